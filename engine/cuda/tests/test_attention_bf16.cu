// The bf16 attention kernel against sums in double, and its promise: a row's bits depend on its own keys alone.

#include <algorithm>
#include <random>

#include "kernels/attention.h"
#include "tests/check.h"

using namespace kdtree;

namespace {

constexpr int kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
constexpr int kSmallDevice = 101376;  // bytes of shared memory a block may have on sm_86, sm_89 and sm_120
constexpr uint16_t kNan = 0x7fc1;

uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

using Row = std::vector<uint16_t>;  // of the cache, or the query of a head: latents, then rope channels

// One request's tree over a cache.
struct Problem {
  int heads, prefix;
  std::vector<int32_t> parents;  // [N]
  std::vector<Row> queries;      // [N * heads]
  std::vector<Row> cache;        // [prefix + N]
  float scale = 0.06f;

  int rows() const { return static_cast<int>(parents.size()); }
  std::vector<int32_t> path(int node) const {
    std::vector<int32_t> path;
    for (; node >= 0; node = parents[static_cast<size_t>(node)]) path.insert(path.begin(), node);
    return path;
  }
};

struct Result {
  std::vector<uint16_t> out;  // [N * heads, 512]
  std::vector<float> lse;     // [N * heads]
};

// How the pass is cut, which the number of blocks asked for decides: into blocks of 16 head rows with a chunk of keys
// each, of 64 with a chunk, or of 64 with a span of several chunks.
enum class Cut { kSixteen, kChunks, kSpans };

struct How {
  Cut cut = Cut::kSixteen;
  bool portable = true;
  bool small_device = false;
  int width = 0;         // rows of the block; 0: as many as the largest tree has
  int block_size = 0;    // of a paged cache
  int fewer_groups = 0;  // a workspace for so many groups of head rows; 0: what the query says
  bool chain = false;    // no paths: row i sees rows 0..i
  int longest = 300;     // at least; so far there are two chunks
  int query_shift = 0;   // elements in front of the first query
  int64_t shift = 0;     // bytes between the view's base and the memory there is; a multiple of a block
};

// Blocks to ask for, for so many groups of 64 head rows: one, more than there are spans, or more than there are chunks.
int blocks_of(Cut cut, int groups, int longest) {
  constexpr int kSpan = 2048;
  return cut == Cut::kSpans ? 1 : cut == Cut::kChunks ? 2 * groups * std::max(longest / kSpan, 1) : INT32_MAX;
}

// Several requests in one call.
std::vector<Result> run(const std::vector<const Problem*>& problems, const How& how) {
  const int requests = static_cast<int>(problems.size()), heads = problems[0]->heads;
  int width = how.width, capacity = 0, depth = 1;
  for (const Problem* p : problems) {
    width = std::max(width, p->rows());
    capacity = std::max(capacity, static_cast<int>(p->cache.size()));
    for (int i = 0; i < p->rows(); ++i) depth = std::max(depth, static_cast<int>(p->path(i).size()));
  }
  const size_t rows = static_cast<size_t>(requests * width);
  std::vector<int32_t> node_count, prefixes, positions(rows, 1 << 30), paths(rows * static_cast<size_t>(depth), -1);
  std::vector<uint16_t> queries(rows * static_cast<size_t>(heads) * kWidth, kNan);

  // Blocks are handed out backwards, so that nothing is right by chance.
  const int size = how.block_size, blocks = size > 0 ? (capacity + size - 1) / size : 0;
  const int64_t first_block = size > 0 ? how.shift / (static_cast<int64_t>(size) * 2 * kWidth) : 0;
  std::vector<int32_t> table;
  for (int b = 0; b < requests * blocks; ++b)
    table.push_back(static_cast<int32_t>(first_block) + requests * blocks - 1 - b);
  std::vector<uint16_t> cache(static_cast<size_t>(requests * (size > 0 ? blocks * size : capacity)) * kWidth, kNan);

  for (int r = 0; r < requests; ++r) {
    const Problem& p = *problems[static_cast<size_t>(r)];
    node_count.push_back(p.rows() - 1);
    prefixes.push_back(p.prefix);
    for (int i = 0; i < p.rows(); ++i) {
      const std::vector<int32_t> path = p.path(i);
      positions[static_cast<size_t>(r * width + i)] = p.prefix + static_cast<int32_t>(path.size()) - 1;
      std::copy(path.begin(), path.end(), paths.begin() + static_cast<ptrdiff_t>(r * width + i) * depth);
    }
    for (size_t i = 0; i < p.queries.size(); ++i)
      std::copy(p.queries[i].begin(), p.queries[i].end(),
                queries.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(r * width * heads) + i) * kWidth);
    for (int i = 0; i < static_cast<int>(p.cache.size()); ++i) {
      const int place =
          size > 0 ? (requests * blocks - 1 - (r * blocks + i / size)) * size + i % size : r * capacity + i;
      const Row& row = p.cache[static_cast<size_t>(i)];
      std::copy(row.begin(), row.end(), cache.begin() + static_cast<ptrdiff_t>(place) * kWidth);
    }
  }

