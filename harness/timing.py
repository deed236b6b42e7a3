"""Taking samples: arms in turns, the first sample apart, throttled turns dropped, a time limit that is reported.

A clock makes marks and tells the seconds between two of them. Wall clock, processor time and pairs of CUDA events share
that interface, so one function measures all of them. Two modes: `interleave` times whole calls (mode "e2e", no
synchronisation inside), `StageTimer` splits one call into stages (mode "staged", for shares only).
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

from harness.records import Clocks, Method, Timing

MAX_TURNS = 3  # turns started at most, as a multiple of the wanted samples, when throttling eats them
THROTTLED_BELOW = 0.75  # SM clock below this share of the nominal one (NVBench's default for the same purpose)
SLOWDOWNS = frozenset({"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown"})
STAGE_TOLERANCE, STAGE_FLOOR_S = 0.03, 1e-3
OTHER = "other"


class Clock(Protocol):
    """mark() notes a moment without waiting; seconds(a, b) tells the time between two marks and may wait for b."""

    method: Method

    def mark(self) -> Any: ...

    def seconds(self, start: Any, stop: Any) -> float: ...


class WallClock:
    """Host wall clock. With work on a device, `synchronize` makes each mark wait for it."""

    method: Method = "wall"

    def __init__(self, synchronize: Callable[[], object] | None = None):
        self._synchronize = synchronize

    def mark(self) -> int:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter_ns()

    def now(self) -> float:
        """Seconds, for code that times itself."""
        return self.mark() * 1e-9

    def seconds(self, start: int, stop: int) -> float:
        return (stop - start) * 1e-9


class CpuClock:
    """Processor time of this process, all threads together: for single-threaded work on a machine that is shared."""

    method: Method = "cpu"

    def mark(self) -> int:
        return time.process_time_ns()

    def now(self) -> float:
        """Seconds, for code that times itself."""
        return self.mark() * 1e-9

    def seconds(self, start: int, stop: int) -> float:
        return (stop - start) * 1e-9


def cpu_clock() -> CpuClock | WallClock:
    """Processor time if BLAS runs on one thread, wall clock otherwise: helpers that wait would count as work."""
    threads = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    return CpuClock() if threads == "1" else WallClock()


class Events(Protocol):
    """What an event clock needs of a GPU library; elapsed_ms waits for `stop`."""

    def record(self) -> Any: ...
    def elapsed_ms(self, start: Any, stop: Any) -> float: ...


class EventClock:
    """Device time on one stream. Each span has its own pair of events: the milliseconds between two events are a
    float32, so differences of times since one early event would lose the microseconds."""

    def __init__(self, events: Events, method: Literal["events", "graph"] = "events"):
        self._events = events
        self.method: Method = method

    def mark(self) -> Any:
        return self._events.record()

    def seconds(self, start: Any, stop: Any) -> float:
        return self._events.elapsed_ms(start, stop) * 1e-3


class CupyEvents:
    """Events of CuPy on `stream` (default: the stream that is current when a mark is made)."""

    def __init__(self, stream: Any = None):
        import cupy

        self._cuda = cupy.cuda
        self._stream = stream

    def record(self) -> Any:
        event = self._cuda.Event()
        event.record(self._stream if self._stream is not None else self._cuda.get_current_stream())
        return event

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        stop.synchronize()
        return float(self._cuda.get_elapsed_time(start, stop))


class ClockReader(Protocol):
    """Reads GPU clocks. nominal_mhz: the SM clock to expect under load, None: the highest that is seen."""

    nominal_mhz: int | None

    def read(self) -> Clocks: ...


@dataclass(frozen=True)
class Arm:
    """What one arm of a case gave. error: what it raised and in which turn; its timing then holds no samples.

    numbers: which of the wanted samples were taken, all of them unless the time limit came first.
    """

    timing: Timing
    error: str | None = None
    numbers: tuple[int, ...] = ()

    @property
    def failure(self) -> str | None:
        """Why no speed can be told, or None. No samples is a failure, not an empty result."""
        if self.error is not None or self.timing.samples_s:
            return self.error
        return f"no samples: {self.timing.dropped} turns were dropped because the GPU throttled"


@dataclass(frozen=True)
class Own:
    """How one arm is measured where it differs from the arms that it takes turns with: a GPU among CPU arms.

    before: runs untimed before each of its calls. launch, l2: for its timing.
    """

    clock: Clock
    before: Callable[[], object] | None = None
    launch: Literal["eager", "graph"] | None = None
    l2: Literal["warm", "flushed"] | None = None


def interleave(
    arms: Mapping[str, Callable[[], Any]],
    *,
    samples: int = 10,
    warmups: int = 1,
    best_of: int = 1,
    clock: Clock | None = None,
    time_limit_s: float | None = None,
    reader: ClockReader | None = None,
    inspect: Callable[[str, int, Any], None] | None = None,
    launch: Literal["eager", "graph"] | None = None,
    l2: Literal["warm", "flushed"] | None = None,
    before: Callable[[], object] | None = None,
    begin: Callable[[int], object] | None = None,
    seconds: Callable[[Any], float] | None = None,
    sample: Literal["repeat", "prompt"] = "repeat",
    own: Mapping[str, Own] | None = None,
) -> dict[str, Arm]:
    """Call every arm once a turn until each has `samples` samples; turns start with another arm each time.

    A sample is the least of `best_of` calls in a row: more than 1 is for short calls on a machine that others use too.
    The first `warmups` turns (at least 1) are kept apart. A turn in which the GPU throttled is dropped for all arms,
    which keeps samples paired, and is made up for by another one, up to 3 times `samples` turns. `time_limit_s` ends
    the measurement after the turn that reaches it, but not before one sample.
    `begin(i)` runs untimed before a turn and tells which sample it is for (0 in warm-ups), so that each sample can be
    of another prompt (`sample`). `before()` runs untimed before each call (such as flushing a cache).
    `inspect(arm, turn, result)` sees each result, untimed; what it raises counts as the arm's error. An arm that raises
    fails alone; the others go on. `seconds(result)` is the time of a call that times itself by this kind of clock.
    `own` tells by name which arms have another clock.
    Raises ValueError for no arms, or for sizes below 1.
    """
    if not arms or min(samples, warmups, best_of) < 1:
        raise ValueError(
            f"need at least one arm, sample, warm-up and call, got {len(arms)}, {samples}, {warmups}, {best_of}"
        )
    usual = Own(clock or WallClock(), before, launch, l2)
    ways = {name: (own or {}).get(name, usual) for name in arms}
    turns: list[_Turn] = []
    errors: dict[str, str] = {}
    capped = False
    clocks_before = reader.read() if reader else None
    begun = time.perf_counter()
    with _no_collection():
        while len(errors) < len(arms) and len(turns) < warmups + MAX_TURNS * samples:
            gc.collect()
            order = [name for name in arms if name not in errors]
            shift = len(turns) % len(order)
            kept = _kept(turns, warmups, reader)
            number = next(i for i in range(samples) if i not in kept)
            if begin is not None:
                begin(number)
            taken: dict[str, float] = {}
            for name in order[shift:] + order[:shift]:
                see = partial(inspect, name, len(turns)) if inspect is not None else None
                way = ways[name]
                try:
                    taken[name] = min(_one_call(arms[name], way, see, seconds) for _ in range(best_of))
                except Exception as error:
                    errors[name] = f"{type(error).__name__} in turn {len(turns)}: {error}"
            turns.append(_Turn(number, taken, reader.read() if reader else None))
            kept = _kept(turns, warmups, reader)
            if len(kept) >= samples:
                break
            if time_limit_s is not None and kept and time.perf_counter() - begun >= time_limit_s:
                capped = True
                break
    kept = _kept(turns, warmups, reader)
    base = Timing(
        method=usual.clock.method,
        mode="e2e",
        samples_s=(),
        warmup_s=None,
        warmups=warmups,
        best_of=best_of,
        dropped=len(turns[warmups:]) - len(kept),
        capped=capped,
        sample=sample,
        clocks_before=clocks_before,
        clocks_after=turns[-1].clocks,
    )
    bases = {name: replace(base, method=w.clock.method, launch=w.launch, l2=w.l2) for name, w in ways.items()}
    return {
        name: Arm(bases[name], errors[name])
        if name in errors
        else Arm(
            replace(bases[name], samples_s=tuple(kept[i][name] for i in sorted(kept)), warmup_s=turns[0].taken[name]),
            numbers=tuple(sorted(kept)),
        )
        for name in arms
    }


def throttled(clocks: Clocks, nominal_mhz: int | None) -> bool:
    """Whether samples taken at these clocks say nothing: a slowdown is active, or the SM clock is far below nominal."""
    slow = clocks.sm_mhz is not None and nominal_mhz is not None and clocks.sm_mhz < THROTTLED_BELOW * nominal_mhz
    return slow or not SLOWDOWNS.isdisjoint(clocks.throttle)


@dataclass(frozen=True)
class Stages:
    """Seconds by stage, "other" among them, and the wall time of the same call measured apart."""

    seconds: dict[str, float]
    wall_s: float

    @property
    def problem(self) -> str | None:
        """Why the shares are not to be trusted, or None: stages and wall time must agree within 3 % (or a ms)."""
        total = sum(self.seconds.values())
        if abs(total - self.wall_s) <= max(STAGE_TOLERANCE * self.wall_s, STAGE_FLOOR_S):
            return None
        return f"stages and {OTHER} sum to {total:.6g} s, the wall clock says {self.wall_s:.6g} s (3 % allowed)"


class StageTimer:
    """Splits a call into named spans: `with timer: ... with timer.span("draft"): ...`, then `timer.result()`.

    What lies between spans is measured too, as "other". `wall` measures the whole call independently; give it the
    device's synchronisation when `clock` is an event clock.
    """

    def __init__(self, clock: Clock | None = None, wall: WallClock | None = None):
        self._clock = clock or WallClock()
        self._wall = wall or WallClock()
        self._spans: list[tuple[str, Any, Any]] = []
        self._open: str | None = None
        self._last: Any = None
        self._wall_marks: list[int] = []

    def __enter__(self) -> StageTimer:
        if self._wall_marks:
            raise RuntimeError("a stage timer measures one call")
        self._wall_marks.append(self._wall.mark())
        self._last = self._clock.mark()
        return self

    def __exit__(self, *_: object) -> None:
        self._close(OTHER)
        self._wall_marks.append(self._wall.mark())

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time of the block counts for stage `name`; the same name may come many times, but not inside another."""
        if self._open is not None or name == OTHER:
            raise RuntimeError(f"stage {name!r} cannot start inside {self._open!r} or be named {OTHER!r}")
        if len(self._wall_marks) != 1:
            raise RuntimeError(f"stage {name!r} lies outside the timed call")
        self._close(OTHER)
        self._open = name
        try:
            yield
        finally:
            self._close(name)
            self._open = None

    def result(self) -> Stages:
        """Seconds by stage in order of first appearance, "other" last. Waits for the device if there is one."""
        if len(self._wall_marks) != 2:
            raise RuntimeError("the timed call has not ended")
        seconds: dict[str, float] = {}
        for name, start, stop in self._spans:
            seconds[name] = seconds.get(name, 0.0) + self._clock.seconds(start, stop)
        seconds[OTHER] = seconds.pop(OTHER)
        return Stages(seconds, self._wall.seconds(*self._wall_marks))

    def _close(self, name: str) -> None:
        now = self._clock.mark()
        self._spans.append((name, self._last, now))
        self._last = now


