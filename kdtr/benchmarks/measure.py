"""Interleaved timing: in each round every arm runs in a new order, each time after the same operation untimed."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

FEW: Final = 3


class Sample(NamedTuple):
    """Seconds of one run: by the clock, and of the processor. Other work on the machine shows in the first only."""

    wall: float
    cpu: float


Arm = Callable[[], Sample]  # runs its operation once


def timed(run: Callable[[], Any], *, before: Callable[[], object] | None = None, check: Callable[[Any], bool]) -> Arm:
    """An arm from a function. `before`, `check` (is the result right?) and freeing the result are not timed."""

    def arm() -> Sample:
        if before is not None:
            before()
        gc.collect()
        cpu, start = time.process_time(), time.perf_counter()
        result = run()
        sample = Sample(time.perf_counter() - start, time.process_time() - cpu)
        assert check(result), "a fast wrong answer has no time"
        return sample

    return arm


def measure(arms: Mapping[str, Arm], rounds: int, slow: Collection[str] = ()) -> dict[str, list[Sample]]:
    """Samples of each arm, one a round; those that are `slow` take part in the first few rounds only."""
    order = random.Random(0)
    samples: dict[str, list[Sample]] = {name: [] for name in arms}
    for i in range(rounds):
        names = [name for name in arms if i < FEW or name not in slow]
        for name in order.sample(names, len(names)):
            arms[name]()  # pages, caches and allocator are then those of this operation
            samples[name].append(arms[name]())
    return samples
