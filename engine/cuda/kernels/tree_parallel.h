// The tree by threshold, expansion and sort: exact, in a number of steps that grows with the depth, not with the
// budget.
//
// Every rank tuple has one score, so the order of popping is the order of (-score, rank tuple), and a parent never
// comes after its child as long as no log-probability is positive. All of them are whole multiples of one power of two,
// so a score is a whole cost. Costs of 32 bits are enough: float64 sums of up to 2^53 units are exact in any order
// (ddtree-spec.md), so the contract's order of operations gives every node up to the threshold just this score, and
// rounds no dearer one to below it. The steps:
//   bound     a cost below which B nodes lie for certain
//   estimate  histograms of the lists, convolved: how many nodes lie below which cost, and so a tighter threshold
//   expand    all nodes up to the threshold, depth by depth; their number must lie in [B, room], else another threshold
//   rank      each node's place by (cost, rank tuple), through buckets of cost
#pragma once

#include "kernels/tree_lists.h"
#include "kernels/tree_scratch.h"

namespace kdtree {

constexpr uint32_t kTooDear = 0xffffffffu;  // any cost that needs more than 32 bits
constexpr int kMostTries = 40;              // a bisection of 32 bits ends before

// Integer costs of list entries: those of the first ranks from shared memory, the rest from the list itself.
struct Costs {
  const Lists& lists;
  const int* lengths;
  double scale;
  uint32_t* near;
  int near_ranks;

  __device__ uint32_t far(int d, int r) const {
    const double cost = -static_cast<double>(lists.at(d, r)) * scale;
    return cost < kTooDear ? static_cast<uint32_t>(cost) : kTooDear;
  }
  __device__ uint32_t operator()(int d, int r) const { return r < near_ranks ? near[d * near_ranks + r] : far(d, r); }

