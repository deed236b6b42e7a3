#include <algorithm>

#include "kernels/experts_bf16.h"
#include "model/products.h"
#include "model/target.h"
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
                              heads * c.v_head_dim, dense ? c.intermediate_size : 0,
                              mixture ? c.moe_intermediate_size : 0});
}

template <typename T>
struct TargetScratch {
  Arena arena;
  T *x, *normed, *q_a, *q, *kv, *q_latent, *attn_latent, *heads, *out, *both, *act, *routed, *last;
  float* wide;  // normed, for the router
  float *router_logits, *router_scores, *expert_weights;
  int32_t* expert_ids;
  unsigned char *attention_workspace, *experts_workspace;
  size_t attention_bytes, experts_bytes;

  // products, fast, general: products on tensor cores; attention there, and elsewhere.
  TargetScratch(const TargetConfig& c, int most_rows, int capacity, bool products, bool fast, bool general) {
    const size_t rows = static_cast<size_t>(most_rows), hidden = static_cast<size_t>(c.hidden_size);
    const size_t heads_count = static_cast<size_t>(c.num_attention_heads), rank = static_cast<size_t>(c.kv_lora_rank);
    const int shared = c.moe_intermediate_size * c.n_shared_experts;
    const size_t widest = static_cast<size_t>(std::max(c.intermediate_size, shared));
    const bool mixture = c.first_k_dense_replace < c.num_hidden_layers;
    attention_bytes =
        std::max(general ? mla_attention_workspace(most_rows, c.num_attention_heads, c.kv_lora_rank, capacity) : 0,
                 fast ? bf16_attention_bytes(c, most_rows, capacity) : 0);
    experts_bytes =
        !mixture ? 0
                 : (products ? experts_bf16_workspace : kdtree::experts_workspace)(
                       most_rows, c.hidden_size, c.moe_intermediate_size, c.n_routed_experts, c.num_experts_per_tok);
    arena.plan(&x, rows * hidden);
    arena.plan(&normed, rows * hidden);
    arena.plan(&wide, kNarrow<T> && mixture ? rows * hidden : 0);
    arena.plan(&q_a, rows * static_cast<size_t>(c.q_lora_rank));
    arena.plan(&q, rows * heads_count * static_cast<size_t>(c.qk_nope_head_dim + c.qk_rope_head_dim));
    arena.plan(&kv, rows * static_cast<size_t>(c.kv_lora_rank + c.qk_rope_head_dim));
    arena.plan(&q_latent, rows * heads_count * rank);
    arena.plan(&attn_latent, rows * heads_count * rank);
    arena.plan(&heads, rows * heads_count * static_cast<size_t>(c.v_head_dim));
    arena.plan(&out, rows * hidden);
    arena.plan(&both, rows * 2 * widest);
    arena.plan(&act, rows * widest);
    arena.plan(&router_logits, rows * static_cast<size_t>(c.n_routed_experts));
    arena.plan(&router_scores, rows * static_cast<size_t>(c.n_routed_experts));
    arena.plan(&expert_ids, rows * static_cast<size_t>(c.num_experts_per_tok));
    arena.plan(&expert_weights, rows * static_cast<size_t>(c.num_experts_per_tok));
    arena.plan(&routed, rows * hidden);
    arena.plan(&last, rows * hidden);
    arena.plan(&attention_workspace, attention_bytes);
    arena.plan(&experts_workspace, experts_bytes);
    arena.allocate();
  }

  // What the largest pass and a single row do best with, and at least what every pass can do with: 64 head rows.
  static size_t bf16_attention_bytes(const TargetConfig& c, int most_rows, int capacity) {
    const int heads = c.num_attention_heads;
    const int width = std::min(most_rows, 65535), least = std::max(64 / heads, 1);
    return std::max({mla_attention_bf16_workspace(1, width, heads, capacity),
                     mla_attention_bf16_workspace(1, 1, heads, capacity),
                     mla_attention_bf16_workspace(1, least, heads, capacity, 1)});
  }
};

// One pass: the state that its steps share, and a line for each operation.
template <typename T>
struct Pass {
  const TargetConfig& c;
  const TargetPass& in;
  cudaStream_t stream;
  Trace* trace;
  Products products;
  int rows = in.rows.count();

