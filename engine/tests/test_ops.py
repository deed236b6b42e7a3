"""Every stage through its Python call: the reference's results, what calls refuse, plans, outputs and workspaces."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import engine.ops
from engine.abi import RequestError, SizeError
from engine.arrays import ArrayError
from engine.ops import Cache, Ops
from engine.plan import Workspace
from engine.results import Trees
from engine.tests.backends import guarded, is_host, to_device, to_host
from reference.accept import accept
from reference.sampling import SamplingParams, choose_rows
from reference.topk import topk_logprob
from reference.tree import build_tree

R, L, V, K, B = 3, 5, 200, 12, 20


@pytest.fixture
def logits() -> Any:
    return (3 * np.random.default_rng(1).standard_normal((R, L, V))).astype(np.float32)


def lists_of(logits: Any, k: int = K) -> tuple[Any, Any]:
    found = [topk_logprob(each, k) for each in logits]
    return np.stack([f.lp for f in found]), np.stack([f.ids for f in found])


def given(ops: Ops, *arrays: Any) -> list[Any]:
    return [to_device(ops, array) for array in arrays]


def deepest_choices(trees: Trees, requests: int = R) -> Any:
    """int32 [R, 1+B]: choices that accept the path to the deepest node of each tree, then token 0."""
    on_host = trees.to_host()
    choices = np.zeros(on_host.tokens.shape, np.int32)
    for request in range(requests):
        tree = on_host.tree(request)
        path = tree["paths"][np.argmax(tree["depths"])]
        path = path[path >= 0]
        choices[request, path[:-1]] = on_host.tokens[request, path[1:]]
    return choices


def test_a_round_stage_by_stage_gives_the_references_results(ops, logits):
    lp, ids = lists_of(logits)
    roots, prefixes = np.array([7, 8, 9], np.int32), np.array([30, 0, 4], np.int32)
    lists = ops.topk_logprob(to_device(ops, logits), K)
    assert_array_equal(to_host(ops, lists.ids), ids)
    np.testing.assert_allclose(to_host(ops, lists.lp), lp, rtol=0, atol=4e-6)

    trees = ops.tree_build(
        *given(ops, lp, ids),
        B,
        root_tokens=to_device(ops, roots),
        prefix_lengths=to_device(ops, prefixes),
        before=lists,
    )
    trees.raise_for_status()
    for request in range(R):
        tree, found = build_tree(lp[request], ids[request], B, int(roots[request])), trees.tree(request)
        first_child, next_sibling = tree.links()
        wanted = {
            **{name: getattr(tree, name) for name in ("tokens", "parents", "depths", "ranks", "scores", "node_count")},
            "positions": tree.positions(int(prefixes[request])),
            "visibility": tree.visibility_words(),
            "paths": tree.paths(L),
            "first_child": first_child,
            "next_sibling": next_sibling,
        }
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            assert_array_equal(found[name], array, err_msg=name, strict=name != "node_count")

    choices = deepest_choices(trees)
    accepted = ops.tree_accept(trees.tokens, trees.parents, trees.node_count, to_device(ops, choices), L, before=trees)
    accepted.raise_for_status()
    host_trees, found = trees.to_host(), accepted.to_host()
    for request in range(R):
        tree = host_trees.tree(request)
        wanted_path = accept(tree["tokens"], tree["parents"], choices[request, : len(tree["tokens"])])
        assert found.accepted[request] == len(wanted_path.nodes) - 1 > 1
        assert_array_equal(found.path[request, : len(wanted_path.nodes)], wanted_path.nodes)
        assert (found.path[request, len(wanted_path.nodes) :] == -1).all()
        assert found.bonus[request] == wanted_path.bonus

    rows = np.random.default_rng(2).standard_normal((4, R, 30 + B + 1, 6)).astype(np.float32)
    cache = to_device(ops, rows)
    compacted = ops.kv_compact(Cache(cache), to_device(ops, prefixes), accepted.accepted, accepted.path)
    compacted.raise_for_status()
    for request in range(R):
        nodes = found.path[request, : found.accepted[request] + 1]
        rows[:, request, prefixes[request] : prefixes[request] + len(nodes)] = rows[
            :, request, prefixes[request] + nodes
        ]
    moved = [(found.path[r, : found.accepted[r] + 1] != np.arange(found.accepted[r] + 1)).sum() for r in range(R)]
    assert_array_equal(to_host(ops, compacted.moved), moved)
    for request in range(R):
        kept = prefixes[request] + found.accepted[request] + 1
        assert_array_equal(to_host(ops, cache)[:, request, :kept], rows[:, request, :kept])


def test_logits_to_trees_in_one_call_equals_the_two_stages(ops, logits):
    device = to_device(ops, logits)
    lists = ops.topk_logprob(device, K)
    apart, together = ops.tree_build(lists.lp, lists.ids, B, checked=True), ops.logits_tree(device, K, B)
    assert together.lists is not None
    for name in ("ids", "lp", "logz"):
        assert_array_equal(to_host(ops, getattr(together.lists, name)), to_host(ops, getattr(lists, name)))
    for name in ("node_count", "tokens", "parents", "scores", "visibility", "paths", "route"):
        assert_array_equal(to_host(ops, getattr(together, name)), to_host(ops, getattr(apart, name)), err_msg=name)
    assert set(together.routes()) <= {"parallel", "serial"}
    copied = together.to_host()
    assert copied.lists is not None
    assert_array_equal(copied.lists.ids, to_host(ops, lists.ids))


def test_choices_greedy_and_drawn_are_the_references(ops):
    rows = np.random.default_rng(3).standard_normal((2, 4, 50)).astype(np.float32)
    rows[1, 2] = np.nan
    count, positions = np.array([3, 2], np.int32), np.array([[5, 6, 6, 7], [0, 1, 2, 3]], np.int32)
    out = guarded(ops, (2, 4), np.int32, "choices")
    found = ops.target_choice(to_device(ops, rows), node_count=to_device(ops, count), out=out.array)
    assert found is out.array
    assert_array_equal(out.host()[0], rows[0].argmax(1))
    assert out.host()[1, :3].tolist() == [*rows[1, :2].argmax(1), -1]
    assert out.untouched().tolist() == [[False] * 4, [False, False, False, True]]
    own = {
        "temperatures": np.array([0.75, 1.5], np.float32),
        "top_k": np.array([0, 9], np.int32),
        "top_p": np.array([0.875, 1.0], np.float32),
        "seeds": np.array([2**63 + 5, 0], np.uint64),
    }
    device = {name: to_device(ops, array) for name, array in own.items()}
    drawn = ops.target_choice(to_device(ops, rows[:, :2]), positions=to_device(ops, positions[:, :2]), **device)
    params = (SamplingParams(0.75, 0, 0.875, 2**63 + 5), SamplingParams(1.5, 9))
    wanted = [choose_rows(rows[r, :2], params[r], positions[r, :2]) for r in range(2)]
    assert_array_equal(to_host(ops, drawn), wanted)


def test_the_cpp_heap_takes_numpy_arrays_in_every_library(ops, logits):
    lp, ids = lists_of(logits)
    lp[1, 2, 3] = np.nan
    trees = ops.heap_tree(lp, ids, B, budgets=np.array([B, B, 4], np.int32), arrays=("positions",))
    assert [str(error) for error in trees.errors()] == ["request 1, depth 3, rank 3: the log-probability is NaN"]
    assert trees.node_count.tolist() == [B, 0, 4]
    assert_array_equal(trees.tree(0)["scores"], build_tree(lp[0], ids[0], B).scores)
    assert (trees.route, trees.visibility, trees.first_child) == (None, None, None)
    assert trees.to_host().positions.shape == (R, 1 + B)
    with pytest.raises(ArrayError, match="heap_tree: lp must be "):
        ops.heap_tree([1], ids, B)


@pytest.mark.parametrize("vocab", [1, 31, V - 3])
def test_padding_of_the_vocabulary_and_gaps_between_rows_are_skipped(ops, logits, vocab):
    padded = np.full((R, L, V + 56), np.nan, np.float32)
    padded[:, :, :vocab] = logits[:, :, :vocab]
    wide = to_device(ops, padded)
    for rows in (wide, wide[:, :, :V]):  # the second has rows that lie apart
        lists = ops.topk_logprob(rows, K, vocab_size=vocab)
        lists.raise_for_status()
        assert_array_equal(to_host(ops, lists.ids), lists_of(logits[:, :, :vocab])[1])
        choices = ops.target_choice(rows, vocab_size=vocab)
        assert_array_equal(to_host(ops, choices), logits[:, :, :vocab].argmax(-1))
    one = ops.topk_logprob(wide[:, :1, :V][::2], K, vocab_size=vocab)  # one row a request
    assert_array_equal(to_host(ops, one.ids), lists_of(logits[::2, :1, :vocab])[1])


def test_logits_of_bfloat16_as_their_own_type_or_as_bits(ops, logits):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    small = logits.astype(ml_dtypes.bfloat16)
    wanted = lists_of(small)[1]
    assert_array_equal(to_host(ops, ops.topk_logprob(to_device(ops, small), K, dtype="bfloat16").ids), wanted)
    assert_array_equal(to_host(ops, ops.logits_tree(to_device(ops, small), K, 3, dtype="bfloat16").lists.ids), wanted)
    bits = to_device(ops, small)
    assert_array_equal(to_host(ops, ops.target_choice(bits, dtype="bfloat16")), small.astype(np.float32).argmax(-1))
    with pytest.raises(ArrayError, match="topk_logprob: logits must be float32 or bfloat16, got uint16"):
        ops.topk_logprob(bits, K)
    if is_host(ops):
        assert_array_equal(ops.topk_logprob(small, K).ids, wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[0], r"an array of 3 axes, got float32 \[5, 200\]"),
        (lambda x: x[:, :, ::2], r"C-contiguous, got float32 \[3, 5, 100\] with strides"),
        (lambda x: x[:, ::2], r"rows at one distance, not overlapping, got float32 \[3, 3, 200\] with strides"),
        (lambda x: x[:, ::-1], r"rows at one distance"),
    ],
)
def test_logits_whose_rows_do_not_lie_as_the_kernel_reads_them_are_refused(ops, logits, change, message):
    array = change(to_device(ops, logits))
    with pytest.raises(ArrayError, match=f"topk_logprob: logits must be {message}"):
        ops.topk_logprob(array, K)


def test_k_is_cut_to_the_vocabulary_and_sizes_out_of_range_are_refused_before_anything_is_made(ops, logits):
    rows = to_device(ops, logits)
    assert ops.topk_logprob(rows, 10**6, vocab_size=7).ids.shape == (R, L, 7)
    lp, ids = given(ops, *lists_of(logits))
    tokens = to_device(ops, np.zeros((1, 3), np.int32))
    one = to_device(ops, np.zeros(1, np.int32))
    for call, message in (
        (lambda: ops.topk_logprob(rows, -1), "k is -1"),
        (lambda: ops.topk_logprob(rows, K, vocab_size=0), r"vocab_size is 0, it must be in \[1, 200\]"),
        (lambda: ops.topk_logprob(rows, K, vocab_size=V + 1), r"vocab_size is 201"),
        (lambda: ops.topk_logprob(to_device(ops, np.zeros((1, 1, 3000), np.float32)), 1025), "k is 1025"),
        (lambda: ops.tree_build(lp, ids, -1), r"budget is -1, it must be in \[0, 1024\]"),
        (lambda: ops.tree_build(lp, ids, 10**12), "budget is 1000000000000"),
        (lambda: ops.tree_build(lp, ids, 3, vocab_size=2**32 + 5), "vocab_size is 4294967301"),
        (lambda: ops.tree_accept(tokens, tokens, one, tokens, 32), r"depth_limit is 32, it must be in \[0, 31\]"),
        (
            lambda: ops.tree_build(*given(ops, np.zeros((0, 2, 2), np.float32), np.zeros((0, 2, 2), np.int32)), 3),
            "is 0",
        ),
        (lambda: ops.target_choice(rows, vocab_size=V + 1), "vocab_size is 201"),
    ):
        with pytest.raises(SizeError, match=message):
            call()


@pytest.mark.parametrize(("depth", "width", "budget"), [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0)])
def test_empty_lists_and_no_budget_give_roots(ops, depth, width, budget):
    lp = -np.sort(np.random.default_rng(0).exponential(1, (2, depth, width)).astype(np.float32))
    ids = np.broadcast_to(np.arange(width, dtype=np.int32), (2, depth, width)).copy()
    trees = ops.tree_build(*given(ops, lp, ids), budget, root_tokens=to_device(ops, np.array([4, 5], np.int32)))
    trees.raise_for_status()
    assert [trees.tree(r)["tokens"].tolist() for r in range(2)] == [[4], [5]]
    assert trees.routes() == ["none", "none"]


def test_wrong_arrays_are_named(ops, logits):
    lp, ids = given(ops, *lists_of(logits))
    roots = to_device(ops, np.zeros(R + 1, np.int32))
    with pytest.raises(ArrayError, match=r"tree_build: root_tokens must be int32 \[3\], got int32 \[4\]"):
        ops.tree_build(lp, ids, B, root_tokens=roots)
    with pytest.raises(ArrayError, match=r"tree_build: ids must be int32 \[3, 5, 12\], got float32 \[3, 5, 12\]"):
        ops.tree_build(lp, lp, B)
    with pytest.raises(ArrayError, match=r"arrays must be some of positions, .*, got parents, widths"):
        ops.tree_build(lp, ids, B, arrays=("paths", "widths", "parents"))
    with pytest.raises(ArrayError, match=r"out must be of node_count, .*, got pathes"):
        ops.tree_build(lp, ids, B, out={"pathes": roots})
    with pytest.raises(ArrayError, match=r"tree_build: scores must be float64 \[3, 21\], got int32 \[4\]"):
        ops.tree_build(lp, ids, B, out={"scores": roots})
    with pytest.raises(ArrayError, match=r"before must be int32 \[3, 3\]"):
        ops.tree_build(lp, ids, B, before=roots)


def test_outputs_may_be_given_and_nothing_around_them_is_written(ops, logits):
    lp, ids = given(ops, *lists_of(logits))
    shapes = {
        "tokens": ((R, 1 + B), np.int32),
        "scores": ((R, 1 + B), np.float64),
        "paths": ((R, 1 + B, L + 1), np.int32),
    }
    out = {name: guarded(ops, *shape, name, offset=1) for name, shape in shapes.items()}
    trees = ops.tree_build(lp, ids, B, arrays=("paths",), out={name: guard.array for name, guard in out.items()})
    plain = ops.tree_build(lp, ids, B)
    for name, guard in out.items():
        assert getattr(trees, name) is guard.array
        assert_array_equal(guard.host(), to_host(ops, getattr(plain, name)))
        assert not guard.untouched().any()
    assert trees.positions is None
    assert trees.tree(0).keys() == {"node_count", "tokens", "parents", "depths", "ranks", "scores", "paths"}


def test_a_guard_tells_what_was_written_outside(ops):
    guard = guarded(ops, (2, 3), np.int32, "victim")
    assert guard.untouched().all()
    guard.whole[guard.start - 2 : guard.start - 1] = 0
    with pytest.raises(AssertionError, match="1 bytes before victim were written"):
        guard.host()


def test_a_plan_runs_again_on_the_same_arrays(ops, logits):
    lp, ids = lists_of(logits)
    device = given(ops, lp, ids)
    plan = ops.tree_build.plan(*device, B)
    first = plan.call()
    assert first is plan.result
    wanted = to_host(ops, ops.tree_build(*device, B).scores)
    assert_array_equal(to_host(ops, first.scores), wanted)
    turned = given(ops, lp[::-1].copy(), ids[::-1].copy())
    for kept, new in zip(device, turned, strict=True):
        kept[...] = new
    for _ in range(2):
        plan.call()
        assert_array_equal(to_host(ops, plan.result.scores), wanted[::-1])


def test_a_plan_keeps_its_arrays_and_has_a_workspace_of_its_own(ops, logits):
    rows = to_device(ops, np.tile(logits, (1, 1, 40)))
    plan, other = (ops.logits_tree.plan(rows, K, B) for _ in range(2))
    wanted = to_host(ops, plan.call().scores)
    del rows
    gc.collect()
    ops.logits_tree(to_device(ops, np.zeros((R, L, 40 * V), np.float32)), K, B)
    other.call()
    assert_array_equal(to_host(ops, plan.call().scores), wanted)
    held = [
        struct.workspace for p in (plan, other) for struct in (call.struct for call in p._calls) if struct.workspace
    ]
    assert len(set(held)) == len(held)


def test_a_workspace_grows_and_is_used_again(ops):
    workspace = Workspace(ops.memory, 0)
    small, _ = workspace.take(100)
    assert workspace.take(50)[0] == small
    large, block = workspace.take(10**6)
    assert workspace.take(10**6 - 1) == (large, block)
    assert workspace.take(1)[0] == large


def test_a_failed_request_is_carried_to_the_end_and_named_as_it_was_found(ops, logits):
    logits[1, 2, 77] = np.nan
    lp, ids = lists_of(np.nan_to_num(logits))
    lp[2, 0, 4] = np.inf
    lists = ops.topk_logprob(to_device(ops, logits), K)
    trees = ops.tree_build(*given(ops, lp, ids), B, before=lists)
    choices = to_device(ops, np.zeros((R, 1 + B), np.int32))
    accepted = ops.tree_accept(trees.tokens, trees.parents, trees.node_count, choices, L, before=trees)
    found = "request 1, depth 3, token 77: the logit is NaN"
    own = "request 2, depth 1, rank 4: the log-probability is +inf"
    assert [str(error) for error in lists.errors()] == [found]
    for result in (trees, accepted, accepted.to_host()):
        assert [str(error) for error in result.errors()] == [found, own]
    with pytest.raises(RequestError, match="request 1, depth 3, token 77") as caught:
        accepted.raise_for_status()
    assert (caught.value.request, caught.value.code, caught.value.place, caught.value.detail) == (1, 1, 3, 77)
    assert caught.value.__notes__ == [own]
    assert to_host(ops, accepted.accepted).tolist()[1:] == [-1, -1]

    unsure = "request 1, depth 3, token or rank 77: the logit or log-probability is NaN"
    raw = ops.tree_build(*given(ops, lp, ids), B, before=lists.status)
    assert str(raw.errors()[0]) == unsure
    same = ops.tree_build(*given(ops, lp, ids), B, before=lists, out={"status": lists.status})
    assert str(same.errors()[0]) == unsure
    assert str(ops.logits_tree(to_device(ops, logits), K, B).errors()[0]) == found


def test_a_cache_may_have_gaps_and_blocks(ops):
    rng = np.random.default_rng(5)
    plain = rng.integers(0, 100, (2, R, 12, 3)).astype(np.int32)
    path = np.full((R, 4), -1, np.int32)
    path[0], path[1, :3], path[2, 0] = (0, 2, 3, 7), (0, 1, 4), 0
    numbers = np.array([3, 2, 0], np.int32), np.array([3, 5, 0], np.int32)
    accepted, prefixes = given(ops, *numbers)
    wanted = plain.copy()
    for r in range(R):
        nodes = path[r, : numbers[0][r] + 1]
        wanted[:, r, numbers[1][r] : numbers[1][r] + len(nodes)] = plain[:, r, numbers[1][r] + nodes]

    def moved(cache: Cache) -> Any:
        found = ops.kv_compact(cache, prefixes, accepted, to_device(ops, path))
        found.raise_for_status()
        return to_host(ops, found.moved).tolist()

    wide = np.full((2, R, 15, 5), -1, np.int32)
    wide[:, :, :12, 1:4] = plain
    gaps = to_device(ops, wide)
    assert moved(Cache(gaps[:, :, :12, 1:4])) == [3, 1, 0]
    kept = numbers[1] + numbers[0] + 1
    for r in range(R):
        assert_array_equal(to_host(ops, gaps)[:, r, : kept[r], 1:4], wanted[:, r, : kept[r]])
    assert (to_host(ops, gaps)[..., (0, 4)] == -1).all()
    assert (to_host(ops, gaps)[:, :, 12:] == -1).all()

    table = np.array([[8, 0, 5, 3], [1, 7, 2, 4], [6, 9, 11, 10]], np.int32)[:, :3]  # rows that lie apart
    pool = np.zeros((2, 12, 4, 3), np.int32)
    for r in range(R):
        pool[:, table[r]] = 0
        pool[:, table[r], :, :] = plain[:, r].reshape(2, 3, 4, 3)
    paged = to_device(ops, pool)
    blocks = to_device(ops, np.ascontiguousarray(np.c_[table, [[99]] * R].astype(np.int32)))[:, :3]
    assert moved(Cache(paged, blocks)) == [3, 1, 0]
    for r in range(R):
        rows = to_host(ops, paged)[:, table[r]].reshape(2, 12, 3)
        assert_array_equal(rows[:, : kept[r]], wanted[:, r, : kept[r]])
    with pytest.raises(RequestError, match="request 1: needs 10 cache rows, 8 are available"):
        ops.kv_compact(Cache(paged, blocks, capacity=8), prefixes, accepted, to_device(ops, path)).raise_for_status()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda a: Cache(a[:, :2]), "of 3 requests, got "),
        (lambda a: Cache(a[..., ::2]), "without gaps in a row"),
        (lambda a: Cache(a[:, :, ::-1]), "without gaps in a row"),
        (lambda a: Cache(a[0, 0]), "without gaps in a row, got float32"),
    ],
)
def test_caches_that_the_kernel_cannot_read_are_refused(ops, make, message):
    array = to_device(ops, np.zeros((2, R, 12, 4), np.float32))
    each, path = given(ops, np.zeros(R, np.int32), np.zeros((R, 1), np.int32))
    with pytest.raises(ArrayError, match=message):
        ops.kv_compact(make(array), each, each, path)


def test_block_tables_that_do_not_fit_and_too_large_capacities_are_refused(ops):
    pool, each, path = given(ops, np.zeros((2, 8, 4, 4), np.float32), np.zeros(R, np.int32), np.zeros((R, 1), np.int32))
    table = to_device(ops, np.zeros((R, 2), np.int32))
    with pytest.raises(ArrayError, match=r"cache.block_table must be int32 \[3, 2\], got int32 \[2, 2\]"):
        ops.kv_compact(Cache(pool, table[:2]), each, each, path)
    with pytest.raises(ArrayError, match="blocks of rows at one distance"):
        ops.kv_compact(Cache(pool[:, ::2], table), each, each, path)
    with pytest.raises(SizeError, match=r"cache.capacity is 9, it must be in \[0, 8\]"):
        ops.kv_compact(Cache(pool, table, capacity=9), each, each, path)


def test_a_kind_of_library_that_there_is_not():
    with pytest.raises(ValueError, match="'opencl'"):
        engine.ops.open("opencl")


def test_stages_say_what_they_do():
    assert "best-first trees" in str(Ops.tree_build.__doc__)
