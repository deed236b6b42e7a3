// The target: a DeepSeek-V3 / Kimi-K2 forward pass over the latent cache. Prefill, one token, a chain and a tree are
// the same call. reference/model.py
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/layers.h"
#include "model/config.h"
#include "model/memory.h"
#include "model/tensors.h"
#include "model/trace.h"

namespace kdtree {

// How the numbers are computed; the same for target and drafter.
struct Arithmetic {
  Gemm gemm = Gemm::kRowInvariant;
  AttentionForm attention = AttentionForm::kExact;
};

// What one pass reads and writes besides weights and scratch. All pointers are device memory of the caller.
struct TargetPass {
  Rows rows;
  kdtree_cache_view cache;  // rows of the pass are written at prefix..prefix+n of each request, nothing is committed
  bool last_rows_only;      // logits of each block's last used row alone (prefill): logits is [R, vocab_size]
  float* logits;            // [M, vocab_size] or [R, vocab_size]
  float* features;          // [M, taps * hidden] residual stream after each tapped layer; NULL without taps
};

class Target {
 public:
  // Checks names and shapes against the config (ModelError lists every fault) and copies the weights to the device as
  // float32. most_rows: M of the largest pass. capacity: cache rows of a request, bounds positions.
  Target(const TensorMap& tensors, int most_rows, int capacity, std::vector<int> taps, Arithmetic arithmetic);
  ~Target();

  const TargetConfig& config() const { return config_; }
  const float* embedding() const;  // [vocab_size, hidden]
  const float* head() const;       // [vocab_size, hidden]
  size_t weight_bytes() const;     // on the device, tables included
  size_t scratch_bytes() const;    // planned for the largest pass

  // Enqueues the pass; allocates nothing, waits for nothing unless `trace` is given (then each array is copied out
  // under the names of reference/model.py).
  void forward(const TargetPass& pass, cudaStream_t stream, Trace* trace = nullptr);

 private:
  struct Weights;
  struct Scratch;
  TargetConfig config_;
  std::unique_ptr<Weights> weights_;
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace kdtree
