// What a run needs on the device: arrays of one shape, and the graph of a round on them.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <utility>

#include "kernels/stand_in.h"
#include "loop/budget_policy.h"
#include "loop/control.h"
#include "loop/host_heap.h"
#include "loop/round_graph.h"
#include "loop/stage_clock.h"
#include "model/memory.h"

namespace kdtree {

class Decoder;

// Copies host values into device memory that was planned for them.
template <typename T>
void upload(const T* place, const std::vector<T>& values) {
  copy_to_device(const_cast<T*>(place), values.data(), values.size() * sizeof(T));
}

template <typename T>
std::vector<T> download(const T* place, size_t count) {
  std::vector<T> values(count);
  if (count > 0)
    require_cuda(cudaMemcpy(values.data(), place, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return values;
}

// All that the launches of a round depend on, for one engine.
struct Shape {
  int method, requests;
  int depth, budget, width;  // L, B and K
  int stop_stride;           // most stop tokens of a request
  int longest;               // cache rows of the request that may use most
  bool dflash, stand_ins, sampled, policy, heap;

  bool operator==(const Shape& other) const;
  // The next larger one that graphs are made for, so that few serve many: the widest tree and the cache rows in steps,
  // no more than the engine's; a power of two of stop tokens.
  Shape bucket(int most_budget, int capacity, int vocab) const;
};

struct Buffers {
  Buffers(const Shape& shape, Decoder* decoder);  // planned; allocate() makes them
  Buffers(const Buffers&) = delete;
  ~Buffers();
  void allocate();

  const Shape shape;
  const int vocab;
  Arena arena;
  // Constant.
  int32_t *budgets, *capacities, *blocks, *stop_counts, *stop_tokens, *full_finish, *uses_dflash;
  int32_t *prompt_lengths, *top_k;
  float *temperatures, *top_p;
  uint64_t* seeds;
  StandIn* stand_ins;
  // State.
  int32_t *prefix, *root, *wanted, *finish, *told;
  // Of a round.
  int32_t *status, *depth_limits, *list_depths, *tree_budgets, *context, *rows_used, *observed, *observed_from;
  float *draft_logits, *lp, *logz;
  int32_t *ids, *node_count, *tokens, *parents, *depths, *ranks, *positions, *paths, *choices, *accepted, *path, *bonus;
  uint32_t* visibility;
  double* scores;
  float* logits;
  unsigned char* features;
  unsigned char *topk_workspace, *tree_workspace, *choice_workspace, *prompt_choice_workspace;
  size_t topk_bytes = 0, tree_bytes = 0, choice_bytes = 0, prompt_choice_bytes = 0;
  Record* records = nullptr;      // pinned
  double* host_scores = nullptr;  // pinned; for the policy
  // Of a prompt pass.
  int32_t *prompt_tokens, *prompt_positions, *last_positions, *ends, *prompt_choices, *first_roots;
  float* prompt_logits;
  unsigned char* prompt_features;

  Control control{};                  // of these arrays
  std::set<int> launched;             // budgets of which a round was, kernel by kernel
  std::unique_ptr<StageClock> clock;  // of rounds that are timed; its events are nodes of their graphs
  std::unique_ptr<HostHeap> heap;     // of runs whose trees the host builds
  std::map<std::pair<int, int>, std::unique_ptr<RoundGraph>> graphs;  // of (stage or kind of round, budget)
};

}  // namespace kdtree
