// The cache row of each row of a pass: the latent is normed (rms_norm.h), the rope key turns (rope.h), both go to the
// cache. A block for a row, and others for the queries that turn with it.

#include "common/behind.h"
#include "kernels/cache_row.h"
#include "kernels/fp8_row.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"

namespace kdtree {
namespace {

// Rows past the used ones are left out. A row that the cache has no place for is only computed.
template <typename T, CacheRows kRows>
__global__ void __launch_bounds__(kNormThreads) latent_kernel(LatentArgs<T> a, bool vector) {
  __shared__ float sums[kNormThreads / kWarp];
  start_behind();
  const int row = static_cast<int>(blockIdx.x), request = row / a.rows.width;
  if (!a.rows.used(row)) return;
  const int64_t entry = static_cast<int64_t>(a.rows.positions[row]) * (a.rope / 2);
  if (blockIdx.y > 0) {
    const int pair = static_cast<int>((blockIdx.y - 1) * blockDim.x + threadIdx.x), half = a.rope / 2;
    if (pair < a.heads * half)
      turn_pair(a.queries + row * a.query_stride + pair / half * a.head_stride, a.rope, pair % half, a.cos + entry,
                a.sin + entry, a.layout);
    return;
  }
  T* const kv = a.kv + row * a.kv_stride;
  const int first = 4 * static_cast<int>(threadIdx.x), stride = 4 * static_cast<int>(blockDim.x);
  // What most threads have of the row, asked for before anything waits; zeros for the others.
  const bool one = first < a.rank;
  const float4 held = one ? load4(kv + first, a.rank - first, vector) : make_float4(0, 0, 0, 0);
  const float4 weight = one ? load4(a.weight + first, a.rank - first, vector) : held;
  const int64_t place = static_cast<int64_t>(a.rows.prefix_lengths[request]) + row % a.rows.width;
  const int64_t offset = place < 0 || place >= a.cache.capacity ? -1 : cache_row(a.cache, request, place);
  unsigned char* const layer = static_cast<unsigned char*>(a.cache.base) + a.layer * a.cache.layer_stride;
  unsigned char* const cached = offset < 0 ? nullptr : layer + offset;

  T* const key = kv + a.rank;
  for (int i = static_cast<int>(threadIdx.x); i < a.rope / 2; i += static_cast<int>(blockDim.x))
    turn_pair(key, a.rope, i, a.cos + entry, a.sin + entry, a.layout);
  float squares = add_squares(held, 0);
  for (int c = first + stride; c < a.rank; c += stride)
    squares = add_squares(load4(kv + c, a.rank - c, vector), squares);
  const float size = size_of_row(squares, a.rank, a.eps, sums);  // all threads meet in it: the key is whole
  const auto put = [&](int c, float4 v, float4 w) {
    const float4 result = normed<T>(v, size, w);
    store4(kv + c, result, a.rank - c, vector);
    if (cached == nullptr) return;
    if constexpr (kRows == CacheRows::kFp8)
      put_fp8_latents(cached, c, rounded4<T>(result));
    else
      store4(reinterpret_cast<T*>(cached) + c, result, a.rank - c, vector);
  };
  if (one) put(first, held, weight);
  for (int c = first + stride; c < a.rank; c += stride)
    put(c, load4(kv + c, a.rank - c, vector), load4(a.weight + c, a.rank - c, vector));
  if (cached == nullptr) return;
  const int rope_at = kRows == CacheRows::kFp8 ? Fp8Row::kRopeAt : static_cast<int>(sizeof(T)) * a.rank;
  T* const cached_key = reinterpret_cast<T*>(cached + rope_at);
  for (int i = static_cast<int>(threadIdx.x); i < a.rope; i += static_cast<int>(blockDim.x)) cached_key[i] = key[i];
}

template <typename T, CacheRows kRows>
kdtree_status write_latents(const LatentArgs<T>& a, cudaStream_t stream) {
  constexpr int64_t kMost = 0x7fffffff;
  constexpr bool kFp8 = kRows == CacheRows::kFp8;
  constexpr int kElement = kFp8 ? 16 : sizeof(T);  // of a cache row
  const kdtree_cache_view& cache = a.cache;
  const int64_t row_bytes = kFp8 ? Fp8Row::kBytes : kElement * (static_cast<int64_t>(a.rank) + a.rope);
  Arguments arguments("latents");
  arguments.range("requests", a.rows.requests, 1, KDTREE_MAX_REQUESTS)
      .range("rows", static_cast<int64_t>(a.rows.requests) * a.rows.width, 1, kMost)
      .range("rank", a.rank, kFp8 ? Fp8Row::kLatent : 1, kFp8 ? Fp8Row::kLatent : 1 << 20)
      .range("rope", a.rope, kFp8 ? Fp8Row::kRope : 0, kFp8 ? Fp8Row::kRope : 1 << 20)
      .range("rope % 2", a.rope % 2, 0, 0)
      .range("layout", static_cast<int>(a.layout), 0, 1)
      .range("kv_stride", a.kv_stride, static_cast<int64_t>(a.rank) + a.rope, INT64_MAX)
      .range("layer", a.layer, 0, static_cast<int64_t>(cache.layers) - 1)
      .range("cache.row_bytes", cache.row_bytes, row_bytes, row_bytes)
      .range("cache.row_stride", cache.row_stride, cache.row_bytes, INT64_MAX)
      .range("cache.row_stride % element", cache.row_stride % kElement, 0, 0)
      .range("cache.layer_stride % element", cache.layer_stride % kElement, 0, 0)
      .range("cache.request_stride % element", cache.request_stride % kElement, 0, 0)
      .range("cache.capacity", cache.capacity, 0, kMost)
      .range("cache.block_size", cache.block_size, 0, kMost)
      .array("node_count", a.rows.node_count, sizeof(int32_t))
      .array("prefix_lengths", a.rows.prefix_lengths, sizeof(int32_t))
      .array("positions", a.rows.positions, sizeof(int32_t))
      .array("kv", a.kv, sizeof(T))
      .array("weight", a.weight, sizeof(T))
      .array("cos", a.cos, sizeof(float))
      .array("sin", a.sin, sizeof(float))
      .array("cache.base", cache.base, kElement);
  if (cache.block_size > 0 && !arguments.failed())
    arguments.range("cache.table_stride", cache.table_stride, ceil_div(cache.capacity, cache.block_size), kMost)
        .array("cache.block_table", cache.block_table, sizeof(int32_t));
  const int64_t pairs = a.queries == nullptr ? 0 : static_cast<int64_t>(a.heads) * (a.rope / 2);
  if (a.queries != nullptr)
    arguments.array("queries", a.queries, sizeof(T))
        .range("heads", a.heads, 1, 1 << 20)
        .range("heads * rope / 2", pairs, 0, 65534 * kWarp)
        .range("head_stride", a.head_stride, a.rope, INT64_MAX)
        .range("query_stride", a.query_stride, (a.heads - 1) * a.head_stride + a.rope, INT64_MAX);
  KDTREE_RETURN_IF_FAILED(arguments.status());
  const bool vector = fours<T>({a.kv, a.weight}, {a.kv_stride, a.rank}) &&
                      (kFp8 || fours<T>({cache.base}, {cache.row_stride / kElement, cache.layer_stride / kElement,
                                                       cache.block_size == 0 ? cache.request_stride / kElement : 0}));
  const dim3 threads = norm_threads(a.rank);
  const dim3 grid(static_cast<unsigned>(a.rows.count()), 1 + static_cast<unsigned>(ceil_div(pairs, threads.x)));
  return launch_behind("latent_kernel", latent_kernel<T, kRows>, grid, threads, 0, stream, a, vector);
}

}  // namespace

kdtree_status latents(const LatentArgs<float>& args, cudaStream_t stream) {
  if (args.cache_rows == CacheRows::kFp8) return fail(KDTREE_SIZE, "latents: an fp8 cache holds rows of bf16");
  return write_latents<float, CacheRows::kPlain>(args, stream);
}
kdtree_status latents(const LatentArgs<uint16_t>& args, cudaStream_t stream) {
  return args.cache_rows == CacheRows::kFp8 ? write_latents<uint16_t, CacheRows::kFp8>(args, stream)
                                            : write_latents<uint16_t, CacheRows::kPlain>(args, stream);
}

}  // namespace kdtree
