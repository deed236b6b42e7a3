// MLA attention in the absorbed form over the latent cache, bf16, for devices with wgmma. attention.h says what,
// mla_wgmma_plan.h how a pass is cut, mla_wgmma_block.h what a block does, mla_attention_bf16.md what was measured.

#include "kernels/mla_wgmma.h"

#ifdef KDTREE_HOST

namespace kdtree::mla_wgmma {

bool available() { return false; }
size_t workspace(int, int, int, int, int, size_t) { return 0; }
kdtree_status attention(const MlaAttentionBf16Args&, cudaStream_t) {
  return fail(KDTREE_UNSUPPORTED, "mla_attention_bf16: there is no wgmma on the CPU");
}

}  // namespace kdtree::mla_wgmma

#else

#include <algorithm>

#include "common/behind.h"
#include "common/per_kernel.h"
#include "kernels/mla_wgmma_block.h"

namespace kdtree::mla_wgmma {
namespace {

// A thread's, once the warpgroups know what they are: together what the kernel is launched with, or one waits for ever.
constexpr int kMultiplierRegisters = 232, kCopierRegisters = 40;

// Grid: groups of the slice, items of a group.
__global__ void __launch_bounds__(kThreads, 1)
    mla_wgmma_kernel(const MlaAttentionBf16Args a, const Plan plan, const __grid_constant__ CUtensorMap map) {
#ifdef KDTREE_HAS_WGMMA
  KDTREE_DYNAMIC_SHARED(raw);
  unsigned char* const aligned = raw + (1024 - shared_address(raw) % 1024) % 1024;
  Block block;
  block.query = shared_address(aligned);
  block.tiles = block.query + kTileBytes;
  block.shared = reinterpret_cast<Shared*>(aligned + 3 * kTileBytes);
  if (threadIdx.x == 0) {
    if (plan.boxes > 0) prefetch_map(&map);
    block.init_barriers();
  }
  start_behind();
  const Item item(a, plan, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y));
  if (item.pairs() == 0) return;
  __syncthreads();
  const int group = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);  // the same, as the compiler sees
  if (group == 2) {
    give_registers<kCopierRegisters>();
    Copier{a, plan, item, block, &map}.run();
  } else if (group == 1) {
    take_registers<kMultiplierRegisters>();
    copy_query(a, item, block);
    Multiplier<1>(a, plan, item, block).run();
  } else {
    take_registers<kMultiplierRegisters>();
    copy_query(a, item, block);
    Multiplier<0>(a, plan, item, block).run();
  }
#endif
}

constexpr int kJoinWarps = 2, kMostAtOnce = 8;

// Two rows of a node, 8 apart, and two columns in each of some pieces.
template <int kPieces>
struct Sums {
  float4 values[kPieces];
  float4 state;   // peak and total of tiles 0 of either row
  float2 others;  // totals of tiles 1

  __device__ void clear() {
    KDTREE_UNROLL
    for (int i = 0; i < kPieces; ++i) values[i] = {0, 0, 0, 0};
    state = {-INFINITY, 0, -INFINITY, 0};
    others = {0, 0};
  }
  __device__ void add(const Sums& next) {
    const Addition first(state.x, next.state.x), second(state.z, next.state.z);
    KDTREE_UNROLL
    for (int i = 0; i < kPieces; ++i)
      values[i] = {first(values[i].x, next.values[i].x), first(values[i].y, next.values[i].y),
                   second(values[i].z, next.values[i].z), second(values[i].w, next.values[i].w)};
    state = {first.peak, first(state.y, next.state.y), second.peak, second(state.w, next.state.w)};
    others = {first(others.x, next.others.x), second(others.y, next.others.y)};
  }
};

struct Listed {
  int place;   // in the workspace
  int begins;  // a span
};

