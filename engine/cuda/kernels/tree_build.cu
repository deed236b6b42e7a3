// Lists -> tree: the best-first tree of each request, one block a request, bit for bit that of reference/tree.py.
//
// tree_lists.h checks the lists and decides the route, tree_parallel.h and tree_serial.h find the nodes and their
// order, this file writes them out: tokens, links, paths, visibility words, positions.

#include <algorithm>

#include "common/error.h"
#include "kernels/request.h"
#include "kernels/tree_parallel.h"
#include "kernels/tree_serial.h"

namespace kdtree {
namespace {

// The nodes of one request as the routes leave them: node i (1..count) is expanded index order[i - 1].
struct Found {
  int count;
  int expanded;  // nodes in the scratch
  int route;
  double unit;  // score of a cost of 1, negative
};

struct Output {
  const kdtree_tree_build_args& a;
  size_t request;
  size_t rows = static_cast<size_t>(a.budget) + 1;

  template <typename T>
  __device__ T* block(T* array, size_t columns = 1) const {
    return array == nullptr ? nullptr : array + request * rows * columns;
  }
};

// Score of a node that costs nothing. In the contract's order of operations it is -0 only as a sum of nothing but -0:
// a step to the next sibling subtracts what was added, and 0 - 0 is +0.
__device__ double zero_score(const Lists& lists, const TreeScratch& s, int node) {
  for (int d = s.depths[node]; d >= 0; --d, node = s.parents[node])
    if (s.ranks[node] > 0 || __float_as_uint(lists.at(d, 0)) == 0) return 0.0;
  return -0.0;
}

__device__ double score_of(const Lists& lists, const TreeScratch& s, const Found& found, const double* serial,
                           int node) {
  if (found.route == KDTREE_ROUTE_SERIAL) return serial[node];
  return s.costs[node] == 0 ? zero_score(lists, s, node) : static_cast<double>(s.costs[node]) * found.unit;
}

// Node number of an expanded index; 0: the root, -1: not in the tree.
__device__ int node_of(const TreeScratch& s, const Found& found, int index) {
  if (index == kNone) return 0;
  return s.places[index] < found.count ? s.places[index] + 1 : -1;
}

__device__ int first_child(const TreeScratch& s, const Found& found, int index) {
  const int child = index == kNone ? 0 : s.starts[index];
  if (child >= found.expanded || s.parents[child] != index) return -1;
  return node_of(s, found, child);
}

__device__ int next_sibling(const TreeScratch& s, const Found& found, int index) {
  if (found.route == KDTREE_ROUTE_SERIAL) {
    const uint32_t next = s.costs[index];
    return next == kNone ? -1 : node_of(s, found, static_cast<int>(next));
  }
  const int next = index + 1;
  return next < found.expanded && s.parents[next] == s.parents[index] ? node_of(s, found, next) : -1;
}

__device__ void write_nodes(const Output& out, const Lists& lists, const TreeScratch& s, const Found& found,
                            const double* serial) {
  const kdtree_tree_build_args& a = out.a;
  const int prefix = a.prefix_lengths != nullptr ? a.prefix_lengths[out.request] : 0;
  int32_t* const positions = out.block(a.positions);
  int32_t* const children = out.block(a.first_child);
  int32_t* const siblings = out.block(a.next_sibling);
  for (int i = threadIdx.x; i <= a.budget; i += blockDim.x) {
    int token = 0, parent = -1, depth = 0, rank = 0, position = 0, child = -1, sibling = -1;
    double score = 0;
    if (i == 0) {
      token = a.root_tokens != nullptr ? a.root_tokens[out.request] : 0;
      position = prefix;
      if (found.count > 0) child = first_child(s, found, kNone);
    } else if (i <= found.count) {
      const int node = s.order[i - 1], d = s.depths[node];
      rank = s.ranks[node];
      token = lists.id(d, rank);
      parent = node_of(s, found, s.parents[node]);
      depth = d + 1;
      position = prefix + depth;
      score = score_of(lists, s, found, serial, node);
      if (children != nullptr) child = first_child(s, found, node);
      if (siblings != nullptr) sibling = next_sibling(s, found, node);
    }
    out.block(a.tokens)[i] = token;
    out.block(a.parents)[i] = parent;
    out.block(a.depths)[i] = depth;
    out.block(a.ranks)[i] = rank;
    out.block(a.scores)[i] = score;
    if (positions != nullptr) positions[i] = position;
    if (children != nullptr) children[i] = child;
    if (siblings != nullptr) siblings[i] = sibling;
  }
}

__device__ void write_paths(const Output& out, const TreeScratch& s, const Found& found) {
  const int columns = out.a.depth_limit + 1;
  int32_t* const paths = out.block(out.a.paths, columns);
  if (paths == nullptr) return;
  for (int i = threadIdx.x; i <= out.a.budget; i += blockDim.x) {
    int32_t* const row = paths + static_cast<size_t>(i) * columns;
    int length = i == 0 ? 1 : 0;
    if (i > 0 && i <= found.count) {
      const int node = s.order[i - 1];
      length = s.depths[node] + 2;
      for (int d = length - 1, up = node; d > 0; --d, up = s.parents[up]) row[d] = s.places[up] + 1;
    }
    if (length > 0) row[0] = 0;
    for (int d = length; d < columns; ++d) row[d] = -1;
  }
}

__device__ void write_visibility(const Output& out, const TreeScratch& s, const Found& found) {
  const int words = static_cast<int>(ceil_div(static_cast<int64_t>(out.rows), 32));
  uint32_t* const visibility = out.block(out.a.visibility, words);
  if (visibility == nullptr) return;
  for (int i = threadIdx.x; i < static_cast<int>(out.rows) * words; i += blockDim.x) {
    const int row = i / words, word = i % words;
    uint32_t bits = 0;
    if (row <= found.count && word <= row / 32) {
      if (word == 0) bits = 1;  // the root
      if (row > 0)
        for (int up = s.order[row - 1]; up != kNone; up = s.parents[up]) {
          const int node = s.places[up] + 1;
          if (node / 32 == word) bits |= 1u << node % 32;
          if (node / 32 < word) break;  // ancestors have smaller numbers
        }
    }
    visibility[i] = bits;
  }
}

// What a block shares beside its dynamic memory.
// Aligned as the dynamic memory behind it is: what the compiler adds up is then sizeof.
struct alignas(128) BlockShared {
  ListFacts facts;
  unsigned totals[2][kWarp];  // of BlockScan
  Frontier frontier;
  float level[2][kBins], all[kBins];  // of the estimate, as is the answer
  uint32_t answer;
  int serial_count;
};

// Finds the nodes by threshold; count -1 where costs need more than 32 bits or no threshold cuts near the budget.
__device__ Found find_in_parallel(const Lists& lists, int budget, int reach, const TreeScratch& s, BlockShared& b) {
  const ListFacts& facts = b.facts;
  Frontier& frontier = b.frontier;
  BlockScan scan(b.totals);
  const TreeSizes sizes(budget);
  const int low_bit = facts.low_bit == kNoBit ? 0 : facts.low_bit;
  const size_t counts_bytes = static_cast<size_t>(lists.depths) * kBins * sizeof(int);
  const int near_ranks =
      min(reach, static_cast<int>((s.rest_bytes - counts_bytes) / (sizeof(uint32_t) * lists.depths)));
  int* const counts = reinterpret_cast<int*>(s.rest);
  uint32_t* const near = reinterpret_cast<uint32_t*>(s.rest + counts_bytes);
  const Costs costs{lists, facts.lengths, power_of_two(-low_bit), near, near_ranks};

  for (int i = threadIdx.x; i < lists.depths * near_ranks; i += blockDim.x) {
    const int d = i / near_ranks, r = i % near_ranks;
    near[i] = r < facts.lengths[d] ? costs.far(d, r) : kTooDear;
  }
  find_bound(costs, lists.depths, budget, &frontier);  // has a barrier at its end
  Found found{-1, 0, KDTREE_ROUTE_PARALLEL, -power_of_two(low_bit)};
  if (frontier.bound >= kTooDear) return found;
  const float nodes = frontier.all_nodes;
  const int wanted = nodes < static_cast<float>(budget) ? static_cast<int>(nodes) : budget;
  uint32_t high = static_cast<uint32_t>(frontier.bound), low = 0, threshold = high;
  if (nodes > static_cast<float>(sizes.nodes))
    threshold = estimate(costs, frontier.depths, reach, high, 1.35f * static_cast<float>(budget), counts, b.level,
                         b.all, &b.answer);
  for (int tries = 0; tries < kMostTries; ++tries) {
    const int expanded = expand(costs, frontier.depths, threshold, sizes.nodes, s, scan);
    if (expanded >= wanted && expanded <= sizes.nodes) {
      rank(s, expanded, threshold, wanted, sizes.buckets, reinterpret_cast<uint16_t*>(s.rest), scan);
      found.count = wanted;
      found.expanded = expanded;
      return found;
    }
    __syncthreads();  // nobody reads this try's scratch any more
    // Fewer than wanted cost at most low - 1; at least as many cost at most high.
    if (expanded > sizes.nodes) {
      if (threshold == low) break;  // one tie, wider than the room
      high = threshold;
    } else {
      low = threshold + 1;
    }
    threshold = low + (high - low) / 2;
  }
  return found;
}

// At least one block a multiprocessor: without saying so, sm_100 gets 32 registers and spills.
__global__ void __launch_bounds__(1024, 1) tree_build_kernel(kdtree_tree_build_args a, size_t shared_bytes) {
  KDTREE_DYNAMIC_SHARED(shared);
  __shared__ BlockShared block;
  ListFacts& facts = block.facts;

  const int request = static_cast<int>(blockIdx.x);
  const int depth_limit = a.depth_limits != nullptr ? a.depth_limits[request] : a.depth_limit;
  const int budget = a.budgets != nullptr ? a.budgets[request] : a.budget;
  Outcome outcome = outcome_before(a.before, request);
  if (!outcome.failed() && (depth_limit < 0 || depth_limit > a.depth_limit))
    outcome = {KDTREE_REQUEST_OWN_SIZE, depth_limit, a.depth_limit};
  if (!outcome.failed() && (budget < 0 || budget > a.budget)) outcome = {KDTREE_REQUEST_OWN_SIZE, budget, a.budget};

  const size_t lists_at = static_cast<size_t>(request) * a.depth_limit * a.width;
  const Lists lists{a.lp + lists_at, a.ids + lists_at, outcome.failed() ? 0 : depth_limit, a.width};
  const TreeScratch scratch(shared, shared_bytes, a.budget);
  facts.clear(static_cast<int>(threadIdx.x));
  __syncthreads();
  if (lists.depths > 0 && a.width > 0) {
    look_at(lists, min(budget, a.width), a.vocab_size, a.checked != 0, &facts);
    if (a.checked == 0)  // with all the shared memory: nothing else lies there yet
      check_repeats(lists, reinterpret_cast<int*>(shared), static_cast<int>(shared_bytes / sizeof(int)), &facts);
    __syncthreads();
    if (facts.fault != kNoFault)
      outcome = {static_cast<int>(facts.fault & 15u), static_cast<int>(facts.fault >> 16) + 1,
                 static_cast<int>(facts.fault >> 4 & 0xfffu)};
  }

  Found found{0, 0, KDTREE_ROUTE_NONE, 0};
  SerialTree serial(scratch, a.budget);
  if (!outcome.failed() && budget > 0 && lists.depths > 0 && facts.lengths[0] > 0) {
    found.count = -1;
    if (!facts.positive) found = find_in_parallel(lists, budget, min(budget, a.width), scratch, block);
    if (found.count < 0) {
      __syncthreads();  // nobody is in the parallel route any more
      if (warp_id() == 0) {
        const int count = serial.build(lists, facts.lengths, budget);
        if (lane_id() == 0) block.serial_count = count;
      }
      __syncthreads();
      found = Found{block.serial_count, block.serial_count, KDTREE_ROUTE_SERIAL, 0};
    }
  }

  const Output out{a, static_cast<size_t>(request)};
  write_nodes(out, lists, scratch, found, serial.scores);
  write_paths(out, scratch, found);
  write_visibility(out, scratch, found);
  if (threadIdx.x == 0) {
    a.node_count[request] = found.count;
    if (a.route != nullptr) a.route[request] = found.route;
    write_status(a.status, request, outcome);
  }
}

kdtree_status check(const kdtree_tree_build_args& a) {
  Arguments arguments("kdtree_tree_build");
  arguments.version(a.struct_size, sizeof(a))
      .range("requests", a.requests, 1, KDTREE_MAX_REQUESTS)
      .range("depth_limit", a.depth_limit, 0, KDTREE_MAX_DEPTH)
      .range("width", a.width, 0, KDTREE_MAX_BUDGET)
      .range("budget", a.budget, 0, KDTREE_MAX_BUDGET)
      .range("vocab_size", a.vocab_size, 0, INT32_MAX)
      .range("checked", a.checked, 0, 1)
      .range("shared_memory_limit", a.shared_memory_limit, 0, INT32_MAX);
  const bool lists = a.depth_limit > 0 && a.width > 0;
  arguments.array("lp", a.lp, 4, lists).array("ids", a.ids, 4, lists);
  arguments.array("root_tokens", a.root_tokens, 4, false)
      .array("prefix_lengths", a.prefix_lengths, 4, false)
      .array("depth_limits", a.depth_limits, 4, false)
      .array("budgets", a.budgets, 4, false)
      .array("before", a.before, 4, false)
      .array("node_count", a.node_count, 4)
      .array("tokens", a.tokens, 4)
      .array("parents", a.parents, 4)
      .array("depths", a.depths, 4)
      .array("ranks", a.ranks, 4)
      .array("scores", a.scores, 8)
      .array("positions", a.positions, 4, false)
      .array("visibility", a.visibility, 4, false)
      .array("paths", a.paths, 4, false)
      .array("first_child", a.first_child, 4, a.next_sibling != nullptr)
      .array("next_sibling", a.next_sibling, 4, a.first_child != nullptr)
      .array("route", a.route, 4, false)
      .array("status", a.status, 4);
  return arguments.status();
}

// Dynamic shared memory of a block in bytes: what is left for it beside BlockShared.
kdtree_status find_shared_bytes(const kdtree_tree_build_args& a, size_t* bytes) {
  size_t limit = shared_memory_optin();
  if (limit == 0) return KDTREE_CUDA;
  if (limit > kMostShared) limit = kMostShared;
  if (a.shared_memory_limit > 0 && static_cast<size_t>(a.shared_memory_limit) < limit)
    limit = static_cast<size_t>(a.shared_memory_limit);

  const size_t fixed = TreeScratch::fixed_bytes(a.budget), reach = static_cast<size_t>(std::min(a.width, a.budget));
  const size_t depths = static_cast<size_t>(a.depth_limit), counts = depths * kBins * sizeof(int);
  const size_t members = static_cast<size_t>(TreeSizes(a.budget).nodes) * sizeof(uint16_t);
  const size_t set = sizeof(int) << set_bits(a.width);
  const size_t least = round_up(fixed + std::max({counts, members, set, SerialTree::bytes(a.budget)}), 16);
  if (least + sizeof(BlockShared) > limit)
    return fail(KDTREE_UNSUPPORTED,
                "kdtree_tree_build: depth limit %d, width %d, budget %d need at least %zu bytes of shared memory in a "
                "block, which may have %zu",
                a.depth_limit, a.width, a.budget, least + sizeof(BlockShared), limit);
  // Costs of list entries that find no room are computed again from the lists.
  const size_t whole = std::max(least, fixed + counts + depths * reach * sizeof(uint32_t));
  *bytes = std::min(whole, limit - sizeof(BlockShared));
  return KDTREE_OK;
}

kdtree_status launch(const kdtree_tree_build_args& a, size_t shared_bytes) {
  KDTREE_RETURN_IF_FAILED(allow_shared_memory(reinterpret_cast<const void*>(tree_build_kernel), "kdtree_tree_build",
                                              shared_bytes, sizeof(BlockShared)));
  const dim3 grid(static_cast<unsigned>(a.requests)), block(static_cast<unsigned>(TreeSizes(a.budget).threads));
  KDTREE_LAUNCH(tree_build_kernel, grid, block, shared_bytes, static_cast<cudaStream_t>(a.stream), a, shared_bytes);
  return check_launch("tree_build_kernel");
}

}  // namespace
}  // namespace kdtree

