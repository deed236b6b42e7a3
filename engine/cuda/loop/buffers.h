// What a run keeps on the device.
#pragma once

#include "loop/run.h"

namespace kdtree {

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

struct Run::Buffers {
  Arena arena;
  std::vector<Arena> stand_in_arenas;
  // Constant.
  int32_t *budgets, *capacities, *blocks, *stop_counts, *stop_tokens, *full_finish, *uses_dflash;
  int32_t *prompts, *prompt_lengths, *top_k;
  float *temperatures, *top_p;
  uint64_t* seeds;
  StandIn* stand_ins;
  bool sampled = false;
  int prompt_stride = 1, stop_stride = 1;
  // State.
  int32_t *prefix, *root, *wanted, *finish;
  // Of a round.
  int32_t *status, *depth_limits, *list_depths, *tree_budgets, *context, *rows_used, *kept, *observed;
  float *draft_logits, *lp, *logz;
  int32_t *ids, *node_count, *tokens, *parents, *depths, *ranks, *positions, *paths, *choices, *accepted, *path, *bonus;
  uint32_t* visibility;
  double* scores;
  float* logits;
  unsigned char* features;
  unsigned char *topk_workspace, *tree_workspace, *choice_workspace, *prompt_choice_workspace;
  size_t topk_bytes, tree_bytes, choice_bytes, prompt_choice_bytes;
  Record* records;
  Record* host_records = nullptr;  // pinned
  // Of a prompt pass.
  int32_t *prompt_tokens, *prompt_positions, *last_positions, *ends, *prompt_choices, *first_roots;
  float* prompt_logits;
  unsigned char* prompt_features;

  ~Buffers() {
    if (host_records != nullptr) (void)cudaFreeHost(host_records);
  }
};

}  // namespace kdtree
