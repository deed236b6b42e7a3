// MLA attention in the absorbed form over the latent cache, bf16. attention.h says what, mla_bf16_tile.h how.
//
// A block takes 64 head rows: 64 heads of one node or, with fewer heads, all heads of several. Keys lie in chunks that
// begin at multiples of kChunk positions; a chunk is summed tile by tile from nothing. The chunks of a span are joined
// in order, then the spans in order, by one formula. Whether a block takes one chunk (few rows) or one span (many)
// changes no bit: it joins its chunks just as the joining kernel would. Estimate for 33 rows and more over 32k keys on
// an H200: 330 to 390 TFLOP/s, a tile's 1088 products in 2600 to 3000 cycles, of which the tensor cores need 1750.
//
// Tiles that lie wholly in the prefix serve all rows of a block. From there on each node has tiles of its own, the end
// of the prefix and its path, where plain decoding would have found these keys; only its rows enter their products.

#include <algorithm>

#include "kernels/attention.h"
#include "kernels/mla_bf16_tile.h"

namespace kdtree {
namespace mla_bf16 {
namespace {

// Fewer keys a chunk: more blocks for one row over a long prefix, 256 of them at 128k keys. More: fewer joins, each
// moves 256 KB through the L2 cache where a tile moves 36.
constexpr int kChunk = 512;
// Partial sums that leave a block take 2 KB a head row and span; a span of 2048 keys keeps that to a twentieth of the
// time, and 33 rows over 8k keys are a block for each multiprocessor.
constexpr int kSpanChunks = 4;
constexpr int kSpan = kChunk * kSpanChunks;
constexpr int kEnoughBlocks = 128;  // from here on blocks take spans
constexpr size_t kMostWorkspace = size_t{256} << 20;

// kAhead: where shared memory allows, the next tile's scores are multiplied while this one's weights are made. Two
// warps that share tensor cores do the two in opposite orders, so that the tensor cores rarely wait. The same sums
// either way.
template <bool kAhead>
struct Layout {
  static constexpr int kStages = kAhead ? 4 : 2;
  static constexpr int kMeetings = kAhead ? 2 : 1;
  static constexpr size_t kTiles = size_t{kStages} * kTileBytes;
  static constexpr size_t kBytes = kTiles + kMeetings * Meeting<kAhead>::kBytes + sizeof(Shared);
};
static_assert(Layout<false>::kBytes <= 101376 && Layout<true>::kBytes <= 232448);

// How a pass is cut: `slice` groups of 64 head rows a launch, `parts` blocks each.
struct Plan {
  int groups;  // of a request
  int part;    // keys of a block: kChunk or kSpan
  int parts;
  int slice;
  int first;  // group of the launch, of all requests
};

struct Partials {
  float* values;  // [slice * 64, parts, 512]
  float* peaks;   // [slice * 64, parts] to base 2
  float* totals;  // [slice * 64, parts]

