// What bf16 products read from memory: bench_traffic, for ncu to count. The weights, 98 MiB, must be read once, however
// many rows there are; each line is one launch, in this order:
//
//   ncu --clock-control none -k regex:linear_bf16 --csv --metrics dram__bytes_read.sum,dram__bytes_write.sum
//       engine/cuda/build/bench_traffic
#include "bench/noise.h"
#include "kernels/linear_bf16.h"
#include "tests/check.h"

using namespace kdtree;

TEST(linear) {
  const int in = check::tiny() ? 128 : 7168, out = check::tiny() ? 64 : 7168;
  const std::vector<int> rows = check::tiny() ? std::vector<int>{1, 9} : std::vector<int>{1, 9, 17, 32, 33, 65};
  const size_t weights = static_cast<size_t>(in) * static_cast<size_t>(out);
  const check::Array<uint16_t> w = bench::noise_on_device<uint16_t>(weights);
  std::printf("%5s %10s %10s\n", "rows", "weights MB", "others MB");
  for (const int m : rows) {
    const check::Array<uint16_t> x = bench::noise_on_device<uint16_t>(static_cast<size_t>(m) * in);
    const check::Array<uint16_t> y(static_cast<size_t>(m) * out);
    LinearBf16Args a{};
    a.x = x.get(), a.x_stride = in;
    a.w = w.get();
    a.y = y.get(), a.y_stride = out;
    a.rows = m, a.out = out, a.in = in, a.batch = 1;
    CHECK_OK(linear_bf16(a, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    std::printf("%5d %10.1f %10.1f\n", m, 2e-6 * static_cast<double>(weights), 2e-6 * m * (in + out));
  }
}
