// Reductions and scans over the threads of a block of up to 32 full warps.
#pragma once

#include "common/port.h"

namespace kdtree {

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }
__device__ inline int warp_count() { return static_cast<int>(blockDim.x) / kWarp; }

// Sum of `value` over the lanes up to this one.
__device__ inline unsigned warp_inclusive_sum(unsigned value) {
  for (int step = 1; step < kWarp; step *= 2) {
    const unsigned below = __shfl_up_sync(kAllLanes, value, step);
    if (lane_id() >= step) value += below;
  }
  return value;
}

struct Scanned {
  unsigned before;  // sum over the threads below this one
  unsigned total;
};

// Exclusive sum over the block, with one barrier. Calls alternate between the two halves of `totals` [2][32]: the half
// of a call is free again after the barrier of the next.
class BlockScan {
 public:
  __device__ explicit BlockScan(unsigned (*totals)[kWarp]) : totals_(totals) {}

  __device__ Scanned operator()(unsigned value) {
    unsigned* totals = totals_[turn_];
    turn_ ^= 1;
    const unsigned inclusive = warp_inclusive_sum(value);
    if (lane_id() == kWarp - 1) totals[warp_id()] = inclusive;
    __syncthreads();
    const unsigned of_warp = lane_id() < warp_count() ? totals[lane_id()] : 0u;
    const unsigned below = __reduce_add_sync(kAllLanes, lane_id() < warp_id() ? of_warp : 0u);
    return Scanned{below + inclusive - value, __reduce_add_sync(kAllLanes, of_warp)};
  }

 private:
  unsigned (*totals_)[kWarp];
  int turn_ = 0;
};

}  // namespace kdtree
