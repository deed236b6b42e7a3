// cuBLAS as peer and cross-check: plain float32, no TF32. Its bits for a row change with the number of rows.
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

}  // namespace kdtree

#else

#include <dlfcn.h>

#include <map>
#include <string>

namespace kdtree {
namespace {

// What is used of cublas_v2.h; these values and signatures are the same in CUDA 12 and 13.
using Handle = struct cublasContext*;
enum { kNoTranspose = 0, kTranspose = 1, kPedanticMath = 2 };

struct Cublas {
  int (*create)(Handle*) = nullptr;
  int (*destroy)(Handle) = nullptr;
  int (*set_stream)(Handle, cudaStream_t) = nullptr;
  int (*set_math_mode)(Handle, int mode) = nullptr;
  int (*sgemm)(Handle, int op_a, int op_b, int m, int n, int k, const float* alpha, const float* a, int lda,
               long long a_stride, const float* b, int ldb, long long b_stride, const float* beta, float* c, int ldc,
               long long c_stride, int count) = nullptr;
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
  Handles() = default;
  Handles(const Handles&) = delete;
  Handles& operator=(const Handles&) = delete;
  ~Handles() {
    for (const auto& [device, handle] : handles_) (void)Cublas::get().destroy(handle);
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
    return Cublas::get().set_math_mode(*handle, kPedanticMath);
  }

 private:
  std::map<int, Handle> handles_;
};

}  // namespace

kdtree_status linear_cublas(const LinearArgs& a, cudaStream_t stream) {
  const Cublas& cublas = Cublas::get();
  if (!cublas.missing.empty()) return fail(KDTREE_UNSUPPORTED, "linear: no cuBLAS: %s", cublas.missing.c_str());
  // Its leading dimensions are 32 bits wide.
  Arguments arguments("linear");
  arguments.range("x_stride", a.x_stride, a.in, 0x7fffffff).range("y_stride", a.y_stride, a.out, 0x7fffffff);
  KDTREE_RETURN_IF_FAILED(arguments.status());
  if (a.add != nullptr && a.add != a.y) {
    for (int64_t i = 0; i < a.batch; ++i)
      KDTREE_RETURN_IF_FAILED(
          copy_rows({a.add + i * a.y_batch, a.y_stride, a.y + i * a.y_batch, a.y_stride, a.rows, a.out}, stream));
  }
  static thread_local Handles handles;
  int device = 0;
  KDTREE_RETURN_IF_FAILED(check_cuda(cudaGetDevice(&device), "cudaGetDevice"));
  Handle handle = nullptr;
  int status = handles.get(device, &handle);
  if (status == 0) status = cublas.set_stream(handle, stream);
  // To cuBLAS, which counts down columns, y is [out, rows] = w^T x with w [in, out] and x [in, rows].
  const float one = 1, kept = a.add == nullptr ? 0.0f : 1.0f;
  if (status == 0)
    status = cublas.sgemm(handle, kTranspose, kNoTranspose, a.out, a.rows, a.in, &one, a.w, a.in, a.w_batch, a.x,
                          static_cast<int>(a.x_stride), a.x_batch, &kept, a.y, static_cast<int>(a.y_stride), a.y_batch,
                          a.batch);
  if (status != 0) return fail(KDTREE_CUDA, "linear: cuBLAS reported status %d", status);
  return KDTREE_OK;
}

}  // namespace kdtree

#endif
