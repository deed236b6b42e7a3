// Attention over an fp8 cache: the bits of the same kernels over the bf16 rows that its rows stand for, however the
// pass is cut and wherever the rows lie, and how far those are from the rows that were given.

#include "kernels/attention.h"
#include "tests/check.h"
#include "tests/fp8_rows.h"

using namespace kdtree;

namespace {

constexpr int kLatent = check::kFp8Latent, kWidth = kLatent + check::kFp8Rope;
constexpr int kSmallDevice = 101376;  // bytes of shared memory a block may have on sm_86, sm_89 and sm_120

using Bytes = std::vector<uint8_t>;  // a cache row of either kind

// Requests with the same tree over caches of their own.
struct Problem {
  int requests, heads, prefix;
  std::vector<int32_t> parents;   // [N]
  std::vector<uint16_t> queries;  // [R * N * heads, 576]
  std::vector<uint16_t> rows;     // [R * (prefix + N), 576], before they are kept
  float scale = 0.06f;

  int width() const { return static_cast<int>(parents.size()); }
  int keys() const { return prefix + width(); }
  std::vector<int32_t> path(int node) const {
    std::vector<int32_t> path;
    for (; node >= 0; node = parents[static_cast<size_t>(node)]) path.insert(path.begin(), node);
    return path;
  }
};

Problem random_problem(int requests, int width, int heads, int prefix, uint64_t seed) {
  Problem p{requests, heads, prefix, {-1}, {}, {}};
  for (int i = 1; i < width; ++i) p.parents.push_back(static_cast<int32_t>((i * 7 + 3) % i));
  p.queries = check::narrow_noise(seed, static_cast<size_t>(requests * width * heads) * kWidth);
  // Rows and groups of many sizes, so that a scale in a wrong place shows.
  std::vector<float> rows = check::noise(seed + 1, static_cast<size_t>(requests * p.keys()) * kWidth);
  for (size_t i = 0; i < rows.size(); ++i)
    rows[i] *= std::ldexp(1.0f, static_cast<int>((i / kWidth * 5 + i % kWidth / 128 * 3) % 7) - 3);
  p.rows = check::narrow_of(rows);
  return p;
}

std::vector<Bytes> fp8_rows(const Problem& p) {
  std::vector<Bytes> rows;
  for (size_t i = 0; i < p.rows.size(); i += kWidth) rows.push_back(check::fp8_row(p.rows.data() + i));
  return rows;
}

Bytes bytes_of(const uint16_t* row) {
  const auto* const first = reinterpret_cast<const uint8_t*>(row);
  return {first, first + 2 * kWidth};
}

// What the rows stand for, in bf16.
std::vector<Bytes> bf16_rows(const std::vector<Bytes>& rows) {
  std::vector<Bytes> result;
  for (const Bytes& row : rows) result.push_back(bytes_of(check::fp8_row_values(row.data()).data()));
  return result;
}

enum class Kernel { kSixteen, kChunks, kSpans, kGeneral, kMask };  // how the pass is cut, or which other kernel

struct How {
  Kernel kernel = Kernel::kSixteen;
  bool small_device = false;
  int block_size = 0;  // of a paged cache
  int gap = 0;         // bytes between rows
};

constexpr int kHows = 6;
How how_of(int i) {
  How how;
  how.kernel = static_cast<Kernel>(i % 3);
  how.small_device = i / 3 % 2 == 1;
  how.block_size = i % 4 == 3 ? 16 : 0;
  how.gap = i % 2 * 16;
  return how;
}

struct Result {
  std::vector<uint16_t> out;  // [R * N * heads, 512]
  std::vector<float> lse;     // [R * N * heads]
};

// rows: [R * keys].
Result run(const Problem& p, const std::vector<Bytes>& rows, const How& how) {
  const int width = p.width(), keys = p.keys(), size = how.block_size;
  const int blocks = size > 0 ? (keys + size - 1) / size : 0, row_bytes = static_cast<int>(rows[0].size());
  const int row_stride = row_bytes + how.gap, places = size > 0 ? blocks * size : keys;
  const size_t count = static_cast<size_t>(p.requests * width);
  std::vector<int32_t> node_count, prefixes, positions, paths(count * static_cast<size_t>(width), -1), table;
  std::vector<uint32_t> sees(count, 0);
  Bytes cache(static_cast<size_t>(p.requests * places) * static_cast<size_t>(row_stride), 0xff);
  for (int b = 0; b < p.requests * blocks; ++b) table.push_back(p.requests * blocks - 1 - b);
  for (int r = 0; r < p.requests; ++r) {
    node_count.push_back(width - 1);
    prefixes.push_back(p.prefix);
    for (int i = 0; i < width; ++i) {
      const std::vector<int32_t> path = p.path(i);
      positions.push_back(p.prefix + static_cast<int32_t>(path.size()) - 1);
      std::copy(path.begin(), path.end(), paths.begin() + static_cast<ptrdiff_t>((r * width + i) * width));
      for (const int32_t step : path) sees[static_cast<size_t>(r * width + i)] |= 1u << step;
    }
    for (int i = 0; i < keys; ++i) {
      const int place = size > 0 ? table[static_cast<size_t>(r * blocks + i / size)] * size + i % size : r * places + i;
      const Bytes& row = rows[static_cast<size_t>(r * keys + i)];
      std::copy(row.begin(), row.end(), cache.begin() + static_cast<ptrdiff_t>(place) * row_stride);
    }
  }
  const check::Array<int32_t> d_count(node_count), d_prefix(prefixes), d_positions(positions), d_paths(paths),
      d_table(table);
  const check::Array<uint32_t> d_sees(sees);
  const check::Array<uint16_t> d_queries(p.queries);
  const check::Array<uint8_t> d_cache(cache);
  check::Array<uint16_t> out(count * static_cast<size_t>(p.heads) * kLatent);
  check::Array<float> lse(count * static_cast<size_t>(p.heads));
  const auto fill = [&](auto* a) {
    a->rows.requests = p.requests, a->rows.width = width;
    a->rows.node_count = d_count.get(), a->rows.prefix_lengths = d_prefix.get(), a->rows.positions = d_positions.get();
    a->rows.paths = d_paths.get(), a->rows.path_stride = width, a->rows.visibility = d_sees.get();
    a->q_latent = d_queries.get(), a->q_rope = a->q_latent + kLatent;
    a->q_latent_head = a->q_rope_head = kWidth;
    a->q_latent_stride = a->q_rope_stride = static_cast<int64_t>(p.heads) * kWidth;
    a->cache.base = d_cache.get();
    a->cache.row_bytes = row_bytes, a->cache.row_stride = row_stride;
    a->cache.request_stride = static_cast<int64_t>(places) * row_stride;
    a->cache.layers = 1, a->cache.capacity = keys;
    a->cache.block_size = size, a->cache.table_stride = blocks, a->cache.block_table = d_table.get();
    a->cache_rows = row_bytes == check::kFp8Bytes ? CacheRows::kFp8 : CacheRows::kPlain;
    a->out = out.get(), a->lse = lse.get();
    a->heads = p.heads, a->scale = p.scale;
    a->longest = std::max(keys, 300);  // at least two chunks
  };
  if (how.kernel == Kernel::kGeneral || how.kernel == Kernel::kMask) {
    MlaAttentionArgs<uint16_t> a{};
    fill(&a);
    a.form = how.kernel == Kernel::kMask ? AttentionForm::kMask : AttentionForm::kExact;
    a.rank = kLatent, a.rope = check::kFp8Rope;
    CHECK_OK(mla_attention(a, nullptr));
  } else {
    MlaAttentionBf16Args a{};
    fill(&a);
    const int groups = p.requests * ((width * p.heads + 63) / 64);
    a.blocks = how.kernel == Kernel::kSpans    ? 1
               : how.kernel == Kernel::kChunks ? 2 * groups * std::max(a.longest / 2048, 1)
                                               : INT32_MAX;
    a.shared_memory = how.small_device ? kSmallDevice : 0;
    a.portable = a.cache_rows == CacheRows::kPlain;
    CHECK(mla_attention_bf16_path(a) == AttentionPath::kPortable);
    const size_t bytes = mla_attention_bf16_workspace(p.requests, width, p.heads, a.longest, a.blocks);
    const check::Array<unsigned char> workspace(bytes);
    a.workspace = workspace.get(), a.workspace_size = bytes;
    CHECK_OK(mla_attention_bf16(a, nullptr));
    (void)workspace.read();  // its guards
  }
  return {out.read(), lse.read()};
}

void same(const Result& a, const Result& b) {
  CHECK_EQUAL_ALL(a.out, b.out, "out");
  CHECK_EQUAL_ALL(check::bits(a.lse), check::bits(b.lse), "lse");
}

// Root of the mean square of the difference, in parts of that of the truth, which sums in double give for `rows`.
double error(const Problem& p, const Result& result, const std::vector<Bytes>& rows) {
  double off = 0, all = 0;
  for (int r = 0; r < p.requests; ++r)
    for (int node = 0; node < p.width(); ++node)
      for (int head = node % 2; head < p.heads; head += 5) {
        const size_t at = static_cast<size_t>((r * p.width() + node) * p.heads + head);
        std::vector<const uint16_t*> keys;
        const auto add = [&](int i) {
          keys.push_back(reinterpret_cast<const uint16_t*>(rows[static_cast<size_t>(r * p.keys() + i)].data()));
        };
        for (int i = 0; i < p.prefix; ++i) add(i);
        for (const int32_t step : p.path(node)) add(p.prefix + step);
        std::vector<double> weights;
        double total = 0;
        for (const uint16_t* key : keys) {
          double score = 0;
          for (size_t c = 0; c < kWidth; ++c)
            score += static_cast<double>(check::wide_of(p.queries[at * kWidth + c])) * check::wide_of(key[c]);
          weights.push_back(std::exp(score * p.scale));
          total += weights.back();
        }
        for (size_t c = 0; c < kLatent; ++c) {
          double sum = 0;
          for (size_t k = 0; k < keys.size(); ++k) sum += weights[k] / total * check::wide_of(keys[k][c]);
          off += std::pow(check::wide_of(result.out[at * kLatent + c]) - sum, 2);
          all += sum * sum;
        }
      }
  return std::sqrt(off / all);
}

}  // namespace

