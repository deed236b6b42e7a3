// The tree of a small budget: one warp takes the best node that is offered, over and over, as the contract words it.
//
// Every node that was taken offers its next child: the root in lane 0, node i in lane i. The best of all is found by
// one reduction of keys, which begin with the high bits of a score and end with the lane; what the node that is taken
// offers next, and its first child, were computed while it waited. So any list is taken, and the time is that of the
// nodes, whatever the list. With two offers a lane, 64 nodes took an H200 longer than by tree_parallel.h.
#pragma once

#include "common/behind.h"
#include "kernels/tree_lists.h"
#include "kernels/tree_output.h"

namespace kdtree {

constexpr int kSmallBudget = kWarp;        // a lane for every node that can have children, the root among them
constexpr uint32_t kLaneMask = kWarp - 1;  // the bits of a key that name its lane
constexpr int kSmallThreads = 128;
constexpr uint32_t kNothing = 0xfff00000u;  // the key of minus infinity: no key of an offer is as high

// Lists as far as the budget reaches, in shared memory. Behind the last entry of a row, and in the first one of the row
// behind the last, stands minus infinity.
struct SmallLists {
  double* values;  // [depths + 1, pitch]
  int32_t* ids;
  int depths, reach, pitch;

  static __host__ __device__ size_t bytes(int depths, int reach) {
    return static_cast<size_t>(depths + 1) * (reach + 1) * (sizeof(double) + sizeof(int32_t));
  }

  __device__ SmallLists(unsigned char* space, int depths_here, int reach_here)
      : values(reinterpret_cast<double*>(space)), depths(depths_here), reach(reach_here), pitch(reach_here + 1) {
    ids = reinterpret_cast<int32_t*>(values + (depths + 1) * pitch);
  }

  // Fills them, those of kBatch turns in one trip to memory. All of the block is behind it at the next barrier.
  __device__ void read(const Lists& lists, const Divider& by_reach) const {
    constexpr int kBatch = 4;
    const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
    const double nothing = minus_infinity();
    for (int first = 0; first < depths * reach; first += kBatch * threads) {
      float found[kBatch];
      int32_t names[kBatch];
      int at[kBatch];
      KDTREE_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        const int i = first + j * threads + thread;
        const int d = by_reach(i), r = i - d * reach;
        at[j] = i < depths * reach ? d * pitch + r : -1;
        if (at[j] < 0) continue;
        found[j] = lists.at(d, r);
        names[j] = lists.id(d, r);
      }
      KDTREE_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        if (at[j] < 0) break;
        values[at[j]] = is_finite(found[j]) ? static_cast<double>(found[j]) : nothing;
        ids[at[j]] = names[j];
      }
    }
    if (thread < depths) values[thread * pitch + reach] = nothing;
    if (thread == 0) values[depths * pitch] = nothing;
  }

  // The value at a place in bytes.
  __device__ double at(int place) const {
    return *reinterpret_cast<const double*>(reinterpret_cast<const unsigned char*>(values) + place);
  }

  static __device__ double minus_infinity() { return __longlong_as_double(-0x10000000000000ll); }
};

// Where a list entry stands in SmallLists: its own place and that of the first one of its row, in bytes, in a word.
struct Place {
  uint32_t bits;

  __device__ int entry() const { return static_cast<int>(bits & 0xffffu); }
  __device__ int row() const { return static_cast<int>(bits >> 16); }
  __device__ int index() const { return entry() / static_cast<int>(sizeof(double)); }
  __device__ int rank() const { return (entry() - row()) / static_cast<int>(sizeof(double)); }
  static __device__ Place of(int row, int entry) {
    return {static_cast<uint32_t>(entry) | static_cast<uint32_t>(row) << 16};
  }
};

// The nodes in the order in which they are taken.
struct SmallTree {
  static constexpr int kNodes = kSmallBudget + 1;  // the root, which is node 0, among them