def stages_of(spans: Iterable[Mapping[str, float]], wall_s: float, inside_s: float) -> Stages:
    """Stages of a call that timed itself: `spans` by round, `inside_s` its rounds from end to end, `wall_s` measured
    around it. "other" is what lies between the spans of the rounds."""
    seconds: dict[str, float] = {}
    for span in spans:
        for name, value in span.items():
            seconds[name] = seconds.get(name, 0.0) + value
    seconds[OTHER] = inside_s - sum(seconds.values())
    return Stages(seconds, wall_s)


def staged_timing(stages: Stages, method: Method) -> Timing:
    """The Timing of a row that holds stages: one sample, in mode "staged", which is never compared with "e2e"."""
    return Timing(method, "staged", (stages.wall_s,), None, 0, False, warmups=0)


@dataclass(frozen=True)
class _Turn:
    """number: of the sample that the turn is for. taken: seconds by arm."""

    number: int
    taken: dict[str, float]
    clocks: Clocks | None


def _one_call(
    work: Callable[[], Any],
    way: Own,
    inspect: Callable[[Any], None] | None,
    seconds: Callable[[Any], float] | None,
) -> float:
    if way.before is not None:
        way.before()
    start = way.clock.mark()
    result = work()
    taken = way.clock.seconds(start, way.clock.mark()) if seconds is None else seconds(result)
    if inspect is not None:
        inspect(result)
    return taken


def _kept(turns: list[_Turn], warmups: int, reader: ClockReader | None) -> dict[int, dict[str, float]]:
    """{number: seconds by arm} of the turns after the warm-up that did not throttle, the first one of each number.

    Judged anew each time, for the nominal clock may show late.
    """
    seen = [turn.clocks.sm_mhz for turn in turns if turn.clocks is not None and turn.clocks.sm_mhz is not None]
    nominal = reader.nominal_mhz if reader and reader.nominal_mhz is not None else max(seen, default=None)
    kept: dict[int, dict[str, float]] = {}
    for turn in turns[warmups:]:
        if turn.clocks is None or not throttled(turn.clocks, nominal):
            kept.setdefault(turn.number, turn.taken)
    return kept


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside a sample, and a quick one between turns: what is old is not looked at again."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
