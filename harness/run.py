"""A run: the chosen cases one after the other, each row stored as soon as it is there."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from harness import attention, builders, curve, logits, native, records, replay, runners, slice_cost, slices
from harness.cases import (
    Attention,
    Builder,
    Chosen,
    Curve,
    Decode,
    Logits,
    Native,
    NativeCurve,
    Replay,
    Slice,
    SliceCost,
)
from harness.compare import Comparison
from harness.console import say
from harness.records import Row
from harness.systems import Bench

ROWS = "rows.jsonl"
AGAIN = 2  # further measurements of a case whose times fail: a burst of a neighbour passes, a regression stays


class Progress:
    """What is done, of how much, and how long the rest takes, on stderr: one changing line on a terminal, whole lines
    elsewhere. Costs are guesses; their sum scales the time."""

    def __init__(self, total: float, count: int, stream: TextIO | None = None):
        self._stream = stream or sys.stderr
        self._changing = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._total, self._count = total, count
        self._done = self._number = 0.0
        self._cost = 0.0
        self._name = ""
        self._started = time.monotonic()

    def start(self, name: str, cost: float) -> None:
        self._done += self._cost
        self._number += 1
        self._name, self._cost = name, cost
        self._show(0.0)

    def show(self, share: float) -> None:
        """The share of the present case that is done; on a terminal only."""
        if self._changing:
            self._show(share)

    def _show(self, share: float) -> None:
        done = self._done + share * self._cost
        spent = time.monotonic() - self._started
        left = f", about {spent / done * (self._total - done):.0f} s to go" if done else ""
        self._write(f"[{self._number:.0f}/{self._count}] {self._name}  {spent:.0f} s{left}")

    def end(self) -> None:
        if self._changing:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _write(self, line: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        line = line.encode(encoding, "backslashreplace").decode(encoding)
        try:
            self._stream.write(f"\r\x1b[K{line}" if self._changing else f"{line}\n")
            self._stream.flush()
        except BrokenPipeError:
            pass


def measure(bench: Bench, chosen: Chosen, progress: Callable[[float], None] = lambda _: None) -> Iterator[Row]:
    """The rows of one case."""
    match chosen.case:
        case Native():
            return native.rows(bench, chosen, progress)
        case Decode():
            return runners.rows(bench, chosen, progress)
        case Builder():
            return builders.rows(bench, chosen)
        case Logits():
            return logits.rows(bench, chosen)
        case NativeCurve():
            return curve.native_rows(bench, chosen)
        case Curve():
            return curve.rows(bench, chosen)
        case Replay():
            return replay.rows(bench, chosen)
        case SliceCost():
            return slice_cost.rows(bench, chosen)
        case Slice():
            return slices.rows(bench, chosen)
        case Attention():
            return attention.rows(bench, chosen)


def run(bench: Bench, chosen: Sequence[Chosen], path: Path, old: Sequence[Row] = ()) -> list[Row]:
    """Measure the chosen cases, append their rows to `path`, and return all rows: `old` ones and new ones."""
    rows = list(old)
    progress = Progress(sum(each.case.cost for each in chosen), len(chosen))
    with records.RowFile(path) as file:
        for each in chosen:
            progress.start(each.case.id, each.case.cost)
            for row in measure(bench, each, progress.show):
                file.append(row)
                rows.append(row)
    progress.end()
    return records.latest(rows)


def confirm(
    bench: Bench,
    chosen: Sequence[Chosen],
    path: Path,
    rows: Sequence[Row],
    check: Callable[[Sequence[Row]], Comparison],
) -> tuple[list[Row], Comparison]:
    """The rows, and what `check` finds in them after cases whose times or ratios fail were measured again.

    All arms of such a case are, since they take turns. All measurements are in the file; the latest one counts, so that
    what fails in the end has failed each time.
    """
    rows, found = list(rows), check(rows)
    for _ in range(AGAIN):
        failing = [line.row for line in found.lines if line.fails and line.check in ("time", "ratio")]
        names = {row.case.removesuffix("/looping") for row in failing}
        again = [each for each in chosen if each.case.id in names]
        if not again:
            break
        say(f"measured again, since times fail: {', '.join(each.case.id for each in again)}", error=True)
        rows = run(replace(bench, done=frozenset()), again, path, rows)
        found = check(rows)
    return rows, found


def fresh(folder: Path) -> Path:
    """The rows file of a new run in `folder`; an older one is kept beside it as rows.previous.jsonl."""
    path = folder / ROWS
    if path.exists():
        os.replace(path, folder / "rows.previous.jsonl")
    return path
