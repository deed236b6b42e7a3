// Times of the float32 layers that dominate a pass: bench_layers [linear|attention].
//
// linear     y = x w^T by rows, ours and cuBLAS's, and the share of the copy bandwidth at which the weights are read
// attention  MLA over L cached rows for N rows of a chain, 512 + 64 latents
// Device time a call: the median over replays of a graph of calls, over inputs that do not fit the L2 cache together.
#include <algorithm>

#include "bench/noise.h"
#include "bench/times.h"
#include "kernels/attention.h"
#include "tests/check.h"
#include "tests/random.h"

using namespace kdtree;

namespace {

constexpr int kMostCalls = 10;

// Of one call, over as many as fit a test.
double microseconds(const std::function<void(int, cudaStream_t)>& call) {
  return check::tiny() ? bench::microseconds(1, 1, call) : bench::microseconds(kMostCalls, 15, call);
}

struct Shape {
  int in, out;
};

}  // namespace

TEST(linear) {
  const std::vector<Shape> shapes =
      check::tiny() ? std::vector<Shape>{{128, 64}} : std::vector<Shape>{{320, 768},    {7168, 576},  {7168, 2112},
                                                                         {1536, 12288}, {7168, 7168}, {320, 4096}};
  const std::vector<int> rows =
      check::tiny() ? std::vector<int>{1, 9} : std::vector<int>{1, 2, 4, 8, 9, 17, 33, 65, 129, 257};
  std::printf("%6s %6s %5s %10s %10s %8s %8s\n", "in", "out", "rows", "ours us", "cuBLAS us", "ours GB/s", "TFLOP/s");
  for (const Shape& shape : shapes) {
    const size_t weights = static_cast<size_t>(shape.in) * shape.out;
    const int copies =
        check::tiny() ? 1 : static_cast<int>(std::clamp<size_t>((size_t{96} << 20) / (4 * weights), 1, kMostCalls));
    const check::Array<float> w = bench::noise_on_device<float>(weights * copies);
    for (const int m : rows) {
      const check::Array<float> x = bench::noise_on_device<float>(static_cast<size_t>(m) * shape.in);
      const check::Array<float> y(static_cast<size_t>(m) * shape.out);
      const auto time = [&](Gemm gemm) {
        return microseconds([&](int i, cudaStream_t stream) {
          LinearArgs a{};
          a.x = x.get(), a.x_stride = shape.in;
          a.w = w.get() + weights * static_cast<size_t>(i % copies);
          a.y = y.get(), a.y_stride = shape.out;
          a.rows = m, a.out = shape.out, a.in = shape.in, a.batch = 1;
          CHECK_OK(linear(a, gemm, stream));
        });
      };
      const double ours = time(Gemm::kRowInvariant);
      double peer = 0;
#ifndef KDTREE_HOST
      peer = time(Gemm::kCublas);
#endif
      std::printf("%6d %6d %5d %10.1f %10.1f %8.0f %8.1f\n", shape.in, shape.out, m, ours, peer,
                  4e-3 * static_cast<double>(weights) / ours, 2e-6 * static_cast<double>(weights) * m / ours);
    }
  }
}

TEST(attention) {
  const int heads = check::tiny() ? 16 : 64, rank = 512, rope = 64;
  const std::vector<int> lengths = check::tiny() ? std::vector<int>{40} : std::vector<int>{256, 1024, 8192, 32768};
  const std::vector<int> rows = check::tiny() ? std::vector<int>{1, 2} : std::vector<int>{1, 2, 5, 9, 17, 33, 65};
  std::printf("%5s %6s %6s %10s %8s\n", "rows", "heads", "L", "us", "TFLOP/s");
  for (const int length : lengths) {
    const int capacity = length + rows.back();
    const check::Array<float> cache = bench::noise_on_device<float>(static_cast<size_t>(capacity) * (rank + rope));
    for (const int n : rows) {
      const check::Array<float> q = bench::noise_on_device<float>(static_cast<size_t>(n) * heads * (rank + rope));
      const check::Array<float> out(static_cast<size_t>(n) * heads * rank);
      const check::Array<int32_t> node_count({n - 1}), prefixes({length});
      std::vector<int32_t> places;
      for (int i = 0; i < n; ++i) places.push_back(length + i);
      const check::Array<int32_t> positions(places);
      const check::Array<unsigned char> workspace(mla_attention_workspace(n, heads, rank, capacity));
      MlaAttentionArgs<float> a{};
      a.rows.requests = 1, a.rows.width = n;
      a.rows.node_count = node_count.get(), a.rows.prefix_lengths = prefixes.get(), a.rows.positions = positions.get();
      a.form = AttentionForm::kExact;
      a.q_latent = q.get(), a.q_rope = q.get() + rank;
      a.q_latent_stride = a.q_rope_stride = static_cast<int64_t>(heads) * (rank + rope);
      a.q_latent_head = a.q_rope_head = rank + rope;
      a.cache.base = cache.get(), a.cache.layers = 1, a.cache.row_bytes = sizeof(float) * (rank + rope);
      a.cache.row_stride = a.cache.row_bytes, a.cache.request_stride = a.cache.row_bytes * capacity;
      a.cache.layer_stride = a.cache.request_stride, a.cache.capacity = capacity;
      a.out = out.get(), a.heads = heads, a.rank = rank, a.rope = rope, a.scale = 0.07f, a.longest = length + n;
      a.workspace = workspace.get(), a.workspace_size = workspace.bytes();
      const double time = microseconds([&](int, cudaStream_t stream) { CHECK_OK(mla_attention(a, stream)); });
      std::printf("%5d %6d %6d %10.1f %8.1f\n", n, heads, length, time,
                  2e-6 * n * heads * static_cast<double>(length) * (2 * rank + rope) / time);
    }
  }
}
