"""Statistics: right values where there are some, and a reason where there are none."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import stats
from harness.stats import END_TO_END, KERNEL, Number, Sample, Verdict, judge

NOT_NUMBERS = [math.nan, math.inf, -math.inf, None]
ODD_SAMPLES: dict[str, Sequence[Sample]] = {
    "none": [],
    "one": [1.0],
    "two": [1.0, 2.0],
    "equal": [1.0] * 12,
    "one nan": [1.0] * 11 + [math.nan],
    "one null": [1.0] * 11 + [None],
    "infinite": [1.0] * 11 + [math.inf],
    "zero": [0.0] * 12,
    "one zero": [1.0] * 11 + [0.0],
    "negative": [1.0] * 11 + [-1.0],
}


def around(median: float, spread: float = 0.01, n: int = 12) -> list[float]:
    """Samples spread evenly over median * (1 +- spread)."""
    return [median * (1 + spread * x) for x in np.linspace(-1, 1, n)]


def test_quartiles_and_median():
    summary = stats.summarise([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (summary.n, summary.q1, summary.median, summary.q3, summary.spread) == (5, 2.0, 3.0, 4.0, 2.0)
    assert stats.summarise([7.0]).median == 7.0


@pytest.mark.parametrize("name", ["none", "one nan", "one null", "infinite"])
def test_a_summary_without_numbers_says_why(name):
    summary = stats.summarise(ODD_SAMPLES[name])
    assert summary.median is summary.q1 is summary.q3 is None
    assert summary.reason == ("no samples" if name == "none" else "1 of 12 samples are not finite")


def test_an_outlier_is_flagged_and_does_not_move_the_median():
    clean, spoilt = around(1.0), [*around(1.0)[:-1], 1000.0]
    assert stats.summarise(clean).outliers == 0
    assert stats.summarise(spoilt).outliers == 1
    assert stats.summarise(spoilt).median == pytest.approx(1.0, rel=0.01)
    assert judge(clean, spoilt).verdict is Verdict.SAME


@pytest.mark.parametrize("base", ODD_SAMPLES, ids=str)
@pytest.mark.parametrize("other", ODD_SAMPLES, ids=str)
def test_odd_samples_never_give_a_number_that_json_cannot_hold(base, other):
    a, b = ODD_SAMPLES[base], ODD_SAMPLES[other]
    judgement = judge(a, b)
    results = [
        judgement.delta,
        stats.summarise(a).median,
        *vars(stats.ratio(*(s[-1] if s else None for s in (a, b)))).values(),
    ]
    if len(a) == len(b):
        for number in (stats.paired_ratio(a, b), stats.pooled_speedup(a, b)):
            results += vars(number).values()
            assert (number.value is None) <= (number.reason is not None)
    json.dumps(results, allow_nan=False)
    if not base == other == "equal":
        assert judgement.verdict in (Verdict.INVALID, Verdict.AMBG)
        assert judgement.reason
    else:
        assert judgement == stats.Judgement(Verdict.SAME, 0.0)


@pytest.mark.parametrize("bad", NOT_NUMBERS)
def test_ratio_against_nothing_is_not_a_number(bad):
    assert stats.ratio(1.0, bad).reason == "the denominator is not a finite number"
    assert stats.ratio(bad, 1.0).reason == "the numerator is not a finite number"
    assert stats.ratio(1.0, 0.0) == Number(None, "the denominator is zero")
    assert stats.ratio(0.0, 0) == Number(None, "the denominator is zero")
    assert stats.ratio(1e308, 1e-308).value is None
    assert stats.ratio(3, 2).value == 1.5


@pytest.mark.parametrize(
    ("old", "new", "threshold", "verdict"),
    [
        (around(1.0), around(1.0), END_TO_END, Verdict.SAME),
        (around(1.0), around(1.049), END_TO_END, Verdict.SAME),
        (around(1.0), around(1.06), END_TO_END, Verdict.SLOW),
        (around(1.0), around(0.94), END_TO_END, Verdict.FAST),
        (around(1.0, 0.2), around(1.06, 0.2), END_TO_END, Verdict.AMBG),  # ranges overlap
        (around(1.0, 0.8), around(1.02, 0.8), END_TO_END, Verdict.AMBG),  # the noise hides too much
        (around(1.0)[:9], around(2.0)[:9], END_TO_END, Verdict.AMBG),  # 9 samples
        (around(1.0)[:10], around(2.0)[:10], END_TO_END, Verdict.SLOW),
        (around(1.0), around(1.08), KERNEL, Verdict.SAME),
        (around(1.0), around(1.12), KERNEL, Verdict.SLOW),
        (around(5e-6), around(6.5e-6), KERNEL, Verdict.SAME),  # 30 %, but below 2 us
        (around(5e-6), around(7.5e-6), KERNEL, Verdict.SLOW),
    ],
)
def test_verdicts(old, new, threshold, verdict):
    assert judge(old, new, threshold).verdict is verdict


def test_a_change_beyond_the_threshold_with_quartiles_that_touch_is_ambiguous():
    assert judge([1.0] * 6 + [1.2] * 6, [1.2] * 12).verdict is Verdict.AMBG


def turns(change: float, noise: float, drift: float = 1.0, n: int = 20) -> tuple[list[float], list[float]]:
    """Two arms, the second `change` times as slow, whose common pace falls by `drift` halfway."""
    random = np.random.Generator(np.random.PCG64(5))
    pace = np.where(np.arange(n) < n // 2, 1.0, drift)
    return (
        (pace * random.normal(1, noise, n)).tolist(),
        (pace * change * random.normal(1, noise, n)).tolist(),
    )


@pytest.mark.parametrize(
    ("change", "noise", "drift", "verdict"),
    [
        (1.0, 0.01, 1.0, Verdict.SAME),
        (1.0, 0.01, 3.0, Verdict.SAME),
        (1.15, 0.02, 1.0, Verdict.SLOW),
        (1.15, 0.02, 3.0, Verdict.SLOW),  # plain quartiles cannot tell this
        (1 / 1.15, 0.02, 3.0, Verdict.FAST),
        (1.04, 0.01, 1.0, Verdict.SAME),
        (1.5, 0.9, 1.0, Verdict.AMBG),
    ],
)
def test_verdicts_of_turns(change, noise, drift, verdict):
    base, other = turns(change, noise, drift)
    base, other = [abs(x) for x in base], [abs(x) for x in other]
    assert stats.judge_turns(base, other).verdict is verdict
    if drift > 1 and change > 1:
        assert judge(base, other).verdict is Verdict.AMBG


def test_verdicts_of_turns_know_floors_few_samples_and_odd_ones():
    base, other = turns(1.3, 0.01)
    micro = [1e-6 * x for x in base], [1e-6 * x for x in other]
    assert stats.judge_turns(*micro, KERNEL).verdict is Verdict.SAME  # 0.3 us
    assert stats.judge_turns(*micro).verdict is Verdict.SLOW
    assert stats.judge_turns(base[:9], other[:9]).reason == "9 samples, 10 wanted"
    for odd in ([], [1.0] * 9 + [0.0], [1.0] * 9 + [math.nan]):
        found = stats.judge_turns(odd, [1.0] * len(odd))
        assert (found.verdict, found.delta) == (Verdict.INVALID, None)
        assert found.reason
    with pytest.raises(ValueError, match="pairs"):
        stats.judge_turns([1.0], [])


# The judge on a busy machine. Numbers of a machine with two cores and loud neighbours: sides of one turn differ by 6 %
# (quartiles / 1.35), every eighth pair by more than 25 %.


@dataclass(frozen=True)
class Noise:
    """Log-normal jitter of each sample, drift of the pace from turn to turn, share of the samples in a burst."""

    jitter: float
    drift: float
    bursts: float


QUIET, SHARED, BUSY = Noise(0.01, 0.005, 0.0), Noise(0.03, 0.03, 0.05), Noise(0.06, 0.05, 0.12)
WILD = Noise(0.25, 0.1, 0.2)


def measured(change: float, noise: Noise, seed: int, n: int = 40) -> tuple[list[float], list[float]]:
    """Two arms that took turns, the second `change` times as slow. A burst doubles one side's time of one turn."""
    random = np.random.Generator(np.random.PCG64(seed))
    pace = np.exp(noise.drift * np.cumsum(random.standard_normal(n)))
    sides = pace * np.exp(noise.jitter * random.standard_normal((2, n)))
    sides *= np.where(random.random((2, n)) < noise.bursts, 1 + 2 * random.random((2, n)), 1.0)
    base, other = sides.tolist()
    return base, [change * x for x in other]


