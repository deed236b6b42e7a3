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

// What a round may do that begins behind `prefix` rows.
__device__ void plan(const Control& c, int request, bool runs, int prefix, int wanted) {
  const int budget = min(c.budgets[request], c.width - 1), room = c.capacities[request] - prefix - 1;
  const int block = c.blocks[request], dflash = c.uses_dflash[request];
  const int depth = runs && c.method != KDTREE_AR ? min(block, wanted) - 1 : 0;
  const int nodes = c.method == KDTREE_DDTREE ? min(budget, room) : depth;
  const int tree_budget = depth > 0 ? max(nodes, 0) : 0, list_depths = tree_budget > 0 ? depth : 0;
  write_status(c.status, request, {runs ? static_cast<int>(KDTREE_REQUEST_OK) : kDone});
  c.depth_limits[request] = depth;
  c.tree_budgets[request] = tree_budget;
  c.list_depths[request] = list_depths;
  c.context[request] = dflash && list_depths > 0 ? prefix : -1;
}

__global__ void plan_round_kernel(Control c) {
  start_behind();
  const int r = request_of_thread();
  if (r < c.requests) plan(c, r, c.finish[r] == KDTREE_RUNNING, c.prefix[r], c.wanted[r]);
}

__global__ void plan_verify_kernel(Control c) {
  start_behind();
  const int r = request_of_thread();
  if (r < c.requests) c.rows_used[r] = c.status[3 * r] == KDTREE_REQUEST_OK ? c.node_count[r] : -1;
}

// The state of a request from here on, by one thread, and the rest of its record.
__device__ void settle(const Control& c, int request, int finish, int prefix, int wanted) {
  Record& record = c.records[request];
  record.finish = finish;
  record.cache_length = prefix;
  c.finish[request] = finish;
  c.prefix[request] = prefix;
  c.wanted[request] = wanted;
  if (c.plans_next) plan(c, request, finish == KDTREE_RUNNING, prefix, wanted);
}

// Behind all that a thread has written into a record.
__device__ void tell(const Control& c, int request) {
  const int32_t told = ++c.told[request];
  __threadfence_system();
  *static_cast<volatile int32_t*>(&c.records[request].told) = told;
}

// One warp a request: lane i has node i of the accepted path.
__global__ void end_round_kernel(Control c) {
  start_behind();
  const int r = static_cast<int>(blockIdx.x), i = static_cast<int>(threadIdx.x);
  const int64_t row = static_cast<int64_t>(r) * c.width, own_path = static_cast<int64_t>(r) * c.path_stride;
  const Outcome outcome = carried_on(c.status, r);
  const int was = c.finish[r], prefix = c.prefix[r], wanted = c.wanted[r], full = c.full_finish[r];
  const int bonus = c.bonus[r], nodes = c.node_count[r], depth_limit = c.depth_limits[r];
  const int list_depths = c.list_depths[r], dflash = c.uses_dflash[r];
  const bool runs = was == KDTREE_RUNNING, ran = runs && !outcome.failed();
  const int accepted = ran ? c.accepted[r] : -1;
  const bool on_path = i <= accepted;
  const int node = on_path ? c.path[own_path + i] : 0;
  const int token = on_path ? c.tokens[row + node] : 0, rank = on_path ? c.ranks[row + node] : 0;
  // The path ends with the first stop token on it.
  const unsigned stopping = __ballot_sync(kAllLanes, on_path && stops(c, r, token));
  const int kept = stopping != 0 ? __ffs(static_cast<int>(stopping)) - 1 : accepted;
  // A bonus token that stops needs no row and no round of its own: nothing will attend to it.
  const bool bonus_stops = ran && stopping == 0 && kept + 1 < wanted && stops(c, r, bonus);

  Record& record = c.records[r];
  if (i <= kept) {
    record.path[i] = node;
    if (i > 0) record.ranks[i - 1] = rank;
    record.output[i] = token;
  }
  if (i == 0) {
    const int count = kept + 1 + (bonus_stops ? 1 : 0);
    const bool stopped = stopping != 0 || bonus_stops;
    record.ran = ran;
    record.output_count = count;
    c.observed[r] = dflash ? kept : -1;
    c.observed_from[r] = prefix;
    if (ran) {
      record.prefix_length = prefix;
      record.nodes = nodes;
      record.depth_limit = depth_limit;
      record.list_depths = list_depths;
      record.kept = kept;
      record.bonus = bonus;
      if (bonus_stops) record.output[kept + 1] = bonus;
      c.root[r] = bonus;
      const int left = stopped ? 0 : wanted - count;
      const int after = stopped ? KDTREE_FINISH_STOP : left == 0 ? full : KDTREE_RUNNING;
      settle(c, r, after, prefix + kept + 1, left);
    } else {
      if (runs) write_status(record.status, 0, outcome);
      settle(c, r, runs ? static_cast<int>(KDTREE_FINISH_ERROR) : was, prefix, wanted);
    }
  }
  __threadfence_system();  // of each lane, before the first one tells
  __syncwarp();
  if (i == 0) tell(c, r);
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
  const int length = lengths[r], choice = choices[r], wanted = c.wanted[r];
  Record& record = c.records[r];
  record.ran = 0;
  record.output_count = 0;
  write_status(record.status, 0, {});
  c.root[r] = choice;
  if (choice < 0) {
    write_status(record.status, 0, {KDTREE_REQUEST_NO_CHOICE, -1, length - 1});
    settle(c, r, KDTREE_FINISH_ERROR, 0, wanted);  // nothing is committed
  } else if (wanted > 0 && stops(c, r, choice)) {
    record.output[0] = choice;
    record.output_count = 1;
    settle(c, r, KDTREE_FINISH_STOP, length, 0);
  } else {
    settle(c, r, wanted > 0 ? static_cast<int32_t>(KDTREE_RUNNING) : c.full_finish[r], length, wanted);
  }
  tell(c, r);
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
kdtree_status end_round(const Control& c, cudaStream_t stream) {
  return launch_behind("end_round_kernel", end_round_kernel, dim3(static_cast<unsigned>(c.requests)), dim3(kWarp), 0,
                       stream, c);
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
