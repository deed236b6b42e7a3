// What is once found out about a kernel on a device, because asking takes about as long as a launch.
#pragma once

#include <map>
#include <mutex>
#include <utility>

namespace kdtree {

// From any thread: those that both ask find out the same.
template <typename T>
class PerKernel {
 public:
  // Whether it is known; then it is in *value.
  bool find(const void* kernel, int device, T* value) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = values_.find({kernel, device});
    if (found == values_.end()) return false;
    *value = found->second;
    return true;
  }
  void set(const void* kernel, int device, T value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_[{kernel, device}] = value;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<const void*, int>, T> values_;
};

}  // namespace kdtree