  const check::Array<int32_t> d_count(node_count), d_prefix(prefixes), d_positions(positions), d_paths(paths),
      d_table(table);
  queries.insert(queries.begin(), static_cast<size_t>(how.query_shift), kNan);
  const check::Array<uint16_t> d_queries(queries), d_cache(cache);
  check::Array<uint16_t> out(rows * static_cast<size_t>(heads) * kLatent);
  check::Array<float> lse(rows * static_cast<size_t>(heads));
  MlaAttentionBf16Args a{};
  a.rows.requests = requests, a.rows.width = width;
  a.rows.node_count = d_count.get(), a.rows.prefix_lengths = d_prefix.get(), a.rows.positions = d_positions.get();
  a.rows.paths = how.chain ? nullptr : d_paths.get(), a.rows.path_stride = depth;
  a.q_latent = d_queries.get() + how.query_shift, a.q_rope = a.q_latent + kLatent;
  a.q_latent_head = a.q_rope_head = kWidth;
  a.q_latent_stride = a.q_rope_stride = static_cast<int64_t>(heads) * kWidth;
  a.cache.base = reinterpret_cast<void*>(reinterpret_cast<intptr_t>(d_cache.get()) - how.shift);
  a.cache.row_bytes = 2 * kWidth, a.cache.row_stride = 2 * kWidth;
  a.cache.request_stride = static_cast<int64_t>(capacity) * 2 * kWidth;
  a.cache.layers = 1, a.cache.capacity = capacity;
  a.cache.block_size = size, a.cache.table_stride = blocks, a.cache.block_table = d_table.get();
  if (size == 0 && how.shift > 0) a.layer = 1, a.cache.layers = 2, a.cache.layer_stride = how.shift;
  a.out = out.get(), a.lse = lse.get();
  a.heads = heads, a.scale = problems[0]->scale;
  a.longest = std::max(capacity, how.longest);
  a.blocks = blocks_of(how.cut, requests * ((width * heads + 63) / 64), a.longest);
  a.shared_memory = how.small_device ? kSmallDevice : 0;
  a.portable = how.portable;
  CHECK(mla_attention_bf16_path(a) == (how.portable ? AttentionPath::kPortable : AttentionPath::kWgmma));
  size_t bytes = mla_attention_bf16_workspace(requests, width, heads, a.longest, a.blocks);
  if (how.fewer_groups > 0) {
    const int rows_of_group = how.portable && how.cut == Cut::kSixteen ? 16 : 64;
    const size_t group = bytes / static_cast<size_t>(requests * ((width * heads + rows_of_group - 1) / rows_of_group));
    CHECK(group * static_cast<size_t>(how.fewer_groups) < bytes);
    bytes = group * static_cast<size_t>(how.fewer_groups);
  }
  const check::Array<unsigned char> workspace(bytes);
  a.workspace = workspace.get(), a.workspace_size = bytes;
  CHECK_OK(mla_attention_bf16(a, nullptr));
  const std::vector<uint16_t> all_out = out.read();
  const std::vector<float> all_lse = lse.read();
  (void)workspace.read();  // its guards

