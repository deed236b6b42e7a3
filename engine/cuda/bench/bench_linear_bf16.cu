// Times of the bf16 products: bench_linear_bf16 [linear|experts].
//
// linear   y = x w^T by rows, ours and cuBLAS's, the rate at which the weights are read, and its share of the copy
//          bandwidth of an H200
// experts  a mixture of 64 experts, 8 a row, drawn independently: the same of the experts that any row chose
// Device time a call: the median over replays of a graph of calls, over weights that do not fit the L2 cache together.
#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "bench/noise.h"
#include "bench/times.h"
#include "kernels/experts_bf16.h"
#include "kernels/linear_bf16.h"
#include "tests/check.h"
#include "tests/random.h"

#ifndef KDTREE_HOST
#include <dlfcn.h>
#endif

using namespace kdtree;

namespace {

constexpr int kLeastCalls = 10, kMostCalls = 256, kReplays = 15;
constexpr double kCopyBytesPerUs = 4.3e6;           // an H200: read and written together
constexpr size_t kWeightBytes = size_t{256} << 20;  // of a graph's calls: the L2 cache holds little of them

#ifndef KDTREE_HOST
// cuBLAS's product of the same, summed in float32; found when it is asked for, as kernels/linear_cublas.cu does.
class Cublas {
 public:
  Cublas() : workspace_(size_t{64} << 20) {
    void* library = nullptr;
    for (const char* name : {"libcublas.so.13", "libcublas.so.12"})
      if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    find(library, "cublasSetStream_v2", set_stream_);
    find(library, "cublasSetWorkspace_v2", set_workspace_);
    find(library, "cublasGemmEx", gemm_);
    find(library, "cublasDestroy_v2", destroy_);
    int (*create)(Handle*) = nullptr;
    find(library, "cublasCreate_v2", create);
    CHECK_EQUAL(create(&handle_), 0);
  }
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;
  ~Cublas() { (void)destroy_(handle_); }

  void operator()(const LinearBf16Args& a, cudaStream_t stream) const {
    constexpr int kBf16 = 14, kFloat32 = 0, kSumInFloat32 = 68, kDefault = -1;
    const float one = 1, zero = 0;
    CHECK_EQUAL(set_stream_(handle_, stream), 0);
    CHECK_EQUAL(set_workspace_(handle_, workspace_.get(), workspace_.bytes()), 0);
    // To cuBLAS, which counts down columns, y is [out, rows] = w^T x with w [in, out] and x [in, rows].
    CHECK_EQUAL(
        gemm_(handle_, 1, 0, a.out, a.rows, a.in, &one, a.w, kBf16, a.in, a.x, kBf16, static_cast<int>(a.x_stride),
              &zero, a.y, a.wide ? kFloat32 : kBf16, static_cast<int>(a.y_stride), kSumInFloat32, kDefault),
        0);
  }

 private:
  using Handle = struct cublasContext*;
  template <typename F>
  static void find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr) throw std::runtime_error(std::string("cuBLAS has no ") + name);
  }

  Handle handle_ = nullptr;
  check::Array<unsigned char> workspace_;
  int (*destroy_)(Handle) = nullptr;
  int (*set_stream_)(Handle, cudaStream_t) = nullptr;
  int (*set_workspace_)(Handle, void*, size_t) = nullptr;
  int (*gemm_)(Handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a, int a_type, int lda,
               const void* b, int b_type, int ldb, const void* beta, void* c, int c_type, int ldc, int compute,
               int algorithm) = nullptr;
};
#endif

struct Shape {
  int in, out;
};

}  // namespace

