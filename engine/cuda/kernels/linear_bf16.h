// The products of bf16 rows and weights on tensor cores. A row's bits do not depend on the other rows, on how many
// there are or on its place among them (kernels/bf16_tile.h has the order of the sums).
#pragma once

#include "common/error.h"

namespace kdtree {

// y = x w^T (+ add), for each of `batch` problems: x [rows, in], w [out, in], y [rows, out]. Strides in elements. Sums
// in float32; `add` joins them there, and y is rounded once.
struct LinearBf16Args {
  const uint16_t* x;  // bf16 bits, as w. Both start at, and their strides are, multiples of 16 bytes
  int64_t x_stride, x_batch;
  const uint16_t* w;  // rows of `in` values, contiguous
  int64_t w_batch;
  void* y;  // float32 where `wide`, else bf16
  int64_t y_stride, y_batch;
  const void* add;  // may be NULL, may be y; type and strides of y
  int rows, out, in, batch;
  bool wide;
};

// in: a multiple of 8. KDTREE_SIZE or KDTREE_ALIGNMENT, with the number, for what does not fit.
kdtree_status linear_bf16(const LinearBf16Args& args, cudaStream_t stream);

}  // namespace kdtree
