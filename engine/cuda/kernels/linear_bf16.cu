// y = x w^T on tensor cores: sums in the order of bf16_tile.h, which no tile shape changes.
//
// A block takes 8 to 96 outputs of up to 72 rows; its warps share them by slices of k. Where they can, blocks take an
// equal share of the outputs, so that all multiprocessors are busy to the end. Weights go from memory into each lane's
// own queue in shared memory, 40 KB and more of a multiprocessor's on their way, and are used for all rows of the tile
// from there. The rows of x come the same way, from L2: for a tile of many rows, more outputs keep that traffic at half
// of the weights' or less. Trees of 2^n nodes and a root have 2^n + 1 rows: tiles end at 24, 40 and 72.

#include "common/behind.h"
#include "kernels/bf16_tile.h"
#include "kernels/linear_bf16.h"

namespace kdtree {
namespace {

constexpr int kMostSize = 1 << 30;
constexpr int kMostOutputs = 65535 * kBf16Outs;  // the grid's second side
constexpr int kMostTileRows = 9 * kBf16Rows;
constexpr int kVeryManyOutputs = 16384;
constexpr int kLongSum = 4096;

// Shared memory of a block: what every architecture has; on an H200 for two blocks a multiprocessor, and for one.
constexpr size_t kLeastBytes = 96 << 10, kHalfBytes = 112 << 10, kWholeBytes = 208 << 10;
constexpr int kMultiprocessors = 132;
constexpr int64_t kFewWeights = 4 << 20;

// tile_rows: of a block, at most Tile::kRows.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads) linear_bf16_kernel(LinearBf16Args a, int tile_rows, int tile_outs) {
  KDTREE_DYNAMIC_SHARED(shared);
  const int part = lane_id() / 4;
  const int first_row = static_cast<int>(blockIdx.x) * tile_rows;
  const int first_out = static_cast<int>(blockIdx.y) * tile_outs;
  const int rows = min(tile_rows, a.rows - first_row), outs = min(tile_outs, a.out - first_out);
  const uint16_t* const x = a.x + blockIdx.z * a.x_batch + (first_row + part) * a.x_stride;
  const uint16_t* const w = a.w + blockIdx.z * a.w_batch + static_cast<int64_t>(first_out + part) * a.in;
  const int64_t eight = int64_t{8} * a.in;
  bf16_multiply<Tile>(shared, a.in, Bf16Weights<false>{w, eight, 2 * eight, outs - part},
                      Bf16Rows{x, a.x_stride, rows - part}, start_behind);

