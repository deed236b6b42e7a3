// Which devices there are, and whether the library holds code for them.

#include <cstring>

#include "common/error.h"

#ifndef KDTREE_ARCHITECTURES
#define KDTREE_ARCHITECTURES "host"  // the build says what it built for
#endif

namespace kdtree {
namespace {

__global__ void probe_kernel() {}

}  // namespace
}  // namespace kdtree

using namespace kdtree;

extern "C" const char* kdtree_architectures(void) { return KDTREE_ARCHITECTURES; }

extern "C" kdtree_status kdtree_device_count(int32_t* count) {
  if (Arguments arguments("kdtree_device_count"); arguments.array("count", count, sizeof(int32_t)).failed())
    return arguments.status();
  int found = 0;
  const cudaError_t error = cudaGetDeviceCount(&found);
  (void)cudaGetLastError();  // a machine without a device is no error for the calls that follow
  *count = error == cudaSuccess ? found : 0;
  if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice) return KDTREE_OK;
  return check_cuda(error, "cudaGetDeviceCount");
}

extern "C" kdtree_status kdtree_device_query(kdtree_device_info* info) {
  Arguments arguments("kdtree_device_query");
  if (arguments.array("info", info, alignof(kdtree_device_info)).failed()) return arguments.status();
  int32_t count = 0;
  if (arguments.version(info->struct_size, sizeof(*info)).failed()) return arguments.status();
  KDTREE_RETURN_IF_FAILED(kdtree_device_count(&count));
  if (arguments.range("device", info->device, 0, static_cast<int64_t>(count) - 1).failed()) return arguments.status();

  cudaDeviceProp properties;
  KDTREE_RETURN_IF_FAILED(check_cuda(cudaGetDeviceProperties(&properties, info->device), "cudaGetDeviceProperties"));
  int driver = 0, runtime = 0, before = 0;
  KDTREE_RETURN_IF_FAILED(check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion"));
  KDTREE_RETURN_IF_FAILED(check_cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion"));
  KDTREE_RETURN_IF_FAILED(check_cuda(cudaGetDevice(&before), "cudaGetDevice"));
  KDTREE_RETURN_IF_FAILED(check_cuda(cudaSetDevice(info->device), "cudaSetDevice"));
  cudaFuncAttributes attributes;
  const cudaError_t fits = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(probe_kernel));
  (void)cudaGetLastError();  // no code for this device is the answer, not a fault
  KDTREE_RETURN_IF_FAILED(check_cuda(cudaSetDevice(before), "cudaSetDevice"));

  info->compute_capability = 10 * properties.major + properties.minor;
  info->multiprocessors = properties.multiProcessorCount;
  info->shared_memory_optin = static_cast<int32_t>(properties.sharedMemPerBlockOptin);
  info->driver = driver;
  info->runtime = runtime;
  info->usable = fits == cudaSuccess;
  info->total_memory = properties.totalGlobalMem;
  std::strncpy(info->name, properties.name, sizeof(info->name) - 1);
  info->name[sizeof(info->name) - 1] = '\0';
  return KDTREE_OK;
}
