// MLA attention in the absorbed form over the latent cache, bf16. attention.h says what, mla_bf16_plan.h how a pass is
// cut, mla_bf16_tile.h how a tile is computed.
//
// A block takes 64 head rows - 64 heads of one node or, with fewer heads, all heads of several - or, where that would
// leave multiprocessors idle, 16. It takes one chunk of keys (few rows) or one span (many), and joins the chunks of a
// span just as the joining kernel would. Neither changes a bit.
//
// Measured on one H200 in a first version (bench/bench_attention.cu), 64 heads: 33 rows over 32k keys 893 us, 169
// TFLOP/s, half of what is wanted; 1 row over 1k, 8k, 32k, 128k keys 27, 48, 94, 132 us. How a pass is cut and how a
// tile is computed have changed since, without a measurement.
//
// Tiles that lie wholly in the prefix serve all rows of a block. From there on each node has tiles of its own, the end
// of the prefix and its path, where plain decoding would have found these keys; only its rows enter their products.

#include <algorithm>

#include "kernels/attention.h"
#include "kernels/mla_bf16_plan.h"
#include "kernels/mla_bf16_tile.h"

namespace kdtree {
namespace mla_bf16 {
namespace {

constexpr size_t kMostWorkspace = size_t{384} << 20;

struct Shared {
  float factors[2][kMostRows];
  RowState chunk[kMostRows];  // of the chunk
  RowState part[kMostRows];   // of the chunks before it in the part
  int64_t offsets[kKeys];     // of the keys of the tile that is copied next: looked up a turn before
  Work work;
};

template <class Shape>
constexpr size_t shared_bytes() {
  return static_cast<size_t>(Shape::kStages) * kTileBytes + Shape::kMeetings * Shape::kMeetingBytes + sizeof(Shared);
}
static_assert(shared_bytes<Shape<64, false>>() <= 101376 && shared_bytes<Shape<16, false>>() <= 101376);
static_assert(shared_bytes<Shape<64, true>>() <= 232448 && shared_bytes<Shape<16, true>>() <= 232448);

// The warp's share of the queries; zeros for rows that are none.
template <class Shape>
__device__ void load_query(const MlaAttentionBf16Args& a, const Work& work, typename Shape::Query& query) {
  const auto [warp, lane] = Thread::again();
  KDTREE_UNROLL
  for (int m = 0; m < Shape::kScoreTiles; ++m) {
    KDTREE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int local = row_of(lane, m, half) + (Shape::kScoreTiles == 2 ? warp / kQuarters * 32 : 0);
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
}

// Weights of a turn's tile, from its score sums. Returns whether older sums must be rescaled.
template <class Shape>
__device__ bool weigh(const MlaAttentionBf16Args& a, int turn, Meeting<Shape> meeting, float (&scores)[8],
                      Shared* shared) {
  if (Thread::again().warp >= Shape::kGroups) return false;
  add_quarters(meeting, scores);
  const Work& work = shared->work;
  const Thread me = Thread::again();
  const int own = me.own_row(), node = work.node(turn), first_key = work.tile(turn) * kKeys + me.lane % 4 * 2;
  const int seen = node < 0 || node == work.node_of(own) ? work.count_of(own) - first_key : 0;
  const float scale = a.scale * 1.4426950408889634f;
  KDTREE_UNROLL
  for (int i = 0; i < 8; ++i) scores[i] = key_of(i) < seen ? scores[i] * scale : -INFINITY;
  RowState state = shared->chunk[own];
  const float factor = state(scores);
  leave_weights(meeting, scores);
  if (me.lane % 4 == 0) {
    shared->chunk[own] = state;
    shared->factors[0][own] = factor;
  }
  return factor != 1.0f;
}

// Joins the chunk that ends with what the block has of its part, in the workspace, and begins the next. After a
// barrier.
template <class Shape>
__device__ void close_chunk(const MlaAttentionBf16Args& a, const Plan& plan, int part, int chunk, Shared* shared,
                            typename Shape::Sums& sums) {
  const Partials partials(a.workspace, plan);
  const int64_t first_partial = static_cast<int64_t>(blockIdx.x) * plan.rows * plan.parts + part;
  const int begin = chunk_begin(chunk);
  const bool first = begin == shared->work.part_begin;
  const Thread me = Thread::again();
  const auto [warp, lane] = me;
  if (const int own = me.own_row(); warp < Shape::kGroups && lane % 4 == 0) {
    if (begin < shared->work.count_of(own)) {
      const RowState old = first ? RowState() : shared->part[own], now = shared->chunk[own];
      const Join join(old.peak, now.peak);
      const RowState joined{join.peak, join(old.total, now.total)};
      shared->part[own] = joined;
      shared->factors[0][own] = join.first;
      shared->factors[1][own] = join.second;
      const int64_t at = first_partial + static_cast<int64_t>(own) * plan.parts;
      partials.peaks[at] = joined.peak;
      partials.totals[at] = joined.total;
    }
    shared->chunk[own] = RowState();
  }
  __syncthreads();
  KDTREE_UNROLL
  for (int m = 0; m < Shape::kGroups / 2; ++m) {
    if (begin < shared->work.count_of(m * 16)) {
      KDTREE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(lane, m, half);
        const float old_factor = shared->factors[0][row], new_factor = shared->factors[1][row];
        float2* const at = reinterpret_cast<float2*>(
            partials.values + (first_partial + static_cast<int64_t>(row) * plan.parts) * kLatent + warp * kColumns +
            lane % 4 * 2);
        float2 old[kColumns / 8];
        KDTREE_UNROLL
        for (int n = 0; n < kColumns / 8; ++n) old[n] = first ? make_float2(0, 0) : at[n * 4];
        KDTREE_UNROLL
        for (int n = 0; n < kColumns / 8; ++n)
          at[n * 4] = make_float2(fmaf(old[n].x, old_factor, sums[m][n][2 * half] * new_factor),
                                  fmaf(old[n].y, old_factor, sums[m][n][2 * half + 1] * new_factor));
      }
    }
    KDTREE_UNROLL
    for (int n = 0; n < kColumns / 8; ++n) {
      KDTREE_UNROLL
      for (int i = 0; i < 4; ++i) sums[m][n][i] = 0;
    }
  }
}

// Grid: groups of the slice, parts, the last first.
template <int kRows, bool kAhead>
__global__ void __launch_bounds__(kThreads, 1) mla_bf16_kernel(MlaAttentionBf16Args a, Plan plan) {
  using Shape = Shape<kRows, kAhead>;
  constexpr int kStages = Shape::kStages;
  KDTREE_DYNAMIC_SHARED(tiles);
  unsigned char* const meetings = tiles + kStages * kTileBytes;
  Shared& shared = *reinterpret_cast<Shared*>(meetings + Shape::kMeetings * Shape::kMeetingBytes);
  const Work& work = shared.work;
  const int part = plan.parts - 1 - static_cast<int>(blockIdx.y);  // chunks grow with the position: the longest first
  if (threadIdx.x == 0) shared.work = Work(a, plan, plan.first + static_cast<int>(blockIdx.x), part);
  __syncthreads();
  if (work.turns == 0) return;

  const char* const layer = static_cast<const char*>(a.cache.base) + a.layer * a.cache.layer_stride;
  const auto tile = [=](int turn) { return tiles + turn % kStages * kTileBytes; };
  const auto meeting = [=](int turn) {
    return Meeting<Shape>{meetings + turn % Shape::kMeetings * Shape::kMeetingBytes};
  };
  int64_t offsets[kStages];
  KDTREE_UNROLL
  for (int turn = 0; turn < kStages; ++turn) offsets[turn] = work.key_offset(a, turn, copied_key());
  KDTREE_UNROLL
  for (int turn = 0; turn < kStages - 1; ++turn) copy_tile(layer, offsets[turn], tile(turn));
  const auto copy_later = [&](int64_t offset) {
    if (Thread::again().lane % 8 == 0) shared.offsets[copied_key()] = offset;
  };
  copy_later(offsets[kStages - 1]);

  typename Shape::Query query;
  load_query<Shape>(a, work, query);
  typename Shape::Sums sums = {};
  if (threadIdx.x < kRows) shared.chunk[threadIdx.x] = RowState();
  float scores[8];
  if (kAhead) wait_copies<kStages - 2>();
  __syncthreads();
  if (kAhead && !work.empty(0)) multiply_keys(query, tile(0), meeting(0), scores);
  for (int turn = 0; turn < work.turns; ++turn) {
    // Looked up while others are still at the turn before.
    const bool empty = work.empty(turn), follows = kAhead && turn + 1 < work.turns && !work.empty(turn + 1);
    const int64_t offset = shared.offsets[copied_key()];
    wait_copies<kStages - 2 - kAhead>();
    __syncthreads();  // the tile is there, kAhead: the next; and nobody looks at the one before
    copy_tile(layer, offset, tile(turn + kStages - 1));
    bool moved = false;
    if (kAhead) {
      KDTREE_UNROLL_BY(1)
      for (int i = 0; i < 2; ++i) {
        if (i == Thread::again().warp / kQuarters) {
          if (!empty) moved = weigh(a, turn, meeting(turn), scores, &shared);
          copy_later(work.key_offset(a, turn + kStages, copied_key()));
        } else if (follows) {
          multiply_keys(query, tile(turn + 1), meeting(turn + 1), scores);
        }
      }
    } else {
      if (!empty) multiply_keys(query, tile(turn), meeting(turn), scores);
      __syncthreads();
      copy_later(work.key_offset(a, turn + kStages, copied_key()));
      if (!empty) moved = weigh(a, turn, meeting(turn), scores, &shared);
    }
    moved = __syncthreads_or(moved);
    if (!empty) {
      if (moved) multiply_rows(shared.factors[0], sums);
      const int node = work.node(turn);
      if (kRows == 16 || node < 0 || work.node_bits == 0)
        multiply_values<true>(tile(turn), meeting(turn), work, node, sums);
      else
        multiply_values<false>(tile(turn), meeting(turn), work, node, sums);
    }

    const int chunk = work.chunk(turn);
    if (turn + 1 == work.turns || work.chunk(turn + 1) != chunk) {
      __syncthreads();  // all have read the factors
      close_chunk<Shape>(a, plan, part, chunk, &shared, sums);
    }
  }
}

constexpr int kJoinThreads = kLatent / 4;
constexpr int kJoinedAtOnce = 8;  // parts that are on their way from memory together

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
  const int local = static_cast<int>(blockIdx.x), group = plan.first + local / plan.rows;
  const int request = group / plan.groups, row = group % plan.groups * plan.rows + local % plan.rows;
  const int node = row / a.heads, head = row % a.heads;
  if (node >= a.rows.width) return;
  const Partials partials(a.workspace, plan);
  const int64_t first = static_cast<int64_t>(local) * plan.parts;
  const int parts = plan.parts_of(keys_of(a, request, node));
  JoinedSum all{-INFINITY, 0, make_float4(0, 0, 0, 0)}, span = all;
  for (int begin = 0; begin < parts; begin += kJoinedAtOnce) {
    JoinedSum next[kJoinedAtOnce];
    KDTREE_UNROLL
    for (int i = 0; i < kJoinedAtOnce; ++i) {
      const int64_t at = first + min(begin + i, parts - 1);
      next[i] = {partials.peaks[at], partials.totals[at],
                 reinterpret_cast<const float4*>(partials.values + at * kLatent)[threadIdx.x]};
    }
    KDTREE_UNROLL
    for (int i = 0; i < kJoinedAtOnce; ++i) {
      const int part = begin + i;
      if (part >= parts) break;
      if (plan.part_begin(part) % kSpan == 0)
        span = next[i];
      else
        span.add(next[i]);
      if (part + 1 == parts || plan.part_begin(part + 1) % kSpan == 0) {
        if (plan.part_begin(part) < kSpan)
          all = span;
        else
          all.add(span);
      }
    }
  }
  const int64_t place = (static_cast<int64_t>(request) * a.rows.width + node) * a.heads + head;
  if (threadIdx.x == 0 && a.lse != nullptr)
    a.lse[place] = all.total == 0 ? -INFINITY : (all.peak + log2f(all.total)) * 0.6931471805599453f;
  const float total = all.total == 0 ? 1.0f : all.total;
  *reinterpret_cast<uint2*>(a.out + place * kLatent + threadIdx.x * 4) = make_uint2(
      narrow_pair(all.values.x / total, all.values.y / total), narrow_pair(all.values.z / total, all.values.w / total));
}

// blocks: that run at a time; 0: as many as the current device has multiprocessors.
kdtree_status plan_pass(int64_t requests, int width, int heads, int longest, int blocks, size_t workspace, Plan* pass) {
  if (blocks <= 0) {
    int device = 0;
    KDTREE_RETURN_IF_FAILED(check_cuda(cudaGetDevice(&device), "cudaGetDevice"));
    KDTREE_RETURN_IF_FAILED(
        check_cuda(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device), "multiprocessors"));
  }
  Plan plan{};
  const int64_t rows = static_cast<int64_t>(width) * heads, large_groups = requests * ceil_div(rows, kMostRows);
  // Spans leave less to join; chunks fill the last of the blocks' rounds better.
  const int64_t spans = large_groups * std::max(longest / kSpan, 1);
  plan.spans = 5 * spans >= 4 * ceil_div(spans, blocks) * blocks;
  plan.parts = plan.parts_of(longest);
  if (!plan.spans && partial_bytes(kMostRows, plan.parts) > workspace) {
    plan.spans = true;
    plan.parts = plan.parts_of(longest);
  }
  plan.rows = large_groups * plan.parts >= blocks ? kMostRows : 16;
  plan.groups = static_cast<int>(ceil_div(rows, plan.rows));
  plan.slice = static_cast<int>(std::min<int64_t>(
      requests * plan.groups, static_cast<int64_t>(workspace / partial_bytes(plan.rows, plan.parts))));
  if (plan.slice > 0) {
    const int64_t groups = requests * plan.groups;
    plan.slice = static_cast<int>(ceil_div(groups, ceil_div(groups, plan.slice)));
  }
  *pass = plan;
  return KDTREE_OK;
}

template <int kRows, bool kAhead>
kdtree_status launch(const MlaAttentionBf16Args& a, Plan plan, cudaStream_t stream) {
  constexpr size_t kBytes = shared_bytes<Shape<kRows, kAhead>>();
  KDTREE_RETURN_IF_FAILED(
      allow_shared_memory(reinterpret_cast<const void*>(mla_bf16_kernel<kRows, kAhead>), "mla_attention_bf16", kBytes));
  const int groups = a.rows.requests * plan.groups;
  for (; plan.first < groups; plan.first += plan.slice) {
    const unsigned now = static_cast<unsigned>(std::min(plan.slice, groups - plan.first));
    KDTREE_LAUNCH((mla_bf16_kernel<kRows, kAhead>), dim3(now, static_cast<unsigned>(plan.parts)), dim3(kThreads),
                  kBytes, stream, a, plan);
    KDTREE_RETURN_IF_FAILED(check_launch("mla_bf16_kernel"));
    KDTREE_LAUNCH(mla_bf16_join_kernel, dim3(now * kRows), dim3(kJoinThreads), 0, stream, a, plan);
    KDTREE_RETURN_IF_FAILED(check_launch("mla_bf16_join_kernel"));
  }
  return KDTREE_OK;
}

}  // namespace
}  // namespace mla_bf16

