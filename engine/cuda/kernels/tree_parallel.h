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
//   rank      each node's place by (cost, rank tuple), through buckets of cost where they are many
// One block works on one tree, so its time is that of the longest chain of reads of shared memory, shuffles and
// barriers. Hence searches take eight ways a step, a warp finds all children of a node at once, the estimate is made by
// one warp without a barrier, and few nodes are ranked without buckets.
#pragma once

#include "kernels/tree_lists.h"
#include "kernels/tree_scratch.h"

namespace kdtree {

constexpr uint32_t kTooDear = 0xffffffffu;  // any cost that needs more than 32 bits
constexpr int kMostTries = 40;              // a bisection of 32 bits ends before
constexpr int kRoomy = 6;                   // with so many times the budget, the bound alone mostly does
constexpr int kMostLevels = 4;              // of the bound: more are not cheaper, and take longer to add up

struct alignas(16) FourFloats {
  float of[4];
};

__device__ inline uint32_t add_costs(uint32_t a, uint32_t b) {
  const uint32_t sum = a + b;
  return sum < a ? kTooDear : sum;
}

// Turns values that are not positive into costs, in units of 2^low_bit, of which they are multiples. Products with
// powers of two are exact here; two of them, since one alone may lie outside float's range.
struct CostOf {
  float first, second;

  __device__ explicit CostOf(int low_bit) : first(power(-low_bit / 2)), second(power(-low_bit - -low_bit / 2)) {}
  __device__ uint32_t operator()(float value) const {
    const float cost = fabsf(value) * first * second;
    return cost < 4294967296.0f ? static_cast<uint32_t>(cost) : kTooDear;
  }

 private:
  static __device__ float power(int exponent) { return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23); }
};

// Integer costs of list entries, in shared memory in rows of 2^near_bits. Behind its end a row goes on with kTooDear.
// kWhole: they are all there; else those of the first ranks are, and the rest comes from the list itself.
template <bool kWhole>
struct Costs {
  const Lists& lists;
  const int* lengths;
  CostOf cost_of;
  uint32_t* near;  // aligned to 16 bytes
  int near_bits;   // at least 3

  // Turns the bits of entries into costs. Behind the next barrier all else may be called.
  __device__ void prepare() const {
    KDTREE_UNROLL_BY(1)
    for (int i = 4 * static_cast<int>(threadIdx.x); i < lists.depths << near_bits;
         i += 4 * static_cast<int>(blockDim.x)) {
      Four& four = *reinterpret_cast<Four*>(near + i);
      Four made = four;
      KDTREE_UNROLL
      for (int j = 0; j < 4; ++j) made.of[j] = cost_of(__uint_as_float(made.of[j]));
      four = made;
    }
  }

  __device__ uint32_t operator()(int d, int r) const {
    if constexpr (!kWhole) {
      if (r >> near_bits != 0) return cost_of(lists.at(d, r));
    }
    return near[(d << near_bits) + r];
  }

  // kTooDear behind the row's end.
  __device__ uint32_t or_too_dear(int d, int r) const {
    if (kWhole ? r >> near_bits != 0 : r >= lengths[d]) return kTooDear;
    return (*this)(d, r);
  }

