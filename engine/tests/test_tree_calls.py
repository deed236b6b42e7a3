"""What a call of the tree builder takes and refuses: arrays, sizes, shared memory; and both stages as logits_tree."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from engine import abi
from engine.abi import AlignmentError, PointerError, SizeError, UnsupportedError, VersionError
from engine.arrays import view
from engine.ops import Ops
from engine.tests.backends import guarded, to_device
from engine.tests.tree_checks import assert_same, built, outputs
from engine.tests.tree_lists import lists_of, mixed_batch
from reference.topk import topk_logprob

PROFILE_99_KIB = 99 * 1024  # the most a block may have on compute capability 12.0
OPTIONAL = ("root_tokens", "prefix_lengths", "depth_limits", "budgets", "before", "positions", "visibility", "paths")
REQUIRED = ("lp", "ids", "node_count", "tokens", "parents", "depths", "ranks", "scores", "status")


class Arguments:
    """The struct of a call of 2 requests with all its arrays, outputs guarded, to be spoiled by a test."""

    SHAPE, BUDGET = (2, 3, 4), 8

    def __init__(self, ops):
        self.ops = ops
        requests, depth, width = self.SHAPE
        lp, ids = lists_of("drafter", np.random.default_rng(0), self.SHAPE, ends=0)
        own = np.zeros(requests, np.int32)
        inputs = {"lp": lp, "ids": ids, "before": np.zeros((requests, 3), np.int32)}
        inputs |= dict.fromkeys(("root_tokens", "prefix_lengths"), own)
        inputs |= {"depth_limits": own + depth, "budgets": own + self.BUDGET}
        self.arrays = {name: to_device(ops, array) for name, array in inputs.items()}
        self.outputs = outputs(ops, self.SHAPE, self.BUDGET)
        self.arrays |= {name: output.array for name, output in self.outputs.items()}
        self.struct = abi.TreeBuildArgs(
            struct_size=ctypes.sizeof(abi.TreeBuildArgs),
            requests=requests,
            depth_limit=depth,
            width=width,
            budget=self.BUDGET,
            **{name: address(ops, array) for name, array in self.arrays.items()},
        )

    def call(self):
        library = self.ops.library
        if status := library.stage("tree_build")(ctypes.byref(self.struct)):
            library.check("tree_build", status)


def address(ops, array):
    return view("test", "array", array, ops.memory.device).pointer


def test_the_struct_of_the_refusal_tests_is_one_that_is_taken(ops):
    arguments = Arguments(ops)
    arguments.call()
    assert arguments.outputs["node_count"].host().tolist() == [8, 8]
    assert not any(output.untouched().any() for output in arguments.outputs.values())


@pytest.mark.parametrize(
    ("field", "value", "error", "words"),
    [
        ("struct_size", 8, VersionError, f"struct_size is 8, this library's is {ctypes.sizeof(abi.TreeBuildArgs)}"),
        ("requests", 0, SizeError, "requests is 0, it must be in [1, 65535]"),
        ("requests", 65536, SizeError, "requests is 65536, it must be in [1, 65535]"),
        ("depth_limit", -1, SizeError, "depth_limit is -1, it must be in [0, 31]"),
        ("depth_limit", 32, SizeError, "depth_limit is 32, it must be in [0, 31]"),
        ("width", -1, SizeError, "width is -1, it must be in [0, 1024]"),
        ("width", 1025, SizeError, "width is 1025, it must be in [0, 1024]"),
        ("budget", -1, SizeError, "budget is -1, it must be in [0, 1024]"),
        ("budget", 1025, SizeError, "budget is 1025, it must be in [0, 1024]"),
        ("vocab_size", -1, SizeError, "vocab_size is -1, it must be in [0, 2147483647]"),
        ("checked", 2, SizeError, "checked is 2, it must be in [0, 1]"),
        ("shared_memory_limit", -1, SizeError, "shared_memory_limit is -1, it must be in [0, 2147483647]"),
        ("shared_memory_limit", 1000, UnsupportedError, "which may have 1000"),
        *((name, None, PointerError, f"{name} is NULL") for name in (*REQUIRED, "first_child", "next_sibling")),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name_and_number(ops, field, value, error, words):
    arguments = Arguments(ops)
    setattr(arguments.struct, field, value)
    with pytest.raises(error) as refused:
        arguments.call()
    assert str(refused.value).startswith("kdtree_tree_build: ")
    assert words in str(refused.value)
    assert all(output.untouched().all() for output in arguments.outputs.values())


def test_an_array_between_two_elements_is_refused_by_name(ops):
    """Case C38."""
    for name in Arguments(ops).arrays:
        arguments = Arguments(ops)
        size = arguments.arrays[name].dtype.itemsize
        for offset in (1, 2, size // 2):
            setattr(arguments.struct, name, address(ops, arguments.arrays[name]) + offset)
            with pytest.raises(AlignmentError, match=rf"kdtree_tree_build: {name} at .* aligned to {size} bytes"):
                arguments.call()
        assert all(output.untouched().all() for output in arguments.outputs.values())


def test_a_call_without_a_struct_is_refused(ops):
    library = ops.library
    for name in ("tree_build", "logits_tree"):
        structs = [None] * len(abi.ARGUMENTS[name])
        with pytest.raises(PointerError, match=f"kdtree_{name}: .* NULL"):
            library.check(name, library.stage(name)(*structs))


def test_arrays_that_nobody_asks_for_may_be_missing(ops):
    arguments = Arguments(ops)
    for name in (*OPTIONAL, "first_child", "next_sibling", "route"):
        setattr(arguments.struct, name, None)
    arguments.call()
    assert arguments.outputs["node_count"].host().tolist() == [8, 8]
    assert not arguments.outputs["scores"].untouched().any()


def test_lists_need_no_array_where_there_are_none(ops):
    for field in ("depth_limit", "width"):
        arguments = Arguments(ops)
        for name in ("lp", "ids", "depth_limits"):
            setattr(arguments.struct, name, None)
        setattr(arguments.struct, field, 0)
        arguments.struct.paths = None  # of another shape without depths
        arguments.call()
        assert arguments.outputs["node_count"].host().tolist() == [0, 0]


def test_optional_arrays_may_be_left_out(ops):
    lp, ids = mixed_batch(np.random.default_rng(13))
    whole = built(ops, lp, ids, 40)
    for arrays in ((), ("paths",), ("visibility", "positions"), ("first_child", "next_sibling")):
        trees = ops.tree_build(to_device(ops, lp), to_device(ops, ids), 40, arrays=arrays).to_host()
        names = ("node_count", "tokens", "parents", "depths", "ranks", "scores", "route", "status", *arrays)
        assert_same({name: getattr(trees, name) for name in names}, {name: whole[name] for name in names}, str(arrays))
        assert all(getattr(trees, name) is None for name in set(trees.OPTIONAL) - set(arrays))


def test_arrays_that_lie_off_16_bytes(ops):
    """Case C38: all that is asked for is the alignment of an element."""
    lp, ids = mixed_batch(np.random.default_rng(14))
    expected = built(ops, lp, ids, 40)
    for offset in (1, 2, 3):
        lists = []
        for array in (lp, ids):
            lists.append(guarded(ops, array.shape, array.dtype, offset=offset).array)
            lists[-1][...] = to_device(ops, array)
        trees = ops.tree_build(*lists, 40).to_host()
        assert_same({name: getattr(trees, name) for name in expected}, expected, f"offset {offset}")


# --- shared memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "budget"), [((1, 31, 512), 512), ((1, 15, 1024), 700), ((1, 31, 1024), 1024)])
def test_trees_are_the_same_with_less_shared_memory(ops, shape, budget):
    """Case C37: what has no place there stays in global memory."""
    rng = np.random.default_rng(15)
    for kind in ("drafter", "quarters"):
        lp, ids = lists_of(kind, rng, shape)
        whole = built(ops, lp, ids, budget)
        for limit in (60_000, 90_000, PROFILE_99_KIB):
            build = partial(built, ops, lp, ids, budget, shared_memory_limit=limit)
            if budget == 1024 and limit == 60_000:
                with pytest.raises(UnsupportedError, match=r"at least 6\d{4} bytes of shared memory.* 60000"):
                    build()
            else:
                assert_same(build(), whole, f"{kind} {limit}")


def test_a_limit_counts_all_the_shared_memory_of_a_block(ops):
    """One byte less than the least is refused with both numbers, the least is enough."""
    lp, ids = lists_of("drafter", np.random.default_rng(16), (1, 7, 64), ends=0)
    whole = built(ops, lp, ids, 64)
    with pytest.raises(UnsupportedError, match=r"depth limit 7, width 64, budget 64.* at least ") as refused:
        built(ops, lp, ids, 64, shared_memory_limit=1)
    least = int(str(refused.value).partition("at least ")[2].split()[0])
    with pytest.raises(UnsupportedError, match=f"at least {least} bytes .* {least - 1}"):
        built(ops, lp, ids, 64, shared_memory_limit=least - 1)
    assert_same(built(ops, lp, ids, 64, shared_memory_limit=least), whole)


def test_a_device_with_little_shared_memory_is_given_what_it_has(host_ops, monkeypatch):
    lp, ids = lists_of("drafter", np.random.default_rng(17), (1, 31, 512), ends=0)
    whole = built(host_ops, lp, ids, 512)
    monkeypatch.setenv("KDTREE_HOST_SHARED_MEMORY", "60000")
    assert_same(built(host_ops, lp, ids, 512), whole)
    assert_same(built(host_ops, lp, ids, 512, shared_memory_limit=PROFILE_99_KIB), whole)
    monkeypatch.setenv("KDTREE_HOST_SHARED_MEMORY", "30000")
    with pytest.raises(UnsupportedError, match=r"at least \d+ bytes of shared memory.* 30000"):
        built(host_ops, lp, ids, 512)


def test_calls_of_different_sizes_from_several_threads(ops):
    """Each thread has an Ops of its own; kernels, and how much shared memory they may have, are the process's."""
    rng = np.random.default_rng(22)
    sizes = (((1, 1, 2), 1), ((1, 31, 600), 600))
    cases = [(*lists_of("drafter", rng, shape), budget) for shape, budget in sizes]
    alone = [built(ops, lp, ids, budget) for lp, ids, budget in cases]

    def work(case):
        lp, ids, budget = cases[case]
        own = Ops(ops.library, ops.memory)
        for _ in range(30):
            assert_same(built(own, lp, ids, budget), alone[case])

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, i % 2) for i in range(4)]:
            done.result()


