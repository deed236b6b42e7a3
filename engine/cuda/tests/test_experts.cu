// Router and experts: the choice against a plain stable sort, the sum against the same layers called row by row.
#include <algorithm>
#include <cmath>
#include <kdtr/compare.hpp>
#include <limits>
#include <numeric>

#include "kernels/layers.h"
#include "tests/check.h"
#include "tests/random.h"

using namespace kdtree;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();

// The `count` best, NaN last, equal ones in ascending index.
std::vector<int> best(const std::vector<float>& values, int count) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](int a, int b) {
    const bool broken_a = std::isnan(values[a]), broken_b = std::isnan(values[b]);
    return broken_a || broken_b ? !broken_a && broken_b : values[a] > values[b];
  };
  std::stable_sort(order.begin(), order.end(), before);
  order.resize(count);
  return order;
}

// reference/moe.py `route` on one row of scores.
std::vector<int> choice(const RouterArgs& a, const float* scores, const std::vector<float>& bias) {
  std::vector<float> biased(a.experts), group_scores;
  for (int e = 0; e < a.experts; ++e) biased[e] = scores[e] + bias[e];
  const int size = a.experts / a.groups;
  for (int g = 0; g < a.groups; ++g) {
    std::vector<float> group(biased.begin() + g * size, biased.begin() + (g + 1) * size);
    const bool broken = std::any_of(group.begin(), group.end(), [](float v) { return std::isnan(v); });
    std::sort(group.begin(), group.end(), [](float x, float y) { return x > y; });
    group_scores.push_back(broken ? kNan : size == 1 ? group[0] : group[1] + group[0]);
  }
  std::vector<float> eligible(a.experts, -kInfinity);
  for (const int g : best(group_scores, a.kept_groups)) std::copy_n(&biased[g * size], size, &eligible[g * size]);
  return best(eligible, a.chosen);
}

// Expert weights with their arrays of pointers. `shift`: floats before the first one.
struct Weights {
  int hidden, width, experts;
  check::Array<float> gate_up, down;
  check::Array<const float*> gate_up_of, down_of;

  Weights(int hidden, int width, int experts, const std::vector<float>& gate_up, const std::vector<float>& down,
          int shift = 0)
      : hidden(hidden),
        width(width),
        experts(experts),
        gate_up(shifted(gate_up, shift)),
        down(shifted(down, shift)),
        gate_up_of(pointers(this->gate_up.get() + shift, 2 * width * hidden)),
        down_of(pointers(this->down.get() + shift, width * hidden)) {}

  static std::vector<float> shifted(const std::vector<float>& values, int shift) {
    std::vector<float> result(shift, kNan);
    result.insert(result.end(), values.begin(), values.end());
    return result;
  }
  std::vector<const float*> pointers(const float* first, int size) const {
    std::vector<const float*> result;
    for (int e = 0; e < experts; ++e) result.push_back(first + static_cast<size_t>(e) * size);
    return result;
  }
  const float* gate_up_at(int expert) const { return gate_up_of.read()[expert]; }
  const float* down_at(int expert) const { return down_of.read()[expert]; }
};

// One call; rows_used may be NULL.
std::vector<float> run(const Weights& weights, const std::vector<float>& x, const std::vector<int32_t>& ids,
                       const std::vector<float>& factors, int chosen, const Rows* rows_used = nullptr, int shift = 0) {
  const int rows = static_cast<int>(ids.size()) / chosen;
  const check::Array<float> device_x(Weights::shifted(x, shift)), device_factors(factors), y(rows * weights.hidden);
  const check::Array<int32_t> device_ids(ids);
  const check::Array<unsigned char> workspace(
      experts_workspace(rows, weights.hidden, weights.width, weights.experts, chosen));
  ExpertsArgs<float> a{};
  a.x = device_x.get() + shift;
  a.gate_up = weights.gate_up_of.get();
  a.down = weights.down_of.get();
  a.ids = device_ids.get();
  a.weights = device_factors.get();
  a.rows_used = rows_used;
  a.y = y.get();
  a.rows = rows;
  a.hidden = weights.hidden;
  a.width = weights.width;
  a.experts = weights.experts;
  a.chosen = chosen;
  a.workspace = workspace.get();
  a.workspace_size = workspace.size();
  CHECK_OK(experts(a, nullptr));
  (void)workspace.read();  // nothing was written beside it
  return y.read();
}