  // How many entries of row d cost at most `most`, which is below kTooDear.
  __device__ int up_to(int d, uint32_t most) const {
    if constexpr (kWhole) {
      const uint32_t* row = near + (d << near_bits);
      const uint32_t* const begin = row;
      int bits = near_bits;
      if (const int odd = near_bits % 3; odd != 0) {  // two or four ways, so that the others are eight
        bits -= odd;
        const uint32_t* const parts = row - 1;
        KDTREE_UNROLL
        for (int i = 1; i < 4; ++i)
          if (i >> odd == 0 && parts[i << bits] <= most) row += 1 << bits;
      }
      while (bits > 3) {
        bits -= 3;
        const uint32_t* const parts = row - 1;
        KDTREE_UNROLL
        for (int i = 1; i < 8; ++i)
          if (parts[i << bits] <= most) row += 1 << bits;
      }
      const Four* const last = reinterpret_cast<const Four*>(row);
      const Four low = last[0], high = last[1];
      int count = static_cast<int>(row - begin);
      KDTREE_UNROLL
      for (int i = 0; i < 4; ++i) count += (low.of[i] <= most) + (high.of[i] <= most);
      return count;
    } else {
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
  }
};

struct Frontier {
  uint32_t bound;   // B nodes, or all there are, cost at most this; kTooDear: it is not known
  float all_nodes;  // how many there are; saturates
  bool flat;        // whether only children of the best chain's nodes cost at most the bound
};

// The best w ranks at each of m levels in a row make w^m nodes: with w^m >= B the dearest of them bounds the cost of
// the B-th node. The m up to kMostLevels are tried, by a warp each, and all first levels, by a lane each; with fewer
// than B nodes in all, the dearest of all is the bound. out->bound is kTooDear before. Lane d reads row d and the
// others ask it. Of flat lists the bound is a threshold as good as any estimate. Returns the rows before the first
// empty one.
template <bool kWhole>
__device__ int find_bound(const Costs<kWhole>& costs, int budget, Frontier* out) {
  const int lane = lane_id();
  const int length = lane < costs.lists.depths ? costs.lengths[lane] : 0;
  const int depths = __ffs(static_cast<int>(__ballot_sync(kAllLanes, length == 0))) - 1;
  const bool here = lane < depths;
  uint32_t above = here ? costs(lane, 0) : 0;  // cost of the best path to this row, then to the row before
  KDTREE_UNROLL_BY(1)
  for (int step = 1; step < depths; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, above, step);
    if (lane >= step) above = add_costs(above, other);
  }
  above = __shfl_up_sync(kAllLanes, above, 1);
  if (lane == 0) above = 0;
  for (int levels = warp_id() + 1; levels <= min(kMostLevels, depths); levels += warp_count()) {
    int power = lane + 1;
    KDTREE_UNROLL_BY(1)
    for (int l = 1; l < levels; ++l) power *= lane + 1;
    const int root = levels == 1 ? budget : __ffs(static_cast<int>(__ballot_sync(kAllLanes, power >= budget)));
    const int ranks = here ? min(root, length) : 0;  // 0 behind the end, where no node is
    const uint32_t dearest = here ? costs(lane, ranks - 1) : 0;
    float nodes = static_cast<float>(ranks);
    uint32_t cost = add_costs(above, dearest);
    KDTREE_UNROLL_BY(4)
    for (int l = 1; l < levels; ++l) {
      nodes *= static_cast<float>(__shfl_down_sync(kAllLanes, ranks, l));
      cost = add_costs(cost, __shfl_down_sync(kAllLanes, dearest, l));
    }
    if (nodes < static_cast<float>(budget)) cost = kTooDear;
    cost = __reduce_min_sync(kAllLanes, cost);
    if (lane == 0) atomicMin(&out->bound, cost);
  }
  if (warp_id() == warp_count() - 1) {
    float level = here ? static_cast<float>(length) : 1;
    uint32_t dearest = here ? costs(lane, length - 1) : 0;
    for (int step = 1; step < kWarp; step *= 2) {
      const float other = __shfl_up_sync(kAllLanes, level, step);
      if (lane >= step) level = fminf(level * other, 1e9f);
      dearest = add_costs(dearest, __shfl_xor_sync(kAllLanes, dearest, step));
    }
    float all = here ? level : 0;
    for (int step = 1; step < kWarp; step *= 2) all += __shfl_xor_sync(kAllLanes, all, step);
    if (lane == 0) {
      out->all_nodes = fminf(all, 1e9f);
      atomicMin(&out->bound, dearest);
    }
  }
  __syncthreads();
  if (warp_id() == 0) {  // the cheapest of all others hang on a second rank
    const uint32_t first = here ? costs(lane, 0) : kTooDear, below = __shfl_down_sync(kAllLanes, first, 1);
    const uint32_t second = here && length > 1 ? add_costs(above, costs(lane, 1)) : kTooDear;
    const bool dear = lane + 1 >= depths || add_costs(second, below) > out->bound;
    const unsigned all_dear = __ballot_sync(kAllLanes, dear);
    if (lane == 0) out->flat = all_dear == kAllLanes;
  }
  __syncthreads();
  return depths;
}

struct EstimateSpace {
  float (*counts)[2 * kCostBins];  // [depths] zeros, then how many entries lie in which bin
  float* level;                    // [kCostBins] aligned to 16 bytes
  uint32_t* answer;
};

