// The shared memory of one tree: its size, computed on the host, and its pieces.
#pragma once

#include "common/port.h"
#include "kdtree_engine.h"

namespace kdtree {

constexpr int kCostBins = 32;              // of the estimate of how many nodes lie below a cost: one a lane
constexpr uint16_t kNone = 0xffff;         // no node
constexpr size_t kMostShared = 96 * 1024;  // of a block: every architecture has as much

// The kernel exists for a few numbers of threads, each for budgets up to a largest one: the places of its arrays in
// shared memory are constants.
__host__ __device__ constexpr int largest_budget(int threads) {
  return threads == 256 ? 64 : threads == 512 ? 384 : KDTREE_MAX_BUDGET;
}
constexpr int threads_of(int budget) { return budget <= 64 ? 256 : budget <= 384 ? 512 : 1024; }

struct alignas(16) Four {
  uint32_t of[4];
};
struct alignas(8) Pair {
  uint32_t of[2];
};

// Room for expanded nodes: the B best are among them.
__host__ __device__ constexpr int room_of(int budget) { return budget <= 64 ? 4 * budget + 64 : 2 * budget + 192; }

// Nodes as they are found (both routes), in parallel arrays over the expanded index, and their order.
template <int kThreads>
struct alignas(16) TreeScratch {
  static constexpr int kBudget = largest_budget(kThreads), kNodes = room_of(kBudget), kBuckets = 2 * kThreads;
  static_assert(kBudget <= kThreads && kNodes < kNone, "a thread for every rank, and indices fit");

  uint32_t buckets[kBuckets];  // of the sort: counts, then starts
  uint32_t costs[kNodes];      // -score in units of the lowest bit
  uint16_t parents[kNodes];    // expanded index, kNone: the root
  uint16_t ranks[kNodes];
  uint16_t starts[kNodes];             // first child, if there is one
  uint16_t places[kNodes];             // place in its bucket, then place in the order; >= B: not in the tree
  uint16_t order[kBudget];             // expanded index by place
  uint8_t depths[kNodes];              // 0: depth 1
  Pair depth_sizes[KDTREE_MAX_DEPTH];  // of expand: nodes of a depth, and those of them that have children

  // By the first warp.
  __device__ void clear_sizes() {
    if (threadIdx.x < KDTREE_MAX_DEPTH) depth_sizes[threadIdx.x] = Pair{};
  }

  // Of expand: nodes that have children. Places are known later.
  __device__ uint16_t* queue() { return places; }

  // What lies behind, in turn: the estimate's counts, and at the end the costs of list entries; the members of
  // buckets; the serial route's candidates; output rows on their way.
  __device__ unsigned char* rest() { return reinterpret_cast<unsigned char*>(this + 1); }
};

}  // namespace kdtree
