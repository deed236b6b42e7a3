#include <algorithm>

#include "kernels/fp8_row.h"
#include "model/target.h"
#include "model/target_scratch.h"
#include "model/target_weights.h"

namespace kdtree {
namespace {

// y[r, :] = x[last used row of block r, :]; zeros for a block without rows.
template <typename T>
__global__ void last_rows_kernel(const T* x, const int32_t* node_count, T* y, int width, int hidden) {
  const int request = static_cast<int>(blockIdx.x), last = node_count[request];
  for (int i = threadIdx.x; i < hidden; i += blockDim.x)
    y[static_cast<int64_t>(request) * hidden + i] =
        last < 0 ? T{0} : x[(static_cast<int64_t>(request) * width + last) * hidden + i];
}

bool attention_fits(const TargetConfig& c) {
  const int heads = c.num_attention_heads;
  return c.kv_lora_rank == 512 && c.qk_rope_head_dim == 64 && c.qk_nope_head_dim % 2 == 0 &&
         (heads == 16 || heads == 32 || heads == 64 || heads == 128);
}

template <typename T>
bool products_fit(const TargetConfig& c) {
  const int64_t query = c.qk_nope_head_dim + c.qk_rope_head_dim, heads = c.num_attention_heads;
  const bool dense = c.first_k_dense_replace > 0, mixture = c.first_k_dense_replace < c.num_hidden_layers;
  return fit_tensor_cores<T>({c.hidden_size, c.q_lora_rank, query, c.qk_nope_head_dim, c.kv_lora_rank,
                              c.qk_rope_head_dim, heads * c.v_head_dim, dense ? c.intermediate_size : 0,
                              mixture ? c.moe_intermediate_size : 0});
}

// Of those on tensor cores, on this device.
kdtree_attention_kernel kernel_of(const TargetConfig& c, const Arithmetic& arithmetic) {
  MlaAttentionBf16Args pass{};
  pass.cache_rows = arithmetic.cache_rows;
  pass.scale = static_cast<float>(c.softmax_scale);
  return mla_attention_bf16_path(pass) == AttentionPath::kWgmma ? KDTREE_KERNEL_WGMMA : KDTREE_KERNEL_MMA;
}

// Throws ModelError unless the cache can keep its rows so.
void check_cache_rows(const TargetConfig& c, const Arithmetic& arithmetic) {
  if (arithmetic.cache_rows == CacheRows::kPlain) return;
  if (arithmetic.dtype != KDTREE_BF16) throw ModelError("an fp8 cache holds rows of bf16, and the dtype is float32");
  if (c.kv_lora_rank != Fp8Row::kLatent || c.qk_rope_head_dim != Fp8Row::kRope)
    throw ModelError("an fp8 cache holds rows of 512 + 64 values, and the model's have " +
                     std::to_string(c.kv_lora_rank) + " + " + std::to_string(c.qk_rope_head_dim));
}

// One pass: the state that its steps share, and a line for each operation.
template <typename T>
struct Pass {
  const TargetConfig& c;
  const TargetPass& in;
  cudaStream_t stream;
  Trace* trace;
  Products products;
  int rows = in.rows.count();

