// What a target's passes compute in, planned for the largest one.
#pragma once

#include <algorithm>

#include "kernels/attention.h"
#include "kernels/experts_bf16.h"
#include "model/config.h"
#include "model/products.h"

namespace kdtree {

template <typename T>
struct TargetScratch {
  Arena arena;
  T *x, *normed, *down, *q, *q_latent, *attn_latent, *heads, *out, *both, *act, *routed, *last;
  // down: what has q_lora_rank columns, if there are any, and the cache row behind.
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
    arena.plan(&down, rows * static_cast<size_t>(c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim));
    arena.plan(&q, rows * heads_count * static_cast<size_t>(c.qk_nope_head_dim + c.qk_rope_head_dim));
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
    const int least = std::max(64 / heads, 1);
    return std::max({mla_attention_bf16_workspace(1, most_rows, heads, capacity),
                     mla_attention_bf16_workspace(1, 1, heads, capacity),
                     mla_attention_bf16_workspace(1, least, heads, capacity, 1)});
  }
};

}  // namespace kdtree