@pytest.mark.parametrize(("noise", "n"), [(QUIET, 12), (SHARED, 40)], ids=str)
@pytest.mark.parametrize(
    ("change", "wanted"), [(1.0, Verdict.SAME), (1.15, Verdict.SLOW), (1 / 1.15, Verdict.FAST)], ids=str
)
def test_the_same_build_twice_is_never_fast_or_slow_and_a_delay_of_15_percent_always_is(change, wanted, noise, n):
    assert [stats.judge_turns(*measured(change, noise, seed, n)).verdict for seed in range(20)] == [wanted] * 20


@pytest.mark.parametrize("n", [10, 15, 20, 40])
@pytest.mark.parametrize("noise", [SHARED, BUSY, WILD], ids=str)
def test_no_noise_makes_the_judge_wrong(noise, n):
    """It may stay undecided. A run has dozens of verdicts: one in a hundred wrong, and many a run fails."""
    for seed in range(400):
        base, same = measured(1.0, noise, seed, n)
        for change, right in ((1.0, Verdict.SAME), (1.15, Verdict.SLOW), (1 / 1.15, Verdict.FAST)):
            for of in (judge, stats.judge_turns):
                found = of(base, [change * x for x in same])
                assert found.verdict in (right, Verdict.AMBG), (of.__name__, change, seed, found)


