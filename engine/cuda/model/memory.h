// Device memory with an owner, and a plan of many arrays in one allocation.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "common/error.h"

namespace kdtree {

// Any failure inside the engine; the C ABI turns it into its status and message.
class EngineFailure : public std::runtime_error {
 public:
  EngineFailure(kdtree_status status, const std::string& what) : std::runtime_error(what), status(status) {}
  kdtree_status status;
};

// Throws EngineFailure with the thread's message if `status` is not KDTREE_OK.
inline void require(kdtree_status status) {
  if (status != KDTREE_OK) throw EngineFailure(status, kdtree_last_error());
}
inline void require_cuda(cudaError_t error, const char* what) { require(check_cuda(error, what)); }

// Copies host memory to the device; done when the call returns. cudaMemcpy alone has then only read what is not pinned,
// and a stream that does not wait for the default one could come before it.
inline void copy_to_device(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  require_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  require_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

// A device is the thread's current one as long as this lives: calls come from any thread, with any device current.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    require_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    changed_ = before_ != device;
    if (changed_) require_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() {
    if (changed_) (void)cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

// One allocation. Moves, never copies.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t bytes) : bytes_(bytes) {
    if (bytes > 0) require_cuda(cudaMalloc(&data_, bytes), "cudaMalloc");
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr;
    other.bytes_ = 0;
  }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    if (this != &other) {
      (void)cudaFree(data_);
      data_ = other.data_;
      bytes_ = other.bytes_;
      other.data_ = nullptr;
      other.bytes_ = 0;
    }
    return *this;
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { (void)cudaFree(data_); }

  unsigned char* data() const { return static_cast<unsigned char*>(data_); }
  size_t bytes() const { return bytes_; }
  // Every byte; done when the call returns, so that no stream can come before it.
  void fill(int value) {
    if (bytes_ == 0) return;
    require_cuda(cudaMemset(data_, value, bytes_), "cudaMemset");
    require_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Arrays are planned first, each 256-aligned, then allocated together: nothing is allocated while rounds run.
class Arena {
 public:
  template <typename T>
  void plan(T** array, size_t elements) {
    slots_.push_back({reinterpret_cast<void**>(const_cast<std::remove_const_t<T>**>(array)), total_});
    total_ = round_up(total_ + elements * sizeof(T), 256);
  }
  // Allocates, fills every planned pointer, and clears the memory so that nothing read before it is written is
  // undefined.
  void allocate() {
    buffer_ = DeviceBuffer(total_);
    buffer_.fill(0);
    for (const Slot& slot : slots_) *slot.array = buffer_.data() + slot.offset;
  }
  void clear() { buffer_.fill(0); }
  size_t bytes() const { return total_; }

 private:
  struct Slot {
    void** array;
    size_t offset;
  };
  std::vector<Slot> slots_;
  size_t total_ = 0;
  DeviceBuffer buffer_;
};

}  // namespace kdtree
