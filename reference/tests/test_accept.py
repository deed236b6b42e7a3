from __future__ import annotations

import numpy as np
import pytest

from reference.accept import accept
from reference.sampling import GREEDY, NO_CHOICE, TargetRowError, choose_rows
from reference.tests.lists import random_lists
from reference.tests.oracle import walked
from reference.tree import build_tree


def int32(*values):
    return np.array(values, np.int32)


#         root 1:7 2:3 3:7 4:3 5:7 6:3 7:9
TOKENS = int32(0, 7, 3, 7, 3, 7, 3, 9)
PARENTS = int32(-1, 0, 0, 1, 1, 2, 2, 4)


def choices_along(tokens, parents, wanted):
    """The target chooses wanted[depth] after every node of that depth."""
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    return int32(*(wanted[min(d, len(wanted) - 1)] for d in depth))


@pytest.mark.parametrize(
    ("wanted", "nodes", "bonus"),
    [((7, 7, 7), [0, 1, 3], 7), ((3, 7, 3), [0, 2, 5], 3), ((7, 3, 9, 1), [0, 1, 4, 7], 1), ((9, 7), [0], 9)],
)
def test_a_child_is_matched_by_parent_and_token(wanted, nodes, bonus):
    """Tokens 7 and 3 stand under many parents (public issue: pie-project/pie#197, wrong sibling search)."""
    accepted = accept(TOKENS, PARENTS, choices_along(TOKENS, PARENTS, wanted))
    assert accepted.nodes.tolist() == nodes
    assert accepted.bonus == bonus


def test_the_right_token_under_a_rejected_parent_is_never_reached():
    tokens, parents = int32(0, 5, 6, 8), int32(-1, 0, 0, 1)
    accepted = accept(tokens, parents, int32(6, 8, 8, 0))
    assert accepted.nodes.tolist() == [0, 2]
    assert accepted.bonus == 8


def test_equal_siblings_are_refused():
    """Public issue: SafeAILab/EAGLE#58; a drawn tree can hold one token twice under a parent."""
    with pytest.raises(ValueError, match="request 2: nodes 2 and 4 are siblings with the same token 4"):
        accept(int32(0, 9, 4, 9, 4), int32(-1, 0, 0, 1, 0), int32(0, 0, 0, 0, 0), request=2)


def test_equals_a_walk_parent_by_parent_on_1000_random_trees():
    rng = np.random.default_rng(2)
    lengths = set()
    for _, lp, _ in random_lists(seed=8, count=1000, max_depth=6, max_width=3):
        ids = np.tile(np.arange(lp.shape[1], dtype=np.int32), (len(lp), 1))
        tree = build_tree(lp, ids, int(rng.integers(0, 60)))
        choices = rng.integers(0, 3, 1 + tree.node_count).astype(np.int32)
        accepted = accept(tree.tokens, tree.parents, choices)
        nodes, bonus = walked(tree.tokens, tree.parents, choices)
        assert accepted.nodes.tolist() == nodes
        assert accepted.bonus == bonus
        assert (np.diff(accepted.nodes) > 0).all()
        lengths.add(len(nodes))
    assert lengths >= {1, 2, 3, 4, 5}


def test_a_tree_that_holds_the_chain_accepts_at_least_what_the_chain_accepts():
    """Public issue: Luce-Org/lucebox#414, where a tree accepted fewer tokens than its own chain."""
    rng = np.random.default_rng(6)
    held = longer = 0
    for _, lp, _ in random_lists(seed=9, count=300, max_depth=6, max_width=4):
        ids = np.tile(np.arange(lp.shape[1], dtype=np.int32), (len(lp), 1))
        salt = int(rng.integers(1 << 30))

        def choices(tree, salt=salt, width=lp.shape[1]):
            """A target is a function of the tokens read so far, whatever tree they stand in."""
            paths = [tuple(int(tree.tokens[i]) for i in path if i > 0) for path in tree.paths()]
            return int32(*(0 if hash((salt, p)) % 3 else hash((salt, p)) % width for p in paths))

        chain, tree = build_tree(lp[:, :1], ids[:, :1], len(lp)), build_tree(lp, ids, 400)
        from_chain = accept(chain.tokens, chain.parents, choices(chain))
        from_tree = accept(tree.tokens, tree.parents, choices(tree))
        if all_first_ranks(tree) < len(lp):
            continue  # the budget ended before the chain did
        held += 1
        assert len(from_tree.nodes) >= len(from_chain.nodes)
        longer += len(from_tree.nodes) > len(from_chain.nodes)
    assert held > 200
    assert longer > 20


def all_first_ranks(tree):
    """Depth down to which the tree holds the chain of rank 0."""
    return max(int((tree.ranks[path[path >= 0]] == 0).all()) * (len(path[path >= 0]) - 1) for path in tree.paths())


@pytest.mark.parametrize("vocabulary", [1000, 163840])
def test_a_nan_row_stops_the_walk_only_where_the_walk_stands_on_it(vocabulary):
    """Never an id out of range, never a made-up id (public issue: vllm-project/vllm#53029)."""
    tokens, parents = int32(0, 5, 6, 8), int32(-1, 0, 0, 1)
    logits = np.full((4, vocabulary), -1.0, np.float32)
    logits[[0, 1, 2, 3], [5, 8, 3, vocabulary - 1]] = 1  # accepts 0, 1, 3; node 2 is rejected
    positions = np.array([9, 10, 10, 11])
    healthy = accept(tokens, parents, choose_rows(logits, GREEDY, positions))
    assert healthy.nodes.tolist() == [0, 1, 3]
    assert healthy.bonus == vocabulary - 1

    rejected = logits.copy()
    rejected[2] = np.nan
    assert accept(tokens, parents, choose_rows(rejected, GREEDY, positions)).nodes.tolist() == [0, 1, 3]
    for node, columns in ((0, slice(None)), (1, slice(7, 8)), (3, slice(None))):
        poisoned = logits.copy()
        poisoned[node, columns] = np.nan
        choices = choose_rows(poisoned, GREEDY, positions)
        assert choices[node] == NO_CHOICE
        with pytest.raises(TargetRowError, match=f"request 4, node {node}: the target's logits hold NaN") as error:
            accept(tokens, parents, choices, request=4)
        assert (error.value.request, error.value.node) == (4, node)
    with pytest.raises(TargetRowError, match="node 0"):
        accept(tokens, parents, choose_rows(np.full_like(logits, np.nan), GREEDY, positions))


def test_arrays_that_do_not_fit_the_tree_are_refused():
    tokens, parents, choices = int32(0, 1, 2), int32(-1, 0, 1), int32(0, 0, 0)
    with pytest.raises(ValueError, match=r"hold \(3, 3, 2\) rows, the tree has 3"):
        accept(tokens, parents, choices[:2])
    with pytest.raises(ValueError, match=r"hold \(3, 3, 3\) rows, the tree has 4"):
        accept(tokens, parents, choices, node_count=3)
    with pytest.raises(ValueError, match=r"the tree has 0"):
        accept(tokens, parents, choices, node_count=-1)
    for bad in (1, 2, -1):
        with pytest.raises(ValueError, match=f"node 1: parent {bad} does not precede it"):
            accept(tokens, int32(-1, bad, 0), choices)
