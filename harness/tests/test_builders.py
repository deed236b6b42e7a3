"""Python builders: heapq equals the reference; SGLang's rules, with and without a heap; rows of a builder case."""

from __future__ import annotations

import numpy as np
import pytest

from harness import sglang_tree
from harness.builders import heapq_tree, make
from harness.sglang_tree import build, build_slowly
from reference.tests.lists import random_lists
from reference.tree import build_tree


def test_heapq_builds_the_references_trees():
    for i, (_, lp, ids) in enumerate(random_lists(7, 400, 15, 20)):
        tree, found = build_tree(lp, ids, 3 * i % 100, 5), heapq_tree(lp, ids, 3 * i % 100, 5)
        for name in ("tokens", "parents", "depths", "ranks", "scores"):
            assert getattr(tree, name).tobytes() == found[name].tobytes()
        assert found["node_count"] == tree.node_count


def test_sglangs_tree_is_the_same_with_and_without_a_heap():
    for i, (_, lp, ids) in enumerate(random_lists(8, 150, 9, 12)):
        if lp.shape[1] < 2:
            continue
        one, other = build(lp, ids, i % 40, 5), build_slowly(lp, ids, i % 40, 5)
        for name, array in one.arrays().items():
            assert array.tobytes() == other.arrays()[name].tobytes(), (i, name)


def test_sglangs_tree_keeps_its_rules():
    for i, (_, lp, ids) in enumerate(random_lists(9, 200, 9, 12)):
        budget = 1 + i % 60
        nodes = build(lp, ids, budget, 5)
        assert (np.diff(nodes.depths) >= 0).all()  # breadth first
        assert (np.diff(nodes.parents) >= 0).all()  # siblings together, in order of their parents
        assert len(nodes.tokens) - 1 <= budget
        assert nodes.ranks.max() < max(sglang_tree.width(budget, *lp.shape), 1)
        if budget <= len(lp):
            assert nodes.ranks.tolist() == [0] * (budget + 1)
            assert nodes.depths.tolist() == list(range(budget + 1))


def test_sglangs_bonus_makes_deeper_trees_than_the_contracts():
    lp = np.log(np.tile(np.array([0.5, 0.3, 0.2], np.float32), (6, 1)))
    ids = np.tile(np.arange(3, dtype=np.int32), (6, 1))
    ours, theirs = build_tree(lp, ids, 12), build(lp, ids, 12)
    assert theirs.depths.max() > ours.depths.max()
    assert theirs.scores[1:].max() > 2 * float(lp[0, 0])


def test_no_builder_of_an_unknown_name():
    with pytest.raises(ValueError, match="no builder 'x'"):
        make("x", np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1, 1), np.int32), 1)
