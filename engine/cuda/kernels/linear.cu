// y = x w^T: sums in the order of linear_order.h, which no tile shape changes.
//
// One or two rows (and rows of any alignment): a warp for kOuts outputs of up to 4 rows. Weights go from memory to
// registers, eight 16-byte loads of a lane on their way at a time; x comes from L1. Memory is the limit.
//
// More rows: a block of 4 or 8 warps for 17 or 34 rows times 32 outputs. x and w pass through shared memory in steps of
// 128 k, copied asynchronously while the step before is computed. A warp holds 17 x 8 sums in each lane and reads 25
// values of 16 bytes for 544 multiply-adds: shared memory is then 3/4 as busy as the arithmetic. 17 rows, because a
// tree of 2^n nodes and its root are 2^n + 1: 33 rows are 2 tiles of 17, 257 are 16. A row that a tile lacks costs
// nothing.
//
// Measured on one H200 (bench/bench_layers.cu), us for 1, 4, 8, 17, 33, 65, 257 rows, cuBLAS float32 behind the stroke:
//   7168 -> 7168   48 | 54   66 | 106   79 | 108   103 | 127   189 | 153   373 | 278   1304 | 694
//   7168 -> 2112   18 | 17   41 |  43   48 |  74    64 |  44    71 |  61    97 |  90    380 | 228
//   1536 -> 12288  20 | 23   32 |  33   37 |  46    49 |  50    68 |  68   132 | 139    509 | 262
// One row reads the weights at the full speed of the memory. The 32 partial sums that it needs for that are what keeps
// many rows from larger tiles: their products then run at 20 TFLOP/s, half as fast as cuBLAS's.

#include <type_traits>

#include "common/behind.h"
#include "common/ptx.h"
#include "kernels/linear_bf16.h"
#include "kernels/linear_cublas.h"
#include "kernels/linear_order.h"

namespace kdtree {
namespace {

constexpr int kMostSize = 1 << 30;
constexpr int kMostOutputs = 65535 * 16;  // the grid's second side
constexpr int kStreamWarps = 4;
constexpr int kTileRows = 17;
constexpr int kTileWarps = 4;       // warps of a block along the outputs
constexpr int kEnoughBlocks = 128;  // about one for each multiprocessor

// Output (m, o) of one problem.
struct LinearResult {
  float* y;
  const float* add;
  int64_t stride;

