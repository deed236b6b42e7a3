// Times of logits -> lists -> tree: bench_topk [float32|bfloat16].
//
// Depth 7, a vocabulary of 163,840, K = B. By batch: the lists alone, the tree alone from those lists, both in one
// call, and a kernel that only reads the logits; the rate at which both in one call read the logits, and how many times
// as long as the reading kernel it takes. Roughly normal logits. Device time a call: the median over replays of a graph
// of calls. All calls read the same logits: those of one request stay in the L2 cache, where a drafter has just written
// them.
#include <algorithm>
#include <functional>

#include "bench/times.h"
#include "tests/check.h"
#include "tests/random.h"

namespace {

constexpr int kDepth = 7, kReplays = 15;

// Device time of one of `calls` calls in microseconds.
double microseconds(int calls, const std::function<void(cudaStream_t)>& call) {
  return bench::microseconds(calls, check::tiny() ? 1 : kReplays, [&](int, cudaStream_t stream) { call(stream); });
}

constexpr int kReadThreads = 512, kReadLoads = 8;

// Reads [n] of 16 bytes, and writes only what no compiler can know to be unneeded.
__global__ void read_kernel(const uint4* from, size_t n, unsigned* to) {
  const size_t pass = static_cast<size_t>(gridDim.x) * kReadThreads;
  unsigned bits = 0;
  for (size_t base = static_cast<size_t>(blockIdx.x) * kReadThreads + threadIdx.x; base < n;
       base += kReadLoads * pass) {
    uint4 loaded[kReadLoads];
    KDTREE_UNROLL
    for (int i = 0; i < kReadLoads; ++i) loaded[i] = base + i * pass < n ? __ldg(from + base + i * pass) : uint4{};
    KDTREE_UNROLL
    for (int i = 0; i < kReadLoads; ++i) bits |= loaded[i].x & loaded[i].y & loaded[i].z & loaded[i].w;
  }
  if (bits == 0xffffffffu) *to = bits;  // NaN in all four: never
}

// A bench call's float32, and their upper halves as bf16.
template <typename T>
std::vector<T> logits(size_t n) {
  const std::vector<float> parts = check::noise(n, 3 * n);
  std::vector<T> result(n);
  for (size_t i = 0; i < n; ++i) {
    const float x = 3 * (parts[3 * i] + parts[3 * i + 1] + parts[3 * i + 2]);
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    if constexpr (sizeof(T) == 4)
      result[i] = x;
    else
      result[i] = static_cast<T>(bits >> 16);
  }
  return result;
}

// All arrays of a call of `requests` requests.
template <typename T>
struct Call {
  check::Array<T> logits;
  check::Array<float> lp, logz;
  check::Array<int32_t> ids, status, counts, nodes, paths, route, tree_status;
  check::Array<double> scores;
  check::Array<uint32_t> visibility;
  check::Array<unsigned char> workspace;
  kdtree_topk_logprob_args topk{};
  kdtree_tree_build_args tree{};

  Call(size_t requests, int vocab_size, int k)
      : logits(requests * kDepth * vocab_size),
        lp(requests * kDepth * k),
        logz(requests * kDepth),
        ids(requests * kDepth * k),
        status(3 * requests),
        counts(requests),
        nodes(7 * requests * (1 + k)),
        paths(requests * (1 + k) * (kDepth + 1)),
        route(requests),
        tree_status(3 * requests),
        scores(requests * (1 + k)),
        visibility(requests * (1 + k) * ((1 + k + 31) / 32)),
        workspace(kdtree_topk_logprob_workspace(static_cast<int>(requests), kDepth, vocab_size, k)) {
    topk.struct_size = sizeof(topk);
    topk.requests = tree.requests = static_cast<int>(requests);
    topk.depth_limit = tree.depth_limit = kDepth;
    topk.vocab_size = tree.vocab_size = vocab_size;
    topk.k = tree.width = tree.budget = k;
    topk.dtype = sizeof(T) == 4 ? KDTREE_F32 : KDTREE_BF16;
    topk.row_stride = vocab_size;
    topk.logits = logits.get();
    topk.ids = ids.get(), topk.lp = lp.get(), topk.logz = logz.get(), topk.status = status.get();
    topk.workspace = workspace.get(), topk.workspace_size = workspace.size();
    tree.struct_size = sizeof(tree);
    tree.checked = 1;
    tree.lp = lp.get(), tree.ids = ids.get(), tree.before = status.get();
    tree.node_count = counts.get();
    int32_t** const arrays[] = {&tree.tokens,    &tree.parents,     &tree.depths,      &tree.ranks,
                                &tree.positions, &tree.first_child, &tree.next_sibling};
    for (size_t i = 0; i < 7; ++i) *arrays[i] = nodes.get() + i * requests * (1 + k);
    tree.paths = paths.get(), tree.route = route.get(), tree.status = tree_status.get();
    tree.scores = scores.get(), tree.visibility = visibility.get();
  }

