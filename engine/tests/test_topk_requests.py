"""Requests of the top-k stage that have limits of their own or fail, and calls that are refused."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from engine import abi
from engine.tests.backends import to_device
from engine.tests.topk_lists import (
    INF,
    INFINITE,
    NAN,
    NO_CHOICE,
    OK,
    OWN_SIZE,
    assert_filled,
    each_dtype,
    gaussian,
    outputs,
    run,
)
from reference.topk import DraftError, topk_logprob


def test_depth_limits_of_each_request(ops):
    """Rows past a limit are neither read nor written."""
    logits = gaussian(7, 5, 3, 500)
    limits = np.array([3, 0, 1, 2, 3], np.int32)
    for request, limit in enumerate(limits):
        logits[request, limit:] = np.nan
    made = outputs(ops, 5, 3, 9)
    ops.topk_logprob(
        to_device(ops, logits),
        9,
        depth_limits=to_device(ops, limits),
        out={name: guard.array for name, guard in made.items()},
    )
    assert not made["status"].host().any()
    for request, limit in enumerate(limits):
        wanted = topk_logprob(logits[request, :limit], 9)
        np.testing.assert_array_equal(made["ids"].host()[request, :limit], wanted.ids)
        for name in ("ids", "lp", "logz"):
            untouched = made[name].untouched()[request]
            assert not untouched[:limit].any()
            assert untouched[limit:].all()


def test_a_limit_that_does_not_fit_is_refused_for_its_request_alone(ops):
    logits, limits = gaussian(8, 4, 2, 50), np.array([3, -1, 2, 1], np.int32)
    found = run(ops, logits, 5, depth_limits=to_device(ops, limits))
    assert found.status.tolist() == [[OWN_SIZE, 3, 2], [OWN_SIZE, -1, 2], [OK, 0, 0], [OK, 0, 0]]
    assert_filled(found, 0)
    assert_filled(found, 1)
    np.testing.assert_array_equal(found.ids[2], topk_logprob(logits[2], 5).ids)
    with pytest.raises(abi.RequestError, match="request 0"):
        found.raise_for_status()


@each_dtype
@pytest.mark.parametrize("vocabulary", [5, 1025, 20_001])
def test_nan_and_plus_inf_are_refused_at_the_first_place(ops, dtype, vocabulary):
    """The first in the order of depth, then token; the other requests are not touched by it.

    Public issue: vllm-project/vllm#41834, where a NaN row quietly became token 0.
    """
    last = vocabulary - 1
    negative_nan = np.uint32(0xFFC00000).view(np.float32)
    faults: list[tuple[list[tuple[int, int, Any]], int]] = [
        ([(0, last, np.nan)], NAN),
        ([(1, 0, INF), (2, 0, np.nan)], INFINITE),
        ([(1, last // 2, negative_nan), (1, last, INF), (2, 0, INF)], NAN),
        ([(2, last, INF)], INFINITE),
        ([], OK),
        ([(2, 3, np.nan), (2, 2, INF)], INFINITE),
    ]
    logits = gaussian(vocabulary, len(faults), 3, vocabulary).astype(dtype)
    for request, (places, _) in enumerate(faults):
        for depth, token, value in places:
            logits[request, depth, token] = value
    found = run(ops, logits, 4)
    for request, (places, code) in enumerate(faults):
        depth, token = min(((depth + 1, token) for depth, token, _ in places), default=(0, 0))
        assert found.status[request].tolist() == [code, depth, token]
        if code == OK:
            np.testing.assert_array_equal(found.ids[request], topk_logprob(logits[request], 4).ids)
        else:
            assert_filled(found, request)
            with pytest.raises(DraftError) as error:
                topk_logprob(logits[request], 4, request=request)
            assert (error.value.depth, error.value.token) == (depth, token)


def test_rows_of_nothing_but_nan(ops):
    logits = np.full((2, 2, 3000), np.nan, np.float32)
    logits[1] = INF
    assert run(ops, logits, 3).status.tolist() == [[NAN, 1, 0], [INFINITE, 1, 0]]


def test_nan_counts_up_to_the_depth_limit_only(ops):
    """And the lists past the limit of a request that fails are not written either."""
    logits = gaussian(11, 3, 3, 100)
    logits[:, 1, 5] = np.nan
    made = outputs(ops, 3, 3, 4)
    ops.topk_logprob(
        to_device(ops, logits),
        4,
        depth_limits=to_device(ops, np.array([1, 2, 3], np.int32)),
        out={name: guard.array for name, guard in made.items()},
    )
    assert made["status"].host().tolist() == [[OK, 0, 0], [NAN, 2, 5], [NAN, 2, 5]]
    for name in ("ids", "lp", "logz"):
        untouched = made[name].untouched().reshape(3, 3, -1)
        assert untouched.all(axis=2).tolist() == untouched.any(axis=2).tolist()
        assert untouched.any(axis=2).tolist() == [[False, True, True], [False, False, True], [False] * 3]


@pytest.mark.parametrize("in_place", [False, True], ids=["own status", "status of the stage before"])
def test_a_request_that_failed_before_is_passed_over(ops, in_place):
    """Its status is carried on, its lists are those of an empty round; also where both are one array."""
    logits = gaussian(12, 3, 2, 2500)
    logits[0, 1, 7] = logits[1, 0, 3] = np.nan
    before = to_device(ops, np.array([[NO_CHOICE, 4, 5], [OK, 0, 0], [OK, 8, 8]], np.int32))
    out = {"status": before} if in_place else None
    found = ops.topk_logprob(to_device(ops, logits), 6, before=before, out=out).to_host()
    assert found.status.tolist() == [[NO_CHOICE, 4, 5], [NAN, 1, 3], [OK, 0, 0]]
    assert_filled(found, 0)
    assert_filled(found, 1)
    np.testing.assert_array_equal(found.ids[2], topk_logprob(logits[2], 6).ids)


# --- arguments --------------------------------------------------------------------------------------------------------


def arguments(**changed) -> abi.TopkLogprobArgs:
    """A call that would be taken, but for what is changed. Nothing is read: all calls here are refused."""
    address = 1 << 20
    sizes = {"requests": 2, "depth_limit": 3, "vocab_size": 100, "k": 7, "dtype": 0, "row_stride": 100}
    names = ("logits", "ids", "lp", "logz", "status", "workspace")
    given = {"struct_size": ctypes.sizeof(abi.TopkLogprobArgs), **sizes, **dict.fromkeys(names, address)}
    return abi.TopkLogprobArgs(**{**given, "workspace_size": 1 << 20, **changed})


@pytest.mark.parametrize(
    ("changed", "status", "message"),
    [
        ({"struct_size": 8}, 1, "struct_size is 8"),
        ({"requests": 0}, 2, "requests is 0, it must be in [1, 65535]"),
        ({"requests": 65536}, 2, "requests is 65536"),
        ({"depth_limit": 32}, 2, "depth_limit is 32, it must be in [0, 31]"),
        ({"vocab_size": 0}, 2, "vocab_size is 0, it must be in [1, "),
        ({"k": 101}, 2, "k is 101, it must be in [0, 100]"),
        ({"k": 1025, "vocab_size": 5000, "row_stride": 5000}, 2, "k is 1025, it must be in [0, 1024]"),
        ({"k": -1}, 2, "k is -1"),
        ({"dtype": 2}, 2, "dtype is 2, it must be in [0, 1]"),
        ({"row_stride": 99}, 2, "row_stride is 99, it must be in [100, "),
        ({"row_stride": 2**62}, 2, "row_stride is 4611686018427387904"),
        ({"logits": None}, 3, "logits is NULL"),
        ({"ids": None}, 3, "ids is NULL"),
        ({"lp": None}, 3, "lp is NULL"),
        ({"logz": None}, 3, "logz is NULL"),
        ({"status": None}, 3, "status is NULL"),
        ({"workspace": None}, 3, "workspace is NULL"),
        ({"logits": (1 << 20) + 2}, 4, "is not aligned to 4 bytes"),
        ({"logits": (1 << 20) + 1, "dtype": 1}, 4, "is not aligned to 2 bytes"),
        ({"lp": (1 << 20) + 3}, 4, "lp at 0x100003 is not aligned to 4 bytes"),
        ({"before": 6}, 4, "before at 0x6 is not aligned to 4 bytes"),
        ({"workspace": (1 << 20) + 64}, 4, "workspace at 0x100040 is not aligned to 256 bytes"),
        ({"workspace_size": 300}, 5, "the workspace has 300 bytes, "),
    ],
    ids=lambda value: ",".join(map(str, value)) if isinstance(value, dict) else None,
)
def test_arguments_are_refused_with_their_numbers(ops, changed, status, message):
    code = ops.library.stage("topk_logprob")(ctypes.byref(arguments(**changed)))
    with pytest.raises(abi.EngineError) as error:
        ops.library.check("topk_logprob", code)
    assert error.value.code == status
    assert "kdtree_topk_logprob: " in str(error.value)
    assert message in str(error.value)


def test_the_workspace_does_not_depend_on_the_dtype_and_grows_with_the_rows(ops):
    query = ops.library.workspace
    assert query("topk_logprob", 1, 0, 1000, 5) == 0
    assert query("topk_logprob", 1, 7, 163840, 65) == query("topk_logprob", 7, 1, 163840, 65)
    sizes = [query("topk_logprob", requests, 7, 163840, 64) for requests in (1, 2, 64, 65535)]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 2**32, "sizes past 32 bits"
    assert sizes[0] < 7 * 163840 * 2 / 10, "the workspace is small beside the logits"
