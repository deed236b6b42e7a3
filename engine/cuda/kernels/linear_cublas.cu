// cuBLAS as peer and cross-check: plain float32, no TF32, or bf16 summed in float32. Its bits for a row change with the
// number of rows.
//
// The library is found when it is first asked for, so that the engine runs without it: its name is looked up as the
// dynamic linker does, which also finds one that the process has loaded already.

#include "common/error.h"
#include "kernels/linear_cublas.h"

#ifdef KDTREE_HOST

namespace kdtree {

kdtree_status linear_cublas(const LinearArgs&, cudaStream_t) {
  return fail(KDTREE_UNSUPPORTED, "linear: there is no cuBLAS on the CPU; choose the row-invariant product");
}
kdtree_status linear_cublas(const LinearBf16Args&, cudaStream_t) { return linear_cublas(LinearArgs{}, nullptr); }

}  // namespace kdtree

#else

#include <dlfcn.h>

#include <map>
#include <string>

namespace kdtree {
namespace {

// What is used of cublas_v2.h; these values and signatures are the same in CUDA 12 and 13.
using Handle = struct cublasContext*;
enum { kNoTranspose = 0, kTranspose = 1 };
// Of float32, without TF32; of bf16, without sums that are narrower than float32.
enum { kPedanticMath = 2, kNoNarrowSums = 16 };
enum { kFloat32 = 0, kBf16 = 14, kSumInFloat32 = 68, kAnyAlgorithm = -1 };

struct Cublas {
  int (*create)(Handle*) = nullptr;
  int (*destroy)(Handle) = nullptr;
  int (*set_stream)(Handle, cudaStream_t) = nullptr;
  int (*set_math_mode)(Handle, int mode) = nullptr;
  int (*sgemm)(Handle, int op_a, int op_b, int m, int n, int k, const float* alpha, const float* a, int lda,
               long long a_stride, const float* b, int ldb, long long b_stride, const float* beta, float* c, int ldc,
               long long c_stride, int count) = nullptr;
  int (*gemm)(Handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a, int a_type, int lda,
              long long a_stride, const void* b, int b_type, int ldb, long long b_stride, const void* beta, void* c,
              int c_type, int ldc, long long c_stride, int count, int sum_type, int algorithm) = nullptr;
  std::string missing;  // why there is no cuBLAS; "" if there is

  Cublas() {
    void* library = nullptr;
    for (const char* name : {"libcublas.so.13", "libcublas.so.12"})
      if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      missing = dlerror();
      return;
    }
    find(library, "cublasCreate_v2", create);
    find(library, "cublasDestroy_v2", destroy);
    find(library, "cublasSetStream_v2", set_stream);
    find(library, "cublasSetMathMode", set_math_mode);
    find(library, "cublasSgemmStridedBatched", sgemm);
    find(library, "cublasGemmStridedBatchedEx", gemm);
  }

  static const Cublas& get() {
    static const Cublas library;
    return library;
  }

 private:
  template <typename F>
  void find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr) missing = std::string("cuBLAS has no ") + name;
  }
};

// The handles of one thread, one a device: cuBLAS forbids two threads to share one.
class Handles {
 public:
  Handles(const Handles&) = delete;
  Handles& operator=(const Handles&) = delete;
  ~Handles() {
    for (const auto& [device, handle] : handles_) (void)Cublas::get().destroy(handle);
  }

  static Handles& of_thread() {
    static thread_local Handles handles;
    return handles;
  }

  // The handle of a device, created when it is first asked for; returns cuBLAS's status.
  int get(int device, Handle* handle) {
    const auto found = handles_.find(device);
    if (found != handles_.end()) {
      *handle = found->second;
      return 0;
    }
    if (const int status = Cublas::get().create(handle)) return status;
    handles_[device] = *handle;
    return 0;
  }

 private:
  Handles() = default;
  std::map<int, Handle> handles_;
};

// Calls multiply(cuBLAS, handle) with the current device's handle on the stream, and makes a status of what it returns.
template <class Args, class Multiply>
kdtree_status multiply_on(const Args& a, int math_mode, cudaStream_t stream, Multiply multiply) {
  const Cublas& cublas = Cublas::get();
  if (!cublas.missing.empty()) return fail(KDTREE_UNSUPPORTED, "linear: no cuBLAS: %s", cublas.missing.c_str());
  // Its leading dimensions are 32 bits wide.
  Arguments arguments("linear");
  arguments.range("x_stride", a.x_stride, a.in, 0x7fffffff).range("y_stride", a.y_stride, a.out, 0x7fffffff);
  KDTREE_RETURN_IF_FAILED(arguments.status());
  int device = 0;
  KDTREE_RETURN_IF_FAILED(check_cuda(cudaGetDevice(&device), "cudaGetDevice"));
  Handle handle = nullptr;
  int status = Handles::of_thread().get(device, &handle);
  if (status == 0) status = cublas.set_stream(handle, stream);
  if (status == 0) status = cublas.set_math_mode(handle, math_mode);
  if (status == 0) status = multiply(cublas, handle);
  if (status != 0) return fail(KDTREE_CUDA, "linear: cuBLAS reported status %d", status);
  return KDTREE_OK;
}

}  // namespace

// To cuBLAS, which counts down columns, y is [out, rows] = w^T x with w [in, out] and x [in, rows].

kdtree_status linear_cublas(const LinearArgs& a, cudaStream_t stream) {
  if (a.add != nullptr && a.add != a.y) {
    for (int64_t i = 0; i < a.batch; ++i)
      KDTREE_RETURN_IF_FAILED(copy_rows(
          CopyRowsArgs<float>{a.add + i * a.y_batch, a.y_stride, a.y + i * a.y_batch, a.y_stride, a.rows, a.out},
          stream));
  }
  const float one = 1, kept = a.add == nullptr ? 0.0f : 1.0f;
  return multiply_on(a, kPedanticMath, stream, [&](const Cublas& cublas, Handle handle) {
    return cublas.sgemm(handle, kTranspose, kNoTranspose, a.out, a.rows, a.in, &one, a.w, a.in, a.w_batch, a.x,
                        static_cast<int>(a.x_stride), a.x_batch, &kept, a.y, static_cast<int>(a.y_stride), a.y_batch,
                        a.batch);
  });
}

kdtree_status linear_cublas(const LinearBf16Args& a, cudaStream_t stream) {
  if (a.add != nullptr) return fail(KDTREE_UNSUPPORTED, "linear: cuBLAS adds nothing to a bf16 product here");
  const float one = 1, zero = 0;
  return multiply_on(a, kNoNarrowSums, stream, [&](const Cublas& cublas, Handle handle) {
    return cublas.gemm(handle, kTranspose, kNoTranspose, a.out, a.rows, a.in, &one, a.w, kBf16, a.in, a.w_batch, a.x,
                       kBf16, static_cast<int>(a.x_stride), a.x_batch, &zero, a.y, a.wide ? kFloat32 : kBf16,
                       static_cast<int>(a.y_stride), a.y_batch, a.batch, kSumInFloat32, kAnyAlgorithm);
  });
}

}  // namespace kdtree

#endif