  std::vector<Result> results;
  for (int r = 0; r < requests; ++r) {
    const ptrdiff_t from = static_cast<ptrdiff_t>(r * width) * heads,
                    used = problems[static_cast<size_t>(r)]->rows() * heads;
    results.push_back({{all_out.begin() + from * kLatent, all_out.begin() + (from + used) * kLatent},
                       {all_lse.begin() + from, all_lse.begin() + from + used}});
    for (ptrdiff_t i = (from + used) * kLatent; i < static_cast<ptrdiff_t>((r + 1) * width) * heads * kLatent; ++i)
      CHECK_EQUAL(all_out[static_cast<size_t>(i)], 0);  // rows past the used ones
  }
  return results;
}

constexpr int kHows = 6;

// One of the paths.
struct Kernel {
  bool portable;

  How how() const {
    How how;
    how.portable = portable;
    return how;
  }
  // The i-th of all combinations of cut and device.
  How how(int i) const {
    How how = this->how();
    how.cut = static_cast<Cut>(i % 3);
    how.small_device = portable && i / 3 % 2 == 1;
    return how;
  }
  Result run(const Problem& problem) const { return ::run({&problem}, how())[0]; }
  Result run(const Problem& problem, const How& how) const { return ::run({&problem}, how)[0]; }
};

// Those of this device.
std::vector<Kernel> kernels() {
  MlaAttentionBf16Args a{};
  a.scale = 1;
  if (mla_attention_bf16_path(a) == AttentionPath::kPortable) return {{true}};
  return {{true}, {false}};
}

Row random_row(std::mt19937* generator, float size) {
  std::normal_distribution<float> normal;
  Row row;
  for (int c = 0; c < kWidth; ++c) row.push_back(narrow(size * normal(*generator)));
  return row;
}

Problem random_problem(int rows, int heads, int prefix, uint32_t seed) {
  std::mt19937 generator(seed);
  Problem p{heads, prefix, {-1}, {}, {}};
  for (int i = 1; i < rows; ++i) p.parents.push_back(static_cast<int32_t>(generator() % static_cast<uint32_t>(i)));
  for (int i = 0; i < rows * heads; ++i) p.queries.push_back(random_row(&generator, 0.7f));
  for (int i = 0; i < prefix + rows; ++i) p.cache.push_back(random_row(&generator, 1));
  return p;
}

void make_chain(Problem* p) {
  for (int i = 0; i < p->rows(); ++i) p->parents[static_cast<size_t>(i)] = i - 1;
}

// The same node as plain decoding meets it: its path committed, itself alone in the pass.
Problem alone(const Problem& p, int node) {
  const std::vector<int32_t> path = p.path(node);
  Problem one{p.heads, p.prefix + static_cast<int>(path.size()) - 1, {-1}, {}, {}};
  one.queries.assign(p.queries.begin() + node * p.heads, p.queries.begin() + (node + 1) * p.heads);
  one.cache.assign(p.cache.begin(), p.cache.begin() + p.prefix);
  for (const int32_t step : path) one.cache.push_back(p.cache[static_cast<size_t>(p.prefix + step)]);
  return one;
}

