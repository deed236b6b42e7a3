"""Rotary embedding: layouts against hand-computed tables, relativity, YaRN against its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reference.numerics import PRECISIONS
from reference.rope import RopeParameters, rotate

FLOAT64 = PRECISIONS["float64"]
PLAIN = RopeParameters(rope_theta=10000.0)
YARN = RopeParameters(10000.0, "yarn", 40.0, 4096, 32.0, 1.0, 1.0, 1.0)


def turned(x, position, layout, rope=PLAIN, numerics=FLOAT64):
    x = np.asarray(x, numerics.dtype)
    cos, sin = rope.tables(np.array([position]), x.shape[-1], numerics)
    return rotate(x, cos[0], sin[0], layout, numerics)


@pytest.mark.parametrize("position", [0, 1, 7])
def test_layouts_match_a_table_made_by_hand(position):
    """d = 8, x = 1..8: pairs (1,2)(3,4)(5,6)(7,8), or (1,5)(2,6)(3,7)(4,8), turned by position * 10^-i."""
    x = [1.0, 2, 3, 4, 5, 6, 7, 8]
    for layout, pairs in (
        ("interleaved", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("half", [(0, 4), (1, 5), (2, 6), (3, 7)]),
    ):
        expected = np.zeros(8)
        for index, (a, b) in enumerate(pairs):
            angle = position * 10.0**-index
            expected[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
            expected[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
        np.testing.assert_allclose(turned(x, position, layout), expected, rtol=0, atol=1e-14)


def test_first_pair_by_numbers():
    """(1, 2) turned by one radian, written out."""
    np.testing.assert_allclose(turned([1, 2, 0, 0], 1, "interleaved")[:2], [-1.14263966, 1.92207560], atol=1e-8)


def test_a_permuted_checkpoint_is_the_other_layout():
    x = np.random.default_rng(0).standard_normal(8)
    evens_first = np.concatenate([x[0::2], x[1::2]])
    interleaved, half = turned(x, 5, "interleaved"), turned(evens_first, 5, "half")
    np.testing.assert_array_equal(np.concatenate([interleaved[0::2], interleaved[1::2]]), half)
    assert np.abs(turned(x, 5, "half") - interleaved).max() > 0.1


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("rope", [PLAIN, YARN])
def test_scores_depend_on_the_distance_only(layout, rope):
    q, k = np.random.default_rng(1).standard_normal((2, 64))
    near = turned(q, 5, layout, rope) @ turned(k, 3, layout, rope)
    far = turned(q, 105, layout, rope) @ turned(k, 103, layout, rope)
    assert near == pytest.approx(far, abs=1e-12)
    assert abs(near - turned(q, 6, layout, rope) @ turned(k, 3, layout, rope)) > 1e-3


def test_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="'neox' is not"):
        turned([1, 2], 0, "neox")


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    plain, yarn = PLAIN.frequencies(64), YARN.frequencies(64)
    turns = 4096 * plain / (2 * np.pi)
    np.testing.assert_array_equal(yarn[turns > 40], plain[turns > 40])
    np.testing.assert_allclose(yarn[turns < 0.7], plain[turns < 0.7] / 40, rtol=1e-15)
    between = (turns < 30) & (turns > 1.2)
    assert ((yarn < plain) & (yarn > plain / 40))[between].all()


@pytest.mark.parametrize(
    ("beta_fast", "beta_slow", "fast", "slow", "low", "high"),
    [
        (32, 1, 10.47, 22.51, 10, 23),
        (28, 1.2, 10.93, 21.88, 10, 22),  # rounded outwards, not to the nearest
        (30, 1.1, 10.69, 22.18, 10, 23),
        (32, 0.001, 10.47, 46.51, 10, 47),  # past the last of the 32 pairs, but before dim - 1
        (32, 1e-6, 10.47, 70.51, 10, 63),
        (1000, 1, -1.49, 22.51, 0, 23),
    ],
)
def test_yarn_ramp_is_linear_between_the_pairs_that_make_so_many_turns(beta_fast, beta_slow, fast, slow, low, high):
    rope = RopeParameters(10000.0, "yarn", 40.0, 4096, beta_fast, beta_slow)
    for beta, pair in ((beta_fast, fast), (beta_slow, slow)):
        turns = 4096 * 10000.0 ** (-2 * pair / 64) / (2 * np.pi)
        assert turns == pytest.approx(beta, rel=5e-3)
    plain = PLAIN.frequencies(64)
    ramp = np.clip((np.arange(32) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(rope.frequencies(64), plain * (1 - ramp) + plain / 40 * ramp, rtol=1e-14)
    if (fast, slow) != (low, high):
        exact = RopeParameters(10000.0, "yarn", 40.0, 4096, beta_fast, beta_slow, truncate=False).frequencies(64)
        assert np.abs(exact - rope.frequencies(64)).max() > 1e-6


def test_yarn_ramp_of_zero_width_is_a_step():
    """Kimi-K2's beta_fast = beta_slow = 1 without rounding: no division by zero."""
    rope = RopeParameters(50000.0, "yarn", 32.0, 4096, 1.0, 1.0, 1.0, 1.0, truncate=False)
    plain = RopeParameters(50000.0).frequencies(64)
    ratio = rope.frequencies(64) / plain
    assert np.isfinite(ratio).all()
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(1 / 32)
    assert set(np.round(ratio, 6)) == {1.0, round(1 / 32, 6)}


