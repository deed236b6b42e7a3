// The product of rows and weights: bit for bit the order that linear_order.h promises, for every number of rows.
#include <algorithm>
#include <limits>

#include "kernels/layers.h"
#include "tests/check.h"
#include "tests/random.h"

using namespace kdtree;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Row x times row w as the canonical order says, one number after the other.
float canonical(const float* x, const float* w, int in) {
  float lanes[32] = {}, joined[32];
  for (int k = 0; k < in; ++k) lanes[k % 128 / 4] = std::fmaf(x[k], w[k], lanes[k % 128 / 4]);
  for (int bit = 16; bit > 0; bit /= 2) {
    for (int lane = 0; lane < 32; ++lane) joined[lane] = lanes[lane] + lanes[lane ^ bit];
    std::memcpy(lanes, joined, sizeof(lanes));
  }
  return lanes[0];
}

// A product in memory. `shift`: how many floats x, w and y begin behind an address aligned to 256 bytes; `gap`: floats
// between rows of x and y, NaN in x.
struct Product {
  int rows, out, in, batch, shift, gap;
  std::vector<float> x, w, expected;  // dense [batch, rows, in], [batch, out, in], [batch, rows, out]
  check::Array<float> device_x, device_w;

  Product(int rows, int out, int in, int batch = 1, int shift = 0, int gap = 4)
      : rows(rows),
        out(out),
        in(in),
        batch(batch),
        shift(shift),
        gap(gap),
        x(check::noise(1, size(rows, in))),
        w(check::noise(2, size(out, in))),
        expected(size(rows, out)),
        device_x(size(rows, in + gap) + shift),
        device_w(size(out, in) + shift) {
    for (int b = 0; b < batch; ++b)
      for (int m = 0; m < rows; ++m)
        for (int o = 0; o < out; ++o)
          expected[(static_cast<size_t>(b) * rows + m) * out + o] =
              canonical(&x[(static_cast<size_t>(b) * rows + m) * in], &w[(static_cast<size_t>(b) * out + o) * in], in);
    std::vector<float> spread(device_x.size(), kNan), shifted(device_w.size(), kNan);
    for (size_t row = 0; row < static_cast<size_t>(batch) * rows; ++row)
      std::copy_n(&x[row * in], in, &spread[row * (in + gap) + shift]);
    std::copy(w.begin(), w.end(), shifted.begin() + shift);
    device_x.write(spread.data(), spread.size());
    device_w.write(shifted.data(), shifted.size());
  }

  size_t size(int a, int b) const { return static_cast<size_t>(batch) * a * b; }

  // Rows first..first+count-1 of each problem in one call.
  void holds(int first, int count) const {
    check::Array<float> y(size(count, out + gap) + shift);
    LinearArgs a{};
    a.x = device_x.get() + shift + static_cast<int64_t>(first) * (in + gap);
    a.x_stride = in + gap;
    a.x_batch = static_cast<int64_t>(rows) * a.x_stride;
    a.w = device_w.get() + shift;
    a.w_batch = static_cast<int64_t>(out) * in;
    a.y = y.get() + shift;
    a.y_stride = out + gap;
    a.y_batch = count * a.y_stride;
    a.rows = count;
    a.out = out;
    a.in = in;
    a.batch = batch;
    CHECK_OK(linear(a, Gemm::kRowInvariant, nullptr));
    const std::vector<float> got = y.read();
    const float filler = check::Array<float>(1).read()[0];
    for (int b = 0; b < batch; ++b)
      for (int m = 0; m < count; ++m) {
        const float* const row = &got[static_cast<size_t>(b * count + m) * (out + gap) + shift];
        const float* const right = &expected[(static_cast<size_t>(b) * rows + first + m) * out];
        const std::string what = "in " + std::to_string(in) + ", rows " + std::to_string(count) + ", problem " +
                                 std::to_string(b) + ", row " + std::to_string(first + m);
        CHECK_EQUAL_ALL(check::bits({row, row + out}), check::bits({right, right + out}), what.c_str());
        for (int i = out; i < out + gap && m + 1 < count; ++i) CHECK_EQUAL(row[i], filler);
      }
  }
};

LinearArgs arguments(const float* x, const float* w, float* y, int rows, int out, int in) {
  LinearArgs a{};
  a.x = x;
  a.x_stride = in;
  a.w = w;
  a.y = y;
  a.y_stride = out;
  a.rows = rows;
  a.out = out;
  a.in = in;
  a.batch = 1;
  return a;
}

}  // namespace

TEST(every_number_of_rows_has_the_same_bits) {
  const int most = check::tiny() ? 19 : 70;
  for (const int in : {1, 3, 4, 31, 32, 127, 128, 129, 320, 576, 1536, 7168}) {
    if (check::tiny() && in > 320) continue;
    const Product product(most, in > 576 ? 5 : 19, in);
    for (int rows = 1; rows <= most; rows += check::tiny() ? 6 : 1) product.holds(0, rows);
  }
}

TEST(a_row_may_be_anywhere) {
  const Product product(check::tiny() ? 20 : 70, 5, 260);
  for (const int rows : {1, 2, 3, 8, 9, 17, 18, 35}) {
    if (rows > product.rows - 2) continue;
    product.holds(1, rows);
    product.holds(product.rows - rows, rows);
  }
}

