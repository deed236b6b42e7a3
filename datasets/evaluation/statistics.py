"""Acceptance from rows: tau, its paired bootstrap intervals, and which prompts count.

tau = 1 + accepted/rounds, pooled over rounds: the tokens that one pass of the target commits (root counted, bonus not).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LOOPING_BELOW = 0.8
"""An output with a smaller share of distinct 8-grams is looping text: easy to draft, so it is reported apart."""


def distinct_ratio(tokens: Sequence[int], n: int = 8) -> float:
    """Distinct n-grams / n-grams of an output; 1.0 when the output is shorter than n."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


@dataclass(frozen=True)
class Acceptance:
    """One method over the same prompts, in the same order as any other it is compared with.

    accepted, rounds: i64 [prompts], draft tokens accepted and rounds taken.
    """

    accepted: NDArray[np.int64]
    rounds: NDArray[np.int64]

    @classmethod
    def of(cls, histograms: Iterable[Sequence[int]]) -> Acceptance:
        """From one histogram a prompt: entry a is the number of rounds that accepted a draft tokens."""
        pairs = [(sum(a * n for a, n in enumerate(h)), sum(h)) for h in histograms]
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return cls(table[:, 0], table[:, 1])

    @property
    def tau(self) -> float:
        """Pooled over rounds; NaN without any round."""
        return 1.0 + float(self.accepted.sum()) / n if (n := int(self.rounds.sum())) else float("nan")

    @property
    def tau_per_prompt(self) -> float:
        """Mean over prompts of their own tau; prompts without a round (output ended at once) do not count."""
        used = self.rounds > 0
        return float(1.0 + (self.accepted[used] / self.rounds[used]).mean()) if used.any() else float("nan")


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def bootstrap(better: Acceptance, base: Acceptance | None = None, *, samples: int = 2000, seed: int = 0) -> Interval:
    """95 % percentile interval of tau(better), or of tau(better) - tau(base), over prompts drawn with replacement.

    Paired: one draw of prompts serves both sides. ValueError when the two do not cover equally many prompts.
    """
    sides = [better] if base is None else [better, base]
    n = len(better.rounds)
    if any(len(side.rounds) != n for side in sides):
        raise ValueError(f"paired interval over {n} and {len(sides[-1].rounds)} prompts")
    if n == 0 or not int(better.rounds.sum()):
        return Interval(float("nan"), float("nan"), float("nan"))
    picks = np.random.Generator(np.random.Philox(seed)).integers(0, n, size=(samples, n))

    def taus(side: Acceptance) -> NDArray[np.float64]:
        drawn: NDArray[np.float64] = side.accepted[picks].sum(1) / np.maximum(side.rounds[picks].sum(1), 1)
        return 1.0 + drawn

    drawn = taus(better) if base is None else taus(better) - taus(base)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Interval(better.tau - (base.tau if base else 0.0), float(low), float(high))


def split_looping(ratios: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Prompt ids in order: (those that count for the headline, those whose output loops)."""
    good = [key for key, ratio in ratios.items() if ratio >= LOOPING_BELOW]
    return good, [key for key in ratios if key not in set(good)]
