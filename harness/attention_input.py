"""Input of the attention cases, made where it is used, its truth in float64, and the checks of what an arm gives.

Arrays are those of NumPy on the host and of CuPy on a GPU, whose functions have the same names; bfloat16 goes as its
bits in uint16. R requests, N rows, H heads, L cached rows of the prefix.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.builders import heapq_tree
from harness.cases import Attention
from harness.curve import made_up_lists
from harness.gpu_builders import Gpu
from harness.parity import Check
from harness.records import Difference

RANK, ROPE = 512, 64
SCALE = 192**-0.5  # of a head of 128 + 64 channels before the projections were absorbed
DEPTH = 7  # of the trees
PAGE = 64  # rows of a request's cache are a multiple
LATENTS = 0.5  # standard deviation; that of queries is 1
NODES = 2.0  # rows of nodes are that much larger, so that one too many or too few shows over any prefix
ROTATED = 128 << 20  # bytes of the caches that calls take in turns, more than any L2 cache holds
CHUNK = 8192  # keys at a time, of the truth
IDLE = 2 << 30  # bytes that are cleared in front of a replay, for longer than it takes to launch one


@dataclass(frozen=True)
class Tree:
    """Nodes of the largest tree of a case; the first N are the tree of N rows. paths int32 [N, DEPTH+1], -1 behind."""

    depths: NDArray[np.int32]
    paths: NDArray[np.int32]

    @classmethod
    def of(cls, rows: int) -> Tree:
        ids, lp = made_up_lists(DEPTH, max(rows - 1, 1))
        arrays = heapq_tree(lp, ids, rows - 1)
        paths = np.full((rows, DEPTH + 1), -1, np.int32)
        for node, (parent, depth) in enumerate(zip(arrays["parents"], arrays["depths"], strict=True)):
            paths[node, :depth] = paths[parent, :depth]
            paths[node, depth] = node
        return cls(arrays["depths"].astype(np.int32), paths)

    def path(self, node: int) -> list[int]:
        return [int(n) for n in self.paths[node] if n >= 0]

    def mask(self, rows: int) -> NDArray[np.bool_]:
        """[rows, rows]: node i sees node j."""
        seen = np.zeros((rows, rows), np.bool_)
        for node in range(rows):
            seen[node, self.path(node)] = True
        return seen


class Input:
    """Queries bits [R, N, H, 576] and caches bits [copies, R, capacity, 576]; N of the largest tree.

    idle: memory to clear in front of a replay over caches that are not in L2, so that none is and the device is busy
    when the first event reaches it. In front of others is one more replay.
    """

    def __init__(self, gpu: Gpu, case: Attention, seed: int):
        self.gpu, self.case, self.tree = gpu, case, Tree.of(max(case.rows))
        self.xp: Any = np if gpu.stream is None else importlib.import_module("cupy")
        rows = max(case.rows)
        self.capacity = -(-(case.prefix + rows) // PAGE) * PAGE
        one = case.batch * self.capacity * (RANK + ROPE) * 2
        copies = max(-(-ROTATED // one), 1) if case.cold else 1
        with self.on():
            random = self.xp.random.default_rng(seed)
            self.q = self._noise(random, (case.batch, rows, case.heads, RANK + ROPE), 1.0)
            self.caches = self._noise(random, (copies, case.batch, self.capacity, RANK + ROPE), LATENTS)
            behind = slice(case.prefix, None)
            self.caches[:, :, behind] = narrow(self.xp, widen(self.xp, self.caches[:, :, behind]) * NODES)
            self.idle = self.xp.empty(1 if gpu.stream is None else IDLE, self.xp.uint8)
        gpu.synchronize()

    def on(self) -> AbstractContextManager[object]:
        """Where arrays are worked on."""
        return nullcontext() if self.gpu.stream is None else self.gpu.stream

    def keys(self, rows: int) -> int:
        """Of all rows of the first `rows` nodes of a request together."""
        return int((self.case.prefix + 1 + self.tree.depths[:rows]).sum())

    def positions(self, rows: int) -> NDArray[np.int32]:
        """[R, rows]."""
        return np.tile(self.case.prefix + self.tree.depths[:rows], (self.case.batch, 1))

    def _noise(self, random: Any, shape: tuple[int, ...], deviation: float) -> Any:
        made = self.xp.empty(shape, self.xp.uint16)
        for part in made.reshape(shape[0] * shape[1], -1):  # the values of all would not fit beside each other
            part[:] = narrow(self.xp, random.standard_normal(part.size, dtype=self.xp.float32) * deviation)
        return made


def narrow(xp: Any, values: Any) -> Any:
    """bfloat16 bits of float32 values, rounded to nearest even."""
    bits = xp.ascontiguousarray(values, dtype=xp.float32).view(xp.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(xp.uint16)


def widen(xp: Any, bits: Any) -> Any:
    """float32 values of bfloat16 bits."""
    return (bits.astype(xp.uint32) << 16).view(xp.float32)


class Truth:
    """Attention over the first cache in float64: the sums over the prefix once for all rows, those over nodes for each
    tree."""

    def __init__(self, given: Input):
        self._given, self._xp = given, given.xp
        self._prefixes = [self._prefix(request) for request in range(given.case.batch)]

    def values(self, request: int, rows: int, *, tree: bool) -> Any:
        """[rows * H, RANK] of a request. tree: each row sees its path, else all nodes."""
        xp, given = self._xp, self._given
        heads, prefix = given.case.heads, given.case.prefix
        before, totals, sums = (part[: rows * heads] for part in self._prefixes[request])
        keys = self._keys(request, prefix, prefix + rows)
        scores = self._queries(request, rows) @ keys.T
        if tree:
            hidden = xp.asarray(np.repeat(~given.tree.mask(rows), heads, axis=0))
            scores = xp.where(hidden, -xp.inf, scores)
        peaks = xp.maximum(before, scores.max(axis=1, keepdims=True))
        weights, factors = xp.exp(scores - peaks), xp.exp(before - peaks)
        totals = totals * factors + weights.sum(axis=1, keepdims=True)
        return (sums * factors + weights @ keys[:, :RANK]) / totals

    def _prefix(self, request: int) -> tuple[Any, Any, Any]:
        """Peaks and totals [N * H, 1] and sums [N * H, RANK] over the prefix."""
        xp, case = self._xp, self._given.case
        q = self._queries(request, max(case.rows))
        peaks, totals, sums = xp.full((len(q), 1), -xp.inf), xp.zeros((len(q), 1)), xp.zeros((len(q), RANK))
        for first in range(0, case.prefix, CHUNK):
            keys = self._keys(request, first, min(first + CHUNK, case.prefix))
            scores = q @ keys.T
            higher = xp.maximum(peaks, scores.max(axis=1, keepdims=True))
            weights, factors = xp.exp(scores - higher), xp.exp(peaks - higher)
            totals = totals * factors + weights.sum(axis=1, keepdims=True)
            sums = sums * factors + weights @ keys[:, :RANK]
            peaks = higher
        return peaks, totals, sums

    def _queries(self, request: int, rows: int) -> Any:
        q = self._given.q[request, :rows].reshape(-1, RANK + ROPE)
        return widen(self._xp, q).astype(self._xp.float64) * SCALE

    def _keys(self, request: int, first: int, last: int) -> Any:
        return widen(self._xp, self._given.caches[0, request, first:last]).astype(self._xp.float64)


def check_values(
    unit: str, given: Input, truth: Truth, found: Any, *, tree: bool, allowed: float
) -> tuple[Check, float]:
    """(whether the errors of all heads' rows in [R, rows, H, RANK] are at most `allowed`, the largest of them).

    An error is the root mean square of the differences from the truth over that of the truth.
    """
    xp, worst = given.xp, 0.0
    rows, heads, difference = found.shape[1], given.case.heads, None
    for request in range(given.case.batch):
        wanted = truth.values(request, rows, tree=tree)
        values = widen(xp, found[request]) if found.dtype == xp.uint16 else found[request]
        wrong = values.reshape(wanted.shape).astype(xp.float64) - wanted
        errors = xp.sqrt((wrong**2).mean(axis=1) / (wanted**2).mean(axis=1))
        errors = xp.where(xp.isnan(errors), xp.inf, errors)
        at = int(errors.argmax())
        error = float(errors[at])
        worst = max(worst, error)
        if error > allowed and difference is None:
            place = f"{unit}, request {request}, row {at // heads}, head {at % heads}"
            difference = Difference("attention's error", place, None, at, allowed, error, None, None)
    return Check(unit, given.case.batch * rows * heads * RANK, difference), worst


def check_bits(unit: str, xp: Any, wanted: Any, found: Any) -> Check:
    """Whether two arrays have the same bits."""
    bad = xp.flatnonzero((wanted != found).ravel())
    if not len(bad):
        return Check(unit, int(wanted.size))
    at = int(bad[0])
    expected, actual = (int(array.ravel()[at]) for array in (wanted, found))
    return Check(unit, at + 1, Difference("attention bits", unit, None, at, expected, actual, None, None))
