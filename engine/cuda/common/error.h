// The thread's message, and the checks that every call of the C ABI makes before it launches.
#pragma once

#include "common/port.h"
#include "kdtree_engine.h"

namespace kdtree {

// Sets the message that kdtree_last_error returns, and returns `status`.
__attribute__((format(printf, 2, 3))) kdtree_status fail(kdtree_status status, const char* format, ...);

// Clears the message.
kdtree_status succeed();

// KDTREE_CUDA with the error's name if `error` is one. what: the call or kernel.
kdtree_status check_cuda(cudaError_t error, const char* what);

// For right after a launch. Kernels run on while the host does, so their errors are found by a later call; if the
// environment says KDTREE_LAUNCH_BLOCKING=1 every launch waits for the device, and an error names its own kernel.
kdtree_status check_launch(const char* kernel);
// Whether it says so.
bool launches_wait();

// Checks of a call's arguments, in order; the first that fails stays.
class Arguments {
 public:
  explicit Arguments(const char* call) : call_(call) { succeed(); }

  Arguments& version(size_t given, size_t expected);
  Arguments& range(const char* name, int64_t value, int64_t least, int64_t most);
  // `needed`: NULL is refused. An array that is there must be aligned.
  Arguments& array(const char* name, const void* pointer, size_t alignment, bool needed = true);
  Arguments& workspace(const void* pointer, size_t given, size_t needed);

  bool failed() const { return status_ != KDTREE_OK; }
  kdtree_status status() const { return status_; }

 private:
  const char* call_;
  kdtree_status status_ = KDTREE_OK;
};

// Shared memory a block of the current device may ask for, in bytes, static included; 0 and a message on an error.
size_t shared_memory_optin();

// Lets `kernel`, which has `static_bytes` of shared memory besides, use `dynamic_bytes` of it and more, on the current
// device. KDTREE_UNSUPPORTED with needed and available bytes if the device has too little.
kdtree_status allow_shared_memory(const void* kernel, const char* name, size_t dynamic_bytes, size_t static_bytes = 0);

#define KDTREE_RETURN_IF_FAILED(call)                         \
  do {                                                        \
    if (const kdtree_status status_ = (call)) return status_; \
  } while (0)

}  // namespace kdtree
