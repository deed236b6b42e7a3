"""Numbers from samples: quartiles, ratios with intervals, verdicts, and digits that stop at the noise.

Every function takes any number of samples: none, one, equal ones, NaN, zero or infinite ones. What cannot be computed
is None with a reason; nothing divides by zero and nothing returns NaN. Random draws come from Philox with a fixed seed,
so that the same samples give the same interval on every machine and with every NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from harness.records import Timing
from reference.sampling import uniforms

MIN_SAMPLES = 10
RESAMPLES = 2000
BLAMED, ACQUITTED = 0.997, 0.95  # confidence of FAST and SLOW (10 samples can give no more than 0.998), and of SAME

Sample = float | int | None


@dataclass(frozen=True)
class Number:
    """A number, or None and the reason why there is none. low, high: 95 % interval where there is one."""

    value: float | None
    reason: str | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of n samples; None with a reason where there are none or one is not finite.

    outliers: samples far from the median (more than 3 spreads and half the median); flagged, never removed.
    """

    n: int
    median: float | None
    q1: float | None
    q3: float | None
    outliers: int
    reason: str | None

    @property
    def spread(self) -> float:
        """q3 - q1, 0 when there are no quartiles."""
        return 0.0 if self.q1 is None or self.q3 is None else self.q3 - self.q1


class Verdict(StrEnum):
    SAME = "SAME"
    FAST = "FAST"
    SLOW = "SLOW"
    AMBG = "AMBG"
    INVALID = "INVALID"


@dataclass(frozen=True)
class Threshold:
    """The least change that counts: a share of the baseline's median, and an absolute floor in seconds."""

    share: float
    floor_s: float = 0.0


END_TO_END = Threshold(0.05)
KERNEL = Threshold(0.10, 2e-6)


@dataclass(frozen=True)
class Judgement:
    """delta: change of the median as a share of the baseline's median; above 0 is slower. reason: of AMBG, INVALID."""

    verdict: Verdict
    delta: float | None
    reason: str | None = None


def summarise(samples: Sequence[Sample]) -> Summary:
    """Median, quartiles (linear between samples) and outliers."""
    n = len(samples)
    if n == 0:
        return Summary(0, None, None, None, 0, "no samples")
    values = _finite(samples)
    if len(values) < n:
        return Summary(n, None, None, None, 0, f"{n - len(values)} of {n} samples are not finite")
    q1, median, q3 = (float(q) for q in np.quantile(values, (0.25, 0.5, 0.75)))
    far = max(3 * (q3 - q1), 0.5 * abs(median))
    return Summary(n, median, q1, q3, int(np.sum(np.abs(values - median) > far)), None)


def ratio(numerator: Sample, denominator: Sample) -> Number:
    """numerator / denominator, or the reason why it is not a number."""
    for name, value in (("numerator", numerator), ("denominator", denominator)):
        if value is None or not math.isfinite(value):
            return Number(None, f"the {name} is not a finite number")
    assert numerator is not None
    assert denominator is not None
    if denominator == 0:
        return Number(None, "the denominator is zero")
    quotient = numerator / denominator
    return Number(quotient) if math.isfinite(quotient) else Number(None, "the quotient is not finite")


def paired_ratio(base: Sequence[Sample], other: Sequence[Sample], *, seed: int = 0) -> Number:
    """Median over turns of base[i] / other[i] with its bootstrap interval: how many times faster `other` is."""
    return _bootstrap(base, other, lambda a, b: np.median(a / b, axis=-1), seed)


def pooled_speedup(base: Sequence[Sample], other: Sequence[Sample], *, seed: int = 0) -> Number:
    """sum(base) / sum(other) over units (prompts) that did the same work, with its bootstrap interval over units."""
    return _bootstrap(base, other, lambda a, b: a.sum(axis=-1) / b.sum(axis=-1), seed)


