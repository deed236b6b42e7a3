// Trees of a round built on the host: its lists come down, the heap of common/heap_tree.cpp takes request after
// request, the trees go up. That is how a serving engine does it that builds its trees on the CPU; what the GPU's
// builder saves is measured against it.
#pragma once

#include <cstdint>
#include <vector>

#include "common/port.h"

namespace kdtree {

struct Buffers;

// Of the arrays of a run. Everything goes onto the stream, the heap as a host function, so that a graph can hold it.
class HostHeap {
 public:
  HostHeap(const Buffers& buffers, int vocab);  // which are allocated
  HostHeap(const HostHeap&) = delete;
  ~HostHeap();

  // In place of kdtree_tree_build, of checked lists: trees of at most `budget` nodes from lists `width` wide.
  void launch(int budget, int width, cudaStream_t stream);

 private:
  struct Call {
    HostHeap* heap;
    int budget, width;
  };
  static void run(void* call) noexcept;
  void build(int budget, int width);
  // Where the host has what lies in an array of the device.
  template <typename T>
  T* mirror(T* array) const;

  const Buffers& d_;
  const int vocab_;
  unsigned char* memory_ = nullptr;  // pinned
  std::vector<Call> calls_;          // by budget; graphs hold their addresses
  std::vector<uint64_t> workspace_;
  std::vector<int32_t> status_;  // of the heap's requests
};

}  // namespace kdtree
