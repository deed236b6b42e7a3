// Logits -> lists: the K best of each row in order, and their log-probabilities. reference/topk.py.
//
// Two kernels. The first reads the logits once: one warp a chunk of 1024 ids leaves the chunk's sum of exponentials,
// the maxima of its groups and its first NaN or +inf (topk_row.h, topk_sum.h). The second, one block a row, adds the
// sums up and finds the K best from the maxima and from the few groups that hold them (topk_select.h). Rows whose logz
// needs a precise sum get more blocks for it; whichever is done last goes on.

#include "common/error.h"
#include "kernels/request.h"
#include "kernels/topk_select.h"
#include "kernels/topk_sum.h"

namespace kdtree {
namespace {

constexpr int kScanThreads = 128;
constexpr int kMostPrecise = 16;  // blocks of a row that share its precise sum

using Args = kdtree_topk_logprob_args;

// Shared memory of a block of the second kernel.
template <int kThreads_, int kMostK>
struct Block {
  static constexpr int kThreads = kThreads_;

  Selection<kThreads, kMostK> selection;
  unsigned totals[2][kWarp];
  unsigned long long fault;
  Outcome outcome;
  RowSum sum;
  bool last;
};

constexpr int kSmallK = 256;
using SmallBlock = Block<256, kSmallK>;
using LargeBlock = Block<512, KDTREE_MAX_BUDGET>;

__device__ int own_depth_limit(const Args& a, int request) {
  return a.depth_limits != nullptr ? a.depth_limits[request] : a.depth_limit;
}

// What is known of a request before its logits are looked at.
__device__ Outcome outcome_without_logits(const Args& a, int request) {
  if (failed_before(a.before, request)) return carried_on(a.before, request);
  const int limit = own_depth_limit(a, request);
  if (limit < 0 || limit > a.depth_limit) return {KDTREE_REQUEST_OWN_SIZE, limit, a.depth_limit};
  return Outcome{};
}

template <typename T>
__device__ const T* row_of(const Args& a, int64_t row) {
  return static_cast<const T*>(a.logits) + row * a.row_stride;
}

// The greatest logits of a chunk's groups, by a warp. top: of each of the lane's octets; own: of all of them.
__device__ void write_maxima(const float (&x)[kSteps][kOctet], const float (&top)[kSteps], float own, int group_bits,
                             uint16_t* maxima) {
  if (group_bits == 0) {
    KDTREE_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      unsigned words[kOctet / 2];
      KDTREE_UNROLL
      for (int i = 0; i < kOctet / 2; ++i)
        words[i] = order_of(x[s][2 * i]) >> 16 | (order_of(x[s][2 * i + 1]) & 0xffff0000u);
      *reinterpret_cast<uint4*>(maxima + s * kStep + lane_id() * kOctet) =
          uint4{words[0], words[1], words[2], words[3]};
    }
    return;
  }
  const bool of_lanes = group_bits >= kLaneGroupBits;
  const int lane_bits = group_bits - (of_lanes ? kLaneGroupBits : 3), lanes = 1 << lane_bits;
  const auto write = [&](float greatest, int place) {
    for (int step = 1; step < lanes; step *= 2) greatest = max(greatest, __shfl_xor_sync(kAllLanes, greatest, step));
    if ((lane_id() & (lanes - 1)) == 0) maxima[place >> lane_bits] = static_cast<uint16_t>(order_of(greatest) >> 16);
  };
  if (of_lanes) {
    write(own, lane_id());
  } else {
    KDTREE_UNROLL
    for (int s = 0; s < kSteps; ++s) write(top[s], s * kWarp + lane_id());
  }
}

template <typename T>
__global__ void __launch_bounds__(kScanThreads, 8) scan_kernel(Args a, RowPlan plan, RowScratch scratch) {
  const int request = static_cast<int>(blockIdx.z), depth = static_cast<int>(blockIdx.y);
  if (outcome_without_logits(a, request).failed() || depth >= own_depth_limit(a, request)) return;
  const int64_t row = static_cast<int64_t>(request) * a.depth_limit + depth;
  const unsigned size = static_cast<unsigned>(a.vocab_size);
  const int warps = kScanThreads / kWarp;
  if (blockIdx.x == 0 && threadIdx.x == 0) scratch.arrived[row] = 0;

  for (int chunk = static_cast<int>(blockIdx.x) * warps + warp_id(); chunk < plan.chunks;
       chunk += static_cast<int>(gridDim.x) * warps) {
    float x[kSteps][kOctet], top[kSteps];
    load_chunk(row_of<T>(a, row), static_cast<unsigned>(chunk), size, x);
    KDTREE_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      top[s] = x[s][0];
      KDTREE_UNROLL
      for (int i = 1; i < kOctet; ++i) top[s] = max_or_nan(top[s], x[s][i]);
    }
    const float own = max_or_nan(max_or_nan(top[0], top[1]), max_or_nan(top[2], top[3]));
    const unsigned greatest = __reduce_max_sync(kAllLanes, own != own ? kOrderOfNaN : order_of(own));
    const int64_t at = row * plan.chunks + chunk;
    unsigned fault = kNoFault;
    ChunkSum sum{0, kNoExponent, greatest};
    if (greatest >= kOrderOfInfinity) {
      KDTREE_UNROLL
      for (int s = 0; s < kSteps; ++s) {
        KDTREE_UNROLL
        for (int i = 0; i < kOctet; ++i)
          if (!(x[s][i] < __uint_as_float(0x7f800000u)))
            fault = min(fault, static_cast<unsigned>(chunk) * kChunk + s * kStep + lane_id() * kOctet + i);
      }
      fault = __reduce_min_sync(kAllLanes, fault);
    } else {
      sum = fast_sum(x, greatest);
      if (plan.groups > 0)
        write_maxima(
            x, top, own, plan.group_bits,
            scratch.maxima + row * plan.row_groups + static_cast<int64_t>(chunk) * (kChunk >> plan.group_bits));
    }
    if (lane_id() == 0) {
      scratch.faults[at] = fault;
      scratch.sums[at] = sum;
    }
  }
}

