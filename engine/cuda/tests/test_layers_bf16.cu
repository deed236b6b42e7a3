// The layers of bf16 arrays for any sizes: bit for bit what the float32 layers make of the same numbers, rounded.
#include <algorithm>
#include <limits>

#include "kernels/attention.h"
#include "kernels/linear_bf16.h"
#include "tests/bf16.h"
#include "tests/blocks.h"
#include "tests/check.h"
#include "tests/random.h"

using namespace kdtree;
using check::narrow_noise, check::narrow_of, check::wide_of;

namespace {

constexpr uint16_t kNanBits = 0x7fc0;

std::vector<float> wide_of_all(const std::vector<uint16_t>& values) {
  std::vector<float> result;
  for (const uint16_t value : values) result.push_back(wide_of(value));
  return result;
}

// An array of bf16 noise, and one of the same numbers in float32; `shift` elements before it.
struct Pair {
  check::Array<uint16_t> narrow;
  check::Array<float> wide;
  int shift;

  explicit Pair(const std::vector<uint16_t>& values, int shift = 0)
      : narrow(shifted(values, shift)), wide(wide_of_all(shifted(values, shift))), shift(shift) {}
  Pair(uint64_t seed, size_t n, int shift = 0) : Pair(narrow_noise(seed, n), shift) {}

  static std::vector<uint16_t> shifted(const std::vector<uint16_t>& values, int shift) {
    std::vector<uint16_t> result(static_cast<size_t>(shift), kNanBits);
    result.insert(result.end(), values.begin(), values.end());
    return result;
  }
  uint16_t* bf16() const { return narrow.get() + shift; }
  float* f32() const { return wide.get() + shift; }
};

}  // namespace

TEST(rows_of_the_embedding) {
  for (const int hidden : {4, 5, 1030}) {
    const std::vector<uint16_t> table = narrow_noise(1, 3 * hidden);
    const check::Array<uint16_t> device_table(table), y(4 * hidden);
    const check::Blocks blocks(2, {1, -1}, {0, 0}, {2, 1, -7, 1 << 30});
    CHECK_OK(embed({blocks.rows, device_table.get(), y.get(), hidden}, nullptr));
    std::vector<uint16_t> right(4 * hidden, 0);
    std::copy_n(&table[2 * hidden], hidden, &right[0]);
    std::copy_n(&table[1 * hidden], hidden, &right[hidden]);
    CHECK_EQUAL_ALL(y.read(), right, "y");
  }
}

TEST(norms_round_the_quotient_then_the_product) {
  for (const int width : {1, 4, 63, 516, 2052, 7168})
    for (const int shift : {0, 1, 2, 4}) {
      const int rows = 3, stride = width + 4;
      const Pair x(2, rows * stride, shift), weight(3, width, shift);
      const check::Array<uint16_t> y(rows * stride);
      const check::Array<float> wide(rows * width), quotient(rows * width), ones(std::vector<float>(width, 1.0f));
      CHECK_OK(rms_norm({x.bf16(), stride, weight.bf16(), y.get(), stride, rows, width, 1e-5f, wide.get()}, nullptr));
      CHECK_OK(rms_norm({x.f32(), stride, ones.get(), quotient.get(), width, rows, width, 1e-5f}, nullptr));
      const std::vector<uint16_t> got = y.read();
      const std::vector<float> q = quotient.read(), w = weight.wide.read(), same = wide.read();
      for (int row = 0; row < rows; ++row)
        for (int i = 0; i < width; ++i) {
          const float rounded = wide_of(narrow_of(q[row * width + i]));
          CHECK_EQUAL(got[row * stride + i], narrow_of(w[shift + i] * rounded));
          CHECK_EQUAL(same[row * width + i], wide_of(got[row * stride + i]));
        }
      // In place, alone, the same bits.
      const int last = (rows - 1) * stride;
      CHECK_OK(rms_norm({x.bf16() + last, stride, weight.bf16(), x.bf16() + last, stride, 1, width, 1e-5f}, nullptr));
      const std::vector<uint16_t> alone = x.narrow.read();
      for (int i = 0; i < width; ++i) CHECK_EQUAL(alone[shift + last + i], got[last + i]);
    }
}

