// Attention against the goldens of the NumPy reference, and its promise: a row's bits depend on its own keys alone.

#include <algorithm>
#include <array>
#include <cstring>
#include <kdtr/compare.hpp>
#include <random>

#include "common/philox.h"
#include "kernels/attention.h"
#include "tests/check.h"

using namespace kdtree;

namespace {

// One request's tree over a cache, on the host.
struct Problem {
  int rows, heads, rank, rope, prefix;
  float scale;
  std::vector<int32_t> parents;                 // [N]
  std::vector<float> q_latent, q_rope;          // [N, H, rank], [N, H, rope]
  std::vector<std::vector<float>> cache;        // [prefix + N] rows of rank + rope
  std::vector<std::vector<bool>> visible = {};  // [N, N]; empty: what the parents say
};

struct Result {
  std::vector<float> out, lse;
};

struct How {
  AttentionForm form = AttentionForm::kExact;
  int width = 0;       // rows of the block; 0: as many as the tree has
  int block_size = 0;  // of a paged cache
  bool split = true;   // give it the workspace for a block a chunk
  int longest = 0;     // 0: as many as there are keys
  bool chain = false;  // no paths: row i sees rows 0..i
};

std::vector<std::vector<int32_t>> paths_of(const std::vector<int32_t>& parents) {
  std::vector<std::vector<int32_t>> paths;
  for (size_t i = 0; i < parents.size(); ++i) {
    std::vector<int32_t> path = i == 0 ? std::vector<int32_t>{} : paths[static_cast<size_t>(parents[i])];
    path.push_back(static_cast<int32_t>(i));
    paths.push_back(path);
  }
  return paths;
}

// Several requests in one call.
std::vector<Result> run(const std::vector<const Problem*>& problems, const How& how) {
  const int requests = static_cast<int>(problems.size());
  const Problem& first = *problems[0];
  int width = how.width, capacity = 0, depth = 1;
  for (const Problem* p : problems) {
    width = std::max(width, p->rows);
    capacity = std::max(capacity, static_cast<int>(p->cache.size()));
    for (const auto& path : paths_of(p->parents)) depth = std::max(depth, static_cast<int>(path.size()));
  }
  const size_t rows = static_cast<size_t>(requests) * width, words = static_cast<size_t>(width + 31) / 32;
  const int entry = first.rank + first.rope;
  std::vector<int32_t> node_count, prefixes, positions(rows, 0), paths(rows * depth, -1);
  std::vector<uint32_t> visibility(rows * words, 0);
  std::vector<float> q_latent(rows * first.heads * first.rank, NAN), q_rope(rows * first.heads * first.rope, NAN);

  // Blocks of a paged cache are handed out backwards, so that nothing is right by chance.
  const int per_request = how.block_size > 0 ? (capacity + how.block_size - 1) / how.block_size : 0;
  std::vector<int32_t> table(static_cast<size_t>(std::max(requests * per_request, 1)));
  for (int b = 0; b < requests * per_request; ++b) table[static_cast<size_t>(b)] = requests * per_request - 1 - b;
  const size_t slots = static_cast<size_t>(requests) * (how.block_size > 0 ? per_request * how.block_size : capacity);
  std::vector<float> cache(slots * entry, NAN);

  for (int r = 0; r < requests; ++r) {
    const Problem& p = *problems[static_cast<size_t>(r)];
    node_count.push_back(p.rows - 1);
    prefixes.push_back(p.prefix);
    const auto all = paths_of(p.parents);
    for (int i = 0; i < p.rows; ++i) {
      const size_t row = static_cast<size_t>(r) * width + i;
      const auto& path = all[static_cast<size_t>(i)];
      positions[row] = p.prefix + static_cast<int32_t>(path.size()) - 1;
      std::copy(path.begin(), path.end(), paths.begin() + row * depth);
      for (int j = 0; j < p.rows; ++j) {
        const bool sees = p.visible.empty()
                              ? std::find(path.begin(), path.end(), j) != path.end()
                              : static_cast<bool>(p.visible[static_cast<size_t>(i)][static_cast<size_t>(j)]);
        if (sees) visibility[row * words + static_cast<size_t>(j) / 32] |= 1u << j % 32;
      }
    }
    std::copy(p.q_latent.begin(), p.q_latent.end(),
              q_latent.begin() + static_cast<size_t>(r) * width * p.heads * p.rank);
    std::copy(p.q_rope.begin(), p.q_rope.end(), q_rope.begin() + static_cast<size_t>(r) * width * p.heads * p.rope);
    for (size_t i = 0; i < p.cache.size(); ++i) {
      const size_t place =
          how.block_size > 0
              ? static_cast<size_t>(table[static_cast<size_t>(r) * per_request + i / how.block_size]) * how.block_size +
                    i % how.block_size
              : static_cast<size_t>(r) * capacity + i;
      std::copy(p.cache[i].begin(), p.cache[i].end(), cache.begin() + place * entry);
    }
  }

  const check::Array<int32_t> d_count(node_count), d_prefix(prefixes), d_positions(positions), d_paths(paths),
      d_table(table);
  const check::Array<uint32_t> d_visibility(visibility);
  const check::Array<float> d_latent(q_latent), d_rope(q_rope), d_cache(cache);
  check::Array<float> out(rows * first.heads * first.rank), lse(rows * first.heads);
  MlaAttentionArgs<float> a{};
  a.rows = Rows{requests,
                width,
                d_count.get(),
                d_prefix.get(),
                nullptr,
                d_positions.get(),
                how.chain ? nullptr : d_paths.get(),
                depth,
                d_visibility.get()};
  a.form = how.form;
  a.q_latent = d_latent.get();
  a.q_rope = d_rope.get();
  a.q_latent_head = first.rank;
  a.q_rope_head = first.rope;
  a.q_latent_stride = static_cast<int64_t>(first.heads) * first.rank;
  a.q_rope_stride = static_cast<int64_t>(first.heads) * first.rope;
  a.cache.base = d_cache.get();
  a.cache.row_bytes = entry * 4;
  a.cache.row_stride = entry * 4;
  a.cache.request_stride = static_cast<int64_t>(capacity) * entry * 4;
  a.cache.layers = 1;
  a.cache.capacity = capacity;
  a.cache.block_size = how.block_size;
  a.cache.table_stride = per_request;
  a.cache.block_table = d_table.get();
  a.out = out.get();
  a.lse = lse.get();
  a.heads = first.heads;
  a.rank = first.rank;
  a.rope = first.rope;
  a.scale = first.scale;
  a.longest = how.longest > 0 ? how.longest : capacity;
  const size_t bytes = how.split ? mla_attention_workspace(static_cast<int>(rows), a.heads, a.rank, a.longest) : 0;
  CHECK(!how.split || bytes > 0);
  check::Array<unsigned char> workspace(bytes);
  a.workspace = bytes > 0 ? workspace.get() : nullptr;
  a.workspace_size = bytes;
  CHECK_OK(mla_attention(a, nullptr));
  const std::vector<float> all_out = out.read(), all_lse = lse.read();
  (void)workspace.read();  // its guards

  std::vector<Result> results;
  for (int r = 0; r < requests; ++r) {
    const Problem& p = *problems[static_cast<size_t>(r)];
    const size_t at = static_cast<size_t>(r) * width * p.heads, used = static_cast<size_t>(p.rows) * p.heads;
    Result result{{all_out.begin() + at * p.rank, all_out.begin() + (at + used) * p.rank},
                  {all_lse.begin() + at, all_lse.begin() + at + used}};
    for (size_t i = (at + used) * p.rank; i < (at + static_cast<size_t>(width) * p.heads) * p.rank; ++i)
      CHECK_EQUAL(all_out[i], 0.0f);  // rows past the used ones
    results.push_back(std::move(result));
  }
  return results;
}

Result run(const Problem& problem, const How& how = {}) { return run({&problem}, how)[0]; }

void same_bits(const std::vector<float>& a, const std::vector<float>& b, const char* what) {
  CHECK_EQUAL(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i)
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0)
      check::fail(__FILE__, __LINE__,
                  std::string(what) + "[" + std::to_string(i) + "]: " + check::text(a[i]) + " and " +
                      check::text(b[i]) + " differ");
}

