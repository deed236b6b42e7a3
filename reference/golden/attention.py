"""Golden attention: N tree rows over a latent cache, in the absorbed form.

attention_small stores its arrays. attention_full has the production sizes (512 latents, 64 rope channels) and inputs
too large to store: they come from the counter-based generator, and the results of sampled (row, head) pairs are kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import kdtr
from reference.golden.files import GoldenFile, rounded
from reference.golden.inputs import gaussian, gaussian_at, integers
from reference.golden.topk import bf16
from reference.mla import latent_attention
from reference.numerics import PRECISIONS

SEED = 20260415
FULL_RANK, FULL_ROPE = 512, 64
FULL_SCALE = 0.1352337788608801  # DeepSeek-V3: 192^-0.5 times its YaRN factor squared
_F64 = PRECISIONS["float64"]
# Measured against float32 and emulated bf16 (reference/tests/test_golden.py), with room for another order of summation.
_F32 = kdtr.Tolerance.close(3e-6, 1e-5)
_BF16 = kdtr.Tolerance.close(8e-3, 1e-2)


def golden_files() -> list[GoldenFile]:
    return [_small(), _full()]


def tree_parents(seed: int, rows: int) -> NDArray[np.int32]:
    """A random tree with the root first: row i > 0 hangs on one of the rows before it, mostly a recent one."""
    drawn = integers(seed, 9, 1 << 16, rows)
    parents = np.arange(rows) - 1 - drawn % np.minimum(np.maximum(np.arange(rows), 1), 7)
    parents[0] = -1
    found: NDArray[np.int32] = np.maximum(parents, -1).astype(np.int32)
    return found


def visibility_of(parents: NDArray[np.int32]) -> NDArray[np.bool_]:
    """bool [N, N]: each row sees itself and its ancestors."""
    sees = np.eye(len(parents), dtype=np.bool_)
    for row in range(1, len(parents)):
        sees[row] |= sees[parents[row]]
    return sees


def full_keys(seed: int, length: int) -> dict[str, NDArray[Any]]:
    """latent [S, 512] and rope_key [S, 64] of a generated case, bf16: streams 2 and 3 of the generator."""
    sizes = {"latent": (2, FULL_RANK), "rope_key": (3, FULL_ROPE)}
    return {name: bf16(gaussian(seed, stream, length, width)) for name, (stream, width) in sizes.items()}


def full_query(seed: int, heads: int, row: int, head: int) -> dict[str, NDArray[Any]]:
    """q_latent [1, 1, 512] and q_rope [1, 1, 64] of one row and head, bf16: streams 0 and 1, over [N, H, width].

    Scaled by 1/8, so that scores are a few units and the softmax looks at some keys more than at others.
    """
    query = {}
    for name, stream, width in (("q_latent", 0, FULL_RANK), ("q_rope", 1, FULL_ROPE)):
        index = (row * heads + head) * width + np.arange(width)
        query[name] = bf16(gaussian_at(seed, stream, index) * np.float32(0.125))[None, None]
    return query


def _truth(
    arrays: dict[str, NDArray[Any]], scale: float, visible: NDArray[np.bool_]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """(out [N, H, r], lse [N, H]) in float64."""
    query, rope, latent, rope_key = (
        arrays[name].astype(np.float64) for name in ("q_latent", "q_rope", "latent", "rope_key")
    )
    return latent_attention(query, rope, latent, rope_key, scale, _F64, visible=visible)


def _small() -> GoldenFile:
    notes = (
        "visible covers the last M cache rows, all rows see the ones before; "
        "lse is base e; a row that sees nothing gives 0 and -inf."
    )
    file = GoldenFile("attention_small", "attention", SEED, notes)
    # (N, prefix, H, r, p): nothing is a multiple of anything.
    sizes = [(1, 0, 2, 16, 8), (1, 1, 2, 16, 8), (7, 0, 3, 20, 6), (9, 63, 3, 20, 6), (33, 64, 2, 16, 8)]
    sizes += [(17, 65, 1, 24, 10), (5, 300, 4, 16, 8), (65, 31, 1, 8, 4)]
    for stream, (rows, prefix, heads, rank, rope) in enumerate(sizes):
        seed = SEED + stream
        sees = visibility_of(tree_parents(seed, rows))
        _add(file, f"tree_n{rows}_p{prefix}", seed, rows, prefix, heads, rank, rope, sees)
        if stream in (3, 4):
            _add(file, f"tree_n{rows}_p{prefix}_bf16", seed, rows, prefix, heads, rank, rope, sees, as_bf16=True)
    # Rows that see nothing at all, beside rows that see everything: a mask over all cache rows.
    sees = np.ones((6, 40), np.bool_)
    sees[1], sees[4] = False, False
    sees[2, :39] = False
    _add(file, "masked_rows", SEED + 50, 6, 34, 2, 16, 8, sees)
    _add(file, "large_scores", SEED + 51, 9, 64, 2, 16, 8, visibility_of(tree_parents(SEED, 9)), scale=20.0)
    return file


def _add(
    file: GoldenFile,
    case: str,
    seed: int,
    rows: int,
    prefix: int,
    heads: int,
    rank: int,
    rope: int,
    visible: NDArray[np.bool_],
    *,
    scale: float | None = None,
    as_bf16: bool = False,
) -> None:
    length = prefix + rows
    inputs: dict[str, NDArray[Any]] = {
        "q_latent": gaussian(seed, 0, rows, heads, rank),
        "q_rope": gaussian(seed, 1, rows, heads, rope),
        "latent": gaussian(seed, 2, length, rank),
        "rope_key": gaussian(seed, 3, length, rope),
    }
    if as_bf16:
        inputs = {name: bf16(array) for name, array in inputs.items()}
    factor = np.float64((rank + rope) ** -0.5 if scale is None else scale)
    out, lse = _truth(inputs, float(factor), visible)
    tolerance = _BF16 if as_bf16 else _F32
    if scale is not None:  # scores of magnitude 100: their own rounding, 1e-5, shows in the weights
        tolerance = kdtr.Tolerance.close(1e-4, 1e-4)
    file.add(
        case,
        inputs={**inputs, "scale": factor, "visible": visible},
        expected={"out": (rounded(out), tolerance), "lse": (rounded(lse), tolerance)},
    )


def _full() -> GoldenFile:
    notes = (
        "Inputs: full_keys and full_query of reference/golden/attention.py; pairs [X, 2] are the sampled (row, head)."
    )
    file = GoldenFile("attention_full", "attention", SEED, notes)
    sizes = [(16, 0, 1), (16, 777, 33), (64, 1000, 17), (64, 4095, 9), (128, 64, 65), (128, 2048, 1), (16, 6001, 5)]
    for index, (heads, prefix, rows) in enumerate(sizes):
        seed = SEED + 100 + index
        parents = tree_parents(seed, rows)
        pairs = np.stack([integers(seed, 10, rows, 12), integers(seed, 11, heads, 12)], axis=1)
        pairs[0], pairs[1] = (0, 0), (rows - 1, heads - 1)
        keys = full_keys(seed, prefix + rows)
        sees = visibility_of(parents)
        out, lse = np.empty((len(pairs), FULL_RANK)), np.empty(len(pairs))
        for place, (row, head) in enumerate(pairs.tolist()):
            query = full_query(seed, heads, row, head)
            one, one_lse = _truth({**query, **keys}, FULL_SCALE, sees[row : row + 1])
            out[place], lse[place] = one[0, 0], one_lse[0, 0]
        file.add(
            f"h{heads}_p{prefix}_n{rows}",
            inputs={
                "seed": np.uint64(seed),
                "heads": np.int32(heads),
                "prefix_length": np.int32(prefix),
                "parents": parents,
                "scale": np.float64(FULL_SCALE),
                "pairs": pairs,
            },
            expected={"sampled_out": (rounded(out), _BF16), "sampled_lse": (rounded(lse), _F32)},
        )
    return file
