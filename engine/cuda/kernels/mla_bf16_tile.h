// Attention of 64 or 16 head rows over tiles of 32 keys in shared memory, bf16 with float32 sums, by 8 warps.
//
// All products run on tensor cores (common/ptx.h has the layout of their fragments).
//   scores   warp w holds query channels 144 (w % 4) to 144 (w % 4) + 143 in registers: of 64 rows half, w / 4, which
//   it
//            multiplies with all keys; 16 rows with half of the keys, w / 4. The four sums of a score meet in shared
//            memory.
//   weights  warp w has rows 8 w to 8 w + 7, four lanes a row, eight keys a lane.
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

// kRows: head rows of a block. kAhead: where shared memory allows, the next tile's scores are multiplied while this
// one's weights are made. Two warps that share tensor cores do the two in opposite orders, so that the tensor cores
// rarely wait. The sums are the same for all four.
template <int kRows, bool kAhead>
struct Shape {
  static constexpr int kStages = !kAhead ? 2 : kRows == 64 ? 4 : 5;  // tiles
  static constexpr int kMeetings = kAhead ? 2 : 1;
  static constexpr int kScoreTiles = kRows / 32 > 0 ? kRows / 32 : 1;  // 16 rows each, of a warp
  static constexpr int kGroups = kRows / 8;
  // 64 rows in the shared memory of a small device: a warp keeps the score sums that would be for itself.
  static constexpr int kOthers = kRows == 64 && !kAhead ? 1 : 0;
  static constexpr int kGroupBytes = (kQuarters - kOthers) * (kKeys / 8) * kWarp * 8;
  static constexpr int kMeetingBytes = kGroups * kGroupBytes;

  using Query = uint32_t[kScoreTiles][kSteps][4];
  using Sums = float[kRows / 16][kColumns / 8][4];
};

// Where the four sums of a score meet. One warp has 8 rows, their group, and finds two sums a lane here for each
// quarter of the channels and 8 keys. Where those lay, it leaves the weights of its rows.
template <class Shape>
struct Meeting {
  unsigned char* base;