  void norm(const T* x, int64_t x_stride, const T* weight, T* y, int64_t y_stride, int width, double eps,
            float* wide = nullptr) const {
    require(
        rms_norm(RmsNormArgs<T>{x, x_stride, weight, y, y_stride, rows, width, static_cast<float>(eps), wide}, stream));
  }
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
  void turn(T* x, int64_t x_stride, int64_t head_stride, int heads, const float* cos, const float* sin) const {
    require(rope(RopeArgs<T>{x, x_stride, head_stride, cos, sin, in.rows.positions, in.rows.node_count, rows,
                             in.rows.width, heads, c.qk_rope_head_dim, c.rope_layout},
                 stream));
  }
  void feed(const T* x, const SwigluWeights<T>& w, int width, T* both, T* act, T* y) const {
    project(x, w.gate_up, both, 2 * width, c.hidden_size);
    require(swiglu(SwigluArgs<T>{both, act, rows, width}, stream));
    project(act, w.down, y, c.hidden_size, width);
  }
  void sum(const T* a, const T* b, T* y) const {
    require(add(a, b, y, static_cast<int64_t>(rows) * c.hidden_size, stream));
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
  bool products_fit, attention_fits;  // tensor cores
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
        products_{arithmetic.gemm, kdtree::products_fit<T>(c)},
        w_(tensors, c, capacity),
        s_(c, most_rows, capacity, products_.tensor_cores, bf16_attention(),
           !bf16_attention() || form_ == AttentionForm::kMask) {
    embedding = w_.embedding;
    head = w_.head;
    weight_bytes = w_.store.bytes();
    scratch_bytes = s_.arena.bytes();
    products_fit = products_.tensor_cores;
    attention_fits = bf16_attention();
  }

  void forward(const TargetPass& pass, cudaStream_t stream, Trace* trace) const override;

 private:
  bool bf16_attention() const { return kNarrow<T> && kdtree::attention_fits(c_); }
  void attend(const TargetPass& pass, int layer, cudaStream_t stream) const;
  void mix(const Pass<T>& p, const TargetLayer<T>& layer, const std::string& at) const;

  const TargetConfig& c_;
  int most_rows_;
  std::vector<int> taps_;
  AttentionForm form_;
  Products products_;
  TargetWeights<T> w_;
  TargetScratch<T> s_;
};

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
    a->layer = layer;
    a->out = s_.attn_latent;
    a->heads = heads;
    a->scale = static_cast<float>(c_.softmax_scale);
    a->longest = pass.cache.capacity;
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

// The experts of `normed` to out: routed ones, then the shared one.
template <typename T>
void Target::BodyOf<T>::mix(const Pass<T>& p, const TargetLayer<T>& layer, const std::string& at) const {
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
  p.sum(s_.routed, s_.out, s_.out);
}

template <typename T>
void Target::BodyOf<T>::forward(const TargetPass& pass, cudaStream_t stream, Trace* trace) const {
  const int hidden = c_.hidden_size, heads = c_.num_attention_heads, rank = c_.kv_lora_rank;
  const int nope = c_.qk_nope_head_dim, rope_width = c_.qk_rope_head_dim, query = nope + rope_width;
  const int64_t row_bytes = static_cast<int64_t>(sizeof(T)) * (rank + rope_width);
  if (pass.rows.count() > most_rows_)
    throw EngineFailure(KDTREE_SIZE, "a pass of " + std::to_string(pass.rows.count()) + " rows, planned for " +
                                         std::to_string(most_rows_));
  if (pass.cache.row_bytes != row_bytes)
    throw EngineFailure(KDTREE_SIZE, "cache rows of " + std::to_string(pass.cache.row_bytes) +
                                         " bytes, the model's have " + std::to_string(row_bytes));
  const Pass<T> p{c_, pass, stream, trace, products_};
  T* const features = static_cast<T*>(pass.features);

  require(embed(EmbedArgs<T>{pass.rows, w_.embedding, s_.x, hidden}, stream));
  p.note("embedding", s_.x, hidden);
  for (int index = 0; index < c_.num_hidden_layers; ++index) {
    const TargetLayer<T>& layer = w_.layers[static_cast<size_t>(index)];
    const std::string at = "layers." + std::to_string(index) + "/";

    p.norm(s_.x, hidden, layer.input_norm, s_.normed, hidden, hidden, c_.rms_norm_eps);
    p.note(at + "attn_norm", s_.normed, hidden);
    if (c_.q_lora_rank > 0) {
      p.project(s_.normed, layer.q_a, s_.q_a, c_.q_lora_rank, hidden);
      p.norm(s_.q_a, c_.q_lora_rank, layer.q_a_norm, s_.q_a, c_.q_lora_rank, c_.q_lora_rank, c_.latent_norm_eps);
      p.project(s_.q_a, layer.q, s_.q, heads * query, c_.q_lora_rank);
    } else {
      p.project(s_.normed, layer.q, s_.q, heads * query, hidden);
    }
    p.project(s_.normed, layer.kv_a, s_.kv, rank + rope_width, hidden);
    p.norm(s_.kv, rank + rope_width, layer.kv_a_norm, s_.kv, rank + rope_width, rank, c_.latent_norm_eps);
    p.turn(s_.q + nope, static_cast<int64_t>(heads) * query, query, heads, w_.cos, w_.sin);
    p.turn(s_.kv + rank, rank + rope_width, 0, 1, w_.cos, w_.sin);
    require(cache_write(pass.rows, s_.kv, rank + rope_width, pass.cache, index, stream));
    p.project_heads(s_.q, static_cast<int64_t>(heads) * query, query, layer.w_uk, s_.q_latent, rank, nope);
    attend(pass, index, stream);
    p.project_heads(s_.attn_latent, static_cast<int64_t>(heads) * rank, rank, layer.w_uv, s_.heads, c_.v_head_dim,
                    rank);
    p.project(s_.heads, layer.o, s_.out, hidden, heads * c_.v_head_dim);
    p.note_heads(at + "q_latent", s_.q_latent, rank, rank);
    p.note_heads(at + "attn_latent", s_.attn_latent, rank, rank);
    p.note_heads(at + "q_nope", s_.q, nope, query);
    p.note_heads(at + "q_rope", s_.q + nope, rope_width, query);
    p.note_part(at + "latent", s_.kv, rank, rank + rope_width);
    p.note_part(at + "rope_key", s_.kv + rank, rope_width, rank + rope_width);
    p.note_heads(at + "attn_heads", s_.heads, c_.v_head_dim, c_.v_head_dim);
    p.note(at + "attn_out", s_.out, hidden);
    p.sum(s_.x, s_.out, s_.x);

    float* const wide = layer.mixture && kNarrow<T> ? s_.wide : nullptr;
    p.norm(s_.x, hidden, layer.post_attention_norm, s_.normed, hidden, hidden, c_.rms_norm_eps, wide);
    p.note(at + "ffn_norm", s_.normed, hidden);
    if (layer.mixture)
      mix(p, layer, at);
    else
      p.feed(s_.normed, layer.mlp, c_.intermediate_size, s_.both, s_.act, s_.out);
    p.note(at + "ffn_out", s_.out, hidden);
    p.sum(s_.x, s_.out, s_.x);
    p.note(at + "hidden", s_.x, hidden);
    const auto tap = std::find(taps_.begin(), taps_.end(), index);
    if (tap != taps_.end() && features != nullptr) {
      const int64_t taps = static_cast<int64_t>(taps_.size()), place = tap - taps_.begin();
      require(
          copy_rows(CopyRowsArgs<T>{s_.x, hidden, features + place * hidden, taps * hidden, p.rows, hidden}, stream));
    }
  }
  if (pass.logits == nullptr) return;
  p.norm(s_.x, hidden, w_.final_norm, s_.normed, hidden, hidden, c_.rms_norm_eps);
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
bool Target::attention_on_tensor_cores() const { return body_->attention_fits; }

void Target::forward(const TargetPass& pass, cudaStream_t stream, Trace* trace) { body_->forward(pass, stream, trace); }

}  // namespace kdtree
