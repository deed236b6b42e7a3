// The products of bf16 rows and weights on tensor cores. A row's bits do not depend on the other rows, on how many
// there are or on its place among them (kernels/bf16_tile.h has the order of the sums).
#pragma once

#include "kernels/bf16.h"
#include "kernels/layers.h"

namespace kdtree {

// y = x w^T (+ add), for each of `batch` problems: x [rows, in], w [out, in], y [rows, out]. Strides in elements. Sums
// in float32; `add` joins them there, and y is rounded once.
struct LinearBf16Args {
  const uint16_t* x;  // bf16 bits, as w. For linear_bf16 both start at, and their strides are, multiples of 16 bytes
  int64_t x_stride, x_batch;
  const uint16_t* w;  // rows of `in` values, contiguous; read before the kernel in front of this one ends
  int64_t w_batch;
  void* y;  // float32 where `wide`, else bf16
  int64_t y_stride, y_batch;
  const void* add;  // may be NULL, may be y; type and strides of y
  int rows, out, in, batch;
  bool wide;
};

// in: a multiple of 8. KDTREE_SIZE or KDTREE_ALIGNMENT, with the number, for what does not fit.
kdtree_status linear_bf16(const LinearBf16Args& args, cudaStream_t stream);

// The same without tensor cores, for any `in` and any alignment that the types have. It sums in another order, that of
// kernels/linear_order.h: a weight is to be multiplied by one of the two, whatever the rows.
kdtree_status linear_bf16_any(const LinearBf16Args& args, cudaStream_t stream);

// The results of one of the problems.
struct LinearBf16Result {
  void* y;
  const void* add;
  int64_t stride;
  bool wide;

  __device__ LinearBf16Result(const LinearBf16Args& a, int64_t batch)
      : y(a.y), add(a.add), stride(a.y_stride), wide(a.wide) {
    const int64_t skipped = batch * a.y_batch * static_cast<int64_t>(wide ? sizeof(float) : sizeof(uint16_t));
    y = static_cast<unsigned char*>(y) + skipped;
    if (add != nullptr) add = static_cast<const unsigned char*>(add) + skipped;
  }
  __device__ void put(int64_t row, int out, float sum) const {
    const int64_t place = row * stride + out;
    if (wide) {
      static_cast<float*>(y)[place] = add == nullptr ? sum : __fadd_rn(sum, static_cast<const float*>(add)[place]);
    } else {
      const uint16_t* const terms = static_cast<const uint16_t*>(add);
      static_cast<uint16_t*>(y)[place] = narrow(terms == nullptr ? sum : __fadd_rn(sum, widen(terms[place])));
    }
  }
};

}  // namespace kdtree
