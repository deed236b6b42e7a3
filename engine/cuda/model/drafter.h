// The DFlash drafter: fills a block of tokens in one pass, from the target's features of all committed positions.
// reference/dflash.py
#pragma once

#include <memory>

#include "model/target.h"

namespace kdtree {

class Drafter {
 public:
  // target: its embedding, head and arithmetic are shared, it must outlive the drafter. most_new_rows: rows of the
  // largest observe.
  Drafter(const TensorMap& tensors, const Target& target, int requests, int capacity, int most_new_rows,
          int block_size);
  ~Drafter();

  const DrafterConfig& config() const { return config_; }
  int block_size() const;
  size_t weight_bytes() const;   // on the device, tables included
  size_t scratch_bytes() const;  // planned for the largest pass
  bool products_on_tensor_cores() const;

  // Newly committed positions: for request r the rows path[r, 0..accepted[r]] of features [R, width, taps * hidden], of
  // the target's dtype, become context positions lengths[r].. . path [R, path_stride], accepted [R] (-1: nothing),
  // lengths [R], all on the device. path NULL: rows 0..accepted[r].
  void observe(const void* features, int width, const int32_t* path, int path_stride, const int32_t* accepted,
               const int32_t* lengths, int requests, cudaStream_t stream, Trace* trace = nullptr);

  // logits [R, block_size - 1, vocab_size] of the block that starts with roots[r] at position lengths[r] (= context
  // length). lengths -1: nothing to do for that request, its logits mean nothing.
  void propose(const int32_t* roots, const int32_t* lengths, float* logits, int requests, cudaStream_t stream,
               Trace* trace = nullptr);

 private:
  struct Body;  // what depends on the dtype
  template <typename T>
  class BodyOf;
  DrafterConfig config_;
  std::unique_ptr<Body> body_;
};

}  // namespace kdtree
