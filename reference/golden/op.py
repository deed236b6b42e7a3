"""Golden results of the single operations of a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kdtr
from reference.config import ModelConfig
from reference.golden.files import EXACT, GoldenFile, rounded, text
from reference.golden.inputs import gaussian, integers
from reference.moe import MoeWeights, SwigluWeights, mixture, route, swiglu
from reference.numerics import PRECISIONS
from reference.rope import RopeLayout, RopeParameters, rotate

SEED = 20260416
_F64 = PRECISIONS["float64"]
_TIGHT = kdtr.Tolerance.close(1e-6, 2e-6)  # one operation in float32
_SUMS = kdtr.Tolerance.close(1e-5, 1e-5)  # two matrix products in float32
_YARN = RopeParameters(50000.0, "yarn", factor=64.0, original_max_position_embeddings=4096)


def golden_files() -> list[GoldenFile]:
    return [_norms(), _rope(), _router(), _feed_forward()]


def _wide(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[np.float64]]:
    return {name: array.astype(np.float64) for name, array in arrays.items()}


def _norms() -> GoldenFile:
    file = GoldenFile(
        "op_rms_norm", "op", SEED, "out = x / sqrt(mean(x^2) + eps) * weight; embedding: out = table[tokens]."
    )
    for stream, (rows, width, eps, scale) in enumerate([(1, 1, 1e-6, 1.0), (3, 31, 1e-5, 1.0), (2, 7168, 1e-6, 30.0)]):
        x = gaussian(SEED, stream, rows, width) * np.float32(scale)
        weight = 1 + gaussian(SEED, 10 + stream, width) * np.float32(0.25)
        out = _F64.rms_norm(x.astype(np.float64), weight.astype(np.float64), eps)
        _add(file, f"rms_norm_w{width}", "rms_norm", {"x": x, "weight": weight, "eps": np.float64(eps)}, {"out": out})
    x = np.zeros((2, 16), np.float32)
    x[1] = 1e-18  # its square leaves float32: only eps remains
    weight = np.ones(16, np.float32)
    out = _F64.rms_norm(x.astype(np.float64), weight.astype(np.float64), 1e-6)
    _add(file, "rms_norm_tiny", "rms_norm", {"x": x, "weight": weight, "eps": np.float64(1e-6)}, {"out": out})
    table, tokens = gaussian(SEED, 20, 97, 24), integers(SEED, 21, 97, 40)
    tokens[:2] = 0, 96
    file.add(
        "embedding",
        inputs={"table": table, "tokens": tokens},
        expected={"out": (table[tokens], EXACT)},
        aux={"op": text("embedding")},
    )
    return file


def _rope() -> GoldenFile:
    notes = "layout: interleaved pairs (2i, 2i+1) or half pairs (i, i + d/2); the result has the layout of the input."
    file = GoldenFile("op_rope", "op", SEED, notes)
    settings = {
        "plain": RopeParameters(10000.0),
        "yarn": replace(_YARN, beta_fast=32.0, mscale=1.0, mscale_all_dim=1.0),
        "yarn_amplitude": replace(_YARN, beta_fast=1.0),  # no mscale keys: the amplitude is 0.1 ln(64) + 1
    }
    for name, rope in settings.items():
        for last in (63, 4095, 131071):
            _tables(file, f"tables_{name}_{last}", rope, last)
    cos, sin = (table.astype(np.float32) for table in settings["plain"].tables(np.array([0, 1, 7]), 8, _F64))
    ramp = np.tile(np.arange(1, 9, dtype=np.float32), (3, 1, 1))
    wide_cos, wide_sin = (
        table.astype(np.float32)
        for table in settings["yarn_amplitude"].tables(np.array([0, 1, 63, 4095, 4096]), 64, _F64)
    )
    x = gaussian(SEED, 30, 5, 3, 64)
    layouts: tuple[RopeLayout, ...] = ("interleaved", "half")
    for layout in layouts:
        _rotation(file, f"ramp_{layout}", ramp, cos, sin, layout)
        _rotation(file, f"heads_{layout}", x, wide_cos, wide_sin, layout)
    return file


def _tables(file: GoldenFile, case: str, rope: RopeParameters, last: int) -> None:
    """cos and sin [N, d/2] of positions up to `last`. The published implementation rounds the angle to float32, so its
    tables are off by last * 2^-24: that much is allowed."""
    positions = np.array([0, 1, last // 2, last - 1, last])
    cos, sin = rope.tables(positions, 64, _F64)
    numbers = {
        "theta": rope.rope_theta,
        "factor": rope.factor,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
    }
    numbers |= {"amplitude": rope.amplitude(), "original_length": float(rope.original_max_position_embeddings)}
    tolerance = kdtr.Tolerance.close(rope.amplitude() * last * 2.0**-23 + 1e-6, 0)
    file.add(
        case,
        inputs={
            "positions": positions.astype(np.int32),
            **{name: np.float64(value) for name, value in numbers.items()},
        },
        expected={
            "frequencies": (rope.frequencies(64), kdtr.Tolerance.close(0, 1e-6)),
            "cos": (rounded(cos), tolerance),
            "sin": (rounded(sin), tolerance),
        },
        aux={"op": text("rope_tables"), "kind": text(rope.kind)},
    )


def _rotation(
    file: GoldenFile, case: str, x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any], layout: RopeLayout
) -> None:
    """x [N, heads, d], cos and sin [N, d/2]."""
    wide = {name: array.astype(np.float64) for name, array in (("x", x), ("cos", cos), ("sin", sin))}
    out = rotate(wide["x"], wide["cos"][:, None], wide["sin"][:, None], layout, _F64)
    file.add(
        case,
        inputs={"x": x, "cos": cos, "sin": sin},
        expected={"out": (rounded(out), _TIGHT)},
        aux={"op": text("rotate"), "layout": text(layout)},
    )


def moe_config(
    experts: int, groups: int, kept: int, per_token: int, *, hidden: int = 24, width: int = 10, normalise: bool = True
) -> ModelConfig:
    """A config of which the feed-forward part matters."""
    return ModelConfig.from_dict(
        {
            "vocab_size": 8,
            "hidden_size": hidden,
            "intermediate_size": width,
            "moe_intermediate_size": width,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 4,
            "qk_nope_head_dim": 2,
            "qk_rope_head_dim": 2,
            "v_head_dim": 2,
            "n_routed_experts": experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": per_token,
            "n_group": groups,
            "topk_group": kept,
            "first_k_dense_replace": 0,
            "norm_topk_prob": normalise,
            "routed_scaling_factor": 2.5,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
        }
    )


def _router() -> GoldenFile:
    notes = (
        "scores = sigmoid(x router); chosen by scores + bias within the best groups; weights from the unbiased scores."
    )
    file = GoldenFile("op_router", "op", SEED, notes)
    sizes = [(8, 4, 2, 2), (8, 1, 1, 3), (256, 8, 4, 8), (384, 1, 1, 8)]
    for stream, (experts, groups, kept, per_token) in enumerate(sizes):
        config = moe_config(experts, groups, kept, per_token)
        x, router = gaussian(SEED, 40 + stream, 9, 24), gaussian(SEED, 50 + stream, 24, experts) * np.float32(0.3)
        bias = gaussian(SEED, 60 + stream, experts) * np.float32(0.2)
        _route(file, f"e{experts}_g{groups}", config, x, router, bias)
    config = moe_config(8, 4, 2, 2, normalise=False)
    x, router = gaussian(SEED, 70, 6, 24), gaussian(SEED, 71, 24, 8) * np.float32(0.3)
    # All biased scores negative: a mask with 0 instead of -inf would let dropped groups win.
    _route(file, "negative", config, x, router, np.full(8, -5, np.float32))
    poor = np.array([3, 0, 0, 0, 0, 0, 0, 0], np.float32)
    _route(file, "biased_expert", config, x, router, poor)
    # Powers of two: sigmoid(0) + bias ties exactly between experts and between groups.
    _route(file, "ties", config, np.zeros((2, 24), np.float32), router, np.float32(0.25) * (np.arange(8) % 2))
    return file


def _route(
    file: GoldenFile, case: str, config: ModelConfig, x: NDArray[Any], router: NDArray[Any], bias: NDArray[Any]
) -> None:
    """router [hidden, E], bias [E] float32."""
    routing = route(x.astype(np.float64), router.astype(np.float64), bias.astype(np.float64), config, _F64)
    file.add(
        case,
        inputs={"x": x, "router": router, "bias": bias.astype(np.float32), **_moe_sizes(config)},
        expected={
            "scores": (rounded(routing.scores), _TIGHT),
            "ids": (routing.ids, EXACT),
            "weights": (rounded(routing.weights), _SUMS),
        },
        aux={"op": text("router")},
    )


def _moe_sizes(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_group": np.int32(config.n_group),
        "topk_group": np.int32(config.topk_group),
        "num_experts_per_tok": np.int32(config.num_experts_per_tok),
        "norm_topk_prob": np.bool_(config.norm_topk_prob),
        "routed_scaling_factor": np.float64(config.routed_scaling_factor),
    }


def _swiglu_weights(stream: int, hidden: int, width: int) -> dict[str, NDArray[np.float32]]:
    scale = np.float32(hidden**-0.5)
    return {
        "gate_up": gaussian(SEED, stream, hidden, 2 * width) * scale,
        "down": gaussian(SEED, stream + 1, width, hidden) * np.float32(width**-0.5),
    }


def _feed_forward() -> GoldenFile:
    file = GoldenFile(
        "op_feed_forward", "op", SEED, "gate_up [hidden, 2I]: gate columns, then up columns; down [I, hidden]."
    )
    for stream, (rows, hidden, width) in enumerate([(1, 5, 3), (7, 33, 65), (33, 64, 40)]):
        x = gaussian(SEED, 80 + stream, rows, hidden)
        weights = _swiglu_weights(100 + 2 * stream, hidden, width)
        out = swiglu(x.astype(np.float64), SwigluWeights(**_wide(weights)), _F64)
        _add(file, f"swiglu_h{hidden}", "swiglu", {"x": x, **weights}, {"out": out}, _SUMS)
    for stream, (rows, experts, groups, kept, per_token) in enumerate(
        [(1, 8, 4, 2, 2), (17, 8, 4, 2, 2), (9, 12, 1, 1, 4)]
    ):
        _experts(
            file, f"experts_n{rows}_e{experts}", 200 + 50 * stream, rows, moe_config(experts, groups, kept, per_token)
        )
    return file


def _experts(file: GoldenFile, case: str, stream: int, rows: int, config: ModelConfig) -> None:
    """The whole mixture: routed experts stacked [E, ...], shared expert, and both parts of the sum."""
    hidden, width, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    each = [_swiglu_weights(stream + 10 + 2 * expert, hidden, width) for expert in range(experts)]
    shared = _swiglu_weights(stream + 4, hidden, width)
    inputs = {
        "x": gaussian(SEED, stream, rows, hidden),
        "router": gaussian(SEED, stream + 1, hidden, experts) * np.float32(0.3),
        "bias": gaussian(SEED, stream + 2, experts) * np.float32(0.2),
    }
    wide = _wide(inputs)
    weights = MoeWeights(
        router=wide["router"],
        bias=wide["bias"],
        experts=tuple(SwigluWeights(**_wide(one)) for one in each),
        shared=SwigluWeights(**_wide(shared)),
    )
    trace: dict[str, NDArray[Any]] = {}
    out = mixture(wide["x"], weights, config, _F64, trace)
    stacked = {f"experts_{name}": np.stack([one[name] for one in each]) for name in ("gate_up", "down")}
    file.add(
        case,
        inputs={
            **inputs,
            **stacked,
            **{f"shared_{name}": array for name, array in shared.items()},
            **_moe_sizes(config),
        },
        expected={
            "expert_ids": (trace["expert_ids"], EXACT),
            "routed_out": (rounded(trace["routed_out"]), _SUMS),
            "shared_out": (rounded(trace["shared_out"]), _SUMS),
            "out": (rounded(out), _SUMS),
        },
        aux={"op": text("experts")},
    )


def _add(
    file: GoldenFile,
    case: str,
    op: str,
    inputs: dict[str, Any],
    results: dict[str, NDArray[Any]],
    tolerance: kdtr.Tolerance = _TIGHT,
) -> None:
    expected = {name: (rounded(array), tolerance) for name, array in results.items()}
    file.add(case, inputs=inputs, expected=expected, aux={"op": text(op)})