  __device__ LinearResult(const LinearArgs& a, int64_t batch)
      : y(a.y + batch * a.y_batch), add(a.add == nullptr ? nullptr : a.add + batch * a.y_batch), stride(a.y_stride) {}
  __device__ void put(int64_t row, int out, float sum) const {
    const int64_t place = row * stride + out;
    y[place] = add == nullptr ? sum : sum + add[place];
  }
};

__device__ LinearResult result_of(const LinearArgs& a, int64_t batch) { return {a, batch}; }
__device__ LinearBf16Result result_of(const LinearBf16Args& a, int64_t batch) { return {a, batch}; }

template <int kRows, int kOuts, class Args>
__global__ void __launch_bounds__(kStreamWarps* kWarp, 5) linear_stream_kernel(Args a) {
  start_behind();
  using T = std::remove_pointer_t<decltype(a.x)>;  // const
  const int first_row = static_cast<int>(blockIdx.x) * kRows;
  const int first_out = (static_cast<int>(blockIdx.y) * kStreamWarps + warp_id()) * kOuts;
  if (first_out >= a.out) return;
  const int rows = min(kRows, a.rows - first_row), outs = min(kOuts, a.out - first_out);
  T* const x0 = a.x + blockIdx.z * a.x_batch + first_row * a.x_stride;
  T* const w0 = a.w + blockIdx.z * a.w_batch + static_cast<int64_t>(first_out) * a.in;
  T* x[kRows];
  T* w[kOuts];
  KDTREE_UNROLL
  for (int m = 0; m < kRows; ++m) x[m] = x0 + min(m, rows - 1) * a.x_stride;
  KDTREE_UNROLL
  for (int n = 0; n < kOuts; ++n) w[n] = w0 + static_cast<int64_t>(min(n, outs - 1)) * a.in;

  float sum[kRows * kOuts] = {};
  add_terms<8 / kOuts>(x, rows, w, a.in, sum);
  const auto result = result_of(a, blockIdx.z);
  join_all(sum, rows * kOuts, [&](int number, float value) {
    const int n = number % kOuts;
    if (n < outs) result.put(first_row + number / kOuts, first_out + n, value);
  });
}

// What the blocks of a tiled product share. A block's rows are those of `groups` groups of `group_rows`.
struct Tiling {
  int groups, group_rows;
  __host__ __device__ int rows() const { return groups * group_rows; }
};

// Tiles of kStages steps: rows of x, then rows of w, 128 floats each.
template <int kOuts, int kStages>
__global__ void __launch_bounds__(2 * kTileWarps * kWarp) linear_tile_kernel(LinearArgs a, Tiling tiling) {
  start_behind();
  KDTREE_DYNAMIC_SHARED(shared);
  float* const stages = reinterpret_cast<float*>(shared);
  constexpr int kBlockOuts = kTileWarps * kOuts;
  const int lane = lane_id(), warp = warp_id();
  const int first_row = static_cast<int>(blockIdx.x) * tiling.rows();
  const int first_out = static_cast<int>(blockIdx.y) * kBlockOuts;
  const int rows = min(tiling.rows(), a.rows - first_row), outs = min(kBlockOuts, a.out - first_out);
  const int stage_size = (tiling.rows() + kBlockOuts) * kWarpTerms;
  const float* const x = a.x + blockIdx.z * a.x_batch + first_row * a.x_stride;
  const float* const w = a.w + blockIdx.z * a.w_batch + static_cast<int64_t>(first_out) * a.in;

  const int steps = static_cast<int>(ceil_div(a.in, kWarpTerms));
  const auto copy = [&](int step) {
    const int k = step * kWarpTerms + 4 * lane;
    if (step < steps && k < a.in) {
      float* const stage = stages + step % kStages * stage_size + 4 * lane;
      for (int i = warp; i < rows; i += warp_count()) copy_async_16(stage + i * kWarpTerms, x + i * a.x_stride + k);
      for (int i = warp; i < outs; i += warp_count())
        copy_async_16(stage + (tiling.rows() + i) * kWarpTerms, w + static_cast<int64_t>(i) * a.in + k);
    }
    commit_copies();
  };

  const int own_first_row = warp / kTileWarps * tiling.group_rows, own_first_out = warp % kTileWarps * kOuts;
  const int own_rows = min(tiling.group_rows, rows - own_first_row);
  float sum[kTileRows * kOuts] = {};
  for (int step = 0; step < kStages - 1; ++step) copy(step);
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 2>();
    __syncthreads();  // the step is there for all, and all are done with the stage that is filled next
    copy(step + kStages - 1);
    if (step * kWarpTerms + 4 * lane >= a.in) continue;
    const float* const stage = stages + step % kStages * stage_size + 4 * lane;
    float4 weights[kOuts];
    KDTREE_UNROLL
    for (int n = 0; n < kOuts; ++n)
      weights[n] = *reinterpret_cast<const float4*>(stage + (tiling.rows() + own_first_out + n) * kWarpTerms);
    KDTREE_UNROLL
    for (int m = 0; m < kTileRows; ++m) {
      if (m < own_rows) {
        const float4 values = *reinterpret_cast<const float4*>(stage + (own_first_row + m) * kWarpTerms);
        KDTREE_UNROLL
        for (int n = 0; n < kOuts; ++n) sum[m * kOuts + n] = add_products(values, weights[n], 4, sum[m * kOuts + n]);
      }
    }
  }
  const LinearResult result(a, blockIdx.z);
  join_all(sum, own_rows * kOuts, [&](int number, float value) {
    const int n = own_first_out + number % kOuts;
    if (n < outs) result.put(first_row + own_first_row + number / kOuts, first_out + n, value);
  });
}

template <int kRows, int kOuts, class Args>
kdtree_status launch_stream(const Args& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(a.rows, kRows)),
                  static_cast<unsigned>(ceil_div(a.out, kStreamWarps * kOuts)), static_cast<unsigned>(a.batch));
  return launch_behind("linear_stream_kernel", linear_stream_kernel<kRows, kOuts, Args>, grid,
                       dim3(kStreamWarps * kWarp), 0, stream, a);
}