TEST(linear) {
  const std::vector<Shape> shapes =
      check::tiny() ? std::vector<Shape>{{128, 64}}
                    : std::vector<Shape>{{7168, 7168},  {7168, 18432}, {18432, 7168}, {7168, 2112},
                                         {1536, 12288}, {320, 768},    {320, 4096},   {7168, 163840}};
  const std::vector<int> rows =
      check::tiny() ? std::vector<int>{1, 9} : std::vector<int>{1, 2, 4, 8, 9, 16, 17, 33, 65, 129};
#ifndef KDTREE_HOST
  const Cublas cublas;
#endif
  std::printf("%6s %6s %5s %9s %10s %12s %8s %6s %8s\n", "in", "out", "rows", "ours us", "cuBLAS us", "cuBLAS/ours",
              "GB/s", "share", "TFLOP/s");
  for (const Shape& shape : shapes) {
    const size_t weights = static_cast<size_t>(shape.in) * shape.out, bytes = weights * sizeof(uint16_t);
    const int copies = check::tiny() ? 1 : static_cast<int>(std::clamp<size_t>(kWeightBytes / bytes, 1, kMostCalls));
    const int calls = std::max(copies, kLeastCalls);
    const check::Array<uint16_t> w = bench::noise_on_device<uint16_t>(weights * copies);
    for (const int m : rows) {
      const check::Array<uint16_t> x = bench::noise_on_device<uint16_t>(static_cast<size_t>(m) * shape.in);
      const check::Array<uint16_t> y(static_cast<size_t>(m) * shape.out);
      const auto arguments = [&](int i) {
        LinearBf16Args a{};
        a.x = x.get(), a.x_stride = shape.in;
        a.w = w.get() + weights * static_cast<size_t>(i % copies);
        a.y = y.get(), a.y_stride = shape.out;
        a.rows = m, a.out = shape.out, a.in = shape.in, a.batch = 1;
        return a;
      };
      const double ours = bench::microseconds(
          calls, kReplays, [&](int i, cudaStream_t stream) { CHECK_OK(linear_bf16(arguments(i), stream)); });
      double peer = 0;
#ifndef KDTREE_HOST
      peer = bench::microseconds(calls, kReplays, [&](int i, cudaStream_t stream) { cublas(arguments(i), stream); });
#endif
      const double rate = static_cast<double>(bytes) / ours;
      std::printf("%6d %6d %5d %9.1f %10.1f %12.2f %8.0f %5.0f%% %8.1f\n", shape.in, shape.out, m, ours, peer,
                  peer / ours, 1e-3 * rate, 100 * rate / kCopyBytesPerUs,
                  2e-6 * static_cast<double>(weights) * m / ours);
      std::fflush(stdout);
    }
  }
}

TEST(experts) {
  const int hidden = check::tiny() ? 64 : 7168, width = check::tiny() ? 16 : 2048;
  const int experts = check::tiny() ? 8 : 64, chosen = check::tiny() ? 2 : 8;
  const std::vector<int> rows = check::tiny() ? std::vector<int>{1, 9} : std::vector<int>{1, 2, 4, 8, 9, 17, 33, 65};
  const size_t each = static_cast<size_t>(hidden) * width;
  const check::Array<uint16_t> gate_up = bench::noise_on_device<uint16_t>(2 * each * experts),
                               down = bench::noise_on_device<uint16_t>(each * experts);
  std::vector<const uint16_t*> gate_up_of, down_of;
  for (int e = 0; e < experts; ++e) {
    gate_up_of.push_back(gate_up.get() + 2 * each * e);
    down_of.push_back(down.get() + each * e);
  }
  const check::Array<const uint16_t*> device_gate_up_of(gate_up_of), device_down_of(down_of);
  std::mt19937 random(1);
  std::printf("%5s %8s %9s %8s %6s\n", "rows", "experts", "us", "GB/s", "share");
  for (const int m : rows) {
    std::vector<int32_t> ids, all(experts);
    std::iota(all.begin(), all.end(), 0);
    for (int row = 0; row < m; ++row) {
      std::shuffle(all.begin(), all.end(), random);
      ids.insert(ids.end(), all.begin(), all.begin() + chosen);
    }
    const size_t touched = std::set<int32_t>(ids.begin(), ids.end()).size();
    const check::Array<uint16_t> x = bench::noise_on_device<uint16_t>(static_cast<size_t>(m) * hidden);
    const check::Array<uint16_t> y(static_cast<size_t>(m) * hidden);
    const check::Array<float> factors(check::noise(3, static_cast<size_t>(m) * chosen));
    const check::Array<int32_t> device_ids(ids);
    const check::Array<unsigned char> workspace(experts_bf16_workspace(m, hidden, width, experts, chosen));
    ExpertsBf16Args a{};
    a.x = x.get(), a.y = y.get(), a.ids = device_ids.get(), a.weights = factors.get();
    a.gate_up = device_gate_up_of.get(), a.down = device_down_of.get();
    a.rows = m, a.hidden = hidden, a.width = width, a.experts = experts, a.chosen = chosen;
    a.workspace = workspace.get(), a.workspace_size = workspace.bytes();
    const double time = bench::microseconds(kLeastCalls, kReplays,
                                            [&](int, cudaStream_t stream) { CHECK_OK(experts_bf16(a, stream)); });
    const double rate = 3.0 * sizeof(uint16_t) * static_cast<double>(each * touched) / time;
    std::printf("%5d %8zu %9.1f %8.0f %5.0f%%\n", m, touched, time, 1e-3 * rate, 100 * rate / kCopyBytesPerUs);
    std::fflush(stdout);
  }
}
