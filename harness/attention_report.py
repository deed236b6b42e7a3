"""How rows of attention are shown: a table beside the roofline and FlashMLA."""

from __future__ import annotations

from harness.blocks import cell, explain, mark
from harness.records import Row
from harness.tables import (
    NONE,
    Line,
    Measured,
    Notes,
    Section,
    Table,
    arm_label,
    columns,
    faster,
    grouped,
    median,
    metric,
    show,
    show_speed,
    status,
)

OWN = {"attention", "prefix", "rows", "dtype", "mask", "software"}  # not told in headings


def label(row: Row) -> str:
    """Name of a row's attention for people."""
    names = {
        "gpu-wgmma": "wgmma",
        "gpu-portable": "mma.sync",
        "gpu-float32": "float32",
        "flashmla": "FlashMLA",
        "flashmla-tree": "FlashMLA + tree",
        "unfused": "two products",
        "sdpa": "SDPA",
    }
    return names.get(str(row.params.get("attention")), arm_label(row))


def section(measured: Measured) -> Section:
    """Every system at every number of rows, beside the roofline and FlashMLA's dense kernel."""
    tables = []
    headers = ("L", "N", "<attention", "us", "TFLOP/s", "GB/s", "% roof", "x FlashMLA", "<status")
    for heading, members in grouped(measured.block("attention"), measured, OWN).items():
        notes, lines = Notes(), []
        for row in sorted(members, key=lambda row: (_prefix(row), rows_of(row))):
            explain(notes, row, label(row))
            if row.params.get("software"):
                notes.add(label(row), f"{row.params['software']}")
            flashmla = measured.arm(row, row.against) if row.against else None
            lines.append(
                Line(
                    (
                        *(str(row.params.get(name, NONE)) for name in ("prefix", "rows")),
                        label(row),
                        show_speed(row, median(row), 1e6),
                        *(cell(row, metric(row, name)) for name in ("tflop_per_s", "gb_per_s")),
                        cell(row, metric(row, "roofline_share"), lambda number: show(number, 100)),
                        cell(row, faster(flashmla, row)) if flashmla is not None else NONE,
                        status(row),
                    ),
                    mark(measured, row),
                )
            )
        tables.append(Table(heading, columns(*headers), tuple(lines), notes.sentences()))
    return Section("Verify attention of a tree's N rows over L cached rows", tables=tuple(tables))


def rows_of(row: Row) -> int:
    """N, 0 of a row that knows none."""
    value = row.params.get("rows")
    return value if type(value) is int else 0


def _prefix(row: Row) -> int:
    value = row.params.get("prefix")
    return value if type(value) is int else 0
