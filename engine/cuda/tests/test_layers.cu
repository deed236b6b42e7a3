// The layers besides products and experts, against the golden files, and what they promise about rows.
#include <algorithm>
#include <kdtr/compare.hpp>
#include <limits>

#include "kernels/layers.h"
#include "tests/blocks.h"
#include "tests/check.h"
#include "tests/random.h"

using namespace kdtree;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

int extent(const kdtr::Tensor& tensor, int axis) { return static_cast<int>(tensor.shape[axis]); }

// Names before "/out" of the cases of a golden file that begin with `prefix`.
std::vector<std::string> golden_cases(const kdtr::File& file, const std::string& op) {
  std::vector<std::string> names;
  for (uint64_t i = 0; i < file.size(); ++i) {
    const std::string name(file[i].name);
    const size_t end = name.rfind("/op");
    if (end != std::string::npos && end + 3 == name.size() && file[i].text() == op)
      names.push_back(name.substr(0, end));
  }
  CHECK(!names.empty());
  return names;
}

check::Array<float> floats(const kdtr::File& file, const std::string& name) {
  return check::Array<float>(file.at(name).as<float>());
}

// [a, b] -> [b, a]
std::vector<float> transposed(const kdtr::Tensor& tensor) {
  const auto view = tensor.as<float, 2>();
  std::vector<float> result;
  for (uint64_t j = 0; j < view.shape[1]; ++j)
    for (uint64_t i = 0; i < view.shape[0]; ++i) result.push_back(view(i, j));
  return result;
}

void multiply(const float* x, const float* w, float* y, int rows, int out, int in) {
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
  CHECK_OK(linear(a, Gemm::kRowInvariant, nullptr));
}

}  // namespace

TEST(embedding_golden) {
  const kdtr::File file = check::golden("op_rms_norm.kdtr");
  const kdtr::Tensor table = file.at("embedding/table"), out = file.at("embedding/out");
  const auto tokens = file.at("embedding/tokens").as<int32_t>();
  const int rows = static_cast<int>(tokens.size), hidden = extent(table, 1);
  const check::Array<float> device_table = floats(file, "embedding/table"), y(rows * hidden);
  const check::Blocks blocks(rows, {rows - 1}, {0}, {tokens.data, tokens.data + rows});
  CHECK_OK(embed({blocks.rows, device_table.get(), y.get(), hidden}, nullptr));
  kdtr::compare(out, y.read()).raise_if_failed();
}

TEST(embedding_of_unused_rows_is_zero) {
  for (const int hidden : {4, 5, 1030}) {
    const std::vector<float> table = check::noise(1, 3 * hidden);
    const check::Array<float> device_table(table), y(8 * hidden);
    // Tokens past the used rows are no tokens.
    const check::Blocks blocks(4, {1, -1}, {0, 0}, {2, 1, -7, 1 << 30, -1, -1, -1, -1});
    CHECK_OK(embed({blocks.rows, device_table.get(), y.get(), hidden}, nullptr));
    std::vector<float> right(8 * hidden, 0.0f);
    std::copy_n(&table[2 * hidden], hidden, &right[0]);
    std::copy_n(&table[1 * hidden], hidden, &right[hidden]);
    CHECK_EQUAL_ALL(check::bits(y.read()), check::bits(right), "y");
  }
}

TEST(rms_norm_golden) {
  const kdtr::File file = check::golden("op_rms_norm.kdtr");
  for (const std::string& name : golden_cases(file, "rms_norm")) {
    const kdtr::Tensor out = file.at(name + "/out");
    const int rows = extent(out, 0), width = extent(out, 1);
    const check::Array<float> x = floats(file, name + "/x"), weight = floats(file, name + "/weight"), y(rows * width);
    const float eps = static_cast<float>(file.at(name + "/eps").scalar<double>());
    CHECK_OK(rms_norm({x.get(), width, weight.get(), y.get(), width, rows, width, eps}, nullptr));
    kdtr::compare(out, y.read()).raise_if_failed();
    CHECK_OK(rms_norm({x.get(), width, weight.get(), x.get(), width, rows, width, eps}, nullptr));
    CHECK_EQUAL_ALL(check::bits(x.read()), check::bits(y.read()), "in place");
  }
}

TEST(rms_norm_bits_depend_on_the_row_alone) {
  for (const int width : {1, 4, 63, 128, 516, 2052, 9000}) {
    const std::vector<float> row = check::noise(2, width), weight = check::noise(3, width);
    std::vector<uint32_t> first;
    for (const int shift : {0, 1})
      for (const int rows : {1, 3}) {
        const int stride = width + 4 - shift;
        std::vector<float> x(rows * stride + shift, kNan);  // the other rows are broken
        std::copy(row.begin(), row.end(), x.begin() + (rows - 1) * stride + shift);
        const check::Array<float> device_x(x), device_weight(weight), y(rows * stride + shift);
        CHECK_OK(
            rms_norm({device_x.get() + shift, stride, device_weight.get(), y.get() + shift, stride, rows, width, 1e-6f},
                     nullptr));
        const std::vector<float> got = y.read();
        const auto begin = got.begin() + (rows - 1) * stride + shift;
        const std::vector<uint32_t> here = check::bits({begin, begin + width});
        if (first.empty()) first = here;
        CHECK_EQUAL_ALL(here, first, ("width " + std::to_string(width)).c_str());
      }
  }
}