def times_faster(base: Timing, other: Timing, *, seed: int = 0) -> Number:
    """How many times faster `other` is than `base`, which took turns with it: by sums if samples are prompts."""
    estimate = pooled_speedup if other.sample == "prompt" else paired_ratio
    return estimate(base.samples_s, other.samples_s, seed=seed)


def loop_efficiency(speedup: Sample, tau: Sample, t_ar: Sample, t_draft: Sample, t_verify: Sample) -> Number:
    """speed-up / (tau * T_AR / (T_draft + T_verify)): the share of the possible gain that the loop delivers.

    t_ar, t_draft, t_verify: seconds of one AR step, one drafting and one verify pass.
    """
    round_s = None if t_draft is None or t_verify is None else t_draft + t_verify
    saved = ratio(t_ar, round_s)
    ideal = None if saved.value is None or tau is None else tau * saved.value
    result = ratio(speedup, ideal)
    return result if saved.reason is None else Number(None, f"AR step over round: {saved.reason}")


def judge(baseline: Sequence[Sample], current: Sequence[Sample], threshold: Threshold = END_TO_END) -> Judgement:
    """Whether `current` seconds are slower than `baseline` seconds of the same work, on comparable machines.

    FAST and SLOW: quartile ranges disjoint, medians apart by more than `threshold` (share and floor), and surely by
    more than half of it, wherever in its interval each median lies. SAME: medians within the threshold, and likely not
    further apart than twice that. AMBG: neither, or a side has fewer than 10 samples. INVALID: no samples, or one that
    is not a positive finite number.
    """
    sides = {"baseline": summarise(baseline), "current": summarise(current)}
    for name, side in sides.items():
        if side.reason is not None:
            return Judgement(Verdict.INVALID, None, f"{name}: {side.reason}")
    first, second = _finite(baseline), _finite(current)
    for name, samples in (("baseline", first), ("current", second)):
        if (lowest := float(samples.min())) <= 0:
            return Judgement(Verdict.INVALID, None, f"{name}: a time of {lowest:g} s")
    old, new = sides["baseline"], sides["current"]
    assert old.median is not None
    assert new.median is not None
    difference = new.median - old.median

    def change(confidence: float) -> tuple[float, float]:
        (old_low, old_high), (new_low, new_high) = (median_interval(x, confidence) for x in (first, second))
        return new_low / old_high, new_high / old_low

    return _decide(
        min(old.n, new.n), difference / old.median, abs(difference), change, threshold, apart=_disjoint(old, new)
    )


def judge_turns(base: Sequence[Sample], other: Sequence[Sample], threshold: Threshold = END_TO_END) -> Judgement:
    """Like `judge`, for sides whose i-th samples belong together (same turn or prompt): what they share is removed.

    Each turn's two samples are divided by their geometric mean, then the quartile ranges must be disjoint, which is the
    case when the quartiles of other[i] / base[i] lie on one side of 1. The interval is that of the median of these
    ratios, and for FAST and SLOW it must clear half their spread too: one side may have been disturbed more often.
    delta: median ratio - 1. Raises ValueError for sides of different length.
    """
    first, second, reason = _pairs(base, other)
    if reason is not None:
        return Judgement(Verdict.INVALID, None, reason)
    ratios = second / first
    q1, median, q3 = (float(q) for q in np.quantile(ratios, (0.25, 0.5, 0.75)))
    return _decide(
        len(ratios),
        median - 1,
        abs(median - 1) * float(np.median(first)),
        lambda confidence: median_interval(ratios, confidence),
        threshold,
        apart=q1 > 1 or q3 < 1,
        noise=(q3 - q1) / median,
    )


