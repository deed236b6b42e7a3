// MLA attention in the absorbed form over the latent cache, bf16, on mma.sync; where there is wgmma,
// mla_attention_wgmma.cu serves. attention.h says what, mla_bf16_plan.h how a pass is cut, mla_bf16_block.h and
// mla_bf16_tile.h what a block does, mla_fp8_tile.h how tiles are made of an fp8 cache. mla_attention_bf16.md: what
// bounds it, what was tried.
//
// A block takes 64 head rows - 64 heads of one node or, with fewer heads, all heads of several - or, where that would
// leave multiprocessors idle, 16. It takes one chunk of keys (few rows) or one span (many), and joins the chunks of a
// span just as the joining kernel would. Neither changes a bit.
//
// Tiles that lie wholly in the prefix serve all rows of a block. From there on each node has tiles of its own, the end
// of the prefix and its path, where plain decoding would have found these keys; only its rows enter their products.

#include <algorithm>

#include "kernels/attention.h"
#include "kernels/mla_fp8_tile.h"
#include "kernels/mla_wgmma.h"

namespace kdtree {
namespace mla_bf16 {
namespace {

constexpr size_t kMostWorkspace = size_t{384} << 20;

// Grid: groups of the slice, parts, the last first.
template <int kRows, bool kAhead, bool kFp8>
__global__ void __launch_bounds__(kThreads, 1) mla_bf16_kernel(MlaAttentionBf16Args a, Plan plan) {
  if (kAhead && !kLargeShared) return;
  using Shape = Shape<kRows, kAhead, kFp8>;
  constexpr int kStages = Shape::kStages, kCodeStages = Shape::kCodeStages;
  KDTREE_DYNAMIC_SHARED(tiles);
  unsigned char* const meetings = tiles + Shape::kKeyBytes;
  constexpr int kMeetingsBytes = Shape::kTurns * (Shape::kMeetingBytes + Shape::kWeightBytes);
  Shared<Shape>& shared = *reinterpret_cast<Shared<Shape>*>(meetings + kMeetingsBytes);
  const Work& work = shared.work;
  const int part = plan.parts - 1 - static_cast<int>(blockIdx.y);  // chunks grow with the position: the longest first
  if (threadIdx.x == 0) shared.work = Work(a, plan, plan.first + static_cast<int>(blockIdx.x), part);
  __syncthreads();
  if (work.turns == 0) return;

  const char* const base = static_cast<const char*>(a.cache.base) + a.layer * a.cache.layer_stride +
                           (a.cache.block_size == 0 ? work.request * a.cache.request_stride : 0);
  const auto tile = [=](unsigned turn) { return tiles + turn % kStages * kTileBytes; };
  const auto meeting = [=](unsigned turn) {
    const unsigned slot = turn % Shape::kTurns;
    unsigned char* const sums = meetings + slot * Shape::kMeetingBytes;
    return Meeting<Shape>{sums,
                          kAhead ? meetings + Shape::kTurns * Shape::kMeetingBytes + slot * Shape::kWeightBytes : sums};
  };
  const auto copy = [&](int turn) {  // zeros behind the last turn
    const int key = copied_key<Shape>();
    if (key >= 0) {
      KDTREE_UNROLL
      for (int i = 0; i < kKeys; i += kKeys / Shape::kCopies)
        copy_row(base, a.cache.row_stride, shared.row(turn, key + i), tile(turn), key + i);
    }
    commit_copies();
  };
  const auto code_stage = [=](int turn) {
    return tiles + kStages * kTileBytes + static_cast<unsigned>(turn) % max(kCodeStages, 1) * kFp8StageBytes;
  };
  // Fp8: once the codes of a turn were converted, those that take their place, and rope channels. Turns before the
  // first one ask for what the first ones need.
  const auto copy_behind = [&](int turn) {
    if (const int rope = turn + Shape::kRopeAhead; rope >= 0)
      copy_rope(base, a.cache.row_stride, shared, rope, tile(rope));
    commit_copies();
    copy_codes(base, a.cache.row_stride, shared, turn + kCodeStages, code_stage(turn + kCodeStages));
    commit_copies();
  };
  const auto convert = [&](int turn) {
    wait_copies<2 * (kCodeStages - 1)>();
    convert_codes(code_stage(turn), tile(turn));
    copy_behind(turn);
  };

  // The queries come by way of the tiles that are needed last.
  constexpr int kQueryTiles = (kRows + kKeys - 1) / kKeys, kFirstTiles = kAhead ? kStages - kQueryTiles : 0;
  static_assert(kQueryTiles * kTileBytes <= Shape::kKeyBytes + kMeetingsBytes);
  unsigned char* const query_tiles = tiles + max(kStages - kQueryTiles, 0) * kTileBytes;
  copy_query<Shape>(a, work, query_tiles);
  look_up(a, 0, &shared);
  if (Shape::kLookedUp == 1) look_up(a, 1, &shared);
  if (threadIdx.x < kRows) {
    KDTREE_UNROLL
    for (int i = 0; i < Shape::kTurns; ++i) shared.chunks[i][threadIdx.x] = RowState();
  }
  __syncthreads();
  if constexpr (!kFp8) {
    for (int turn = 0; turn < kFirstTiles; ++turn) copy(turn);
    wait_copies<kFirstTiles>();
  } else if constexpr (kAhead) {
    for (int turn = -kCodeStages; turn < 0; ++turn) copy_behind(turn);
    wait_copies<2 * kCodeStages>();
  } else {
    wait_copies<0>();
  }
  __syncthreads();
  typename Shape::Query query;
  load_query<Shape>(query_tiles, query);
  __syncthreads();
  if constexpr (!kFp8)
    for (int turn = kFirstTiles; turn < (kAhead ? kStages : 1); ++turn) copy(turn);
  else if constexpr (kAhead)
    convert(0);
  else
    for (int turn = -kCodeStages; turn < 0; ++turn) copy_behind(turn);
  typename Shape::Sums sums = {};

  const auto add_values = [&](int number, int flags, bool moved) {
    if ((flags & Turn::kEmpty) != 0) return;
    if (moved) multiply_rows(shared.factors[static_cast<unsigned>(number) % Shape::kTurns], sums);
    if ((flags & Turn::kAll) != 0)
      multiply_values<true>(tile(number), meeting(number), work, 0, sums);
    else
      multiply_values<false>(tile(number), meeting(number), work, shared.turn(number).node, sums);
  };

  if constexpr (kAhead) {
    bool moved = false;
    // Flags of the last turn, of this one and of the next.
    constexpr int kNow = Turn::kFlagBits, kNext = 2 * kNow;
    int turn = -1, flags = Turn::kEmpty | Turn::kEmpty << kNow | shared.turn(0).flags << kNext;
    do {
      bool closes = false;
      do {
        // The tiles of the first turns were all asked for at once.
        if (kFp8)
          wait_copies<2 * Shape::kRopeAhead + 1>();
        else if (turn >= 2)
          wait_copies<kStages - 4>();
        else if (turn == 1)
          wait_copies<kStages - 3>();
        else if (turn == 0)
          wait_copies<kStages - 2>();
        else
          wait_copies<kStages - 1>();
        // The next turn's tile is there, and what this turn's predecessor left; what that looked at is free.
        const bool any_moved = __syncthreads_or(moved);
        moved = false;
        KDTREE_UNROLL_BY(1)
        for (int first = 1; first >= 0; --first) {
          // Of two warps that share tensor cores one multiplies values while the other weighs.
          if ((Thread::again().warp < kQuarters) == (first != 0)) {
            if (!kFp8 && turn >= 2) copy(turn + kStages - 2);
            add_values(turn - 1, flags, any_moved);
            if constexpr (kFp8) convert(turn + 2);
            continue;
          }
          float own[8];
          const bool weighs = Thread::again().warp < Shape::kGroups;
          if ((flags & (Turn::kWhole << kNow | Turn::kEmpty << kNext)) == Turn::kWhole << kNow && weighs) {
            auto weighing = begin_weighing<true>(a, turn, flags >> kNow, meeting(turn), shared);
            multiply_keys(query, tile(turn + 1), meeting(turn + 1), own, [&](int i) {
              constexpr int kAtOnce = static_cast<int>(ceil_div(weighing.kCount, kScoreSteps<Shape>));
              KDTREE_UNROLL
              for (int j = i * kAtOnce; j < (i + 1) * kAtOnce; ++j)
                if (j < weighing.kCount) weighing.step(j);
            });
            moved = end_weighing(weighing, turn, flags >> kNow, &shared);
          } else {
            if ((flags & Turn::kEmpty << kNext) == 0)
              multiply_keys(query, tile(turn + 1), meeting(turn + 1), own, [](int) {});
            if ((flags & Turn::kEmpty << kNow) == 0 && weighs) {
              auto weighing = begin_weighing<false>(a, turn, flags >> kNow, meeting(turn), shared);
              weighing.all();
              moved = end_weighing(weighing, turn, flags >> kNow, &shared);
            }
          }
        }
        if ((turn + Shape::kRowsAhead) % Shape::kLookedUp == 0) look_up(a, turn + Shape::kRowsAhead, &shared);
        closes = (flags & Turn::kCloses) != 0;
        flags = flags >> Turn::kFlagBits | shared.turn(turn + 2).flags << kNext;
        ++turn;
      } while (!closes);
      close_chunk<Shape>(a, plan, part, shared.turn(turn - 2), &shared, sums);
    } while (turn <= work.turns);
  } else {
    for (int turn = 0; turn < work.turns; ++turn) {
      if constexpr (kFp8) {
        wait_copies<1>();
        convert_codes(code_stage(turn), tile(turn));
      } else {
        wait_copies<kStages - 2>();
      }
      __syncthreads();  // the tile is there, and nobody looks at the one before
      if (!kFp8) copy(turn + 1);
      look_up(a, turn + 2, &shared);
      // Flags are read again rather than kept.
      const auto empty = [&] { return (shared.turn(turn).flags & Turn::kEmpty) != 0; };
      float own[8];
      if (!empty()) multiply_keys(query, tile(turn), meeting(turn), own, [](int) {});
      __syncthreads();
      if constexpr (kFp8) copy_behind(turn);
      bool moved = false;
      if (!empty() && Thread::again().warp < Shape::kGroups) {
        auto weighing = begin_weighing<false>(a, turn, 0, meeting(turn), shared);
        if (Shape::kOthers > 0) {
          KDTREE_UNROLL
          for (int i = 0; i < 8; ++i) weighing.scores[i] = own[i];
        }
        weighing.all();
        moved = end_weighing(weighing, turn, 0, &shared);
      }
      moved = __syncthreads_or(moved);
      add_values(turn, shared.turn(turn).flags, moved);
      if ((shared.turn(turn).flags & Turn::kCloses) != 0) {
        __syncthreads();  // all have read the factors
        close_chunk<Shape>(a, plan, part, shared.turn(turn), &shared, sums);
      }
    }
  }
}

constexpr int kJoinWarps = 2;     // of a block: one for each row's factors; of the eight that have the columns of a row
constexpr int kJoinedAtOnce = 8;  // parts that are on their way from memory together

// How the next 32 parts of two rows are joined: a span's sum so far by `spans[i].x` and part i by `spans[i].y` make the
// span's sum; where the span ends, all sums before by `alls[i].x` and the span's by `alls[i].y` make all.
struct JoinFactors {
  float2 spans[kWarp][2], alls[kWarp][2];
  float totals[kWarp][2];
};
static_assert(chunk_begin(kWarp) % kSpan == 0, "32 parts are whole spans");

// For row `row` of two, by a warp, a part a lane. starts: bits of the parts that begin a span. state: peak and total.
// before: the peak of all parts before; returns that of all. Peaks do not depend on the order in which they are
// compared, so all are found at once.
__device__ float find_factors(unsigned starts, float2 state, int row, float before, JoinFactors* factors) {
  const int lane = lane_id(), start = 31 - __clz(static_cast<int>(starts & ((2u << lane) - 1u)));
  const auto scan = [=](float peak, int first) {
    for (int step = 1; step < kWarp; step *= 2) {
      const float below = __shfl_up_sync(kAllLanes, peak, static_cast<unsigned>(step));
      if (lane - step >= first) peak = fmaxf(peak, below);
    }
    return peak;
  };
  const float span = scan(state.x, start), all = fmaxf(scan(state.x, 0), before);
  float span_before = __shfl_up_sync(kAllLanes, span, 1u), all_before = __shfl_up_sync(kAllLanes, all, 1u);
  if (lane == start) span_before = -INFINITY;
  if (lane == 0) all_before = before;
  all_before = __shfl_sync(kAllLanes, all_before, start);
  factors->spans[lane][row] = make_float2(rescale(span_before, span), rescale(state.x, span));
  factors->alls[lane][row] = make_float2(rescale(all_before, all), rescale(span, all));
  factors->totals[lane][row] = state.y;
  return __shfl_sync(kAllLanes, all, kWarp - 1);
}

__device__ inline float joined(float2 factors, float before, float next) {
  return fmaf(before, factors.x, next * factors.y);
}

// Two rows: a total and two columns of each.
struct JoinedSum {
  float totals[2];
  float values[4];

