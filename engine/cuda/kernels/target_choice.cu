// Target logits -> choices: argmax of each row, or one draw from it. A batch may mix both.
//
// Greedy rows are taken by a block each, or where there are few rows by several, whose results a second kernel merges;
// sampled rows by a kernel of their own (choice_sample.h), a block each, launched only if there may be any. Each kernel
// leaves the other's rows alone. What a row gives depends on nothing but the row and its own parameters.
//
// A row whose parameters the reference would refuse (temperature NaN, infinite or negative, top_k < 0, top_p outside
// (0, 1], position < 0) gets -1, as does a row without a choice; a request whose node count does not fit its block has
// no rows. The accept stage reports both.

#include "common/behind.h"
#include "common/launch.h"
#include "kernels/choice_sample.h"
#include "kernels/request.h"

namespace kdtree {
namespace {

constexpr int kMostThreads = 1024;
constexpr int kEnoughRows = 48;       // from here on a block a row keeps the memory busy
constexpr int kEnoughBlocks = 264;    // two for each multiprocessor of the largest device
constexpr int kLeastElements = 8192;  // of a part of a row
constexpr int kMostParts = kWarp;     // a lane merges one

using Part = uint2;  // a Best

struct Rows {
  const kdtree_target_choice_args& a;
  int request;
  int row;

  // Whether the row is to be chosen from by the sampling, or the greedy, kernel. All is loaded before anything is
  // tested, so that the loads do not wait for each other.
  __device__ bool wanted(bool sampled) const {
    const bool failed = failed_before(a.before, request);
    const int nodes = a.node_count != nullptr ? a.node_count[request] : a.rows - 1;
    const bool drawn = a.temperatures != nullptr && a.temperatures[request] != 0;
    return !failed && row <= nodes && nodes < a.rows && drawn == sampled;
  }

  __device__ size_t index() const { return static_cast<size_t>(request) * a.rows + row; }

  template <typename T>
  __device__ const T* logits() const {
    return static_cast<const T*>(a.logits) + static_cast<int64_t>(index()) * a.row_stride;
  }
};

template <typename T>
__global__ void __launch_bounds__(kMostThreads) greedy_kernel(kdtree_target_choice_args a) {
  start_behind();
  __shared__ Best slots[kWarp];
  const Rows at{a, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y)};
  if (!at.wanted(false)) return;
  const int parts = static_cast<int>(gridDim.x), threads = static_cast<int>(blockDim.x);
  const int worker = static_cast<int>(blockIdx.x) * threads + static_cast<int>(threadIdx.x);
  const Best best = best_of_block(best_of_part(at.logits<T>(), a.vocab_size, worker, parts * threads), slots);
  if (threadIdx.x != 0) return;
  if (parts == 1)
    a.choices[at.index()] = best.choice();
  else
    static_cast<Part*>(a.workspace)[at.index() * parts + blockIdx.x] = make_uint2(best.order, best.id);
}

__global__ void __launch_bounds__(kWarp) merge_kernel(kdtree_target_choice_args a, int parts) {
  start_behind();
  const Rows at{a, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x)};
  if (!at.wanted(false)) return;
  Best mine{0, 0};
  if (lane_id() < parts) {
    const Part part = static_cast<const Part*>(a.workspace)[at.index() * parts + lane_id()];
    mine = {part.x, part.y};
  }
  const Best best = best_of_warp(mine);
  if (lane_id() == 0) a.choices[at.index()] = best.choice();
}

template <typename T>
__global__ void __launch_bounds__(kSampleThreads, 2) sample_kernel(kdtree_target_choice_args a) {
  start_behind();
  __shared__ SampleScratch scratch;
  const Rows at{a, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x)};
  if (!at.wanted(true)) return;
  SampleParams params;
  params.temperature = a.temperatures[at.request];
  params.top_k = a.top_k != nullptr ? a.top_k[at.request] : 0;
  params.top_p = a.top_p != nullptr ? a.top_p[at.request] : 1.0f;
  params.seed = a.seeds != nullptr ? a.seeds[at.request] : 0;
  params.position = a.positions[at.index()];
  const int choice = sample_row(at.logits<T>(), a.vocab_size, params, scratch);
  if (threadIdx.x == 0) a.choices[at.index()] = choice;
}

