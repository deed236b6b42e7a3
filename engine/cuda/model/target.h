// The target: a DeepSeek-V3 / Kimi-K2 forward pass over the latent cache. Prefill, one token, a chain and a tree are
// the same call. reference/model.py
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kdtree_decode.h"
#include "kernels/attention.h"
#include "kernels/layers.h"
#include "model/config.h"
#include "model/memory.h"
#include "model/tensors.h"
#include "model/trace.h"

namespace kdtree {

// How the numbers are computed; the same for target and drafter. dtype: of weights, activations and caches, but for the
// target's where cache_rows says otherwise. In bf16 the router, the statistics of norms, rotations, softmax and all
// sums are float32, as published, and so are the logits.
struct Arithmetic {
  Gemm gemm = Gemm::kRowInvariant;
  AttentionForm attention = AttentionForm::kExact;
  kdtree_dtype dtype = KDTREE_F32;
  CacheRows cache_rows = CacheRows::kPlain;

  size_t element() const { return dtype == KDTREE_BF16 ? sizeof(uint16_t) : sizeof(float); }  // bytes
};

// What one pass reads and writes besides weights and scratch. All pointers are device memory of the caller.
struct TargetPass {
  Rows rows;
  kdtree_cache_view cache;  // rows of the pass are written at prefix..prefix+n of each request, nothing is committed
  int longest;              // the most keys that any row may have; changes no bit, but how attention is cut
  bool last_rows_only;      // logits of each block's last used row alone (prefill): logits is [R, vocab_size]
  float* logits;            // [M, vocab_size] or [R, vocab_size]
  void* features;  // [M, taps * hidden] of the dtype: residual stream after each tapped layer; NULL without taps
};

class Target {
 public:
  // Checks names and shapes against the config (ModelError lists every fault) and copies the weights to the device. A
  // ModelError as well where the cache's rows do not fit.
  // most_rows: M of the largest pass. capacity: cache rows of a request, bounds positions.
  Target(const TensorMap& tensors, int most_rows, int capacity, std::vector<int> taps, Arithmetic arithmetic);
  ~Target();

  const TargetConfig& config() const { return config_; }
  Arithmetic arithmetic() const { return arithmetic_; }
  const void* embedding() const;  // [vocab_size, hidden] of the dtype
  const void* head() const;       // [vocab_size, hidden] of the dtype
  size_t weight_bytes() const;    // on the device, tables included
  size_t scratch_bytes() const;   // planned for the largest pass
  bool products_on_tensor_cores() const;
  kdtree_attention_kernel attention_kernel() const;  // of the exact form
  int32_t row_bytes() const;                         // of the cache

  // Enqueues the pass; allocates nothing, waits for nothing unless `trace` is given (then each array is copied out
  // under the names of reference/model.py).
  void forward(const TargetPass& pass, cudaStream_t stream, Trace* trace = nullptr);

 private:
  struct Body;  // what depends on the dtype
  template <typename T>
  class BodyOf;
  TargetConfig config_;
  Arithmetic arithmetic_;
  std::unique_ptr<Body> body_;
};

}  // namespace kdtree
