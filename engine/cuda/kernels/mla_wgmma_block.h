// A block of the attention on wgmma: two warpgroups that multiply and one that copies.
//
// Queries [64, 576] and two tiles of keys [64, 576] lie in shared memory in pieces of 64 columns. Warpgroup 0 makes the
// scores and weights of tile 0 of a pair, warpgroup 1 those of tile 1; then both add the weighted values of tile 0 and
// those of tile 1, 0 for the first 256 columns and 1 for the others. While one makes weights, the other has products
// for the tensor cores, and while the sums of a leaf are left, the scores of the next pair are made. The weights of a
// tile take the place of its rope keys, which its scores were the last to need.
//
// A row's peak moves tile by tile, and its sums add up tile by tile: the bits are those of one warpgroup that takes all
// tiles in order, except that the weights of even and of odd tiles are totalled apart.
#pragma once

#include "common/hopper.h"
#include "kernels/mla_bf16_tile.h"
#include "kernels/mla_wgmma_plan.h"

namespace kdtree::mla_wgmma {

constexpr int kThreads = 3 * 128;
constexpr int kPieces = (kLatent + kRope) / 64, kPieceBytes = kTile * 128;
constexpr int kFirstPieces = 4;  // of a tile, those of the columns of warpgroup 0
constexpr int kTileBytes = kPieces * kPieceBytes;
constexpr float kLog2E = 1.4426950408889634f;
constexpr int kMoves = 8;  // a peak follows a score that is 2^8 times as heavy; weights up to that cost no precision

struct Shared {
  uint64_t full[2][2];  // [tile][half of its columns], with the rope keys in the second
  uint64_t empty[2][2];
  float peaks[2][kRows];      // after tile 0, after tile 1
  float4 node[2][kRows / 2];  // of a warpgroup's node: peak and total of row 16 w + r, then of that 8 below
};
constexpr size_t kSharedBytes = 1024 + 3 * kTileBytes + sizeof(Shared);
static_assert(kSharedBytes <= 232448);

// How the sums of some keys, a node, grow by those of the next keys. The node's peak moves seldom, so that its sums
// need not be read: what is added is rounded, then the sum, as where it is added in memory.
struct Addition {
  float peak, node, next;  // the factors of the two

  __device__ Addition(float node_peak, float next_peak) {
    const bool moves = node_peak == -INFINITY || next_peak > node_peak + kMoves;
    peak = moves ? next_peak : node_peak;
    node = moves ? mla_bf16::rescale(node_peak, peak) : 1.0f;
    next = moves ? 1.0f : mla_bf16::rescale(next_peak, peak);
  }
  __device__ float operator()(float sum, float added) const { return add_flushed(sum * node, added * next); }

  // Sums below 2^-126 count as 0, as in memory.
  __device__ static float add_flushed(float a, float b) {
    float sum;
    asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
  }
};

#ifdef KDTREE_HAS_WGMMA

using namespace hopper;
using mla_bf16::narrow_pair;
using mla_bf16::power2;

enum Meeting { kFirstWeights = 1, kSecondWeights = 2, kCopied = 3, kScores = 4, kQueries = 5 };

struct Block {
  uint32_t query, tiles;  // addresses in shared memory
  Shared* shared;

  __device__ uint32_t tile(int which) const { return tiles + static_cast<uint32_t>(which) * kTileBytes; }
  __device__ uint32_t weights(int which) const { return tile(which) + (kPieces - 1) * kPieceBytes; }
  __device__ uint32_t full(int which, int half) const { return shared_address(&shared->full[which][half]); }
  __device__ uint32_t empty(int which, int half) const { return shared_address(&shared->empty[which][half]); }

