// Rows moved and added: features, cache rows, residual sums. A thread for four neighbours.

#include "common/error.h"
#include "common/launch.h"
#include "kernels/cache_row.h"
#include "kernels/layers.h"
#include "kernels/vector4.h"

namespace kdtree {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    add_kernel(const float* x, const float* z, float* y, int64_t size, bool vector) {
  const int64_t i = 4 * (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x);
  if (i >= size) return;
  const int count = size - i < 4 ? static_cast<int>(size - i) : 4;
  const bool whole = vector && count == 4;
  const float4 a = load4(x + i, count, whole), b = load4(z + i, count, whole);
  store4(y + i, make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w), count, whole);
}

__device__ void copy_row(const float* from, float* to, int width, bool vector) {
  for (int c = 4 * static_cast<int>(threadIdx.x); c < width; c += 4 * static_cast<int>(blockDim.x))
    store4(to + c, load4(from + c, width - c, vector), width - c, vector);
}

__global__ void __launch_bounds__(kThreads) copy_rows_kernel(CopyRowsArgs a, bool vector) {
  const int64_t row = blockIdx.x;
  copy_row(a.src + row * a.src_stride, a.dst + row * a.dst_stride, a.width, vector);
}

// Rows past the used ones, and those that the cache has no place for, are left out.
__global__ void __launch_bounds__(kThreads) cache_write_kernel(Rows rows, const float* src, int64_t src_stride,
                                                               kdtree_cache_view cache, int layer, bool vector) {
  const int row = static_cast<int>(blockIdx.x);
  if (!rows.used(row)) return;
  const int request = row / rows.width;
  const int64_t place = static_cast<int64_t>(rows.prefix_lengths[request]) + row % rows.width;
  if (place < 0 || place >= cache.capacity) return;
  const int64_t offset = cache_row(cache, request, place);
  if (offset < 0) return;
  unsigned char* const base = static_cast<unsigned char*>(cache.base) + layer * cache.layer_stride;
  float* const to = reinterpret_cast<float*>(base + offset);
  copy_row(src + row * src_stride, to, cache.row_bytes / static_cast<int>(sizeof(float)), vector);
}

}  // namespace

kdtree_status add(const float* x, const float* z, float* y, int64_t count, cudaStream_t stream) {
  Arguments arguments("add");
  arguments.range("count", count, 1, int64_t{0x7fffffff} * 4 * kThreads)
      .array("x", x, sizeof(float))
      .array("z", z, sizeof(float))
      .array("y", y, sizeof(float));
  KDTREE_RETURN_IF_FAILED(arguments.status());
  KDTREE_LAUNCH(add_kernel, dim3(static_cast<unsigned>(ceil_div(count, 4 * kThreads))), dim3(kThreads), 0, stream, x, z,
                y, count, fours({x, z, y}, {}));
  return check_launch("add_kernel");
}

kdtree_status copy_rows(const CopyRowsArgs& a, cudaStream_t stream) {
  Arguments arguments("copy_rows");
  arguments.range("rows", a.rows, 1, 0x7fffffff)
      .range("width", a.width, 1, 1 << 30)
      .range("src_stride", a.src_stride, 0, INT64_MAX)
      .range("dst_stride", a.dst_stride, a.rows > 1 ? a.width : 0, INT64_MAX)
      .array("src", a.src, sizeof(float))
      .array("dst", a.dst, sizeof(float));
  KDTREE_RETURN_IF_FAILED(arguments.status());
  const bool vector = fours({a.src, a.dst}, {a.src_stride, a.dst_stride, a.width});
  KDTREE_LAUNCH(copy_rows_kernel, dim3(static_cast<unsigned>(a.rows)), threads_for(a.width, 4, kThreads), 0, stream, a,
                vector);
  return check_launch("copy_rows_kernel");
}

kdtree_status cache_write(const Rows& rows, const float* src, int64_t src_stride, const kdtree_cache_view& cache,
                          int layer, cudaStream_t stream) {
  constexpr int64_t kMost = 0x7fffffff;
  constexpr int kFloat = sizeof(float);
  Arguments arguments("cache_write");
  arguments.range("requests", rows.requests, 1, KDTREE_MAX_REQUESTS)
      .range("rows", static_cast<int64_t>(rows.requests) * rows.width, 1, kMost)
      .range("layer", layer, 0, static_cast<int64_t>(cache.layers) - 1)
      .range("cache.row_bytes", cache.row_bytes, kFloat, kMost)
      .range("cache.row_bytes % 4", cache.row_bytes % kFloat, 0, 0)
      .range("cache.row_stride", cache.row_stride, cache.row_bytes, INT64_MAX)
      .range("cache.row_stride % 4", cache.row_stride % kFloat, 0, 0)
      .range("cache.layer_stride % 4", cache.layer_stride % kFloat, 0, 0)
      .range("cache.request_stride % 4", cache.request_stride % kFloat, 0, 0)
      .range("cache.capacity", cache.capacity, 0, kMost)
      .range("cache.block_size", cache.block_size, 0, kMost)
      .range("src_stride", src_stride, cache.row_bytes / kFloat, INT64_MAX)
      .array("node_count", rows.node_count, sizeof(int32_t))
      .array("prefix_lengths", rows.prefix_lengths, sizeof(int32_t))
      .array("src", src, sizeof(float))
      .array("cache.base", cache.base, sizeof(float));
  if (cache.block_size > 0 && !arguments.failed())
    arguments.range("cache.table_stride", cache.table_stride, ceil_div(cache.capacity, cache.block_size), kMost)
        .array("cache.block_table", cache.block_table, sizeof(int32_t));
  KDTREE_RETURN_IF_FAILED(arguments.status());
  const int width = cache.row_bytes / kFloat;
  const bool contiguous = cache.block_size == 0;
  const bool vector =
      fours({src, cache.base}, {src_stride, width, cache.row_stride / kFloat, cache.layer_stride / kFloat,
                                contiguous ? cache.request_stride / kFloat : 0});
  KDTREE_LAUNCH(cache_write_kernel, dim3(static_cast<unsigned>(rows.count())), threads_for(width, 4, kThreads), 0,
                stream, rows, src, src_stride, cache, layer, vector);
  return check_launch("cache_write_kernel");
}

}  // namespace kdtree
