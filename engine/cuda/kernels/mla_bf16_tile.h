// Attention of 64 or 16 head rows over tiles of 32 keys in shared memory, bf16 with float32 sums, by 8 warps.
//
// All products run on tensor cores (common/ptx.h has the layout of their fragments).
//   scores   warp w holds query channels 144 (w % 4) to 144 (w % 4) + 143 in registers: of 64 rows half, w / 4, with
//            all keys; of 16 rows all, with half of the keys, w / 4. The four sums of a score meet in shared memory.
//   weights  warp w has rows 8 w to 8 w + 7, four lanes a row. A lane has keys 8 i + 2 (lane % 4) and the next, i < 4.
//   values   warp w has columns 64 w to 64 w + 63 of all rows.
// A row's sums run in an order that nothing but the place of a key in its tile decides, and no row enters another's.
#pragma once

#include "common/block.h"
#include "common/ptx.h"
#include "kernels/mla_bf16_plan.h"

namespace kdtree::mla_bf16 {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kQuarters = 4;  // of the channels
constexpr int kSteps = kWidth / kQuarters / 16;
constexpr int kColumns = kLatent / kWarps;  // of a warp

// 16 bytes more than a row has: the 8 rows that a matrix load reads at a time lie in different banks.
constexpr int kStride = kRowBytes + 16;
constexpr int kTileBytes = kKeys * kStride;
// Codes and scales of a tile of an fp8 cache, as the warps copy them (mla_fp8_tile.h).
constexpr int kFp8StageBytes = kWarps * kKeys * (kColumns + static_cast<int>(sizeof(float)));
constexpr int kWeightStride = 2 * kKeys + 16;  // likewise

// kRows: head rows of a block. kAhead: where shared memory allows, a turn multiplies the scores of the next tile, makes
// the weights of this one and multiplies the values of the one before. None of the three waits for another warp in the
// turn: one barrier a tile is enough. The sums are the same for all four shapes. kFp8: of the cache; tiles are bf16.
template <int kRows_, bool kAhead_, bool kFp8_>
struct Shape {
  static constexpr int kRows = kRows_;
  static constexpr bool kAhead = kAhead_, kFp8 = kFp8_;
  static constexpr int kStages = (!kAhead ? 2 : kRows == 64 ? 4 : 5) - (kFp8 ? 1 : 0);  // tiles
  static constexpr int kCodeStages = !kFp8 ? 0 : kAhead && kRows == 16 ? 3 : 2;         // of codes that come, as tiles
  // Turns from a tile's conversion to that of the one whose rope channels are then asked for: those of the tile that
  // had their place have been looked at.
  static constexpr int kRopeAhead = kAhead ? kStages - 2 : 1;
  static constexpr int kKeyBytes = kStages * kTileBytes + kCodeStages * kFp8StageBytes;
  static constexpr int kRowsAhead = kFp8 ? kCodeStages + 3 : kStages;  // turns that rows are looked up ahead, if kAhead
  static constexpr int kTurns = kAhead ? 2 : 1;                        // whose sums, weights, factors are kept
  static constexpr int kLookedUp = kAhead ? 8 : 1;                     // turns at a time
  static constexpr int kScoreTiles = kRows / 32 > 0 ? kRows / 32 : 1;  // 16 rows each, of a warp
  static constexpr int kGroups = kRows / 8;
  // 64 rows in the shared memory of a small device: a warp keeps the score sums that would be for itself.
  static constexpr int kOthers = kRows == 64 && !kAhead ? 1 : 0;
  static constexpr int kGroupBytes = (kQuarters - kOthers) * (kKeys / 8) * kWarp * 8;
  static constexpr int kMeetingBytes = kGroups * kGroupBytes;
  // Of 16 rows two warps make the weights and four others copy.
  static constexpr int kFirstCopier = kAhead && kRows == 16 && !kFp8 ? kWarps / 2 : 0;
  static constexpr int kCopies = kWarps / (kWarps - kFirstCopier);  // keys of a tile of which a thread copies a part
  // Weights lie where the score sums of their rows lay, unless the next tile's sums come there.
  static constexpr int kWeightGroupBytes = kAhead ? 8 * kWeightStride : kGroupBytes;
  static constexpr int kWeightBytes = kAhead ? kGroups * kWeightGroupBytes : 0;

