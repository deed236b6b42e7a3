// Barriers, warp operations, atomics and arithmetic against scalar code, and two whole kernels against references in
// double. On a GPU the same checks hold the device, so that host and device are known to agree.
#include <algorithm>
#include <numeric>
#include <random>

#include "tests/check.h"

namespace {

using namespace kdtree;
using std::vector;

// --- warp operations

struct WarpResults {
  int all[32], up[32], down[32], exchanged[32], eighth[32], up_eighth[32], down_eighth[32], xor_eighth[32];
  float real[32];
  double wide[32];
  unsigned ballot[32], any[32], every[32], same[32];
  unsigned add[32], least[32], most[32], bits_and[32], bits_or[32], bits_xor[32];
  int add_signed[32], least_signed[32], most_signed[32];
};

__global__ void warp_kernel(WarpResults* out) {
  const int i = threadIdx.x;
  const unsigned m = kAllLanes;
  out->all[i] = __shfl_sync(m, 3 * i, 5);
  out->up[i] = __shfl_up_sync(m, i, 3);
  out->down[i] = __shfl_down_sync(m, i, 3);
  out->exchanged[i] = __shfl_xor_sync(m, i, 16);
  out->eighth[i] = __shfl_sync(m, i, 11, 8);
  out->up_eighth[i] = __shfl_up_sync(m, i, 2, 8);
  out->down_eighth[i] = __shfl_down_sync(m, i, 2, 8);
  out->xor_eighth[i] = __shfl_xor_sync(m, i, 9, 8);
  out->real[i] = __shfl_sync(m, 0.5f * i, 31 - i);
  out->wide[i] = __shfl_sync(m, 1.0 / (i + 1), 31 - i);
  out->ballot[i] = __ballot_sync(m, i % 3 == 0);
  out->any[i] = __any_sync(m, i == 30) + 2 * __any_sync(m, i == 32);
  out->every[i] = __all_sync(m, i < 32) + 2 * __all_sync(m, i < 31);
  out->same[i] = __match_any_sync(m, i % 5);
  const unsigned value = 0x80000000u + 977u * i;
  out->add[i] = __reduce_add_sync(m, value);
  out->least[i] = __reduce_min_sync(m, value);
  out->most[i] = __reduce_max_sync(m, value);
  out->bits_and[i] = __reduce_and_sync(m, value | 4);
  out->bits_or[i] = __reduce_or_sync(m, value);
  out->bits_xor[i] = __reduce_xor_sync(m, value);
  out->add_signed[i] = __reduce_add_sync(m, i - 20);
  out->least_signed[i] = __reduce_min_sync(m, i - 20);
  out->most_signed[i] = __reduce_max_sync(m, i - 20);
}

// The two halves of each warp go separate ways, with masks of their own.
__global__ void halves_kernel(unsigned* out) {
  const unsigned lane = threadIdx.x % 32;
  unsigned result;
  if (lane < 16) {
    result = __reduce_add_sync(0xffffu, lane);
  } else {
    result = __ballot_sync(0xffff0000u, lane % 2) ^ __shfl_sync(0xffff0000u, lane, 20);
    __syncwarp(0xffff0000u);
  }
  __syncwarp();
  out[threadIdx.x] = result;
}

// --- barriers and atomics

__global__ void votes_kernel(int* out, int threshold) {
  const int i = threadIdx.x;
  const int any = __syncthreads_or(i == threshold), all = __syncthreads_and(i < threshold);
  out[i] = 1000000 * (any != 0) + 100000 * (all != 0) + __syncthreads_count(i < threshold);
}

struct Words {
  int i_add, i_max, i_min, i_exch, i_cas, i_or, i_and;
  unsigned u_add, u_max, u_min, u_exch, u_cas, u_or, u_and;
  unsigned long long w_add, w_max, w_min, w_exch, w_cas, w_or, w_and;
  float f_add;
  double d_add;
};

__global__ void atomics_kernel(Words* out, const Words* initial, unsigned* finished, unsigned* last_block) {
  __shared__ Words words;
  __shared__ bool last;
  if (threadIdx.x == 0) words = *initial;
  __syncthreads();
  const int t = threadIdx.x;
  const auto all = [&](Words* w) {
    atomicAdd(&w->i_add, t), atomicMax(&w->i_max, t), atomicMin(&w->i_min, -t), atomicExch(&w->i_exch, 7);
    atomicOr(&w->i_or, 1 << t % 31), atomicAnd(&w->i_and, ~(1 << t % 31));
    atomicAdd(&w->u_add, 1u), atomicMax(&w->u_max, 0x80000000u + t), atomicMin(&w->u_min, 5u + t);
    atomicExch(&w->u_exch, 8u), atomicOr(&w->u_or, 1u << t % 32), atomicAnd(&w->u_and, ~(1u << t % 16));
    const unsigned long long wide = 1ull << 40;
    atomicAdd(&w->w_add, wide), atomicMax(&w->w_max, wide + t), atomicMin(&w->w_min, wide + 5 + t);
    atomicExch(&w->w_exch, wide), atomicOr(&w->w_or, 1ull << t % 64), atomicAnd(&w->w_and, ~(1ull << t % 40));
    for (int seen = 1;;) {
      const int before = atomicCAS(&w->i_cas, seen, seen + 2);
      if (before == seen) break;
      seen = before;
    }
    for (unsigned seen = 1;;) {
      const unsigned before = atomicCAS(&w->u_cas, seen, seen + 3);
      if (before == seen) break;
      seen = before;
    }
    for (unsigned long long seen = 1;;) {
      const unsigned long long before = atomicCAS(&w->w_cas, seen, seen + wide);
      if (before == seen) break;
      seen = before;
    }
    atomicAdd(&w->f_add, 0.5f), atomicAdd(&w->d_add, 0.25);
  };
  all(&words);
  all(out + 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0) out[0] = words;
    __threadfence();
    last = atomicAdd(finished, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == blockDim.x - 1) *last_block = *finished;
}

void check_words(const Words& w, int n, int times) {
  const unsigned long long wide = 1ull << 40;
  CHECK_EQUAL(w.i_add, 1 + times * (n * (n - 1) / 2));
  CHECK_EQUAL(w.i_max, n - 1);
  CHECK_EQUAL(w.i_min, -(n - 1));
  CHECK_EQUAL(w.i_exch, 7);
  CHECK_EQUAL(w.i_cas, 1 + 2 * n * times);
  CHECK_EQUAL(w.i_or, 0x7fffffff);
  CHECK_EQUAL(w.i_and, static_cast<int>(0x80000000u));
  CHECK_EQUAL(w.u_add, 1u + n * times);
  CHECK_EQUAL(w.u_max, 0x80000000u + n - 1);
  CHECK_EQUAL(w.u_min, 5u);
  CHECK_EQUAL(w.u_exch, 8u);
  CHECK_EQUAL(w.u_cas, 1u + 3u * n * times);
  CHECK_EQUAL(w.u_or, 0xffffffffu);
  CHECK_EQUAL(w.u_and, 0xffff0000u);
  CHECK_EQUAL(w.w_add, 1 + wide * n * times);
  CHECK_EQUAL(w.w_max, wide + n - 1);
  CHECK_EQUAL(w.w_min, wide + 5);
  CHECK_EQUAL(w.w_exch, wide);
  CHECK_EQUAL(w.w_cas, 1 + wide * n * times);
  CHECK_EQUAL(w.w_or, ~0ull);
  CHECK_EQUAL(w.w_and, ~0ull << 40);
  CHECK_EQUAL(w.f_add, 0.5f * n * times);
  CHECK_EQUAL(w.d_add, 0.25 * n * times);
}

// --- arithmetic

struct Numbers {
  int popc, popcll, ffs, ffsll, clz, clz_zero, clzll;
  unsigned brev, umulhi, bits;
  unsigned long long umul64hi;
  long long wide_bits;
  float back, least, most, of_nan, sum;
  double wide_back, wide_sum;
  int mixed_least;
  unsigned mixed_most;
};

__global__ void numbers_kernel(Numbers* n, float x, double y) {
  n->popc = __popc(0xf0f0f0f1u), n->popcll = __popcll(0xf0f0f0f1f0f0f0f1ull);
  n->ffs = __ffs(0x50), n->ffsll = __ffsll(1ll << 40), n->clz = __clz(1), n->clz_zero = __clz(0);
  n->clzll = __clzll(1ll << 40), n->brev = __brev(0x80000006u);
  n->umulhi = __umulhi(0xffffffffu, 0xfffffffeu), n->umul64hi = __umul64hi(~0ull, ~1ull);
  n->bits = __float_as_uint(x), n->back = __uint_as_float(n->bits);
  n->wide_bits = __double_as_longlong(y), n->wide_back = __longlong_as_double(n->wide_bits);
  n->least = min(x, 1.0f), n->most = max(x, 1.0f), n->of_nan = max(nanf(""), x);
  n->sum = __fadd_rn(__fmul_rn(x, x), -1.0f), n->wide_sum = __dsub_rn(__dmul_rn(y, y), 1.0);
  n->mixed_least = min(-3, 4), n->mixed_most = max(-3, 4u);
}

// --- two kernels

__global__ void softmax_kernel(const float* x, float* y, int n) {
  __shared__ float partial[8];
  const int thread = threadIdx.x, warp = thread / kWarp, warps = blockDim.x / kWarp;
  x += static_cast<size_t>(blockIdx.x) * n;
  y += static_cast<size_t>(blockIdx.x) * n;
  float most = -INFINITY;
  for (int i = thread; i < n; i += blockDim.x) most = max(most, x[i]);
  for (int step = 16; step > 0; step /= 2) most = max(most, __shfl_xor_sync(kAllLanes, most, step));
  if (thread % kWarp == 0) partial[warp] = most;
  __syncthreads();
  for (int w = 0; w < warps; ++w) most = max(most, partial[w]);
  __syncthreads();
  float sum = 0.0f;
  for (int i = thread; i < n; i += blockDim.x) sum += expf(x[i] - most);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(kAllLanes, sum, step);
  if (thread % kWarp == 0) partial[warp] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int w = 0; w < warps; ++w) sum += partial[w];
  for (int i = thread; i < n; i += blockDim.x) y[i] = expf(x[i] - most) / sum;
}