# --- logits -> trees --------------------------------------------------------------------------------------------------


def logits_of(rng, shape, dtype, vocab_size):
    """float32 or bfloat16 bits, with garbage behind the vocabulary."""
    logits = (rng.normal(size=shape) * 3).astype(np.float32)
    logits[..., vocab_size:] = np.nan
    if dtype == "float32":
        return logits, logits
    bits = (logits.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("physical", "vocab_size", "k", "budget"), [(1000, 1000, 64, 64), (129, 100, 100, 300)])
def test_logits_tree_is_both_stages(ops, dtype, physical, vocab_size, k, budget):
    rng = np.random.default_rng(18)
    given, values = logits_of(rng, (3, 5, physical), dtype, vocab_size)
    own = {
        "depth_limits": np.array([5, 0, 3], np.int32),
        "budgets": np.array([budget, 7, budget], np.int32),
        "root_tokens": np.array([1, 2, 3], np.int32),
        "prefix_lengths": np.array([10, 20, 30], np.int32),
    }
    held = {name: to_device(ops, array) for name, array in own.items()}
    logits = to_device(ops, given)
    trees = ops.logits_tree(logits, k, budget, vocab_size=vocab_size, dtype=dtype, **held).to_host()
    limits = held.pop("depth_limits")
    lists = ops.topk_logprob(logits, k, vocab_size=vocab_size, dtype=dtype, depth_limits=limits)
    alone = ops.tree_build(lists.lp, lists.ids, budget, depth_limits=limits, vocab_size=vocab_size, **held).to_host()
    names = ("node_count", "tokens", "parents", "depths", "ranks", "scores", *trees.OPTIONAL, "route", "status")
    assert_same({name: getattr(trees, name) for name in names}, {name: getattr(alone, name) for name in names})
    assert trees.node_count.tolist()[1] == 0
    assert trees.node_count.tolist()[0] == budget
    for r in (0, 2):
        ids = topk_logprob(values[r, : own["depth_limits"][r]], k, vocab_size).ids
        depth, rank = trees.depths[r, 1:], trees.ranks[r, 1:]
        np.testing.assert_array_equal(trees.tokens[r, 1:], ids[depth - 1, rank])


