// y = weight * (x / sqrt(mean(x^2) + eps)). A block for a row, with as many threads as the width alone asks for.
// In bf16 the quotient is rounded before the weight is multiplied, as the published models do.
//
// Thread t of T sums the squares of elements 4 (t + T j) + (0..3), j ascending; then the lanes of a warp join by the
// bits of their numbers, then the warps in their order. Divided, not multiplied by a reciprocal square root, as the
// reference does. 7168 elements: 448 threads of 4 loads each, about 3 us a row on its own, all of it latency.

#include "common/block.h"
#include "common/error.h"
#include "common/launch.h"
#include "kernels/layers.h"
#include "kernels/vector4.h"

namespace kdtree {
namespace {

constexpr int kMostThreads = 512, kFloatsOfThread = 16;

__device__ float add_squares(float4 v, float sum) {
  return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, sum))));
}

template <typename T>
__device__ float4 scaled(float4 v, float size, float4 w) {
  return make_float4(w.x * rounded<T>(v.x / size), w.y * rounded<T>(v.y / size), w.z * rounded<T>(v.z / size),
                     w.w * rounded<T>(v.w / size));
}

template <typename T>
__global__ void __launch_bounds__(kMostThreads) rms_norm_kernel(RmsNormArgs<T> a, bool vector) {
  __shared__ float sums[kMostThreads / kWarp];
  const int64_t row = blockIdx.x;
  const T* const x = a.x + row * a.x_stride;
  T* const y = a.y + row * a.y_stride;
  const int first = 4 * static_cast<int>(threadIdx.x), stride = 4 * static_cast<int>(blockDim.x);

  float sum = 0;
  for (int c = first; c < a.width; c += stride) sum = add_squares(load4(x + c, a.width - c, vector), sum);
  for (int bit = kWarp / 2; bit > 0; bit /= 2) sum += __shfl_xor_sync(kAllLanes, sum, bit);
  if (lane_id() == 0) sums[warp_id()] = sum;
  __syncthreads();
  float squares = sums[0];
  for (int warp = 1; warp < warp_count(); ++warp) squares += sums[warp];

  const float size = sqrtf(squares / static_cast<float>(a.width) + a.eps);
  for (int c = first; c < a.width; c += stride) {
    const int count = a.width - c;
    const float4 result = scaled<T>(load4(x + c, count, vector), size, load4(a.weight + c, count, vector));
    store4(y + c, result, count, vector);
    if (a.wide != nullptr)
      store4(a.wide + row * a.width + c,
             make_float4(rounded<T>(result.x), rounded<T>(result.y), rounded<T>(result.z), rounded<T>(result.w)), count,
             vector);
  }
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
      .array("wide", a.wide, sizeof(float), false);
  KDTREE_RETURN_IF_FAILED(arguments.status());
  const bool vector = fours<T>({a.x, a.weight, a.y}, {a.x_stride, a.y_stride, a.width}) && fours({a.wide}, {a.width});
  KDTREE_LAUNCH((rms_norm_kernel<T>), dim3(static_cast<unsigned>(a.rows)),
                threads_for(a.width, kFloatsOfThread, kMostThreads), 0, stream, a, vector);
  return check_launch("rms_norm_kernel");
}

}  // namespace

kdtree_status rms_norm(const RmsNormArgs<float>& args, cudaStream_t stream) { return rms_norm_rows(args, stream); }
kdtree_status rms_norm(const RmsNormArgs<uint16_t>& args, cudaStream_t stream) { return rms_norm_rows(args, stream); }

}  // namespace kdtree
