"""Sampling: order of calls, what is kept and dropped, what an error does, and whether the clocks tell the truth."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from harness import timing
from harness.records import Clocks, Method
from harness.tests.patience import eventually
from harness.timing import Arm, CpuClock, EventClock, Own, StageTimer, WallClock, interleave
from reference.drafter import NoisyOracleDrafter
from reference.loop import ar_generate, ddtree_generate
from reference.tests.toys import HashTarget


class Machine:
    """A clock whose time passes only when work is done, so that samples are exact."""

    method: Method = "wall"

    def __init__(self):
        self.now = 0.0
        self.calls: list[str] = []

    def mark(self):
        return self.now

    def seconds(self, start, stop):
        return stop - start

    def work(self, name: str, *seconds: float):
        """An arm; call i takes seconds[i], the last one for all further calls."""
        durations = iter(seconds)
        last = seconds[-1]

        def call():
            self.calls.append(name)
            self.now += next(durations, last)
            return name

        return call


def seconds(arm: Arm) -> list[float]:
    return [sample for sample in arm.timing.samples_s if sample is not None]


class FakeReader:
    def __init__(self, clocks: list[Clocks], nominal_mhz: int | None = None):
        self.nominal_mhz = nominal_mhz
        self._clocks = clocks
        self._read = -1  # the first reading comes before the first turn

    def read(self) -> Clocks:
        self._read += 1
        return self._clocks[min(max(self._read - 1, 0), len(self._clocks) - 1)]


def test_arms_take_turns_and_the_first_sample_is_kept_apart():
    machine = Machine()
    arms = interleave({"a": machine.work("a", 24.0, 1.0), "b": machine.work("b", 5.0, 2.0)}, samples=3, clock=machine)
    assert machine.calls == ["a", "b", "b", "a", "a", "b", "b", "a"]
    a, b = arms["a"].timing, arms["b"].timing
    assert a.samples_s == (1.0, 1.0, 1.0)
    assert b.samples_s == (2.0, 2.0, 2.0)
    assert (a.warmup_s, b.warmup_s, a.warmups, a.dropped, a.capped) == (24.0, 5.0, 1, 0, False)
    assert (a.method, a.mode) == ("wall", "e2e")


def test_an_arm_with_a_clock_of_its_own_takes_turns_with_the_others():
    host, device = Machine(), Machine()
    device.method = "graph"
    device.calls = host.calls
    arms = interleave(
        {"cpu": host.work("cpu", 9.0, 4.0), "gpu": device.work("gpu", 3.0, 0.5, 0.25)},
        samples=3,
        best_of=2,
        clock=host,
        before=lambda: host.calls.append("flush"),
        own={"gpu": Own(device, device.work("busy", 100.0), "graph", "warm")},
    )
    assert host.calls[:8] == ["flush", "cpu", "flush", "cpu", "busy", "gpu", "busy", "gpu"]
    assert host.calls[8:12] == ["busy", "gpu", "busy", "gpu"]
    cpu, gpu = arms["cpu"].timing, arms["gpu"].timing
    assert (cpu.method, cpu.launch, cpu.l2, cpu.samples_s) == ("wall", None, None, (4.0, 4.0, 4.0))
    assert (gpu.method, gpu.launch, gpu.l2, gpu.samples_s) == ("graph", "graph", "warm", (0.25, 0.25, 0.25))
    assert (cpu.warmup_s, gpu.warmup_s) == (4.0, 0.5)
    assert cpu.paired(gpu)
    assert gpu.paired(cpu)
    assert not cpu.paired(replace(cpu, method="cpu"))
    assert not gpu.paired(replace(cpu, samples_s=(4.0, 4.0)))
    assert not gpu.paired(replace(cpu, mode="staged"))


@pytest.mark.parametrize("samples", [1, 2, 5, 100])
def test_a_slow_first_call_is_in_no_statistic(samples):
    machine = Machine()
    cold = interleave({"a": machine.work("a", 1000.0, 1.0)}, samples=samples, clock=machine)["a"].timing
    warm = interleave({"a": machine.work("a", 1.0)}, samples=samples, clock=machine)["a"].timing
    assert cold.samples_s == warm.samples_s == (1.0,) * samples
    assert cold.warmup_s == 1000.0


def test_more_warm_up_turns_are_counted():
    machine = Machine()
    found = interleave({"a": machine.work("a", 9.0, 8.0, 7.0, 1.0)}, samples=2, warmups=3, clock=machine)["a"].timing
    assert (found.warmup_s, found.warmups, found.samples_s) == (9.0, 3, (1.0, 1.0))


def test_an_arm_that_raises_fails_alone():
    machine = Machine()
    calls = 0

    def broken():
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("cache is full")

    arms = interleave({"bad": broken, "good": machine.work("good", 1.0)}, samples=5, clock=machine)
    assert arms["bad"].timing.samples_s == ()
    assert arms["bad"].failure == "RuntimeError in turn 2: cache is full"
    assert arms["good"].failure is None
    assert arms["good"].timing.samples_s == (1.0,) * 5
    assert calls == 3


def test_when_every_arm_raises_nothing_is_called_again():
    calls = []

    def broken():
        calls.append(1)
        raise ZeroDivisionError("no")

    arms = interleave({"a": broken, "b": broken}, samples=10)
    assert len(calls) == 2
    assert all(arm.failure == "ZeroDivisionError in turn 0: no" for arm in arms.values())


def test_an_interrupt_is_not_an_arms_error():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interleave({"a": interrupted}, samples=1)
    assert gc.isenabled()


def test_results_are_seen_outside_the_time_and_may_fail_the_arm():
    machine = Machine()
    seen = []

    def inspect(name, turn, result):
        machine.now += 100.0
        seen.append((name, turn, result))
        if name == "b" and turn == 2:
            raise ValueError("another token than before")

    arms = {"a": machine.work("a", 1.0), "b": machine.work("b", 1.0)}
    found = interleave(arms, samples=3, clock=machine, inspect=inspect)
    assert found["a"].timing.samples_s == (1.0, 1.0, 1.0)
    assert found["b"].failure == "ValueError in turn 2: another token than before"
    assert ("a", 3, "a") in seen


def test_a_sample_is_the_least_of_its_calls():
    machine = Machine()
    seen = []
    found = interleave(
        {"a": machine.work("a", 9, 8, 9, 3, 1, 2, 5, 6, 4)},
        samples=2,
        best_of=3,
        clock=machine,
        inspect=lambda name, turn, result: seen.append(turn),
    )["a"].timing
    assert (found.warmup_s, found.samples_s, found.best_of) == (8, (1, 4), 3)
    assert seen == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_what_runs_before_a_call_is_not_timed():
    machine = Machine()

    def flush():
        machine.now += 50.0

    assert interleave({"a": machine.work("a", 1.0)}, samples=2, clock=machine, before=flush)["a"].timing.samples_s == (
        1,
        1,
    )


def test_the_time_limit_is_reported():
    limited = interleave({"a": lambda: time.sleep(0.02)}, samples=1000, time_limit_s=0.15)["a"].timing
    assert limited.capped
    assert 1 <= len(limited.samples_s) < 10
    one = interleave({"a": lambda: time.sleep(0.01)}, samples=5, time_limit_s=0.0)["a"].timing
    assert (one.capped, len(one.samples_s)) == (True, 1)
    free = interleave({"a": lambda: None}, samples=5, time_limit_s=60.0)["a"].timing
    assert (free.capped, len(free.samples_s)) == (False, 5)


FULL, SLOWED = Clocks(2000, 2600), Clocks(1200, 2600)  # 60 %


@pytest.mark.parametrize("nominal", [2000, None])
def test_throttled_turns_are_dropped_counted_and_made_up_for(nominal):
    machine = Machine()
    reader = FakeReader([FULL, FULL, SLOWED, FULL, SLOWED, FULL], nominal)
    arms = {"a": machine.work("a", 9, 1, 100, 2, 100, 3), "b": machine.work("b", 9, 10, 1000, 20, 1000, 30)}
    found = interleave(arms, samples=3, clock=machine, reader=reader)
    a, b = found["a"].timing, found["b"].timing
    assert (a.samples_s, a.dropped) == ((1, 2, 3), 2)
    assert (b.samples_s, b.dropped) == ((10, 20, 30), 2)
    assert a.clocks_before == FULL


def test_throttling_shows_only_when_the_clock_recovers_and_still_is_dropped():
    machine = Machine()
    reader = FakeReader([SLOWED, SLOWED, FULL])
    found = interleave({"a": machine.work("a", 9, 100, 1)}, samples=3, clock=machine, reader=reader)["a"].timing
    assert (found.samples_s, found.dropped) == ((1, 1, 1), 1)


def test_only_throttled_turns_is_a_failed_measurement():
    machine = Machine()
    found = interleave({"a": machine.work("a", 1)}, samples=4, clock=machine, reader=FakeReader([SLOWED], 2000))["a"]
    assert found.timing.samples_s == ()
    assert found.timing.dropped == 12
    assert found.failure == "no samples: 12 turns were dropped because the GPU throttled"


@pytest.mark.parametrize(
    ("clocks", "nominal", "dropped"),
    [
        (Clocks(1501, None), 2000, False),
        (Clocks(1499, None), 2000, True),
        (Clocks(2000, None, ("hw_thermal_slowdown",)), 2000, True),
        (Clocks(2000, None, ("gpu_idle", "sw_power_cap", "applications_clocks_setting")), 2000, False),
        (Clocks(None, None), 2000, False),
        (Clocks(100, None), None, False),
    ],
)
def test_what_counts_as_throttled(clocks, nominal, dropped):
    assert timing.throttled(clocks, nominal) is dropped


@pytest.mark.parametrize("size", [{"samples": 0}, {"warmups": 0}, {"best_of": 0}, {"arms": {}}])
def test_a_measurement_of_nothing_is_refused(size):
    with pytest.raises(ValueError, match="at least one"):
        interleave(**{"arms": {"a": lambda: None}, **size})


def test_wall_clock_tells_the_time():
    def holds() -> bool:
        samples = seconds(interleave({"a": lambda: time.sleep(0.02)}, samples=5)["a"])
        assert min(samples) >= 0.02
        return min(samples) < 0.024

    eventually(holds)


def test_cpu_clock_does_not_count_waiting():
    def holds() -> bool:
        samples = seconds(interleave({"a": lambda: time.sleep(0.05)}, samples=3, clock=CpuClock())["a"])
        return max(samples) < 0.01

    eventually(holds)


def test_cpu_clock_counts_work():
    def work() -> None:
        stop = time.thread_time() + 0.05
        while time.thread_time() < stop:
            pass

    def holds() -> bool:
        samples = seconds(interleave({"a": work}, samples=3, clock=CpuClock())["a"])
        assert min(samples) > 0.049
        return min(samples) < 0.06

    eventually(holds)


class AsynchronousDevice:
    """A device that works on after the call that started the work has returned."""

    def __init__(self):
        self._running: threading.Thread | None = None

    def launch(self, seconds: float) -> None:
        self._running = threading.Thread(target=time.sleep, args=(seconds,))
        self._running.start()

    def synchronize(self) -> None:
        if self._running is not None:
            self._running.join()


def test_wall_clock_waits_for_the_device():
    device = AsynchronousDevice()

    def sample(clock):
        return min(seconds(interleave({"a": lambda: device.launch(0.02)}, samples=3, clock=clock)["a"]))

    assert sample(WallClock(device.synchronize)) >= 0.02
    eventually(lambda: sample(WallClock()) < 0.015)  # what goes wrong without


class FakeEvents:
    def __init__(self):
        self.now_ms = 0.0
        self.waits = 0

    def record(self):
        return self.now_ms

    def elapsed_ms(self, start, stop):
        self.waits += 1
        return stop - start


def test_event_clock_measures_pairs_and_waits_only_at_the_end():
    events = FakeEvents()
    clock = EventClock(events)
    timer = StageTimer(clock, WallClock())
    with timer:
        for stage, ms in (("draft", 3.0), ("verify", 5.0), ("draft", 1.0)):
            with timer.span(stage):
                events.now_ms += ms
            events.now_ms += 0.5
    assert events.waits == 0
    assert timer.result().seconds == pytest.approx({"draft": 4e-3, "verify": 5e-3, "other": 1.5e-3})
    assert clock.method == "events"
    assert EventClock(events, "graph").method == "graph"


def test_stages_and_other_sum_to_the_wall_time():
    def holds() -> bool:
        timer = StageTimer()
        with timer:
            with timer.span("draft"):
                time.sleep(0.01)
            time.sleep(0.02)
            with timer.span("verify"):
                time.sleep(0.03)
        stages = timer.result()
        assert list(stages.seconds) == ["draft", "verify", "other"]
        for stage, least in (("draft", 0.01), ("other", 0.02), ("verify", 0.03)):
            assert least <= stages.seconds[stage] <= stages.wall_s - (0.06 - least)
        kept = timing.staged_timing(stages, "wall")
        assert (kept.mode, kept.samples_s) == ("staged", (stages.wall_s,))
        return stages.problem is None

    eventually(holds)


@pytest.mark.parametrize(("wall", "fine"), [(1.029, True), (1.04, False), (0.975, True), (0.96, False)])
def test_stages_that_do_not_explain_the_wall_time_are_flagged(wall, fine):
    problem = timing.Stages({"draft": 0.4, "other": 0.6}, wall).problem
    assert (problem is None) is fine
    if problem:
        assert "sum to 1 s" in problem
        assert f"{wall}" in problem


def test_stages_of_a_loop_that_timed_itself():
    target = HashTarget(16)
    prompt = np.array([5, 3, 8], np.int32)
    golden = ar_generate(target, None, prompt, max_new_tokens=60).tokens
    drafter = NoisyOracleDrafter(golden, 16, 8, seed=1)
    clock = WallClock()
    start = clock.mark()
    found = ddtree_generate(target, drafter, prompt, max_new_tokens=60, budget=32)
    wall = clock.seconds(start, clock.mark()) - found.prefill_seconds
    rounds = found.rounds
    stages = timing.stages_of((r.seconds for r in rounds), wall, sum(r.wall_seconds for r in rounds))
    assert list(stages.seconds) == ["draft", "tree_build", "tree_compile", "verify", "commit", "other"]
    assert all(value > 0 for value in stages.seconds.values())
    assert sum(stages.seconds.values()) == pytest.approx(sum(r.wall_seconds for r in rounds))
    assert wall > 2e-3  # else the absolute floor allows what follows
    longer = timing.stages_of((r.seconds for r in rounds), 2 * wall, sum(r.wall_seconds for r in rounds))
    assert longer.problem is not None


def test_stages_do_not_nest_or_leave_the_call():
    timer = StageTimer()
    with pytest.raises(RuntimeError, match="outside"), timer.span("draft"):
        pass
    with timer:
        with pytest.raises(RuntimeError, match="inside 'draft'"), timer.span("draft"), timer.span("verify"):
            pass
        with pytest.raises(RuntimeError, match="other"), timer.span("other"):
            pass
        with pytest.raises(RuntimeError, match="not ended"):
            timer.result()
    with pytest.raises(RuntimeError, match="one call"), timer:
        pass


SPIN_KERNEL = r"""
extern "C" __global__ void spin(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("samples", [1, 2, 5, 100])
def test_a_kernel_of_5_ms_takes_5_ms_with_events_and_wall_clock(samples):
    cupy = pytest.importorskip("cupy")
    kernel = cupy.RawKernel(SPIN_KERNEL, "spin")
    stream = cupy.cuda.get_current_stream()

    def launch(nanoseconds):
        return lambda: kernel((1,), (1,), (nanoseconds,))

    def holds(clock: timing.Clock) -> bool:
        arms = {"5 ms": launch(cupy.int64(5_000_000)), "nothing": launch(cupy.int64(0))}
        found = interleave(arms, samples=samples, clock=clock)
        least = min(seconds(found["5 ms"]))  # a busy host is late to launch and to see the end
        assert least > 0.95 * 5e-3
        return least < 1.05 * 5e-3 and min(seconds(found["nothing"])) < 1e-3

    for clock in (EventClock(timing.CupyEvents()), WallClock(stream.synchronize)):
        for _ in range(2):  # compiled and warm after the first time: both must agree
            eventually(partial(holds, clock))
