// The bf16 product: every row has the bits that it has alone, whatever the tile, and is near what float64 says.
#include <algorithm>

#include "kernels/linear_cublas.h"
#include "tests/bf16.h"
#include "tests/check.h"
#include "tests/random.h"

using namespace kdtree;
using check::from_bits, check::narrow_noise, check::narrow_of, check::wide_of;

namespace {

constexpr uint16_t kNanBits = 0x7fc0;
// Of a float32 sum, in parts of the sum of its terms' sizes. A tensor core may cut each term of an mma at 2^-24 of the
// largest; a term that is lost or taken twice costs a hundred times as much at the lengths here.
constexpr double kSumError = 0x1p-20;
constexpr double kRounding = 0x1p-8;  // of a value, to bf16

// A product in memory. gap: elements between rows of x and of y, NaN in x. Everything is followed by NaN.
struct Product {
  int rows, out, in, batch, gap;
  bool wide;
  std::vector<uint16_t> x, w;  // dense [batch, rows, in], [batch, out, in]
  check::Array<uint16_t> device_x, device_w;

  Product(int rows, int out, int in, int batch = 1, bool wide = true, int gap = 8)
      : rows(rows),
        out(out),
        in(in),
        batch(batch),
        gap(gap),
        wide(wide),
        x(narrow_noise(1, size(rows, in))),
        w(narrow_noise(2, size(out, in))),
        device_x(size(rows, in + gap) + 64),
        device_w(size(out, in) + 64) {
    std::vector<uint16_t> spread(device_x.size(), kNanBits), followed(device_w.size(), kNanBits);
    for (size_t row = 0; row < static_cast<size_t>(batch) * rows; ++row)
      std::copy_n(&x[row * in], in, &spread[row * (in + gap)]);
    std::copy(w.begin(), w.end(), followed.begin());
    device_x.write(spread.data(), spread.size());
    device_w.write(followed.data(), followed.size());
  }

  size_t size(int a, int b) const { return static_cast<size_t>(batch) * a * b; }

  LinearBf16Args arguments(int first, int count, void* y) const {
    LinearBf16Args a{};
    a.x = device_x.get() + static_cast<int64_t>(first) * (in + gap);
    a.x_stride = in + gap;
    a.x_batch = static_cast<int64_t>(rows) * a.x_stride;
    a.w = device_w.get();
    a.w_batch = static_cast<int64_t>(out) * in;
    a.y = y;
    a.y_stride = out + gap;
    a.y_batch = count * a.y_stride;
    a.rows = count;
    a.out = out;
    a.in = in;
    a.batch = batch;
    a.wide = wide;
    return a;
  }

  // Rows first..first+count-1 of each problem in one call: the bits of y, dense.
  template <class T>
  std::vector<uint32_t> of(int first, int count) const {
    const check::Array<T> y(size(count, out + gap));
    CHECK_OK(linear_bf16(arguments(first, count, y.get()), nullptr));
    const std::vector<T> all = y.read();
    const T filler = check::Array<T>(1).read()[0];
    std::vector<uint32_t> bits;
    for (size_t row = 0; row < static_cast<size_t>(batch) * count; ++row)
      for (int i = 0; i < out + gap; ++i) {
        const T value = all[row * (out + gap) + i];
        if (i < out)
          bits.push_back(value);
        else
          CHECK_EQUAL(value, filler);
      }
    return bits;
  }
  std::vector<uint32_t> run(int first, int count) const {
    return wide ? of<uint32_t>(first, count) : of<uint16_t>(first, count);
  }
  float value(uint32_t bits) const { return wide ? from_bits(bits) : wide_of(static_cast<uint16_t>(bits)); }

  // Every step-th row by itself: [rows][batch * out], nothing for the others.
  std::vector<std::vector<uint32_t>> alone(int step = 1) const {
    std::vector<std::vector<uint32_t>> result(rows);
    for (int row = 0; row < rows; row += step) result[row] = run(row, 1);
    return result;
  }

