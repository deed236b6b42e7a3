"""Counter-based inputs that NumPy and C++ make alike, bit for bit.

Element i of stream s under a seed: x0..x3 = Philox4x32-10(key = seed, counter = (i mod 2^32, i div 2^32, s, 2)).
    words[i]    = x0
    gaussian[i] = float32(((x0 + x1 + x2 + x3) * 2^-32 - 2) * sqrt(3))
The sum of four words is exact, the product with sqrt(3) = 1.7320508075688772 is one float64 operation, and the value is
rounded once to float32 (and, for bf16, from there to nearest even): mean 0, variance 1, |value| < 3.47.
The last counter word keeps these numbers apart from those of sampling and of the noisy oracle, which have 0 there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.sampling import philox4x32

_GOLDEN_STREAM = 2
_CHUNK = 1 << 20


def words(seed: int, stream: int, index: NDArray[Any]) -> NDArray[np.uint32]:
    """x0..x3 of the elements `index` int [M] -> uint32 [M, 4]."""
    out = np.empty((len(index), 4), np.uint32)
    for start in range(0, len(index), _CHUNK):
        chunk = index[start : start + _CHUNK].astype(np.uint64)
        counter = np.empty((len(chunk), 4), np.uint32)
        counter[:, 0] = chunk & np.uint64(0xFFFFFFFF)
        counter[:, 1] = chunk >> np.uint64(32)
        counter[:, 2], counter[:, 3] = stream, _GOLDEN_STREAM
        out[start : start + len(chunk)] = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return out


def gaussian_at(seed: int, stream: int, index: NDArray[Any]) -> NDArray[np.float32]:
    """The elements `index` int [M] of a stream, float32 [M], mean 0 and variance 1."""
    drawn = words(seed, stream, index).astype(np.float64).sum(axis=1)
    values: NDArray[np.float64] = (drawn * 2.0**-32 - 2.0) * math.sqrt(3.0)
    return values.astype(np.float32)


def gaussian(seed: int, stream: int, *shape: int) -> NDArray[np.float32]:
    """The first elements of a stream in C order over `shape`."""
    return gaussian_at(seed, stream, np.arange(math.prod(shape))).reshape(shape)


def integers(seed: int, stream: int, below: int, *shape: int) -> NDArray[np.int32]:
    """int32 values x0 mod `below` in C order over `shape`."""
    drawn = words(seed, stream, np.arange(math.prod(shape)))[:, 0].astype(np.int64) % below
    return drawn.astype(np.int32).reshape(shape)
