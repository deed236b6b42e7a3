// bf16 numbers, kept as their bits.
#pragma once

#include "common/port.h"

namespace kdtree {

// The bf16 bits nearest to `value`, ties to even; a NaN stays one.
__device__ inline uint16_t narrow(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// `value` as an array of T keeps it: float32 as it is, or bf16 bits.
template <typename T>
__device__ inline T stored(float value) {
  static_assert(sizeof(T) == sizeof(float) || sizeof(T) == sizeof(uint16_t), "float or bf16 bits");
  if constexpr (sizeof(T) == sizeof(float))
    return value;
  else
    return narrow(value);
}

// The number that is then read.
template <typename T>
__device__ inline float rounded(float value) {
  return widen(stored<T>(value));
}

}  // namespace kdtree
