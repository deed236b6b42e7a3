// How the bf16 attention is cut into blocks: chunks and spans of keys by absolute position, head rows, and the turns of
// a block. What is cut here is computed apart and joined in order; none of it but the borders of chunks and spans
// touches a bit.
#pragma once

#include "kernels/attention.h"
#include "kernels/cache_row.h"

namespace kdtree::mla_bf16 {

constexpr int kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
constexpr int kRowBytes = 2 * kWidth;
constexpr int kKeys = 32;      // of a tile
constexpr int kMostRows = 64;  // head rows of a block

// A chunk of keys is summed from nothing; the chunks of a span are joined in order, then the spans. Short chunks give
// one row over few keys many blocks, and cost joins where there are many rows: so they grow with the position. Partial
// sums that leave a block take 2 KB a head row and span.
constexpr int kSpan = 2048;
__host__ __device__ constexpr int chunk_keys(int span) { return span == 0 ? 256 : span < 4 ? 512 : 1024; }
__host__ __device__ constexpr int first_chunk(int span) {
  return span == 0 ? 0 : span < 4 ? 8 + (span - 1) * 4 : 20 + (span - 4) * 2;
}
__host__ __device__ constexpr int chunk_of(int position) {
  return first_chunk(position / kSpan) + position % kSpan / chunk_keys(position / kSpan);
}
__host__ __device__ constexpr int chunk_begin(int chunk) {
  return chunk < 8 ? chunk * 256 : chunk < 20 ? kSpan + (chunk - 8) * 512 : 4 * kSpan + (chunk - 20) * 1024;
}
static_assert(chunk_begin(first_chunk(1)) == kSpan && chunk_begin(first_chunk(4)) == 4 * kSpan &&
              chunk_begin(first_chunk(9)) == 9 * kSpan && chunk_of(3 * kSpan - 1) == first_chunk(3) - 1);

// How a pass is cut: `slice` groups of head rows a launch, `parts` blocks each.
struct Plan {
  int rows;    // of a group: 16 or 64
  int groups;  // of a request
  bool spans;  // a part is a span, or else a chunk
  int parts;
  int slice;
  int first;  // group of the launch, of all requests

  // Parts that so many keys reach into; the first key of a part.
  __host__ __device__ int parts_of(int keys) const {
    return keys <= 0 ? 0 : spans ? (keys - 1) / kSpan + 1 : chunk_of(keys - 1) + 1;
  }
  __host__ __device__ int part_begin(int part) const { return spans ? part * kSpan : chunk_begin(part); }
};

// Sums of the parts of each group of a slice. Rows 16 m + r and 16 m + r + 8, r < 8, lie together, as a lane has them
// (mla_bf16_tile.h): so that a warp writes 512 bytes at a time.
struct Partials {
  float4* values;  // [slice, parts, 8 warps, rows / 16, 8, 32 lanes]: two columns of the one row, then of the other
  float4* states;  // [slice, parts, rows / 2]: peaks of both rows to base 2, totals

  __host__ __device__ Partials(void* workspace, const Plan& plan)
      : values(static_cast<float4*>(workspace)),
        states(values + static_cast<int64_t>(plan.slice) * plan.parts * plan.rows * (kLatent / 4)) {}

  // first: pairs of rows before those of the block's part.
  __device__ void leave(int64_t first, int row, float peak, float total) const {
    float* const state = reinterpret_cast<float*>(states + first + row / 16 * 8 + row % 8) + row / 8 % 2;
    state[0] = peak;
    state[2] = total;
  }
};

// Bytes of one group.
inline size_t partial_bytes(int rows, int parts) {
  return static_cast<size_t>(parts) * static_cast<size_t>(rows) * (kLatent + 2) * sizeof(float);
}

__host__ __device__ inline int keys_of(const MlaAttentionBf16Args& a, int request, int node) {
  const int last = a.rows.node_count[request];
  const int keys = a.rows.positions[static_cast<int64_t>(request) * a.rows.width + node] + 1;
  return node > last ? 0 : min(keys, a.longest);
}

// A tile, and whose: what a block does in a turn.
struct alignas(16) Turn {
  static constexpr int kEmpty = 1;   // no row has a key in it: there is nothing to do
  static constexpr int kWhole = 2;   // all rows have all its keys
  static constexpr int kAll = 4;     // all rows may have some of its keys
  static constexpr int kCloses = 8;  // the last of its chunk
  static constexpr int kOdd = 16;    // so is its chunk
  static constexpr int kFlagBits = 5;
  int key;   // its first
  int node;  // whose it is; -1: of all nodes
  int chunk;
  int flags;
};

// What a block works through: tiles that all its rows share, then for each tile a turn for each node. The same for all
// threads, and looked up rather than kept.
struct Work {
  int request;
  int first_row;  // node * heads + head of the block's first row, in its request
  int node_bits;  // 1, 2 or 4 nodes, as a power of two
  int prefix;     // keys that all nodes of the request share
  int counts[4];  // keys of each node; 0: not a node
  int part_begin;
  int first_tile;  // of the part
  int shared;      // tiles, of the part
  int turns;

  __device__ Work(const MlaAttentionBf16Args& a, const Plan& plan, int group, int part)
      : request(group / plan.groups),
        first_row(group % plan.groups * plan.rows),
        node_bits(a.heads >= plan.rows ? 0
                  : a.heads == 32      ? 1
                                       : 2),
        prefix(a.rows.prefix_lengths[request]),
        part_begin(plan.part_begin(part)),
        first_tile(part_begin / kKeys) {
    int most = 0;
    KDTREE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int node = first_row / a.heads + i;
      counts[i] = i < 1 << node_bits && node < a.rows.width ? keys_of(a, request, node) : 0;
      most = max(most, counts[i]);
    }
    const int end = static_cast<int>(ceil_div(min(most, plan.part_begin(part + 1)), kKeys));
    shared = max(min(prefix / kKeys, end) - first_tile, 0);
    turns = shared + (max(end - first_tile - shared, 0) << node_bits);
  }

  // The node of a row of the block, and its keys.
  __device__ int node_of(int row) const { return (row << node_bits) / kMostRows; }
  __device__ int count_of(int row) const { return counts[node_of(row)]; }

  __device__ Turn turn(int number) const {
    if (number >= turns) return {0, -1, 0, Turn::kEmpty};
    const auto key = [this](int turn) {
      return (first_tile + (turn < shared ? turn : shared + ((turn - shared) >> node_bits))) * kKeys;
    };
    const bool whole = number < shared;
    const int first = key(number), node = whole ? -1 : (number - shared) & ((1 << node_bits) - 1);
    const int chunk = chunk_of(first);
    const bool closes = number + 1 == turns || key(number + 1) >= chunk_begin(chunk + 1);
    const bool empty = first >= counts[max(node, 0)];
    return {first, node, chunk,
            (empty ? Turn::kEmpty : 0) | (whole ? Turn::kWhole : 0) | (whole || node_bits == 0 ? Turn::kAll : 0) |
                (closes ? Turn::kCloses : 0) | (chunk % 2 != 0 ? Turn::kOdd : 0)};
  }

  // The row of the cache, counted from where those of the request begin, that holds key `key` of a turn; -1: no such
  // key.
  __device__ int cache_row(const MlaAttentionBf16Args& a, const Turn& turn, int key) const {
    const int place = max(turn.node, 0), position = turn.key + key;
    if ((turn.flags & Turn::kEmpty) != 0 || position >= counts[place]) return -1;
    return path_row(a.rows, a.cache, request, first_row / a.heads + place, prefix, position);
  }
};

}  // namespace kdtree::mla_bf16
