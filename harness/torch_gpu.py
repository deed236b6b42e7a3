"""Work of PyTorch on the GPU, timed as that of the engine is: a CUDA graph between two events."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from harness.timing import EventClock, Own


def replayed(work: Callable[[], object], calls: int) -> tuple[Callable[[], object], Own]:
    """(replays `calls` times `work`, how it is timed). `work` runs once before, for what it makes at first."""
    cuda: Any = importlib.import_module("torch").cuda
    work()
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        for _ in range(calls):
            work()
    return graph.replay, Own(EventClock(_Events(cuda), "graph"), graph.replay, "graph", "warm")


class _Events:
    """Events of PyTorch on its current stream."""

    def __init__(self, cuda: Any):
        self._cuda = cuda

    def record(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop))
