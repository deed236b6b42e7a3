// How the top-k stage cuts a row of logits, and what its first kernel leaves for the second.
//
// Which lane holds which id depends on the id alone, never on where the row lies in memory, on how many rows there are
// or on how many blocks share one: so a row's sums have the same bits in every batch and at every alignment.
#pragma once

#include "kernels/choice_row.h"
#include "kernels/topk_wide.h"

namespace kdtree {

constexpr int kOctet = 8;               // neighbouring ids that one lane holds
constexpr int kSteps = 4;               // octets of a lane
constexpr int kStep = kWarp * kOctet;   // ids from a lane's octet to its next
constexpr int kChunk = kSteps * kStep;  // ids that one warp sums
constexpr int kNoExponent = -(1 << 30);

// Of one chunk: the sum of exp(logit) in units of 2^exponent and FastExp::rest, and the order of the greatest logit.
struct __align__(16) ChunkSum {
  double sum;
  int exponent;  // kNoExponent: nothing was summed
  unsigned top;  // from kOrderOfInfinity on the chunk has a fault
};

// Of one chunk: the sum of exp(logit - peak) over the logits below the row's peak, and how many equal it.
struct PreciseSum {
  Wide sum;
  unsigned peaks;
};

// How rows of a call are cut. The same for every number of rows.
//
// Of each group of ids the greatest logit is kept. Small groups are many maxima to look through, large ones many ids to
// look at again: near the square root of V / K both are few. There are at least 2 K of them, so that the K-th greatest
// maximum is near the K-th greatest logit.
struct RowPlan {
  int chunks;
  int group_bits;      // log2 of the ids of a group: 0, or 3 to 8
  int64_t groups;      // of a row; 0: k is 0
  int64_t row_groups;  // from row to row

  RowPlan(int vocab_size, int k)
      : chunks(static_cast<int>(ceil_div(vocab_size, kChunk))), group_bits(0), groups(0), row_groups(0) {
    if (k == 0) return;
    group_bits = bits_of_group(vocab_size, k);
    const int64_t all = static_cast<int64_t>(chunks) * (kChunk >> group_bits);
    groups = group_bits == 0 ? vocab_size : all;
    row_groups = ceil_div(all, 8) * 8;  // loads of 16 bytes
  }

 private:
  static int bits_of_group(int64_t vocab_size, int64_t k) {
    if (vocab_size <= 2 * kChunk || vocab_size < 2 * kOctet * k) return 0;
    int bits = 3;
    while (bits < 8 && k << (2 * bits + 2) <= 2 * vocab_size) ++bits;
    return bits;
  }
};

// From kLaneGroupBits on a group is all that some neighbouring lanes have of a chunk, which costs the least to reduce;
// smaller ones are neighbouring octets.
constexpr int kLaneGroupBits = 5;
static_assert(1 << kLaneGroupBits == kSteps * kOctet);

// First id of octet i of a group of 2^bits ids, bits >= 3.
__device__ inline unsigned octet_of_group(unsigned group, unsigned i, int bits) {
  if (bits < kLaneGroupBits) return (group << bits) + i * kOctet;
  const int lane_bits = bits - kLaneGroupBits;
  const unsigned groups = kChunk >> bits, step = i >> lane_bits;
  const unsigned lane = ((group & (groups - 1)) << lane_bits) + (i & ((1u << lane_bits) - 1));
  return (group - (group & (groups - 1))) * (1u << bits) + step * kStep + lane * kOctet;
}

// [rows, ...] of the workspace, rows counted over [R, L].
struct RowScratch {
  ChunkSum* sums;       // [rows, chunks]
  unsigned* faults;     // [rows, chunks] lowest id with NaN or +inf, where there is one
  PreciseSum* precise;  // [rows, chunks]
  unsigned* arrived;    // [rows] blocks that are done with their part of the row
  unsigned* finished;   // [R] behind `arrived`: rows of a request that are done
  uint16_t* maxima;     // [rows, row_groups] upper halves of the orders of the greatest logits
  size_t bytes;

  RowScratch(void* base, int64_t rows, const RowPlan& plan) : bytes(0) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(base);
    sums = take<ChunkSum>(start, rows * plan.chunks);
    faults = take<unsigned>(start, rows * plan.chunks);
    precise = take<PreciseSum>(start, rows * plan.chunks);
    arrived = take<unsigned>(start, 2 * rows);
    finished = arrived + rows;
    maxima = take<uint16_t>(start, rows * plan.row_groups);
  }

 private:
  template <typename T>
  T* take(uintptr_t start, int64_t count) {
    T* const at = reinterpret_cast<T*>(start + bytes);
    bytes += round_up(static_cast<size_t>(count) * sizeof(T), 256);
    return at;
  }
};