  const LinearBf16Result result(a, blockIdx.z);
  for (int i = static_cast<int>(threadIdx.x); i < rows * Tile::kOuts; i += Tile::kThreads) {
    const int row = i / Tile::kOuts, out = i % Tile::kOuts;
    if (out < outs) result.put(first_row + row, first_out + out, bf16_joined<Tile>(shared, row, out));
  }
}

template <class Tile>
kdtree_status launch_tile(const LinearBf16Args& a, int tile_rows, int tile_outs, cudaStream_t stream) {
  KDTREE_RETURN_IF_FAILED(
      allow_shared_memory(reinterpret_cast<const void*>(linear_bf16_kernel<Tile>), "linear_bf16_kernel", Tile::kBytes));
  const dim3 grid(static_cast<unsigned>(ceil_div(a.rows, tile_rows)), static_cast<unsigned>(ceil_div(a.out, tile_outs)),
                  static_cast<unsigned>(a.batch));
  return launch_behind("linear_bf16_kernel", linear_bf16_kernel<Tile>, grid, dim3(Tile::kThreads), Tile::kBytes, stream,
                       a, tile_rows, tile_outs);
}

// The tile with as many stages as fit into kBytes, at most kStages.
template <int kTiles, int kColumns, int kSlices, int kPieces, int kStages, size_t kBytes>
struct Fitting {
  static constexpr int kThere = static_cast<int>(kBytes / Bf16Tile<kTiles, kColumns, kSlices, kPieces, 2>::kStageBytes);
  using Tile = Bf16Tile<kTiles, kColumns, kSlices, kPieces, (kStages < kThere ? kStages : kThere)>;
};

// Tiles of 16 outputs and of 8 rows, slices, pieces of 32 k a stage, and the stages where shared memory allows them.
// tile_outs: of a block, at most 16 kTiles.
template <int kTiles, int kColumns, int kSlices, int kPieces, int kStages>
kdtree_status launch(const LinearBf16Args& a, int tile_rows, int tile_outs, cudaStream_t stream) {
  using Least = typename Fitting<kTiles, kColumns, kSlices, kPieces, kStages, kLeastBytes>::Tile;
  using Half = typename Fitting<kTiles, kColumns, kSlices, kPieces, kStages, kHalfBytes>::Tile;
  using Whole = typename Fitting<kTiles, kColumns, kSlices, kPieces, kStages, kWholeBytes>::Tile;
  if constexpr (Whole::kStages > Least::kStages) {
    if (shared_memory_optin() >= kWholeBytes) {
      const int64_t blocks = ceil_div(a.rows, tile_rows) * ceil_div(a.out, tile_outs) * a.batch;
      return blocks <= kMultiprocessors ? launch_tile<Whole>(a, tile_rows, tile_outs, stream)
                                        : launch_tile<Half>(a, tile_rows, tile_outs, stream);
    }
  }
  return launch_tile<Least>(a, tile_rows, tile_outs, stream);
}

template <int kTiles, int kColumns, int kSlices, int kPieces, int kStages>
kdtree_status launch(const LinearBf16Args& a, int tile_rows, cudaStream_t stream) {
  return launch<kTiles, kColumns, kSlices, kPieces, kStages>(a, tile_rows, kTiles * kBf16Outs, stream);
}

// Small weights in blocks of the smallest tiles that all run at once: they are read several times from L2 for nothing,
// and what counts is how long a block takes.
bool few_blocks(const LinearBf16Args& a) {
  return static_cast<int64_t>(a.out) * a.in * a.batch <= kFewWeights &&
         ceil_div(a.rows, 3 * kBf16Rows) * ceil_div(a.out, kBf16Outs) * a.batch <= 2 * kMultiprocessors;
}

kdtree_status launch_eight_slices(const LinearBf16Args& a, int rows, cudaStream_t stream) {
  if (rows <= 8) return launch<1, 1, 8, 2, 8>(a, rows, stream);
  if (rows <= 16) return launch<1, 2, 8, 2, 6>(a, rows, stream);
  if (rows <= 24) return launch<1, 3, 8, 1, 8>(a, rows, stream);
  if (rows <= 40) return launch<2, 5, 8, 1, 5>(a, rows, stream);
  return launch<1, 9, 8, 1, 4>(a, rows, stream);
}

// Outputs of a block, at most 80, with many rows 64, where all multiprocessors have the same number of blocks, as
// nearly as it goes, and one or two of them for each tile of rows; 0: that is too few, or short sums would have nothing
// beside them that covers their beginnings and ends.
int even_outs(const LinearBf16Args& a, int tile_rows) {
  const int64_t tiles = ceil_div(a.rows, tile_rows), all = tiles * a.out;
  const int most = (tile_rows <= 5 * kBf16Rows ? 5 : 4) * kBf16Outs;  // what registers have room for
  const int64_t each = ceil_div(all, int64_t{kMultiprocessors} * most);
  if (a.batch > 1 || each > 2 * tiles || (each == 1 && a.in < kLongSum)) return 0;
  constexpr int kUnit = kBf16Outs / 2;
  return static_cast<int>(ceil_div(ceil_div(all, each * kMultiprocessors), kUnit)) * kUnit;
}

template <int kColumns>
kdtree_status launch_even(const LinearBf16Args& a, int rows, int outs, cudaStream_t stream) {
  if (outs <= 2 * kBf16Outs) return launch<2, kColumns, 4, 1, 8>(a, rows, outs, stream);
  if (outs <= 3 * kBf16Outs) return launch<3, kColumns, 4, 1, 8>(a, rows, outs, stream);
  if constexpr (kColumns <= 5) {
    if (outs > 4 * kBf16Outs) return launch<5, kColumns, 4, 1, 8>(a, rows, outs, stream);
  }
  return launch<4, kColumns, 4, 1, 8>(a, rows, outs, stream);
}

kdtree_status launch_four_slices(const LinearBf16Args& a, int rows, bool few, cudaStream_t stream) {
  if (few) return rows <= 8 ? launch<1, 1, 4, 2, 4>(a, rows, stream) : launch<1, 3, 4, 2, 4>(a, rows, stream);
  if (const int outs = even_outs(a, rows); outs > 0) {
    if (rows <= 8) return launch_even<1>(a, rows, outs, stream);
    if (rows <= 16) return launch_even<2>(a, rows, outs, stream);
    if (rows <= 24) return launch_even<3>(a, rows, outs, stream);
    if (rows <= 40) return launch_even<5>(a, rows, outs, stream);
    return launch_even<9>(a, rows, outs, stream);
  }
  if (rows <= 4) return launch<1, 1, 4, 2, 4>(a, rows, stream);
  if (rows <= 8) return launch<2, 1, 4, 2, 4>(a, rows, stream);
  if (rows <= 16) return launch<2, 2, 4, 2, 4>(a, rows, stream);
  if (rows <= 24) return launch<2, 3, 4, 2, 4>(a, rows, stream);
  if (rows <= 40)
    return a.out < kVeryManyOutputs ? launch<4, 5, 4, 1, 6>(a, rows, stream) : launch<6, 5, 4, 1, 3>(a, rows, stream);
  return launch<4, 9, 4, 1, 5>(a, rows, stream);
}

}  // namespace

kdtree_status linear_bf16(const LinearBf16Args& a, cudaStream_t stream) {
  const size_t alignment = a.wide ? sizeof(float) : sizeof(uint16_t);
  Arguments arguments("linear_bf16");
  arguments.range("rows", a.rows, 1, kMostSize)
      .range("out", a.out, 1, kMostOutputs)
      .range("in", a.in, 1, kMostSize)
      .range("batch", a.batch, 1, 65535)
      .range("x_stride", a.x_stride, a.in, INT64_MAX)
      .range("y_stride", a.y_stride, a.out, INT64_MAX)
      .array("x", a.x, sizeof(uint4))
      .array("w", a.w, sizeof(uint4))
      .array("y", a.y, alignment)
      .array("add", a.add, alignment, false);
  KDTREE_RETURN_IF_FAILED(arguments.status());
  KDTREE_RETURN_IF_FAILED(check_bf16_extents(
      "linear_bf16", {{"in", a.in}, {"x_stride", a.x_stride}, {"x_batch", a.x_batch}, {"w_batch", a.w_batch}}));
  // Equal tiles: 65 rows are one, 129 are two of 65.
  const bool few = few_blocks(a);
  const int tiles = static_cast<int>(ceil_div(a.rows, few ? 3 * kBf16Rows : kMostTileRows));
  const int rows = static_cast<int>(ceil_div(a.rows, tiles));
  return bf16_slices(a.in, a.out) == 8 ? launch_eight_slices(a, rows, stream)
                                       : launch_four_slices(a, rows, few, stream);
}

}  // namespace kdtree