// Rows `from` of one result against rows `to` of another.
void same_row(const Problem& p, const Result& a, int from, const Result& b, int to, const char* what) {
  const size_t size = static_cast<size_t>(p.heads) * p.rank;
  const auto cut = [size](const Result& r, int row) {
    return std::vector<float>(r.out.begin() + static_cast<ptrdiff_t>(size) * row,
                              r.out.begin() + static_cast<ptrdiff_t>(size) * (row + 1));
  };
  same_bits(cut(a, from), cut(b, to), what);
}

std::vector<float> floats(const kdtr::Tensor& tensor) {
  std::vector<float> values;
  if (tensor.dtype == kdtr::DType::bf16) {
    for (const uint16_t bits : tensor.bits<uint16_t>()) {
      const uint32_t wide = static_cast<uint32_t>(bits) << 16;
      float value;
      std::memcpy(&value, &wide, sizeof value);
      values.push_back(value);
    }
  } else {
    for (const float value : tensor.as<float>()) values.push_back(value);
  }
  return values;
}

std::vector<std::vector<float>> join(const std::vector<float>& latent, const std::vector<float>& rope_key, int rank,
                                     int rope) {
  std::vector<std::vector<float>> rows;
  for (size_t i = 0; i < latent.size() / static_cast<size_t>(rank); ++i) {
    std::vector<float> row(latent.begin() + static_cast<ptrdiff_t>(i) * rank,
                           latent.begin() + static_cast<ptrdiff_t>(i + 1) * rank);
    row.insert(row.end(), rope_key.begin() + static_cast<ptrdiff_t>(i) * rope,
               rope_key.begin() + static_cast<ptrdiff_t>(i + 1) * rope);
    rows.push_back(row);
  }
  return rows;
}