@pytest.mark.parametrize(
    ("rope", "amplitude", "correction"),
    [
        (PLAIN, 1.0, 1.0),
        (YARN, 1.0, (0.1 * math.log(40) + 1) ** 2),
        (RopeParameters(1e4, "yarn", 40.0, 4096, mscale=0.707, mscale_all_dim=1.0), 0.9210, 1.8739),
        (RopeParameters(1e4, "yarn", 40.0, 4096), 0.1 * math.log(40) + 1, 1.0),
        (RopeParameters(1e4, "yarn", 40.0, 4096, mscale=0.5, mscale_all_dim=0.0), 0.1 * math.log(40) + 1, 1.0),
        (RopeParameters(1e4, "yarn", 40.0, 4096, mscale=0.5), 0.1 * math.log(40) + 1, 1.0),
        (RopeParameters(1e4, "yarn", 40.0, 4096, attention_factor=1.0), 1.0, 1.0),
        (RopeParameters(1e4, "yarn", 1.0, 4096, mscale=1.0, mscale_all_dim=1.0), 1.0, 1.0),
    ],
)
def test_amplitude_and_softmax_scale(rope, amplitude, correction):
    assert rope.amplitude() == pytest.approx(amplitude, abs=1e-4)
    assert rope.softmax_scale(192) * math.sqrt(192) == pytest.approx(correction, abs=1e-4)
    cos, sin = rope.tables(np.array([0, 3]), 8, FLOAT64)
    np.testing.assert_allclose(cos**2 + sin**2, rope.amplitude() ** 2, rtol=1e-14)


def test_tables_of_the_precisions():
    positions = np.array([0, 1, 4095, 100_000])
    cos, _ = YARN.tables(positions, 64, FLOAT64)
    cos32, _ = YARN.tables(positions, 64, PRECISIONS["float32"])
    cos16, _ = YARN.tables(positions, 64, PRECISIONS["bfloat16"])
    assert cos32.dtype == np.float32
    np.testing.assert_allclose(cos32[:2], cos[:2], atol=2e-7)
    assert 0 < np.abs(cos32[3] - cos[3]).max() < 0.01  # float32 angles, as published
    assert not (cos16.view(np.uint32) & 0xFFFF).any()
    np.testing.assert_allclose(cos16, cos32, atol=2**-8)