  // Where the chunk of a turn with these flags has its states: one is weighed while the one before is closed.
  __device__ static int chunk_slot(int flags) { return kTurns > 1 && (flags & Turn::kOdd) != 0 ? 1 : 0; }

  using Query = uint32_t[kScoreTiles][kSteps][4];
  using Sums = float[kRows / 16][kColumns / 8][4];
};

// Where the four sums of a score meet. One warp has 8 rows, their group, and finds two sums a lane here for each
// quarter of the channels and 8 keys. It leaves the weights of its rows.
template <class Shape>
struct Meeting {
  unsigned char* base;
  unsigned char* weight_base;

  // eight: which 8 keys. from: the quarter; if the rows' own warp keeps its sums, quarter ^ group % 4, which is not 0.
  __device__ float2* sums(int lane, int group, int from, int eight) const {
    return reinterpret_cast<float2*>(base + group * Shape::kGroupBytes +
                                     (((from - Shape::kOthers) * (kKeys / 8) + eight) * kWarp + lane) * 8);
  }
  // 16 bytes of weights: keys 8 eight to 8 eight + 7 of a row.
  __device__ unsigned char* weights(int group, int row, int eight) const {
    return weight_base + group * Shape::kWeightGroupBytes + row * kWeightStride + eight * 16;
  }
};

// The thread in its block. The compiler would keep every address that it once made of it, which costs the registers
// that the sums need: again() is the same thread, but the compiler does not know.
struct Thread {
  int warp, lane;

