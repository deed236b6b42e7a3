#include <algorithm>
#include <cmath>
#include <vector>

#include "common/philox.h"
#include "kernels/stand_in.h"

namespace kdtree {
namespace {

constexpr int kThreads = 256;
constexpr uint32_t kNoiseStream = 1;  // third counter word, apart from sampling's 0

__device__ int golden_index(const StandIn& s, int prefix, int depth) { return prefix - s.prompt_length + 1 + depth; }

// 0 for the proposed token, then -8, -16 ... for the ids after it, cyclically.
__device__ void oracle_row(const StandIn& s, int index, int vocab, float* row) {
  const int token = s.golden[index];
  const bool wrong = index >= s.right;
  const int best = wrong ? (token + 1) % vocab : token;
  for (int v = threadIdx.x; v < vocab; v += blockDim.x) {
    const int behind = v >= best ? v - best : v - best + vocab;
    row[v] = wrong && v == token ? -INFINITY : -8.0f * static_cast<float>(behind);
  }
}

// The golden token at a random rank, the other ids in cyclic order from a random one.
__device__ void noisy_row(const StandIn& s, int index, int vocab, float* row) {
  const int token = s.golden[index];
  const PhiloxWords words = philox(s.seed, static_cast<uint32_t>(index), 0, kNoiseStream);
  const int ranks = min(s.max_rank, vocab - 1) + 1;
  const int rank = static_cast<int>(words.x[1] % static_cast<uint32_t>(ranks));
  const int first = static_cast<int>(words.x[2] % static_cast<uint32_t>(vocab));
  const double step = 4.0 / static_cast<double>(1u << words.x[3] % 4);
  const bool missing = (words.x[0] + 0.5) * 0x1p-32 < s.miss;
  const int own = token >= first ? token - first : token - first + vocab;
  for (int v = threadIdx.x; v < vocab; v += blockDim.x) {
    int place = v >= first ? v - first : v - first + vocab;
    if (v == token) {
      row[v] = missing ? -INFINITY : static_cast<float>(-rank * step);
      continue;
    }
    if (place > own) --place;    // without the golden token
    if (place >= rank) ++place;  // with it at its rank
    row[v] = static_cast<float>(-place * step);
  }
}

__device__ int find_list(const StandIn& s, int position) {
  int low = 0, high = s.list_count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (s.positions[middle] < position)
      low = middle + 1;
    else
      high = middle;
  }
  return low < s.list_count && s.positions[low] == position ? low : -1;
}

__device__ void replay_row(const StandIn& s, int list, int depth, int vocab, float* row) {
  const int64_t at = static_cast<int64_t>(list) * s.list_depths + depth;
  for (int v = threadIdx.x; v < vocab; v += blockDim.x) row[v] = s.rest[at];
  __syncthreads();
  for (int r = threadIdx.x; r < s.list_width; r += blockDim.x) {
    const float lp = s.lp[at * s.list_width + r];
    if (lp > -INFINITY) row[s.ids[at * s.list_width + r]] = lp;
  }
}

__device__ int proposed(const StandIn& s, int prefix, int asked) {
  const int most = min(asked, s.block_size - 1);
  if (s.kind == StandInKind::kReplay) return find_list(s, prefix) < 0 ? 0 : min(most, s.list_depths);
  return max(min(most, s.golden_count - golden_index(s, prefix, 0)), 0);
}

// Grid: depths, requests. The count of a request is written by a launch of its own: all blocks read it here.
__global__ void __launch_bounds__(kThreads) stand_in_kernel(StandInArgs a) {
  const int depth = static_cast<int>(blockIdx.x), request = static_cast<int>(blockIdx.y);
  const StandIn& s = a.stand_ins[request];
  if (s.kind == StandInKind::kNone) return;
  const int prefix = a.prefix[request];
  if (depth >= proposed(s, prefix, a.depths[request])) return;
  float* const row = a.logits + (static_cast<int64_t>(request) * a.depth_limit + depth) * a.vocab_size;
  if (s.kind == StandInKind::kOracle) oracle_row(s, golden_index(s, prefix, depth), a.vocab_size, row);
  if (s.kind == StandInKind::kNoisy) noisy_row(s, golden_index(s, prefix, depth), a.vocab_size, row);
  if (s.kind == StandInKind::kReplay) replay_row(s, find_list(s, prefix), depth, a.vocab_size, row);
}

__global__ void stand_in_depths_kernel(StandInArgs a) {
  const int request = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (request >= a.requests || a.stand_ins[request].kind == StandInKind::kNone) return;
  a.depths[request] = proposed(a.stand_ins[request], a.prefix[request], a.depths[request]);
}

}  // namespace

kdtree_status stand_in(const StandInArgs& a, cudaStream_t stream) {
  if (a.depth_limit > 0) {
    KDTREE_LAUNCH(stand_in_kernel, dim3(static_cast<unsigned>(a.depth_limit), static_cast<unsigned>(a.requests)),
                  dim3(kThreads), 0, stream, a);
    KDTREE_RETURN_IF_FAILED(check_launch("stand_in_kernel"));
  }
  KDTREE_LAUNCH(stand_in_depths_kernel, dim3(static_cast<unsigned>(ceil_div(a.requests, kThreads))), dim3(kThreads), 0,
                stream, a);
  return check_launch("stand_in_depths_kernel");
}

float replay_rest(const int32_t* ids, const float* lp, int width, int vocab_size) {
  std::vector<int32_t> named(ids, ids + width);
  std::sort(named.begin(), named.end());
  const auto distinct = std::unique(named.begin(), named.end()) - named.begin();
  double sum = 0;
  for (int r = 0; r < width; ++r) sum += std::exp(static_cast<double>(lp[r]));
  const double left = 1.0 - sum, unnamed = static_cast<double>(vocab_size) - static_cast<double>(distinct);
  const double share = unnamed > 0 && left > 0 ? std::log(left / unnamed) : -INFINITY;
  return static_cast<float>(std::min(share, static_cast<double>(std::nextafterf(lp[width - 1], -INFINITY))));
}

}  // namespace kdtree
