#include <algorithm>
#include <cstring>

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
      calls_(static_cast<size_t>(buffers.shape.budget) + 1),
      workspace_(
          ceil_div(kdtree_heap_tree_workspace(buffers.shape.depth, buffers.shape.width, buffers.shape.budget), 8)),
      status_(3 * static_cast<size_t>(buffers.shape.requests)) {
  const size_t bytes = bytes_between(d_.root, d_.logz);
  require_cuda(cudaMallocHost(reinterpret_cast<void**>(&memory_), bytes), "cudaMallocHost");
  std::memset(memory_, 0, bytes);
}

HostHeap::~HostHeap() { (void)cudaFreeHost(memory_); }

template <typename T>
T* HostHeap::mirror(T* array) const {
  return reinterpret_cast<T*>(memory_ + bytes_between(d_.root, array));
}

void HostHeap::launch(int budget, int width, cudaStream_t stream) {
  Call& call = calls_.at(static_cast<size_t>(budget));
  call = {this, budget, width};
  const size_t lists = bytes_between(d_.root, d_.status + status_.size());
  require_cuda(cudaMemcpyAsync(memory_, d_.root, lists, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  require_cuda(cudaLaunchHostFunc(stream, run, &call), "cudaLaunchHostFunc");
  require_cuda(
      cudaMemcpyAsync(d_.status, mirror(d_.status), bytes_between(d_.status, d_.logz), cudaMemcpyHostToDevice, stream),
      "cudaMemcpyAsync");
}

void HostHeap::run(void* call) noexcept {
  const Call& c = *static_cast<const Call*>(call);
  c.heap->build(c.budget, c.width);
}

void HostHeap::build(int budget, int width) {
  const int requests = d_.shape.requests;
  int32_t *const depths = mirror(d_.list_depths), *const status = mirror(d_.status);
  for (int r = 0; r < requests; ++r)
    if (status[3 * r] != KDTREE_REQUEST_OK) depths[r] = 0;  // the root alone; its lists say nothing

  kdtree_heap_tree_args tree{};
  tree.struct_size = sizeof(tree);
  tree.requests = requests;
  tree.depth_limit = d_.shape.depth;
  tree.width = width;
  tree.budget = budget;
  tree.vocab_size = vocab_;
  tree.checked = 1;
  tree.lp = mirror(d_.lp);
  tree.ids = mirror(d_.ids);
  tree.root_tokens = mirror(d_.root);
  tree.prefix_lengths = mirror(d_.prefix);
  tree.depth_limits = depths;
  tree.budgets = mirror(d_.tree_budgets);
  tree.node_count = mirror(d_.node_count);
  tree.tokens = mirror(d_.tokens);
  tree.parents = mirror(d_.parents);
  tree.depths = mirror(d_.depths);
  tree.ranks = mirror(d_.ranks);
  tree.scores = mirror(d_.scores);
  tree.positions = mirror(d_.positions);
  tree.visibility = mirror(d_.visibility);
  tree.paths = mirror(d_.paths);
  tree.status = status_.data();
  tree.workspace = workspace_.data();
  tree.workspace_size = workspace_.size() * sizeof(uint64_t);
  const kdtree_heap_tree_result result = kdtree_heap_tree(&tree);
  if (result == KDTREE_HEAP_TREE_OK) return;  // sound lists: no request has another status than it came with
  for (int r = 0; r < requests; ++r) {
    tree.node_count[r] = 0;
    if (status[3 * r] == KDTREE_REQUEST_OK) status[3 * r] = KDTREE_REQUEST_OWN_SIZE;
  }
}

}  // namespace kdtree
