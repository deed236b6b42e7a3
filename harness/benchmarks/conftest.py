"""The GPU for benchmarks, and how a stage is measured there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.plan import Plan
from harness import gpu_builders
from harness.gpu_builders import Gpu, GpuArm, NoGpuError, prepare
from harness.records import Timing

ROUNDS, WARMUPS = 20, 3

Measure = Callable[[Plan[Any]], tuple[GpuArm, Timing]]


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """The GPU and the engine for it; skips with the reason if they cannot be had."""
    try:
        return gpu_builders.open_gpu(None)
    except NoGpuError as error:
        pytest.skip(str(error))


@pytest.fixture
def gpu_measure(gpu: Gpu, benchmark: Any) -> Measure:
    """gpu_measure(plan): the arm that replays it in a graph, and the device time of one call. What pytest-benchmark
    tells is the wall clock of whole replays."""

    def measure(plan: Plan[Any]) -> tuple[GpuArm, Timing]:
        arm = prepare(gpu, [plan], gpu_builders.CALLS)
        return arm, measure_graph(benchmark, arm)

    return measure


def measure_graph(benchmark: Any, arm: GpuArm, requests: int = 1) -> Timing:
    """Device time of one request of a call of an arm, by events around replays."""
    taken: list[float] = []

    def before() -> None:
        if arm.own.before is not None:
            arm.own.before()

    def replay() -> None:
        start = arm.own.clock.mark()
        arm.run()
        taken.append(arm.own.clock.seconds(start, arm.own.clock.mark()) / (arm.calls * requests))

    benchmark.pedantic(replay, setup=before, rounds=ROUNDS, warmup_rounds=WARMUPS)
    warmups = taken[: len(taken) - ROUNDS]
    return Timing(
        arm.own.clock.method,
        "e2e",
        tuple(taken[len(warmups) :]),
        warmups[0] if warmups else None,
        dropped=0,
        capped=False,
        warmups=len(warmups),
        launch=arm.own.launch,
        l2=arm.own.l2,
    )
