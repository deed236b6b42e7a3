// The routed experts of all rows on tensor cores: grouped by expert on the device (experts_group.h), multiplied tile by
// tile (bf16_tile.h), added up row by row.
//
//   group    one block sorts the pairs (row, slot) by expert and cuts tiles
//   gate_up  a block for 8 gates and their 8 ups, or more, of the rows of a tile -> mid [pair, width], bf16. An mma has
//            gates above and ups below: a lane holds both sums of a value
//   down     a block for 16 outputs, or more -> out [pair, hidden], float32
//   combine  y = w0 out0; y = y + w1 out1; ... in the order of the slots, each product rounded by itself
// A tile reads its expert's weights once; tiles of one expert follow each other in the grid, so that a second one finds
// them in L2. The grid is for as many tiles as there could be: what is not needed ends at once.

#include "common/behind.h"
#include "kernels/bf16_tile.h"
#include "kernels/experts_bf16.h"
#include "kernels/experts_group.h"
#include "kernels/swiglu.h"

namespace kdtree {
namespace {

constexpr int kCombineThreads = 128;
constexpr int kMostSize = 65535 * 8;  // outputs: the grid's second side

// Rows of a tile. They cost shared memory and no time: tiles are as tall as the experts' rows are likely to be.
enum class Height : int { kLow = 8, kMiddle = 16, kTall = 40 };
Height height_of(int rows, int experts, int chosen) {
  if (rows <= static_cast<int>(Height::kLow)) return Height::kLow;
  return static_cast<int64_t>(rows) * chosen <= 8 * static_cast<int64_t>(experts) ? Height::kMiddle : Height::kTall;
}

using Scratch = ExpertScratch<uint16_t>;

Scratch scratch_of(void* workspace, int rows, int hidden, int width, int experts, int chosen) {
  return {workspace,
          static_cast<int64_t>(rows) * chosen,
          hidden,
          width,
          experts,
          static_cast<int>(height_of(rows, experts, chosen)),
          static_cast<int>(Height::kLow)};
}

// What the kernels read of the arguments.
struct Problem {
  ExpertsBf16Args a;
  Rows rows;  // if a.rows_used says so
  Scratch scratch;
  int tile_rows;
};

__global__ void __launch_bounds__(kGroupWarps* kWarp, 1) experts_bf16_group_kernel(Problem p) {
  start_behind();
  const Scratch& s = p.scratch;
  group_expert_pairs({p.a.ids, p.a.rows_used == nullptr ? nullptr : &p.rows, p.a.rows, p.a.chosen, p.tile_rows,
                      s.tile_count, s.tiles, s.order});
}

// Tile of this block; rows 0 past the last one.
__device__ ExpertTile own_tile(const Scratch& scratch) {
  const int index = static_cast<int>(blockIdx.x);
  return index < *scratch.tile_count ? scratch.tiles[index] : ExpertTile{0, 0, 0};
}

// The lane's rows of x: `of(pair)` for the pairs of the tile.
template <class Tile, typename Of>
__device__ __forceinline__ Bf16ChosenRows<Tile::kColumns> find_rows(const Scratch& scratch, const ExpertTile& tile,
                                                                    Of of) {
  const int part = lane_id() / 4;
  Bf16ChosenRows<Tile::kColumns> result;
  KDTREE_UNROLL
  for (int n = 0; n < Tile::kColumns; ++n)
    result.rows[n] = of(scratch.order[tile.first + min(kBf16Rows * n + part, tile.rows - 1)]);
  result.left = tile.rows - part;
  return result;
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads) experts_bf16_gate_up_kernel(Problem p) {
  KDTREE_DYNAMIC_SHARED(shared);
  start_behind();
  const ExpertTile tile = own_tile(p.scratch);
  if (tile.rows == 0) return;
  constexpr int kGates = Tile::kOuts / 2;
  const int first = static_cast<int>(blockIdx.y) * kGates, part = lane_id() / 4;
  const int gates = min(kGates, p.a.width - first);
  const uint16_t* const gate = p.a.gate_up[tile.expert] + static_cast<int64_t>(first + part) * p.a.hidden;
  const auto x = find_rows<Tile>(
      p.scratch, tile, [&](int pair) { return p.a.x + static_cast<int64_t>(pair / p.a.chosen) * p.a.hidden; });
  const int64_t row = p.a.hidden;
  bf16_multiply<Tile>(shared, p.a.hidden, Bf16Weights<true>{gate, p.a.width * row, 8 * row, gates - part}, x, [] {});
  for (int i = static_cast<int>(threadIdx.x); i < tile.rows * kGates; i += Tile::kThreads) {
    const int row = i / kGates, own = i % kGates, out = own / 8 * kBf16Outs + own % 8;
    if (own < gates)
      p.scratch.mid[static_cast<int64_t>(p.scratch.order[tile.first + row]) * p.a.width + first + own] =
          narrow(gated(bf16_joined<Tile>(shared, row, out), bf16_joined<Tile>(shared, row, out + 8)));
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads) experts_bf16_down_kernel(Problem p) {
  KDTREE_DYNAMIC_SHARED(shared);
  start_behind();
  const ExpertTile tile = own_tile(p.scratch);
  if (tile.rows == 0) return;
  const int first = static_cast<int>(blockIdx.y) * Tile::kOuts, part = lane_id() / 4;
  const int outs = min(Tile::kOuts, p.a.hidden - first);
  const uint16_t* const down = p.a.down[tile.expert] + static_cast<int64_t>(first + part) * p.a.width;
  const auto mid = find_rows<Tile>(p.scratch, tile,
                                   [&](int pair) { return p.scratch.mid + static_cast<int64_t>(pair) * p.a.width; });
  const int64_t row = p.a.width;
  bf16_multiply<Tile>(shared, p.a.width, Bf16Weights<false>{down, 8 * row, 16 * row, outs - part}, mid, [] {});
  for (int i = static_cast<int>(threadIdx.x); i < tile.rows * Tile::kOuts; i += Tile::kThreads) {
    const int row = i / Tile::kOuts, out = i % Tile::kOuts;
    if (out < outs)
      p.scratch.out[static_cast<int64_t>(p.scratch.order[tile.first + row]) * p.a.hidden + first + out] =
          bf16_joined<Tile>(shared, row, out);
  }
}

__global__ void __launch_bounds__(kCombineThreads) experts_bf16_combine_kernel(Problem p) {
  start_behind();
  const int row = static_cast<int>(blockIdx.x);
  const int c = 4 * static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  if (c >= p.a.hidden || (p.a.rows_used != nullptr && !p.rows.used(row))) return;
  const int64_t first = static_cast<int64_t>(row) * p.a.chosen;
  float y[4];
  for (int slot = 0; slot < p.a.chosen; ++slot) {
    const float4 v = *reinterpret_cast<const float4*>(p.scratch.out + (first + slot) * p.a.hidden + c);
    const float out[4] = {v.x, v.y, v.z, v.w}, weight = p.a.weights[first + slot];
    KDTREE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float term = __fmul_rn(weight, out[i]);
      y[i] = slot == 0 ? term : __fadd_rn(y[i], term);
    }
  }
  const int64_t place = static_cast<int64_t>(row) * p.a.hidden + c;
  if (p.a.wide)
    *reinterpret_cast<float4*>(static_cast<float*>(p.a.y) + place) = make_float4(y[0], y[1], y[2], y[3]);
  else
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.a.y) + place) =
        make_uint2(narrow(y[0]) | static_cast<uint32_t>(narrow(y[1])) << 16,
                   narrow(y[2]) | static_cast<uint32_t>(narrow(y[3])) << 16);
}

