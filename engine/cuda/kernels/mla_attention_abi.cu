// The call of the C ABI for attention over the latent cache: what it is given, for the kernel of its number type.

#include "kernels/attention.h"

namespace kdtree {
namespace {

Rows rows_of(const kdtree_mla_attention_args& a) {
  Rows rows{};
  rows.requests = a.requests, rows.width = a.rows;
  rows.node_count = a.node_count, rows.prefix_lengths = a.prefix_lengths, rows.positions = a.positions;
  rows.paths = a.paths, rows.path_stride = a.path_stride;
  return rows;
}

kdtree_status attend_f32(const kdtree_mla_attention_args& a) {
  MlaAttentionArgs<float> args{};
  args.rows = rows_of(a);
  args.form = AttentionForm::kExact;
  args.q_latent = static_cast<const float*>(a.q);
  args.q_rope = args.q_latent + a.rank;
  args.q_latent_head = args.q_rope_head = a.rank + a.rope;
  args.q_latent_stride = args.q_rope_stride = args.q_latent_head * a.heads;
  args.cache = a.cache, args.layer = a.layer;
  args.out = static_cast<float*>(a.out), args.lse = a.lse;
  args.heads = a.heads, args.rank = a.rank, args.rope = a.rope;
  args.scale = a.scale, args.longest = a.longest;
  args.workspace = a.workspace, args.workspace_size = a.workspace_size;
  return mla_attention(args, static_cast<cudaStream_t>(a.stream));
}

kdtree_status attend_bf16(const kdtree_mla_attention_args& a) {
  MlaAttentionBf16Args args{};
  args.rows = rows_of(a);
  args.q_latent = static_cast<const uint16_t*>(a.q);
  args.q_rope = args.q_latent + a.rank;
  args.q_latent_head = args.q_rope_head = a.rank + a.rope;
  args.q_latent_stride = args.q_rope_stride = args.q_latent_head * a.heads;
  args.cache = a.cache, args.cache_rows = static_cast<CacheRows>(a.cache_rows), args.layer = a.layer;
  args.out = static_cast<uint16_t*>(a.out), args.lse = a.lse;
  args.heads = a.heads, args.scale = a.scale, args.longest = a.longest;
  args.portable = a.path == KDTREE_ATTENTION_PORTABLE;
  args.workspace = a.workspace, args.workspace_size = a.workspace_size;
  if (a.path == KDTREE_ATTENTION_WGMMA && mla_attention_bf16_path(args) != AttentionPath::kWgmma)
    return fail(
        KDTREE_UNSUPPORTED,
        "kdtree_mla_attention: no wgmma here, which needs compute capability 9.0, 227 KB of shared memory, rows "
        "in bf16 and a scale above 0 (it is %g)",
        static_cast<double>(a.scale));
  return mla_attention_bf16(args, static_cast<cudaStream_t>(a.stream));
}

}  // namespace
}  // namespace kdtree

using namespace kdtree;

extern "C" size_t kdtree_mla_attention_workspace(int32_t requests, int32_t rows, int32_t heads, int32_t rank,
                                                 int32_t longest, int32_t dtype) {
  if (requests < 1 || requests > KDTREE_MAX_REQUESTS || rows < 1 || rows > KDTREE_MAX_BUDGET + 1 || heads < 1 ||
      rank < 1 || longest < 1)
    return 0;
  return dtype == KDTREE_BF16 ? mla_attention_bf16_workspace(requests, rows, heads, longest)
                              : mla_attention_workspace(requests * rows, heads, rank, longest);
}

extern "C" kdtree_status kdtree_mla_attention(const kdtree_mla_attention_args* args) {
  if (args == nullptr) return fail(KDTREE_POINTER, "kdtree_mla_attention: args is NULL");
  const kdtree_mla_attention_args& a = *args;
  const bool bf16 = a.dtype == KDTREE_BF16;
  const size_t element = bf16 ? sizeof(uint16_t) : sizeof(float);
  Arguments arguments("kdtree_mla_attention");
  arguments.version(a.struct_size, sizeof(a))
      .range("requests", a.requests, 1, KDTREE_MAX_REQUESTS)
      .range("rows", a.rows, 1, KDTREE_MAX_BUDGET + 1)
      .range("dtype", a.dtype, KDTREE_F32, KDTREE_BF16)
      .range("cache_rows", a.cache_rows, KDTREE_CACHE_DTYPE, bf16 ? KDTREE_CACHE_FP8 : KDTREE_CACHE_DTYPE)
      .range("path", a.path, KDTREE_ATTENTION_BEST, bf16 ? KDTREE_ATTENTION_WGMMA : KDTREE_ATTENTION_PORTABLE)
      .range("layer", a.layer, 0, a.cache.layers - 1)
      .range("path_stride", a.path_stride, a.paths != nullptr ? 1 : 0, KDTREE_MAX_BUDGET + 1)
      .array("q", a.q, element)
      .array("node_count", a.node_count, sizeof(int32_t))
      .array("prefix_lengths", a.prefix_lengths, sizeof(int32_t))
      .array("positions", a.positions, sizeof(int32_t))
      .array("paths", a.paths, sizeof(int32_t), false)
      .array("out", a.out, element)
      .array("lse", a.lse, sizeof(float), false);
  if (bf16) arguments.range("rank", a.rank, 512, 512).range("rope", a.rope, 64, 64);
  if (arguments.failed()) return arguments.status();
  return bf16 ? attend_bf16(a) : attend_f32(a);
}