// Odd values to `out` in any order; how often each value mod 16 occurs to `histogram`.
__global__ void compact_kernel(const int* x, int n, int* out, int* count, unsigned* histogram) {
  KDTREE_DYNAMIC_SHARED(raw);
  auto* bins = reinterpret_cast<unsigned*>(raw);
  for (int b = threadIdx.x; b < 16; b += blockDim.x) bins[b] = 0;
  __syncthreads();
  const int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % kWarp;
  const int value = i < n ? x[i] : 0;
  const bool keep = i < n && value % 2 != 0;
  if (i < n) atomicAdd(&bins[value % 16], 1u);
  const unsigned kept = __ballot_sync(kAllLanes, keep);
  int place = lane == 0 ? atomicAdd(count, __popc(kept)) : 0;
  place = __shfl_sync(kAllLanes, place, 0);
  if (keep) out[place + __popc(kept & ((1u << lane) - 1))] = value;
  __syncthreads();
  for (int b = threadIdx.x; b < 16; b += blockDim.x) atomicAdd(&histogram[b], bins[b]);
}

__global__ void indices_kernel(unsigned* out) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = 1000 * block + thread;
}

struct Parameters {
  int values[4];
  int* out;
};

__global__ void by_value_kernel(Parameters p, short factor) {
  p.values[0] += threadIdx.x;  // the thread's own copy
  p.out[threadIdx.x] = p.values[0] * factor + p.values[3];
}

