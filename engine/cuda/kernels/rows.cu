// Rows moved and added: features, cache rows, residual sums. A thread for four neighbours.

#include "common/error.h"
#include "common/launch.h"
#include "kernels/cache_row.h"
#include "kernels/layers.h"
#include "kernels/vector4.h"

namespace kdtree {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) add_kernel(const T* x, const T* z, T* y, int64_t size, bool vector) {
  const int64_t i = 4 * (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x);
  if (i >= size) return;
  const int count = size - i < 4 ? static_cast<int>(size - i) : 4;
  const bool whole = vector && count == 4;
  const float4 a = load4(x + i, count, whole), b = load4(z + i, count, whole);
  store4(y + i, make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w), count, whole);
}

template <typename T>
__device__ void copy_row(const T* from, T* to, int width, bool vector) {
  for (int c = 4 * static_cast<int>(threadIdx.x); c < width; c += 4 * static_cast<int>(blockDim.x))
    copy4(from + c, to + c, width - c, vector);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) copy_rows_kernel(CopyRowsArgs<T> a, bool vector) {
  const int64_t row = blockIdx.x;
  copy_row(a.src + row * a.src_stride, a.dst + row * a.dst_stride, a.width, vector);
}

// Rows past the used ones, and those that the cache has no place for, are left out.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    cache_write_kernel(Rows rows, const T* src, int64_t src_stride, kdtree_cache_view cache, int layer, bool vector) {
  const int row = static_cast<int>(blockIdx.x);
  if (!rows.used(row)) return;
  const int request = row / rows.width;
  const int64_t place = static_cast<int64_t>(rows.prefix_lengths[request]) + row % rows.width;
  if (place < 0 || place >= cache.capacity) return;
  const int64_t offset = cache_row(cache, request, place);
  if (offset < 0) return;
  unsigned char* const base = static_cast<unsigned char*>(cache.base) + layer * cache.layer_stride;
  T* const to = reinterpret_cast<T*>(base + offset);
  copy_row(src + row * src_stride, to, cache.row_bytes / static_cast<int>(sizeof(T)), vector);
}

template <typename T>
kdtree_status add_arrays(const T* x, const T* z, T* y, int64_t count, cudaStream_t stream) {
  Arguments arguments("add");
  arguments.range("count", count, 1, int64_t{0x7fffffff} * 4 * kThreads)
      .array("x", x, sizeof(T))
      .array("z", z, sizeof(T))
      .array("y", y, sizeof(T));
  KDTREE_RETURN_IF_FAILED(arguments.status());
  KDTREE_LAUNCH((add_kernel<T>), dim3(static_cast<unsigned>(ceil_div(count, 4 * kThreads))), dim3(kThreads), 0, stream,
                x, z, y, count, fours<T>({x, z, y}, {}));
  return check_launch("add_kernel");
}

template <typename T>
kdtree_status copy_all_rows(const CopyRowsArgs<T>& a, cudaStream_t stream) {
  Arguments arguments("copy_rows");
  arguments.range("rows", a.rows, 1, 0x7fffffff)
      .range("width", a.width, 1, 1 << 30)
      .range("src_stride", a.src_stride, 0, INT64_MAX)
      .range("dst_stride", a.dst_stride, a.rows > 1 ? a.width : 0, INT64_MAX)
      .array("src", a.src, sizeof(T))
      .array("dst", a.dst, sizeof(T));
  KDTREE_RETURN_IF_FAILED(arguments.status());
  const bool vector = fours<T>({a.src, a.dst}, {a.src_stride, a.dst_stride, a.width});
  KDTREE_LAUNCH((copy_rows_kernel<T>), dim3(static_cast<unsigned>(a.rows)), threads_for(a.width, 4, kThreads), 0,
                stream, a, vector);
  return check_launch("copy_rows_kernel");
}

template <typename T>
kdtree_status write_cache(const Rows& rows, const T* src, int64_t src_stride, const kdtree_cache_view& cache, int layer,
                          cudaStream_t stream) {
  constexpr int64_t kMost = 0x7fffffff;
  constexpr int kElement = sizeof(T);
  Arguments arguments("cache_write");
  arguments.range("requests", rows.requests, 1, KDTREE_MAX_REQUESTS)
      .range("rows", static_cast<int64_t>(rows.requests) * rows.width, 1, kMost)
      .range("layer", layer, 0, static_cast<int64_t>(cache.layers) - 1)
      .range("cache.row_bytes", cache.row_bytes, kElement, kMost)
      .range("cache.row_bytes % element", cache.row_bytes % kElement, 0, 0)
      .range("cache.row_stride", cache.row_stride, cache.row_bytes, INT64_MAX)
      .range("cache.row_stride % element", cache.row_stride % kElement, 0, 0)
      .range("cache.layer_stride % element", cache.layer_stride % kElement, 0, 0)
      .range("cache.request_stride % element", cache.request_stride % kElement, 0, 0)
      .range("cache.capacity", cache.capacity, 0, kMost)
      .range("cache.block_size", cache.block_size, 0, kMost)
      .range("src_stride", src_stride, cache.row_bytes / kElement, INT64_MAX)
      .array("node_count", rows.node_count, sizeof(int32_t))
      .array("prefix_lengths", rows.prefix_lengths, sizeof(int32_t))
      .array("src", src, sizeof(T))
      .array("cache.base", cache.base, sizeof(T));
  if (cache.block_size > 0 && !arguments.failed())
    arguments.range("cache.table_stride", cache.table_stride, ceil_div(cache.capacity, cache.block_size), kMost)
        .array("cache.block_table", cache.block_table, sizeof(int32_t));
  KDTREE_RETURN_IF_FAILED(arguments.status());
  const int width = cache.row_bytes / kElement;
  const bool contiguous = cache.block_size == 0;
  const bool vector =
      fours<T>({src, cache.base}, {src_stride, width, cache.row_stride / kElement, cache.layer_stride / kElement,
                                   contiguous ? cache.request_stride / kElement : 0});
  KDTREE_LAUNCH((cache_write_kernel<T>), dim3(static_cast<unsigned>(rows.count())), threads_for(width, 4, kThreads), 0,
                stream, rows, src, src_stride, cache, layer, vector);
  return check_launch("cache_write_kernel");
}

}  // namespace

kdtree_status add(const float* x, const float* z, float* y, int64_t count, cudaStream_t stream) {
  return add_arrays(x, z, y, count, stream);
}
kdtree_status add(const uint16_t* x, const uint16_t* z, uint16_t* y, int64_t count, cudaStream_t stream) {
  return add_arrays(x, z, y, count, stream);
}

kdtree_status copy_rows(const CopyRowsArgs<float>& args, cudaStream_t stream) { return copy_all_rows(args, stream); }
kdtree_status copy_rows(const CopyRowsArgs<uint16_t>& args, cudaStream_t stream) { return copy_all_rows(args, stream); }

kdtree_status cache_write(const Rows& rows, const float* src, int64_t src_stride, const kdtree_cache_view& cache,
                          int layer, cudaStream_t stream) {
  return write_cache(rows, src, src_stride, cache, layer, stream);
}
kdtree_status cache_write(const Rows& rows, const uint16_t* src, int64_t src_stride, const kdtree_cache_view& cache,
                          int layer, cudaStream_t stream) {
  return write_cache(rows, src, src_stride, cache, layer, stream);
}

}  // namespace kdtree