TEST(gates_and_sums) {
  for (const int width : {1, 4, 7, 516})
    for (const int shift : {0, 3, 4}) {
      const Pair both(7, 3 * 2 * width, shift);
      const check::Array<uint16_t> y(3 * width);
      const check::Array<float> right(3 * width);
      CHECK_OK(swiglu({both.bf16(), y.get(), 3, width}, nullptr));
      CHECK_OK(swiglu({both.f32(), right.get(), 3, width}, nullptr));
      CHECK_EQUAL_ALL(y.read(), narrow_of(right.read()), "y");
      const Pair x(8, 3 * width, shift), z(9, 3 * width, shift);
      CHECK_OK(add(x.bf16(), z.bf16(), y.get(), 3 * width, nullptr));
      CHECK_OK(add(x.f32(), z.f32(), right.get(), 3 * width, nullptr));
      CHECK_EQUAL_ALL(y.read(), narrow_of(right.read()), "x + z");
    }
}

TEST(copies_keep_all_bits) {
  for (const int width : {3, 4, 576, 1101}) {
    std::vector<uint16_t> src = narrow_noise(10, 3 * (width + 1));
    src[0] = 0xffff;  // a NaN that rounding would change
    const check::Array<uint16_t> from(src), to(3 * (width + 4));
    std::vector<uint16_t> right = to.read();
    for (int m = 0; m < 3; ++m) std::copy_n(&src[m * (width + 1)], width, &right[m * (width + 4)]);
    CHECK_OK(copy_rows({from.get(), width + 1, to.get(), width + 4, 3, width}, nullptr));
    CHECK_EQUAL_ALL(to.read(), right, "copied rows");
  }
}

TEST(products_without_tensor_cores) {
  for (const int rows : {1, 2, 3, 9})
    for (const int in : {1, 6, 13, 128, 300, 2049})
      for (const int shift : {0, 1, 4}) {
        const int out = 7, batch = 2, stride = in + 3;
        const Pair x(12, batch * rows * stride, shift), w(13, batch * out * in, shift), add(14, batch * rows * out);
        const check::Array<uint16_t> narrow_y(batch * rows * out);
        const check::Array<float> wide_y(batch * rows * out), right(batch * rows * out);
        LinearArgs f{};
        f.x = x.f32(), f.x_stride = stride, f.x_batch = rows * stride;
        f.w = w.f32(), f.w_batch = out * in;
        f.y = right.get(), f.y_stride = out, f.y_batch = rows * out;
        f.rows = rows, f.out = out, f.in = in, f.batch = batch;
        LinearBf16Args a{x.bf16(),  stride,  f.x_batch, w.bf16(), f.w_batch, wide_y.get(), out,
                         f.y_batch, nullptr, rows,      out,      in,        batch,        true};
        CHECK_OK(linear(f, Gemm::kRowInvariant, nullptr));
        CHECK_OK(linear_bf16_any(a, nullptr));
        CHECK_EQUAL_ALL(check::bits(wide_y.read()), check::bits(right.read()), "float32");
        f.add = add.f32();
        a.add = add.bf16();
        a.y = narrow_y.get();
        a.wide = false;
        CHECK_OK(linear(f, Gemm::kRowInvariant, nullptr));
        CHECK_OK(linear_bf16_any(a, nullptr));
        CHECK_EQUAL_ALL(narrow_y.read(), narrow_of(right.read()), "bf16");
      }
}