  template <typename Y>
  void project(const T* x, const T* w, Y* y, int out, int width) const {
    multiply(products, x, w, y, rows, out, width, stream);
  }
  // Each head's own product: x [rows, heads, ...] with x_head between heads.
  void project_heads(const T* x, int64_t x_stride, int64_t x_head, const T* w, T* y, int out, int width) const {
    const int heads = c.num_attention_heads;
    multiply(products,
             Product<T, T>{x, x_stride, x_head, w, static_cast<int64_t>(out) * width, y,
                           static_cast<int64_t>(heads) * out, out, rows, out, width, heads},
             stream);
  }
  void feed(const T* x, const SwigluWeights<T>& w, int width, T* both, T* act, T* y) const {
    project(x, w.gate_up, both, 2 * width, c.hidden_size);
    require(swiglu(SwigluArgs<T>{both, act, rows, width}, stream));
    project(act, w.down, y, c.hidden_size, width);
  }
  template <typename Y>
  void note(const std::string& name, const Y* array, int width) const {
    if (trace != nullptr) trace->add(name, array, rows, width, width, {rows, width}, stream);
  }
  void note_heads(const std::string& name, const T* array, int width, int64_t stride) const {
    const int heads = c.num_attention_heads;
    if (trace != nullptr)
      trace->add(name, array, static_cast<int64_t>(rows) * heads, width, stride, {rows, heads, width}, stream);
  }
  void note_part(const std::string& name, const T* array, int width, int64_t stride) const {
    if (trace != nullptr) trace->add(name, array, rows, width, stride, {rows, width}, stream);
  }
};

}  // namespace

struct Target::Body {
  virtual ~Body() = default;
  virtual void forward(const TargetPass& pass, cudaStream_t stream, Trace* trace) const = 0;

  const void *embedding, *head;
  size_t weight_bytes, scratch_bytes;
  bool products_fit;  // tensor cores
  kdtree_attention_kernel attention_kernel;
};

template <typename T>
class Target::BodyOf final : public Target::Body {
 public:
  BodyOf(const TensorMap& tensors, const TargetConfig& c, int most_rows, int capacity, std::vector<int> taps,
         Arithmetic arithmetic)
      : c_(c),
        most_rows_(most_rows),
        taps_(std::move(taps)),
        form_(arithmetic.attention),
        cache_rows_(arithmetic.cache_rows),
        products_{arithmetic.gemm, kdtree::products_fit<T>(c)},
        w_(tensors, c, capacity),
        s_(c, most_rows, capacity, products_.tensor_cores, bf16_attention(),
           !bf16_attention() || form_ == AttentionForm::kMask) {
    embedding = w_.embedding;
    head = w_.head;
    weight_bytes = w_.store.bytes();
    scratch_bytes = s_.arena.bytes();
    products_fit = products_.tensor_cores;
    attention_kernel = bf16_attention() ? kernel_of(c, arithmetic) : KDTREE_KERNEL_GENERAL;
  }

  void forward(const TargetPass& pass, cudaStream_t stream, Trace* trace) const override;

 private:
  bool bf16_attention() const { return kNarrow<T> && attention_fits(c_); }
  void attend(const TargetPass& pass, int layer, cudaStream_t stream) const;
  // What a block gives to the residual stream: their sum, if there are two.
  struct Given {
    const T *added = nullptr, *also = nullptr;
  };
  void norm_stream(const Pass<T>& p, const Given& given, const T* weight, float* wide = nullptr) const;
  void project_down(const Pass<T>& p, const TargetLayer<T>& layer, int index) const;
  Given mix(const Pass<T>& p, const TargetLayer<T>& layer, const std::string& at) const;
  void end_layer(const Pass<T>& p, int index) const;