template <int kFactor, typename T>
__global__ void __launch_bounds__(64) scaled_kernel(T* x) {
  x[threadIdx.x] *= kFactor;
}

}  // namespace

TEST(warp_operations) {
  check::Array<WarpResults> out(1);
  KDTREE_LAUNCH(warp_kernel, 1, 32, 0, nullptr, out.get());
  CHECK_CUDA(cudaGetLastError());
  const WarpResults got = out.read()[0];
  unsigned add = 0, bits_and = ~0u, bits_or = 0, bits_xor = 0, thirds = 0;
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned value = 0x80000000u + 977u * i;
    add += value, bits_and &= value | 4, bits_or |= value, bits_xor ^= value, thirds |= unsigned{i % 3 == 0} << i;
  }
  for (int i = 0; i < 32; ++i) {
    const int segment = i / 8 * 8;
    CHECK_EQUAL(got.all[i], 15);
    CHECK_EQUAL(got.up[i], i < 3 ? i : i - 3);
    CHECK_EQUAL(got.down[i], i > 28 ? i : i + 3);
    CHECK_EQUAL(got.exchanged[i], i ^ 16);
    CHECK_EQUAL(got.eighth[i], segment + 3);
    CHECK_EQUAL(got.up_eighth[i], i - segment < 2 ? i : i - 2);
    CHECK_EQUAL(got.down_eighth[i], i - segment > 5 ? i : i + 2);
    CHECK_EQUAL(got.xor_eighth[i], (i ^ 9) > segment + 7 ? i : i ^ 9);
    CHECK_EQUAL(got.real[i], 0.5f * (31 - i));
    CHECK_EQUAL(got.wide[i], 1.0 / (32 - i));
    CHECK_EQUAL(got.ballot[i], thirds);
    CHECK_EQUAL(got.any[i], 1);
    CHECK_EQUAL(got.every[i], 1);
    unsigned same = 0;
    for (int j = 0; j < 32; ++j) same |= unsigned{j % 5 == i % 5} << j;
    CHECK_EQUAL(got.same[i], same);
    CHECK_EQUAL(got.add[i], add);
    CHECK_EQUAL(got.least[i], 0x80000000u);
    CHECK_EQUAL(got.most[i], 0x80000000u + 977u * 31);
    CHECK_EQUAL(got.bits_and[i], bits_and);
    CHECK_EQUAL(got.bits_or[i], bits_or);
    CHECK_EQUAL(got.bits_xor[i], bits_xor);
    CHECK_EQUAL(got.add_signed[i], 31 * 16 - 20 * 32);
    CHECK_EQUAL(got.least_signed[i], -20);
    CHECK_EQUAL(got.most_signed[i], 11);
  }
}

