// Cache rows: what norm and rotation give by themselves, in their places and nowhere else; and norms of sums.
#include <algorithm>

#include "kernels/layers.h"
#include "tests/bf16.h"
#include "tests/check.h"
#include "tests/random.h"

using namespace kdtree;

namespace {

template <typename T>
std::vector<T> noise_of(uint64_t seed, size_t n) {
  if constexpr (std::is_same_v<T, float>)
    return check::noise(seed, n);
  else
    return check::narrow_noise(seed, n);
}

// Bits, so that the filler of unwritten elements compares as well.
template <typename T>
std::vector<uint32_t> bits_of(const std::vector<T>& values) {
  if constexpr (std::is_same_v<T, float>)
    return check::bits(values);
  else
    return {values.begin(), values.end()};
}

// As the reference turns a head, rounded once.
template <typename T>
void turn(T* head, int width, const float* cos, const float* sin, RopeLayout layout) {
  const bool half = layout == RopeLayout::kHalf;
  const auto value = [](T stored) {
    if constexpr (std::is_same_v<T, float>)
      return stored;
    else
      return check::wide_of(stored);
  };
  const auto kept = [](float value) {
    if constexpr (std::is_same_v<T, float>)
      return value;
    else
      return check::narrow_of(value);
  };
  for (int i = 0; i < width / 2; ++i) {
    T& first = head[half ? i : 2 * i];
    T& second = head[half ? i + width / 2 : 2 * i + 1];
    const float x = value(first), y = value(second);
    first = kept(x * cos[i] - y * sin[i]);
    second = kept(y * cos[i] + x * sin[i]);
  }
}

constexpr int kRows = 3;  // of a block; two blocks

// Two requests with prefixes 0 and 3; the second has no room for its third row, and in a paged cache its second
// block is missing. shift: elements in front of the arrays.
template <typename T>
void write_rows(int rank, int rope_width, RopeLayout layout, bool paged, int shift) {
  const int row = rank + rope_width, stride = row + 5, layers = 2, capacity = 5, layer = 1, row_stride = row + 4;
  const int places = paged ? 10 : 2 * capacity;
  const check::Array<int32_t> node_count({1, 2}), prefixes({0, 3}), positions({0, 1, -9, 3, 4, 4}),
      table({3, 0, 1, 2, -1, 4});
  Rows rows{};
  rows.requests = 2;
  rows.width = kRows;
  rows.node_count = node_count.get();
  rows.prefix_lengths = prefixes.get();
  rows.positions = positions.get();
  const std::vector<T> given = noise_of<T>(1, 2 * kRows * stride + shift);
  const check::Array<T> kv(given), alone(given), weight(noise_of<T>(2, rank + shift)),
      memory(layers * places * row_stride + shift);
  const check::Array<float> cos(check::noise(3, 5 * rope_width / 2 + 1)), sin(check::noise(4, 5 * rope_width / 2 + 1));
  kdtree_cache_view cache{};
  cache.base = memory.get() + shift;
  cache.row_bytes = row * static_cast<int>(sizeof(T));
  cache.row_stride = row_stride * static_cast<int>(sizeof(T));
  cache.request_stride = capacity * cache.row_stride;
  cache.layer_stride = places * cache.row_stride;
  cache.layers = layers;
  cache.capacity = capacity;
  cache.block_size = paged ? 2 : 0;
  cache.table_stride = 3;
  cache.block_table = paged ? table.get() : nullptr;

  std::vector<T> right_memory = memory.read(), right = given;
  T* const x = alone.get() + shift;
  CHECK_OK(rms_norm(RmsNormArgs<T>{x, stride, weight.get() + shift, x, stride, 2 * kRows, rank, 1e-6f}, nullptr));
  const std::vector<int32_t> places_of = positions.read();
  const std::vector<float> all_cos = cos.read(), all_sin = sin.read();
  const auto turn_row = [&](T* head, int number) {
    if (number == 2) return;  // the one that is not used
    const size_t entry = static_cast<size_t>(places_of[number]) * rope_width / 2;
    turn(head, rope_width, all_cos.data() + entry, all_sin.data() + entry, layout);
  };
  std::vector<T> computed = alone.read();
  for (int number = 0; number < 2 * kRows; ++number) turn_row(computed.data() + shift + number * stride + rank, number);
  const auto expect = [&](int number, int place) {
    const auto from = computed.begin() + shift + number * stride;
    std::copy_n(from, row, right.begin() + shift + number * stride);
    if (place >= 0) std::copy_n(from, row, right_memory.begin() + shift + (layer * places + place) * row_stride);
  };
  expect(0, paged ? 6 : 0);
  expect(1, paged ? 7 : 1);
  expect(3, paged ? -1 : capacity + 3);
  expect(4, paged ? 8 : capacity + 4);
  expect(5, -1);
  LatentArgs<T> a{rows,      kv.get() + shift, stride, weight.get() + shift,
                  cos.get(), sin.get(),        cache,  layer,
                  rank,      rope_width,       1e-6f,  layout};
  // Heads that lie apart in rows that hold more; with them more pairs than a block has threads.
  constexpr int kHeads = 9;
  const int between = rope_width + 3, query_stride = kHeads * between + 1;
  const check::Array<T> queries(noise_of<T>(11, static_cast<size_t>(2 * kRows) * query_stride));
  std::vector<T> turned = queries.read();
  if (rope_width > 0) {
    a.queries = queries.get();
    a.query_stride = query_stride;
    a.head_stride = between;
    a.heads = kHeads;
    for (int number = 0; number < 2 * kRows; ++number)
      for (int head = 0; head < kHeads; ++head)
        turn_row(turned.data() + number * query_stride + head * between, number);
  }
  CHECK_OK(latents(a, nullptr));
  CHECK_EQUAL_ALL(bits_of(queries.read()), bits_of(turned), "queries");
  CHECK_EQUAL_ALL(bits_of(kv.read()), bits_of(right), "rows of the pass");
  CHECK_EQUAL_ALL(bits_of(memory.read()), bits_of(right_memory), paged ? "paged" : "contiguous");
}

// The stream takes two terms, or one, and its norm is that of the sum.
template <typename T>
void norm_sums(int width, int shift) {
  const int rows = 3, stride = width + 4;
  const size_t size = static_cast<size_t>(rows) * stride + shift;
  const check::Array<T> x(noise_of<T>(5, size)), added(noise_of<T>(6, size)), also(noise_of<T>(7, size)),
      weight(noise_of<T>(8, width));
  for (const bool both : {false, true}) {
    const check::Array<T> y(size), right(size), sum(x.read()), terms(added.read());
    if (both) CHECK_OK(add(also.get(), added.get(), terms.get(), static_cast<int64_t>(size), nullptr));
    const check::Array<T> stream(size);
    CHECK_OK(add(x.get(), terms.get(), stream.get(), static_cast<int64_t>(size), nullptr));
    CHECK_OK(rms_norm(
        RmsNormArgs<T>{stream.get() + shift, stride, weight.get(), right.get() + shift, stride, rows, width, 1e-5f},
        nullptr));
    CHECK_OK(
        rms_norm(RmsNormArgs<T>{sum.get() + shift, stride, weight.get(), y.get() + shift, stride, rows, width, 1e-5f,
                                nullptr, added.get() + shift, both ? also.get() + shift : nullptr, sum.get() + shift},
                 nullptr));
    CHECK_EQUAL_ALL(bits_of(y.read()), bits_of(right.read()), "y");
    const std::vector<T> kept = sum.read(), whole = stream.read();
    for (int row = 0; row < rows; ++row)
      for (int i = 0; i < width; ++i) {
        const size_t at = static_cast<size_t>(shift + row * stride + i);
        CHECK_EQUAL(bits_of<T>({kept[at]})[0], bits_of<T>({whole[at]})[0]);
      }
  }
}

}  // namespace

