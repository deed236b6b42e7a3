// One draw from a row of logits by one block: temperature, top_k, top_p, and the random number of (seed, position).
//
// Weights are float64, exp((logit - peak) / temperature), and become whole numbers of 2^-s with s = 63 - ceil(log2 V),
// so that all sums are sums of 64-bit integers: exact, whatever the order of the additions, and so the same bits for
// every number of threads and every neighbour. Rounding moves the cumulative distribution by at most V * 2^-(s + 1) of
// the peak's weight: 2.3e-9 for V = 163,840, below the 1e-6 within which a draw may turn.
//
// top_k and top_p are cuts in one order, best first and equal logits by id, after the element where a cumulative sum
// of ones, or of weights, passes a threshold. The logit of that element is found by its bits, from the highest (radix
// selection, 11 bits a pass), its id among equal logits, and the draw itself, by sums over ever smaller chunks.
#pragma once

#include "common/philox.h"
#include "kernels/choice_row.h"

namespace kdtree {

constexpr int kSampleThreads = 512;
constexpr int kDigitBits = 11;
constexpr int kSums = 1 << kDigitBits;
constexpr int kChunks = 256;

using Sum = unsigned long long;

// 64-bit sums in shared memory that many threads add to. Two words each: there is no 64-bit atomic addition in shared
// memory but a loop of exchanges, which equal digits would make long.
struct Sums {
  unsigned low[kSums];
  unsigned high[kSums];

  __device__ Sum operator[](int i) const { return static_cast<Sum>(high[i]) << 32 | low[i]; }
  __device__ void set(int i, Sum value) {
    low[i] = static_cast<unsigned>(value);
    high[i] = static_cast<unsigned>(value >> 32);
  }
  __device__ void add(int i, Sum value) {
    const unsigned part = static_cast<unsigned>(value);
    const unsigned carry = atomicAdd(&low[i], part) + part < part ? 1u : 0u;
    if (const unsigned rest = static_cast<unsigned>(value >> 32) + carry; rest != 0) atomicAdd(&high[i], rest);
  }
};

// Where a cumulative sum passes a threshold: at the first entry whose inclusive sum is above it.
struct Crossing {
  int index;
  Sum rest;   // threshold less the sum before the entry
  Sum entry;  // the entry itself
};

struct SampleScratch {
  Sums sums;
  Sum of_warps[kWarp];
  Crossing crossing;
  Best best[kWarp];
};

__device__ inline Sum warp_sum(Sum value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// n >= 1 things in pieces of `size`; 32-bit, for a 64-bit division is a call.
__device__ inline int pieces(int n, int size) { return (n - 1) / size + 1; }

// Over the first n entries of scratch.sums, by the whole block. threshold: of the total, below it.
template <typename Threshold>
__device__ Crossing find_crossing(SampleScratch& scratch, int n, Threshold threshold) {
  __syncthreads();
  const int each = pieces(n, static_cast<int>(blockDim.x));
  const int first = min(n, static_cast<int>(threadIdx.x) * each), last = min(n, first + each);
  Sum mine = 0;
  for (int i = first; i < last; ++i) mine += scratch.sums[i];
  Sum inclusive = mine;
  for (int step = 1; step < kWarp; step *= 2) {
    const Sum below = __shfl_up_sync(kAllLanes, inclusive, step);
    if (lane_id() >= step) inclusive += below;
  }
  if (lane_id() == kWarp - 1) scratch.of_warps[warp_id()] = inclusive;
  __syncthreads();
  Sum before = inclusive - mine, total = 0;
  for (int warp = 0; warp < warp_count(); ++warp) {
    if (warp == warp_id()) before += total;
    total += scratch.of_warps[warp];
  }
  const Sum at = threshold(total);
  if (before <= at && at < before + mine) {
    int i = first;
    for (; before + scratch.sums[i] <= at; ++i) before += scratch.sums[i];
    scratch.crossing = {i, at - before, scratch.sums[i]};
  }
  __syncthreads();
  return scratch.crossing;
}

// Id at which the cumulative sum of measure(value), ascending by id, passes threshold(total).
template <typename T, typename Measure, typename Threshold>
__device__ int find_id(const T* row, int size, SampleScratch& scratch, Measure measure, Threshold threshold) {
  int first = 0, last = size;
  Sum rest = 0;
  for (bool whole = true;; whole = false) {
    const bool single = last - first <= kSums;
    const int length = single ? 1 : pieces(last - first, kChunks);
    const int chunks = pieces(last - first, length);
    if (single) {
      for (int i = threadIdx.x; i < chunks; i += blockDim.x)
        scratch.sums.set(i, measure(widen(row[first + i]), first + i));
    } else {
      for (int chunk = warp_id(); chunk < chunks; chunk += warp_count()) {
        const int from = first + chunk * length, to = min(last, from + length);
        Sum sum = 0;
        for (int id = from + lane_id(); id < to; id += kWarp) sum += measure(widen(row[id]), id);
        sum = warp_sum(sum);
        if (lane_id() == 0) scratch.sums.set(chunk, sum);
      }
    }
    const Crossing found = find_crossing(scratch, chunks, [&](Sum total) { return whole ? threshold(total) : rest; });
    first += found.index * length;
    if (single) return first;
    last = min(last, first + length);
    rest = found.rest;
  }
}

// The elements up to one of them, best first and equal ones by id.
struct Cut {
  unsigned order;
  int id;

  __device__ bool keeps(unsigned other, int other_id) const {
    return other > order || (other == order && other_id <= id);
  }
};

// Cuts after the element of `cut` at which the cumulative sum of measure(value), best first, passes threshold(total).
template <typename T, typename Measure, typename Threshold>
__device__ Cut cut_after(const T* row, int size, SampleScratch& scratch, const Cut& cut, Measure measure,
                         Threshold threshold) {
  constexpr int kKeyBits = 8 * sizeof(T);  // the order of bfloat16 has its bits in the upper half
  unsigned key = 0;
  Crossing found{0, 0, 0};
  for (int bits = kKeyBits; bits > 0;) {
    const int digit = min(bits, kDigitBits), digits = 1 << digit;
    const bool whole = bits == kKeyBits;
    bits -= digit;
    for (int i = threadIdx.x; i < digits; i += blockDim.x) scratch.sums.set(i, 0);
    __syncthreads();
    for_each<1>(row, size, threadIdx.x, blockDim.x, [&](int id, const auto& values) {
      KDTREE_UNROLL
      for (size_t v = 0; v < sizeof(values) / sizeof(float); ++v) {
        const unsigned order = order_of(values[v]);
        const unsigned mine = order >> (32 - kKeyBits) >> bits;
        if ((whole || mine >> digit == key) && cut.keeps(order, id + static_cast<int>(v)))
          scratch.sums.add(digits - 1 - static_cast<int>(mine & (digits - 1)), measure(values[v]));
      }
    });
    const Sum rest = found.rest;
    found = find_crossing(scratch, digits, [&](Sum total) { return whole ? threshold(total) : rest; });
    key = key << digit | static_cast<unsigned>(digits - 1 - found.index);
  }
  // All equal logits measure the same, and `found` is their sum.
  unsigned order = key << (32 - kKeyBits);
  if (kKeyBits < 32 && order >> 31 == 0) order |= (1u << (32 - kKeyBits)) - 1;
  const float value = __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order);
  const Sum one = measure(value), place = found.rest / one;
  if (place + 1 == found.entry / one) return {order, order == cut.order ? cut.id : size};
  const auto equal = [&](float other, int) -> Sum { return order_of(other) == order; };
  return {order, find_id(row, size, scratch, equal, [&](Sum) { return place; })};
}

struct SampleParams {
  float temperature;
  int top_k;
  float top_p;
  uint64_t seed;
  int position;

