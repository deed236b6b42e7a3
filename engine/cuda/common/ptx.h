// Instructions that CUDA C++ has no function for, behind functions that also exist for the CPU (host/ptx_models.h).
// sm_80 and newer.
//
// The matrix instructions work on 16-bit elements. One fragment register of a lane holds two neighbours, the first in
// the low half: of an 8 x 8 matrix, lane i holds row i / 4, columns 2 (i % 4) and the next. With them
//   d [16, 8] += a [16, 16] b [16, 8]
//   d[0], d[1]: row i / 4, columns 2 (i % 4) and the next; d[2], d[3]: the same 8 rows below
//   a[0]: rows 0-7, k 0-7; a[1]: rows 8-15, k 0-7; a[2]: rows 0-7, k 8-15; a[3]: rows 8-15, k 8-15
//   b[0]: k 0-7; b[1]: k 8-15, both transposed: lane i holds column i / 4, k 2 (i % 4) and the next
#pragma once

#include "common/port.h"

#ifdef KDTREE_HOST
#include "host/ptx_models.h"
#else

namespace kdtree {

__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Starts a copy of 16 bytes from global to shared memory, both aligned to 16; zeros where not `valid`.
__device__ inline void copy_async_16(void* shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
               : "memory");
}

// The same of 4 bytes.
__device__ inline void copy_async_4(void* shared, const void* global, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(valid ? 4 : 0)
               : "memory");
}

// Closes the thread's group of copies.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kPending` of the thread's closed groups are on their way, the youngest.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Two or four 8 x 8 matrices from shared memory by the whole warp. Lanes 8 m to 8 m + 7 bring the rows of matrix m: 8
// elements each, aligned to 16 bytes. Transposed: lane i holds column i / 4, rows 2 (i % 4) and the next.
__device__ inline void load_matrix(uint32_t (&f)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(f[0]), "=r"(f[1])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void load_matrix(uint32_t (&f)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void load_matrix_transposed(uint32_t (&f)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(f[0]), "=r"(f[1])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void load_matrix_transposed(uint32_t (&f)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
               : "r"(shared_address(row))
               : "memory");
}

// d += a b, bf16 products summed in float32.
__device__ inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace kdtree

#endif