Problem random_problem(int rows, int heads, int rank, int rope, int prefix, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Problem p{rows, heads, rank, rope, prefix, 0.2f, {-1}, {}, {}, {}};
  for (int i = 1; i < rows; ++i) p.parents.push_back(static_cast<int32_t>(generator() % static_cast<uint32_t>(i)));
  for (int i = 0; i < rows * heads * rank; ++i) p.q_latent.push_back(0.3f * normal(generator));
  for (int i = 0; i < rows * heads * rope; ++i) p.q_rope.push_back(0.3f * normal(generator));
  for (int i = 0; i < prefix + rows; ++i) {
    std::vector<float> row;
    for (int c = 0; c < rank + rope; ++c) row.push_back(normal(generator));
    p.cache.push_back(row);
  }
  return p;
}

// The same node as plain decoding meets it: its path committed, itself alone in the pass.
Problem alone(const Problem& p, int node) {
  const std::vector<int32_t> path = paths_of(p.parents)[static_cast<size_t>(node)];
  Problem one{1, p.heads, p.rank, p.rope, p.prefix + static_cast<int>(path.size()) - 1, p.scale, {-1}, {}, {}, {}};
  const ptrdiff_t latent = static_cast<ptrdiff_t>(p.heads) * p.rank, rope = static_cast<ptrdiff_t>(p.heads) * p.rope;
  one.q_latent.assign(p.q_latent.begin() + node * latent, p.q_latent.begin() + (node + 1) * latent);
  one.q_rope.assign(p.q_rope.begin() + node * rope, p.q_rope.begin() + (node + 1) * rope);
  one.cache.assign(p.cache.begin(), p.cache.begin() + p.prefix);
  for (const int32_t step : path) one.cache.push_back(p.cache[static_cast<size_t>(p.prefix + step)]);
  return one;
}

// Element `index` of a stream of reference/golden/inputs.py, rounded to bf16 and widened.
float generated(uint64_t seed, uint32_t stream, uint64_t index, double factor = 1) {
  const PhiloxWords words = philox(seed, static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), stream, 2);
  double sum = 0;
  for (const uint32_t word : words.x) sum += word;
  float value = static_cast<float>((sum * 0x1p-32 - 2.0) * std::sqrt(3.0));
  value = static_cast<float>(value * factor);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

}  // namespace

