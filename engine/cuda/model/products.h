// The products of a model, float32 or bf16, by the kernels that its sizes allow.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "kernels/linear_cublas.h"
#include "model/memory.h"

namespace kdtree {

// bf16, not float32.
template <typename T>
constexpr bool kNarrow = std::is_same_v<T, uint16_t>;

// One choice for all products of a model, so that a weight is always summed in the same order.
struct Products {
  Gemm gemm;
  bool tensor_cores;  // bf16 only
};

// Whether tensor cores take what has these sizes: rows, and heads within them, begin at multiples of 16 bytes.
template <typename T>
bool fit_tensor_cores(std::initializer_list<int64_t> sizes) {
  bool fit = kNarrow<T>;
  for (const int64_t size : sizes) fit = fit && size % 8 == 0;
  return fit;
}

// y = x w^T for each of `batch` problems; strides in elements. T: float with Y float, uint16_t (bf16) with either Y.
template <typename T, typename Y>
struct Product {
  const T* x;
  int64_t x_stride, x_batch;
  const T* w;
  int64_t w_batch;
  Y* y;
  int64_t y_stride, y_batch;
  int rows, out, in, batch;
};

template <typename T, typename Y>
void multiply(const Products& how, const Product<T, Y>& p, cudaStream_t stream) {
  if constexpr (!kNarrow<T>) {
    require(linear(
        {p.x, p.x_stride, p.x_batch, p.w, p.w_batch, p.y, p.y_stride, p.y_batch, nullptr, p.rows, p.out, p.in, p.batch},
        how.gemm, stream));
  } else {
    const LinearBf16Args args{p.x,       p.x_stride, p.x_batch, p.w,   p.w_batch, p.y,     p.y_stride,
                              p.y_batch, nullptr,    p.rows,    p.out, p.in,      p.batch, std::is_same_v<Y, float>};
    require(how.gemm == Gemm::kCublas ? linear_cublas(args, stream)
            : how.tensor_cores        ? linear_bf16(args, stream)
                                      : linear_bf16_any(args, stream));
  }
}

// Of whole rows: x [rows, in], y [rows, out].
template <typename T, typename Y>
void multiply(const Products& how, const T* x, const T* w, Y* y, int rows, int out, int in, cudaStream_t stream) {
  multiply(how, Product<T, Y>{x, in, 0, w, 0, y, out, 0, rows, out, in, 1}, stream);
}

}  // namespace kdtree
