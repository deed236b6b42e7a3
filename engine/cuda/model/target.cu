#include <algorithm>
#include <cmath>

#include "model/target.h"
#include "model/weights.h"

namespace kdtree {
namespace {

struct Layer {
  const float *input_norm, *post_attention_norm;
  const float *q_a, *q_a_norm, *q;  // q: q_b_proj, or q_proj where there is no q_lora_rank
  const float *kv_a, *kv_a_norm;
  const float* w_uk;  // [heads, rank, nope]
  const float* w_uv;  // [heads, v, rank]
  const float* o;
  bool mixture;
  SwigluWeights mlp;  // dense, or the shared expert
  const float *router, *bias;
  std::vector<SwigluWeights> experts;
  DeviceBuffer expert_pointers;  // gate_up of all experts, then down
};

// Transposes each head's key part: kv_b [heads, nope + v, rank] -> [heads, rank, nope].
std::vector<float> key_part(const std::vector<float>& kv_b, int heads, int nope, int v, int rank) {
  std::vector<float> out(static_cast<size_t>(heads) * rank * nope);
  for (int h = 0; h < heads; ++h)
    for (int n = 0; n < nope; ++n)
      for (int r = 0; r < rank; ++r)
        out[(static_cast<size_t>(h) * rank + r) * nope + n] =
            kv_b[(static_cast<size_t>(h) * (nope + v) + n) * rank + r];
  return out;
}

std::vector<float> value_part(const std::vector<float>& kv_b, int heads, int nope, int v, int rank) {
  std::vector<float> out;
  for (int h = 0; h < heads; ++h) {
    const auto first = kv_b.begin() + (static_cast<ptrdiff_t>(h) * (nope + v) + nope) * rank;
    out.insert(out.end(), first, first + static_cast<ptrdiff_t>(v) * rank);
  }
  return out;
}

// y[r, :] = x[last used row of block r, :]; zeros for a block without rows.
__global__ void last_rows_kernel(const float* x, const int32_t* node_count, float* y, int width, int hidden) {
  const int request = static_cast<int>(blockIdx.x), last = node_count[request];
  for (int i = threadIdx.x; i < hidden; i += blockDim.x)
    y[static_cast<int64_t>(request) * hidden + i] =
        last < 0 ? 0.0f : x[(static_cast<int64_t>(request) * width + last) * hidden + i];
}

}  // namespace

struct Target::Weights {
  WeightStore store;
  const float *embedding, *head, *final_norm, *cos, *sin;
  std::vector<Layer> layers;

  Weights(const TensorMap& tensors, const TargetConfig& c, int capacity) : store(tensors), layers(c.num_hidden_layers) {
    std::map<std::string, std::vector<int64_t>> optional;
    if (c.tie_word_embeddings) optional["lm_head.weight"] = {c.vocab_size, c.hidden_size};
    check_weights(tensors, c.weight_shapes(), optional);
    const std::string head_name = tensors.count("lm_head.weight") ? "lm_head.weight" : "model.embed_tokens.weight";
    if (c.tie_word_embeddings && head_name == "lm_head.weight" &&
        tensors.at(head_name).floats(head_name) != tensors.at("model.embed_tokens.weight").floats(head_name))
      throw ModelError("tie_word_embeddings is true but lm_head.weight differs from model.embed_tokens.weight");
    store.take(&embedding, "model.embed_tokens.weight");
    store.take(&final_norm, "model.norm.weight");
    store.take(&head, head_name);
    for (int i = 0; i < c.num_hidden_layers; ++i) take_layer(c, i);
    std::vector<float> turns[2];
    for (std::vector<float>& table : turns) table.resize(static_cast<size_t>(capacity) * c.qk_rope_head_dim / 2);
    rope_tables(c.rope, c.qk_rope_head_dim, capacity, turns[0].data(), turns[1].data());
    store.add(&cos, [&] { return turns[0]; });
    store.add(&sin, [&] { return turns[1]; });
    store.upload();
    for (Layer& layer : layers)
      if (layer.mixture) {
        std::vector<const float*> pointers;
        for (const SwigluWeights& expert : layer.experts) pointers.push_back(expert.gate_up);
        for (const SwigluWeights& expert : layer.experts) pointers.push_back(expert.down);
        layer.expert_pointers = DeviceBuffer(pointers.size() * sizeof(float*));
        copy_to_device(layer.expert_pointers.data(), pointers.data(), layer.expert_pointers.bytes());
      }
  }