  __device__ static Thread again() {
    unsigned thread = threadIdx.x;
#ifndef KDTREE_HOST
    asm volatile("" : "+r"(thread));
#endif
    return {static_cast<int>(thread / kWarp), static_cast<int>(thread % kWarp)};
  }
  __device__ int number() const { return warp * kWarp + lane; }
  __device__ int own_row() const { return warp * 8 + lane / 4; }  // whose weights it makes, if there is such a row
};

// Two floats as bf16, to nearest, ties to even; the first in the low half.
__device__ inline uint32_t narrow_pair(float first, float second) {
#ifdef KDTREE_HOST
  const auto narrow = [](float value) {
    const uint32_t bits = __float_as_uint(value);
    return value == value ? (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16 : 0x7fffu;
  };
  return narrow(first) | narrow(second) << 16;
#else
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#endif
}

// 2^x to 22 bits; 0 below 2^-126.
__device__ inline float power2(float x) {
#ifdef KDTREE_HOST
  return x < -126 ? 0.0f : exp2f(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

// 2^(from - to) for the rescaling of sums: 0 where nothing was summed yet.
__device__ inline float rescale(float from, float to) { return from == -INFINITY ? 0.0f : power2(from - to); }

// How two sums over different keys become one, when a block joins chunks; the join kernel's `joined` is the same
// formula.
struct Join {
  float peak, first, second;  // factors of the two

  __device__ Join(float peak_a, float peak_b)
      : peak(fmaxf(peak_a, peak_b)), first(rescale(peak_a, peak)), second(rescale(peak_b, peak)) {}
  __device__ float operator()(float a, float b) const { return fmaf(a, first, b * second); }
};

// The softmax of a row so far, the same in its four lanes.
struct RowState {
  float peak = -INFINITY;  // what weights are relative to, a logarithm to base 2
  float total = 0;         // of the weights
};

// Eight lanes copy the row of a key.
template <class Shape>
__device__ inline int copied_key() {
  return Thread::again().number() / 8 - Shape::kFirstCopier * (kWarp / 8);
}

// Starts the thread's share of the copy of a tile's row, `key`. row: of the cache, from `base` on; -1: zeros.
__device__ inline void copy_row(const char* base, int64_t row_stride, int row, unsigned char* tile, int key) {
  static_assert(kKeys * 8 == kThreads && kRowBytes % 128 == 0);
  const int part = Thread::again().lane % 8 * 16;
  unsigned char* const to = tile + key * kStride + part;
  const char* const from = base + max(row, 0) * row_stride + part;
  KDTREE_UNROLL
  for (int i = 0; i < kRowBytes / 128; ++i) copy_async_16(to + i * 128, from + i * 128, row >= 0);
}

// Steps of multiply_keys.
template <class Shape>
constexpr int kScoreSteps = (Shape::kScoreTiles == 2 ? 2 : 1) * kSteps;

// Scores of the warp's query rows with the tile over its share of the channels, handed out. own: those of rows 8 w to
// 8 w + 7, if kOthers. between(i): what else is done after step i.

template <class Shape, class Between>
__device__ inline void multiply_keys(const typename Shape::Query& query, const unsigned char* tile,
                                     Meeting<Shape> meeting, float (&own)[8], Between&& between) {
  constexpr int kTiles = Shape::kScoreTiles, kHalves = kTiles == 2 ? 2 : 1;
  const auto [warp, lane] = Thread::again();
  const int quarter = warp % kQuarters, first_half = kHalves == 2 ? 0 : warp / kQuarters;
  const int first_group = kTiles == 2 ? warp / kQuarters * kQuarters : 0;
  const unsigned char* const at =
      tile + (first_half * 16 + lane / 16 * 8 + lane % 8) * kStride + quarter * kSteps * 32 + lane / 8 % 2 * 16;
  KDTREE_UNROLL
  for (int half = 0; half < kHalves; ++half) {
    float sums[kTiles][2][4] = {};
    KDTREE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      uint32_t keys[4];
      load_matrix(keys, at + half * 16 * kStride + k * 32);
      const uint32_t first[2] = {keys[0], keys[1]}, second[2] = {keys[2], keys[3]};
      KDTREE_UNROLL
      for (int m = 0; m < kTiles; ++m) {
        mma_bf16(sums[m][0], query[m][k], first);
        mma_bf16(sums[m][1], query[m][k], second);
      }
      between(half * kSteps + k);
    }
    KDTREE_UNROLL
    for (int part = 0; part < 2 * kTiles; ++part) {
      KDTREE_UNROLL
      for (int n = 0; n < 2; ++n) {
        const float x = sums[part / 2][n][part % 2 * 2], y = sums[part / 2][n][part % 2 * 2 + 1];
        if (Shape::kOthers > 0 && (part == 0 || part == quarter)) {  // the first so that there is nothing to keep
          own[4 * half + 2 * n] = x;
          own[4 * half + 2 * n + 1] = y;
        }
        const int from = Shape::kOthers > 0 ? part ^ quarter : quarter;
        if (Shape::kOthers == 0 || from > 0)
          *meeting.sums(lane, first_group + part, from, 2 * (first_half + half) + n) = make_float2(x, y);
      }
    }
  }
}

// The warp makes the weights of its rows from their score sums, in steps, so that they can be made while tensor cores
// work. Keys from `seen` on count for nothing.
template <class Shape, bool kWhole>
struct Weighing {
  static constexpr int kCount = 14;  // of the steps
  Meeting<Shape> meeting;
  float scale;  // to base 2
  int seen;     // unless kWhole
  RowState state;
  float factor;     // for the row's older sums
  float scores[8];  // then weights
  float2 sums[kQuarters];
  float across;

  // The quarters' sums of two scores. They are added as (0 + 1) + (2 + 3), in whichever order each pair comes.
  __device__ void load(int eight) {
    const auto [warp, lane] = Thread::again();
    if (Shape::kOthers > 0) sums[0] = make_float2(scores[2 * eight], scores[2 * eight + 1]);
    KDTREE_UNROLL
    for (int from = Shape::kOthers; from < kQuarters; ++from) sums[from] = *meeting.sums(lane, warp, from, eight);
  }
  __device__ void add(int eight) {
    scores[2 * eight] = ((sums[0].x + sums[1].x) + (sums[2].x + sums[3].x)) * scale;
    scores[2 * eight + 1] = ((sums[0].y + sums[1].y) + (sums[2].y + sums[3].y)) * scale;
    if (!kWhole) {
      const int first = eight * 8 + Thread::again().lane % 4 * 2;
      if (first >= seen) scores[2 * eight] = -INFINITY;
      if (first + 1 >= seen) scores[2 * eight + 1] = -INFINITY;
    }
  }

  // The peak follows the largest score only when that is 2^8 times as heavy: then it moves once or twice in a chunk,
  // and the sums, most of the state, are rarely touched. Weights up to 2^8 cost no precision.
  __device__ void move() {
    const bool moves = across > state.peak + 8;
    const float shrunk = power2(state.peak - across);
    factor = moves ? shrunk : 1.0f;
    state.peak = moves ? across : state.peak;
    across = state.peak == -INFINITY ? 0.0f : state.peak;  // what is not seen weighs 0 also before the first that is
  }

  __device__ void step(int i) {
    if (i < 5) {
      if (i > 0) add(i - 1);
      if (i < 4) load(i);
    } else if (i == 5) {
      // fmaxf leaves a NaN out, but its weight is NaN below.
      across = fmaxf(fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3])),
                     fmaxf(fmaxf(scores[4], scores[5]), fmaxf(scores[6], scores[7])));
      sums[0].x = __shfl_xor_sync(kAllLanes, across, 1);
    } else if (i == 6) {
      across = fmaxf(across, sums[0].x);
      sums[0].x = __shfl_xor_sync(kAllLanes, across, 2);
    } else if (i == 7) {
      across = fmaxf(across, sums[0].x);
      move();
    } else if (i < 10) {
      KDTREE_UNROLL
      for (int j = 4 * (i - 8); j < 4 * (i - 7); ++j) scores[j] = power2(scores[j] - across);
    } else if (i == 10) {
      leave();
    } else if (i == 11) {
      across = scores[0];
      KDTREE_UNROLL
      for (int j = 1; j < 8; ++j) across += scores[j];
      sums[0].x = __shfl_xor_sync(kAllLanes, across, 1);
    } else if (i == 12) {
      across += sums[0].x;
      sums[0].x = __shfl_xor_sync(kAllLanes, across, 2);
    } else {
      state.total = fmaf(state.total, factor, across + sums[0].x);
    }
  }