TEST(halves_of_a_warp_go_separate_ways) {
  const int n = 96;
  check::Array<unsigned> out(n);
  KDTREE_LAUNCH(halves_kernel, 1, n, 0, nullptr, out.get());
  const vector<unsigned> got = out.read();
  for (int i = 0; i < n; ++i) CHECK_EQUAL(got[i], i % 32 < 16 ? 120u : 0xaaaa0000u ^ 20u);
}

TEST(barriers_that_vote) {
  const int n = 100;  // the last warp is not full
  for (const int threshold : {0, 37, 99, 100}) {
    check::Array<int> out(n);
    KDTREE_LAUNCH(votes_kernel, 1, n, 0, nullptr, out.get(), threshold);
    const int expected = 1000000 * (threshold < n) + 100000 * (threshold == n) + threshold;
    CHECK_EQUAL_ALL(out.read(), vector<int>(n, expected), "votes");
  }
}

TEST(atomics) {
  const int n = 128, blocks = 3;
  Words initial{};
  initial.i_add = initial.i_cas = 1, initial.u_add = initial.u_cas = 1, initial.w_add = initial.w_cas = 1;
  initial.i_and = -1, initial.u_and = ~0u, initial.w_and = ~0ull, initial.u_min = ~0u, initial.w_min = ~0ull;
  check::Array<Words> out({Words{}, initial}), given({initial});
  check::Array<unsigned> finished({0u}), last({0u});
  KDTREE_LAUNCH(atomics_kernel, blocks, n, 0, nullptr, out.get(), given.get(), finished.get(), last.get());
  CHECK_CUDA(cudaGetLastError());
  check_words(out.read()[0], n, 1);
  check_words(out.read()[1], n, blocks);
  CHECK_EQUAL(last.read()[0], static_cast<unsigned>(blocks));
}

