// Numbers for tests: the same on every machine.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace check {

// Floats in [-1, 1), by splitmix64.
inline std::vector<float> noise(uint64_t seed, size_t n) {
  std::vector<float> values(n);
  for (float& value : values) {
    uint64_t z = seed += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    value = static_cast<float>(static_cast<int64_t>(z ^ (z >> 31)) >> 40) * 0x1p-23f;
  }
  return values;
}

// What a float is made of: equal bits also where numbers would be NaN or zeros of two signs.
inline std::vector<uint32_t> bits(const std::vector<float>& values) {
  std::vector<uint32_t> result(values.size());
  if (!values.empty()) std::memcpy(result.data(), values.data(), values.size() * sizeof(float));
  return result;
}

}  // namespace check
