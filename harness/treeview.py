"""Draft trees of chosen rounds, drawn as SVG: token texts, scores, the accepted path and the bonus token.

Each tree can be read as it stands, in a <details> element. The page's script adds a list of rounds, arrow keys from
node to node, and a slider that grows the tree in the order in which its nodes were chosen.
"""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass
from html import escape

from harness.records import RecordedTree, Row
from harness.tables import Measured, arm_label, visible_text

BOX, PITCH, ROW, HIGH = 118, 142, 23, 18  # width of a node, distance of depths, distance of leaves, height of a node
MARGIN = 8
TEXT_COLUMNS = 9
SHOWN = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


@dataclass(frozen=True)
class Node:
    """A node in its place. number: its index in the tree, -1 for the bonus token, which hangs below the last accepted.

    parent: index of the parent, -1 for the root.
    """

    number: int
    parent: int
    x: float
    y: float


def trees(measured: Measured) -> str:
    """All recorded trees as <details> elements, the first one open; "" without any."""
    held = [(row, tree) for row in measured.block("decode") for tree in row.trees]
    parts = []
    for number, (row, tree) in enumerate(held):
        label = escape(_label(row, tree))
        opened = " open" if number == 0 else ""
        drawing = f'<div class="scroll">\n{draw(tree)}\n</div>'
        parts.append(f'<details class="tree"{opened}>\n<summary>{label}</summary>\n{drawing}\n</details>')
    return "\n".join(parts)


def draw(tree: RecordedTree) -> str:
    """One tree as an <svg>, the root at the left, one column for each depth, likely children above unlikely ones."""
    accepted = accepted_nodes(tree)
    nodes = layout(tree)
    places = {node.number: node for node in nodes}
    width = max(node.x for node in nodes) + BOX + MARGIN
    height = max(node.y for node in nodes) + HIGH + MARGIN
    edges, boxes = [], []
    for node in nodes:
        kind = "bonus" if node.number < 0 else "acc" if node.number in accepted else ""
        if node.parent >= 0:
            edges.append(_edge(places[node.parent], node, kind))
        boxes.append(_bonus(tree, node) if node.number < 0 else _box(tree, node, kind))
    title = f"<title>{escape(visible_text(f'Draft tree of {tree.prompt}, round {tree.round}'))}</title>"
    head = (
        f'<svg class="draft" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" role="group" '
        f'xmlns="http://www.w3.org/2000/svg" data-count="{len(tree.tokens)}">'
    )
    return "\n".join([head, title, *edges, *boxes, "</svg>"])


def layout(tree: RecordedTree) -> list[Node]:
    """Every node and the bonus token in its place: leaves on lines of their own, parents halfway between children."""
    children: dict[int, list[int]] = {}
    for number, parent in enumerate(tree.parents):
        if number:
            children.setdefault(parent, []).append(number)
    last = max(accepted_nodes(tree), key=lambda i: tree.depths[i])
    children[last] = [-1, *children.get(last, [])]
    y: dict[int, float] = {}
    lines = 0
    stack = [(0, False)]
    while stack:
        number, seen = stack.pop()
        below = children.get(number, [])
        if not below:
            y[number] = MARGIN + lines * ROW
            lines += 1
        elif seen:
            y[number] = (y[below[0]] + y[below[-1]]) / 2
        else:
            stack.append((number, True))
            stack += [(child, False) for child in reversed(below)]
    numbers = [number for number in range(len(tree.tokens)) if number in y]
    nodes = [Node(i, tree.parents[i] if i else -1, MARGIN + tree.depths[i] * PITCH, y[i]) for i in numbers]
    return [*nodes, Node(-1, last, MARGIN + (tree.depths[last] + 1) * PITCH, y[-1])]


def accepted_nodes(tree: RecordedTree) -> set[int]:
    """The accepted path, the root included."""
    return {0, *(i for i in tree.accepted if 0 <= i < len(tree.tokens))}


def shown_text(text: str) -> str:
    """A token's text with its blanks made visible."""
    return visible_text("".join(SHOWN.get(c, c) for c in text))


def clipped(text: str, columns: int = TEXT_COLUMNS) -> str:
    """Visible text that fits a node; "…" stands for the rest. Wide characters take two columns."""
    shown = shown_text(text)
    taken = 0
    for i, c in enumerate(shown):
        taken += 2 if unicodedata.east_asian_width(c) in "WF" else 1
        if taken > columns:
            return shown[: max(1, i - 1)] + "…"
    return shown


def _label(row: Row, tree: RecordedTree) -> str:
    nodes, accepted = len(tree.tokens) - 1, len(accepted_nodes(tree)) - 1
    block, at = row.params.get("block_size", "?"), row.params.get("temperature")
    draw = "" if not at else f", T = {at}"
    return visible_text(
        f"{tree.prompt}, {arm_label(row)}, block {block}{draw}, round {tree.round}: "
        f"{accepted} of {nodes} nodes accepted, then the bonus token"
    )


def _edge(parent: Node, child: Node, kind: str) -> str:
    x1, y1, x2, y2 = parent.x + BOX, parent.y + HIGH / 2, child.x, child.y + HIGH / 2
    middle = (x1 + x2) / 2
    path = f"M{x1:g} {y1:g}C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}"
    return f'<path class="edge {kind}" data-i="{child.number}" d="{path}"/>'


def _box(tree: RecordedTree, node: Node, kind: str) -> str:
    """A node: its text at the left, its score at the right. data-*: for the script; the title: for the mouse."""
    i = node.number
    text, score = tree.texts[i], tree.scores[i]
    told = "n/a" if score is None else f"{round(score, 2) + 0.0:.2f}"
    parts = [f"token {tree.tokens[i]}", f"depth {tree.depths[i]}"]
    if i:
        parts += [f"node {i} in order of choice", f"score {told}"]
        parts += [] if score is None else [f"probability of the path {_percent(score)}"]
        before = tree.scores[tree.parents[i]]
        if score is not None and before is not None:
            parts.append(f"of this step {_percent(score - before)}")
    parts.append("root" if i == 0 else "accepted" if kind else "not accepted")
    weak = "" if i == 0 or kind or score is None else f' style="opacity:{0.7 + 0.3 * math.exp(score / 4):.2f}"'
    return _group(node, f"n {kind}", text, ", ".join(parts), told if i else "root", weak)


def _bonus(tree: RecordedTree, node: Node) -> str:
    facts = f"token {tree.bonus}, bonus token: the target's own choice after the accepted path"
    return _group(node, "n bonus", tree.bonus_text, facts, "bonus", "")


def _group(node: Node, kind: str, text: str, facts: str, side: str, style: str) -> str:
    shown = escape(shown_text(text))
    return (
        f'<g class="{kind.strip()}" tabindex="-1" data-i="{node.number}" data-p="{node.parent}" data-t="{shown}" '
        f'data-f="{escape(facts)}" transform="translate({node.x:g} {node.y:g})"{style}>'
        f"<title>{shown}: {escape(facts)}</title>"
        f'<rect width="{BOX}" height="{HIGH}" rx="4"/><text x="6" y="13">{escape(clipped(text))}</text>'
        f'<text class="score" x="{BOX - 5}" y="13" text-anchor="end">{escape(side)}</text></g>'
    )


def _percent(log_probability: float) -> str:
    share = math.exp(min(log_probability, 0.0)) * 100
    return f"{share:.1f} %" if share >= 0.1 else "below 0.1 %"