// The lists of a request that is not taken: nothing downstream reads garbage from them.
__device__ void write_refused(const Args& a, int64_t row) {
  for (int i = threadIdx.x; i < a.k; i += blockDim.x) {
    a.ids[row * a.k + i] = 0;
    a.lp[row * a.k + i] = minus_infinity();
  }
  if (threadIdx.x == 0) a.logz[row] = 0;
}

// The first fault in the request's logits, in the order of (depth, id). By the whole block; `first` is shared, and
// holds ~0 so far.
template <typename T>
__device__ Outcome find_fault(const Args& a, int request, int chunks, const unsigned* faults,
                              unsigned long long* first) {
  const int64_t row = static_cast<int64_t>(request) * a.depth_limit;
  const int limit = own_depth_limit(a, request);
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(limit) * chunks; i += blockDim.x) {
    const unsigned id = faults[row * chunks + i];
    if (id != kNoFault) atomicMin(first, static_cast<unsigned long long>(i / chunks) << 32 | id);
  }
  __syncthreads();
  if (*first == ~0ull) return Outcome{};
  const int depth = static_cast<int>(*first >> 32);
  const unsigned id = static_cast<unsigned>(*first);
  const float x = widen(row_of<T>(a, row + depth)[id]);
  return {x != x ? KDTREE_REQUEST_NAN : KDTREE_REQUEST_INFINITE, depth + 1, static_cast<int>(id)};
}

// Whether this block is the last of its row's to be here, with what the others wrote visible.
__device__ bool last_to_arrive(unsigned* arrived, bool* last) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *last = atomicAdd(arrived, 1u) == gridDim.x - 1;
  __syncthreads();
  __threadfence();
  return *last;
}

