"""The three blocks that every report starts with: verdict (with what failed), decoding, tree builders."""

from __future__ import annotations

from collections.abc import Callable

from harness.compare import Comparison, render
from harness.records import Row
from harness.stats import Number
from harness.tables import (
    NONE,
    Line,
    Mark,
    Measured,
    Notes,
    Section,
    Table,
    arm_label,
    builder_input,
    columns,
    dataset_of,
    equal,
    faster,
    grouped,
    looping,
    median,
    method,
    metric,
    show,
    show_interval,
    show_speed,
    status,
    status_words,
)

SHARED = {"dataset", "budget", "depth_limit", "looping", "lists", "trees", "contract"}  # not told in headings
EMPTY = "Nothing of this kind was asked for in this run."


def blocks(measured: Measured, comparison: Comparison | None = None) -> list[Section]:
    """Verdict, what failed (if anything did), decoding, builders."""
    failures = _failures(measured, comparison)
    return [
        verdict(measured, comparison),
        *([failures] if failures.items else []),
        _decode(measured),
        _builders(measured),
    ]


def verdict(measured: Measured, comparison: Comparison | None = None) -> Section:
    """One word for the run with the counts behind it, and what the tables say in a sentence each."""
    count = {name: [r for r in measured.rows if r.status == name] for name in ("OK", "INVALID", "NOT_RUN")}
    bad = len(count["INVALID"]) + (sum(line.fails for line in comparison.lines) if comparison else 0)
    word = "FAILED" if bad else "PASSED" if count["OK"] else "NOTHING MEASURED"
    checked = [r for r in count["OK"] if r.parity is not None]
    told = [f"{len(count['OK'])} measured, {len(checked)} of them equal to their reference"]
    if count["INVALID"]:
        told.append(f"{len(count['INVALID'])} INVALID")
    reasons: dict[str, int] = {}
    for row in count["NOT_RUN"]:
        reasons[row.reason or ""] = reasons.get(row.reason or "", 0) + 1
    told += [f"{n} not run: {reason}" for reason, n in reasons.items()]
    if comparison is not None:
        told.append(comparison.summary)
    if measured.left_out:
        told.append(f"{measured.left_out} rows of earlier inputs left out")
    text = "; ".join(told)
    return Section(
        text, verdict=word, items=tuple(filter(None, [_best(measured), _heaps(measured), _heap_rounds(measured)]))
    )


def _best(measured: Measured) -> str:
    """How plain decoding, chain and trees stand to each other."""
    trees = [r for r in headline(measured) if method(r) == "tree" and r.status == "OK"]
    found = [(r, faster(measured.base(r), r)) for r in trees]
    told = [(r, n) for r, n in found if n.value is not None]
    if not told:
        return ""
    row, number = max(told, key=lambda pair: pair[1].value or 0.0)
    place = f"{dataset_of(row)}, {arm_label(row)}"
    above = [r for r in trees if beside_chain(measured, r) == "OK" and measured.chain(r) is not None]
    below = [r for r in trees if beside_chain(measured, r) == "SLOWER"]
    return (
        f"Best tree: {show_interval(number)} times the speed of AR ({place}, tau {show(metric(row, 'tau'))}). "
        f"Of {len(trees)} trees {len(above)} are faster than their own chain, {len(below)} slower, "
        f"{len(trees) - len(above) - len(below)} undecided."
    )


def _heaps(measured: Measured) -> str:
    rows = [r for r in measured.block("builder") if r.arm == "cpp-heap" and builder_input(r) == "lists"]
    found = [n.value for r in rows if (n := faster(measured.arm(r, "heapq"), r)).value is not None]
    if not found:
        return ""
    low, high = (show(Number(f(found))) for f in (min, max))
    return f"The C++ heap builds the same trees {low} to {high} times faster than Python's heapq."


