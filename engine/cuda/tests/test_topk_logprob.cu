// Top-k lists: the golden file, hard rows against a sort, sums that many blocks share, refusals.
#include <algorithm>
#include <limits>
#include <numeric>

#include "kernels/topk_sum.h"
#include "tests/check.h"
#include "tests/random.h"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float value(float x) { return x; }
float value(uint16_t x) {
  const uint32_t wide = static_cast<uint32_t>(x) << 16;
  float result;
  std::memcpy(&result, &wide, sizeof(result));
  return result;
}

uint16_t to_bf16(float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof(wide));
  return static_cast<uint16_t>(wide >> 16 | (x != x ? 1 : 0));  // cut off: any bf16 will do
}

// Floats next to each other differ by 1.
int64_t place(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits < 0 ? int64_t{INT32_MIN} - bits : bits;
}

// A call with all its arrays. The logits begin `offset` elements off a boundary.
template <typename T>
struct Call {
  int requests, depths, vocab_size, k;
  int64_t stride;
  size_t offset;
  check::Array<T> logits;
  check::Array<int32_t> ids, status;
  check::Array<float> lp, logz;
  check::Array<unsigned char> workspace;
  kdtree_topk_logprob_args args{};

  Call(int requests, int depths, int vocab_size, int k, int64_t stride, size_t offset = 0)
      : requests(requests),
        depths(depths),
        vocab_size(vocab_size),
        k(k),
        stride(stride),
        offset(offset),
        logits(offset + static_cast<size_t>(requests) * depths * stride),
        ids(lists()),
        status(3 * static_cast<size_t>(requests)),
        lp(lists()),
        logz(static_cast<size_t>(requests) * depths),
        workspace(kdtree_topk_logprob_workspace(requests, depths, vocab_size, k)) {
    args.struct_size = sizeof(args);
    args.requests = requests;
    args.depth_limit = depths;
    args.vocab_size = vocab_size;
    args.k = k;
    args.dtype = sizeof(T) == 4 ? KDTREE_F32 : KDTREE_BF16;
    args.row_stride = stride;
    args.logits = logits.get() + offset;
    args.ids = ids.get();
    args.lp = lp.get();
    args.logz = logz.get();
    args.status = status.get();
    args.workspace = workspace.get();
    args.workspace_size = workspace.size();
  }

  size_t lists() const { return static_cast<size_t>(requests) * depths * k; }

  // Rows of vocab_size; what lies between them is NaN.
  void set(const std::vector<T>& rows) {
    std::vector<T> all(logits.size(), sizeof(T) == 4 ? static_cast<T>(kNan) : static_cast<T>(0x7fc0));
    for (int64_t row = 0; row < static_cast<int64_t>(requests) * depths; ++row)
      std::copy_n(rows.begin() + row * vocab_size, vocab_size, all.begin() + offset + row * stride);
    logits.write(all.data(), all.size());
  }

  // Runs, and holds every list against a stable sort and every logz against a sum in long double.
  void check(const std::vector<T>& rows, const std::string& what) {
    set(rows);
    CHECK_OK(kdtree_topk_logprob(&args));
    CHECK_EQUAL_ALL(status.read(), std::vector<int32_t>(status.size(), 0), (what + ": status").c_str());
    const std::vector<int32_t> got_ids = ids.read();
    const std::vector<float> got_lp = lp.read(), got_logz = logz.read();
    std::vector<int32_t> order(vocab_size);
    for (size_t row = 0; row < got_logz.size(); ++row) {
      const T* x = rows.data() + row * vocab_size;
      std::iota(order.begin(), order.end(), 0);
      std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](int32_t a, int32_t b) {
        return value(x[a]) > value(x[b]) || (value(x[a]) == value(x[b]) && a < b);
      });
      const std::string at = what + ", row " + std::to_string(row);
      CHECK_EQUAL_ALL(std::vector<int32_t>(got_ids.begin() + row * k, got_ids.begin() + (row + 1) * k),
                      std::vector<int32_t>(order.begin(), order.begin() + k), (at + ": ids").c_str());
      const float z = log_sum_exp(x);
      if (!(z == got_logz[row] || std::abs(place(z) - place(got_logz[row])) <= 1))
        check::fail(__FILE__, __LINE__, at + ": logz " + check::text(got_logz[row]) + ", expected " + check::text(z));
      for (int i = 0; i < k; ++i) {
        const float wanted = z == -kInfinity ? -kInfinity : value(x[order[i]]) - got_logz[row];
        const float got = got_lp[row * k + i];
        if (std::memcmp(&wanted, &got, sizeof(got)) != 0)
          check::fail(__FILE__, __LINE__, at + ", rank " + std::to_string(i) + ": lp " + check::text(got));
      }
    }
  }

  float log_sum_exp(const T* x) const {
    long double peak = -kInfinity, others = -1;
    for (int i = 0; i < vocab_size; ++i) peak = std::max(peak, static_cast<long double>(value(x[i])));
    if (peak == -kInfinity) return -kInfinity;
    for (int i = 0; i < vocab_size; ++i) others += std::exp(static_cast<long double>(value(x[i])) - peak);
    return static_cast<float>(peak + std::log1p(others));
  }
};

