// The tree one node after the other, as the contract words it: by one warp with a list of pending candidates.
//
// For lists whose sums may round (ddtree-spec.md, "Facts that allow a parallel builder") or grow, and for ties so wide
// that no threshold cuts near the budget. Slow, and right for every list.
#pragma once

#include "kernels/tree_lists.h"
#include "kernels/tree_scratch.h"

namespace kdtree {

struct Candidate {
  double score;
  uint16_t parent;  // expanded index, kNone: the root
  uint16_t rank;
  uint16_t maker;  // the sibling before it, or its parent for rank 0
  uint16_t depth;  // 0: depth 1; kNone: an empty slot
};

// What SerialTree takes of the rest of the scratch.
__host__ __device__ constexpr size_t serial_bytes(int budget) {
  return (static_cast<size_t>(budget) + 2) * (sizeof(Candidate) + sizeof(double));
}

template <typename Scratch>
struct SerialTree {
  Scratch& s;
  Candidate* pending;  // [B + 2] slot i belongs to lane i % 32
  double* scores;      // [B]

  __device__ SerialTree(Scratch& scratch, int budget)
      : s(scratch),
        pending(reinterpret_cast<Candidate*>(scratch.rest())),
        scores(reinterpret_cast<double*>(pending + budget + 2)) {}

  // Whether slot a comes before slot b; an empty one never does, and -1 is none. A candidate waits only after its
  // prefix became a node, so of two none extends the other.
  __device__ bool before(int a, int b) const {
    if (a < 0 || pending[a].depth == kNone) return false;
    if (b < 0 || pending[b].depth == kNone) return true;
    const Candidate x = pending[a], y = pending[b];
    if (x.score != y.score) return x.score > y.score;
    int rank_x = x.rank, rank_y = y.rank, up_x = x.parent, up_y = y.parent, difference = 0;
    KDTREE_UNROLL_BY(1)
    for (int d = x.depth; d > y.depth; --d, up_x = s.parents[up_x]) rank_x = s.ranks[up_x];
    KDTREE_UNROLL_BY(1)
    for (int d = y.depth; d > x.depth; --d, up_y = s.parents[up_y]) rank_y = s.ranks[up_y];
    for (;; up_x = s.parents[up_x], up_y = s.parents[up_y]) {
      if (rank_x != rank_y) difference = rank_x - rank_y;  // the difference nearest to the root decides
      if (up_x == up_y) break;
      rank_x = s.ranks[up_x];
      rank_y = s.ranks[up_y];
    }
    return difference < 0;
  }

  // Called by one whole warp. Fills parents, ranks, depths, places, order, scores; starts: first child, costs: next
  // sibling, kNone where there is none. Returns the number of nodes.
  __device__ int build(const Lists& lists, const int* lengths, int budget) {
    int size = 0, count = 0, own = -1;  // own: the best slot of this lane
    if (lists.depths > 0 && lengths[0] > 0 && budget > 0) {
      if (lane_id() == 0) {
        pending[0] = Candidate{static_cast<double>(lists.at(0, 0)), kNone, 0, kNone, 0};
        own = 0;
      }
      size = 1;
    }
    __syncwarp();
    while (count < budget) {
      int best = own;
      KDTREE_UNROLL_BY(1)
      for (int step = kWarp / 2; step > 0; step /= 2) {
        const int other = __shfl_xor_sync(kAllLanes, best, step);
        if (before(other, best)) best = other;
      }
      best = __shfl_sync(kAllLanes, best, 0);
      if (best < 0 || pending[best].depth == kNone) break;
      const Candidate node = pending[best];
      const int d = node.depth, r = node.rank;
      const bool sibling = r + 1 < lengths[d], child = d + 1 < lists.depths && lengths[d + 1] > 0;
      const int child_slot = sibling ? size : best;
      __syncwarp();
      if (lane_id() == 0) {
        s.parents[count] = node.parent;
        s.ranks[count] = node.rank;
        s.depths[count] = static_cast<uint8_t>(d);
        s.places[count] = s.order[count] = static_cast<uint16_t>(count);
        s.starts[count] = kNone;
        s.costs[count] = kNone;
        scores[count] = node.score;
        if (node.maker != kNone) {
          if (r == 0)
            s.starts[node.maker] = static_cast<uint16_t>(count);
          else
            s.costs[node.maker] = static_cast<uint32_t>(count);
        }
        pending[best].depth = kNone;
        if (sibling) {
          const double beside =
              (node.score - static_cast<double>(lists.at(d, r))) + static_cast<double>(lists.at(d, r + 1));
          pending[best] =
              Candidate{beside, node.parent, static_cast<uint16_t>(r + 1), static_cast<uint16_t>(count), node.depth};
        }
        if (child)
          pending[child_slot] =
              Candidate{node.score + static_cast<double>(lists.at(d + 1, 0)), static_cast<uint16_t>(count), 0,
                        static_cast<uint16_t>(count), static_cast<uint16_t>(d + 1)};
      }
      __syncwarp();
      if (sibling && child) ++size;
      ++count;
      if (lane_id() == best % kWarp) {
        own = -1;
        for (int slot = lane_id(); slot < size; slot += kWarp)
          if (before(slot, own)) own = slot;
      } else if (child && lane_id() == child_slot % kWarp && before(child_slot, own)) {
        own = child_slot;
      }
    }
    return count;
  }
};

}  // namespace kdtree
