// Lists -> tree: the best-first tree of each request, one block a request, bit for bit that of reference/tree.py.
//
// Calls of small budgets go to the kernel of tree_small.h. Of the others tree_lists.h checks the lists and decides the
// route, tree_parallel.h and tree_serial.h find the nodes and their order, this file writes them out: tokens, links,
// paths, visibility words, positions.
//
// What a tree takes is latency: a launch overlaps the end of the kernel before, the lists come in one trip to global
// memory, all after it is done in shared memory, visibility is filled with zeros while one warp makes an estimate - of
// a call from logits while their lists are made -, and the outputs leave side by side. The kernel exists for 256, 512
// and 1024 threads, by budget (tree_scratch.h). tree_build.md: where the time goes.

#include <algorithm>

#include "common/behind.h"
#include "kernels/tree_output.h"
#include "kernels/tree_parallel.h"
#include "kernels/tree_serial.h"
#include "kernels/tree_small.h"

namespace kdtree {
namespace {

// The nodes of one request as the routes leave them: node i (1..count) is expanded index order[i - 1].
struct Found {
  int count;
  int expanded;  // nodes in the scratch
  int route;
};

// Where scores come from.
struct Scores {
  const double* serial;  // [nodes] of the serial route
  double unit;           // of the parallel one: the score of a cost of 1
};

// Score of a node that costs nothing. In the contract's order of operations it is -0 only as a sum of nothing but -0:
// a step to the next sibling subtracts what was added, and 0 - 0 is +0.
template <typename Scratch>
__device__ double zero_score(const Lists& lists, Scratch& s, int node) {
  for (int d = s.depths[node]; d >= 0; --d, node = s.parents[node])
    if (s.ranks[node] > 0 || __float_as_uint(lists.at(d, 0)) == 0) return 0.0;
  return -0.0;
}

template <typename Scratch>
__device__ double score_of(const Lists& lists, Scratch& s, const Found& found, const Scores& scores, int node) {
  if (found.route == KDTREE_ROUTE_SERIAL) return scores.serial[node];
  return s.costs[node] == 0 ? zero_score(lists, s, node) : static_cast<double>(s.costs[node]) * scores.unit;
}

// Node number of an expanded index; 0: the root, -1: not in the tree.
template <typename Scratch>
__device__ int node_of(Scratch& s, const Found& found, int index) {
  if (index == kNone) return 0;
  return s.places[index] < found.count ? s.places[index] + 1 : -1;
}

template <typename Scratch>
__device__ int first_child(Scratch& s, const Found& found, int index) {
  const int child = index == kNone ? 0 : s.starts[index];
  if (child >= found.expanded || s.parents[child] != index) return -1;
  return node_of(s, found, child);
}

template <typename Scratch>
__device__ int next_sibling(Scratch& s, const Found& found, int index) {
  if (found.route == KDTREE_ROUTE_SERIAL) {
    const uint32_t next = s.costs[index];
    return next == kNone ? -1 : node_of(s, found, static_cast<int>(next));
  }
  const int next = index + 1;
  return next < found.expanded && s.parents[next] == s.parents[index] ? node_of(s, found, next) : -1;
}

// Node i of the request, or the filler.
template <typename Scratch>
__device__ void write_node(const Output& out, const Lists& lists, Scratch& s, const Found& found, const Scores& scores,
                           const Root& root, int i) {
  NodeRow row;
  if (i == 0) {
    row.token = root.token;
    row.position = root.position;
    if (found.count > 0) row.first_child = first_child(s, found, kNone);
  } else if (i <= found.count) {
    const int node = s.order[i - 1], d = s.depths[node];
    row.rank = s.ranks[node];
    row.token = lists.id(d, row.rank);
    row.parent = node_of(s, found, s.parents[node]);
    row.depth = d + 1;
    row.position = root.position + row.depth;
    row.score = score_of(lists, s, found, scores, node);
    if (out.a.first_child != nullptr) {
      row.first_child = first_child(s, found, node);
      row.next_sibling = next_sibling(s, found, node);
    }
  }
  out.write(i, row);
}

// What the path of a node takes in shared memory on its way.
__host__ __device__ constexpr size_t path_bytes(int depth_limit) {
  return (static_cast<size_t>(depth_limit) + 1) * sizeof(uint16_t);
}

// Path of node i (kNone behind its end), and those of its visibility words that are not 0. Numbers fall on the way to
// the root, so a word is complete when the walk leaves it.
template <typename Scratch>
__device__ void walk_up(Scratch& s, const Found& found, int i, int columns, uint16_t* path, uint32_t* words) {
  const bool there = i <= found.count;
  int up = there && i > 0 ? s.order[i - 1] : kNone, word = i / 32;
  uint32_t bits = 0;
  const int depth = up == kNone ? 0 : s.depths[up] + 1;
  KDTREE_UNROLL_BY(1)
  for (int d = columns - 1; d > depth; --d) path[d] = kNone;
  path[0] = there ? 0 : kNone;
  KDTREE_UNROLL_BY(1)
  for (int d = depth; d > 0; --d) {
    const int number = s.places[up] + 1;
    up = s.parents[up];
    path[d] = static_cast<uint16_t>(number);
    if (number / 32 != word) {
      if (words != nullptr) words[word] = bits;
      word = number / 32;
      bits = 0;
    }
    bits |= 1u << number % 32;
  }
  if (!there || words == nullptr) return;
  if (word > 0) {
    words[word] = bits;
    bits = 0;
  }
  words[0] = bits | 1u;
}

// All arrays with a row for every node; visibility holds zeros. Thread by thread, paths would be written far apart:
// they are laid out in `space` and leave it side by side, as many rows at a time as fit. With few nodes other warps
// walk than write nodes.
template <typename Scratch>
__device__ void write_tree(const Output& out, const Lists& lists, Scratch& s, const Found& found, const Scores& scores,
                           const Root& root, unsigned char* space, size_t bytes) {
  const kdtree_tree_build_args& a = out.a;
  const int rows = static_cast<int>(out.rows), threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x), columns = a.depth_limit + 1, words = visibility_words(a.budget);
  uint32_t* const visibility = out.block(a.visibility, words);
  int32_t* const paths = out.block(a.paths, columns);
  const int at_once = min(rows, static_cast<int>(bytes / path_bytes(a.depth_limit)));
  uint16_t* const steps = reinterpret_cast<uint16_t*>(space);
  for (int i = thread; i < rows; i += threads) write_node(out, lists, s, found, scores, root, i);
  for (int first = 0; first < rows; first += at_once) {
    const int some = min(at_once, rows - first);
    if (first > 0) __syncthreads();
    for (int i = threads - 1 - thread; i < some; i += threads)
      walk_up(s, found, first + i, columns, steps + i * columns,
              visibility == nullptr ? nullptr : visibility + static_cast<size_t>(first + i) * words);
    __syncthreads();
    if (paths != nullptr)
      store_all(reinterpret_cast<uint32_t*>(paths + first * columns), some * columns, thread, threads, [&](int i) {
        return [from = steps + i]() mutable {
          const uint32_t step = *from++;
          return step == kNone ? 0xffffffffu : step;
        };
      });
  }
}

// What a block shares beside its dynamic memory.
// Aligned as the dynamic memory behind it is: what the compiler adds up is then sizeof.
struct alignas(128) BlockShared {
  float level[kCostBins];  // of the estimate, as is the answer
  int status[3];           // as an Outcome, which has a constructor
  ListFacts facts;
  unsigned totals[2][kWarp];  // of BlockScan
  Frontier frontier;
  uint32_t answer;
  int serial_count;
  Root root;
  bool blank;  // visibility holds zeros

