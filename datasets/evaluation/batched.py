"""Plain decoding of many prompts in lock step, and the drafter run at every position of a decoded text at once.

The output of a lossless loop does not depend on the drafter, so one plain decode per prompt and one drafter pass per
position hold everything that tau needs. Same numbers as `reference.model` and `reference.dflash`, up to the rounding
that another batch size brings; many rows a matrix product make it several times faster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference.cache import LatentCache
from reference.config import DrafterConfig
from reference.mla import absorb_query, expand_output, latent_attention, project
from reference.model import Model
from reference.moe import MoeWeights, mixture, swiglu
from reference.numerics import Array, Numerics, softmax_with_lse
from reference.rope import rotate
from reference.sampling import SamplingParams, choice_margins, choose
from reference.weights import Weights


@dataclass(frozen=True)
class Decoded:
    """One plain decode: P prompt tokens, M output tokens, the last of them a stop token if `stopped`.

    features: [P+M-1 or more, taps * hidden], the drafter's input at every position that was read.
    margins: float64 [M], how far each choice was from another one (reference.sampling.choice_margins).
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    stopped: bool
    features: Array
    margins: NDArray[np.float64]


def decode(
    model: Model,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    *,
    taps: Sequence[int],
    stop_tokens: Collection[int],
    max_new_tokens: int,
) -> list[Decoded]:
    """Decode each prompt with its own sampling until a stop token (kept) or `max_new_tokens` tokens."""
    caches: list[LatentCache] = []
    features: list[list[Array]] = []
    tokens: list[list[int]] = []
    margins: list[list[float]] = []

    def take(at: int, logits: Array) -> None:
        """Choose the next token of sequence `at` after the last row of its cache."""
        place = caches[at].length - 1
        margins[at].append(float(choice_margins(logits[None], sampling[at], np.array([place]))[0]))
        tokens[at].append(choose(logits, sampling[at], place))

    for at, prompt in enumerate(prompts):
        caches.append(model.new_cache(len(prompt) + max_new_tokens))
        out = model.forward(np.asarray(prompt), caches[at], taps=taps)
        caches[at].commit(np.arange(len(prompt)))
        features.append([out.features])
        tokens.append([])
        margins.append([])
        take(at, out.logits[-1])

    while running := [i for i, t in enumerate(tokens) if len(t) < max_new_tokens and t[-1] not in stop_tokens]:
        logits, rows = _step(model, [tokens[i][-1] for i in running], [caches[i] for i in running], taps)
        for row, at in enumerate(running):
            features[at].append(rows[row : row + 1])
            take(at, logits[row])
    return [
        Decoded(tuple(p), tuple(t), t[-1] in stop_tokens, np.concatenate(f), np.array(m))
        for p, t, f, m in zip(prompts, tokens, features, margins, strict=True)
    ]


def _step(model: Model, tokens: list[int], caches: list[LatentCache], taps: Sequence[int]) -> tuple[Array, Array]:
    """One token of each sequence, committed to its cache: logits [B, V] and features [B, taps * hidden]."""
    config, numerics, eps = model.config, model.numerics, model.config.rms_norm_eps
    places = np.array([cache.length for cache in caches])
    cos, sin = config.rope.tables(places, config.qk_rope_head_dim, numerics)
    x = model.embedding[np.asarray(tokens)]
    after = []
    for index, layer in enumerate(model.layers):
        new = project(numerics.rms_norm(x, layer.input_norm, eps), layer.attention, cos, sin, config, numerics)
        q_latent = absorb_query(new.q_nope, layer.attention.w_uk, numerics)
        out = np.empty_like(q_latent)
        for row, cache in enumerate(caches):
            one = slice(row, row + 1)
            cache.write(index, new.latent[one], new.rope_key[one])
            latent, rope_key = cache.read(index, cache.length + 1)
            attended = latent_attention(
                q_latent[one], new.q_rope[one], latent, rope_key, config.softmax_scale, numerics
            )
            out[one] = numerics.store(attended[0])
        heads = expand_output(out, layer.attention.w_uv, numerics).reshape(len(x), -1)
        x = numerics.store(x + numerics.linear(heads, layer.attention.o_proj))
        normed = numerics.rms_norm(x, layer.post_attention_norm, eps)
        if isinstance(layer.mlp, MoeWeights):
            x = numerics.store(x + mixture(normed, layer.mlp, config, numerics))
        else:
            x = numerics.store(x + swiglu(normed, layer.mlp, numerics))
        after.append(x)
    for cache in caches:
        cache.commit([0])
    logits = numerics.linear(numerics.rms_norm(x, model.final_norm, eps), model.head.T)
    return logits, np.concatenate([after[tap] for tap in taps], axis=1)