  __host__ __device__ Partials(void* workspace, const Plan& plan)
      : values(static_cast<float*>(workspace)),
        peaks(values + static_cast<int64_t>(plan.slice) * kHeadRows * plan.parts * kLatent),
        totals(peaks + static_cast<int64_t>(plan.slice) * kHeadRows * plan.parts) {}
};

size_t group_bytes(int parts) { return static_cast<size_t>(parts) * kHeadRows * (kLatent + 2) * sizeof(float); }

__device__ int keys_of(const MlaAttentionBf16Args& a, int request, int node) {
  if (node > a.rows.node_count[request]) return 0;
  return min(a.rows.positions[static_cast<int64_t>(request) * a.rows.width + node] + 1, a.longest);
}

__device__ void plan_work(const MlaAttentionBf16Args& a, const Plan& plan, Work* work) {
  const int group = plan.first + static_cast<int>(blockIdx.x), part = static_cast<int>(blockIdx.y);
  work->request = group / plan.groups;
  work->first_row = group % plan.groups * kHeadRows;
  work->node_bits = a.heads >= kHeadRows ? 0 : a.heads == 32 ? 1 : 2;
  work->prefix = a.rows.prefix_lengths[work->request];
  int most = 0;
  for (int i = 0; i < 1 << work->node_bits; ++i) {
    const int node = work->first_row / a.heads + i;
    work->counts[i] = node < a.rows.width ? keys_of(a, work->request, node) : 0;
    most = max(most, work->counts[i]);
  }
  const int end = static_cast<int>(ceil_div(min(most, (part + 1) * plan.part), kKeys));
  work->first_tile = part * plan.part / kKeys;
  work->shared = max(min(work->prefix / kKeys, end) - work->first_tile, 0);
  work->turns = work->shared + (max(end - work->first_tile - work->shared, 0) << work->node_bits);
}

// Byte offset in the layer of key row 4 w + lane / 8 of a turn's tile; -1: no such key.
__device__ int64_t key_offset(const MlaAttentionBf16Args& a, const Work& work, int turn) {
  if (turn >= work.turns) return -1;
  const auto [warp, lane] = Thread::again();
  const int place = max(work.node(turn), 0);
  const int position = work.tile(turn) * kKeys + warp * (kKeys / kWarps) + lane / 8;
  if (position >= work.counts[place]) return -1;
  int row = position;
  if (position >= work.prefix && a.rows.paths != nullptr) {
    const int64_t node = static_cast<int64_t>(work.request) * a.rows.width + work.first_row / a.heads + place;
    row = work.prefix + a.rows.paths[node * a.rows.path_stride + position - work.prefix];
  }
  const kdtree_cache_view& cache = a.cache;  // as cache_row, with divisions of 32 bits
  if (cache.block_size == 0) return work.request * cache.request_stride + row * cache.row_stride;
  const unsigned size = static_cast<unsigned>(cache.block_size), index = static_cast<unsigned>(row) / size;
  const int64_t block = cache.block_table[static_cast<int64_t>(work.request) * cache.table_stride + index];
  return block < 0 ? -1 : (block * cache.block_size + (static_cast<unsigned>(row) - index * size)) * cache.row_stride;
}

// Starts the copy of a tile, four rows a warp, eight lanes a row; rows that are no keys become zeros.
__device__ void copy_tile(const char* layer, int64_t offset, unsigned char* tile) {
  static_assert(kKeys / kWarps * 8 == kWarp && kRowBytes % 128 == 0);
  const auto [warp, lane] = Thread::again();
  unsigned char* const to = tile + (warp * (kKeys / kWarps) + lane / 8) * kStride + lane % 8 * 16;
  const char* const from = layer + max(offset, int64_t{0}) + lane % 8 * 16;
  KDTREE_UNROLL
  for (int i = 0; i < kRowBytes / 128; ++i) copy_async_16(to + i * 128, from + i * 128, offset >= 0);
  commit_copies();
}

// The warp's share of the queries; zeros for rows that are none.
__device__ void load_query(const MlaAttentionBf16Args& a, const Work& work, Query& query) {
  const auto [warp, lane] = Thread::again();
  KDTREE_UNROLL
  for (int m = 0; m < 2; ++m) KDTREE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int local = warp / kQuarters * 32 + m * 16 + half * 8 + lane / 4;
    const int64_t row = static_cast<int64_t>(work.request) * a.rows.width + (work.first_row + local) / a.heads;
    const int head = (work.first_row + local) % a.heads;
    const bool used = work.count_of(local) > 0;
    const uint16_t* const latent = a.q_latent + row * a.q_latent_stride + head * a.q_latent_head;
    const uint16_t* const rope = a.q_rope + row * a.q_rope_stride + head * a.q_rope_head;
    KDTREE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      const int first = (warp % kQuarters * kSteps + k) * 16;
      const uint16_t* const from = (first < kLatent ? latent : rope - kLatent) + first + lane % 4 * 2;
      KDTREE_UNROLL
      for (int right = 0; right < 2; ++right)
        query[m][k][half + 2 * right] = used ? *reinterpret_cast<const uint32_t*>(from + right * 8) : 0u;
    }
  }
}

// Joins the chunk that ends with what the block has of its part, in the workspace, and begins the next. After a
// barrier.
__device__ void close_chunk(const MlaAttentionBf16Args& a, const Plan& plan, int chunk, Shared* shared, RowState* state,
                            Sums& sums) {
  const Partials partials(a.workspace, plan);
  const int64_t first_partial = static_cast<int64_t>(blockIdx.x) * kHeadRows * plan.parts + blockIdx.y;
  const bool first = chunk * kChunk == static_cast<int>(blockIdx.y) * plan.part;
  const Thread me = Thread::again();
  const auto [warp, lane] = me;
  const int own = me.own_row();
  if (lane % 4 == 0 && chunk * kChunk < shared->work.count_of(own)) {
    const Join join(first ? -INFINITY : shared->peaks[own], state->peak);
    const float total = join(first ? 0.0f : shared->totals[own], state->total);
    partials.peaks[first_partial + static_cast<int64_t>(own) * plan.parts] = shared->peaks[own] = join.peak;
    partials.totals[first_partial + static_cast<int64_t>(own) * plan.parts] = shared->totals[own] = total;
    shared->factors[0][own] = join.first;
    shared->factors[1][own] = join.second;
  }
  *state = RowState();
  __syncthreads();
  KDTREE_UNROLL
  for (int m = 0; m < 4; ++m) {
    if (chunk * kChunk >= shared->work.count_of(m * 16)) continue;
    KDTREE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(lane, m, half);
      const float old_factor = shared->factors[0][row], new_factor = shared->factors[1][row];
      float2* const at = reinterpret_cast<float2*>(partials.values +
                                                   (first_partial + static_cast<int64_t>(row) * plan.parts) * kLatent +
                                                   warp * kColumns + lane % 4 * 2);
      KDTREE_UNROLL
      for (int n = 0; n < kColumns / 8; ++n) {
        // + 0: zeros have one sign, whoever joins them.
        float2 value = make_float2(sums[m][n][2 * half] + 0.0f, sums[m][n][2 * half + 1] + 0.0f);
        if (!first) {
          const float2 old = at[n * 4];
          value.x = fmaf(old.x, old_factor, value.x * new_factor);
          value.y = fmaf(old.y, old_factor, value.y * new_factor);
        }
        at[n * 4] = value;
      }
    }
  }
  KDTREE_UNROLL
  for (int m = 0; m < 4; ++m) KDTREE_UNROLL
  for (int n = 0; n < kColumns / 8; ++n) KDTREE_UNROLL
  for (int i = 0; i < 4; ++i) sums[m][n][i] = 0;
}

