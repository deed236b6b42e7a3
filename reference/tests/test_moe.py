"""Router and experts against a slow loop version, and the faults that others have had."""

from __future__ import annotations

import numpy as np
import pytest

from reference.moe import MoeWeights, SwigluWeights, mixture, route, swiglu
from reference.numerics import PRECISIONS, sigmoid
from reference.tests.models import target_config

FLOAT64, FLOAT32, BFLOAT16 = (PRECISIONS[name] for name in ("float64", "float32", "bfloat16"))


def route_slowly(x, router, bias, config):
    """Loops over rows, groups and experts, straight from the description."""
    size = config.n_routed_experts // config.n_group
    ids, weights = [], []
    for row in np.asarray(x, np.float64):
        score = [1 / (1 + np.exp(-float(row @ w))) for w in np.asarray(router, np.float64).T]
        biased = [s + float(b) for s, b in zip(score, bias, strict=True)]
        groups = [biased[g * size : (g + 1) * size] for g in range(config.n_group)]
        by_sum = sorted(range(config.n_group), key=lambda g: (-sum(sorted(groups[g])[-2:]), g))
        kept = set(by_sum[: config.topk_group])
        allowed = [e for e in range(config.n_routed_experts) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: (-biased[e], e))[: config.num_experts_per_tok]
        weight = np.array([score[e] for e in chosen])
        if config.norm_topk_prob:
            weight = weight / (weight.sum() + 1e-20)
        ids.append(chosen)
        weights.append(weight * config.routed_scaling_factor)
    return np.array(ids), np.array(weights)


CHOICES = [
    {},
    {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8},
    {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 4},
    {"n_group": 4, "topk_group": 4, "num_experts_per_tok": 3},
    {"norm_topk_prob": False},
    {"routed_scaling_factor": 1.0},
]


@pytest.mark.parametrize("changes", CHOICES)
@pytest.mark.parametrize("shift", [-5.0, 0.0, 5.0])
def test_router_equals_the_slow_version(changes, shift):
    config = target_config(**changes)
    rng = np.random.default_rng(0)
    x, router = rng.standard_normal((200, 24)), rng.standard_normal((24, 8)) / 4
    bias = shift + 0.3 * rng.standard_normal(8)
    routing = route(x, router, bias, config, FLOAT64)
    ids, weights = route_slowly(x, router, bias, config)
    np.testing.assert_array_equal(routing.ids, ids)
    np.testing.assert_allclose(routing.weights, weights, rtol=1e-12)
    assert routing.ids.dtype == np.int32
    assert len(np.unique(ids)) > 4


