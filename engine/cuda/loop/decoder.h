// An engine: target, drafter, and the caches of its requests on one device.
#pragma once

#include <memory>
#include <vector>

#include "kdtree_decode.h"
#include "loop/buffers.h"
#include "model/drafter.h"
#include "model/target.h"

namespace kdtree {

class Decoder {
 public:
  Decoder(const kdtree_decoder_args& args, const TensorMap& target, const TensorMap* drafter);

  const kdtree_decoder_args& args() const { return args_; }
  Target& target() { return *target_; }
  Drafter* drafter() { return drafter_.get(); }  // NULL: none
  const kdtree_cache_view& cache() const { return cache_; }
  int vocab_size() const { return target_->config().vocab_size; }
  size_t feature_bytes() const {  // of a row
    return taps_ * static_cast<size_t>(target_->config().hidden_size) * target_->arithmetic().element();
  }
  int most_depth() const { return args_.block_size - 1; }
  // Prompt rows of each request in one pass.
  int prompt_width() const { return std::max(args_.prefill_rows / args_.max_requests, 1); }
  bool graphs() const { return can_capture() && target_->arithmetic().gemm != Gemm::kCublas; }
  kdtree_decoder_info info() const;

  // Arrays of a shape, cleared: some that were given back, with their graph, or new ones.
  std::unique_ptr<Buffers> take(const Shape& shape);
  void give_back(std::unique_ptr<Buffers> buffers);
  bool drop_spare();  // whether there were any

  bool busy = false;  // a run exists

 private:
  void make_room(size_t bytes);

  kdtree_decoder_args args_;  // defaults filled in
  size_t taps_ = 0;
  std::unique_ptr<Target> target_;
  std::unique_ptr<Drafter> drafter_;
  DeviceBuffer cache_memory_, table_memory_;
  kdtree_cache_view cache_{};
  std::vector<std::unique_ptr<Buffers>> spare_;  // of the last runs, the latest at the end
};

}  // namespace kdtree
