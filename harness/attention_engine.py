"""The engine's own attention on the input of a case, and its promise: the bits of plain decoding, row by row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.ops import Cache, Ops
from harness.attention_input import DEPTH, RANK, SCALE, Input, check_bits, widen
from harness.gpu_builders import GpuArm
from harness.parity import Check
from harness.timing import Own

SYSTEMS = {  # number type and path
    "gpu-wgmma": ("bfloat16", "wgmma"),
    "gpu-portable": ("bfloat16", "portable"),
    "gpu-float32": ("float32", "best"),
}
NAN = {"bfloat16": 0x7FC1, "float32": np.nan}


class EngineAttention:
    """Attention of a number type on a path. calls: of a replay, at least.

    UnsupportedError for a path that the device does not have comes with the first call.
    """

    def __init__(self, given: Input, dtype: str, path: str, calls: int):
        self._given, self._dtype, self._path, self._least = given, dtype, path, calls
        self._ops = self._new_ops()
        made = [array if dtype == "bfloat16" else widen(given.xp, array) for array in (given.q, given.caches)]
        self._q, self._caches = made
        self._held: list[object] = []  # what graphs know by its address alone

    def arm(self, n: int) -> GpuArm:
        given, caches = self._given, self._caches
        repeats = -(-self._least // len(caches))
        with given.on():
            out = self._empty(n)
            call = self._call(n, self._new_ops())  # with a workspace that no call of other sizes replaces
            self._held.append(call)
            given.gpu.synchronize()

        def work() -> None:
            for cache in list(reversed(caches)) * repeats:
                call(cache, out)

        run = given.gpu.capture(work, [out])

        def results() -> list[Any]:
            given.gpu.synchronize()
            return [out]

        before = self._clear if given.case.cold else run
        return GpuArm(run, repeats * len(caches), Own(given.gpu.clock, before, "graph"), results)

    def checks(self, n: int, found: Any) -> list[Check]:
        """The bits of the rows of an arm with `n` of them."""
        everything = self._given.q.shape[1]
        same = check_bits(
            f"{n} rows among {everything}", self._given.xp, self._bits(self._whole[:, :n]), self._bits(found)
        )
        return [same, *self._alone]

    @functools.cached_property
    def _whole(self) -> Any:
        """All rows of the largest tree."""
        return self._attend(self._q.shape[1], self._caches[0])

    @functools.cached_property
    def _alone(self) -> list[Check]:
        """Root, deepest and last node as plain decoding finds them; the last among rows of others that are NaN."""
        given, prefix = self._given, self._given.case.prefix
        depths = given.tree.depths
        last, whole = len(depths) - 1, self._whole
        checks = []
        for node in sorted({0, int(depths.argmax()), last}):
            path, cache = given.tree.path(node), self._caches[0].copy()
            cache[:, prefix : prefix + len(path)] = self._caches[0][:, [prefix + n for n in path]]
            one = self._single(node, cache, prefix + len(path) - 1)
            unit = f"node {node} by plain decoding"
            checks.append(check_bits(unit, given.xp, self._bits(one[:, 0]), self._bits(whole[:, node])))
        cache = self._caches[0].copy()
        cache[:, [prefix + node for node in range(last) if node not in given.tree.path(last)]] = NAN[self._dtype]
        among = self._bits(self._attend(last + 1, cache)[:, last])
        return [*checks, check_bits(f"node {last} among NaN", given.xp, self._bits(whole[:, last]), among)]

    def _attend(self, n: int, cache: Any) -> Any:
        out = self._empty(n)
        self._call(n, self._ops)(cache, out)
        return out

    def _clear(self) -> None:
        with self._given.on():
            self._given.idle.fill(0)

    def _new_ops(self) -> Ops:
        return Ops(self._given.gpu.ops.library, self._given.gpu.ops.memory)

    def _call(self, n: int, ops: Ops) -> Callable[[Any, Any], object]:
        """(cache [R, capacity, 576], out): attention of the first n nodes."""
        given, batch = self._given, self._given.case.batch
        paths = given.xp.asarray(np.tile(given.tree.paths[:n], (batch, 1, 1)))
        counts = self._integers(np.full(batch, n - 1))
        prefixes, positions = self._integers(np.full(batch, given.case.prefix)), self._integers(given.positions(n))
        q, longest = given.xp.ascontiguousarray(self._q[:, :n]), given.case.prefix + DEPTH + 1
        return lambda cache, out: self._run(ops, q, cache, (counts, prefixes, positions), paths, longest, out)

    def _single(self, node: int, cache: Any, length: int) -> Any:
        """One node's row behind `length` rows of the cache."""
        given, batch = self._given, self._given.case.batch
        sizes = (np.zeros(batch), np.full(batch, length), np.full((batch, 1), length))
        out, q = self._empty(1), given.xp.ascontiguousarray(self._q[:, node : node + 1])
        self._run(self._ops, q, cache, tuple(map(self._integers, sizes)), None, length + 1, out)
        return out

    def _run(self, ops: Ops, q: Any, cache: Any, sizes: tuple[Any, ...], paths: Any, longest: int, out: Any) -> None:
        ops.mla_attention(
            q,
            Cache(cache[None]),
            *sizes,
            scale=SCALE,
            rank=RANK,
            paths=paths,
            longest=longest,
            path=self._path,
            dtype=self._dtype,
            out=out,
            stream=self._given.gpu.stream,
        )

    def _empty(self, n: int) -> Any:
        case, xp = self._given.case, self._given.xp
        return xp.empty((case.batch, n, case.heads, RANK), xp.uint16 if self._dtype == "bfloat16" else xp.float32)

    def _integers(self, values: Any) -> Any:
        return self._given.xp.asarray(values.astype(np.int32))

    def _bits(self, values: Any) -> Any:
        xp = self._given.xp
        return xp.ascontiguousarray(values).view(xp.uint16 if self._dtype == "bfloat16" else xp.uint32)
