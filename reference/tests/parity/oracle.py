"""transformers' DeepseekV3ForCausalLM as oracle: random checkpoints that exercise every numeric rule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, modeling_rope_utils
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as published

from reference.config import ModelConfig

BASE: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "attention_bias": False,
}

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
KIMI_YARN = DEEPSEEK_YARN | {"factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0}
KIMI_K2 = {
    "rope_theta": 50000.0,
    "rope_scaling": KIMI_YARN,
    "routed_scaling_factor": 2.827,
    "n_group": 1,
    "rms_norm_eps": 1e-5,
}

# The published text_config of Kimi-K2.5, key for key, with the sizes shrunk.
KIMI_K25_TEXT: dict[str, Any] = {
    **BASE,
    **KIMI_K2,
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    "aux_loss_alpha": 0.001,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "ep_size": 1,
    "initializer_range": 0.02,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "vocab_size": 211,
    "output_attentions": False,
    "id2label": {"0": "LABEL_0"},
    "dtype": "bfloat16",
    "torchscript": False,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "base": {},
    "kimi_yarn": KIMI_K2,
    "deepseek_yarn": {"rope_scaling": DEEPSEEK_YARN},
    "yarn_mscale_differs": {"rope_scaling": DEEPSEEK_YARN | {"mscale": 0.707}},
    "yarn_without_mscale": {"rope_scaling": YARN},
    "no_q_lora": {"q_lora_rank": None},
    "groups_4_pick_2": {"n_group": 4, "topk_group": 2},
    "norm_topk_off": {"norm_topk_prob": False},
    "half_rope": {"rope_interleave": False},
    "shared_2": {"n_shared_experts": 2},
    "tied": {"tie_word_embeddings": True},
    "kimi_k25_text_config": KIMI_K25_TEXT,
    "negative_bias": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    "all_mixture": {"first_k_dense_replace": 0, "n_shared_experts": 2},
    "all_dense": {"first_k_dense_replace": 3},
    "latent_512_rope_64": {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
}


def raw_config(name: str) -> dict[str, Any]:
    return {**BASE, **CONFIGS[name]}


def random_oracle(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[DeepseekV3ForCausalLM, ModelConfig]:
    """The published model with random weights, norms, biases and routers; logits come out of order 1 to 4."""
    raw = raw_config(name)
    config = DeepseekV3Config(
        **{key: value for key, value in raw.items() if key not in ("model_type", "architectures")}
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            elif "embed_tokens" in key:
                size = 0.2 if config.tie_word_embeddings else 1.0
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
            else:
                fan_in = parameter.shape[-1]
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (1.2 / math.sqrt(fan_in)))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                shift = -5.0 if name == "negative_bias" else 0.0
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator) + shift)
    return model.to(dtype), ModelConfig.from_dict(raw)


def published_weights(model: DeepseekV3ForCausalLM, config: ModelConfig) -> dict[str, np.ndarray]:
    """State in memory -> checkpoint names: transformers fuses the experts of a layer, gate rows first."""
    weights: dict[str, np.ndarray] = {}
    for key, value in model.state_dict().items():
        array = value.detach().numpy()
        if key.endswith("mlp.experts.gate_up_proj"):
            for expert, block in enumerate(array):
                gate, up = np.split(block, 2)
                at = f"{key.removesuffix('gate_up_proj')}{expert}."
                weights[at + "gate_proj.weight"], weights[at + "up_proj.weight"] = gate, up
        elif key.endswith("mlp.experts.down_proj"):
            for expert, block in enumerate(array):
                weights[f"{key.removesuffix('down_proj')}{expert}.down_proj.weight"] = block
        else:
            weights[key] = array
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return weights


class _DoubleTorch:
    """torch, except that asking for float32 gives float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def widened_islands() -> Iterator[None]:
    """Models built and run inside have their float32 islands (norm statistics, router, rope, softmax) in float64."""
    modules = (published, modeling_rope_utils)
    try:
        for module in modules:
            module.torch = _DoubleTorch()
        yield
    finally:
        for module in modules:
            module.torch = torch
