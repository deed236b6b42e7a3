from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from reference.accept import accept
from reference.cache import LatentCache
from reference.sampling import GREEDY, choose_rows
from reference.tests.lists import random_lists
from reference.tests.oracle import enumerated_tree, published_tree
from reference.topk import DraftError, topk_logprob
from reference.tree import Tree, build_tree

ARRAYS = ("tokens", "parents", "depths", "ranks", "scores")


def lists(*rows):
    return np.log(np.array(rows, np.float64)).astype(np.float32)


def ids_of(lp, offset=0):
    return np.tile(np.arange(lp.shape[1], dtype=np.int32) + offset, (lp.shape[0], 1))


def assert_same_tree(tree, expected):
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(tree, name), np.array(expected[name]), err_msg=name)


# --- Against independent implementations


def test_equals_the_public_algorithm_on_20000_random_and_tied_cases():
    """arXiv 2604.12989 and the behaviour of github.com/liranringel/ddtree at c96427a: every array, every node."""
    rng = np.random.default_rng(7)
    for _, lp, ids in random_lists(seed=1, count=20_000, max_depth=8, max_width=10):
        budget = int(rng.integers(0, 33))
        tree, expected = build_tree(lp, ids, budget, 5), published_tree(lp, ids, budget, 5)
        for name in ARRAYS:
            assert getattr(tree, name).tolist() == expected[name], name
        np.testing.assert_array_equal(tree.visibility(), expected["visibility"])


@pytest.mark.parametrize(("depth", "budget"), [(1, 1024), (7, 256), (7, 1024), (15, 256), (31, 1024), (31, 63)])
def test_equals_the_public_algorithm_at_full_size(depth, budget):
    for _, lp, ids in random_lists(seed=depth * budget, count=7, max_depth=depth, max_width=budget):
        lp, ids = np.tile(lp, (31, 1))[:depth], np.tile(ids, (31, 1))[:depth]
        assert_same_tree(build_tree(lp, ids, budget), published_tree(lp, ids, budget))


def test_equals_enumeration_of_all_prefixes():
    """Sums of multiples of 1/4 are exact, so pop order must be the global sort by (-score, rank tuple)."""
    rng = np.random.default_rng(3)
    for _ in range(600):
        depth, width = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        lp = -np.sort(rng.integers(0, 9, (depth, width)) / 4, axis=1).astype(np.float32)
        lp[rng.random(lp.shape) < 0.1] = -np.inf
        lp = -np.sort(-lp, axis=1)
        for budget in (1, 3, 10, 400):
            assert_same_tree(build_tree(lp, ids_of(lp), budget, 9), enumerated_tree(lp, ids_of(lp), budget, 9))


def test_scores_are_float64_in_the_contracts_order_of_operations():
    lp = np.array([[-0.1, -1e8, -1.5e8], [-0.3, -0.7, -0.9]], np.float32)
    tree = build_tree(lp, ids_of(lp), 12)
    a, b = (float(x) for x in lp[0, :2])
    sibling = (a - a) + b
    assert tree.scores[tree.ranks.tolist().index(1, 4)] == sibling
    for node in range(1, 1 + tree.node_count):
        rank, row = tree.ranks[node], lp[tree.depths[node] - 1].astype(np.float64)
        score = tree.scores[tree.parents[node]] + row[0]
        for r in range(rank):
            score = (score - row[r]) + row[r + 1]
        assert tree.scores[node] == score
    in_float32 = np.float32(np.float32(lp[0, 0]) + lp[1, 0])
    assert tree.scores[2] != in_float32, "float32 accumulation would give another score here"


# --- Degenerate sizes (public issues: sgl-project/sglang#38351, #24054, vllm-project/vllm#42910)

SIZES = {
    "block of one": (np.zeros((0, 8), np.float32), 4, 0),
    "budget 0": (lists([0.5] * 8, [0.5] * 8, [0.5] * 8), 0, 0),
    "budget 1": (lists([0.6, 0.4], [0.9, 0.1]), 1, 1),
    "budget above the whole tree": (lists([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]), 50, 12),
    "vocabulary of one": (np.zeros((4, 1), np.float32), 10, 4),
    "lists of width 0": (np.zeros((3, 0), np.float32), 4, 0),
}