// As the queries of cache rows, of which there is but a latent of one value.
TEST(rotations_golden) {
  const kdtr::File file = check::golden("op_rope.kdtr");
  for (const std::string& name : golden_cases(file, "rotate")) {
    const kdtr::Tensor out = file.at(name + "/out");
    const int rows = extent(out, 0), heads = extent(out, 1), width = extent(out, 2);
    const check::Array<float> x = floats(file, name + "/x"), cos = floats(file, name + "/cos"),
                              sin = floats(file, name + "/sin"), kv(rows * (1 + width)), weight({1}),
                              memory(rows * (1 + width));
    std::vector<int32_t> each(rows);
    for (int row = 0; row < rows; ++row) each[row] = row;
    const check::Array<int32_t> positions(each), node_count({rows - 1}), prefix({0});
    LatentArgs<float> a{};
    a.rows.requests = 1;
    a.rows.width = rows;
    a.rows.node_count = node_count.get();
    a.rows.prefix_lengths = prefix.get();
    a.rows.positions = positions.get();
    a.kv = kv.get();
    a.kv_stride = 1 + width;
    a.weight = weight.get();
    a.cos = cos.get();
    a.sin = sin.get();
    a.cache.base = memory.get();
    a.cache.row_bytes = (1 + width) * static_cast<int>(sizeof(float));
    a.cache.row_stride = a.cache.row_bytes;
    a.cache.layers = 1;
    a.cache.capacity = rows;
    a.rank = 1;
    a.rope = width;
    a.layout = file.at(name + "/layout").text() == "half" ? RopeLayout::kHalf : RopeLayout::kInterleaved;
    a.queries = x.get();
    a.query_stride = heads * width;
    a.head_stride = width;
    a.heads = heads;
    CHECK_OK(latents(a, nullptr));
    kdtr::compare(out, x.read()).raise_if_failed();
  }
}

TEST(rope_tables_golden) {
  const kdtr::File file = check::golden("op_rope.kdtr");
  for (const std::string& name : golden_cases(file, "rope_tables")) {
    const auto number = [&](const char* of) { return file.at(name + "/" + of).scalar<double>(); };
    const RopeParameters parameters{number("theta"),     file.at(name + "/kind").text() == "yarn",
                                    number("factor"),    number("original_length"),
                                    number("beta_fast"), number("beta_slow"),
                                    number("amplitude"), true};
    const auto positions = file.at(name + "/positions").as<int32_t>();
    const int half = extent(file.at(name + "/cos"), 1), count = positions(positions.size - 1) + 1;
    if (check::tiny() && count > 5000) continue;
    std::vector<float> cos(static_cast<size_t>(count) * half), sin(cos.size()), some_cos, some_sin;
    rope_tables(parameters, 2 * half, count, cos.data(), sin.data());
    for (uint64_t i = 0; i < positions.size; ++i)
      for (int pair = 0; pair < half; ++pair) {
        some_cos.push_back(cos[static_cast<size_t>(positions(i)) * half + pair]);
        some_sin.push_back(sin[static_cast<size_t>(positions(i)) * half + pair]);
      }
    kdtr::compare(file.at(name + "/cos"), some_cos).raise_if_failed();
    kdtr::compare(file.at(name + "/sin"), some_sin).raise_if_failed();
  }
}

TEST(swiglu_golden) {
  const kdtr::File file = check::golden("op_feed_forward.kdtr");
  for (const std::string& name : golden_cases(file, "swiglu")) {
    const kdtr::Tensor down = file.at(name + "/down"), out = file.at(name + "/out");
    const int rows = extent(out, 0), hidden = extent(out, 1), width = extent(down, 0);
    const check::Array<float> x = floats(file, name + "/x"), w(transposed(file.at(name + "/gate_up"))),
                              w_down(transposed(down)), both(rows * 2 * width), mid(rows * width), y(rows * hidden);
    multiply(x.get(), w.get(), both.get(), rows, 2 * width, hidden);
    CHECK_OK(swiglu({both.get(), mid.get(), rows, width}, nullptr));
    multiply(mid.get(), w_down.get(), y.get(), rows, hidden, width);
    kdtr::compare(out, y.read()).raise_if_failed();
  }
}