  const TargetConfig& c_;
  int most_rows_;
  std::vector<int> taps_;
  AttentionForm form_;
  CacheRows cache_rows_;
  Products products_;
  TargetWeights<T> w_;
  TargetScratch<T> s_;
};

// The stream takes what was given to it, and its norm goes to `normed`.
template <typename T>
void Target::BodyOf<T>::norm_stream(const Pass<T>& p, const Given& given, const T* weight, float* wide) const {
  const int hidden = c_.hidden_size;
  require(rms_norm(RmsNormArgs<T>{s_.x, hidden, weight, s_.normed, hidden, p.rows, hidden,
                                  static_cast<float>(c_.rms_norm_eps), wide, given.added, given.also, s_.x},
                   p.stream));
}

// From `normed` to queries, rotated, in q, and to cache rows, in place behind `down`'s first columns.
template <typename T>
void Target::BodyOf<T>::project_down(const Pass<T>& p, const TargetLayer<T>& layer, int index) const {
  const int hidden = c_.hidden_size, heads = c_.num_attention_heads, lora = c_.q_lora_rank;
  const int rank = c_.kv_lora_rank, rope_width = c_.qk_rope_head_dim, row = rank + rope_width;
  const int query = c_.qk_nope_head_dim + rope_width;
  const float eps = static_cast<float>(c_.latent_norm_eps);
  if (lora > 0) {
    p.project(s_.normed, layer.q_a, s_.down, lora + row, hidden);
    require(rms_norm(RmsNormArgs<T>{s_.down, lora + row, layer.q_a_norm, s_.down, lora + row, p.rows, lora, eps},
                     p.stream));
    multiply(products_,
             Product<T, T>{s_.down, lora + row, 0, layer.q, 0, s_.q, heads * query, 0, p.rows, heads * query, lora, 1},
             p.stream);
  } else {
    p.project(s_.normed, layer.q, s_.q, heads * query, hidden);
    p.project(s_.normed, layer.kv_a, s_.down, row, hidden);
  }
  LatentArgs<T> rows{p.in.rows,  s_.down + lora, lora + row, layer.kv_a_norm, w_.cos, w_.sin,
                     p.in.cache, index,          rank,       rope_width,      eps,    c_.rope_layout};
  rows.cache_rows = cache_rows_;
  rows.queries = s_.q + c_.qk_nope_head_dim;
  rows.query_stride = static_cast<int64_t>(heads) * query;
  rows.head_stride = query;
  rows.heads = heads;
  require(latents(rows, p.stream));
}

// Queries in q_latent and q, results in attn_latent.
template <typename T>
void Target::BodyOf<T>::attend(const TargetPass& pass, int layer, cudaStream_t stream) const {
  const int heads = c_.num_attention_heads, rank = c_.kv_lora_rank, nope = c_.qk_nope_head_dim;
  const int query = nope + c_.qk_rope_head_dim;
  const auto common = [&](auto* a) {
    a->rows = pass.rows;
    a->q_latent = s_.q_latent;
    a->q_latent_stride = static_cast<int64_t>(heads) * rank;
    a->q_latent_head = rank;
    a->q_rope = s_.q + nope;
    a->q_rope_stride = static_cast<int64_t>(heads) * query;
    a->q_rope_head = query;
    a->cache = pass.cache;
    a->cache_rows = cache_rows_;
    a->layer = layer;
    a->out = s_.attn_latent;
    a->heads = heads;
    a->scale = static_cast<float>(c_.softmax_scale);
    a->longest = pass.longest;
    a->workspace = s_.attention_bytes > 0 ? s_.attention_workspace : nullptr;
    a->workspace_size = s_.attention_bytes;
  };
  // A prompt has no mask: its rows are a chain.
  const AttentionForm form = pass.rows.visibility != nullptr ? form_ : AttentionForm::kExact;
  if constexpr (kNarrow<T>) {
    if (bf16_attention() && form == AttentionForm::kExact) {
      MlaAttentionBf16Args attention{};
      common(&attention);
      require(mla_attention_bf16(attention, stream));
      return;
    }
  }
  MlaAttentionArgs<T> attention{};
  common(&attention);
  attention.form = form;
  attention.rank = rank;
  attention.rope = c_.qk_rope_head_dim;
  require(mla_attention(attention, stream));
}

// The experts of `normed`: the routed ones to `routed`, the shared one to `out`.
template <typename T>
typename Target::BodyOf<T>::Given Target::BodyOf<T>::mix(const Pass<T>& p, const TargetLayer<T>& layer,
                                                         const std::string& at) const {
  const int hidden = c_.hidden_size, chosen = c_.num_experts_per_tok, count = c_.n_routed_experts;
  const float* wide = s_.wide;
  if constexpr (!kNarrow<T>) wide = s_.normed;
  multiply(products_, wide, layer.router, s_.router_logits, p.rows, count, hidden, p.stream);
  require(router({s_.router_logits, layer.bias, s_.router_scores, s_.expert_ids, s_.expert_weights, p.rows, count,
                  chosen, c_.n_group, c_.topk_group, c_.norm_topk_prob, static_cast<float>(c_.routed_scaling_factor)},
                 p.stream));
  const auto fill = [&](auto* a) {
    a->x = s_.normed;
    a->gate_up = layer.gate_up();
    a->down = layer.down();
    a->ids = s_.expert_ids;
    a->weights = s_.expert_weights;
    a->rows_used = &p.in.rows;
    a->y = s_.routed;
    a->rows = p.rows;
    a->hidden = hidden;
    a->width = c_.moe_intermediate_size;
    a->experts = count;
    a->chosen = chosen;
    a->workspace = s_.experts_workspace;
    a->workspace_size = s_.experts_bytes;
  };
  if (products_.tensor_cores) {
    if constexpr (kNarrow<T>) {
      ExpertsBf16Args a{};
      fill(&a);
      require(experts_bf16(a, p.stream));
    }
  } else {
    ExpertsArgs<T> a{};
    fill(&a);
    require(experts(a, p.stream));
  }
  p.feed(s_.normed, layer.mlp, c_.moe_intermediate_size * c_.n_shared_experts, s_.both, s_.act, s_.out);
  p.note(at + "router_scores", s_.router_scores, count);
  p.note(at + "expert_ids", s_.expert_ids, chosen);
  p.note(at + "expert_weights", s_.expert_weights, chosen);
  p.note(at + "routed_out", s_.routed, hidden);
  p.note(at + "shared_out", s_.out, hidden);
  if (p.trace == nullptr) return {s_.out, s_.routed};
  // The same sum, where it can be seen.
  require(add(s_.routed, s_.out, s_.out, static_cast<int64_t>(p.rows) * hidden, p.stream));
  return {s_.out};
}

// Once the stream has taken what the layer gave.
template <typename T>
void Target::BodyOf<T>::end_layer(const Pass<T>& p, int index) const {
  const int hidden = c_.hidden_size;
  p.note("layers." + std::to_string(index) + "/hidden", s_.x, hidden);
  const auto tap = std::find(taps_.begin(), taps_.end(), index);
  if (tap == taps_.end() || p.in.features == nullptr) return;
  const int64_t taps = static_cast<int64_t>(taps_.size()), place = tap - taps_.begin();
  T* const features = static_cast<T*>(p.in.features) + place * hidden;
  require(copy_rows(CopyRowsArgs<T>{s_.x, hidden, features, taps * hidden, p.rows, hidden}, p.stream));
}

template <typename T>
void Target::BodyOf<T>::forward(const TargetPass& pass, cudaStream_t stream, Trace* trace) const {
  const int hidden = c_.hidden_size, heads = c_.num_attention_heads, rank = c_.kv_lora_rank;
  const int nope = c_.qk_nope_head_dim, rope_width = c_.qk_rope_head_dim, query = nope + rope_width;
  if (pass.rows.count() > most_rows_)
    throw EngineFailure(KDTREE_SIZE, "a pass of " + std::to_string(pass.rows.count()) + " rows, planned for " +
                                         std::to_string(most_rows_));
  const Pass<T> p{c_, pass, stream, trace, products_};
  const int64_t kv_stride = c_.q_lora_rank + rank + rope_width;
  const T* const kv = s_.down + c_.q_lora_rank;

  require(embed(EmbedArgs<T>{pass.rows, w_.embedding, s_.x, hidden}, stream));
  p.note("embedding", s_.x, hidden);
  Given given;
  for (int index = 0; index < c_.num_hidden_layers; ++index) {
    const TargetLayer<T>& layer = w_.layers[static_cast<size_t>(index)];
    const std::string at = "layers." + std::to_string(index) + "/";

    norm_stream(p, given, layer.input_norm);
    if (index > 0) end_layer(p, index - 1);
    p.note(at + "attn_norm", s_.normed, hidden);
    project_down(p, layer, index);
    p.project_heads(s_.q, static_cast<int64_t>(heads) * query, query, layer.w_uk, s_.q_latent, rank, nope);
    attend(pass, index, stream);
    p.project_heads(s_.attn_latent, static_cast<int64_t>(heads) * rank, rank, layer.w_uv, s_.heads, c_.v_head_dim,
                    rank);
    p.project(s_.heads, layer.o, s_.out, hidden, heads * c_.v_head_dim);
    p.note_heads(at + "q_latent", s_.q_latent, rank, rank);
    p.note_heads(at + "attn_latent", s_.attn_latent, rank, rank);
    p.note_heads(at + "q_nope", s_.q, nope, query);
    p.note_heads(at + "q_rope", s_.q + nope, rope_width, query);
    p.note_part(at + "latent", kv, rank, kv_stride);
    p.note_part(at + "rope_key", kv + rank, rope_width, kv_stride);
    p.note_heads(at + "attn_heads", s_.heads, c_.v_head_dim, c_.v_head_dim);
    p.note(at + "attn_out", s_.out, hidden);

    norm_stream(p, {s_.out}, layer.post_attention_norm, layer.mixture && kNarrow<T> ? s_.wide : nullptr);
    p.note(at + "ffn_norm", s_.normed, hidden);
    given = {s_.out};
    if (layer.mixture)
      given = mix(p, layer, at);
    else
      p.feed(s_.normed, layer.mlp, c_.intermediate_size, s_.both, s_.act, s_.out);
    p.note(at + "ffn_out", s_.out, hidden);
  }
  norm_stream(p, given, w_.final_norm);
  end_layer(p, c_.num_hidden_layers - 1);
  p.note("final_norm", s_.normed, hidden);
  if (pass.last_rows_only) {
    KDTREE_LAUNCH((last_rows_kernel<T>), dim3(static_cast<unsigned>(pass.rows.requests)), dim3(128), 0, stream,
                  s_.normed, pass.rows.node_count, s_.last, pass.rows.width, hidden);
    require(check_launch("last_rows_kernel"));
    multiply(products_, s_.last, w_.head, pass.logits, pass.rows.requests, c_.vocab_size, hidden, stream);
    return;
  }
  p.project(s_.normed, w_.head, pass.logits, c_.vocab_size, hidden);
  p.note("logits", pass.logits, c_.vocab_size);
}

Target::Target(const TensorMap& tensors, int most_rows, int capacity, std::vector<int> taps, Arithmetic arithmetic)
    : config_(TargetConfig::read(tensors)), arithmetic_(arithmetic) {
  for (const int tap : taps)
    if (tap < 0 || tap >= config_.num_hidden_layers)
      throw ModelError("tap " + std::to_string(tap) + " is outside the layers 0.." +
                       std::to_string(config_.num_hidden_layers - 1));
  check_cache_rows(config_, arithmetic);
  if (arithmetic.dtype == KDTREE_BF16)
    body_ = std::make_unique<BodyOf<uint16_t>>(tensors, config_, most_rows, capacity, std::move(taps), arithmetic);
  else
    body_ = std::make_unique<BodyOf<float>>(tensors, config_, most_rows, capacity, std::move(taps), arithmetic);
}

Target::~Target() = default;

const void* Target::embedding() const { return body_->embedding; }
const void* Target::head() const { return body_->head; }
size_t Target::weight_bytes() const { return body_->weight_bytes; }
size_t Target::scratch_bytes() const { return body_->scratch_bytes; }
bool Target::products_on_tensor_cores() const { return body_->products_fit; }
kdtree_attention_kernel Target::attention_kernel() const { return body_->attention_kernel; }

int32_t Target::row_bytes() const {
  if (arithmetic_.cache_rows == CacheRows::kFp8) return Fp8Row::kBytes;
  return static_cast<int32_t>(arithmetic_.element()) * (config_.kv_lora_rank + config_.qk_rope_head_dim);
}

void Target::forward(const TargetPass& pass, cudaStream_t stream, Trace* trace) {
  if (pass.cache.row_bytes != row_bytes())
    throw EngineFailure(KDTREE_SIZE, "cache rows of " + std::to_string(pass.cache.row_bytes) +
                                         " bytes, the model's have " + std::to_string(row_bytes()));
  body_->forward(pass, stream, trace);
}

}  // namespace kdtree
