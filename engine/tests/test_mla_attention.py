"""Attention over the latent cache against sums in float64, and its promise: a row's bits are plain decoding's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.abi import SizeError, UnsupportedError
from engine.arrays import ArrayError
from engine.ops import Cache
from engine.tests.backends import guarded, is_host, to_device, to_host
from reference.fp8_row import ROW_BYTES, dequantize_rows, quantize_rows
from reference.numerics import float32_to_bf16_bits

RANK, ROPE, SCALE = 512, 64, 0.07
PARENTS = [-1, 0, 0, 1, 3, 2]
DEPTHS = [0, 1, 1, 2, 3, 2]
PATHS = np.array(
    [[0, -1, -1, -1], [0, 1, -1, -1], [0, 2, -1, -1], [0, 1, 3, -1], [0, 1, 3, 4], [0, 2, 5, -1]], np.int32
)
NAN = 0x7FC1


def narrow(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bfloat16 bits, rounded to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widen(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@dataclass(frozen=True)
class Problem:
    """Requests with the same tree over prefixes of their own. q [R, N, H, width], rows [1, R, capacity, width]."""

    q: NDArray[Any]
    rows: NDArray[Any]
    prefixes: tuple[int, ...]
    rank: int
    dtype: str

    @classmethod
    def of(cls, dtype: str, prefixes: tuple[int, ...], heads: int, rank: int = RANK, rope: int = ROPE) -> Problem:
        random = np.random.default_rng(heads + len(prefixes))
        nodes, capacity = len(PARENTS), max(prefixes) + len(PARENTS)
        q = random.standard_normal((len(prefixes), nodes, heads, rank + rope), np.float32)
        rows = random.standard_normal((1, len(prefixes), capacity, rank + rope), np.float32)
        if dtype == "float32":
            return cls(q, rows, prefixes, rank, dtype)
        return cls(narrow(q), narrow(rows), prefixes, rank, dtype)

    def arguments(self, ops: Any) -> dict[str, Any]:
        count = len(self.prefixes)
        positions = np.array(self.prefixes)[:, None] + np.array(DEPTHS)
        arrays = {
            "node_count": np.full(count, len(PARENTS) - 1, np.int32),
            "prefix_lengths": np.array(self.prefixes, np.int32),
            "positions": positions.astype(np.int32),
            "paths": np.tile(PATHS, (count, 1, 1)),
        }
        on_device = {name: to_device(ops, array) for name, array in arrays.items()}
        return {**on_device, "scale": SCALE, "rank": self.rank, "dtype": self.dtype}

    def expected(self, request: int, node: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """out [H, rank] and lse [H]."""
        prefix, path = self.prefixes[request], PATHS[node][PATHS[node] >= 0]
        rows = self.rows[0, request, [*range(prefix), *(prefix + path)]]
        keys, q = (
            widen(a) if self.dtype == "bfloat16" else a.astype(np.float64) for a in (rows, self.q[request, node])
        )
        scores = SCALE * q @ keys.T
        peak = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - peak)
        total = weights.sum(axis=1, keepdims=True)
        return weights / total @ keys[:, : self.rank], (peak + np.log(total))[:, 0]


def attend(ops: Any, problem: Problem, **others: Any) -> NDArray[Any]:
    given = {**problem.arguments(ops), **others}
    return to_host(ops, ops.mla_attention(to_device(ops, problem.q), Cache(to_device(ops, problem.rows)), **given))


@pytest.mark.parametrize("problem", [Problem.of("bfloat16", (40, 70), 16), Problem.of("float32", (9, 3), 5, 24, 8)])
def test_every_row_sees_its_prefix_and_its_path(ops, problem):
    shape = problem.q.shape[:3]
    lse = guarded(ops, shape, np.float32, "lse")
    bf16 = problem.dtype == "bfloat16"
    out = guarded(ops, (*shape, problem.rank), np.uint16 if bf16 else np.float32, "out")
    path = "portable" if bf16 else "best"
    attend(ops, problem, lse=lse.array, out=out.array, path=path, longest=max(problem.prefixes) + 4)
    found = widen(out.host()) if bf16 else out.host()
    for request in range(shape[0]):
        for node in range(shape[1]):
            values, sums = problem.expected(request, node)
            np.testing.assert_allclose(lse.host()[request, node], sums, atol=1e-4)
            # Weights and results are rounded to bf16: 2^-9 each, of values that add up to a root mean square below 1.
            np.testing.assert_allclose(found[request, node], values, atol=0.02 if bf16 else 1e-5)


@pytest.mark.parametrize("path", ["portable", "wgmma"])
def test_a_row_of_a_tree_has_the_bits_of_plain_decoding(ops, path):
    """The path's rows behind the prefix, one row at a time; in the tree all other rows are NaN."""
    problem, node = Problem.of("bfloat16", (70,), 16), 4
    if path == "wgmma" and (is_host(ops) or ops.library.device().compute_capability != 90):
        with pytest.raises(UnsupportedError, match="no wgmma here"):
            attend(ops, problem, path=path)
        return
    chosen, prefix = PATHS[node], problem.prefixes[0]
    rows = problem.rows.copy()
    hidden = [prefix + other for other in range(len(PARENTS)) if other not in chosen]
    rows[0, 0, hidden] = NAN
    tree = attend(ops, Problem(problem.q, rows, problem.prefixes, RANK, problem.dtype), path=path)
    plain = rows.copy()
    plain[0, 0, prefix : prefix + len(chosen)] = rows[0, 0, prefix + chosen]
    length = prefix + len(chosen) - 1
    one = ops.mla_attention(
        to_device(ops, problem.q[:, node : node + 1].copy()),
        Cache(to_device(ops, plain)),
        *(to_device(ops, np.array(value, np.int32)) for value in ([0], [length], [[length]])),
        scale=SCALE,
        path=path,
        dtype="bfloat16",
    )
    np.testing.assert_array_equal(to_host(ops, one)[0, 0], tree[0, node])


