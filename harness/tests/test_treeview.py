"""Draft trees: every node drawn once, in its place, with its text, its score and what became of it."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from harness.records import RecordedTree
from harness.tables import Measured
from harness.tests.runs import decode, tree
from harness.treeview import BOX, HIGH, clipped, draw, layout, shown_text, trees
from reference.tree import build_tree

SVG = "{http://www.w3.org/2000/svg}"


def groups(drawn: str) -> dict[str, ET.Element]:
    """The nodes of a drawing by index."""
    return {e.get("data-i", ""): e for e in ET.fromstring(drawn).iter(f"{SVG}g")}


def real_tree(budget: int, depth_limit: int = 7, seed: int = 0) -> RecordedTree:
    """A tree of the reference, with the path to its last node accepted."""
    lp = -np.sort(np.random.default_rng(seed).exponential(2.0, (depth_limit, 16)).astype(np.float32), axis=1)
    ids = np.tile(np.arange(16, dtype=np.int32), (depth_limit, 1))
    made = build_tree(lp, ids, budget, 1)
    path = [len(made.tokens) - 1]
    while path[0]:
        path.insert(0, int(made.parents[path[0]]))
    return tree(
        tokens=tuple(made.tokens.tolist()),
        texts=tuple(f" t{token}" for token in made.tokens.tolist()),
        parents=tuple(made.parents.tolist()),
        depths=tuple(made.depths.tolist()),
        scores=tuple(made.scores.tolist()),
        accepted=tuple(path),
    )


@pytest.mark.parametrize(("budget", "depth_limit"), [(0, 7), (1, 1), (7, 7), (64, 7), (128, 15), (1024, 31)])
def test_every_node_has_a_place_of_its_own(budget, depth_limit):
    recorded = real_tree(budget, depth_limit)
    nodes = layout(recorded)
    assert sorted(node.number for node in nodes) == list(range(-1, len(recorded.tokens)))
    places = {node.number: node for node in nodes}
    for node in nodes:
        if node.parent >= 0:
            assert node.x >= places[node.parent].x + BOX
    columns: dict[float, list[float]] = {}
    for node in nodes:
        columns.setdefault(node.x, []).append(node.y)
    for heights in columns.values():
        assert np.all(np.diff(sorted(heights)) >= HIGH)
    drawn = groups(draw(recorded))
    assert len(drawn) == len(nodes)


def test_node_text_score_and_fate():
    drawn = groups(draw(tree()))
    assert [drawn[i].get("class") for i in ("0", "1", "2", "3", "-1")] == ["n acc", "n", "n acc", "n acc", "n bonus"]
    assert [text.text for text in drawn["3"].iter(f"{SVG}text")] == ["␣n", "-3.75"]
    assert [text.text for text in drawn["-1"].iter(f"{SVG}text")] == ["umbers", "bonus"]
    assert drawn["-1"].get("data-p") == "3"
    assert drawn["0"].get("data-t") == "⏎␣␣␣␣"
    facts = drawn["3"].get("data-f", "")
    assert facts == "token 13, depth 2, node 3 in order of choice, score -3.75, probability of the path 2.4 %, of this step 15.3 %, accepted"  # fmt: skip  # noqa: E501
    assert drawn["1"].get("data-f", "").endswith("not accepted")


def test_edges_follow_parents_and_the_accepted_path_is_marked():
    root = ET.fromstring(draw(tree()))
    edges = {e.get("data-i"): e.get("class", "").split()[1:] for e in root.iter(f"{SVG}path")}
    assert edges == {"1": [], "2": ["acc"], "3": ["acc"], "-1": ["bonus"]}


def test_accepted_with_or_without_the_root_and_none():
    assert draw(tree(accepted=(0, 2, 3))) == draw(tree(accepted=(2, 3)))
    nothing = groups(draw(tree(accepted=(0,))))
    assert nothing["-1"].get("data-p") == "0"
    assert nothing["2"].get("class") == "n"
    nodes = {node.number: node for node in layout(tree(accepted=(0,)))}
    assert nodes[-1].y < nodes[1].y < nodes[2].y  # the bonus token stands above the children that it beat


def test_a_score_that_is_no_number():
    row = decode("x", "ddtree-b7", 0.5, trees=(tree(scores=(0.0, float("nan"), float("-inf"), -0.001)),))
    drawn = groups(draw(row.trees[0]))
    assert [[text.text for text in drawn[i].iter(f"{SVG}text")][1] for i in "123"] == ["n/a", "n/a", "0.00"]


@pytest.mark.parametrize(
    "text", ["</svg><script>", "&amp;", '"', "日本語日本語", "\x00\x1b", "\u202e", "\ud800", "🙂" * 9, ""]
)
def test_any_token_text_can_be_drawn(text):
    drawn = groups(draw(tree(texts=(text, text, text, text), bonus_text=text)))
    assert drawn["1"].get("data-t") == shown_text(text)
    assert next(drawn["1"].iter(f"{SVG}text")).text in (clipped(text), None if not text else clipped(text))


def test_long_texts_are_clipped_by_the_width_that_they_take():
    assert clipped("␣numbers_") == "␣numbers_"
    assert clipped("abcdefghij") == "abcdefgh…"
    assert clipped("日本語日本語") == "日本語…"
    assert clipped("\n\n  ") == "⏎⏎␣␣"


def test_all_rounds_are_listed_and_the_first_is_open():
    row = decode("humaneval", "ddtree-b16", 0.5, trees=(tree(), tree(round=4, accepted=(0,))))
    page = trees(Measured([row]))
    assert page.count("<details") == 2
    assert page.count('<details class="tree" open>') == 1
    assert "humaneval/0, tree 16, block 8, round 3: 2 of 3 nodes accepted" in page
    assert "round 4: 0 of 3 nodes accepted" in page
    assert trees(Measured([decode("humaneval", "ddtree-b16", 0.5)])) == ""
