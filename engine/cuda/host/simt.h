// Kernel source on the CPU: every CUDA thread is a fiber, a block runs to its end before the next one starts.
// README.md says what this shows and what it does not.
#pragma once

#include <math.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "host/runtime.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

// A sanitizer watches globals better than thread-local arrays; under one, blocks stay on one OS thread.
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define KDTREE_HOST_SANITIZED
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KDTREE_HOST_SANITIZED
#endif
#ifdef KDTREE_HOST_SANITIZED
#define __shared__ static
#else
#define __shared__ static thread_local
#endif

#define threadIdx (::kdtree::host::current->thread)
#define blockIdx (::kdtree::host::current->block->index)
#define blockDim (::kdtree::host::current->block->size)
#define gridDim (::kdtree::host::current->block->grid)

#define KDTREE_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ::kdtree::host::launch(#kernel, kernel, grid, block, shared_bytes, stream __VA_OPT__(, ) __VA_ARGS__)
#define KDTREE_DYNAMIC_SHARED(name) unsigned char* name = ::kdtree::host::current->block->dynamic_shared

// Where a thread waits: the last parameter of whatever waits.
#define KDTREE_HOST_PLACE ::kdtree::host::Place place = {__builtin_FILE(), __builtin_LINE()}

constexpr int warpSize = 32;

namespace kdtree::host {

struct Place {
  const char* file;
  int line;
};

struct Block {
  uint3 index;
  dim3 size, grid;
  unsigned char* dynamic_shared;
};

class Machine;

// What a thread sees of itself. `number` counts x first, then y, then z.
struct Lane {
  uint3 thread;
  unsigned number;
  const Block* block;
  Machine* machine;
};

extern constinit thread_local Lane* current;

// A warp operation: all lanes of the mask bring their `part`, the last one runs `combine` over the parts (null where a
// lane is not in the mask), and each lane finds its result in its part. Memory is ordered by __syncwarp alone.
struct WarpOp {
  const char* name;
  void (*combine)(unsigned mask, void* const* parts);
};

extern const WarpOp kSyncWarp, kShuffle, kShuffleUp, kShuffleDown, kShuffleXor, kBallot, kAny, kAll, kMatchAny,
    kReduceAdd, kReduceMin, kReduceMax, kReduceMinSigned, kReduceMaxSigned, kReduceAnd, kReduceOr, kReduceXor;

void meet(const WarpOp& op, unsigned mask, void* part, Place place);

enum class Barrier { kPlain, kOr, kAnd, kCount };

int wait_for_block(Barrier kind, int predicate, Place place);

struct Launch {
  const char* name;
  const void* kernel;
  dim3 grid, block;
  size_t dynamic_bytes;
  void (*call)(const void* arguments);
  const void* arguments;
};

// Runs all blocks; an impossible configuration goes to cudaGetLastError.
void run(const Launch& launch);

template <typename... P>
void launch(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, size_t dynamic_bytes, cudaStream_t,
            std::type_identity_t<P>... arguments) {
  const auto body = [&] { kernel(arguments...); };
  using Body = decltype(body);
  run({name, reinterpret_cast<const void*>(kernel), grid, block, dynamic_bytes,
       [](const void* call) { (*static_cast<Body*>(call))(); }, &body});
}

inline unsigned lane() { return current->number % 32; }

// Values travel as 64 bits.
template <typename T>
uint64_t to_bits(T value) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "a 4 or 8 byte number, as in CUDA");
  if constexpr (sizeof(T) == 4) {
    return std::bit_cast<uint32_t>(value);
  } else {
    return std::bit_cast<uint64_t>(value);
  }
}

template <typename T>
T from_bits(uint64_t bits) {
  if constexpr (sizeof(T) == 4) {
    return std::bit_cast<T>(static_cast<uint32_t>(bits));
  } else {
    return std::bit_cast<T>(bits);
  }
}

struct ShufflePart {
  uint64_t value;
  unsigned source;
};

template <typename T>
T shuffle(const WarpOp& op, unsigned mask, T value, unsigned source, Place place) {
  ShufflePart part{to_bits(value), source};
  meet(op, mask, &part, place);
  return from_bits<T>(part.value);
}

template <typename T>
uint64_t exchange(const WarpOp& op, unsigned mask, T value, Place place) {
  uint64_t part = to_bits(value);
  meet(op, mask, &part, place);
  return part;
}

template <typename T>
inline constexpr bool is_atomic_word =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long>;