// What of a turn's tile has no row of its node: nothing is computed.
__device__ bool is_empty(const Work& work, int turn) {
  return work.tile(turn) * kKeys >= work.counts[max(work.node(turn), 0)];
}

// Weights of a turn's tile, from its score sums. Returns whether older sums must be rescaled.
template <bool kAhead>
__device__ bool weigh(const MlaAttentionBf16Args& a, int turn, Meeting<kAhead> meeting, float (&scores)[8],
                      Shared* shared, RowState* state) {
  add_quarters(meeting, scores);
  const Work& work = shared->work;
  const Thread me = Thread::again();
  const int own = me.own_row(), node = work.node(turn), first_key = work.tile(turn) * kKeys + me.lane % 4 * 2;
  const int seen = node < 0 || node == work.node_of(own) ? work.count_of(own) - first_key : 0;
  const float scale = a.scale * 1.4426950408889634f;
  KDTREE_UNROLL
  for (int i = 0; i < 8; ++i) scores[i] = key_of(i) < seen ? scores[i] * scale : -INFINITY;
  const float factor = (*state)(scores);
  leave_weights(meeting, scores);
  if (me.lane % 4 == 0) shared->factors[0][own] = factor;
  return factor != 1.0f;
}

// Grid: groups of the slice, parts.
template <bool kAhead>
__global__ void __launch_bounds__(kThreads, 1) mla_bf16_kernel(MlaAttentionBf16Args a, Plan plan) {
  constexpr int kStages = Layout<kAhead>::kStages;
  KDTREE_DYNAMIC_SHARED(tiles);
  unsigned char* const meetings = tiles + Layout<kAhead>::kTiles;
  Shared& shared = *reinterpret_cast<Shared*>(meetings + Layout<kAhead>::kMeetings * Meeting<kAhead>::kBytes);
  const Work& work = shared.work;
  if (threadIdx.x == 0) plan_work(a, plan, &shared.work);
  __syncthreads();
  if (work.turns == 0) return;

  const char* const layer = static_cast<const char*>(a.cache.base) + a.layer * a.cache.layer_stride;
  const auto tile = [=](int turn) { return tiles + turn % kStages * kTileBytes; };
  const auto meeting = [=](int turn) {
    return Meeting<kAhead>{meetings + turn % Layout<kAhead>::kMeetings * Meeting<kAhead>::kBytes};
  };
  for (int turn = 0; turn < kStages - 1; ++turn) copy_tile(layer, key_offset(a, work, turn), tile(turn));
  int64_t offset = key_offset(a, work, kStages - 1);

  Query query;
  load_query(a, work, query);
  Sums sums = {};
  RowState state;
  float scores[8];
  if (kAhead) {
    wait_copies<kStages - 2>();
    __syncthreads();
    if (!is_empty(work, 0)) multiply_keys(query, tile(0), meeting(0), scores);
  }
  for (int turn = 0; turn < work.turns; ++turn) {
    wait_copies<kStages - 2 - kAhead>();
    __syncthreads();  // the tile is there, kAhead: the next; and nobody looks at the one before
    copy_tile(layer, offset, tile(turn + kStages - 1));
    const bool empty = is_empty(work, turn);
    bool moved = false;
    if (kAhead) {
      const bool follows = turn + 1 < work.turns && !is_empty(work, turn + 1);
      KDTREE_UNROLL_BY(1)
      for (int i = 0; i < 2; ++i) {
        if (i == Thread::again().warp / kQuarters) {
          if (!empty) moved = weigh(a, turn, meeting(turn), scores, &shared, &state);
          offset = key_offset(a, work, turn + kStages);
        } else if (follows) {
          multiply_keys(query, tile(turn + 1), meeting(turn + 1), scores);
        }
      }
    } else {
      if (!empty) multiply_keys(query, tile(turn), meeting(turn), scores);
      __syncthreads();
      offset = key_offset(a, work, turn + kStages);
      if (!empty) moved = weigh(a, turn, meeting(turn), scores, &shared, &state);
    }
    moved = __syncthreads_or(moved);
    if (!empty) {
      if (moved) multiply_rows(shared.factors[0], sums);
      if (work.node(turn) < 0 || work.node_bits == 0)
        multiply_values<true>(tile(turn), meeting(turn), work, 0, sums);
      else
        multiply_values<false>(tile(turn), meeting(turn), work, work.node(turn), sums);
    }

    const int chunk = work.tile(turn) * kKeys / kChunk;
    if (turn + 1 == work.turns || work.tile(turn + 1) * kKeys / kChunk != chunk) {
      __syncthreads();  // all have read the factors
      close_chunk(a, plan, chunk, &shared, &state, sums);
    }
  }
}

