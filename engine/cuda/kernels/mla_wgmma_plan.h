// How the attention on wgmma is cut: leaves of keys by absolute position, the tree that joins them, and the items that
// blocks work on.
//
// A leaf is summed from nothing, its tiles in order. Two neighbours of one size, the first at a multiple of twice that
// size, are joined to a node of twice the size, wherever the row has keys in both; what is left at the row's end is
// joined from the right to the left. So the tree, and with it every bit, follows from the row's own keys alone, and a
// block may take any run of leaves: it joins what is joined within the run, and leaves a few nodes.
#pragma once

#include <algorithm>

#include "kernels/mla_bf16_plan.h"

namespace kdtree::mla_wgmma {

constexpr int kLatent = 512, kRope = 64, kRowBytes = 2 * (kLatent + kRope);
constexpr int kRows = 64;  // head rows of an item
constexpr int kTile = 64, kPair = 2 * kTile;

// Short leaves let one row over few keys have many blocks; each costs a join of 64 x 512 sums.
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

// Whether a node is the right one of two that are joined.
__host__ __device__ constexpr bool is_right(int begin, int size) { return (begin & size) != 0; }
// Keys of the largest node that begins at `begin` and ends by `end`, a border of leaves.
__host__ __device__ constexpr int node_keys(int begin, int end) {
  int size = leaf_keys(begin);
  while (!is_right(begin, size) && size <= end - begin - size) size *= 2;
  return size;
}

// In the time that a leaf's end takes, by guess: the cycles of version 3 in mla_attention_bf16.md give some 230.
constexpr int kLeafKeys = 200;

// How a pass is cut. A group is 64 head rows of a request: of one node, or of several with fewer heads. Its items are
// `parts` runs of leaves and, of several nodes, a tail of each: from the leaf on in which the prefix ends.
struct Plan {
  int groups;  // of a request
  int parts;
  int tails;  // items behind the parts: nodes of a group, 0 if one
  int slots;  // nodes that an item may leave
  int longest;
  int slice;  // groups of a launch
  int first;  // of the launch, of all requests
  int boxes;  // copies that bring 64 rows; 0: rows of the cache lie so that each comes by itself

  __host__ __device__ int items() const { return parts + tails; }
  // At most so many nodes of a row wait for their right neighbours.
  __host__ __device__ int levels() const {
    int levels = 2;
    while (levels < 24 && kPair << (levels - 2) < longest) ++levels;
    return levels < items() * slots ? levels : items() * slots;
  }
  // Keys that no row of a request has more of: what the parts are cut from, as `longest` may be far more.
  __host__ __device__ int length(const MlaAttentionBf16Args& a, int request) const {
    return max(min(a.rows.prefix_lengths[request] + a.rows.width, longest), 1);
  }
  // Runs of leaves that take about as long: a leaf costs as much as some more keys.
  __host__ __device__ int part_begin(int part, int length) const {
    if (part >= parts) return leaves_end(length);
    const int leaves = leaf_of(length - 1) + 1;
    if (parts >= leaves) return min(leaf_begin(part), leaves_end(length));
    const int64_t at = (length + int64_t{kLeafKeys} * leaves) * part / parts;
    int low = 0, high = leaves;  // the first leaf whose middle is not before
    while (low < high) {
      const int middle = (low + high) / 2;
      if (int64_t{leaf_begin(middle)} + leaf_begin(middle + 1) + int64_t{kLeafKeys} * (2 * middle + 1) < 2 * at)
        low = middle + 1;
      else
        high = middle;
    }
    return leaf_begin(low);
  }
  // What an item leaves at most, and has waiting while it is worked on. The first part has the most leaves; a tail has
  // the last leaf of the prefix and what follows.
  int most_nodes(int width) const {
    const int all = leaf_of(longest - 1) + 1, first = parts >= all ? 1 : leaf_of(part_begin(1, longest)) + 2;
    int nodes = 1;
    for (int n = std::max(std::min(first, all), tails > 0 ? std::min(all, width / kPair + 3) : 1); n > 1; n /= 2)
      nodes += 2;
    return nodes;
  }
};

// What an item leaves: nodes in the order of their keys, for either half of the columns and each of 128 threads 32
// times the sums of two columns in two rows, 8 apart, and once the rows' peaks to base 2 and totals: those of the tiles
// of the half's number.
constexpr int kNodePieces = 33;
constexpr int64_t kNodeVectors = 2 * kNodePieces * 128;
__host__ __device__ constexpr int64_t node_vector(int half, int piece, int thread) {
  return (static_cast<int64_t>(half) * kNodePieces + piece) * 128 + thread;
}
inline size_t group_bytes(const Plan& plan) {
  return static_cast<size_t>(plan.items()) * static_cast<size_t>(plan.slots) * kNodeVectors * sizeof(float4);
}

// What one block works on: rows `first_row` and the next 63 of a request, those from `row_begin` to `row_end` used,
// over keys `begin` to `end`.
struct Item {
  int request, first_row, row_begin, row_end;
  int node;  // whose path the keys behind the prefix are
  int prefix;
  int begin, end;
  int number;  // where in the workspace its nodes lie
  bool all;    // of the rows' keys

  __host__ __device__ Item(const MlaAttentionBf16Args& a, const Plan& plan, int local, int index) {
    const int group = plan.first + local;
    request = group / plan.groups;
    first_row = group % plan.groups * kRows;
    node = first_row / a.heads;
    prefix = a.rows.prefix_lengths[request];
    number = local * plan.items() + index;
    all = plan.parts == 1 && plan.tails == 0;
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
      end = min(end, plan.part_begin(index + 1, length));
    } else {
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
    if (position >= end) return -1;
    int row = position;
    if (position >= prefix && a.rows.paths != nullptr) {
      const int64_t of = static_cast<int64_t>(request) * a.rows.width + node;
      row = prefix + a.rows.paths[of * a.rows.path_stride + position - prefix];
    }
    const kdtree_cache_view& cache = a.cache;  // as cache_row.h has it, with divisions of 32 bits
    if (cache.block_size == 0) return row;
    const unsigned size = static_cast<unsigned>(cache.block_size), index = static_cast<unsigned>(row) / size;
    const int block = cache.block_table[static_cast<int64_t>(request) * cache.table_stride + index];
    return block < 0 ? -1 : block * cache.block_size + static_cast<int>(static_cast<unsigned>(row) - index * size);
  }
};

}  // namespace kdtree::mla_wgmma
