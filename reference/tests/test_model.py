"""The target: prefill, single tokens and trees are one function; what it refuses; what cannot leak between rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from reference.cache import LatentCache
from reference.model import Model
from reference.tests.models import YARN, random_parents, random_weights, target_config, tree_visibility
from reference.weights import WeightError

CONFIGS: dict[str, dict[str, Any]] = {
    "base": {},
    "yarn": {"rope_scaling": YARN, "rope_theta": 50000.0, "n_group": 1, "topk_group": 1},
    "no_q_lora_half_rope": {"q_lora_rank": None, "rope_interleave": False},
    "tied_two_shared": {"tie_word_embeddings": True, "n_shared_experts": 2},
    "all_mixture": {"first_k_dense_replace": 0},
    "latent_512": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
}


def model_of(name="base", precision="float64", attention="absorbed", **changes):
    config = target_config(**CONFIGS[name], **changes)
    return Model(config, random_weights(config), precision, attention)


def prefilled(model, tokens, capacity=None, block_size=None):
    cache = model.new_cache(capacity or len(tokens) + 40, block_size)
    if len(tokens):
        model.forward(tokens, cache)
        cache.commit(np.arange(len(tokens)))
    return cache


def some_tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, 61, count)


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_equals_one_token_at_a_time(name):
    model, tokens = model_of(name), some_tokens(12)
    whole = model.forward(tokens, model.new_cache(12)).logits
    cache = model.new_cache(12)
    for position, token in enumerate(tokens):
        logits = model.forward([token], cache).logits
        cache.commit([0])
        np.testing.assert_allclose(logits[0], whole[position], rtol=0, atol=1e-12)


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_prefill_in_two_parts(cut):
    model, tokens = model_of(), some_tokens(12)
    whole = model.forward(tokens, model.new_cache(12), taps=(0, 2))
    cache = prefilled(model, tokens[:cut])
    rest = model.forward(tokens[cut:], cache, taps=(0, 2))
    np.testing.assert_allclose(rest.logits, whole.logits[cut:], rtol=0, atol=1e-12)
    np.testing.assert_allclose(rest.features, whole.features[cut:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-12), ("float32", 1e-4)])
def test_absorbed_and_expanded_models_agree(name, precision, tolerance):
    tokens = some_tokens(20)
    logits = {}
    for attention in ("absorbed", "expanded"):
        model = model_of(name, precision, attention)
        logits[attention] = model.forward(tokens, model.new_cache(20)).logits
    assert np.abs(logits["absorbed"]).max() > 1
    np.testing.assert_allclose(logits["absorbed"], logits["expanded"], rtol=0, atol=tolerance)


def test_cheapest_attention_takes_either_form():
    model, tokens = model_of("latent_512", attention="cheapest"), some_tokens(40)
    trace: dict[str, np.ndarray] = {}
    cache = model.new_cache(41)
    prefill = model.forward(tokens, cache, trace=trace).logits
    assert "layers.0/q_latent" not in trace  # every row is looked at by forty
    cache.commit(np.arange(40))
    one = model.forward([5], cache, trace=trace).logits
    assert "layers.0/q_latent" in trace
    absorbed = model_of("latent_512")
    expected = absorbed.forward([*tokens, 5], absorbed.new_cache(41)).logits
    np.testing.assert_allclose(np.concatenate([prefill, one]), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("prefix", [0, 1, 63, 64])
@pytest.mark.parametrize("name", ["base", "yarn"])
def test_every_tree_node_equals_plain_decoding_of_its_path(name, prefix):
    model = model_of(name)
    tokens = some_tokens(prefix + 9)
    parents = random_parents(np.random.default_rng(prefix), 9)
    visibility = tree_visibility(parents)
    cache = prefilled(model, tokens[:prefix])
    logits = model.forward(tokens[prefix:], cache, visibility=visibility).logits
    for node in range(9):
        path = tokens[prefix:][visibility[node]]
        alone = model.forward(np.concatenate([tokens[:prefix], path]), model.new_cache(prefix + 9)).logits[-1]
        np.testing.assert_allclose(logits[node], alone, rtol=0, atol=1e-11)


@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 1000])
def test_chain_nodes_do_not_feel_the_shape_around_them(prefix):
    """Chain; chain with one sibling at depth 1; bushy tree around the chain. With positions by index they differ."""
    model = model_of("yarn")
    tokens = some_tokens(prefix)
    chain = some_tokens(5, seed=1)
    shapes = {
        "chain": ([-1, 0, 1, 2, 3], [0, 1, 2, 3, 4]),
        "sibling": ([-1, 0, 0, 1, 3, 4], [0, 1, 3, 4, 5]),
        "bushy": ([-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7], [0, 1, 4, 7, 10]),
    }
    expected = None
    for parents, chain_rows in shapes.values():
        row_tokens = some_tokens(len(parents), seed=2)
        row_tokens[chain_rows] = chain
        cache = prefilled(model, tokens)
        logits = model.forward(row_tokens, cache, visibility=tree_visibility(parents)).logits
        expected = logits[chain_rows] if expected is None else expected
        np.testing.assert_allclose(logits[chain_rows], expected, rtol=0, atol=1e-11)
        # Second round: the chain is kept, the next token comes at prefix + 5.
        cache.commit(chain_rows)
        following = model.forward([7], cache).logits[0]
        plain = model.forward(np.concatenate([tokens, chain, [7]]), model.new_cache(prefix + 6)).logits[-1]
        np.testing.assert_allclose(following, plain, rtol=0, atol=1e-11)


def test_siblings_share_a_position():
    """The same token twice below one parent gives the same logits twice."""
    model = model_of()
    cache = prefilled(model, some_tokens(5))
    logits = model.forward([3, 9, 9, 4, 4], cache, visibility=tree_visibility([-1, 0, 0, 1, 2])).logits
    np.testing.assert_allclose(logits[1], logits[2], rtol=0, atol=1e-12)
    np.testing.assert_allclose(logits[3], logits[4], rtol=0, atol=1e-12)


def test_positions_by_index_are_refused_and_the_right_ones_change_nothing():
    model, visibility = model_of(), tree_visibility([-1, 0, 0, 2])
    cache = prefilled(model, some_tokens(5))
    implied = model.forward([1, 2, 3, 4], cache, visibility=visibility).logits
    given = model.forward([1, 2, 3, 4], cache, visibility=visibility, positions=[5, 6, 6, 7]).logits
    np.testing.assert_array_equal(implied, given)
    with pytest.raises(ValueError, match="row 2 has 7, its parent row 0 has 5: a child comes one later"):
        model.forward([1, 2, 3, 4], cache, visibility=visibility, positions=[5, 6, 7, 8])
    for wrong, message in (
        ([5, 6, 6], r"integers of shape \[4\], got int64\[3\]"),
        ([5.0, 6, 6, 7], "integers of shape"),
        ([-1, 0, 0, 1], "row 0 has -1, must be >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            model.forward([1, 2, 3, 4], cache, visibility=visibility, positions=wrong)


def test_logits_depend_on_relative_positions_only():
    model, tokens = model_of(), some_tokens(8)
    here = model.forward(tokens, model.new_cache(8)).logits
    there = model.forward(tokens, model.new_cache(8), positions=np.arange(100, 108)).logits
    np.testing.assert_allclose(here, there, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones((4, 4), np.uint8), r"bool \(True = sees\), got uint8"),
        (np.tri(4, dtype=np.int32), "must be bool"),
        (np.where(np.tri(4), 0, -np.inf), "must be bool .*got float64"),
        (np.ones((4, 9), bool), r"shape \[4, 4\] \(new rows only\), got \[4, 9\]"),
        (np.ones((4, 5), bool), r"shape \[4, 4\].*got \[4, 5\]"),
        (np.ones((9, 4), bool), r"shape \[4, 4\].*got \[9, 4\]"),
        (np.ones(16, bool), r"shape \[4, 4\].*got \[16\]"),
        (~tree_visibility([-1, 0, 0, 2]), "row 0 does not see itself"),
        (tree_visibility([-1, 0, 0, 2]).T, "row 0 sees the later row 1"),
        (np.ones((4, 4), bool), "row 0 sees the later row 1"),
        (np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]], bool), r"row 3 sees \[2, 3\]"),
        (np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]], bool), "row 3 sees .* its parent 2"),
    ],
)
def test_masks_that_are_no_tree_are_refused(mask, message):
    model = model_of()
    cache = prefilled(model, some_tokens(5))
    with pytest.raises(ValueError, match=message):
        model.forward([1, 2, 3, 4], cache, visibility=mask)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 129])
def test_trees_of_every_width_and_mask_storage(rows):
    model = model_of(num_hidden_layers=2)
    cache = prefilled(model, some_tokens(5), capacity=5 + rows)
    tokens = some_tokens(rows, seed=1)
    visibility = tree_visibility(random_parents(np.random.default_rng(rows), rows))
    expected = model.forward(tokens, cache, visibility=visibility).logits
    wide = np.zeros((rows, 160), bool)
    wide[:, :rows] = visibility
    for mask in (np.asfortranarray(visibility), wide[:, :rows], visibility[::-1][::-1]):
        np.testing.assert_array_equal(model.forward(tokens, cache, visibility=mask).logits, expected)
    node = rows - 1
    path = np.concatenate([some_tokens(5), tokens[visibility[node]]])
    plain = model.forward(path, model.new_cache(len(path))).logits[-1]
    np.testing.assert_allclose(expected[node], plain, rtol=0, atol=1e-11)


def test_a_forest_of_several_roots():
    model = model_of()
    cache = prefilled(model, some_tokens(5))
    logits = model.forward([1, 2, 3], cache, visibility=tree_visibility([-1, -1, 1])).logits
    alone = model.forward([2, 3], cache).logits
    np.testing.assert_allclose(logits[1:], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("garbage", [np.nan, 1e30, np.inf])
@pytest.mark.parametrize("block_size", [None, 4])
def test_what_lies_in_unused_cache_rows_does_not_matter(garbage, block_size):
    model = model_of()
    logits = []
    for filler in (0.0, garbage):
        cache = prefilled(model, some_tokens(7), capacity=24, block_size=block_size)
        cache.storage[:, 7:] = filler
        logits.append(model.forward(some_tokens(5, 1), cache, visibility=tree_visibility([-1, 0, 0, 1, 2])).logits)
    np.testing.assert_array_equal(*logits)


def test_contiguous_and_block_caches_give_the_same_bits():
    model = model_of()
    logits = [
        model.forward([5, 6], prefilled(model, some_tokens(9), 16, block_size)).logits
        for block_size in (None, 1, 4, 16)
    ]
    for other in logits[1:]:
        np.testing.assert_array_equal(logits[0], other)


@pytest.mark.parametrize("attention", ["absorbed", "expanded"])
def test_a_nan_row_poisons_itself_and_its_children_only(attention):
    config = target_config()
    weights = random_weights(config)
    weights["model.embed_tokens.weight"][60] = np.nan
    model = Model(config, weights, "float32", attention)
    visibility = tree_visibility([-1, 0, 0, 1, 2, 4])
    logits = model.forward([1, 60, 3, 4, 5, 6], prefilled(model, some_tokens(6) % 60), visibility=visibility).logits
    clean = model.forward([1, 7, 3, 4, 5, 6], prefilled(model, some_tokens(6) % 60), visibility=visibility).logits
    assert np.isnan(logits[[1, 3]]).all()
    np.testing.assert_allclose(logits[[0, 2, 4, 5]], clean[[0, 2, 4, 5]], rtol=0, atol=1e-5)


def test_forward_commits_nothing_and_writes_scratch_only():
    model = model_of()
    cache = prefilled(model, some_tokens(6))
    before = cache.storage[:, :6].copy()
    first = model.forward([1, 2, 3], cache).logits
    assert cache.length == 6
    np.testing.assert_array_equal(cache.storage[:, :6], before)
    np.testing.assert_array_equal(model.forward([1, 2, 3], cache).logits, first)


def test_committing_a_scattered_path_equals_decoding_it():
    model = model_of()
    tokens, tree = some_tokens(6), np.array([1, 2, 3, 4, 5, 6])
    visibility = tree_visibility([-1, 0, 0, 1, 2, 4])
    cache = prefilled(model, tokens)
    model.forward(tree, cache, visibility=visibility)
    cache.commit([0, 2, 4, 5])
    after = model.forward([9], cache).logits
    plain = model.forward([9], prefilled(model, np.concatenate([tokens, tree[[0, 2, 4, 5]]]))).logits
    np.testing.assert_allclose(after, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["base", "latent_512"])
def test_precisions_converge(name):
    tokens = some_tokens(16)
    truth, single, half = (
        model.forward(tokens, model.new_cache(16)).logits
        for model in (model_of(name, precision) for precision in ("float64", "float32", "bfloat16"))
    )
    assert (truth.dtype, single.dtype, half.dtype) == (np.float64, np.float32, np.float32)
    assert 1e-8 < np.abs(single - truth).max() < 2e-5
    assert 1e-3 < np.median(np.abs(half - truth)) < 0.1
    assert not (half.view(np.uint32) & 0xFFFF).any()


def test_dense_layers_are_plain_residual_swiglu():
    """However many there are: nothing is rescaled, and mixture layers add routed and shared parts once."""
    for dense in (0, 1, 3, 4):
        model = model_of(first_k_dense_replace=dense)
        trace: dict[str, np.ndarray] = {}
        model.forward(some_tokens(6), model.new_cache(6), trace=trace)
        x = trace["embedding"]
        for layer in range(4):
            at = f"layers.{layer}/"
            out = trace[at + "ffn_out"]
            assert (at + "routed_out" in trace) == (layer >= dense)
            if layer >= dense:
                np.testing.assert_array_equal(out, trace[at + "routed_out"] + trace[at + "shared_out"])
            x = x + trace[at + "attn_out"] + out
            np.testing.assert_allclose(trace[at + "hidden"], x, rtol=0, atol=1e-12)


def test_trace_names_and_shapes():
    model = model_of(first_k_dense_replace=1, num_hidden_layers=2)
    trace: dict[str, np.ndarray] = {}
    forward = model.forward(some_tokens(5), model.new_cache(5), taps=(0, 1), trace=trace)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (5, 24),
        "q_nope": (5, 3, 6),
        "q_rope": (5, 3, 8),
        "latent": (5, 16),
        "rope_key": (5, 8),
        "q_latent": (5, 3, 16),
        "attn_latent": (5, 3, 16),
        "attn_heads": (5, 3, 5),
        "attn_out": (5, 24),
        "ffn_norm": (5, 24),
        "ffn_out": (5, 24),
        "hidden": (5, 24),
    }
    mixture = {"router_scores": (5, 8), "expert_ids": (5, 2), "expert_weights": (5, 2), "routed_out": (5, 24)}
    expected: dict[str, tuple[int, ...]] = {"embedding": (5, 24), "final_norm": (5, 24), "logits": (5, 61)}
    expected |= {f"layers.{layer}/{name}": shape for layer in range(2) for name, shape in shapes.items()}
    expected |= {f"layers.1/{name}": shape for name, shape in {**mixture, "shared_out": (5, 24)}.items()}
    assert {name: array.shape for name, array in trace.items()} == expected
    hidden = np.concatenate([trace["layers.0/hidden"], trace["layers.1/hidden"]], axis=1)
    np.testing.assert_array_equal(forward.features, hidden)
    expanded: dict[str, np.ndarray] = {}
    model = model_of(first_k_dense_replace=1, num_hidden_layers=2, attention="expanded")
    model.forward(some_tokens(5), model.new_cache(5), trace=expanded)
    absorbed_only = {f"layers.{layer}/{name}" for layer in range(2) for name in ("q_latent", "attn_latent")}
    assert set(trace) - set(expanded) == absorbed_only
    for name in expanded:
        np.testing.assert_allclose(expanded[name], trace[name], rtol=0, atol=1e-11, err_msg=name)


def test_features_without_taps_are_empty():
    model = model_of()
    assert model.forward([1, 2], model.new_cache(2)).features.shape == (2, 0)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], r"non-empty 1-d integer array, got float64\[0\]"),
        ([[1, 2]], r"got int64\[1, 2\]"),
        ([1.0], "got float64"),
        ([3, 61], r"token 61 in row 1 is outside the vocabulary 0\.\.60"),
        ([-1], "token -1 in row 0"),
    ],
)
def test_tokens_that_are_none(tokens, message):
    model = model_of()
    with pytest.raises(ValueError, match=message):
        model.forward(tokens, model.new_cache(4))


def test_other_requests_that_cannot_be_met():
    model = model_of()
    for tap in (-1, 4):
        with pytest.raises(ValueError, match=rf"tap {tap} is outside the layers 0\.\.3"):
            model.forward([1], model.new_cache(1), taps=(0, tap))
    with pytest.raises(RuntimeError, match="needs 3 cache rows, 2 are available"):
        model.forward([1, 2, 3], model.new_cache(2))
    with pytest.raises(ValueError, match="attention must be"):
        model_of(attention="flash")
    with pytest.raises(ValueError, match="'float16' is not supported"):
        model_of(precision="float16")


def test_weights_that_do_not_fit_are_all_named():
    config = target_config()
    weights = random_weights(config)
    del weights["model.norm.weight"], weights["model.layers.2.mlp.experts.7.up_proj.weight"]
    weights["model.layers.4.input_layernorm.weight"] = np.ones(24, np.float32)
    weights["lm_head.weight"] = weights["lm_head.weight"].T
    with pytest.raises(WeightError) as error:
        Model(config, weights)
    for part in (
        "4 faults",
        "missing model.norm.weight [24]",
        "missing model.layers.2.mlp.experts.7.up_proj.weight [12, 24]",
        "surplus model.layers.4.input_layernorm.weight",
        "lm_head.weight has shape [24, 61], the config says [61, 24]",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_a_bias_that_is_not_finite_is_refused(damage):
    config = target_config()
    weights = random_weights(config)
    weights["model.layers.3.mlp.gate.e_score_correction_bias"][5] = damage
    with pytest.raises(WeightError, match=r"layers\.3\.mlp\.gate\.e_score_correction_bias\[5\] is -?(nan|inf)"):
        Model(config, weights)


def test_tied_head():
    config = target_config(tie_word_embeddings=True)
    weights = random_weights(config)
    model = Model(config, weights)
    np.testing.assert_array_equal(model.head, model.embedding)
    same = Model(config, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].copy()})
    tokens = some_tokens(4)
    np.testing.assert_array_equal(
        model.forward(tokens, model.new_cache(4)).logits, same.forward(tokens, same.new_cache(4)).logits
    )
    with pytest.raises(WeightError, match=r"lm_head\.weight differs"):
        Model(config, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1})
    untied = target_config()
    without = {name: array for name, array in random_weights(untied).items() if name != "lm_head.weight"}
    with pytest.raises(WeightError, match=r"missing lm_head.weight \[61, 24\]"):
        Model(untied, without)


def test_latent_norm_epsilon_is_its_own():
    tokens = some_tokens(10)
    logits = [
        model.forward(tokens, model.new_cache(10)).logits
        for model in (model_of(latent_norm_eps=eps) for eps in (1e-6, 1e-5, 1e-2))
    ]
    differences = [np.abs(a - b).max() for a, b in itertools.pairwise(logits)]
    assert 1e-8 < differences[0] < 1e-3 < differences[1]


def test_two_sequences_on_one_model_do_not_meet():
    model = model_of()
    one, other = some_tokens(6), some_tokens(6, 1)
    alone = model.forward([3], prefilled(model, one)).logits
    first, second = prefilled(model, one), prefilled(model, other)
    model.forward([4, 5], second)
    np.testing.assert_array_equal(model.forward([3], first).logits, alone)


def test_cache_rows_beyond_two_to_the_31_elements(tmp_path):
    """Row 3,728,270 of width 576 crosses 2^31: a block there gives the bits of a small cache. The file is sparse."""
    model = model_of("latent_512", "float32", num_hidden_layers=1)
    block = 3_728_270 // 64
    storage = np.memmap(tmp_path / "pool", np.float32, "w+", shape=(1, 64 * (block + 1), 576))
    far = LatentCache(1, 512, 64, 128, np.float32, block_size=64, block_table=[block, 3], storage=storage)
    near = model.new_cache(128, block_size=64)
    tokens = some_tokens(100)
    logits = [model.forward(tokens, cache).logits for cache in (near, far)]
    np.testing.assert_array_equal(logits[0], logits[1])
    assert storage[0, 3_728_270].any()
    assert not storage[0, 0].any()
