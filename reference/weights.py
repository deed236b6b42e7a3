"""Checking and taking named weight tensors, for the target and the drafter alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from reference.moe import SwigluWeights
from reference.numerics import Array, Numerics


class WeightError(ValueError):
    """Weights that do not fit the config; the message lists every missing, surplus, misshapen or damaged tensor."""


@dataclass(frozen=True)
class Weights:
    """Tensors by published name, given out in the numerics' dtype. Checked on making: see `check_weights`."""

    tensors: Mapping[str, Array]
    numerics: Numerics

    def take(self, name: str) -> Array:
        """The tensor as activations are held (rounded, if the mode rounds)."""
        return np.ascontiguousarray(self.numerics.store(np.asarray(self.tensors[name])))

    def take_linear(self, *names: str) -> Array:
        """Projections [out, in] as one matrix [in, sum of outs], C-ordered: BLAS is faster so for few rows."""
        parts = [self.numerics.store(np.asarray(self.tensors[name])) for name in names]
        return np.ascontiguousarray(np.concatenate(parts).T)

    def take_wide(self, name: str) -> Array:
        """The tensor in the dtype of the float32 islands, not rounded."""
        return np.ascontiguousarray(self.numerics.wide(np.asarray(self.tensors[name])))

    def take_swiglu(self, prefix: str) -> SwigluWeights:
        """The three projections of a feed-forward block, gate and up joined."""
        gate_up = self.take_linear(prefix + "gate_proj.weight", prefix + "up_proj.weight")
        return SwigluWeights(gate_up, self.take_linear(prefix + "down_proj.weight"))


def check_weights(
    weights: Mapping[str, Array],
    shapes: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """WeightError naming every tensor that is missing, surplus or of another shape than `shapes` and `optional` say."""
    allowed = {**(optional or {}), **shapes}
    faults = [f"missing {name} {list(shape)}" for name, shape in shapes.items() if name not in weights]
    faults += [f"surplus {name}" for name in weights if name not in allowed]
    for name, shape in allowed.items():
        if name in weights and (actual := np.shape(weights[name])) != shape:
            faults.append(f"{name} has shape {list(actual)}, the config says {list(shape)}")
    if faults:
        raise WeightError(f"{len(faults)} faults in the weights: " + "; ".join(faults))