template <class Tile>
kdtree_status multiply_gate_up(const Problem& p, cudaStream_t stream) {
  KDTREE_RETURN_IF_FAILED(allow_shared_memory(reinterpret_cast<const void*>(experts_bf16_gate_up_kernel<Tile>),
                                              "experts_bf16_gate_up_kernel", Tile::kBytes));
  const dim3 grid(static_cast<unsigned>(p.scratch.most_tiles),
                  static_cast<unsigned>(ceil_div(p.a.width, Tile::kOuts / 2)));
  return launch_behind("experts_bf16_gate_up_kernel", experts_bf16_gate_up_kernel<Tile>, grid, dim3(Tile::kThreads),
                       Tile::kBytes, stream, p);
}

template <class Tile>
kdtree_status multiply_down(const Problem& p, cudaStream_t stream) {
  KDTREE_RETURN_IF_FAILED(allow_shared_memory(reinterpret_cast<const void*>(experts_bf16_down_kernel<Tile>),
                                              "experts_bf16_down_kernel", Tile::kBytes));
  const dim3 grid(static_cast<unsigned>(p.scratch.most_tiles),
                  static_cast<unsigned>(ceil_div(p.a.hidden, Tile::kOuts)));
  return launch_behind("experts_bf16_down_kernel", experts_bf16_down_kernel<Tile>, grid, dim3(Tile::kThreads),
                       Tile::kBytes, stream, p);
}