TEST(has_the_bits_of_the_rows_that_it_stands_for) {
  int i = 0;
  for (const int heads : {16, 32, 64, 128})
    for (const int prefix : check::tiny() ? std::vector<int>{33} : std::vector<int>{0, 45, 330}) {
      const Problem p = random_problem(heads < 64 ? 2 : 1, 5, heads, prefix, static_cast<uint64_t>(heads + prefix));
      const std::vector<Bytes> rows = fp8_rows(p);
      for (const int j : {i, i + 3}) same(run(p, rows, how_of(j)), run(p, bf16_rows(rows), how_of(i)));
      ++i;
    }
}

// Tiles of all stages and their places again and again, in each shape of a block.
TEST(long_prefixes_go_round_all_stages) {
  const Problem p = random_problem(1, 3, 32, check::tiny() ? 300 : 1100, 5);
  const std::vector<Bytes> rows = fp8_rows(p);
  const Result expected = run(p, bf16_rows(rows), how_of(0));
  for (int i = 0; i < kHows; ++i) same(run(p, rows, how_of(i)), expected);
}

TEST(a_node_of_a_tree_has_the_bits_of_plain_decoding) {
  const Problem p = random_problem(1, 7, 16, 90, 6);
  const std::vector<Bytes> rows = fp8_rows(p);
  const Result tree = run(p, rows, how_of(1));
  for (int node = 0; node < p.width(); node += 2) {
    const std::vector<int32_t> path = p.path(node);
    Problem one{1, p.heads, p.prefix + static_cast<int>(path.size()) - 1, {-1}, {}, {}};
    const auto queries = p.queries.begin() + node * p.heads * kWidth;
    one.queries.assign(queries, queries + p.heads * kWidth);
    std::vector<Bytes> kept(rows.begin(), rows.begin() + p.prefix);
    for (const int32_t step : path) kept.push_back(rows[static_cast<size_t>(p.prefix + step)]);
    const Result plain = run(one, kept, how_of(node));
    const size_t at = static_cast<size_t>(node * p.heads);
    for (size_t i = 0; i < plain.out.size(); ++i) CHECK_EQUAL(plain.out[i], tree.out[at * kLatent + i]);
    for (size_t i = 0; i < plain.lse.size(); ++i) CHECK_EQUAL(plain.lse[i], tree.lse[at + i]);
  }
}

