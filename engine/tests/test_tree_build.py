"""Lists -> trees on the device: every array of the reference, byte for byte, by either route."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import kdtr
from engine.sources import CHECKOUT
from engine.tests.backends import is_host, to_device, to_host
from engine.tests.tree_checks import ROUTES, assert_routes, assert_same, built, check, heap_built
from engine.tests.tree_lists import KINDS, drawn_options, ids_of, lists_of, mixed_batch, size_of, spoiled, wanted

GOLDEN = CHECKOUT / "datasets" / "golden"
RECORDED = sorted(GOLDEN.glob("drafter_lists_*.kdtr"))
SMALL = 32  # largest budget of a call that goes to the serial route whatever the lists


def route_of(ops, lp, ids, budget):
    """The route of a request in a call that is not small, whose tree is as the reference's."""
    return check(ops, lp, ids, SMALL + 1, budgets=np.array([budget], np.int32))["route"]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["tree_ties", "tree_degenerate", "tree_random"])
def test_golden_trees(ops, file):
    """Case C01 and C02: sizes at the edge, equal scores."""
    golden = kdtr.read(GOLDEN / f"{file}.kdtr")
    cases = sorted({name.rpartition("/")[0] for name in golden})
    for case in cases:
        case_in = {name.rpartition("/")[2]: np.asarray(golden[name]) for name in golden if name.startswith(f"{case}/")}
        lp, ids = (case_in.pop(name)[None] for name in ("lp", "ids"))
        budget = int(case_in.pop("budget"))
        own = {name: case_in.pop(name[:-1])[None] for name in ("root_tokens", "prefix_lengths")}
        found = built(ops, lp, ids, budget, **own)
        assert_routes(found)
        assert len(case_in) == 11
        assert_same(found, {name: array[None] for name, array in case_in.items()}, case)
        assert not found["status"].any()
    assert len(cases) >= 15


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_lists(ops, path: Path):
    """What a drafter really gives is built by the parallel route wherever the budget is not small."""
    file = kdtr.read(path)
    lp, ids = (np.concatenate([file[name] for name in file if name.endswith(f"/{end}")]) for end in ("lp", "ids"))
    routes: Counter[int] = Counter()
    for budget in (16, 32, 33, 64, 128, 256):
        width = min(budget, lp.shape[2])
        lists = np.ascontiguousarray(lp[:, :, :width]), np.ascontiguousarray(ids[:, :, :width])
        found = built(ops, *lists, budget)
        assert_same(found, heap_built(ops, *lists, budget), f"budget {budget}")
        some = slice(0, None, max(1, len(lp) // 4))
        assert_same({name: a[some] for name, a in found.items()}, wanted(lists[0][some], lists[1][some], budget))
        if budget > SMALL:
            routes.update(found["route"].tolist())
    assert routes[ROUTES["parallel"]] >= 0.99 * routes.total() > 0, routes


# --- random lists -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_random_lists_of_every_kind(ops, kind):
    rng = np.random.default_rng(sum(kind.encode()))
    routes: Counter[int] = Counter()
    for i in range(12):
        depth, width, budget = size_of(rng, 128)
        budget = budget if i % 2 else max(budget, SMALL + 1)
        shape = (4, depth, width)
        lp, ids = lists_of(kind, rng, shape)
        options = drawn_options(rng, shape, budget)
        found = check(ops, lp, ids, budget, f"{kind} {i} {shape} budget {budget}", **options)
        routes.update(found["route"].tolist())
    route = "serial" if kind in ("fine", "positive", "huge") else "parallel"
    assert routes[ROUTES[route]] > 0, routes


@pytest.mark.parametrize(
    ("shape", "budget"),
    [
        *(((2, depth, 3), 20) for depth in range(32)),
        ((2, 0, 0), 0),
        ((2, 0, 5), 7),
        ((2, 5, 0), 7),
        ((2, 3, 4), 0),
        ((2, 3, 4), 1),
        ((1, 31, 1), 1024),
        ((1, 1, 1), 1024),
        ((1, 1, 1024), 1024),
        ((1, 1, 1024), 1),
        ((1, 31, 1024), 33),
        ((1, 31, 2), 1024),
        ((1, 7, 1024), 1024),
        ((1, 2, 1000), 1023),
    ],
)
def test_sizes(ops, shape, budget):
    """Case C01: no list, no depth, no budget, and more budget than there are nodes."""
    rng = np.random.default_rng(5)
    for kind in ("drafter", "quarters", "fine"):
        lp, ids = lists_of(kind, rng, shape, ends=0)
        check(ops, lp, ids, budget, kind)


def test_more_budget_than_nodes_takes_them_all(ops):
    """Case C01 (d) and (e)."""
    lp = np.broadcast_to(np.array([-0.5, -1.5, -2.5], np.float32), (1, 2, 3))
    ids = np.broadcast_to(np.arange(3, dtype=np.int32), (1, 2, 3))
    assert check(ops, lp, ids, 50)["node_count"] == 12
    chain = np.zeros((1, 4, 1), np.float32), np.zeros((1, 4, 1), np.int32)
    assert check(ops, *chain, 10)["node_count"] == 4


def test_every_budget_of_one_tree_is_a_prefix_of_the_next(ops):
    """Thread counts, buckets and rooms change with the budget; the order of the nodes does not."""
    rng = np.random.default_rng(11)
    for kind in ("drafter", "quarters"):
        lp, ids = lists_of(kind, rng, (1, 7, 40), ends=0)
        whole = check(ops, lp, ids, 600)
        for budget in (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 385, 511, 512, 513):
            found = built(ops, lp, ids, budget)
            for name in ("tokens", "parents", "depths", "ranks", "scores", "positions"):
                assert found[name].tobytes() == whole[name][:, : budget + 1].tobytes(), (kind, budget, name)


def test_one_tie_wider_than_the_room_goes_to_the_serial_route(ops):
    """16 nodes cost one step, 256 cost two: no threshold gives between 20 and 104 of them."""
    lp, ids = np.full((1, 2, 16), -1, np.float32), ids_of(np.random.default_rng(0), (1, 2, 16))
    assert route_of(ops, lp, ids, 20) == ROUTES["serial"]
    assert route_of(ops, lp, ids, 16) == ROUTES["parallel"]
    assert check(ops, lp, ids, 300)["route"] == ROUTES["parallel"]


def test_costs_around_32_bits(ops):
    """The dearest node costs 2^32 - 2 units of 2^-24, which the parallel route takes, then one more."""
    ids = np.broadcast_to(np.arange(2, dtype=np.int32), (1, 2, 2))
    for last, route in ((2**9 - 2, "parallel"), (2**9 - 1, "serial")):
        costs = np.array([[[1, 2**32 - 2**9], [1, last]]], np.float64)
        lp = (-costs / 2**24).astype(np.float32)
        np.testing.assert_array_equal(lp * -(2.0**24), costs)
        assert route_of(ops, lp, ids, 6) == ROUTES[route], last


@pytest.mark.parametrize(
    ("row", "route"),
    [
        ([-1, -2, -3, -4], "parallel"),
        ([0, -1, -2, -3], "parallel"),
        ([0, -0.0, -np.inf, -np.inf], "parallel"),
        ([-(2.0**-149), -(2.0**-148), -(2.0**-146), -(2.0**-140)], "parallel"),
        ([-0.5, -1, -3e38, -3e38], "parallel"),  # masked tokens, which no tree of 8 nodes reaches
        ([-(2.0**-31), -0.5, -1, -1.5], "parallel"),
        ([-(2.0**-32), -0.5, -1, -1.5], "serial"),  # the bound is 3/2 of 2^32 units
        ([2.0**-149, -1, -2, -3], "serial"),
    ],
)
def test_which_lists_go_which_way(ops, row, route):
    lp = np.tile(np.array(row, np.float32), (1, 3, 1))
    assert route_of(ops, lp, ids_of(np.random.default_rng(0), lp.shape), 8) == ROUTES[route]


@pytest.mark.parametrize("budget", [1, 2, 3, 15, 16, SMALL - 1, SMALL])
def test_a_small_budget_takes_one_node_after_the_other(ops, budget):
    """All scores equal, equal but for their last bits, or in steps so small that few of their bits tell them apart."""
    rng = np.random.default_rng(budget)
    for step in (0.0, 2.0**-23, 2.0**-14, 2.0**-10):
        for depth, width in ((1, 64), (2, 33), (7, 20), (31, 3)):
            lp = -np.sort(1 + step * rng.integers(0, 5, (3, depth, width)), axis=2).astype(np.float32)
            found = check(ops, lp, ids_of(rng, lp.shape), budget, f"{step} {depth} {width}")
            assert (found["route"] == ROUTES["serial"]).all()


@pytest.mark.parametrize("first", [0.0, -0.0])
def test_zero_scores_have_the_sign_that_the_order_of_operations_gives(ops, first):
    rng = np.random.default_rng(3)
    lp = rng.choice(np.array([0.0, -0.0], np.float32), (6, 5, 3))
    lp[:, :, 0] = first
    found = check(ops, lp, ids_of(rng, lp.shape), 100)
    signs = np.signbit(found["scores"][:, 1:])
    assert signs.any() == (first == 0 and np.signbit(first))
    assert not signs.all()


def test_the_largest_and_smallest_finite_numbers(ops):
    largest, smallest = np.finfo(np.float32).max, np.float32(2.0**-149)
    rows = ([0, -largest], [-largest, -largest], [-smallest, -1], [-smallest, -largest], [largest, -largest])
    for row in rows:
        lp = np.tile(np.array(row, np.float32), (1, 31, 1))
        check(ops, lp, np.tile(np.arange(2, dtype=np.int32), (1, 31, 1)), 70, str(row))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_bad_lists_are_refused_where_and_why_the_reference_refuses_them(ops, seed):
    rng = np.random.default_rng(seed)
    codes: Counter[int] = Counter()
    for i in range(12):
        shape = (16, int(rng.integers(1, 32)), int(rng.choice([1, 2, 5, 33, 64])))
        budget, vocab_size = int(rng.choice([0, 1, 20])), 50_000_000
        lp, ids = lists_of("drafter", rng, shape)
        pairs = [spoiled(rng, lp[r], ids[r], int(rng.integers(0, 4)), vocab_size) for r in range(shape[0])]
        lp, ids = (np.stack(arrays) for arrays in zip(*pairs, strict=True))
        options = drawn_options(rng, shape, budget)
        found = check(ops, lp, ids, budget, f"{i} {shape}", vocab_size=vocab_size, **options)
        codes.update(found["status"][:, 0].tolist())
    assert set(codes) == {0, 1, 2, 3, 4, 5}, codes


def test_a_fault_in_the_last_place_of_the_largest_lists(ops):
    rng = np.random.default_rng(2)
    clean = lists_of("drafter", rng, (1, 31, 1024), ends=0)
    lp, ids = (np.repeat(array, 5, axis=0) for array in clean)
    lp[0, 30, 1023], lp[1, 30, 1023], lp[3, 30, 1023] = np.nan, np.inf, 0
    ids[2, 30, 1023], ids[4, 30, 1023] = -7, ids[4, 30, 1022]
    found = check(ops, lp, ids, 5)
    assert found["status"].tolist() == [[code, 31, 1023] for code in (1, 2, 3, 4, 5)]


def test_every_id_equal_and_ids_that_share_a_slot(ops):
    """A set of ids that is full of equals, and one whose ids differ in their high bits alone."""
    lp, _ = lists_of("drafter", np.random.default_rng(4), (2, 3, 1024), ends=0)
    ids = np.broadcast_to(np.arange(1024, dtype=np.int32) << 20, lp.shape).copy()
    ids[0] = 7
    assert check(ops, lp, ids, 40)["status"].tolist() == [[5, 1, 1], [0, 0, 0]]


def test_repeats_are_counted_among_finite_entries_of_one_row_only(ops):
    lp = np.tile(np.array([-1, -2, -np.inf, -np.inf], np.float32), (3, 2, 1))
    ids = np.tile(np.array([3, 4, 3, 3], np.int32), (3, 2, 1))
    ids[1, 1, 1] = 3
    ids[2] = [[3, 4, 5, 6], [3, 4, 3, -1]]
    found = check(ops, lp, ids, 5)
    assert found["status"].tolist() == [[0, 0, 0], [5, 2, 1], [3, 2, 3]]


def test_lists_are_refused_even_where_no_budget_reaches_them_but_not_beyond_the_depth_limit(ops):
    lp, ids = lists_of("drafter", np.random.default_rng(1), (3, 4, 6), ends=0)
    lp[:, 3, 5] = np.nan
    limits, budgets = np.array([4, 3, 4], np.int32), np.array([0, 2, 2], np.int32)
    found = check(ops, lp, ids, 2, depth_limits=limits, budgets=budgets)
    assert found["status"].tolist() == [[1, 4, 5], [0, 0, 0], [1, 4, 5]]


def test_the_vocabulary_bounds_every_id(ops):
    lp, _ = lists_of("drafter", np.random.default_rng(1), (2, 2, 3), ends=0)
    ids = np.array([[[0, 1, 2], [65535, 65536, 131071]], [[0, 1, 2], [9, 8, 163839]]], np.int32)
    for vocab_size, codes in ((0, [0, 0]), (163840, [0, 0]), (163839, [0, 3]), (131071, [3, 3]), (1, [3, 3])):
        assert check(ops, lp, ids, 9, vocab_size=vocab_size)["status"][:, 0].tolist() == codes


def test_sizes_of_its_own_that_do_not_fit_are_the_requests_status(ops):
    """Case C08: the other requests of the batch are built."""
    lp, ids = lists_of("drafter", np.random.default_rng(6), (6, 3, 4), ends=0)
    limits, budgets = np.array([3, -1, 4, 3, 3, 9], np.int32), np.array([8, 8, 8, 9, -5, 99], np.int32)
    roots, prefixes = np.arange(6, dtype=np.int32), np.arange(6, dtype=np.int32) * 10
    found = built(ops, lp, ids, 8, depth_limits=limits, budgets=budgets, root_tokens=roots, prefix_lengths=prefixes)
    own_size = 9
    assert found["status"].tolist() == [
        [0, 0, 0],
        [own_size, -1, 3],
        [own_size, 4, 3],
        [own_size, 9, 8],
        [own_size, -5, 8],
        [own_size, 9, 3],
    ]
    limits[found["status"][:, 0] != 0] = 0  # to the reference they are trees of their root
    budgets[found["status"][:, 0] != 0] = 0
    expected = wanted(lp, ids, 8, depth_limits=limits, budgets=budgets, root_tokens=roots, prefix_lengths=prefixes)
    del expected["status"]
    assert_same(found, expected)
    assert_routes(found)


def test_a_request_that_failed_before_is_passed_over(ops):
    lp, ids = lists_of("drafter", np.random.default_rng(7), (3, 3, 4), ends=0)
    lp[1] = np.nan
    before = np.array([[0, 7, 7], [6, 12, 34], [11, 5, 4]], np.int32)
    roots = np.array([5, 6, 7], np.int32)
    limits = np.array([3, 99, 3], np.int32)  # not looked at either
    found = built(ops, lp, ids, 8, before=before, root_tokens=roots, depth_limits=limits)
    assert found["status"].tolist() == [[0, 0, 0], [6, 12, 34], [11, 5, 4]]
    assert found["node_count"].tolist()[1:] == [0, 0]
    expected = wanted(lp, ids, 8, root_tokens=roots, depth_limits=np.array([3, 0, 0], np.int32))
    del expected["status"]
    assert_same(found, expected)


def test_before_may_be_the_status_itself(ops):
    lp, ids = lists_of("drafter", np.random.default_rng(7), (2, 3, 4), ends=0)
    status = to_device(ops, np.array([[0, 0, 0], [1, 2, 3]], np.int32))
    trees = ops.tree_build(to_device(ops, lp), to_device(ops, ids), 8, before=status, out={"status": status})
    assert to_host(ops, status).tolist() == [[0, 0, 0], [1, 2, 3]]
    assert to_host(ops, trees.node_count).tolist() == [8, 0]


def test_checked_lists_are_taken_as_they_are(ops):
    """The same trees for good lists; and ids that stand twice show that nothing looked."""
    rng = np.random.default_rng(8)
    for kind in ("drafter", "quarters", "fine"):
        lp, ids = lists_of(kind, rng, (3, 7, 20))
        assert_same(built(ops, lp, ids, 40, checked=True), built(ops, lp, ids, 40), kind)
    lp, ids = lists_of("drafter", rng, (1, 2, 3), ends=0)
    ids[:] = 5
    assert built(ops, lp, ids, 4)["status"].tolist() == [[5, 1, 1]]
    assert built(ops, lp, ids, 4, checked=True, vocab_size=3)["status"].tolist() == [[0, 0, 0]]


# --- batches ----------------------------------------------------------------------------------------------------------


def test_a_request_in_a_batch_gets_the_bytes_it_gets_alone(ops):
    """Case C02 and C08: whoever stands beside it, in whatever order, at whatever time."""
    rng = np.random.default_rng(9)
    lp, ids = mixed_batch(rng)
    requests = len(lp)
    own = {
        "budgets": rng.integers(0, 65, requests).astype(np.int32),
        "depth_limits": rng.integers(0, 8, requests).astype(np.int32),
        "prefix_lengths": rng.integers(0, 1000, requests).astype(np.int32),
    }
    batch = check(ops, lp, ids, 64, **own)
    assert_same(built(ops, lp, ids, 64, **own), batch, "again")
    for r in range(requests):
        one = slice(r, r + 1)
        alone = built(ops, lp[one], ids[one], 64, **{name: array[one] for name, array in own.items()})
        assert_same(alone, {name: array[one] for name, array in batch.items()}, f"request {r} alone")
    order = rng.permutation(requests)
    shuffled = built(ops, lp[order], ids[order], 64, **{name: array[order] for name, array in own.items()})
    assert_same(shuffled, {name: array[order] for name, array in batch.items()}, "shuffled")


def test_the_order_in_which_threads_run_changes_nothing(ops, monkeypatch):
    """Case C02. On the CPU the order of warps, lanes and requests is another one for each seed."""
    rng = np.random.default_rng(21)
    lp, ids = mixed_batch(rng)
    first = check(ops, lp, ids, 70)
    for seed in range(1, 6 if is_host(ops) else 100):
        monkeypatch.setenv("KDTREE_HOST_SEED", str(seed))
        assert_same(built(ops, lp, ids, 70), first, f"order {seed}")


def test_what_lies_beyond_a_depth_limit_is_not_looked_at(ops):
    """Case C08: garbage in the padding, then other garbage."""
    rng = np.random.default_rng(10)
    lp, ids = mixed_batch(rng)
    limits = rng.integers(0, 8, len(lp)).astype(np.int32)
    beyond = np.arange(7) >= limits[:, None]
    first = check(ops, lp, ids, 33, depth_limits=limits)
    for value, token in ((np.nan, -1), (np.inf, 2**31 - 1), (-1e30, 0)):
        lp[beyond], ids[beyond] = value, token
        assert_same(built(ops, lp, ids, 33, depth_limits=limits), first, f"{value} {token}")


def test_a_plan_called_again_writes_the_same_bytes(ops):
    lp, ids = mixed_batch(np.random.default_rng(12))
    plan = ops.tree_build.plan(to_device(ops, lp), to_device(ops, ids), 50)
    runs = []
    for _ in range(3):
        trees = plan.call().to_host()
        runs.append(b"".join(getattr(trees, name).tobytes() for name in ("scores", "paths", "visibility", "status")))
    assert len(set(runs)) == 1
