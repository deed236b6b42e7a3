// What benches multiply.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "tests/check.h"
#include "tests/random.h"

namespace bench {

// n numbers of noise, repeated: float, or bf16 as its bits.
template <typename T>
check::Array<T> noise_on_device(size_t n) {
  check::Array<T> array(n);
  const std::vector<float> noise = check::noise(n, std::min<size_t>(n, 1 << 20));
  std::vector<T> piece;
  if constexpr (std::is_same_v<T, float>)
    piece = noise;
  else
    for (const uint32_t bits : check::bits(noise)) piece.push_back(static_cast<T>(bits >> 16));
  for (size_t at = 0; at < n; at += piece.size())
    CHECK_CUDA(
        cudaMemcpy(array.get() + at, piece.data(), std::min(piece.size(), n - at) * sizeof(T), cudaMemcpyHostToDevice));
  return array;
}

}  // namespace bench
