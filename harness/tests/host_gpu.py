"""The host library in the place of a GPU; as a pytest plugin (-p) it is the GPU of the benchmarks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from numpy.typing import NDArray

from engine.ops import Ops
from engine.tests.backends import open_ops
from harness import gpu_builders
from harness.gpu_builders import POISON
from harness.records import Method
from harness.timing import Clock, ClockReader, CpuClock

Arrays = Sequence[NDArray[Any]]
FLAG = "KDTREE_TEST_HOST_GPU"


class GraphClock(CpuClock):
    method: Method = "graph"


class HostGpu:
    """The host library as a GPU: a capture is the work itself. fault(arrays): what a faulty device adds to it."""

    stream = None
    reader: ClockReader | None = None

    def __init__(self, ops: Ops, fault: Callable[[Arrays], object] = lambda _: None, replays: bool = True):
        self.ops, self._fault, self._replays = ops, fault, replays
        self.clock: Clock = GraphClock()

    def to_device(self, array: NDArray[Any]) -> Any:
        return array.copy()

    def capture(self, work: Callable[[], object], written: Arrays) -> Callable[[], object]:
        work()
        for array in written:
            array.fill(POISON)

        def run() -> None:
            if self._replays:
                work()
                self._fault(written)

        return run

    def synchronize(self) -> None:
        pass


def pytest_configure(config: pytest.Config) -> None:
    """Only where the flag says so: the module may be imported for its classes alone."""
    if os.environ.get(FLAG):
        from harness import pytest_plugin  # not earlier: pytest wants to load it itself

        pytest_plugin._gpu_missing = lambda: None  # type: ignore[assignment]
        gpu_builders.CALLS = 2
        gpu_builders.open_gpu = lambda missing: HostGpu(open_ops("host"))
