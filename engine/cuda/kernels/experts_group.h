// The pairs (row, slot) of a pass, sorted by the expert that they chose, in the order of the rows, and cut into tiles.
#pragma once

#include "common/block.h"
#include "kernels/layers.h"

namespace kdtree {

constexpr int kMostExperts = 512;
constexpr int kMostChosen = 32;
constexpr int kGroupWarps = kMostExperts / kWarp;  // a thread for an expert

struct ExpertTile {
  int32_t expert, first, rows;  // pairs order[first..first+rows-1]
};

// tile_rows: the most pairs of a tile.
struct ExpertGroups {
  const int32_t* ids;  // [rows, chosen]
  const Rows* used;    // in the kernel's parameters; NULL: all rows
  int rows, chosen, tile_rows;
  int32_t* tile_count;  // [1]
  ExpertTile* tiles;    // [most_expert_tiles]
  int32_t* order;       // [rows * chosen] row * chosen + slot, grouped by expert
};

// A pair starts a tile at the latest when tile_rows of its expert are before it, or when it is its expert's first.
inline int64_t most_expert_tiles(int64_t pairs, int experts, int tile_rows) {
  const int64_t full = pairs / tile_rows + (experts < pairs ? experts : pairs);
  return full < pairs ? full : pairs;
}

// The workspace of a mixture of experts, whose gated values are kept as Mid.
template <typename Mid>
struct ExpertScratch {
  int32_t* tile_count;  // [1]
  ExpertTile* tiles;    // [most_tiles], with room for those of least_rows
  int32_t* order;       // [pairs] row * chosen + slot, grouped by expert
  Mid* mid;             // [pairs, width]
  float* out;           // [pairs, hidden]
  int64_t most_tiles;
  size_t bytes;

  // least_rows: of a tile, whatever the pass; so that more pairs never need less room.
  ExpertScratch(void* workspace, int64_t pairs, int hidden, int width, int experts, int tile_rows, int least_rows)
      : most_tiles(most_expert_tiles(pairs, experts, tile_rows)), bytes(0) {
    unsigned char* const base = static_cast<unsigned char*>(workspace);
    const auto take = [&](size_t size) {
      unsigned char* const place = base == nullptr ? nullptr : base + bytes;
      bytes += round_up(size, 256);
      return place;
    };
    tile_count = reinterpret_cast<int32_t*>(take(sizeof(int32_t)));
    tiles = reinterpret_cast<ExpertTile*>(
        take(sizeof(ExpertTile) * static_cast<size_t>(most_expert_tiles(pairs, experts, least_rows))));
    order = reinterpret_cast<int32_t*>(take(sizeof(int32_t) * static_cast<size_t>(pairs)));
    mid = reinterpret_cast<Mid*>(take(sizeof(Mid) * static_cast<size_t>(pairs) * width));
    out = reinterpret_cast<float*>(take(sizeof(float) * static_cast<size_t>(pairs) * hidden));
  }
};

// Adds pairs begin..end-1 to counts [experts], in their order, by one warp. order: the place of each is what its
// expert's count was; NULL: they are only counted.
__device__ inline void count_expert_pairs(const ExpertGroups& g, int begin, int end, int* counts, int32_t* order) {
  for (int first = begin; first < end; first += kWarp) {
    const int pair = first + lane_id();
    const bool counted = pair < end && (g.used == nullptr || g.used->used(pair / g.chosen));
    const int expert = counted ? g.ids[pair] : -1;
    const unsigned same = __match_any_sync(kAllLanes, expert);
    const int leader = __ffs(static_cast<int>(same)) - 1;
    int place = 0;
    if (counted && lane_id() == leader) {
      place = counts[expert];
      counts[expert] = place + __popc(same);
    }
    place = __shfl_sync(kAllLanes, place, leader) + __popc(same & ((1u << lane_id()) - 1));
    if (order != nullptr && counted) order[place] = pair;
    __syncwarp();
  }
}

// By one block of kGroupWarps warps: each counts and later places the pairs of its own stretch.
__device__ inline void group_expert_pairs(const ExpertGroups& g) {
  __shared__ int counts[kGroupWarps][kMostExperts];  // of each warp's stretch; then where its next pair goes
  __shared__ unsigned totals[2][kWarp];
  if (g.rows == 1) {  // no expert has two pairs
    const bool used = g.used == nullptr || g.used->used(0);
    const int slot = static_cast<int>(threadIdx.x);
    if (used && slot < g.chosen) {
      g.order[slot] = slot;
      g.tiles[slot] = {g.ids[slot], slot, 1};
    }
    if (slot == 0) *g.tile_count = used ? g.chosen : 0;
    return;
  }
  BlockScan scan(totals);
  const int warp = warp_id(), expert = static_cast<int>(threadIdx.x);
  const int pairs = g.rows * g.chosen;
  const int stretch = static_cast<int>(ceil_div(ceil_div(pairs, kGroupWarps), kWarp)) * kWarp;
  const int begin = min(warp * stretch, pairs), end = min(begin + stretch, pairs);
  for (int w = 0; w < kGroupWarps; ++w) counts[w][expert] = 0;
  __syncthreads();

  count_expert_pairs(g, begin, end, counts[warp], nullptr);
  __syncthreads();

  int count = 0;
  for (int w = 0; w < kGroupWarps; ++w) count += counts[w][expert];
  const Scanned place = scan(static_cast<unsigned>(count));
  int next = static_cast<int>(place.before);
  for (int w = 0; w < kGroupWarps; ++w) {
    const int here = counts[w][expert];
    counts[w][expert] = next;
    next += here;
  }
  const Scanned tile = scan(static_cast<unsigned>(ceil_div(count, g.tile_rows)));
  for (int i = 0; i * g.tile_rows < count; ++i) {
    const int first = static_cast<int>(place.before) + i * g.tile_rows;
    g.tiles[tile.before + static_cast<unsigned>(i)] = {expert, first, min(g.tile_rows, count - i * g.tile_rows)};
  }
  if (threadIdx.x == 0) *g.tile_count = static_cast<int>(tile.total);
  __syncthreads();

  count_expert_pairs(g, begin, end, counts[warp], g.order);
}

}  // namespace kdtree
