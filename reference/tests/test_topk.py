from __future__ import annotations

from decimal import Decimal, localcontext

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from reference.topk import DraftError, log_normaliser, topk_logprob
from reference.tree import build_tree

VOCABULARIES = (1, 31, 32, 33, 127, 1000, 4097, 129280, 163841)


def slow_topk(row, k):
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


def exact_log_sum_exp(row):
    """log(sum(exp(row))), correctly rounded to float32 from 80 decimal digits."""
    with localcontext(prec=80):
        exact = sum((Decimal(float(x)).exp() for x in row), Decimal(0)).ln()
        near = np.float32(float(exact))  # rounded twice, so one of its neighbours may be nearer
        around = (np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf)))
        return min(around, key=lambda candidate: abs(Decimal(float(candidate)) - exact))


@pytest.mark.parametrize("k", [0, 1, 2, 7, 40])
def test_equals_a_full_sort_with_ties_to_the_lowest_id(k):
    rng = np.random.default_rng(k)
    for row in (rng.normal(size=37), rng.integers(-2, 2, 37), np.zeros(37), np.where(rng.random(37) < 0.5, -np.inf, 1)):
        logits = row.astype(np.float32)[None]
        top = topk_logprob(logits, k)
        assert top.ids.dtype == np.int32
        assert top.ids.shape == (1, min(k, 37))
        assert top.ids[0].tolist() == slow_topk(logits[0].tolist(), k)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("winner", [0, 65535, 65536, 131071, -1])
def test_every_id_is_inside_the_vocabulary_and_the_winner_is_found(vocabulary, winner):
    """Public issue: vllm-project/vllm#44744, a tail tile returned an id outside the vocabulary."""
    winner = vocabulary - 1 if winner == -1 else winner
    if winner >= vocabulary:
        winner %= vocabulary
    logits = np.random.default_rng(vocabulary).normal(size=(2, vocabulary)).astype(np.float32)
    logits[1, winner] = 50
    top = topk_logprob(logits, 64)
    assert top.ids[1, 0] == winner
    assert top.ids.min() >= 0
    assert top.ids.max() < vocabulary
    for row, ids in zip(logits, top.ids, strict=True):
        assert ids.tolist() == np.argsort(-row, kind="stable")[:64].tolist()


def test_lp_is_one_float32_subtraction_of_the_rounded_logz():
    logits = np.random.default_rng(0).normal(2, 4, (5, 1000)).astype(np.float32)
    top = topk_logprob(logits, 10)
    assert top.lp.dtype == top.logz.dtype == np.float32
    for d in range(5):
        wide = logits[d].astype(np.float64)
        z = np.float32(wide.max() + np.log(np.exp(wide - wide.max()).sum()))
        assert top.logz[d] == z
        np.testing.assert_array_equal(top.lp[d], logits[d, top.ids[d]] - z)
        in_one_rounding = (wide[top.ids[d]] - (wide.max() + np.log(np.exp(wide - wide.max()).sum()))).astype(np.float32)
    assert (top.lp[d] != in_one_rounding).any(), "the case must tell the two ways of rounding apart"


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.float32, st.integers(1, 12), elements=st.floats(-40, 40, width=32)))
@example(np.array([0, -40], np.float32))
@example(np.array([-1e-9, -20], np.float32))
@example(np.array([1e-45], np.float32))
def test_logz_is_the_correctly_rounded_log_sum_exp(row):
    assert log_normaliser(row) == exact_log_sum_exp(row)


def test_logz_is_correctly_rounded_where_peak_and_log_sum_cancel():
    """Rows that are already normalised have a logz of some 1e-8, where plain float64 has few bits left."""
    rng = np.random.default_rng(4)
    plain_wrong = 0
    for vocabulary in rng.integers(2, 40, 40):
        row = np.log(rng.dirichlet(np.full(vocabulary, 2.0))).astype(np.float32)
        exact = exact_log_sum_exp(row)
        assert log_normaliser(row) == exact
        wide = row.astype(np.float64)
        plain_wrong += np.float32(wide.max() + np.log(np.exp(wide - wide.max()).sum())) != exact
    assert plain_wrong > 0, "plain float64 would do: the wider path is not needed"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_input_gives_the_tree_of_the_same_values_in_float32(dtype):
    logits = np.random.default_rng(1).normal(0, 3, (3, 200)).astype(dtype)
    logits[0, :2] = dtype(65504), dtype(60000)
    narrow, wide = topk_logprob(logits, 9), topk_logprob(logits.astype(np.float32), 9)
    for a, b in ((narrow.ids, wide.ids), (narrow.lp, wide.lp), (narrow.logz, wide.logz)):
        np.testing.assert_array_equal(a, b)
    assert build_tree(narrow.lp, narrow.ids, 9).tokens.tolist() == build_tree(wide.lp, wide.ids, 9).tokens.tolist()
    assert narrow.ids[0, 0] == 0


