"""Small random targets and drafters for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from reference.config import DrafterConfig, ModelConfig

TARGET: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "q_lora_rank": 10,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
}

YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

DRAFTER: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "block_size": 8,
    "num_target_layers": 4,
    "vocab_size": 61,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": [0, 2]},
}


def target_config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**TARGET, **changes})


def drafter_config(**changes: Any) -> DrafterConfig:
    return DrafterConfig.from_dict({**DRAFTER, **changes})


def random_weights(config: ModelConfig | DrafterConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights that keep activations of order one; norms near 1, a bias that matters."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in config.weight_shapes().items():
        draw = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            draw = 1 + 0.2 * draw
        elif name.endswith("e_score_correction_bias"):
            draw = 0.2 * draw
        elif not name.endswith("embed_tokens.weight"):
            draw *= 1.5 / np.sqrt(shape[-1])
        weights[name] = draw.astype(np.float32)
    return weights


def tree_visibility(parents: list[int]) -> np.ndarray:
    """bool [N, N] of a tree given by parents (-1 for a root), parents first."""
    visibility = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            visibility[row] |= visibility[parent]
    return visibility


def random_parents(rng: np.random.Generator, count: int) -> list[int]:
    """A random tree: row 0 is the root, every other row hangs on an earlier one."""
    return [-1, *(int(rng.integers(0, row)) for row in range(1, count))]