  __device__ void init_barriers() const {
    KDTREE_UNROLL
    for (int i = 0; i < 4; ++i) {
      barrier_init(full(i / 2, i % 2), 1);
      barrier_init(empty(i / 2, i % 2), i == 3 ? 8 : 4);  // warps that look at it last
    }
    publish_barriers();
  }
};

// The warpgroups that multiply: the item's queries to shared memory, zeros for rows that are not used.
__device__ inline void copy_query(const MlaAttentionBf16Args& a, const Item& item, const Block& block) {
  const int64_t strides = a.q_latent_stride | a.q_latent_head | a.q_rope_stride | a.q_rope_head;
  const uintptr_t starts = reinterpret_cast<uintptr_t>(a.q_latent) | reinterpret_cast<uintptr_t>(a.q_rope);
  const bool whole = strides % 8 == 0 && starts % 16 == 0;
  const int head_bits = 31 - __clz(a.heads);
  KDTREE_UNROLL_BY(1)
  for (int i = 0; i < 2; ++i) {
    const int local = static_cast<int>(threadIdx.x) / 8 + 32 * i, chunk = static_cast<int>(threadIdx.x) % 8;
    const bool used = local >= item.row_begin && local < item.row_end;
    const int64_t row = static_cast<int64_t>(item.request) * a.rows.width + ((item.first_row + local) >> head_bits);
    const int head = (item.first_row + local) & (a.heads - 1);
    const uint16_t* const latent = used ? a.q_latent + row * a.q_latent_stride + head * a.q_latent_head : a.q_latent;
    const uint16_t* const rope = used ? a.q_rope + row * a.q_rope_stride + head * a.q_rope_head : a.q_rope;
    const uint32_t to = block.query + piece_offset(local, chunk);
    KDTREE_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint16_t* const from = (piece < kLatent / 64 ? latent + piece * 64 : rope) + chunk * 8;
      const uint32_t at = to + static_cast<uint32_t>(piece * kPieceBytes);
      if (whole) {
        copy_async_16(at, from, used);
      } else {
        const uint32_t* const words = reinterpret_cast<const uint32_t*>(from);
        KDTREE_UNROLL
        for (int word = 0; word < 4; ++word)
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + static_cast<uint32_t>(4 * word)),
                       "r"(used ? words[word] : 0u)
                       : "memory");
      }
    }
  }
  commit_copies();
  wait_copies<0>();
  publish_stores();
  meet(kQueries, 256);
}

// The warpgroup that copies keys. Tiles of the prefix come in boxes; the others row by row, all of a pair at once.
struct Copier {
  const MlaAttentionBf16Args& a;
  const Plan& plan;
  const Item& item;
  const Block& block;
  const CUtensorMap* map;

  __device__ static int thread() { return static_cast<int>(threadIdx.x) % 128; }
  __device__ static int pieces(int half) { return half == 0 ? kFirstPieces : kPieces - kFirstPieces; }

  __device__ bool in_boxes(int key) const { return plan.boxes > 0 && key + kTile <= min(item.prefix, item.end); }

  __device__ void copy_boxes(int pair, int key, int which) const {
    KDTREE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int count = pieces(half), boxes = plan.boxes, rows = kTile / boxes;
      const uint32_t full = block.full(which, half);
      if (thread() >= kWarp) continue;
      barrier_wait(block.empty(which, half), pair + 1);
      if (thread() == 0) barrier_arrive_with(full, static_cast<uint32_t>(count * kPieceBytes));
      __syncwarp();
      KDTREE_UNROLL_BY(1)
      for (int i = thread(); i < count * boxes; i += kWarp) {
        const int piece = half * kFirstPieces + i % count, first = i / count * rows;
        copy_box(block.tile(which) + static_cast<uint32_t>(piece * kPieceBytes + first * 128), map, piece * 64,
                 box_row(key + first), box_request(), full);
      }
    }
  }

  // A block that the table does not have: all of its box lies outside of the cache, and zeros come for it.
  __device__ int box_row(int key) const {
    if (a.cache.block_size == 0) return key;
    const int row = item.cache_row(a, key);
    return row < 0 ? -kTile : row;
  }
  __device__ int box_request() const { return a.cache.block_size > 0 ? 0 : item.request; }

  __device__ void copy_rows(int pair, int key, int which) const {
    const char* const base = static_cast<const char*>(a.cache.base) + a.layer * a.cache.layer_stride +
                             (a.cache.block_size == 0 ? item.request * a.cache.request_stride : 0);
    const int chunk = thread() % 8;
    barrier_wait(block.empty(which, 0), pair + 1);
    barrier_wait(block.empty(which, 1), pair + 1);
    KDTREE_UNROLL_BY(1)
    for (int i = 0; i < 4; ++i) {
      const int local = i * 16 + thread() / 8, row = item.cache_row(a, key + local);
      const char* const from = base + max(row, 0) * a.cache.row_stride + chunk * 16;
      const uint32_t to = block.tile(which) + piece_offset(local, chunk);
      KDTREE_UNROLL
      for (int piece = 0; piece < kPieces; ++piece)
        copy_async_16(to + static_cast<uint32_t>(piece * kPieceBytes), from + piece * 128, row >= 0);
    }
    commit_copies();
  }

  __device__ void announce_rows(int which) const {
    publish_stores();
    meet(kCopied, 128);
    if (thread() == 0) {
      barrier_arrive(block.full(which, 0));
      barrier_arrive(block.full(which, 1));
    }
  }

  __device__ void run() const {
    const int pairs = item.pairs();
    const int boxed = item.boxed(plan);
    if (thread() < kWarp) {
      KDTREE_UNROLL_BY(1)
      for (int pair = 0; pair < boxed; ++pair) {
        copy_boxes(pair, item.begin + pair * kPair, 0);
        copy_boxes(pair, item.begin + pair * kPair + kTile, 1);
      }
    }
    meet(kCopied, 128);
    KDTREE_UNROLL_BY(1)
    for (int pair = boxed; pair < pairs; ++pair) {
      const int key = item.begin + pair * kPair;
      const bool first = in_boxes(key);
      first ? copy_boxes(pair, key, 0) : copy_rows(pair, key, 0);
      copy_rows(pair, key + kTile, 1);
      if (!first) {
        wait_copies<1>();
        announce_rows(0);
      }
      wait_copies<0>();
      announce_rows(1);
    }
  }
};