def _heap_rounds(measured: Measured) -> str:
    """What it costs whole decodings that the host builds their trees."""
    rows = [r for r in headline(measured) if "-heap-" in r.arm]
    found = [faster(r, measured.arm(r, r.arm.replace("-heap-", "-"))).value for r in rows]
    told = [value for value in found if value is not None]
    if not told:
        return ""
    low, high = (show(Number(f(told))) for f in (min, max))
    return (
        f"Decoding is {low} to {high} times as fast where the GPU builds the trees as where the host's C++ heap does."
    )


def _failures(measured: Measured, comparison: Comparison | None) -> Section:
    items = []
    for row in measured.rows:
        if row.status != "INVALID":
            continue
        text = f"{row.case} {row.arm}: INVALID: {row.reason}"
        if (parity := row.parity) is not None and (first := parity.first_difference) is not None:
            seed = "" if first.seed is None else f", seed {first.seed}"
            at = "" if first.round is None else f", round {first.round}"
            margin = "" if first.margin is None else f"; margin of the target's choice {first.margin:.3g}"
            text += (
                f". First difference: {first.what} of {first.unit}{seed}{at}, index {first.index}: "
                f"expected {first.expected}, got {first.actual}{margin}"
            )
            if parity.reproduce:
                text += f". Reproduce with: python -m harness.parity {parity.reproduce}"
        items.append(text)
    if comparison is not None:
        failing = tuple(line for line in comparison.lines if line.fails and line.check != "parity")
        for line in failing:
            single = Comparison((line,), (), comparison.exit, "")
            items.append(" ".join(render(single).split()))
    return Section("Regressions and failures", items=tuple(items))


def headline(measured: Measured) -> list[Row]:
    return [row for row in measured.block("decode") if not looping(row)]


def _decode(measured: Measured) -> Section:
    apart = [row for row in measured.block("decode") if looping(row)]
    tables = _decode_tables(measured, headline(measured))
    for table in _decode_tables(measured, apart):
        heading = f"Looping outputs (distinct 8-grams below 0.8), which inflate every speed-up: {table.heading}"
        tables.append(Table(heading, table.columns, table.lines, table.notes))
    return Section("Plain decoding (AR), chain (DFlash) and tree (DDTree)", () if tables else (EMPTY,), tuple(tables))


def _decode_tables(measured: Measured, rows: list[Row]) -> list[Table]:
    """One line for each chain and tree; for AR only where it stands alone."""
    headers = ("<dataset", "budget", "tau", "tok/s: AR", "chain", "tree", "speed-up [95 %]", "<equal", "<status")
    tables = []
    for heading, members in grouped(rows, measured, SHARED).items():
        notes, lines = Notes(), []
        margins = 0
        for row in members:
            base, chain = measured.base(row), measured.chain(row)
            explain(notes, row)
            margins += row.parity.margins if row.parity else 0
            kind = method(row)
            if kind == "ar" and any(r is not row and measured.base(r) is row for r in members):
                continue
            gain = faster(base, row)
            if row.status == "OK" and kind != "ar" and gain.value is None:
                notes.add(place_of(row), f"no speed-up: {gain.reason}")
            lines.append(
                Line(
                    (
                        dataset_of(row),
                        arm_label(row).removeprefix("tree "),
                        cell(row, metric(row, "tau")),
                        show_speed(base, metric(base, "tokens_per_s")),
                        show_speed(chain, metric(chain, "tokens_per_s")),
                        show_speed(row, metric(row, "tokens_per_s")) if kind in ("tree", "other") else NONE,
                        cell(row, gain, show_interval) if kind != "ar" else NONE,
                        equal(row),
                        beside_chain(measured, row),
                    ),
                    mark(measured, row),
                )
            )
        if margins:
            notes.add(f"{margins} times", "the target's choice had a margin below the allowed one; counted, no failure")
        tables.append(Table(heading, columns(*headers), tuple(lines), notes.sentences()))
    return tables


def beside_chain(measured: Measured, row: Row) -> str:
    """The status of a tree that is correct: OK if faster than its own chain, SLOWER, or "no gain" if undecided."""
    chain = measured.chain(row)
    if row.status != "OK" or method(row) != "tree" or chain is None:
        return status(row)
    number = faster(chain, row)
    if number.value is None:
        return "OK"
    low, high = (number.value if end is None else end for end in (number.low, number.high))
    return "SLOWER" if high < 1 else "OK" if low > 1 else "no gain"


