// Times of the bf16 attention kernel: bench_attention [heads_16|heads_64|heads_128|portable|small_device].
//
// heads_*       N rows, a root and a chain of the others, over L cached rows
// portable      64 heads on the path of all devices
// small_device  64 heads in the shared memory of a small device, 99 KB a block
// TFLOP/s: 2 (512 + 64 + 512) operations a head, row and key. GB/s: the cache rows, queries and results, each once.
// Device time a call, over caches that do not fit the L2 cache together.
#include <algorithm>

#include "bench/noise.h"
#include "bench/times.h"
#include "kernels/attention.h"
#include "tests/check.h"
#include "tests/random.h"

using namespace kdtree;

namespace {

constexpr int kLatent = 512, kWidth = 576;
constexpr size_t kCacheBytes = size_t{192} << 20;  // of the caches that calls take in turns

void measure(int heads, bool portable, int shared_memory = 0) {
  const std::vector<int> lengths = check::tiny() ? std::vector<int>{40} : std::vector<int>{1024, 8192, 32768, 131072};
  const std::vector<int> rows = check::tiny() ? std::vector<int>{1, 3} : std::vector<int>{1, 8, 17, 33, 65, 129};
  const int calls = check::tiny() ? 1 : 4, replays = check::tiny() ? 1 : 15;
  std::printf("%5s %6s %7s %10s %8s %8s\n", "heads", "rows", "L", "us", "TFLOP/s", "GB/s");
  for (const int length : lengths) {
    const int capacity = length + rows.back();
    const size_t entries = static_cast<size_t>(capacity) * kWidth;
    const int copies = static_cast<int>(std::clamp<size_t>(kCacheBytes / (2 * entries), 1, check::tiny() ? 1 : 150));
    const check::Array<uint16_t> cache = bench::noise_on_device<uint16_t>(entries * static_cast<size_t>(copies));
    for (const int n : rows) {
      const size_t head_rows = static_cast<size_t>(n) * static_cast<size_t>(heads);
      const check::Array<uint16_t> q = bench::noise_on_device<uint16_t>(head_rows * kWidth);
      const check::Array<uint16_t> out(head_rows * kLatent);
      const check::Array<int32_t> node_count({n - 1}), prefixes({length});
      std::vector<int32_t> places;
      for (int i = 0; i < n; ++i) places.push_back(length + i);
      const check::Array<int32_t> positions(places);
      const check::Array<unsigned char> workspace(mla_attention_bf16_workspace(1, n, heads, capacity));
      MlaAttentionBf16Args a{};
      a.rows.requests = 1, a.rows.width = n;
      a.rows.node_count = node_count.get(), a.rows.prefix_lengths = prefixes.get(), a.rows.positions = positions.get();
      a.q_latent = q.get(), a.q_rope = q.get() + kLatent;
      a.q_latent_head = a.q_rope_head = kWidth;
      a.q_latent_stride = a.q_rope_stride = static_cast<int64_t>(heads) * kWidth;
      a.cache.layers = 1, a.cache.row_bytes = 2 * kWidth, a.cache.row_stride = 2 * kWidth;
      a.cache.request_stride = a.cache.layer_stride = static_cast<int64_t>(capacity) * 2 * kWidth;
      a.cache.capacity = capacity;
      a.out = out.get(), a.heads = heads, a.scale = 0.07f, a.longest = length + n;
      a.portable = portable, a.shared_memory = shared_memory;
      a.workspace = workspace.get(), a.workspace_size = workspace.bytes();
      if (length == lengths.front() && n == rows.front())
        std::printf("path: %s\n", mla_attention_bf16_path(a) == AttentionPath::kWgmma ? "wgmma" : "portable");
      const double time = bench::microseconds(std::max(copies, calls), replays, [&](int i, cudaStream_t stream) {
        a.cache.base = cache.get() + entries * static_cast<size_t>(i % copies);
        CHECK_OK(mla_attention_bf16(a, stream));
      });
      const double work = static_cast<double>(head_rows) * length;
      const double bytes = 2.0 * kWidth * (length + n) + 2.0 * static_cast<double>(head_rows) * (kWidth + kLatent);
      std::printf("%5d %6d %7d %10.1f %8.1f %8.0f\n", heads, n, length, time, 2e-6 * work * (kWidth + kLatent) / time,
                  1e-3 * bytes / time);
      std::fflush(stdout);
    }
  }
}

}  // namespace

TEST(heads_16) { measure(16, false); }
TEST(heads_64) { measure(64, false); }
TEST(heads_128) { measure(128, false); }
TEST(portable) { measure(64, true); }
TEST(small_device) { measure(64, true, 101376); }