// A threshold below which about `wanted` nodes lie, at most `bound`. Only an estimate: whatever it says, the tree is
// the same. meanwhile: called by all warps but the first, which makes the estimate.
template <bool kWhole, typename F>
__device__ uint32_t estimate(const Costs<kWhole>& costs, int depths, uint32_t bound, float wanted,
                             const EstimateSpace& space, const F& meanwhile) {
  const int lane = lane_id();
  const float bin_cost = (static_cast<float>(bound) + 1) / kCostBins;
  for (int d = warp_id(); d < depths; d += warp_count()) {
    const float edge = (static_cast<float>(lane) + 0.5f) * bin_cost;  // bins are rounded to the nearest
    const int up_to = costs.up_to(d, edge < static_cast<float>(bound) ? static_cast<uint32_t>(edge) : bound);
    const int before = __shfl_up_sync(kAllLanes, up_to, 1);
    space.counts[d][lane] = 0;
    space.counts[d][kCostBins + lane] = static_cast<float>(lane == 0 ? up_to : up_to - before);
  }
  __syncthreads();
  if (warp_id() == 0) {
    float level = space.counts[0][kCostBins + lane], below = level;
    KDTREE_UNROLL_BY(1)
    for (int d = 1; d < depths && __any_sync(kAllLanes, level > 0); ++d) {
      space.level[lane] = level;
      __syncwarp();
      const float* const counts = &space.counts[d][kCostBins + lane];
      const FourFloats* const parents = reinterpret_cast<const FourFloats*>(space.level);
      float sums[4] = {};
      KDTREE_UNROLL
      for (int i = 0; i < kCostBins / 4; ++i) {
        const FourFloats four = parents[i];
        KDTREE_UNROLL
        for (int j = 0; j < 4; ++j) sums[j] = fmaf(four.of[j], counts[-(4 * i + j)], sums[j]);
      }
      level = fminf((sums[0] + sums[1]) + (sums[2] + sums[3]), 1e30f);
      below += level;
      __syncwarp();
    }
    for (int step = 1; step < kWarp; step *= 2) {
      const float other = __shfl_up_sync(kAllLanes, below, step);
      if (lane >= step) below += other;
    }
    const unsigned enough = __ballot_sync(kAllLanes, below >= wanted);
    const float cost = (static_cast<float>(__ffs(static_cast<int>(enough))) - 0.5f) * bin_cost;
    if (lane == 0)
      *space.answer = enough != 0 && cost < static_cast<float>(bound) ? static_cast<uint32_t>(cost) : bound;
  } else {
    meanwhile();
  }
  __syncthreads();
  return *space.answer;
}

// Buckets of costs up to a threshold, in ascending order; narrower towards it, where most nodes are.
struct Buckets {
  float per_cost, count;

  __device__ Buckets(uint32_t threshold, int buckets)
      : per_cost(1 / (static_cast<float>(threshold) + 1)), count(static_cast<float>(buckets)) {}
  __device__ int last() const { return static_cast<int>(count) - 1; }
  __device__ int operator()(uint32_t cost) const {
    const float share = static_cast<float>(cost) * per_cost;
    return min(static_cast<int>(share * share * count), last());
  }
};

// Adds expanded node i.
template <typename Scratch>
__device__ void put_node(Scratch& s, int i, uint32_t cost, int parent, int rank, int d) {
  s.costs[i] = cost;
  s.parents[i] = static_cast<uint16_t>(parent);
  s.ranks[i] = static_cast<uint16_t>(rank);
  s.depths[i] = static_cast<uint8_t>(d);
  s.starts[i] = kNone;
}

// How many ranks of row d cost at most `most`, by a warp: a chunk a step. first: cost of the lane's rank.
template <bool kWhole>
__device__ int count_up_to(const Costs<kWhole>& costs, int d, uint32_t first, uint32_t most) {
  unsigned within = __ballot_sync(kAllLanes, first <= most);
  int count = __popc(within);
  KDTREE_UNROLL_BY(1)
  for (int r = kWarp + lane_id(); within == kAllLanes; r += kWarp) {
    within = __ballot_sync(kAllLanes, costs.or_too_dear(d, r) <= most);
    count += __popc(within);
  }
  return count;
}

