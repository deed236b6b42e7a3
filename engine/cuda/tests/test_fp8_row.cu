// Rows of an fp8 cache: codes and scales of all bf16 numbers, and the rows that a pass leaves.

#include "kernels/fp8_row.h"
#include "kernels/layers.h"
#include "tests/check.h"
#include "tests/fp8_rows.h"

using namespace kdtree;

namespace {

constexpr int kWidth = check::kFp8Latent + check::kFp8Rope;

__global__ void encode_kernel(const float* values, uint32_t* codes, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) codes[i] = e4m3_code(values[i]);
}

__global__ void decode_kernel(float* values) {
  const float2 pair = e4m3_pair(threadIdx.x | (255 - threadIdx.x) << 8);
  values[threadIdx.x] = pair.x;
  values[256 + 255 - threadIdx.x] = pair.y;
}

__global__ void scale_kernel(const uint32_t* largest, float* scales, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) scales[i] = fp8_scale(largest[i]);
}

// What a pass leaves of rows whose channels have these weights.
struct Written {
  std::vector<uint16_t> kv, queries;
  std::vector<uint8_t> cache;
};

constexpr int kRequests = 2, kRows = 3, kCapacity = 6, kStride = kWidth + 3, kHeads = 2;

Written write(const std::vector<uint16_t>& weight, const std::vector<uint16_t>& kv, CacheRows kind, bool paged,
              int gap) {
  const int row_bytes = kind == CacheRows::kFp8 ? check::kFp8Bytes : 2 * kWidth, row_stride = row_bytes + gap;
  const check::Array<int32_t> node_count({2, 1}), prefixes({0, 3}), positions({0, 1, 1, 3, 4, 4}),
      table({3, 0, 1, 2, 5, 4});
  const check::Array<uint16_t> d_kv(kv), d_weight(weight),
      queries(check::narrow_noise(4, static_cast<size_t>(kRequests * kRows * kHeads) * check::kFp8Rope));
  const check::Array<float> cos(check::noise(5, kCapacity * check::kFp8Rope / 2)),
      sin(check::noise(6, kCapacity * check::kFp8Rope / 2));
  const check::Array<uint8_t> cache(
      std::vector<uint8_t>(static_cast<size_t>(2 * kRequests * kCapacity) * static_cast<size_t>(row_stride), 0xee));
  LatentArgs<uint16_t> a{};
  a.rows.requests = kRequests, a.rows.width = kRows;
  a.rows.node_count = node_count.get(), a.rows.prefix_lengths = prefixes.get(), a.rows.positions = positions.get();
  a.kv = d_kv.get(), a.kv_stride = kStride, a.weight = d_weight.get();
  a.cos = cos.get(), a.sin = sin.get();
  a.cache.base = cache.get(), a.cache.row_bytes = row_bytes, a.cache.row_stride = row_stride;
  a.cache.request_stride = kCapacity * row_stride, a.cache.layer_stride = kRequests * kCapacity * row_stride;
  a.cache.layers = 2, a.cache.capacity = kCapacity;
  a.cache.block_size = paged ? 2 : 0, a.cache.table_stride = 3, a.cache.block_table = table.get();
  a.cache_rows = kind;
  a.layer = 1;
  a.rank = check::kFp8Latent, a.rope = check::kFp8Rope, a.eps = 1e-6f;
  a.queries = queries.get(), a.head_stride = check::kFp8Rope, a.query_stride = kHeads * check::kFp8Rope;
  a.heads = kHeads;
  CHECK_OK(latents(a, nullptr));
  return {d_kv.read(), queries.read(), cache.read()};
}

void check_rows(const std::vector<uint16_t>& weight, uint64_t seed) {
  const std::vector<uint16_t> kv = check::narrow_noise(seed, static_cast<size_t>(kRequests * kRows * kStride));
  for (const bool paged : {false, true})
    for (const int gap : {0, 16}) {
      const Written plain = write(weight, kv, CacheRows::kPlain, paged, gap);
      const Written fp8 = write(weight, kv, CacheRows::kFp8, paged, gap);
      CHECK_EQUAL_ALL(fp8.kv, plain.kv, "rows of the pass");
      CHECK_EQUAL_ALL(fp8.queries, plain.queries, "queries");
      std::vector<uint8_t> right(fp8.cache.size(), 0xee);
      const std::vector<uint8_t> untouched(2 * kWidth, 0xee);
      int kept = 0;
      for (int i = 0; i < 2 * kRequests * kCapacity; ++i) {
        const uint8_t* const from = plain.cache.data() + static_cast<ptrdiff_t>(i) * (2 * kWidth + gap);
        if (std::equal(untouched.begin(), untouched.end(), from)) continue;
        std::vector<uint16_t> row(kWidth);
        std::memcpy(row.data(), from, 2 * kWidth);
        const std::vector<uint8_t> bytes = check::fp8_row(row.data());
        std::copy(bytes.begin(), bytes.end(), right.begin() + static_cast<ptrdiff_t>(i) * (check::kFp8Bytes + gap));
        ++kept;
      }
      CHECK_EQUAL(kept, 5);  // 1 + node_count rows of each request
      CHECK_EQUAL_ALL(fp8.cache, right, paged ? "paged" : "contiguous");
    }
}

}  // namespace

