// The order in which tensor cores sum a product of bf16 rows over k, and the pipeline that feeds them. The order
// depends on (in, out) alone, so a row has the same bits in every tile and beside any rows:
//   k falls into steps of 64 (the last one filled up with zeros), the steps into bf16_slices(in, out) slices of equal
//   length, one a warp;
//   a slice adds its steps in ascending order, as mma.m16n8k16 does: outputs on its side of 16, rows on its side of 8;
//   the slices' sums meet in ascending order: ((s0 + s1) + s2) + ...
// A column of mma depends on its own row of x alone; zeros take part where a row, an output or a k is not there, and
// what lies behind a row is never read.
//
// Within 32 k an mma takes them in an order of its own, the same for x and w: lane t of four holds k 8 t to 8 t + 7 of
// its row, its first four go into the first mma and the others into the second. So 16 contiguous bytes of a row are
// what one lane needs of it, and the lane that copies them is the lane that uses them: shared memory is a queue of each
// lane's own, with neither barriers nor bank conflicts.
#pragma once

#include <initializer_list>

#include "common/block.h"
#include "common/error.h"
#include "common/ptx.h"
#include "kernels/bf16.h"

namespace kdtree {

constexpr int kBf16Step = 64;   // k of a step: 128 bytes of a row, what memory gives at a time
constexpr int kBf16Piece = 32;  // k of two mma
constexpr int kBf16Vector = 8;  // elements of 16 bytes
constexpr int kBf16Outs = 16;   // outputs of an mma
constexpr int kBf16Rows = 8;    // rows of x of an mma

// Runs over k that are summed side by side: with few outputs and long sums there would be too few warps to keep memory
// busy.
__host__ __device__ constexpr int bf16_slices(int in, int out) { return out < 4096 && in >= 1024 ? 8 : 4; }

// KDTREE_SIZE with the name and number of the first that is no multiple of 8, without which a row does not begin at a
// multiple of 16 bytes.
struct Bf16Extent {
  const char* name;
  int64_t value;
};
inline kdtree_status check_bf16_extents(const char* call, std::initializer_list<Bf16Extent> extents) {
  for (const Bf16Extent& extent : extents)
    if (extent.value % kBf16Vector != 0)
      return fail(KDTREE_SIZE, "%s: %s is %lld, it must be a multiple of %d", call, extent.name,
                  static_cast<long long>(extent.value), kBf16Vector);
  return KDTREE_OK;
}

// As copy_async_16, for weights: brings the 128 bytes around into L2, of which the other half is asked for next.
__device__ __forceinline__ void copy_async_weights(void* shared, const void* global, bool valid) {
#ifdef KDTREE_HOST
  copy_async_16(shared, global, valid);
#else
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
               : "memory");
#endif
}

// A block of kSlices warps for kTiles x 16 outputs and kColumns x 8 rows. kPieces: of 32 k that a stage of the queue
// holds, 1 or 2; kStages: of the queue, of which one is read while the others are on their way.
template <int kTiles_, int kColumns_, int kSlices_, int kPieces_, int kStages_>
struct Bf16Tile {
  static constexpr int kTiles = kTiles_, kColumns = kColumns_, kSlices = kSlices_, kPieces = kPieces_;
  static constexpr int kStages = kStages_;
  static constexpr int kOuts = kTiles * kBf16Outs, kRows = kColumns * kBf16Rows, kThreads = kSlices * kWarp;
  static constexpr int kVectors = 2 * kTiles + kColumns;  // a lane has of 32 k
  static constexpr int kJoinStride = kOuts + 4;           // keeps the rows' sums off each other's banks
  static constexpr size_t kStageBytes = sizeof(uint4) * kThreads * kPieces * kVectors;
  static constexpr size_t kJoinBytes = sizeof(float) * kSlices * kRows * kJoinStride;
  static constexpr size_t kBytes = kStages * kStageBytes > kJoinBytes ? kStages * kStageBytes : kJoinBytes;
  static_assert(kStages >= 2 && (kPieces == 1 || kPieces == 2), "a stage is read while another one is on its way");
};

// A lane copies 8 elements at a time of row lane / 4 of each 8 x 8 part, at k 8 (lane % 4). What is not there counts as
// zeros. These say where its rows are: addresses go from one row to the next, so that they take few registers.
//
// Weights: `first` is the lane's row of the first part, `half` elements before that of a tile's lower half, `tile`
// before that of the next tile. left: outputs from the lane's first one on; kPaired: a tile has 8, and their partners
// below.
template <bool kPaired>
struct Bf16Weights {
  const uint16_t* first;
  int64_t half, tile;
  int left;
  static constexpr int kTileOuts = kPaired ? 8 : 16, kHalfOuts = kPaired ? 0 : 8;
};

// Rows of x that lie `stride` elements apart. left: from the lane's first one on.
struct Bf16Rows {
  const uint16_t* first;
  int64_t stride;
  int left;
  __device__ const uint16_t* at(int k) const { return first + k; }
  __device__ const uint16_t* after(const uint16_t* row, int, int) const { return row + kBf16Rows * stride; }
};

// Rows of x from anywhere.
template <int kColumns>
struct Bf16ChosenRows {
  const uint16_t* rows[kColumns];
  int left;
  __device__ const uint16_t* at(int k) const { return rows[0] + k; }
  __device__ const uint16_t* after(const uint16_t*, int n, int k) const { return rows[n] + k; }
};

