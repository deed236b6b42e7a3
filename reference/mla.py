"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) of one layer, in the absorbed and in the expanded form.

Sizes: N new rows, S rows of cache (committed prefix, then the N new ones), H heads, r = kv_lora_rank,
p = qk_rope_head_dim, n = qk_nope_head_dim, v = v_head_dim.

A cache row is the **normalised** latent [r] and the **rotated** rope key [p], shared by all heads. Absorbed: fold W_UK
into the query and W_UV into the output, so that attention reads only cache rows:

    q_latent = q_nope W_UK                                  [N, H, r]
    score    = scale (q_latent . latent + q_rope . rope_key)
    out      = softmax(score) latent  ->  W_UV  ->  [N, H, v]

Log-sum-exp values are natural logarithms (base e) of the scaled scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reference.config import ModelConfig
from reference.numerics import Array, Numerics, softmax_with_lse
from reference.rope import rotate


@dataclass(frozen=True)
class MlaWeights:
    """Weights of one layer, each [in, out]; kv_b_proj by head.

    query: q_proj [hidden, H(n+p)] when q_lora_rank is null; otherwise q_a_proj, q_a_layernorm and q_b_proj.
    """

    query: Array | tuple[Array, Array, Array]
    kv_a_proj: Array  # [hidden, r + p]
    kv_a_norm: Array  # [r]
    kv_b_proj: Array  # [r, H, n + v]; per head the n columns come first
    w_uk: Array  # [H, n, r], see `key_part`
    o_proj: Array  # [H v, hidden]

    @property
    def w_uv(self) -> Array:
        """[H, r, v], a view."""
        return self.kv_b_proj[..., self.w_uk.shape[1] :].transpose(1, 0, 2)


@dataclass(frozen=True)
class MlaInputs:
    """What attention needs of the new rows: queries (rope part rotated) and their cache rows."""

    q_nope: Array  # [N, H, n]
    q_rope: Array  # [N, H, p]
    latent: Array  # [N, r]
    rope_key: Array  # [N, p]


def key_part(kv_b_proj: Array, nope_dim: int) -> Array:
    """W_UK [H, n, r] of kv_b_proj [r, H, n + v]: a copy, since BLAS is slow on its transpose for few rows."""
    return np.ascontiguousarray(kv_b_proj[..., :nope_dim].transpose(1, 2, 0))


def project(
    x: Array, weights: MlaWeights, cos: Array, sin: Array, config: ModelConfig, numerics: Numerics
) -> MlaInputs:
    """x [N, hidden] (already normed), cos and sin [N, p/2] -> queries and cache rows of the N rows."""
    n, rank, eps = config.qk_nope_head_dim, config.kv_lora_rank, config.latent_norm_eps
    if isinstance(weights.query, tuple):
        q_a_proj, q_a_norm, q_b_proj = weights.query
        compressed = numerics.rms_norm(numerics.linear(x, q_a_proj), q_a_norm, eps)
        query = numerics.linear(compressed, q_b_proj)
    else:
        query = numerics.linear(x, weights.query)
    query = query.reshape(len(x), config.num_attention_heads, n + config.qk_rope_head_dim)
    kv = numerics.linear(x, weights.kv_a_proj)
    return MlaInputs(
        q_nope=query[..., :n],
        q_rope=rotate(query[..., n:], cos[:, None], sin[:, None], config.rope_layout, numerics),
        latent=numerics.rms_norm(kv[:, :rank], weights.kv_a_norm, eps),
        rope_key=rotate(kv[:, rank:], cos, sin, config.rope_layout, numerics),
    )


def absorb_query(q_nope: Array, w_uk: Array, numerics: Numerics) -> Array:
    """q_nope [N, H, n] -> q_latent [N, H, r]."""
    return numerics.store(np.ascontiguousarray((q_nope.transpose(1, 0, 2) @ w_uk).transpose(1, 0, 2)))


def expand_output(out_latent: Array, w_uv: Array, numerics: Numerics) -> Array:
    """Attention output in latent space [N, H, r] -> per head [N, H, v]."""
    return numerics.store(np.ascontiguousarray((out_latent.transpose(1, 0, 2) @ w_uv).transpose(1, 0, 2)))


def latent_attention(
    q_latent: Array,
    q_rope: Array,
    latent: Array,
    rope_key: Array,
    scale: float,
    numerics: Numerics,
    *,
    visible: npt.NDArray[np.bool_] | None = None,
    chunk: int | None = None,
) -> tuple[Array, Array]:
    """Absorbed attention of N rows over S cache rows.

    q_latent [N, H, r], q_rope [N, H, p] (unscaled), latent [S, r], rope_key [S, p].
    visible: bool [N, M], M <= S: which of the last M cache rows each row sees, earlier ones are seen by all; None: all.
    chunk: keys per pass, merged by log-sum-exp; None: one pass.
    Returns out [N, H, r] and lse [N, H], both wide; a row that sees nothing gives 0 and -inf.

    A cache row that a row does not see has no influence on it, NaN included; a row that sees a NaN or infinity is NaN.
    As in a fused kernel, scores stay wide and only the probabilities are rounded before the product with the latents.
    """
    rows, heads, rank = q_latent.shape
    length = len(latent)
    for name, array, shape in (
        ("q_rope", q_rope, (rows, heads, q_rope.shape[-1])),
        ("latent", latent, (length, rank)),
        ("rope_key", rope_key, (length, q_rope.shape[-1])),
    ):
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(array.shape)}")
    seen = _visible_over(rows, length, visible)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    step = chunk or max(length, 1)
    parts = []
    for start in range(0, max(length, 1), step):
        keys = slice(start, min(start + step, length))
        hidden = None if seen is None else _hidden_part(seen, length, keys)
        parts.append(_attend(q_latent, q_rope, latent[keys], rope_key[keys], scale, numerics, hidden))
    return parts[0] if len(parts) == 1 else merge_partials(parts)


