// Logits -> lists: the K best of each row in order, and their log-probabilities. reference/topk.py.
//
// The logits are read once: one warp a chunk of 1024 ids leaves the chunk's sum of exponentials, the maxima of its
// groups and its first NaN or +inf (topk_scan.h). Then one block a row adds the sums up (topk_sum.h) and finds the K
// best from the maxima and from the few groups that hold them (topk_select.h). Few rows take two kernels for that, so
// that rows whose logz needs a precise sum can have more blocks for it; whichever is done last goes on. Many rows take
// one: the last block of a row to have read its part goes on, while other blocks read other rows. topk_logprob.md: what
// bounds that, what was tried.

#include "common/behind.h"
#include "common/error.h"
#include "kernels/request.h"
#include "kernels/topk_scan.h"
#include "kernels/topk_select.h"

namespace kdtree {
namespace {

constexpr int kScanThreads = 128, kClearThreads = 256;
constexpr int kMostPrecise = 16;      // blocks of a row that share its precise sum
constexpr int kManyRows = 128;        // from here on one block a row is enough for a precise sum
constexpr int kStreamThreads = 1024;  // of the one kernel on a multiprocessor

using Args = kdtree_topk_logprob_args;

// Shared memory of a block that selects.
template <typename Selection>
struct Block {
  static constexpr int kThreads = Selection::kThreads;
  using Groups = Maxima<kThreads, Selection::kHeld>;