  __device__ void add(const float2 (&factors)[2], const float (&next_totals)[2], const float (&next)[4]) {
    KDTREE_UNROLL
    for (int row = 0; row < 2; ++row) totals[row] = joined(factors[row], totals[row], next_totals[row]);
    KDTREE_UNROLL
    for (int i = 0; i < 4; ++i) values[i] = joined(factors[i / 2], values[i], next[i]);
  }
};

// Grid: pairs of head rows of the slice, 8 apart, and shares of the columns. Joins the parts of two head rows: those of
// a span, then the spans, in their order.
__global__ void __launch_bounds__(kJoinWarps* kWarp) mla_bf16_join_kernel(MlaAttentionBf16Args a, Plan plan) {
  __shared__ JoinFactors factors;
  const int pairs = plan.rows / 2, local = static_cast<int>(blockIdx.x) / pairs;
  const int pair = static_cast<int>(blockIdx.x) % pairs, group = plan.first + local;
  const int request = group / plan.groups, first_row = pair / 8 * 16 + pair % 8;
  const int row = group % plan.groups * plan.rows + first_row, node = row / a.heads, head = row % a.heads;
  if (node >= a.rows.width) return;
  const Partials partials(a.workspace, plan);
  const int lane = lane_id(), own = warp_id(), warp = static_cast<int>(blockIdx.y) * kJoinWarps + own;
  const int parts = plan.parts_of(keys_of(a, request, node)), part_values = plan.rows * (kLatent / 4);
  const int64_t first = static_cast<int64_t>(local) * plan.parts;
  const float* const states = reinterpret_cast<const float*>(partials.states + first * pairs + pair) + own;
  const float4* const values = partials.values + first * part_values +
                               ((warp * (plan.rows / 16) + pair / 8) * (kColumns / 8) + lane / 4) * kWarp +
                               pair % 8 * 4 + lane % 4;
  const auto load = [=](float4(&next)[kJoinedAtOnce], int begin) {
    KDTREE_UNROLL
    for (int i = 0; i < kJoinedAtOnce; ++i)
      next[i] = values[static_cast<int64_t>(max(min(begin + i, parts - 1), 0)) * part_values];
  };
  JoinedSum all = {}, span = {};
  float peak = -INFINITY;
  float4 next[kJoinedAtOnce];
  if (parts > 0) load(next, 0);
  for (int begin = 0; begin < parts; begin += kWarp) {
    const int part = begin + lane;
    float2 state = make_float2(-INFINITY, 0);
    if (part < parts) state = make_float2(states[part * pairs * 4], states[part * pairs * 4 + 2]);
    const unsigned starts = __ballot_sync(kAllLanes, plan.part_begin(part) % kSpan == 0);
    const unsigned ends = starts >> 1 | 1u << (kWarp - 1) | 1u << min(parts - 1 - begin, kWarp - 1);
    __syncthreads();  // the factors before have been used
    peak = find_factors(starts, state, own, peak, &factors);
    __syncthreads();
    const int count = min(parts - begin, kWarp);
    for (int done = 0; done < count; done += kJoinedAtOnce) {
      float4 now[kJoinedAtOnce];
      KDTREE_UNROLL
      for (int i = 0; i < kJoinedAtOnce; ++i) now[i] = next[i];
      load(next, begin + done + kJoinedAtOnce);
      KDTREE_UNROLL
      for (int i = 0; i < kJoinedAtOnce; ++i) {
        const int at = done + i;
        if (at >= count) break;
        span.add(factors.spans[at], factors.totals[at], {now[i].x, now[i].y, now[i].z, now[i].w});
        if ((ends >> at & 1) != 0) {
          all.add(factors.alls[at], span.totals, span.values);
          span = {};
        }
      }
    }
  }
  KDTREE_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int64_t to = (static_cast<int64_t>(request) * a.rows.width + node) * a.heads + head + 8 * i;
    const float total = all.totals[i], divisor = total == 0 ? 1.0f : total;
    if (warp == i && lane == 0 && a.lse != nullptr)
      a.lse[to] = total == 0 ? -INFINITY : (peak + log2f(total)) * 0.6931471805599453f;
    *reinterpret_cast<uint32_t*>(a.out + to * kLatent + warp * kColumns + lane * 2) =
        narrow_pair(all.values[2 * i] / divisor, all.values[2 * i + 1] / divisor);
  }
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

template <int kRows, bool kAhead, bool kFp8>
kdtree_status launch(const MlaAttentionBf16Args& a, Plan plan, cudaStream_t stream) {
  constexpr size_t kBytes = shared_bytes<Shape<kRows, kAhead, kFp8>>();
  KDTREE_RETURN_IF_FAILED(allow_shared_memory(reinterpret_cast<const void*>(mla_bf16_kernel<kRows, kAhead, kFp8>),
                                              "mla_attention_bf16", kBytes));
  const int groups = a.rows.requests * plan.groups;
  for (; plan.first < groups; plan.first += plan.slice) {
    const unsigned now = static_cast<unsigned>(std::min(plan.slice, groups - plan.first));
    KDTREE_LAUNCH((mla_bf16_kernel<kRows, kAhead, kFp8>), dim3(now, static_cast<unsigned>(plan.parts)), dim3(kThreads),
                  kBytes, stream, a, plan);
    KDTREE_RETURN_IF_FAILED(check_launch("mla_bf16_kernel"));
    KDTREE_LAUNCH(mla_bf16_join_kernel, dim3(now * kRows / 2, kWarps / kJoinWarps), dim3(kJoinWarps * kWarp), 0, stream,
                  a, plan);
    KDTREE_RETURN_IF_FAILED(check_launch("mla_bf16_join_kernel"));
  }
  return KDTREE_OK;
}

template <bool kFp8>
kdtree_status launch(const MlaAttentionBf16Args& a, const Plan& plan, cudaStream_t stream) {
  const size_t allowed = a.shared_memory > 0 ? static_cast<size_t>(a.shared_memory) : shared_memory_optin();
  const bool ahead = allowed >= std::max(most_shared_bytes<64, true>(), most_shared_bytes<16, true>());
  if (plan.rows == 16)
    return ahead ? launch<16, true, kFp8>(a, plan, stream) : launch<16, false, kFp8>(a, plan, stream);
  return ahead ? launch<64, true, kFp8>(a, plan, stream) : launch<64, false, kFp8>(a, plan, stream);
}

}  // namespace
}  // namespace mla_bf16

size_t mla_attention_bf16_workspace(int requests, int width, int heads, int longest, int blocks) {
  using namespace mla_bf16;
  Plan plan{};
  if (plan_pass(requests, width, heads, std::max(longest, 1), blocks, kMostWorkspace, &plan) != KDTREE_OK) return 0;
  // Less than 64 rows' worth would have the pass cut otherwise than is planned here.
  const size_t bytes = std::max(partial_bytes(plan.rows, plan.parts) * static_cast<size_t>(std::max(plan.slice, 1)),
                                partial_bytes(kMostRows, plan.parts));
  if (!mla_wgmma::available()) return bytes;
  return std::max(bytes, mla_wgmma::workspace(requests, width, heads, std::max(longest, 1), blocks, kMostWorkspace));
}

AttentionPath mla_attention_bf16_path(const MlaAttentionBf16Args& a) {
  constexpr int kNeeded = 227 * 1024;
  const bool wgmma = !a.portable && a.cache_rows == CacheRows::kPlain && a.scale > 0 &&
                     (a.shared_memory <= 0 || a.shared_memory >= kNeeded);
  return wgmma && mla_wgmma::available() ? AttentionPath::kWgmma : AttentionPath::kPortable;
}

kdtree_status mla_attention_bf16(const MlaAttentionBf16Args& a, cudaStream_t stream) {
  using namespace mla_bf16;
  Arguments arguments("mla_attention_bf16");
  arguments.range("requests", a.rows.requests, 1, 65535)
      .range("width", a.rows.width, 1, INT32_MAX / 128)
      .range("longest", a.longest, 1, INT32_MAX - 2 * kSpan);
  if (arguments.failed()) return arguments.status();
  if (a.heads != 16 && a.heads != 32 && a.heads != 64 && a.heads != 128)
    return fail(KDTREE_SIZE, "mla_attention_bf16: heads is %d, it must be 16, 32, 64 or 128", a.heads);
  const bool fp8 = a.cache_rows == CacheRows::kFp8;
  const int row_bytes = fp8 ? Fp8Row::kBytes : kRowBytes;
  arguments
      .range("head rows", static_cast<int64_t>(a.rows.requests) * ceil_div(int64_t{a.rows.width} * a.heads, kMostRows),
             1, INT32_MAX / kMostRows)
      .range("row_bytes", a.cache.row_bytes, row_bytes, row_bytes)
      .array("cache", a.cache.base, 16)
      .array("q_latent", a.q_latent, 4)
      .array("q_rope", a.q_rope, 4)
      .array("out", a.out, 8);
  if (arguments.failed()) return arguments.status();
  for (const int64_t stride : {a.cache.row_stride, a.cache.request_stride, a.cache.layer_stride})
    if (stride % 16 != 0)
      return fail(KDTREE_ALIGNMENT, "mla_attention_bf16: a stride of the cache is %lld bytes, no multiple of 16",
                  static_cast<long long>(stride));
  for (const int64_t stride : {a.q_latent_stride, a.q_latent_head, a.q_rope_stride, a.q_rope_head})
    if (stride % 2 != 0)
      return fail(KDTREE_ALIGNMENT, "mla_attention_bf16: a stride of the queries is %lld elements, no multiple of 2",
                  static_cast<long long>(stride));
  if (mla_attention_bf16_path(a) == AttentionPath::kWgmma) return mla_wgmma::attention(a, stream);
  Plan plan{};
  KDTREE_RETURN_IF_FAILED(
      plan_pass(a.rows.requests, a.rows.width, a.heads, a.longest, a.blocks, a.workspace_size, &plan));
  arguments.range("parts", plan.parts, 1, 65535)
      .workspace(a.workspace, a.workspace_size, partial_bytes(plan.rows, plan.parts));
  if (arguments.failed()) return arguments.status();
  return fp8 ? launch<true>(a, plan, stream) : launch<false>(a, plan, stream);
}

}  // namespace kdtree