  // How many entries of row d cost at most `most`, which is below kTooDear.
  __device__ int up_to(int d, uint32_t most) const {
    int low = 0, high = lengths[d];
    while (low < high) {
      const int middle = (low + high) / 2;
      if ((*this)(d, middle) <= most)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
};

struct Frontier {
  uint64_t bound;   // B nodes, or all there are, cost at most this; kTooDear or more: it is not known
  float all_nodes;  // how many there are; saturates
  int depths;       // rows before the first empty one
};

// The best w ranks at each of m levels in a row make w^m nodes: with w^m >= B the dearest of them bounds the cost of
// the B-th node. All first levels and m are tried; with fewer than B nodes in all, the dearest of all is the bound.
__device__ inline void find_bound(const Costs& costs, int depths, int budget, Frontier* out) {
  if (threadIdx.x == 0) {
    int used = 0;
    float level = 1, all = 0;
    uint64_t dearest = 0;
    for (; used < depths && costs.lengths[used] > 0; ++used) {
      level = fminf(level * static_cast<float>(costs.lengths[used]), 1e9f);
      all = fminf(all + level, 1e9f);
      dearest += costs.far(used, costs.lengths[used] - 1);
    }
    *out = Frontier{dearest, all, used};
  }
  __syncthreads();
  constexpr int kMostLevels = 10;  // 2^10 nodes are the largest budget
  uint64_t best = ~0ull;
  for (int i = threadIdx.x; i < out->depths * kMostLevels; i += blockDim.x) {
    const int first = i / kMostLevels, levels = i % kMostLevels + 1;
    if (first + levels > out->depths) continue;
    int wide = static_cast<int>(powf(static_cast<float>(budget), 1.0f / levels));
    float nodes = 1;
    for (int l = 0; l < levels; ++l) nodes *= wide;
    if (nodes < budget) ++wide;
    nodes = 1;
    uint64_t cost = 0;
    for (int d = 0; d < first; ++d) cost += costs.far(d, 0);
    for (int d = first; d < first + levels; ++d) {
      const int ranks = min(wide, costs.lengths[d]);
      nodes *= ranks;
      cost += costs.far(d, ranks - 1);
    }
    if (nodes >= budget && cost < best) best = cost;
  }
  if (best != ~0ull)
    atomicMin(reinterpret_cast<unsigned long long*>(&out->bound), static_cast<unsigned long long>(best));
  __syncthreads();
}

// A threshold below which about `wanted` nodes lie, at most `bound`. counts [depths, kBins], level [2, kBins] and
// all [kBins]: scratch. An estimate only: whatever it says, the tree is the same.
__device__ inline uint32_t estimate(const Costs& costs, int depths, int reach, uint32_t bound, float wanted,
                                    int* counts, float (*level)[kBins], float* all, uint32_t* answer) {
  const float per_cost = kBins / (static_cast<float>(bound) + 1);
  for (int i = threadIdx.x; i < depths * kBins; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < depths * reach; i += blockDim.x) {
    const int d = i / reach, r = i % reach;
    if (r >= costs.lengths[d]) continue;
    const uint32_t cost = costs(d, r);
    const int bin = cost <= bound ? static_cast<int>(static_cast<float>(cost) * per_cost + 0.5f) : kBins;
    if (bin < kBins) atomicAdd(&counts[d * kBins + bin], 1);
  }
  __syncthreads();
  const int share = min(static_cast<int>(blockDim.x) / kBins, kWarp);  // lanes that sum for one bin; a power of two
  const int bins_at_once = static_cast<int>(blockDim.x) / share, part = static_cast<int>(threadIdx.x) % share;
  for (int bin = threadIdx.x; bin < kBins; bin += blockDim.x)
    level[0][bin] = all[bin] = static_cast<float>(counts[bin]);
  __syncthreads();
  for (int d = 1; d < depths; ++d) {
    const float* from = level[(d - 1) % 2];
    float* to = level[d % 2];
    for (int bin = static_cast<int>(threadIdx.x) / share; bin < kBins; bin += bins_at_once) {
      float sum = 0;
      for (int i = part; i <= bin; i += share) sum += from[i] * static_cast<float>(counts[d * kBins + bin - i]);
      for (int step = share / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
      if (part == 0) {
        to[bin] = fminf(sum, 1e30f);
        all[bin] += to[bin];
      }
    }
    __syncthreads();
  }
  if (warp_id() == 0) {
    const float first = all[2 * lane_id()], second = all[2 * lane_id() + 1];
    float below = first + second;
    for (int step = 1; step < kWarp; step *= 2) {
      const float other = __shfl_up_sync(kAllLanes, below, step);
      if (lane_id() >= step) below += other;
    }
    const unsigned enough = __ballot_sync(kAllLanes, below >= wanted);
    if (enough == 0) {
      if (lane_id() == 0) *answer = bound;
    } else if (lane_id() == __ffs(static_cast<int>(enough)) - 1) {
      const int bin = 2 * lane_id() + (below - second >= wanted ? 0 : 1);
      const float cost = (static_cast<float>(bin) + 0.5f) / per_cost;
      *answer = cost < static_cast<float>(bound) ? static_cast<uint32_t>(cost) : bound;
    }
  }
  __syncthreads();
  return *answer;
}

// All nodes that cost at most `threshold`, depth by depth, each depth in the order of its rank tuples. Returns how
// many; more than `room` (and an unusable scratch) if they are more. s.starts is complete behind the next barrier.
__device__ inline int expand(const Costs& costs, int depths, uint32_t threshold, int room, const TreeScratch& s,
                             BlockScan& scan) {
  int begin = 0, end = costs.up_to(0, threshold);  // at most the budget, which is less than the room
  for (int i = threadIdx.x; i < end; i += blockDim.x) {
    s.costs[i] = costs(0, i);
    s.parents[i] = kNone;
    s.ranks[i] = static_cast<uint16_t>(i);
    s.depths[i] = 0;
  }
  __syncthreads();
  for (int d = 1; d < depths; ++d) {
    const int items = static_cast<int>(ceil_div(end - begin, blockDim.x));
    const int mine = begin + static_cast<int>(threadIdx.x) * items;
    unsigned children[kMostItems], sum = 0;
    for (int i = 0; i < kMostItems; ++i) {
      children[i] = i < items && mine + i < end ? costs.up_to(d, threshold - s.costs[mine + i]) : 0;
      sum += children[i];
    }
    const Scanned scanned = scan(sum);
    if (scanned.total > static_cast<unsigned>(room - end)) return room + 1;
    unsigned start = end + scanned.before;
    for (int i = 0; i < kMostItems; ++i) {
      if (i < items && mine + i < end) s.starts[mine + i] = static_cast<uint16_t>(start);
      start += children[i];
    }
    __syncthreads();
    const int next = end + static_cast<int>(scanned.total);
    for (int i = end + static_cast<int>(threadIdx.x); i < next; i += blockDim.x) {
      int low = begin, high = end;  // the last node that starts at or before i
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (s.starts[middle] <= i)
          low = middle;
        else
          high = middle;
      }
      const int rank = i - s.starts[low];
      s.costs[i] = s.costs[low] + costs(d, rank);
      s.parents[i] = static_cast<uint16_t>(low);
      s.ranks[i] = static_cast<uint16_t>(rank);
      s.depths[i] = static_cast<uint8_t>(d);
    }
    __syncthreads();
    begin = end;
    end = next;
    if (begin == end) break;
  }
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += blockDim.x)
    s.starts[i] = static_cast<uint16_t>(end);
  return end;
}

// Whether node a comes before node b of the same cost: the smaller rank tuple, a prefix before what extends it.
// Within a depth the index orders the tuples; the deeper of two is represented by its ancestor at the other's depth.
__device__ inline bool tuple_before(const TreeScratch& s, int a, int b) {
  const int depth_a = s.depths[a], depth_b = s.depths[b];
  int up_a = a, up_b = b;
  for (int d = depth_a; d > depth_b; --d) up_a = s.parents[up_a];
  for (int d = depth_b; d > depth_a; --d) up_b = s.parents[up_b];
  return up_a != up_b ? up_a < up_b : depth_a < depth_b;
}

// Fills s.places for nodes 0..count-1 and s.order for the first `budget` places.
__device__ inline void rank(const TreeScratch& s, int count, uint32_t threshold, int budget, int buckets,
                            uint16_t* members, BlockScan& scan) {
  const uint64_t factor = (static_cast<uint64_t>(buckets) << 32) / (static_cast<uint64_t>(threshold) + 1);
  const auto bucket_of = [&](int i) { return static_cast<int>((s.costs[i] * factor) >> 32); };
  for (int i = threadIdx.x; i < buckets; i += blockDim.x) s.buckets[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    s.places[i] = static_cast<uint16_t>(atomicAdd(&s.buckets[bucket_of(i)], 1u));
  __syncthreads();
  const int items = static_cast<int>(ceil_div(buckets, blockDim.x)), mine = static_cast<int>(threadIdx.x) * items;
  unsigned sizes[kMostItems], sum = 0;
  for (int i = 0; i < kMostItems; ++i) {
    sizes[i] = i < items && mine + i < buckets ? s.buckets[mine + i] : 0;
    sum += sizes[i];
  }
  unsigned start = scan(sum).before;
  for (int i = 0; i < kMostItems; ++i) {
    if (i < items && mine + i < buckets) s.buckets[mine + i] = start;
    start += sizes[i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    members[s.buckets[bucket_of(i)] + s.places[i]] = static_cast<uint16_t>(i);
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int bucket = bucket_of(i), first = static_cast<int>(s.buckets[bucket]);
    const int last = bucket + 1 < buckets ? static_cast<int>(s.buckets[bucket + 1]) : count;
    int place = first;
    for (int j = first; j < last && place < budget; ++j) {
      const int other = members[j];
      if (other == i) continue;
      const uint32_t cost = s.costs[other];
      place += cost < s.costs[i] || (cost == s.costs[i] && tuple_before(s, other, i));
    }
    s.places[i] = static_cast<uint16_t>(place);
    if (place < budget) s.order[place] = static_cast<uint16_t>(i);
  }
  __syncthreads();
}

}  // namespace kdtree
