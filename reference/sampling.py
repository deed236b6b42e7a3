"""The target's choice at a row: greedy, or one draw whose random number belongs to the position.

Because the number is a function of (seed, absolute position) and not of the node, plain decoding and DDTree with the
same seed draw the same tokens. The position is that of the row itself, prefix length + depth: the position of the token
that the row has read; the drawn token stands one further.

Generator: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011), key = seed
(low word first), counter = (position, 0, 0, 0), u = (x0 + 0.5) * 2^-32 with x0 the first output word.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_CHOICE = -1

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


class TargetRowError(ValueError):
    """A target row on the accepted path, or the prompt's last, from which no token can be chosen.

    It is raised before anything of its round is committed.
    """

    def __init__(self, *, request: int, node: int | None = None, position: int | None = None):
        places = {"node": node, "position": position}
        place = ", ".join(f"{name} {index}" for name, index in places.items() if index is not None)
        reason = "the target's logits hold NaN or have no finite maximum, so no token can be chosen"
        super().__init__(f"request {request}, {place}: {reason}")
        self.request, self.node, self.position = request, node, position


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy. top_k 0 and top_p 1 switch the filters off. seed: 64 bits."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must fit 64 unsigned bits, got {self.seed}")


GREEDY = SamplingParams()


def philox4x32(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Philox4x32-10: counters uint32 [..., 4] and one key of two 32-bit words -> uint32 [..., 4]."""
    x = [np.asarray(counter)[..., word].astype(np.uint64) for word in range(4)]
    k0, k1 = key
    for _ in range(_ROUNDS):
        low, high = x[0] * _MULTIPLIERS[0], x[2] * _MULTIPLIERS[1]
        x = [
            (high >> np.uint64(32)) ^ x[1] ^ np.uint64(k0),
            high & np.uint64(_MASK),
            (low >> np.uint64(32)) ^ x[3] ^ np.uint64(k1),
            low & np.uint64(_MASK),
        ]
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return np.stack(x, axis=-1).astype(np.uint32)


def uniforms(seed: int, positions: NDArray[Any]) -> NDArray[np.float64]:
    """The random numbers of (seed, position) in (0, 1): positions int [N], each in [0, 2^32) -> float64 [N]."""
    places = np.asarray(positions, np.int64)
    if places.size and not (places.min() >= 0 and places.max() <= _MASK):
        raise ValueError(f"positions must be in [0, 2^32), got {places.min()} to {places.max()}")
    counter = np.zeros((*places.shape, 4), np.uint32)
    counter[..., 0] = places
    first_word = philox4x32(counter, (seed & _MASK, seed >> 32))[..., 0]
    return (first_word.astype(np.float64) + 0.5) * 2.0**-32


def probabilities(logits: NDArray[Any], params: SamplingParams) -> NDArray[np.float64]:
    """Sampling distribution of each row of `logits` [N, V], float64 [N, V]; every row has a finite maximum.

    softmax(logit / temperature) over what top_k, then top_p leave. top_k keeps the k largest logits, ties to the lowest
    id. top_p keeps the shortest list, in the same order, whose probability reaches top_p.
    """
    peak = logits.max(axis=1, keepdims=True).astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature sends everything below the peak to exp(-inf) = 0
        weights = np.exp((logits.astype(np.float64) - peak) / params.temperature)
    if params.top_k > 0 or params.top_p < 1.0:
        order = np.argsort(-logits, axis=1, kind="stable")  # best first, equal logits by id
        ranked = np.take_along_axis(weights, order, axis=1)
        if params.top_k > 0:
            ranked[:, params.top_k :] = 0.0
        if params.top_p < 1.0:
            reached = np.cumsum(ranked / ranked.sum(axis=1, keepdims=True), axis=1)
            ranked[:, 1:][reached[:, :-1] >= params.top_p] = 0.0
        np.put_along_axis(weights, order, ranked, axis=1)
    normalised: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return normalised


def choose_rows(logits: NDArray[Any], params: SamplingParams, positions: NDArray[Any]) -> NDArray[np.int32]:
    """The target's token after each row: logits [N, V], positions int [N] -> int32 [N].

    Greedy: the largest logit, ties to the lowest id. Sampled: the first id, ascending, whose cumulative probability
    exceeds u * total. A row with NaN, with +inf, or without any finite logit gets NO_CHOICE; it disturbs no other row.
    """
    if logits.ndim != 2 or logits.shape[1] == 0 or np.shape(positions) != logits.shape[:1]:
        raise ValueError(f"logits must be [N, V] and positions [N], got {logits.shape} and {np.shape(positions)}")
    values = logits if logits.dtype in (np.float32, np.float64) else logits.astype(np.float32)
    choices = np.full(len(values), NO_CHOICE, np.int32)
    usable = np.flatnonzero(np.isfinite(values.max(axis=1)))  # the maximum of a row with NaN is NaN
    if params.temperature == 0:
        choices[usable] = values[usable].argmax(axis=1)
    elif len(usable):
        cumulative = np.cumsum(probabilities(values[usable], params), axis=1)
        thresholds = uniforms(params.seed, np.asarray(positions)[usable]) * cumulative[:, -1]
        choices[usable] = (cumulative > thresholds[:, None]).argmax(axis=1)
    return choices


def choose(logits: NDArray[Any], params: SamplingParams, position: int, *, request: int = 0) -> int:
    """choose_rows for one row [V]. Raises TargetRowError where that gives NO_CHOICE."""
    token = int(choose_rows(logits[None], params, np.array([position]))[0])
    if token == NO_CHOICE:
        raise TargetRowError(request=request, position=position)
    return token


def choice_margins(logits: NDArray[Any], params: SamplingParams, positions: NDArray[Any]) -> NDArray[np.float64]:
    """How far each row's choice is from turning into another one, float64 [N]; NaN for rows without a choice.

    Greedy: largest minus second largest logit. Sampled: the least |u * total - boundary| over the boundaries of the
    cumulative distribution. Used to tell a rounding difference from a fault; inf where there is no other choice.
    """
    margins = np.full(len(logits), np.nan)
    values = logits.astype(np.float64)
    usable = np.flatnonzero(np.isfinite(values.max(axis=1)))
    if logits.shape[1] == 1:
        margins[usable] = np.inf
    elif params.temperature == 0:
        best = np.partition(values[usable], -2, axis=1)[:, -2:]
        margins[usable] = best[:, 1] - best[:, 0]
    elif len(usable):
        cumulative = np.cumsum(probabilities(values[usable], params), axis=1)
        thresholds = uniforms(params.seed, np.asarray(positions)[usable]) * cumulative[:, -1]
        inner = np.where(cumulative < cumulative[:, -1:], cumulative, np.inf)  # the last boundary is the end
        margins[usable] = np.abs(inner - thresholds[:, None]).min(axis=1)
    return margins