  void take_layer(const TargetConfig& c, int index) {
    Layer& layer = layers[static_cast<size_t>(index)];
    const std::string at = "model.layers." + std::to_string(index) + ".", attention = at + "self_attn.";
    const int heads = c.num_attention_heads, nope = c.qk_nope_head_dim, v = c.v_head_dim, rank = c.kv_lora_rank;
    store.take(&layer.input_norm, at + "input_layernorm.weight");
    store.take(&layer.post_attention_norm, at + "post_attention_layernorm.weight");
    if (c.q_lora_rank > 0) {
      store.take(&layer.q_a, attention + "q_a_proj.weight");
      store.take(&layer.q_a_norm, attention + "q_a_layernorm.weight");
    }
    store.take(&layer.q, attention + (c.q_lora_rank > 0 ? "q_b_proj.weight" : "q_proj.weight"));
    store.take(&layer.kv_a, attention + "kv_a_proj_with_mqa.weight");
    store.take(&layer.kv_a_norm, attention + "kv_a_layernorm.weight");
    store.take(&layer.w_uk, attention + "kv_b_proj.weight",
               [=](const std::vector<float>& kv_b) { return key_part(kv_b, heads, nope, v, rank); });
    store.take(&layer.w_uv, attention + "kv_b_proj.weight",
               [=](const std::vector<float>& kv_b) { return value_part(kv_b, heads, nope, v, rank); });
    store.take(&layer.o, attention + "o_proj.weight");
    layer.mixture = index >= c.first_k_dense_replace;
    if (!layer.mixture) {
      store.take(&layer.mlp, at + "mlp.");
      return;
    }
    store.take(&layer.mlp, at + "mlp.shared_experts.");
    store.take(&layer.router, at + "mlp.gate.weight");
    const std::string bias = at + "mlp.gate.e_score_correction_bias";
    store.take(&layer.bias, bias, [bias](std::vector<float> values) {
      for (size_t e = 0; e < values.size(); ++e)  // it only shifts the choice of experts: nothing later could notice
        if (!std::isfinite(values[e])) throw ModelError(bias + "[" + std::to_string(e) + "] is not finite");
      return values;
    });
    layer.experts.resize(static_cast<size_t>(c.n_routed_experts));
    for (int e = 0; e < c.n_routed_experts; ++e)
      store.take(&layer.experts[static_cast<size_t>(e)], at + "mlp.experts." + std::to_string(e) + ".");
  }
};

struct Target::Scratch {
  int most_rows, capacity;
  std::vector<int> taps;
  Arithmetic arithmetic;
  Arena arena;
  float *x, *normed, *q_a, *q, *kv, *q_latent, *attn_latent, *heads, *out, *both, *act;
  float *router_logits, *router_scores, *expert_weights, *routed, *last;
  int32_t* expert_ids;
  unsigned char *attention_workspace, *experts_workspace;
  size_t attention_bytes, experts_bytes;

