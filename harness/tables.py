"""What every report shows, free of any format: tables of text, and the numbers of rows that stand in them.

Speeds are told for rows with status OK only. What is not told says so in words, and why in a note below the table.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness import records, stats
from harness.records import Environment, Row, Scalar, Timing
from harness.stats import Number

LOOPING_BELOW = 0.8  # share of distinct 8-grams of an output
DIGITS = 3
NONE = "-"

Mark = Literal["", "good", "bad", "weak", "off"]


@dataclass(frozen=True)
class Column:
    """A header with its unit. text: set to the left, not lined up as numbers are."""

    name: str
    text: bool = False


@dataclass(frozen=True)
class Line:
    """Cells of one line; mark: what the line tells at a glance, for formats that have colours."""

    cells: tuple[str, ...]
    mark: Mark = ""


@dataclass(frozen=True)
class Table:
    """heading: what all lines share, "" for none. notes: sentences below the table."""

    heading: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """A part of the report. text: sentences above the tables; items: a list below them.

    verdict: the word of the first part, whose title is the sentence behind it; "" elsewhere.
    """

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    items: tuple[str, ...] = ()
    verdict: str = ""


@dataclass
class Notes:
    """Collects reasons with the places that they hold for, so that each reason is told once."""

    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, place: str, reason: str) -> None:
        held = self.places.setdefault(reason, [])
        if place not in held:
            held.append(place)

    def sentences(self) -> tuple[str, ...]:
        return tuple(f"{', '.join(places)}: {reason}" for reason, places in self.places.items())


class Measured:
    """The rows of a run as they stand: of each measurement the last one, of each case those of its last input.

    left_out: rows of earlier inputs that are not shown.
    """

    def __init__(self, rows: Iterable[Row]):
        newest = records.latest(rows)
        last = {row.case: row.case_hash for row in newest}
        self.rows = tuple(row for row in newest if row.case_hash == last[row.case])
        self.left_out = len(newest) - len(self.rows)

    def block(self, *names: str) -> list[Row]:
        return [row for row in self.rows if row.block in names]

    def case(self, row: Row) -> list[Row]:
        return [other for other in self.rows if other.case == row.case and other.block == row.block]

    def arm(self, row: Row, name: str | None) -> Row | None:
        """An arm of the same case."""
        return next((other for other in self.case(row) if other.arm == name), None)

    def base(self, row: Row) -> Row | None:
        """Plain decoding of the same case: the arm that `row` took turns with, itself if there is none."""
        return row if row.against is None and method(row) == "ar" else self.arm(row, row.against or "ar")

    def chain(self, row: Row) -> Row | None:
        """The chain with the same drafter, on the same system."""
        found = [other for other in self.case(row) if method(other) == "chain" and settings(other) == settings(row)]
        return found[0] if found else None

    def heading(self, row: Row, leave: Iterable[str]) -> str:
        """What a row shares with the others of its table: its parameters but those that have columns (`leave`).

        What a row that did not run cannot know is taken from the first row of its case.
        """
        first = self.case(row)[0]
        params = {**first.params, **row.params} if row.status == "NOT_RUN" else row.params
        timing = row.timing or first.timing
        words = [_words(name, value) for name, value in params.items() if name not in leave]
        return ", ".join([*filter(None, words), *_timing_words(timing)])


def method(row: Row) -> Literal["ar", "chain", "tree", "other"]:
    """How a decoding row decodes, from the parts of its arm's name. Trees that the host's heap builds are "other"."""
    parts = row.arm.split("-")
    if "ar" in parts:
        return "ar"
    return "chain" if "chain" in parts else "tree" if "ddtree" in parts and "heap" not in parts else "other"


def settings(row: Row) -> tuple[Scalar, str | None]:
    """What must be equal for two arms of a case to be set against each other."""
    return row.params.get("system"), row.timing.launch if row.timing else None


def arm_label(row: Row) -> str:
    """Name of an arm for people: "AR", "chain", "tree 64", "tree 64 heap"; of others the arm itself. The
    system stands in headings."""
    arm = row.arm.removeprefix("gpu-")
    budget = re.fullmatch(r"ddtree(-heap)?-b(\d+)", arm)
    names = {
        "ar": "AR",
        "heapq": "Python heapq",
        "cpp-heap": "C++ heap",
        "sglang-heapq": "SGLang's heapq",
        "sglang-uno": "SGLang's UNO (GPU)",
    }
    if budget is None:
        return names.get(arm, arm)
    return f"tree {budget[2]}{' heap' if budget[1] else ''}"


def builder_input(row: Row) -> str:
    """What the trees of a builder row are made from."""
    vocab = row.params.get("vocab")
    return "lists" if vocab is None else f"logits of {vocab} tokens"


def budget_of(row: Row) -> int:
    """Node budget of a row, 0 without one."""
    value = row.params.get("budget")
    return value if type(value) is int else 0


def dataset_of(row: Row) -> str:
    return str(row.params.get("dataset", row.case))


def looping(row: Row) -> bool:
    """Whether the row's outputs loop: such text inflates tau and every speed-up."""
    distinct = row.metrics.get("distinct8")
    return row.params.get("looping") is True or (distinct is not None and distinct < LOOPING_BELOW)