  __device__ void keep(const Outcome& outcome) {
    status[0] = outcome.code;
    status[1] = outcome.place;
    status[2] = outcome.detail;
  }
};

// Finds the nodes by threshold; count -1 where costs need more than 32 bits or no threshold cuts near the budget.
// kWhole: the costs of all entries that the budget can reach fit into shared memory. make_blank(n): called once at
// most, by all threads from n on, while the others are at work.
template <bool kWhole, typename Scratch, typename F>
__device__ Found find_in_parallel(const Lists& lists, int budget, const ListSpace& space, Scratch& s, BlockShared& b,
                                  const F& make_blank) {
  const ListFacts& facts = b.facts;
  BlockScan scan(b.totals);
  const int room = room_of(budget);
  const Costs<kWhole> costs{lists, facts.lengths, CostOf(facts.unit_bit()), space.near, space.near_bits};
  costs.prepare();
  s.clear_sizes();
  __syncthreads();
  const int depths = find_bound(costs, budget, &b.frontier);
  Found found{-1, 0, KDTREE_ROUTE_PARALLEL};
  const Frontier& frontier = b.frontier;
  if (frontier.bound == kTooDear) return found;
  const bool all = frontier.all_nodes < static_cast<float>(budget);
  const int wanted = all ? static_cast<int>(frontier.all_nodes) : budget;
  uint32_t high = frontier.bound, low = 0, threshold = high;
  // Where the bound is worth a try, it is try 0. An estimate, if it may be needed, is try 1.
  for (int tries = room >= kRoomy * budget || frontier.flat ? 0 : 1; tries < kMostTries; ++tries) {
    if (tries == 1 && frontier.all_nodes > static_cast<float>(room))
      threshold = estimate(costs, depths, frontier.bound, 1.35f * static_cast<float>(budget),
                           {reinterpret_cast<float (*)[2 * kCostBins]>(s.rest()), b.level, &b.answer},
                           [&] { make_blank(kWarp); });
    const Buckets buckets(threshold, Scratch::kBuckets);
    const int expanded = expand(costs, depths, threshold, room, s);
    if (expanded >= wanted && expanded <= room) {
      if (expanded <= kFewNodes)
        rank_few<Scratch::kBuckets / 2>(s, expanded, wanted);
      else
        rank(s, expanded, wanted, buckets, reinterpret_cast<uint16_t*>(s.rest()), scan);
      found.count = wanted;
      found.expanded = expanded;
      return found;
    }
    __syncthreads();  // nobody reads this try's scratch any more
    s.clear_sizes();
    // Fewer than wanted cost at most low - 1; at least as many cost at most high.
    if (expanded > room) {
      if (threshold == low) break;  // one tie, wider than the room
      high = threshold;
    } else {
      low = threshold + 1;
    }
    threshold = low + (high - low) / 2;
    __syncthreads();
  }
  return found;
}

// At least one block a multiprocessor: without saying so, sm_100 gets 32 registers and spills.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1) tree_build_kernel(kdtree_tree_build_args a, Division division) {
  KDTREE_DYNAMIC_SHARED(shared);
  __shared__ BlockShared block;
  ListFacts& facts = block.facts;

