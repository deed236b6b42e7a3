#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/error.h"
#include "common/per_kernel.h"

namespace kdtree {
namespace {

constexpr size_t kMessageSize = 512;
thread_local char message[kMessageSize] = "";

size_t shared_memory_optin_of(int device) {
  int bytes = 0;
  if (check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                 "shared memory per block") != KDTREE_OK)
    return 0;
  return static_cast<size_t>(bytes);
}

}  // namespace

kdtree_status fail(kdtree_status status, const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::vsnprintf(message, kMessageSize, format, values);
  va_end(values);
  return status;
}

kdtree_status succeed() {
  message[0] = '\0';
  return KDTREE_OK;
}

kdtree_status check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return KDTREE_OK;
  cudaGetLastError();  // or the next launch's check would report this call's error again
  return fail(KDTREE_CUDA, "%s: %s: %s", what, cudaGetErrorName(error), cudaGetErrorString(error));
}

bool launches_wait() {
  static const bool wait = [] {
    const char* value = std::getenv("KDTREE_LAUNCH_BLOCKING");
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
  return wait;
}

kdtree_status check_launch(const char* kernel) {
  KDTREE_RETURN_IF_FAILED(check_cuda(cudaGetLastError(), kernel));
  return launches_wait() ? check_cuda(cudaDeviceSynchronize(), kernel) : KDTREE_OK;
}

Arguments& Arguments::version(size_t given, size_t expected) {
  if (!failed() && given != expected)
    status_ = fail(KDTREE_VERSION, "%s: struct_size is %zu, this library's is %zu", call_, given, expected);
  return *this;
}

Arguments& Arguments::range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (!failed() && (value < least || value > most))
    status_ = fail(KDTREE_SIZE, "%s: %s is %lld, it must be in [%lld, %lld]", call_, name,
                   static_cast<long long>(value), static_cast<long long>(least), static_cast<long long>(most));
  return *this;
}

Arguments& Arguments::array(const char* name, const void* pointer, size_t alignment, bool needed) {
  if (failed()) return *this;
  if (pointer == nullptr) {
    if (needed) status_ = fail(KDTREE_POINTER, "%s: %s is NULL", call_, name);
  } else if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
    status_ = fail(KDTREE_ALIGNMENT, "%s: %s at %p is not aligned to %zu bytes", call_, name, pointer, alignment);
  }
  return *this;
}

Arguments& Arguments::workspace(const void* pointer, size_t given, size_t needed) {
  if (failed() || needed == 0) return *this;
  if (given < needed)
    status_ = fail(KDTREE_WORKSPACE, "%s: the workspace has %zu bytes, %zu are needed", call_, given, needed);
  return array("workspace", pointer, 256);
}

size_t shared_memory_optin() {
  int device = 0;
  return check_cuda(cudaGetDevice(&device), "cudaGetDevice") == KDTREE_OK ? shared_memory_optin_of(device) : 0;
}

kdtree_status allow_shared_memory(const void* kernel, const char* name, size_t dynamic_bytes, size_t static_bytes) {
  static PerKernel<size_t> allowances;  // bytes of dynamic shared memory, as far as this library has set them
  int device = 0;
  size_t allowed = 0;
  KDTREE_RETURN_IF_FAILED(check_cuda(cudaGetDevice(&device), "cudaGetDevice"));
  allowances.find(kernel, device, &allowed);
  if (dynamic_bytes <= allowed) return KDTREE_OK;
  const size_t available = shared_memory_optin_of(device);
  if (available == 0) return KDTREE_CUDA;
  if (dynamic_bytes + static_bytes > available)
    return fail(KDTREE_UNSUPPORTED, "%s: a block needs %zu + %zu bytes of shared memory, this device has %zu", name,
                dynamic_bytes, static_bytes, available);
  // All there is at once: another thread may be about to launch the same kernel with more than this call takes.
  const size_t most = available - static_bytes;
  KDTREE_RETURN_IF_FAILED(check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most)), name));
  allowances.set(kernel, device, most);
  return KDTREE_OK;
}

}  // namespace kdtree

extern "C" const char* kdtree_last_error(void) { return kdtree::message; }

extern "C" int32_t kdtree_abi_version(void) { return KDTREE_ABI_VERSION; }