  Scratch(const TargetConfig& c, int most_rows_, int capacity_, std::vector<int> taps_, Arithmetic arithmetic_)
      : most_rows(most_rows_), capacity(capacity_), taps(std::move(taps_)), arithmetic(arithmetic_) {
    const size_t rows = static_cast<size_t>(most_rows), hidden = static_cast<size_t>(c.hidden_size);
    const size_t heads_count = static_cast<size_t>(c.num_attention_heads), rank = static_cast<size_t>(c.kv_lora_rank);
    const int shared = c.moe_intermediate_size * c.n_shared_experts;
    const size_t widest = static_cast<size_t>(std::max(c.intermediate_size, shared));
    const bool mixture = c.first_k_dense_replace < c.num_hidden_layers;
    attention_bytes = mla_attention_workspace(most_rows, c.num_attention_heads, c.kv_lora_rank, capacity);
    experts_bytes = mixture ? kdtree::experts_workspace(most_rows, c.hidden_size, c.moe_intermediate_size,
                                                        c.n_routed_experts, c.num_experts_per_tok)
                            : 0;
    arena.plan(&x, rows * hidden);
    arena.plan(&normed, rows * hidden);
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
};

namespace {

// One pass: the state that its steps share, and a line for each operation.
struct Pass {
  const TargetConfig& c;
  const TargetPass& in;
  cudaStream_t stream;
  Trace* trace;
  Gemm gemm;
  int rows = in.rows.count();