template <int kOuts, int kStages>
kdtree_status launch_tile(const LinearArgs& a, const Tiling& tiling, cudaStream_t stream) {
  const size_t bytes = sizeof(float) * kStages * static_cast<size_t>(tiling.rows() + kTileWarps * kOuts) * kWarpTerms;
  KDTREE_RETURN_IF_FAILED(allow_shared_memory(reinterpret_cast<const void*>(linear_tile_kernel<kOuts, kStages>),
                                              "linear_tile_kernel", bytes));
  const dim3 grid(static_cast<unsigned>(ceil_div(a.rows, tiling.rows())),
                  static_cast<unsigned>(ceil_div(a.out, kTileWarps * kOuts)), static_cast<unsigned>(a.batch));
  const dim3 block(static_cast<unsigned>(tiling.groups * kTileWarps * kWarp));
  return launch_behind("linear_tile_kernel", linear_tile_kernel<kOuts, kStages>, grid, block, bytes, stream, a, tiling);
}

// The rows fall into equal groups of at most 17; a block takes two where there are several.
Tiling tiling_of(int rows) {
  const int groups = static_cast<int>(ceil_div(rows, kTileRows));
  return {groups > 1 ? 2 : 1, static_cast<int>(ceil_div(rows, groups))};
}

template <int kRows, class Args>
kdtree_status stream_of_rows(const Args& a, cudaStream_t stream) {
  // Long sums for few outputs: a warp for each, or too few of them would ask for memory.
  if (a.in >= 2048 && a.out < 4096) return launch_stream<kRows, 1>(a, stream);
  return launch_stream<kRows, 4>(a, stream);
}

kdtree_status linear_row_invariant(const LinearArgs& a, cudaStream_t stream) {
  if (a.rows == 1) return stream_of_rows<1>(a, stream);
  const bool large = a.in >= 4096 && a.out >= 4096;  // two rows of these are better off with tiles
  if (a.rows == 2 && !large) return stream_of_rows<2>(a, stream);
  if (!fours({a.x, a.w}, {a.x_stride, a.x_batch, a.w_batch, a.in})) return stream_of_rows<4>(a, stream);
  const Tiling tiling = tiling_of(a.rows);
  const int64_t blocks = ceil_div(a.rows, tiling.rows()) * ceil_div(a.out, kTileWarps * 8) * a.batch;
  return blocks >= kEnoughBlocks ? launch_tile<8, 2>(a, tiling, stream) : launch_tile<4, 3>(a, tiling, stream);
}

// What both types of arguments say alike. alignment: of y and add.
template <class Args>
Arguments checked(const char* call, const Args& a, size_t alignment) {
  Arguments arguments(call);
  arguments.range("rows", a.rows, 1, kMostSize)
      .range("out", a.out, 1, kMostOutputs)
      .range("in", a.in, 1, kMostSize)
      .range("batch", a.batch, 1, 65535)
      .range("x_stride", a.x_stride, a.in, INT64_MAX)
      .range("y_stride", a.y_stride, a.out, INT64_MAX)
      .array("x", a.x, sizeof(*a.x))
      .array("w", a.w, sizeof(*a.w))
      .array("y", a.y, alignment)
      .array("add", a.add, alignment, false);
  return arguments;
}

}  // namespace

kdtree_status linear(const LinearArgs& a, Gemm gemm, cudaStream_t stream) {
  Arguments arguments = checked("linear", a, sizeof(float));
  KDTREE_RETURN_IF_FAILED(arguments.range("gemm", static_cast<int>(gemm), 0, 1).status());
  return gemm == Gemm::kCublas ? linear_cublas(a, stream) : linear_row_invariant(a, stream);
}

kdtree_status linear_bf16_any(const LinearBf16Args& a, cudaStream_t stream) {
  KDTREE_RETURN_IF_FAILED(checked("linear_bf16_any", a, a.wide ? sizeof(float) : sizeof(uint16_t)).status());
  if (a.rows == 1) return stream_of_rows<1>(a, stream);
  return a.rows == 2 ? stream_of_rows<2>(a, stream) : stream_of_rows<4>(a, stream);
}

}  // namespace kdtree