  void same_as_alone(const std::vector<std::vector<uint32_t>>& alone, int first, int count) const {
    const std::vector<uint32_t> together = run(first, count);
    for (int b = 0; b < batch; ++b)
      for (int m = 0; m < count; ++m) {
        if (alone[first + m].empty()) continue;
        const auto got = together.begin() + (static_cast<int64_t>(b) * count + m) * out;
        const auto right = alone[first + m].begin() + static_cast<int64_t>(b) * out;
        if (std::equal(got, got + out, right)) continue;
        const std::string what = "in " + std::to_string(in) + ", out " + std::to_string(out) + ", " +
                                 std::to_string(count) + " rows, row " + std::to_string(first + m);
        CHECK_EQUAL_ALL(std::vector<uint32_t>(got, got + out), std::vector<uint32_t>(right, right + out), what.c_str());
      }
  }

  void near_float64(const std::vector<uint32_t>& bits) const {
    for (size_t row = 0; row < static_cast<size_t>(batch) * rows; ++row)
      for (int o = 0; o < out; ++o) {
        const uint16_t* const terms = &w[(row / rows * out + o) * in];
        double sum = 0, size = 0;
        for (int k = 0; k < in; ++k) {
          const double term = static_cast<double>(wide_of(x[row * in + k])) * wide_of(terms[k]);
          sum += term;
          size += std::fabs(term);
        }
        CHECK_NEAR(value(bits[row * out + o]), sum, kSumError * size + (wide ? 0 : kRounding * std::fabs(sum)));
      }
  }
};

}  // namespace

TEST(every_number_of_rows_has_the_same_bits) {
  const int most = check::tiny() ? 20 : 257;
  for (const int in : {456, 1096}) {  // four slices and eight
    const Product product(most, 24, in);
    const auto alone = product.alone();
    for (int rows = 2; rows <= most; rows += check::tiny() ? 7 : 1)
      product.same_as_alone(alone, rows * 37 % (most - rows + 1), rows);
  }
}

TEST(tiles_of_many_outputs_have_the_same_bits) {
  const int most = check::tiny() ? 9 : 145;
  const Product product(most, 4096 + 8, check::tiny() ? 64 : 328, 1, true, 0);
  const auto alone = product.alone(9);
  for (const int rows : {2, 5, 9, 17, 33, 65, 73, 145}) {
    if (rows > most) continue;
    product.same_as_alone(alone, 0, rows);
    product.same_as_alone(alone, most - rows, rows);
  }
}

TEST(no_number_of_blocks_changes_bits) {
  // More and fewer blocks than multiprocessors: another depth of queues; shares of outputs that are no multiple of 16,
  // of one and two tiles of rows, and of long sums; more outputs than are shared equally.
  struct Sizes {
    int in, out, batch, rows;
  };
  for (const Sizes s : {Sizes{72, 21128, 1, 72}, Sizes{72, 18440, 1, 72}, Sizes{72, 12296, 1, 73},
                        Sizes{72, 8456, 1, 40}, Sizes{72, 4096, 1, 72}, Sizes{4096, 4104, 1, 8}, Sizes{72, 4096, 3, 72},
                        Sizes{1096, 2200, 2, 40}, Sizes{1096, 1080, 2, 72}}) {
    if (check::tiny() && (s.out * s.batch > 5000 || s.in > 2000)) continue;
    const Product product(s.rows, s.out, s.in, s.batch);
    const auto alone = product.alone(13);
    for (const int rows : {8, 14, 21, 33, 40, 72, 73})
      if (rows <= s.rows) product.same_as_alone(alone, s.rows - rows, rows);
  }
}

TEST(every_length_of_sum) {
  for (const int in : {8, 16, 24, 32, 56, 64, 72, 128, 320, 520, 1536, 7168}) {
    if (check::tiny() && in > 320) continue;
    const Product product(check::tiny() ? 18 : 41, 19, in);
    const auto alone = product.alone();
    for (const int rows : {1, 3, 9, 17, 25, 41})
      if (rows <= product.rows) product.same_as_alone(alone, product.rows - rows, rows);
    product.near_float64(product.run(0, product.rows));
  }
}

TEST(problems_and_strides) {
  for (const bool wide : {true, false})
    for (const int gap : {0, 8, 24})
      for (const int rows : {1, 3, 10}) {
        const Product product(rows, 21, 136, 3, wide, gap);
        product.near_float64(product.run(0, rows));
        product.same_as_alone(product.alone(), 0, rows);
      }
}