TEST(cache_rows_go_behind_the_prefix) {
  for (const auto& [rank, rope_width] : {std::pair{512, 64}, std::pair{7, 2}, std::pair{24, 6}, std::pair{4, 0}})
    for (const RopeLayout layout : {RopeLayout::kInterleaved, RopeLayout::kHalf})
      for (const bool paged : {false, true})
        for (const int shift : {0, 1}) {
          write_rows<float>(rank, rope_width, layout, paged, shift);
          write_rows<uint16_t>(rank, rope_width, layout, paged, shift);
        }
}

TEST(norms_of_sums) {
  for (const int width : {1, 4, 63, 516, 7168})
    for (const int shift : {0, 1}) {
      norm_sums<float>(width, shift);
      norm_sums<uint16_t>(width, shift);
    }
}

TEST(refusals) {
  const check::Array<float> memory(64);
  const check::Array<int32_t> zeros({0, 0});
  float* const p = memory.get();
  LatentArgs<float> good{};
  good.rows.requests = good.rows.width = 1;
  good.rows.node_count = good.rows.prefix_lengths = good.rows.positions = zeros.get();
  good.kv = p;
  good.kv_stride = 4;
  good.weight = good.cos = good.sin = p;
  good.cache.base = p;
  good.cache.row_bytes = good.cache.row_stride = 16;
  good.cache.layers = good.cache.capacity = 1;
  good.rank = good.rope = 2;
  CHECK_OK(latents(good, nullptr));
  LatentArgs<float> a = good;
  a.layer = 1;
  CHECK_STATUS(latents(a, nullptr), KDTREE_SIZE);
  a = good;
  a.cache.row_bytes = 8;
  CHECK_STATUS(latents(a, nullptr), KDTREE_SIZE);
  CHECK_EQUAL(std::string(kdtree_last_error()), std::string("latents: cache.row_bytes is 8, it must be in [16, 16]"));
  a = good;
  a.rope = 1;
  CHECK_STATUS(latents(a, nullptr), KDTREE_SIZE);
  a = good;
  a.weight = nullptr;
  CHECK_STATUS(latents(a, nullptr), KDTREE_POINTER);
  CHECK_STATUS(rms_norm(RmsNormArgs<float>{p, 4, p, p, 4, 1, 4, 0, nullptr, p}, nullptr), KDTREE_POINTER);
  CHECK_STATUS(rms_norm(RmsNormArgs<float>{p, 4, p, p, 4, 1, 4, 0, nullptr, nullptr, p, p}, nullptr), KDTREE_POINTER);
}
