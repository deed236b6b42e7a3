// How the attention on wgmma is cut, without a device: whatever the parts, a row's leaves are added in one order.

#include <algorithm>
#include <random>

#include "kernels/mla_wgmma_plan.h"
#include "tests/check.h"

using namespace kdtree;
using namespace kdtree::mla_wgmma;

namespace {

// A node, and how it was added up, as text.
struct Summed {
  int begin;
  std::string how;
};

std::string leaf(int begin, int end) { return std::to_string(begin) + "-" + std::to_string(end) + " "; }
std::string add(const std::string& node, const std::string& next) { return "(" + node + next + ")"; }

// One request.
struct Pass {
  int heads, width, prefix, node_count, longest, parts, weight;
  bool spans;
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
    plan.longest = longest, plan.parts = parts, plan.weight = weight, plan.spans = spans, plan.slice = 1;
    plan.count_nodes(width);
    return plan;
  }
};

// What a block does at the end of its leaves. Returns what it leaves.
std::vector<Summed> work(const Item& item) {
  std::vector<Summed> left;
  int first = item.begin;
  bool open = false;  // the last node
  for (int pair = 0; pair < item.pairs(); ++pair) {
    const int next = item.begin + (pair + 1) * kPair;
    if (pair + 1 < item.pairs() && next < first + leaf_keys(first)) continue;
    CHECK(next <= first + leaf_keys(first));
    const std::string now = leaf(first, std::min(next, item.end));
    const int span = span_floor(first);
    if (span >= item.begin && span < first) {
      CHECK(open);
      left.back().how = add(left.back().how, now);
    } else {
      CHECK(!open);
      left.push_back({first, now});
    }
    open = span >= item.begin && next < span + span_keys(span);
    first = next;
  }
  return left;
}

// What the joining kernel makes of nodes in their order.
std::string join_all(const std::vector<Summed>& nodes) {
  std::string all, span;
  for (const Summed& node : nodes) {
    if (node.begin != span_floor(node.begin)) {
      CHECK(!span.empty());
      span = add(span, node.how);
      continue;
    }
    all = add(all, span);
    span = node.how;
  }
  return add(all, span);
}

// The sum of so many keys, as it is defined.
std::string sum_of(int keys) {
  std::vector<Summed> leaves;
  for (int begin = 0; begin < keys; begin += leaf_keys(begin))
    leaves.push_back({begin, leaf(begin, std::min(begin + leaf_keys(begin), keys))});
  return join_all(leaves);
}

void check_pass(const Pass& pass, int group) {
  const MlaAttentionBf16Args a = pass.args();
  Plan plan = pass.plan();
  plan.first = group;
  std::vector<std::vector<Summed>> left;
  int free = 0;  // the first place in the workspace that no node takes
  for (int i = 0; i < plan.items(); ++i) {
    const Item item(a, plan, 0, i);
    left.push_back(work(item));
    if (left.back().empty()) continue;
    CHECK(item.first_slot >= free);
    free = item.first_slot + static_cast<int>(left.back().size());
  }
  CHECK(free <= plan.nodes());
  for (int i = 0; i < std::max(plan.tails, 1); ++i) {
    const int node = group * kRows / pass.heads + i;
    const int keys = node < pass.width ? mla_bf16::keys_of(a, 0, node) : 0;
    if (keys == 0) continue;
    // As the joining kernel finds them: from each item as many as its run of leaves makes.
    const int length = plan.length(a, 0), end = leaves_end(keys);
    const int shared_end = plan.tails == 0 ? end : leaf_floor(std::min(pass.prefix, pass.longest));
    std::vector<Summed> nodes;
    for (int item = 0; item < plan.parts + (plan.tails > 0 ? 1 : 0); ++item) {
      const bool tail = item == plan.parts;
      const int stop = tail ? end : std::min(plan.part_begin(item + 1, length), shared_end);
      const std::vector<Summed>& of = left[static_cast<size_t>(tail ? item + i : item)];
      const int begin = tail ? shared_end : plan.part_begin(item, length);
      size_t slot = 0;
      for (int at = begin; at < stop; at = node_end(at, begin, stop)) {
        CHECK(slot < of.size());
        CHECK_EQUAL(of[slot].begin, at);
        nodes.push_back(of[slot++]);
      }
      CHECK_EQUAL(slot, of.size());
    }
    CHECK_EQUAL(join_all(nodes), sum_of(keys));
  }
}

}  // namespace

TEST(however_a_pass_is_cut_the_sum_is_that_of_the_keys) {
  std::mt19937 generator(1);
  const auto below = [&](int n) { return static_cast<int>(generator() % static_cast<uint32_t>(n)); };
  for (int i = 0; i < (check::tiny() ? 500 : 10000); ++i) {
    const int capacity = std::vector<int>{200, 1500, 5000, 20000, 70000, 140000}[static_cast<size_t>(below(6))];
    Pass pass{
        16 << below(4), 1 + below(below(4) > 0 ? 40 : 300), below(capacity), 0, 0, 1, below(120), below(2) == 0, {}};
    pass.node_count = below(8) == 0 ? below(pass.width + 1) - 1 : pass.width - 1;
    const bool chain = below(2) == 0;
    for (int row = 0; row < pass.width; ++row)
      pass.positions.push_back(row > pass.node_count ? 1 << 30
                                                     : pass.prefix + (chain ? row : below(std::min(row, 15) + 1)));
    pass.longest = pass.prefix + pass.width + (below(2) == 0 ? below(2 * capacity) : 0);
    const int units = pass.plan().units(pass.longest);
    pass.parts = below(3) == 0 ? units : below(3) == 0 ? 1 : 1 + below(units);
    check_pass(pass, below(pass.plan().groups));
  }
}

TEST(parts_take_about_as_long) {
  for (const int length : {1025, 8200, 32801, 131105})
    for (const int parts : {2, 4, 7}) {
      Plan plan{};
      plan.longest = length, plan.parts = parts, plan.weight = kLeafKeys;
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