// Blocks that share a row: of the sizes alone, for the workspace.
int parts_of_row(int64_t requests, int64_t rows, int64_t vocab_size) {
  const int64_t all = requests * rows;
  if (all >= kEnoughRows) return 1;
  int64_t parts = ceil_div(kEnoughBlocks, all);
  if (parts > kMostParts) parts = kMostParts;
  if (parts > ceil_div(vocab_size, kLeastElements)) parts = ceil_div(vocab_size, kLeastElements);
  return static_cast<int>(parts);
}

bool in_range(int32_t requests, int32_t rows, int32_t vocab_size) {
  return requests >= 1 && requests <= KDTREE_MAX_REQUESTS && rows >= 1 && rows <= KDTREE_MAX_BUDGET + 1 &&
         vocab_size >= 1;
}

template <typename T>
kdtree_status launch(const kdtree_target_choice_args& a) {
  const cudaStream_t stream = static_cast<cudaStream_t>(a.stream);
  const unsigned requests = static_cast<unsigned>(a.requests), rows = static_cast<unsigned>(a.rows);
  const int parts = parts_of_row(a.requests, a.rows, a.vocab_size);
  const int64_t groups = ceil_div(a.vocab_size, 16 / sizeof(T));
  KDTREE_RETURN_IF_FAILED(launch_behind("greedy_kernel", greedy_kernel<T>,
                                        dim3(static_cast<unsigned>(parts), rows, requests),
                                        threads_for(ceil_div(groups, parts), 1, kMostThreads), 0, stream, a));
  if (parts > 1)
    KDTREE_RETURN_IF_FAILED(
        launch_behind("merge_kernel", merge_kernel, dim3(rows, requests), dim3(kWarp), 0, stream, a, parts));
  if (a.temperatures == nullptr) return KDTREE_OK;
  return launch_behind("sample_kernel", sample_kernel<T>, dim3(rows, requests),
                       threads_for(a.vocab_size, 1, kSampleThreads), 0, stream, a);
}

}  // namespace
}  // namespace kdtree

using namespace kdtree;

extern "C" size_t kdtree_target_choice_workspace(int32_t requests, int32_t rows, int32_t vocab_size) {
  if (!in_range(requests, rows, vocab_size)) return 0;
  const int parts = parts_of_row(requests, rows, vocab_size);
  return parts == 1 ? 0 : static_cast<size_t>(requests) * rows * parts * sizeof(Part);
}

extern "C" kdtree_status kdtree_target_choice(const kdtree_target_choice_args* args) {
  if (args == nullptr) return fail(KDTREE_POINTER, "kdtree_target_choice: args is NULL");
  const kdtree_target_choice_args& a = *args;
  const size_t element = a.dtype == KDTREE_BF16 ? sizeof(uint16_t) : sizeof(float);
  Arguments arguments("kdtree_target_choice");
  arguments.version(a.struct_size, sizeof(a))
      .range("requests", a.requests, 1, KDTREE_MAX_REQUESTS)
      .range("rows", a.rows, 1, KDTREE_MAX_BUDGET + 1)
      .range("vocab_size", a.vocab_size, 1, 0x7fffffff)
      .range("dtype", a.dtype, KDTREE_F32, KDTREE_BF16)
      .range("row_stride", a.row_stride, a.vocab_size, INT64_MAX)
      .array("logits", a.logits, element)
      .array("node_count", a.node_count, sizeof(int32_t), false)
      .array("positions", a.positions, sizeof(int32_t), a.temperatures != nullptr)
      .array("temperatures", a.temperatures, sizeof(float), false)
      .array("top_k", a.top_k, sizeof(int32_t), false)
      .array("top_p", a.top_p, sizeof(float), false)
      .array("seeds", a.seeds, sizeof(uint64_t), false)
      .array("before", a.before, sizeof(int32_t), false)
      .array("choices", a.choices, sizeof(int32_t));
  if (!arguments.failed())
    arguments.workspace(a.workspace, a.workspace_size,
                        kdtree_target_choice_workspace(a.requests, a.rows, a.vocab_size));
  if (arguments.failed()) return arguments.status();
  return a.dtype == KDTREE_BF16 ? launch<uint16_t>(a) : launch<float>(a);
}
