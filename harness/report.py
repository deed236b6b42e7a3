"""Reports of a run: Markdown for people and pull requests, CSV for programs, HTML with plots and draft trees.

All are functions of rows and of nothing else: the same rows give the same bytes. No clock, no path, no setting of the
machine enters. Text is UTF-8; what cannot be encoded is escaped.
"""

from __future__ import annotations

import csv
import io
import os
import re
import textwrap
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness import html
from harness.blocks import blocks
from harness.compare import Comparison
from harness.details import details
from harness.records import Row, Scalar
from harness.tables import Measured, Section, Table, faster, median, status, visible_text

WIDTH = 100
TITLE = "DDTree harness report"
RAW_ROWS = "rows.jsonl"
# What Markdown would not show as it is: emphasis, code, tables, HTML, strike-through, links, character references.
SPECIAL = re.compile(r"[\\`|<]|\*(?=\S)|(?<=\S)\*|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|~(?=~)|\](?=[\[(:])|&(?=#?\w+;)")


@dataclass(frozen=True)
class Paths:
    markdown: Path
    csv: Path
    html: Path


def write(rows: Iterable[Row], out_dir: str | os.PathLike[str], comparison: Comparison | None = None) -> Paths:
    """Write report.md, report.csv and report.html into `out_dir`, each at once or not at all."""
    rows, folder = list(rows), Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    paths = Paths(folder / "report.md", folder / "report.csv", folder / "report.html")
    _replace(paths.markdown, markdown(rows, comparison))
    _replace(paths.csv, table(rows))
    _replace(paths.html, html.page(rows, comparison))
    return paths


def text(rows: Iterable[Row], comparison: Comparison | None = None) -> str:
    """The blocks that are always there, for a terminal: verdict, failures, decoding, builders."""
    return "\n\n".join(_section(part) for part in blocks(Measured(rows), comparison))


def markdown(rows: Iterable[Row], comparison: Comparison | None = None) -> str:
    """The whole report, at most 100 columns wide."""
    measured = Measured(rows)
    parts = [_section(part) for part in [*blocks(measured, comparison), *details(measured)]]
    end = f"Raw rows: [{RAW_ROWS}]({RAW_ROWS}), one JSON object a line; as a table: [report.csv](report.csv)."
    return "\n\n".join([f"# {TITLE}", *parts, end]) + "\n"


def table(rows: Iterable[Row]) -> str:
    """CSV, one line for each measurement. Every string is stored as it is. A number that is not told is a word ("n/a",
    "INVALID", "not run"); a cell is empty where its column does not belong to the row. Times in seconds."""
    measured = Measured(rows)
    lines = [_csv_line(measured, row) for row in measured.rows]
    groups = dict.fromkeys(name.partition(".")[0] for line in lines for name in line)
    names = dict.fromkeys(name for line in lines for name in line)
    order = [name for group in groups for name in names if name.partition(".")[0] == group]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, order, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