// Grid: groups of the slice; halves, warps and pieces of a node. Adds up the nodes of a group's rows as one block would
// have added their leaves. A warp takes kPieces pieces: few, so that there are many warps, or more, so that the states
// are read less often.
template <int kPieces>
__global__ void __launch_bounds__(kJoinWarps* kWarp)
    mla_wgmma_join_kernel(const MlaAttentionBf16Args a, const Plan plan) {
#ifdef KDTREE_HAS_WGMMA
  KDTREE_DYNAMIC_SHARED(raw);
  __shared__ int total;
  constexpr int kAtOnce = kPieces <= 2 ? kMostAtOnce : 3;  // nodes that are on their way from memory together
  using Sums = Sums<kPieces>;
  Listed* const nodes = reinterpret_cast<Listed*>(raw);
  const int local = static_cast<int>(blockIdx.x), group = plan.first + local, request = group / plan.groups;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int place = static_cast<int>(blockIdx.y) * kJoinWarps + static_cast<int>(threadIdx.x) / kWarp;
  constexpr int kRuns = 32 / kPieces;
  const int half = place / (4 * kRuns), warp = place / kRuns % 4, piece = place % kRuns * kPieces;
  const int row = group % plan.groups * kRows + warp * 16 + lane / 4, node = row / a.heads;
  if (node >= a.rows.width) return;  // of the last group
  const int keys = mla_bf16::keys_of(a, request, node), end = leaves_end(keys);
  const int shared_end = plan.tails == 0 ? end : leaf_floor(min(a.rows.prefix_lengths[request], a.longest));

  const int length = plan.length(a, request);

  // The first warp lists the nodes, an item a lane.
  int count = 0;
  if (threadIdx.x < kWarp) {
    const int items = end == 0 ? 0 : plan.parts + (plan.tails > 0 ? 1 : 0);
    for (int base = 0; base < items; base += kWarp) {
      const int item = base + lane;
      const bool tail = item == plan.parts;
      int begin = 0, stop = 0;
      if (item < items) {
        begin = tail ? shared_end : plan.part_begin(item, length);
        stop = tail ? end : min(plan.part_begin(item + 1, length), shared_end);
      }
      const int own = nodes_of(begin, stop);
      int before = own;
      for (int step = 1; step < kWarp; step *= 2) {
        const int below = __shfl_up_sync(kAllLanes, before, static_cast<unsigned>(step));
        if (lane >= step) before += below;
      }
      const int all = __shfl_sync(kAllLanes, before, kWarp - 1);
      int to = count + before - own;
      int slot = local * plan.nodes() +
                 (tail ? plan.first_tail_node(node % max(plan.tails, 1)) : plan.first_node(item, begin));
      for (int at = begin; at < stop; at = node_end(at, begin, stop)) nodes[to++] = {slot++, at == span_floor(at)};
      count += all;
    }
    if (threadIdx.x == 0) total = count;
  }
  __syncthreads();
  count = total;
  start_behind();  // for nodes; lengths were there before the kernel that leaves them began

  const float4* const vectors = static_cast<const float4*>(a.workspace);
  Sums all, span;
  all.clear();
  span.clear();
  for (int base = 0; base < count; base += kAtOnce) {
    Sums next[kAtOnce];
    KDTREE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const float4* const from = vectors + nodes[min(base + i, count - 1)].place * kNodeVectors;
      KDTREE_UNROLL
      for (int j = 0; j < kPieces; ++j) next[i].values[j] = from[node_vector(half, piece + j, warp * kWarp + lane)];
      next[i].state = from[node_state(0, warp * 16 + lane / 4)];
      const float4 other = from[node_state(1, warp * 16 + lane / 4)];
      next[i].others = make_float2(other.y, other.w);
    }
    KDTREE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + i >= count) break;
      if (nodes[base + i].begins == 0) {
        span.add(next[i]);
        continue;
      }
      if (base + i > 0) all.add(span);
      span = next[i];
    }
  }
  all.add(span);

  const float peaks[2] = {all.state.x, all.state.z};
  const float totals[2] = {all.state.y + all.others.x, all.state.w + all.others.y};
  KDTREE_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int64_t to = static_cast<int64_t>(request) * a.rows.width * a.heads + row + 8 * i;
    const float factor = totals[i] == 0 ? 0.0f : 1.0f / totals[i];
    if (half == 0 && piece == 0 && lane % 4 == 0 && a.lse != nullptr)
      a.lse[to] = totals[i] == 0 ? -INFINITY : (peaks[i] + log2f(totals[i])) * 0.6931471805599453f;
    KDTREE_UNROLL
    for (int j = 0; j < kPieces; ++j) {
      const float4 sums = all.values[j];
      *reinterpret_cast<uint32_t*>(a.out + to * kLatent + half * 256 + (piece + j) * 8 + lane % 4 * 2) =
          mla_bf16::narrow_pair((i == 0 ? sums.x : sums.z) * factor, (i == 0 ? sums.y : sums.w) * factor);
    }
  }
#endif
}

constexpr int kMostParts = 256;
constexpr int kItemKeys = 250;     // in the time that an item's start and end take, about
constexpr double kNodeKeys = 1.5;  // in the time that joining a node takes, about

kdtree_status multiprocessors(int* count) {
  int device = 0;
  KDTREE_RETURN_IF_FAILED(check_cuda(cudaGetDevice(&device), "cudaGetDevice"));
  return check_cuda(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device), "multiprocessors");
}

