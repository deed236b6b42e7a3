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
  if (of_lanes) {
    KDTREE_UNROLL_BY(1)
    for (int step = 1; step < lanes; step *= 2) own = max(own, __shfl_xor_sync(kAllLanes, own, step));
    if (first) maxima[lane_id() >> lane_bits] = static_cast<uint16_t>(order_of(own) >> 16);
    return;
  }
  float greatest[kSteps];
  KDTREE_UNROLL
  for (int s = 0; s < kSteps; ++s) {  // at most two lanes
    const float other = __shfl_xor_sync(kAllLanes, top[s], 1);
    greatest[s] = lanes == 1 ? top[s] : max(top[s], other);
  }
  if (first) {
    KDTREE_UNROLL
    for (int s = 0; s < kSteps; ++s)
      maxima[(s * kWarp + lane_id()) >> lane_bits] = static_cast<uint16_t>(order_of(greatest[s]) >> 16);
  }
}
static_assert(kLaneGroupBits - 3 == 2, "groups of neighbouring octets have one or two of them");

// By a warp. kWell: lies_well is true.
template <bool kWell, typename T>
__device__ void scan_chunk(const T* row, unsigned chunk, unsigned size, int64_t row_number, const RowPlan& plan,
                           const RowScratch& scratch) {
  float x[kSteps][kOctet], top[kSteps];
  load_chunk<kWell>(row, chunk, size, x);
  KDTREE_UNROLL
  for (int s = 0; s < kSteps; ++s) {
    top[s] = x[s][0];
    KDTREE_UNROLL
    for (int i = 1; i < kOctet; ++i) top[s] = max_or_nan(top[s], x[s][i]);
  }
  const float own = max_or_nan(max_or_nan(top[0], top[1]), max_or_nan(top[2], top[3]));
  const unsigned greatest = __reduce_max_sync(kAllLanes, own != own ? kOrderOfNaN : order_of(own));
  const int64_t at = row_number * plan.chunks + chunk;
  ChunkSum sum{0, kNoExponent};
  if (greatest >= kOrderOfInfinity) {
    unsigned fault = 0xffffffffu;
    KDTREE_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      KDTREE_UNROLL
      for (int i = 0; i < kOctet; ++i)
        if (!(x[s][i] < __uint_as_float(0x7f800000u)))
          fault = min(fault, chunk * kChunk + s * kStep + lane_id() * kOctet + i);
    }
    fault = __reduce_min_sync(kAllLanes, fault);
    if (lane_id() == 0) scratch.faults[at] = fault;
  } else {
    if (plan.groups > 0)  // before the sum: it needs fewer and fewer of the logits
      write_maxima(
          x, top, own, plan.group_bits,
          scratch.maxima + row_number * plan.row_groups + static_cast<int64_t>(chunk) * (kChunk >> plan.group_bits));
    sum = fast_sum(x, greatest);
  }
  if (lane_id() == 0) {
    scratch.tops[at] = greatest;
    scratch.sums[at] = sum.sum;
    scratch.exponents[at] = sum.exponent;
  }
}

// A block's part of a row: chunks part, part + parts, ... of its warps.
template <typename T>
__device__ void scan_part(const T* row, unsigned size, int64_t row_number, int part, int parts, const RowPlan& plan,
                          const RowScratch& scratch) {
  for (int chunk = part * warp_count() + warp_id(); chunk < plan.chunks; chunk += parts * warp_count()) {
    if (lies_well(row, static_cast<unsigned>(chunk), size))
      scan_chunk<true>(row, static_cast<unsigned>(chunk), size, row_number, plan, scratch);
    else
      scan_chunk<false>(row, static_cast<unsigned>(chunk), size, row_number, plan, scratch);
  }
}

}  // namespace kdtree