template <typename T, typename Shared>
__global__ void __launch_bounds__(Shared::kThreads, Shared::kThreads <= 256 ? 4 : 2)
    select_kernel(Args a, RowPlan plan, RowScratch scratch) {
  KDTREE_DYNAMIC_SHARED(memory);
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int part = static_cast<int>(blockIdx.x), depth = static_cast<int>(blockIdx.y);
  const int request = static_cast<int>(blockIdx.z);
  const int64_t row = static_cast<int64_t>(request) * a.depth_limit + depth;

  if (threadIdx.x == 0) {  // for all: a block of another depth may be overwriting it
    s.outcome = outcome_without_logits(a, request);
    s.fault = ~0ull;
  }
  __syncthreads();
  Outcome outcome = s.outcome;
  const int limit = own_depth_limit(a, request);
  if (!outcome.failed()) {
    if (warp_id() == 0 && depth < limit) {  // beside the search for faults, which decides whether it counts
      const RowSum sum = combine(scratch.sums + row * plan.chunks, plan.chunks);
      if (lane_id() == 0) s.sum = sum;
    }
    outcome = find_fault<T>(a, request, plan.chunks, scratch.faults, &s.fault);
  }
  if (part == 0 && depth == 0 && threadIdx.x == 0) write_status(a.status, request, outcome);
  if (depth >= a.depth_limit) return;
  if (outcome.failed()) {
    const bool own = limit >= 0 && limit <= a.depth_limit;
    if (part == 0 && (!own || depth < limit)) write_refused(a, row);
    return;
  }
  if (depth >= limit) return;

  const T* const logits = row_of<T>(a, row);
  const unsigned size = static_cast<unsigned>(a.vocab_size);
  const float peak = s.sum.peak;
  const Effort effort = s.sum.effort;
  if (effort == kKnown) {
    if (part > 0) return;
  } else {
    PreciseSum* const sums = scratch.precise + row * plan.chunks;
    for (int chunk = part * warp_count() + warp_id(); chunk < plan.chunks;
         chunk += static_cast<int>(gridDim.x) * warp_count()) {
      const PreciseSum sum = precise_sum(logits, static_cast<unsigned>(chunk), size, peak, effort == kWide);
      if (lane_id() == 0) sums[chunk] = sum;
    }
    if (!last_to_arrive(scratch.arrived + row, &s.last)) return;
    if (warp_id() == 0) {
      const double logz = combine(sums, plan.chunks, peak);
      if (lane_id() == 0) s.sum.logz = static_cast<float>(logz);
    }
    __syncthreads();
  }
  const float logz = s.sum.logz;
  if (threadIdx.x == 0) a.logz[row] = logz;
  if (a.k == 0) return;

  BlockScan scan(s.totals);
  Selector<T, decltype(s.selection)> select(s.selection, scan, logits, size, static_cast<unsigned>(a.k));
  select(scratch.maxima + row * plan.row_groups, plan.groups, plan.group_bits, order_of(peak),
         [&](unsigned rank, unsigned order, unsigned id) {
           float x = value_of(order);
           if (x == 0) x = widen(logits[id]);  // the order does not know the sign of zero
           a.ids[row * a.k + rank] = static_cast<int>(id);
           a.lp[row * a.k + rank] = logz == minus_infinity() ? logz : __fsub_rn(x, logz);
         });
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
kdtree_status launch(const Args& a) {
  const RowPlan plan(a.vocab_size, a.k);
  const int64_t rows = static_cast<int64_t>(a.requests) * a.depth_limit;
  const RowScratch scratch(a.workspace, rows, plan);
  const cudaStream_t stream = static_cast<cudaStream_t>(a.stream);
  const unsigned depths = static_cast<unsigned>(a.depth_limit), requests = static_cast<unsigned>(a.requests);
  int device = 0, multiprocessors = 0;
  KDTREE_RETURN_IF_FAILED(check_cuda(cudaGetDevice(&device), "cudaGetDevice"));
  KDTREE_RETURN_IF_FAILED(
      check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "multiprocessors"));

  int parts = 1;
  if (rows > 0) {
    // Eight blocks fit a multiprocessor; with eight rounds of them the last, partly idle one is a small share.
    const int64_t whole = ceil_div(plan.chunks, kScanThreads / kWarp);
    const int blocks = clamp(ceil_div(64 * multiprocessors, rows), 1, whole);
    KDTREE_LAUNCH((scan_kernel<T>), dim3(static_cast<unsigned>(blocks), depths, requests), dim3(kScanThreads), 0,
                  stream, a, plan, scratch);
    KDTREE_RETURN_IF_FAILED(check_launch("scan_kernel"));
    parts =
        clamp(2 * multiprocessors / rows, 1, clamp(ceil_div(plan.chunks, Shared::kThreads / kWarp), 1, kMostPrecise));
  }
  KDTREE_RETURN_IF_FAILED(allow_shared_memory(reinterpret_cast<const void*>(select_kernel<T, Shared>),
                                              "kdtree_topk_logprob", sizeof(Shared)));
  KDTREE_LAUNCH((select_kernel<T, Shared>), dim3(static_cast<unsigned>(parts), depths > 0 ? depths : 1, requests),
                dim3(Shared::kThreads), sizeof(Shared), stream, a, plan, scratch);
  return check_launch("select_kernel");
}

template <typename T>
kdtree_status launch(const Args& a) {
  return a.k <= kSmallK ? launch<T, SmallBlock>(a) : launch<T, LargeBlock>(a);
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
