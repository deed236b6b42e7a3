"""Logits -> lists on the device: the ids of the reference, its logz to 1 ulp, lp one subtraction of that logz."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kdtr
from engine.sources import CHECKOUT
from engine.tests.topk_lists import DTYPES, INF, ascending, assert_lists, bits, check, each_dtype, gaussian, run

VOCABULARIES = (1, 31, 32, 33, 127, 1000, 4097, 129281, 163840, 163841)


# --- against the reference --------------------------------------------------------------------------------------------


def test_golden_lists(ops):
    golden = kdtr.read(CHECKOUT / "datasets" / "golden" / "topk.kdtr")
    cases = sorted(name.removesuffix("/logits") for name in golden if name.endswith("/logits"))
    for case in cases:
        logits, vocab_size = np.asarray(golden[f"{case}/logits"])[None], int(golden[f"{case}/vocab_size"])
        found = run(ops, logits, int(golden[f"{case}/k"]), vocab_size=vocab_size)
        assert bits(found.ids[0]) == bits(golden[f"{case}/ids"]), case
        for name in ("lp", "logz"):
            tolerance = golden.info[f"{case}/{name}"].tolerance
            assert tolerance is not None
            row = kdtr.compare_array(name, golden[f"{case}/{name}"], getattr(found, name)[0], tolerance)
            assert row.ok, f"{case}: {row}"
        assert_lists(found, logits, int(golden[f"{case}/k"]), vocab_size)
    assert len(cases) >= 18


@each_dtype
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_every_vocabulary_and_the_winners_that_narrow_ids_would_lose(ops, dtype, vocabulary):
    """Case C04. Public issues: vllm-project/vllm#44744 (an id outside the vocabulary), #41834."""
    logits = gaussian(vocabulary, 1, 2, vocabulary, dtype=dtype)
    winners = sorted({w % vocabulary for w in (0, 65535, 65536, 131071, vocabulary - 1)})
    logits[0, 1, winners] = 40
    found = check(ops, logits, min(64, vocabulary))
    assert found.ids[0, 1, : len(winners)].tolist() == winners
    assert found.ids.min() >= 0
    assert found.ids.max() < vocabulary


@each_dtype
@pytest.mark.parametrize("k", [0, 1, 2, 63, 255, 256, 257, 1000, 1024])
def test_every_length_of_lists(ops, dtype, k):
    """Both kernels, all sizes of groups, and vocabularies at the edges of chunks and groups."""
    for vocabulary in (1024, 2048, 2049, 4095, 16 * 1024 - 1, 16 * 1024, 20011):
        check(ops, gaussian(k, 1, 1, vocabulary, dtype=dtype), min(k, vocabulary))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_drawn_rows(ops, data):
    """Few different values, so that ties are everywhere; -inf, both zeros, any V and k."""
    vocabulary = data.draw(st.integers(1, 5000))
    seed = data.draw(st.integers(0, 2**32 - 1))
    values = data.draw(
        st.lists(st.sampled_from([-INF, -100.0, -3.5, -0.0, 0.0, 1e-30, 0.25, 7.0, 88.0, 3e38]), min_size=1, max_size=5)
    )
    noise = data.draw(st.sampled_from([0.0, 0.0, 1e-3, 5.0]))
    rng = np.random.default_rng(seed)
    rows = rng.choice(values, (1, 2, vocabulary)) + noise * rng.standard_normal((1, 2, vocabulary))
    dtype = data.draw(st.sampled_from(DTYPES))
    check(ops, rows.astype(np.float32).astype(dtype), data.draw(st.integers(0, min(vocabulary, 1024))))