@pytest.mark.parametrize("case", SIZES)
def test_degenerate_size_goes_through_the_whole_round_and_commits(case):
    """Tree, compile, verify, accept, compaction; a root-only tree still commits one token, the target's own choice."""
    lp, budget, expected_nodes = SIZES[case]
    tree = build_tree(lp, ids_of(lp), budget, root_token=3)
    assert tree.node_count == expected_nodes
    vocabulary = max(lp.shape[1], 4)
    logits = np.random.default_rng(0).normal(size=(1 + tree.node_count, vocabulary))
    choices = choose_rows(logits, GREEDY, tree.positions(5))
    accepted = accept(tree.tokens, tree.parents, choices)
    assert accepted.nodes[0] == 0
    assert accepted.bonus == logits[accepted.nodes[-1]].argmax()
    cache = LatentCache(2, 1, 1, capacity=5 + 1 + tree.node_count, dtype=np.float64)
    for layer in range(2):
        cache.write(layer, np.zeros((5, 1)), np.zeros((5, 1)))
    cache.commit(np.arange(5))
    for layer in range(2):
        cache.write(layer, np.arange(1.0 + tree.node_count)[:, None], np.zeros((1 + tree.node_count, 1)))
    cache.commit(accepted.nodes)
    assert cache.length == 5 + len(accepted.nodes)
    np.testing.assert_array_equal(cache.read(1, cache.length)[0][5:, 0], accepted.nodes)


def test_budget_one_takes_the_best_candidate():
    lp = lists([0.6, 0.4], [0.9, 0.1])
    tree = build_tree(lp, ids_of(lp, 100), 1)
    assert (tree.tokens[1], tree.parents[1], tree.depths[1]) == (100, 0, 1)


def test_vocabulary_of_one_gives_a_chain():
    assert build_tree(np.zeros((4, 1), np.float32), np.zeros((4, 1), np.int32), 10).parents.tolist() == [-1, 0, 1, 2, 3]


def test_vocabulary_smaller_than_k_through_the_topk_stage():
    top = topk_logprob(np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32), 8)
    assert build_tree(top.lp, top.ids, 50).node_count == 3 + 9


@pytest.mark.parametrize("lp", [np.zeros((2, 3), np.float32), np.zeros((0, 3), np.float32)])
def test_negative_budget_is_refused(lp):
    with pytest.raises(ValueError, match="request 4: budget must be at least 0, got -1"):
        build_tree(lp, ids_of(lp), -1, request=4)


# --- Ties (public issue: openvinotoolkit/openvino.genai#3451)

TIES = {
    "all equal": (np.full((4, 16), -np.log(16.0), np.float32), 20),
    "two halves at two depths": (lists([0.5, 0.5], [0.5, 0.5]), 6),
    "a quarter at depth 1 beside half of a half": (lists([0.5, 0.25, 0.25], [0.5, 0.25, 0.25]), 3),
}


def rank_tuples(tree):
    return [tuple(tree.ranks[i] for i in path[1:] if i >= 0) for path in tree.paths()][1:]


def test_equal_scores_are_ordered_by_rank_tuple_and_a_prefix_comes_first():
    lp, budget = TIES["two halves at two depths"]
    assert rank_tuples(build_tree(lp, ids_of(lp), budget)) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    lp, budget = TIES["a quarter at depth 1 beside half of a half"]
    assert rank_tuples(build_tree(lp, ids_of(lp), budget)) == [(0,), (0, 0), (1,)]
    lp = np.zeros((3, 2), np.float32)  # probability 1 twice: every prefix scores 0
    assert rank_tuples(build_tree(lp, ids_of(lp), 4)) == [(0,), (0, 0), (0, 0, 0), (0, 0, 1)]


@pytest.mark.parametrize("case", TIES)
def test_tied_trees_are_the_same_bytes_every_time(case):
    lp, budget = TIES[case]
    first = build_tree(lp, ids_of(lp), budget)
    for _ in range(100):
        again = build_tree(lp.copy(), ids_of(lp), budget)
        assert all(getattr(first, name).tobytes() == getattr(again, name).tobytes() for name in ARRAYS)
    assert (first.parents[1:] < np.arange(1, 1 + first.node_count)).all()


