"""Top-k stage: drafter logits -> sorted lists of token ids and log-probabilities, one list per depth.

Contract: per depth the K = min(k, V) best entries, ordered by (logit descending, token id ascending); logZ is the
log-sum-exp over the whole vocabulary rounded to float32; `lp = logit - logZ` is one float32 subtraction.
Source: DDTree paper (arXiv 2604.12989), section on the surrogate; the id order among equal logits, which the public
implementation leaves open, is fixed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Below this |logZ| cancellation eats the bits that rounding to float32 still needs, so the sum is redone wider.
_NEAR_ZERO = 2.0**-8


class DraftError(ValueError):
    """Drafter output that must not become a tree. `depth` is 1-based; `rank` (or for logits `token`) is 0-based."""

    def __init__(self, reason: str, *, request: int, depth: int, rank: int | None = None, token: int | None = None):
        place = f"rank {rank}" if rank is not None else f"token {token}"
        super().__init__(f"request {request}, depth {depth}, {place}: {reason}")
        self.reason, self.request, self.depth, self.rank, self.token = reason, request, depth, rank, token


@dataclass(frozen=True, eq=False)
class TopK:
    """ids int32 [L, K], lp float32 [L, K], logz float32 [L]."""

    ids: NDArray[np.int32]
    lp: NDArray[np.float32]
    logz: NDArray[np.float32]


def topk_logprob(logits: NDArray[Any], k: int, vocab_size: int | None = None, *, request: int = 0) -> TopK:
    """Best entries of each row of `logits` [L, V] (float32, or float16/bfloat16, which widen exactly).

    `vocab_size` is the logical vocabulary; columns past it are padding: never returned, not part of logZ, not checked.
    A -inf logit keeps its place at the end of the list with lp = -inf; a row of -inf only has logz = lp = -inf.
    Raises DraftError for NaN and +inf (public issue: vllm-project/vllm#41834, a NaN row became token 0), TypeError for
    a dtype that does not widen exactly to float32, ValueError for impossible sizes.
    """
    if logits.ndim != 2:
        raise ValueError(f"request {request}: logits must have shape [L, V], got {list(logits.shape)}")
    if logits.dtype.name not in ("float32", "float16", "bfloat16"):
        raise TypeError(f"request {request}: logits must be float32, float16 or bfloat16, got {logits.dtype}")
    physical = logits.shape[1]
    logical = physical if vocab_size is None else vocab_size
    if not 1 <= logical <= physical:
        raise ValueError(f"request {request}: vocabulary size {logical} does not fit logits of width {physical}")
    if k < 0:
        raise ValueError(f"request {request}: k must be at least 0, got {k}")

    rows = logits[:, :logical].astype(np.float32)
    bad = np.isnan(rows) | np.isposinf(rows)
    if bad.any():
        row, token = (int(i) for i in np.argwhere(bad)[0])
        reason = "the logit is NaN" if np.isnan(rows[row, token]) else "the logit is +inf"
        raise DraftError(reason, request=request, depth=row + 1, token=token)

    width = min(k, logical)
    ids = np.empty((len(rows), width), np.int32)
    lp = np.empty((len(rows), width), np.float32)
    logz = np.empty(len(rows), np.float32)
    for d, row in enumerate(rows):
        ids[d] = best_ids(row, width)
        logz[d] = log_normaliser(row)
        if np.isneginf(logz[d]):
            lp[d] = -np.inf  # -inf - -inf would be NaN
        else:
            with np.errstate(over="ignore"):  # a finite logit may lie further than float32 reaches below logZ: -inf
                lp[d] = row[ids[d]] - logz[d]
    return TopK(ids, lp, logz)


def best_ids(row: NDArray[Any], k: int) -> NDArray[np.intp]:
    """Indices of the k largest entries of `row` [V] (no NaN), ordered by (value descending, index ascending)."""
    if k == 0:
        return np.empty(0, np.intp)
    if k < len(row):
        cut = np.partition(row, len(row) - k)[len(row) - k]
        above = np.flatnonzero(row > cut)
        at_cut = np.flatnonzero(row == cut)[: k - len(above)]  # ascending, so the lowest ids win the last places
        candidates = np.concatenate([above, at_cut])
    else:
        candidates = np.arange(len(row))
    return candidates[np.lexsort((candidates, -row[candidates]))]


def log_normaliser(row: NDArray[np.float32]) -> np.float32:
    """log(sum(exp(row))) of a float32 row [V] without NaN and +inf: computed in float64, rounded once to float32."""
    peak = row.max()
    if np.isneginf(peak):
        return np.float32(-np.inf)
    wide = row.astype(np.float64)
    z = _log_sum_exp(wide, np.float64(peak))
    if abs(z) < _NEAR_ZERO:  # an almost normalised row: log-sum and peak cancel
        z = _log_sum_exp(wide.astype(np.longdouble), np.longdouble(peak))
    return np.float32(z)


def _log_sum_exp(row: NDArray[Any], peak: np.floating[Any]) -> np.floating[Any]:
    others = np.exp(row - peak)
    others[row.argmax()] = 0.0  # the peak's own 1 goes through log1p, so that small others keep their bits
    total: np.floating[Any] = peak + np.log1p(others.sum())
    return total
