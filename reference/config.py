"""Configurations of the target and of the drafter, with the published spellings.

`from_dict` reads a published config.json. It is strict: a key that could change the numbers and is not understood is a
`ConfigError` that names it, so is a key whose only supported value is another one. Keys that cannot change a forward
pass (NEUTRAL_KEYS) are ignored.

Target (`ModelConfig`), required: vocab_size, hidden_size, intermediate_size, moe_intermediate_size, num_hidden_layers,
num_attention_heads, q_lora_rank (null: one q_proj), kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim,
n_routed_experts, n_shared_experts, num_experts_per_tok, n_group, topk_group, first_k_dense_replace, norm_topk_prob,
routed_scaling_factor, rms_norm_eps, and rope_theta (or rope_parameters.rope_theta).
Optional, with the published default: rope_scaling (null), rope_parameters, rope_interleave (true),
tie_word_embeddings (false), max_position_embeddings (4096), bos_token_id, eos_token_id; and one of ours,
latent_norm_eps (1e-6): the epsilon of q_a_layernorm and kv_a_layernorm, which the published implementations of
DeepSeek-V3 leave at 1e-6 whatever rms_norm_eps says.
A config with a nested text_config (Kimi-K2.5 and later) is read through it.

Drafter (`DrafterConfig`), required: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
num_key_value_heads, head_dim, rms_norm_eps, rope_theta (or rope_parameters), block_size, num_target_layers, vocab_size,
dflash_config.mask_token_id, dflash_config.target_layer_ids. YaRN (rope_scaling) needs an explicit attention_factor:
drafters with amplitude 1 and with 0.1 ln(factor) + 1 both exist.

In a KDTR file every key is a tensor `config/<key>`, nested keys `config/<key>/<field>`: 0-d i64, f64 or bool, 1-d i64
for lists, 1-d u8 (UTF-8) for strings; an absent tensor is null (`to_tensors`, `from_tensors`).

`weight_shapes()` of either class gives the published tensor names of a checkpoint and their shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from reference.config_reader import ConfigError, KeyReader, read_rope, tensors_to_tree, tree_to_tensors, write_rope
from reference.numerics import Array
from reference.rope import RopeLayout, RopeParameters

__all__ = ["ConfigError", "DrafterConfig", "ModelConfig", "default_target_layer_ids", "load_config_json"]

# Keys of the outer config of a multimodal checkpoint that say nothing about its language model.
_OUTER_KEYS = ("ignore_index", "use_unified_vision_chunk", "projection_hidden_size", "projection_layer_norm_eps")
_OUTER_PREFIXES = ("vision_", "image_", "video_", "media_", "mm_")


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V3 / Kimi-K2 target: latent attention, dense first layers, then mixture-of-experts layers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    first_k_dense_replace: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope: RopeParameters
    rope_interleave: bool = True
    latent_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")
        group_size, rest = divmod(self.n_routed_experts, self.n_group)
        if rest or group_size < 2:
            raise ConfigError(
                f"n_routed_experts {self.n_routed_experts} must be n_group {self.n_group} times at least 2"
            )
        if self.topk_group > self.n_group:
            raise ConfigError(f"topk_group {self.topk_group} is more than n_group {self.n_group}")
        if self.num_experts_per_tok > self.topk_group * group_size:
            raise ConfigError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than the {self.topk_group * group_size} "
                f"experts of topk_group {self.topk_group} groups"
            )

    @property
    def rope_layout(self) -> RopeLayout:
        """ "interleaved" or "half" (see reference.rope); to be recorded with goldens that hold rotated values."""
        return "interleaved" if self.rope_interleave else "half"

    @property
    def softmax_scale(self) -> float:
        """Scale of the attention scores, YaRN's factor included."""
        return self.rope.softmax_scale(self.qk_nope_head_dim + self.qk_rope_head_dim)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Read a published config; ConfigError names the first offending key."""
        if "text_config" in raw:
            raw = _text_config(raw)
        read = KeyReader(raw, "target config")
        read.only("model_type", "deepseek_v3", "kimi_k2")
        read.only("hidden_act", "silu")
        read.only("scoring_func", "sigmoid")
        read.only("topk_method", "noaux_tc")
        read.only("moe_layer_freq", 1)
        read.only("attention_bias", False)
        read.only("sliding_window", None)
        heads = read.integer("num_attention_heads")
        read.only("num_key_value_heads", heads, None)
        nope, rope_dim = read.integer("qk_nope_head_dim"), read.integer("qk_rope_head_dim")
        read.only("head_dim", rope_dim)
        read.only("qk_head_dim", nope + rope_dim)
        read.ignore("quantization_config")  # read by the checkpoint loader: it is about storage
        config = cls(
            vocab_size=read.integer("vocab_size"),
            hidden_size=read.integer("hidden_size"),
            intermediate_size=read.integer("intermediate_size"),
            moe_intermediate_size=read.integer("moe_intermediate_size"),
            num_hidden_layers=read.integer("num_hidden_layers"),
            num_attention_heads=heads,
            q_lora_rank=read.integer_or_null("q_lora_rank"),
            kv_lora_rank=read.integer("kv_lora_rank"),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope_dim,
            v_head_dim=read.integer("v_head_dim"),
            n_routed_experts=read.integer("n_routed_experts"),
            n_shared_experts=read.integer("n_shared_experts"),
            num_experts_per_tok=read.integer("num_experts_per_tok"),
            n_group=read.integer("n_group"),
            topk_group=read.integer("topk_group"),
            first_k_dense_replace=read.integer("first_k_dense_replace", minimum=0),
            norm_topk_prob=read.boolean("norm_topk_prob"),
            routed_scaling_factor=read.number("routed_scaling_factor"),
            rms_norm_eps=read.number("rms_norm_eps"),
            rope=read_rope(read),
            rope_interleave=read.boolean("rope_interleave", True),
            latent_norm_eps=read.number("latent_norm_eps", 1e-6),
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
            max_position_embeddings=read.integer("max_position_embeddings", 4096),
            bos_token_id=read.integer_or_null("bos_token_id", None, minimum=0),
            eos_token_id=read.integers("eos_token_id", (), minimum=0),
        )
        read.finish()
        return config

    def to_dict(self) -> dict[str, Any]:
        """The config.json object that `from_dict` and transformers read back to the same numbers."""
        fields = dict(self.__dict__)
        rope: RopeParameters = fields.pop("rope")
        fields["eos_token_id"] = list(self.eos_token_id) or None
        return {
            "model_type": "deepseek_v3",
            **fields,
            "num_key_value_heads": self.num_attention_heads,
            "hidden_act": "silu",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "attention_bias": False,
            **write_rope(rope),
        }

    def to_tensors(self) -> dict[str, Array]:
        """`config/...` tensors of a KDTR model file."""
        return tree_to_tensors(self.to_dict())

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Array]) -> Self:
        """Read the `config/...` tensors among `tensors`; others are ignored."""
        return cls.from_tree(tensors_to_tree(tensors))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Self:
        """Read a config that was kept as tensors, where null is what is absent."""
        if isinstance(text := tree.get("text_config"), Mapping):
            return cls.from_dict({**tree, "text_config": {"q_lora_rank": None, **text}})
        return cls.from_dict({"q_lora_rank": None, **tree})

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Published tensor names of a checkpoint and their shapes, in file order of the layers."""
        hidden, heads, rank = self.hidden_size, self.num_attention_heads, self.kv_lora_rank
        query = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_hidden_layers):
            at = f"model.layers.{layer}."
            shapes[at + "input_layernorm.weight"] = (hidden,)
            if self.q_lora_rank is None:
                shapes[at + "self_attn.q_proj.weight"] = (query, hidden)
            else:
                shapes[at + "self_attn.q_a_proj.weight"] = (self.q_lora_rank, hidden)
                shapes[at + "self_attn.q_a_layernorm.weight"] = (self.q_lora_rank,)
                shapes[at + "self_attn.q_b_proj.weight"] = (query, self.q_lora_rank)
            shapes[at + "self_attn.kv_a_proj_with_mqa.weight"] = (rank + self.qk_rope_head_dim, hidden)
            shapes[at + "self_attn.kv_a_layernorm.weight"] = (rank,)
            shapes[at + "self_attn.kv_b_proj.weight"] = (heads * (self.qk_nope_head_dim + self.v_head_dim), rank)
            shapes[at + "self_attn.o_proj.weight"] = (hidden, heads * self.v_head_dim)
            shapes[at + "post_attention_layernorm.weight"] = (hidden,)
            if layer < self.first_k_dense_replace:
                shapes |= _swiglu_shapes(at + "mlp.", hidden, self.intermediate_size)
                continue
            shapes[at + "mlp.gate.weight"] = (self.n_routed_experts, hidden)
            shapes[at + "mlp.gate.e_score_correction_bias"] = (self.n_routed_experts,)
            for expert in range(self.n_routed_experts):
                shapes |= _swiglu_shapes(f"{at}mlp.experts.{expert}.", hidden, self.moe_intermediate_size)
            shared = self.moe_intermediate_size * self.n_shared_experts
            shapes |= _swiglu_shapes(at + "mlp.shared_experts.", hidden, shared)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter (arXiv 2602.06036): grouped-query attention over target features and one block of tokens."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeParameters
    block_size: int
    num_target_layers: int
    vocab_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even, got {self.head_dim}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.mask_token_id >= self.vocab_size:
            raise ConfigError(f"mask_token_id {self.mask_token_id} is outside vocab_size {self.vocab_size}")
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)):
            raise ConfigError(f"target_layer_ids must be strictly increasing and not empty, got {list(ids)}")
        # The last layer's output means the residual stream to some and the normed one to others, so nobody taps it.
        if ids[-1] >= self.num_target_layers - 1:
            raise ConfigError(
                f"target_layer_ids {list(ids)} must stay below the last target layer, {self.num_target_layers - 1}"
            )
        if self.rope.kind == "yarn" and self.rope.attention_factor is None:
            raise ConfigError(
                "a drafter with YaRN must give rope_scaling.attention_factor: 1 and 0.1 ln(factor) + 1 are both in use"
            )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Read a published config; ConfigError names the first offending key."""
        read = KeyReader(raw, "drafter config")
        read.only("model_type", "qwen3", "dflash", "kimi_k2", "deepseek_v3")
        read.only("hidden_act", "silu")
        read.only("attention_bias", False)
        read.only("use_sliding_window", False)
        read.only("sliding_window", None)
        layers = read.integer("num_hidden_layers")
        read.only("layer_types", ["full_attention"] * layers, None)
        nested = KeyReader(read.mapping("dflash_config"), "drafter config, dflash_config")
        # Some writers repeat the nested keys at the top, or nest block_size; the two must agree.
        for key in ("mask_token_id", "target_layer_ids"):
            read.only(key, nested.peek(key))
        block_size = read.integer("block_size", nested.peek("block_size"))
        nested.only("block_size", block_size)
        config = cls(
            hidden_size=read.integer("hidden_size"),
            intermediate_size=read.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=read.integer("num_attention_heads"),
            num_key_value_heads=read.integer("num_key_value_heads"),
            head_dim=read.integer("head_dim"),
            rms_norm_eps=read.number("rms_norm_eps"),
            rope=read_rope(read),
            block_size=block_size,
            num_target_layers=read.integer("num_target_layers"),
            vocab_size=read.integer("vocab_size"),
            mask_token_id=nested.integer("mask_token_id", minimum=0),
            target_layer_ids=nested.integers("target_layer_ids", minimum=0),
        )
        read.ignore(
            "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id", "max_window_layers"
        )
        nested.finish()
        read.finish()
        return config

    def to_dict(self) -> dict[str, Any]:
        """The config.json object that `from_dict` reads back."""
        fields = dict(self.__dict__)
        rope: RopeParameters = fields.pop("rope")
        nested = {
            "mask_token_id": fields.pop("mask_token_id"),
            "target_layer_ids": list(fields.pop("target_layer_ids")),
        }
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **fields,
            "hidden_act": "silu",
            "attention_bias": False,
            "dflash_config": nested,
            **write_rope(rope),
        }

    def to_tensors(self) -> dict[str, Array]:
        """`config/...` tensors of a KDTR drafter file."""
        return tree_to_tensors(self.to_dict())

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Array]) -> Self:
        """Read the `config/...` tensors among `tensors`; others are ignored."""
        return cls.from_dict(tensors_to_tree(tensors))

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Published tensor names of a drafter file and their shapes. Embedding and head are the target's."""
        hidden, dim = self.hidden_size, self.head_dim
        query, key = self.num_attention_heads * dim, self.num_key_value_heads * dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(self.target_layer_ids) * hidden),
            "hidden_norm.weight": (hidden,),
        }
        for layer in range(self.num_hidden_layers):
            at = f"layers.{layer}."
            shapes[at + "input_layernorm.weight"] = (hidden,)
            shapes[at + "self_attn.q_proj.weight"] = (query, hidden)
            shapes[at + "self_attn.k_proj.weight"] = (key, hidden)
            shapes[at + "self_attn.v_proj.weight"] = (key, hidden)
            shapes[at + "self_attn.o_proj.weight"] = (hidden, query)
            shapes[at + "self_attn.q_norm.weight"] = (dim,)
            shapes[at + "self_attn.k_norm.weight"] = (dim,)
            shapes[at + "post_attention_layernorm.weight"] = (hidden,)
            shapes |= _swiglu_shapes(at + "mlp.", hidden, self.intermediate_size)
        shapes["norm.weight"] = (hidden,)
        return shapes


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The published choice of tapped target layers (0-based): spread evenly from 1 to num_target_layers - 3."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))


def load_config_json(path: Path) -> dict[str, Any]:
    """The object in a config.json; ConfigError names the file if it is absent, no JSON or no object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: the config must be an object, got {type(raw).__name__}")
    return raw


def _swiglu_shapes(at: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        at + "gate_proj.weight": (intermediate, hidden),
        at + "up_proj.weight": (intermediate, hidden),
        at + "down_proj.weight": (hidden, intermediate),
    }


def _text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The nested text config; whatever else the outer config says about the language model must agree with it."""
    outer = KeyReader(raw, "multimodal config")
    text = dict(outer.mapping("text_config"))
    outer.ignore("model_type", "quantization_config", *_OUTER_KEYS)
    for key, value in raw.items():
        if key.startswith(_OUTER_PREFIXES) or key in ("bos_token_id", "eos_token_id"):
            outer.ignore(key)
        elif key in ("tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters"):
            outer.only(key, text.setdefault(key, value))
    outer.finish()
    return text
