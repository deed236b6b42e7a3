// Kernels in a row, each of which is on its multiprocessors when the one before ends (programmatic dependent launch,
// sm_90 and newer). Elsewhere, and on the CPU, a kernel starts when the one before has ended.
#pragma once

#include "common/error.h"
#include "common/per_kernel.h"

namespace kdtree {

// By every thread of the first kernel: blocks of the second may take what room the first leaves.
__device__ inline void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// By every thread of the second kernel, before it touches what the first writes: waits until the first is done.
__device__ inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// By every thread of a kernel that lets the next one start as soon as it may itself. In front of it a kernel may only
// touch what nothing on the stream writes, such as weights. Whatever is launched behind another kernel must wait, so
// that its end means the end of all before it. A kernel that reads more in front of its wait, as top-k reads logits,
// is right only behind one that is launched without this, which begins when all before it has ended.
__device__ inline void start_behind() {
  wait_for_previous();
  let_next_start();
}

#ifndef KDTREE_HOST
// Whether the kernel's code on the current device is such that it waits.
inline kdtree_status can_wait(const void* kernel, const char* name, bool* can) {
  static PerKernel<bool> known;
  int device = 0;
  KDTREE_RETURN_IF_FAILED(check_cuda(cudaGetDevice(&device), "cudaGetDevice"));
  if (known.find(kernel, device, can)) return KDTREE_OK;
  cudaFuncAttributes attributes;
  KDTREE_RETURN_IF_FAILED(check_cuda(cudaFuncGetAttributes(&attributes, kernel), name));
  *can = attributes.ptxVersion >= 90;  // code of compute_80 holds no wait, also where it runs on sm_90
  known.set(kernel, device, *can);
  return KDTREE_OK;
}
#endif

// A parameter that is not deduced from its argument.
template <typename T>
struct Given {
  using Type = T;
};

// Launches a kernel that waits on the device for what lies before it in the stream; whether it may start before that
// ends is for that to say.
template <typename... P>
kdtree_status launch_behind(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
                            cudaStream_t stream, typename Given<P>::Type... arguments) {
#ifdef KDTREE_HOST
  KDTREE_LAUNCH(kernel, grid, block, shared_bytes, stream, arguments...);
#else
  bool waits = false;
  KDTREE_RETURN_IF_FAILED(can_wait(reinterpret_cast<const void*>(kernel), name, &waits));
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = waits ? 1 : 0;
  KDTREE_RETURN_IF_FAILED(check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), name));
#endif
  return check_launch(name);
}

}  // namespace kdtree
