// The shared memory of one tree: its size, computed on the host, and its pieces.
#pragma once

#include "common/port.h"
#include "kdtree_engine.h"

namespace kdtree {

constexpr int kBins = 64;                  // of the estimate of how many nodes lie below a cost
constexpr int kMostItems = 3;              // items a thread handles in a scan
constexpr uint16_t kNone = 0xffff;         // no node
constexpr size_t kMostShared = 96 * 1024;  // of a block: every architecture has as much

// Sizes that follow from the budget B alone.
struct TreeSizes {
  int threads;
  int nodes;    // room for expanded nodes: the B best are among them
  int buckets;  // of the sort; a power of two

  __host__ __device__ constexpr explicit TreeSizes(int budget)
      : threads(budget <= 32    ? 128
                : budget <= 128 ? 256
                : budget <= 384 ? 512
                                : 1024),
        nodes(2 * budget + 64),
        buckets(budget <= 64    ? 128
                : budget <= 128 ? 256
                : budget <= 256 ? 512
                : budget <= 512 ? 1024
                                : 2048) {}
};

// The threads that a call has for its budget scan all that a request of any smaller one brings, and indices fit.
constexpr bool sizes_fit() {
  for (int budget = 0; budget <= KDTREE_MAX_BUDGET; ++budget) {
    const TreeSizes sizes(budget);
    const int items = kMostItems * sizes.threads;
    if (sizes.nodes > items || sizes.buckets > items || sizes.nodes >= kNone) return false;
  }
  return true;
}
static_assert(sizes_fit(), "a thread handles kMostItems at most");

// Nodes as they are found (both routes), in parallel arrays over the expanded index, and their order.
struct TreeScratch {
  uint32_t* costs;      // [nodes] -score in units of the lowest bit
  uint32_t* buckets;    // [buckets] counts, then starts
  uint16_t* parents;    // [nodes] expanded index, kNone: the root
  uint16_t* ranks;      // [nodes]
  uint16_t* starts;     // [nodes] first child, if there is one
  uint16_t* places;     // [nodes] place in its bucket, then place in the order; >= B: not in the tree
  uint16_t* order;      // [B] expanded index by place
  uint8_t* depths;      // [nodes] 0: depth 1
  unsigned char* rest;  // what is left, in turn: the estimate's counts and costs of list entries; the members of
                        // buckets; the serial route's candidates
  size_t rest_bytes;

  static __host__ __device__ size_t fixed_bytes(int budget) {
    const TreeSizes sizes(budget);
    return round_up(sizes.nodes * (sizeof(uint32_t) + 4 * sizeof(uint16_t) + 1) + sizes.buckets * sizeof(uint32_t) +
                        budget * sizeof(uint16_t),
                    16);
  }

  __device__ TreeScratch(unsigned char* at, size_t bytes, int budget) {
    const TreeSizes sizes(budget);
    costs = reinterpret_cast<uint32_t*>(at);
    buckets = costs + sizes.nodes;
    parents = reinterpret_cast<uint16_t*>(buckets + sizes.buckets);
    ranks = parents + sizes.nodes;
    starts = ranks + sizes.nodes;
    places = starts + sizes.nodes;
    order = places + sizes.nodes;
    depths = reinterpret_cast<uint8_t*>(order + budget);
    rest = at + fixed_bytes(budget);
    rest_bytes = bytes - fixed_bytes(budget);
  }
};

}  // namespace kdtree