void multiply(const float* x, const float* w, float* y, int out, int in) {
  LinearArgs a{};
  a.x = x;
  a.x_stride = in;
  a.w = w;
  a.y = y;
  a.y_stride = out;
  a.rows = a.batch = 1;
  a.out = out;
  a.in = in;
  CHECK_OK(linear(a, Gemm::kRowInvariant, nullptr));
}

// The same by the other layers, one row and expert at a time.
std::vector<float> row_by_row(const Weights& weights, const std::vector<float>& x, const std::vector<int32_t>& ids,
                              const std::vector<float>& factors, int chosen) {
  const int hidden = weights.hidden, width = weights.width;
  const check::Array<float> both(2 * width), mid(width), out(hidden);
  std::vector<float> result;
  for (size_t pair = 0; pair < ids.size(); ++pair) {
    const auto first = x.begin() + static_cast<std::ptrdiff_t>(pair / chosen * hidden);
    const check::Array<float> row(std::vector<float>(first, first + hidden));
    multiply(row.get(), weights.gate_up_at(ids[pair]), both.get(), 2 * width, hidden);
    CHECK_OK(swiglu({both.get(), mid.get(), 1, width}, nullptr));
    multiply(mid.get(), weights.down_at(ids[pair]), out.get(), hidden, width);
    const std::vector<float> expert = out.read();
    if (pair % chosen == 0) result.resize(result.size() + hidden);
    float* const y = &result[result.size() - hidden];
    for (int i = 0; i < hidden; ++i) {
      const volatile float product = factors[pair] * expert[i];
      y[i] = pair % chosen == 0 ? product : y[i] + product;
    }
  }
  return result;
}

// `chosen` different experts for each row, many of them among the first.
std::vector<int32_t> crowded(int rows, int experts, int chosen) {
  std::vector<int32_t> ids;
  for (int row = 0; row < rows; ++row)
    for (int slot = 0; slot < chosen; ++slot)
      ids.push_back(row % 3 == 0 ? (chosen - slot - 1) : (7 * row + slot * (experts / chosen)) % experts);
  return ids;
}

// [a, b, c] -> [a, c, b]
std::vector<float> each_transposed(const kdtr::Tensor& tensor) {
  const auto view = tensor.as<float, 3>();
  std::vector<float> result;
  for (uint64_t e = 0; e < view.shape[0]; ++e)
    for (uint64_t j = 0; j < view.shape[2]; ++j)
      for (uint64_t i = 0; i < view.shape[1]; ++i) result.push_back(view(e, i, j));
  return result;
}

}  // namespace

TEST(router_chooses_as_a_stable_sort) {
  const int rows = check::tiny() ? 3 : 9;
  struct Sizes {
    int experts, groups, kept, chosen;
  };
  for (const Sizes sizes : {Sizes{1, 1, 1, 1}, Sizes{8, 8, 3, 3}, Sizes{36, 4, 2, 5}, Sizes{256, 8, 4, 8},
                            Sizes{384, 1, 1, 8}, Sizes{512, 64, 2, 32}}) {
    const size_t n = static_cast<size_t>(rows) * sizes.experts;
    std::vector<float> logits = check::noise(1, n), bias = check::noise(2, sizes.experts);
    for (float& value : bias) value = std::round(4 * value) / 4;  // ties, and sums of both signs
    for (size_t i = 0; i < n; ++i) {
      logits[i] = std::round(8 * logits[i]) / 2;
      if (i % 23 == 5) logits[i] = i % 2 == 0 ? 100.0f : -100.0f;
      const size_t row = i / sizes.experts;
      if (row == 2 && i % 5 == 0) logits[i] = kNan;
      if (row == 3 || (row == 4 && i % 7 != 0)) logits[i] = kNan;
    }
    const check::Array<float> device_logits(logits), device_bias(bias), scores(n), weights(rows * sizes.chosen);
    const check::Array<int32_t> ids(rows * sizes.chosen);
    const RouterArgs a{device_logits.get(), device_bias.get(), scores.get(), ids.get(),  weights.get(), rows,
                       sizes.experts,       sizes.chosen,      sizes.groups, sizes.kept, true,          2.5f};
    CHECK_OK(router(a, nullptr));
    const std::vector<float> all = scores.read(), got = weights.read();
    const std::vector<int32_t> chosen = ids.read();
    for (int row = 0; row < rows; ++row) {
      const float* const own = &all[static_cast<size_t>(row) * sizes.experts];
      const std::vector<int> right = choice(a, own, bias);
      const int32_t* const first = &chosen[row * sizes.chosen];
      CHECK_EQUAL_ALL(std::vector<int>(first, first + sizes.chosen), right, "ids");
      float total = own[right[0]];
      for (int i = 1; i < sizes.chosen; ++i) total += own[right[i]];
      std::vector<float> factors;
      for (const int id : right) factors.push_back(own[id] / (total + 1e-20f) * 2.5f);
      for (int i = 0; i < sizes.chosen; ++i)
        if (std::isnan(factors[i]))
          CHECK(std::isnan(got[row * sizes.chosen + i]));
        else
          CHECK_EQUAL(got[row * sizes.chosen + i], factors[i]);
    }
  }
}

