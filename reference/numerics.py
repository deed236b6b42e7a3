"""Precision modes, and the small operations whose rounding they decide.

Three modes, one `Numerics` value each:

| mode       | activations and weights held as | norms' statistics, router, softmax, rope tables |
|------------|---------------------------------|--------------------------------------------------|
| `float64`  | float64                         | float64                                          |
| `float32`  | float32                         | float32                                          |
| `bfloat16` | float32 arrays that hold only bf16 values, rounded after every operation | float32 |

`float64` is the truth that goldens are made from. `bfloat16` is an emulation: products accumulate in float32 and the
result is rounded to nearest even, and the float32 islands are those of the published DeepSeek-V3 implementation in
transformers (RMSNorm statistics with the weight multiplied after rounding back, router product and sigmoid, rope
tables, softmax). float16 is refused: the residual stream of these models leaves its range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


def round_to_bf16(x: Array) -> Array:
    """`x` rounded to bfloat16, to nearest even, held as float32. NaN stays NaN, overflow gives infinity."""
    x32 = np.asarray(x, np.float32, order="C")
    bits = x32.view(np.uint32)
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) & np.uint32(0xFFFF0000)
    # Adding to a NaN's mantissa could carry it into the sign or down to infinity.
    return np.where(np.isnan(x32), np.float32(np.nan), rounded.view(np.float32))


def bf16_bits_to_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The float32 values of raw bfloat16 bit patterns (uint16, any shape); exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bf16_bits(x: Array) -> npt.NDArray[np.uint16]:
    """Raw bfloat16 bit patterns (uint16) of `x`, rounded to nearest even."""
    return (round_to_bf16(x).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


@dataclass(frozen=True)
class Numerics:
    """One precision mode. `dtype` holds weights and activations, `island` the operations that stay wide."""

    name: str
    dtype: np.dtype[Any]
    island: np.dtype[Any]
    emulates_bf16: bool = False

    @staticmethod
    def of(precision: str | Numerics) -> Numerics:
        """The mode called `precision`; ValueError for any other name."""
        if isinstance(precision, Numerics):
            return precision
        if precision not in PRECISIONS:
            raise ValueError(f"precision {precision!r} is not supported; choose one of {', '.join(PRECISIONS)}")
        return PRECISIONS[precision]

    def store(self, x: Array) -> Array:
        """`x` as it would come back from memory in this mode: converted to `dtype` and, for bf16, rounded."""
        return round_to_bf16(x) if self.emulates_bf16 else x.astype(self.dtype, copy=False)

    def wide(self, x: Array) -> Array:
        """`x` in the dtype of the float32 islands."""
        return x.astype(self.island, copy=False)

    def linear(self, x: Array, weight: Array) -> Array:
        """`x [..., in]` times `weight [in, out]` -> [..., out]."""
        return self.store(x @ weight)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """Root-mean-square norm over the last axis; wide statistics, the weight is multiplied after rounding back."""
        wide = self.wide(x)
        mean_square = np.add.reduce(wide * wide, axis=-1, keepdims=True) / self.island.type(x.shape[-1])
        return self.store(weight * self.store(wide / np.sqrt(mean_square + self.island.type(eps))))

    def swiglu(self, gate: Array, up: Array) -> Array:
        """silu(gate) * up, element by element."""
        return self.store(self.store(gate * sigmoid(gate)) * up)


PRECISIONS: Mapping[str, Numerics] = MappingProxyType(
    {
        "float64": Numerics("float64", np.dtype(np.float64), np.dtype(np.float64)),
        "float32": Numerics("float32", np.dtype(np.float32), np.dtype(np.float32)),
        "bfloat16": Numerics("bfloat16", np.dtype(np.float32), np.dtype(np.float32), emulates_bf16=True),
    }
)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)); 0 where exp(-x) overflows."""
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def softmax_with_lse(scores: Array) -> tuple[Array, Array]:
    """Softmax over the last axis and the natural-log-sum-exp of each row.

    scores: [..., S], -inf where a row must not look. Returns probabilities [..., S] and lse [...], dtype of scores.
    A row with nothing to see (all -inf, or S = 0) gives zeros and lse -inf, so that it is neutral in a merge; a row
    with a NaN gives NaN.
    """
    if scores.shape[-1] == 0:
        return scores.copy(), np.full(scores.shape[:-1], -np.inf, scores.dtype)
    peak = scores.max(axis=-1, keepdims=True)
    peak = np.where(np.isneginf(peak), scores.dtype.type(0), peak)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    empty = total == 0
    with np.errstate(divide="ignore"):
        lse = np.where(empty, -np.inf, np.log(total) + peak)
    return weights / np.where(empty, scores.dtype.type(1), total), lse[..., 0].astype(scores.dtype, copy=False)
