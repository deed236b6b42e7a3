"""Plots of a run as inline SVG, written by hand: small, the same bytes from the same rows, no library.

Colours come from the page's style sheet (classes c0..c7), so that they follow light and dark; every series has its own
marker as well, so that colour is never alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from harness import attention_report
from harness.attention_report import rows_of
from harness.blocks import SHARED, headline
from harness.details import acceptance, stage_names, stage_shares, verify_cost
from harness.records import Row
from harness.stats import Number, trim
from harness.tables import (
    Measured,
    arm_label,
    budget_of,
    builder_input,
    dataset_of,
    faster,
    grouped,
    median,
    method,
    metric,
    visible_text,
)

WIDTH, HEIGHT = 560, 330
LEFT, RIGHT, BOTTOM = 58, 14, 46
COLOURS = 8
CHAIN = "chain"
FEWEST_COUNTS = 4  # of rows, for a plot of attention


@dataclass(frozen=True)
class Figure:
    """title: what is shown; caption: how to read it; svg: one <svg> element."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Point:
    """x: place on the axis (number or index of a category). low, high: ends of the whisker."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """points: joined by a line where `joined` says so. colour: number of the class."""

    name: str
    points: tuple[Point, ...]
    colour: int
    joined: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Axis:
    """ticks: (place, text). log: the scale is logarithmic."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        low, high, at = (
            (math.log(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return (at - low) / (high - low)


def figures(measured: Measured) -> list[Figure]:
    """All plots that the rows give."""
    return [
        *_against_budget(measured),
        *_stages(measured),
        *_acceptance(measured),
        *_curve(measured),
        *_attention(measured),
        *_builders(measured),
    ]


def _against_budget(measured: Measured) -> list[Figure]:
    """tau, and the speed-up over AR, against the budget: a line for each data set, the chain at the left."""
    found = []
    for heading, members in grouped(headline(measured), measured, SHARED).items():
        rows = [r for r in members if r.status == "OK" and method(r) in (CHAIN, "tree")]
        budgets = sorted({budget_of(r) for r in rows if method(r) == "tree"})
        places = {CHAIN: 0.0, **{str(b): float(i) for i, b in enumerate(budgets, 1)}}
        colours = {name: i for i, name in enumerate(dict.fromkeys(map(dataset_of, members)))}
        ticks = tuple((place, name) for name, place in places.items())
        x = Axis("node budget of the tree", -0.4, len(budgets) + 0.4, ticks)

        def lines(
            value: Callable[[Row], Number],
            rows: Sequence[Row] = rows,
            places: dict[str, float] = places,
            colours: dict[str, int] = colours,
        ) -> list[Series]:
            made = []
            for name, colour in colours.items():
                of_set = [r for r in rows if dataset_of(r) == name]
                points, joined = [], []
                for row in sorted(of_set, key=lambda r: (method(r) != CHAIN, budget_of(r))):
                    number = value(row)
                    if number.value is not None:
                        place = places[CHAIN if method(row) == CHAIN else str(budget_of(row))]
                        points.append(Point(place, number.value, number.low, number.high))
                        joined.append(method(row) != CHAIN)
                if points:
                    made.append(Series(name, tuple(points), colour, tuple(joined)))
            return made

        taus = lines(lambda row: metric(row, "tau"))
        gains = lines(lambda row: faster(measured.base(row), row))
        if taus:
            y = linear("τ, tokens per target forward", [1.0, *_values(taus)], start=1.0)
            caption = f"Acceptance length; at the left the chain with the same drafter. {heading}."
            found.append(Figure("tau against budget", caption, line_chart("tau against budget", x, y, taus)))
        if gains:
            y = linear("times the speed of AR", [0.0, 1.0, *_values(gains)], start=0.0)
            caption = f"Speed-up over plain decoding with its 95 % interval; 1 = as fast as AR. {heading}."
            svg = line_chart("speed-up against budget", x, y, gains, guide=(1.0, "AR"))
            found.append(Figure("Speed-up against budget", caption, svg))
    return found


def _stages(measured: Measured) -> list[Figure]:
    rows = measured.block("stage")
    found = []
    for heading, members in grouped(rows, measured, SHARED).items():
        bars = [(f"{dataset_of(r)} {arm_label(r)}", shares) for r in members if (shares := stage_shares(r))]
        if bars:
            names = stage_names(members)
            svg = stacked_bars("stage shares", names, [(n, [s.get(stage, 0.0) for stage in names]) for n, s in bars])
            found.append(
                Figure("Where a round's time goes", f"Share of each stage in the decode time. {heading}.", svg)
            )
    return found


def _acceptance(measured: Measured) -> list[Figure]:
    """For each data set: the chain, the smallest, the middle and the largest tree."""
    found = []
    for heading, members in grouped(headline(measured), measured, SHARED).items():
        for name in dict.fromkeys(map(dataset_of, members)):
            rows = [r for r in members if dataset_of(r) == name and method(r) in (CHAIN, "tree") and acceptance(r)]
            rows = sorted((r for r in rows if r.status == "OK"), key=lambda r: (method(r) != CHAIN, budget_of(r)))
            trees = [r for r in rows if method(r) == "tree"]
            chosen = [r for r in rows if method(r) == CHAIN]
            chosen += [trees[i] for i in sorted({0, len(trees) // 2, len(trees) - 1}) if trees]
            if chosen:
                title = f"Accepted draft tokens a round, {name}"
                bars = [(arm_label(r), acceptance(r)) for r in chosen]
                caption = f"Share of the rounds that accepted 0, 1, 2 ... draft tokens. {heading}."
                found.append(Figure(title, caption, grouped_bars(title, "draft tokens accepted in a round", bars)))
    return found


def _curve(measured: Measured) -> list[Figure]:
    series = []
    groups = grouped(measured.block("curve"), measured, {*SHARED, "rows"})
    for number, (heading, members) in enumerate(groups.items()):
        points = []
        for row in members:
            cost, n = verify_cost(measured, row), row.params.get("rows")
            if row.status == "OK" and cost.value is not None and type(n) is int:
                points.append(Point(float(n), cost.value, cost.low, cost.high))
        if points:
            series.append(Series(heading, tuple(points), number % COLOURS))
    if not series:
        return []
    counts = sorted({point.x for s in series for point in s.points})
    ticks = tuple((n, f"{n:g}") for n in counts)
    x = Axis("N, rows verified at once", 0.0, counts[-1] * 1.04 or 1.0, _apart(ticks, counts[-1] / 14))
    y = linear("T_verify(N) / T_AR", [0.0, *_values(series)], start=0.0)
    caption = (
        "Time for N rows over the time for one. A tree of N-1 nodes pays only where its tau lies above this curve."
    )
    return [Figure("Cost of verifying", caption, line_chart("cost of verifying", x, y, series))]


def _attention(measured: Measured) -> list[Figure]:
    """The engine's kernels against FlashMLA: time against N, a figure a length, where there are enough N for a line."""
    shown = ("gpu-wgmma", "gpu-portable", "flashmla", "flashmla-tree")
    rows = [row for row in measured.block("attention") if median(row).value and row.params["attention"] in shown]
    found = []
    for heading, members in grouped(rows, measured, attention_report.OWN - {"prefix"}).items():
        counts = sorted({rows_of(row) for row in members})
        if len(counts) < FEWEST_COUNTS:
            continue
        series = []
        for colour, system in enumerate(shown):
            of_system = sorted((row for row in members if row.params["attention"] == system), key=rows_of)
            points = [_time_point(counts.index(rows_of(row)), median(row)) for row in of_system]
            if points:
                series.append(Series(attention_report.label(of_system[0]), tuple(points), colour))
        ticks = tuple((float(i), str(n)) for i, n in enumerate(counts))
        x = Axis("N, rows of the tree", -0.4, len(counts) - 0.6, ticks)
        y = logarithmic("µs (log scale)", _values(series))
        title = f"Verify attention over {members[0].params['prefix']} cached rows"
        caption = f"Median time of one layer's call; whiskers: quartiles. {heading}."
        found.append(Figure(title, caption, line_chart(title, x, y, series)))
    return found


def _builders(measured: Measured) -> list[Figure]:
    shapes: dict[tuple[str, ...], list[Row]] = {}
    for row in measured.block("builder"):
        if median(row).value:
            shape = (*(str(row.params.get(name)) for name in ("depth_limit", "batch")), builder_input(row))
            shapes.setdefault(shape, []).append(row)
    found = []
    for (depth, batch, source), rows in shapes.items():
        budgets = sorted({budget_of(r) for r in rows})
        if len(budgets) < 2:
            continue
        arms = list(dict.fromkeys(row.arm for row in measured.block("builder")))
        series = []
        for arm in arms:
            of_arm = sorted((r for r in rows if r.arm == arm), key=budget_of)
            points = [_time_point(budgets.index(budget_of(r)), median(r)) for r in of_arm]
            if points:
                series.append(Series(arm_label(of_arm[0]), tuple(points), arms.index(arm) % COLOURS))
        ticks = tuple((float(i), str(b)) for i, b in enumerate(budgets))
        x = Axis("node budget of the tree", -0.4, len(budgets) - 0.6, ticks)
        y = logarithmic("µs per tree (log scale)", _values(series))
        recorded = source == "lists"
        title = f"Building a tree, depth {depth}, batch {batch}" + ("" if recorded else f", from {source}")
        of_what = "on recorded lists of real rounds" if recorded else "with the top-k before it"
        caption = f"Median time per tree {of_what}; whiskers: quartiles."
        found.append(Figure(title, caption, line_chart(title, x, y, series)))
    return found


def _time_point(place: int, number: Number) -> Point:
    assert number.value is not None
    low, high = (None if end is None else end * 1e6 for end in (number.low, number.high))
    return Point(float(place), number.value * 1e6, low, high)


def linear(label: str, values: Iterable[float], *, start: float) -> Axis:
    """An axis from `start` to a round number above all values, with 4 to 8 ticks."""
    high = max(values)
    span = high - start or 1.0
    step = 10.0 ** math.floor(math.log10(span))
    step = next(s for s in (step / 10, step / 5, step / 2, step, 2 * step, 5 * step) if span / s <= 7)
    count = math.ceil(span * 1.02 / step)
    ticks = tuple((start + i * step, trim(start + i * step, step) or "0") for i in range(count + 1))
    return Axis(label, start, start + count * step, ticks)


def logarithmic(label: str, values: Iterable[float]) -> Axis:
    """A logarithmic axis around all values, which must be positive, with ticks at 1, 2 and 5 of each decade."""
    held = list(values)
    low, high = min(held) / 1.3, max(held) * 1.3
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= m * 10.0**d <= high]
    return Axis(label, low, high, tuple((t, f"{t:g}") for t in ticks), log=True)


def line_chart(
    title: str, x: Axis, y: Axis, series: Sequence[Series], *, guide: tuple[float, str] | None = None
) -> str:
    """Lines with markers and whiskers. guide: a dashed line at a value, with its name."""
    top, parts = _legend([s.name for s in series], [s.colour for s in series])
    across, down = _scales(x, y, top)
    parts += _frame(x, y, top)
    if guide is not None:
        at = down(guide[0])
        parts.append(f'<path class="guide" d="M{LEFT} {_n(at)}H{WIDTH - RIGHT}"/>')
        parts.append(_text(WIDTH - RIGHT - 4, at - 5, guide[1], "tick", "end"))
    for number, s in enumerate(series):
        shift = 5.0 * (number - (len(series) - 1) / 2)  # so that whiskers of several series stand side by side
        places = [(across(p.x) + shift, down(p.y)) for p in s.points]
        joined = s.joined or (True,) * len(places)
        line = [place for place, is_joined in zip(places, joined, strict=True) if is_joined]
        if len(line) > 1:
            parts.append(f'<path class="line c{s.colour}" d="M{"L".join(f"{_n(a)} {_n(b)}" for a, b in line)}"/>')
        for point, (a, b) in zip(s.points, places, strict=True):
            if point.low is not None and point.high is not None:
                ends = (down(max(point.low, y.low)), down(min(point.high, y.high)))
                parts.append(f'<path class="whisker c{s.colour}" d="M{_n(a)} {_n(ends[0])}V{_n(ends[1])}"/>')
            parts.append(_marker(a, b, s.colour, f"{s.name}: {trim(point.y, digits=3)}"))
    return _svg(title, parts)


def grouped_bars(title: str, x_label: str, bars: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Bars for 0, 1, 2 ... side by side for each name; heights are shares of 1, shown in per cent."""
    count = max(len(heights) for _, heights in bars)
    colours = [i % COLOURS for i in range(len(bars))]
    top, parts = _legend([name for name, _ in bars], colours)
    x = Axis(x_label, -0.5, count - 0.5, tuple((float(i), str(i)) for i in range(count)))
    y = linear("% of rounds", [100 * h for _, heights in bars for h in heights], start=0.0)
    across, down = _scales(x, y, top)
    parts += _frame(x, y, top)
    width = 0.8 / len(bars)
    for number, ((name, heights), colour) in enumerate(zip(bars, colours, strict=True)):
        for i, height in enumerate(heights):
            left, right = (across(i - 0.4 + (number + side) * width) for side in (0, 1))
            head = down(100 * height)
            size = f'width="{_n(right - left - 1)}" height="{_n(down(0.0) - head)}"'
            tip = f"<title>{_escape(f'{name}, {i} accepted: {100 * height:.1f} %')}</title>"
            parts.append(f'<rect class="bar c{colour}" x="{_n(left)}" y="{_n(head)}" {size}>{tip}</rect>')
    return _svg(title, parts)


def stacked_bars(title: str, names: Sequence[str], bars: Sequence[tuple[str, Sequence[float]]]) -> str:
    """One bar of full width for each label, cut into named shares of 1; shares above 6 % carry their number."""
    colours = [i % COLOURS for i in range(len(names))]
    top, parts = _legend(names, colours)
    left, pitch = 12 + 6.6 * max(len(label) for label, _ in bars), 24
    for row, (label, shares) in enumerate(bars):
        y, x = top + row * pitch, left
        parts.append(_text(left - 8, y + 12.5, label, "tick", "end"))
        for name, share, colour in zip(names, shares, colours, strict=True):
            width = share * (WIDTH - RIGHT - left)
            tip = f"<title>{_escape(f'{label}, {name}: {100 * share:.1f} %')}</title>"
            size = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{pitch - 7}"'
            parts.append(f'<rect class="bar c{colour}" {size}>{tip}</rect>')
            if share > 0.06:
                parts.append(_text(x + width / 2, y + 12.5, f"{100 * share:.0f}", "inbar", "middle"))
            x += width
    return _svg(title, parts, height=top + len(bars) * pitch + 4)


def _legend(names: Sequence[str], colours: Sequence[int]) -> tuple[float, list[str]]:
    """(first y below the legend, its parts): names with their markers, in as many lines as they need."""
    x, y, parts = float(LEFT), 12.0, []
    for name, colour in zip(names, colours, strict=True):
        width = 26 + 6.6 * len(name)
        if x + width > WIDTH and x > LEFT:
            x, y = float(LEFT), y + 18
        parts += [_marker(x + 5, y, colour, name), _text(x + 14, y + 4, name, "legend", "start")]
        x += width
    return y + 18, parts


def _frame(x: Axis, y: Axis, top: float) -> list[str]:
    """Grid, ticks and labels."""
    across, down = _scales(x, y, top)
    parts = [f'<path class="grid" d="M{LEFT} {_n(down(at))}H{WIDTH - RIGHT}"/>' for at, _ in y.ticks]
    parts += [_text(LEFT - 7, down(at) + 4, text, "tick", "end") for at, text in y.ticks]
    parts += [_text(across(at), HEIGHT - BOTTOM + 16, text, "tick", "middle") for at, text in x.ticks]
    parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x.label, "label", "middle"))
    middle = (top + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 14 {_n(middle)})"'
    parts.append(f'<text class="label" x="14" y="{_n(middle)}" text-anchor="middle" {turned}>{_escape(y.label)}</text>')
    return parts


def _scales(x: Axis, y: Axis, top: float) -> tuple[Callable[[float], float], Callable[[float], float]]:
    return (
        lambda value: LEFT + x.place(value) * (WIDTH - RIGHT - LEFT),
        lambda value: HEIGHT - BOTTOM - y.place(value) * (HEIGHT - BOTTOM - top),
    )


def _marker(x: float, y: float, colour: int, tip: str) -> str:
    """A small shape of its own for every colour."""
    shapes = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", "M-3.5-3.5h7v7h-7Z", "M0-4.6L4.4 3.4H-4.4Z", "M0-5L5 0L0 5L-5 0Z")
    title = f"<title>{_escape(tip)}</title>"
    shape = shapes[colour % len(shapes)]
    return f'<path class="mark c{colour}" transform="translate({_n(x)} {_n(y)})" d="{shape}">{title}</path>'


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{_escape(text)}</text>'


def _svg(title: str, parts: Sequence[str], height: float = HEIGHT) -> str:
    head = f'<svg class="plot" viewBox="0 0 {WIDTH} {_n(height)}" role="img" xmlns="http://www.w3.org/2000/svg">'
    return "\n".join([head, f"<title>{_escape(title)}</title>", *parts, "</svg>"])


def _values(series: Iterable[Series]) -> list[float]:
    """All values and ends of whiskers."""
    points = [point for s in series for point in s.points]
    return [v for p in points for v in (p.y, p.low, p.high) if v is not None]


def _apart(ticks: Sequence[tuple[float, str]], least: float) -> tuple[tuple[float, str], ...]:
    """The ticks without those that stand too close to the one before."""
    kept: list[tuple[float, str]] = []
    for tick in ticks:
        if not kept or tick[0] - kept[-1][0] >= least:
            kept.append(tick)
    return tuple(kept)


def _n(value: float) -> str:
    """A coordinate with at most two digits behind the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _escape(text: str) -> str:
    return visible_text(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
