"""Trees of the device against those of the C++ heap builder, in numbers: 100,000 on a GPU, 6,000 on the CPU."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from engine import abi
from engine.tests.backends import is_host, to_device, to_host
from engine.tests.tree_checks import assert_routes, assert_same, built, heap_built
from engine.tests.tree_lists import KINDS, drawn_options, lists_of, size_of, spoiled, wanted

CASES = {"host": 6_000, "cuda": 100_000}
# One call's requests, least and largest budget, and how often it is drawn: what a serving batch has, by either way to
# build it, and the whole range.
CALLS = {
    "host": ((64, 0, 32, 4), (64, 33, 64, 8), (8, 33, 300, 3), (1, 33, 1024, 1)),
    "cuda": ((256, 0, 32, 2), (256, 33, 64, 3), (256, 33, 256, 3), (64, 33, 1024, 1)),
}


def test_many_trees_are_those_of_the_heap(ops):
    backend = "host" if is_host(ops) else "cuda"
    calls = [call for *call, share in CALLS[backend] for _ in range(share)]
    rng = np.random.default_rng(20261)
    routes: Counter[str] = Counter()
    refused = 0
    kinds = list(KINDS)
    while routes.total() < CASES[backend]:
        requests, least, largest = calls[int(rng.integers(len(calls)))]
        depth, width, budget = size_of(rng, largest)
        budget = max(budget, least)
        chosen = rng.integers(0, len(kinds), requests)
        lp, ids = mixed(rng, [kinds[i] for i in chosen], depth, width)
        for r in np.flatnonzero(rng.random(requests) < 0.03):
            lp[r], ids[r] = spoiled(rng, lp[r], ids[r], faults=2, vocab_size=2**31 - 1)
        options = drawn_options(rng, lp.shape, budget)
        case = f"after {routes.total()} cases: {list(lp.shape)}, budget {budget}, {sorted(options)}"
        found = built(ops, lp, ids, budget, **options)
        assert_routes(found)
        assert_same(found, heap_built(ops, lp, ids, budget, **options), case)
        routes.update(abi.ROUTES[route] for route in found["route"].tolist())
        refused += int((found["status"][:, 0] > 0).sum())
    print(f"{backend}: {routes.total()} trees, {dict(routes)}, {refused} refused")
    assert refused > CASES[backend] / 100
    assert routes["none"] > refused
    assert routes["serial"] > CASES[backend] / 100
    assert routes["parallel"] > CASES[backend] / 3


@pytest.mark.parametrize("ops", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_the_most_requests_of_the_largest_budget(ops):
    """More than 2^31 words of visibility: the last request is the first one's twin. The CPU would take minutes."""
    if ops.library.device().total_memory < 24 * 2**30:
        pytest.skip("needs 24 GiB of device memory")
    requests, budget = abi.MAX_REQUESTS, abi.MAX_BUDGET
    lp, ids = lists_of("drafter", np.random.default_rng(2), (1, 2, 64), ends=0)
    expected = heap_built(ops, lp, ids, budget)
    lists = (to_device(ops, np.repeat(array, requests, axis=0)) for array in (lp, ids))
    trees = ops.tree_build(*lists, budget, arrays=("visibility",))
    for request in (0, requests - 1):
        one = slice(request, request + 1)
        found = {name: to_host(ops, getattr(trees, name)[one]) for name in ("tokens", "scores", "visibility", "status")}
        assert_same(found, {name: expected[name] for name in found}, f"request {request}")


def mixed(rng, kinds, depth, width):
    """Lists of one kind a request; requests of a kind are drawn together."""
    lp = np.empty((len(kinds), depth, width), np.float32)
    ids = np.empty(lp.shape, np.int32)
    for kind in sorted(set(kinds)):
        these = np.flatnonzero(np.array(kinds) == kind)
        lp[these], ids[these] = lists_of(kind, rng, (len(these), depth, width))
    return lp, ids


@pytest.mark.parametrize("ends", [0.0, 0.2])
def test_the_heap_gives_the_trees_of_the_reference(ops, ends):
    """So that the comparison above is one with the reference; more of it stands in harness/tests/test_heap_tree.py."""
    rng = np.random.default_rng(1)
    for kind in KINDS:
        depth, width, budget = size_of(rng, 128)
        lp, ids = lists_of(kind, rng, (3, depth, width), ends=ends)
        options = drawn_options(rng, lp.shape, budget)
        assert_same(heap_built(ops, lp, ids, budget, **options), wanted(lp, ids, budget, **options), kind)