  double scores[kNodes];
  uint32_t above[kNodes];  // bits of its ancestors
  Place places[kNodes];
  uint8_t parents[kNodes], before[kNodes];  // before: the child of the same parent before it, 0: there is none
  uint8_t first_child[kNodes], next_sibling[kNodes];  // 0: there is none
  int count;                                          // without the root
};

__device__ inline int first_bit(uint32_t mask) { return __ffs(static_cast<int>(mask)) - 1; }

// Ascends as scores descend; equal for equal scores, but also for some that differ. 0 of either sign is one score. The
// bits of kLaneMask say nothing.
__device__ inline uint32_t key_of(double score) {
  const int high = static_cast<int>(__double_as_longlong(score) >> 32);
  return high > 0 ? ~static_cast<uint32_t>(high) & 0x7fffffffu : static_cast<uint32_t>(high) | 0x80000000u;
}
__device__ inline uint32_t key_in(int lane, uint32_t key) { return (key & ~kLaneMask) | static_cast<uint32_t>(lane); }

// What a lane offers: the next child of its node.
struct Offer {
  double score, value;   // of the child, and of its list entry
  double next, first;    // values of the next entry of its row, and of the first one of the next row
  double beside, below;  // scores of its next sibling and of its first child
  uint32_t key, beside_key, below_key;
  Place place;
  int last;        // the child before it
  uint32_t above;  // bits of its ancestors

  __device__ void look_ahead() {
    beside = (score - value) + next;
    below = score + first;
    beside_key = key_of(beside);
    below_key = key_of(below);
  }
};

// An offer among those whose keys are alike.
struct Rival {
  double score;
  uint32_t above;
  int rank, lane;

  // The better score, and of equal ones the smaller rank tuple. Of two offers none extends the other; where their
  // ancestors part, both have a child of the same node.
  __device__ bool before(const Rival& other, const SmallTree& tree) const {
    if (score != other.score) return score > other.score;
    return rank_beside(other, tree) < other.rank_beside(*this, tree);
  }
  __device__ int rank_beside(const Rival& other, const SmallTree& tree) const {
    const uint32_t only = above & ~other.above;
    return only != 0 ? tree.places[first_bit(only)].rank() : rank;
  }
};

// The lane of the best offer among those whose keys are like `best`.
__device__ inline int settle(const Offer& o, uint32_t best, const SmallTree& tree) {
  __syncwarp();  // the places of all nodes can be read
  Rival mine{SmallLists::minus_infinity(), 0, 0, 0};
  if ((o.key ^ best) <= kLaneMask) mine = {o.score, o.above, o.place.rank(), lane_id()};
  KDTREE_UNROLL_BY(1)
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const Rival other{__shfl_xor_sync(kAllLanes, mine.score, step), __shfl_xor_sync(kAllLanes, mine.above, step),
                      __shfl_xor_sync(kAllLanes, mine.rank, step), __shfl_xor_sync(kAllLanes, mine.lane, step)};
    if (other.before(mine, tree)) mine = other;
  }
  return mine.lane;
}