TEST(bf16_is_the_nearest_to_float32) {
  const Product exact(5, 37, 264, 1, true), rounded(5, 37, 264, 1, false);
  const std::vector<uint32_t> sums = exact.run(0, 5), got = rounded.run(0, 5);
  for (size_t i = 0; i < sums.size(); ++i) {
    const float sum = from_bits(sums[i]), there = rounded.value(got[i]);
    for (const uint32_t other : {got[i] - 1, got[i] + 1})
      CHECK(std::fabs(there - sum) <= std::fabs(rounded.value(other) - sum));
  }
}

TEST(rounding_at_the_edges) {
  struct Case {
    uint16_t terms[2];
    uint16_t sum;
  };
  const std::vector<Case> cases = {{{0x3f80, 0x3b80}, 0x3f80},     // 1 + 2^-8: halfway, down to even
                                   {{0x3f81, 0x3b80}, 0x3f82},     // 1 + 2^-7 + 2^-8: halfway, up to even
                                   {{0x7f7f, 0x7b00}, 0x7f80},     // the largest one and half of its last bit: infinity
                                   {{0x7f80, 0xff80}, kNanBits},   // infinity less infinity
                                   {{0xffff, 0x3f80}, kNanBits}};  // a NaN with all bits set: no carry
  std::vector<uint16_t> x(8 * cases.size());
  for (size_t i = 0; i < cases.size(); ++i) std::copy_n(cases[i].terms, 2, &x[8 * i]);
  const check::Array<uint16_t> device_x(x), ones(std::vector<uint16_t>(8, 0x3f80)), y(cases.size());
  LinearBf16Args a{};
  a.x = device_x.get();
  a.x_stride = a.in = 8;
  a.w = ones.get();
  a.y = y.get();
  a.y_stride = a.out = a.batch = 1;
  a.rows = static_cast<int>(cases.size());
  CHECK_OK(linear_bf16(a, nullptr));
  const std::vector<uint16_t> got = y.read();
  for (size_t i = 0; i < cases.size(); ++i) CHECK_EQUAL(got[i], cases[i].sum);
}

TEST(add_comes_last) {
  const int rows = 11, out = 21;
  const Product product(rows, out, 136, 1, true, 0);
  const std::vector<uint32_t> sums = product.run(0, rows);
  const std::vector<float> z = check::noise(5, rows * out);
  const std::vector<uint16_t> narrow_z = narrow_noise(5, rows * out);
  const check::Array<float> other(z), inside(z), y(rows * out);
  const check::Array<uint16_t> narrow_inside(narrow_z);
  LinearBf16Args a = product.arguments(0, rows, y.get());
  a.add = other.get();
  CHECK_OK(linear_bf16(a, nullptr));
  a.add = a.y = inside.get();
  CHECK_OK(linear_bf16(a, nullptr));
  a.add = a.y = narrow_inside.get();
  a.wide = false;
  CHECK_OK(linear_bf16(a, nullptr));
  const std::vector<float> got = y.read(), in_place = inside.read();
  const std::vector<uint16_t> narrow_got = narrow_inside.read();
  for (size_t i = 0; i < z.size(); ++i) {
    const float right = from_bits(sums[i]) + z[i];
    CHECK_EQUAL(got[i], right);
    CHECK_EQUAL(in_place[i], right);
    CHECK_EQUAL(narrow_got[i], narrow_of(from_bits(sums[i]) + wide_of(narrow_z[i])));
  }
}

TEST(a_broken_row_breaks_no_other) {
  for (const int rows : {2, 9, 30}) {
    const Product product(rows, 19, 136);
    const int broken = rows - 2;
    std::vector<uint16_t> x(product.device_x.size(), kNanBits);
    for (int m = 0; m < rows; ++m)
      if (m != broken) std::copy_n(&product.x[m * product.in], product.in, &x[m * (product.in + product.gap)]);
    const std::vector<uint32_t> right = product.run(0, rows);
    const check::Array<uint16_t> device_x(x);
    const check::Array<uint32_t> y(rows * (product.out + product.gap));
    LinearBf16Args a = product.arguments(0, rows, y.get());
    a.x = device_x.get();
    CHECK_OK(linear_bf16(a, nullptr));
    const std::vector<uint32_t> got = y.read();
    for (int m = 0; m < rows; ++m)
      for (int o = 0; o < product.out; ++o) {
        const uint32_t bits = got[m * (product.out + product.gap) + o];
        if (m == broken)
          CHECK(std::isnan(from_bits(bits)));
        else
          CHECK_EQUAL(bits, right[m * product.out + o]);
      }
  }
}