  let_next_start();
  const int request = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const Output out{a, static_cast<size_t>(request)};
  const auto make_blank = [&](int first) {  // by all threads from `first` on: visibility is filled with zeros
    const int words = visibility_words(a.budget);
    if (thread == first) block.blank = true;
    if (a.visibility != nullptr)
      store_all(out.block(a.visibility, words), static_cast<int>(out.rows) * words, thread - first, kThreads - first,
                [](int) { return [] { return 0u; }; });
  };
  if (thread == 0) block.blank = false;
  if (division.early) make_blank(0);
  wait_for_previous();
  const Asked asked(a, request);
  const int budget = asked.budget;
  bool failed = asked.outcome.failed();
  if (thread == 0) block.keep(asked.outcome);  // it takes no registers on the way

  const size_t lists_at = static_cast<size_t>(request) * a.depth_limit * a.width;
  const Lists lists{a.lp + lists_at, a.ids + lists_at, failed || a.width == 0 ? 0 : asked.depth_limit, a.width,
                    division.by_width};
  unsigned char* const near = shared + division.bytes - (sizeof(uint32_t) * a.depth_limit << division.near_bits);
  const ListSpace space{reinterpret_cast<uint32_t*>(near), division.near_bits,
                        a.checked != 0 ? nullptr : reinterpret_cast<int*>(shared), division.set_rows,
                        division.set_bits};
  const int reach = min(budget, a.width);
  const auto prepare = [&] {  // what needs no list
    if (thread == 0) {
      block.frontier.bound = kTooDear;
    }
    if (thread == kThreads - 1) block.root = Root::of(a, request);
  };
  const auto make_blank_meanwhile = [&](int first) {
    if (!division.early) make_blank(first);
  };
  if (lists.depths > 0) {
    if (a.checked != 0)
      read_lists<false>(lists, reach, a.vocab_size, space, &facts, prepare);
    else
      read_lists<true>(lists, reach, a.vocab_size, space, &facts, prepare);
    failed = facts.fault != kNoFault;
    if (failed && thread == 0) block.keep(outcome_of(facts.fault));
  } else {
    prepare();
    __syncthreads();
  }