  void norm(const float* x, int64_t x_stride, const float* weight, float* y, int64_t y_stride, int width,
            double eps) const {
    require(rms_norm({x, x_stride, weight, y, y_stride, rows, width, static_cast<float>(eps)}, stream));
  }
  void project(const float* x, const float* w, float* y, int out, int width) const {
    require(linear({x, width, 0, w, 0, y, out, 0, nullptr, rows, out, width, 1}, gemm, stream));
  }
  // Each head's own product: x [rows, heads, ...] with x_head between heads.
  void project_heads(const float* x, int64_t x_stride, int64_t x_head, const float* w, float* y, int out,
                     int width) const {
    const int heads = c.num_attention_heads;
    require(linear({x, x_stride, x_head, w, static_cast<int64_t>(out) * width, y, static_cast<int64_t>(heads) * out,
                    out, nullptr, rows, out, width, heads},
                   gemm, stream));
  }
  void turn(float* x, int64_t x_stride, int64_t head_stride, int heads, const float* cos, const float* sin) const {
    require(rope({x, x_stride, head_stride, cos, sin, in.rows.positions, in.rows.node_count, rows, in.rows.width, heads,
                  c.qk_rope_head_dim, c.rope_layout},
                 stream));
  }
  void feed(const float* x, const SwigluWeights& w, int width, float* both, float* act, float* y) const {
    project(x, w.gate_up, both, 2 * width, c.hidden_size);
    require(swiglu({both, act, rows, width}, stream));
    project(act, w.down, y, c.hidden_size, width);
  }
  void sum(const float* a, const float* b, float* y) const {
    require(add(a, b, y, static_cast<int64_t>(rows) * c.hidden_size, stream));
  }
  void note(const std::string& name, const float* array, int width) const {
    if (trace != nullptr) trace->add(name, array, rows, width, width, {rows, width}, stream);
  }
  void note_heads(const std::string& name, const float* array, int width, int64_t stride) const {
    const int heads = c.num_attention_heads;
    if (trace != nullptr)
      trace->add(name, array, static_cast<int64_t>(rows) * heads, width, stride, {rows, heads, width}, stream);
  }
  void note_part(const std::string& name, const float* array, int width, int64_t stride) const {
    if (trace != nullptr) trace->add(name, array, rows, width, stride, {rows, width}, stream);
  }
};

}  // namespace

Target::Target(const TensorMap& tensors, int most_rows, int capacity, std::vector<int> taps, Arithmetic arithmetic)
    : config_(TargetConfig::read(tensors)) {
  for (const int tap : taps)
    if (tap < 0 || tap >= config_.num_hidden_layers)
      throw ModelError("tap " + std::to_string(tap) + " is outside the layers 0.." +
                       std::to_string(config_.num_hidden_layers - 1));
  weights_ = std::make_unique<Weights>(tensors, config_, capacity);
  scratch_ = std::make_unique<Scratch>(config_, most_rows, capacity, std::move(taps), arithmetic);
}

Target::~Target() = default;

const float* Target::embedding() const { return weights_->embedding; }
const float* Target::head() const { return weights_->head; }
size_t Target::weight_bytes() const { return weights_->store.bytes(); }
size_t Target::scratch_bytes() const { return scratch_->arena.bytes(); }

void Target::forward(const TargetPass& pass, cudaStream_t stream, Trace* trace) {
  const TargetConfig& c = config_;
  const Weights& w = *weights_;
  const Scratch& s = *scratch_;
  const int hidden = c.hidden_size, heads = c.num_attention_heads, rank = c.kv_lora_rank;
  const int nope = c.qk_nope_head_dim, rope_width = c.qk_rope_head_dim, query = nope + rope_width;
  const int64_t row_bytes = static_cast<int64_t>(sizeof(float)) * (rank + rope_width);
  if (pass.rows.count() > s.most_rows)
    throw EngineFailure(KDTREE_SIZE, "a pass of " + std::to_string(pass.rows.count()) + " rows, planned for " +
                                         std::to_string(s.most_rows));
  if (pass.cache.row_bytes != row_bytes)
    throw EngineFailure(KDTREE_SIZE, "cache rows of " + std::to_string(pass.cache.row_bytes) +
                                         " bytes, the model's have " + std::to_string(row_bytes));
  const Pass p{c, pass, stream, trace, s.arithmetic.gemm};

  require(embed({pass.rows, w.embedding, s.x, hidden}, stream));
  p.note("embedding", s.x, hidden);
  for (int index = 0; index < c.num_hidden_layers; ++index) {
    const Layer& layer = w.layers[static_cast<size_t>(index)];
    const std::string at = "layers." + std::to_string(index) + "/";

    p.norm(s.x, hidden, layer.input_norm, s.normed, hidden, hidden, c.rms_norm_eps);
    p.note(at + "attn_norm", s.normed, hidden);
    if (c.q_lora_rank > 0) {
      p.project(s.normed, layer.q_a, s.q_a, c.q_lora_rank, hidden);
      p.norm(s.q_a, c.q_lora_rank, layer.q_a_norm, s.q_a, c.q_lora_rank, c.q_lora_rank, c.latent_norm_eps);
      p.project(s.q_a, layer.q, s.q, heads * query, c.q_lora_rank);
    } else {
      p.project(s.normed, layer.q, s.q, heads * query, hidden);
    }
    p.project(s.normed, layer.kv_a, s.kv, rank + rope_width, hidden);
    p.norm(s.kv, rank + rope_width, layer.kv_a_norm, s.kv, rank + rope_width, rank, c.latent_norm_eps);
    p.turn(s.q + nope, static_cast<int64_t>(heads) * query, query, heads, w.cos, w.sin);
    p.turn(s.kv + rank, rank + rope_width, 0, 1, w.cos, w.sin);
    require(cache_write(pass.rows, s.kv, rank + rope_width, pass.cache, index, stream));
    p.project_heads(s.q, static_cast<int64_t>(heads) * query, query, layer.w_uk, s.q_latent, rank, nope);
    MlaAttentionArgs attention{};
    attention.rows = pass.rows;
    // A prompt has no mask: its rows are a chain.
    attention.form = pass.rows.visibility != nullptr ? s.arithmetic.attention : AttentionForm::kExact;
    attention.q_latent = s.q_latent;
    attention.q_latent_stride = static_cast<int64_t>(heads) * rank;
    attention.q_latent_head = rank;
    attention.q_rope = s.q + nope;
    attention.q_rope_stride = static_cast<int64_t>(heads) * query;
    attention.q_rope_head = query;
    attention.cache = pass.cache;
    attention.layer = index;
    attention.out = s.attn_latent;
    attention.heads = heads;
    attention.rank = rank;
    attention.rope = rope_width;
    attention.scale = static_cast<float>(c.softmax_scale);
    attention.longest = pass.cache.capacity;
    attention.workspace = s.attention_bytes > 0 ? s.attention_workspace : nullptr;
    attention.workspace_size = s.attention_bytes;
    require(mla_attention(attention, stream));
    p.project_heads(s.attn_latent, static_cast<int64_t>(heads) * rank, rank, layer.w_uv, s.heads, c.v_head_dim, rank);
    p.project(s.heads, layer.o, s.out, hidden, heads * c.v_head_dim);
    p.note_heads(at + "q_latent", s.q_latent, rank, rank);
    p.note_heads(at + "attn_latent", s.attn_latent, rank, rank);
    p.note_heads(at + "q_nope", s.q, nope, query);
    p.note_heads(at + "q_rope", s.q + nope, rope_width, query);
    p.note_part(at + "latent", s.kv, rank, rank + rope_width);
    p.note_part(at + "rope_key", s.kv + rank, rope_width, rank + rope_width);
    p.note_heads(at + "attn_heads", s.heads, c.v_head_dim, c.v_head_dim);
    p.note(at + "attn_out", s.out, hidden);
    p.sum(s.x, s.out, s.x);

    p.norm(s.x, hidden, layer.post_attention_norm, s.normed, hidden, hidden, c.rms_norm_eps);
    p.note(at + "ffn_norm", s.normed, hidden);
    if (layer.mixture) {
      const int chosen = c.num_experts_per_tok, count = c.n_routed_experts;
      p.project(s.normed, layer.router, s.router_logits, count, hidden);
      require(router({s.router_logits, layer.bias, s.router_scores, s.expert_ids, s.expert_weights, p.rows, count,
                      chosen, c.n_group, c.topk_group, c.norm_topk_prob, static_cast<float>(c.routed_scaling_factor)},
                     stream));
      const float* const* pointers = reinterpret_cast<const float* const*>(layer.expert_pointers.data());
      require(experts({s.normed, pointers, pointers + count, s.expert_ids, s.expert_weights, &pass.rows, s.routed,
                       p.rows, hidden, c.moe_intermediate_size, count, chosen, s.experts_workspace, s.experts_bytes},
                      stream));
      p.feed(s.normed, layer.mlp, c.moe_intermediate_size * c.n_shared_experts, s.both, s.act, s.out);
      p.note(at + "router_scores", s.router_scores, count);
      if (trace != nullptr)
        trace->add(at + "expert_ids", s.expert_ids, p.rows, chosen, chosen, {p.rows, chosen}, stream);
      p.note(at + "expert_weights", s.expert_weights, chosen);
      p.note(at + "routed_out", s.routed, hidden);
      p.note(at + "shared_out", s.out, hidden);
      p.sum(s.routed, s.out, s.out);
    } else {
      p.feed(s.normed, layer.mlp, c.intermediate_size, s.both, s.act, s.out);
    }
    p.note(at + "ffn_out", s.out, hidden);
    p.sum(s.x, s.out, s.x);
    p.note(at + "hidden", s.x, hidden);
    const auto tap = std::find(s.taps.begin(), s.taps.end(), index);
    if (tap != s.taps.end() && pass.features != nullptr) {
      const int64_t taps = static_cast<int64_t>(s.taps.size()), place = tap - s.taps.begin();
      require(copy_rows({s.x, hidden, pass.features + place * hidden, taps * hidden, p.rows, hidden}, stream));
    }
  }
  if (pass.logits == nullptr) return;
  p.norm(s.x, hidden, w.final_norm, s.normed, hidden, hidden, c.rms_norm_eps);
  p.note("final_norm", s.normed, hidden);
  if (pass.last_rows_only) {
    KDTREE_LAUNCH(last_rows_kernel, dim3(static_cast<unsigned>(pass.rows.requests)), dim3(128), 0, stream, s.normed,
                  pass.rows.node_count, s.last, pass.rows.width, hidden);
    require(check_launch("last_rows_kernel"));
    require(linear({s.last, hidden, 0, w.head, 0, pass.logits, c.vocab_size, 0, nullptr, pass.rows.requests,
                    c.vocab_size, hidden, 1},
                   s.arithmetic.gemm, stream));
    return;
  }
  p.project(s.normed, w.head, pass.logits, c.vocab_size, hidden);
  p.note("logits", pass.logits, c.vocab_size);
}

}  // namespace kdtree