double value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// What the sums in double say, and how far bf16 may be off: every weight is rounded to 8 bits, which is at most 2^-9 of
// it, and so is the result; the 576 products of a score are summed in float32, which moves its weight by some 600 2^-24
// of their absolute sum.
void check_row(const Problem& p, const Result& result, int node, int head) {
  const Row& query = p.queries[static_cast<size_t>(node * p.heads + head)];
  std::vector<const Row*> keys;
  for (int i = 0; i < p.prefix; ++i) keys.push_back(&p.cache[static_cast<size_t>(i)]);
  for (const int32_t step : p.path(node)) keys.push_back(&p.cache[static_cast<size_t>(p.prefix + step)]);
  std::vector<double> scores;
  double largest = -INFINITY, moved = 0;
  for (const Row* key : keys) {
    double score = 0, absolute = 0;
    for (size_t c = 0; c < kWidth; ++c) {
      score += value(query[c]) * value((*key)[c]);
      absolute += std::fabs(value(query[c]) * value((*key)[c]));
    }
    scores.push_back(score * p.scale);
    largest = std::max(largest, scores.back());
    moved = std::max(moved, 600 * 0x1p-24 * absolute * p.scale);
  }
  double total = 0;
  for (double& score : scores) total += score = std::exp(score - largest);
  const size_t at = static_cast<size_t>(node * p.heads + head);
  CHECK_NEAR(result.lse[at], largest + std::log(total), moved + 0x1p-20 * (1 + std::fabs(largest)));
  for (size_t c = 0; c < kLatent; ++c) {
    double sum = 0, absolute = 0;
    for (size_t k = 0; k < keys.size(); ++k) {
      sum += scores[k] / total * value((*keys[k])[c]);
      absolute += scores[k] / total * std::fabs(value((*keys[k])[c]));
    }
    CHECK_NEAR(value(result.out[at * kLatent + c]), sum, (0x1p-9 + 2 * moved) * absolute + 0x1p-8 * std::fabs(sum));
  }
}

void check_all(const Problem& p, const Result& result) {
  for (int node = 0; node < p.rows(); ++node)
    for (int head = 0; head < p.heads; head += node % 2 == 0 ? 5 : 7) check_row(p, result, node, head);
}

void same_row(int heads, const Result& a, int from, const Result& b, int to) {
  for (int h = 0; h < heads; ++h) {
    const size_t x = static_cast<size_t>(from * heads + h), y = static_cast<size_t>(to * heads + h);
    for (size_t c = 0; c < kLatent; ++c) CHECK_EQUAL(a.out[x * kLatent + c], b.out[y * kLatent + c]);
    CHECK(std::memcmp(&a.lse[x], &b.lse[y], sizeof(float)) == 0);
  }
}

void same(const Problem& p, const Result& a, const Result& b) {
  for (int node = 0; node < p.rows(); ++node) same_row(p.heads, a, node, b, node);
}

}  // namespace

TEST(agrees_with_sums_in_double) {
  for (const Kernel& kernel : kernels()) {
    int i = 0;
    for (const int heads : {16, 32, 64, 128})
      for (const int prefix : check::tiny() ? std::vector<int>{33} : std::vector<int>{0, 45, 96}) {
        Problem p = random_problem(check::tiny() ? 3 : 6, heads, prefix, static_cast<uint32_t>(heads + prefix));
        check_all(p, kernel.run(p, kernel.how(i++)));
        make_chain(&p);
        How chain = kernel.how(i++);
        chain.chain = true;
        check_all(p, kernel.run(p, chain));
      }
  }
}

TEST(agrees_around_the_borders_of_tiles_chunks_and_spans) {
  for (const Kernel& kernel : kernels()) {
    int i = 0;
    for (const int prefix :
         check::tiny() ? std::vector<int>{31, 255} : std::vector<int>{30, 31, 32, 254, 255, 256, 2046, 2047}) {
      Problem p = random_problem(3, 16, prefix, static_cast<uint32_t>(prefix));
      p.parents = {-1, 0, 0};
      const Result result = kernel.run(p, kernel.how(i++));
      check_all(p, result);
      same_row(p.heads, kernel.run(alone(p, 2), kernel.how(i++)), 0, result, 2);
    }
  }
}

TEST(large_scores_move_the_peak) {
  for (const Kernel& kernel : kernels()) {
    Problem p = random_problem(3, 16, check::tiny() ? 40 : 300, 3);
    p.scale = 2;
    const Result result = kernel.run(p);
    check_all(p, result);
    for (int i = 1; i < kHows; ++i) same(p, result, kernel.run(p, kernel.how(i)));
  }
}

TEST(a_node_of_a_tree_has_the_bits_of_plain_decoding) {
  for (const Kernel& kernel : kernels()) {
    int i = 0;
    for (const int heads : {16, 32, 64, 128})
      for (const int prefix : check::tiny() ? std::vector<int>{30} : std::vector<int>{0, 61, 253}) {
        const Problem p = random_problem(check::tiny() ? 5 : 11, heads, prefix, static_cast<uint32_t>(prefix));
        const Result tree = kernel.run(p, kernel.how(i++));
        for (int node = 0; node < p.rows(); node += heads > 32 || prefix > 100 ? 4 : 1)
          same_row(heads, kernel.run(alone(p, node), kernel.how(i++)), 0, tree, node);
      }
  }
}

