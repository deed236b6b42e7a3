// One row of logits as the choosing kernels see it: its elements in any alignment, their order, and its best one.
#pragma once

#include "common/block.h"

namespace kdtree {

constexpr int kNoChoice = -1;

// Calls f(id, values) for groups of neighbours: `values` holds the floats of ids id, id + 1, ... The elements up to the
// first boundary of 16 bytes and behind the last one come alone, those between as one load each. Of `workers` callers
// each gets its own part, in ascending order, with kLoads loads on their way at a time. Plain loads: a kernel may have
// begun before the logits were there.
template <int kLoads, typename T, typename F>
__device__ void for_each(const T* row, int size, int worker, int workers, F f) {
  constexpr int kWidth = 16 / sizeof(T);
  const auto single = [&](int id) {
    const float value[1] = {widen(row[id])};
    f(id, value);
  };
  const int unaligned = static_cast<int>((0 - reinterpret_cast<uintptr_t>(row)) % 16 / sizeof(T));
  const int head = min(size, unaligned);
  const int groups = (size - head) / kWidth;
  const uint4* const body = reinterpret_cast<const uint4*>(row + head);

  if (worker < head) single(worker);
  for (int first = worker; first < groups; first += kLoads * workers) {
    uint4 loaded[kLoads];
    KDTREE_UNROLL
    for (int i = 0; i < kLoads; ++i)
      if (first + i * workers < groups) loaded[i] = body[first + i * workers];
    KDTREE_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const int group = first + i * workers;
      if (group >= groups) continue;
      const unsigned words[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
      float values[kWidth];
      KDTREE_UNROLL
      for (int v = 0; v < kWidth; ++v)
        values[v] = kWidth == 4 ? __uint_as_float(words[v % 4])
                                : __uint_as_float(v % 2 == 0 ? words[v / 2] << 16 : words[v / 2] & 0xffff0000u);
      f(head + group * kWidth, values);
    }
  }
  const int tail = head + groups * kWidth;
  if (worker < size - tail) single(tail + worker);
}

// Unsigned numbers in the order of the values: -inf, ..., -0 = +0, ..., +inf. Only numbers have an order.
constexpr unsigned kOrderOfMinusInfinity = 0x007fffffu;
constexpr unsigned kOrderOfInfinity = 0xff800000u;
constexpr unsigned kOrderOfNaN = 0xffffffffu;  // above all: a row's maximum tells whether there is one

__device__ inline unsigned order_of(float value) {
  const unsigned bits = __float_as_uint(value);
  if (bits == 0x80000000u) return 0x80000000u;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Maximum that is NaN if one of the two is.
__device__ inline float max_or_nan(float a, float b) {
#ifdef KDTREE_HOST
  return a != a ? a : b != b ? b : max(a, b);
#else
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#endif
}

// The best element of some: order of its value, and its id, the lowest of those. kOrderOfNaN if there was a NaN.
struct Best {
  unsigned order;
  unsigned id;

  // The id, or kNoChoice if no token can be chosen: a NaN, a +inf, or nothing finite.
  __device__ int choice() const {
    return order > kOrderOfMinusInfinity && order < kOrderOfInfinity ? static_cast<int>(id) : kNoChoice;
  }
};

__device__ inline Best best_of_warp(Best mine) {
  const unsigned order = __reduce_max_sync(kAllLanes, mine.order);
  return {order, __reduce_min_sync(kAllLanes, mine.order == order ? mine.id : 0xffffffffu)};
}

// What a worker sees of a row. Maxima of whole groups are compared: which element it was is looked up at the end.
template <typename T>
__device__ Best best_of_part(const T* row, int size, int worker, int workers) {
  float maximum = __uint_as_float(0xff800000u);  // -inf
  float best = maximum;
  int place = 0;
  for_each<4>(row, size, worker, workers, [&](int id, const auto& values) {
    float top = values[0];
    KDTREE_UNROLL
    for (size_t v = 1; v < sizeof(values) / sizeof(float); ++v) top = max_or_nan(top, values[v]);
    maximum = max_or_nan(maximum, top);
    if (top > best) {
      best = top;
      place = id;
    }
  });
  if (maximum != maximum) return {kOrderOfNaN, 0};
  if (order_of(best) == kOrderOfMinusInfinity) return {kOrderOfMinusInfinity, 0};
  while (widen(row[place]) != best) ++place;
  return {order_of(best), static_cast<unsigned>(place)};
}

// By the whole block; every thread gets the best of what all of them saw. `slots`: one a warp, in shared memory.
__device__ inline Best best_of_block(Best mine, Best* slots) {
  const Best of_warp = best_of_warp(mine);
  if (lane_id() == 0) slots[warp_id()] = of_warp;
  __syncthreads();
  return best_of_warp(lane_id() < warp_count() ? slots[lane_id()] : Best{0, 0});
}

}  // namespace kdtree