def test_without_paths_a_row_sees_those_before_it_and_pages_change_nothing(ops):
    problem = Problem.of("bfloat16", (40, 70), 16)
    given = problem.arguments(ops)
    chain = np.array(problem.prefixes)[:, None] + np.arange(len(PARENTS))
    given |= {"positions": to_device(ops, chain.astype(np.int32)), "paths": None, "path": "portable"}
    whole = attend(ops, problem, **given)
    size, blocks = 16, 5
    pool = np.full((1, 2 * blocks, size, RANK + ROPE), NAN, np.uint16)
    table = np.arange(2 * blocks, dtype=np.int32)[::-1].reshape(2, blocks).copy()
    for request, row in ((r, i) for r in range(2) for i in range(problem.rows.shape[2])):
        pool[0, table[request, row // size], row % size] = problem.rows[0, request, row]
    paged = Cache(to_device(ops, pool), to_device(ops, table))
    found = to_host(ops, ops.mla_attention(to_device(ops, problem.q), paged, **given))
    np.testing.assert_array_equal(found, whole)
    row, keys = 2, widen(problem.rows[0, 0, :43])
    scores = SCALE * widen(problem.q[0, row]) @ keys.T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    np.testing.assert_allclose(
        widen(whole[0, row]), weights / weights.sum(axis=1, keepdims=True) @ keys[:, :RANK], atol=0.02
    )


def test_an_fp8_cache_has_the_bits_of_the_rows_that_it_stands_for(ops):
    problem = Problem.of("bfloat16", (40, 70), 16)
    values = widen(problem.rows).astype(np.float32).reshape(-1, RANK + ROPE)
    bytes_of_rows = quantize_rows(values[:, :RANK], values[:, RANK:])
    rows = float32_to_bf16_bits(np.concatenate(dequantize_rows(bytes_of_rows), axis=1)).reshape(problem.rows.shape)
    expected = attend(ops, Problem(problem.q, rows, problem.prefixes, RANK, problem.dtype), path="portable")
    cache = Cache(to_device(ops, bytes_of_rows.reshape(*problem.rows.shape[:3], ROW_BYTES)))
    given = problem.arguments(ops)
    for path in ("portable", "best"):
        found = ops.mla_attention(to_device(ops, problem.q), cache, **given, path=path)
        np.testing.assert_array_equal(to_host(ops, found), expected)
    with pytest.raises(UnsupportedError, match=r"no wgmma here, which needs .* rows in bf16"):
        ops.mla_attention(to_device(ops, problem.q), cache, **given, path="wgmma")


@pytest.mark.parametrize(
    ("others", "error", "said"),
    [
        ({"path": "fast"}, ArrayError, "path must be one of best, portable, wgmma"),
        ({"dtype": None}, ArrayError, "q must be float32 or bfloat16, got uint16"),
        ({"rank": 500}, SizeError, "rank is 500"),
        ({"rank": 0}, SizeError, "rank is 0"),
        ({"layer": 1}, SizeError, "layer is 1"),
        ({"longest": 0}, SizeError, "longest is 0"),
        ({"node_count": np.zeros(2, np.int32)}, ArrayError, r"node_count must be int32 \[1\]"),
        ({"lse": np.zeros((1, 6, 16))}, ArrayError, r"lse must be float32 \[1, 6, 16\]"),
        ({"out": np.zeros((1, 6, 16, RANK), np.float32)}, ArrayError, "out must be bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(host_ops, others, error, said):
    with pytest.raises(error, match=said):
        attend(host_ops, Problem.of("bfloat16", (5,), 16), **others)


def test_float32_has_one_path(host_ops):
    with pytest.raises(SizeError, match="path is 2"):
        attend(host_ops, Problem.of("float32", (5,), 5, 24, 8), path="wgmma")
