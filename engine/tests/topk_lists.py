"""Calls of the top-k stage in NumPy, and the comparison with the reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kdtr
from engine.results import TopK
from engine.tests.backends import guarded, to_device
from reference.topk import topk_logprob

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), BF16]
OK, NAN, INFINITE, OWN_SIZE, NO_CHOICE = 0, 1, 2, 9, 6
INF = np.inf

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def run(ops, logits, k, **options) -> TopK:
    """Of NumPy logits [R, L, V], as NumPy arrays."""
    name = logits.dtype.name
    found: TopK = ops.topk_logprob(to_device(ops, logits), k, dtype=name, **options).to_host()
    return found


def assert_lists(found: TopK, logits, k, vocab_size=None) -> None:
    """Equal to the reference, request by request."""
    for request, rows in enumerate(logits):
        wanted = topk_logprob(rows, k, vocab_size)
        np.testing.assert_array_equal(found.ids[request], wanted.ids)
        logz = found.logz[request]
        row = kdtr.compare_array("logz", wanted.logz, logz, kdtr.Tolerance.ulp(1))
        assert row.ok, f"request {request}: {row.problem} at {row.index}: reference {row.golden}, got {row.actual}"
        best = np.take_along_axis(rows.astype(np.float32), wanted.ids.astype(np.int64), axis=1)
        with np.errstate(invalid="ignore", over="ignore"):
            lp = np.where(np.isneginf(logz)[:, None], np.float32(-INF), best - logz[:, None])
        assert bits(found.lp[request]) == bits(lp)
    np.testing.assert_array_equal(found.status, np.zeros((len(logits), 3)))


def check(ops, logits, k, **options) -> TopK:
    found = run(ops, logits, k, **options)
    assert_lists(found, logits, k, options.get("vocab_size"))
    return found


def bits(array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def all_bits(found: TopK) -> dict[str, bytes]:
    return {name: bits(getattr(found, name)) for name in ("ids", "lp", "logz", "status")}


def gaussian(seed, *shape, scale=3.0, dtype=np.float32) -> Any:
    return (scale * np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def ascending(v):
    """A row [v] each of whose logits is the greatest so far."""
    return np.linspace(-5, 20, v)


def outputs(ops, requests, depths, k):
    """Guarded arrays for all that a call writes."""
    shapes = {"ids": ("int32", k), "lp": ("float32", k), "logz": ("float32", None), "status": ("int32", None)}
    made = {}
    for name, (dtype, last) in shapes.items():
        shape = (requests, 3) if name == "status" else (requests, depths) if last is None else (requests, depths, last)
        made[name] = guarded(ops, shape, dtype, name, offset=1)
    return made


def assert_filled(found: TopK, request: int, depths=slice(None)) -> None:
    """The lists of a request that is not taken: id 0, -inf, logz 0."""
    assert not found.ids[request, depths].any()
    assert np.isneginf(found.lp[request, depths]).all()
    assert not found.logz[request, depths].any()