TEST(router_without_normalising_or_scores) {
  const check::Array<float> logits({0, 0, 0, 0}), bias({-4, -1, -2, -1}), weights(2);
  const check::Array<int32_t> ids(2);
  CHECK_OK(router({logits.get(), bias.get(), nullptr, ids.get(), weights.get(), 1, 4, 2, 2, 1, false, 3}, nullptr));
  CHECK_EQUAL_ALL(ids.read(), (std::vector<int32_t>{3, 2}), "ids");
  CHECK_EQUAL_ALL(weights.read(), (std::vector<float>{1.5f, 1.5f}), "weights");
}

TEST(experts_golden) {
  const kdtr::File file = check::golden("op_feed_forward.kdtr");
  for (const std::string name : {"experts_n1_e8", "experts_n9_e12", "experts_n17_e8"}) {
    const kdtr::Tensor down = file.at(name + "/experts_down"), routed = file.at(name + "/routed_out");
    const auto x = file.at(name + "/x").as<float>();
    const auto ids = file.at(name + "/expert_ids").as<int32_t>();
    const int experts = static_cast<int>(down.shape[0]), width = static_cast<int>(down.shape[1]);
    const int hidden = static_cast<int>(down.shape[2]), rows = static_cast<int>(routed.shape[0]);
    const int chosen = static_cast<int>(ids.shape[1]);
    const Weights weights(hidden, width, experts, each_transposed(file.at(name + "/experts_gate_up")),
                          each_transposed(down));
    // The factors are those of the router.
    const auto router_weights = file.at(name + "/router").as<float, 2>();
    std::vector<float> by_expert;
    for (int e = 0; e < experts; ++e)
      for (int i = 0; i < hidden; ++i) by_expert.push_back(router_weights(i, e));
    const check::Array<float> device_x(x), device_router(by_expert), bias(file.at(name + "/bias").as<float>()),
        logits(rows * experts), factors(rows * chosen);
    for (int row = 0; row < rows; ++row)
      multiply(device_x.get() + row * hidden, device_router.get(), logits.get() + row * experts, experts, hidden);
    const check::Array<int32_t> own_ids(rows * chosen);
    const auto number = [&](const char* of) { return file.at(name + "/" + of).scalar<int32_t>(); };
    CHECK_OK(router({logits.get(), bias.get(), nullptr, own_ids.get(), factors.get(), rows, experts, chosen,
                     number("n_group"), number("topk_group"), file.at(name + "/norm_topk_prob").scalar<bool>(),
                     static_cast<float>(file.at(name + "/routed_scaling_factor").scalar<double>())},
                    nullptr));
    kdtr::compare(file.at(name + "/expert_ids"), own_ids.read()).raise_if_failed();
    const std::vector<float> y = run(weights, {x.data, x.data + x.size}, own_ids.read(), factors.read(), chosen);
    kdtr::compare(routed, y).raise_if_failed();
  }
}

TEST(experts_equal_the_layers_row_by_row) {
  struct Sizes {
    int rows, hidden, width, experts, chosen, shift;
  };
  for (const Sizes s :
       {Sizes{1, 20, 12, 6, 3, 0}, Sizes{2, 132, 7, 4, 2, 0}, Sizes{30, 20, 12, 6, 3, 0}, Sizes{11, 21, 9, 5, 1, 0},
        Sizes{9, 20, 12, 6, 2, 1}, Sizes{3, 8, 4, 512, 32, 0}, Sizes{200, 8, 4, 16, 8, 0}}) {
    if (check::tiny() && s.rows * s.chosen > 90) continue;
    const Weights weights(s.hidden, s.width, s.experts, check::noise(3, 2 * s.experts * s.width * s.hidden),
                          check::noise(4, s.experts * s.width * s.hidden), s.shift);
    const std::vector<float> x = check::noise(5, s.rows * s.hidden), factors = check::noise(6, s.rows * s.chosen);
    const std::vector<int32_t> ids = crowded(s.rows, s.experts, s.chosen);
    const std::vector<float> right = row_by_row(weights, x, ids, factors, s.chosen);
    CHECK_EQUAL_ALL(check::bits(run(weights, x, ids, factors, s.chosen, nullptr, s.shift)), check::bits(right), "y");
  }
}

