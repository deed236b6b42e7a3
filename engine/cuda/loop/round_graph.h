// What is launched on a stream, captured once as a CUDA graph and replayed.
#pragma once

#include <functional>

#include "model/memory.h"

namespace kdtree {

// Whether launches can be captured: not in the host library, and not where each is to wait for the device.
bool can_capture();

class RoundGraph {
 public:
  // `launches` is called once, with a stream that records; nothing runs. It must neither allocate nor wait.
  explicit RoundGraph(const std::function<void(cudaStream_t)>& launches);
  RoundGraph(const RoundGraph&) = delete;
  ~RoundGraph();

  void launch(cudaStream_t stream) const;

 private:
#ifndef KDTREE_HOST
  cudaGraphExec_t executable_ = nullptr;
#endif
};

}  // namespace kdtree