TEST(small_goldens) {
  const kdtr::File golden = check::golden("attention_small.kdtr");
  int trees = 0, masks = 0;
  for (uint64_t i = 0; i < golden.size(); ++i) {
    const std::string_view name = golden[i].name;
    if (name.size() < 5 || name.substr(name.size() - 4) != "/out") continue;
    const std::string at(name.substr(0, name.size() - 3));
    const kdtr::Tensor latent = golden.at(at + "latent"), query = golden.at(at + "q_latent"),
                       out = golden.at(at + "out");
    const auto visible = golden.at(at + "visible").as<bool, 2>();
    Problem p{};
    p.rows = static_cast<int>(query.shape[0]);
    p.heads = static_cast<int>(query.shape[1]);
    p.rank = static_cast<int>(query.shape[2]);
    p.rope = static_cast<int>(golden.at(at + "q_rope").shape[2]);
    p.scale = static_cast<float>(golden.at(at + "scale").scalar<double>());
    const int columns = static_cast<int>(visible.shape[1]);
    // A mask wider than the block is one over the cache: rows beyond the queries' become rows nobody asks about.
    const int block = std::max(p.rows, columns);
    p.prefix = static_cast<int>(latent.shape[0]) - block;
    p.q_latent = floats(query);
    p.q_rope = floats(golden.at(at + "q_rope"));
    p.cache = join(floats(latent), floats(golden.at(at + "rope_key")), p.rank, p.rope);
    const bool tree = columns == p.rows;
    const int asked = p.rows;
    for (int i = 0; i < block; ++i) {
      std::vector<bool> row(static_cast<size_t>(block), false);
      int parent = -1;
      for (int j = 0; j < columns && i < asked; ++j) {
        row[static_cast<size_t>(j)] = visible(i, j);
        if (j < i && visible(i, j)) parent = j;
      }
      p.visible.push_back(row);
      p.parents.push_back(i == 0 ? -1 : std::max(parent, 0));
    }
    p.rows = block;
    p.q_latent.resize(static_cast<size_t>(block) * p.heads * p.rank);
    p.q_rope.resize(static_cast<size_t>(block) * p.heads * p.rope);
    for (const AttentionForm form : {AttentionForm::kExact, AttentionForm::kMask}) {
      if (form == AttentionForm::kExact && !tree) continue;
      How how;
      how.form = form;
      Result result = run(p, how);
      result.out.resize(static_cast<size_t>(asked) * p.heads * p.rank);
      result.lse.resize(static_cast<size_t>(asked) * p.heads);
      kdtr::compare(out, result.out).raise_if_failed();
      kdtr::compare(golden.at(at + "lse"), result.lse).raise_if_failed();
      ++(form == AttentionForm::kExact ? trees : masks);
    }
  }
  std::printf("%d trees, %d masks\n", trees, masks);
  CHECK(trees >= 8 && masks > trees);
}

// 512 latents and 64 rope channels, 16 to 128 heads: inputs from the generator, results of sampled rows and heads.
TEST(full_goldens) {
  const kdtr::File golden = check::golden("attention_full.kdtr");
  int ran = 0, left = 0;
  for (uint64_t i = 0; i < golden.size(); ++i) {
    const std::string_view name = golden[i].name;
    if (name.size() < 6 || name.substr(name.size() - 6) != "/pairs") continue;
    const std::string at(name.substr(0, name.size() - 5));
    const auto pairs = golden.at(at + "pairs").as<int32_t, 2>();
    const auto parents = golden.at(at + "parents").as<int32_t, 1>();
    const uint64_t seed = golden.at(at + "seed").scalar<uint64_t>();
    Problem p{static_cast<int>(parents.size),
              golden.at(at + "heads").scalar<int32_t>(),
              512,
              64,
              golden.at(at + "prefix_length").scalar<int32_t>(),
              static_cast<float>(golden.at(at + "scale").scalar<double>()),
              {parents.begin(), parents.end()},
              {},
              {},
              {}};
#ifdef KDTREE_HOST
    const int64_t most = check::tiny() ? 100 : 300000;  // scores; the CPU takes its time
#else
    const int64_t most = INT64_MAX;
#endif
    if (static_cast<int64_t>(p.rows) * p.heads * (p.prefix + p.rows) > most) {
      ++left;
      continue;
    }
    const uint64_t query = static_cast<uint64_t>(p.rows) * static_cast<uint64_t>(p.heads);
    for (uint64_t e = 0; e < query * 512; ++e) p.q_latent.push_back(generated(seed, 0, e, 0.125));
    for (uint64_t e = 0; e < query * 64; ++e) p.q_rope.push_back(generated(seed, 1, e, 0.125));
    for (uint64_t row = 0; row < static_cast<uint64_t>(p.prefix + p.rows); ++row) {
      std::vector<float> entry;
      for (uint64_t c = 0; c < 512; ++c) entry.push_back(generated(seed, 2, row * 512 + c));
      for (uint64_t c = 0; c < 64; ++c) entry.push_back(generated(seed, 3, row * 64 + c));
      p.cache.push_back(entry);
    }
    const Result result = run(p);
    std::vector<float> out, lse;
    for (uint64_t k = 0; k < pairs.shape[0]; ++k) {
      const size_t place = static_cast<size_t>(pairs(k, 0)) * p.heads + static_cast<size_t>(pairs(k, 1));
      lse.push_back(result.lse[place]);
      out.insert(out.end(), result.out.begin() + static_cast<ptrdiff_t>(place * 512),
                 result.out.begin() + static_cast<ptrdiff_t>((place + 1) * 512));
    }
    kdtr::compare(golden.at(at + "sampled_out"), out).raise_if_failed();
    kdtr::compare(golden.at(at + "sampled_lse"), lse).raise_if_failed();
    ++ran;
  }
  std::printf("%d cases, %d left to a GPU\n", ran, left);
  CHECK(ran > 0);
}

