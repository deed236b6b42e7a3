// The lists of one request: one look at every entry that checks it, keeps it in shared memory and finds what decides
// which way the tree is built.
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
  uint32_t inverse;  // inverse_of(width)

  __device__ float at(int d, int r) const { return lp[static_cast<size_t>(d) * width + r]; }
  __device__ int32_t id(int d, int r) const { return ids[static_cast<size_t>(d) * width + r]; }
  // Row of entry i; a division by a number that is no constant costs more than a read of shared memory.
  __device__ int row_of(int i) const { return static_cast<int>(static_cast<uint64_t>(i) * inverse >> 31); }

  // i * inverse / 2^31 is i / width, rounded down, as long as i * width < 2^31: entries are 31 * 1024 at most.
  static constexpr uint32_t inverse_of(int width) {
    return width > 0 ? (1u << 31) / static_cast<uint32_t>(width) + 1 : 0;
  }
};

constexpr unsigned kNoFault = 0xffffffffu;
constexpr int kNoBit = 1000;  // lowest bit of zeros

// A fault as one number that orders by depth, then rank, then code.
__device__ inline unsigned pack_fault(int d, int r, int code) {
  return static_cast<unsigned>(d) << 16 | static_cast<unsigned>(r) << 4 | static_cast<unsigned>(code);
}

// What read_lists finds; complete when it returns.
struct ListFacts {
  unsigned fault;                 // the first one, or kNoFault
  int lengths[KDTREE_MAX_DEPTH];  // finite entries among those that a budget can reach; without a fault, right
  int low_bit;                    // exponent of the lowest bit set in any of them, or kNoBit
  int positive;                   // whether one is above 0

  __device__ void clear(int thread, int reach) {
    if (thread < KDTREE_MAX_DEPTH) lengths[thread] = reach;
    if (thread == 0) {
      fault = kNoFault;
      low_bit = kNoBit;
      positive = 0;
    }
  }

  // Exponent of the unit of costs.
  __device__ int unit_bit() const { return low_bit == kNoBit ? 0 : low_bit; }
};

__device__ inline bool is_finite(float value) { return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u; }

// A finite value's magnitude is mantissa * 2^exponent.
struct Magnitude {
  unsigned mantissa;
  int exponent;

  __device__ explicit Magnitude(float value) {
    const unsigned bits = __float_as_uint(value) & 0x7fffffffu, field = bits >> 23;
    mantissa = field > 0 ? (bits & 0x7fffffu) | 0x800000u : bits;
    exponent = static_cast<int>(field > 0 ? field : 1) - 150;
  }
};

// Exponent of the lowest set bit of a finite value other than 0.
__device__ inline int lowest_bit(float value) {
  const Magnitude magnitude(value);
  return magnitude.exponent + __ffs(static_cast<int>(magnitude.mantissa)) - 1;
}

