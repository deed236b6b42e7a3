#include "common/behind.h"
#include "kernels/request.h"
#include "loop/control.h"

namespace kdtree {
namespace {

constexpr int kThreads = 64;

__device__ int request_of_thread() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

__device__ bool stops(const Control& c, int request, int token) {
  for (int i = 0; i < c.stop_counts[request]; ++i)
    if (c.stop_tokens[static_cast<int64_t>(request) * c.stop_stride + i] == token) return true;
  return false;
}

__global__ void plan_round_kernel(Control c) {
  start_behind();
  const int r = request_of_thread();
  if (r >= c.requests) return;
  const bool runs = c.finish[r] == KDTREE_RUNNING;
  write_status(c.status, r, {runs ? static_cast<int>(KDTREE_REQUEST_OK) : kDone});
  const int depth = runs && c.method != KDTREE_AR ? min(c.blocks[r], c.wanted[r]) - 1 : 0;
  const int nodes =
      c.method == KDTREE_DDTREE ? min(min(c.budgets[r], c.width - 1), c.capacities[r] - c.prefix[r] - 1) : depth;
  c.depth_limits[r] = depth;
  c.tree_budgets[r] = depth > 0 ? max(nodes, 0) : 0;
  c.list_depths[r] = c.tree_budgets[r] > 0 ? depth : 0;
  c.context[r] = c.uses_dflash[r] && c.list_depths[r] > 0 ? c.prefix[r] : -1;
}

__global__ void plan_verify_kernel(Control c) {
  start_behind();
  const int r = request_of_thread();
  if (r < c.requests) c.rows_used[r] = c.status[3 * r] == KDTREE_REQUEST_OK ? c.node_count[r] : -1;
}

__global__ void cut_path_kernel(Control c) {
  start_behind();
  const int r = request_of_thread();
  if (r >= c.requests) return;
  int kept = c.status[3 * r] == KDTREE_REQUEST_OK ? c.accepted[r] : -1;
  const int32_t* const path = c.path + static_cast<int64_t>(r) * c.path_stride;
  for (int i = 0; i < kept; ++i)
    if (stops(c, r, c.tokens[static_cast<int64_t>(r) * c.width + path[i]])) kept = i;
  c.kept[r] = kept;
  c.observed[r] = c.uses_dflash[r] ? kept : -1;
}

__global__ void end_round_kernel(Control c) {
  start_behind();
  const int r = request_of_thread();
  if (r >= c.requests) return;
  Record& record = c.records[r];
  record.ran = 0;
  record.output_count = 0;
  if (c.finish[r] == KDTREE_RUNNING && failed_before(c.status, r)) {
    c.finish[r] = KDTREE_FINISH_ERROR;
    write_status(record.status, 0, carried_on(c.status, r));
  } else if (c.finish[r] == KDTREE_RUNNING) {
    const int32_t* const path = c.path + static_cast<int64_t>(r) * c.path_stride;
    const int kept = c.kept[r], bonus = c.bonus[r], wanted = c.wanted[r];
    record.ran = 1;
    record.prefix_length = c.prefix[r];
    record.nodes = c.node_count[r];
    record.depth_limit = c.depth_limits[r];
    record.list_depths = c.list_depths[r];
    record.kept = kept;
    record.bonus = bonus;
    bool stopped = false;
    for (int i = 0; i <= kept; ++i) {
      const int64_t node = static_cast<int64_t>(r) * c.width + path[i];
      record.path[i] = path[i];
      if (i > 0) record.ranks[i - 1] = c.ranks[node];
      record.output[i] = c.tokens[node];
      stopped = stops(c, r, record.output[i]);
    }
    int count = kept + 1;
    // A bonus token that stops needs no row and no round of its own: nothing will attend to it.
    if (!stopped && count < wanted && stops(c, r, bonus)) {
      record.output[count++] = bonus;
      stopped = true;
    }
    record.output_count = count;
    c.prefix[r] += kept + 1;
    c.root[r] = bonus;
    c.wanted[r] = stopped ? 0 : wanted - count;
    if (stopped)
      c.finish[r] = KDTREE_FINISH_STOP;
    else if (c.wanted[r] == 0)
      c.finish[r] = c.full_finish[r];
  }
  record.finish = c.finish[r];
  record.cache_length = c.prefix[r];
}

__global__ void plan_prompt_kernel(Control c, PromptChunk p) {
  start_behind();
  const int r = static_cast<int>(blockIdx.x), length = p.lengths[r];
  const int used = min(max(length - p.begin, 0), p.width);  // rows of this pass
  for (int i = threadIdx.x; i < p.width; i += blockDim.x) {
    const int64_t row = static_cast<int64_t>(r) * p.width + i;
    p.tokens[row] = i < used ? p.prompts[static_cast<int64_t>(r) * p.stride + p.begin + i] : 0;
    p.positions[row] = i < used ? p.begin + i : 0;
  }
  if (threadIdx.x != 0) return;
  const bool ends = used > 0 && p.begin + used == length;
  write_status(p.ends, r, {ends ? static_cast<int>(KDTREE_REQUEST_OK) : kDone});
  p.last_positions[r] = length - 1;
  c.prefix[r] = min(p.begin, length);
  c.rows_used[r] = used - 1;
  c.observed[r] = c.uses_dflash[r] ? used - 1 : -1;
}

__global__ void keep_choices_kernel(Control c, const int32_t* ends, const int32_t* choices, int32_t* into) {
  start_behind();
  const int r = request_of_thread();
  if (r < c.requests && ends[3 * r] == KDTREE_REQUEST_OK) into[r] = choices[r];
}

__global__ void end_prompt_kernel(Control c, const int32_t* choices, const int32_t* lengths) {
  start_behind();
  const int r = request_of_thread();
  if (r >= c.requests) return;
  Record& record = c.records[r];
  record.ran = 0;
  record.output_count = 0;
  write_status(record.status, 0, {});
  c.prefix[r] = lengths[r];
  c.root[r] = choices[r];
  if (choices[r] < 0) {
    c.finish[r] = KDTREE_FINISH_ERROR;
    c.prefix[r] = 0;  // nothing is committed
    write_status(record.status, 0, {KDTREE_REQUEST_NO_CHOICE, -1, lengths[r] - 1});
  } else if (c.wanted[r] > 0 && stops(c, r, choices[r])) {
    record.output[0] = choices[r];
    record.output_count = 1;
    c.wanted[r] = 0;
    c.finish[r] = KDTREE_FINISH_STOP;
  } else {
    c.finish[r] = c.wanted[r] > 0 ? static_cast<int32_t>(KDTREE_RUNNING) : c.full_finish[r];
  }
  record.finish = c.finish[r];
  record.cache_length = c.prefix[r];
}

template <typename... Rest>
kdtree_status launch_requests(void (*kernel)(Control, Rest...), const char* name, const Control& c, cudaStream_t stream,
                              Rest... rest) {
  return launch_behind(name, kernel, dim3(static_cast<unsigned>(ceil_div(c.requests, kThreads))), dim3(kThreads), 0,
                       stream, c, rest...);
}

}  // namespace

kdtree_status plan_round(const Control& c, cudaStream_t stream) {
  return launch_requests(plan_round_kernel, "plan_round_kernel", c, stream);
}
kdtree_status plan_verify(const Control& c, cudaStream_t stream) {
  return launch_requests(plan_verify_kernel, "plan_verify_kernel", c, stream);
}
kdtree_status cut_path(const Control& c, cudaStream_t stream) {
  return launch_requests(cut_path_kernel, "cut_path_kernel", c, stream);
}
kdtree_status end_round(const Control& c, cudaStream_t stream) {
  return launch_requests(end_round_kernel, "end_round_kernel", c, stream);
}
kdtree_status keep_choices(const Control& c, const int32_t* ends, const int32_t* choices, int32_t* into,
                           cudaStream_t stream) {
  return launch_requests(keep_choices_kernel, "keep_choices_kernel", c, stream, ends, choices, into);
}
kdtree_status end_prompt(const Control& c, const int32_t* choices, const int32_t* lengths, cudaStream_t stream) {
  return launch_requests(end_prompt_kernel, "end_prompt_kernel", c, stream, choices, lengths);
}
kdtree_status plan_prompt(const Control& c, const PromptChunk& chunk, cudaStream_t stream) {
  return launch_behind("plan_prompt_kernel", plan_prompt_kernel, dim3(static_cast<unsigned>(c.requests)),
                       dim3(kThreads), 0, stream, c, chunk);
}

}  // namespace kdtree
