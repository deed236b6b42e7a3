// The lists of one request: one look at every entry that checks it, keeps it in shared memory and finds what decides
// which way the tree is built.
#pragma once

#include "common/block.h"
#include "kernels/request.h"

namespace kdtree {

// Division by a number that the host knows: by any other it costs more than a read of shared memory.
struct Divider {
  uint32_t inverse;

  // i * inverse / 2^31 is i / divisor, rounded down, as long as i * divisor < 2^31.
  static Divider by(int divisor) { return {divisor > 0 ? (1u << 31) / static_cast<uint32_t>(divisor) + 1 : 0}; }
  __device__ int operator()(int i) const { return static_cast<int>(static_cast<uint64_t>(i) * inverse >> 31); }
};

// Row d holds the candidates of depth d + 1. width: entries from row to row.
struct Lists {
  const float* lp;
  const int32_t* ids;
  int depths;
  int width;
  Divider row_of;  // row of entry i, of which there are 31 * 1024 at most

  __device__ float at(int d, int r) const { return lp[static_cast<size_t>(d) * width + r]; }
  __device__ int32_t id(int d, int r) const { return ids[static_cast<size_t>(d) * width + r]; }
};

constexpr unsigned kNoFault = 0xffffffffu;
constexpr uint32_t kMinusInfinityBits = 0xff800000u;
constexpr int kNoBit = 1000;  // lowest bit of zeros

// A fault as one number that orders by depth, then rank, then code.
__device__ inline unsigned pack_fault(int d, int r, int code) {
  return static_cast<unsigned>(d) << 16 | static_cast<unsigned>(r) << 4 | static_cast<unsigned>(code);
}

__device__ inline Outcome outcome_of(unsigned fault) {
  return {static_cast<int>(fault & 15u), static_cast<int>(fault >> 16) + 1, static_cast<int>(fault >> 4 & 0xfffu)};
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

// The ids of a row meet in 2^bits slots, two for each.
__host__ __device__ constexpr int set_bits(int width) {
  int bits = 5;
  while ((1 << bits) < 2 * width) ++bits;
  return bits;
}

// Where read_lists puts things.
struct ListSpace {
  uint32_t* near;  // [depths, 2^near_bits] bits of the first entries of the rows; minus infinity where the budget ends
  int near_bits;
  int* sets;  // [set_rows, 2^set_bits] ranks by id; nullptr where nothing is checked
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

// Whether an id stands twice among the finite entries of one of `rows` rows from `row` on, as far as this thread can
// tell. Every entry puts its rank into the slot of its id and looks who is there behind a barrier: itself, an equal id,
// or another id, and then it tries again with the others that were displaced. That is an exchange an entry, where a
// search for a free slot would be a compare-and-swap a step.
// A slot's last one always finds itself, so the rounds end.
__device__ inline bool sees_repeat(const Lists& lists, int row, int rows, const ListSpace& space) {
  const int first = row * lists.width + static_cast<int>(threadIdx.x), last = (row + rows) * lists.width;
  const int threads = static_cast<int>(blockDim.x);
  uint32_t factor = 2654435761u;  // the high bits of a product choose: multiples of a power of two differ there
  const auto slot_of = [&](int d, int id) {
    return &space.sets[((d - row) << space.set_bits) + (static_cast<uint32_t>(id) * factor >> (32 - space.set_bits))];
  };
  unsigned left = 0;  // the thread's entries that have not found their place, a bit each
  for (int i = first, bit = 0; i < last; i += threads, ++bit)
    if (is_finite(lists.lp[i]) && lists.ids[i] >= 0) left |= 1u << bit;
  bool repeated = false;
  do {
    for (unsigned bits = left; bits != 0; bits &= bits - 1) {
      const int i = first + (__ffs(static_cast<int>(bits)) - 1) * threads, d = lists.row_of(i);
      atomicExch(slot_of(d, lists.ids[i]), i - d * lists.width);
    }
    __syncthreads();
    for (unsigned bits = left; bits != 0; bits &= bits - 1) {
      const int i = first + (__ffs(static_cast<int>(bits)) - 1) * threads, d = lists.row_of(i), id = lists.ids[i];
      const int there = *slot_of(d, id);
      if (there != i - d * lists.width && lists.id(d, there) != id) continue;
      repeated |= there != i - d * lists.width;
      left &= ~(bits & -bits);
    }
    factor = factor * 1664525u + 2u;  // odd again
  } while (__syncthreads_or(left != 0));
  return repeated;
}

// Names the ids that stand twice among the finite entries of a row. Ends with a barrier.
__device__ inline void check_repeats(const Lists& lists, const ListSpace& space, ListFacts* facts) {
  const int most = min(space.set_rows, kWarp * static_cast<int>(blockDim.x) / lists.width);
  for (int row = 0; row < lists.depths; row += most) {
    const int rows = min(most, lists.depths - row);
    if (__syncthreads_or(sees_repeat(lists, row, rows, space)))
      name_repeats(lists, row * lists.width, (row + rows) * lists.width, facts);
  }
  __syncthreads();
}

// Reads every entry once, and checks it if kChecks; those of kBatch turns in one trip to memory, during which shared
// memory is prepared and `meanwhile` is called. `facts` need no preparation. reach: ranks that the budget can reach.
// Ends with a barrier.
template <bool kChecks, typename F>
__device__ void read_lists(const Lists& lists, int reach, int vocab_size, const ListSpace& space, ListFacts* facts,
                           const F& meanwhile) {
  constexpr int kBatch = kChecks ? 4 : 8;
  const int entries = lists.depths * lists.width, threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x), near_width = 1 << space.near_bits;
  int low_bit = kNoBit;
  unsigned fault = kNoFault;
  bool positive = false;
  for (int first = 0; first < entries; first += kBatch * threads) {
    float values[kBatch], befores[kBatch];
    int32_t ids[kBatch];
    KDTREE_UNROLL
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + j * threads + thread;
      values[j] = i < entries ? lists.lp[i] : 0.0f;
      befores[j] = kChecks && i > 0 && i < entries ? lists.lp[i - 1] : 0.0f;
      ids[j] = kChecks && i < entries ? lists.ids[i] : -1;
    }
    if (first == 0) {
      facts->clear(thread, reach);
      if (reach < near_width && space.near != nullptr) {
        KDTREE_UNROLL_BY(1)
        for (int i = thread; i < lists.depths << space.near_bits; i += threads)
          if ((i & (near_width - 1)) >= reach) space.near[i] = kMinusInfinityBits;
      }
      meanwhile();
      __syncthreads();
    }
    KDTREE_UNROLL
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + j * threads + thread;
      const float x = values[j];
      const unsigned finite = __ballot_sync(kAllLanes, is_finite(x));
      if (i >= entries) continue;
      const int d = lists.row_of(i), r = i - d * lists.width;
      if constexpr (kChecks) {
        if (const int code = entry_fault(x, befores[j], ids[j], r, vocab_size))
          fault = min(fault, pack_fault(d, r, code));
      }
      if (r >= reach) continue;
      if (r < near_width) space.near[(d << space.near_bits) + r] = __float_as_uint(x);
      if (!is_finite(x)) {
        // Behind the first one of a row it says nothing, and there may be thousands.
        if (lane_id() == 0 || r == 0 || (finite >> (lane_id() - 1) & 1) != 0) atomicMin(&facts->lengths[d], r);
        continue;
      }
      if (x != 0) low_bit = min(low_bit, lowest_bit(x));
      positive |= x > 0;
    }
  }
  low_bit = __reduce_min_sync(kAllLanes, low_bit);
  if (lane_id() == 0) atomicMin(&facts->low_bit, low_bit);
  if (fault != kNoFault) atomicMin(&facts->fault, fault);
  if (positive) atomicOr(&facts->positive, 1);
  if constexpr (kChecks)
    check_repeats(lists, space, facts);
  else
    __syncthreads();
}

}  // namespace kdtree
