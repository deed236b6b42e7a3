// The one pass over the logits: of every chunk its sum, the maxima of its groups and its first NaN or +inf, by one
// warp.
#pragma once

#include "kernels/topk_sum.h"

namespace kdtree {

// The greatest logits of a chunk's groups, by a warp. top: of each of the lane's octets; own: of all of them.
__device__ inline void write_maxima(const float (&x)[kSteps][kOctet], const float (&top)[kSteps], float own,
                                    int group_bits, uint16_t* maxima) {
  if (group_bits == 0) {
    KDTREE_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      unsigned words[kOctet / 2];
      KDTREE_UNROLL
      for (int i = 0; i < kOctet / 2; ++i)
        words[i] = order_of(x[s][2 * i]) >> 16 | (order_of(x[s][2 * i + 1]) & 0xffff0000u);
      *reinterpret_cast<uint4*>(maxima + s * kStep + lane_id() * kOctet) =
          uint4{words[0], words[1], words[2], words[3]};
    }
    return;
  }
  const bool of_lanes = group_bits >= kLaneGroupBits;
  const int lane_bits = group_bits - (of_lanes ? kLaneGroupBits : 3), lanes = 1 << lane_bits;
  const bool first = (lane_id() & (lanes - 1)) == 0;
  maxima += lane_id() >> lane_bits;
  if (of_lanes) {
    KDTREE_UNROLL_BY(1)
    for (int step = 1; step < lanes; step *= 2) own = max(own, __shfl_xor_sync(kAllLanes, own, step));
    if (first) *maxima = static_cast<uint16_t>(order_of(own) >> 16);
    return;
  }
  KDTREE_UNROLL
  for (int s = 0; s < kSteps; ++s) {  // at most two lanes
    const float other = __shfl_xor_sync(kAllLanes, top[s], 1);
    const float greatest = lanes == 1 ? top[s] : max(top[s], other);
    if (first) *maxima = static_cast<uint16_t>(order_of(greatest) >> 16);
    maxima += kWarp >> lane_bits;
  }
}
static_assert(kLaneGroupBits - 3 == 2, "groups of neighbouring octets have one or two of them");

// By a warp. kWhole: the chunk is one of whole_chunks. sums, faults: of the row's chunks; maxima: of its groups, NULL:
// none are asked for.
template <bool kWhole, typename T>
__device__ void scan_chunk(const T* row, unsigned chunk, unsigned size, int group_bits, ChunkSum* sums,
                           unsigned* faults, uint16_t* maxima) {
  float x[kSteps][kOctet], top[kSteps];
  load_chunk<kWhole>(row, chunk, size, x);
  KDTREE_UNROLL
  for (int s = 0; s < kSteps; ++s) {
    top[s] = x[s][0];
    KDTREE_UNROLL
    for (int i = 1; i < kOctet; ++i) top[s] = max_or_nan(top[s], x[s][i]);
  }
  const float own = max_or_nan(max_or_nan(top[0], top[1]), max_or_nan(top[2], top[3]));
  // Of every chunk, for maxima are read ahead of whether their row has a fault; and before the sum, which needs fewer
  // and fewer of the logits.
  if (maxima != nullptr) write_maxima(x, top, own, group_bits, maxima + chunk * (kChunk >> group_bits));
  const unsigned greatest = __reduce_max_sync(kAllLanes, own != own ? kOrderOfNaN : order_of(own));
  if (greatest >= kOrderOfInfinity) {
    unsigned id = 0xffffffffu;
    KDTREE_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      KDTREE_UNROLL
      for (int i = 0; i < kOctet; ++i)
        if (!(x[s][i] < __uint_as_float(0x7f800000u)))
          id = min(id, chunk * kChunk + s * kStep + lane_id() * kOctet + i);
    }
    id = __reduce_min_sync(kAllLanes, id);
    if (lane_id() == 0) {
      faults[chunk] = id;
      sums[chunk] = {0, kNoExponent, greatest};
    }
    return;
  }
  const ChunkSum fast = fast_sum(x, greatest);
  if (lane_id() == 0) sums[chunk] = fast;
}

// A block's part of a row: chunks part, part + parts, ... of its warps.
template <typename T>
__device__ void scan_part(const T* row, unsigned size, int64_t row_number, int part, int parts, const RowPlan& plan,
                          const RowScratch& scratch) {
  ChunkSum* const sums = scratch.sums + row_number * plan.chunks;
  unsigned* const faults = scratch.faults + row_number * plan.chunks;
  uint16_t* const maxima = plan.groups > 0 ? scratch.maxima + row_number * plan.row_groups : nullptr;
  const unsigned chunks = static_cast<unsigned>(plan.chunks), step = static_cast<unsigned>(parts * warp_count());
  const unsigned whole = whole_chunks(row, size);
  unsigned chunk = static_cast<unsigned>(part * warp_count() + warp_id());
  KDTREE_UNROLL_BY(1)
  for (; chunk < min(whole, chunks); chunk += step)
    scan_chunk<true>(row, chunk, size, plan.group_bits, sums, faults, maxima);
  KDTREE_UNROLL_BY(1)
  for (; chunk < chunks; chunk += step) scan_chunk<false>(row, chunk, size, plan.group_bits, sums, faults, maxima);
}

}  // namespace kdtree
