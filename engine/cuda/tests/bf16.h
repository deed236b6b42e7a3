// bf16 numbers on the host, for tests.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/random.h"

namespace check {

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline float wide_of(uint16_t bits) { return from_bits(static_cast<uint32_t>(bits) << 16); }

// The nearest bf16 of a number that is not NaN, ties to even.
inline uint16_t narrow_of(float value) {
  const uint32_t bits = check::bits({value})[0];
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline std::vector<uint16_t> narrow_of(const std::vector<float>& values) {
  std::vector<uint16_t> result;
  for (const float value : values) result.push_back(narrow_of(value));
  return result;
}

inline std::vector<uint16_t> narrow_noise(uint64_t seed, size_t n) { return narrow_of(noise(seed, n)); }

}  // namespace check