TEST(swiglu_of_extreme_gates) {
  const check::Array<float> both({-200.0f, 200.0f, 0.0f, -0.0f, 1.0f, 2.0f, 3.0f, 4.0f}), y(4);
  CHECK_OK(swiglu({both.get(), y.get(), 1, 4}, nullptr));
  CHECK_EQUAL_ALL(y.read(), (std::vector<float>{0, 400, 0, 0}), "y");
}

TEST(router_golden) {
  const kdtr::File file = check::golden("op_router.kdtr");
  for (const std::string& name : golden_cases(file, "router")) {
    const auto number = [&](const char* of) { return file.at(name + "/" + of).scalar<int32_t>(); };
    const kdtr::Tensor x = file.at(name + "/x"), scores = file.at(name + "/scores");
    const int rows = extent(x, 0), experts = extent(scores, 1), chosen = number("num_experts_per_tok");
    const check::Array<float> device_x = floats(file, name + "/x"), w(transposed(file.at(name + "/router"))),
                              bias = floats(file, name + "/bias"), logits(rows * experts), own_scores(rows * experts),
                              weights(rows * chosen);
    const check::Array<int32_t> ids(rows * chosen);
    multiply(device_x.get(), w.get(), logits.get(), rows, experts, extent(x, 1));
    RouterArgs a{};
    a.logits = logits.get();
    a.bias = bias.get();
    a.scores = own_scores.get();
    a.ids = ids.get();
    a.weights = weights.get();
    a.rows = rows;
    a.experts = experts;
    a.chosen = chosen;
    a.groups = number("n_group");
    a.kept_groups = number("topk_group");
    a.normalise = file.at(name + "/norm_topk_prob").scalar<bool>();
    a.scale = static_cast<float>(file.at(name + "/routed_scaling_factor").scalar<double>());
    CHECK_OK(router(a, nullptr));
    kdtr::compare(scores, own_scores.read()).raise_if_failed();
    kdtr::compare(file.at(name + "/ids"), ids.read()).raise_if_failed();
    kdtr::compare(file.at(name + "/weights"), weights.read()).raise_if_failed();
  }
}

TEST(add_and_copies) {
  for (const int n : {1, 3, 4, 1030}) {
    const std::vector<float> x = check::noise(5, n + 1), z = check::noise(6, n + 1);
    for (const int shift : {0, 1}) {
      const check::Array<float> device_x(x), device_z(z), y(n);
      CHECK_OK(add(device_x.get() + shift, device_z.get() + shift, y.get(), n, nullptr));
      std::vector<float> right(n);
      for (int i = 0; i < n; ++i) right[i] = x[i + shift] + z[i + shift];
      CHECK_EQUAL_ALL(y.read(), right, "x + z");
    }
  }
  for (const int width : {4, 6, 1100})
    for (const int gap : {0, 1, 8}) {
      const int stride = width + gap;
      const std::vector<float> src = check::noise(7, 3 * stride);
      const check::Array<float> from(src), to(3 * (width + 4));
      std::vector<float> right = to.read();
      for (int m = 0; m < 3; ++m) std::copy_n(&src[m * stride], width, &right[m * (width + 4)]);
      CHECK_OK(copy_rows({from.get(), stride, to.get(), width + 4, 3, width}, nullptr));
      CHECK_EQUAL_ALL(check::bits(to.read()), check::bits(right), "copied rows");
    }
}

TEST(refusals) {
  const check::Array<float> memory(64);
  float* const p = memory.get();
  CHECK_STATUS(rms_norm({p, 4, p, p, 4, 1, 5, 0}, nullptr), KDTREE_SIZE);
  CHECK_EQUAL(std::string(kdtree_last_error()).rfind("rms_norm: x_stride is 4, it must be in [5, ", 0), size_t{0});
  CHECK_STATUS(rms_norm({p, 4, nullptr, p, 4, 1, 4, 0}, nullptr), KDTREE_POINTER);
  CHECK_STATUS(swiglu({p, p, 0, 4}, nullptr), KDTREE_SIZE);
  CHECK_STATUS(add(p, p, p, 0, nullptr), KDTREE_SIZE);
  CHECK_STATUS(add(p, nullptr, p, 4, nullptr), KDTREE_POINTER);
  CHECK_STATUS(copy_rows({p, 4, p, 3, 2, 4}, nullptr), KDTREE_SIZE);
  const check::Array<int32_t> ids(8);
  const RouterArgs good{p, p, p, ids.get(), p, 1, 8, 2, 4, 2, true, 1};
  RouterArgs a = good;
  a.experts = 513;
  CHECK_STATUS(router(a, nullptr), KDTREE_SIZE);
  a = good;
  a.groups = 3;
  CHECK_STATUS(router(a, nullptr), KDTREE_SIZE);
  a = good;
  a.chosen = 33;
  CHECK_STATUS(router(a, nullptr), KDTREE_SIZE);
  const check::Blocks blocks(2, {1}, {0}, {0, 0});
  CHECK_STATUS(embed({blocks.rows, p, p, 0}, nullptr), KDTREE_SIZE);
}