// The fault of entry x, id at rank r behind `before`, other than a repeated id; 0 if it has none.
__device__ inline int entry_fault(float x, float before, int32_t id, int r, int vocab_size) {
  if (!is_finite(x) && !(x < 0)) return x > 0 ? KDTREE_REQUEST_INFINITE : KDTREE_REQUEST_NAN;
  if (id < 0 || (vocab_size > 0 && id >= vocab_size)) return KDTREE_REQUEST_VOCABULARY;
  return r > 0 && x > before ? KDTREE_REQUEST_UNSORTED : 0;
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

// Where read_lists puts things.
struct ListSpace {
  uint32_t* near;  // [depths, 2^near_bits] bits of the first entries of the rows, those that the budget can reach
  int near_bits;
  int* sets;  // [set_rows, 2^set_bits] ids of rows; nullptr where nothing is checked
  int set_rows, set_bits;
};

// Fault of the first entry of a row that repeats an id, in entries first..last-1. Rare, and slow.
__device__ inline void name_repeats(const Lists& lists, int first, int last, ListFacts* facts) {
  for (int i = first + static_cast<int>(threadIdx.x); i < last; i += blockDim.x) {
    const int d = lists.row_of(i), r = i - d * lists.width, id = lists.ids[i];
    if (!is_finite(lists.lp[i])) continue;
    KDTREE_UNROLL_BY(1)
    for (int before = 0; before < r; ++before)
      if (lists.id(d, before) == id) {  // behind one that is not finite an earlier fault stands anyway
        atomicMin(&facts->fault, pack_fault(d, r, KDTREE_REQUEST_REPEATED));
        break;
      }
  }
}

// Ids that stand twice among the finite entries of a row, in the rows from `row` on, for which read_lists had no sets.
__device__ inline void check_other_rows(const Lists& lists, int row, const ListSpace& space, ListFacts* facts) {
  for (; row < lists.depths; row += space.set_rows) {
    const int first = row * lists.width, last = min(row + space.set_rows, lists.depths) * lists.width;
    for (int i = threadIdx.x; i < space.set_rows << space.set_bits; i += blockDim.x) space.sets[i] = -1;
    __syncthreads();
    bool repeated = false;
    for (int i = first + static_cast<int>(threadIdx.x); i < last; i += blockDim.x) {
      const int id = lists.ids[i];
      if (is_finite(lists.lp[i]) && id >= 0)
        repeated |= !add_id(space.sets + ((lists.row_of(i) - row) << space.set_bits), space.set_bits, id);
    }
    if (__syncthreads_or(repeated)) name_repeats(lists, first, last, facts);
  }
  __syncthreads();
}

// Reads every entry once, those of kBatch turns in one trip to memory, during which shared memory is prepared and
// `meanwhile` is called. `facts` need no preparation. reach: ranks that the budget can reach. Ends with a barrier.
template <typename F>
__device__ void read_lists(const Lists& lists, int reach, int vocab_size, const ListSpace& space, ListFacts* facts,
                           const F& meanwhile) {
  constexpr int kBatch = 4;
  const int entries = lists.depths * lists.width, threads = static_cast<int>(blockDim.x);
  const int set_rows = space.sets != nullptr ? min(space.set_rows, lists.depths) : 0;
  int low_bit = kNoBit;
  unsigned fault = kNoFault;
  bool positive = false, repeated = false;
  for (int first = 0; first < entries; first += kBatch * threads) {
    float values[kBatch], befores[kBatch];
    int32_t ids[kBatch];
    KDTREE_UNROLL
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + j * threads + static_cast<int>(threadIdx.x);
      values[j] = i < entries ? lists.lp[i] : 0.0f;
      befores[j] = i > 0 && i < entries ? lists.lp[i - 1] : 0.0f;
      ids[j] = i < entries && space.sets != nullptr ? lists.ids[i] : -1;
    }
    if (first == 0) {
      facts->clear(static_cast<int>(threadIdx.x), reach);
      KDTREE_UNROLL_BY(1)
      for (int i = threadIdx.x; i < set_rows << space.set_bits; i += threads) space.sets[i] = -1;
      meanwhile();
      __syncthreads();
    }
    KDTREE_UNROLL
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + j * threads + static_cast<int>(threadIdx.x);
      if (i >= entries) break;
      const int d = lists.row_of(i), r = i - d * lists.width;
      const float x = values[j];
      const bool finite = is_finite(x);
      if (space.sets != nullptr) {
        if (const int code = entry_fault(x, befores[j], ids[j], r, vocab_size))
          fault = min(fault, pack_fault(d, r, code));
        else if (finite && d < set_rows)
          repeated |= !add_id(space.sets + (d << space.set_bits), space.set_bits, ids[j]);
      }
      if (r >= reach) continue;
      if (!finite) {
        if (r == 0 || is_finite(befores[j])) atomicMin(&facts->lengths[d], r);
        continue;
      }
      if (x != 0) low_bit = min(low_bit, lowest_bit(x));
      positive |= x > 0;
      if (r >> space.near_bits == 0) space.near[(d << space.near_bits) + r] = __float_as_uint(x);
    }
  }
  low_bit = __reduce_min_sync(kAllLanes, low_bit);
  if (lane_id() == 0) atomicMin(&facts->low_bit, low_bit);
  if (__syncthreads_or(fault != kNoFault || positive || repeated)) {
    if (fault != kNoFault) atomicMin(&facts->fault, fault);
    if (positive) atomicOr(&facts->positive, 1);
    if (__syncthreads_or(repeated)) name_repeats(lists, 0, set_rows * lists.width, facts);
    __syncthreads();
  }
  if (space.sets != nullptr && set_rows < lists.depths) check_other_rows(lists, set_rows, space, facts);
}

}  // namespace kdtree