TEST(the_general_kernel_reads_the_same_rows) {
  const Problem p = random_problem(2, 3, 5, 40, 7);
  const std::vector<Bytes> rows = fp8_rows(p);
  for (const Kernel kernel : {Kernel::kGeneral, Kernel::kMask}) {
    const How how{kernel, false, 0, 16}, paged{kernel, false, 16, 0};
    const Result expected = run(p, bf16_rows(rows), how);
    CHECK(error(p, expected, bf16_rows(rows)) < 0x1p-8);
    same(run(p, rows, how), expected);
    same(run(p, rows, paged), expected);
  }
}

// Against the rows as they are kept, bf16 of weights and result alone; against those given, what three bits of
// mantissa cost: up to 2^-4 of each latent, and as much of what a score says.
TEST(is_near_sums_in_double) {
  const Problem p = random_problem(1, 4, 16, 150, 8);
  const std::vector<Bytes> rows = fp8_rows(p);
  std::vector<Bytes> given;
  for (size_t i = 0; i < p.rows.size(); i += kWidth) given.push_back(bytes_of(p.rows.data() + i));
  const Result result = run(p, rows, how_of(0));
  const double kept = error(p, result, bf16_rows(rows)), first = error(p, result, given);
  CHECK_NEAR(kept, 0, 0x1p-8);
  CHECK_NEAR(first, 0, 0x1p-4);
  CHECK(first > kept);
}