def test_tied_trees_are_the_same_bytes_in_fresh_processes():
    script = (
        "import numpy as np, hashlib\n"
        "from reference.tree import build_tree\n"
        "lp = np.full((4, 16), -np.log(16.0), np.float32)\n"
        "tree = build_tree(lp, np.tile(np.arange(16, dtype=np.int32), (4, 1)), 20)\n"
        "print(hashlib.sha256(tree.tokens.tobytes() + tree.parents.tobytes() + tree.scores.tobytes()).hexdigest())\n"
    )
    digests = {
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        for _ in range(5)
    }
    assert len(digests) == 1


def test_order_of_the_batch_does_not_matter():
    """Each request's tree is the solo tree, whatever stands beside it and in which order."""
    batch = [TIES[case] for case in TIES] + [(lists([0.7, 0.2, 0.1]), 2)]
    solo = [build_tree(lp, ids_of(lp), budget).tokens.tobytes() for lp, budget in batch]
    for order in ([3, 1, 0, 2], [2, 3, 1, 0]):
        assert [build_tree(batch[i][0], ids_of(batch[i][0]), batch[i][1]).tokens.tobytes() for i in order] == [
            solo[i] for i in order
        ]


# --- Bad scores (public issues: vllm-project/vllm#41834, #44744)


@pytest.mark.parametrize(
    ("value", "place", "words"),
    [
        (np.nan, (1, 2), "request 6, depth 2, rank 2: the log-probability is NaN"),
        (np.inf, (0, 0), r"request 6, depth 1, rank 0: the log-probability is \+inf"),
        (-0.5, (2, 3), "request 6, depth 3, rank 3: the log-probability -0.5 is above"),
    ],
)
def test_bad_log_probability_is_refused_by_request_depth_and_rank(value, place, words):
    lp = np.tile(np.array([-1, -2, -3, -4], np.float32), (3, 1))
    lp[place] = value
    with pytest.raises(DraftError, match=words) as error:
        build_tree(lp, ids_of(lp), 8, request=6)
    assert (error.value.request, error.value.depth, error.value.rank) == (6, place[0] + 1, place[1])


@pytest.mark.parametrize(
    ("token", "words"), [(-1, "token id -1 is outside"), (4, "token id 4 is outside the vocabulary of 4")]
)
def test_id_outside_the_vocabulary_is_refused(token, words):
    lp = np.tile(np.array([-1, -2, -3, -4], np.float32), (3, 1))
    ids = ids_of(lp)
    ids[1, 3] = token
    with pytest.raises(DraftError, match=f"depth 2, rank 3: the {words}"):
        build_tree(lp, ids, 8, vocab_size=4)


def test_same_token_twice_in_a_list_is_refused_since_it_would_make_equal_siblings():
    lp = np.tile(np.array([-1, -2, -3], np.float32), (2, 1))
    ids = ids_of(lp)
    ids[1] = [5, 2, 5]
    with pytest.raises(DraftError, match="depth 2, rank 2: the token id 5 stands twice"):
        build_tree(lp, ids, 8)


def test_bad_entries_are_named_in_depth_then_rank_order_even_beyond_the_budget():
    lp = np.tile(np.array([-1, -2, -3, -4], np.float32), (3, 1))
    lp[2, 0], lp[1, 3] = np.inf, np.nan
    with pytest.raises(DraftError, match="depth 2, rank 3: the log-probability is NaN"):
        build_tree(lp, ids_of(lp), 1)


def test_narrow_or_float_ids_and_wide_scores_are_refused():
    """Ids kept in 16-bit or float arrays would be damaged quietly."""
    lp = np.zeros((1, 2), np.float32)
    for dtype in (np.int16, np.float32, np.int64):
        with pytest.raises(TypeError, match="ids int32"):
            build_tree(lp, np.zeros((1, 2), dtype), 2)
    with pytest.raises(TypeError, match="lp must be float32"):
        build_tree(lp.astype(np.float64), ids_of(lp), 2)
    with pytest.raises(ValueError, match=r"must both be \[L, K\]"):
        build_tree(lp, ids_of(lp)[:, :1], 2)


