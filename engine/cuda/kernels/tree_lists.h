// The lists of one request: their check, and what decides which way its tree is built.
#pragma once

#include "common/block.h"
#include "kdtree_engine.h"

namespace kdtree {

// Row d holds the candidates of depth d + 1. width: entries from row to row.
struct Lists {
  const float* lp;
  const int32_t* ids;
  int depths;
  int width;

  __device__ float at(int d, int r) const { return lp[static_cast<size_t>(d) * width + r]; }
  __device__ int32_t id(int d, int r) const { return ids[static_cast<size_t>(d) * width + r]; }
};

constexpr unsigned kNoFault = 0xffffffffu;
constexpr int kNoBit = 1000;  // lowest bit of zeros

// A fault as one number that orders by depth, then rank, then code.
__device__ inline unsigned pack_fault(int d, int r, int code) {
  return static_cast<unsigned>(d) << 16 | static_cast<unsigned>(r) << 4 | static_cast<unsigned>(code);
}

// Complete only behind the barrier that follows look_at and check_repeats.
struct ListFacts {
  unsigned fault;                 // the first one, or kNoFault
  int lengths[KDTREE_MAX_DEPTH];  // finite entries among those that a budget can reach
  int low_bit;                    // exponent of the lowest bit set in any of them, or kNoBit
  int positive;                   // whether one is above 0

  __device__ void clear(int thread) {
    if (thread < KDTREE_MAX_DEPTH) lengths[thread] = 0;
    if (thread == 0) {
      fault = kNoFault;
      low_bit = kNoBit;
      positive = 0;
    }
  }
};

// Exponent of the lowest set bit of a finite value other than 0.
__device__ inline int lowest_bit(float value) {
  const unsigned bits = __float_as_uint(value) & 0x7fffffffu;
  const int exponent = static_cast<int>(bits >> 23);
  const unsigned mantissa = (bits & 0x7fffffu) | (exponent > 0 ? 0x800000u : 0u);
  return (exponent > 0 ? exponent : 1) - 150 + __ffs(static_cast<int>(mantissa)) - 1;
}

__device__ inline bool is_finite(float value) { return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u; }

// One entry's fault other than a repeated id; 0 if it has none.
__device__ inline int entry_fault(const Lists& lists, int d, int r, int vocab_size) {
  const float x = lists.at(d, r);
  if (!is_finite(x) && !(x < 0)) return x > 0 ? KDTREE_REQUEST_INFINITE : KDTREE_REQUEST_NAN;
  const int32_t id = lists.id(d, r);
  if (id < 0 || (vocab_size > 0 && id >= vocab_size)) return KDTREE_REQUEST_VOCABULARY;
  return r > 0 && x > lists.at(d, r - 1) ? KDTREE_REQUEST_UNSORTED : 0;
}

// A set of the ids of one row has 2^bits slots, at most half of them full, so that a search ends.
__host__ __device__ constexpr int set_bits(int width) {
  int bits = 5;
  while ((1 << bits) < 2 * width) ++bits;
  return bits;
}

// Adds `id` (>= 0) to a set whose slots hold ids or -1; false if it was there. The high bits of the product choose the
// slot: ids that are multiples of a power of two differ there.
__device__ inline bool add_id(int* set, int bits, int id) {
  const unsigned last = (1u << bits) - 1;
  for (unsigned slot = static_cast<unsigned>(id) * 2654435761u >> (32 - bits);; slot = (slot + 1) & last) {
    const int found = atomicCAS(&set[slot], -1, id);
    if (found == -1) return true;
    if (found == id) return false;
  }
}

// Finds ids that stand twice among the finite entries of a row, with sets in `space` of `capacity` ints.
__device__ inline void check_repeats(const Lists& lists, int* space, int capacity, ListFacts* facts) {
  const int bits = set_bits(lists.width), slots = 1 << bits;
  const int rows = min(capacity / slots, lists.depths);
  for (int first = 0; first < lists.depths; first += rows) {
    const int entries = min(rows, lists.depths - first) * lists.width;
    for (int i = threadIdx.x; i < rows * slots; i += blockDim.x) space[i] = -1;
    __syncthreads();
    bool repeated = false;
    for (int i = threadIdx.x; i < entries; i += blockDim.x) {
      const int d = first + i / lists.width, r = i % lists.width, id = lists.id(d, r);
      if (is_finite(lists.at(d, r)) && id >= 0) repeated |= !add_id(space + (d - first) * slots, bits, id);
    }
    if (!__syncthreads_or(repeated)) continue;
    for (int i = threadIdx.x; i < entries; i += blockDim.x) {  // rare: which one is the second of its id
      const int d = first + i / lists.width, r = i % lists.width, id = lists.id(d, r);
      if (!is_finite(lists.at(d, r))) continue;
      for (int before = 0; before < r; ++before)
        if (lists.id(d, before) == id) {  // behind one that is not finite an earlier fault stands anyway
          atomicMin(&facts->fault, pack_fault(d, r, KDTREE_REQUEST_REPEATED));
          break;
        }
    }
  }
}

// Reads every entry once and adds to `facts`, which was cleared. reach: ranks that the budget can reach.
__device__ inline void look_at(const Lists& lists, int reach, int vocab_size, bool checked, ListFacts* facts) {
  int low_bit = kNoBit;
  unsigned fault = kNoFault;
  bool positive = false;
  for (int i = threadIdx.x; i < lists.depths * lists.width; i += blockDim.x) {
    const int d = i / lists.width, r = i % lists.width;
    if (!checked) {
      if (const int code = entry_fault(lists, d, r, vocab_size)) fault = min(fault, pack_fault(d, r, code));
    }
    const float x = lists.at(d, r);
    if (r >= reach || !is_finite(x)) continue;
    if (x != 0) low_bit = min(low_bit, lowest_bit(x));
    positive |= x > 0;
    if (r + 1 == reach || !is_finite(lists.at(d, r + 1))) atomicMax(&facts->lengths[d], r + 1);
  }
  low_bit = __reduce_min_sync(kAllLanes, low_bit);
  fault = __reduce_min_sync(kAllLanes, fault);
  positive = __any_sync(kAllLanes, positive);
  if (lane_id() == 0) {
    atomicMin(&facts->low_bit, low_bit);
    if (fault != kNoFault) atomicMin(&facts->fault, fault);
    if (positive) atomicOr(&facts->positive, 1);
  }
}

}  // namespace kdtree