def test_a_request_whose_logits_are_refused_gets_no_tree(ops):
    logits = np.random.default_rng(19).normal(size=(3, 4, 200)).astype(np.float32)
    logits[1, 2, 77], logits[2, 0, 5] = np.nan, np.inf
    before = to_device(ops, np.array([[0, 0, 0], [0, 0, 0], [8, 1, 2]], np.int32))
    trees = ops.logits_tree(to_device(ops, logits), 16, 20, before=before).to_host()
    assert trees.status.tolist() == [[0, 0, 0], [1, 3, 77], [8, 1, 2]]
    assert trees.node_count.tolist() == [20, 0, 0]


def logits_tree_arguments(ops):
    """The structs of logits_tree around Arguments, and the outputs of its first stage."""
    tree = Arguments(ops)
    requests, depth, k = tree.SHAPE
    logits = to_device(ops, np.random.default_rng(20).normal(size=(requests, depth, 50)).astype(np.float32))
    made = {
        "ids": guarded(ops, tree.SHAPE, np.int32, "ids"),
        "lp": guarded(ops, tree.SHAPE, np.float32, "lp"),
        "logz": guarded(ops, (requests, depth), np.float32, "logz"),
        "status": guarded(ops, (requests, 3), np.int32, "status"),
    }
    size = ops.library.workspace("topk_logprob", requests, depth, 50, k)
    workspace, kept = ops.memory.workspace(size, 0)
    topk = abi.TopkLogprobArgs(
        struct_size=ctypes.sizeof(abi.TopkLogprobArgs),
        requests=requests,
        depth_limit=depth,
        vocab_size=50,
        k=k,
        row_stride=50,
        logits=address(ops, logits),
        depth_limits=tree.struct.depth_limits,
        workspace=workspace,
        workspace_size=size,
        **{name: address(ops, output.array) for name, output in made.items()},
    )
    tree.struct.lp, tree.struct.ids = topk.lp, topk.ids
    return topk, tree, made, (logits, kept)


