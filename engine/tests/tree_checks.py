"""Calls of the tree builder between guards over poison, and the comparison with the reference, byte for byte."""

from __future__ import annotations

import numpy as np

from engine import abi
from engine.tests.backends import guarded, to_device
from engine.tests.tree_lists import wanted

ROUTES = {name: code for code, name in enumerate(abi.ROUTES)}


def outputs(ops, shape, budget):
    """Guarded and poisoned arrays for all that a call writes."""
    requests, depth, _ = shape
    nodes = budget + 1
    shapes = {"node_count": (requests,), "route": (requests,), "status": (requests, 3)}
    for name in ("tokens", "parents", "depths", "ranks", "scores", "positions", "first_child", "next_sibling"):
        shapes[name] = (requests, nodes)
    shapes |= {"visibility": (requests, nodes, (nodes + 31) // 32), "paths": (requests, nodes, depth + 1)}
    dtypes = {"scores": np.float64, "visibility": np.uint32}
    return {name: guarded(ops, size, dtypes.get(name, np.int32), name) for name, size in shapes.items()}


def built(ops, lp, ids, budget, **options):
    """All arrays of a call in NumPy, written between guards over poison."""
    out = outputs(ops, lp.shape, budget)
    options = {name: to_device(ops, o) if isinstance(o, np.ndarray) else o for name, o in options.items()}
    lists = to_device(ops, lp), to_device(ops, ids)
    ops.tree_build(*lists, budget, out={name: g.array for name, g in out.items()}, **options)
    return {name: g.host() for name, g in out.items()}


def assert_same(found, expected, case=""):
    """Byte for byte, so that the sign of zero counts; names the first element that differs."""
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), f"{case} {name}"
        if found[name].tobytes() != np.ascontiguousarray(array).tobytes():
            bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[array.itemsize]
            bad = tuple(np.argwhere(found[name].view(bits) != np.ascontiguousarray(array).view(bits))[0])
            where = [int(i) for i in bad]
            raise AssertionError(f"{case} {name}{where}: expected {array[bad]}, got {found[name][bad]}")


def assert_routes(found):
    """A tree without nodes has no route, every other one has one."""
    np.testing.assert_array_equal(found["route"] == ROUTES["none"], found["node_count"] == 0)
    assert found["route"].min() >= 0
    assert found["route"].max() <= ROUTES["serial"]


def check(ops, lp, ids, budget, case="", **options):
    """All arrays of a call, equal to the reference's."""
    found = built(ops, lp, ids, budget, **options)
    assert_routes(found)
    assert_same(found, wanted(lp, ids, budget, **options), case)
    return found


def heap_built(ops, lp, ids, budget, **options):
    """All arrays of the C++ heap builder, whose trees harness/tests hold against the reference's."""
    trees = ops.heap_tree(lp, ids, budget, **options)
    names = ("node_count", "tokens", "parents", "depths", "ranks", "scores", *trees.OPTIONAL, "status")
    return {name: getattr(trees, name) for name in names}
