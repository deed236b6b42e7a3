// How the attention on wgmma is cut: leaves and spans of keys by absolute position, and the items that blocks work on.
//
// A leaf is summed from nothing, its tiles in order. The leaves of a span are added up in order, then the spans. So
// every bit follows from the row's own keys alone, and a block may take any run of leaves: of a span that begins in its
// run it leaves one node, the sum of what it has of it; of a span that began before, each leaf.
#pragma once

#include <algorithm>

#include "kernels/mla_bf16_plan.h"

namespace kdtree::mla_wgmma {

constexpr int kLatent = 512, kRope = 64, kRowBytes = 2 * (kLatent + kRope);
constexpr int kRows = 64;  // head rows of an item
constexpr int kTile = 64, kPair = 2 * kTile;

// Short leaves let one row over few keys have many blocks; each costs an addition of 64 x 512 sums.
__host__ __device__ constexpr int leaf_keys(int position) {
  return position < 1024 ? 128 : position < 2048 ? 256 : position < 8192 ? 512 : position < 32768 ? 1024 : 2048;
}
__host__ __device__ constexpr int leaf_begin(int leaf) {
  return leaf < 8    ? leaf * 128
         : leaf < 12 ? 1024 + (leaf - 8) * 256
         : leaf < 24 ? 2048 + (leaf - 12) * 512
         : leaf < 48 ? 8192 + (leaf - 24) * 1024
                     : 32768 + (leaf - 48) * 2048;
}
__host__ __device__ constexpr int leaf_of(int position) {
  return position < 1024    ? position / 128
         : position < 2048  ? 8 + (position - 1024) / 256
         : position < 8192  ? 12 + (position - 2048) / 512
         : position < 32768 ? 24 + (position - 8192) / 1024
                            : 48 + (position - 32768) / 2048;
}
__host__ __device__ constexpr int leaf_floor(int position) { return position & -leaf_keys(position); }
// Behind the leaf of the last of so many keys.
__host__ __device__ constexpr int leaves_end(int keys) {
  return keys <= 0 ? 0 : leaf_floor(keys - 1) + leaf_keys(keys - 1);
}
static_assert(leaf_begin(leaf_of(8191) + 1) == 8192 && leaf_begin(leaf_of(32767) + 1) == 32768 &&
              leaf_floor(2047) == 2048 - 256 && leaves_end(32769) == 32768 + 2048);

constexpr int kSpanLeaves = 8;  // at most
constexpr int kLeastSpan = 1024;
__host__ __device__ constexpr int span_keys(int position) {
  return position < 2048 ? 1024 : position < 8192 ? 2048 : position < 32768 ? 8192 : 16384;
}
__host__ __device__ constexpr int span_begin(int span) {
  return span < 2   ? span * 1024
         : span < 5 ? 2048 + (span - 2) * 2048
         : span < 8 ? 8192 + (span - 5) * 8192
                    : 32768 + (span - 8) * 16384;
}
__host__ __device__ constexpr int span_of(int position) {
  return position < 2048    ? position / 1024
         : position < 8192  ? 2 + (position - 2048) / 2048
         : position < 32768 ? 5 + (position - 8192) / 8192
                            : 8 + (position - 32768) / 16384;
}
__host__ __device__ constexpr int span_floor(int position) { return position & -span_keys(position); }
static_assert(span_begin(span_of(8191) + 1) == 8192 && span_begin(span_of(32767) + 1) == 32768 &&
              span_floor(2047) == 1024 && span_floor(65535) == 49152);

// Where the node ends that begins at a leaf's begin in a run of keys.
__host__ __device__ constexpr int node_end(int at, int run_begin, int run_end) {
  const int end = span_floor(at) >= run_begin ? span_floor(at) + span_keys(at) : at + leaf_keys(at);
  return end < run_end ? end : run_end;
}
__host__ __device__ constexpr int nodes_of(int begin, int end) {
  int nodes = 0;
  for (int at = begin; at < end; at = node_end(at, begin, end)) ++nodes;
  return nodes;
}

constexpr int kLeafKeys = 60;  // in the time that a leaf's end takes, about

// How a pass is cut. A group is 64 head rows of a request: of one node, or of several with fewer heads. Its items are
// `parts` runs of leaves and, of several nodes, a tail of each: from the leaf on in which the prefix ends.
struct Plan {
  int groups;  // of a request
  int parts;
  int tails;                   // items behind the parts: nodes of a group, 0 if one
  int part_nodes, tail_nodes;  // of all parts of a group, of a tail, at most
  bool spans;                  // parts begin where spans do
  int weight;                  // of a leaf where parts are cut: so many keys
  int longest;
  int slice;  // groups of a launch
  int first;  // of the launch, of all requests
  int boxes;  // copies that bring 64 rows; 0: rows of the cache lie so that each comes by itself

