// Grouped-query attention of a drafter's block over its context and itself, unmasked, computed in float32, of float32
// or bf16.
//
// A block takes one row and up to 4 of the query heads that share a key head; the keys are the context's, then the
// block's own. Its warps take 32 keys each in turns, a lane one key for the scores and then some columns of the values
// for the sums; what the warps found is joined in their order. So a sum's order follows from the place of a key alone.

#include "common/behind.h"
#include "kernels/attention.h"
#include "kernels/attention_tile.h"
#include "kernels/vector4.h"

namespace kdtree {
namespace {

constexpr int kWarps = 8;
constexpr int kHeads = 4;
constexpr int kMostDim = 256;

__device__ float of_head(float4 v, int head) { return head == 0 ? v.x : head == 1 ? v.y : head == 2 ? v.z : v.w; }

// kColumns: of 32 values, a lane's share.
template <typename T, int kColumns>
__global__ void __launch_bounds__(kWarps* kWarp, 1) gqa_attention_kernel(GqaAttentionArgs<T> a, bool vector) {
  constexpr int kDim = kColumns * kWarp;
  __shared__ float4 query[kHeads][kDim / 4];
  __shared__ float4 weights[kWarps][kWarp];  // of the 4 heads
  __shared__ float values[kWarps][kHeads][kDim], peaks[kWarps][kHeads], totals[kWarps][kHeads];
  start_behind();
  const int row = static_cast<int>(blockIdx.x), request = row / a.block_size;
  const int kv_head = static_cast<int>(blockIdx.y), group = a.heads / a.kv_heads;
  const int first = static_cast<int>(blockIdx.z) * kHeads, heads = min(kHeads, group - first);
  const int context = a.context_lengths[request], lane = lane_id(), warp = warp_id();
  if (context < 0) return;

  const int64_t first_value = static_cast<int64_t>(kv_head * group + first) * a.dim;
  const T* const own_query = a.q + row * a.q_stride + first_value;
  for (int i = static_cast<int>(threadIdx.x); i < kHeads * kDim; i += kWarps * kWarp) {
    const int head = i / kDim, column = i % kDim;
    const bool there = head < heads && column < a.dim;
    reinterpret_cast<float*>(query)[i] = there ? widen(own_query[head * a.dim + column]) : 0.0f;
  }
  __syncthreads();

  const int64_t pair = 2 * static_cast<int64_t>(a.kv_heads) * a.dim;  // keys and values of one position
  const T* const old = a.context + static_cast<int64_t>(request) * a.capacity * pair + kv_head * a.dim;
  const T* const own = a.block + static_cast<int64_t>(request) * a.block_size * a.block_stride + kv_head * a.dim;
  const auto key_at = [&](int position) {
    return position < context ? old + position * pair : own + (position - context) * a.block_stride;
  };
  const int count = context + a.block_size;
  const float scale = 1.0f / sqrtf(static_cast<float>(a.dim));
  float peak[kHeads], total[kHeads] = {}, sum[kHeads][kColumns] = {};
  for (int h = 0; h < kHeads; ++h) peak[h] = -INFINITY;
  for (int begin = warp * kWarp; begin < count; begin += kWarps * kWarp) {
    const bool there = begin + lane < count;
    const T* const key = key_at(there ? begin + lane : begin);
    float score[kHeads] = {};
    KDTREE_UNROLL_BY(4)
    for (int c = 0; c < a.dim; c += 4) {
      const float4 k = load4(key + c, a.dim - c, vector);
      KDTREE_UNROLL
      for (int h = 0; h < kHeads; ++h) {
        const float4 q = query[h][c / 4];
        score[h] = fmaf(k.w, q.w, fmaf(k.z, q.z, fmaf(k.y, q.y, fmaf(k.x, q.x, score[h]))));
      }
    }
    float weight[kHeads];
    KDTREE_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const float own_score = there ? score[h] * scale : -INFINITY;
      float most = fmaxf(own_score, peak[h]);  // leaves a NaN out, but its weight is NaN below
      for (int step = kWarp / 2; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
      weight[h] = own_score == -INFINITY ? 0.0f : expf(own_score - most);
      float all = weight[h];
      for (int step = kWarp / 2; step > 0; step /= 2) all += __shfl_xor_sync(kAllLanes, all, step);
      const float factor = rescale(peak[h], most);
      total[h] = fmaf(total[h], factor, all);
      peak[h] = most;
      KDTREE_UNROLL
      for (int j = 0; j < kColumns; ++j) sum[h][j] *= factor;
    }
    weights[warp][lane] = make_float4(weight[0], weight[1], weight[2], weight[3]);
    __syncwarp();
    const int keys = min(kWarp, count - begin);
    KDTREE_UNROLL_BY(4)
    for (int k = 0; k < keys; ++k) {
      const T* const value = key_at(begin + k) + static_cast<int64_t>(a.kv_heads) * a.dim;
      const float4 w = weights[warp][k];
      KDTREE_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        const float v = lane + j * kWarp < a.dim ? widen(value[lane + j * kWarp]) : 0.0f;
        KDTREE_UNROLL
        for (int h = 0; h < kHeads; ++h) sum[h][j] = fmaf(of_head(w, h), v, sum[h][j]);
      }
    }
    __syncwarp();
  }
  KDTREE_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    if (lane == 0) {
      peaks[warp][h] = peak[h];
      totals[warp][h] = total[h];
    }
    KDTREE_UNROLL
    for (int j = 0; j < kColumns; ++j) values[warp][h][lane + j * kWarp] = sum[h][j];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < heads * a.dim; i += kWarps * kWarp) {
    const int head = i / a.dim, column = i % a.dim;
    float most = -INFINITY, all = 0, value = 0;
    for (int w = 0; w < kWarps; ++w) {
      const Join join(most, peaks[w][head]);
      most = join.peak;
      all = join(all, totals[w][head]);
      value = join(value, values[w][head][column]);
    }
    a.out[static_cast<int64_t>(row) * a.heads * a.dim + first_value + i] = stored<T>(value / all);
  }
}

