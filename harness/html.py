"""The report as one HTML file that needs nothing else: style, plots and draft trees stand in it.

It can be read without scripts and asks nobody for anything: its content security policy forbids every request. A short
script adds the list of rounds and the keyboard to the draft trees.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape as escape_html
from pathlib import Path

from harness import treeview
from harness.blocks import blocks
from harness.compare import Comparison
from harness.details import details
from harness.plots import Figure, figures
from harness.records import Row
from harness.tables import Measured, Section, Table, visible_text

ASSETS = Path(__file__).parent / "assets"
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
WORDS = {
    "OK": "ok",
    "SLOWER": "slower",
    "no gain": "nogain",
    "INVALID": "invalid",
    "not run": "notrun",
    "NO": "invalid",
}


def page(rows: Iterable[Row], comparison: Comparison | None = None) -> str:
    """The whole document."""
    measured = Measured(rows)
    first, *main = blocks(measured, comparison)
    drawn, trees = figures(measured), treeview.trees(measured)
    parts: list[tuple[str, str]] = [(section.title, _section(section)) for section in main]
    if drawn:
        parts.append(("Plots", f'<div class="plots">{"".join(map(_figure, drawn))}</div>'))
    if trees:
        parts.append(("Draft trees", f"{_TREE_TEXT}\n{trees}"))
    parts += [(section.title, _section(section)) for section in details(measured)]
    links = "".join(f'<a href="#{_anchor(title)}">{escape(_short(title))}</a>' for title, _ in parts)
    body = "\n".join(
        f'<section id="{_anchor(t)}">\n<h2>{escape(t)}</h2>\n{content}\n</section>' for t, content in parts
    )
    style, script = ((ASSETS / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(f"{first.verdict}: DDTree harness report")}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>DDTree harness report</h1>
{_verdict(first)}
<nav>{links}</nav>
</header>
<main>
{body}
</main>
<footer>Raw rows: <a href="rows.jsonl">rows.jsonl</a>, one JSON object a line. As a table:
<a href="report.csv">report.csv</a>. As Markdown: <a href="report.md">report.md</a>.</footer>
<script>
{script}</script>
</body>
</html>
"""


def escape(text: str) -> str:
    """A string for HTML; what cannot be seen is shown as its number, line ends as <br>."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "<br>".join(escape_html(visible_text(line)) for line in lines)


def pretty(header: str) -> str:
    """A header in the signs of print: µs, τ, ×."""
    header = re.sub(r"\bus\b", "µs", header)
    return re.sub(r"^x (?=\w)", "× ", re.sub(r"\btau\b", "τ", header))


def _verdict(section: Section) -> str:
    kind = {"PASSED": "ok", "FAILED": "invalid"}.get(section.verdict, "notrun")
    items = "".join(f"<li>{escape(item)}</li>" for item in section.items)
    listed = f"\n<ul>{items}</ul>" if items else ""
    return f'<p class="verdict {kind}"><strong>{escape(section.verdict)}</strong> {escape(section.title)}</p>{listed}'


def _section(section: Section) -> str:
    parts = [f"<p>{escape(sentence)}</p>" for sentence in section.text]
    parts += map(_table, section.tables)
    if section.items:
        parts.append("<ul>" + "\n".join(f"<li>{escape(item)}</li>" for item in section.items) + "</ul>")
    return "\n".join(parts)


def _table(table: Table) -> str:
    kinds = ["t" if column.text else "" for column in table.columns]
    head = "".join(
        f'<th scope="col"{_class(kind)}>{escape(pretty(column.name))}</th>'
        for column, kind in zip(table.columns, kinds, strict=True)
    )
    body = "\n".join(
        f"<tr{_class(line.mark)}>"
        + "".join(f"<td{_class(kind)}>{_cell(text)}</td>" for text, kind in zip(line.cells, kinds, strict=True))
        + "</tr>"
        for line in table.lines
    )
    caption = f"<caption>{escape(table.heading)}</caption>" if table.heading else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    drawn = f"<table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
    return f'<div class="scroll">{drawn}</div>' + (f'\n<ul class="notes">{notes}</ul>' if notes else "")


def _cell(text: str) -> str:
    """A cell; words of status as badges."""
    return f'<span class="word {WORDS[text]}">{escape(text)}</span>' if text in WORDS else escape(text)


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _figure(figure: Figure) -> str:
    caption = f"<figcaption><b>{escape(pretty(figure.title))}</b> {escape(figure.caption)}</figcaption>"
    return f"<figure>{caption}\n{figure.svg}\n</figure>\n"


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _short(title: str) -> str:
    """A title for the list of links: what stands before the first comma or colon."""
    return re.split(r"[,:(]", title)[0].strip()


_TREE_TEXT = """<p>Rounds as they were: token texts with their path scores (sums of log-probabilities), the
<span class="key acc">accepted path</span> and the <span class="key bonus">bonus token</span>. Paler nodes are less
likely. Point at a node for its facts.</p>"""