TEST(a_row_does_not_know_its_neighbours) {
  const int hidden = 20, width = 12, experts = 6, chosen = 2, rows = 19;
  const Weights weights(hidden, width, experts, check::noise(7, 2 * experts * width * hidden),
                        check::noise(8, experts * width * hidden));
  const std::vector<float> x = check::noise(9, rows * hidden), factors = check::noise(10, rows * chosen);
  const std::vector<int32_t> ids = crowded(rows, experts, chosen);
  const std::vector<float> all = run(weights, x, ids, factors, chosen);
  for (int count = 1; count < rows; count += check::tiny() ? 8 : 3)
    for (const int first : {0, rows - count}) {
      const std::vector<float> some =
          run(weights, {x.begin() + first * hidden, x.begin() + (first + count) * hidden},
              {ids.begin() + first * chosen, ids.begin() + (first + count) * chosen},
              {factors.begin() + first * chosen, factors.begin() + (first + count) * chosen}, chosen);
      const std::vector<float> right(all.begin() + first * hidden, all.begin() + (first + count) * hidden);
      CHECK_EQUAL_ALL(check::bits(some), check::bits(right), ("rows " + std::to_string(count)).c_str());
    }
}

TEST(unused_rows_are_skipped) {
  const int hidden = 8, width = 4, experts = 3, chosen = 2, block = 3, rows = 3 * block;
  const Weights weights(hidden, width, experts, check::noise(11, 2 * experts * width * hidden),
                        check::noise(12, experts * width * hidden));
  const std::vector<float> factors = check::noise(14, rows * chosen);
  std::vector<float> x = check::noise(13, rows * hidden);
  std::vector<int32_t> ids = crowded(rows, experts, chosen);
  const std::vector<float> right = row_by_row(weights, x, ids, factors, chosen);
  const std::vector<int32_t> counts = {1, -1, 2};
  const check::Array<int32_t> node_count(counts);
  Rows used{};
  used.requests = 3;
  used.width = block;
  used.node_count = node_count.get();
  for (int row = 0; row < rows; ++row)
    if (row % block > counts[row / block]) {
      ids[row * chosen] = -1;
      ids[row * chosen + 1] = 1 << 30;
      std::fill_n(&x[row * hidden], hidden, kNan);
    }
  const std::vector<float> got = run(weights, x, ids, factors, chosen, &used);
  const uint32_t filler = check::bits(check::Array<float>(1).read())[0];
  for (int row = 0; row < rows; ++row)
    for (int i = row * hidden; i < (row + 1) * hidden; ++i)
      CHECK_EQUAL(check::bits({got[i]})[0], row % block > counts[row / block] ? filler : check::bits({right[i]})[0]);
}

TEST(refusals) {
  const check::Array<float> memory(256);
  const check::Array<int32_t> ids(4);
  const check::Array<const float*> table(4);
  const check::Array<unsigned char> workspace(experts_workspace(2, 4, 4, 4, 2));
  const ExpertsArgs<float> good{
      memory.get(),    table.get(),     table.get(), ids.get(), memory.get(), nullptr, memory.get(), 2, 4, 4, 4, 2,
      workspace.get(), workspace.size()};
  ExpertsArgs<float> a = good;
  a.workspace_size -= 1;
  CHECK_STATUS(experts(a, nullptr), KDTREE_WORKSPACE);
  a = good;
  a.experts = 513;
  CHECK_STATUS(experts(a, nullptr), KDTREE_SIZE);
  a = good;
  a.chosen = 5;
  CHECK_STATUS(experts(a, nullptr), KDTREE_SIZE);
  a = good;
  a.gate_up = nullptr;
  CHECK_STATUS(experts(a, nullptr), KDTREE_POINTER);
  Rows rows{};
  rows.requests = rows.width = 3;
  a = good;
  a.rows_used = &rows;
  CHECK_STATUS(experts(a, nullptr), KDTREE_SIZE);
  CHECK_EQUAL(std::string(kdtree_last_error()), std::string("experts: rows_used is 9, it must be in [2, 2]"));
}