  // Whether the reference would take them.
  __device__ bool sound() const {
    return temperature > 0 && order_of(temperature) < kOrderOfInfinity && top_k >= 0 && top_p > 0 && top_p <= 1 &&
           position >= 0;
  }
};

// By the whole block. -1 for a row without a choice, or parameters that are none.
template <typename T>
__device__ int sample_row(const T* row, int size, const SampleParams& params, SampleScratch& scratch) {
  const Best best = best_of_block(best_of_part(row, size, threadIdx.x, blockDim.x), scratch.best);
  if (best.choice() == kNoChoice || !params.sound()) return kNoChoice;

  const double peak = widen(row[best.choice()]), rate = 1.0 / params.temperature;
  const double scale = static_cast<double>(1ull << (31 + __clz(size - 1)));
  const auto weight = [&](float value) { return static_cast<Sum>(exp((value - peak) * rate) * scale + 0.5); };
  Cut cut{0, size};
  if (params.top_k > 0 && params.top_k < size) {
    const Sum last = params.top_k - 1;
    cut = cut_after(row, size, scratch, cut, [](float) -> Sum { return 1; }, [&](Sum) { return last; });
  }
  if (params.top_p < 1)
    cut = cut_after(row, size, scratch, cut, weight, [&](Sum total) {
      const Sum reached = static_cast<Sum>(ceil(params.top_p * static_cast<double>(total)));
      return min(reached, total) - 1;
    });
  const auto kept = [&](float value, int id) -> Sum { return cut.keeps(order_of(value), id) ? weight(value) : 0; };
  // The random number is the first word of the counter (position, 0, 0, 0).
  // u * total with u = (2 x + 1) / 2^33, rounded down: a whole number is above the one if it is above the other.
  const Sum u = 2ull * philox(params.seed, static_cast<uint32_t>(params.position)).x[0] + 1;
  return find_id(row, size, scratch, kept, [&](Sum total) { return __umul64hi(u, total) << 31 | (u * total) >> 33; });
}

}  // namespace kdtree