// The inverse of order_of.
__device__ inline float value_of(unsigned order) { return __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order); }

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ inline void widen_words(const unsigned (&words)[4], float (&x)[kOctet]) {
  KDTREE_UNROLL
  for (int i = 0; i < kOctet; ++i) x[i] = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
}
__device__ inline void widen_words(const unsigned (&words)[8], float (&x)[kOctet]) {
  KDTREE_UNROLL
  for (int i = 0; i < kOctet; ++i) x[i] = __uint_as_float(words[i]);
}

// The octet of ids first, first + 1, ...; -inf past the row's end.
template <typename T>
__device__ void load_octet_by_element(const T* row, unsigned first, unsigned size, float (&x)[kOctet]) {
  KDTREE_UNROLL
  for (int i = 0; i < kOctet; ++i) x[i] = first + i < size ? widen(__ldg(row + first + i)) : minus_infinity();
}

// The octet at `at`, from the loads of 16 bytes that it touches: kVectors, one more than it needs unless `skip` is 0.
template <typename T, int kVectors>
__device__ void load_octet_by_vector(const T* at, unsigned skip, float (&x)[kOctet]) {
  constexpr int kWords = kOctet * sizeof(T) / 4;
  const uint4* const from = reinterpret_cast<const uint4*>(reinterpret_cast<const unsigned char*>(at) - skip);
  unsigned loaded[4 * kVectors];
  KDTREE_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    const uint4 four = __ldg(from + v);
    loaded[4 * v] = four.x;
    loaded[4 * v + 1] = four.y;
    loaded[4 * v + 2] = four.z;
    loaded[4 * v + 3] = four.w;
  }
  if constexpr (4 * kVectors > kWords) {
    if (skip & 8) {
      KDTREE_UNROLL
      for (int w = 0; w < kWords + 2; ++w) loaded[w] = loaded[w + 2];
    }
    if (skip & 4) {
      KDTREE_UNROLL
      for (int w = 0; w < kWords + 1; ++w) loaded[w] = loaded[w + 1];
    }
    if (skip & 2) {
      KDTREE_UNROLL
      for (int w = 0; w < kWords; ++w) loaded[w] = loaded[w] >> 16 | loaded[w + 1] << 16;
    }
  }
  unsigned words[kWords];
  KDTREE_UNROLL
  for (int w = 0; w < kWords; ++w) words[w] = loaded[w];
  widen_words(words, x);
}

// Bytes by which the row lies past a boundary of 16. The same for each of its octets.
template <typename T>
__device__ unsigned skip_of(const T* row) {
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(row) % 16);
}

template <typename T>
__device__ void load_octet(const T* row, unsigned first, unsigned size, float (&x)[kOctet]) {
  if (skip_of(row) == 0 && first + kOctet <= size)
    load_octet_by_vector<T, kOctet * sizeof(T) / 16>(row + first, 0, x);
  else
    load_octet_by_element(row, first, size, x);
}

// `value`, but not before `x` is there: loads that hang on it do not take registers yet.
__device__ inline unsigned after(float x, unsigned value) {
#ifdef KDTREE_HOST
  (void)x;
#else
  asm volatile("" : "+r"(value) : "f"(x));
#endif
  return value;
}

// Chunks of a row, from the first on, that lie as loads of 16 bytes want it: on their boundary, and whole.
template <typename T>
__device__ unsigned whole_chunks(const T* row, unsigned size) {
  return skip_of(row) == 0 ? size / kChunk : 0;
}

// The lane's octets of a chunk. Loads of 16 bytes wherever none of them leaves the row; all of a whole chunk, half of
// those of another, are started before the first is used. kWhole: it is one of whole_chunks.
template <bool kWhole, typename T>
__device__ void load_chunk(const T* row, unsigned chunk, unsigned size, float (&x)[kSteps][kOctet]) {
  constexpr int kVectors = kOctet * sizeof(T) / 16;
  constexpr unsigned kMargin = 16 / sizeof(T);
  unsigned first = chunk * kChunk + lane_id() * kOctet;
  const unsigned skip = skip_of(row);
  if constexpr (kWhole) {
    const T* const at = row + first;
    KDTREE_UNROLL
    for (int s = 0; s < kSteps; ++s) load_octet_by_vector<T, kVectors>(at + s * kStep, 0, x[s]);
  } else if (chunk > 0 && (chunk + 1) * kChunk + kMargin <= size) {
    KDTREE_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      load_octet_by_vector<T, kVectors + 1>(row + first + s * kStep, skip, x[s]);
      if (s == kSteps / 2 - 1) first = after(x[s][0], first);
    }
  } else {
    KDTREE_UNROLL
    for (int s = 0; s < kSteps; ++s) load_octet_by_element(row, first + s * kStep, size, x[s]);
  }
}

}  // namespace kdtree
