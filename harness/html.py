"""The report as one HTML file that needs nothing else: style, plots and draft trees stand in it.

It can be read without scripts and asks nobody for anything; a short script adds the keyboard to the draft trees.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape as _escape
from pathlib import Path

from harness.blocks import blocks
from harness.compare import Comparison
from harness.details import details
from harness.records import Row
from harness.tables import Measured, Section, Table, visible

ASSETS = Path(__file__).parent / "assets"


def page(rows: Iterable[Row], comparison: Comparison | None = None) -> str:
    measured = Measured(rows)
    parts = [_section(section) for section in [*blocks(measured, comparison), *details(measured)]]
    return "\n".join(["<!doctype html>", *parts]) + "\n"


def escape(text: str) -> str:
    """A string for HTML; what cannot be seen is shown as its number."""
    return _escape("".join(c if c == "\n" else visible(c) for c in text)).replace("\n", "<br>")


def _section(section: Section) -> str:
    return f"<h2>{escape(section.title)}</h2>" + "".join(map(_table, section.tables))


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column.name)}</th>" for column in table.columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in line.cells) + "</tr>" for line in table.lines)
    return f"<table><tr>{head}</tr>{body}</table>"