// What a cut takes, in the time of so many keys.
struct Cost {
  int64_t groups;
  int longest, blocks;

  // Of items that take so many keys at most, and leave so many nodes.
  double operator()(const Plan& cut, double keys, int nodes) const {
    const int64_t slices = ceil_div(groups, cut.slice);
    const double rounds = static_cast<double>(slices * ceil_div(ceil_div(groups, slices) * cut.items(), blocks));
    return rounds * (keys + kItemKeys) + kNodeKeys * static_cast<double>(groups) * nodes;
  }
  double operator()(const Plan& cut) const {
    double keys = 0;
    int nodes = 0;
    for (int part = 0, begin = 0; part < cut.parts; ++part) {
      const int end = cut.part_begin(part + 1, longest);
      if (end > begin)
        keys = std::max(keys,
                        std::min(end, longest) - begin + double{kLeafKeys} * (leaf_of(end - 1) + 1 - leaf_of(begin)));
      nodes += nodes_of(begin, end);
      begin = end;
    }
    return operator()(cut, keys, nodes);
  }
  // What a cut of so many parts takes at least.
  double least(const Plan& cut) const {
    const int last = leaf_floor(longest - 1), largest = std::max(longest - last, last > 0 ? leaf_keys(last - 1) : 0);
    const double mean = (longest + double{kLeafKeys} * (leaf_of(longest - 1) + 1)) / cut.parts;
    return operator()(cut, std::max<double>(largest + kLeafKeys, mean), 1);
  }
};

// blocks: that run at a time; 0: as many as the current device has multiprocessors.
kdtree_status plan_pass(int64_t requests, int width, int heads, int longest, int blocks, size_t workspace, Plan* pass) {
  if (blocks <= 0) KDTREE_RETURN_IF_FAILED(multiprocessors(&blocks));
  Plan plan{};
  plan.groups = static_cast<int>(ceil_div(static_cast<int64_t>(width) * heads, kRows));
  plan.tails = heads < kRows ? kRows / heads : 0;
  plan.longest = longest, plan.weight = kLeafKeys;
  const Cost cost{requests * plan.groups, longest, blocks};
  const auto fit = [&](Plan* cut) {
    cut->count_nodes(width);
    cut->slice = static_cast<int>(std::min<int64_t>(cost.groups, static_cast<int64_t>(workspace / group_bytes(*cut))));
    return cut->slice > 0;
  };
  Plan best = plan;
  best.parts = plan.units(longest);
  if (!fit(&best) || cost.groups * best.items() > blocks) {  // else a leaf each, all at once
    best.parts = 1, best.spans = true;                       // the fewest nodes, should nothing fit
    double least = fit(&best) ? cost(best) : INFINITY;
    for (const bool spans : {true, false}) {
      Plan cut = plan;
      cut.spans = spans;
      for (cut.parts = 1; cut.parts <= std::min(cut.units(longest), kMostParts); ++cut.parts) {
        if (!fit(&cut) || cost.least(cut) >= least) continue;
        for (const int weight : {kLeafKeys, kLeafKeys / 2, 2 * kLeafKeys}) {
          cut.weight = weight;
          if (const double all = cost(cut); all < least) least = all, best = cut;
        }
      }
    }
  }
  if (best.slice > 0) best.slice = static_cast<int>(ceil_div(cost.groups, ceil_div(cost.groups, best.slice)));
  *pass = best;
  return KDTREE_OK;
}

// The cache as the copy engine sees it: [requests or 1, rows, 576].
kdtree_status map_cache(const MlaAttentionBf16Args& a, Plan* plan, CUtensorMap* map) {
  plan->boxes = 1;
  const kdtree_cache_view& cache = a.cache;
  if (cache.block_size > 0) {
    const int rows = std::min(cache.block_size & -cache.block_size, kTile);
    plan->boxes = rows < 8 ? 0 : kTile / rows;
  }
  if (plan->boxes == 0) return KDTREE_OK;
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    (void)cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    (void)cudaGetLastError();  // told below, not by the next launch
    return reinterpret_cast<Encode>(entry);
  }();
  if (encode == nullptr)
    return fail(KDTREE_UNSUPPORTED, "mla_attention_bf16: the driver has no cuTensorMapEncodeTiled");
  const bool paged = cache.block_size > 0;
  const int requests = paged ? 1 : a.rows.requests;
  const cuuint64_t sizes[3] = {kRowBytes / 2, paged ? cuuint64_t{1} << 31 : static_cast<cuuint64_t>(cache.capacity),
                               static_cast<cuuint64_t>(requests)};
  const cuuint64_t strides[2] = {
      static_cast<cuuint64_t>(cache.row_stride),
      requests > 1 ? static_cast<cuuint64_t>(cache.request_stride) : static_cast<cuuint64_t>(cache.row_stride)};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(kTile / plan->boxes), 1}, steps[3] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, static_cast<char*>(cache.base) + a.layer * cache.layer_stride,
             sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    return fail(KDTREE_CUDA,
                "mla_attention_bf16: cuTensorMapEncodeTiled gives %d for a cache of %d rows, %lld bytes apart",
                static_cast<int>(result), cache.capacity, static_cast<long long>(cache.row_stride));
  return KDTREE_OK;
}