constexpr int kJoinThreads = kLatent / 4;

struct JoinedSum {
  float peak, total;
  float4 values;

  __device__ void add(const JoinedSum& next) {
    const Join join(peak, next.peak);
    peak = join.peak;
    total = join(total, next.total);
    values = make_float4(join(values.x, next.values.x), join(values.y, next.values.y), join(values.z, next.values.z),
                         join(values.w, next.values.w));
  }
};

// Grid: head rows of the slice. Joins the parts of a head row: those of a span, then the spans, in their order.
__global__ void __launch_bounds__(kJoinThreads) mla_bf16_join_kernel(MlaAttentionBf16Args a, Plan plan) {
  const int local = static_cast<int>(blockIdx.x), group = plan.first + local / kHeadRows;
  const int request = group / plan.groups, row = group % plan.groups * kHeadRows + local % kHeadRows;
  const int node = row / a.heads, head = row % a.heads;
  if (node >= a.rows.width) return;
  const Partials partials(a.workspace, plan);
  const int64_t first = static_cast<int64_t>(local) * plan.parts;
  const auto partial = [&](int part) {
    const float4* const values = reinterpret_cast<const float4*>(partials.values + (first + part) * kLatent);
    return JoinedSum{partials.peaks[first + part], partials.totals[first + part], values[threadIdx.x]};
  };
  const int parts = static_cast<int>(ceil_div(keys_of(a, request, node), plan.part));
  const int parts_of_span = kSpan / plan.part;
  JoinedSum all{-INFINITY, 0, make_float4(0, 0, 0, 0)};
  for (int begin = 0; begin < parts; begin += parts_of_span) {
    JoinedSum span = partial(begin);
    for (int i = begin + 1; i < min(parts, begin + parts_of_span); ++i) span.add(partial(i));
    if (begin == 0)
      all = span;
    else
      all.add(span);
  }
  const int64_t place = (static_cast<int64_t>(request) * a.rows.width + node) * a.heads + head;
  if (threadIdx.x == 0 && a.lse != nullptr)
    a.lse[place] = all.total == 0 ? -INFINITY : (all.peak + log2f(all.total)) * 0.6931471805599453f;
  const float total = all.total == 0 ? 1.0f : all.total;
  *reinterpret_cast<uint2*>(a.out + place * kLatent + threadIdx.x * 4) = make_uint2(
      narrow_pair(all.values.x / total, all.values.y / total), narrow_pair(all.values.z / total, all.values.w / total));
}

