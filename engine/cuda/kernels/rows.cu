// Rows moved and added: features, sums. A thread for four neighbours.

#include "common/behind.h"
#include "common/launch.h"
#include "kernels/layers.h"
#include "kernels/vector4.h"

namespace kdtree {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) add_kernel(const T* x, const T* z, T* y, int64_t size, bool vector) {
  start_behind();
  const int64_t i = 4 * (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x);
  if (i >= size) return;
  const int count = size - i < 4 ? static_cast<int>(size - i) : 4;
  const bool whole = vector && count == 4;
  const float4 a = load4(x + i, count, whole), b = load4(z + i, count, whole);
  store4(y + i, make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w), count, whole);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) copy_rows_kernel(CopyRowsArgs<T> a, bool vector) {
  start_behind();
  const int64_t row = blockIdx.x;
  const T* const from = a.src + row * a.src_stride;
  T* const to = a.dst + row * a.dst_stride;
  for (int c = 4 * static_cast<int>(threadIdx.x); c < a.width; c += 4 * static_cast<int>(blockDim.x))
    copy4(from + c, to + c, a.width - c, vector);
}

template <typename T>
kdtree_status add_arrays(const T* x, const T* z, T* y, int64_t count, cudaStream_t stream) {
  Arguments arguments("add");
  arguments.range("count", count, 1, int64_t{0x7fffffff} * 4 * kThreads)
      .array("x", x, sizeof(T))
      .array("z", z, sizeof(T))
      .array("y", y, sizeof(T));
  KDTREE_RETURN_IF_FAILED(arguments.status());
  return launch_behind("add_kernel", add_kernel<T>, dim3(static_cast<unsigned>(ceil_div(count, 4 * kThreads))),
                       dim3(kThreads), 0, stream, x, z, y, count, fours<T>({x, z, y}, {}));
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
  return launch_behind("copy_rows_kernel", copy_rows_kernel<T>, dim3(static_cast<unsigned>(a.rows)),
                       threads_for(a.width, 4, kThreads), 0, stream, a, vector);
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

}  // namespace kdtree
