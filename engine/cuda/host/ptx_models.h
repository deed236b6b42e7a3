// What the instructions behind common/ptx.h do, for the CPU. Their memory accesses are made by the lane that the
// instruction makes them for, in the kernel's code, so that the sanitizers see them.
#pragma once

#include <cstdint>
#include <cstring>

#include "host/simt.h"

namespace kdtree {
namespace host {

// A copy on its way. from: null for zeros.
struct AsyncCopy {
  void* to;
  const void* from;
  size_t bytes;
};

// The lane's copies, oldest first: start_copy adds one to the open group, close_copies closes the group, take_copy
// takes one out of a closed group that is not among the youngest `pending`; false if there is none.
void start_copy(AsyncCopy copy);
void close_copies();
bool take_copy(unsigned pending, AsyncCopy* copy);

// Ends the program as a misaligned address does on a device.
void check_alignment(const void* address, size_t alignment, const char* instruction);

// In: the lane's row of 8 elements. Out: the rows that hold the lane's two elements of each matrix.
struct LoadMatrixPart {
  const uint16_t* row;
  const uint16_t* needed[4][2];
};

extern const WarpOp kLoadMatrix2, kLoadMatrix4, kLoadMatrix2Transposed, kLoadMatrix4Transposed, kMmaBf16;

template <int kMatrices, bool kTransposed>
void load_matrices(uint32_t (&fragments)[kMatrices], const void* row, Place place) {
  LoadMatrixPart part{static_cast<const uint16_t*>(row), {}};
  if (lane() < 8 * kMatrices) check_alignment(row, 16, "ldmatrix");
  constexpr const WarpOp& kOp = kMatrices == 2 ? (kTransposed ? kLoadMatrix2Transposed : kLoadMatrix2)
                                               : (kTransposed ? kLoadMatrix4Transposed : kLoadMatrix4);
  meet(kOp, 0xffffffffu, &part, place);
  const unsigned column = kTransposed ? lane() / 4 : lane() % 4 * 2;
  for (int m = 0; m < kMatrices; ++m) {
    const uint32_t low = part.needed[m][0][column], high = part.needed[m][1][column + (kTransposed ? 0 : 1)];
    fragments[m] = low | high << 16;
  }
}

struct MmaPart {
  float d[4];
  uint32_t a[4], b[2];
};

}  // namespace host

namespace host {

template <size_t kBytes>
void copy_async(void* shared, const void* global, bool valid) {
  check_alignment(shared, kBytes, "cp.async");
  if (valid) check_alignment(global, kBytes, "cp.async");
  std::memset(shared, 0xff, kBytes);
  start_copy({shared, valid ? global : nullptr, kBytes});
}

}  // namespace host

inline void copy_async_16(void* shared, const void* global, bool valid = true) {
  host::copy_async<16>(shared, global, valid);
}
inline void copy_async_4(void* shared, const void* global, bool valid = true) {
  host::copy_async<4>(shared, global, valid);
}

inline void commit_copies() { host::close_copies(); }

template <int kPending>
void wait_copies() {
  for (host::AsyncCopy copy; host::take_copy(kPending, &copy);) {
    if (copy.from != nullptr)
      std::memcpy(copy.to, copy.from, copy.bytes);
    else
      std::memset(copy.to, 0, copy.bytes);
  }
}

inline void load_matrix(uint32_t (&fragments)[2], const void* row, KDTREE_HOST_PLACE) {
  host::load_matrices<2, false>(fragments, row, place);
}
inline void load_matrix(uint32_t (&fragments)[4], const void* row, KDTREE_HOST_PLACE) {
  host::load_matrices<4, false>(fragments, row, place);
}
inline void load_matrix_transposed(uint32_t (&fragments)[2], const void* row, KDTREE_HOST_PLACE) {
  host::load_matrices<2, true>(fragments, row, place);
}
inline void load_matrix_transposed(uint32_t (&fragments)[4], const void* row, KDTREE_HOST_PLACE) {
  host::load_matrices<4, true>(fragments, row, place);
}

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], KDTREE_HOST_PLACE) {
  host::MmaPart part{{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  host::meet(host::kMmaBf16, 0xffffffffu, &part, place);
  for (int i = 0; i < 4; ++i) d[i] = part.d[i];
}

}  // namespace kdtree