// Takes up to `budget` nodes; returns how many there are. What the next key needs comes first, all else is done while
// it is on its way.
__device__ inline int take(const SmallLists& lists, int budget, Offer o, SmallTree& tree) {
  const int lane = lane_id(), step = static_cast<int>(sizeof(double)), down = lists.pitch * step;
  uint32_t best = __reduce_min_sync(kAllLanes, o.key);
  int number = 1;
  for (;;) {
    bool tie = false;
    KDTREE_UNROLL_BY(1)
    while (number <= budget && best < kNothing) {
      const int source = static_cast<int>(best & kLaneMask);
      const uint32_t below_key = __shfl_sync(kAllLanes, o.below_key, source);
      tie = __popc(__ballot_sync(kAllLanes, (o.key ^ best) <= kLaneMask)) > 1;
      if (tie) break;
      // The lane that is taken offers the next sibling, that of the new node its first child.
      const bool takes = lane == source, begins = lane == number && below_key < kNothing;
      if (takes) o.key = key_in(lane, o.beside_key);
      if (begins) o.key = key_in(lane, below_key);
      best = __reduce_min_sync(kAllLanes, o.key);
      const Place place{__shfl_sync(kAllLanes, o.place.bits, source)};
      // Read by all lanes: two addresses each, and no branch.
      const int entry = begins ? place.row() + down : place.entry() + step;
      const double next = lists.at(entry + step), first = lists.at(begins ? entry + down : place.row() + down);
      const double below = __shfl_sync(kAllLanes, o.below, source), value = __shfl_sync(kAllLanes, o.first, source);
      const uint32_t above = __shfl_sync(kAllLanes, o.above, source);
      if (takes) {
        tree.scores[number] = o.score;
        tree.above[number] = o.above;
        tree.places[number] = o.place;
        tree.parents[number] = static_cast<uint8_t>(lane);
        tree.before[number] = static_cast<uint8_t>(o.last);
      }
      o.score = begins ? below : takes ? o.beside : o.score;
      o.value = begins ? value : takes ? o.next : o.value;
      o.above = begins ? above | 1u << lane : o.above;
      o.last = begins ? 0 : takes ? number : o.last;
      o.next = takes || begins ? next : o.next;
      o.first = takes || begins ? first : o.first;
      o.place = takes || begins ? Place::of(begins ? entry : place.row(), entry) : o.place;
      o.look_ahead();
      ++number;
    }
    if (!tie) return number - 1;
    if (lane == settle(o, best, tree)) o.key -= kWarp;  // now it is the best one by its key too
    best = __reduce_min_sync(kAllLanes, o.key);
  }
}

// Called by one whole warp; all of the tree is there at the next barrier.
__device__ inline void take_nodes(const SmallLists& lists, int budget, SmallTree& tree) {
  const int lane = lane_id();
  for (int i = lane; i < SmallTree::kNodes; i += kWarp) tree.first_child[i] = tree.next_sibling[i] = 0;
  Offer o{};
  o.key = kNothing;
  if (lane == 0) {
    o.above = 1;  // place: the first entry, behind no child
    o.score = o.value = lists.values[0];
    o.next = lists.values[1];
    o.first = lists.values[lists.pitch];
    o.key = key_in(0, key_of(o.score));
    o.look_ahead();
  }
  __syncwarp();
  const int count = take(lists, __reduce_min_sync(kAllLanes, budget), o, tree);
  __syncwarp();
  const int node = lane + 1;
  if (node <= count) {
    *(tree.before[node] == 0 ? &tree.first_child[tree.parents[node]] : &tree.next_sibling[tree.before[node]]) =
        static_cast<uint8_t>(node);
  }
  if (lane == 0) tree.count = count;
}

// The steps of a node's path from one on, one a call, and -1 behind them. Numbers grow along a path.
struct Steps {
  uint32_t left;  // ancestors
  int own;

  __device__ Steps(uint32_t above, int node, int first) : left(above), own(node) {
    KDTREE_UNROLL_BY(4)
    for (int c = 0; c < first; ++c) next();
  }
  __device__ uint32_t next() {
    const int step = left != 0 ? first_bit(left) : own;
    if (left == 0) own = -1;
    left &= left - 1;
    return static_cast<uint32_t>(step);
  }
};

