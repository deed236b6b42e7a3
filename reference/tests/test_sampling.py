from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from reference.sampling import (
    GREEDY,
    NO_CHOICE,
    SamplingParams,
    TargetRowError,
    choice_margins,
    choose,
    choose_rows,
    philox4x32,
    probabilities,
    uniforms,
)

# Random123 distribution, tests/kat_vectors, rows "philox4x32 10": counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


def scalar_philox(counter, key):
    """Straight from the paper, one Python integer at a time."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        low, high = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (high >> 32) ^ b ^ k, high % 2**32, (low >> 32) ^ d ^ m, low % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def chi_square_tail(statistic, degrees):
    """P(chi-square with odd `degrees` > statistic), the closed form by recurrence."""
    tail, term = math.erfc(math.sqrt(statistic / 2)), math.sqrt(2 * statistic / math.pi) * math.exp(-statistic / 2)
    for k in range(1, degrees, 2):
        tail, term = tail + term, term * statistic / (k + 2)
    return tail


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_gives_the_published_known_answers(counter, key, output):
    key0, key1 = words(key)
    assert philox4x32(np.array(words(counter), np.uint32), (key0, key1)).tolist() == words(output)


def test_philox_of_many_counters_equals_the_scalar_form():
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 2**32, (3, 50, 4), dtype=np.uint32)
    key = (int(rng.integers(2**32)), int(rng.integers(2**32)))
    expected = [[scalar_philox(c.tolist(), key) for c in row] for row in counters]
    np.testing.assert_array_equal(philox4x32(counters, key), expected)


def test_the_random_number_is_that_of_seed_and_position():
    """key = seed, low word first; counter = (position, 0, 0, 0); u = (x0 + 0.5) / 2^32."""
    seed = 0x299F31D0A4093822
    for position in (0, 1, 77, 2**32 - 1):
        x0 = scalar_philox([position, 0, 0, 0], (0xA4093822, 0x299F31D0))[0]
        assert uniforms(seed, np.array([position]))[0] == (x0 + 0.5) / 2**32
    assert uniforms(0, np.array([0]))[0] == (0x6627E8D5 + 0.5) / 2**32
    for bad in (-1, 2**32):
        with pytest.raises(ValueError, match="positions must be in"):
            uniforms(0, np.array([3, bad]))


def test_random_numbers_are_uniform():
    u = uniforms(99, np.arange(100_000))
    assert 0 < u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    counts = np.bincount((u * 64).astype(int), minlength=64)
    statistic = ((counts - 100_000 / 64) ** 2 / (100_000 / 64)).sum()
    assert chi_square_tail(statistic, 63) > 1e-4


def test_chi_square_tail_against_table_values():
    for statistic, degrees, tail in (
        (3.841459, 1, 0.05),
        (7.814728, 3, 0.05),
        (11.344867, 3, 0.01),
        (82.528727, 63, 0.05),
    ):
        assert abs(chi_square_tail(statistic, degrees) - tail) < 1e-6


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.6, seed=2),
        SamplingParams(temperature=1.3, top_k=3, seed=3),
        SamplingParams(temperature=1.0, top_p=0.9, seed=4),
    ],
)
def test_200000_draws_follow_the_target_distribution(params):
    logits = np.array([0.3, -0.9, 1.1, 0.0])
    weights = np.exp(logits / params.temperature)
    if params.top_k:
        weights[1] = 0  # the smallest logit
    if params.top_p < 1:
        assert sorted(weights / weights.sum())[0] < 0.1
        weights[1] = 0
    expected = 200_000 * weights / weights.sum()
    tokens = choose_rows(np.tile(logits, (200_000, 1)), params, np.arange(200_000))
    counts = np.bincount(tokens, minlength=4)
    alive = expected > 0
    assert (counts[~alive] == 0).all()
    statistic = ((counts - expected)[alive] ** 2 / expected[alive]).sum()
    tail = math.exp(-statistic / 2) if alive.sum() == 3 else chi_square_tail(statistic, 3)
    assert tail > 1e-4


def test_greedy_takes_the_lowest_id_among_equal_maxima():
    logits = np.array([[1, 3, 3, 2], [0, 0, 0, 0], [-np.inf, -5, -5, -np.inf]], np.float32)
    assert choose_rows(logits, GREEDY, np.arange(3)).tolist() == [1, 0, 1]
    assert choose_rows(logits.astype(ml_dtypes.bfloat16), GREEDY, np.arange(3)).tolist() == [1, 0, 1]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1, seed=5), SamplingParams(1.0, 2, 0.5, 5)])
def test_a_row_without_a_sound_maximum_gets_no_choice_and_disturbs_no_other(params):
    """NaN anywhere, +inf, or nothing but -inf: never a made-up id (public issue: vllm-project/vllm#53029)."""
    rows = np.random.default_rng(0).normal(size=(6, 9))
    good = choose_rows(rows, params, np.arange(6))
    assert (good >= 0).all()
    rows[1, 4], rows[2], rows[3, 0], rows[4] = np.nan, np.nan, np.inf, -np.inf
    choices = choose_rows(rows, params, np.arange(6))
    assert choices.tolist() == [good[0], NO_CHOICE, NO_CHOICE, NO_CHOICE, NO_CHOICE, good[5]]
    assert np.isnan(choice_margins(rows, params, np.arange(6))).tolist() == [False, True, True, True, True, False]
    with pytest.raises(TargetRowError, match="request 1, position 8: the target's logits hold NaN"):
        choose(rows[2], params, 8, request=1)
    assert choose(rows[5], params, 5) == good[5]


def test_the_drawn_token_is_the_first_whose_cumulative_sum_exceeds_u():
    logits = np.log(np.array([0.25, 0.0, 0.25, 0.5]), where=[True, False, True, True], out=np.full(4, -np.inf))
    params = SamplingParams(temperature=1.0, seed=17)
    positions = np.arange(500)
    tokens = choose_rows(np.tile(logits, (500, 1)), params, positions)
    u = uniforms(17, positions)
    assert tokens.tolist() == np.select([u < 0.25, u < 0.5], [0, 2], 3).tolist()


def test_filters_keep_what_they_promise():
    logits = np.log(np.array([[0.1, 0.4, 0.1, 0.3, 0.1]]))

    def kept(**filters):
        return np.flatnonzero(probabilities(logits, SamplingParams(temperature=1.0, **filters))[0]).tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=1) == [1]
    assert kept(top_k=3) == [0, 1, 3], "the tie at the cut goes to the lowest id"
    assert kept(top_k=99) == [0, 1, 2, 3, 4]
    assert kept(top_p=0.39) == [1]
    assert kept(top_p=0.41) == [1, 3]
    assert kept(top_p=0.75) == [0, 1, 3]
    assert kept(top_p=1e-9) == [1], "one token always stays"
    # top_k first: the survivors 0.4 and 0.3 are renormalised to 0.571 and 0.429 before top_p looks at them.
    assert kept(top_k=2, top_p=0.55) == [1]
    assert kept(top_p=0.55) == [1, 3]
    for filters in ({}, {"top_k": 3}, {"top_p": 0.75}, {"top_k": 2, "top_p": 0.55}):
        assert abs(probabilities(logits, SamplingParams(temperature=1.0, **filters)).sum() - 1) < 1e-15


