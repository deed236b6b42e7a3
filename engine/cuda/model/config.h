// The configurations of target and drafter, with the published spellings. reference/config.py
//
// Reading is strict: a key that could change the numbers and is not understood is a ModelError that names it, and so is
// one whose only supported value is another. Keys that cannot change a forward pass are ignored.
#pragma once

#include <string>
#include <vector>

#include "kernels/layers.h"
#include "model/tensors.h"

namespace kdtree {

// The tensors of a target's file as a forward pass reads them, by their published names: of a multimodal model those of
// its language model (names behind `language_model.`, a nested text_config); layers that predict several tokens and
// stored rotary frequencies are left out. Throws ModelError where the two halves of such a config disagree.
TensorMap language_model(TensorMap tensors);

struct TargetConfig {
  int vocab_size, hidden_size, intermediate_size, moe_intermediate_size, num_hidden_layers, num_attention_heads;
  int q_lora_rank;  // 0: one q_proj
  int kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim;
  int n_routed_experts, n_shared_experts, num_experts_per_tok, n_group, topk_group, first_k_dense_replace;
  bool norm_topk_prob, tie_word_embeddings;
  double routed_scaling_factor, rms_norm_eps, latent_norm_eps;
  RopeLayout rope_layout;
  RopeParameters rope;
  double softmax_scale;  // (nope + rope)^-0.5, YaRN's factor included

  static TargetConfig read(const TensorMap& tensors);
  // Published tensor names and their shapes; lm_head.weight is optional where the embedding is tied.
  std::map<std::string, std::vector<int64_t>> weight_shapes() const;
};

struct DrafterConfig {
  int hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim;
  int block_size, num_target_layers, vocab_size, mask_token_id;
  double rms_norm_eps;
  RopeParameters rope;
  std::vector<int> target_layer_ids;

  static DrafterConfig read(const TensorMap& tensors);
  std::map<std::string, std::vector<int64_t>> weight_shapes() const;
};

// Throws ModelError naming every weight that is missing, surplus or of another shape than `shapes` and `optional` say.
void check_weights(const TensorMap& tensors, const std::map<std::string, std::vector<int64_t>>& shapes,
                   const std::map<std::string, std::vector<int64_t>>& optional);

}  // namespace kdtree
