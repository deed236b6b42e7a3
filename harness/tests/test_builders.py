"""Python builders: heapq equals the reference; SGLang's rules, with and without a heap; rows of a builder case."""

from __future__ import annotations

import numpy as np
import pytest

from harness import sglang_tree, uno_tree
from harness.builders import check, heapq_tree, make
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


def test_unos_tree_is_the_best_by_its_order():
    """Against all edges of the chosen nodes, looked through anew for each node, as its kernel does."""
    for i, (_, lp, ids) in enumerate(random_lists(10, 60, 6, 9)):
        if not np.isfinite(lp).all() or lp.shape[1] < 2:
            continue
        budget = 1 + i % 30
        if sum(lp.shape[1] ** depth for depth in range(1, len(lp) + 1)) < budget:
            continue
        tree = uno_tree.build(lp, ids, budget)
        depths, scores, used = tree["depths"], tree["scores"], set()
        for node in range(1, budget + 1):
            edges = [
                (
                    -(scores[parent] + lp[depths[parent], rank]),
                    depths[parent] + 1,
                    rank,
                    ids[depths[parent], rank],
                    parent,
                )
                for parent in range(node)
                if depths[parent] < len(lp)
                for rank in range(lp.shape[1])
                if (parent, rank) not in used
            ]
            mass, depth, rank, token, parent = min(edges)
            used.add((parent, rank))
            found = [tree[name][node] for name in ("depths", "ranks", "tokens", "parents")]
            assert [-scores[node], *found] == [mass, depth, rank, token, parent], (i, node)


# No two sums of these are near each other.
LP = np.log(np.array([[0.5, 0.31, 0.1], [0.6, 0.21, 0.13], [0.7, 0.17, 0.051], [0.45, 0.37, 0.11]], np.float32))
IDS = np.tile(np.arange(3, dtype=np.int32), (4, 1))


def test_unos_tree_is_the_contracts_where_no_sums_are_near():
    ours, theirs = build_tree(LP, IDS, 24), uno_tree.build(LP, IDS, 24)
    for name in ("tokens", "parents", "depths", "ranks"):
        assert getattr(ours, name).tolist() == theirs[name].tolist()


def test_uno_takes_few_nodes_and_candidates():
    assert [uno_tree.width(budget, 64) for budget in (16, 64, 127)] == [64, 31, 16]
    with pytest.raises(uno_tree.NoUnoError, match="at most 128 nodes, the root included; asked for 129"):
        uno_tree.width(128, 64)


def test_a_node_of_unos_tree_that_breaks_its_rules_is_found():
    tree = uno_tree.build(LP, IDS, 3)
    told, (fine,) = check("sglang-uno", [tree], LP[None], IDS[None], 3)
    assert "its own rules" in told
    assert fine.difference is None
    tree["ranks"][2] += 1
    _, (wrong,) = check("sglang-uno", [tree], LP[None], IDS[None], 3)
    assert wrong.difference is not None
    assert (wrong.difference.what, wrong.difference.index) == ("tree.ranks", 2)


def test_no_builder_of_an_unknown_name():
    with pytest.raises(ValueError, match="no builder 'x'"):
        make("x", np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1, 1), np.int32), 1)
