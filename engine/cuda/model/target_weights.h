// The weights of a target on the device, as a pass reads them.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/weights.h"

namespace kdtree {

// T: float, or uint16_t for bf16 bits. The router is float32 either way.
template <typename T>
struct TargetLayer {
  const T *input_norm, *post_attention_norm;
  const T *q_a, *q_a_norm, *q;  // q: q_b_proj, or q_proj where there is no q_lora_rank; q_a: with kv_a's rows behind
  const T *kv_a, *kv_a_norm;    // kv_a: only where there is no q_lora_rank
  const T* w_uk;                // [heads, rank, nope]
  const T* w_uv;                // [heads, v, rank]
  const T* o;
  bool mixture;
  SwigluWeights<T> mlp;  // dense, or the shared expert
  const float *router, *bias;
  std::vector<SwigluWeights<T>> experts;
  DeviceBuffer expert_pointers;  // gate_up of all experts, then down

  const T* const* gate_up() const { return reinterpret_cast<const T* const*>(expert_pointers.data()); }
  const T* const* down() const { return gate_up() + experts.size(); }
};

// Transposes each head's key part: kv_b [heads, nope + v, rank] -> [heads, rank, nope].
template <typename T>
std::vector<T> key_part(const std::vector<T>& kv_b, int heads, int nope, int v, int rank) {
  std::vector<T> out(static_cast<size_t>(heads) * rank * nope);
  for (int h = 0; h < heads; ++h)
    for (int n = 0; n < nope; ++n)
      for (int r = 0; r < rank; ++r)
        out[(static_cast<size_t>(h) * rank + r) * nope + n] =
            kv_b[(static_cast<size_t>(h) * (nope + v) + n) * rank + r];
  return out;
}

template <typename T>
std::vector<T> value_part(const std::vector<T>& kv_b, int heads, int nope, int v, int rank) {
  std::vector<T> out;
  for (int h = 0; h < heads; ++h) {
    const auto first = kv_b.begin() + (static_cast<ptrdiff_t>(h) * (nope + v) + nope) * rank;
    out.insert(out.end(), first, first + static_cast<ptrdiff_t>(v) * rank);
  }
  return out;
}

template <typename T>
struct TargetWeights {
  WeightStore store;
  const T *embedding, *head, *final_norm;
  const float *cos, *sin;
  std::vector<TargetLayer<T>> layers;

  // Throws ModelError. capacity: positions.
  TargetWeights(const TensorMap& tensors, const TargetConfig& c, int capacity)
      : store(tensors), layers(static_cast<size_t>(c.num_hidden_layers)) {
    std::map<std::string, std::vector<int64_t>> optional;
    if (c.tie_word_embeddings) optional["lm_head.weight"] = {c.vocab_size, c.hidden_size};
    check_weights(tensors, c.weight_shapes(), optional);
    const std::string embedding_name = "model.embed_tokens.weight";
    const std::string head_name = tensors.count("lm_head.weight") ? "lm_head.weight" : embedding_name;
    if (c.tie_word_embeddings && head_name != embedding_name &&
        tensors.at(head_name).template values<float>(head_name) !=
            tensors.at(embedding_name).template values<float>(embedding_name))
      throw ModelError("tie_word_embeddings is true but lm_head.weight differs from model.embed_tokens.weight");
    store.take(&embedding, embedding_name);
    store.take(&final_norm, "model.norm.weight");
    store.take(&head, head_name);
    for (int i = 0; i < c.num_hidden_layers; ++i) take_layer(c, i);
    std::vector<float> turns[2];
    for (std::vector<float>& table : turns) table.resize(static_cast<size_t>(capacity) * c.qk_rope_head_dim / 2);
    rope_tables(c.rope, c.qk_rope_head_dim, capacity, turns[0].data(), turns[1].data());
    store.add(&cos, std::move(turns[0]));
    store.add(&sin, std::move(turns[1]));
    store.upload();
    for (TargetLayer<T>& layer : layers)
      if (layer.mixture) {
        std::vector<const T*> pointers;
        for (const SwigluWeights<T>& expert : layer.experts) pointers.push_back(expert.gate_up);
        for (const SwigluWeights<T>& expert : layer.experts) pointers.push_back(expert.down);
        layer.expert_pointers = DeviceBuffer(pointers.size() * sizeof(T*));
        copy_to_device(layer.expert_pointers.data(), pointers.data(), layer.expert_pointers.bytes());
      }
  }

 private:
  void take_layer(const TargetConfig& c, int index) {
    TargetLayer<T>& layer = layers[static_cast<size_t>(index)];
    const std::string at = "model.layers." + std::to_string(index) + ".", attention = at + "self_attn.";
    const int heads = c.num_attention_heads, nope = c.qk_nope_head_dim, v = c.v_head_dim, rank = c.kv_lora_rank;
    const size_t of_heads = static_cast<size_t>(heads) * static_cast<size_t>(rank);
    store.take(&layer.input_norm, at + "input_layernorm.weight");
    store.take(&layer.post_attention_norm, at + "post_attention_layernorm.weight");
    const std::string kv_a = attention + "kv_a_proj_with_mqa.weight";
    if (c.q_lora_rank > 0) {
      store.take(&layer.q_a, std::vector<std::string>{attention + "q_a_proj.weight", kv_a});
      store.take(&layer.q_a_norm, attention + "q_a_layernorm.weight");
      store.take(&layer.q, attention + "q_b_proj.weight");
    } else {
      store.take(&layer.q, attention + "q_proj.weight");
      store.take(&layer.kv_a, kv_a);
    }
    store.take(&layer.kv_a_norm, attention + "kv_a_layernorm.weight");
    store.template take<T>(&layer.w_uk, attention + "kv_b_proj.weight", of_heads * static_cast<size_t>(nope),
                           [=](const std::vector<T>& kv_b) { return key_part(kv_b, heads, nope, v, rank); });
    store.template take<T>(&layer.w_uv, attention + "kv_b_proj.weight", of_heads * static_cast<size_t>(v),
                           [=](const std::vector<T>& kv_b) { return value_part(kv_b, heads, nope, v, rank); });
    store.take(&layer.o, attention + "o_proj.weight");
    layer.mixture = index >= c.first_k_dense_replace;
    if (!layer.mixture) {
      store.take(&layer.mlp, at + "mlp.");
      return;
    }
    store.take(&layer.mlp, at + "mlp.shared_experts.");
    store.take(&layer.router, at + "mlp.gate.weight");
    const std::string bias = at + "mlp.gate.e_score_correction_bias";
    store.template take<float>(&layer.bias, bias, static_cast<size_t>(c.n_routed_experts),
                               [bias](const std::vector<float>& values) {
                                 for (size_t e = 0; e < values.size();
                                      ++e)  // it only shifts the choice of experts: nothing later could notice
                                   if (!std::isfinite(values[e]))
                                     throw ModelError(bias + "[" + std::to_string(e) + "] is not finite");
                                 return values;
                               });
    layer.experts.resize(static_cast<size_t>(c.n_routed_experts));
    for (int e = 0; e < c.n_routed_experts; ++e)
      store.take(&layer.experts[static_cast<size_t>(e)], at + "mlp.experts." + std::to_string(e) + ".");
  }
};

}  // namespace kdtree
