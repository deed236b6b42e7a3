// What kernels need of CUDA. With KDTREE_HOST the same kernel source compiles as C++20 and runs on the CPU (see
// host/README.md); the two macros stand for what plain C++ cannot parse.
//
// Rules for kernel source, so that both ways work: no CUDA header besides this one, bf16 as its uint16_t bits, shared
// arrays through __shared__ or KDTREE_DYNAMIC_SHARED, inline PTX only behind a function that host/ has a model of.
#pragma once

#ifdef KDTREE_HOST
#include "host/simt.h"
#define KDTREE_UNROLL
#define KDTREE_UNROLL_BY(times)
#else
#include <cuda_runtime.h>
// In front of a loop: unroll it so that its values stay in registers, or by that much.
#define KDTREE_PRAGMA(text) _Pragma(#text)
#define KDTREE_UNROLL _Pragma("unroll")
#define KDTREE_UNROLL_BY(times) KDTREE_PRAGMA(unroll times)
// A kernel with template arguments goes in parentheses.
#define KDTREE_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
// The dynamic shared memory of the block, as unsigned char* `name`, aligned to 128.
#define KDTREE_DYNAMIC_SHARED(name)                            \
  extern __shared__ __align__(128) unsigned char name##_raw[]; \
  unsigned char* name = name##_raw
#endif

#include <cstddef>
#include <cstdint>

namespace kdtree {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
__host__ __device__ constexpr size_t round_up(size_t a, size_t b) { return (a + b - 1) / b * b; }

// The value of bf16 bits.
__device__ inline float widen(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
__device__ inline float widen(float value) { return value; }

// 2^n, for n in -1022..1023.
__device__ inline double power_of_two(int n) { return __longlong_as_double(static_cast<long long>(1023 + n) << 52); }

}  // namespace kdtree