def test_minus_inf_ends_its_row_and_is_never_drafted_though_the_budget_is_not_used_up():
    lp = lists([0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
    lp[1, 1:] = -np.inf
    tree = build_tree(lp, ids_of(lp), 100)
    assert tree.node_count == 3 + 3 * 1 + 3 * 3
    assert set(tree.ranks[tree.depths == 2].tolist()) == {0}
    lp[1, 0] = -np.inf  # a depth without any candidate ends the tree above it
    assert build_tree(lp, ids_of(lp), 100).depths.max() == 1
    lp[0] = -np.inf
    assert build_tree(lp, ids_of(lp), 100).node_count == 0


@pytest.mark.parametrize("token", [0, 65535, 65536, 131071, 163840])
def test_any_token_id_survives_and_id_0_is_an_ordinary_token(token):
    """Sizes come from node_count, never from a value test (public issue: sgl-project/sglang#27509)."""
    lp = lists([0.9], [0.9])
    tree = build_tree(lp, np.full((2, 1), token, np.int32), 5, root_token=token, vocab_size=163841)
    assert tree.node_count == 2
    assert tree.tokens.tolist() == [token] * 3
    assert tree.padded(5, 2)["node_count"] == 2


# --- Derived arrays


def test_derived_arrays_of_a_small_tree():
    #   0 -> 1 -> 2 -> 3,  0 -> 4,  1 -> 5
    tree = Tree(
        *(np.array(a) for a in ([9, 1, 2, 3, 4, 5], [-1, 0, 1, 2, 0, 1], [0, 1, 2, 3, 1, 2], [0] * 6, [0.0] * 6))
    )
    visible = np.array(
        [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 0, 0],
            [1, 0, 0, 0, 1, 0],
            [1, 1, 0, 0, 0, 1],
        ],
        bool,
    )
    np.testing.assert_array_equal(tree.visibility(), visible)
    assert tree.visibility_words()[:, 0].tolist() == [0b1, 0b11, 0b111, 0b1111, 0b10001, 0b100011]
    assert tree.paths(4)[3].tolist() == [0, 1, 2, 3, -1]
    assert tree.paths()[5].tolist() == [0, 1, 5, -1]
    assert tree.positions(100).tolist() == [100, 101, 102, 103, 101, 102]
    first_child, next_sibling = tree.links()
    assert first_child.tolist() == [1, 2, 3, -1, -1, -1]
    assert next_sibling.tolist() == [-1, 4, 5, -1, -1, -1]


def test_padded_arrays_hold_the_tree_then_the_documented_filler():
    lp = lists([0.6, 0.4], [0.9, 0.1])
    tree = build_tree(lp, ids_of(lp, 50), 40, root_token=7)
    rows, arrays = 1 + tree.node_count, tree.padded(40, 3, prefix_length=11)
    assert {n: (a.dtype.name, a.shape) for n, a in arrays.items()} == {
        "node_count": ("int32", ()),
        **dict.fromkeys(("tokens", "parents", "depths", "ranks", "positions"), ("int32", (41,))),
        **dict.fromkeys(("first_child", "next_sibling"), ("int32", (41,))),
        "scores": ("float64", (41,)),
        "visibility": ("uint32", (41, 2)),
        "paths": ("int32", (41, 4)),
    }
    assert arrays["node_count"] == tree.node_count == 6
    for name in ARRAYS:
        np.testing.assert_array_equal(arrays[name][:rows], getattr(tree, name))
    np.testing.assert_array_equal(arrays["positions"][:rows], 11 + tree.depths)
    np.testing.assert_array_equal(arrays["visibility"][:rows, :1], tree.visibility_words())
    for name, array in arrays.items():
        if name != "node_count":
            assert (array[rows:] == (-1 if name in ("parents", "first_child", "next_sibling", "paths") else 0)).all()
    with pytest.raises(ValueError, match="6 nodes does not fit a budget of 5"):
        tree.padded(5, 3)
    with pytest.raises(ValueError, match="depth limit 1 is below the deepest node, 2"):
        tree.padded(40, 1)


def test_garbage_in_padding_changes_nothing_and_batched_equals_solo():
    """Budgets 0, 1, 7, 32 at prefixes 0, 5, 64, 1000, padded to 33 slots (public issue: trymirai/lalamo#207)."""
    rng = np.random.default_rng(5)
    for garbage in (0, 7, -3, 2**31 - 1):
        for budget, prefix in ((0, 0), (1, 5), (7, 64), (32, 1000)):
            lp = -np.sort(rng.exponential(1, (4, 8)), axis=1).astype(np.float32)
            tree = build_tree(lp, ids_of(lp), budget)
            rows, arrays = 1 + tree.node_count, tree.padded(32, 4, prefix)
            choices = rng.integers(0, 3, 33).astype(np.int32)
            solo = accept(tree.tokens, tree.parents, choices[:rows])
            for array in (arrays["tokens"], arrays["parents"], choices):
                array[rows:] = garbage
            padded = accept(arrays["tokens"], arrays["parents"], choices, node_count=int(arrays["node_count"]))
            assert padded.nodes.tolist() == solo.nodes.tolist()
            assert padded.bonus == solo.bonus
            assert not (arrays["visibility"][:rows] >> np.uint32(min(rows, 31)) & (rows < 32)).any()


def test_a_tree_owns_read_only_arrays_and_refuses_what_is_no_tree():
    tokens = np.array([1, 2])
    tree = Tree(tokens, np.array([-1, 0]), np.array([0, 1]), np.array([0, 0]), np.zeros(2))
    tokens[:] = 9
    assert tree.tokens.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        tree.tokens[0] = 5
    for parents, depths in (
        ([-1, 1], [0, 1]),
        ([-1, -1], [0, 1]),
        ([-1, 0], [0, 2]),
        ([0, 0], [0, 1]),
        ([-1, 0], [1, 2]),
    ):
        with pytest.raises(ValueError, match="node"):
            Tree(np.array([1, 2]), np.array(parents), np.array(depths), np.array([0, 0]), np.zeros(2))
    with pytest.raises(ValueError, match=r"parents must have shape"):
        Tree(np.array([1, 2]), np.array([-1]), np.array([0]), np.array([0]), np.zeros(1))


# --- Invariants

log_probabilities = hnp.arrays(
    np.float32,
    st.tuples(st.integers(0, 7), st.integers(1, 9)),
    elements=st.one_of(
        st.floats(-30, 0, width=32), st.sampled_from([-0.5, -1.0, -2.0]).map(np.float32), st.just(np.float32(-np.inf))
    ),
).map(lambda lp: -np.sort(-lp, axis=1))


@settings(max_examples=300, deadline=None)
@given(lp=log_probabilities, budget=st.integers(0, 64), prefix=st.integers(0, 2**20))
def test_invariants(lp, budget, prefix):
    ids = np.random.default_rng(0).random(lp.shape).argsort(axis=1).astype(np.int32)
    tree = build_tree(lp, ids, budget)
    nodes = np.arange(1, 1 + tree.node_count)
    assert tree.node_count <= budget
    assert (tree.parents[1:] < nodes).all()
    assert (tree.depths[1:] == tree.depths[tree.parents[1:]] + 1).all()
    assert tree.depths.max() <= len(lp)
    assert (
        len({(p, t) for p, t in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)}) == 1 + tree.node_count
    )
    assert (np.diff(tree.scores) <= 1e-12 * np.abs(tree.scores[:-1])).all(), "scores do not rise beyond rounding"
    np.testing.assert_array_equal(tree.positions(prefix), prefix + tree.depths)

    visible, paths = tree.visibility(), tree.paths(len(lp))
    for node in range(1 + tree.node_count):
        path = [i for i in paths[node] if i >= 0]
        assert path == np.flatnonzero(visible[node]).tolist()
        assert path[0] == 0
        assert path[-1] == node
        assert len(path) == 1 + tree.depths[node]
        assert [tree.parents[i] for i in path[1:]] == path[:-1]
    bits = np.unpackbits(tree.visibility_words().astype("<u4").view(np.uint8), axis=1, bitorder="little")
    np.testing.assert_array_equal(bits[:, : visible.shape[1]], visible)
    assert not bits[:, visible.shape[1] :].any()

    first_child, next_sibling = tree.links()
    for node in range(1 + tree.node_count):
        children, child = [], first_child[node]
        while child >= 0:
            children.append(int(child))
            child = next_sibling[child]
        assert children == np.flatnonzero(tree.parents == node).tolist()
        assert tree.ranks[children].tolist() == list(range(len(children))), "siblings in rank order, none left out"

    larger = build_tree(lp, ids, budget + 1)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(larger, name)[: 1 + tree.node_count], getattr(tree, name))
    smaller_k = build_tree(lp[:, : max(budget, 1)], ids[:, : max(budget, 1)], budget)
    assert smaller_k.tokens.tolist() == tree.tokens.tolist(), "ranks from the budget on can never be reached"
