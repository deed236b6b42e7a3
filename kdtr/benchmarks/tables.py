"""What a benchmark stores, and the tables made of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kdtr.benchmarks.measure import Sample
from kdtr.console import table

GROSS: Final = 2.0  # a goal missed by this factor, also in processor time, is no noise
AGAIN: Final = 2

_STATISTICS: Final[Mapping[str, Callable[[Sequence[Sample]], float]]] = {
    "median": lambda samples: statistics.median(sample.wall for sample in samples),
    "minimum": lambda samples: min(sample.wall for sample in samples),
    "cpu": lambda samples: min(sample.cpu for sample in samples),
}


@dataclass(frozen=True, slots=True)
class Goal:
    """What an arm shall reach: `ratio` times the speed of the arm `against`, or at most `milliseconds`.

    `of` is the statistic that is judged: "median" or "minimum" by the clock.
    """

    of: str = "median"
    against: str | None = None
    ratio: float | None = None
    milliseconds: float | None = None

    def __str__(self) -> str:
        what = f">= {self.ratio:g}x {self.against}" if self.ratio is not None else f"<= {self.milliseconds:g} ms"
        return f"{what} ({self.of})"


@dataclass(frozen=True, slots=True)
class Measured:
    """One table: samples of each arm, the arm that ratios are of, and the goals by arm."""

    title: str
    baseline: str
    samples: Mapping[str, Sequence[Sample]]
    goals: Mapping[str, Goal]

    def info(self) -> dict[str, Any]:
        """For `benchmark.extra_info`: plain Python values."""
        return {
            "title": self.title,
            "baseline": self.baseline,
            "wall_seconds": {name: [float(each.wall) for each in samples] for name, samples in self.samples.items()},
            "cpu_seconds": {name: [float(each.cpu) for each in samples] for name, samples in self.samples.items()},
            "goals": {name: asdict(goal) for name, goal in self.goals.items()},
        }

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> Measured:
        """The inverse of `info`."""
        cpu = info["cpu_seconds"]
        samples = {name: list(map(Sample, wall, cpu[name])) for name, wall in info["wall_seconds"].items()}
        goals = {name: Goal(**goal) for name, goal in info["goals"].items()}
        return cls(info["title"], info["baseline"], samples, goals)

    def seconds(self, arm: str, of: str) -> float:
        """A statistic of an arm: "median" or "minimum" by the clock, or "cpu", the minimum of processor time."""
        return _STATISTICS[of](self.samples[arm])

    def shortfall(self, arm: str, of: str | None = None) -> float:
        """How far an arm is from its goal: 1 or less is met, 2 is twice as slow as allowed."""
        goal = self.goals[arm]
        of = of or goal.of
        if goal.ratio is not None and goal.against is not None:
            return self.seconds(arm, of) * goal.ratio / self.seconds(goal.against, of)
        assert goal.milliseconds is not None
        return 1000 * self.seconds(arm, of) / goal.milliseconds

    def grossly_missed(self) -> list[str]:
        """Arms that are off their goal by more than noise explains, by the clock and in processor time.

        Milliseconds depend on the machine: a baseline that is slower, too, shows that the machine is.
        """
        return [
            arm
            for arm, goal in self.goals.items()
            if min(self.shortfall(arm), self.shortfall(arm, "cpu")) > GROSS
            and (goal.against or self.seconds(arm, "cpu") > self.seconds(self.baseline, "cpu"))
        ]

    def lines(self) -> list[str]:
        """The table as text: milliseconds, and how many times as fast as the baseline."""
        rows = []
        for arm, samples in self.samples.items():
            times = [f"{1000 * self.seconds(arm, of):.2f}" for of in ("median", "minimum")]
            ratios = [f"{self.seconds(self.baseline, of) / self.seconds(arm, of):.2f}" for of in _STATISTICS]
            short = self.shortfall(arm) if arm in self.goals else 0.0
            verdict = (str(self.goals[arm]), "met" if short <= 1 else f"MISSED by {short:.2f}x") if short else ("", "")
            rows.append((arm, str(len(samples)), *times, *ratios, *verdict))
        header = ("arm", "n", "median ms", "minimum ms", "x median", "x minimum", "x cpu", "goal", "is")
        note = f"x: time of {self.baseline} / time of the arm (higher is faster); cpu: minimum of processor time"
        return [self.title, *table(header, rows, right=header[1:7]), note]


def confirmed(measured: Measured, again: Callable[[], Measured]) -> Measured:
    """The measurement, or while a goal is grossly missed the next one, at most AGAIN times: bursts of others pass."""
    for _ in range(AGAIN):
        if not measured.grossly_missed():
            break
        measured = again()
    return measured


def of_file(stored: Mapping[str, Any]) -> list[Measured]:
    """The tables of a JSON file of pytest-benchmark; other benchmarks in it are left alone."""
    infos = [each["extra_info"]["kdtr"] for each in stored["benchmarks"] if "kdtr" in each["extra_info"]]
    return [Measured.from_info(info) for info in infos]
