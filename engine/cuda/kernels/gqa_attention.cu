// Grouped-query attention of a drafter's block over its context and itself, unmasked, computed in
// float32, of float32 or bf16.
//
// A block takes one row and up to 16 of the query heads that share a key head; the keys are the context's, then the
// block's own.

#include "kernels/attention.h"
#include "kernels/attention_tile.h"
#include "kernels/bf16.h"

namespace kdtree {
namespace {

size_t shared_bytes(int dim) {
  return sizeof(float) *
         (static_cast<size_t>(kTileHeads + 2 * kTileKeys) * tile_stride(dim) + kTileKeys * kTileHeads + kTileHeads);
}

// Grid: rows of all requests, key heads, groups of 16 query heads of a key head.
template <typename T>
__global__ void __launch_bounds__(kTileThreads, 1) gqa_attention_kernel(GqaAttentionArgs<T> a) {
  KDTREE_DYNAMIC_SHARED(shared);
  const int row = static_cast<int>(blockIdx.x), request = row / a.block_size;
  const int kv_head = static_cast<int>(blockIdx.y), group = a.heads / a.kv_heads;
  const int first = static_cast<int>(blockIdx.z) * kTileHeads, heads = min(kTileHeads, group - first);
  const int context = a.context_lengths[request], stride = tile_stride(a.dim);
  if (context < 0) return;

  Tile tile;
  tile.width = tile.columns = a.dim;
  tile.value_stride = stride;
  tile.query = reinterpret_cast<float*>(shared);
  tile.keys = tile.query + kTileHeads * stride;
  tile.values = tile.keys + kTileKeys * stride;
  tile.weights = tile.values + kTileKeys * stride;
  tile.factors = tile.weights + kTileKeys * kTileHeads;

  const int64_t query = (static_cast<int64_t>(row) * a.heads + kv_head * group + first) * a.dim;
  for (int i = threadIdx.x; i < kTileHeads * a.dim; i += blockDim.x)
    tile.query[i / a.dim * stride + i % a.dim] = i < heads * a.dim ? widen(a.q[query + i]) : 0.0f;

  const int64_t pair = 2 * static_cast<int64_t>(a.kv_heads) * a.dim;  // keys and values of one position
  const T* const old = a.context + static_cast<int64_t>(request) * a.capacity * pair + kv_head * a.dim;
  const T* const own = a.block + static_cast<int64_t>(request) * a.block_size * pair + kv_head * a.dim;
  const int count = context + a.block_size;
  const float scale = 1.0f / sqrtf(static_cast<float>(a.dim));
  Attended sum;
  for (int begin = 0; begin < count; begin += kTileKeys) {
    for (int i = threadIdx.x; i < kTileKeys * a.dim; i += blockDim.x) {
      const int position = begin + i / a.dim, column = i % a.dim;
      const T* const source = position < context ? old + position * pair : own + (position - context) * pair;
      const bool there = position < count;
      tile.keys[i / a.dim * stride + column] = there ? widen(source[column]) : 0.0f;
      tile.values[i / a.dim * stride + column] =
          there ? widen(source[static_cast<int64_t>(a.kv_heads) * a.dim + column]) : 0.0f;
    }
    __syncthreads();
    attend(tile, begin + static_cast<int>(threadIdx.x) % kTileKeys < count, scale, &sum);
  }
  if (threadIdx.x % kTileKeys == 0) tile.factors[threadIdx.x / kTileKeys] = sum.total;
  __syncthreads();
  for (int c = 0; c < kTileColumns; ++c) {
    const int column = static_cast<int>(threadIdx.x) + c * kTileThreads;
    for (int h = 0; h < kTileHeads; ++h)
      if (column < a.dim && h < heads)
        a.out[query + static_cast<int64_t>(h) * a.dim + column] = stored<T>(sum.values[c][h] / tile.factors[h]);
  }
}

template <typename T>
kdtree_status attend_block(const GqaAttentionArgs<T>& a, cudaStream_t stream) {
  Arguments arguments("gqa_attention");
  arguments.range("requests", a.requests, 1, KDTREE_MAX_REQUESTS)
      .range("block_size", a.block_size, 1, KDTREE_MAX_DEPTH + 1)
      .range("kv_heads", a.kv_heads, 1, 65535)
      .range("heads", a.heads, a.kv_heads, INT32_MAX)
      .range("heads beyond a multiple of kv_heads", a.heads % a.kv_heads, 0, 0)
      .range("dim", a.dim, 1, kTileThreads)
      .range("capacity", a.capacity, 0, INT32_MAX);
  if (arguments.failed()) return arguments.status();
  const size_t bytes = shared_bytes(a.dim);
  KDTREE_RETURN_IF_FAILED(
      allow_shared_memory(reinterpret_cast<const void*>(gqa_attention_kernel<T>), "gqa_attention", bytes));
  const dim3 grid(static_cast<unsigned>(a.requests * a.block_size), static_cast<unsigned>(a.kv_heads),
                  static_cast<unsigned>(ceil_div(a.heads / a.kv_heads, kTileHeads)));
  KDTREE_LAUNCH((gqa_attention_kernel<T>), grid, dim3(kTileThreads), bytes, stream, a);
  return check_launch("gqa_attention_kernel");
}

}  // namespace

kdtree_status gqa_attention(const GqaAttentionArgs<float>& args, cudaStream_t stream) {
  return attend_block(args, stream);
}
kdtree_status gqa_attention(const GqaAttentionArgs<uint16_t>& args, cudaStream_t stream) {
  return attend_block(args, stream);
}

}  // namespace kdtree