  TreeScratch<kThreads>& scratch = *reinterpret_cast<TreeScratch<kThreads>*>(shared);
  Found found{0, 0, KDTREE_ROUTE_NONE};
  SerialTree serial(scratch, a.budget);
  if (!failed && budget > 0 && lists.depths > 0 && facts.lengths[0] > 0) {
    found.count = -1;
    if (!facts.positive)
      found = reach <= 1 << space.near_bits
                  ? find_in_parallel<true>(lists, budget, space, scratch, block, make_blank_meanwhile)
                  : find_in_parallel<false>(lists, budget, space, scratch, block, make_blank_meanwhile);
    if (found.count < 0) {
      __syncthreads();  // nobody is in the parallel route any more
      if (warp_id() == 0) {
        const int count = serial.build(lists, facts.lengths, budget);
        if (lane_id() == 0) block.serial_count = count;
      }
      __syncthreads();
      found = Found{block.serial_count, block.serial_count, KDTREE_ROUTE_SERIAL};
    }
  }

  if (!block.blank) {
    __syncthreads();  // all have seen that
    make_blank(0);
    __syncthreads();
  }
  const size_t kept = sizeof(scratch) + (found.route == KDTREE_ROUTE_SERIAL ? serial_bytes(a.budget) : 0);
  const double unit = found.route == KDTREE_ROUTE_PARALLEL ? -power_of_two(facts.unit_bit()) : 0;
  write_tree(out, lists, scratch, found, {serial.scores, unit}, block.root, shared + kept, division.bytes - kept);
  if (thread == 0) {
    a.node_count[request] = found.count;
    if (a.route != nullptr) a.route[request] = found.route;
    write_status(a.status, request, {block.status[0], block.status[1], block.status[2]});
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

size_t scratch_bytes(int threads) {
  return threads == 256   ? sizeof(TreeScratch<256>)
         : threads == 512 ? sizeof(TreeScratch<512>)
                          : sizeof(TreeScratch<1024>);
}

// Dynamic shared memory of a call with so much for the costs of entries, so many sets of ids and rows of output at a
// time. What else lies there goes by turns.
size_t bytes_of(const kdtree_tree_build_args& a, int near_bits, size_t sets, size_t rows) {
  const size_t depths = static_cast<size_t>(a.depth_limit), set = sizeof(int) << set_bits(a.width);
  if (a.budget <= kSmallBudget)
    return round_up(std::max(SmallLists::bytes(a.depth_limit, std::min(a.budget, a.width)), sets * set), 16);
  const size_t counts = depths * 2 * kCostBins * sizeof(float), row = path_bytes(a.depth_limit);
  const size_t members = static_cast<size_t>(room_of(a.budget)) * sizeof(uint16_t);
  const size_t near = depths * sizeof(uint32_t) << near_bits;
  const size_t rest = std::max({counts + near, members, serial_bytes(a.budget) + row, rows * row});
  return round_up(std::max(scratch_bytes(threads_of(a.budget)) + rest, sets * set + near), 16);
}

// Divides the dynamic shared memory of a block: what is left for it beside `fixed` bytes.
kdtree_status divide(const kdtree_tree_build_args& a, Division* division) {
  size_t limit = shared_memory_optin();
  if (limit == 0) return KDTREE_CUDA;
  if (limit > kMostShared) limit = kMostShared;
  if (a.shared_memory_limit > 0 && static_cast<size_t>(a.shared_memory_limit) < limit)
    limit = static_cast<size_t>(a.shared_memory_limit);

  constexpr int kLeastBits = 3;
  const bool small = a.budget <= kSmallBudget;
  const size_t fixed = small ? sizeof(SmallShared) : sizeof(BlockShared);
  const size_t least = bytes_of(a, kLeastBits, 1, 1);
  if (least + fixed > limit)
    return fail(KDTREE_UNSUPPORTED,
                "kdtree_tree_build: depth limit %d, width %d, budget %d need at least %zu bytes of shared memory in a "
                "block, which may have %zu",
                a.depth_limit, a.width, a.budget, least + fixed, limit);
  const size_t most = (limit - fixed) / 16 * 16;
  // Costs of list entries that find no room are computed again from the lists.
  int near_bits = kLeastBits;
  if (!small)
    while (1 << near_bits < std::min(a.width, a.budget) && bytes_of(a, near_bits + 1, 1, 1) <= most) ++near_bits;
  const size_t all_sets = a.checked != 0 ? 1 : std::max<size_t>(a.depth_limit, 1);
  const size_t rows = static_cast<size_t>(a.budget) + 1;
  const size_t near = small ? 0 : static_cast<size_t>(a.depth_limit) * sizeof(uint32_t) << near_bits;
  division->bytes = std::min(bytes_of(a, near_bits, all_sets, rows), most);
  division->by_width = Divider::by(a.width);
  division->by_reach = Divider::by(std::min(a.budget, a.width));
  division->by_columns = Divider::by(a.depth_limit + 1);
  division->by_words = Divider::by(visibility_words(a.budget));
  division->near_bits = near_bits;
  division->set_bits = set_bits(a.width);
  division->set_rows = static_cast<int>((division->bytes - near) / (sizeof(int) << division->set_bits));
  return KDTREE_OK;
}

template <typename Kernel>
kdtree_status launch_kernel(const char* name, Kernel kernel, int threads, size_t fixed, const kdtree_tree_build_args& a,
                            const Division& division) {
  KDTREE_RETURN_IF_FAILED(
      allow_shared_memory(reinterpret_cast<const void*>(kernel), "kdtree_tree_build", division.bytes, fixed));
  // The lists may come from the kernel before, whose end is waited for on the device.
  return launch_behind(name, kernel, dim3(static_cast<unsigned>(a.requests)), dim3(static_cast<unsigned>(threads)),
                       division.bytes, static_cast<cudaStream_t>(a.stream), a, division);
}

kdtree_status launch(const kdtree_tree_build_args& a, const Division& division) {
  if (a.budget <= kSmallBudget)
    return launch_kernel("tree_small_kernel", tree_small_kernel, kSmallThreads, sizeof(SmallShared), a, division);
  switch (threads_of(a.budget)) {
    case 256:
      return launch_kernel("tree_build_kernel", tree_build_kernel<256>, 256, sizeof(BlockShared), a, division);
    case 512:
      return launch_kernel("tree_build_kernel", tree_build_kernel<512>, 512, sizeof(BlockShared), a, division);
    default:
      return launch_kernel("tree_build_kernel", tree_build_kernel<1024>, 1024, sizeof(BlockShared), a, division);
  }
}

}  // namespace
}  // namespace kdtree

using namespace kdtree;

extern "C" size_t kdtree_tree_build_workspace(int32_t, int32_t, int32_t, int32_t) { return 0; }

extern "C" kdtree_status kdtree_tree_build(const kdtree_tree_build_args* args) {
  if (args == nullptr) return fail(KDTREE_POINTER, "kdtree_tree_build: args is NULL");
  Division division{};
  KDTREE_RETURN_IF_FAILED(check(*args));
  KDTREE_RETURN_IF_FAILED(divide(*args, &division));
  return launch(*args, division);
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
  Division division{};
  division.early = true;  // the first kernel of the lists is launched such that it waits for all on the stream
  KDTREE_RETURN_IF_FAILED(check(behind));
  KDTREE_RETURN_IF_FAILED(divide(behind, &division));
  KDTREE_RETURN_IF_FAILED(kdtree_topk_logprob(topk));
  return launch(behind, division);
}
