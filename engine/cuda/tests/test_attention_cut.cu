// How the attention on wgmma is cut, without a device: whatever the parts, a row's leaves are joined by the same tree.

#include <algorithm>
#include <random>

#include "kernels/mla_wgmma_plan.h"
#include "tests/check.h"

using namespace kdtree;
using namespace kdtree::mla_wgmma;

namespace {

// A node, and how it was joined, as text.
struct Joined {
  int begin, size;
  std::string how;
};

std::string leaf(int begin, int end) { return std::to_string(begin) + "-" + std::to_string(end) + " "; }
std::string join(const std::string& left, const std::string& right) { return "(" + left + right + ")"; }

// One request.
struct Pass {
  int heads, width, prefix, node_count, longest, parts;
  std::vector<int32_t> positions;

  MlaAttentionBf16Args args() const {
    MlaAttentionBf16Args a{};
    a.rows.requests = 1, a.rows.width = width;
    a.rows.node_count = &node_count, a.rows.prefix_lengths = &prefix, a.rows.positions = positions.data();
    a.heads = heads, a.longest = longest;
    return a;
  }
  Plan plan() const {
    Plan plan{};
    plan.groups = static_cast<int>(ceil_div(width * heads, kRows));
    plan.tails = heads < kRows ? kRows / heads : 0;
    plan.longest = longest, plan.parts = parts, plan.slice = 1;
    plan.slots = plan.most_nodes(width);
    return plan;
  }
};

// What a block does at the end of its leaves. Returns what it leaves, or all in one where it has all of the rows' keys.
std::vector<Joined> work(const Item& item, int slots) {
  std::vector<Joined> left;
  int first = item.begin;
  for (int pair = 0; pair < item.pairs(); ++pair) {
    const int next = item.begin + (pair + 1) * kPair;
    const bool last = pair + 1 == item.pairs();
    if (!last && next < first + leaf_keys(first)) continue;
    CHECK(next <= first + leaf_keys(first));
    Joined now{first, leaf_keys(first), leaf(first, std::min(next, item.end))};
    while (!left.empty() &&
           ((last && item.all) || (is_right(now.begin, now.size) && now.begin - now.size >= item.begin))) {
      CHECK((last && item.all) || (left.back().begin == now.begin - now.size && left.back().size == now.size));
      now = {now.begin - now.size, 2 * now.size, join(left.back().how, now.how)};
      left.pop_back();
    }
    left.push_back(now);
    CHECK(static_cast<int>(left.size()) <= slots);
    first = next;
  }
  return left;
}

// What the joining kernel makes of nodes in their order.
std::string join_all(const std::vector<Joined>& nodes, int levels) {
  std::vector<Joined> waiting;
  for (const Joined& node : nodes) {
    Joined now = node;
    CHECK(static_cast<int>(waiting.size()) < levels);
    while (is_right(now.begin, now.size)) {
      CHECK(!waiting.empty());
      now = {now.begin - now.size, 2 * now.size, join(waiting.back().how, now.how)};
      waiting.pop_back();
    }
    waiting.push_back(now);
  }
  std::string how;
  for (; !waiting.empty(); waiting.pop_back()) how = how.empty() ? waiting.back().how : join(waiting.back().how, how);
  return how;
}

// The tree of so many keys, as it is defined.
std::string tree_of(int keys) {
  std::vector<Joined> leaves;
  for (int begin = 0; begin < keys; begin += leaf_keys(begin))
    leaves.push_back({begin, leaf_keys(begin), leaf(begin, std::min(begin + leaf_keys(begin), keys))});
  return join_all(leaves, 64);
}

void check_pass(const Pass& pass, int group) {
  const MlaAttentionBf16Args a = pass.args();
  Plan plan = pass.plan();
  plan.first = group;
  std::vector<std::vector<Joined>> left;
  for (int i = 0; i < plan.items(); ++i) left.push_back(work(Item(a, plan, 0, i), plan.slots));
  for (int i = 0; i < std::max(plan.tails, 1); ++i) {
    const int node = group * kRows / pass.heads + i;
    const int keys = node < pass.width ? mla_bf16::keys_of(a, 0, node) : 0;
    if (keys == 0) continue;
    // As the joining kernel finds them: from each item as many as its run of leaves makes.
    const int length = plan.length(a, 0), end = leaves_end(keys);
    const int shared_end = plan.tails == 0 ? end : leaf_floor(std::min(pass.prefix, pass.longest));
    std::vector<Joined> nodes;
    for (int item = 0; item < plan.parts + (plan.tails > 0 ? 1 : 0); ++item) {
      const bool tail = item == plan.parts;
      const int stop = tail ? end : std::min(plan.part_begin(item + 1, length), shared_end);
      const std::vector<Joined>& of = left[static_cast<size_t>(tail ? item + i : item)];
      size_t slot = 0;
      if (plan.items() == 1) {
        nodes = of;
        continue;
      }
      for (int at = tail ? shared_end : plan.part_begin(item, length); at < stop; at += of[slot++].size) {
        CHECK(slot < of.size());
        CHECK_EQUAL(of[slot].begin, at);
        CHECK_EQUAL(of[slot].size, node_keys(at, stop));
        nodes.push_back(of[slot]);
      }
    }
    if (plan.items() == 1) {
      CHECK_EQUAL(nodes.size(), 1u);
      CHECK_EQUAL(nodes[0].how, tree_of(keys));
    } else {
      CHECK_EQUAL(join_all(nodes, plan.levels()), tree_of(keys));
    }
  }
}

}  // namespace

TEST(however_a_pass_is_cut_the_tree_is_that_of_the_keys) {
  std::mt19937 generator(1);
  const auto below = [&](int n) { return static_cast<int>(generator() % static_cast<uint32_t>(n)); };
  for (int i = 0; i < (check::tiny() ? 500 : 10000); ++i) {
    const int capacity = std::vector<int>{200, 1500, 5000, 20000, 70000, 140000}[static_cast<size_t>(below(6))];
    Pass pass{16 << below(4), 1 + below(below(4) > 0 ? 40 : 300), below(capacity), 0, 0, 1, {}};
    pass.node_count = below(8) == 0 ? below(pass.width + 1) - 1 : pass.width - 1;
    const bool chain = below(2) == 0;
    for (int row = 0; row < pass.width; ++row)
      pass.positions.push_back(row > pass.node_count ? 1 << 30
                                                     : pass.prefix + (chain ? row : below(std::min(row, 15) + 1)));
    pass.longest = pass.prefix + pass.width + (below(2) == 0 ? below(2 * capacity) : 0);
    const int leaves = leaf_of(pass.longest - 1) + 1;
    pass.parts = below(3) == 0 ? leaves : below(3) == 0 ? 1 : 1 + below(leaves);
    check_pass(pass, below(pass.plan().groups));
  }
}

TEST(parts_take_about_as_long) {
  for (const int length : {1025, 8200, 32801, 131105})
    for (const int parts : {2, 4, 7}) {
      Plan plan{};
      plan.longest = length, plan.parts = parts;
      const auto cost = [&](int part) {
        const int begin = plan.part_begin(part, length), end = std::min(plan.part_begin(part + 1, length), length);
        return end - begin + kLeafKeys * (leaf_of(end - 1) + 1 - leaf_of(begin));
      };
      const int leaf = leaf_keys(length - 1) + kLeafKeys;
      int all = 0;
      for (int part = 0; part < parts; ++part) all += cost(part);
      for (int part = 0; part < parts; ++part) CHECK(std::abs(cost(part) - all / parts) <= leaf);
    }
}