def merge_partials(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Join attention over disjoint key sets: parts (out [..., r], lse [...] base e) -> (out, lse) of their union.

    Empty parts (lse -inf) are neutral; if all are empty the result is 0 and -inf.
    """
    lse = np.stack([part[1] for part in parts])
    weights, total = softmax_with_lse(np.moveaxis(lse, 0, -1))
    out = np.zeros_like(parts[0][0])
    for index, (part, part_lse) in enumerate(parts):
        # An empty part holds 0, but what an implementation leaves there must not matter.
        out += np.where(np.isneginf(part_lse)[..., None], out.dtype.type(0), part * weights[..., index, None])
    return out, total


def expanded_attention(
    inputs: MlaInputs,
    latent: Array,
    rope_key: Array,
    weights: MlaWeights,
    scale: float,
    numerics: Numerics,
    visible: npt.NDArray[np.bool_] | None = None,
) -> Array:
    """The same attention with every head's keys and values expanded, rounded operation by operation as published.

    latent [S, r], rope_key [S, p], visible as in `latent_attention`. Returns [N, H, v].
    """
    rank, heads, width = weights.kv_b_proj.shape
    expanded = numerics.linear(latent, weights.kv_b_proj.reshape(rank, -1)).reshape(-1, heads, width)
    nope = weights.w_uk.shape[1]
    key, value = expanded[..., :nope], expanded[..., nope:].transpose(1, 0, 2)
    scores = inputs.q_nope.transpose(1, 0, 2) @ key.transpose(1, 2, 0)  # [H, N, S]
    scores += inputs.q_rope.transpose(1, 0, 2) @ rope_key.T
    scores = numerics.store(numerics.store(scores) * numerics.dtype.type(scale))
    seen = _visible_over(len(inputs.q_nope), len(latent), visible)
    if seen is not None and seen.shape[1]:
        np.copyto(scores[..., len(latent) - seen.shape[1] :], -np.inf, where=~seen)
    probability = numerics.store(softmax_with_lse(numerics.wide(scores))[0])
    out = np.ascontiguousarray((probability @ value).transpose(1, 0, 2))
    if not np.isfinite(out).all():
        damaged, poisoned = _damage(latent, rope_key, None if seen is None else ~seen, len(out))
        out = np.ascontiguousarray((probability @ np.where(damaged[:, None], 0, value)).transpose(1, 0, 2))
        out[poisoned] = np.nan
    return numerics.store(out)


def expanded_is_cheaper(rows: int, length: int, config: ModelConfig) -> bool:
    """Whether N = rows over S = length takes fewer multiplications expanded: each cache row once, then short rows."""
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    plain = config.qk_nope_head_dim + config.v_head_dim
    absorbed = rows * (rank * plain + length * (2 * rank + rope))
    return length * rank * plain + rows * length * (plain + rope) < absorbed


def _attend(
    q_latent: Array,
    q_rope: Array,
    latent: Array,
    rope_key: Array,
    scale: float,
    numerics: Numerics,
    hidden: npt.NDArray[np.bool_] | None,
) -> tuple[Array, Array]:
    """One pass over the given keys. hidden: bool [N, M], True where a row must not see one of the last M keys."""
    rows, heads, rank = q_latent.shape
    length = len(latent)
    scores = q_latent.reshape(rows * heads, rank) @ latent.T + q_rope.reshape(rows * heads, -1) @ rope_key.T
    scores = numerics.wide(scores).reshape(rows, heads, length) * numerics.island.type(scale)
    if hidden is not None and hidden.shape[1]:
        np.copyto(scores[..., length - hidden.shape[1] :], -np.inf, where=hidden[:, None])
    probability, lse = softmax_with_lse(scores)
    probability = numerics.store(probability).reshape(rows * heads, length)
    out = (probability @ latent).reshape(rows, heads, rank)
    if not np.isfinite(out).all():
        damaged, poisoned = _damage(latent, rope_key, hidden, rows)
        out = (probability @ np.where(damaged[:, None], latent.dtype.type(0), latent)).reshape(out.shape)
        out[poisoned] = np.nan
    return numerics.wide(out), lse


def _damage(
    latent: Array, rope_key: Array, hidden: npt.NDArray[np.bool_] | None, rows: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which cache rows [S] hold a NaN or infinity, and which query rows [N] see one of them.

    A hidden value has weight 0, but 0 * NaN is NaN: the sum must be taken without it.
    """
    damaged = np.logical_not(np.isfinite(latent).all(axis=1) & np.isfinite(rope_key).all(axis=1))
    sees = np.ones((rows, len(latent)), np.bool_)
    if hidden is not None:
        sees[:, len(latent) - hidden.shape[1] :] = ~hidden
    return damaged, np.any(sees & damaged, axis=1)


def _visible_over(rows: int, length: int, visible: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.bool_] | None:
    if visible is None:
        return None
    if visible.dtype != np.bool_:
        raise ValueError(f"visible must be bool (True = sees), got {visible.dtype}")
    if visible.ndim != 2 or visible.shape[0] != rows or visible.shape[1] > length:
        raise ValueError(f"visible must have shape [{rows}, at most {length}], got {list(visible.shape)}")
    return visible


def _hidden_part(seen: npt.NDArray[np.bool_], length: int, keys: slice) -> npt.NDArray[np.bool_]:
    """Complement of `seen`, cut to those of its columns (the last of `length`) that lie in `keys`."""
    first = length - seen.shape[1]
    return ~seen[:, max(keys.start - first, 0) : max(keys.stop - first, 0)]