Plan plan_of(int64_t requests, int width, int heads, int longest, size_t workspace) {
  Plan plan{};
  plan.groups = static_cast<int>(ceil_div(static_cast<int64_t>(width) * heads, kHeadRows));
  const int64_t groups = requests * plan.groups;
  const size_t chunks = group_bytes(static_cast<int>(ceil_div(longest, kChunk)));
  plan.part = groups * ceil_div(longest, kSpan) >= kEnoughBlocks || chunks > workspace ? kSpan : kChunk;
  plan.parts = static_cast<int>(ceil_div(longest, plan.part));
  plan.slice = static_cast<int>(std::min<int64_t>(groups, static_cast<int64_t>(workspace / group_bytes(plan.parts))));
  return plan;
}

template <bool kAhead>
kdtree_status launch(const MlaAttentionBf16Args& a, Plan plan, cudaStream_t stream) {
  const size_t bytes = Layout<kAhead>::kBytes;
  KDTREE_RETURN_IF_FAILED(
      allow_shared_memory(reinterpret_cast<const void*>(mla_bf16_kernel<kAhead>), "mla_attention_bf16", bytes));
  const int groups = a.rows.requests * plan.groups;
  for (; plan.first < groups; plan.first += plan.slice) {
    const unsigned now = static_cast<unsigned>(std::min(plan.slice, groups - plan.first));
    KDTREE_LAUNCH((mla_bf16_kernel<kAhead>), dim3(now, static_cast<unsigned>(plan.parts)), dim3(kThreads), bytes,
                  stream, a, plan);
    KDTREE_RETURN_IF_FAILED(check_launch("mla_bf16_kernel"));
    KDTREE_LAUNCH(mla_bf16_join_kernel, dim3(now * kHeadRows), dim3(kJoinThreads), 0, stream, a, plan);
    KDTREE_RETURN_IF_FAILED(check_launch("mla_bf16_join_kernel"));
  }
  return KDTREE_OK;
}

}  // namespace
}  // namespace mla_bf16

size_t mla_attention_bf16_workspace(int requests, int width, int heads, int longest) {
  using namespace mla_bf16;
  const Plan plan = plan_of(requests, width, heads, longest, kMostWorkspace);
  return group_bytes(plan.parts) * static_cast<size_t>(std::max(plan.slice, 1));
}

kdtree_status mla_attention_bf16(const MlaAttentionBf16Args& a, cudaStream_t stream) {
  using namespace mla_bf16;
  Arguments arguments("mla_attention_bf16");
  arguments.range("requests", a.rows.requests, 1, 65535)
      .range("width", a.rows.width, 1, 65535)
      .range("longest", a.longest, 1, INT32_MAX - kSpan);
  if (arguments.failed()) return arguments.status();
  if (a.heads != 16 && a.heads != 32 && a.heads != 64 && a.heads != 128)
    return fail(KDTREE_SIZE, "mla_attention_bf16: heads is %d, it must be 16, 32, 64 or 128", a.heads);
  const Plan plan = plan_of(a.rows.requests, a.rows.width, a.heads, a.longest, a.workspace_size);
  arguments.range("head rows", static_cast<int64_t>(a.rows.requests) * plan.groups * kHeadRows, 1, INT32_MAX)
      .range("parts", plan.parts, 1, 65535)
      .range("row_bytes", a.cache.row_bytes, kRowBytes, kRowBytes)
      .array("cache", a.cache.base, 16)
      .array("q_latent", a.q_latent, 4)
      .array("q_rope", a.q_rope, 4)
      .array("out", a.out, 8)
      .workspace(a.workspace, a.workspace_size, group_bytes(plan.parts));
  if (arguments.failed()) return arguments.status();
  for (const int64_t stride : {a.cache.row_stride, a.cache.request_stride, a.cache.layer_stride})
    if (stride % 16 != 0)
      return fail(KDTREE_ALIGNMENT, "mla_attention_bf16: a stride of the cache is %lld bytes, no multiple of 16",
                  static_cast<long long>(stride));
  for (const int64_t stride : {a.q_latent_stride, a.q_latent_head, a.q_rope_stride, a.q_rope_head})
    if (stride % 2 != 0)
      return fail(KDTREE_ALIGNMENT, "mla_attention_bf16: a stride of the queries is %lld elements, no multiple of 2",
                  static_cast<long long>(stride));
  const size_t allowed = a.shared_memory > 0 ? static_cast<size_t>(a.shared_memory) : shared_memory_optin();
  return allowed >= Layout<true>::kBytes ? launch<true>(a, plan, stream) : launch<false>(a, plan, stream);
}

}  // namespace kdtree
