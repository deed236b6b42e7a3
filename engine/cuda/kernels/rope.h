// How a pair turns, as every kernel computes it.
#pragma once

#include "kernels/bf16.h"
#include "kernels/layers.h"

namespace kdtree {

// Pair i of a head of `width` values. cos, sin: rows of the tables. Products are rounded to float32 before they meet,
// as in the reference: no fused multiply-add. bf16 is rounded once, at the end.
template <typename T>
__device__ void turn_pair(T* head, int width, int i, const float* cos, const float* sin, RopeLayout layout) {
  T& first = head[layout == RopeLayout::kHalf ? i : 2 * i];
  T& second = head[layout == RopeLayout::kHalf ? i + width / 2 : 2 * i + 1];
  const float x = widen(first), y = widen(second);
  first = stored<T>(__fsub_rn(__fmul_rn(x, cos[i]), __fmul_rn(y, sin[i])));
  second = stored<T>(__fadd_rn(__fmul_rn(y, cos[i]), __fmul_rn(x, sin[i])));
}

}  // namespace kdtree