TEST(a_node_of_a_tree_has_the_bits_of_plain_decoding) {
  const std::vector<int> prefixes = check::tiny() ? std::vector<int>{30} : std::vector<int>{0, 1, 127, 128, 300};
  const int rows = check::tiny() ? 5 : 17;
  for (const int prefix : prefixes) {
    const Problem p = random_problem(rows, 3, 40, 8, prefix, static_cast<uint32_t>(prefix));
    const Result tree = run(p);
    for (int node = 0; node < rows; ++node) same_row(p, run(alone(p, node)), 0, tree, node, "node");
  }
}

TEST(a_chain_needs_no_paths_and_a_prompt_may_come_in_pieces) {
  Problem p = random_problem(check::tiny() ? 6 : 40, 2, 40, 8, 0, 5);
  for (size_t i = 1; i < p.parents.size(); ++i) p.parents[i] = static_cast<int32_t>(i) - 1;
  const Result whole = run(p);
  How chain;
  chain.chain = true;
  same_bits(whole.out, run(p, chain).out, "chain");
  for (int node = 0; node < p.rows; node += 3) same_row(p, run(alone(p, node)), 0, whole, node, "piece");
}

TEST(neighbours_slots_width_workspace_and_paging_change_no_bit) {
  const int rows = check::tiny() ? 4 : 9, prefix = check::tiny() ? 20 : 290;
  const Problem p = random_problem(rows, 18, 40, 8, prefix, 1), other = random_problem(rows - 2, 18, 40, 8, 7, 2);
  const Result base = run(p);
  How how;
  how.split = false;
  same_bits(base.out, run(p, how).out, "one block that walks");
  same_bits(base.lse, run(p, how).lse, "lse of one block that walks");
  how = {};
  how.width = rows + 5;
  how.longest = 700;
  same_bits(base.out, run(p, how).out, "wider, longer");
  how = {};
  how.block_size = 16;
  same_bits(base.out, run(p, how).out, "paged");
  const std::vector<Result> both = run({&other, &p}, {});
  same_bits(base.out, both[1].out, "second request");
  same_bits(run(other).out, both[0].out, "first request");

  // The last row, moved to another slot of another tree.
  const Problem one = alone(p, rows - 1);
  Problem beside = random_problem(3, 18, 40, 8, one.prefix, 3);
  beside.parents = {-1, 0, 0};
  std::copy(one.cache.begin(), one.cache.end(), beside.cache.begin());  // the prefix; row 0 of the block is the node
  std::copy(one.q_latent.begin(), one.q_latent.end(), beside.q_latent.begin());
  std::copy(one.q_rope.begin(), one.q_rope.end(), beside.q_rope.begin());
  same_row(p, run(beside), 0, base, rows - 1, "other slot");
}

