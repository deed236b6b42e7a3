// Cache rows of 656 bytes on the host, for tests: by nearest values and double sums, not as the kernels make them.
#pragma once

#include <algorithm>
#include <cmath>

#include "tests/bf16.h"

namespace check {

constexpr int kFp8Latent = 512, kFp8Rope = 64, kFp8Bytes = 656;

// What a code stands for.
inline float e4m3_of(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return NAN;
  const float size =
      exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9) : std::ldexp(8.0f + mantissa, exponent - 10);
  return code < 128 ? size : -size;
}

// The nearest code by search, of two the even one.
inline uint8_t e4m3_nearest(float value) {
  if (std::isnan(value)) return 0x7f;
  int best = 0;
  for (int code = 1; code < 0x7f; ++code) {
    const double now = std::fabs(e4m3_of(static_cast<uint8_t>(code)) - std::fabs(static_cast<double>(value)));
    const double old = std::fabs(e4m3_of(static_cast<uint8_t>(best)) - std::fabs(static_cast<double>(value)));
    if (now < old || (now == old && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

// The row of 512 + 64 bf16 numbers.
inline std::vector<uint8_t> fp8_row(const uint16_t* row) {
  std::vector<uint8_t> bytes(kFp8Bytes);
  for (int group = 0; group < kFp8Latent / 128; ++group) {
    double largest = 0;
    bool finite = true;
    for (int c = group * 128; c < (group + 1) * 128; ++c) {
      finite = finite && std::isfinite(wide_of(row[c]));
      largest = std::max(largest, std::fabs(static_cast<double>(wide_of(row[c]))));
    }
    float scale = 0x1p-117f;
    while (finite && largest / scale > 448) scale *= 2;
    if (!finite) scale = from_bits(0x7fc00000u);
    std::memcpy(bytes.data() + kFp8Latent + 4 * group, &scale, sizeof scale);
    for (int c = group * 128; c < (group + 1) * 128; ++c)
      bytes[static_cast<size_t>(c)] = e4m3_nearest(wide_of(row[c]) / scale);
  }
  std::memcpy(bytes.data() + kFp8Latent + 16, row + kFp8Latent, 2 * kFp8Rope);
  return bytes;
}

// The 512 + 64 bf16 numbers that a row stands for.
inline std::vector<uint16_t> fp8_row_values(const uint8_t* bytes) {
  std::vector<uint16_t> row(kFp8Latent + kFp8Rope);
  for (int c = 0; c < kFp8Latent; ++c) {
    float scale;
    std::memcpy(&scale, bytes + kFp8Latent + c / 128 * 4, sizeof scale);
    const float value = e4m3_of(bytes[c]) * scale;
    row[static_cast<size_t>(c)] = std::isnan(value) ? 0x7fc0 : narrow_of(value);
  }
  std::memcpy(row.data() + kFp8Latent, bytes + kFp8Latent + 16, 2 * kFp8Rope);
  return row;
}

}  // namespace check