TEST(a_chain_longer_than_a_tile_may_come_in_pieces) {
  for (const Kernel& kernel : kernels()) {
    Problem p = random_problem(check::tiny() ? 5 : 70, 16, 3, 5);
    make_chain(&p);
    const Result whole = kernel.run(p, kernel.how(1));
    How chain = kernel.how();
    chain.chain = true;
    same(p, whole, kernel.run(p, chain));
    for (int node = 0; node < p.rows(); node += 23) same_row(p.heads, kernel.run(alone(p, node)), 0, whole, node);
  }
}

TEST(neighbours_slots_width_workspace_paging_and_the_device_change_no_bit) {
  for (const Kernel& kernel : kernels()) {
    for (const int heads : {16, 64}) {
      const int rows = heads == 16 ? 9 : 3, prefix = check::tiny() ? 20 : heads == 16 ? 270 : 45;
      const Problem p = random_problem(rows, heads, prefix, 1), other = random_problem(rows - 2, heads, 7, 2);
      const Result base = kernel.run(p);
      const auto changed = [&](auto&& change) {
        for (const Cut cut : {Cut::kSixteen, Cut::kChunks}) {
          How how = kernel.how();
          how.cut = cut;
          change(how);
          same(p, base, kernel.run(p, how));
        }
      };
      for (int i = 1; i < kHows; ++i) same(p, base, kernel.run(p, kernel.how(i)));
      changed([&](How& how) { how.width = rows + 5; });
      changed([](How& how) { how.fewer_groups = 2; });
      changed([](How& how) { how.query_shift = 2; });  // aligned to 4 bytes, no more
      for (const int block_size : {1, 16, 48}) changed([=](How& how) { how.block_size = block_size; });
      for (const int i : {0, 1, 5}) {
        const Problem nobody{heads, 5, {}, {}, {}};  // a request without rows
        const std::vector<Result> all = run({&other, &nobody, &p}, kernel.how(i));
        same(p, base, all[2]);
        same(other, kernel.run(other), all[0]);
      }

      // The last row, moved to other slots of another tree.
      const Problem one = alone(p, rows - 1);
      Problem beside = random_problem(4, heads, one.prefix, 3);
      std::copy(one.cache.begin(), one.cache.end() - 1, beside.cache.begin());
      for (const int slot : {0, 2}) {
        beside.parents = {-1, -1, -1, 0};  // several roots, so that any of them is alone behind the prefix
        beside.cache[static_cast<size_t>(one.prefix + slot)] = one.cache.back();
        std::copy(one.queries.begin(), one.queries.end(), beside.queries.begin() + slot * heads);
        for (const int i : {0, 1}) same_row(heads, kernel.run(beside, kernel.how(i)), slot, base, rows - 1);
      }
    }
  }
}

TEST(spans_are_joined_as_chunks_are) {
  for (const Kernel& kernel : kernels()) {
    const Problem p = random_problem(1, 16, check::tiny() ? 600 : 4700, 4);
    const Result result = kernel.run(p);
    check_all(p, result);
    for (const int i : {1, 2, 5}) same(p, result, kernel.run(p, kernel.how(i)));
  }
}

TEST(long_prefixes_are_joined_alike_however_they_are_cut) {
#ifdef KDTREE_HOST
  const std::vector<int> prefixes = {530};
#else
  const std::vector<int> prefixes = {530, 3000, 9100, 34000};
#endif
  for (const Kernel& kernel : kernels())
    for (const int prefix : check::tiny() ? std::vector<int>{150} : prefixes)
      for (const int heads : prefix > 1000 ? std::vector<int>{16, 64} : std::vector<int>{32}) {
        const Problem p = random_problem(3, heads, prefix, static_cast<uint32_t>(prefix));
        const Result result = kernel.run(p, kernel.how(2));
        for (int node = 0; node < p.rows(); ++node) check_row(p, result, node, 5 * node + 1);
        for (const int i : {0, 1}) same(p, result, kernel.run(p, kernel.how(i)));
        for (const int i : {0, 2}) same_row(heads, kernel.run(alone(p, 2), kernel.how(i)), 0, result, 2);
        for (const int longest : {5000, 70000}) {  // as where the cache has room for more
          How how = kernel.how(2);
          how.longest = longest;
          same(p, result, kernel.run(p, how));
        }
      }
}

