// How long the device takes for the stages of a round: events on the stream in front of them, behind the commit, and
// behind what the drafter takes of it. Each is recorded when all in front of it has ended, and what lies behind it
// starts only then, so that no kernel overlaps one of another stage. In the host library, which runs what is launched
// at once: by the host's clock.
#pragma once

#include <chrono>

#include "kdtree_decode.h"
#include "model/memory.h"

namespace kdtree {

constexpr int kStageCount = KDTREE_STAGE_COMMIT + 1;
// Moments: a stage's number is when it begins.
constexpr int kCommitted = kStageCount, kObserved = kCommitted + 1, kMoments = kObserved + 1;

#ifdef KDTREE_HOST

class StageClock {
 public:
  void mark(int moment, cudaStream_t) { moments_[moment] = Clock::now(); }
  double seconds(int moment) const {
    return std::chrono::duration<double>(moments_[moment + 1] - moments_[moment]).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point moments_[kMoments];
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

  // Where the stream is captured, each replay records the event.
  void mark(int moment, cudaStream_t stream) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    require_cuda(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
    const unsigned how = capture == cudaStreamCaptureStatusNone ? cudaEventRecordDefault : cudaEventRecordExternal;
    require_cuda(cudaEventRecordWithFlags(events_[moment], stream, how), "cudaEventRecordWithFlags");
  }
  // From a moment to the next, once the stream has come there.
  double seconds(int moment) const {
    float milliseconds = 0;
    require_cuda(cudaEventElapsedTime(&milliseconds, events_[moment], events_[moment + 1]), "cudaEventElapsedTime");
    return 1e-3 * static_cast<double>(milliseconds);
  }

 private:
  cudaEvent_t events_[kMoments] = {};
};

#endif

}  // namespace kdtree