  Selection selection;
  unsigned totals[2][kWarp];
  unsigned long long fault;
  Outcome outcome;
  RowSum sum;
  bool last, any_fault;
};

// Of few rows each is to be done soon; beside the streams of many there are no more registers than those take.
constexpr int kSmallK = 256;
using SmallBlock = Block<Selection<256, kSmallK, 2, 4>>;
using LargeBlock = Block<Selection<512, KDTREE_MAX_BUDGET, 3, 5>>;
using SmallStreamBlock = Block<Selection<256, kSmallK, 3, 2>>;
using LargeStreamBlock = Block<Selection<512, KDTREE_MAX_BUDGET, 3, 2>>;

// Chunks that a warp of the one kernel reads. At its end a block waits for a fence and a counter, which is to be little
// beside its reading; where two chunks are enough for that, the last blocks are sooner done.
template <typename T, typename Shared>
constexpr int kStreamRounds = sizeof(T) == 4 && Shared::kThreads == SmallStreamBlock::kThreads ? 2 : 5;

__device__ int own_depth_limit(const Args& a, int request) {
  return a.depth_limits != nullptr ? a.depth_limits[request] : a.depth_limit;
}

// What is known of a request before its logits are looked at. limit: its own_depth_limit, loaded beside the status.
__device__ Outcome outcome_without_logits(const Args& a, int request, int limit) {
  if (failed_before(a.before, request)) return carried_on(a.before, request);
  if (limit < 0 || limit > a.depth_limit) return {KDTREE_REQUEST_OWN_SIZE, limit, a.depth_limit};
  return Outcome{};
}

template <typename T>
__device__ const T* row_of(const Args& a, int64_t row) {
  return static_cast<const T*>(a.logits) + row * a.row_stride;
}

template <typename T>
__global__ void __launch_bounds__(kScanThreads, 6) scan_kernel(Args a, RowPlan plan, RowScratch scratch) {
  let_next_start();
  const int request = static_cast<int>(blockIdx.z), depth = static_cast<int>(blockIdx.y);
  const int limit = own_depth_limit(a, request);
  if (outcome_without_logits(a, request, limit).failed() || depth >= limit) return;
  const int64_t row = static_cast<int64_t>(request) * a.depth_limit + depth;
  if (blockIdx.x == 0 && threadIdx.x == 0) scratch.arrived[row] = 0;
  scan_part(row_of<T>(a, row), static_cast<unsigned>(a.vocab_size), row, static_cast<int>(blockIdx.x),
            static_cast<int>(gridDim.x), plan, scratch);
}

// The lists of a request that is not taken: nothing downstream reads garbage from them.
__device__ void write_refused(const Args& a, int64_t row) {
  for (int i = threadIdx.x; i < a.k; i += blockDim.x) {
    a.ids[row * a.k + i] = 0;
    a.lp[row * a.k + i] = minus_infinity();
  }
  if (threadIdx.x == 0) a.logz[row] = 0;
}

// The first fault in the request's logits, in the order of (depth, id); there is one. By the whole block; `first` is
// shared, and holds ~0 so far.
template <typename T>
__device__ Outcome find_fault(const Args& a, int request, int limit, const RowPlan& plan, const RowScratch& scratch,
                              unsigned long long* first) {
  const int64_t row = static_cast<int64_t>(request) * a.depth_limit;
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(limit) * plan.chunks; i += blockDim.x)
    if (scratch.sums[row * plan.chunks + i].top >= kOrderOfInfinity)
      atomicMin(first, static_cast<unsigned long long>(i / plan.chunks) << 32 | scratch.faults[row * plan.chunks + i]);
  __syncthreads();
  const int depth = static_cast<int>(*first >> 32);
  const unsigned id = static_cast<unsigned>(*first);
  const float x = widen(row_of<T>(a, row + depth)[id]);
  return {x != x ? KDTREE_REQUEST_NAN : KDTREE_REQUEST_INFINITE, depth + 1, static_cast<int>(id)};
}

// Whether this block is the last of the row's `blocks` to be here, with what the others wrote visible. One thread's
// fences are enough for all: what they wrote came before a barrier, what they read comes behind one.
__device__ bool last_to_arrive(unsigned* arrived, unsigned blocks, bool* last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    *last = atomicAdd(arrived, 1u) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return *last;
}

// The lists of a row whose sums are known, by the block part of `parts` that share it. All that is asked for is that
// s.sum is there and that s.selection is clear. maxima: loaded if the row may need no precise sum and the part is 0.
template <typename T, typename Shared>
__device__ void write_lists(const Args& a, const RowPlan& plan, const RowScratch& scratch, int64_t row, int part,
                            int parts, typename Shared::Groups& maxima, Shared& s) {
  const T* const logits = row_of<T>(a, row);
  const unsigned size = static_cast<unsigned>(a.vocab_size);
  const float peak = s.sum.peak;
  const Effort effort = s.sum.effort;
  if (effort == kKnown) {
    if (part > 0) return;
  } else {
    PreciseSum* const sums = scratch.precise + row * plan.chunks;
    for (int chunk = part * warp_count() + warp_id(); chunk < plan.chunks; chunk += parts * warp_count()) {
      const PreciseSum sum = precise_sum(logits, static_cast<unsigned>(chunk), size, peak, effort == kWide);
      if (lane_id() == 0) sums[chunk] = sum;
    }
    if (parts == 1)
      __syncthreads();
    else if (!last_to_arrive(scratch.arrived + row, static_cast<unsigned>(parts), &s.last))
      return;
    if (warp_id() == 0) {
      const double logz = combine(sums, plan.chunks, peak);
      if (lane_id() == 0) s.sum.logz = static_cast<float>(logz);
    }
    maxima.load(scratch.maxima + row * plan.row_groups, plan.groups);
    __syncthreads();
  }
  const float logz = s.sum.logz;
  if (threadIdx.x == 0) a.logz[row] = logz;
  if (a.k == 0) return;

  BlockScan scan(s.totals);
  Selector<T, decltype(s.selection)> select(s.selection, scan, logits, size, static_cast<unsigned>(a.k));
  select(maxima, plan.group_bits, order_of(peak), [&](unsigned rank, unsigned order, unsigned id) {
    float x = value_of(order);
    if (x == 0) x = widen(logits[id]);  // the order does not know the sign of zero
    a.ids[row * a.k + rank] = static_cast<int>(id);
    a.lp[row * a.k + rank] = logz == minus_infinity() ? logz : __fsub_rn(x, logz);
  });
}

// By the first warp, of a row: s.sum.
template <typename Shared>
__device__ void combine_row(const RowPlan& plan, const RowScratch& scratch, int64_t row, Shared& s) {
  const RowSum sum = combine(scratch.sums + row * plan.chunks, plan.chunks);
  if (lane_id() == 0) s.sum = sum;
}

template <typename T, typename Shared>
__global__ void __launch_bounds__(Shared::kThreads, Shared::kThreads <= 256 ? 2 : 1)
    select_kernel(Args a, RowPlan plan, RowScratch scratch) {
  KDTREE_DYNAMIC_SHARED(memory);
  Shared& s = *reinterpret_cast<Shared*>(memory);
  // Part 0 of all rows comes first: the others are seldom asked for more than to leave.
  const int depth = static_cast<int>(blockIdx.x), request = static_cast<int>(blockIdx.y);
  const int part = static_cast<int>(blockIdx.z);
  const int64_t first_row = static_cast<int64_t>(request) * a.depth_limit, row = first_row + depth;
  let_next_start();
  s.selection.clear();
  const int limit = own_depth_limit(a, request);
  if (threadIdx.x == 0) {
    s.fault = ~0ull;
    s.outcome = outcome_without_logits(a, request, limit);  // a block of another depth may write it
  }
  __syncthreads();
  const bool taken = !s.outcome.failed();  // of another request the scan left nothing
  wait_for_previous();                     // not before: the scan itself began when all before it had ended

  typename Shared::Groups maxima;
  const bool asked = taken && depth < limit;
  maxima.load(scratch.maxima + row * plan.row_groups, asked && part == 0 ? plan.groups : 0);
  bool fault = false;
  if (warp_id() == 0) {
    if (asked) combine_row(plan, scratch, row, s);
  } else {
    const int rows = taken ? limit : 0, others = static_cast<int>(blockDim.x) - kWarp;
    const ChunkSum* const sums = scratch.sums + first_row * plan.chunks;
    KDTREE_UNROLL_BY(4)
    for (int64_t i = static_cast<int>(threadIdx.x) - kWarp; i < static_cast<int64_t>(rows) * plan.chunks; i += others)
      fault |= sums[i].top >= kOrderOfInfinity;
  }
  fault = __syncthreads_or(fault) != 0;
  Outcome outcome = s.outcome;
  if (!outcome.failed() && fault) outcome = find_fault<T>(a, request, limit, plan, scratch, &s.fault);
  if (part == 0 && depth == 0 && threadIdx.x == 0) write_status(a.status, request, outcome);
  if (depth >= a.depth_limit) return;
  if (outcome.failed()) {
    const bool own = limit >= 0 && limit <= a.depth_limit;
    if (part == 0 && (!own || depth < limit)) write_refused(a, row);
    return;
  }
  if (depth >= limit) return;
  write_lists<T>(a, plan, scratch, row, part, static_cast<int>(gridDim.z), maxima, s);
}

__global__ void __launch_bounds__(kClearThreads) clear_kernel(unsigned* counters, int n) {
  let_next_start();
  const int i = static_cast<int>(blockIdx.x) * kClearThreads + static_cast<int>(threadIdx.x);
  if (i < n) counters[i] = 0;
}

// Both in one, for many rows. Behind the clear_kernel of scratch.arrived and finished.
template <typename T, typename Shared>
__global__ void __launch_bounds__(Shared::kThreads, kStreamThreads / Shared::kThreads)
    stream_kernel(Args a, RowPlan plan, RowScratch scratch) {
  KDTREE_DYNAMIC_SHARED(memory);
  Shared& s = *reinterpret_cast<Shared*>(memory);
  let_next_start();
  const int part = static_cast<int>(blockIdx.x), depth = static_cast<int>(blockIdx.y);
  const int request = static_cast<int>(blockIdx.z);
  const int64_t row = static_cast<int64_t>(request) * a.depth_limit + depth;
  {
    // All threads find the same: what the logits say of a request is written when all its blocks have passed by here.
    const int limit = own_depth_limit(a, request);
    const Outcome outcome = outcome_without_logits(a, request, limit);
    if (outcome.failed() || limit == 0) {
      wait_for_previous();
      const bool own = limit >= 0 && limit <= a.depth_limit;
      if (part == 0 && outcome.failed() && (!own || depth < limit)) write_refused(a, row);
      if (part == 0 && depth == 0 && threadIdx.x == 0) write_status(a.status, request, outcome);
      return;
    }
    if (depth >= limit) {
      wait_for_previous();
      return;
    }
  }
  scan_part(row_of<T>(a, row), static_cast<unsigned>(a.vocab_size), row, part, static_cast<int>(gridDim.x), plan,
            scratch);
  wait_for_previous();  // not before: the counters are all it needs
  if (!last_to_arrive(scratch.arrived + row, gridDim.x, &s.last)) return;
  typename Shared::Groups maxima;
  maxima.load(scratch.maxima + row * plan.row_groups, plan.groups);
  s.selection.clear();
  if (threadIdx.x == 0) s.fault = ~0ull;
  if (warp_id() == 0) combine_row(plan, scratch, row, s);
  __syncthreads();
  const bool fault = !(s.sum.peak < -minus_infinity());
  if (!fault) write_lists<T>(a, plan, scratch, row, 0, 1, maxima, s);

  // The last row of a request tells what became of it.
  __threadfence();
  __syncthreads();
  const int limit = own_depth_limit(a, request);  // again: a register less while the logits are read
  if (threadIdx.x == 0) {
    constexpr unsigned kFault = 1u << 16;
    const unsigned before = atomicAdd(scratch.finished + request, fault ? kFault + 1 : 1);
    s.last = static_cast<int>(before % kFault) == limit - 1;
    s.any_fault = fault || before >= kFault;
  }
  __syncthreads();
  if (!s.last) return;
  __threadfence();
  Outcome outcome{};
  if (s.any_fault) {
    outcome = find_fault<T>(a, request, limit, plan, scratch, &s.fault);
    for (int d = 0; d < limit; ++d) write_refused(a, row - depth + d);
  }
  if (threadIdx.x == 0) write_status(a.status, request, outcome);
}

kdtree_status check(const Args& a) {
  Arguments arguments("kdtree_topk_logprob");
  arguments.version(a.struct_size, sizeof(a))
      .range("requests", a.requests, 1, KDTREE_MAX_REQUESTS)
      .range("depth_limit", a.depth_limit, 0, KDTREE_MAX_DEPTH)
      .range("vocab_size", a.vocab_size, 1, INT32_MAX)
      .range("k", a.k, 0, a.vocab_size < KDTREE_MAX_BUDGET ? a.vocab_size : KDTREE_MAX_BUDGET)
      .range("dtype", a.dtype, KDTREE_F32, KDTREE_BF16);
  if (arguments.failed()) return arguments.status();
  const int64_t rows = static_cast<int64_t>(a.requests) * a.depth_limit, size = a.dtype == KDTREE_F32 ? 4 : 2;
  const bool lists = rows > 0 && a.k > 0;
  arguments.range("row_stride", a.row_stride, a.vocab_size, INT64_MAX / (size * (rows + 1)))
      .array("logits", a.logits, static_cast<size_t>(size), rows > 0)
      .array("depth_limits", a.depth_limits, 4, false)
      .array("before", a.before, 4, false)
      .array("ids", a.ids, 4, lists)
      .array("lp", a.lp, 4, lists)
      .array("logz", a.logz, 4, rows > 0)
      .array("status", a.status, 4)
      .workspace(a.workspace, a.workspace_size,
                 kdtree_topk_logprob_workspace(a.requests, a.depth_limit, a.vocab_size, a.k));
  return arguments.status();
}

int clamp(int64_t value, int64_t least, int64_t most) {
  return static_cast<int>(value < least ? least : value > most ? most : value);
}

template <typename T, typename Shared>
kdtree_status launch_two(const Args& a, const RowPlan& plan, const RowScratch& scratch) {
  const int64_t rows = static_cast<int64_t>(a.requests) * a.depth_limit;
  const cudaStream_t stream = static_cast<cudaStream_t>(a.stream);
  const unsigned depths = static_cast<unsigned>(a.depth_limit), requests = static_cast<unsigned>(a.requests);
  KDTREE_RETURN_IF_FAILED(allow_shared_memory(reinterpret_cast<const void*>(select_kernel<T, Shared>),
                                              "kdtree_topk_logprob", sizeof(Shared)));
  const dim3 block(Shared::kThreads);
  if (rows == 0) {
    KDTREE_LAUNCH((select_kernel<T, Shared>), dim3(1, requests, 1), block, sizeof(Shared), stream, a, plan, scratch);
    return check_launch("select_kernel");
  }
  int device = 0, multiprocessors = 0;
  KDTREE_RETURN_IF_FAILED(check_cuda(cudaGetDevice(&device), "cudaGetDevice"));
  KDTREE_RETURN_IF_FAILED(
      check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "multiprocessors"));
  // Six blocks fit a multiprocessor; with ten rounds of them the last, partly idle one is a small share.
  const int64_t whole = ceil_div(plan.chunks, kScanThreads / kWarp);
  const int blocks = clamp(ceil_div(64 * multiprocessors, rows), 1, whole);
  KDTREE_LAUNCH((scan_kernel<T>), dim3(static_cast<unsigned>(blocks), depths, requests), dim3(kScanThreads), 0, stream,
                a, plan, scratch);
  KDTREE_RETURN_IF_FAILED(check_launch("scan_kernel"));
  const int parts =
      clamp(2 * multiprocessors / rows, 1, clamp(ceil_div(plan.chunks, Shared::kThreads / kWarp), 1, kMostPrecise));
  return launch_behind("select_kernel", select_kernel<T, Shared>, dim3(depths, requests, static_cast<unsigned>(parts)),
                       block, sizeof(Shared), stream, a, plan, scratch);
}

