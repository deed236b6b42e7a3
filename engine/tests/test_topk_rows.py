"""What a row of logits gives is a function of it alone: not of the batch, the alignment, padding or workspace."""

from __future__ import annotations

import numpy as np
import pytest

from engine.arrays import view
from engine.tests.backends import to_device, to_host
from engine.tests.topk_lists import (
    BF16,
    INF,
    INFINITE,
    NO_CHOICE,
    OK,
    OWN_SIZE,
    all_bits,
    ascending,
    assert_lists,
    bits,
    check,
    each_dtype,
    gaussian,
    outputs,
    run,
)


@each_dtype
@pytest.mark.parametrize("vocabulary", [33, 4097, 20001])
def test_views_into_a_pool(ops, dtype, vocabulary):
    """Case C38: logits that begin k elements off a 16-byte boundary. Public issue: lightseekorg/tokenspeed#683."""
    logits = gaussian(1, 1, 2, vocabulary, dtype=dtype)
    wanted = all_bits(check(ops, logits, 20))
    for offset in range(8):
        stride = vocabulary + offset % 3
        pool = np.full(offset + 2 * stride, np.nan, dtype)
        rows = pool[offset:].reshape(1, 2, stride)
        rows[..., :vocabulary] = logits
        device = to_device(ops, pool)[offset:].reshape(1, 2, stride)
        found = ops.topk_logprob(device, 20, vocab_size=vocabulary, dtype=dtype.name).to_host()
        assert all_bits(found) == wanted, offset


@each_dtype
def test_padding_is_never_looked_at(ops, dtype):
    """What lies behind the logical vocabulary may be anything, and rows may lie apart."""
    logits = gaussian(2, 3, 2, 1011, dtype=dtype)
    wanted = all_bits(check(ops, logits, 50))
    for padding in (1, 5, 13):
        for garbage in (np.nan, INF, 1e38):
            wide = np.full((3, 2, 1011 + padding), garbage, dtype)
            wide[..., :1011] = logits
            assert all_bits(run(ops, wide, 50, vocab_size=1011)) == wanted
    apart = np.full((3, 2, 1100), np.nan, dtype)
    apart[..., :1011] = logits
    found = ops.topk_logprob(to_device(ops, apart)[..., :1011], 50, dtype=dtype.name).to_host()
    assert all_bits(found) == wanted


@each_dtype
@pytest.mark.parametrize("shift", [20, 2, 0], ids=["fast", "in double", "nearly normalised"])
def test_batch_and_solo_give_the_same_bytes(ops, dtype, shift):
    """However many blocks share a row."""
    rows = gaussian(3, 4, 3, 20_003).astype(np.float64)
    rows += shift - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    logits = rows.astype(np.float32).astype(dtype)
    batch = check(ops, logits, 70)
    assert all_bits(run(ops, logits, 70)) == all_bits(batch)
    for request in range(4):
        solo = run(ops, logits[request : request + 1], 70)
        for name in ("ids", "lp", "logz"):
            assert bits(getattr(solo, name)[0]) == bits(getattr(batch, name)[request])
        alone = run(ops, logits[request : request + 1, 1:2], 70)
        assert bits(alone.lp[0, 0]) == bits(batch.lp[request, 1])


def test_half_precision_gives_the_bytes_of_the_same_values_in_float32(ops):
    logits = gaussian(5, 2, 2, 9001, dtype=BF16)
    assert all_bits(run(ops, logits, 300)) == all_bits(run(ops, logits.astype(np.float32), 300))