def test_temperature_scales_before_top_p():
    logits = np.log(np.array([[0.5, 0.3, 0.2]]))
    cold = probabilities(logits, SamplingParams(temperature=0.5, top_p=0.6))[0]
    assert np.flatnonzero(cold).tolist() == [0], "0.25 of 0.38 is 0.66 at temperature 1/2"
    np.testing.assert_allclose(
        probabilities(logits, SamplingParams(temperature=2.0))[0],
        np.sqrt([0.5, 0.3, 0.2]) / np.sqrt([0.5, 0.3, 0.2]).sum(),
    )
    tiny = SamplingParams(temperature=1e-300, seed=1)
    assert choose_rows(logits, tiny, np.array([3])).tolist() == [0]


def test_margins_tell_how_near_the_other_choice_is():
    logits = np.array([[0.0, 2.0, 1.75], [1.0, 1.0, 0.0]])
    np.testing.assert_array_equal(choice_margins(logits, GREEDY, np.arange(2)), [0.25, 0.0])
    params = SamplingParams(temperature=1.0, seed=3)
    cumulative = np.cumsum(np.exp(logits[0]) / np.exp(logits[0]).sum())
    expected = np.abs(cumulative[:2] - uniforms(3, np.array([41]))).min()
    assert abs(choice_margins(logits[:1], params, np.array([41]))[0] - expected) < 1e-15
    assert choice_margins(np.zeros((1, 1)), params, np.array([0])).tolist() == [np.inf]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"temperature": -1}, "temperature must be finite"),
        ({"temperature": math.nan}, "temperature must be finite"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"top_p": 0}, "top_p must be in"),
        ({"top_p": 1.1}, "top_p must be in"),
        ({"seed": -1}, "64 unsigned bits"),
        ({"seed": 2**64}, "64 unsigned bits"),
    ],
)
def test_impossible_parameters_are_refused(bad, text):
    with pytest.raises(ValueError, match=text):
        SamplingParams(**bad)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"logits must be \[N, V\]"):
        choose_rows(np.zeros((2, 3)), GREEDY, np.arange(3))
    with pytest.raises(ValueError, match=r"logits must be \[N, V\]"):
        choose_rows(np.zeros((2, 0)), GREEDY, np.arange(2))
