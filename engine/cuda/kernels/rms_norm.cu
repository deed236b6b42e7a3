// y = weight * (x / sqrt(mean(x^2) + eps)), perhaps of a sum. A block for a row, with as many threads as the width
// alone asks for; rms_norm.h has the order.
//
// 7168 elements: 448 threads of 4 loads each, about 3 us a row on its own, all of it latency. So what is added to the
// residual stream in front of a norm is added here.

#include "common/error.h"
#include "kernels/layers.h"
#include "kernels/rms_norm.h"

namespace kdtree {
namespace {

template <typename T>
__device__ float4 sum4(float4 a, float4 b) {
  return rounded4<T>(make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w));
}

template <typename T>
__global__ void __launch_bounds__(kNormThreads) rms_norm_kernel(RmsNormArgs<T> a, bool vector) {
  __shared__ float sums[kNormThreads / kWarp];
  const int64_t row = blockIdx.x, of_head = blockIdx.y * a.head_stride, skipped = row * a.x_stride + of_head;
  const T* const x = a.added == nullptr ? a.x + skipped : a.sum + skipped;
  T* const y = a.y + row * a.y_stride + of_head;
  const int first = 4 * static_cast<int>(threadIdx.x), stride = 4 * static_cast<int>(blockDim.x);

  float squares = 0;
  for (int c = first; c < a.width; c += stride) {
    const int count = a.width - c;
    float4 v = load4(a.x + skipped + c, count, vector);
    if (a.added != nullptr) {
      float4 more = load4(a.added + skipped + c, count, vector);
      if (a.also != nullptr) more = sum4<T>(load4(a.also + skipped + c, count, vector), more);
      v = sum4<T>(v, more);
      store4(a.sum + skipped + c, v, count, vector);  // read again below, by this thread
    }
    squares = add_squares(v, squares);
  }
  const float size = size_of_row(squares, a.width, a.eps, sums);
  for (int c = first; c < a.width; c += stride) {
    const int count = a.width - c;
    const float4 result = normed<T>(load4(x + c, count, vector), size, load4(a.weight + c, count, vector));
    store4(y + c, result, count, vector);
    if (a.wide != nullptr) store4(a.wide + row * a.width + c, rounded4<T>(result), count, vector);
  }
}

template <typename T>
kdtree_status rms_norm_rows(const RmsNormArgs<T>& a, cudaStream_t stream) {
  Arguments arguments("rms_norm");
  arguments.range("rows", a.rows, 1, 0x7fffffff)
      .range("width", a.width, 1, 1 << 30)
      .range("heads", a.heads, 1, a.wide == nullptr ? 65535 : 1)
      .range("head_stride", a.head_stride, a.heads > 1 ? a.width : 0, INT64_MAX / 65536)
      .range("x_stride", a.x_stride, (a.heads - 1) * a.head_stride + a.width, INT64_MAX)
      .range("y_stride", a.y_stride, (a.heads - 1) * a.head_stride + a.width, INT64_MAX)
      .array("x", a.x, sizeof(T))
      .array("weight", a.weight, sizeof(T))
      .array("y", a.y, sizeof(T))
      .array("wide", a.wide, sizeof(float), false)
      .array("added", a.added, sizeof(T), a.also != nullptr)
      .array("also", a.also, sizeof(T), false)
      .array("sum", a.sum, sizeof(T), a.added != nullptr);
  KDTREE_RETURN_IF_FAILED(arguments.status());
  const bool vector =
      fours<T>({a.x, a.weight, a.y, a.added, a.also, a.sum}, {a.x_stride, a.y_stride, a.head_stride, a.width}) &&
      fours({a.wide}, {a.width});
  const dim3 grid(static_cast<unsigned>(a.rows), static_cast<unsigned>(a.heads));
  KDTREE_LAUNCH((rms_norm_kernel<T>), grid, norm_threads(a.width), 0, stream, a, vector);
  return check_launch("rms_norm_kernel");
}

}  // namespace

kdtree_status rms_norm(const RmsNormArgs<float>& args, cudaStream_t stream) { return rms_norm_rows(args, stream); }
kdtree_status rms_norm(const RmsNormArgs<uint16_t>& args, cudaStream_t stream) { return rms_norm_rows(args, stream); }

}  // namespace kdtree