template <typename T>
std::vector<T> as(const std::vector<float>& values) {
  if constexpr (sizeof(T) == 4) {
    return values;
  } else {
    std::vector<T> result(values.size());
    std::transform(values.begin(), values.end(), result.begin(), to_bf16);
    return result;
  }
}

// Roughly normal.
std::vector<float> bell(uint64_t seed, size_t n, float scale = 3, float shift = 0) {
  const std::vector<float> parts = check::noise(seed, 3 * n);
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) values[i] = shift + scale * (parts[3 * i] + parts[3 * i + 1] + parts[3 * i + 2]);
  return values;
}

__global__ void exp_kernel(const float* x, float* fraction, double* term, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  fraction[i] = kdtree::exp2_approx(30 * (x[i] - 1));
  const kdtree::FastExp exponential(20.f);
  term[i] = exponential(20 * x[i]) * kdtree::power_of_two(exponential.exponent()) * kdtree::FastExp::rest(20);
}

}  // namespace

// What the bound on the fast sum's error is made of.
TEST(terms_of_the_fast_sum) {
  const int n = check::tiny() ? 1 << 12 : 1 << 20;
  const std::vector<float> x = check::noise(7, n);
  const check::Array<float> in(x), fraction(n);
  const check::Array<double> term(n);
  KDTREE_LAUNCH(exp_kernel, dim3(n / 256), dim3(256), 0, nullptr, in.get(), fraction.get(), term.get(), n);
  const std::vector<float> fractions = fraction.read();
  const std::vector<double> terms = term.read();
  for (int i = 0; i < n; ++i) {
    CHECK_NEAR(fractions[i] / std::exp2(static_cast<double>(30 * (x[i] - 1))), 1, 0x1p-22);
    const double binades = (20 - 20 * x[i]) / std::log(2.0);
    CHECK_NEAR(terms[i] / std::exp(static_cast<double>(20 * x[i])), 1, 2.6e-7 + 5.1e-8 * binades);
  }
}

TEST(golden_lists) {
  const kdtr::File file = check::golden("topk.kdtr");
  int cases = 0;
  for (size_t i = 0; i < file.size(); ++i) {
    const std::string name(file[i].name);
    const size_t slash = name.rfind("/logits");
    if (slash == std::string::npos) continue;
    const std::string at = name.substr(0, slash + 1);
    const auto run = [&](const auto& logits) {
      using T = std::decay_t<decltype(logits[0])>;
      const int depths = static_cast<int>(logits.shape[0]), stride = static_cast<int>(logits.shape[1]);
      const auto ids = file.at(at + "ids").as<int32_t, 2>();
      Call<T> call(1, depths, file.at(at + "vocab_size").scalar<int32_t>(), static_cast<int>(ids.shape[1]), stride);
      call.logits.write(logits.data, logits.size);
      CHECK_OK(kdtree_topk_logprob(&call.args));
      CHECK_EQUAL_ALL(call.ids.read(), ids, at.c_str());
      const auto logz = file.at(at + "logz").as<float, 1>();
      const std::vector<float> got = call.logz.read();
      for (size_t d = 0; d < got.size(); ++d) CHECK(got[d] == logz[d] || std::abs(place(got[d]) - place(logz[d])) <= 1);
    };
    if (file[i].dtype == kdtr::DType::f32)
      run(file[i].as<float, 2>());
    else
      run(file[i].bits<uint16_t, 2>());
    ++cases;
  }
  CHECK(cases >= 18);
}

