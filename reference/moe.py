"""Feed-forward blocks: SwiGLU, the grouped router with a choosing bias (DeepSeek-V3, arXiv 2412.19437), the experts."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reference.config import ModelConfig
from reference.numerics import Array, Numerics, sigmoid


@dataclass(frozen=True)
class SwigluWeights:
    """gate_up [hidden, 2I]: gate columns, then up columns. down [I, hidden]."""

    gate_up: Array
    down: Array


@dataclass(frozen=True)
class MoeWeights:
    """router [hidden, E] and correction bias [E], both wide; E routed experts; the shared one."""

    router: Array
    bias: Array
    experts: tuple[SwigluWeights, ...]
    shared: SwigluWeights


@dataclass(frozen=True)
class Routing:
    """scores [N, E]: sigmoid, unbiased. ids int32 [N, k]: best biased score first. weights [N, k]: final factors."""

    scores: Array
    ids: npt.NDArray[np.int32]
    weights: Array


def swiglu(x: Array, weights: SwigluWeights, numerics: Numerics) -> Array:
    """down(silu(gate x) * up x): x [N, hidden] -> [N, hidden]."""
    both = numerics.linear(x, weights.gate_up)
    width = len(weights.down)
    return numerics.linear(numerics.swiglu(both[:, :width], both[:, width:]), weights.down)


def route(x: Array, router: Array, bias: Array, config: ModelConfig, numerics: Numerics) -> Routing:
    """Choose num_experts_per_tok experts for each row of x [N, hidden]; everything in the island dtype.

    The bias takes part in choosing only. A group scores the sum of its two best biased scores; experts of groups that
    are not kept can never win, however low the others are. Ties go to the lowest id, of groups as of experts. The
    weights are the unbiased scores, normalised over the chosen if norm_topk_prob, times routed_scaling_factor.
    """
    scores = sigmoid(numerics.wide(x) @ router)
    biased = scores + bias
    rows, experts = biased.shape
    grouped = biased.reshape(rows, config.n_group, -1)
    group_score = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
    kept = _best(group_score, config.topk_group)
    keep = np.zeros(group_score.shape, np.bool_)
    np.put_along_axis(keep, kept, True, axis=1)
    eligible = np.where(keep[..., None], grouped, -np.inf).reshape(rows, experts)
    ids = _best(eligible, config.num_experts_per_tok)
    weights = np.take_along_axis(scores, ids, axis=1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(axis=1, keepdims=True) + weights.dtype.type(1e-20))
    return Routing(scores, ids.astype(np.int32), weights * weights.dtype.type(config.routed_scaling_factor))


def mixture(
    x: Array,
    weights: MoeWeights,
    config: ModelConfig,
    numerics: Numerics,
    trace: MutableMapping[str, Array] | None = None,
    prefix: str = "",
) -> Array:
    """x [N, hidden] -> weighted sum of the chosen experts, plus the shared expert unscaled.

    Experts add up in ascending id. trace receives, under `prefix`, router_scores, expert_ids, expert_weights,
    routed_out and shared_out.
    """
    routing = route(x, weights.router, weights.bias, config, numerics)
    routed = np.zeros_like(x)
    for expert in np.flatnonzero(np.bincount(routing.ids.ravel())):
        row, slot = np.nonzero(routing.ids == expert)
        out = swiglu(x[row], weights.experts[expert], numerics)
        routed[row] = numerics.store(routed[row] + numerics.store(out * routing.weights[row, slot, None]))
    shared = swiglu(x, weights.shared, numerics)
    if trace is not None:
        trace[prefix + "router_scores"] = routing.scores
        trace[prefix + "expert_ids"] = routing.ids
        trace[prefix + "expert_weights"] = routing.weights
        trace[prefix + "routed_out"] = routed
        trace[prefix + "shared_out"] = shared
    return numerics.store(routed + shared)


def _best(values: Array, count: int) -> npt.NDArray[np.intp]:
    """Indices of the `count` largest values of each row, largest first, equal ones in ascending index; NaN last."""
    return np.argsort(-values, axis=1, kind="stable")[:, :count]