def median_interval(values: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    """Where the median lies of what `values` [n] were drawn from, with at least this confidence; n >= 1.

    Order statistics: the k-th least and the k-th greatest value, k by the binomial distribution, so that no noise of
    any shape makes it narrower than it may be. All of the range where n is too small for the confidence.
    """
    n, k, outside = len(values), 0, 0.0
    while (outside := outside + math.comb(n, k) / 2**n) <= (1 - confidence) / 2:
        k += 1
    ordered, k = np.sort(values), max(k, 1)
    return float(ordered[k - 1]), float(ordered[n - k])


def trim(value: Sample, noise: Sample = None, digits: int = 4) -> str:
    """`value` as text with digits down to the first digit of `noise`, and at most `digits` significant ones.

    Never in exponent form. "n/a" for None, NaN and infinity.
    """
    if value is None or not math.isfinite(value):
        return "n/a"
    if value == 0:
        return "0"
    last = math.floor(math.log10(abs(value))) - digits + 1  # power of ten of the last digit shown
    if noise is not None and math.isfinite(noise) and noise > 0:
        last = max(last, math.floor(math.log10(noise)))
    rounded = round(value, -last)
    return f"{rounded:.{max(0, -last)}f}" if rounded else "0"


def _finite(samples: Sequence[Sample]) -> NDArray[np.float64]:
    return np.array([s for s in samples if s is not None and math.isfinite(s)], np.float64)


def _decide(
    n: int,
    delta: float,
    difference_s: float,
    change: Callable[[float], tuple[float, float]],
    threshold: Threshold,
    *,
    apart: bool,
    noise: float = 0.0,
) -> Judgement:
    """The verdict on a change by `delta`. change(confidence): the interval of new over old. apart: by the quartiles."""
    if n < MIN_SAMPLES:
        return Judgement(Verdict.AMBG, delta, f"{n} samples, {MIN_SAMPLES} wanted")
    if difference_s < threshold.floor_s:
        return Judgement(Verdict.SAME, delta)
    within = abs(delta) <= threshold.share
    low, high = change(ACQUITTED if within else BLAMED)
    if within:
        most = 1 + 2 * threshold.share
        verdict = Verdict.SAME if 1 / most < low and high < most else Verdict.AMBG
    elif not apart:
        return Judgement(Verdict.AMBG, delta, "the quartile ranges overlap")
    else:
        clear = 1 + max(threshold.share, noise) / 2
        verdict = Verdict.SLOW if low > clear else Verdict.FAST if high < 1 / clear else Verdict.AMBG
    if verdict != Verdict.AMBG:
        return Judgement(verdict, delta)
    return Judgement(verdict, delta, f"noise: a change by anything from {low - 1:+.1%} to {high - 1:+.1%}")


def _disjoint(a: Summary, b: Summary) -> bool:
    assert a.q1 is not None
    assert a.q3 is not None
    assert b.q1 is not None
    assert b.q3 is not None
    return a.q3 < b.q1 or b.q3 < a.q1


def _bootstrap(
    base: Sequence[Sample],
    other: Sequence[Sample],
    statistic: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]],
    seed: int,
) -> Number:
    first, second, reason = _pairs(base, other)
    if reason is not None:
        return Number(None, reason)
    value, n = float(statistic(first, second)), len(first)
    if n == 1:
        return Number(value, "one pair, no interval")
    chosen = (uniforms(seed, np.arange(RESAMPLES * n)) * n).astype(np.int64).reshape(RESAMPLES, n)
    low, high = (float(q) for q in np.quantile(statistic(first[chosen], second[chosen]), (0.025, 0.975)))
    return Number(value, None, low, high)


def _pairs(
    base: Sequence[Sample], other: Sequence[Sample]
) -> tuple[NDArray[np.float64], NDArray[np.float64], str | None]:
    """Both sides, and why they are no pairs of times, or None. Raises ValueError for different lengths."""
    n = len(base)
    if n != len(other):
        raise ValueError(f"pairs wanted, got {n} and {len(other)} samples")
    first, second = _finite(base), _finite(other)
    reason = None
    if n == 0:
        reason = "no samples"
    elif min(len(first), len(second)) < n:
        reason = f"{2 * n - len(first) - len(second)} of {2 * n} samples are not finite"
    elif (lowest := min(first.min(), second.min())) <= 0:
        reason = f"a time of {lowest:g} s"
    return first, second, reason
