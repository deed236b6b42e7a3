// Four neighbours at a time: one 16-byte access where addresses allow it, single ones elsewhere. What is computed is
// the same either way.
#pragma once

#include <initializer_list>

#include "common/port.h"

namespace kdtree {

// Whether arrays begin at, and rows lie apart by, multiples of 16 bytes. strides: in floats.
inline bool fours(std::initializer_list<const void*> arrays, std::initializer_list<int64_t> strides) {
  for (const void* array : arrays)
    if (reinterpret_cast<uintptr_t>(array) % sizeof(float4) != 0) return false;
  for (const int64_t stride : strides)
    if (stride % 4 != 0) return false;
  return true;
}

// p[0..count-1], count <= 4; zeros behind. vector: count is 4 and p is aligned to 16 bytes.
__device__ inline float4 load4(const float* p, int count, bool vector) {
  if (vector) return *reinterpret_cast<const float4*>(p);
  float4 v = make_float4(0, 0, 0, 0);
  if (count > 0) v.x = p[0];
  if (count > 1) v.y = p[1];
  if (count > 2) v.z = p[2];
  if (count > 3) v.w = p[3];
  return v;
}

__device__ inline void store4(float* p, float4 v, int count, bool vector) {
  if (vector) {
    *reinterpret_cast<float4*>(p) = v;
    return;
  }
  if (count > 0) p[0] = v.x;
  if (count > 1) p[1] = v.y;
  if (count > 2) p[2] = v.z;
  if (count > 3) p[3] = v.w;
}

}  // namespace kdtree