def escape(text: str) -> str:
    """A string as one line of Markdown that shows it unchanged: marks of the language escaped, line ends as <br>."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "<br>".join(visible_text(SPECIAL.sub(r"\\\g<0>", line)) for line in lines)


def _csv_line(measured: Measured, row: Row) -> dict[str, str]:
    """One line by column name; names with a dot stand in groups."""
    line = {
        "suite": row.suite,
        "block": row.block,
        "case": row.case,
        "arm": row.arm,
        "status": status(row),
        "reason": row.reason or "",
        "against": row.against or "",
    }
    line |= {f"params.{name}": _plain(value) for name, value in row.params.items()}
    line["seed"] = "" if row.seed is None else str(row.seed)
    if (parity := row.parity) is not None:
        line |= {
            "parity.against": parity.against,
            "parity.compared": str(parity.compared),
            "parity.differences": str(parity.differences),
            "parity.margins": str(parity.margins),
        }
    told = row.status == "OK"
    line |= {f"metrics.{name}": _number(value) if told else status(row) for name, value in row.metrics.items()}
    if (timing := row.timing) is not None:
        time, gain = median(row), faster(measured.arm(row, row.against), row)
        line |= {"time.samples": str(len(timing.samples_s))}
        for name, value in (("median_s", time.value), ("q1_s", time.low), ("q3_s", time.high)):
            line[f"time.{name}"] = _number(value) if told else status(row)
        if row.against is not None and timing.mode == "e2e":
            for name, value in (("times_faster", gain.value), ("low", gain.low), ("high", gain.high)):
                line[f"gain.{name}"] = _number(value) if told else status(row)
        for name in ("method", "mode", "sample", "launch", "l2", "best_of", "dropped", "capped"):
            line[f"timing.{name}"] = _plain(getattr(timing, name))
    if row.stages is not None:
        line |= {f"stages.{name}_s": _number(value) if told else status(row) for name, value in row.stages.items()}
    if row.depth_histogram is not None:
        line["depth_histogram"] = " ".join(map(str, row.depth_histogram))
    line["nulls"] = "; ".join(f"{place}: {reason}" for place, reason in row.nulls.items())
    line["case_hash"] = row.case_hash
    environment = row.environment
    for name in ("hardware_key", "cpu", "cores", "commit", "dirty", "code"):
        line[f"environment.{name}"] = _plain(getattr(environment, name))
    line["environment.gpu"] = environment.gpu.name if environment.gpu else f"none: {environment.gpu_missing or ''}"
    return line


def _number(value: float | int | None) -> str:
    return "n/a" if value is None else repr(value)


def _plain(value: Scalar) -> str:
    return "" if value is None else str(value)


def _section(section: Section) -> str:
    """A section as Markdown."""
    title = escape(section.title)
    parts = [_wrap(f"**{section.verdict}:** {title}") if section.verdict else f"## {title}"]
    parts += [_wrap(escape(sentence)) for sentence in section.text]
    for each in section.tables:
        parts += [_wrap(f"*{escape(each.heading)}*")] if each.heading else []
        parts.append(_table(each))
    if section.items:
        parts.append("\n".join(_item(item) for item in section.items))
    return "\n\n".join(parts)


def _table(table: Table) -> str:
    """A pipe table. What makes it too wide (a long name) becomes a number that is explained below."""
    lines = [[escape(cell) for cell in line.cells] for line in table.lines]
    headers = [escape(column.name) for column in table.columns]
    moved: list[str] = []
    while len(drawn := _draw(table, headers, lines).splitlines()) and max(map(display_width, drawn)) > WIDTH:
        longest = max((cell for line in lines for cell in line), key=display_width, default="")
        if display_width(longest) <= len(f"({len(moved) + 1})"):
            break
        moved.append(longest)
        lines = [[f"({len(moved)})" if cell == longest else cell for cell in line] for line in lines]
    notes = [*(f"({number}) {full}" for number, full in enumerate(moved, 1)), *map(escape, table.notes)]
    return "\n".join(drawn) + ("\n\n" + "\n".join(_item(note, escaped=True) for note in notes) if notes else "")


def _draw(table: Table, headers: list[str], lines: list[list[str]]) -> str:
    widths = [max(3, *map(display_width, column)) for column in zip(headers, *lines, strict=True)]
    rule = [":" + "-" * (w - 1) if c.text else "-" * (w - 1) + ":" for c, w in zip(table.columns, widths, strict=True)]
    drawn = []
    for cells in (headers, rule, *lines):
        padded = [
            cell + fill if column.text else fill + cell
            for column, cell, width in zip(table.columns, cells, widths, strict=True)
            for fill in [" " * (width - display_width(cell))]
        ]
        drawn.append(f"| {' | '.join(padded)} |")
    return "\n".join(drawn)


def _item(item: str, *, escaped: bool = False) -> str:
    return _wrap(item if escaped else escape(item), first="- ", later="  ")


def _wrap(text: str, *, first: str = "", later: str = "") -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def display_width(text: str) -> int:
    """Columns of a terminal: wide characters take two, combining ones none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _replace(path: Path, content: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode("utf-8", "backslashreplace"))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
