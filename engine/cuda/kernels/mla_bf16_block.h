// A block of the bf16 attention: its shared memory, its queries, the weights of its rows and the end of a chunk.
#pragma once

#include <algorithm>

#include "kernels/mla_bf16_tile.h"

namespace kdtree::mla_bf16 {

// Turns are looked up a few at a time, and the last few are kept.
template <class Shape>
struct Shared {
  Turn turns[Shape::kLookedUp == 1 ? 4 : 2 * Shape::kLookedUp];
  int rows[2 * Shape::kLookedUp][kKeys];           // of the cache, for the keys of the turns
  float factors[2 * Shape::kTurns][Shape::kRows];  // of the sums before a turn; the last two: of a chunk that closes
  RowState chunks[Shape::kTurns][Shape::kRows];    // the one chunk is weighed while the one before is closed
  RowState part[Shape::kRows];                     // of the chunks before in the part
  Work work;

  __device__ float* joins(int which) { return factors[2 * Shape::kTurns - 2 + which]; }
  __device__ const Turn& turn(int number) const {
    return turns[static_cast<unsigned>(number) % (sizeof turns / sizeof turns[0])];
  }
  __device__ int row(int number, int key) const {
    return rows[static_cast<unsigned>(number) % (2 * Shape::kLookedUp)][key];
  }
};

template <class Shape>
constexpr size_t shared_bytes() {
  return static_cast<size_t>(Shape::kKeyBytes) + Shape::kTurns * (Shape::kMeetingBytes + Shape::kWeightBytes) +
         sizeof(Shared<Shape>);
}
template <int kRows, bool kAhead>
constexpr size_t most_shared_bytes() {
  return std::max(shared_bytes<Shape<kRows, kAhead, false>>(), shared_bytes<Shape<kRows, kAhead, true>>());
}
static_assert(most_shared_bytes<64, false>() <= 101376 && most_shared_bytes<16, false>() <= 101376);
// Code for devices of 99 KB alone holds nothing of what they do not run.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr bool kLargeShared = false;
#else
constexpr bool kLargeShared = true;
#endif
static_assert(most_shared_bytes<64, true>() <= 232448 && most_shared_bytes<16, true>() <= 232448);

// Finds the rows of kLookedUp turns.
template <class Shape>
__device__ void look_up(const MlaAttentionBf16Args& a, int first, Shared<Shape>* shared) {
  const auto [warp, key] = Thread::again();
  if (warp >= Shape::kLookedUp) return;
  const int number = first + warp;
  const Turn turn = shared->work.turn(number);
  shared->rows[number % (2 * Shape::kLookedUp)][key] = shared->work.cache_row(a, turn, key);
  if (key == 0) shared->turns[number % (sizeof shared->turns / sizeof(Turn))] = turn;
}

// Whether every 8 elements of the queries are aligned to 16 bytes.
__device__ inline bool query_vectors(const MlaAttentionBf16Args& a) {
  const int64_t strides = a.q_latent_stride | a.q_latent_head | a.q_rope_stride | a.q_rope_head;
  const uintptr_t starts = reinterpret_cast<uintptr_t>(a.q_latent) | reinterpret_cast<uintptr_t>(a.q_rope);
  return strides % 8 == 0 && starts % 16 == 0;
}

// Starts the copy of the block's queries to `to`, rows as those of a tile; zeros for rows that are none.
template <class Shape>
__device__ void copy_query(const MlaAttentionBf16Args& a, const Work& work, unsigned char* to) {
  const bool whole = query_vectors(a);
  KDTREE_UNROLL_BY(2)
  for (int piece = Thread::again().number(); piece < Shape::kRows * (kRowBytes / 16); piece += kThreads) {
    const int local = piece / (kRowBytes / 16), first = piece % (kRowBytes / 16) * 8;
    const int64_t row = static_cast<int64_t>(work.request) * a.rows.width + (work.first_row + local) / a.heads;
    const int head = (work.first_row + local) % a.heads;
    const bool used = work.count_of(local) > 0;
    const uint16_t* const from = !used ? a.q_latent
                                 : first < kLatent
                                     ? a.q_latent + row * a.q_latent_stride + head * a.q_latent_head + first
                                     : a.q_rope + row * a.q_rope_stride + head * a.q_rope_head + first - kLatent;
    unsigned char* const at = to + local * kStride + first * 2;
    if (whole) {
      copy_async_16(at, from, used);
    } else {
      KDTREE_UNROLL
      for (int i = 0; i < 4; ++i)
        reinterpret_cast<uint32_t*>(at)[i] = used ? reinterpret_cast<const uint32_t*>(from)[i] : 0u;
    }
  }
  commit_copies();
}

// The warp's share of the queries.
template <class Shape>
__device__ void load_query(const unsigned char* from, typename Shape::Query& query) {
  const auto [warp, lane] = Thread::again();
  const int first_row = Shape::kScoreTiles == 2 ? warp / kQuarters * 32 : 0;
  const unsigned char* const at =
      from + (first_row + lane % 16) * kStride + warp % kQuarters * kSteps * 32 + lane / 16 * 16;
  KDTREE_UNROLL
  for (int m = 0; m < Shape::kScoreTiles; ++m) {
    KDTREE_UNROLL
    for (int k = 0; k < kSteps; ++k) load_matrix(query[m][k], at + m * 16 * kStride + k * 32);
  }
}

// What the warp needs to weigh the tile of a turn, with these flags.
template <bool kWhole, class Shape>
__device__ Weighing<Shape, kWhole> begin_weighing(const MlaAttentionBf16Args& a, int number, int flags,
                                                  Meeting<Shape> meeting, const Shared<Shape>& shared) {
  const int own = Thread::again().own_row();
  Weighing<Shape, kWhole> weighing;
  weighing.meeting = meeting;
  weighing.scale = a.scale * 1.4426950408889634f;
  if (!kWhole) {
    const Turn turn = shared.turn(number);
    weighing.seen = turn.node < 0 || turn.node == shared.work.node_of(own) ? shared.work.count_of(own) - turn.key : 0;
  }
  weighing.state = shared.chunks[Shape::chunk_slot(flags)][own];
  return weighing;
}

// Returns whether older sums must be rescaled.
template <bool kWhole, class Shape>
__device__ bool end_weighing(const Weighing<Shape, kWhole>& weighing, int number, int flags, Shared<Shape>* shared) {
  const Thread me = Thread::again();
  if (me.lane % 4 == 0) {
    shared->chunks[Shape::chunk_slot(flags)][me.own_row()] = weighing.state;
    shared->factors[static_cast<unsigned>(number) % Shape::kTurns][me.own_row()] = weighing.factor;
  }
  return weighing.factor != 1.0f;
}

// Joins the chunk that a turn closes with what the block has of its part, in the workspace. After a barrier.
template <class Shape>
__device__ void close_chunk(const MlaAttentionBf16Args& a, const Plan& plan, int part, const Turn& turn,
                            Shared<Shape>* shared, typename Shape::Sums& sums) {
  constexpr int kTiles = Shape::kRows / 16;
  const Partials partials(a.workspace, plan);
  const int64_t block = static_cast<int64_t>(blockIdx.x) * plan.parts + part;
  const int begin = chunk_begin(turn.chunk);
  const bool first = begin == shared->work.part_begin;
  const Thread me = Thread::again();
  const auto [warp, lane] = me;
  if (const int own = me.own_row(); warp < Shape::kGroups && lane % 4 == 0) {
    RowState& chunk = shared->chunks[Shape::chunk_slot(turn.flags)][own];
    if (begin < shared->work.count_of(own)) {
      const RowState old = first ? RowState() : shared->part[own], now = chunk;
      const Join join(old.peak, now.peak);
      const RowState joined{join.peak, join(old.total, now.total)};
      shared->part[own] = joined;
      shared->joins(0)[own] = join.first;
      shared->joins(1)[own] = join.second;
      partials.leave(block * (Shape::kRows / 2), own, joined.peak, joined.total);
    }
    chunk = RowState();
  }
  __syncthreads();
  KDTREE_UNROLL
  for (int m = 0; m < kTiles; ++m) {
    if (begin < shared->work.count_of(m * 16)) {
      const int row = row_of(lane, m, 0);
      const float old_factors[2] = {shared->joins(0)[row], shared->joins(0)[row + 8]};
      const float new_factors[2] = {shared->joins(1)[row], shared->joins(1)[row + 8]};
      float4* const at = partials.values + ((block * kWarps + warp) * kTiles + m) * (kColumns / 8) * kWarp + lane;
      constexpr int kAtOnce = 4;  // more would not fit the registers
      KDTREE_UNROLL
      for (int n = 0; n < kColumns / 8; n += kAtOnce) {
        float4 old[kAtOnce];
        KDTREE_UNROLL
        for (int i = 0; i < kAtOnce; ++i) old[i] = first ? make_float4(0, 0, 0, 0) : at[(n + i) * kWarp];
        KDTREE_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          const float (&sum)[4] = sums[m][n + i];
          at[(n + i) * kWarp] = make_float4(fmaf(old[i].x, old_factors[0], sum[0] * new_factors[0]),
                                            fmaf(old[i].y, old_factors[0], sum[1] * new_factors[0]),
                                            fmaf(old[i].z, old_factors[1], sum[2] * new_factors[1]),
                                            fmaf(old[i].w, old_factors[1], sum[3] * new_factors[1]));
        }
      }
    }
    KDTREE_UNROLL
    for (int n = 0; n < kColumns / 8; ++n) {
      KDTREE_UNROLL
      for (int i = 0; i < 4; ++i) sums[m][n][i] = 0;
    }
  }
}

}  // namespace kdtree::mla_bf16
