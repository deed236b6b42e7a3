"""Accept on the device against reference.accept, array for array and fault for fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdtr
from engine.abi import RequestError, SizeError
from engine.tests.backends import guarded, to_device, to_host
from reference.accept import accept
from reference.tree import build_tree

GOLDEN = Path(__file__).resolve().parents[2] / "datasets" / "golden"
GARBAGE = (-7, 2_000_000_000)  # behind a request's own nodes: no parent, no token, no choice
SUCCESS = [0, 0, 0]


def batch(trees, budget, garbage):
    """(tokens, parents, choices int32 [R, 1+B], node_count int32 [R]) of (tokens, parents, choices) each."""
    arrays = np.full((3, len(trees), 1 + budget), garbage, np.int32)
    for request, tree in enumerate(trees):
        for array, values in zip(arrays, tree, strict=True):
            array[request, : len(values)] = values
    return (*arrays, np.array([len(tree[0]) - 1 for tree in trees], np.int32))


def run(ops, trees, depth_limit, budget=None, garbage=GARBAGE[0], **given):
    budget = max(len(tree[0]) - 1 for tree in trees) if budget is None else budget
    tokens, parents, choices, node_count = (to_device(ops, array) for array in batch(trees, budget, garbage))
    return ops.tree_accept(tokens, parents, node_count, choices, depth_limit, **given).to_host()


def reference_of(tree, request):
    """What the reference finds: its result, or the error that it raises."""
    try:
        tokens, parents, choices = (np.asarray(values, np.int32) for values in tree)
        return accept(tokens, parents, choices, request=request)
    except ValueError as error:
        return error


def check_all(result, trees, depth_limit):
    """Compare every request with the reference; returns what they came to: numbers of nodes, and codes of faults."""
    errors = {error.request: error for error in result.errors()}
    return {check(result, request, tree, depth_limit, errors.get(request)) for request, tree in enumerate(trees)}


def check(result, request, tree, depth_limit, error):
    expected = reference_of(tree, request)
    if isinstance(expected, ValueError):
        assert error is not None, f"request {request}: the reference says '{expected}'"
        assert str(expected).startswith(str(error))
        assert (result.accepted[request], result.bonus[request]) == (-1, -1)
        assert (result.path[request] == -1).all()
        return f"code {error.code}"
    assert error is None, str(error)
    accepted = len(expected.nodes) - 1
    assert result.path[request].tolist() == expected.nodes.tolist() + [-1] * (depth_limit - accepted)
    assert (result.accepted[request], result.bonus[request]) == (accepted, expected.bonus)
    assert result.status[request].tolist() == SUCCESS
    return accepted


def golden_trees():
    file = kdtr.read(GOLDEN / "accept.kdtr")
    for case in sorted({name.split("/")[0] for name in file}):
        if f"{case}/choices" in file:
            arrays = {name: file[f"{case}/{name}"][:1025] for name in ("tokens", "parents", "choices")}
            yield case, {**arrays, "node_count": file[f"{case}/node_count"]}, file


def test_golden_walks_with_garbage_behind_the_nodes(ops):
    lengths = set()
    for case, arrays, file in golden_trees():
        of_batch = {name: to_device(ops, array.reshape(1, *array.shape)) for name, array in arrays.items()}
        result = ops.tree_accept(**of_batch, depth_limit=31).to_host()
        nodes = file[f"{case}/accepted"]
        assert result.status[0].tolist() == SUCCESS, case
        assert result.path[0].tolist() == nodes.tolist() + [-1] * (32 - len(nodes)), case
        assert (result.accepted[0], result.bonus[0]) == (len(nodes) - 1, file[f"{case}/bonus"]), case
        lengths.add(len(nodes))
    assert lengths >= {1, 2, 3, 4, 5, 8}


@pytest.mark.parametrize("name", ["b8_k128", "b8_k256", "b16_k128", "b16_k256"])
def test_recorded_rounds(ops, name):
    """Trees of real drafter lists and the choices of the real target, greedy and sampled."""
    file = kdtr.read(GOLDEN / f"drafter_lists_{name}.kdtr")
    accepted = 0
    for case in sorted({key.split("/")[0] for key in file}):
        lp, ids, choices, path = (file[f"{case}/{key}"] for key in ("lp", "ids", "choices", "path"))
        budget, roots = int(file[f"{case}/budget"]), file[f"{case}/root_token"]
        trees = []
        for round_lp, round_ids, root, chosen in zip(lp, ids, roots, choices, strict=True):
            tree = build_tree(round_lp, round_ids, budget, int(root))
            trees.append((tree.tokens, tree.parents, chosen[: 1 + tree.node_count]))
        result = run(ops, trees, path.shape[1] - 1, budget)
        assert not result.errors()
        np.testing.assert_array_equal(result.path, path, err_msg=case)
        np.testing.assert_array_equal(result.bonus, file[f"{case}/bonus"], err_msg=case)
        accepted += int(result.accepted.sum())
    assert accepted > 0


def random_tree(rng, rows, vocabulary, faults):
    """Parents drawn among the nodes before, tokens so that siblings differ; then what `faults` asks for is broken."""
    tokens, parents = [int(rng.integers(vocabulary))], [-1]
    taken: set[tuple[int, int]] = set()
    while len(tokens) < rows:
        # Mostly one of the latest nodes, so that trees get deep.
        parent = max(0, len(tokens) - 1 - int(rng.geometric(0.5) - 1))
        token = int(rng.integers(vocabulary))
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
        elif rng.random() < 0.2:
            vocabulary += 1  # the parents near the end are full
    choices = rng.integers(0, 3, rows)
    for _ in range(faults):
        node, kind = int(rng.integers(rows)), int(rng.integers(3))
        if kind == 0:
            choices[node] = -1
        elif kind == 1 and node > 0:
            parents[node] = int(rng.choice([-1, node, rows, -(2**31), 2**31 - 1]))
        elif kind == 2 and node > 1:
            other = int(rng.integers(1, node))
            tokens[node], parents[node] = tokens[other], parents[other]
    return tokens, parents, choices.tolist()


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize(("budget", "count"), [(24, 900), (70, 100), (300, 12)])
def test_random_trees_sound_and_broken(ops, budget, count, garbage):
    rng = np.random.default_rng(budget)
    trees = [random_tree(rng, int(rng.integers(1, budget + 2)), 3, r % 3) for r in range(count)]
    result = run(ops, trees, 31, budget, garbage)
    seen = check_all(result, trees, 31)
    if count == 900:
        assert seen >= {0, 1, 2, 3, 4, "code 6", "code 7", "code 8"}


def test_a_batch_of_different_sizes_equals_its_requests_alone(ops):
    """Budgets 0, 1, 7, 32 padded to 33 slots, twice with other garbage (public issue: trymirai/lalamo#207)."""
    rng = np.random.default_rng(5)
    trees = [random_tree(rng, rows, 3, 0) for rows in (1, 2, 8, 33)]
    together = [run(ops, trees, 20, 32, garbage) for garbage in GARBAGE]
    for request, tree in enumerate(trees):
        alone = run(ops, [tree], 20)
        for result in together:
            for name in ("accepted", "path", "bonus", "status"):
                assert getattr(result, name)[request].tobytes() == getattr(alone, name)[0].tobytes()
    assert not together[0].errors()
    check_all(together[0], trees, 20)


TOKENS, PARENTS = [0, 7, 3, 7, 3, 7, 3, 9], [-1, 0, 0, 1, 1, 2, 2, 4]
DEPTHS = [0, 1, 1, 2, 2, 2, 2, 3]


@pytest.mark.parametrize(
    ("wanted", "nodes", "bonus"),
    [((7, 7, 7, 7), [0, 1, 3], 7), ((3, 7, 3, 3), [0, 2, 5], 3), ((7, 3, 9, 1), [0, 1, 4, 7], 1), ((9,) * 4, [0], 9)],
)
def test_a_child_is_matched_by_parent_and_token(ops, wanted, nodes, bonus):
    """Tokens 7 and 3 stand under many parents (public issue: pie-project/pie#197, wrong sibling search)."""
    result = run(ops, [(TOKENS, PARENTS, [wanted[depth] for depth in DEPTHS])], 7)
    assert result.path[0].tolist() == nodes + [-1] * (8 - len(nodes))
    assert result.bonus.tolist() == [bonus]


def test_the_right_token_under_a_rejected_parent_is_never_reached(ops):
    result = run(ops, [([0, 5, 6, 8], [-1, 0, 0, 1], [6, 8, 8, 0])], 3)
    assert (result.path[0].tolist(), result.bonus[0]) == ([0, 2, -1, -1], 8)


def test_the_first_fault_in_node_order_is_named(ops):
    trees = [
        ([0, 9, 4, 9, 4], [-1, 0, 0, 1, 0], [0] * 5),  # public issue: SafeAILab/EAGLE#58, one token twice
        ([0, 9, 4, 4, 9], [-1, 0, 0, 0, 4], [0] * 5),  # the twin before the parent
        ([0, 9, 4, 4, 9], [-1, 1, 0, 0, 0], [0] * 5),  # the parent before the twin
        ([0, 4, 4, 4, 4], [-1, 0, 0, 0, 0], [-1] * 5),  # three twins, and a root without a choice
        ([0, 1, 2], [5, 0, 1], [1, 2, -1]),  # the root's parent is nobody's business; node 2 is on the path
        ([0, -1], [-1, 0], [-1, 3]),  # no choice leads nowhere, not even to a node without a token
    ]
    errors = [(e.code, e.place, e.detail) for e in run(ops, trees, 4).errors()]
    assert errors == [(8, 4, 2), (8, 3, 2), (7, 1, 1), (8, 2, 1), (6, 2, 0), (6, 0, 0)]
    with pytest.raises(RequestError, match="request 0: nodes 2 and 4 are siblings with the same token") as caught:
        run(ops, trees, 4).raise_for_status()
    assert "request 2, node 1: parent 1 does not precede it" in caught.value.__notes__


@pytest.mark.parametrize("vocabulary", [1000, 163840])
def test_a_nan_row_stops_the_walk_only_where_the_walk_stands_on_it(ops, vocabulary):
    """Never an id out of range, never a made-up id (public issue: vllm-project/vllm#53029)."""
    tokens, parents = np.array([0, 5, 6, 8], np.int32), np.array([-1, 0, 0, 1], np.int32)
    logits = np.full((6, 4, vocabulary), -1.0, np.float32)
    logits[:, [0, 1, 2, 3], [5, 8, 3, vocabulary - 1]] = 1  # accepts 0, 1, 3; node 2 is rejected
    logits[1, 2] = np.nan
    logits[2, 0] = np.nan
    logits[3, 1, 7] = np.nan
    logits[4, 3, vocabulary - 1] = np.inf
    logits[5] = np.nan
    choices = ops.target_choice(to_device(ops, logits))
    node_count = to_device(ops, np.full(6, 3, np.int32))
    trees = (to_device(ops, np.tile(array, (6, 1))) for array in (tokens, parents))
    result = ops.tree_accept(*trees, node_count, choices, 3).to_host()
    assert result.path[:2].tolist() == [[0, 1, 3, -1]] * 2
    assert result.bonus.tolist() == [vocabulary - 1] * 2 + [-1] * 4
    assert [(e.request, e.code, e.place) for e in result.errors()] == [(2, 6, 0), (3, 6, 1), (4, 6, 3), (5, 6, 0)]
    with pytest.raises(RequestError, match="request 2, node 0: the target's logits hold NaN"):
        result.raise_for_status()


def test_golden_choices_of_tied_logits_lead_to_the_golden_path(ops):
    file = kdtr.read(GOLDEN / "accept.kdtr")
    tokens, parents, logits = (file[f"logit_ties/{name}"][None] for name in ("tokens", "parents", "logits"))
    choices = ops.target_choice(to_device(ops, logits))
    arrays = to_device(ops, tokens), to_device(ops, parents), to_device(ops, np.array([5], np.int32))
    result = ops.tree_accept(*arrays, choices, 5).to_host()
    nodes = file["logit_ties/accepted"]
    assert result.path[0, : len(nodes)].tolist() == nodes.tolist()
    assert result.bonus[0] == file["logit_ties/bonus"]


def test_a_tree_that_holds_the_chain_accepts_at_least_what_the_chain_accepts(ops):
    """Public issue: Luce-Org/lucebox#414, where a tree accepted fewer tokens than its own chain."""
    rng = np.random.default_rng(3)
    chains, bushes = [], []
    for _ in range(200):
        depth = int(rng.integers(1, 8))
        tokens, target = rng.integers(0, 3, depth).tolist(), rng.integers(0, 3, depth + 1).tolist()
        chains.append(([9, *tokens], [-1, *range(depth)], target))
        # One more child, of another token, under every node of the chain; a target depends on the path alone.
        extra = [(token + 1) % 3 for token in tokens]
        more = rng.integers(0, 3, depth).tolist()
        bushes.append(([9, *tokens, *extra], [-1, *range(depth), *range(depth)], [*target, *more]))
    chain, bush = run(ops, chains, 7), run(ops, bushes, 7)
    assert (bush.accepted >= chain.accepted).all()
    assert (bush.accepted > chain.accepted).sum() > 20
    assert set(chain.accepted.tolist()) >= {0, 1, 2, 3}


def chain_of(nodes):
    return list(range(nodes + 1)), [-1, *range(nodes)], list(range(1, nodes + 2))


def test_a_path_deeper_than_the_limit_is_refused_behind_what_the_reference_refuses(ops):
    wide = ([0, *range(1, 9)], [-1, *range(8)], [1, 2, 3, 4, 99, 0, 0, 0, 0])  # 8 deep, 4 accepted
    broken = ([*range(9)], [-1, *range(8)], [1, 2, 3, 4, 5, 6, 7, 8, -1])
    result = run(ops, [wide, chain_of(8), broken], 4)
    assert result.accepted.tolist() == [4, -1, -1]
    assert result.status.tolist() == [SUCCESS, [9, 8, 4], [6, 8, 0]]
    assert run(ops, [chain_of(31)], 31).path[0].tolist() == list(range(32))
    assert run(ops, [chain_of(32)], 31).status.tolist() == [[9, 32, 31]]
    assert run(ops, [chain_of(0)], 0).path.tolist() == [[0]]


def test_the_largest_tree(ops):
    """1,024 nodes: one with 1,023 siblings, and 34 chains of the deepest kind that end in a twin or do not."""
    fan = ([0, *range(1, 1025)], [-1] + [0] * 1024, [1024] + [7] * 1024)
    tokens, parents = [0], [-1]
    for chain in range(1, 34):
        tokens += [chain, *range(30)]
        parents += [0, *range(len(parents), len(parents) + 30)]
    tokens, parents = [*tokens, 55], [*parents, 0]
    choices = [33, *[*range(30), 1000] * 33, 5]
    twin = ([*tokens[:-1], 33], parents, choices)
    result = run(ops, [fan, (tokens, parents, choices), twin], 31)
    assert result.path[0, :3].tolist() == [0, 1024, -1]
    assert result.path[1].tolist() == [0, *range(993, 1024)]
    assert result.bonus[1] == 1000
    assert result.status[2].tolist() == [8, 1024, 993]


def test_requests_that_failed_before_are_passed_over(ops):
    """Also where `before` and the status are one array, and whatever stands in the trees of those requests."""
    before = np.array([SUCCESS, [1, 2, 3], SUCCESS, [11, 70, 64]], np.int32)
    trees = [chain_of(3), ([0, 1], [-1, 9], [1, -1]), ([0, 1], [-1, 9], [1, -1]), chain_of(2)]
    arrays = [to_device(ops, array) for array in batch(trees, 3, GARBAGE[0])]
    tokens, parents, choices, node_count = arrays
    node_count[1] = -5
    separate = to_device(ops, before)
    same = to_device(ops, before)
    expected = [SUCCESS, [1, 2, 3], [7, 1, 9], [11, 70, 64]]
    for given, out in ((separate, None), (same, {"status": same})):
        result = ops.tree_accept(tokens, parents, node_count, choices, 3, before=given, out=out).to_host()
        assert result.status.tolist() == expected
        assert result.accepted.tolist() == [3, -1, -1, -1]
        assert result.path.tolist() == [[0, 1, 2, 3]] + [[-1] * 4] * 3
        assert result.bonus.tolist() == [4, -1, -1, -1]
    assert to_host(ops, separate).tolist() == before.tolist()


@pytest.mark.parametrize("count", [-1, 4, 2**31 - 1, -(2**31)])
def test_a_node_count_outside_the_block_is_refused(ops, count):
    tokens, parents, choices, _ = (to_device(ops, array) for array in batch([chain_of(3)] * 2, 3, 0))
    node_count = to_device(ops, np.array([count, 3], np.int32))
    result = ops.tree_accept(tokens, parents, node_count, choices, 3).to_host()
    assert result.status.tolist() == [[9, count, 3], SUCCESS]
    assert result.accepted.tolist() == [-1, 3]
    with pytest.raises(RequestError, match=f"request 0: its own size {count} is not in 0..3"):
        result.raise_for_status()


@pytest.mark.parametrize("offset", range(4))
def test_only_the_outputs_are_written_at_any_alignment(ops, offset):
    rng = np.random.default_rng(offset)
    trees = [random_tree(rng, 20, 3, 0) for _ in range(5)]
    shapes = {"accepted": (5,), "path": (5, 8), "bonus": (5,), "status": (5, 3)}
    out = {name: guarded(ops, shape, np.int32, name, offset) for name, shape in shapes.items()}
    arrays = [guarded(ops, array.shape, np.int32, offset=offset) for array in batch(trees, 19, 0)]
    for array, values in zip(arrays, batch(trees, 19, 0), strict=True):
        array.array[...] = to_device(ops, values)
    tokens, parents, choices, node_count = (array.array for array in arrays)
    given = {name: array.array for name, array in out.items()}
    first = ops.tree_accept(tokens, parents, node_count, choices, 7, out=given).to_host()
    written = {name: array.host() for name, array in out.items()}
    for name in shapes:
        assert not out[name].untouched().any()
        np.testing.assert_array_equal(written[name], getattr(first, name))
    again = ops.tree_accept(tokens, parents, node_count, choices, 7).to_host()
    assert all(getattr(again, name).tobytes() == getattr(first, name).tobytes() for name in shapes)
    for array, values in zip(arrays, batch(trees, 19, 0), strict=True):
        np.testing.assert_array_equal(array.host(), values)


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_the_order_of_threads_changes_nothing(host_ops, seed, monkeypatch):
    rng = np.random.default_rng(11)
    trees = [random_tree(rng, int(rng.integers(40, 90)), 4, r % 3) for r in range(60)]
    trees += [(rng.integers(0, 20, 70), np.minimum(np.arange(70) - 1, 0), [0] * 70) for _ in range(20)]  # many alike
    plain = run(host_ops, trees, 31)
    check_all(plain, trees, 31)
    monkeypatch.setenv("KDTREE_HOST_SEED", seed)
    shuffled = run(host_ops, trees, 31)
    for name in ("accepted", "path", "bonus", "status"):
        assert getattr(shuffled, name).tobytes() == getattr(plain, name).tobytes()


def test_sizes_out_of_range_are_refused_with_their_numbers(ops):
    def call(rows: int, depth_limit: int) -> Any:
        tokens = to_device(ops, np.zeros((1, rows), np.int32))
        return ops.tree_accept(tokens, tokens, to_device(ops, np.zeros(1, np.int32)), tokens, depth_limit)

    with pytest.raises(SizeError, match=r"budget is 1025, it must be in \[0, 1024\]"):
        call(1026, 3)
    with pytest.raises(SizeError, match=r"depth_limit is 32, it must be in \[0, 31\]"):
        call(3, 32)