def mark(measured: Measured, row: Row) -> Mark:
    if row.status != "OK":
        return "bad" if row.status == "INVALID" else "off"
    marks: dict[str, Mark] = {"SLOWER": "weak", "OK": "good" if method(row) == "tree" else ""}
    return marks.get(beside_chain(measured, row), "")


def _builders(measured: Measured) -> Section:
    """One line for each case: the arms beside each other, and which tree they build."""
    inputs: dict[str, list[list[Row]]] = {}
    for members in _cases(measured, "builder"):
        inputs.setdefault(builder_input(members[0]), []).append(members)
    found = tuple(_builder_table(measured, name, members) for name, members in inputs.items())
    return Section("Tree builders", () if found else (EMPTY,), found)


def _builder_table(measured: Measured, source: str, cases: list[list[Row]]) -> Table:
    """Cases that begin at the same input."""
    headers = (
        "budget",
        "depth",
        "batch",
        "GPU us",
        "C++ us",
        "heapq us",
        "C++/GPU",
        "heapq/C++",
        "<equal",
        "<status",
    )
    notes, lines = Notes(), []
    for members in cases:
        first = members[0]
        arms = {name: measured.arm(first, name) for name in ("gpu", "cpp-heap", "heapq")}
        shown = [row for row in arms.values() if row is not None]
        for row in shown:
            explain(notes, row, f"{arm_label(row)}, all budgets")
        gpu, cpp, heapq = arms.values()
        checks = [equal(row) for row in shown if row.status != "NOT_RUN"]
        verdicts = {status(row) for row in shown}
        word = "INVALID" if "INVALID" in verdicts else "OK" if "OK" in verdicts else "not run"
        lines.append(
            Line(
                (
                    *(str(first.params.get(name, NONE)) for name in ("budget", "depth_limit", "batch")),
                    *(show_speed(row, median(row), 1e6) for row in (gpu, cpp, heapq)),
                    *(_ratio(*pair) for pair in ((cpp, gpu), (heapq, cpp))),
                    "NO" if "NO" in checks else (checks[0] if checks else NONE),
                    word,
                ),
                "bad" if word == "INVALID" else "off" if word == "not run" else "",
            )
        )
    if any(row.arm == "gpu" and row.status == "OK" for members in cases for row in members):
        notes.add("GPU us", "device time of graph replays; the others: processor time, wall clock with transfers")
    heading = f"Time per tree from {source}; equal: the same arrays as the reference, bit for bit"
    return Table(heading, columns(*headers), tuple(lines), notes.sentences())


def _cases(measured: Measured, block: str) -> list[list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in measured.block(block):
        found.setdefault(row.case, []).append(row)
    return list(found.values())


def explain(notes: Notes, row: Row, place: str | None = None) -> None:
    """Why a row has no speed, what it lacks, and what was odd about its samples."""
    place = place or place_of(row)
    if row.status != "OK":
        notes.add(place, status_words(row))
        return
    for name, why in row.nulls.items():
        notes.add(place, f"{name.removeprefix('metrics.').replace('_', ' ')} is n/a: {why}")
    if row.timing is None:
        return
    if row.timing.capped:
        notes.add(place, f"the time limit ended the measurement after {len(row.timing.samples_s)} samples")
    if row.timing.dropped:
        notes.add(place, f"{row.timing.dropped} turns were dropped because the GPU throttled")
    if row.timing.mode == "e2e":
        number = median(row)
        if number.value is None:
            notes.add(place, f"time is n/a: {number.reason}")


def place_of(row: Row) -> str:
    return f"{dataset_of(row)} {arm_label(row)}"


def cell(row: Row, number: Number, form: Callable[[Number], str] = show) -> str:
    return form(number) if row.status == "OK" else status(row) if row.status == "INVALID" else NONE


def _ratio(base: Row | None, row: Row | None) -> str:
    number = faster(base, row)
    return NONE if number.value is None else show(number)
