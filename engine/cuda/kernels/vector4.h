// Four neighbours at a time, float32 or bf16: one access of 16 or 8 bytes where addresses allow it, single ones
// elsewhere. What is computed is the same either way.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "kernels/bf16.h"

namespace kdtree {

// Whether arrays of T begin at, and rows lie apart by, multiples of four elements. strides: in elements.
template <typename T = float>
bool fours(std::initializer_list<const void*> arrays, std::initializer_list<int64_t> strides) {
  for (const void* array : arrays)
    if (reinterpret_cast<uintptr_t>(array) % (4 * sizeof(T)) != 0) return false;
  for (const int64_t stride : strides)
    if (stride % 4 != 0) return false;
  return true;
}

// p[0..count-1], count <= 4; zeros behind. vector: count is 4 and p is aligned to four elements.
__device__ inline float4 load4(const float* p, int count, bool vector) {
  if (vector) return *reinterpret_cast<const float4*>(p);
  float4 v = make_float4(0, 0, 0, 0);
  if (count > 0) v.x = p[0];
  if (count > 1) v.y = p[1];
  if (count > 2) v.z = p[2];
  if (count > 3) v.w = p[3];
  return v;
}
__device__ inline float4 load4(const uint16_t* p, int count, bool vector) {
  if (vector) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16),
                       __uint_as_float(v.y & 0xffff0000u));
  }
  float4 v = make_float4(0, 0, 0, 0);
  if (count > 0) v.x = widen(p[0]);
  if (count > 1) v.y = widen(p[1]);
  if (count > 2) v.z = widen(p[2]);
  if (count > 3) v.w = widen(p[3]);
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
__device__ inline void store4(uint16_t* p, float4 v, int count, bool vector) {
  if (vector) {
    *reinterpret_cast<uint2*>(p) = make_uint2(narrow(v.x) | static_cast<uint32_t>(narrow(v.y)) << 16,
                                              narrow(v.z) | static_cast<uint32_t>(narrow(v.w)) << 16);
    return;
  }
  if (count > 0) p[0] = narrow(v.x);
  if (count > 1) p[1] = narrow(v.y);
  if (count > 2) p[2] = narrow(v.z);
  if (count > 3) p[3] = narrow(v.w);
}

// The bits of from[0..count-1] to `to`.
template <typename T>
__device__ inline void copy4(const T* from, T* to, int count, bool vector) {
  using Four = std::conditional_t<sizeof(T) == sizeof(float), float4, uint2>;
  if (vector) {
    *reinterpret_cast<Four*>(to) = *reinterpret_cast<const Four*>(from);
    return;
  }
  for (int i = 0; i < 4 && i < count; ++i) to[i] = from[i];
}

}  // namespace kdtree
