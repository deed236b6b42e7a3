#include <algorithm>

#include "kdtree_heap_tree.h"
#include "loop/buffers.h"
#include "loop/host_heap.h"

namespace kdtree {
namespace {

size_t bytes_between(const int32_t* begin, const void* end) {
  return static_cast<size_t>(static_cast<const unsigned char*>(end) - reinterpret_cast<const unsigned char*>(begin));
}

}  // namespace

HostHeap::HostHeap(const Buffers& buffers, int vocab)
    : d_(buffers),
      vocab_(vocab),
      workspace_(
          ceil_div(kdtree_heap_tree_workspace(buffers.shape.depth, buffers.shape.width, buffers.shape.budget), 8)),
      status_(3 * static_cast<size_t>(buffers.shape.requests)) {
  require_cuda(cudaMallocHost(reinterpret_cast<void**>(&memory_), bytes_between(d_.root, d_.logz)), "cudaMallocHost");
}

HostHeap::~HostHeap() { (void)cudaFreeHost(memory_); }

template <typename T>
T* HostHeap::here(T* array) const {
  return reinterpret_cast<T*>(memory_ + bytes_between(d_.root, array));
}

void HostHeap::launch(int budget, int width, cudaStream_t stream) {
  Call& call = calls_.insert({budget, {this, budget, width}}).first->second;
  const size_t lists = bytes_between(d_.root, d_.status + status_.size());
  require_cuda(cudaMemcpyAsync(memory_, d_.root, lists, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  require_cuda(cudaLaunchHostFunc(stream, run, &call), "cudaLaunchHostFunc");
  require_cuda(
      cudaMemcpyAsync(d_.status, here(d_.status), bytes_between(d_.status, d_.logz), cudaMemcpyHostToDevice, stream),
      "cudaMemcpyAsync");
}

void HostHeap::run(void* call) {
  const Call& c = *static_cast<const Call*>(call);
  c.heap->build(c.budget, c.width);
}

void HostHeap::build(int budget, int width) {
  const int requests = d_.shape.requests;
  int32_t *const depths = here(d_.list_depths), *const status = here(d_.status);
  for (int r = 0; r < requests; ++r)
    if (status[3 * r] != KDTREE_REQUEST_OK) depths[r] = 0;  // the root alone; its lists say nothing

  kdtree_heap_tree_args tree{};
  tree.struct_size = sizeof(tree);
  tree.requests = requests;
  tree.depth_limit = d_.shape.depth;
  tree.width = width;
  tree.budget = budget;
  tree.vocab_size = vocab_;
  tree.lp = here(d_.lp);
  tree.ids = here(d_.ids);
  tree.root_tokens = here(d_.root);
  tree.prefix_lengths = here(d_.prefix);
  tree.depth_limits = depths;
  tree.budgets = here(d_.tree_budgets);
  tree.node_count = here(d_.node_count);
  tree.tokens = here(d_.tokens);
  tree.parents = here(d_.parents);
  tree.depths = here(d_.depths);
  tree.ranks = here(d_.ranks);
  tree.scores = here(d_.scores);
  tree.positions = here(d_.positions);
  tree.visibility = here(d_.visibility);
  tree.paths = here(d_.paths);
  tree.status = status_.data();
  tree.workspace = workspace_.data();
  tree.workspace_size = workspace_.size() * sizeof(uint64_t);
  const kdtree_heap_tree_result result = kdtree_heap_tree(&tree);
  if (result != KDTREE_HEAP_TREE_OK && result != KDTREE_HEAP_TREE_REFUSED) refused_ = result;
  // Both number what is wrong with a list alike.
  for (int r = 0; r < requests; ++r)
    if (status[3 * r] == KDTREE_REQUEST_OK) std::copy_n(status_.begin() + 3 * r, 3, status + 3 * r);
}

void HostHeap::check() const {
  if (refused_ != 0)
    throw EngineFailure(KDTREE_SIZE,
                        "the host's tree builder refused a round: kdtree_heap_tree_result " + std::to_string(refused_));
}

}  // namespace kdtree
