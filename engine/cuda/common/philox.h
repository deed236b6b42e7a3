// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011): random numbers that are functions of a key and a counter.
#pragma once

#include "common/port.h"

namespace kdtree {

struct PhiloxWords {
  uint32_t x[4];
};

__host__ __device__ inline PhiloxWords philox(uint64_t key, uint32_t c0, uint32_t c1 = 0, uint32_t c2 = 0,
                                              uint32_t c3 = 0) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  PhiloxWords w{{c0, c1, c2, c3}};
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xd2511f53u} * w.x[0], second = uint64_t{0xcd9e8d57u} * w.x[2];
    w = PhiloxWords{{static_cast<uint32_t>(second >> 32) ^ w.x[1] ^ k0, static_cast<uint32_t>(second),
                     static_cast<uint32_t>(first >> 32) ^ w.x[3] ^ k1, static_cast<uint32_t>(first)}};
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return w;
}

}  // namespace kdtree
