#include "loop/round_graph.h"

namespace kdtree {

#ifdef KDTREE_HOST

bool can_capture() { return false; }
RoundGraph::RoundGraph(const std::function<void(cudaStream_t)>&) {
  throw EngineFailure(KDTREE_UNSUPPORTED, "kernels executed on the CPU cannot be captured");
}
RoundGraph::~RoundGraph() = default;
void RoundGraph::launch(cudaStream_t) const {}

#else

namespace {

// A stream of its own: the default one cannot be captured.
class Recording {
 public:
  Recording() {
    require_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    const cudaError_t begun = cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal);
    if (begun != cudaSuccess) (void)cudaStreamDestroy(stream_);
    require_cuda(begun, "cudaStreamBeginCapture");
  }
  Recording(const Recording&) = delete;
  ~Recording() {
    if (!ended_) {
      (void)end();               // a launch failed
      (void)cudaGetLastError();  // or the next launch's check would report this call's error again
    }
    if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
    (void)cudaStreamDestroy(stream_);
  }
  cudaStream_t stream() const { return stream_; }
  cudaGraph_t graph() {
    require_cuda(end(), "cudaStreamEndCapture");
    return graph_;
  }

 private:
  cudaError_t end() {
    ended_ = true;
    return cudaStreamEndCapture(stream_, &graph_);
  }

  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  bool ended_ = false;
};

}  // namespace

bool can_capture() { return !launches_wait(); }

RoundGraph::RoundGraph(const std::function<void(cudaStream_t)>& launches) {
  Recording recording;
  launches(recording.stream());
  require_cuda(cudaGraphInstantiate(&executable_, recording.graph(), 0), "cudaGraphInstantiate");
}

RoundGraph::~RoundGraph() { (void)cudaGraphExecDestroy(executable_); }

void RoundGraph::launch(cudaStream_t stream) const {
  require_cuda(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch");
}

#endif

}  // namespace kdtree
