// Accepted path -> committed cache rows: the rows of the accepted nodes move to directly behind the prefix, in place,
// in every layer, in one launch.
//
// A thread owns one column of bytes (16, 4, 2 or 1 wide) of one request in one layer and moves it down all rows in
// ascending order, some rows read before the same ones are written. Row i goes to place i and comes from path[i] >= i,
// and later rows come from behind that, so no row is overwritten before it is read; and as no two threads share a
// byte, no order of threads or blocks changes the result. The first rows of a path mostly stand where they belong:
// only rows that change their place are touched, and a chain path moves nothing.
//
// Every block checks its request for itself, so that nothing moves where something is refused; one block reports.

#include "common/behind.h"
#include "common/block.h"
#include "kernels/cache_row.h"
#include "kernels/request.h"

namespace kdtree {
namespace {

constexpr int kMostThreads = 256;
constexpr int kRowsInFlight = 16;
constexpr int kEnoughBlocks = 2048;  // from here on a block takes several layers
constexpr int kMostRows = KDTREE_MAX_DEPTH + 1;

// Where each row that moves comes from and goes to, in bytes from the first row of the layer, ascending.
struct Moves {
  int count;
  int64_t from[kMostRows];
  int64_t to[kMostRows];
};

__device__ int clamped(int64_t value) { return static_cast<int>(min(value, static_cast<int64_t>(0x7fffffff))); }

// By one warp, lane i for row i of the path. Fills in `moves`; nothing moves if the outcome is a failure.
__device__ Outcome plan(const kdtree_kv_compact_args& a, int request, Moves& moves) {
  const int lane = lane_id();
  const int accepted = a.accepted[request];
  const int prefix = a.prefix_lengths[request];
  const int node = lane <= a.depth_limit ? a.path[static_cast<size_t>(request) * (a.depth_limit + 1) + lane] : -1;
  const Outcome earlier = outcome_before(a.before, request);
  __syncwarp();
  if (lane == 0) moves.count = 0;
  if (earlier.failed()) return earlier;
  if (accepted < -1 || accepted > a.depth_limit) return {KDTREE_REQUEST_OWN_SIZE, accepted, a.depth_limit};
  if (accepted == -1) return {};
  if (prefix < 0) return {KDTREE_REQUEST_OWN_SIZE, prefix, a.cache.capacity};

  const bool on_path = lane <= accepted;
  const int before = __shfl_up_sync(kAllLanes, node, 1);
  const bool in_order = lane == 0 ? node == 0 : node > before && node <= KDTREE_MAX_BUDGET;
  if (const unsigned wrong = __ballot_sync(kAllLanes, on_path && !in_order); wrong != 0) {
    const int index = __ffs(static_cast<int>(wrong)) - 1;
    return {KDTREE_REQUEST_PATH, index, __shfl_sync(kAllLanes, node, index)};
  }
  const int64_t needed = static_cast<int64_t>(prefix) + __shfl_sync(kAllLanes, node, accepted) + 1;
  if (needed > a.cache.capacity) return {KDTREE_REQUEST_CAPACITY, clamped(needed), a.cache.capacity};

  const bool moving = on_path && node != lane;
  int64_t from = 0, to = 0;
  if (moving) {
    from = cache_row(a.cache, request, static_cast<int64_t>(prefix) + node);
    to = cache_row(a.cache, request, static_cast<int64_t>(prefix) + lane);
  }
  // The rows before the first one without a block are those there are.
  unsigned missing = from < 0 ? static_cast<unsigned>(prefix + node) : 0x7fffffffu;
  if (to < 0) missing = static_cast<unsigned>(prefix + lane);
  missing = __reduce_min_sync(kAllLanes, missing);
  if (missing != 0x7fffffffu)
    return {KDTREE_REQUEST_CAPACITY, clamped(needed),
            static_cast<int>(missing) / a.cache.block_size * a.cache.block_size};

  const unsigned movers = __ballot_sync(kAllLanes, moving);
  if (moving) {
    const int index = __popc(movers & ((1u << lane) - 1));
    moves.from[index] = from;
    moves.to[index] = to;
  }
  if (lane == 0) moves.count = __popc(movers);
  return {};
}

template <typename Word>
__global__ void __launch_bounds__(kMostThreads) kv_compact_kernel(kdtree_kv_compact_args a) {
  start_behind();
  __shared__ Moves moves;
  const int request = static_cast<int>(blockIdx.z);
  if (threadIdx.x < kWarp) {
    const Outcome outcome = plan(a, request, moves);
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) {
      write_status(a.status, request, outcome);
      if (a.moved != nullptr) a.moved[request] = moves.count;
    }
  }
  __syncthreads();