// Rows that others wrote: scales that are no powers of two, of which products are rounded to bf16, and every code.
TEST(any_scale_and_any_code_is_read) {
  const Problem p = random_problem(1, 3, 16, 70, 9);
  std::vector<Bytes> rows = fp8_rows(p);
  for (size_t i = 0; i < rows.size(); ++i)
    for (size_t group = 0; group < 4; ++group) {
      const float scale = 0.001f * static_cast<float>(1 + (i * 4 + group) % 13);
      std::memcpy(rows[i].data() + kLatent + 4 * group, &scale, sizeof scale);
      for (size_t c = 0; c < 128; ++c) {
        const auto code = static_cast<uint8_t>(c * 2 + i % 2);
        rows[i][group * 128 + c] = (code & 0x7f) == 0x7f ? uint8_t{0x7e} : code;
      }
    }
  const Result expected = run(p, bf16_rows(rows), how_of(0));
  for (const uint16_t bits : expected.out) CHECK(std::isfinite(check::wide_of(bits)));
  for (int i = 0; i < kHows; ++i) same(run(p, rows, how_of(i)), expected);
}

TEST(a_nan_is_in_code_or_scale_and_spreads_to_those_who_see_it) {
  const Problem p = random_problem(1, 4, 16, 40, 10);  // nodes 1 and 2 hang on the root, 3 on node 0 as well
  const std::vector<Bytes> clean = fp8_rows(p);
  const Result expected = run(p, clean, how_of(0));
  const size_t node = 2, values = static_cast<size_t>(p.heads) * kLatent;
  for (const bool in_scale : {false, true}) {
    std::vector<Bytes> rows = clean;
    Bytes& bad = rows[static_cast<size_t>(p.prefix) + node];
    if (in_scale)
      std::fill_n(bad.begin() + kLatent + 8, 4, uint8_t{0xff});
    else
      bad[300] = 0xff;
    for (int i = 0; i < kHows; ++i) {
      const Result result = run(p, rows, how_of(i));
      for (size_t row = 0; row < p.parents.size(); ++row) {
        const std::vector<int32_t> path = p.path(static_cast<int>(row));
        const bool sees = std::find(path.begin(), path.end(), static_cast<int32_t>(node)) != path.end();
        for (size_t c = row * values; c < (row + 1) * values; ++c)
          CHECK(sees ? std::isnan(check::wide_of(result.out[c])) : result.out[c] == expected.out[c]);
      }
    }
  }
}

TEST(refusals_name_what_is_wrong) {
  MlaAttentionBf16Args a{};
  a.rows.requests = a.rows.width = a.longest = 1;
  a.heads = 16;
  a.cache_rows = CacheRows::kFp8;
  a.cache.row_bytes = 1152;
  CHECK_STATUS(mla_attention_bf16(a, nullptr), KDTREE_SIZE);
  CHECK(std::string(kdtree_last_error()).find("row_bytes is 1152, it must be in [656, 656]") != std::string::npos);
  MlaAttentionArgs<float> wide{};
  wide.cache_rows = CacheRows::kFp8;
  CHECK_STATUS(mla_attention(wide, nullptr), KDTREE_SIZE);
  CHECK(std::string(kdtree_last_error()).find("an fp8 cache holds rows of bf16") != std::string::npos);
}
