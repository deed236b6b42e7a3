"""The target: a DeepSeek-V3 / Kimi-K2 forward pass over a latent cache. Prefill, AR token and tree are the same call.

A layer: x += attention(norm(x)); x += feed-forward(norm(x)). Then a final norm and the head. See reference.mla and
reference.moe for the two halves, reference.numerics for the precision modes.

Names that `trace` receives, each an array over the N rows: `embedding`; per layer `layers.<i>/` + attn_norm,
q_nope [N, H, n], q_rope [N, H, p] (rotated), latent [N, r] (normalised), rope_key [N, p] (rotated), q_latent and
attn_latent [N, H, r] (absorbed form only), attn_heads [N, H, v], attn_out, ffn_norm, router_scores [N, E],
expert_ids int32 and expert_weights [N, k], routed_out and shared_out (these five in mixture layers only), ffn_out, and
hidden (the residual stream after the layer); `final_norm`; `logits`. Where no shape is given it is [N, hidden].
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from reference.cache import LatentCache
from reference.config import ModelConfig
from reference.mla import (
    MlaWeights,
    absorb_query,
    expand_output,
    expanded_attention,
    expanded_is_cheaper,
    key_part,
    latent_attention,
    project,
)
from reference.moe import MoeWeights, SwigluWeights, mixture, swiglu
from reference.numerics import Array, Numerics
from reference.visibility import check_positions, check_visibility
from reference.weights import WeightError, Weights, check_weights

AttentionForm: TypeAlias = Literal["absorbed", "expanded", "cheapest"]


@dataclass(frozen=True)
class Forward:
    """logits [N, vocab_size]; features [N, len(taps) * hidden_size], the residual stream after each tapped layer."""

    logits: Array
    features: Array


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; `mlp` is dense in the first layers and a mixture in the others."""

    input_norm: Array
    attention: MlaWeights
    post_attention_norm: Array
    mlp: SwigluWeights | MoeWeights


class Model:
    """A target with its weights in one precision. It holds no state: sequences live in the caches it makes.

    weights: every tensor of `config.weight_shapes()` by its published name, any float dtype; lm_head.weight may also be
    given when the config ties it, and must then equal the embedding. WeightError lists all that is wrong.
    attention: "absorbed" (as an engine computes), "expanded" (as published) or "cheapest", the one of the two that
    takes fewer multiplications, chosen call by call. They are equal up to rounding.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Array],
        precision: str | Numerics = "float32",
        attention: AttentionForm = "absorbed",
    ) -> None:
        if attention not in get_args(AttentionForm):
            raise ValueError(f"attention must be one of {', '.join(get_args(AttentionForm))}, got {attention!r}")
        self.config = config
        self.numerics = numerics = Numerics.of(precision)
        self.attention = attention
        head_shape = (config.vocab_size, config.hidden_size)
        check_weights(weights, config.weight_shapes(), optional={"lm_head.weight": head_shape})
        given = Weights(weights, numerics)
        self.embedding = given.take("model.embed_tokens.weight")
        self.final_norm = given.take("model.norm.weight")
        # Held [hidden, vocab_size]; a tied head costs that much again and is faster for it.
        self._head = given.take_linear("lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight")
        if config.tie_word_embeddings and not np.array_equal(self.head, self.embedding, equal_nan=True):
            raise WeightError("tie_word_embeddings is true but lm_head.weight differs from model.embed_tokens.weight")
        self.layers = tuple(_layer(given, config, index) for index in range(config.num_hidden_layers))

    @property
    def head(self) -> Array:
        """[vocab_size, hidden], a view."""
        return self._head.T

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def new_cache(self, capacity: int, block_size: int | None = None) -> LatentCache:
        """An empty cache for `capacity` rows; with block_size, scattered over blocks of that many rows."""
        config = self.config
        return LatentCache(
            config.num_hidden_layers,
            config.kv_lora_rank,
            config.qk_rope_head_dim,
            capacity,
            self.numerics.dtype,
            block_size=block_size,
        )

    def forward(
        self,
        tokens: npt.ArrayLike,
        cache: LatentCache,
        *,
        positions: npt.ArrayLike | None = None,
        visibility: npt.NDArray[np.bool_] | None = None,
        taps: Sequence[int] = (),
        trace: MutableMapping[str, Array] | None = None,
    ) -> Forward:
        """Run the N rows `tokens` after the cache's committed rows; writes their N scratch rows, commits nothing.

        visibility: bool [N, N], row i sees row j: itself and its ancestors, parents before children; every row sees all
        committed rows. None: each row sees the ones before it. positions: int [N], default committed length + depth
        (which is length + index without a visibility). ValueError names what does not fit, with both shapes.
        """
        ids = self._checked_tokens(tokens)
        rows, prefix, numerics = len(ids), cache.length, self.numerics
        sees = np.tri(rows, dtype=np.bool_) if visibility is None else check_visibility(visibility, rows)
        place = check_positions(positions, sees, prefix)
        for tap in taps:
            if not 0 <= tap < len(self.layers):
                raise ValueError(f"tap {tap} is outside the layers 0..{len(self.layers) - 1}")
        cos, sin = self.config.rope.tables(place, self.config.qk_rope_head_dim, numerics)
        record: MutableMapping[str, Array] = {} if trace is None else trace
        x = record["embedding"] = self.embedding[ids]
        after: dict[int, Array] = {}
        for index, layer in enumerate(self.layers):
            at = f"layers.{index}/"
            normed = record[at + "attn_norm"] = numerics.rms_norm(x, layer.input_norm, self.config.rms_norm_eps)
            x = numerics.store(x + self._attend(index, layer.attention, normed, cos, sin, sees, cache, record))
            normed = record[at + "ffn_norm"] = numerics.rms_norm(x, layer.post_attention_norm, self.config.rms_norm_eps)
            if isinstance(layer.mlp, MoeWeights):
                out = mixture(normed, layer.mlp, self.config, numerics, record, at)
            else:
                out = swiglu(normed, layer.mlp, numerics)
            record[at + "ffn_out"] = out
            x = record[at + "hidden"] = numerics.store(x + out)
            after[index] = x
        normed = record["final_norm"] = numerics.rms_norm(x, self.final_norm, self.config.rms_norm_eps)
        logits = record["logits"] = numerics.linear(normed, self._head)
        features = [after[tap] for tap in taps]
        return Forward(logits, np.concatenate(features, axis=1) if features else np.empty((rows, 0), x.dtype))

    def _attend(
        self,
        index: int,
        weights: MlaWeights,
        x: Array,
        cos: Array,
        sin: Array,
        sees: npt.NDArray[np.bool_],
        cache: LatentCache,
        record: MutableMapping[str, Array],
    ) -> Array:
        """Attention of one layer: writes the rows' cache entries, then looks at them and at the committed ones."""
        config, numerics, at = self.config, self.numerics, f"layers.{index}/"
        new = project(x, weights, cos, sin, config, numerics)
        cache.write(index, new.latent, new.rope_key)
        latent, rope_key = cache.read(index, cache.length + len(x))
        form = self.attention
        if form == "cheapest":
            form = "expanded" if expanded_is_cheaper(len(x), len(latent), config) else "absorbed"
        if form == "absorbed":
            q_latent = record[at + "q_latent"] = absorb_query(new.q_nope, weights.w_uk, numerics)
            out, _ = latent_attention(
                q_latent, new.q_rope, latent, rope_key, config.softmax_scale, numerics, visible=sees
            )
            out = record[at + "attn_latent"] = numerics.store(out)
            heads = expand_output(out, weights.w_uv, numerics)
        else:
            heads = expanded_attention(new, latent, rope_key, weights, config.softmax_scale, numerics, sees)
        record.update({at + name: getattr(new, name) for name in ("q_nope", "q_rope", "latent", "rope_key")})
        record[at + "attn_heads"] = heads
        out = record[at + "attn_out"] = numerics.linear(heads.reshape(len(x), -1), weights.o_proj)
        return out

    def _checked_tokens(self, tokens: npt.ArrayLike) -> npt.NDArray[Any]:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"tokens must be a non-empty 1-d integer array, got {ids.dtype}{list(ids.shape)}")
        outside = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        if outside.size:
            row = int(outside[0])
            raise ValueError(f"token {ids[row]} in row {row} is outside the vocabulary 0..{self.vocab_size - 1}")
        return ids


