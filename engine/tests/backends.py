"""One test body for both libraries: the fixture `ops` (engine/tests/conftest.py) is each of them in turn.

    def test_something(ops):
        lists = ops.topk_logprob(to_device(ops, logits), 8)
        assert_array_equal(to_host(ops, lists.ids), expected)

bfloat16 goes to the device as its bits, so a call says dtype="bfloat16".
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

import engine.ops
from engine.memory import HostMemory
from engine.ops import Ops
from engine.toolkit import ToolkitError

POISON = 0xA5  # every byte of an output before a call, and of the guards around it
GUARD_BYTES = 512
KINDS = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]


def open_ops(kind: str) -> Ops:
    """The operations of a kind; skips with the reason where its library cannot be built for want of a compiler."""
    compiler = os.environ.get("CXX") or "g++"
    if kind == "host" and shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler: {compiler} is not on PATH")
    try:
        return engine.ops.open(kind)
    except ToolkitError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=KINDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    """The operations of the host library, and where there is a GPU those of the CUDA library."""
    return open_ops(request.param)


@pytest.fixture(scope="session")
def host_ops() -> Ops:
    """The operations of the host library, for what only executing kernels on the CPU can show."""
    return open_ops("host")


def is_host(ops: Ops) -> bool:
    return isinstance(ops.memory, HostMemory)


def to_device(ops: Ops, array: Any) -> Any:
    """A copy of a NumPy array in the memory of `ops`, bfloat16 as its bits in uint16."""
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":
        array = array.view(np.uint16)
    made = ops.memory.empty(array.shape, array.dtype.name, ops.memory.stream(None))
    if is_host(ops):
        made[...] = array
    else:
        made.set(np.ascontiguousarray(array))
    return made


def to_host(ops: Ops, array: Any) -> NDArray[Any]:
    """A copy of an array in NumPy, after the work of the current stream."""
    return ops.memory.to_host(array, ops.memory.stream(None))


@dataclass(frozen=True, eq=False)
class Guarded:
    """An output array, poisoned, between two guards. `array` is what a call gets."""

    ops: Ops = field(repr=False)
    name: str
    array: Any
    whole: Any = field(repr=False)
    start: int

    def host(self) -> NDArray[Any]:
        """What the array holds; AssertionError if a guard was written to."""
        whole = to_host(self.ops, self.whole)
        stop = self.start + self.array.nbytes
        for place, guard in (("before", whole[: self.start]), ("behind", whole[stop:])):
            bad = np.flatnonzero(guard != POISON)
            assert not len(bad), f"{len(bad)} bytes {place} {self.name} were written, the first {place} at {bad[0]}"
        return to_host(self.ops, self.array)

    def untouched(self) -> NDArray[np.bool_]:
        """Which elements still hold the poison."""
        found = np.ascontiguousarray(self.host())
        untouched: NDArray[np.bool_] = found == np.full(1, POISON, np.uint8).repeat(found.itemsize).view(found.dtype)
        return untouched


def guarded(ops: Ops, shape: tuple[int, ...], dtype: DTypeLike, name: str = "the array", offset: int = 0) -> Guarded:
    """A poisoned array between guards, for `out`. offset: elements by which it lies off a 16-byte boundary."""
    kind = np.dtype(dtype)
    start, size = GUARD_BYTES + offset * kind.itemsize, int(np.prod(shape)) * kind.itemsize
    whole = to_device(ops, np.full(start + size + GUARD_BYTES, POISON, np.uint8))
    return Guarded(ops, name, whole[start : start + size].view(kind).reshape(shape), whole, start)