// Replaces *address by f(*address) in one step and returns what was there.
template <typename T, typename F>
T update(T* address, F f) {
  T old, changed;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  do changed = f(old);
  while (!__atomic_compare_exchange(address, &old, &changed, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

}  // namespace kdtree::host

// Barriers and warp operations.
inline void __syncthreads(KDTREE_HOST_PLACE) { kdtree::host::wait_for_block(kdtree::host::Barrier::kPlain, 0, place); }
inline int __syncthreads_or(int predicate, KDTREE_HOST_PLACE) {
  return kdtree::host::wait_for_block(kdtree::host::Barrier::kOr, predicate, place);
}
inline int __syncthreads_and(int predicate, KDTREE_HOST_PLACE) {
  return kdtree::host::wait_for_block(kdtree::host::Barrier::kAnd, predicate, place);
}
inline int __syncthreads_count(int predicate, KDTREE_HOST_PLACE) {
  return kdtree::host::wait_for_block(kdtree::host::Barrier::kCount, predicate, place);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, KDTREE_HOST_PLACE) {
  kdtree::host::meet(kdtree::host::kSyncWarp, mask, nullptr, place);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, KDTREE_HOST_PLACE) {
  const int first = static_cast<int>(kdtree::host::lane()) & ~(width - 1);
  return kdtree::host::shuffle(kdtree::host::kShuffle, mask, value, first + (source & (width - 1)), place);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, KDTREE_HOST_PLACE) {
  const unsigned lane = kdtree::host::lane(), in_segment = lane & (width - 1);
  return kdtree::host::shuffle(kdtree::host::kShuffleUp, mask, value, delta <= in_segment ? lane - delta : lane, place);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, KDTREE_HOST_PLACE) {
  const unsigned lane = kdtree::host::lane(), after = (width - 1) - (lane & (width - 1));
  return kdtree::host::shuffle(kdtree::host::kShuffleDown, mask, value, delta <= after ? lane + delta : lane, place);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, KDTREE_HOST_PLACE) {
  const unsigned lane = kdtree::host::lane(), last = lane | (width - 1), source = lane ^ bits;
  return kdtree::host::shuffle(kdtree::host::kShuffleXor, mask, value, source <= last ? source : lane, place);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, KDTREE_HOST_PLACE) {
  return static_cast<unsigned>(kdtree::host::exchange(kdtree::host::kBallot, mask, predicate, place));
}
inline int __any_sync(unsigned mask, int predicate, KDTREE_HOST_PLACE) {
  return kdtree::host::exchange(kdtree::host::kAny, mask, predicate, place) != 0;
}
inline int __all_sync(unsigned mask, int predicate, KDTREE_HOST_PLACE) {
  return kdtree::host::exchange(kdtree::host::kAll, mask, predicate, place) == mask;
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value, KDTREE_HOST_PLACE) {
  return static_cast<unsigned>(kdtree::host::exchange(kdtree::host::kMatchAny, mask, value, place));
}

#define KDTREE_HOST_REDUCE(name, type, op)                                                  \
  inline type name(unsigned mask, type value, KDTREE_HOST_PLACE) {                          \
    return static_cast<type>(kdtree::host::exchange(kdtree::host::op, mask, value, place)); \
  }
KDTREE_HOST_REDUCE(__reduce_add_sync, unsigned, kReduceAdd)
KDTREE_HOST_REDUCE(__reduce_add_sync, int, kReduceAdd)
KDTREE_HOST_REDUCE(__reduce_min_sync, unsigned, kReduceMin)
KDTREE_HOST_REDUCE(__reduce_min_sync, int, kReduceMinSigned)
KDTREE_HOST_REDUCE(__reduce_max_sync, unsigned, kReduceMax)
KDTREE_HOST_REDUCE(__reduce_max_sync, int, kReduceMaxSigned)
KDTREE_HOST_REDUCE(__reduce_and_sync, unsigned, kReduceAnd)
KDTREE_HOST_REDUCE(__reduce_or_sync, unsigned, kReduceOr)
KDTREE_HOST_REDUCE(__reduce_xor_sync, unsigned, kReduceXor)
#undef KDTREE_HOST_REDUCE

// Atomics order nothing, as on the device. The types are those that CUDA takes.
template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  static_assert(kdtree::host::is_atomic_word<T> || std::is_same_v<T, float> || std::is_same_v<T, double>);
  if constexpr (std::is_same_v<T, int>)
    return static_cast<int>(atomicAdd(reinterpret_cast<unsigned*>(address), static_cast<unsigned>(value)));  // wraps
  return kdtree::host::update(address, [=](T old) { return old + value; });
}
template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  static_assert(kdtree::host::is_atomic_word<T> || std::is_same_v<T, long long>);
  return kdtree::host::update(address, [=](T old) { return old < value ? value : old; });
}
template <typename T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  static_assert(kdtree::host::is_atomic_word<T> || std::is_same_v<T, long long>);
  return kdtree::host::update(address, [=](T old) { return value < old ? value : old; });
}
template <typename T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  static_assert(kdtree::host::is_atomic_word<T>);
  return kdtree::host::update(address, [=](T old) { return old | value; });
}
template <typename T>
T atomicAnd(T* address, std::type_identity_t<T> value) {
  static_assert(kdtree::host::is_atomic_word<T>);
  return kdtree::host::update(address, [=](T old) { return old & value; });
}
template <typename T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  static_assert(kdtree::host::is_atomic_word<T> || std::is_same_v<T, float>);
  return kdtree::host::update(address, [=](T) { return value; });
}
template <typename T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  static_assert(kdtree::host::is_atomic_word<T>);
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

// Threads of a block never run at the same time, and blocks on other OS threads meet in atomics only.
inline void __threadfence_block() {}
inline void __threadfence() {
#ifndef KDTREE_HOST_SANITIZED
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}
inline void __threadfence_system() { __threadfence(); }

// Integers and bits.
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1u) << (31 - bit);
  return reversed;
}
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>(uint64_t{x} * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<unsigned long long>(static_cast<Wide>(x) * y >> 64);
}

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }

// Arithmetic. The host is compiled without contraction, so these are the plain operators.
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// As in CUDA: of two numbers the one that is not a NaN, and signed meets unsigned as in C.
template <typename A, typename B, typename = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  const T x = static_cast<T>(a), y = static_cast<T>(b);
  return y < x || x != x ? y : x;
}
template <typename A, typename B, typename = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  const T x = static_cast<T>(a), y = static_cast<T>(b);
  return x < y || x != x ? y : x;
}

template <typename T>
T __ldg(const T* pointer) {
  return *pointer;
}