template <int kPieces>
kdtree_status join_nodes(const MlaAttentionBf16Args& a, const Plan& plan, unsigned groups, cudaStream_t stream) {
  const auto kernel = mla_wgmma_join_kernel<kPieces>;
  // The compiler reads as far as kAtOnce goes before it looks whether there are as many.
  const size_t bytes = static_cast<size_t>(plan.part_nodes + plan.tail_nodes + kMostAtOnce) * sizeof(Listed);
  KDTREE_RETURN_IF_FAILED(allow_shared_memory(reinterpret_cast<const void*>(kernel), "mla_attention_bf16", bytes, 128));
  return launch_behind("mla_wgmma_join_kernel", kernel, dim3(groups, 256 / kPieces / kJoinWarps),
                       dim3(kJoinWarps * kWarp), bytes, stream, a, plan);
}

// Many groups have warps enough that each may take more pieces, unless it has many nodes to add.
kdtree_status join(const MlaAttentionBf16Args& a, const Plan& plan, unsigned groups, cudaStream_t stream) {
  if (groups < 8) return join_nodes<1>(a, plan, groups, stream);
  if (groups < 16 && plan.part_nodes > 16) return join_nodes<2>(a, plan, groups, stream);
  return groups < 32 ? join_nodes<4>(a, plan, groups, stream) : join_nodes<8>(a, plan, groups, stream);
}

}  // namespace

bool available() {
  static PerKernel<bool> known;
  const void* const kernel = reinterpret_cast<const void*>(mla_wgmma_kernel);
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  bool result = false;
  if (known.find(kernel, device, &result)) return result;
  int major = 0, minor = 0, shared = 0;
  cudaFuncAttributes attributes{};
  result = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess &&
           major == 9 && minor == 0 && shared >= 227 * 1024 &&
           cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
           attributes.numRegs == (2 * kMultiplierRegisters + kCopierRegisters) / 3;  // without wgmma it is empty
  (void)cudaGetLastError();
  known.set(kernel, device, result);
  return result;
}

size_t workspace(int requests, int width, int heads, int longest, int blocks, size_t most) {
  Plan plan{};
  if (plan_pass(requests, width, heads, longest, blocks, most, &plan) != KDTREE_OK) return 0;
  return group_bytes(plan) * static_cast<size_t>(std::max(plan.slice, 1));
}

kdtree_status attention(const MlaAttentionBf16Args& a, cudaStream_t stream) {
  Plan plan{};
  CUtensorMap map{};
  KDTREE_RETURN_IF_FAILED(
      plan_pass(a.rows.requests, a.rows.width, a.heads, a.longest, a.blocks, a.workspace_size, &plan));
  if (Arguments arguments("mla_attention_bf16");
      arguments.workspace(a.workspace, a.workspace_size, group_bytes(plan)).failed())
    return arguments.status();
  KDTREE_RETURN_IF_FAILED(map_cache(a, &plan, &map));
  KDTREE_RETURN_IF_FAILED(
      allow_shared_memory(reinterpret_cast<const void*>(mla_wgmma_kernel), "mla_attention_bf16", kSharedBytes));
  const int groups = a.rows.requests * plan.groups;
  for (; plan.first < groups; plan.first += plan.slice) {
    const unsigned now = static_cast<unsigned>(std::min(plan.slice, groups - plan.first));
    KDTREE_RETURN_IF_FAILED(launch_behind("mla_wgmma_kernel", mla_wgmma_kernel,
                                          dim3(now, static_cast<unsigned>(plan.items())), dim3(kThreads), kSharedBytes,
                                          stream, a, plan, map));
    KDTREE_RETURN_IF_FAILED(join(a, plan, now, stream));
  }
  return KDTREE_OK;
}

}  // namespace kdtree::mla_wgmma

#endif