  __device__ void all() {
    KDTREE_UNROLL
    for (int i = 0; i < kCount; ++i) step(i);
  }

  __device__ void leave() const {
    const auto [warp, lane] = Thread::again();
    __syncwarp();  // all lanes have taken their row's state, and the score sums that may lie there
    KDTREE_UNROLL
    for (int eight = 0; eight < kKeys / 8; ++eight)
      *reinterpret_cast<uint32_t*>(meeting.weights(warp, lane / 4, eight) + lane % 4 * 4) =
          narrow_pair(scores[2 * eight], scores[2 * eight + 1]);
  }
};

// sums += weights times values, for all rows or those of one node.
template <bool kAll, class Shape>
__device__ inline void multiply_values(const unsigned char* tile, Meeting<Shape> meeting, const Work& work, int node,
                                       typename Shape::Sums& sums) {
  constexpr int kTiles = Shape::kGroups / 2;
  const auto [warp, lane] = Thread::again();
  const unsigned char* const at = tile + lane % 16 * kStride + warp * kColumns * 2 + lane / 16 * 16;
  KDTREE_UNROLL
  for (int k = 0; k < kKeys / 16; ++k) {
    uint32_t weights[kTiles][4];
    KDTREE_UNROLL
    for (int m = 0; m < kTiles; ++m)
      load_matrix(weights[m], meeting.weights(2 * m + lane / 8 % 2, lane % 8, 2 * k + lane / 16));
    KDTREE_UNROLL
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t values[4];
      load_matrix_transposed(values, at + k * 16 * kStride + n * 32);
      const uint32_t first[2] = {values[0], values[1]}, second[2] = {values[2], values[3]};
      KDTREE_UNROLL
      for (int m = 0; m < kTiles; ++m) {
        if (!kAll && work.node_of(m * 16) != node) continue;
        mma_bf16(sums[m][2 * n], weights[m], first);
        mma_bf16(sums[m][2 * n + 1], weights[m], second);
      }
    }
  }
}

// The row of sums[m][.][2 half] in the block.
__device__ inline int row_of(int lane, int m, int half) { return m * 16 + half * 8 + lane / 4; }

template <int kTiles>
__device__ inline void multiply_rows(const float* factors, float (&sums)[kTiles][kColumns / 8][4]) {
  const int lane = Thread::again().lane;
  KDTREE_UNROLL
  for (int m = 0; m < kTiles; ++m) {
    KDTREE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float factor = factors[row_of(lane, m, half)];
      KDTREE_UNROLL
      for (int n = 0; n < kColumns / 8; ++n) {
        sums[m][n][2 * half] *= factor;
        sums[m][n][2 * half + 1] *= factor;
      }
    }
  }
}

}  // namespace kdtree::mla_bf16
