"""Latent attention: both forms agree, masks, empty rows, NaN that must not spread, chunk merging."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from reference.mla import (
    MlaWeights,
    absorb_query,
    expand_output,
    expanded_attention,
    key_part,
    latent_attention,
    merge_partials,
    project,
)
from reference.numerics import PRECISIONS, softmax_with_lse
from reference.tests.models import YARN, random_parents, random_weights, target_config, tree_visibility
from reference.weights import Weights

FLOAT64, FLOAT32, BFLOAT16 = (PRECISIONS[name] for name in ("float64", "float32", "bfloat16"))


def queries_and_rows(rng, rows, length, heads=3, rank=16, rope=8, dtype=np.float64) -> tuple[Any, Any, Any, Any]:
    draw = (
        rng.standard_normal(shape)
        for shape in ((rows, heads, rank), (rows, heads, rope), (length, rank), (length, rope))
    )
    q_latent, q_rope, latent, rope_key = (array.astype(dtype) for array in draw)
    return q_latent, q_rope, latent, rope_key


def plain_attention(q_latent, q_rope, latent, rope_key, scale, sees):
    """Loops over rows, heads and keys; float64."""
    out = np.zeros(q_latent.shape)
    lse = np.full(q_latent.shape[:2], -np.inf)
    for row, head in itertools.product(range(out.shape[0]), range(out.shape[1])):
        keys = [s for s in range(len(latent)) if sees[row, s]]
        if keys:
            score = [scale * (q_latent[row, head] @ latent[s] + q_rope[row, head] @ rope_key[s]) for s in keys]
            lse[row, head] = np.logaddexp.reduce(score)
            out[row, head] = sum(np.exp(x - lse[row, head]) * latent[s] for x, s in zip(score, keys, strict=True))
    return out, lse


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 129])
@pytest.mark.parametrize("prefix", [0, 5])
def test_tree_masks_of_every_width_and_storage(rows, prefix):
    rng = np.random.default_rng(rows)
    arrays = queries_and_rows(rng, rows, prefix + rows)
    visibility = tree_visibility(random_parents(rng, rows))
    sees = np.concatenate([np.ones((rows, prefix), bool), visibility], axis=1)
    expected, expected_lse = plain_attention(*arrays, 0.3, sees)
    wide = np.zeros((rows, 160), bool)
    wide[:, :rows] = visibility
    forms = {
        "new rows": visibility,
        "all rows": sees,
        "transposed storage": np.asfortranarray(visibility),
        "view of a larger allocation": wide[:, :rows],
        "reversed twice": visibility[::-1][::-1],
        "negative stride": np.ascontiguousarray(visibility[:, ::-1])[:, ::-1],
    }
    for form, mask in forms.items():
        out, lse = latent_attention(*arrays, 0.3, FLOAT64, visible=mask)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12, err_msg=form)
        np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-12, err_msg=form)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones((4, 4), np.uint8), r"must be bool \(True = sees\), got uint8"),
        (np.ones((4, 4), np.int32), "must be bool"),
        (np.zeros((4, 4)), "must be bool"),
        (np.ones(16, bool), r"shape \[4, at most 9\], got \[16\]"),
        (np.ones((9, 4), bool), r"shape \[4, at most 9\], got \[9, 4\]"),
        (np.ones((4, 10), bool), r"shape \[4, at most 9\], got \[4, 10\]"),
        (np.ones((5, 5), bool), r"shape \[4, at most 9\], got \[5, 5\]"),
    ],
)
def test_masks_of_a_wrong_kind_are_refused_with_both_shapes(mask, message):
    arrays = queries_and_rows(np.random.default_rng(0), 4, 9)
    with pytest.raises(ValueError, match=message):
        latent_attention(*arrays, 0.3, FLOAT64, visible=mask)


def test_arrays_that_do_not_fit_are_refused():
    q_latent, q_rope, latent, rope_key = queries_and_rows(np.random.default_rng(0), 4, 9)
    for wrong in (
        (q_latent, q_rope[:3], latent, rope_key),
        (q_latent, q_rope, latent[:, :15], rope_key),
        (q_latent, q_rope, latent, rope_key[:8]),
    ):
        with pytest.raises(ValueError, match="must have shape"):
            latent_attention(*wrong, 0.3, FLOAT64)
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        latent_attention(q_latent, q_rope, latent, rope_key, 0.3, FLOAT64, chunk=0)


@pytest.mark.parametrize("chunk", [None, 1, 2, 5])
def test_rows_with_nothing_to_see_are_zero_and_minus_infinity(chunk):
    arrays = queries_and_rows(np.random.default_rng(0), 3, 5)
    visible = np.zeros((3, 5), bool)
    visible[1, 2:4] = True
    out, lse = latent_attention(*arrays, 0.3, FLOAT64, visible=visible, chunk=chunk)
    assert (out[[0, 2]] == 0).all()
    assert np.isneginf(lse[[0, 2]]).all()
    expected, expected_lse = plain_attention(*arrays, 0.3, visible)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse[1], expected_lse[1], rtol=0, atol=1e-13)


def test_no_cache_rows_at_all():
    arrays = queries_and_rows(np.random.default_rng(0), 2, 0)
    out, lse = latent_attention(*arrays, 0.3, FLOAT64)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("numerics", [FLOAT64, FLOAT32, BFLOAT16])
@pytest.mark.parametrize("where", ["latent", "rope_key"])
def test_hidden_rows_have_no_influence_whatever_they_hold(garbage, numerics, where):
    """Bit for bit, because the weight 0 of a hidden row must not meet its value."""
    rng = np.random.default_rng(3)
    q_latent, q_rope, latent, rope_key = (numerics.store(a) for a in queries_and_rows(rng, 4, 9))
    visible = tree_visibility([-1, 0, 0, 2])
    clean = latent_attention(q_latent, q_rope, latent, rope_key, 0.3, numerics, visible=visible)
    dirty = {"latent": latent.copy(), "rope_key": rope_key.copy()}
    dirty[where][6] = garbage  # row 1 of the tree, seen by itself only
    with np.errstate(all="ignore"):
        out, lse = latent_attention(
            q_latent, q_rope, dirty["latent"], dirty["rope_key"], 0.3, numerics, visible=visible
        )
    others = [0, 2, 3]
    np.testing.assert_array_equal(out[others], clean[0][others])
    np.testing.assert_array_equal(lse[others], clean[1][others])
    if not np.isfinite(garbage) and where == "latent":
        assert np.isnan(out[1]).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_visible_infinity_never_becomes_a_plausible_row(sign):
    """An infinite score of -inf looks like a masked one; the row that sees it must be NaN all the same."""
    q_latent, q_rope, latent, rope_key = queries_and_rows(np.random.default_rng(3), 2, 4)
    q_latent[:, :, 0] = 1
    latent[2, 0] = sign * np.inf
    visible = np.array([[True, True, False, False], [True, True, True, False]])
    with np.errstate(invalid="ignore"):
        out, _ = latent_attention(q_latent, q_rope, latent, rope_key, 0.3, FLOAT64, visible=visible)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()


def test_expanded_form_has_the_same_protection():
    config = target_config()
    rng = np.random.default_rng(4)
    weights, inputs = layer_inputs(config, rng, 4, FLOAT64)
    latent, rope_key = rng.standard_normal((9, 16)), rng.standard_normal((9, 8))
    visible = tree_visibility([-1, 0, 0, 2])
    clean = expanded_attention(inputs, latent, rope_key, weights, 0.3, FLOAT64, visible)
    latent[6] = np.nan
    out = expanded_attention(inputs, latent, rope_key, weights, 0.3, FLOAT64, visible)
    np.testing.assert_array_equal(out[[0, 2, 3]], clean[[0, 2, 3]])
    assert np.isnan(out[1]).all()


def layer_inputs(config, rng, rows, numerics):
    """Weights of a layer and what they make of random normed rows."""
    tensors = random_weights(config, 5)
    at = "model.layers.0.self_attn."
    held = Weights(tensors, numerics)
    query = (
        held.take_linear(at + "q_proj.weight")
        if config.q_lora_rank is None
        else (
            held.take_linear(at + "q_a_proj.weight"),
            held.take(at + "q_a_layernorm.weight"),
            held.take_linear(at + "q_b_proj.weight"),
        )
    )
    kv_b = held.take_linear(at + "kv_b_proj.weight").reshape(config.kv_lora_rank, config.num_attention_heads, -1)
    weights = MlaWeights(
        query,
        held.take_linear(at + "kv_a_proj_with_mqa.weight"),
        held.take(at + "kv_a_layernorm.weight"),
        kv_b,
        key_part(kv_b, config.qk_nope_head_dim),
        held.take_linear(at + "o_proj.weight"),
    )
    cos, sin = config.rope.tables(np.arange(rows), config.qk_rope_head_dim, numerics)
    x = numerics.store(rng.standard_normal((rows, config.hidden_size)))
    return weights, project(x, weights, cos, sin, config, numerics)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": YARN},
        {"q_lora_rank": None},
        {"rope_interleave": False},
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16},
    ],
)
@pytest.mark.parametrize("prefix", [0, 1, 13])
def test_absorbed_and_expanded_agree(changes, prefix):
    config = target_config(**changes)
    for numerics, tolerance in ((FLOAT64, 1e-12), (FLOAT32, 1e-5), (BFLOAT16, 0.1)):
        rng = np.random.default_rng(7)
        weights, inputs = layer_inputs(config, rng, 9, numerics)
        kept_latent = numerics.store(rng.standard_normal((prefix, config.kv_lora_rank)))
        kept_key = numerics.store(rng.standard_normal((prefix, config.qk_rope_head_dim)))
        latent = np.concatenate([kept_latent, inputs.latent])
        rope_key = np.concatenate([kept_key, inputs.rope_key])
        visible = tree_visibility(random_parents(rng, 9))
        expanded = expanded_attention(inputs, latent, rope_key, weights, config.softmax_scale, numerics, visible)
        q_latent = absorb_query(inputs.q_nope, weights.w_uk, numerics)
        out, _ = latent_attention(
            q_latent, inputs.q_rope, latent, rope_key, config.softmax_scale, numerics, visible=visible
        )
        absorbed = expand_output(numerics.store(out), weights.w_uv, numerics)
        assert absorbed.shape == expanded.shape == (9, config.num_attention_heads, config.v_head_dim)
        assert 0.3 < np.abs(expanded).max() < 30
        np.testing.assert_allclose(absorbed, expanded, rtol=0, atol=tolerance)


def test_kv_b_holds_nope_rows_then_value_rows_per_head():
    weights, _ = layer_inputs(target_config(), np.random.default_rng(0), 2, FLOAT64)
    kv_b = random_weights(target_config(), 5)["model.layers.0.self_attn.kv_b_proj.weight"]
    np.testing.assert_array_equal(weights.w_uk[1], kv_b[11:17])
    np.testing.assert_array_equal(weights.w_uv[1].T, kv_b[17:22])


def test_latent_is_normalised_and_key_rotated():
    config = target_config()
    weights, inputs = layer_inputs(config, np.random.default_rng(1), 6, FLOAT64)
    mean_square = ((inputs.latent / weights.kv_a_norm) ** 2).mean(axis=1)
    np.testing.assert_allclose(mean_square, 1, atol=1e-4)
    rng = np.random.default_rng(1)
    raw = rng.standard_normal((6, config.hidden_size)) @ weights.kv_a_proj
    np.testing.assert_allclose(inputs.rope_key[0], raw[0, 16:])  # position 0 does not turn
    assert np.abs(inputs.rope_key[5] - raw[5, 16:]).max() > 0.1
    norms = np.linalg.norm(inputs.rope_key, axis=1)
    np.testing.assert_allclose(norms, np.linalg.norm(raw[:, 16:], axis=1))


# Merging: the parts' log-sums are natural logarithms.


def test_merge_uses_base_e():
    """Partition sums 1 and 7, values 0 and 1: 7/8. Mixing in base 2 gives 0.794 or 0.943."""
    out, lse = merge_partials([(np.zeros((1, 1)), np.log([1.0])), (np.ones((1, 1)), np.log([7.0]))])
    assert out[0, 0] == pytest.approx(0.875, abs=1e-15)
    assert lse[0] == pytest.approx(np.log(8))


@pytest.mark.parametrize("spread", [1.0, 80.0])
@pytest.mark.parametrize("splits", range(1, 17))
def test_merge_does_not_depend_on_number_order_or_size_of_splits(splits, spread):
    rng = np.random.default_rng(splits)
    arrays = queries_and_rows(rng, 3, 50)
    arrays = (arrays[0] * spread, arrays[1], arrays[2], arrays[3])
    whole, whole_lse = latent_attention(*arrays, 0.3, FLOAT64)
    cuts = np.sort(rng.integers(0, 51, splits - 1))  # uneven, some parts empty
    bounds = [0, *cuts.tolist(), 50]
    parts = [
        latent_attention(arrays[0], arrays[1], arrays[2][a:b], arrays[3][a:b], 0.3, FLOAT64)
        for a, b in itertools.pairwise(bounds)
    ]
    for order in (parts, parts[::-1], [parts[i] for i in rng.permutation(len(parts))]):
        out, lse = merge_partials(order)
        np.testing.assert_allclose(out, whole, rtol=0, atol=1e-12)
        np.testing.assert_allclose(lse, whole_lse, rtol=1e-14, atol=1e-12)


@pytest.mark.parametrize("leftover", [0.0, np.nan, 1e30])
def test_empty_parts_are_neutral_in_a_merge(leftover):
    arrays = queries_and_rows(np.random.default_rng(0), 2, 6)
    part = latent_attention(*arrays, 0.3, FLOAT64)
    empty = np.full_like(part[0], leftover), np.full_like(part[1], -np.inf)
    for parts in ([part, empty], [empty, part], [empty, part, empty]):
        out, lse = merge_partials(parts)
        np.testing.assert_array_equal(out, part[0])
        np.testing.assert_array_equal(lse, part[1])
    out, lse = merge_partials([empty, empty])
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 12, 100])
@pytest.mark.parametrize("prefix", [0, 5, 11])
def test_chunks_with_a_tree_mask(chunk, prefix):
    rng = np.random.default_rng(prefix)
    arrays = queries_and_rows(rng, 7, prefix + 7)
    visible = tree_visibility(random_parents(rng, 7))
    whole = latent_attention(*arrays, 0.3, FLOAT64, visible=visible)
    parts = latent_attention(*arrays, 0.3, FLOAT64, visible=visible, chunk=chunk)
    for actual, expected in zip(parts, whole, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-13)


def test_softmax_of_extreme_rows():
    scores = np.array([[80.0, -80.0], [-np.inf, -np.inf], [np.nan, 0.0], [700.0, 700.0], [-np.inf, -800.0]])
    probability, lse = softmax_with_lse(scores)
    np.testing.assert_allclose(probability[0], [1, 0], atol=1e-60)
    np.testing.assert_array_equal(probability[1], [0, 0])
    assert np.isnan(probability[2]).all()
    np.testing.assert_array_equal(probability[3], [0.5, 0.5])
    np.testing.assert_allclose(lse[[0, 3, 4]], [80, 700 + np.log(2), -800])
    assert lse[1] == -np.inf
    assert np.isnan(lse[2])