// All nodes that cost at most `threshold`, depth by depth, the children of a node side by side. Returns how many; more
// than `room` (and an unusable scratch) if they are more. s.depth_sizes hold zeros, and nobody reads the scratch.
//
// Few nodes have children: those wait in a queue, and a warp takes two at a time, for each waits long for its place.
// Ranks ascend in cost, so children are the first ranks of a row, and those with children themselves the first of
// these.
template <bool kWhole, typename Scratch>
__device__ int expand(const Costs<kWhole>& costs, int depths, uint32_t threshold, int room, Scratch& s) {
  const int thread = static_cast<int>(threadIdx.x), lane = lane_id(), warps = static_cast<int>(blockDim.x) / kWarp;
  constexpr int kAtOnce = Scratch::kBuckets < 2048 ? 2 : 1;  // 1024 threads have no registers for two
  uint16_t* const queue = s.queue();
  // What a node of depth d may cost and have a child; nothing: below 0.
  const auto fertile_up_to = [&](int d) {
    const uint32_t next = d + 1 < depths ? costs(d + 1, 0) : kTooDear;
    return next <= threshold ? static_cast<int64_t>(threshold - next) : -1;
  };
  int64_t fertile = fertile_up_to(0);
  {
    const uint32_t cost = thread < costs.lengths[0] ? costs(0, thread) : kTooDear;  // a thread for every rank
    const unsigned within = __ballot_sync(kAllLanes, cost <= threshold);
    const unsigned parents = __ballot_sync(kAllLanes, cost <= fertile);
    if (cost <= threshold)
      put_node(s, thread, cost, kNone, thread, 0);
    else
      s.costs[thread] = kTooDear;  // for rank_few
    if (cost <= fertile) queue[thread] = static_cast<uint16_t>(thread);
    if (lane < 2 && within != 0)
      atomicAdd(&s.depth_sizes[0].of[lane], static_cast<uint32_t>(__popc(lane == 0 ? within : parents)));
    s.buckets[thread] = s.buckets[thread + blockDim.x] = 0;
  }
  __syncthreads();
  int end = static_cast<int>(s.depth_sizes[0].of[0]);
  int parents = 0, parents_end = static_cast<int>(s.depth_sizes[0].of[1]);  // of the depth before, in the queue
  KDTREE_UNROLL_BY(1)
  for (int d = 1; parents < parents_end; ++d) {
    const uint32_t first = costs.or_too_dear(d, lane);
    fertile = fertile_up_to(d);
    KDTREE_UNROLL_BY(1)
    for (int p = parents + warp_id(); p < parents_end; p += kAtOnce * warps) {
      int parent[kAtOnce], children[kAtOnce], fertile_ones[kAtOnce], all = 0, all_fertile = 0;
      uint32_t cost[kAtOnce];
      KDTREE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        const bool here = j == 0 || p + j * warps < parents_end;
        parent[j] = queue[here ? p + j * warps : p];
        cost[j] = s.costs[parent[j]];
        children[j] = here ? count_up_to(costs, d, first, threshold - cost[j]) : 0;
        fertile_ones[j] =
            here && cost[j] <= fertile ? count_up_to(costs, d, first, static_cast<uint32_t>(fertile) - cost[j]) : 0;
        all += children[j];
        all_fertile += fertile_ones[j];
      }
      uint32_t at = 0;
      if (lane < 2) at = atomicAdd(&s.depth_sizes[d].of[lane], static_cast<uint32_t>(lane == 0 ? all : all_fertile));
      int begin = end + static_cast<int>(__shfl_sync(kAllLanes, at, 0));
      int slot = parents_end + static_cast<int>(__shfl_sync(kAllLanes, at, 1));
      if (max(begin + all, slot + all_fertile) > room) continue;
      KDTREE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        if (lane == 0 && children[j] > 0) s.starts[parent[j]] = static_cast<uint16_t>(begin);
        KDTREE_UNROLL_BY(1)
        for (int r = lane; r < children[j]; r += kWarp) {
          const uint32_t own = r < kWarp ? first : costs(d, r);
          put_node(s, begin + r, cost[j] + own, parent[j], r, d);
          if (r < fertile_ones[j]) queue[slot + r] = static_cast<uint16_t>(begin + r);
        }
        begin += children[j];
        slot += fertile_ones[j];
      }
    }
    __syncthreads();
    const Pair sizes = s.depth_sizes[d];
    if (sizes.of[0] > static_cast<uint32_t>(room - end)) return room + 1;
    end += static_cast<int>(sizes.of[0]);
    parents = parents_end;
    parents_end += static_cast<int>(sizes.of[1]);
  }
  return end;
}

