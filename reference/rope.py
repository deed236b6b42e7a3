"""Rotary position embedding: both channel layouts, plain and YaRN frequencies (arXiv 2309.00071).

Layouts. A rotary vector of width d holds d/2 pairs, pair i turning by position * frequency[i]:

* `interleaved`: pair i = channels (2i, 2i+1). The layout of DeepSeek-V3 and Kimi-K2 checkpoints.
* `half`: pair i = channels (i, i + d/2), also called NeoX or rotate-half. The layout of the DFlash drafter.

Every channel keeps its place: the result has the same layout as the input. (transformers writes the interleaved result
with the even channels first; dot products do not see the difference, dumps of rotated keys do.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from reference.numerics import Array, Numerics

RopeLayout: TypeAlias = Literal["interleaved", "half"]


@dataclass(frozen=True)
class RopeParameters:
    """Frequencies of a model. `kind` is "default" or "yarn"; the fields after it are YaRN's, by their published names.

    mscale, mscale_all_dim: None when the config has no such key, which is not the same as 1 (see `amplitude`).
    attention_factor: the amplitude, when the config gives it outright. truncate: round the ramp's ends to integers.
    """

    rope_theta: float
    kind: Literal["default", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def amplitude(self) -> float:
        """Factor on cos and sin: 1 unless YaRN; there the ratio of both mscales if given, else 0.1 ln(factor) + 1."""
        if self.kind == "default":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def softmax_scale(self, query_dim: int) -> float:
        """Scale of scores: query_dim^-0.5, under YaRN times (0.1 mscale_all_dim ln(factor) + 1)^2 at every length."""
        scale = query_dim**-0.5
        if self.kind == "yarn" and self.mscale_all_dim:
            scale *= self._magnitude(self.mscale_all_dim) ** 2
        return float(scale)

    def frequencies(self, dim: int) -> npt.NDArray[np.float64]:
        """Radians per position of each of the dim/2 pairs, float64."""
        plain = self.rope_theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
        if self.kind == "default":
            return plain
        low, high = self._turning_dim(self.beta_fast, dim), self._turning_dim(self.beta_slow, dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        # 0: a fast pair keeps its frequency; 1: a slow pair is stretched by the factor.
        ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
        return plain / self.factor * ramp + plain * (1.0 - ramp)

    def tables(self, positions: Array, dim: int, numerics: Numerics) -> tuple[Array, Array]:
        """cos and sin, each [N, dim/2], for int positions [N], in the activations' dtype.

        Frequencies and angles live in the island dtype, as in the published implementation; cos and sin of that angle
        are taken in float64 and rounded once, so that they are the same on every machine.
        """
        frequency = self.frequencies(dim).astype(numerics.island)
        angle = (positions.astype(numerics.island)[:, None] * frequency).astype(np.float64)
        amplitude = self.amplitude()
        return tuple(numerics.store(numerics.wide(turn(angle) * amplitude)) for turn in (np.cos, np.sin))  # type: ignore[return-value]

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def _turning_dim(self, rotations: float, dim: int) -> float:
        """Which (fractional) channel pair makes `rotations` full turns over the original context."""
        turns = self.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(self.rope_theta))


def rotate(x: Array, cos: Array, sin: Array, layout: RopeLayout, numerics: Numerics) -> Array:
    """Turn the pairs of `x [..., d]`; cos, sin broadcast against [..., d/2]. Same shape and layout out."""
    if layout == "interleaved":
        first, second = slice(0, None, 2), slice(1, None, 2)
    elif layout == "half":
        first, second = slice(0, x.shape[-1] // 2), slice(x.shape[-1] // 2, None)
    else:
        raise ValueError(f"rope layout {layout!r} is not 'interleaved' or 'half'")
    a, b = x[..., first], x[..., second]
    out: npt.NDArray[Any] = np.empty_like(x)
    out[..., first] = numerics.store(numerics.store(a * cos) - numerics.store(b * sin))
    out[..., second] = numerics.store(numerics.store(b * cos) + numerics.store(a * sin))
    return out
