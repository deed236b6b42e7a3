// The order in which a warp sums a product's terms over k. It depends on `in` alone, so any tile of rows and outputs
// gives the same bits:
//   lane l takes k = 128 j + 4 l + (0..3) for j = 0, 1, ...: one fused multiply-add after the other, k ascending;
//   then the lanes' sums meet by their numbers' bits: l with l ^ 16, ^ 8, ^ 4, ^ 2, ^ 1.
// A k that a lane does not have adds nothing, not even 0 times a number: values behind a row may be NaN.
#pragma once

#include "common/block.h"
#include "kernels/vector4.h"

namespace kdtree {

constexpr int kWarpTerms = 4 * kWarp;  // k that a warp takes at one j

// sum + x[0] w[0] + ... + x[count-1] w[count-1]
__device__ __forceinline__ float add_products(float4 x, float4 w, int count, float sum) {
  sum = fmaf(x.x, w.x, sum);
  if (count > 1) sum = fmaf(x.y, w.y, sum);
  if (count > 2) sum = fmaf(x.z, w.z, sum);
  if (count > 3) sum = fmaf(x.w, w.w, sum);
  return sum;
}

// sum[m * kOuts + n] += the lane's terms of x[m] w[n], for m < rows. kSteps: values of j whose weights are on their way
// together, to keep memory busy. kVector: rows are aligned to four elements and `in` is a multiple of 4. T: float, or
// bf16 bits.
template <bool kVector, int kSteps, typename T, int kRows, int kOuts>
__device__ __forceinline__ void add_terms_as(const T* const (&x)[kRows], int rows, const T* const (&w)[kOuts], int in,
                                             float (&sum)[kRows * kOuts]) {
  for (int first = 4 * lane_id(); first < in; first += kSteps * kWarpTerms) {
    float4 weights[kSteps][kOuts];
    KDTREE_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      const int k = first + s * kWarpTerms;
      if (k < in) {
        KDTREE_UNROLL
        for (int n = 0; n < kOuts; ++n) weights[s][n] = load4(w[n] + k, in - k, kVector);
      }
    }
    KDTREE_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      const int k = first + s * kWarpTerms;
      if (k < in) {
        KDTREE_UNROLL
        for (int m = 0; m < kRows; ++m) {
          if (m < rows) {
            const float4 values = load4(x[m] + k, in - k, kVector);
            KDTREE_UNROLL
            for (int n = 0; n < kOuts; ++n)
              sum[m * kOuts + n] = add_products(values, weights[s][n], kVector ? 4 : in - k, sum[m * kOuts + n]);
          }
        }
      }
    }
  }
}

// The same for rows of any alignment.
template <int kSteps, typename T, int kRows, int kOuts>
__device__ __forceinline__ void add_terms(const T* const (&x)[kRows], int rows, const T* const (&w)[kOuts], int in,
                                          float (&sum)[kRows * kOuts]) {
  uintptr_t places = sizeof(T) * static_cast<uintptr_t>(in);
  KDTREE_UNROLL
  for (int m = 0; m < kRows; ++m) places |= reinterpret_cast<uintptr_t>(x[m]);
  KDTREE_UNROLL
  for (int n = 0; n < kOuts; ++n) places |= reinterpret_cast<uintptr_t>(w[n]);
  if (places % (4 * sizeof(T)) == 0)
    add_terms_as<true, kSteps>(x, rows, w, in, sum);
  else
    add_terms_as<false, 1>(x, rows, w, in, sum);
}

// Joins the lanes' sums of kCount numbers, kCount a power of two up to 32, and returns the one of number
// lane / (32 / kCount): at each bit a lane gives half of its numbers away and keeps the other half, so that all of them
// cost little more than one would.
template <int kCount, int kBit = kWarp / 2>
__device__ __forceinline__ float join_lanes(const float (&sum)[kCount]) {
  if constexpr (kBit == 0) {
    return sum[0];
  } else if constexpr (kCount == 1) {
    const float joined[1] = {sum[0] + __shfl_xor_sync(kAllLanes, sum[0], kBit)};
    return join_lanes<1, kBit / 2>(joined);
  } else {
    float kept[kCount / 2];
    const bool upper = (lane_id() & kBit) != 0;
    KDTREE_UNROLL
    for (int i = 0; i < kCount / 2; ++i) {
      const float given = upper ? sum[i] : sum[i + kCount / 2];
      kept[i] = (upper ? sum[i + kCount / 2] : sum[i]) + __shfl_xor_sync(kAllLanes, given, kBit);
    }
    return join_lanes<kCount / 2, kBit / 2>(kept);
  }
}

// Joins kCount numbers, of which the first `used` matter, and calls take(number, sum) once for each by the lane that
// has it.
template <int kCount, int kFirst = 0, typename Take>
__device__ __forceinline__ void join_all(const float (&sum)[kCount], int used, Take take) {
  if constexpr (kFirst < kCount) {
    constexpr int kGroup = kCount - kFirst < kWarp ? kCount - kFirst : kWarp;
    static_assert((kGroup & (kGroup - 1)) == 0, "what is left over after groups of 32 is a power of two");
    if (kFirst >= used) return;
    float group[kGroup];
    KDTREE_UNROLL
    for (int i = 0; i < kGroup; ++i) group[i] = sum[kFirst + i];
    const float joined = join_lanes(group);
    constexpr int kLanes = kWarp / kGroup;
    const int number = kFirst + lane_id() / kLanes;
    if (lane_id() % kLanes == 0 && number < used) take(number, joined);
    join_all<kCount, kFirst + kGroup>(sum, used, take);
  }
}

}  // namespace kdtree
