// The bf16 experts: the bits of the products called row by row, for every number of rows; near what float64 says.
#include <algorithm>
#include <array>
#include <limits>

#include "kernels/experts_bf16.h"
#include "kernels/linear_bf16.h"
#include "tests/bf16.h"
#include "tests/check.h"

using namespace kdtree;
using check::narrow_noise, check::narrow_of, check::wide_of;

namespace {

constexpr uint16_t kNanBits = 0x7fc0;

// A layer of experts in memory, and rows for it. Every expert's weights are followed by NaN.
struct Layer {
  int hidden, width, experts, chosen, rows;
  std::vector<uint16_t> x, gate_up, down;  // [rows, hidden], [experts, 2 width, hidden], [experts, hidden, width]
  std::vector<float> factors;
  std::vector<int32_t> ids;
  check::Array<uint16_t> device_gate_up, device_down;
  check::Array<const uint16_t*> gate_up_of, down_of;

  Layer(int hidden, int width, int experts, int chosen, int rows)
      : hidden(hidden),
        width(width),
        experts(experts),
        chosen(chosen),
        rows(rows),
        x(narrow_noise(1, static_cast<size_t>(rows) * hidden)),
        gate_up(narrow_noise(2, static_cast<size_t>(experts) * 2 * width * hidden)),
        down(narrow_noise(3, static_cast<size_t>(experts) * hidden * width)),
        factors(check::noise(4, static_cast<size_t>(rows) * chosen)),
        device_gate_up(spread(gate_up)),
        device_down(spread(down)),
        gate_up_of(pointers(device_gate_up)),
        down_of(pointers(device_down)) {
    // Different ones for each row; the first few are crowded.
    for (int row = 0; row < rows; ++row)
      for (int slot = 0; slot < chosen; ++slot)
        ids.push_back(row % 3 == 0 ? chosen - slot - 1 : (7 * row + slot * (experts / chosen)) % experts);
  }

  std::vector<uint16_t> spread(const std::vector<uint16_t>& dense) const {
    const size_t own = dense.size() / experts;
    std::vector<uint16_t> result((own + 64) * experts, kNanBits);
    for (int e = 0; e < experts; ++e) std::copy_n(&dense[e * own], own, &result[e * (own + 64)]);
    return result;
  }
  std::vector<const uint16_t*> pointers(const check::Array<uint16_t>& array) const {
    std::vector<const uint16_t*> result;
    for (int e = 0; e < experts; ++e) result.push_back(array.get() + array.size() / experts * e);
    return result;
  }

  // Rows first..first+count-1 in one call, y in bits. used: NULL, or as ExpertsBf16Args says.
  template <class T>
  std::vector<T> of(int first, int count, const Rows* used = nullptr) const {
    const check::Array<uint16_t> device_x({x.begin() + first * hidden, x.begin() + (first + count) * hidden});
    const check::Array<float> device_factors(
        std::vector<float>(factors.begin() + first * chosen, factors.begin() + (first + count) * chosen));
    const check::Array<int32_t> device_ids(
        std::vector<int32_t>(ids.begin() + first * chosen, ids.begin() + (first + count) * chosen));
    const check::Array<T> y(static_cast<size_t>(count) * hidden);
    const check::Array<unsigned char> workspace(experts_bf16_workspace(count, hidden, width, experts, chosen));
    ExpertsBf16Args a{};
    a.x = device_x.get();
    a.gate_up = gate_up_of.get();
    a.down = down_of.get();
    a.ids = device_ids.get();
    a.weights = device_factors.get();
    a.rows_used = used;
    a.y = y.get();
    a.rows = count;
    a.hidden = hidden;
    a.width = width;
    a.experts = experts;
    a.chosen = chosen;
    a.wide = sizeof(T) == sizeof(float);
    a.workspace = workspace.get();
    a.workspace_size = workspace.size();
    CHECK_OK(experts_bf16(a, nullptr));
    (void)workspace.read();  // nothing was written beside it
    return y.read();
  }

  // The same by other layers, one row and expert at a time.
  std::vector<uint32_t> row_by_row() const {
    const check::Array<float> both(2 * width), mid(width), out(hidden);
    std::vector<float> result(static_cast<size_t>(rows) * hidden);
    for (size_t pair = 0; pair < ids.size(); ++pair) {
      const size_t row = pair / chosen, expert = ids[pair];
      const check::Array<uint16_t> own(std::vector<uint16_t>(x.begin() + row * hidden, x.begin() + (row + 1) * hidden));
      multiply(own, device_gate_up.get() + device_gate_up.size() / experts * expert, both, 2 * width, hidden);
      CHECK_OK(swiglu({both.get(), mid.get(), 1, width}, nullptr));
      const check::Array<uint16_t> narrow_mid(narrow_of(mid.read()));
      multiply(narrow_mid, device_down.get() + device_down.size() / experts * expert, out, hidden, width);
      const std::vector<float> values = out.read();
      for (int i = 0; i < hidden; ++i) {
        const volatile float product = factors[pair] * values[i];
        float& y = result[row * hidden + i];
        y = pair % chosen == 0 ? product : y + product;
      }
    }
    return check::bits(result);
  }
  static void multiply(const check::Array<uint16_t>& row, const uint16_t* w, const check::Array<float>& y, int out,
                       int in) {
    LinearBf16Args a{};
    a.x = row.get();
    a.x_stride = a.in = in;
    a.w = w;
    a.y = y.get();
    a.y_stride = a.out = out;
    a.rows = a.batch = 1;
    a.wide = true;
    CHECK_OK(linear_bf16(a, nullptr));
  }

