// How long the device takes for what is launched on a stream, between two events. That holds the start of a graph, or
// the waits for the host between single launches, but neither the launch in front nor the wait behind. In the host
// library, which runs what is launched at once: by the host's clock.
#pragma once

#include <chrono>

#include "model/memory.h"

namespace kdtree {

#ifdef KDTREE_HOST

class StageClock {
 public:
  void start(cudaStream_t) { start_ = Clock::now(); }
  void stop(cudaStream_t) { stop_ = Clock::now(); }
  double seconds() const { return std::chrono::duration<double>(stop_ - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_, stop_;
};

#else

class StageClock {
 public:
  StageClock() {
    for (cudaEvent_t& event : events_) require_cuda(cudaEventCreate(&event), "cudaEventCreate");
  }
  StageClock(const StageClock&) = delete;
  ~StageClock() {
    for (const cudaEvent_t event : events_) (void)cudaEventDestroy(event);
  }

  void start(cudaStream_t stream) { require_cuda(cudaEventRecord(events_[0], stream), "cudaEventRecord"); }
  void stop(cudaStream_t stream) { require_cuda(cudaEventRecord(events_[1], stream), "cudaEventRecord"); }
  // Once the stream has come to the second event.
  double seconds() const {
    float milliseconds = 0;
    require_cuda(cudaEventElapsedTime(&milliseconds, events_[0], events_[1]), "cudaEventElapsedTime");
    return 1e-3 * static_cast<double>(milliseconds);
  }

 private:
  cudaEvent_t events_[2] = {};
};

#endif

}  // namespace kdtree
