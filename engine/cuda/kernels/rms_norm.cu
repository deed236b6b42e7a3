// y = weight * (x / sqrt(mean(x^2) + eps)), perhaps of a sum. A block for a row, with as many threads as the width
// alone asks for; rms_norm.h has the order.
//
// All of a row's time is latency. So what is added to the residual stream in front of a norm is added here.

#include "common/behind.h"
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
  const int64_t row = blockIdx.x, skipped = row * a.x_stride;
  const T* const x = a.added == nullptr ? a.x + skipped : a.sum + skipped;
  T* const y = a.y + row * a.y_stride;
  const int first = 4 * static_cast<int>(threadIdx.x), stride = 4 * static_cast<int>(blockDim.x);
  const auto load = [&](const T* from, int c) {
    return c < a.width ? load4(from + c, a.width - c, vector) : make_float4(0, 0, 0, 0);
  };
  const auto added = [&](float4 v, float4 more, float4 also) {
    return sum4<T>(v, a.also != nullptr ? sum4<T>(also, more) : more);
  };
  const auto put = [&](int c, float4 v, float4 weight, float size) {
    const float4 result = normed<T>(v, size, weight);
    store4(y + c, result, a.width - c, vector);
    if (a.wide != nullptr) store4(a.wide + row * a.width + c, rounded4<T>(result), a.width - c, vector);
  };

  // What a thread holds is asked for at once: the sum's place may be x's, so no load could pass a store.
  float4 held[kNormHeld], weights[kNormHeld], more[kNormHeld], also[kNormHeld];
  KDTREE_UNROLL
  for (int j = 0; j < kNormHeld; ++j) weights[j] = load(a.weight, first + j * stride);
  start_behind();
  KDTREE_UNROLL
  for (int j = 0; j < kNormHeld; ++j) {
    const int c = first + j * stride;
    held[j] = load(a.x + skipped, c);
    if (a.added != nullptr) more[j] = load(a.added + skipped, c);
    if (a.also != nullptr) also[j] = load(a.also + skipped, c);
  }
  float squares = 0;
  KDTREE_UNROLL
  for (int j = 0; j < kNormHeld; ++j) {
    const int c = first + j * stride;
    if (c >= a.width) break;
    if (a.added != nullptr) {
      held[j] = added(held[j], more[j], also[j]);
      store4(a.sum + skipped + c, held[j], a.width - c, vector);
    }
    squares = add_squares(held[j], squares);
  }
  for (int c = first + kNormHeld * stride; c < a.width; c += stride) {
    float4 v = load(a.x + skipped, c);
    if (a.added != nullptr) {
      v = added(v, load(a.added + skipped, c), a.also == nullptr ? v : load(a.also + skipped, c));
      store4(a.sum + skipped + c, v, a.width - c, vector);  // read again below, by this thread
    }
    squares = add_squares(v, squares);
  }
  const float size = size_of_row(squares, a.width, a.eps, sums);
  KDTREE_UNROLL
  for (int j = 0; j < kNormHeld; ++j)
    if (first + j * stride < a.width) put(first + j * stride, held[j], weights[j], size);
  for (int c = first + kNormHeld * stride; c < a.width; c += stride) put(c, load(x, c), load(a.weight, c), size);
}

template <typename T>
kdtree_status rms_norm_rows(const RmsNormArgs<T>& a, cudaStream_t stream) {
  Arguments arguments("rms_norm");
  arguments.range("rows", a.rows, 1, 0x7fffffff)
      .range("width", a.width, 1, 1 << 30)
      .range("x_stride", a.x_stride, a.width, INT64_MAX)
      .range("y_stride", a.y_stride, a.width, INT64_MAX)
      .array("x", a.x, sizeof(T))
      .array("weight", a.weight, sizeof(T))
      .array("y", a.y, sizeof(T))
      .array("wide", a.wide, sizeof(float), false)
      .array("added", a.added, sizeof(T), a.also != nullptr)
      .array("also", a.also, sizeof(T), false)
      .array("sum", a.sum, sizeof(T), a.added != nullptr);
  KDTREE_RETURN_IF_FAILED(arguments.status());
  const bool vector = fours<T>({a.x, a.weight, a.y, a.added, a.also, a.sum}, {a.x_stride, a.y_stride, a.width}) &&
                      fours({a.wide}, {a.width});
  const dim3 grid(static_cast<unsigned>(a.rows));
  return launch_behind("rms_norm_kernel", rms_norm_kernel<T>, grid, norm_threads(a.width), 0, stream, a, vector);
}

}  // namespace

kdtree_status rms_norm(const RmsNormArgs<float>& args, cudaStream_t stream) { return rms_norm_rows(args, stream); }
kdtree_status rms_norm(const RmsNormArgs<uint16_t>& args, cudaStream_t stream) { return rms_norm_rows(args, stream); }

}  // namespace kdtree
