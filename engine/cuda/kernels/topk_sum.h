// log(sum(exp(row))) of the top-k stage: a fast sum of each chunk, and a precise one for the rows that need it.
//
// The fast sum: each term is ex2 of one fma, within 2.6e-7 of itself (ex2.approx 2^-22, which a test holds it to, and
// an exponent that is half a binade off the peak) and 5.1e-8 for each binade that it lies below the peak, from rounding
// the argument (4.2e-8) and from a log2(e) that is made good at the peak alone (0.9e-8). Over a chunk the latter come
// to 3.3e-7 at most: with 1,023 terms 7.8 binades below one peak. Eight terms are added in a float32 tree (3 roundings,
// 1.8e-7), those sums in double. 7.7e-7 in all is less than one unit in the last place of a float32 logz from 8 on
// (9.5e-7). Rows with a smaller |logz|, or with an enormous peak, are summed again: in double, and where logz is nearly
// 0 in Wide.
#pragma once

#include "kernels/topk_row.h"

namespace kdtree {

constexpr float kMostFastLogit = 32768;  // chunks past it are not summed fast
constexpr float kMostFastPeak = 16384;   // next to such a peak, chunks below -kMostFastLogit count nothing
constexpr double kLeastFastLogz = 8;
constexpr double kNearZero = 0x1p-7;

// 2^x for x <= 1.
__device__ inline float exp2_approx(float x) {
#ifdef KDTREE_HOST
  return std::exp2(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

// e^x / 2^exponent / rest(peak) of the logits of a chunk.
class FastExp {
 public:
  __device__ explicit FastExp(float peak) : exponent_(rintf(peak * kLog2e)) {}

  __device__ int exponent() const { return static_cast<int>(exponent_); }
  __device__ float operator()(float x) const { return exp2_approx(fmaf(x, kLog2e, -exponent_)); }

  // What kLog2e lacks makes of e^peak; at most 4.4e-4 from 1.
  __device__ static double rest(float peak) {
    const double x = peak * (kLacking * 0.6931471805599453);
    return 1 + x * (1 + x / 2);
  }

 private:
  static constexpr float kLog2e = 0x1.715476p+0f;
  static constexpr double kLacking = 0x1.4ae0bf85ddf44p-26;
  float exponent_;
};

// By a warp; the result is lane 0's.
__device__ inline double sum_of_warp(double value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

__device__ inline Wide sum_of_warp(Wide value) {
  KDTREE_UNROLL_BY(1)
  for (int step = kWarp / 2; step > 0; step /= 2)
    value =
        wide_add(value, {__shfl_xor_sync(kAllLanes, value.high, step), __shfl_xor_sync(kAllLanes, value.low, step)});
  return value;
}

// By a warp, of the logits x of a chunk without NaN and +inf. top: order of the greatest.
__device__ inline ChunkSum fast_sum(const float (&x)[kSteps][kOctet], unsigned top) {
  const float peak = value_of(top);
  if (!(fabsf(peak) < kMostFastLogit)) return {0, kNoExponent, top};
  const FastExp exponential(peak);
  double sum = 0;
  KDTREE_UNROLL
  for (int s = 0; s < kSteps; ++s) {
    float terms[kOctet];
    KDTREE_UNROLL
    for (int i = 0; i < kOctet; ++i) terms[i] = exponential(x[s][i]);
    KDTREE_UNROLL
    for (int width = kOctet / 2; width > 0; width /= 2) KDTREE_UNROLL
    for (int i = 0; i < width; ++i) terms[i] += terms[i + width];
    sum += static_cast<double>(terms[0]);
  }
  return {sum_of_warp(sum), exponential.exponent(), top};
}

// What logz still needs: nothing, a sum in double, or one in Wide.
enum Effort : int { kKnown, kDouble, kWide };

// What the chunk sums of a row say of it.
struct RowSum {
  float peak;
  float logz;
  Effort effort;
};

// By a warp, all of whose lanes get it: of the chunks of a row.
__device__ inline RowSum combine(const ChunkSum* sums, int chunks) {
  constexpr int kHeld = 5;  // of a lane, read at once; a row of 163,840 has no more
  ChunkSum held[kHeld];
  int exponent = kNoExponent;
  unsigned top = 0;
  const auto meet = [&](const ChunkSum& part) {
    top = max(top, part.top);
    exponent = max(exponent, part.exponent);
  };
  KDTREE_UNROLL
  for (int i = 0; i < kHeld; ++i) {
    const int c = lane_id() + i * kWarp;
    held[i] = c < chunks ? sums[c] : ChunkSum{0, kNoExponent, 0};
    meet(held[i]);
  }
  KDTREE_UNROLL_BY(4)
  for (int c = lane_id() + kHeld * kWarp; c < chunks; c += kWarp) meet(sums[c]);
  const float peak = value_of(__reduce_max_sync(kAllLanes, top));
  exponent = __reduce_max_sync(kAllLanes, exponent);
  double sum = 0;
  const auto add = [&](const ChunkSum& part) {
    const int below = part.exponent - exponent;
    if (part.sum > 0 && below > -1000) sum += part.sum * FastExp::rest(value_of(part.top)) * power_of_two(below);
  };
  KDTREE_UNROLL
  for (int i = 0; i < kHeld; ++i) add(held[i]);
  KDTREE_UNROLL_BY(2)
  for (int c = lane_id() + kHeld * kWarp; c < chunks; c += kWarp) add(sums[c]);
  sum = sum_of_warp(sum);
  if (peak == minus_infinity()) return {peak, peak, kKnown};
  const double logz = exponent * 0.6931471805599453 + log(sum);
  Effort effort = kDouble;
  if (fabsf(peak) < kMostFastPeak && fabs(logz) >= kLeastFastLogz) effort = kKnown;
  if (fabs(logz) < kNearZero) effort = kWide;
  return {peak, static_cast<float>(logz), effort};
}

// By a warp: the terms of one chunk, relative to the row's peak. wide: logz is nearly 0.
template <typename T>
__device__ PreciseSum precise_sum(const T* row, unsigned chunk, unsigned size, float peak, bool wide) {
  Wide sum{0, 0};
  unsigned peaks = 0;
  KDTREE_UNROLL_BY(1)
  for (unsigned id = chunk * kChunk + lane_id(), i = 0; i < kChunk / kWarp; ++i, id += kWarp) {
    const float x = id < size ? widen(row[id]) : minus_infinity();
    if (x == peak) {
      ++peaks;
    } else if (x != minus_infinity()) {
      const Wide below = exact_sum(static_cast<double>(x), -static_cast<double>(peak));
      sum = wide_add(sum, wide ? wide_exp(below) : Wide{exp(below.high), 0});
    }
  }
  return {sum_of_warp(sum), __reduce_add_sync(kAllLanes, peaks)};
}

// By a warp: logz from the precise sums of all chunks; lane 0's.
__device__ inline double combine(const PreciseSum* sums, int chunks, float peak) {
  Wide others{0, 0};
  unsigned peaks = 0;
  KDTREE_UNROLL_BY(1)
  for (int c = lane_id(); c < chunks; c += kWarp) {
    others = wide_add(others, sums[c].sum);
    peaks += sums[c].peaks;
  }
  others = sum_of_warp(others);
  peaks = __reduce_add_sync(kAllLanes, peaks);
  return log_of_sum(static_cast<double>(peak), wide_add(others, {static_cast<double>(peaks) - 1, 0}));
}

}  // namespace kdtree