  // In float64; sizes: the same with every term's size, what errors are counted in.
  void exact(std::vector<double>* y, std::vector<double>* sizes) const {
    y->assign(static_cast<size_t>(rows) * hidden, 0);
    sizes->assign(y->size(), 0);
    for (size_t pair = 0; pair < ids.size(); ++pair) {
      const uint16_t* const row = &x[pair / chosen * hidden];
      const uint16_t* const gates = &gate_up[static_cast<size_t>(ids[pair]) * 2 * width * hidden];
      const uint16_t* const downs = &down[static_cast<size_t>(ids[pair]) * hidden * width];
      std::vector<double> both(2 * width);
      for (int o = 0; o < 2 * width; ++o)
        for (int k = 0; k < hidden; ++k)
          both[o] += static_cast<double>(wide_of(row[k])) * wide_of(gates[static_cast<size_t>(o) * hidden + k]);
      for (int i = 0; i < hidden; ++i)
        for (int k = 0; k < width; ++k) {
          const double mid = both[k] / (1 + std::exp(-both[k])) * both[width + k];
          const double term = factors[pair] * mid * wide_of(downs[static_cast<size_t>(i) * width + k]);
          (*y)[pair / chosen * hidden + i] += term;
          (*sizes)[pair / chosen * hidden + i] += std::fabs(term);
        }
    }
  }
};

struct Sizes {
  int rows, hidden, width, experts, chosen;
};

}  // namespace

TEST(experts_equal_the_products_row_by_row) {
  // Tiles of 8, 16 and 40 rows; sums of 1024 and more have eight slices, if there are fewer than 4096 outputs.
  for (const Sizes s :
       {Sizes{1, 72, 24, 6, 3}, Sizes{2, 136, 8, 4, 2}, Sizes{30, 72, 24, 6, 3}, Sizes{20, 24, 40, 12, 1},
        Sizes{40, 16, 16, 64, 8}, Sizes{3, 8, 8, 512, 32}, Sizes{90, 16, 8, 16, 8}, Sizes{2, 1096, 24, 2, 1},
        Sizes{10, 1096, 8, 9, 1}, Sizes{20, 1096, 8, 2, 1}, Sizes{2, 24, 1096, 2, 1}, Sizes{10, 24, 1096, 9, 1},
        Sizes{20, 24, 1096, 2, 1}, Sizes{2, 1096, 2056, 1, 1}, Sizes{2, 4104, 1096, 1, 1}}) {
    if (check::tiny() && (s.rows * s.chosen > 90 || s.hidden * s.width > 30000)) continue;
    const Layer layer(s.hidden, s.width, s.experts, s.chosen, s.rows);
    CHECK_EQUAL_ALL(layer.of<uint32_t>(0, s.rows), layer.row_by_row(), ("rows " + std::to_string(s.rows)).c_str());
  }
}

TEST(a_row_does_not_know_its_neighbours) {
  for (const int experts : {6, 40}) {
    const int rows = check::tiny() ? 19 : 257, hidden = 24, chosen = 2;
    const Layer layer(hidden, 16, experts, chosen, rows);
    std::vector<std::vector<uint32_t>> alone;
    for (int row = 0; row < rows; ++row) alone.push_back(layer.of<uint32_t>(row, 1));
    for (int count = 2; count <= rows; count += check::tiny() ? 8 : (count < 70 ? 1 : 11)) {
      const int first = count * 37 % (rows - count + 1);
      const std::vector<uint32_t> some = layer.of<uint32_t>(first, count);
      for (int m = 0; m < count; ++m)
        if (!std::equal(alone[first + m].begin(), alone[first + m].end(), some.begin() + m * hidden))
          CHECK_EQUAL_ALL(std::vector<uint32_t>(some.begin() + m * hidden, some.begin() + (m + 1) * hidden),
                          alone[first + m],
                          (std::to_string(count) + " rows, row " + std::to_string(first + m)).c_str());
    }
  }
}

TEST(experts_are_near_float64) {
  for (const Sizes s : {Sizes{1, 200, 72, 3, 2}, Sizes{12, 200, 72, 3, 2}}) {
    const Layer layer(s.hidden, s.width, s.experts, s.chosen, s.rows);
    std::vector<double> right, sizes;
    layer.exact(&right, &sizes);
    const std::vector<float> wide = layer.of<float>(0, s.rows);
    const std::vector<uint16_t> narrow = layer.of<uint16_t>(0, s.rows);
    // Each gated value is rounded to bf16 once, by 2^-9 of its size at most; float32 costs a thousandth of that.
    for (size_t i = 0; i < right.size(); ++i) CHECK_NEAR(wide[i], right[i], 0x1.01p-9 * sizes[i]);
    CHECK_EQUAL_ALL(narrow, narrow_of(wide), "y");
  }
}