TEST(arithmetic) {
  check::Array<Numbers> out(1);
  const float x = 1.0f + 0x1p-12f;
  const double y = 1.0 + 0x1p-30;
  KDTREE_LAUNCH(numbers_kernel, 1, 1, 0, nullptr, out.get(), x, y);
  const Numbers n = out.read()[0];
  CHECK_EQUAL(n.popc, 17);
  CHECK_EQUAL(n.popcll, 34);
  CHECK_EQUAL(n.ffs, 5);
  CHECK_EQUAL(n.ffsll, 41);
  CHECK_EQUAL(n.clz, 31);
  CHECK_EQUAL(n.clz_zero, 32);
  CHECK_EQUAL(n.clzll, 23);
  CHECK_EQUAL(n.brev, 0x60000001u);
  CHECK_EQUAL(n.umulhi, 0xfffffffdu);
  CHECK_EQUAL(n.umul64hi, ~2ull);
  CHECK_EQUAL(n.bits, 0x3f800800u);
  CHECK_EQUAL(n.back, x);
  CHECK_EQUAL(n.wide_bits, 0x3ff0000000400000ll);
  CHECK_EQUAL(n.wide_back, y);
  CHECK_EQUAL(n.least, 1.0f);
  CHECK_EQUAL(n.most, x);
  CHECK_EQUAL(n.of_nan, x);
  CHECK_EQUAL(n.sum, 0x1p-11f);  // a fused multiply-add would keep 2^-24
  CHECK_EQUAL(n.wide_sum, 0x1p-29);
  CHECK_EQUAL(n.mixed_least, -3);
  CHECK_EQUAL(n.mixed_most, 0xfffffffdu);
}

TEST(softmax) {
  const int rows = check::tiny() ? 2 : 8, n = 1000;
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-8.0f, 8.0f);
  vector<float> x(static_cast<size_t>(rows) * n);
  for (float& value : x) value = uniform(random);
  check::Array<float> in(x), out(x.size());
  KDTREE_LAUNCH(softmax_kernel, rows, 128, 0, nullptr, in.get(), out.get(), n);
  CHECK_CUDA(cudaGetLastError());
  const vector<float> got = out.read();
  for (int r = 0; r < rows; ++r) {
    double sum = 0.0;
    for (int i = 0; i < n; ++i) sum += std::exp(static_cast<double>(x[r * n + i]));
    for (int i = 0; i < n; ++i) {
      const double expected = std::exp(static_cast<double>(x[r * n + i])) / sum;
      CHECK_NEAR(got[r * n + i], expected, 1e-6 * expected);
    }
  }
}