// Eight, Four: the tile for as many slices.
template <class Eight, class Four>
kdtree_status multiply(const Problem& p, cudaStream_t stream) {
  static_assert(Eight::kRows == Four::kRows && Eight::kSlices == 8 && Four::kSlices == 4,
                "one order whatever the tile");
  KDTREE_RETURN_IF_FAILED(bf16_slices(p.a.hidden, 2 * p.a.width) == Eight::kSlices ? multiply_gate_up<Eight>(p, stream)
                                                                                   : multiply_gate_up<Four>(p, stream));
  return bf16_slices(p.a.width, p.a.hidden) == Eight::kSlices ? multiply_down<Eight>(p, stream)
                                                              : multiply_down<Four>(p, stream);
}

}  // namespace

size_t experts_bf16_workspace(int rows, int hidden, int width, int experts, int chosen) {
  if (rows < 1 || hidden < 1 || width < 1 || experts < 1 || chosen < 1) return 0;
  return scratch_of(nullptr, rows, hidden, width, experts, chosen).bytes;
}

kdtree_status experts_bf16(const ExpertsBf16Args& a, cudaStream_t stream) {
  Arguments arguments("experts_bf16");
  arguments.range("hidden", a.hidden, 1, kMostSize)
      .range("width", a.width, 1, kMostSize)
      .range("experts", a.experts, 1, kMostExperts)
      .range("chosen", a.chosen, 1, a.experts < kMostChosen ? a.experts : kMostChosen)
      .range("rows", a.rows, 1, (1 << 30) / kMostChosen)
      .array("x", a.x, sizeof(uint4))
      .array("gate_up", a.gate_up, sizeof(void*))
      .array("down", a.down, sizeof(void*))
      .array("ids", a.ids, sizeof(int32_t))
      .array("weights", a.weights, sizeof(float))
      .array("y", a.y, sizeof(float4));
  if (a.rows_used != nullptr)
    arguments.range("rows_used", a.rows_used->count(), a.rows, a.rows)
        .array("node_count", a.rows_used->node_count, sizeof(int32_t));
  arguments.workspace(a.workspace, a.workspace_size,
                      experts_bf16_workspace(a.rows, a.hidden, a.width, a.experts, a.chosen));
  KDTREE_RETURN_IF_FAILED(arguments.status());
  KDTREE_RETURN_IF_FAILED(check_bf16_extents("experts_bf16", {{"hidden", a.hidden}, {"width", a.width}}));

  const Height height = height_of(a.rows, a.experts, a.chosen);
  const Problem p{a, a.rows_used == nullptr ? Rows{} : *a.rows_used,
                  scratch_of(a.workspace, a.rows, a.hidden, a.width, a.experts, a.chosen), static_cast<int>(height)};
  KDTREE_RETURN_IF_FAILED(launch_behind("experts_bf16_group_kernel", experts_bf16_group_kernel, dim3(1),
                                        dim3(kGroupWarps * kWarp), 0, stream, p));
  if (height == Height::kLow)
    KDTREE_RETURN_IF_FAILED((multiply<Bf16Tile<1, 1, 8, 2, 4>, Bf16Tile<1, 1, 4, 2, 4>>(p, stream)));
  else if (height == Height::kMiddle)
    KDTREE_RETURN_IF_FAILED((multiply<Bf16Tile<1, 2, 8, 2, 3>, Bf16Tile<2, 2, 4, 2, 4>>(p, stream)));
  else
    KDTREE_RETURN_IF_FAILED((multiply<Bf16Tile<2, 5, 8, 1, 2>, Bf16Tile<4, 5, 4, 1, 3>>(p, stream)));
  const dim3 grid(static_cast<unsigned>(a.rows), static_cast<unsigned>(ceil_div(a.hidden, 4 * kCombineThreads)));
  return launch_behind("experts_bf16_combine_kernel", experts_bf16_combine_kernel, grid, dim3(kCombineThreads), 0,
                       stream, p);
}

}  // namespace kdtree