def _layer(weights: Weights, config: ModelConfig, index: int) -> Layer:
    at = f"model.layers.{index}."
    attention = at + "self_attn."
    query: Array | tuple[Array, Array, Array]
    if config.q_lora_rank is None:
        query = weights.take_linear(attention + "q_proj.weight")
    else:
        query = (
            weights.take_linear(attention + "q_a_proj.weight"),
            weights.take(attention + "q_a_layernorm.weight"),
            weights.take_linear(attention + "q_b_proj.weight"),
        )
    by_head = (config.kv_lora_rank, config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim)
    kv_b_proj = weights.take_linear(attention + "kv_b_proj.weight").reshape(by_head)
    mlp: SwigluWeights | MoeWeights
    if index < config.first_k_dense_replace:
        mlp = weights.take_swiglu(at + "mlp.")
    else:
        bias = weights.take_wide(at + "mlp.gate.e_score_correction_bias")
        if not np.isfinite(bias).all():
            # It would only shift the choice of experts, so nothing later could notice.
            expert = int(np.flatnonzero(~np.isfinite(bias))[0])
            raise WeightError(f"{at}mlp.gate.e_score_correction_bias[{expert}] is {bias[expert]}, must be finite")
        mlp = MoeWeights(
            router=np.ascontiguousarray(weights.take_wide(at + "mlp.gate.weight").T),
            bias=bias,
            experts=tuple(weights.take_swiglu(f"{at}mlp.experts.{e}.") for e in range(config.n_routed_experts)),
            shared=weights.take_swiglu(at + "mlp.shared_experts."),
        )
    return Layer(
        input_norm=weights.take(at + "input_layernorm.weight"),
        attention=MlaWeights(
            query=query,
            kv_a_proj=weights.take_linear(attention + "kv_a_proj_with_mqa.weight"),
            kv_a_norm=weights.take(attention + "kv_a_layernorm.weight"),
            kv_b_proj=kv_b_proj,
            w_uk=key_part(kv_b_proj, config.qk_nope_head_dim),
            o_proj=weights.take_linear(attention + "o_proj.weight"),
        ),
        post_attention_norm=weights.take(at + "post_attention_layernorm.weight"),
        mlp=mlp,
    )