TEST(compaction_by_ballots_with_a_histogram) {
  const int n = check::tiny() ? 700 : 10000, block = 128;
  std::mt19937 random(2);
  vector<int> x(n);
  for (int& value : x) value = static_cast<int>(random() % 100000);
  check::Array<int> in(x), out(n), count({0});
  check::Array<unsigned> histogram(vector<unsigned>(16, 0));
  KDTREE_LAUNCH(compact_kernel, (n + block - 1) / block, block, 16 * sizeof(unsigned), nullptr, in.get(), n, out.get(),
                count.get(), histogram.get());
  CHECK_CUDA(cudaGetLastError());
  vector<int> odd;
  vector<unsigned> bins(16, 0);
  for (const int value : x) {
    if (value % 2 != 0) odd.push_back(value);
    ++bins[value % 16];
  }
  CHECK_EQUAL(count.read()[0], static_cast<int>(odd.size()));
  vector<int> got = out.read();
  got.resize(odd.size());
  std::sort(got.begin(), got.end());
  std::sort(odd.begin(), odd.end());
  CHECK_EQUAL_ALL(got, odd, "odd values");
  CHECK_EQUAL_ALL(histogram.read(), bins, "histogram");
}

TEST(indices) {
  const dim3 grid(3, 2, 4), block(5, 3, 2);
  const unsigned blocks = 24, threads = 30;
  check::Array<unsigned> out(blocks * threads);
  KDTREE_LAUNCH(indices_kernel, grid, block, 0, nullptr, out.get());
  const vector<unsigned> got = out.read();
  for (unsigned b = 0; b < blocks; ++b)
    for (unsigned t = 0; t < threads; ++t) CHECK_EQUAL(got[b * threads + t], 1000 * b + t);
}

TEST(parameters_are_copied_for_each_thread) {
  check::Array<int> out(40);
  KDTREE_LAUNCH(by_value_kernel, 1, 40, 0, nullptr, Parameters{{1, 2, 3, 4}, out.get()}, 10);
  const vector<int> got = out.read();
  for (int i = 0; i < 40; ++i) CHECK_EQUAL(got[i], (1 + i) * 10 + 4);
}

TEST(kernels_with_template_arguments) {
  check::Array<double> x(vector<double>(64, 1.5));
  KDTREE_LAUNCH((scaled_kernel<3, double>), 1, 64, 0, nullptr, x.get());
  CHECK_EQUAL_ALL(x.read(), vector<double>(64, 4.5), "x");
}

TEST(impossible_launches_are_errors) {
  const auto launch = [](dim3 grid, dim3 block, size_t bytes) {
    check::Array<double> x(vector<double>(64, 1.0));
    KDTREE_LAUNCH((scaled_kernel<1, double>), grid, block, bytes, nullptr, x.get());
    return cudaGetLastError();
  };
  CHECK(launch(1, 1025, 0) != cudaSuccess);
  CHECK(launch(1, dim3(32, 33), 0) != cudaSuccess);
  CHECK(launch(1, dim3(1, 1, 65), 0) != cudaSuccess);
  CHECK(launch(1, 0, 0) != cudaSuccess);
  CHECK(launch(0, 1, 0) != cudaSuccess);
  CHECK(launch(dim3(1, 65536), 1, 0) != cudaSuccess);
  CHECK_EQUAL(launch(1, 64, 48 * 1024), cudaSuccess);
  CHECK_EQUAL(launch(1, 64, 48 * 1024 + 1), cudaErrorInvalidValue);
  int most = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  if (const char* bytes = std::getenv("KDTREE_HOST_SHARED_MEMORY")) CHECK_EQUAL(most, std::atoi(bytes));
  const auto kernel = scaled_kernel<1, double>;
  const auto allow = [&](int bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  };
  CHECK_CUDA(allow(most));
  CHECK_EQUAL(launch(1, 64, most), cudaSuccess);
  CHECK_EQUAL(launch(1, 64, most + 1), cudaErrorInvalidValue);
  CHECK_EQUAL(allow(most + 1), cudaErrorInvalidValue);
  CHECK_EQUAL(cudaPeekAtLastError(), cudaErrorInvalidValue);
  CHECK_EQUAL(cudaGetLastError(), cudaErrorInvalidValue);
  CHECK_EQUAL(cudaGetLastError(), cudaSuccess);
}