TEST(no_alignment_changes_bits) {
  for (const int shift : {1, 2, 3})
    for (const int rows : {1, 2, 4, 7, 9, 20}) Product(rows, 9, 132, 2, shift, 3).holds(0, rows);
  for (const int gap : {0, 1, 2})
    for (const int rows : {1, 3, 8, 18}) Product(rows, 9, 132, 2, 0, gap).holds(0, rows);
}

TEST(wide_tiles_have_the_same_bits) {
  // Enough blocks that each takes 32 outputs.
  for (const int rows : {9, 17, 33, 50})
    if (!check::tiny() || rows == 17) Product(rows, 33, 260, check::tiny() ? 64 : 66).holds(0, rows);
}

TEST(one_row_many_outputs) {
  Product(1, 4097, 36).holds(0, 1);
  if (!check::tiny()) Product(1, 4100, 2048).holds(0, 1);
}

TEST(add_comes_last) {
  const int in = 132, out = 21;
  for (const int rows : {1, 6, 19}) {
    const std::vector<float> x = check::noise(3, rows * in), w = check::noise(4, out * in);
    const std::vector<float> z = check::noise(5, rows * out);
    const check::Array<float> device_x(x), device_w(w), other(z), inside(z), y(rows * out);
    LinearArgs a = arguments(device_x.get(), device_w.get(), y.get(), rows, out, in);
    a.add = other.get();
    CHECK_OK(linear(a, Gemm::kRowInvariant, nullptr));
    a.add = a.y = inside.get();
    CHECK_OK(linear(a, Gemm::kRowInvariant, nullptr));
    std::vector<float> right(z);
    for (int m = 0; m < rows; ++m)
      for (int o = 0; o < out; ++o) right[m * out + o] = canonical(&x[m * in], &w[o * in], in) + z[m * out + o];
    CHECK_EQUAL_ALL(check::bits(y.read()), check::bits(right), "y");
    CHECK_EQUAL_ALL(check::bits(inside.read()), check::bits(right), "y in place");
  }
}

TEST(a_broken_row_breaks_no_other) {
  for (const int rows : {2, 5, 20}) {
    const int in = 140, out = 7, broken = rows - 2;
    std::vector<float> x = check::noise(6, rows * in);
    const std::vector<float> w = check::noise(7, out * in);
    for (int k = 0; k < in; ++k) x[broken * in + k] = kNan;
    const check::Array<float> device_x(x), device_w(w), y(rows * out);
    CHECK_OK(linear(arguments(device_x.get(), device_w.get(), y.get(), rows, out, in), Gemm::kRowInvariant, nullptr));
    const std::vector<float> got = y.read();
    for (int m = 0; m < rows; ++m)
      for (int o = 0; o < out; ++o) CHECK_EQUAL(std::isnan(got[m * out + o]), m == broken);
  }
}

TEST(refusals) {
  const check::Array<float> memory(64);
  const LinearArgs good = arguments(memory.get(), memory.get() + 16, memory.get() + 32, 2, 4, 4);
  CHECK_OK(linear(good, Gemm::kRowInvariant, nullptr));
  LinearArgs a = good;
  a.rows = 0;
  CHECK_STATUS(linear(a, Gemm::kRowInvariant, nullptr), KDTREE_SIZE);
  CHECK_EQUAL(std::string(kdtree_last_error()), std::string("linear: rows is 0, it must be in [1, 1073741824]"));
  a = good;
  a.x_stride = 3;
  CHECK_STATUS(linear(a, Gemm::kRowInvariant, nullptr), KDTREE_SIZE);
  a = good;
  a.y_stride = 3;
  CHECK_STATUS(linear(a, Gemm::kRowInvariant, nullptr), KDTREE_SIZE);
  a = good;
  a.batch = 65536;
  CHECK_STATUS(linear(a, Gemm::kRowInvariant, nullptr), KDTREE_SIZE);
  a = good;
  a.w = nullptr;
  CHECK_STATUS(linear(a, Gemm::kRowInvariant, nullptr), KDTREE_POINTER);
  CHECK_STATUS(linear(good, static_cast<Gemm>(2), nullptr), KDTREE_SIZE);
}

TEST(cublas_agrees_or_says_why_not) {
  const int rows = 5, out = 12, in = 200, batch = 3;
  const Product product(rows, out, in, batch);
  const std::vector<float> z = check::noise(8, batch * rows * out);
  const check::Array<float> other(z), y(z.size());
  LinearArgs a = arguments(product.device_x.get(), product.device_w.get(), y.get(), rows, out, in);
  a.x_stride = in + product.gap;
  a.x_batch = rows * a.x_stride;
  a.w_batch = out * in;
  a.y_batch = rows * out;
  a.batch = batch;
  a.add = other.get();
  const kdtree_status status = linear(a, Gemm::kCublas, nullptr);
  if (status == KDTREE_UNSUPPORTED) {
    CHECK(std::string(kdtree_last_error()).find("cuBLAS") != std::string::npos);
    return;
  }
  CHECK_OK(status);
  const std::vector<float> got = y.read();
  for (size_t i = 0; i < got.size(); ++i) CHECK_NEAR(got[i], product.expected[i] + z[i], 2e-5);
}