BAD_ROWS = {
    "one NaN": ([0, 1, np.nan, 2], "depth 2, token 2: the logit is NaN"),
    "all NaN": ([np.nan] * 4, "depth 2, token 0: the logit is NaN"),
    "one +inf": ([0, np.inf, 1, 2], r"depth 2, token 1: the logit is \+inf"),
    "two +inf": ([0, np.inf, 1, np.inf], r"depth 2, token 1: the logit is \+inf"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_nan_and_plus_inf_are_refused_by_request_depth_and_token(case):
    """Public issue: vllm-project/vllm#41834, where a NaN row quietly became token 0."""
    row, words = BAD_ROWS[case]
    with pytest.raises(DraftError, match="request 3, " + words) as error:
        topk_logprob(np.array([[0, 0, 0, 0], row], np.float32), 2, request=3)
    assert (error.value.request, error.value.depth) == (3, 2)


def test_minus_inf_is_never_drafted():
    logits = np.array([[-np.inf, 2, -np.inf, 1], [-np.inf] * 4, [0, 0, 0, 0]], np.float32)
    top = topk_logprob(logits, 4)
    assert top.ids.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert np.isneginf(top.lp[0, 2:]).all()
    assert np.isneginf(top.lp[1]).all()
    assert np.isneginf(top.logz[1])
    tree = build_tree(top.lp, top.ids, 50)
    assert sorted(tree.tokens[1:].tolist()) == [1, 3], "depth 2 has no candidate, so depth 3 is out of reach"
    lone = np.full((2, 5), -np.inf, np.float32)
    lone[:, 3] = -7
    top = topk_logprob(lone, 5)
    assert top.lp[:, 0].tolist() == [0, 0]
    assert build_tree(top.lp, top.ids, 9).tokens.tolist() == [0, 3, 3]


def test_huge_finite_logits_stay_finite_or_become_minus_inf():
    biggest = np.finfo(np.float32).max
    top = topk_logprob(np.array([[biggest, -biggest, 0], [biggest] * 3], np.float32), 3)
    assert top.ids.tolist() == [[0, 2, 1], [0, 1, 2]]
    assert top.lp[0].tolist() == [0, -biggest, -np.inf]
    assert top.lp[1].tolist() == [0, 0, 0]
    assert build_tree(top.lp, top.ids, 20).node_count == 2 + 2 * 3


def test_padded_columns_never_appear_and_do_not_count():
    logits = np.zeros((2, 8), np.float32)
    logits[:, 5:] = [[9, np.nan, np.inf], [np.nan, np.nan, 3]]
    padded, exact = topk_logprob(logits, 8, vocab_size=5), topk_logprob(logits[:, :5], 8)
    assert padded.ids.tolist() == exact.ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    np.testing.assert_array_equal(padded.lp, exact.lp)
    np.testing.assert_array_equal(padded.logz, exact.logz)


def test_impossible_arguments_are_refused():
    logits = np.zeros((2, 8), np.float32)
    for size in (0, 9, -1):
        with pytest.raises(ValueError, match=f"vocabulary size {size} does not fit logits of width 8"):
            topk_logprob(logits, 2, vocab_size=size)
    with pytest.raises(ValueError, match="k must be at least 0, got -2"):
        topk_logprob(logits, -2)
    with pytest.raises(ValueError, match=r"must have shape \[L, V\], got \[8\]"):
        topk_logprob(logits[0], 2)
    with pytest.raises(TypeError, match="got float64"):
        topk_logprob(logits.astype(np.float64), 2)
    assert topk_logprob(logits[:0], 4).ids.shape == (0, 4)