@pytest.mark.parametrize(
    ("stage", "field", "value", "error", "words"),
    [
        ("topk", "struct_size", 8, VersionError, "struct_size is 8"),
        ("tree", "struct_size", 8, VersionError, "struct_size is 8"),
        ("tree", "requests", 1, SizeError, "tree.requests is 1, it must be in [2, 2]"),
        ("tree", "depth_limit", 2, SizeError, "tree.depth_limit is 2, it must be in [3, 3]"),
        ("tree", "width", 3, SizeError, "tree.width is 3, it must be in [4, 4]"),
        ("tree", "lp", 4096, PointerError, "lp, ids, depth_limits and stream of tree must be those of topk"),
        ("tree", "ids", 4096, PointerError, "lp, ids, depth_limits and stream of tree must be those of topk"),
        ("tree", "depth_limits", None, PointerError, "lp, ids, depth_limits and stream of tree must be those of topk"),
        ("tree", "budget", 1025, SizeError, "budget is 1025"),
        ("tree", "status", None, PointerError, "status is NULL"),
        ("tree", "shared_memory_limit", 1000, UnsupportedError, "which may have 1000"),
    ],
)
def test_logits_tree_refuses_before_anything_is_enqueued(ops, stage, field, value, error, words):
    topk, tree, made, kept = logits_tree_arguments(ops)
    setattr(topk if stage == "topk" else tree.struct, field, value)
    library = ops.library
    with pytest.raises(error) as refused:
        library.check("logits_tree", library.stage("logits_tree")(ctypes.byref(topk), ctypes.byref(tree.struct)))
    assert words in str(refused.value)
    assert all(output.untouched().all() for output in (*tree.outputs.values(), *made.values()))
    del kept


def test_the_structs_of_the_refusals_of_logits_tree_are_ones_that_are_taken(ops):
    topk, tree, made, kept = logits_tree_arguments(ops)
    assert ops.library.stage("logits_tree")(ctypes.byref(topk), ctypes.byref(tree.struct)) == 0
    assert tree.outputs["node_count"].host().tolist() == [8, 8]
    assert not any(output.untouched().any() for output in made.values())
    del kept