TEST(experts_without_tensor_cores) {
  for (const auto& [hidden, width] : {std::pair{13, 5}, std::pair{12, 8}, std::pair{130, 33}}) {
    const int rows = 11, count = 5, chosen = 3;
    const Pair x(15, rows * hidden), gate_up(16, count * 2 * width * hidden), down(17, count * hidden * width);
    std::vector<const uint16_t*> pointers;
    for (int e = 0; e < count; ++e) pointers.push_back(gate_up.bf16() + e * 2 * width * hidden);
    for (int e = 0; e < count; ++e) pointers.push_back(down.bf16() + e * hidden * width);
    std::vector<int32_t> ids;
    for (int i = 0; i < rows * chosen; ++i) ids.push_back((i / chosen * 2 + i % chosen) % count);
    const std::vector<float> factors = check::noise(18, rows * chosen);
    const check::Array<const uint16_t*> table(pointers);
    const check::Array<int32_t> d_ids(ids);
    const check::Array<float> d_factors(factors), both(2 * width), mid(width), out(hidden);
    const check::Array<uint16_t> y(rows * hidden), narrow_mid(width);
    const check::Array<unsigned char> workspace(experts_workspace(rows, hidden, width, count, chosen));
    CHECK_OK(
        experts(ExpertsArgs<uint16_t>{x.bf16(), table.get(), table.get() + count, d_ids.get(), d_factors.get(), nullptr,
                                      y.get(), rows, hidden, width, count, chosen, workspace.get(), workspace.size()},
                nullptr));
    const std::vector<uint16_t> got = y.read();
    for (int row = 0; row < rows; ++row) {
      std::vector<float> sum(hidden);
      for (int slot = 0; slot < chosen; ++slot) {
        const int pair = row * chosen + slot, e = ids[pair];
        const auto multiply = [](const float* from, const float* w, float* to, int n, int k) {
          CHECK_OK(linear({from, k, 0, w, 0, to, n, 0, nullptr, 1, n, k, 1}, Gemm::kRowInvariant, nullptr));
        };
        multiply(x.f32() + row * hidden, gate_up.f32() + e * 2 * width * hidden, both.get(), 2 * width, hidden);
        CHECK_OK(swiglu({both.get(), mid.get(), 1, width}, nullptr));
        const check::Array<float> rounded(wide_of_all(narrow_of(mid.read())));
        multiply(rounded.get(), down.f32() + e * hidden * width, out.get(), hidden, width);
        const std::vector<float> values = out.read();
        for (int i = 0; i < hidden; ++i) {
          const float term = factors[pair] * values[i];
          sum[i] = slot == 0 ? term : sum[i] + term;
        }
      }
      for (int i = 0; i < hidden; ++i) CHECK_EQUAL(got[row * hidden + i], narrow_of(sum[i]));
    }
  }
}