TEST(codes_are_the_nearest_of_every_bf16_number) {
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 1u << 16; ++bits) {
    const float value = check::from_bits(bits << 16);
    if (!(std::fabs(value) > 448)) values.push_back(value);  // as scales have them, NaN
  }
  for (int code = 0; code < 0x7e; ++code) {  // ties, and what is just beside them
    const float tie = (check::e4m3_of(static_cast<uint8_t>(code)) + check::e4m3_of(static_cast<uint8_t>(code + 1))) / 2;
    for (const float value : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, 1000.0f)})
      values.insert(values.end(), {value, -value});
  }
  const check::Array<float> d_values(values);
  const check::Array<uint32_t> codes(values.size());
  const int count = static_cast<int>(values.size());
  KDTREE_LAUNCH(encode_kernel, dim3(static_cast<unsigned>(ceil_div(count, 256))), dim3(256), 0, nullptr, d_values.get(),
                codes.get(), count);
  CHECK_OK(check_launch("encode_kernel"));
  const std::vector<uint32_t> found = codes.read();
  for (size_t i = 0; i < values.size(); ++i) CHECK_EQUAL(found[i], check::e4m3_nearest(values[i]));
}

TEST(every_code_has_its_value) {
  const check::Array<float> values(512);
  KDTREE_LAUNCH(decode_kernel, dim3(1), dim3(256), 0, nullptr, values.get());
  CHECK_OK(check_launch("decode_kernel"));
  const std::vector<float> found = values.read();
  for (size_t i = 0; i < 512; ++i) {
    const float right = check::e4m3_of(static_cast<uint8_t>(i % 256));
    if (std::isnan(right))
      CHECK(std::isnan(found[i]));
    else
      CHECK_EQUAL(check::bits({found[i]})[0], check::bits({right})[0]);
  }
}

TEST(scales_are_the_least_powers_of_two_that_are_enough) {
  std::vector<uint32_t> largest;
  for (uint32_t exponent = 0; exponent < 256; ++exponent)
    for (const uint32_t fraction : {0u, 1u, 0x600000u, 0x600001u, 0x7fffffu})
      largest.push_back(exponent << 23 | fraction);
  const check::Array<uint32_t> d_largest(largest);
  const check::Array<float> scales(largest.size());
  const int count = static_cast<int>(largest.size());
  KDTREE_LAUNCH(scale_kernel, dim3(static_cast<unsigned>(ceil_div(count, 256))), dim3(256), 0, nullptr, d_largest.get(),
                scales.get(), count);
  CHECK_OK(check_launch("scale_kernel"));
  const std::vector<float> found = scales.read();
  for (size_t i = 0; i < largest.size(); ++i) {
    const double size = check::from_bits(largest[i]), scale = found[i];
    if (!std::isfinite(size)) {
      CHECK(std::isnan(scale));
      continue;
    }
    int exponent;
    CHECK_EQUAL(std::frexp(scale, &exponent), 0.5);
    CHECK(scale >= 0x1p-117 && size <= 448 * scale);
    CHECK(scale == 0x1p-117 || size > 448 * scale / 2);
  }
}

TEST(rows_of_a_pass_are_those_of_bf16_kept_in_codes) {
  std::vector<uint16_t> weight = check::narrow_noise(2, check::kFp8Latent);
  check_rows(weight, 1);
  for (size_t c = 0; c < weight.size(); ++c)  // groups of many sizes, one of zeros
    weight[c] = check::narrow_of(check::wide_of(weight[c]) *
                                 std::ldexp(c / 128 == 2 ? 0.0f : 1.0f, static_cast<int>(c / 128) * 17 - 20));
  check_rows(weight, 7);
  for (size_t c = 0; c < 128; ++c) weight[c] = check::narrow_of(std::ldexp(1.0f, -122 - static_cast<int>(c % 9)));
  check_rows(weight, 8);
}

TEST(a_nan_or_an_infinity_makes_its_group_one) {
  for (const uint16_t bad : {uint16_t{0x7f80}, uint16_t{0xff80}, uint16_t{0x7fc0}, uint16_t{0xffc0}}) {
    std::vector<uint16_t> weight = check::narrow_noise(2, check::kFp8Latent);
    weight[200] = bad;
    check_rows(weight, 9);
  }
}

TEST(refusals_name_the_size) {
  LatentArgs<uint16_t> a{};
  a.rows.requests = a.rows.width = 1;
  a.cache_rows = CacheRows::kFp8;
  a.rank = 256, a.rope = 64;
  CHECK_STATUS(latents(a, nullptr), KDTREE_SIZE);
  CHECK(std::string(kdtree_last_error()).find("rank is 256, it must be in [512, 512]") != std::string::npos);
  LatentArgs<float> wide{};
  wide.cache_rows = CacheRows::kFp8;
  CHECK_STATUS(latents(wide, nullptr), KDTREE_SIZE);
  CHECK(std::string(kdtree_last_error()).find("an fp8 cache holds rows of bf16") != std::string::npos);
}