size_t mla_attention_bf16_workspace(int requests, int width, int heads, int longest, int blocks) {
  using namespace mla_bf16;
  Plan plan{};
  if (plan_pass(requests, width, heads, longest, blocks, kMostWorkspace, &plan) != KDTREE_OK) return 0;
  return partial_bytes(plan.rows, plan.parts) * static_cast<size_t>(std::max(plan.slice, 1));
}

kdtree_status mla_attention_bf16(const MlaAttentionBf16Args& a, cudaStream_t stream) {
  using namespace mla_bf16;
  Arguments arguments("mla_attention_bf16");
  arguments.range("requests", a.rows.requests, 1, 65535)
      .range("width", a.rows.width, 1, 65535)
      .range("longest", a.longest, 1, INT32_MAX - 2 * kSpan);
  if (arguments.failed()) return arguments.status();
  if (a.heads != 16 && a.heads != 32 && a.heads != 64 && a.heads != 128)
    return fail(KDTREE_SIZE, "mla_attention_bf16: heads is %d, it must be 16, 32, 64 or 128", a.heads);
  Plan plan{};
  KDTREE_RETURN_IF_FAILED(
      plan_pass(a.rows.requests, a.rows.width, a.heads, a.longest, a.blocks, a.workspace_size, &plan));
  arguments.range("head rows", static_cast<int64_t>(a.rows.requests) * plan.groups * plan.rows, 1, INT32_MAX)
      .range("parts", plan.parts, 1, 65535)
      .range("row_bytes", a.cache.row_bytes, kRowBytes, kRowBytes)
      .array("cache", a.cache.base, 16)
      .array("q_latent", a.q_latent, 4)
      .array("q_rope", a.q_rope, 4)
      .array("out", a.out, 8)
      .workspace(a.workspace, a.workspace_size, partial_bytes(plan.rows, plan.parts));
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
  const bool ahead = allowed >= std::max(shared_bytes<Shape<64, true>>(), shared_bytes<Shape<16, true>>());
  if (plan.rows == 16) return ahead ? launch<16, true>(a, plan, stream) : launch<16, false>(a, plan, stream);
  return ahead ? launch<64, true>(a, plan, stream) : launch<64, false>(a, plan, stream);
}

}  // namespace kdtree