// Leaves the slices' sums of the block's outputs in `shared`, for bf16_joined. before_rows(): is called when the first
// weights are on their way and nothing was read of the rows yet.
template <class Tile, bool kPaired, class Rows, class Before>
__device__ __forceinline__ void bf16_multiply(unsigned char* shared, int in, const Bf16Weights<kPaired>& weights,
                                              const Rows& rows, Before before_rows) {
  const int lane = lane_id(), slice = warp_id();
  const int steps = static_cast<int>(ceil_div(in, kBf16Step));
  constexpr int kStagesOfStep = kBf16Step / kBf16Piece / Tile::kPieces, kPieceVectors = Tile::kVectors * kWarp;
  const int first = slice * steps / Tile::kSlices * kStagesOfStep;
  const int count = (slice + 1) * steps / Tile::kSlices * kStagesOfStep - first;
  constexpr int kStageVectors = Tile::kPieces * kPieceVectors;
  uint4* const queue = reinterpret_cast<uint4*>(shared) + slice * Tile::kStages * kStageVectors + lane;

  const auto k_of = [&](int number) { return (first + number) * Tile::kPieces * kBf16Piece + lane % 4 * kBf16Vector; };
  const auto copy_weights = [&](int number, uint4* stage) {
    if (number >= count) return;
    const int k = k_of(number);
    const uint16_t* from = weights.first + k;
    KDTREE_UNROLL
    for (int m = 0; m < Tile::kTiles; ++m) {
      KDTREE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const bool there = m * weights.kTileOuts + half * weights.kHalfOuts < weights.left;
        KDTREE_UNROLL
        for (int p = 0; p < Tile::kPieces; ++p)
          copy_async_weights(stage + p * kPieceVectors + (2 * m + half) * kWarp,
                             from + half * weights.half + p * kBf16Piece, there && k + p * kBf16Piece < in);
      }
      from += weights.tile;
    }
  };
  // With it the stage is asked for.
  const auto copy_rows = [&](int number, uint4* stage) {
    if (number < count) {
      const int k = k_of(number);
      const uint16_t* from = rows.at(k);
      KDTREE_UNROLL
      for (int n = 0; n < Tile::kColumns; ++n) {
        if (n > 0) from = rows.after(from, n, k);
        KDTREE_UNROLL
        for (int p = 0; p < Tile::kPieces; ++p)
          copy_async_16(stage + p * kPieceVectors + (2 * Tile::kTiles + n) * kWarp, from + p * kBf16Piece,
                        n * kBf16Rows < rows.left && k + p * kBf16Piece < in);
      }
    }
    commit_copies();
  };

  float sum[Tile::kTiles][Tile::kColumns][4] = {};
  for (int number = 0; number < Tile::kStages - 1; ++number) copy_weights(number, queue + number * kStageVectors);
  before_rows();
  for (int number = 0; number < Tile::kStages - 1; ++number) copy_rows(number, queue + number * kStageVectors);
  int place = 0, free_place = Tile::kStages - 1;
  for (int number = 0; number < count; ++number) {
    wait_copies<Tile::kStages - 2>();
    copy_weights(number + Tile::kStages - 1, queue + free_place * kStageVectors);
    copy_rows(number + Tile::kStages - 1, queue + free_place * kStageVectors);
    KDTREE_UNROLL
    for (int p = 0; p < Tile::kPieces; ++p) {
      const uint4* const piece = queue + place * kStageVectors + p * kPieceVectors;
      uint4 x[Tile::kColumns];
      KDTREE_UNROLL
      for (int n = 0; n < Tile::kColumns; ++n) x[n] = piece[(2 * Tile::kTiles + n) * kWarp];
      KDTREE_UNROLL
      for (int m = 0; m < Tile::kTiles; ++m) {
        // Put side by side once, not for every column.
        const uint4 upper = piece[2 * m * kWarp], lower = piece[(2 * m + 1) * kWarp];
        const uint32_t first_half[4] = {upper.x, lower.x, upper.y, lower.y};
        const uint32_t second_half[4] = {upper.z, lower.z, upper.w, lower.w};
        KDTREE_UNROLL
        for (int n = 0; n < Tile::kColumns; ++n) mma_bf16(sum[m][n], first_half, {x[n].x, x[n].y});
        KDTREE_UNROLL
        for (int n = 0; n < Tile::kColumns; ++n) mma_bf16(sum[m][n], second_half, {x[n].z, x[n].w});
      }
    }
    free_place = place;
    place = place + 1 == Tile::kStages ? 0 : place + 1;
  }

  __syncthreads();  // the queues of all warps are empty: the sums take their place
  float* const own = reinterpret_cast<float*>(shared) + slice * Tile::kRows * Tile::kJoinStride;
  KDTREE_UNROLL
  for (int n = 0; n < Tile::kColumns; ++n) {
    KDTREE_UNROLL
    for (int m = 0; m < Tile::kTiles; ++m) {
      KDTREE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int row = n * kBf16Rows + lane % 4 * 2 + i % 2, out = m * kBf16Outs + i / 2 * 8 + lane / 4;
        own[row * Tile::kJoinStride + out] = sum[m][n][i];
      }
    }
  }
  __syncthreads();
}

// The sum of (row, out) of the block's tile.
template <class Tile>
__device__ __forceinline__ float bf16_joined(const unsigned char* shared, int row, int out) {
  const float* const sums = reinterpret_cast<const float*>(shared) + row * Tile::kJoinStride + out;
  float sum = sums[0];
  KDTREE_UNROLL
  for (int s = 1; s < Tile::kSlices; ++s) sum = __fadd_rn(sum, sums[s * Tile::kRows * Tile::kJoinStride]);
  return sum;
}

}  // namespace kdtree
