// How long the device takes for the stages of a round: events on the stream in front of them and behind the last. Each
// is recorded when all in front of it has ended, and what lies behind it starts only then, so that no kernel overlaps
// one of another stage. In the host library, which runs what is launched at once: by the host's clock.
#pragma once

#include <chrono>

#include "kdtree_decode.h"
#include "model/memory.h"

namespace kdtree {

constexpr int kStageCount = KDTREE_STAGE_COMMIT + 1;

#ifdef KDTREE_HOST

class StageClock {
 public:
  void mark(int moment, cudaStream_t) { moments_[moment] = Clock::now(); }
  double seconds(int stage) const {
    return std::chrono::duration<double>(moments_[stage + 1] - moments_[stage]).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point moments_[kStageCount + 1];
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

  // moment: the number of the stage that begins, or how many there are. Where the stream is captured, each replay
  // records the event.
  void mark(int moment, cudaStream_t stream) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    require_cuda(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
    const unsigned how = capture == cudaStreamCaptureStatusNone ? cudaEventRecordDefault : cudaEventRecordExternal;
    require_cuda(cudaEventRecordWithFlags(events_[moment], stream, how), "cudaEventRecordWithFlags");
  }
  // Of a stage, once the stream has come to its end.
  double seconds(int stage) const {
    float milliseconds = 0;
    require_cuda(cudaEventElapsedTime(&milliseconds, events_[stage], events_[stage + 1]), "cudaEventElapsedTime");
    return 1e-3 * static_cast<double>(milliseconds);
  }

 private:
  cudaEvent_t events_[kStageCount + 1] = {};
};

#endif

}  // namespace kdtree
