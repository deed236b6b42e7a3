"""Plots: the right numbers in the right places, from OK rows only, as well-formed SVG."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET

import pytest

from harness import plots
from harness.plots import Axis, Figure, Point, Series, figures, line_chart, linear, logarithmic
from harness.records import Row
from harness.tables import Measured
from harness.tests.runs import BUDGETS, builder, decode, decodings, run, timed

SVG = "{http://www.w3.org/2000/svg}"


def parts(figure: Figure | str, kind: str) -> list[ET.Element]:
    """Elements whose class begins with the word."""
    root = ET.fromstring(figure if isinstance(figure, str) else figure.svg)
    return [e for e in root.iter() if e.get("class", "").split()[:1] == [kind]]


def marks(figure: Figure, name: str) -> list[tuple[float, float, str]]:
    """(x, y, value as told) of the markers of a series, those of the legend left out."""
    found = []
    for mark in parts(figure, "mark"):
        told = (mark.findtext(f"{SVG}title") or "").rpartition(": ")
        if told[0] == name:
            x, y = mark.get("transform", "").removeprefix("translate(").rstrip(")").split()
            found.append((float(x), float(y), told[2]))
    return found


def named(rows: list[Row], title: str) -> Figure:
    return next(figure for figure in figures(Measured(rows)) if figure.title == title)


def test_every_plot_of_a_run_is_there_and_well_formed():
    found = figures(Measured(run()))
    titles = [figure.title for figure in found]
    assert titles == [
        "tau against budget",
        "Speed-up against budget",
        "Where a round's time goes",
        "Accepted draft tokens a round, humaneval",
        "Accepted draft tokens a round, heldout_code",
        "Cost of verifying",
        "Building a tree, depth 7, batch 1",
    ]
    for figure in found:
        root = ET.fromstring(figure.svg)
        width, height = map(float, root.get("viewBox", "").split()[2:])
        labels = [e.text for e in root.iter() if e.get("class") == "label"]
        assert len(labels) == 2 or figure.title.startswith("Where")
        for text in root.iter(f"{SVG}text"):
            assert 0 <= float(text.get("x", "")) <= width
            assert 0 <= float(text.get("y", "")) <= height
        for x, y in [map(float, m.get("transform", "")[10:-1].split()) for m in parts(figure, "mark")]:
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_tau_rises_with_the_budget_and_the_chain_stands_apart():
    figure = named(run(), "tau against budget")
    points = marks(figure, "humaneval")
    assert [value for _, _, value in points] == ["2.50", "2.90", "3.10", "3.40"]
    assert [x for x, _, _ in points] == sorted(x for x, _, _ in points)
    assert [y for _, y, _ in points] == sorted((y for _, y, _ in points), reverse=True)
    line = parts(figure, "line")[0].get("d", "")
    assert line.count("L") == len(BUDGETS) - 1  # the chain is no part of the line


def test_equal_values_stand_at_equal_heights_and_the_guide_at_one():
    figure = named(run(), "Speed-up against budget")
    assert [v for _, _, v in marks(figure, "humaneval")] == ["1.60", "2.00", "1.59", "1.11"]
    (guide,) = parts(figure, "guide")
    height = float(guide.get("d", "").split()[1].partition("H")[0])
    tick = next(t for t in parts(figure, "tick") if t.text == "1.0")
    assert float(tick.get("y", "")) == pytest.approx(height + 4)
    assert all(y < height for _, y, _ in marks(figure, "humaneval"))


@pytest.mark.parametrize("status", ["INVALID", "NOT_RUN"])
def test_what_is_wrong_or_did_not_run_is_in_no_plot(status):
    rows = decodings("humaneval")
    rows[-1] = dataclasses.replace(rows[-1], status=status, reason="x")
    assert [v for _, _, v in marks(named(rows, "tau against budget"), "humaneval")] == ["2.50", "2.90", "3.10"]
    builders = [builder(arm, 1e-6, b) for b in (7, 16) for arm in ("heapq", "cpp-heap")]
    builders[-1] = dataclasses.replace(builders[-1], status=status, reason="x")
    assert len(marks(named(builders, "Building a tree, depth 7, batch 1"), "C++ heap")) == 1
    assert figures(Measured([dataclasses.replace(row, status=status, reason="x") for row in run()])) == []


def test_no_rows_one_row_and_extreme_values():
    assert figures(Measured([])) == []
    for seconds in (1e-12, 1e12):
        rows = [decode("x", "ar", 1.0), decode("x", "ddtree-b7", seconds, timing=timed(seconds))]
        rows += [builder("heapq", seconds, b) for b in (7, 16)]
        for figure in figures(Measured(rows)):
            assert "nan" not in figure.svg.lower()
            assert "inf" not in figure.svg.lower()
            ET.fromstring(figure.svg)


def test_a_builder_measured_at_zero_seconds_is_left_out_of_the_logarithmic_plot():
    rows = [builder("heapq", 1e-6, b) for b in (7, 16)] + [builder("cpp-heap", 0.0, b) for b in (7, 16)]
    assert marks(named(rows, "Building a tree, depth 7, batch 1"), "C++ heap") == []


def test_names_are_escaped_and_stay_text():
    figure = named(decodings('<b>&"\x1b'), "tau against budget")
    legend = parts(figure, "legend")
    assert legend[0].text == '<b>&"\\u001b'


def test_axes():
    for high in (1e-9, 0.3, 1.0, 1.13, 2.0, 37.0, 999.0, 1e12):
        axis = linear("y", [0.0, high], start=0.0)
        assert 3 <= len(axis.ticks) <= 9
        assert axis.high >= high
        assert axis.ticks[-1][0] == pytest.approx(axis.high)
        assert len({text for _, text in axis.ticks}) == len(axis.ticks)
    assert linear("y", [1.0], start=1.0).high > 1.0
    axis = logarithmic("y", [0.88, 164.0])
    assert [text for _, text in axis.ticks] == ["1", "2", "5", "10", "20", "50", "100", "200"]
    assert axis.place(axis.low) == 0
    assert axis.place(axis.high) == pytest.approx(1)
    assert axis.place((axis.low * axis.high) ** 0.5) == pytest.approx(0.5)


def test_whiskers_span_the_interval():
    y = Axis("y", 0.0, 10.0, ((0.0, "0"), (10.0, "10")))
    x = Axis("x", 0.0, 2.0, ((1.0, "1"),))
    svg = line_chart("t", x, y, [Series("s", (Point(1.0, 5.0, 2.5, 7.5),), 0)])
    (whisker,) = parts(svg, "whisker")
    start, end = whisker.get("d", "").split()[1].split("V")
    zero, ten = (float(t.get("y", "")) - 4 for t in parts(svg, "tick")[:2])
    assert float(start) == pytest.approx(zero + (ten - zero) * 0.25, abs=0.02)
    assert float(end) == pytest.approx(zero + (ten - zero) * 0.75, abs=0.02)


def test_stage_bars_fill_their_line():
    svg = plots.stacked_bars("t", ["draft", "verify"], [("tree", [0.25, 0.75])])
    bars = parts(svg, "bar")
    widths = [float(bar.get("width", "")) for bar in bars]
    assert widths[1] == pytest.approx(3 * widths[0], abs=0.05)
    assert float(bars[1].get("x", "")) + widths[1] == pytest.approx(plots.WIDTH - plots.RIGHT, abs=0.05)
    assert [t.text for t in parts(svg, "inbar")] == ["25", "75"]


def test_the_same_rows_give_the_same_bytes():
    assert [f.svg for f in figures(Measured(run()))] == [f.svg for f in figures(Measured(run()))]
