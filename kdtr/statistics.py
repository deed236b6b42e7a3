"""Statistics of one tensor for people: counts, range, mean, first values, a histogram in one line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

_BLOCK: Final = 1 << 20  # numbers converted to float64 at a time
_BINS: Final = 48
_FIRST: Final = 8
_RAMP: Final = " .:-=+*#%@"


class Extreme(NamedTuple):
    """The smallest or largest finite number, and where its (first) element is."""

    value: Any
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of the numbers of a tensor; a complex element has two. `low` to `std` are of the finite ones, None without any.

    `mean` and `std` (of the population) are computed in float64; `bins` counts finite numbers in equal steps from low
    to high; `first` are elements as text.
    """

    count: int
    nan: int
    positive_infinite: int
    negative_infinite: int
    zero: int
    low: Extreme | None
    high: Extreme | None
    mean: float | None
    std: float | None
    first: tuple[str, ...]
    bins: tuple[int, ...]

    def histogram(self) -> str:
        """One character a bin, denser for more; a bin that is not empty is not blank."""
        most = max(self.bins, default=0)
        return "".join(_RAMP[math.ceil(count * (len(_RAMP) - 1) / most)] for count in self.bins) if most else ""


def statistics(array: npt.NDArray[Any]) -> Statistics:
    """Statistics of an array of any element type of the format."""
    flat = np.ascontiguousarray(array).reshape(-1)
    parts = flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat
    nan = positive = negative = zero = count = 0
    low_at = high_at = None
    for start, values in _blocks(parts):
        nan += int(np.isnan(values).sum())
        positive += int(np.isposinf(values).sum())
        negative += int(np.isneginf(values).sum())
        zero += int((values == 0).sum())
        at = np.flatnonzero(np.isfinite(values))
        if not at.size:
            continue
        count += at.size
        # 64-bit integers are compared as such: float64 makes neighbours equal.
        exact = parts[start : start + values.size] if parts.dtype.kind in "iu" else values
        low, high = start + int(at[exact[at].argmin()]), start + int(at[exact[at].argmax()])
        low_at = low if low_at is None or parts[low] < parts[low_at] else low_at
        high_at = high if high_at is None or parts[high] > parts[high_at] else high_at

    def extreme(at: int | None) -> Extreme | None:
        if at is None:
            return None
        index = np.unravel_index(at * flat.size // parts.size, array.shape)
        return Extreme(parts[at], tuple(int(i) for i in index))

    smallest, largest = extreme(low_at), extreme(high_at)
    mean = std = None
    bins = np.zeros(_BINS if count else 0, np.int64)
    if smallest is not None and largest is not None:
        mean = sum(float((values[np.isfinite(values)] / count).sum()) for _, values in _blocks(parts))
        squares = 0.0
        low_half = float(smallest.value) / 2  # halves: the difference of two float64 can be infinite
        span_half = float(largest.value) / 2 - low_half
        for _, values in _blocks(parts):
            kept = values[np.isfinite(values)]
            with np.errstate(over="ignore"):
                squares += float(((kept - mean) ** 2 / count).sum())
            place = (kept / 2 - low_half) / span_half * _BINS if span_half > 0 else np.zeros(kept.size)
            bins += np.bincount(np.minimum(place.astype(np.int64), _BINS - 1), minlength=_BINS)
        std = math.sqrt(squares)
    return Statistics(
        parts.size,
        nan,
        positive,
        negative,
        zero,
        smallest,
        largest,
        mean,
        std,
        tuple(str(value) for value in flat[:_FIRST]),
        tuple(bins.tolist()),
    )


def _blocks(parts: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    """Start and numbers of each block, as float64."""
    for start in range(0, parts.size, _BLOCK):
        yield start, parts[start : start + _BLOCK].astype(np.float64)
