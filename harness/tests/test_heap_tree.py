"""The C++ heap builder: the reference's trees bit for bit, its refusals, and bad calls that write nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kdtr
from harness import heap_tree
from harness.environment import CHECKOUT
from harness.heap_tree import CompilerError, HeapTree, compile_library
from reference.tests.lists import random_lists
from reference.topk import DraftError
from reference.tree import build_tree

pytestmark = pytest.mark.skipif(heap_tree.compiler() is None, reason="no C++ compiler")
GOLDEN = CHECKOUT / "datasets" / "golden"


@pytest.fixture(scope="module")
def library() -> Path:
    return compile_library()


def built(library, lp, ids, budget, root=0, prefix=0, vocab_size=0):
    native = HeapTree(library, 1, lp.shape[0], lp.shape[1], budget)
    roots, prefixes = (np.array([value], np.int32) for value in (root, prefix))
    lists = (np.ascontiguousarray(array)[None] for array in (lp, ids))
    native.give(*lists, vocab_size=vocab_size, root_tokens=roots, prefix_lengths=prefixes)
    if native.call():
        raise native.refusals()[0]
    return native.tree(0)


def assert_same(found, wanted):
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("seed", range(4))
def test_trees_of_random_and_tied_lists_are_the_references(library, seed):
    rng = np.random.default_rng(seed)
    for _, lp, ids in random_lists(seed, 500, 31, 40):
        budget, root, prefix = int(rng.integers(0, 260)), int(rng.integers(0, 50)), int(rng.integers(0, 9))
        if rng.random() < 0.2:  # ends some rows
            lp = np.where(np.arange(lp.shape[1]) >= rng.integers(0, lp.shape[1] + 1), -np.inf, lp).astype(np.float32)
        wanted = build_tree(lp, ids, budget, root).padded(budget, len(lp), prefix)
        assert_same(built(library, lp, ids, budget, root, prefix), wanted)


@pytest.mark.parametrize("file", ["tree_ties", "tree_degenerate", "tree_random"])
def test_golden_trees(library, file):
    golden = kdtr.read(GOLDEN / f"{file}.kdtr")
    cases = sorted({name.rpartition("/")[0] for name in golden})
    for case in cases:
        arrays = {name.rpartition("/")[2]: golden[name] for name in golden if name.rpartition("/")[0] == case}
        lp, ids, budget = arrays["lp"], arrays["ids"], int(arrays["budget"])
        found = built(library, lp, ids, budget, arrays["root_token"], arrays["prefix_length"])
        expected = {name: golden[f"{case}/{name}"] for name in found if f"{case}/{name}" in golden}
        assert len(expected) >= 6
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name].reshape(array.shape), array, err_msg=f"{case} {name}")


@pytest.mark.parametrize(
    ("shape", "budget"),
    [((0, 4), 5), ((4, 0), 5), ((4, 4), 0), ((1, 1), 1), ((31, 2), 1024), ((1, 2000), 1024), ((31, 64), 1024)],
)
def test_degenerate_and_largest_sizes(library, shape, budget):
    lp = -np.sort(np.random.default_rng(1).exponential(1, shape).astype(np.float32), axis=1)
    ids = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    assert_same(built(library, lp, ids, budget), build_tree(lp, ids, budget).padded(budget, shape[0]))


def test_a_batch_with_sizes_of_its_own_equals_its_requests_alone(library):
    rng = np.random.default_rng(3)
    lp = -np.sort(rng.exponential(2, (6, 7, 20)).astype(np.float32), axis=2)
    ids = np.stack([np.stack([rng.permutation(20) for _ in range(7)]) for _ in range(6)]).astype(np.int32)
    lp[4, 3, 5] = np.nan
    limits, budgets = np.array([7, 0, 3, 7, 7, 1], np.int32), np.array([64, 64, 10, 0, 64, 64], np.int32)
    native = HeapTree(library, 6, 7, 20, 64)
    native.give(lp, ids, depth_limits=limits, budgets=budgets)
    for _ in range(2):  # what a call leaves in the buffers does not matter
        assert native.call() == 1
        assert [(e.request, e.depth, e.rank, e.reason) for e in native.refusals()] == [
            (4, 4, 5, "the log-probability is NaN")
        ]
        for r in (0, 1, 2, 3, 5):
            tree = build_tree(lp[r, : limits[r]], ids[r, : limits[r]], int(budgets[r]))
            assert_same(native.tree(r), tree.padded(64, 7))
        assert native.tree(4)["node_count"] == 0
        native.arrays["tokens"][:] = -7


def test_sound_lists_need_no_check(library):
    for _, lp, ids in random_lists(11, 40, 6, 12):
        native = HeapTree(library, 1, lp.shape[0], lp.shape[1], 9)
        native.status[:] = -7
        native.give(np.ascontiguousarray(lp[None]), np.ascontiguousarray(ids[None]), checked=True)
        assert (native.call(), native.status.tolist()) == (0, [[0, 0, 0]])
        assert_same(native.tree(0), build_tree(lp, ids, 9).padded(9, len(lp)))


@pytest.mark.parametrize("seed", range(6))
def test_bad_lists_are_refused_where_and_why_the_reference_refuses_them(library, seed):
    rng = np.random.default_rng(seed)
    refused = 0

    def refuse(lp, ids, budget):
        built(library, lp, ids, budget, vocab_size=30)

    for _, lp, ids in random_lists(seed, 60, 6, 12):
        lp, ids = lp.copy(), ids.copy()
        d, r = (int(rng.integers(0, n)) for n in lp.shape)
        match seed:
            case 0:
                lp[d, r] = np.nan
            case 1:
                lp[d, r] = np.inf
            case 2:
                ids[d, r] = -1
            case 3:
                ids[d, r] = 30
            case 4:
                lp[d, r:] = np.nextafter(lp[d, r - 1] if r else 0, np.float32(np.inf))
            case _:
                ids[d, r] = ids[d, (r + 1) % lp.shape[1]]
        wanted, found = (refusal(lambda *a: build_tree(*a, vocab_size=30), lp, ids), refusal(refuse, lp, ids))
        assert found == wanted
        refused += wanted is not None
    assert refused >= 30


def refusal(build, lp, ids):
    """(depth, rank, reason without its numbers), or None if the lists are taken."""
    try:
        build(lp, ids, 9)
    except DraftError as error:
        plain = re.sub(r" -?(\d[\d.e+-]*|inf|nan)\b", "", error.reason).removesuffix(" of")
        return error.depth, error.rank, plain
    return None


def test_a_call_that_does_not_fit_says_why_and_writes_nothing(library):
    native = HeapTree(library, 2, 3, 4, 5)
    lp, ids = np.zeros((2, 3, 4), np.float32), np.tile(np.arange(4, dtype=np.int32), (2, 3, 1))
    for name, value, reason in (
        ("struct_size", 8, "another version"),
        ("budget", 1025, "out of range"),
        ("requests", -1, "out of range"),
        ("checked", 2, "out of range"),
        ("workspace_size", 10, "workspace"),
        ("tokens", None, "missing"),
    ):
        native.give(lp, ids)
        kept = getattr(native._args, name)
        native.arrays["tokens"][:] = -9
        setattr(native._args, name, value)
        with pytest.raises(ValueError, match=reason):
            native.call()
        assert (native.arrays["tokens"] == -9).all()
        setattr(native._args, name, kept)
    native.give(lp, ids, budgets=np.array([5, 6], np.int32))
    with pytest.raises(ValueError, match="out of range"):
        native.call()
    with pytest.raises(ValueError, match=r"lp must be contiguous float32 \[2, 3, 4\]"):
        native.give(lp[:, :2], ids)
    with pytest.raises(ValueError, match="out of range"):
        HeapTree(library, 1, 32, 4, 5)


def test_no_compiler_and_a_failing_one_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerError, match="no-such-compiler is not on PATH"):
        compile_library(tmp_path)
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\n[ $# = 1 ] || { echo broken >&2; exit 1; }\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(CompilerError, match=r"cannot compile heap_tree.cpp: broken"):
        compile_library(tmp_path)
    assert not list(tmp_path.glob("heap_tree*"))


def test_under_the_address_and_undefined_behaviour_sanitizers(tmp_path):
    program = heap_tree.compiler()
    assert program is not None
    runtime = subprocess.run(
        [program, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout
    if not os.path.isabs(runtime.strip()):
        pytest.skip("this compiler has no AddressSanitizer")
    flags = (*heap_tree.FLAGS, "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    library = compile_library(tmp_path, flags)
    work = """if True:
        import sys, numpy as np
        from pathlib import Path
        from harness.heap_tree import HeapTree
        from reference.tests.lists import random_lists
        for i, (_, lp, ids) in enumerate(random_lists(9, 200, 31, 40)):
            budget = (0, 1, 31, 32, 33, 1024)[i % 6]
            native = HeapTree(Path(sys.argv[1]), 2, *lp.shape, budget)
            native.give(*(np.ascontiguousarray([array, array]) for array in (lp, ids)), vocab_size=64)
            native.call()
    """
    environment = {**os.environ, "LD_PRELOAD": runtime.strip(), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": "."}
    done = subprocess.run(
        [sys.executable, "-c", work, str(library)], cwd=CHECKOUT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
