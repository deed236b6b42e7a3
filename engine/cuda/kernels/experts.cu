// The routed experts of all rows: grouped by expert on the device, multiplied tile by tile, added up row by row.
//
//   group    one block sorts the pairs (row, slot) by expert, in the order of the rows, and cuts tiles of at most 8
//   gate_up  a warp for two gates and the two ups that go with them, of the rows of a tile -> mid [pair, width]
//   down     a warp for four outputs -> out [pair, hidden]
//   combine  y = w0 out0; y = y + w1 out1; ... in the order of the slots, each product rounded by itself
// Sums run in the order of linear_order.h, so a row's bits do not depend on who shares its experts. A tile reads its
// expert's weights once; tiles of one expert follow each other in the grid, so that a second one finds them in L2.
// The grid is for as many tiles as there could be: what is not needed ends at once.

#include "common/behind.h"
#include "kernels/experts_group.h"
#include "kernels/layers.h"
#include "kernels/linear_order.h"
#include "kernels/swiglu.h"

namespace kdtree {
namespace {

constexpr int kTileRows = 8;
constexpr int kOuts = 4;
constexpr int kWarps = 4;
constexpr int kCombineThreads = 128;

template <typename T>
ExpertScratch<T> scratch_of(void* workspace, int rows, int hidden, int width, int experts, int chosen) {
  return {workspace, static_cast<int64_t>(rows) * chosen, hidden, width, experts, kTileRows, kTileRows};
}

// What the kernels read of the arguments.
template <typename T>
struct Problem {
  ExpertsArgs<T> a;
  Rows rows;  // if a.rows_used says so
  ExpertScratch<T> scratch;
  __device__ bool used(int row) const { return a.rows_used == nullptr || rows.used(row); }
};

template <typename T>
__global__ void __launch_bounds__(kGroupWarps* kWarp, 1) experts_group_kernel(Problem<T> p) {
  start_behind();
  const ExpertScratch<T>& s = p.scratch;
  group_expert_pairs({p.a.ids, p.a.rows_used == nullptr ? nullptr : &p.rows, p.a.rows, p.a.chosen, kTileRows,
                      s.tile_count, s.tiles, s.order});
}

// Tile of this block; rows 0 past the last one.
template <typename T>
__device__ ExpertTile own_tile(const ExpertScratch<T>& scratch) {
  const int index = static_cast<int>(blockIdx.x);
  return index < *scratch.tile_count ? scratch.tiles[index] : ExpertTile{0, 0, 0};
}

// kRows: the most rows of a tile.
template <typename T, int kRows>
__global__ void __launch_bounds__(kWarps* kWarp) experts_gate_up_kernel(Problem<T> p) {
  start_behind();
  const ExpertTile tile = own_tile(p.scratch);
  const int first_out = (static_cast<int>(blockIdx.y) * kWarps + warp_id()) * (kOuts / 2);
  if (tile.rows == 0 || first_out >= p.a.width) return;
  const int outs = min(kOuts / 2, p.a.width - first_out);
  const T* const gate_up = p.a.gate_up[tile.expert];
  const T* x[kRows];
  const T* w[kOuts];
  KDTREE_UNROLL
  for (int m = 0; m < kRows; ++m)
    x[m] = p.a.x + static_cast<int64_t>(p.scratch.order[tile.first + min(m, tile.rows - 1)] / p.a.chosen) * p.a.hidden;
  KDTREE_UNROLL
  for (int n = 0; n < kOuts; ++n) {
    const int out = first_out + min(n % (kOuts / 2), outs - 1) + n / (kOuts / 2) * p.a.width;
    w[n] = gate_up + static_cast<int64_t>(out) * p.a.hidden;
  }
  float sum[kRows * kOuts] = {};
  add_terms<2>(x, tile.rows, w, p.a.hidden, sum);
  // The up of gate n is number n + 2 of its row: kLanes lanes hold one number.
  constexpr int kLanes = kWarp / (kRows * kOuts);
  const float own = join_lanes(sum);
  const float up = __shfl_down_sync(kAllLanes, own, kOuts / 2 * kLanes);
  const int number = lane_id() / kLanes, m = number / kOuts, n = number % kOuts;
  if (lane_id() % kLanes == 0 && m < tile.rows && n < outs)
    p.scratch.mid[static_cast<int64_t>(p.scratch.order[tile.first + m]) * p.a.width + first_out + n] =
        stored<T>(gated(own, up));
}

template <typename T, int kRows>
__global__ void __launch_bounds__(kWarps* kWarp) experts_down_kernel(Problem<T> p) {
  start_behind();
  const ExpertTile tile = own_tile(p.scratch);
  const int first_out = (static_cast<int>(blockIdx.y) * kWarps + warp_id()) * kOuts;
  if (tile.rows == 0 || first_out >= p.a.hidden) return;
  const int outs = min(kOuts, p.a.hidden - first_out);
  const T* const down = p.a.down[tile.expert];
  const T* x[kRows];
  const T* w[kOuts];
  KDTREE_UNROLL
  for (int m = 0; m < kRows; ++m)
    x[m] = p.scratch.mid + static_cast<int64_t>(p.scratch.order[tile.first + min(m, tile.rows - 1)]) * p.a.width;
  KDTREE_UNROLL
  for (int n = 0; n < kOuts; ++n) w[n] = down + static_cast<int64_t>(first_out + min(n, outs - 1)) * p.a.width;
  float sum[kRows * kOuts] = {};
  add_terms<2>(x, tile.rows, w, p.a.width, sum);
  join_all(sum, tile.rows * kOuts, [&](int number, float value) {
    const int64_t pair = p.scratch.order[tile.first + number / kOuts];
    const int n = number % kOuts;
    if (n < outs) p.scratch.out[pair * p.a.hidden + first_out + n] = value;
  });
}

__device__ float4 scaled(float4 v, float w) {
  return make_float4(__fmul_rn(w, v.x), __fmul_rn(w, v.y), __fmul_rn(w, v.z), __fmul_rn(w, v.w));
}
__device__ float4 added(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

template <typename T>
__global__ void __launch_bounds__(kCombineThreads) experts_combine_kernel(Problem<T> p, bool vector) {
  start_behind();
  const int row = static_cast<int>(blockIdx.x);
  const int c = 4 * static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x), count = p.a.hidden - c;
  if (count <= 0 || !p.used(row)) return;
  const int64_t first = static_cast<int64_t>(row) * p.a.chosen;
  const float* const out = p.scratch.out + first * p.a.hidden + c;
  float4 y = scaled(load4(out, count, vector), p.a.weights[first]);
  for (int slot = 1; slot < p.a.chosen; ++slot)
    y = added(y,
              scaled(load4(out + static_cast<int64_t>(slot) * p.a.hidden, count, vector), p.a.weights[first + slot]));
  store4(p.a.y + static_cast<int64_t>(row) * p.a.hidden + c, y, count, vector);
}

template <int kRows, typename T>
kdtree_status multiply(const Problem<T>& p, cudaStream_t stream) {
  const unsigned tiles = static_cast<unsigned>(p.scratch.most_tiles);
  const dim3 block(kWarps * kWarp);
  const dim3 gates(tiles, static_cast<unsigned>(ceil_div(p.a.width, kWarps * kOuts / 2)));
  const dim3 outs(tiles, static_cast<unsigned>(ceil_div(p.a.hidden, kWarps * kOuts)));
  KDTREE_RETURN_IF_FAILED(
      launch_behind("experts_gate_up_kernel", experts_gate_up_kernel<T, kRows>, gates, block, 0, stream, p));
  return launch_behind("experts_down_kernel", experts_down_kernel<T, kRows>, outs, block, 0, stream, p);
}

template <typename T>
kdtree_status multiply_experts(const ExpertsArgs<T>& a, cudaStream_t stream) {
  Arguments arguments("experts");
  arguments.range("hidden", a.hidden, 1, 65535 * kWarps * kOuts)
      .range("width", a.width, 1, 65535 * kWarps * kOuts / 2)
      .range("experts", a.experts, 1, kMostExperts)
      .range("chosen", a.chosen, 1, a.experts < kMostChosen ? a.experts : kMostChosen)
      .range("rows", a.rows, 1, (1 << 30) / kMostChosen)
      .array("x", a.x, sizeof(T))
      .array("gate_up", a.gate_up, sizeof(T*))
      .array("down", a.down, sizeof(T*))
      .array("ids", a.ids, sizeof(int32_t))
      .array("weights", a.weights, sizeof(float))
      .array("y", a.y, sizeof(T));
  if (a.rows_used != nullptr)
    arguments.range("rows_used", a.rows_used->count(), a.rows, a.rows)
        .array("node_count", a.rows_used->node_count, sizeof(int32_t));
  arguments.workspace(a.workspace, a.workspace_size,
                      scratch_of<T>(nullptr, a.rows, a.hidden, a.width, a.experts, a.chosen).bytes);
  KDTREE_RETURN_IF_FAILED(arguments.status());

  const Problem<T> p{a, a.rows_used == nullptr ? Rows{} : *a.rows_used,
                     scratch_of<T>(a.workspace, a.rows, a.hidden, a.width, a.experts, a.chosen)};
  KDTREE_RETURN_IF_FAILED(
      launch_behind("experts_group_kernel", experts_group_kernel<T>, dim3(1), dim3(kGroupWarps * kWarp), 0, stream, p));
  // One row: no expert has two.
  KDTREE_RETURN_IF_FAILED(a.rows == 1 ? multiply<1>(p, stream) : multiply<kTileRows>(p, stream));
  const dim3 grid(static_cast<unsigned>(a.rows), static_cast<unsigned>(ceil_div(a.hidden, 4 * kCombineThreads)));
  return launch_behind("experts_combine_kernel", experts_combine_kernel<T>, grid, dim3(kCombineThreads), 0, stream, p,
                       fours<T>({a.y}, {a.hidden}) && fours({p.scratch.out}, {a.hidden}));
}

}  // namespace

size_t experts_workspace(int rows, int hidden, int width, int experts, int chosen) {
  if (rows < 1 || hidden < 1 || width < 1 || experts < 1 || chosen < 1) return 0;
  return scratch_of<float>(nullptr, rows, hidden, width, experts, chosen).bytes;
}

kdtree_status experts(const ExpertsArgs<float>& args, cudaStream_t stream) { return multiply_experts(args, stream); }
kdtree_status experts(const ExpertsArgs<uint16_t>& args, cudaStream_t stream) { return multiply_experts(args, stream); }

}  // namespace kdtree