TEST(unused_rows_are_skipped) {
  const int block = 3, hidden = 16;
  Layer layer(hidden, 8, 3, 2, 3 * block);
  const std::vector<uint32_t> right = layer.row_by_row();
  const std::vector<int32_t> counts = {1, -1, 2};
  const check::Array<int32_t> node_count(counts);
  Rows used{};
  used.requests = 3;
  used.width = block;
  used.node_count = node_count.get();
  const auto skipped = [&](int row) { return row % block > counts[row / block]; };
  for (int row = 0; row < layer.rows; ++row)
    if (skipped(row)) {
      layer.ids[row * 2] = -1;
      layer.ids[row * 2 + 1] = 1 << 30;
      std::fill_n(&layer.x[row * hidden], hidden, kNanBits);
    }
  const std::vector<uint32_t> got = layer.of<uint32_t>(0, layer.rows, &used);
  const uint32_t filler = check::Array<uint32_t>(1).read()[0];
  for (int row = 0; row < layer.rows; ++row)
    for (int i = row * hidden; i < (row + 1) * hidden; ++i) CHECK_EQUAL(got[i], skipped(row) ? filler : right[i]);
}

TEST(a_broken_row_breaks_no_other) {
  Layer layer(24, 16, 4, 2, 12);
  const std::vector<uint32_t> right = layer.of<uint32_t>(0, layer.rows);
  const int broken = 5;
  std::fill_n(&layer.x[broken * layer.hidden], layer.hidden, kNanBits);
  const std::vector<float> got = layer.of<float>(0, layer.rows);
  for (int i = 0; i < layer.rows * layer.hidden; ++i)
    if (i / layer.hidden == broken)
      CHECK(std::isnan(got[i]));
    else
      CHECK_EQUAL(check::bits({got[i]})[0], right[i]);
}

// Tiles of the rows' own height grow fewer where it changes; an engine plans once, for its most rows.
TEST(a_workspace_for_more_rows_serves_fewer) {
  for (const auto& [experts, chosen, hidden, width] : {std::array{512, 8, 32, 16}, std::array{512, 1, 256, 64}}) {
    size_t before = 0;
    for (const int rows : {1, 8, 9, 64, 511, 512, 513, 640, 641, 4096, 4097}) {
      const size_t size = experts_bf16_workspace(rows, hidden, width, experts, chosen);
      CHECK(size >= before);
      before = size;
    }
  }
}

TEST(refusals) {
  const check::Array<uint16_t> memory(1024);
  const check::Array<int32_t> ids(4);
  const check::Array<float> factors(4);
  const check::Array<const uint16_t*> table(std::vector<const uint16_t*>(4, memory.get()));
  const check::Array<unsigned char> workspace(experts_bf16_workspace(2, 16, 8, 4, 2));
  ExpertsBf16Args good{};
  good.x = memory.get();
  good.gate_up = good.down = table.get();
  good.ids = ids.get();
  good.weights = factors.get();
  good.y = memory.get() + 512;
  good.rows = good.chosen = 2;
  good.hidden = 16;
  good.width = 8;
  good.experts = 4;
  good.workspace = workspace.get();
  good.workspace_size = workspace.size();
  const auto refused = [](const ExpertsBf16Args& a, kdtree_status status, const std::string& message) {
    CHECK_STATUS(experts_bf16(a, nullptr), status);
    CHECK_EQUAL(std::string(kdtree_last_error()).substr(0, message.size()), message);
  };
  ExpertsBf16Args a = good;
  a.hidden = 12;
  refused(a, KDTREE_SIZE, "experts_bf16: hidden is 12, it must be a multiple of 8");
  a = good;
  a.width = 7;
  refused(a, KDTREE_SIZE, "experts_bf16: width is 7, it must be a multiple of 8");
  a = good;
  a.experts = 513;
  refused(a, KDTREE_SIZE, "experts_bf16: experts is 513, it must be in [1, 512]");
  a = good;
  a.chosen = 5;
  refused(a, KDTREE_SIZE, "experts_bf16: chosen is 5, it must be in [1, 4]");
  a = good;
  a.workspace_size -= 1;
  refused(a, KDTREE_WORKSPACE, "experts_bf16: the workspace has ");
  a = good;
  a.down = nullptr;
  refused(a, KDTREE_POINTER, "experts_bf16: down is NULL");
  a = good;
  a.x += 4;
  refused(a, KDTREE_ALIGNMENT, "experts_bf16: x at ");
  Rows rows{};
  rows.requests = rows.width = 3;
  a = good;
  a.rows_used = &rows;
  refused(a, KDTREE_SIZE, "experts_bf16: rows_used is 9, it must be in [2, 2]");
}