// Whether node a comes before node b of the same cost: the smaller rank tuple, a prefix before what extends it.
template <typename Scratch>
__device__ bool tuple_before(Scratch& s, int a, int b) {
  const int depth_a = s.depths[a], depth_b = s.depths[b];
  int up_a = a, up_b = b;
  KDTREE_UNROLL_BY(1)
  for (int d = depth_a; d > depth_b; --d) up_a = s.parents[up_a];
  KDTREE_UNROLL_BY(1)
  for (int d = depth_b; d > depth_a; --d) up_b = s.parents[up_b];
  if (up_a == up_b) return depth_a < depth_b;
  KDTREE_UNROLL_BY(1)
  while (s.parents[up_a] != s.parents[up_b]) {
    up_a = s.parents[up_a];
    up_b = s.parents[up_b];
  }
  return s.ranks[up_a] < s.ranks[up_b];
}

constexpr int kFewNodes = 128;  // so many are ranked by comparing all with all

// As rank, of at most kFewNodes nodes: some threads for each, which look at as many others. Behind the last node
// s.costs hold kTooDear.
template <int kThreads, typename Scratch>
__device__ void rank_few(Scratch& s, int count, int budget) {
  constexpr int kParts = kThreads / kFewNodes;
  const int thread = static_cast<int>(threadIdx.x), node = thread / kParts, part = thread % kParts;
  if (thread / kWarp * kWarp < count * kParts) {
    const uint32_t cost = s.costs[node];
    int place = 0, alike = 0;
    const int share = (count + 4 * kParts - 1) / (4 * kParts);
    const Four* const others = reinterpret_cast<const Four*>(s.costs) + part * share;
    KDTREE_UNROLL_BY(2)
    for (int j = 0; j < share; ++j) {
      const Four four = others[j];
      KDTREE_UNROLL
      for (int i = 0; i < 4; ++i) {
        place += four.of[i] < cost ? 1 : 0;
        alike += four.of[i] == cost ? 1 : 0;
      }
    }
    KDTREE_UNROLL
    for (int step = 1; step < kParts; step *= 2) {
      place += __shfl_xor_sync(kAllLanes, place, step);
      alike += __shfl_xor_sync(kAllLanes, alike, step);
    }
    if (node < count && part == 0) {
      KDTREE_UNROLL_BY(1)
      for (int j = 0; alike > 1; ++j) {
        if (s.costs[j] != cost || j == node) continue;
        --alike;
        place += tuple_before(s, j, node);
      }
      s.places[node] = static_cast<uint16_t>(place);
      if (place < budget) s.order[place] = static_cast<uint16_t>(node);
    }
  }
  __syncthreads();
}

// Fills s.places for nodes 0..count-1 and s.order for the first `budget` places. Buckets, two a thread and 0 behind
// expand, are counted while each node gets a place in its own.
template <typename Scratch>
__device__ void rank(Scratch& s, int count, int budget, const Buckets& buckets, uint16_t* members, BlockScan& scan) {
  uint32_t* const sizes = s.buckets + 2 * threadIdx.x;
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    s.places[i] = static_cast<uint16_t>(atomicAdd(&s.buckets[buckets(s.costs[i])], 1u));
  __syncthreads();
  const uint32_t first_size = sizes[0];
  const uint32_t start = scan(first_size + sizes[1]).before;
  sizes[0] = start;
  sizes[1] = start + first_size;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    members[s.buckets[buckets(s.costs[i])] + s.places[i]] = static_cast<uint16_t>(i);
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const uint32_t cost = s.costs[i];
    const int bucket = buckets(cost), first = static_cast<int>(s.buckets[bucket]);
    const int last = bucket < buckets.last() ? static_cast<int>(s.buckets[bucket + 1]) : count;
    int place = first;
    for (int j = first; j < last && place < budget; ++j) {
      const int other = members[j];
      if (other == i) continue;
      const uint32_t others = s.costs[other];
      place += others < cost || (others == cost && tuple_before(s, other, i));
    }
    s.places[i] = static_cast<uint16_t>(place);
    if (place < budget) s.order[place] = static_cast<uint16_t>(i);
  }
  __syncthreads();
}

}  // namespace kdtree