class BatchDrafter:
    """The DFlash drafter of `reference.dflash`, over many root positions of one text in one pass (float32)."""

    def __init__(self, config: DrafterConfig, weights: Mapping[str, Array], embedding: Array, head: Array) -> None:
        self.config, self.numerics = config, Numerics.of("float32")
        given = Weights(weights, self.numerics)
        self._vectors = {name: given.take(name) for name in weights if name.endswith("norm.weight")}
        self._linears = {name: given.take_linear(name) for name in weights if name not in self._vectors}
        self._mlp = tuple(given.take_swiglu(f"layers.{index}.mlp.") for index in range(config.num_hidden_layers))
        self._embedding = self.numerics.store(embedding)
        self._head = np.ascontiguousarray(self.numerics.store(head).T)

    def proposals(
        self, features: Array, roots: Sequence[int], start: int, block_size: int, chunk: int = 16
    ) -> Iterator[Array]:
        """For each root token, which stand at positions start, start+1, ...: logits [block_size - 1, V].

        The root at position s sees features[:s] (features: [positions, taps * hidden]) and its own block.
        """
        numerics, config = self.numerics, self.config
        context = numerics.linear(numerics.store(features), self._linears["fc.weight"])
        context = numerics.rms_norm(context, self._vectors["hidden_norm.weight"], config.rms_norm_eps)
        turn = config.rope.tables(np.arange(len(context)), config.head_dim, numerics)
        kept = [self._keys_and_values(f"layers.{i}.", context, turn) for i in range(config.num_hidden_layers)]
        for first in range(0, len(roots), chunk):
            block = np.full((len(roots[first : first + chunk]), block_size), config.mask_token_id)
            block[:, 0] = roots[first : first + chunk]
            yield from self._block(block, start + first, kept)

    def _block(self, tokens: NDArray[np.int64], start: int, kept: list[tuple[Array, Array]]) -> Array:
        """tokens [m, b], the blocks of the roots at start, start+1, ... -> logits [m, b - 1, V]."""
        numerics, config, eps = self.numerics, self.config, self.config.rms_norm_eps
        m, b = tokens.shape
        places = (np.arange(start, start + m)[:, None] + np.arange(b)).reshape(-1)
        turn = config.rope.tables(places, config.head_dim, numerics)
        x = self._embedding[tokens.reshape(-1)]
        for index in range(config.num_hidden_layers):
            at = f"layers.{index}."
            normed = numerics.rms_norm(x, self._vectors[at + "input_layernorm.weight"], eps)
            query = self._heads(at, "q", normed)
            query = rotate(query, turn[0][:, None], turn[1][:, None], "half", numerics)
            key, value = self._keys_and_values(at, normed, turn)
            heads = self._attend(query.reshape(m, b, *query.shape[1:]), key, value, start, kept[index])
            x = numerics.store(x + numerics.linear(heads, self._linears[at + "self_attn.o_proj.weight"]))
            normed = numerics.rms_norm(x, self._vectors[at + "post_attention_layernorm.weight"], eps)
            x = numerics.store(x + swiglu(normed, self._mlp[index], numerics))
        rows = numerics.rms_norm(x.reshape(m, b, -1)[:, 1:], self._vectors["norm.weight"], eps)
        return numerics.linear(rows, self._head)

    def _heads(self, at: str, part: str, x: Array) -> Array:
        """Projection and, for q and k, its norm: x [n, hidden] -> [n, heads, head_dim]."""
        out = self.numerics.linear(x, self._linears[f"{at}self_attn.{part}_proj.weight"])
        out = out.reshape(len(x), -1, self.config.head_dim)
        if part == "v":
            return out
        return self.numerics.rms_norm(out, self._vectors[f"{at}self_attn.{part}_norm.weight"], self.config.rms_norm_eps)

    def _keys_and_values(self, at: str, x: Array, turn: tuple[Array, Array]) -> tuple[Array, Array]:
        key = rotate(self._heads(at, "k", x), turn[0][:, None], turn[1][:, None], "half", self.numerics)
        return key, self._heads(at, "v", x)

    def _attend(self, query: Array, key: Array, value: Array, start: int, kept: tuple[Array, Array]) -> Array:
        """query [m, b, heads, d]; key, value [m * b, kv heads, d] of the blocks; kept: the context's.

        Block i sees context positions before start + i and its own b rows. Returns [m * b, heads * d].
        """
        m, b, heads, dim = query.shape
        shared = key.shape[1]
        group = heads // shared
        end = start + m - 1
        grouped = query.reshape(m, b, shared, group, dim).transpose(2, 0, 1, 3, 4)  # [kv, m, b, group, d]
        own = [part.reshape(m, b, shared, dim).transpose(2, 0, 1, 3) for part in (key, value)]  # [kv, m, b, d]
        before = [part[:end].transpose(1, 0, 2) for part in kept]  # [kv, end, d]
        folded = grouped.reshape(shared, m * b * group, dim)
        far = (folded @ before[0].transpose(0, 2, 1)).reshape(shared, m, b * group, end)
        hidden = np.arange(end) >= (start + np.arange(m))[:, None]
        far = np.where(hidden[None, :, None], np.float32(-np.inf), far)
        near = grouped.reshape(shared, m, b * group, dim) @ own[0].transpose(0, 1, 3, 2)
        scores = np.concatenate([far, near], axis=-1) * np.float32(dim**-0.5)
        weights = softmax_with_lse(scores)[0]
        out = (weights[..., :end].reshape(shared, m * b * group, end) @ before[1]).reshape(shared, m, b * group, dim)
        out = out + weights[..., end:] @ own[1]
        joined: Array = out.reshape(shared, m, b, group, dim).transpose(1, 2, 0, 3, 4).reshape(m * b, heads * dim)
        return joined