// So many rows and keys that the nodes of more than one block's keys are joined by warps with several pieces each.
TEST(many_rows_over_many_keys_have_the_bits_of_each_alone) {
#ifdef KDTREE_HOST
  const int prefix = 150;
#else
  const int prefix = check::tiny() ? 150 : 5000;
#endif
  for (const Kernel& kernel : kernels()) {
    const Problem p = random_problem(9, 64, prefix, 31);
    const Result result = kernel.run(p, kernel.how(2));
    for (const int row : {0, 4, 8}) same_row(64, kernel.run(alone(p, row), kernel.how(2)), 0, result, row);
  }
}

TEST(a_row_that_is_not_seen_has_no_influence_and_one_that_is_seen_spreads) {
  for (const Kernel& kernel : kernels()) {
    for (const int heads : {16, 32, 64}) {
      const Problem p = random_problem(5, heads, 30, 9);
      const Result clean = kernel.run(p);
      for (int bad = 0; bad < p.rows(); bad += heads == 16 ? 1 : 3) {
        Problem poisoned = p;
        std::fill_n(poisoned.cache[static_cast<size_t>(p.prefix + bad)].begin(), kWidth, kNan);
        for (const int i : {0, 1, 3 + bad % 3}) {
          const Result result = kernel.run(poisoned, kernel.how(i));
          for (int row = 0; row < p.rows(); ++row) {
            const std::vector<int32_t> path = p.path(row);
            if (std::find(path.begin(), path.end(), bad) == path.end()) {
              same_row(heads, clean, row, result, row);
            } else {
              for (size_t c = 0; c < static_cast<size_t>(heads) * kLatent; ++c)
                CHECK(std::isnan(value(result.out[static_cast<size_t>(row * heads) * kLatent + c])));
            }
          }
        }
      }
    }
  }
}

TEST(rows_lie_beyond_two_and_four_gigabytes) {
  for (const Kernel& kernel : kernels()) {
    const Problem p = random_problem(2, 16, 35, 6);
    const Result base = kernel.run(p);
    for (const int64_t gigabytes : {2, 4, 9}) {
      How far = kernel.how();
      far.shift = (gigabytes << 30) / (16 * 2 * kWidth) * (16 * 2 * kWidth) + 16 * 2 * kWidth;
      same(p, base, kernel.run(p, far));
      far.block_size = 16;
      same(p, base, kernel.run(p, far));
    }
  }
}

TEST(refusals_name_the_size) {
  MlaAttentionBf16Args a{};
  a.rows.requests = a.rows.width = 1;
  a.longest = 1;
  a.heads = 24;
  CHECK_STATUS(mla_attention_bf16(a, nullptr), KDTREE_SIZE);
  CHECK(std::string(kdtree_last_error()).find("heads is 24") != std::string::npos);
  a.heads = 16;
  a.cache.row_bytes = 2304;
  CHECK_STATUS(mla_attention_bf16(a, nullptr), KDTREE_SIZE);
  CHECK(std::string(kdtree_last_error()).find("row_bytes is 2304") != std::string::npos);
}

// Whatever the device: wgmma wants a positive scale and all of its shared memory.
TEST(what_wgmma_does_not_take_goes_to_the_portable_kernel) {
  MlaAttentionBf16Args a{};
  a.scale = -1;
  CHECK(mla_attention_bf16_path(a) == AttentionPath::kPortable);
  a.scale = 1;
  a.shared_memory = 226 * 1024;
  CHECK(mla_attention_bf16_path(a) == AttentionPath::kPortable);
}