def test_all_biased_scores_negative_choose_no_expert_of_a_dropped_group():
    """With 0 instead of -inf for dropped groups their experts would win."""
    config = target_config(num_experts_per_tok=4)
    x = np.random.default_rng(1).standard_normal((50, 24))
    router = np.random.default_rng(2).standard_normal((24, 8)) / 4
    ids = route(x, router, np.full(8, -5.0), config, FLOAT64).ids
    assert all(len(set(row // 2)) == 2 for row in ids)


def test_group_score_is_the_sum_of_the_two_best():
    """Group 0 has the best expert, group 1 the best two: one group kept."""
    config = target_config(n_group=2, topk_group=1)
    router = np.zeros((24, 8))
    bias = np.array([0.9, 0.0, 0.0, 0.0, 0.6, 0.6, 0.0, 0.0])
    ids = route(np.ones((1, 24)), router, bias, config, FLOAT64).ids
    assert ids.tolist() == [[4, 5]]


def test_bias_chooses_but_does_not_weigh():
    config = target_config(n_group=1, topk_group=1)
    logits = np.array([2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0])
    router = np.zeros((24, 8))
    router[0] = logits
    bias = np.zeros(8)
    bias[7] = 3.0  # a poor expert pushed to the front
    routing = route(np.eye(1, 24), router, bias, config, FLOAT64)
    assert routing.ids.tolist() == [[7, 0]]
    score = 1 / (1 + np.exp(-logits[[7, 0]]))
    np.testing.assert_allclose(routing.weights[0], 2.5 * score / score.sum(), rtol=1e-12)


def test_ties_go_to_the_lowest_expert_and_group():
    config = target_config(num_experts_per_tok=3)
    routing = route(np.zeros((2, 24)), np.zeros((24, 8)), np.zeros(8), config, FLOAT32)
    assert routing.ids.tolist() == [[0, 1, 2]] * 2
    bias = np.array([0, 1, 1, 0, 1, 0, 0, 1], np.float32)
    assert route(np.zeros((1, 24)), np.zeros((24, 8)), bias, config, FLOAT32).ids.tolist() == [[1, 2, 0]]


def test_router_stays_float32_in_bfloat16_mode():
    """Two experts that differ by less than a bf16 step are still told apart."""
    config = target_config(n_group=1, topk_group=1)
    router = np.full((24, 8), 0.25, np.float32)
    router[:, 5] += 1e-5
    x = np.ones((1, 24), np.float32)
    assert route(x, router, np.zeros(8, np.float32), config, BFLOAT16).ids[0, 0] == 5


def test_a_nan_row_routes_somewhere_and_stays_alone():
    config = target_config()
    x = np.random.default_rng(0).standard_normal((3, 24))
    weights = experts(config, np.random.default_rng(1))
    clean = mixture(x, weights, config, FLOAT64)
    x[1] = np.nan
    out = mixture(x, weights, config, FLOAT64)
    assert np.isnan(out[1]).all()
    np.testing.assert_allclose(out[[0, 2]], clean[[0, 2]], rtol=0, atol=1e-12)


def experts(config, rng, routed=1.0, shared=1.0):
    hidden, width = config.hidden_size, config.moe_intermediate_size

    def block(size, scale):
        down = scale * rng.standard_normal((size, hidden)) / 4
        return SwigluWeights(rng.standard_normal((hidden, 2 * size)) / 4, down)

    return MoeWeights(
        router=rng.standard_normal((hidden, config.n_routed_experts)) / 4,
        bias=0.2 * rng.standard_normal(config.n_routed_experts),
        experts=tuple(block(width, routed) for _ in range(config.n_routed_experts)),
        shared=block(width * config.n_shared_experts, shared),
    )


def plain_swiglu(x, weights):
    gate, up = np.split(x @ weights.gate_up, 2)
    return (gate / (1 + np.exp(-gate)) * up) @ weights.down


@pytest.mark.parametrize("changes", [{}, {"n_shared_experts": 2}, {"norm_topk_prob": False}])
def test_mixture_equals_a_plain_formula(changes):
    config = target_config(**changes)
    rng = np.random.default_rng(2)
    weights = experts(config, rng)
    x = rng.standard_normal((40, 24))
    trace: dict[str, np.ndarray] = {}
    out = mixture(x, weights, config, FLOAT64, trace, "layers.1/")
    ids, factors = route_slowly(x, weights.router, weights.bias, config)
    routed = [
        sum(f * plain_swiglu(row, weights.experts[e]) for e, f in zip(chosen, factor, strict=True))
        for row, chosen, factor in zip(x, ids, factors, strict=True)
    ]
    shared = [plain_swiglu(row, weights.shared) for row in x]
    np.testing.assert_allclose(trace["layers.1/routed_out"], routed, rtol=0, atol=1e-12)
    np.testing.assert_allclose(trace["layers.1/shared_out"], shared, rtol=0, atol=1e-12)
    np.testing.assert_allclose(out, np.add(routed, shared), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(trace["layers.1/expert_ids"], ids)


def test_scaling_factor_touches_only_the_routed_part_and_once():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((10, 24))
    weights = experts(target_config(), rng)
    once: dict[str, np.ndarray] = {}
    twice: dict[str, np.ndarray] = {}
    mixture(x, weights, target_config(), FLOAT64, once)
    mixture(x, weights, target_config(routed_scaling_factor=5.0), FLOAT64, twice)
    np.testing.assert_allclose(twice["routed_out"], 2 * once["routed_out"], rtol=1e-12)
    np.testing.assert_array_equal(twice["shared_out"], once["shared_out"])


def test_either_part_alone():
    config, x = target_config(), np.random.default_rng(4).standard_normal((10, 24))
    only_shared = experts(config, np.random.default_rng(5), routed=0.0)
    np.testing.assert_array_equal(mixture(x, only_shared, config, FLOAT64), swiglu(x, only_shared.shared, FLOAT64))
    only_routed = experts(config, np.random.default_rng(5), shared=0.0)
    trace: dict[str, np.ndarray] = {}
    out = mixture(x, only_routed, config, FLOAT64, trace)
    np.testing.assert_array_equal(out, trace["routed_out"])


@pytest.mark.parametrize("numerics", [FLOAT32, BFLOAT16])
def test_large_activations_stay_finite(numerics):
    config = target_config()
    weights = experts(config, np.random.default_rng(6))
    cast = MoeWeights(
        numerics.wide(weights.router),
        numerics.wide(weights.bias),
        tuple(SwigluWeights(numerics.store(e.gate_up), numerics.store(e.down)) for e in weights.experts),
        SwigluWeights(numerics.store(weights.shared.gate_up), numerics.store(weights.shared.down)),
    )
    x = numerics.store(6e4 * np.sign(np.random.default_rng(7).standard_normal((5, 24))))
    assert np.isfinite(mixture(x, cast, config, numerics)).all()


def test_float16_is_refused():
    with pytest.raises(ValueError, match="'float16' is not supported; choose one of float64, float32, bfloat16"):
        type(FLOAT32).of("float16")


def test_sigmoid_neither_overflows_nor_warns():
    x = np.array([-np.inf, -1e4, -1.0, 0.0, 1.0, 1e4, np.inf, np.nan], np.float32)
    expected = [0, 0, 1 / (1 + np.e), 0.5, np.e / (1 + np.e), 1, 1, np.nan]
    np.testing.assert_allclose(sigmoid(x), expected, rtol=1e-6)
    assert sigmoid(x).dtype == np.float32


def test_bfloat16_results_are_bfloat16_values():
    config = target_config()
    weights = experts(config, np.random.default_rng(8))
    cast = SwigluWeights(BFLOAT16.store(weights.shared.gate_up), BFLOAT16.store(weights.shared.down))
    x = BFLOAT16.store(np.random.default_rng(9).standard_normal((6, 24)))
    out = swiglu(x, cast, BFLOAT16)
    assert not (out.view(np.uint32) & 0xFFFF).any()
    np.testing.assert_allclose(out, [plain_swiglu(row, cast) for row in x.astype(float)], rtol=0, atol=0.05)