  // eight: which 8 keys. apart: quarter ^ group % 4, so that every place has one writer.
  __device__ float2* sums(int lane, int group, int apart, int eight) const {
    return reinterpret_cast<float2*>(base + group * Shape::kGroupBytes +
                                     (((apart - Shape::kOthers) * (kKeys / 8) + eight) * kWarp + lane) * 8);
  }
  // 16 bytes of weights: keys 8 eight to 8 eight + 7 of a row. Turned so that 8 rows lie in different banks.
  __device__ unsigned char* weights(int group, int row, int eight) const {
    return base + group * Shape::kGroupBytes + row * 2 * kKeys + (eight ^ row / 2 % 4) * 16;
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

// How two sums over different keys become one. The one formula by which chunks and spans are joined.
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

  // Weights of the lane's keys; -INFINITY among the scores is a key that is not seen. Returns what the row's older sums
  // are to be multiplied with. The peak follows the largest score only when that is 2^8 times as heavy: then it moves
  // once or twice in a chunk, and the sums, most of the state, are rarely touched. Weights up to 2^8 cost no precision.
  __device__ float operator()(float (&scores)[8]) {
    float largest = scores[0];  // fmaxf leaves a NaN out, but its weight is NaN below
    KDTREE_UNROLL
    for (int i = 1; i < 8; ++i) largest = fmaxf(largest, scores[i]);
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    float factor = 1;
    if (largest > peak + 8) {
      factor = rescale(peak, largest);
      peak = largest;
    }
    const float zero = peak == -INFINITY ? 0.0f : peak;  // what is not seen weighs 0 also before the first that is
    float sum = 0;
    KDTREE_UNROLL
    for (int i = 0; i < 8; ++i) {
      scores[i] = power2(scores[i] - zero);
      sum += scores[i];
    }
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    total = fmaf(total, factor, sum);
    return factor;
  }
};

// The lane's score i of its row is that with this key of the tile, and 2 (lane % 4) further.
__device__ constexpr int key_of(int i) { return i / 2 * 8 + i % 2; }

// Eight lanes copy the row of a key.
__device__ inline int copied_key() { return Thread::again().number() / 8; }

// Starts the copy of a tile; rows without an offset become zeros.
__device__ inline void copy_tile(const char* layer, int64_t offset, unsigned char* tile) {
  static_assert(kKeys * 8 == kThreads && kRowBytes % 128 == 0);
  const int part = Thread::again().lane % 8 * 16;
  unsigned char* const to = tile + copied_key() * kStride + part;
  const char* const from = layer + max(offset, int64_t{0}) + part;
  KDTREE_UNROLL
  for (int i = 0; i < kRowBytes / 128; ++i) copy_async_16(to + i * 128, from + i * 128, offset >= 0);
  commit_copies();
}

// Scores of the warp's query rows with the tile over its share of the channels, handed out. own: those of rows 8 w to
// 8 w + 7, if kOthers.
template <class Shape>
__device__ inline void multiply_keys(const typename Shape::Query& query, const unsigned char* tile,
                                     Meeting<Shape> meeting, float (&own)[8]) {
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
    }
    KDTREE_UNROLL
    for (int part = 0; part < 2 * kTiles; ++part) {
      KDTREE_UNROLL
      for (int n = 0; n < 2; ++n) {
        const float x = sums[part / 2][n][part % 2 * 2], y = sums[part / 2][n][part % 2 * 2 + 1];
        if (Shape::kOthers > 0 && part == quarter) {
          own[4 * half + 2 * n] = x;
          own[4 * half + 2 * n + 1] = y;
        } else {
          *meeting.sums(lane, first_group + part, part ^ quarter, 2 * (first_half + half) + n) = make_float2(x, y);
        }
      }
    }
  }
}

// Scores of the warp's rows: the sums of the quarters, (0 + 1) + (2 + 3) in whatever order they come, because a sum of
// two does not depend on it.
template <class Shape>
__device__ inline void add_quarters(Meeting<Shape> meeting, float (&own)[8]) {
  const auto [warp, lane] = Thread::again();
  KDTREE_UNROLL
  for (int eight = 0; eight < kKeys / 8; ++eight) {
    float2 sums[kQuarters];
    sums[0] = make_float2(own[2 * eight], own[2 * eight + 1]);
    KDTREE_UNROLL
    for (int apart = Shape::kOthers; apart < kQuarters; ++apart) sums[apart] = *meeting.sums(lane, warp, apart, eight);
    own[2 * eight] = (sums[0].x + sums[1].x) + (sums[2].x + sums[3].x);
    own[2 * eight + 1] = (sums[0].y + sums[1].y) + (sums[2].y + sums[3].y);
  }
}

// Leaves the weights of the warp's rows where their score sums lay; all lanes have taken those.
template <class Shape>
__device__ inline void leave_weights(Meeting<Shape> meeting, const float (&weights)[8]) {
  const auto [warp, lane] = Thread::again();
  __syncwarp();
  KDTREE_UNROLL
  for (int eight = 0; eight < kKeys / 8; ++eight)
    *reinterpret_cast<uint32_t*>(meeting.weights(warp, lane / 4, eight) + lane % 4 * 4) =
        narrow_pair(weights[2 * eight], weights[2 * eight + 1]);
}

// sums += weights times values, for all rows or those of one node.
template <bool kAll, class Shape>
__device__ inline void multiply_values(const unsigned char* tile, Meeting<Shape> meeting, const Work& work, int node,
                                       typename Shape::Sums& sums) {
  constexpr int kTiles = Shape::kGroups / 2;
  const auto [warp, lane] = Thread::again();
  const unsigned char* const at = tile + (lane / 8 % 2 * 8 + lane % 8) * kStride + warp * kColumns * 2 + lane / 16 * 16;
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
