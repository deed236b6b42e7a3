// Static shared arrays are thread-local variables; before a block they hold what nothing has written.
#pragma once

#include <link.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "host/simt.h"

namespace kdtree::host {

// This OS thread's thread-local variables of the module that holds this code: the kernels' static shared arrays, and a
// few of the host code. They are set to all ones before a block, and put back after the launch.
class StaticShared {
 public:
  StaticShared() {
    current = nullptr;  // the block exists from its first use on
    dl_iterate_phdr(find, this);
    saved_.assign(begin_, begin_ + size_);
  }
  StaticShared(const StaticShared&) = delete;
  StaticShared& operator=(const StaticShared&) = delete;
  ~StaticShared() { std::memcpy(begin_, saved_.data(), size_); }

  void spoil() { std::memset(begin_, 0xff, size_); }

 private:
  static int find(dl_phdr_info* info, size_t, void* self) {
    const auto here = reinterpret_cast<uintptr_t>(&find);
    bool ours = false;
    size_t size = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& segment = info->dlpi_phdr[i];
      const uintptr_t start = info->dlpi_addr + segment.p_vaddr;
      if (segment.p_type == PT_LOAD && start <= here && here < start + segment.p_memsz) ours = true;
      if (segment.p_type == PT_TLS) size = segment.p_memsz;
    }
    if (!ours) return 0;
    auto* shared = static_cast<StaticShared*>(self);
    shared->begin_ = static_cast<unsigned char*>(info->dlpi_tls_data);
    shared->size_ = shared->begin_ == nullptr ? 0 : size;
    return 1;
  }

  unsigned char* begin_ = nullptr;
  size_t size_ = 0;
  std::vector<unsigned char> saved_;
};

}  // namespace kdtree::host