template <typename T>
kdtree_status attend_block(GqaAttentionArgs<T> a, cudaStream_t stream) {
  Arguments arguments("gqa_attention");
  arguments.range("requests", a.requests, 1, KDTREE_MAX_REQUESTS)
      .range("block_size", a.block_size, 1, KDTREE_MAX_DEPTH + 1)
      .range("kv_heads", a.kv_heads, 1, 65535)
      .range("heads", a.heads, a.kv_heads, INT32_MAX)
      .range("heads beyond a multiple of kv_heads", a.heads % a.kv_heads, 0, 0)
      .range("dim", a.dim, 1, kMostDim)
      .range("capacity", a.capacity, 0, INT32_MAX);
  const int64_t query = static_cast<int64_t>(a.heads) * a.dim, pair = 2 * static_cast<int64_t>(a.kv_heads) * a.dim;
  if (a.q_stride == 0) a.q_stride = query;
  if (a.block_stride == 0) a.block_stride = pair;
  arguments.range("q_stride", a.q_stride, query, INT64_MAX).range("block_stride", a.block_stride, pair, INT64_MAX);
  if (arguments.failed()) return arguments.status();
  const dim3 grid(static_cast<unsigned>(a.requests * a.block_size), static_cast<unsigned>(a.kv_heads),
                  static_cast<unsigned>(ceil_div(a.heads / a.kv_heads, kHeads)));
  const bool vector = fours<T>({a.context, a.block}, {a.dim, a.block_stride});
  const auto kernel = a.dim <= 64    ? gqa_attention_kernel<T, 2>
                      : a.dim <= 128 ? gqa_attention_kernel<T, 4>
                                     : gqa_attention_kernel<T, 8>;
  return launch_behind("gqa_attention_kernel", kernel, grid, dim3(kWarps * kWarp), 0, stream, a, vector);
}

}  // namespace

kdtree_status gqa_attention(const GqaAttentionArgs<float>& args, cudaStream_t stream) {
  return attend_block(args, stream);
}
kdtree_status gqa_attention(const GqaAttentionArgs<uint16_t>& args, cudaStream_t stream) {
  return attend_block(args, stream);
}

}  // namespace kdtree
