"""The DFlash drafter: what a block sees, what is kept, block sizes, and a loop-free restatement as oracle."""

from __future__ import annotations

import numpy as np
import pytest

from reference.dflash import DFlash, grouped_attention
from reference.drafter import Drafter
from reference.loop import ddtree_generate
from reference.model import Model
from reference.numerics import PRECISIONS
from reference.tests.models import YARN, drafter_config, random_weights, target_config
from reference.weights import WeightError

FLOAT64 = PRECISIONS["float64"]
VOCAB, HIDDEN = 61, 24


def tables(seed=9) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((VOCAB, HIDDEN)), rng.standard_normal((VOCAB, HIDDEN)) / 4


def drafter_of(precision="float64", block_size=None, **changes):
    config = drafter_config(**changes)
    return DFlash(config, random_weights(config, 3), *tables(), precision, block_size)


def features(count, seed=5):
    return np.random.default_rng(seed).standard_normal((count, 2 * HIDDEN))


def observed(drafter, count, seed=5):
    drafter.reset([])
    drafter.observe(np.zeros(count, int), features(count, seed))
    return drafter


def plain_block(config, weights, context_features, root, block):
    """The description restated row by row in float64; no cache, no grouping, no joined projections."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    embedding, head = tables()
    length, dim = len(context_features), config.head_dim
    repeat = config.num_attention_heads // config.num_key_value_heads

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * scale

    def turn(x, position):
        angle = position * config.rope.rope_theta ** (-np.arange(0, dim, 2) / dim)
        a, b = x[: dim // 2], x[dim // 2 :]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])

    context = [norm(w["fc.weight"] @ f, w["hidden_norm.weight"]) for f in context_features]
    x = [embedding[root]] + [embedding[config.mask_token_id]] * (block - 1)
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        attention = {name: w[f"{at}self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        q_norm, k_norm = w[at + "self_attn.q_norm.weight"], w[at + "self_attn.k_norm.weight"]
        normed = [norm(row, w[at + "input_layernorm.weight"]) for row in x]
        sources = [*context, *normed]
        for row in range(block):
            heads = []
            for head_index in range(config.num_attention_heads):
                kv = head_index // repeat
                query = (attention["q_proj"] @ normed[row])[head_index * dim : (head_index + 1) * dim]
                query = turn(norm(query, q_norm), length + row)
                keys = [
                    turn(norm((attention["k_proj"] @ s)[kv * dim : (kv + 1) * dim], k_norm), position)
                    for position, s in enumerate(sources)
                ]
                values = [(attention["v_proj"] @ s)[kv * dim : (kv + 1) * dim] for s in sources]
                score = np.array([query @ key for key in keys]) / np.sqrt(dim)
                probability = np.exp(score - score.max())
                heads.append(probability @ np.array(values) / probability.sum())
            after = x[row] + attention["o_proj"] @ np.concatenate(heads)
            inner = norm(after, w[at + "post_attention_layernorm.weight"])
            gate = w[at + "mlp.gate_proj.weight"] @ inner
            up = w[at + "mlp.up_proj.weight"] @ inner
            x[row] = after + w[at + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
    return np.array([head @ norm(row, w["norm.weight"]) for row in x[1:]])


@pytest.mark.parametrize("block", [1, 2, 5, 8])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_block_equals_its_description(block, length):
    drafter = observed(drafter_of(block_size=block), length)
    expected = plain_block(drafter.config, random_weights(drafter.config, 3), features(length), 17, block)
    logits = drafter.block_logits(17)
    assert logits.shape == (block - 1, VOCAB)
    np.testing.assert_allclose(logits, expected.reshape(block - 1, VOCAB), rtol=0, atol=1e-12)


def test_observing_in_pieces_changes_nothing():
    whole, pieces = observed(drafter_of(), 40), drafter_of()
    pieces.reset([])
    for start, stop in ((0, 13), (13, 14), (14, 14), (14, 33), (33, 40)):
        pieces.observe(np.zeros(stop - start, int), features(40)[start:stop])
    assert pieces.context_length == 40
    np.testing.assert_allclose(pieces.block_logits(3), whole.block_logits(3), rtol=0, atol=1e-12)


def test_the_block_leaves_nothing_behind():
    drafter = observed(drafter_of(), 9)
    first = drafter.propose(3, 7)
    drafter.propose(44, 7)
    assert drafter.context_length == 9
    np.testing.assert_array_equal(drafter.propose(3, 7), first)


def test_depth_limit_cuts_rows_but_not_the_block():
    drafter = observed(drafter_of(), 9)
    whole = drafter.propose(3, 7)
    assert whole.shape == (7, VOCAB)
    for limit in (0, 1, 4, 6, 7, 100):
        np.testing.assert_array_equal(drafter.propose(3, limit), whole[:limit])
    with pytest.raises(ValueError, match="depth_limit must be at least 0, got -1"):
        drafter.propose(3, -1)


def test_every_row_sees_the_root_the_masks_and_all_context():
    base = observed(drafter_of(), 9).block_logits(3)
    assert (np.abs(observed(drafter_of(), 9).block_logits(4) - base).max(axis=1) > 1e-3).all()
    shorter = observed(drafter_of(block_size=7), 9).block_logits(3)
    assert (np.abs(shorter - base[:6]).max(axis=1) > 1e-6).all()
    drafter = drafter_of()
    changed = features(9)
    changed[0] += 1
    drafter.reset([])
    drafter.observe(np.zeros(9, int), changed)
    assert (np.abs(drafter.block_logits(3) - base).max(axis=1) > 1e-6).all()


def test_reset_forgets():
    drafter = observed(drafter_of(), 9)
    fresh = drafter.block_logits(3)
    drafter.observe(np.zeros(5, int), features(5, 8))
    assert np.abs(drafter.block_logits(3) - fresh).max() > 1e-3
    np.testing.assert_array_equal(observed(drafter, 9).block_logits(3), fresh)


@pytest.mark.parametrize("block", [8, 16])
def test_trained_at_16_runs_at_8_and_16(block):
    config = drafter_config(block_size=16)
    weights = random_weights(config, 3)
    drafter = observed(DFlash(config, weights, *tables(), "float64", block), 4)
    np.testing.assert_allclose(
        drafter.propose(3, 31), plain_block(config, weights, features(4), 3, block), rtol=0, atol=1e-12
    )


def test_precisions_converge():
    truth, single, half = (observed(drafter_of(p), 12).block_logits(3) for p in ("float64", "float32", "bfloat16"))
    assert single.dtype == half.dtype == np.float32
    assert 1e-8 < np.abs(single - truth).max() < 1e-4
    assert 1e-3 < np.median(np.abs(half - truth)) < 0.1
    assert not (half.view(np.uint32) & 0xFFFF).any()


def test_yarn_amplitude_is_the_explicit_one():
    one, more = (
        observed(drafter_of(rope_scaling=YARN | {"attention_factor": factor}), 9).block_logits(3)
        for factor in (1.0, 1.416)
    )
    assert np.abs(one - more).max() > 1e-3


def test_grouped_attention_reads_the_head_of_its_group():
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 4, 6)), rng.standard_normal((5, 2, 6)), rng.standard_normal((5, 2, 6))
    out = grouped_attention(query, key, value, FLOAT64)
    for head in range(4):
        score = query[:, head] @ key[:, head // 2].T / np.sqrt(6)
        weight = np.exp(score) / np.exp(score).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(out[:, head], weight @ value[:, head // 2], rtol=0, atol=1e-13)


def test_trace_names_and_shapes():
    drafter = drafter_of()
    trace: dict[str, np.ndarray] = {}
    drafter.reset([])
    drafter.observe(np.zeros(5, int), features(5), trace=trace)
    expected: dict[str, tuple[int, ...]] = {"context_in": (5, 24)}
    for layer in range(2):
        expected |= {f"layers.{layer}/context_key": (5, 2, 6), f"layers.{layer}/context_value": (5, 2, 6)}
    assert {name: array.shape for name, array in trace.items()} == expected
    trace = {}
    logits = drafter.block_logits(3, trace)
    expected = {"embedding": (8, 24), "final_norm": (7, 24), "logits": (7, 61)}
    for layer in range(2):
        shapes: dict[str, tuple[int, ...]] = {"q": (8, 4, 6), "k": (8, 2, 6), "v": (8, 2, 6), "attn_heads": (8, 4, 6)}
        shapes |= {"attn_out": (8, 24), "ffn_out": (8, 24), "hidden": (8, 24)}
        expected |= {f"layers.{layer}/{name}": shape for name, shape in shapes.items()}
    assert {name: array.shape for name, array in trace.items()} == expected
    np.testing.assert_array_equal(trace["logits"], logits)


@pytest.mark.parametrize("given", [None, np.zeros((5, 48)), np.zeros((4, 24)), np.zeros(192)])
def test_features_that_do_not_fit_are_refused(given):
    drafter = drafter_of()
    with pytest.raises(ValueError, match=r"features must have shape \[4, 48\], got"):
        drafter.observe(np.zeros(4, int), given)


def test_other_things_that_do_not_fit_are_refused():
    config = drafter_config()
    weights = random_weights(config)
    embedding, head = tables()
    for size in (0, 9):
        with pytest.raises(ValueError, match=rf"block_size {size} is outside 1\.\.8"):
            DFlash(config, weights, embedding, head, block_size=size)
    with pytest.raises(ValueError, match=r"target_head has shape \[60, 24\], the drafter needs \[61, 24\]"):
        DFlash(config, weights, embedding, head[:60])
    del weights["norm.weight"]
    with pytest.raises(WeightError, match=r"missing norm.weight \[24\]"):
        DFlash(config, weights, embedding, head)
    with pytest.raises(ValueError, match="root token 61 is outside the vocabulary"):
        drafter_of().block_logits(61)


@pytest.mark.parametrize("budget", [0, 1, 7, 30])
def test_a_random_drafter_in_the_loop_gives_the_target_s_own_tokens(budget):
    """Features of committed rows, proposals, tree, verification: an untrained drafter only costs rounds."""
    config = target_config()
    target = Model(config, random_weights(config), "float64")
    draft = drafter_config()
    drafter: Drafter = DFlash(draft, random_weights(draft, 3), target.embedding, target.head, "float64")
    prompt = np.random.default_rng(1).integers(0, 60, 9).astype(np.int32)
    tokens = list(prompt)
    for _ in range(12):
        tokens.append(int(target.forward(tokens, target.new_cache(len(tokens))).logits[-1].argmax()))
    generation = ddtree_generate(target, drafter, prompt, max_new_tokens=12, budget=budget)
    assert list(generation.tokens) == tokens[9:]
