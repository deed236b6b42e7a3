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
// One block works on one tree, so its time is that of the longest chain of reads of shared memory, shuffles and
// barriers. Hence searches take eight ways a step, a warp hands out children by itself, and the estimate is made by one
// warp without a barrier.
#pragma once

#include "kernels/tree_lists.h"
#include "kernels/tree_scratch.h"

namespace kdtree {

constexpr uint32_t kTooDear = 0xffffffffu;  // any cost that needs more than 32 bits
constexpr int kMostTries = 40;              // a bisection of 32 bits ends before
constexpr int kRoomy = 6;                   // with so many times the budget, the bound alone mostly does
constexpr int kMostLevels = 10;             // of the bound: 2^10 nodes are the largest budget

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
      const int d = i >> near_bits, some = lengths[d] - (i - (d << near_bits));
      Four& four = *reinterpret_cast<Four*>(near + i);
      Four made;
      KDTREE_UNROLL
      for (int j = 0; j < 4; ++j) made.of[j] = j < some ? cost_of(__uint_as_float(four.of[j])) : kTooDear;
      four = made;
    }
  }

  __device__ uint32_t operator()(int d, int r) const {
    if constexpr (!kWhole) {
      if (r >> near_bits != 0) return cost_of(lists.at(d, r));
    }
    return near[(d << near_bits) + r];
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
  uint32_t bound;          // B nodes, or all there are, cost at most this; kTooDear: it is not known
  float all_nodes;         // how many there are; saturates
  int roots[kMostLevels];  // roots[m - 1]: the smallest w with w^m >= B

  // Needs no list: done while they are on their way. find_bound needs a barrier in between.
  __device__ void prepare(int thread, int budget) {
    if (thread == 0) bound = kTooDear;
    if (thread >= kMostLevels) return;
    int root = static_cast<int>(exp2f(log2f(static_cast<float>(budget)) / static_cast<float>(thread + 1)));
    float nodes = 1;
    for (int l = 0; l <= thread; ++l) nodes *= static_cast<float>(root);
    roots[thread] = nodes < static_cast<float>(budget) ? root + 1 : root;
  }
};

// The best w ranks at each of m levels in a row make w^m nodes: with w^m >= B the dearest of them bounds the cost of
// the B-th node. All m are tried, by a warp each, and all first levels, by a lane each; with fewer than B nodes in all,
// the dearest of all is the bound. Lane d reads row d and the others ask it. Returns the rows before the first empty
// one.
template <bool kWhole>
__device__ int find_bound(const Costs<kWhole>& costs, int budget, Frontier* out) {
  const int lane = lane_id();
  const int length = lane < costs.lists.depths ? costs.lengths[lane] : 0;
  const int depths = __ffs(static_cast<int>(__ballot_sync(kAllLanes, length == 0))) - 1;
  const bool here = lane < depths;
  uint32_t above = here ? costs(lane, 0) : 0;  // cost of the best path to this row, then to the row before
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, above, step);
    if (lane >= step) above = add_costs(above, other);
  }
  above = __shfl_up_sync(kAllLanes, above, 1);
  if (lane == 0) above = 0;
  for (int levels = warp_id() + 1; levels <= min(kMostLevels, depths); levels += warp_count()) {
    const int ranks = here ? min(out->roots[levels - 1], length) : 0;  // 0 behind the end, where no node is
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
  return depths;
}

struct EstimateSpace {
  float (*counts)[2 * kCostBins];  // [depths] zeros, then how many entries lie in which bin
  float* level;                    // [kCostBins] aligned to 16 bytes
  uint32_t* answer;
};

// A threshold below which about `wanted` nodes lie, at most `bound`. Only an estimate: whatever it says, the tree is
// the same.
template <bool kWhole>
__device__ uint32_t estimate(const Costs<kWhole>& costs, int depths, uint32_t bound, float wanted,
                             const EstimateSpace& space) {
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
    float level = space.counts[0][kCostBins + lane], below = 0;
    unsigned enough = 0;
    for (int d = 1;; ++d) {
      float up_to = level;
      for (int step = 1; step < kWarp; step *= 2) {
        const float other = __shfl_up_sync(kAllLanes, up_to, step);
        if (lane >= step) up_to += other;
      }
      below += up_to;
      // Deeper nodes only add: bins behind the first one with enough decide nothing any more.
      enough = __ballot_sync(kAllLanes, below >= wanted);
      const int last = enough != 0 ? __ffs(static_cast<int>(enough)) - 1 : kCostBins - 1;
      if (d == depths || !__any_sync(kAllLanes, lane <= last && level > 0)) break;
      space.level[lane] = level;
      __syncwarp();
      const float* const counts = &space.counts[d][kCostBins + lane];
      const FourFloats* const parents = reinterpret_cast<const FourFloats*>(space.level);
      float sums[4] = {};
      KDTREE_UNROLL_BY(4)
      for (int i = 0; i <= last / 4; ++i) {
        const FourFloats four = parents[i];
        KDTREE_UNROLL
        for (int j = 0; j < 4; ++j) sums[j] += four.of[j] * counts[-(4 * i + j)];
      }
      level = fminf((sums[0] + sums[1]) + (sums[2] + sums[3]), 1e30f);
      __syncwarp();
    }
    const float cost = (static_cast<float>(__ffs(static_cast<int>(enough))) - 0.5f) * bin_cost;
    if (lane == 0)
      *space.answer = enough != 0 && cost < static_cast<float>(bound) ? static_cast<uint32_t>(cost) : bound;
  }
  __syncthreads();
  return *space.answer;
}

// Buckets of costs up to a threshold, in ascending order.
struct Buckets {
  float per_cost;
  int last;