@pytest.mark.parametrize("shift", [12, 0], ids=["fast", "nearly normalised"])
def test_a_workspace_may_hold_anything(ops, shift):
    """Filled with two kinds of garbage: the same bytes, and nothing written behind it."""
    rows = gaussian(6, 2, 2, 20_011).astype(np.float64)
    rows += shift - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    logits = rows.astype(np.float32)
    wanted = all_bits(check(ops, logits, 80))
    size = ops.library.workspace("topk_logprob", 2, 2, 20_011, 80)
    assert size > 0
    for garbage in (0xFF, 0x3C):
        plan = ops.topk_logprob.plan(to_device(ops, logits), 80)
        scratch = to_device(ops, np.full(size + 512, garbage, np.uint8))
        start = -view("test", "workspace", scratch, ops.memory.device, 0).pointer % 256

        def take(bytes_, scratch=scratch, start=start):
            assert bytes_ == size
            part = scratch[start : start + bytes_]
            return view("test", "workspace", part, ops.memory.device, 0).pointer, scratch

        plan.scratch(take)
        assert all_bits(plan.call().to_host()) == wanted
        after = to_host(ops, scratch)[start + size :]
        assert (after == garbage).all()


def test_many_requests_and_depths(ops):
    logits = gaussian(13, 300, 1, 40)
    check(ops, logits, 3)
    check(ops, gaussian(14, 2, 31, 70), 11)


@each_dtype
@pytest.mark.parametrize("k", [40, 300])
@pytest.mark.parametrize("in_place", [False, True], ids=["own status", "status of the stage before"])
def test_many_rows_are_each_what_it_is_alone(ops, dtype, k, in_place):
    """Many rows take another kernel. Faults, limits, earlier failures, precise sums and hard rows are among them."""
    requests, depths, vocabulary = 90, 3, 4100
    rng = np.random.default_rng(16)
    logits = (3 * rng.standard_normal((requests, depths, vocabulary), np.float32)).astype(np.float64)
    logits[10:20] -= np.log(np.exp(logits[10:20]).sum(axis=-1, keepdims=True))
    logits[20:24] = 2.5
    logits[24] = ascending(vocabulary)
    logits = logits.astype(np.float32).astype(dtype)
    for request, depth, token, value in (
        (30, 2, 4099, np.nan),
        (30, 2, 4000, INF),
        (31, 0, 0, INF),
        (32, 1, 5, np.nan),
    ):
        logits[request, depth, token] = value
    logits[33] = np.nan
    limits = np.full(requests, depths, np.int32)
    limits[[5, 32, 33, 40, 41]] = [1, 1, 0, 4, -1]
    before = np.zeros((requests, 3), np.int32)
    before[[7, 31]] = [[NO_CHOICE, 4, 5], [OK, 8, 8]]

    def lists(first, last):
        made = {name: guard.array for name, guard in outputs(ops, last - first, depths, k).items()}
        part = to_device(ops, before[first:last])
        if in_place:
            made["status"] = part
        limit = to_device(ops, limits[first:last])
        given = to_device(ops, logits[first:last])
        return ops.topk_logprob(given, k, dtype=dtype.name, depth_limits=limit, before=part, out=made).to_host()

    many = lists(0, requests)
    assert [many.status[r].tolist() for r in (30, 31, 32, 33, 40, 41)] == [
        *([INFINITE, 3, 4000], [INFINITE, 1, 0]),
        *([OK, 0, 0], [OK, 0, 0], [OWN_SIZE, 4, 3], [OWN_SIZE, -1, 3]),
    ]
    for request in range(requests):
        alone = all_bits(lists(request, request + 1))
        assert {name: bits(getattr(many, name)[request]) for name in alone} == alone, request


@pytest.mark.parametrize("depths", [0, 2])
def test_lists_of_nothing(ops, depths):
    """No depths, or no entries: the status is written all the same, and logz where there are rows."""
    logits = gaussian(15, 3, depths, 30)
    for k in (0, 4):
        found = run(ops, logits, k)
        assert found.ids.shape == (3, depths, k)
        assert_lists(found, logits, k)


def test_depths_of_their_own_where_there_are_none(ops):
    """An own depth past none at all is refused before anything of the request, whose scratch is nothing, is read."""
    limits = to_device(ops, np.array([1, 0, 3], np.int32))
    for k in (0, 4):
        found = run(ops, gaussian(16, 3, 0, 30), k, depth_limits=limits)
        assert found.status.tolist() == [[OWN_SIZE, 1, 0], [OK, 0, 0], [OWN_SIZE, 3, 0]]
