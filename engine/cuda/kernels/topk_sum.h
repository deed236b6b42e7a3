// log(sum(exp(row))) of the top-k stage: a fast sum of each chunk, and a precise one for the rows that need it.
//
// The fast sum: exp in float32, each within 2.6e-7 of itself (ex2.approx 2^-22, which a test holds it to, and 2e-8 from
// the reduced argument), eight of them in a float32 tree (3 roundings, 1.8e-7), those in double. 4.4e-7 in all is less
// than one unit in the last place of a float32 logz from 4 on (4.8e-7). Rows with a smaller |logz|, or with a peak
// where float32 cannot reduce the argument, are summed again: in double, and where logz is nearly 0 in Wide.
#pragma once

#include "kernels/topk_row.h"

namespace kdtree {

constexpr float kMostFastLogit = 32768;  // chunks past it are not summed fast
constexpr float kMostFastPeak = 16384;   // next to such a peak, chunks below -kMostFastLogit count nothing
constexpr double kLeastFastLogz = 4;
constexpr double kNearZero = 0x1p-7;

// 2^x for |x| <= 1/2.
__device__ inline float exp2_approx(float x) {
#ifdef KDTREE_HOST
  return std::exp2(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

// e^x / 2^exponent of logits near a chunk's peak, without rounding x - peak: the exponent goes into the integer part.
class FastExp {
 public:
  __device__ explicit FastExp(float peak)
      : floor_(peak - 69.f), exponent_(rintf(peak * kLog2e)), magic_(kMagic - exponent_) {}

  __device__ int exponent() const { return static_cast<int>(exponent_); }

  // Below the floor, 2^-100 of the peak's own, it is the floor's.
  __device__ float operator()(float x) const {
    x = max(x, floor_);
    const float shifted = fmaf(x, kLog2e, magic_);  // n - exponent in the low bits
    const float n = shifted - magic_;
    const float fraction = fmaf(x, kLog2eLow, fmaf(x, kLog2e, -n));
    return __uint_as_float(__float_as_uint(exp2_approx(fraction)) + (__float_as_uint(shifted) << 23));
  }

 private:
  static constexpr float kLog2e = 0x1.715476p+0f, kLog2eLow = 0x1.4ae0cp-26f;
  static constexpr float kMagic = 0x1.8p+23f;  // numbers near it are whole, and its low nine bits are 0
  float floor_, exponent_, magic_;
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
    // Unsigned: the parts of a request that failed before may hold anything.
    const int below = static_cast<int>(static_cast<unsigned>(part.exponent) - static_cast<unsigned>(exponent));
    if (below > -1000 && below <= 0) sum += part.sum * power_of_two(below);
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