// The same, but the compiler does not know: it would keep all that it once made of it, and the sums need the registers.
__device__ inline uint32_t again(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// A warpgroup that multiplies. Rows of a thread: `row` and 8 below.
template <int kOwn>
struct Multiplier {
  const MlaAttentionBf16Args& a;
  const Plan& plan;
  const Item& item;
  const Block block;

  float peaks[2], totals[2];
  float scores[32];
  float sums[128];
  uint32_t weights[16];

  __device__ Multiplier(const MlaAttentionBf16Args& args, const Plan& cut, const Item& of, const Block& in)
      : a(args), plan(cut), item(of), block(in) {}

  __device__ static int thread() { return static_cast<int>(again(threadIdx.x) % 128); }
  __device__ static int row() { return thread() / kWarp * 16 + thread() % kWarp / 4; }
  __device__ static int column() { return thread() % 4 * 2; }  // the first of two in each 8

  // A node of the item in the workspace.
  __device__ float4* node(int slot) const {
    return static_cast<float4*>(a.workspace) + static_cast<int64_t>(item.first_slot + slot) * kNodeVectors;
  }

  __device__ static bool first_of_warp() { return threadIdx.x % kWarp == 0; }

  // Scores of the own tile of a pair. Where there is none, a piece of whatever lies there, at which nobody looks: with
  // all products under a condition the compiler would wait for them at once.
  __device__ void multiply_keys(int pair, bool there) {
    const Operand queries = inner_operand(again(block.query)), keys = inner_operand(again(block.tile(kOwn)));
    const int pieces = there ? kPieces : 1;
    if (there) barrier_wait(block.full(kOwn, 0), pair);
    int piece = 0;
    KDTREE_UNROLL_BY(1)
    do {
      if (piece == kFirstPieces) barrier_wait(block.full(kOwn, 1), pair);
      begin_products();  // in front of each piece, or the compiler has every product waited for
      KDTREE_UNROLL
      for (int k = 0; k < 4; ++k) {
        const uint32_t at = static_cast<uint32_t>(piece * kPieceBytes + k * 32);
        multiply_64(scores, queries + at, keys + at, piece > 0 || k > 0);
      }
    } while (++piece < pieces);
    commit_products();
  }

  // The weights of tile `which` come from shared memory, those of the own tile from registers.
  __device__ void multiply_values(int which, bool add) {
    const uint32_t tile = again(block.tile(which));
    const Operand values = outer_operand(tile + kOwn * kFirstPieces * kPieceBytes, kPieceBytes);
    const Operand other = inner_operand(tile + (kPieces - 1) * kPieceBytes);
    begin_products();
    KDTREE_UNROLL
    for (uint32_t k = 0; k < 4; ++k) {
      if (which == kOwn)
        multiply_256(sums, weights + 4 * k, values + k * 16 * kPieceRow, add || k > 0);
      else
        multiply_256(sums, other + k * 32, values + k * 16 * kPieceRow, add || k > 0);
    }
    commit_products();
  }

  // Peaks after a tile that the other warpgroup has weighed.
  __device__ void follow(float (&factors)[2]) {
    const float* const after = block.shared->peaks[1 - kOwn] + row();
    KDTREE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float now = after[8 * i];
      factors[i] = now == peaks[i] ? 1.0f : power2(peaks[i] - now);
      peaks[i] = now;
      totals[i] *= factors[i];
    }
  }

  __device__ void rescale(const float (&factors)[2]) {
    if (__any_sync(kAllLanes, factors[0] != 1.0f || factors[1] != 1.0f)) {
      KDTREE_UNROLL
      for (int i = 0; i < 128; ++i) sums[i] *= factors[i / 2 % 2];
    }
  }

  // The largest score of each row to base 2; keys behind the end count for nothing.
  __device__ void find_largest(int key, float (&largest)[2]) {
    if (key + kTile > item.end) {
      const int seen = item.end - key - column();
      KDTREE_UNROLL
      for (int i = 0; i < 32; ++i)
        if (i / 4 * 8 + i % 2 >= seen) scores[i] = -INFINITY;
    }
    float most[8];  // four chains for each row, so that one need not wait for itself
    KDTREE_UNROLL
    for (int i = 0; i < 32; ++i) most[i % 8] = i < 8 ? scores[i] : fmaxf(most[i % 8], scores[i]);
    KDTREE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float all = fmaxf(fmaxf(most[2 * i], most[2 * i + 1]), fmaxf(most[2 * i + 4], most[2 * i + 5]));
      all = fmaxf(all, __shfl_xor_sync(kAllLanes, all, 1));
      largest[i] = fmaxf(all, __shfl_xor_sync(kAllLanes, all, 2)) * (a.scale * kLog2E);
    }
  }

  // Scores to weights, in registers and in shared memory.
  __device__ void weigh(const float (&largest)[2], float (&factors)[2]) {
    const float scale = a.scale * kLog2E;
    float* const after = block.shared->peaks[kOwn] + row();
    float references[2];
    KDTREE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const bool moves = largest[i] > peaks[i] + kMoves;
      factors[i] = moves ? power2(peaks[i] - largest[i]) : 1.0f;
      peaks[i] = moves ? largest[i] : peaks[i];
      references[i] = peaks[i] == -INFINITY ? 0.0f : peaks[i];
      if (threadIdx.x % 4 == 0) after[8 * i] = peaks[i];
    }
    KDTREE_UNROLL
    for (int i = 0; i < 32; ++i) scores[i] = power2(fmaf(scores[i], scale, -references[i / 2 % 2]));
    KDTREE_UNROLL
    for (int i = 0; i < 16; ++i) weights[i] = narrow_pair(scores[2 * i], scores[2 * i + 1]);
    const int lane = thread() % kWarp, to = thread() / kWarp * 16 + lane % 16;
    KDTREE_UNROLL
    for (int k = 0; k < 4; ++k)
      store_matrix(block.weights(kOwn) + piece_offset(to, 2 * k + lane / 16), weights + 4 * k);
    publish_stores();
    float added[8];
    KDTREE_UNROLL
    for (int i = 0; i < 32; ++i) added[i % 8] = i < 8 ? scores[i] : added[i % 8] + scores[i];
    KDTREE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float sum = (added[2 * i] + added[2 * i + 1]) + (added[2 * i + 4] + added[2 * i + 5]);
      totals[i] = fmaf(totals[i], factors[i], sum);
    }
  }

  // How the sums of a leaf are left.
  struct Ending {
    float4* to;        // of this thread; null: the leaf goes on
    bool adds;         // to what is there
    float factors[2];  // by which they are multiplied first
  };

  // The peaks and totals of a leaf go to a node that its sums are to follow.
  __device__ Ending end_leaf(int slot, bool adds) {
    float4* const to = node(slot);
    Ending ending{to + node_vector(kOwn, 0, thread()), adds, {1, 1}};
    float4* const kept = &block.shared->node[kOwn][row() / 16 * 8 + row() % 8];
    float4 state = make_float4(peaks[0], totals[0], peaks[1], totals[1]);
    if (adds) {
      const float4 old = *kept;
      const Addition first(old.x, peaks[0]), second(old.z, peaks[1]);
      if (__any_sync(kAllLanes, first.node != 1.0f || second.node != 1.0f)) {
        KDTREE_UNROLL_BY(4)
        for (int n = 0; n < kNodePieces; ++n) {
          const float4 sum = __ldcg(ending.to + n * 128);
          ending.to[n * 128] =
              make_float4(sum.x * first.node, sum.y * first.node, sum.z * second.node, sum.w * second.node);
        }
      }
      state = make_float4(first.peak, first(old.y, totals[0]), second.peak, second(old.w, totals[1]));
      ending.factors[0] = first.next, ending.factors[1] = second.next;
    }
    __syncwarp();  // all four lanes of a row have what was there
    if (threadIdx.x % 4 == 0) *kept = to[node_state(kOwn, row())] = state;
    __syncwarp();
    return ending;
  }

  template <int kHalf>
  __device__ void leave(const Ending& ending) const {
    if (ending.to == nullptr) return;
    KDTREE_UNROLL
    for (int n = kHalf * kNodePieces / 2; n < (kHalf + 1) * kNodePieces / 2; ++n) {
      const float4 sum = make_float4(sums[4 * n] * ending.factors[0], sums[4 * n + 1] * ending.factors[0],
                                     sums[4 * n + 2] * ending.factors[1], sums[4 * n + 3] * ending.factors[1]);
      if (ending.adds)
        add_to_memory(ending.to + n * 128, sum);
      else
        ending.to[n * 128] = sum;
    }
  }

  __device__ void run() {
    const int pairs = item.pairs();
    int slot = 0, leaf = item.begin;  // of the node; first key of the leaf
    bool fresh = true;                // nothing was added to the sums of the leaf
    const auto restart = [&] {
      fresh = true;
      peaks[0] = peaks[1] = -INFINITY;
      totals[0] = totals[1] = 0;
    };
    const auto close = [&](int next, bool last) -> Ending {
      if (!last && next < leaf + leaf_keys(leaf)) return {nullptr, false, {1, 1}};
      KDTREE_UNROLL
      for (int i = 0; i < 2; ++i) {
        totals[i] += __shfl_xor_sync(kAllLanes, totals[i], 1);
        totals[i] += __shfl_xor_sync(kAllLanes, totals[i], 2);
      }
      const int span = span_floor(leaf);
      const Ending ending = end_leaf(slot, span >= item.begin && span < leaf);
      if (span < item.begin || next == span + span_keys(span)) ++slot;
      leaf = next;
      restart();
      return ending;
    };

    restart();
    multiply_keys(0, true);
    KDTREE_UNROLL_BY(1)
    for (int pair = 0; pair < pairs; ++pair) {
      const int key = item.begin + pair * kPair;
      float largest[2], first[2], second[2];
      wait_products<0>();
      settle(scores);
      if constexpr (kOwn == 0) {
        find_largest(key, largest);
        meet(kScores, 128);  // the weights take the place of keys that all warps must have read
        weigh(largest, first);
        pass_by(kFirstWeights, 256);
        if (!fresh) rescale(first);
        multiply_values(0, !fresh);
        wait_products<0>();
        settle(sums);
        if (first_of_warp()) barrier_arrive(block.empty(0, 0));
        meet(kSecondWeights, 256);
        follow(second);
      } else {
        find_largest(key + kTile, largest);
        meet(kFirstWeights, 256);
        follow(first);
        if (!fresh) rescale(first);
        multiply_values(0, !fresh);
        weigh(largest, second);
        pass_by(kSecondWeights, 256);
        wait_products<0>();
        settle(sums);
        if (first_of_warp()) barrier_arrive(block.empty(0, 1));
      }
      rescale(second);
      multiply_values(1, true);
      fresh = false;
      wait_products<0>();
      settle(sums);
      if (first_of_warp()) {
        if (kOwn == 0) barrier_arrive(block.empty(1, 0));
        barrier_arrive(block.empty(1, 1));
      }
      // Half of the sums are left while tile 1 is on its way.
      const bool more = pair + 1 < pairs;
      const Ending ending = close(key + kPair, !more);
      if (kOwn == 0) multiply_keys(pair + 1, more);
      leave<0>(ending);
      if (kOwn == 1) multiply_keys(pair + 1, more);
      leave<1>(ending);
    }
    wait_products<0>();
    settle(scores);
  }
};

#endif  // KDTREE_HAS_WGMMA

}  // namespace kdtree::mla_wgmma
