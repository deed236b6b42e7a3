// Instructions of sm_90a: products of a warpgroup (wgmma), copies of tiles by the copy engine (TMA) and the barriers
// that count their bytes. There is no model of them for the CPU: what uses them compiles to nothing there.
//
// A warpgroup is four warps, the first of a number divisible by four. Its warp w has rows 16 w to 16 w + 15 of sums
// [64, n], each as the fragment d of ptx.h: of columns 8 j to 8 j + 7 lane i has d[4 j], d[4 j + 1], row i / 4, columns
// 2 (i % 4) and the next, and d[4 j + 2], d[4 j + 3], the same 8 rows below. A operand in registers: 16 columns as a of
// ptx.h. Operands in shared memory are pieces of 128 bytes a row, at multiples of 1024 bytes, in which the 16 bytes c
// of row r lie at place c ^ r % 8 of it.
#pragma once

#include "common/port.h"

#ifndef KDTREE_HOST

#include <cuda.h>

#include "common/ptx.h"

// Whether this pass of the compiler is for a device that has these instructions.
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KDTREE_HAS_WGMMA
#endif

namespace kdtree::hopper {

#ifdef KDTREE_HAS_WGMMA

constexpr uint32_t kPieceRow = 128;  // bytes

// Of 16 bytes `chunk`, 0..7, of a row of a piece.
__device__ inline uint32_t piece_offset(int row, int chunk) {
  return static_cast<uint32_t>(row) * kPieceRow + static_cast<uint32_t>((chunk ^ row % 8) * 16);
}

// Where an operand lies. Inner: a row of the piece is a row of the operand [64 rows, 64 of the summed index].
// Outer: a row of the piece is one summed index, and has 64 columns of the operand; the next 64 columns lie in the next
// piece, `piece_bytes` on.
struct Operand {
  uint32_t low, high;

  // As many bytes on: one addition, so that products need not wait for it.
  __device__ Operand operator+(uint32_t bytes) const { return {low + bytes / 16, high}; }
  __device__ uint64_t bits() const { return static_cast<uint64_t>(high) << 32 | low; }
};
__device__ inline Operand inner_operand(uint32_t address) {
  return {1u << 16 | (address >> 4 & 0x3fff), 1u << 30 | 1024 / 16};
}
__device__ inline Operand outer_operand(uint32_t address, uint32_t piece_bytes) {
  return {piece_bytes / 16 << 16 | (address >> 4 & 0x3fff), 1u << 30 | 1024 / 16};
}

// Before the first product of a run, when registers were written that it reads or adds to.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of products.
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `kPending` closed groups are on their way.
template <int kPending>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// The compiler keeps what it does with sums behind the wait for them.
template <int kCount>
__device__ inline void settle(float (&sums)[kCount]) {
  KDTREE_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

#define KDTREE_SUMS_8(d, i)                                                                                   \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define KDTREE_SUMS_32(d, i) \
  KDTREE_SUMS_8(d, i), KDTREE_SUMS_8(d, i + 8), KDTREE_SUMS_8(d, i + 16), KDTREE_SUMS_8(d, i + 24)
#define KDTREE_PLACES_32                                                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, "                                                                                                          \
  "%25, %26, %27, %28, %29, %30, %31"
#define KDTREE_PLACES_128                                                                                          \
  KDTREE_PLACES_32                                                                                                 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "    \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, " \
  "%75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, " \
  "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, "      \
  "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d [64, 64] (+)= a [64, 16] b [64, 16]^T, bf16, both inner operands.
__device__ inline void multiply_64(float (&d)[32], Operand a, Operand b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" KDTREE_PLACES_32 "}, %32, %33, p, 1, 1, 0, 0;\n}"
      : KDTREE_SUMS_32(d, 0)
      : "l"(a.bits()), "l"(b.bits()), "r"(static_cast<int>(add)));
}

// d [64, 256] (+)= a [64, 16] b [16, 256], bf16: a an inner operand or in registers, b an outer operand.
__device__ inline void multiply_256(float (&d)[128], Operand a, Operand b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" KDTREE_PLACES_128 "}, %128, %129, p, 1, 1, 0, 1;\n}"
      : KDTREE_SUMS_32(d, 0), KDTREE_SUMS_32(d, 32), KDTREE_SUMS_32(d, 64), KDTREE_SUMS_32(d, 96)
      : "l"(a.bits()), "l"(b.bits()), "r"(static_cast<int>(add)));
}
__device__ inline void multiply_256(float (&d)[128], const uint32_t* a, Operand b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" KDTREE_PLACES_128
      "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}"
      : KDTREE_SUMS_32(d, 0), KDTREE_SUMS_32(d, 32), KDTREE_SUMS_32(d, 64), KDTREE_SUMS_32(d, 96)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "r"(static_cast<int>(add)));
}

#undef KDTREE_PLACES_128
#undef KDTREE_PLACES_32
#undef KDTREE_SUMS_32
#undef KDTREE_SUMS_8

// Four 8 x 8 matrices to shared memory by the whole warp, the reverse of load_matrix.
__device__ inline void store_matrix(uint32_t row, const uint32_t* f) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(f[0]), "r"(f[1]),
               "r"(f[2]), "r"(f[3])
               : "memory");
}

// What the thread stored to shared memory is seen by products and by the copy engine, after a barrier.
__device__ inline void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier in shared memory, by its address: a phase ends when all have arrived and all bytes that were announced are
// there. The first phase is 0.
__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_arrive_with(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the end of a phase; the thread must have seen the one before.
__device__ inline void barrier_wait(uint32_t barrier, int phase) {
  asm volatile(
      "{\n.reg .pred p;\nwaiting:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\nbra waiting;\ndone:\n}" ::"r"(barrier),
      "r"(phase & 1)
      : "memory");
}

// Some warps of the block meet: `threads` in all, those that wait and those that only say that they were here.
__device__ inline void meet(int which, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}
__device__ inline void pass_by(int which, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(which), "r"(threads) : "memory");
}

// copy_async_16 by the address in shared memory.
__device__ inline void copy_async_16(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(__cvta_generic_to_global(global)),
               "r"(valid ? 16 : 0)
               : "memory");
}

// A box of the map to shared memory; its bytes count at the barrier. x: the column, y: the row, z: the request.
__device__ inline void copy_box(uint32_t to, const CUtensorMap* map, int x, int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Four floats are added to those in memory: each sum is rounded to nearest, below 2^-126 to 0. A thread's additions to
// one address come in its order.
__device__ inline void add_to_memory(float4* to, float4 added) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "f"(added.x), "f"(added.y), "f"(added.z), "f"(added.w)
               : "memory");
}

// Registers a thread of the warpgroup may have from here on: more, once others have given theirs.
template <int kCount>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

#endif  // KDTREE_HAS_WGMMA

}  // namespace kdtree::hopper

#endif