  __host__ __device__ int items() const { return parts + tails; }
  // Keys that no row of a request has more of: what the parts are cut from, as `longest` may be far more.
  __host__ __device__ int length(const MlaAttentionBf16Args& a, int request) const {
    return max(min(a.rows.prefix_lengths[request] + a.rows.width, longest), 1);
  }
  // Leaves or spans, of which parts are runs.
  __host__ __device__ int units(int length) const { return (spans ? span_of(length - 1) : leaf_of(length - 1)) + 1; }
  __host__ __device__ int unit_begin(int unit) const { return spans ? span_begin(unit) : leaf_begin(unit); }
  // Runs that take about as long.
  __host__ __device__ int part_begin(int part, int length) const {
    const int end = leaves_end(length), all = units(length);
    if (part >= parts) return end;
    if (parts >= all) return min(unit_begin(part), end);
    const int more = weight;
    const auto cost = [=](int begin) { return min(begin, length) + int64_t{more} * leaf_of(begin); };
    const int64_t at = cost(end) * part / parts;
    int low = 0, high = all;  // the first unit whose middle is not before
    while (low < high) {
      const int middle = (low + high) / 2;
      if (cost(unit_begin(middle)) + cost(min(unit_begin(middle + 1), end)) < 2 * at)
        low = middle + 1;
      else
        high = middle;
    }
    return min(unit_begin(low), end);
  }
  // Where in a group's nodes those of a part are that begins at `begin`: parts before it leave no more than its leaves,
  // nor than the spans that begin there and, each, leaves of a span that began before.
  __host__ __device__ int first_node(int part, int begin) const {
    const int begun = begin > 0 ? span_of(begin - 1) + 1 : 0;
    return min(leaf_of(begin), begun + (spans ? 0 : part * (kSpanLeaves - 1)));
  }
  // Likewise of a tail.
  __host__ __device__ int first_tail_node(int tail) const { return part_nodes + tail * tail_nodes; }
  __host__ __device__ int nodes() const { return first_tail_node(tails); }
  // Once parts and tails are known. A tail begins with the last leaf of the prefix.
  void count_nodes(int width) {
    part_nodes = first_node(parts, leaves_end(longest));
    tail_nodes = tails > 0 ? std::min(kSpanLeaves + width / kLeastSpan + 2, width / kPair + 3) : 0;
  }
};

// What an item leaves: nodes in the order of their keys. For either half of the columns and each of 128 threads 32
// times the sums of two columns in two rows, 8 apart; then for each such pair of rows peaks to base 2 and totals: those
// of the tiles of the half's number.
constexpr int kNodePieces = 32;
constexpr int64_t kHalfVectors = kNodePieces * 128 + kRows / 2, kNodeVectors = 2 * kHalfVectors;
__host__ __device__ constexpr int64_t node_vector(int half, int piece, int thread) {
  return half * kHalfVectors + piece * 128 + thread;
}
__host__ __device__ constexpr int64_t node_state(int half, int row) {
  return half * kHalfVectors + kNodePieces * 128 + row / 16 * 8 + row % 8;
}
inline size_t group_bytes(const Plan& plan) {
  return static_cast<size_t>(plan.nodes()) * kNodeVectors * sizeof(float4);
}

// What one block works on: rows `first_row` and the next 63 of a request, those from `row_begin` to `row_end` used,
// over keys `begin` to `end`.
struct Item {
  int request, first_row, row_begin, row_end;
  int node;  // whose path the keys behind the prefix are
  int prefix;
  int begin, end;
  int first_slot;  // of its nodes, in the workspace

  __host__ __device__ Item(const MlaAttentionBf16Args& a, const Plan& plan, int local, int index) {
    const int group = plan.first + local;
    request = group / plan.groups;
    first_row = group % plan.groups * kRows;
    node = first_row / a.heads;
    prefix = a.rows.prefix_lengths[request];
    row_begin = 0;
    row_end = kRows;
    begin = end = 0;
    if (plan.tails == 0) {
      end = mla_bf16::keys_of(a, request, node);
    } else {
      row_end = min(kRows, (min(a.rows.node_count[request] + 1, a.rows.width) - node) * a.heads);
      if (row_end > 0) end = leaf_floor(min(prefix, a.longest));
    }
    if (index < plan.parts) {
      const int length = plan.length(a, request);
      begin = plan.part_begin(index, length);
      first_slot = local * plan.nodes() + plan.first_node(index, begin);
      end = min(end, plan.part_begin(index + 1, length));
    } else {
      first_slot = local * plan.nodes() + plan.first_tail_node(index - plan.parts);
      row_begin = (index - plan.parts) * a.heads;
      row_end = min(row_end, row_begin + a.heads);
      begin = end;
      node += index - plan.parts;
      if (row_begin < row_end) end = mla_bf16::keys_of(a, request, node);
    }
  }

  __host__ __device__ int pairs() const { return end > begin ? (end - begin + kPair - 1) / kPair : 0; }
  // Of them those that lie in the prefix and come in boxes.
  __host__ __device__ int boxed(const Plan& plan) const {
    return plan.boxes > 0 ? max(min(prefix, end) - begin, 0) / kPair : 0;
  }

  // The row of the cache, counted from where those of the request begin, of the key at `position`; -1: none.
  __device__ int cache_row(const MlaAttentionBf16Args& a, int position) const {
    return position < end ? path_row(a.rows, a.cache, request, node, prefix, position) : -1;
  }
};

}  // namespace kdtree::mla_wgmma
