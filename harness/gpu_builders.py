"""The GPU among the tree builders: its arms take turns with those of the CPU, each timed by its own clock.

One sample is a replay of a CUDA graph that holds every batch of the case, over and over up to CALLS calls, between two
events on its stream. The replay before it is not timed and not waited for: so the device is busy when the first event
reaches it, and no launch of the host's is counted. Lists stay in L2, where the stage before would have left them.
Trees come from the last replay: what the calls before the capture wrote is overwritten.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import engine.ops
from engine.abi import EngineError
from engine.ops import Ops
from engine.plan import Plan
from engine.results import Result
from engine.toolkit import BuildError
from harness.environment import SmiClockReader, gpu_uuid
from harness.timing import Clock, ClockReader, CupyEvents, EventClock, Own

CALLS = 64
POISON = 77


class NoGpuError(RuntimeError):
    """GPU arms cannot be measured here; the message says why."""


class Gpu(Protocol):
    """Where GPU work runs and what times it; the tests put the host library in its place. stream: for the ops."""

    ops: Ops
    stream: Any
    clock: Clock
    reader: ClockReader | None

    def to_device(self, array: NDArray[Any]) -> Any:
        """A copy of an array that any stream may use."""

    def capture(self, work: Callable[[], object], written: Sequence[Any]) -> Callable[[], object]:
        """What replays `work`, a series of calls on `stream`. The arrays that it writes hold POISON until then."""

    def synchronize(self) -> None:
        """Wait for what was replayed."""


class CupyGpu:
    """The current CUDA device, through CuPy."""

    def __init__(self, ops: Ops):
        self._cupy: Any = importlib.import_module("cupy")
        self.ops = ops
        self.stream: Any = self._cupy.cuda.Stream(non_blocking=True)
        self.clock: Clock = EventClock(CupyEvents(self.stream), "graph")
        self.reader: ClockReader | None = SmiClockReader(uuid=gpu_uuid())

    def to_device(self, array: NDArray[Any]) -> Any:
        with self.stream:
            made = self._cupy.asarray(array)
        self.stream.synchronize()
        return made

    def capture(self, work: Callable[[], object], written: Sequence[Any]) -> Callable[[], object]:
        with self.stream:
            work()
            for array in written:
                array.fill(POISON)
            self.stream.synchronize()
            self.stream.begin_capture()
            try:
                work()
            finally:
                graph = self.stream.end_capture()
        return lambda: graph.launch(self.stream)

    def synchronize(self) -> None:
        self.stream.synchronize()


def open_gpu(missing: str | None) -> Gpu:
    """The GPU with the engine's library for it, which is built if it is not there. Raises NoGpuError.

    missing: why there is no GPU, if that is known.
    """
    if missing is not None:
        raise NoGpuError(missing)
    try:
        ops = engine.ops.open("cuda")
        return CupyGpu(ops)
    except (BuildError, EngineError, ImportError) as error:
        first = str(error).splitlines()[0] if str(error) else ""
        raise NoGpuError(f"the engine cannot be used: {type(error).__name__}: {first}") from error


@dataclass(frozen=True)
class GpuArm:
    """run: what is timed, `calls` calls of the stage. results: what the last run wrote, of each plan, on the host."""

    run: Callable[[], object]
    calls: int
    own: Own
    results: Callable[[], list[Any]]


def prepare(gpu: Gpu, plans: Sequence[Plan[Any]], calls: int) -> GpuArm:
    """The arm that runs plans in turns, `calls` calls or a few more, in one graph."""
    repeats = -(-calls // len(plans))
    written = [array for plan in plans for array in _written(plan.result)]
    run = gpu.capture(lambda: [plan.call() for _ in range(repeats) for plan in plans], written)

    def results() -> list[Any]:
        gpu.synchronize()
        return [plan.result.to_host() for plan in plans]

    return GpuArm(run, repeats * len(plans), Own(gpu.clock, run, "graph", "warm"), results)


def tree_arm(gpu: Gpu, lp: NDArray[np.float32], ids: NDArray[np.int32], budget: int) -> GpuArm:
    """Trees with all their arrays from lists [batches, R, L, K], taken as those are that topk_logprob has checked."""
    batches = [(gpu.to_device(one), gpu.to_device(other)) for one, other in zip(lp, ids, strict=True)]
    plan = gpu.ops.tree_build.plan
    plans = [plan(one, other, budget, checked=True, stream=gpu.stream) for one, other in batches]
    return prepare(gpu, plans, CALLS)


def trees_of(arm: GpuArm) -> list[dict[str, NDArray[Any]]]:
    """All trees of an arm. Raises RequestError if the device refused a request."""
    found = []
    for result in arm.results():
        result.raise_for_status()
        found += [result.tree(request) for request in range(len(result.status))]
    return found


def _written(result: Any) -> list[Any]:
    """The arrays of a result."""
    if not isinstance(result, Result):
        return [result]
    arrays = [value for name, value in vars(result).items() if name != "origin" and value is not None]
    return [written for array in arrays for written in _written(array)]