TEST(cublas_agrees_or_says_why_not) {
  for (const bool wide : {true, false}) {
    const Product product(5, 70, 136, 3, wide);
    const check::Array<uint32_t> y(product.size(5, product.out + product.gap));
    const kdtree_status status = linear_cublas(product.arguments(0, 5, y.get()), nullptr);
    if (status == KDTREE_UNSUPPORTED) {
      CHECK(std::string(kdtree_last_error()).find("cuBLAS") != std::string::npos);
      continue;
    }
    CHECK_OK(status);
    const std::vector<uint32_t> all = y.read();
    const uint16_t* const narrow = reinterpret_cast<const uint16_t*>(all.data());
    for (int problem = 0; problem < product.batch; ++problem)
      for (int row = 0; row < product.rows; ++row)
        for (int out = 0; out < product.out; ++out) {
          double sum = 0, sizes = 0;
          for (int k = 0; k < product.in; ++k) {
            const double term =
                static_cast<double>(wide_of(product.x[(problem * product.rows + row) * product.in + k])) *
                wide_of(product.w[(problem * product.out + out) * product.in + k]);
            sum += term;
            sizes += std::fabs(term);
          }
          const size_t at = static_cast<size_t>(problem * product.rows + row) * (product.out + product.gap) + out;
          const double got = wide ? from_bits(all[at]) : wide_of(narrow[at]);
          CHECK_NEAR(got, sum, kSumError * sizes + (wide ? 0 : kRounding * std::fabs(sum)));
        }
  }
}

TEST(refusals) {
  const check::Array<uint16_t> memory(512);
  LinearBf16Args good{};
  good.x = memory.get();
  good.x_stride = 16;
  good.w = memory.get() + 64;
  good.y = memory.get() + 256;
  good.y_stride = 4;
  good.rows = 2;
  good.out = 4;
  good.in = 16;
  good.batch = 1;
  CHECK_OK(linear_bf16(good, nullptr));
  const auto refused = [](const LinearBf16Args& a, kdtree_status status, const std::string& message) {
    CHECK_STATUS(linear_bf16(a, nullptr), status);
    CHECK_EQUAL(std::string(kdtree_last_error()).substr(0, message.size()), message);
  };
  LinearBf16Args a = good;
  a.rows = 0;
  refused(a, KDTREE_SIZE, "linear_bf16: rows is 0, it must be in [1, 1073741824]");
  a = good;
  a.in = 12;
  refused(a, KDTREE_SIZE, "linear_bf16: in is 12, it must be a multiple of 8");
  a = good;
  a.x_stride = 20;
  refused(a, KDTREE_SIZE, "linear_bf16: x_stride is 20, it must be a multiple of 8");
  a = good;
  a.x_batch = 36;
  refused(a, KDTREE_SIZE, "linear_bf16: x_batch is 36, it must be a multiple of 8");
  a = good;
  a.w_batch = 4;
  refused(a, KDTREE_SIZE, "linear_bf16: w_batch is 4, it must be a multiple of 8");
  a = good;
  a.x_stride = 8;
  refused(a, KDTREE_SIZE, "linear_bf16: x_stride is 8, it must be in [16, ");
  a = good;
  a.y_stride = 3;
  refused(a, KDTREE_SIZE, "linear_bf16: y_stride is 3, it must be in [4, ");
  a = good;
  a.w = nullptr;
  refused(a, KDTREE_POINTER, "linear_bf16: w is NULL");
  a = good;
  a.x += 4;
  refused(a, KDTREE_ALIGNMENT, "linear_bf16: x at ");
  a = good;
  a.wide = true;
  a.y = memory.get() + 257;
  refused(a, KDTREE_ALIGNMENT, "linear_bf16: y at ");
}