  const int count = moves.count;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (count == 0 || column >= a.cache.row_bytes / static_cast<int>(sizeof(Word))) return;
  for (int layer = static_cast<int>(blockIdx.y); layer < a.cache.layers; layer += static_cast<int>(gridDim.y)) {
    unsigned char* const base =
        static_cast<unsigned char*>(a.cache.base) + layer * a.cache.layer_stride + column * sizeof(Word);
    for (int first = 0; first < count; first += kRowsInFlight) {
      Word held[kRowsInFlight];
      for (int i = 0; i < kRowsInFlight; ++i)
        if (first + i < count) held[i] = *reinterpret_cast<const Word*>(base + moves.from[first + i]);
      for (int i = 0; i < kRowsInFlight; ++i)
        if (first + i < count) *reinterpret_cast<Word*>(base + moves.to[first + i]) = held[i];
    }
  }
}

// The widest word that every row of every layer is a whole number of, at an address that is one too.
size_t word_size(const kdtree_kv_compact_args& a) {
  const kdtree_cache_view& cache = a.cache;
  uint64_t all = reinterpret_cast<uintptr_t>(cache.base) | static_cast<uint64_t>(cache.row_bytes) |
                 static_cast<uint64_t>(cache.row_stride);
  if (cache.layers > 1) all |= static_cast<uint64_t>(cache.layer_stride);
  if (cache.block_size == 0 && a.requests > 1) all |= static_cast<uint64_t>(cache.request_stride);
  return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : all % 2 == 0 ? 2 : 1;
}

template <typename Word>
kdtree_status launch(const kdtree_kv_compact_args& a) {
  const int64_t columns = a.cache.row_bytes / static_cast<int>(sizeof(Word));
  const size_t threads = round_up(static_cast<size_t>(columns < kMostThreads ? columns : kMostThreads), kWarp);
  const int64_t across = ceil_div(columns, static_cast<int64_t>(threads));
  int64_t layers = ceil_div(kEnoughBlocks, across * a.requests);
  if (layers > a.cache.layers) layers = a.cache.layers;
  const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(layers), static_cast<unsigned>(a.requests));
  return launch_behind("kv_compact_kernel", kv_compact_kernel<Word>, grid, dim3(static_cast<unsigned>(threads)), 0,
                       static_cast<cudaStream_t>(a.stream), a);
}

kdtree_status check(const kdtree_kv_compact_args& a) {
  constexpr int64_t kMost = 0x7fffffff;
  const kdtree_cache_view& cache = a.cache;
  Arguments arguments("kdtree_kv_compact");
  arguments.version(a.struct_size, sizeof(a))
      .range("requests", a.requests, 1, KDTREE_MAX_REQUESTS)
      .range("depth_limit", a.depth_limit, 0, KDTREE_MAX_DEPTH)
      .range("reserved", a.reserved, 0, 0)
      .range("cache.row_bytes", cache.row_bytes, 1, kMost)
      .range("cache.layers", cache.layers, 1, kMost)
      .range("cache.capacity", cache.capacity, 0, kMost)
      .range("cache.block_size", cache.block_size, 0, kMost)
      .range("cache.reserved", cache.reserved, 0, 0);
  if (arguments.failed()) return arguments.status();
  // Threads must not share bytes: rows, and layers and requests where there are several, lie apart.
  arguments.array("cache.base", cache.base, 1).range("cache.row_stride", cache.row_stride, cache.row_bytes, INT64_MAX);
  if (cache.layers > 1) arguments.range("cache.layer_stride", cache.layer_stride, cache.row_bytes, INT64_MAX);
  if (cache.block_size > 0) {
    arguments.range("cache.table_stride", cache.table_stride, ceil_div(cache.capacity, cache.block_size), kMost)
        .array("cache.block_table", cache.block_table, sizeof(int32_t));
  } else if (a.requests > 1) {
    arguments.range("cache.request_stride", cache.request_stride, cache.row_bytes, INT64_MAX);
  }
  arguments.array("prefix_lengths", a.prefix_lengths, sizeof(int32_t))
      .array("accepted", a.accepted, sizeof(int32_t))
      .array("path", a.path, sizeof(int32_t))
      .array("before", a.before, sizeof(int32_t), false)
      .array("status", a.status, sizeof(int32_t))
      .array("moved", a.moved, sizeof(int32_t), false);
  return arguments.status();
}

}  // namespace
}  // namespace kdtree

using namespace kdtree;

extern "C" kdtree_status kdtree_kv_compact(const kdtree_kv_compact_args* args) {
  if (args == nullptr) return fail(KDTREE_POINTER, "kdtree_kv_compact: args is NULL");
  const kdtree_kv_compact_args& a = *args;
  KDTREE_RETURN_IF_FAILED(check(a));
  switch (word_size(a)) {
    case 16:
      return launch<uint4>(a);
    case 4:
      return launch<uint32_t>(a);
    case 2:
      return launch<uint16_t>(a);
    default:
      return launch<unsigned char>(a);
  }
}