template <typename T>
void check_sizes() {
  for (const int vocab_size : {1, 9, 1023, 2048, 2049, 5000, 16384, 16391})
    for (const int k : {0, 1, 64, 256, 257, 1024}) {
      if (k > vocab_size || (check::tiny() && vocab_size > 5000)) continue;
      Call<T> call(1, 2, vocab_size, k, vocab_size);
      call.check(as<T>(bell(vocab_size + k, 2 * static_cast<size_t>(vocab_size))),
                 "V " + std::to_string(vocab_size) + ", k " + std::to_string(k));
    }
}
TEST(sizes_float32) { check_sizes<float>(); }
TEST(sizes_bfloat16) { check_sizes<uint16_t>(); }

// Too many groups, candidates or ties for the room that is kept for them.
template <typename T>
void check_hard_rows() {
  const int vocab_size = check::tiny() ? 9000 : 40000;
  std::vector<float> rows(7 * static_cast<size_t>(vocab_size));
  const std::vector<float> some = bell(1, vocab_size);
  for (int i = 0; i < vocab_size; ++i) {
    float* const x = rows.data() + i;
    x[0 * vocab_size] = -5 + 25.f * i / vocab_size;
    x[1 * vocab_size] = 2.5f;
    x[2 * vocab_size] = some[i] > 0 ? 1.f : 0.f;
    x[3 * vocab_size] = -kInfinity;
    x[4 * vocab_size] = i % 1009 == 17 ? some[i] : -kInfinity;
    x[5 * vocab_size] = i == 4500 ? 3e38f : some[i];
    x[6 * vocab_size] = i == 7 ? 1.f : some[i] / 100 - 3;
  }
  for (const int k : {64, 512}) {
    Call<T> call(1, 7, vocab_size, k, vocab_size);
    call.check(as<T>(rows), "k " + std::to_string(k));
  }
}
TEST(hard_rows_float32) { check_hard_rows<float>(); }
TEST(hard_rows_bfloat16) { check_hard_rows<uint16_t>(); }

// Normalised rows need the precise sum, which several blocks share when there are few rows; and the same bytes come out
// for one request as for many, at every alignment.
template <typename T>
void check_shares() {
  const int vocab_size = check::tiny() ? 3001 : 20001, requests = check::tiny() ? 2 : 4;
  for (const float logz : {0.f, 2.f, 9.f}) {
    std::vector<float> row = bell(3, vocab_size);
    double sum = 0;
    for (const float x : row) sum += std::exp(static_cast<double>(x));
    for (float& x : row) x += logz - static_cast<float>(std::log(sum));
    const std::vector<T> rounded = as<T>(row);
    Call<T> solo(1, 1, vocab_size, 50, vocab_size);
    solo.check(rounded, "solo");
    std::vector<T> many;
    for (int r = 0; r < requests; ++r) many.insert(many.end(), rounded.begin(), rounded.end());
    for (const size_t offset : {0, 1, 2, 3, 5, 7}) {
      Call<T> batch(requests, 1, vocab_size, 50, vocab_size + 2, offset);
      batch.check(many, "batch");
      for (int r = 0; r < requests; ++r) CHECK(batch.logz.read()[r] == solo.logz.read()[0]);
    }
  }
}
TEST(shares_float32) { check_shares<float>(); }
TEST(shares_bfloat16) { check_shares<uint16_t>(); }

// Rows that end where the memory ends, at any alignment: no load of 16 bytes goes past them.
template <typename T>
void check_edges() {
  const int vocab_size = 3 * 1024;
  const std::vector<T> row = as<T>(bell(4, vocab_size));
  Call<T> wanted(1, 1, vocab_size, 20, vocab_size);
  wanted.check(row, "aligned");
  for (const size_t offset : {0, 1, 2, 4, 5}) {
    T* memory = nullptr;
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&memory), (offset + vocab_size) * sizeof(T)));
    CHECK_CUDA(cudaMemcpy(memory + offset, row.data(), vocab_size * sizeof(T), cudaMemcpyHostToDevice));
    Call<T> call(1, 1, vocab_size, 20, vocab_size);
    call.args.logits = memory + offset;
    CHECK_OK(kdtree_topk_logprob(&call.args));
    CHECK_EQUAL_ALL(call.ids.read(), wanted.ids.read(), "ids");
    CHECK_EQUAL_ALL(call.lp.read(), wanted.lp.read(), "lp");
    CHECK_CUDA(cudaFree(memory));
  }
}
TEST(edges_float32) { check_edges<float>(); }
TEST(edges_bfloat16) { check_edges<uint16_t>(); }