  __device__ Buckets(uint32_t threshold, int count)
      : per_cost(static_cast<float>(count) / (static_cast<float>(threshold) + 1)), last(count - 1) {}
  __device__ int operator()(uint32_t cost) const {
    return min(static_cast<int>(static_cast<float>(cost) * per_cost), last);
  }
};

// Adds expanded node i.
template <typename Scratch>
__device__ void put_node(Scratch& s, int i, uint32_t cost, int parent, int rank, int d) {
  s.costs[i] = cost;
  s.parents[i] = static_cast<uint16_t>(parent);
  s.ranks[i] = static_cast<uint16_t>(rank);
  s.depths[i] = static_cast<uint8_t>(d);
}

// Exclusive sum over the warp.
__device__ inline Scanned scan_warp(unsigned value) {
  const unsigned inclusive = warp_inclusive_sum(value);
  return Scanned{inclusive - value, __shfl_sync(kAllLanes, inclusive, kWarp - 1)};
}

// All nodes that cost at most `threshold`, depth by depth, each depth in the order of its rank tuples. Returns how
// many; more than `room` (and an unusable scratch) if they are more. s.starts is complete behind the next barrier.
template <bool kWhole, typename Scratch>
__device__ int expand(const Costs<kWhole>& costs, int depths, uint32_t threshold, int room, Scratch& s,
                      BlockScan& scan) {
  constexpr int kThreads = Scratch::kBuckets / 2, kWarps = kThreads / kWarp;
  const int thread = static_cast<int>(threadIdx.x), lane = lane_id();
  const uint32_t first_cost = thread < costs.lengths[0] ? costs(0, thread) : kTooDear;  // a thread for every rank
  const bool first = first_cost <= threshold;
  if (first) put_node(s, thread, first_cost, kNone, thread, 0);
  s.buckets[thread] = s.buckets[thread + kThreads] = 0;
  int begin = 0, end = __syncthreads_count(first);
  uint8_t* const heads = s.heads + thread - lane;
  for (int d = 1; d < depths && begin < end; ++d) {
    int next = end;
    // Of up to 32 parents each warp finds all children and puts some: nobody waits for others in between. 1024 threads
    // have no registers left for that.
    const bool few = kThreads < 1024 && end - begin <= kWarp;
    for (int base = begin; base < end; base += kThreads) {
      // Otherwise all warps take as many parents: the first ones have most of the children.
      const int share = few ? kWarp : min(kWarp, (end - base + kWarps - 1) / kWarps);
      const int parent = base + (few ? 0 : warp_id() * share) + lane;
      const bool here = lane < share && parent < end;
      const uint32_t cost = here ? s.costs[parent] : 0;
      const unsigned children = here ? static_cast<unsigned>(costs.up_to(d, threshold - cost)) : 0;
      const Scanned scanned = few ? scan_warp(children) : scan(children);
      if (scanned.total > static_cast<unsigned>(room - next)) return room + 1;
      if (here && (!few || warp_id() == 0))
        s.starts[parent] = static_cast<uint16_t>(next + static_cast<int>(scanned.before));
      // The warp hands out children, which stand side by side: marks show where a parent's begin.
      const unsigned warp_begin =
          few ? static_cast<unsigned>(thread - lane) : __shfl_sync(kAllLanes, scanned.before, 0);
      const unsigned warp_end = few ? scanned.total : __shfl_sync(kAllLanes, scanned.before + children, kWarp - 1);
      const unsigned fertile = __ballot_sync(kAllLanes, children > 0);
      if (children > 0) heads[__popc(fertile & ((1u << lane) - 1))] = static_cast<uint8_t>(lane);
      __syncwarp();
      for (unsigned from = warp_begin; from < warp_end; from += few ? kThreads : kWarp) {
        const unsigned at = scanned.before - from;  // wraps around where it is before
        const bool earlier = children > 0 && scanned.before < from;
        const unsigned marks = __reduce_or_sync(kAllLanes, children > 0 && !earlier && at < kWarp ? 1u << at : 0u);
        const int heads_before = __popc(__ballot_sync(kAllLanes, earlier)) + __popc(marks & ((2u << lane) - 1));
        const int head = heads[heads_before - 1];
        const unsigned start = __shfl_sync(kAllLanes, scanned.before, head), child = from + lane;
        if (child < warp_end) {
          const int rank = static_cast<int>(child - start), above = parent - lane + head;
          put_node(s, next + static_cast<int>(child), s.costs[above] + costs(d, rank), above, rank, d);
        }
      }
      next += static_cast<int>(scanned.total);
    }
    if (next > end) __syncthreads();
    begin = end;
    end = next;
  }
  for (int i = begin + thread; i < end; i += kThreads) s.starts[i] = static_cast<uint16_t>(end);
  return end;
}

// Whether node a comes before node b of the same cost: the smaller rank tuple, a prefix before what extends it.
// Within a depth the index orders the tuples; the deeper of two is represented by its ancestor at the other's depth.
template <typename Scratch>
__device__ bool tuple_before(Scratch& s, int a, int b) {
  const int depth_a = s.depths[a], depth_b = s.depths[b];
  int up_a = a, up_b = b;
  KDTREE_UNROLL_BY(1)
  for (int d = depth_a; d > depth_b; --d) up_a = s.parents[up_a];
  KDTREE_UNROLL_BY(1)
  for (int d = depth_b; d > depth_a; --d) up_b = s.parents[up_b];
  return up_a != up_b ? up_a < up_b : depth_a < depth_b;
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
    const int last = bucket < buckets.last ? static_cast<int>(s.buckets[bucket + 1]) : count;
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
