// How benches take times.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "tests/check.h"

namespace bench {

struct Event {
  cudaEvent_t event;
  Event() { CHECK_CUDA(cudaEventCreate(&event)); }
  ~Event() { (void)cudaEventDestroy(event); }
};

// Device time of one call in microseconds: the median over `replays` of a graph of `calls` of them; call(i, stream) is
// the i-th.
inline double microseconds(int calls, int replays, const std::function<void(int, cudaStream_t)>& call) {
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  call(0, stream);  // what is loaded at the first call is loaded now
  CHECK_CUDA(cudaStreamSynchronize(stream));
  const auto all = [&] {
    for (int i = 0; i < calls; ++i) call(i, stream);
  };
#ifndef KDTREE_HOST
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  all();
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&replay, graph, 0));
#endif
  const Event first, last;
  std::vector<double> times;
  for (int i = 0; i < replays; ++i) {
    CHECK_CUDA(cudaEventRecord(first.event, stream));
#ifdef KDTREE_HOST
    all();
#else
    CHECK_CUDA(cudaGraphLaunch(replay, stream));
#endif
    CHECK_CUDA(cudaEventRecord(last.event, stream));
    CHECK_CUDA(cudaEventSynchronize(last.event));
    float milliseconds = 0;
    CHECK_CUDA(cudaEventElapsedTime(&milliseconds, first.event, last.event));
    times.push_back(1000.0 * milliseconds / calls);
  }
#ifndef KDTREE_HOST
  CHECK_CUDA(cudaGraphExecDestroy(replay));
  CHECK_CUDA(cudaGraphDestroy(graph));
#endif
  CHECK_CUDA(cudaStreamDestroy(stream));
  std::nth_element(times.begin(), times.begin() + replays / 2, times.end());
  return times[static_cast<size_t>(replays / 2)];
}

}  // namespace bench