  // The same 2^20 logits over and over.
  void fill(const std::vector<T>& piece) {
    for (size_t at = 0; at < logits.size(); at += piece.size())
      CHECK_CUDA(cudaMemcpy(logits.get() + at, piece.data(), std::min(piece.size(), logits.size() - at) * sizeof(T),
                            cudaMemcpyHostToDevice));
  }
};

template <typename T>
void measure(const char* name) {
  const int vocab_size = check::tiny() ? 3000 : 163840, calls = check::tiny() ? 1 : 10;
  const std::vector<int> batches = check::tiny() ? std::vector<int>{1, 40} : std::vector<int>{1, 8, 64, 256};
  const std::vector<int> lengths = check::tiny() ? std::vector<int>{16, 300} : std::vector<int>{64, 1024};
  const std::vector<T> piece = logits<T>(check::tiny() ? 50'000 : 1 << 20);
  std::printf("%-8s %5s %6s %10s %10s %10s %10s %8s %8s\n", "logits", "K = B", "batch", "lists us", "tree us",
              "both us", "read us", "GB/s", "/ read");
  for (const int k : lengths)
    for (const int batch : batches) {
      Call<T> call(static_cast<size_t>(batch), vocab_size, k);
      call.fill(piece);
      const double lists = microseconds(calls, [&](cudaStream_t stream) {
        call.topk.stream = stream;
        CHECK_OK(kdtree_topk_logprob(&call.topk));
      });
      const double tree = microseconds(calls, [&](cudaStream_t stream) {
        call.tree.stream = stream;
        CHECK_OK(kdtree_tree_build(&call.tree));
      });
      const double both = microseconds(calls, [&](cudaStream_t stream) {
        call.topk.stream = call.tree.stream = stream;
        CHECK_OK(kdtree_logits_tree(&call.topk, &call.tree));
      });
      const size_t bytes = call.logits.size() * sizeof(T), n = bytes / sizeof(uint4);
      const check::Array<unsigned> never(1);
      const double read = microseconds(calls, [&](cudaStream_t stream) {
        // Blocks for 4 x 132 of 512 threads, all at once on an H200; no more than there are loads for.
        const size_t blocks = std::clamp<size_t>(n / kReadThreads, 1, 528);
        KDTREE_LAUNCH(read_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kReadThreads), 0, stream,
                      reinterpret_cast<const uint4*>(call.logits.get()), n, never.get());
        CHECK_CUDA(cudaGetLastError());
      });
      for (const int32_t code : call.status.read()) CHECK_EQUAL(code, 0);
      for (const int32_t count : call.counts.read()) CHECK_EQUAL(count, k);
      std::printf("%-8s %5d %6d %10.1f %10.1f %10.1f %10.1f %8.0f %8.2f\n", name, k, batch, lists, tree, both, read,
                  1e-3 * static_cast<double>(bytes) / both, both / read);
    }
}

}  // namespace

TEST(float32) { measure<float>("float32"); }
TEST(bfloat16) { measure<uint16_t>("bfloat16"); }