HARD = {
    "ascending": ascending,
    "descending": lambda v: ascending(v)[::-1],
    "all equal": lambda v: np.full(v, 2.5),
    "two values": lambda v: np.random.default_rng(1).integers(0, 2, v),
    "nine values": lambda v: np.random.default_rng(2).integers(-4, 5, v),
    "all -inf": lambda v: np.full(v, -INF),
    "masked by -inf": lambda v: np.where(np.arange(v) % 5003 == 17, gaussian(3, v), -INF),
    "masked by a number": lambda v: np.where(np.arange(v) % 5003 == 17, gaussian(3, v), -1e9),
    "one huge": lambda v: np.where(np.arange(v) == v // 2, 3e38, gaussian(4, v)),
    "one above, all below zero": lambda v: np.where(np.arange(v) == 7, 1, -3 + gaussian(5, v, scale=0.1)),
    "a cluster": lambda v: gaussian(6, v) + np.where(np.arange(v) < 3000, 10, 0),
    "a narrow plateau": lambda v: np.where(np.arange(v) % 64 == 3, 5 + gaussian(7, v, scale=1e-4), gaussian(8, v)),
    "millions": lambda v: gaussian(9, v, scale=1e6),
    "subnormal": lambda v: gaussian(10, v, scale=1e-40),
}


@each_dtype
@pytest.mark.parametrize("kind", HARD)
def test_rows_that_defeat_a_guess_at_the_bound(ops, dtype, kind):
    """Too many groups, candidates or ties for the room that is kept for them."""
    logits = HARD[kind](40_000).astype(np.float32).astype(dtype)[None, None]
    for k in (64, 1024):
        check(ops, logits, k)


@pytest.mark.parametrize("vocabulary", [163840, 163841])
@pytest.mark.parametrize("kind", ["ascending", "masked by -inf"])
def test_hard_rows_of_full_length(ops, vocabulary, kind):
    check(ops, HARD[kind](vocabulary).astype(np.float32)[None, None], 256)


def test_zeros_are_equal_and_keep_their_sign(ops):
    """-0.0 and +0.0 are one value, ordered by id; lp keeps the sign that logit - 0 has."""
    logits = np.array([[[0.0, -0.0, -0.0, 0.0], [-0.0, -INF, -INF, -INF]]], np.float32)
    found = check(ops, logits, 4)
    assert found.ids.tolist() == [[[0, 1, 2, 3], [0, 1, 2, 3]]]
    assert found.logz[0, 1] == 0
    assert np.signbit(found.lp[0, 1, 0])


# --- the normaliser ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [3, 1000, 5000])
def test_logz_of_any_size(ops, vocabulary):
    """From far below the fast sum's reach to far above: where |logz| is small, a float32 has more bits to get right."""
    rows = gaussian(0, 60, vocabulary).astype(np.float64)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    wanted = np.concatenate([np.linspace(-6, 6, 41), [1e-4, -1e-4, 3.999, 4.001, -3.999], 30.0 * np.arange(-7, 7)])
    check(ops, (rows + wanted[:, None]).astype(np.float32)[None, :31], 2)
    check(ops, (rows + wanted[:, None]).astype(np.float32)[None, 31:], 2)


@each_dtype
def test_normalised_rows(ops, dtype):
    """Peak and log-sum cancel: logz is some 1e-8, and more bits than a double has are needed."""
    rng = np.random.default_rng(4)
    for vocabulary in (2, 5, 17, 40, 3000):
        rows = np.log(rng.dirichlet(np.full(vocabulary, 2.0), (2, 20)))
        check(ops, rows.astype(np.float32).astype(dtype), min(vocabulary, 3))


def test_logz_of_one_token_and_next_to_nothing(ops):
    """log(1 + e^-40) is not 0, and not what is left after 1 has eaten its bits."""
    far = [[0, -40], [-1e-9, -20], [1e-45, -INF], [0, -80], [0, -103], [5, -90]]
    check(ops, np.array(far, np.float32)[None], 2)


def test_logz_of_enormous_logits(ops):
    biggest = np.finfo(np.float32).max
    rows = [[biggest, -biggest, 0], [biggest] * 3, [-biggest] * 3, [16384, 16383, -16384], [-32767.9, -32768.1, -INF]]
    check(ops, np.array(rows, np.float32)[None], 3)
    wide = np.full((1, 2, 3000), -32768.5, np.float32)  # chunks on both sides of what is summed fast
    wide[0, 0, 10], wide[0, 1, 2000] = -32767.5, 16000
    check(ops, wide, 3)


def test_terms_far_below_a_chunks_peak_count_only_beside_their_own(ops):
    """One chunk of almost nothing beside one that matters, in either order."""
    rows = np.full((1, 2, 4096), -200, np.float32)
    rows[0, 0, 5] = rows[0, 1, 4000] = 20
    check(ops, rows, 5)