// All arrays with a row for every node, each by other warps than the one before if there are enough.
__device__ inline void write_small(const Output& out, const SmallLists& lists, const SmallTree& tree, int count,
                                   const Root& root, const Division& division) {
  const kdtree_tree_build_args& a = out.a;
  const int rows = static_cast<int>(out.rows), columns = a.depth_limit + 1, words = visibility_words(a.budget);
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const auto above = [&](int i) { return i == 0 ? 0u : tree.above[i]; };
  KDTREE_UNROLL_BY(1)
  for (int i = thread; i < rows; i += threads) {
    NodeRow row;
    if (i == 0) {
      row.token = root.token;
      row.position = root.position;
    } else if (i <= count) {
      const Place place = tree.places[i];
      row.token = lists.ids[place.index()];
      row.parent = tree.parents[i];
      row.depth = __popc(tree.above[i]);
      row.rank = place.rank();
      row.position = root.position + row.depth;
      row.score = tree.scores[i];
    }
    if (count > 0 && i <= count) {
      row.first_child = tree.first_child[i] != 0 ? tree.first_child[i] : -1;
      row.next_sibling = tree.next_sibling[i] != 0 ? tree.next_sibling[i] : -1;
    }
    out.write(i, row);
  }
  if (a.paths != nullptr)
    store_all(reinterpret_cast<uint32_t*>(out.block(a.paths, columns)), rows * columns, threads - 1 - thread, threads,
              [&](int j) {
                const int first = division.by_columns(j), at = j - first * columns;
                const auto steps = [&above, count](int node, int from) {
                  return node <= count ? Steps(above(node), node, from) : Steps(0, -1, 0);
                };
                // Of a node that is counted up here instead, ptxas 13.0 reads the ancestors of the one behind it.
                return [steps, columns, &division, j, c = at, walk = steps(first, at)]() mutable {
                  if (c == columns) walk = steps(division.by_columns(j), c = 0);
                  ++j;
                  ++c;
                  return walk.next();
                };
              });
  if (a.visibility != nullptr)
    store_all(out.block(a.visibility, words), rows * words, (thread + threads / 2) % threads, threads, [&](int j) {
      return [&, j]() mutable {
        const int i = division.by_words(j), word = j++ - i * words;
        if (i > count) return 0u;
        return (word == 0 ? above(i) : 0u) | (i / 32 == word ? 1u << i % 32 : 0u);
      };
    });
}

// What a block shares beside its dynamic memory; aligned as that is, so that sizeof is all that the compiler takes.
struct alignas(128) SmallShared {
  SmallTree tree;
  ListFacts facts;
};

static __global__ void __launch_bounds__(kSmallThreads, 1)
    tree_small_kernel(kdtree_tree_build_args a, Division division) {
  KDTREE_DYNAMIC_SHARED(shared);
  __shared__ SmallShared block;
  SmallTree& tree = block.tree;

  let_next_start();
  wait_for_previous();
  const int request = static_cast<int>(blockIdx.x);
  const Asked asked(a, request);
  Outcome outcome = asked.outcome;
  const size_t lists_at = static_cast<size_t>(request) * a.depth_limit * a.width;
  const Lists lists{a.lp + lists_at, a.ids + lists_at, outcome.failed() || a.width == 0 ? 0 : asked.depth_limit,
                    a.width, division.by_width};
  if (a.checked == 0 && lists.depths > 0) {
    read_lists<true>(lists, 0, a.vocab_size,
                     {nullptr, 0, reinterpret_cast<int*>(shared), division.set_rows, division.set_bits}, &block.facts,
                     [] {});
    if (block.facts.fault != kNoFault) outcome = outcome_of(block.facts.fault);
    __syncthreads();
  }
  const Root root = Root::of(a, request);
  const bool any = !outcome.failed() && lists.depths > 0 && asked.budget > 0;
  const SmallLists near(shared, any ? lists.depths : 0, min(a.budget, a.width));
  int count = 0;
  if (any) {
    near.read(lists, division.by_reach);
    __syncthreads();
    if (warp_id() == 0) take_nodes(near, asked.budget, tree);
    __syncthreads();
    count = tree.count;
  }
  write_small(Output{a, static_cast<size_t>(request)}, near, tree, count, root, division);
  if (threadIdx.x == 0) {
    a.node_count[request] = count;
    if (a.route != nullptr) a.route[request] = count > 0 ? KDTREE_ROUTE_SERIAL : KDTREE_ROUTE_NONE;
    write_status(a.status, request, outcome);
  }
}

}  // namespace kdtree
