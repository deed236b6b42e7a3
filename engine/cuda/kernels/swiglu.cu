// y[m, i] = silu(both[m, i]) * both[m, width + i]. A thread for four neighbours of a row.

#include "common/behind.h"
#include "kernels/layers.h"
#include "kernels/swiglu.h"
#include "kernels/vector4.h"

namespace kdtree {
namespace {

constexpr int kThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kThreads) swiglu_kernel(SwigluArgs<T> a, bool vector) {
  start_behind();
  const int c = 4 * static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  const int count = a.width - c;
  if (count <= 0) return;
  const int64_t row = blockIdx.x;
  const T* const both = a.both + row * 2 * a.width + c;
  const float4 gate = load4(both, count, vector), up = load4(both + a.width, count, vector);
  const float4 y = make_float4(gated(gate.x, up.x), gated(gate.y, up.y), gated(gate.z, up.z), gated(gate.w, up.w));
  store4(a.y + row * a.width + c, y, count, vector);
}

template <typename T>
kdtree_status swiglu_rows(const SwigluArgs<T>& a, cudaStream_t stream) {
  Arguments arguments("swiglu");
  arguments.range("rows", a.rows, 1, 0x7fffffff)
      .range("width", a.width, 1, 65535 * 4 * kThreads)
      .array("both", a.both, sizeof(T))
      .array("y", a.y, sizeof(T));
  KDTREE_RETURN_IF_FAILED(arguments.status());
  const dim3 grid(static_cast<unsigned>(a.rows), static_cast<unsigned>(ceil_div(a.width, 4 * kThreads)));
  return launch_behind("swiglu_kernel", swiglu_kernel<T>, grid, dim3(kThreads), 0, stream, a,
                       fours<T>({a.both, a.y}, {a.width}));
}

}  // namespace

kdtree_status swiglu(const SwigluArgs<float>& args, cudaStream_t stream) { return swiglu_rows(args, stream); }
kdtree_status swiglu(const SwigluArgs<uint16_t>& args, cudaStream_t stream) { return swiglu_rows(args, stream); }

}  // namespace kdtree