using namespace kdtree;

extern "C" size_t kdtree_tree_build_workspace(int32_t, int32_t, int32_t, int32_t) { return 0; }

extern "C" kdtree_status kdtree_tree_build(const kdtree_tree_build_args* args) {
  if (args == nullptr) return fail(KDTREE_POINTER, "kdtree_tree_build: args is NULL");
  size_t shared_bytes = 0;
  KDTREE_RETURN_IF_FAILED(check(*args));
  KDTREE_RETURN_IF_FAILED(find_shared_bytes(*args, &shared_bytes));
  return launch(*args, shared_bytes);
}

extern "C" kdtree_status kdtree_logits_tree(const kdtree_topk_logprob_args* topk, const kdtree_tree_build_args* tree) {
  if (topk == nullptr || tree == nullptr) return fail(KDTREE_POINTER, "kdtree_logits_tree: topk or tree is NULL");
  Arguments arguments("kdtree_logits_tree");
  arguments.version(topk->struct_size, sizeof(*topk))
      .version(tree->struct_size, sizeof(*tree))
      .range("tree.requests", tree->requests, topk->requests, topk->requests)
      .range("tree.depth_limit", tree->depth_limit, topk->depth_limit, topk->depth_limit)
      .range("tree.width", tree->width, topk->k, topk->k);
  if (arguments.failed()) return arguments.status();
  if (tree->lp != topk->lp || tree->ids != topk->ids || tree->depth_limits != topk->depth_limits ||
      tree->stream != topk->stream)
    return fail(KDTREE_POINTER, "kdtree_logits_tree: lp, ids, depth_limits and stream of tree must be those of topk");
  // All that can be refused is refused before the first kernel is enqueued.
  kdtree_tree_build_args behind = *tree;
  behind.before = topk->status;  // a request whose logits are refused gets no tree
  behind.checked = 1;
  size_t shared_bytes = 0;
  KDTREE_RETURN_IF_FAILED(check(behind));
  KDTREE_RETURN_IF_FAILED(find_shared_bytes(behind, &shared_bytes));
  KDTREE_RETURN_IF_FAILED(kdtree_topk_logprob(topk));
  return launch(behind, shared_bytes);
}