// Rows enough for the kernel that reads and selects in one: roughly normal ones, and one each that is normalised, all
// equal and ascending.
template <typename T>
void check_many_rows() {
  const int requests = check::tiny() ? 43 : 90, depths = 3, vocab_size = 2200;
  for (const int k : {30, 300}) {
    std::vector<float> rows = bell(static_cast<uint64_t>(k), static_cast<size_t>(requests) * depths * vocab_size);
    double sum = 0;
    for (int i = 0; i < vocab_size; ++i) sum += std::exp(static_cast<double>(rows[i]));
    for (int i = 0; i < vocab_size; ++i) {
      rows[i] -= static_cast<float>(std::log(sum));
      rows[10 * vocab_size + i] = 2.5f;
      rows[20 * vocab_size + i] = -5 + 25.f * i / vocab_size;
    }
    Call<T> call(requests, depths, vocab_size, k, vocab_size);
    call.check(as<T>(rows), "k " + std::to_string(k));
  }
}
TEST(many_rows_float32) { check_many_rows<float>(); }
TEST(many_rows_bfloat16) { check_many_rows<uint16_t>(); }

TEST(refused_logits) {
  const int vocab_size = 3000, k = 5;
  Call<float> call(3, 2, vocab_size, k, vocab_size);
  std::vector<float> rows = bell(5, 6 * static_cast<size_t>(vocab_size));
  rows[1 * vocab_size + 2999] = kInfinity;  // request 0, depth 2
  rows[4 * vocab_size + 2000] = kInfinity;  // request 2, depth 1: not the first
  rows[4 * vocab_size + 1999] = kNan;
  call.set(rows);
  const check::Array<int32_t> limits({2, 1, 2});
  call.args.depth_limits = limits.get();
  CHECK_OK(kdtree_topk_logprob(&call.args));
  const std::vector<int32_t> wanted = {KDTREE_REQUEST_INFINITE, 2, 2999, 0, 0, 0, KDTREE_REQUEST_NAN, 1, 1999};
  CHECK_EQUAL_ALL(call.status.read(), wanted, "status");
  const std::vector<int32_t> ids = call.ids.read();
  const std::vector<float> lp = call.lp.read(), logz = call.logz.read();
  for (const int row : {0, 1, 4, 5}) {
    CHECK_EQUAL(logz[row], 0.f);
    for (int i = 0; i < k; ++i) CHECK(ids[row * k + i] == 0 && lp[row * k + i] == -kInfinity);
  }
  CHECK_EQUAL(static_cast<uint32_t>(ids[3 * k]), 0xa5a5a5a5u);  // past its limit: not written
}

TEST(carried_failures) {
  const int vocab_size = 1500;
  Call<uint16_t> call(3, 1, vocab_size, 3, vocab_size);
  call.set(as<uint16_t>(bell(6, 3 * static_cast<size_t>(vocab_size))));
  const std::vector<int32_t> before = {KDTREE_REQUEST_PATH, 4, 5, 0, 0, 0, 0, 0, 0};
  const check::Array<int32_t> limits({1, 2, 0});
  call.status.write(before.data(), before.size());
  call.args.before = call.status.get();  // one array for both
  call.args.depth_limits = limits.get();
  CHECK_OK(kdtree_topk_logprob(&call.args));
  const std::vector<int32_t> wanted = {KDTREE_REQUEST_PATH, 4, 5, KDTREE_REQUEST_OWN_SIZE, 2, 1, 0, 0, 0};
  CHECK_EQUAL_ALL(call.status.read(), wanted, "status");
}

TEST(refused_arguments) {
  Call<float> call(1, 1, 10, 4, 10);
  kdtree_topk_logprob_args args = call.args;
  args.k = 11;
  CHECK_STATUS(kdtree_topk_logprob(&args), KDTREE_SIZE);
  CHECK(std::string(kdtree_last_error()) == "kdtree_topk_logprob: k is 11, it must be in [0, 10]");
  args = call.args;
  args.workspace_size -= 1;
  CHECK_STATUS(kdtree_topk_logprob(&args), KDTREE_WORKSPACE);
  CHECK_STATUS(kdtree_topk_logprob(nullptr), KDTREE_POINTER);
}