template <typename T, typename Shared>
kdtree_status launch_one(const Args& a, const RowPlan& plan, const RowScratch& scratch) {
  const int64_t rows = static_cast<int64_t>(a.requests) * a.depth_limit;
  const cudaStream_t stream = static_cast<cudaStream_t>(a.stream);
  KDTREE_RETURN_IF_FAILED(allow_shared_memory(reinterpret_cast<const void*>(stream_kernel<T, Shared>),
                                              "kdtree_topk_logprob", sizeof(Shared)));
  const int counters = static_cast<int>(rows + a.requests);
  KDTREE_LAUNCH(clear_kernel, dim3(static_cast<unsigned>(ceil_div(counters, kClearThreads))), dim3(kClearThreads), 0,
                stream, scratch.arrived, counters);
  KDTREE_RETURN_IF_FAILED(check_launch("clear_kernel"));
  const int64_t blocks = ceil_div(plan.chunks, kStreamRounds<T, Shared> * Shared::kThreads / kWarp);
  return launch_behind(
      "stream_kernel", stream_kernel<T, Shared>,
      dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(a.depth_limit), static_cast<unsigned>(a.requests)),
      dim3(Shared::kThreads), sizeof(Shared), stream, a, plan, scratch);
}

template <typename T>
kdtree_status launch(const Args& a) {
  const RowPlan plan(a.vocab_size, a.k);
  const int64_t rows = static_cast<int64_t>(a.requests) * a.depth_limit;
  const RowScratch scratch(a.workspace, rows, plan);
  const bool many = rows >= kManyRows;
  if (a.k <= kSmallK)
    return many ? launch_one<T, SmallStreamBlock>(a, plan, scratch) : launch_two<T, SmallBlock>(a, plan, scratch);
  return many ? launch_one<T, LargeStreamBlock>(a, plan, scratch) : launch_two<T, LargeBlock>(a, plan, scratch);
}

}  // namespace
}  // namespace kdtree

using namespace kdtree;

// 0 for sizes that the call refuses.
extern "C" size_t kdtree_topk_logprob_workspace(int32_t requests, int32_t depth_limit, int32_t vocab_size, int32_t k) {
  if (requests < 1 || requests > KDTREE_MAX_REQUESTS || depth_limit < 1 || depth_limit > KDTREE_MAX_DEPTH ||
      vocab_size < 1 || k < 0 || k > KDTREE_MAX_BUDGET || k > vocab_size)
    return 0;
  return RowScratch(nullptr, static_cast<int64_t>(requests) * depth_limit, RowPlan(vocab_size, k)).bytes;
}

extern "C" kdtree_status kdtree_topk_logprob(const kdtree_topk_logprob_args* args) {
  if (args == nullptr) return fail(KDTREE_POINTER, "kdtree_topk_logprob: args is NULL");
  KDTREE_RETURN_IF_FAILED(check(*args));
  return args->dtype == KDTREE_F32 ? launch<float>(*args) : launch<uint16_t>(*args);
}
