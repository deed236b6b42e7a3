"""The DFlash drafter (arXiv 2602.06036): a small transformer that fills a whole block of tokens in one pass.

Per committed position it gets the target's residual stream after the layers `target_layer_ids`, concatenated in that
order: context = hidden_norm(fc(features)). Per round it embeds [root token, mask, mask, ...] with the target's table
and runs its layers over that block. Queries come from the block; keys and values from [context ; block] with the same
projections, the context without the layer's input norm. Queries and keys are normed per head and turned by
rotate-half RoPE over the whole head; context positions are 0 .. S-1, block positions S .. S+b-1. Nothing is masked:
every row sees all context and the whole block. After the final norm the target's head is applied to rows 1 .. b-1;
row j predicts the token **at** its own position S + j. Context keys and values are kept, the block's are dropped.

Tensors of a checkpoint (published names; hidden H, taps t, heads x head_dim Q, kv heads x head_dim K, FFN I):
fc.weight [H, t H], hidden_norm.weight [H], norm.weight [H], and per layer N under `layers.N.`:
input_layernorm.weight [H], self_attn.q_proj.weight [Q, H], self_attn.k_proj.weight [K, H],
self_attn.v_proj.weight [K, H], self_attn.o_proj.weight [H, Q], self_attn.q_norm.weight [head_dim],
self_attn.k_norm.weight [head_dim], post_attention_layernorm.weight [H], mlp.gate_proj.weight [I, H],
mlp.up_proj.weight [I, H], mlp.down_proj.weight [H, I]. No embedding and no head: they are the target's.

Names that `trace` receives. From `observe`, new positions only: `context_in` and per layer `layers.<i>/` + context_key,
context_value. From `block_logits`: `embedding`; per layer q, k, v (of the block; q and k rotated), attn_heads,
attn_out, ffn_out, hidden; then `final_norm` (rows 1..) and `logits`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reference.config import DrafterConfig
from reference.moe import SwigluWeights, swiglu
from reference.numerics import Array, Numerics, softmax_with_lse
from reference.rope import rotate
from reference.weights import Weights, check_weights


@dataclass(frozen=True)
class DraftLayer:
    """Weights of one layer, [in, out]. kv_proj [H, 2K]: k columns, then v columns."""

    input_norm: Array
    q_proj: Array
    kv_proj: Array
    o_proj: Array
    q_norm: Array
    k_norm: Array
    post_attention_norm: Array
    mlp: SwigluWeights


class DFlash:
    """A drafter for one sequence at a time (see reference.drafter for the protocol).

    weights: every tensor of `config.weight_shapes()`, any float dtype. target_embedding, target_head: [vocab_size, H].
    block_size: at most the trained one, which is the default; a block of b proposes b - 1 tokens.
    """

    def __init__(
        self,
        config: DrafterConfig,
        weights: Mapping[str, Array],
        target_embedding: Array,
        target_head: Array,
        precision: str | Numerics = "float32",
        block_size: int | None = None,
    ) -> None:
        check_weights(weights, config.weight_shapes())
        table = (config.vocab_size, config.hidden_size)
        for name, array in (("target_embedding", target_embedding), ("target_head", target_head)):
            if array.shape != table:
                raise ValueError(f"{name} has shape {list(array.shape)}, the drafter needs {list(table)}")
        self.block_size = config.block_size if block_size is None else block_size
        if not 1 <= self.block_size <= config.block_size:
            raise ValueError(f"block_size {self.block_size} is outside 1..{config.block_size}, the trained block")
        self.config = config
        self.taps = config.target_layer_ids
        self.numerics = numerics = Numerics.of(precision)
        self._embedding = numerics.store(target_embedding)
        self._head = np.ascontiguousarray(numerics.store(target_head).T)  # shared with a Model's own

        given = Weights(weights, numerics)
        self._fc, self._hidden_norm = given.take_linear("fc.weight"), given.take("hidden_norm.weight")
        self._norm = given.take("norm.weight")
        self._layers = tuple(_layer(given, f"layers.{index}.") for index in range(config.num_hidden_layers))
        self._context = _Context(config, numerics)

    @property
    def context_length(self) -> int:
        """Committed positions observed since `reset`; also the position of the next root token."""
        return self._context.length

    def reset(self, prompt: npt.ArrayLike) -> None:
        """Forget everything; the prompt's own features come through `observe`."""
        self._context = _Context(self.config, self.numerics)

    def observe(
        self,
        tokens: npt.ArrayLike,
        features: Array | None,
        trace: MutableMapping[str, Array] | None = None,
    ) -> None:
        """Add m newly committed positions, in order: tokens [m] (unused) and target features [m, taps * H]."""
        count = len(np.asarray(tokens))
        width = len(self._fc)
        if features is None or features.shape != (count, width):
            got = None if features is None else list(features.shape)
            raise ValueError(f"features must have shape [{count}, {width}], got {got}")
        numerics, eps = self.numerics, self.config.rms_norm_eps
        context = numerics.rms_norm(numerics.linear(numerics.store(features), self._fc), self._hidden_norm, eps)
        cos, sin = self._turn(self.context_length, count)
        record: MutableMapping[str, Array] = {} if trace is None else trace
        record["context_in"] = context
        pairs = [self._keys_and_values(layer, context, cos, sin) for layer in self._layers]
        for index, (key, value) in enumerate(pairs):
            record[f"layers.{index}/context_key"], record[f"layers.{index}/context_value"] = key, value
        self._context.append(pairs)

    def propose(self, root_token: int, depth_limit: int) -> Array:
        """Logits [min(depth_limit, block_size - 1), V]; row d - 1 is about depth d. The whole block always runs."""
        if depth_limit < 0:
            raise ValueError(f"depth_limit must be at least 0, got {depth_limit}")
        return self.block_logits(root_token)[:depth_limit]

    def block_logits(self, root_token: int, trace: MutableMapping[str, Array] | None = None) -> Array:
        """Logits [block_size - 1, V] of one block that starts with `root_token` at position `context_length`."""
        config, numerics, eps = self.config, self.numerics, self.config.rms_norm_eps
        if not 0 <= root_token < config.vocab_size:
            raise ValueError(f"root token {root_token} is outside the vocabulary 0..{config.vocab_size - 1}")
        tokens = np.full(self.block_size, config.mask_token_id)
        tokens[0] = root_token
        cos, sin = self._turn(self.context_length, self.block_size)
        record: MutableMapping[str, Array] = {} if trace is None else trace
        x = record["embedding"] = self._embedding[tokens]
        for index, layer in enumerate(self._layers):
            at = f"layers.{index}/"
            normed = numerics.rms_norm(x, layer.input_norm, eps)
            query = numerics.linear(normed, layer.q_proj).reshape(self.block_size, config.num_attention_heads, -1)
            query = numerics.rms_norm(query, layer.q_norm, eps)
            query = record[at + "q"] = rotate(query, cos[:, None], sin[:, None], "half", numerics)
            key, value = record[at + "k"], record[at + "v"] = self._keys_and_values(layer, normed, cos, sin)
            context_key, context_value = self._context.read(index)
            heads = record[at + "attn_heads"] = grouped_attention(
                query, np.concatenate([context_key, key]), np.concatenate([context_value, value]), numerics
            )
            out = record[at + "attn_out"] = numerics.linear(heads.reshape(self.block_size, -1), layer.o_proj)
            x = numerics.store(x + out)
            normed = numerics.rms_norm(x, layer.post_attention_norm, eps)
            out = record[at + "ffn_out"] = swiglu(normed, layer.mlp, numerics)
            x = record[at + "hidden"] = numerics.store(x + out)
        normed = record["final_norm"] = numerics.rms_norm(x[1:], self._norm, eps)
        logits = record["logits"] = numerics.linear(normed, self._head)
        return logits

    def _keys_and_values(self, layer: DraftLayer, x: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        """x [m, H] -> rotated keys and values, each [m, kv heads, head_dim]."""
        config = self.config
        both = self.numerics.linear(x, layer.kv_proj).reshape(len(x), 2, config.num_key_value_heads, config.head_dim)
        key = self.numerics.rms_norm(both[:, 0], layer.k_norm, config.rms_norm_eps)
        return rotate(key, cos[:, None], sin[:, None], "half", self.numerics), both[:, 1]

    def _turn(self, start: int, count: int) -> tuple[Array, Array]:
        positions = np.arange(start, start + count, dtype=np.int64)
        return self.config.rope.tables(positions, self.config.head_dim, self.numerics)


def grouped_attention(query: Array, key: Array, value: Array, numerics: Numerics) -> Array:
    """Unmasked grouped-query attention: query [m, heads, d], key and value [s, kv heads, d] -> [m, heads, d].

    Query head h reads kv head h // (heads / kv heads); the scale is d^-0.5. Rounded operation by operation.
    """
    rows, heads, dim = query.shape
    shared = key.shape[1]
    grouped = query.reshape(rows, shared, heads // shared, dim).transpose(1, 2, 0, 3).reshape(shared, -1, dim)
    scores = numerics.store(grouped @ key.transpose(1, 2, 0))
    scores = numerics.store(scores * numerics.dtype.type(dim**-0.5))
    probability = numerics.store(softmax_with_lse(numerics.wide(scores))[0])
    out = numerics.store(probability @ value.transpose(1, 0, 2))
    return out.reshape(shared, heads // shared, rows, dim).transpose(2, 0, 1, 3).reshape(rows, heads, dim)


class _Context:
    """Keys and values of the committed positions, per layer; storage doubles when it is full."""

    def __init__(self, config: DrafterConfig, numerics: Numerics) -> None:
        self.length = 0
        self._rows = np.empty(
            (config.num_hidden_layers, 2, 0, config.num_key_value_heads, config.head_dim), numerics.dtype
        )

    def append(self, pairs: list[tuple[Array, Array]]) -> None:
        """One (key, value) pair of shape [m, kv heads, head_dim] per layer."""
        end = self.length + len(pairs[0][0])
        layers, _, capacity, *row = self._rows.shape
        if end > capacity:
            grown = np.empty((layers, 2, max(end, 2 * capacity), *row), self._rows.dtype)
            grown[:, :, : self.length] = self._rows[:, :, : self.length]
            self._rows = grown
        for layer, pair in enumerate(pairs):
            self._rows[layer, :, self.length : end] = pair
        self.length = end

    def read(self, layer: int) -> tuple[Array, Array]:
        return self._rows[layer, 0, : self.length], self._rows[layer, 1, : self.length]


def _layer(weights: Weights, at: str) -> DraftLayer:
    attention = at + "self_attn."
    return DraftLayer(
        input_norm=weights.take(at + "input_layernorm.weight"),
        q_proj=weights.take_linear(attention + "q_proj.weight"),
        kv_proj=weights.take_linear(attention + "k_proj.weight", attention + "v_proj.weight"),
        o_proj=weights.take_linear(attention + "o_proj.weight"),
        q_norm=weights.take(attention + "q_norm.weight"),
        k_norm=weights.take(attention + "k_norm.weight"),
        post_attention_norm=weights.take(at + "post_attention_layernorm.weight"),
        mlp=weights.take_swiglu(at + "mlp."),
    )
