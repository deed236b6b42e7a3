// The experts of a row, one warp a row. reference/moe.py `route`.
//
// Biased scores lie in shared memory, first as their bits, then as keys: whole numbers in the order of choosing, so
// that the best of what is left is one maximum and the lowest id that has it.

#include "common/behind.h"
#include "common/block.h"
#include "kernels/layers.h"
#include "kernels/swiglu.h"

namespace kdtree {
namespace {

constexpr int kMostExperts = 512;
constexpr int kWarps = 4;
constexpr unsigned kTaken = 0;

// Greater numbers have greater keys, both zeros the same one, a NaN the least; all are above kTaken.
__device__ unsigned key_of(float value) {
  if (value != value) return 1;
  const unsigned bits = __float_as_uint(value == 0 ? 0.0f : value);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// The index of the best of keys[0..count-1] that is left, ties to the lowest; it is taken. By the whole warp, lane i
// reads and writes keys i, i + 32, ... alone.
__device__ int take_best(unsigned* keys, int count) {
  unsigned best = kTaken;
  int place = count;
  for (int i = lane_id(); i < count; i += kWarp) {
    if (keys[i] > best) {
      best = keys[i];
      place = i;
    }
  }
  const unsigned most = __reduce_max_sync(kAllLanes, best);
  const int found = __reduce_min_sync(kAllLanes, best == most ? place : count);
  if (lane_id() == found % kWarp) keys[found] = kTaken;
  return found;
}

// Sum of the two best of `size` numbers given as bits, of one if there is one; NaN if one is.
__device__ float two_best(const unsigned* bits, int size) {
  float first = __uint_as_float(bits[0]), second = -INFINITY;
  bool broken = first != first;
  for (int i = 1; i < size; ++i) {
    const float value = __uint_as_float(bits[i]);
    broken = broken || value != value;
    second = value > first ? first : value > second ? value : second;
    first = value > first ? value : first;
  }
  if (broken) return NAN;
  return size == 1 ? first : second + first;
}

__global__ void __launch_bounds__(kWarps* kWarp) router_kernel(RouterArgs a) {
  start_behind();
  __shared__ unsigned key_rows[kWarps][kMostExperts];
  __shared__ unsigned group_rows[kWarps][kMostExperts];
  const int lane = lane_id();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp_id();
  if (row >= a.rows) return;
  unsigned* const keys = key_rows[warp_id()];
  unsigned* const groups = group_rows[warp_id()];
  const float* const logits = a.logits + row * a.experts;
  const int group_size = a.experts / a.groups;

  for (int e = lane; e < a.experts; e += kWarp) {
    const float score = sigmoid(logits[e]);
    keys[e] = __float_as_uint(score + a.bias[e]);
    if (a.scores != nullptr) a.scores[row * a.experts + e] = score;
  }
  __syncwarp();
  const bool limited = a.kept_groups < a.groups;
  if (limited) {
    for (int g = lane; g < a.groups; g += kWarp) groups[g] = key_of(two_best(keys + g * group_size, group_size));
    for (int i = 0; i < a.kept_groups; ++i) take_best(groups, a.groups);
    __syncwarp();
  }
  for (int e = lane; e < a.experts; e += kWarp)
    keys[e] = key_of(!limited || groups[e / group_size] == kTaken ? __uint_as_float(keys[e]) : -INFINITY);

  // Lane i gets choice i.
  int id = 0;
  for (int i = 0; i < a.chosen; ++i) {
    const int best = take_best(keys, a.experts);
    if (lane == i) id = best;
  }
  const float score = lane < a.chosen ? sigmoid(logits[id]) : 0.0f;
  float weight = score;
  if (a.normalise) {
    float total = __shfl_sync(kAllLanes, score, 0);
    for (int i = 1; i < a.chosen; ++i) total += __shfl_sync(kAllLanes, score, i);
    weight = score / (total + 1e-20f);
  }
  if (lane < a.chosen) {
    a.ids[row * a.chosen + lane] = id;
    a.weights[row * a.chosen + lane] = weight * a.scale;
  }
}

}  // namespace

kdtree_status router(const RouterArgs& a, cudaStream_t stream) {
  Arguments arguments("router");
  arguments.range("rows", a.rows, 1, 0x7fffffff)
      .range("experts", a.experts, 1, kMostExperts)
      .range("chosen", a.chosen, 1, a.experts < kWarp ? a.experts : kWarp)
      .range("groups", a.groups, 1, a.experts);
  if (!arguments.failed()) arguments.range("experts % groups", a.experts % a.groups, 0, 0);
  arguments.range("kept_groups", a.kept_groups, 1, a.groups)
      .array("logits", a.logits, sizeof(float))
      .array("bias", a.bias, sizeof(float))
      .array("scores", a.scores, sizeof(float), false)
      .array("ids", a.ids, sizeof(int32_t))
      .array("weights", a.weights, sizeof(float));
  KDTREE_RETURN_IF_FAILED(arguments.status());
  return launch_behind("router_kernel", router_kernel, dim3(static_cast<unsigned>(ceil_div(a.rows, kWarps))),
                       dim3(kWarps * kWarp), 0, stream, a);
}

}  // namespace kdtree