TEST(a_row_that_is_not_seen_has_no_influence_and_one_that_is_seen_spreads) {
  const Problem p = random_problem(5, 2, 24, 6, 10, 9);
  const std::vector<std::vector<int32_t>> paths = paths_of(p.parents);
  const Result clean = run(p);
  for (int bad = 0; bad < p.rows; ++bad) {
    Problem poisoned = p;
    for (float& value : poisoned.cache[static_cast<size_t>(p.prefix + bad)]) value = NAN;
    for (const AttentionForm form : {AttentionForm::kExact, AttentionForm::kMask}) {
      How how;
      how.form = form;
      const Result reference = form == AttentionForm::kExact ? clean : run(p, how);
      const Result result = run(poisoned, how);
      for (int row = 0; row < p.rows; ++row) {
        const auto& path = paths[static_cast<size_t>(row)];
        if (std::find(path.begin(), path.end(), bad) == path.end())
          same_row(p, reference, row, result, row, "row that does not see it");
        else
          for (int i = 0; i < p.heads * p.rank; ++i)
            CHECK(std::isnan(result.out[static_cast<size_t>(row) * p.heads * p.rank + static_cast<size_t>(i)]));
      }
    }
  }
}

TEST(grouped_heads_look_at_context_and_block) {
  std::mt19937 generator(11);
  std::normal_distribution<float> normal;
  for (const auto& [requests, block, heads, kv_heads, dim, capacity] :
       {std::array{2, 8, 4, 2, 8, 20}, std::array{1, 3, 40, 1, 33, 50}, std::array{1, 1, 2, 2, 128, 0}}) {
    const std::vector<int32_t> lengths = requests == 2 ? std::vector<int32_t>{17, 0} : std::vector<int32_t>{capacity};
    const auto draw = [&](size_t n) {
      std::vector<float> values(n);
      for (float& value : values) value = normal(generator);
      return values;
    };
    const size_t row = static_cast<size_t>(heads) * dim, pair = 2 * static_cast<size_t>(kv_heads) * dim;
    const std::vector<float> q = draw(static_cast<size_t>(requests) * block * row);
    std::vector<float> context = draw(static_cast<size_t>(requests) * capacity * pair);
    const std::vector<float> own = draw(static_cast<size_t>(requests) * block * pair);
    for (int r = 0; r < requests; ++r)  // what lies past the context is never read
      for (size_t i = static_cast<size_t>(lengths[static_cast<size_t>(r)]) * pair; i < capacity * pair; ++i)
        context[static_cast<size_t>(r) * capacity * pair + i] = NAN;
    const check::Array<float> d_q(q), d_context(context), d_own(own);
    const check::Array<int32_t> d_lengths(lengths);
    check::Array<float> d_out(q.size());
    CHECK_OK(gqa_attention({d_q.get(), d_context.get(), d_own.get(), d_lengths.get(), d_out.get(), requests, block,
                            heads, kv_heads, dim, capacity},
                           nullptr));
    const std::vector<float> out = d_out.read();
    for (int r = 0; r < requests; ++r)
      for (int b = 0; b < block; ++b)
        for (int h = 0; h < heads; ++h) {
          const int length = lengths[static_cast<size_t>(r)];
          const size_t kv = static_cast<size_t>(h / (heads / kv_heads)) * dim;
          const float* query = &q[(static_cast<size_t>(r) * block + b) * row + static_cast<size_t>(h) * dim];
          const auto keys = [&](int k) {
            return k < length ? &context[(static_cast<size_t>(r) * capacity + k) * pair + kv]
                              : &own[(static_cast<size_t>(r) * block + k - length) * pair + kv];
          };
          std::vector<double> weights;
          double total = 0;
          for (int k = 0; k < length + block; ++k) {
            double score = 0;
            for (int c = 0; c < dim; ++c) score += static_cast<double>(query[c]) * keys(k)[c];
            weights.push_back(std::exp(score / std::sqrt(static_cast<double>(dim))));
            total += weights.back();
          }
          for (int c = 0; c < dim; ++c) {
            double value = 0;
            for (int k = 0; k < length + block; ++k)
              value += weights[static_cast<size_t>(k)] / total * keys(k)[static_cast<size_t>(kv_heads) * dim + c];
            CHECK_NEAR(out[(static_cast<size_t>(r) * block + b) * row + static_cast<size_t>(h) * dim + c], value, 1e-5);
          }
        }
  }
}

TEST(refusals_name_the_size) {
  MlaAttentionArgs<float> a{};
  a.rows.requests = a.rows.width = 1;
  a.heads = 1;
  a.rank = 513;
  CHECK_STATUS(mla_attention(a, nullptr), KDTREE_SIZE);
  CHECK(std::string(kdtree_last_error()).find("rank is 513") != std::string::npos);
}
