#include <algorithm>

#include "loop/decoder.h"

namespace kdtree {
namespace {

constexpr int kDefaultPrefillRows = 256, kDefaultBlock = 16;
constexpr size_t kMostSpare = 16, kMostSpareBytes = size_t{1} << 30;

kdtree_decoder_args checked(kdtree_decoder_args args) {
  Arguments arguments("kdtree_decoder_create");
  arguments.range("max_requests", args.max_requests, 1, KDTREE_MAX_REQUESTS)
      .range("capacity", args.capacity, 1, INT32_MAX / 2)
      .range("max_budget", args.max_budget, 0, KDTREE_MAX_BUDGET)
      .range("block_size", args.block_size, 0, KDTREE_MAX_DEPTH + 1)
      .range("prefill_rows", args.prefill_rows, 0, 1 << 20)
      .range("cache_block_size", args.cache_block_size, 0, INT32_MAX)
      .range("gemm", args.gemm, 0, 1)
      .range("attention", args.attention, 0, 1)
      .range("dtype", args.dtype, KDTREE_F32, KDTREE_BF16)
      .range("cache_rows", args.cache_rows, KDTREE_CACHE_DTYPE, KDTREE_CACHE_FP8);
  require(arguments.status());
  if (args.prefill_rows == 0) args.prefill_rows = kDefaultPrefillRows;
  return args;
}

}  // namespace

Decoder::Decoder(const kdtree_decoder_args& args, const TensorMap& target, const TensorMap* drafter)
    : args_(checked(args)) {
  const OnDevice here(args_.device);
  std::vector<int> taps;
  if (drafter != nullptr) {
    const DrafterConfig config = DrafterConfig::read(*drafter);
    taps = config.target_layer_ids;
    if (args_.block_size == 0) args_.block_size = config.block_size;
  } else if (args_.block_size == 0) {
    args_.block_size = kDefaultBlock;
  }
  taps_ = taps.size();
  const Arithmetic arithmetic{static_cast<Gemm>(args_.gemm), static_cast<AttentionForm>(args_.attention),
                              static_cast<kdtree_dtype>(args_.dtype), static_cast<CacheRows>(args_.cache_rows)};
  const int widest = std::max({1 + args_.max_budget, args_.block_size, prompt_width()});
  const int64_t rows = static_cast<int64_t>(args_.max_requests) * widest;
  Arguments arguments("kdtree_decoder_create");
  require(arguments.range("rows of the largest pass", rows, 1, INT32_MAX).status());
  target_ = std::make_unique<Target>(target, static_cast<int>(rows), args_.capacity, std::move(taps), arithmetic);
  if (drafter != nullptr)
    drafter_ = std::make_unique<Drafter>(*drafter, *target_, args_.max_requests, args_.capacity,
                                         std::max(args_.block_size, prompt_width()), args_.block_size);

  const TargetConfig& c = target_->config();
  const int64_t requests = args_.max_requests, layers = c.num_hidden_layers;
  cache_.row_bytes = target_->row_bytes();
  cache_.row_stride = cache_.row_bytes;
  cache_.layers = c.num_hidden_layers;
  cache_.capacity = args_.capacity;
  int64_t rows_of_layer = requests * args_.capacity;
  if (args_.cache_block_size > 0) {
    const int64_t blocks = ceil_div(args_.capacity, args_.cache_block_size);
    rows_of_layer = requests * blocks * args_.cache_block_size;
    cache_.block_size = args_.cache_block_size;
    cache_.table_stride = static_cast<int32_t>(blocks);
    std::vector<int32_t> table(static_cast<size_t>(requests * blocks));
    for (size_t b = 0; b < table.size(); ++b) table[b] = static_cast<int32_t>(table.size() - 1 - b);
    table_memory_ = DeviceBuffer(table.size() * sizeof(int32_t));
    copy_to_device(table_memory_.data(), table.data(), table_memory_.bytes());
    cache_.block_table = reinterpret_cast<const int32_t*>(table_memory_.data());
  } else {
    cache_.request_stride = static_cast<int64_t>(args_.capacity) * cache_.row_stride;
  }
  cache_.layer_stride = rows_of_layer * cache_.row_stride;
  cache_memory_ = DeviceBuffer(static_cast<size_t>(layers * cache_.layer_stride));
  // Bits of a NaN, so that the use of a row never written shows.
  cache_memory_.fill(0xff);
  cache_.base = cache_memory_.data();
}

kdtree_decoder_info Decoder::info() const {
  const TargetConfig& c = target_->config();
  kdtree_decoder_info info{};
  info.struct_size = sizeof(info);
  info.vocab_size = c.vocab_size;
  info.hidden_size = c.hidden_size;
  info.layers = c.num_hidden_layers;
  info.block_size = args_.block_size;
  info.row_bytes = cache_.row_bytes;
  info.model_bytes = target_->weight_bytes() + (drafter_ ? drafter_->weight_bytes() : 0);
  info.scratch_bytes = target_->scratch_bytes() + (drafter_ ? drafter_->scratch_bytes() : 0);
  info.cache_bytes = cache_memory_.bytes() + table_memory_.bytes();
  info.dtype = args_.dtype;
  const bool products = target_->products_on_tensor_cores() && (!drafter_ || drafter_->products_on_tensor_cores());
  info.products_path = products ? KDTREE_PATH_TENSOR_CORES : KDTREE_PATH_GENERAL;
  const kdtree_attention_kernel attention = target_->attention_kernel();
  info.attention_path = attention == KDTREE_KERNEL_GENERAL ? KDTREE_PATH_GENERAL : KDTREE_PATH_TENSOR_CORES;
  info.graphs = graphs();
  info.cache_rows = args_.cache_rows;
  info.attention_kernel = attention;
  return info;
}

std::unique_ptr<Buffers> Decoder::take(const Shape& shape) {
  const auto found =
      std::find_if(spare_.begin(), spare_.end(), [&](const auto& spare) { return spare->shape == shape; });
  if (found != spare_.end()) {
    std::unique_ptr<Buffers> buffers = std::move(*found);
    spare_.erase(found);
    buffers->arena.clear();
    return buffers;
  }
  auto buffers = std::make_unique<Buffers>(shape, this);
  make_room(buffers->arena.bytes());
  buffers->allocate();
  return buffers;
}

void Decoder::give_back(std::unique_ptr<Buffers> buffers) {
  if (buffers->arena.bytes() > kMostSpareBytes) return;
  make_room(buffers->arena.bytes());
  spare_.push_back(std::move(buffers));
}

bool Decoder::drop_spare() {
  const bool any = !spare_.empty();
  spare_.clear();
  return any;
}

// For one more of so many bytes.
void Decoder::make_room(size_t bytes) {
  for (const auto& spare : spare_) bytes += spare->arena.bytes();
  while (!spare_.empty() && (spare_.size() >= kMostSpare || bytes > kMostSpareBytes)) {
    bytes -= spare_.front()->arena.bytes();
    spare_.erase(spare_.begin());
  }
}

}  // namespace kdtree