def test_an_undecided_change_is_told_with_its_bounds():
    base = [1.0 + 0.01 * i for i in range(12)]
    other = [1.12 * x if i % 4 else 1.01 * x for i, x in enumerate(base)]
    found = stats.judge_turns(base, other)
    assert (found.verdict, found.reason) == (Verdict.AMBG, "noise: a change by anything from +1.0% to +12.0%")
    assert judge([1.0, 3.0] * 6, [1.0, 3.0] * 6).verdict is Verdict.AMBG  # equal medians, but of what?


@pytest.mark.parametrize(
    ("n", "confidence", "k"),
    [(1, 0.95, 1), (5, 0.95, 1), (10, 0.95, 2), (10, 0.997, 1), (20, 0.997, 4), (40, 0.95, 14)],
)
def test_the_interval_of_a_median_is_between_order_statistics(n, confidence, k):
    """k from the table of the binomial distribution (sign test)."""
    values = np.random.Generator(np.random.PCG64(0)).permutation(np.arange(1.0, n + 1))
    assert stats.median_interval(values, confidence) == (k, n + 1 - k)


def test_the_interval_of_a_median_covers_it_whatever_the_noise():
    random = np.random.Generator(np.random.PCG64(3))
    for noise in (random.standard_normal, random.standard_cauchy, lambda n: random.choice([-1.0, 1.0], n) + 0.01):
        covered = [
            low <= 0.01 and high >= -0.99 for low, high in (stats.median_interval(noise(20), 0.95) for _ in range(2000))
        ]
        assert np.mean(covered) >= 0.95


def test_the_ratio_of_pairs_does_not_see_drift_that_both_share():
    drift = np.linspace(1, 3, 20)
    number = stats.paired_ratio(list(2.0 * drift), list(drift))
    assert (number.value, number.low, number.high) == (2.0, 2.0, 2.0)