def faster(base: Row | None, row: Row | None) -> Number:
    """How many times faster `row` is than `base`, with its 95 % interval; the reason where that cannot be told."""
    if row is None or (base is None and row.against is None):
        return Number(None, "there is no arm to set it against")
    if base is None:
        return Number(None, f"arm {row.against} was not measured")
    for side in (base, row):
        if side.status != "OK":
            return Number(None, f"arm {side.arm} {status_words(side)}")
        if side.timing is None or side.timing.mode != "e2e":
            return Number(None, f"arm {side.arm} holds no end-to-end time")
    assert base.timing is not None
    assert row.timing is not None
    if not base.timing.paired(row.timing):
        return Number(None, f"the samples of {base.arm} and {row.arm} were not taken in the same turns")
    return stats.times_faster(base.timing, row.timing)


def median(row: Row | None) -> Number:
    """Median seconds of an OK row with its quartiles in place of the interval."""
    if row is None:
        return Number(None, "no such arm")
    if row.status != "OK":
        return Number(None, status_words(row))
    if row.timing is None:
        return Number(None, "no time was measured")
    found = stats.summarise(row.timing.samples_s)
    return Number(found.median, found.reason, found.q1, found.q3)


def metric(row: Row | None, name: str) -> Number:
    """A stored number of an OK row, or the reason why there is none."""
    if row is None:
        return Number(None, "no such arm")
    if row.status != "OK":
        return Number(None, status_words(row))
    return Number(row.metrics.get(name), row.nulls.get(f"metrics.{name}", "not measured"))


def show(number: Number, scale: float = 1.0, digits: int = DIGITS) -> str:
    """A number for a table, its digits ending at the noise, which is what the interval spans. Counts are whole."""
    if isinstance(number.value, int):
        return str(number.value)
    return stats.trim(_scaled(number.value, scale), _noise(number, scale), digits)


def show_interval(number: Number) -> str:
    """ "2.3 [2.2, 2.4]"; without an interval the number alone."""
    if number.value is None or number.low is None or number.high is None:
        return show(number)
    noise = _noise(number, 1.0)
    low, high = (stats.trim(end, noise, DIGITS) for end in (number.low, number.high))
    return f"{show(number)} [{low}, {high}]"


def show_speed(row: Row | None, number: Number, scale: float = 1.0) -> str:
    """Like `show`, for a row that may have none: "-" without the row, INVALID or "not run" in words."""
    if row is None:
        return NONE
    return show(number, scale) if row.status == "OK" else status(row)


def status(row: Row) -> str:
    return {"OK": "OK", "INVALID": "INVALID", "NOT_RUN": "not run"}[row.status]


def status_words(row: Row) -> str:
    """ "not run: no CUDA driver"."""
    return f"{status(row)}: {row.reason}" if row.reason else status(row)


def equal(row: Row) -> str:
    """Whether the results were the true ones; with the number of margins where a target was undecided."""
    if row.parity is None:
        return NONE
    if not row.parity.passed:
        return "NO"
    return f"yes ({row.parity.margins})" if row.parity.margins else "yes"


def environments(rows: Iterable[Row]) -> list[Environment]:
    found: list[Environment] = []
    for row in rows:
        if row.environment not in found:
            found.append(row.environment)
    return found


def visible_text(text: str) -> str:
    """Text that can be seen: control, format and lone surrogate characters as their number."""
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in text)


def columns(*names: str) -> tuple[Column, ...]:
    """Columns from headers; a leading "<" marks text."""
    return tuple(Column(name.removeprefix("<"), name.startswith("<")) for name in names)


def grouped(rows: Sequence[Row], measured: Measured, leave: Iterable[str]) -> dict[str, list[Row]]:
    """Rows by what they share, in order of first appearance."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(measured.heading(row, leave), []).append(row)
    return found


def _words(name: str, value: Scalar) -> str:
    if name == "temperature" and type(value) in (int, float):
        return f"T = {value:g}" if value else "greedy"
    if name == "batch" and value == 1:
        return ""
    known = {"block_size": "block {}", "max_new_tokens": "{} new tokens", "depth_limit": "depth {}"}
    return known.get(name, f"{name.replace('_', ' ')} {{}}").format(value)


def _timing_words(timing: Timing | None) -> list[str]:
    if timing is None:
        return []
    clock = {"wall": "wall clock", "cpu": "processor time", "events": "CUDA events", "graph": "CUDA events"}
    launch = {"eager": "eager launches", "graph": "CUDA graph", None: ""}[timing.launch]
    cold = {"warm": "warm L2", "flushed": "flushed L2", None: ""}[timing.l2]
    return [clock[timing.method], *filter(None, (launch, cold))]


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _noise(number: Number, scale: float) -> float | None:
    """The width of the interval, but at most a tenth of the number: two digits always stay."""
    if number.value is None or number.low is None or number.high is None:
        return None
    return min(number.high - number.low, abs(number.value) / 10) * scale