TEST(latent_attention_without_tensor_cores) {
  // A tree of four rows behind the prefix; 140 keys are two chunks.
  const int nodes = 4, depth = 3;
  const check::Array<int32_t> node_count({nodes - 1}), paths({0, -1, -1, 0, 1, -1, 0, 2, -1, 0, 2, 3});
  const check::Array<uint32_t> visibility({1u, 3u, 5u, 13u});
  struct Size {
    int heads, rank, rope, prefix;
  };
  for (const Size& size : {Size{3, 7, 2, 5}, Size{17, 24, 6, 138}, Size{2, 512, 64, 3}})
    for (const AttentionForm form : {AttentionForm::kExact, AttentionForm::kMask})
      for (const bool split : {true, false}) {
        const int heads = size.heads, rank = size.rank, rope = size.rope, prefix = size.prefix;
        const int row = rank + rope, capacity = prefix + nodes;
        const Pair latent(19, nodes * heads * rank), turned(20, nodes * heads * rope), cache(21, capacity * row);
        const check::Array<int32_t> prefixes({prefix}), positions({prefix, prefix + 1, prefix + 1, prefix + 2});
        const check::Array<uint16_t> narrow_out(nodes * heads * rank);
        const check::Array<float> wide_out(nodes * heads * rank), lse(nodes * heads), right_lse(nodes * heads);
        const size_t bytes = split ? mla_attention_workspace(nodes, heads, rank, capacity) : 0;
        const check::Array<unsigned char> workspace(bytes);
        const auto attend = [&](auto* a, const auto* q, const auto* t, auto* base, auto* out, float* sums) {
          a->rows = Rows{1,           nodes, node_count.get(), prefixes.get(), nullptr, positions.get(),
                         paths.get(), depth, visibility.get()};
          a->form = form;
          a->q_latent = q;
          a->q_rope = t;
          a->q_latent_stride = heads * rank, a->q_rope_stride = heads * rope;
          a->q_latent_head = rank, a->q_rope_head = rope;
          a->cache.base = base;
          a->cache.row_bytes = row * static_cast<int>(sizeof(*base));
          a->cache.row_stride = a->cache.row_bytes;
          a->cache.layers = 1;
          a->cache.capacity = capacity;
          a->out = out;
          a->lse = sums;
          a->heads = heads, a->rank = rank, a->rope = rope;
          a->scale = 0.3f;
          a->longest = capacity;
          a->workspace = split ? workspace.get() : nullptr;
          a->workspace_size = bytes;
          CHECK_OK(mla_attention(*a, nullptr));
        };
        MlaAttentionArgs<uint16_t> a{};
        attend(&a, latent.bf16(), turned.bf16(), cache.bf16(), narrow_out.get(), lse.get());
        MlaAttentionArgs<float> f{};
        attend(&f, latent.f32(), turned.f32(), cache.f32(), wide_out.get(), right_lse.get());
        CHECK_EQUAL_ALL(narrow_out.read(), narrow_of(wide_out.read()), "out");
        CHECK_EQUAL_ALL(check::bits(lse.read()), check::bits(right_lse.read()), "lse");
      }
}

TEST(grouped_attention) {
  const int requests = 2, block = 3, heads = 6, kv_heads = 2, dim = 10, capacity = 20;
  const int query = heads * dim, pair = 2 * kv_heads * dim;
  const Pair q(22, requests * block * query), context(23, requests * capacity * pair), own(24, requests * block * pair);
  const check::Array<int32_t> lengths({17, 0});
  const check::Array<uint16_t> out(requests * block * query);
  const check::Array<float> right(requests * block * query);
  CHECK_OK(gqa_attention(
      {q.bf16(), context.bf16(), own.bf16(), lengths.get(), out.get(), requests, block, heads, kv_heads, dim, capacity},
      nullptr));
  CHECK_OK(gqa_attention(
      {q.f32(), context.f32(), own.f32(), lengths.get(), right.get(), requests, block, heads, kv_heads, dim, capacity},
      nullptr));
  CHECK_EQUAL_ALL(out.read(), narrow_of(right.read()), "out");
}

TEST(refusals) {
  const check::Array<uint16_t> memory(64);
  const check::Array<float> wide(64);
  uint16_t* const p = memory.get();
  CHECK_STATUS(rms_norm({p, 4, p, p, 4, 1, 5, 0}, nullptr), KDTREE_SIZE);
  CHECK_STATUS(rms_norm({p, 4, nullptr, p, 4, 1, 4, 0}, nullptr), KDTREE_POINTER);
  CHECK_STATUS(add(p, nullptr, p, 4, nullptr), KDTREE_POINTER);
  LinearBf16Args a{p, 5, 0, p, 0, wide.get(), 3, 0, nullptr, 1, 3, 5, 1, true};
  CHECK_OK(linear_bf16_any(a, nullptr));
  a.x_stride = 4;
  CHECK_STATUS(linear_bf16_any(a, nullptr), KDTREE_SIZE);
  CHECK_EQUAL(std::string(kdtree_last_error()).rfind("linear_bf16_any: x_stride is 4, it must be in [5, ", 0),
              size_t{0});
}