def test_pooled_speedup_is_a_ratio_of_sums():
    number = stats.pooled_speedup([10.0, 1.0], [2.0, 1.0])
    assert number.value == pytest.approx(11 / 3)
    assert number.low is not None
    assert number.high is not None
    assert number.low <= 11 / 3 <= number.high


def test_the_interval_is_the_same_in_every_run_and_holds_the_truth():
    noise = np.random.Generator(np.random.PCG64(1))
    base, other = (1.5 * noise.lognormal(0, 0.05, 30)).tolist(), noise.lognormal(0, 0.05, 30).tolist()
    number = stats.paired_ratio(base, other)
    assert number == stats.paired_ratio(base, other)
    assert stats.pooled_speedup(base, other) != stats.pooled_speedup(base, other, seed=1)
    assert number.low is not None
    assert number.high is not None
    assert number.low < 1.5 < number.high
    assert number.high - number.low < 0.15
    # Fixed by the seed on every machine and NumPy, since reports of the same rows are equal byte for byte.
    fixed = stats.paired_ratio([1.0, 2.0, 4.0, 8.0, 16.0], [1.0] * 5)
    assert (fixed.value, fixed.low, fixed.high) == (4.0, 1.0, 16.0)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    noise = np.random.Generator(np.random.PCG64(2))
    covered = 0
    for seed in range(200):
        base, other = (2.0 * noise.lognormal(0, 0.1, 25)).tolist(), noise.lognormal(0, 0.1, 25).tolist()
        number = stats.paired_ratio(base, other, seed=seed)
        assert number.low is not None
        assert number.high is not None
        covered += number.low <= 2.0 <= number.high
    assert covered >= 180


def test_pairs_must_match():
    with pytest.raises(ValueError, match="2 and 1"):
        stats.paired_ratio([1.0, 2.0], [1.0])
    assert stats.paired_ratio([2.0], [1.0]) == Number(2.0, "one pair, no interval")


def test_loop_efficiency():
    # tau 4 at 1 ms a step, rounds of 2 ms: at best 2 times as fast.
    assert stats.loop_efficiency(1.5, 4.0, 1e-3, 0.5e-3, 1.5e-3).value == pytest.approx(0.75)
    assert stats.loop_efficiency(1.5, 4.0, 1e-3, 0.0, 0.0).reason == "AR step over round: the denominator is zero"
    assert stats.loop_efficiency(1.5, None, 1e-3, 1e-3, 1e-3).value is None
    assert stats.loop_efficiency(1.5, 0.0, 1e-3, 1e-3, 1e-3).reason == "the denominator is zero"


@pytest.mark.parametrize(
    ("value", "noise", "text"),
    [
        (123.456, 2.0, "123"),
        (123.456, 20.0, "120"),
        (0.123456, 0.004, "0.123"),
        (12345.0, 300.0, "12300"),
        (1.23456789, None, "1.235"),
        (1.23456789, 0.0, "1.235"),
        (0.00001234, 1e-7, "0.0000123"),
        (3.0, 0.01, "3.00"),
        (0, 1.0, "0"),
        (0.4, 5.0, "0"),
        (-1.26, 0.1, "-1.3"),
        (99.96, 0.1, "100.0"),
        (123456789.0, None, "123500000"),
        (None, None, "n/a"),
        (math.nan, 1.0, "n/a"),
        (math.inf, 1.0, "n/a"),
        (1.5, math.nan, "1.500"),
    ],
)
def test_digits_stop_at_the_noise(value, noise, text):
    assert stats.trim(value, noise) == text


@given(st.floats(1e-9, 1e9), st.floats(1e-12, 1e6))
def test_trimming_is_never_off_by_more_than_the_noise_or_the_last_digit(value, noise):
    shown = stats.trim(value, noise)
    assert "e" not in shown
    assert abs(float(shown) - value) <= max(noise, value * 1e-3)
