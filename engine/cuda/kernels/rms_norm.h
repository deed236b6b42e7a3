// The size of a row, sqrt(mean(x^2) + eps), as every kernel computes it.
//
// Thread t of T sums the squares of elements 4 (t + T j) + (0..3), j ascending; then the lanes of a warp join by the
// bits of their numbers, then the warps in their order. Divided by, not multiplied by a reciprocal square root, as in
// the reference. T follows from the width alone.
#pragma once

#include "common/block.h"
#include "common/launch.h"
#include "kernels/vector4.h"

namespace kdtree {

constexpr int kNormThreads = 512, kNormFloats = 4;  // of a block at most; of a thread, until there are so many
constexpr int kNormHeld = 4;                        // loads of a thread that it keeps: all of rows of up to 8192

inline dim3 norm_threads(int width) { return threads_for(width, kNormFloats, kNormThreads); }

__device__ inline float add_squares(float4 v, float sum) {
  return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, sum))));
}

// squares: of the thread's elements. sums: shared. By all threads of the block.
__device__ inline float size_of_row(float squares, int width, float eps, float (&sums)[kNormThreads / kWarp]) {
  for (int bit = kWarp / 2; bit > 0; bit /= 2) squares += __shfl_xor_sync(kAllLanes, squares, bit);
  if (lane_id() == 0) sums[warp_id()] = squares;
  __syncthreads();
  float all = sums[0];
  for (int warp = 1; warp < warp_count(); ++warp) all += sums[warp];
  return sqrtf(all / static_cast<float>(width) + eps);
}

// w * (v / size), the quotient rounded to T before it is multiplied, as the published models do.
template <typename T>
__device__ float4 normed(float4 v, float size, float4 w) {
  return make_float4(w.x * rounded<T>(v.x / size), w.y * rounded<T>(v.y / size), w.z * rounded<T>(v.z / size),
                     w.w * rounded<T>(v.w / size));
}

template <typename T>
__device__ float4 rounded4(float4 v) {
  return make_float4(rounded<T>(v.x), rounded<T>(v.y), rounded<T>(v.z), rounded<T>(v.w));
}

}  // namespace kdtree
