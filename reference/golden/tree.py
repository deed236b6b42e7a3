"""Golden trees: lists -> tree, for every size and tie rule of the contract in reference/tree.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.golden.files import EXACT, GoldenFile
from reference.golden.inputs import gaussian, integers, words
from reference.tree import build_tree

SEED = 20260412


def golden_files() -> list[GoldenFile]:
    return [_ties(), _degenerate(), _random()]


def _add(
    file: GoldenFile, case: str, lp: Any, ids: Any, budget: int, *, root_token: int = 0, prefix_length: int = 0
) -> None:
    lists, tokens = np.asarray(lp, np.float32), np.asarray(ids, np.int32)
    tree = build_tree(lists, tokens, budget, root_token)
    file.add(
        case,
        inputs={
            "lp": lists,
            "ids": tokens,
            "budget": np.int32(budget),
            "root_token": np.int32(root_token),
            "prefix_length": np.int32(prefix_length),
        },
        expected={name: (array, EXACT) for name, array in tree.padded(budget, len(lists), prefix_length).items()},
    )


def _ids(seed_stream: int, depths: int, width: int, vocab: int) -> NDArray[np.int32]:
    """Distinct ids in each row: a start and an odd stride, modulo a power of two that `width` fits."""
    size = 1 << (max(width, vocab) - 1).bit_length()
    drawn = words(SEED, 1000 + seed_stream, np.arange(depths))
    start, stride = drawn[:, :1].astype(np.int64), drawn[:, 1:2].astype(np.int64) | 1
    return ((start + stride * np.arange(width)) % size).astype(np.int32)


def _lists(stream: int, depths: int, width: int, spread: float = 3.0) -> NDArray[np.float32]:
    """Drafter-like lists without libm: sorted exact gaussians minus a logZ above 1, one float32 subtraction."""
    logits = np.sort(gaussian(SEED, stream, depths, width) * np.float32(spread), axis=1)[:, ::-1]
    logz = logits[:, :1] + np.abs(gaussian(SEED, 500 + stream, depths, 1)) + np.float32(1)
    return np.ascontiguousarray(logits - logz)


def _ties() -> GoldenFile:
    file = GoldenFile("tree_ties", "tree", SEED, "Equal scores: the lexicographically smaller rank tuple comes first.")
    width = 16
    ids = np.tile(np.arange(width), (4, 1))
    _add(file, "all_equal", np.full((4, width), -np.log(np.float32(16))), ids, 20)
    half = np.log(np.float32(0.5))
    _add(file, "half_half", np.full((2, 2), half), [[5, 9], [5, 9]], 6)
    # A depth-1 node with p = 1/4 beside a depth-2 node worth 1/2 * 1/2; each budget ends at another side of the tie.
    quarter = np.array([[-1, -2, -3], [-1, -2, -3]], np.float32)
    for budget in range(1, 8):
        _add(file, f"quarter_b{budget}", quarter, [[1, 2, 3], [4, 5, 6]], budget)
    steps = -integers(SEED, 1, 3, 7, 64).astype(np.float32).cumsum(axis=1)
    for budget in (16, 64, 255, 256, 257, 1024):
        _add(file, f"steps_b{budget}", steps, _ids(1, 7, 64, 4096), budget)
    deep = np.zeros((15, 4), np.float32)  # certain tokens: a prefix beats its extensions, so depth comes first
    _add(file, "zeros", deep, np.tile([3, 2, 1, 0], (15, 1)), 100)
    return file


def _degenerate() -> GoldenFile:
    file = GoldenFile("tree_degenerate", "tree", SEED, "Sizes and entries at the edge of the contract.")
    none = np.empty((0, 0), np.float32)
    _add(file, "no_depth", np.empty((0, 4), np.float32), np.empty((0, 4), np.int32), 4, root_token=7)
    _add(file, "no_list", np.empty((3, 0), np.float32), np.empty((3, 0), np.int32), 4, root_token=7)
    _add(file, "nothing", none, none.astype(np.int32), 0, root_token=7)
    three = np.array([[-0.5, -1.5, -2.5]] * 3, np.float32)
    _add(file, "budget_0", three, [[0, 1, 2]] * 3, 0)
    _add(file, "budget_1", three, [[0, 1, 2]] * 3, 1)
    # Three tokens at two depths: 3 + 9 nodes, however large the budget.
    _add(file, "small_vocabulary", three[:2], [[0, 1, 2]] * 2, 50)
    _add(file, "one_token", np.zeros((4, 1), np.float32), np.zeros((4, 1), np.int32), 10)
    # Token 0 and the same tokens at every depth are ordinary.
    _add(file, "token_0_everywhere", [[-1, -2], [-0.5, -3], [-0.25, -2]], [[0, 7], [0, 7], [0, 7]], 9)
    _add(file, "same_tokens", [[-0.5, -1.0], [-0.5, -1.0], [-0.5, -1.0]], [[7, 3], [7, 3], [7, 3]], 14)
    cut = np.array([[-0.5, -1.5, -np.inf], [-0.25, -np.inf, -np.inf], [-1, -1, -1]], np.float32)
    _add(file, "row_ends", cut, [[4, 5, 6]] * 3, 40)
    cut[1] = -np.inf
    _add(file, "depth_ends", cut, [[4, 5, 6]] * 3, 40)
    cut[0] = -np.inf
    _add(file, "nothing_finite", cut, [[4, 5, 6]] * 3, 40)
    large = np.array([[0, -65504, -3e38], [0, -65504, -3e38]], np.float32)
    _add(file, "huge_scores", large, [[163839, 65536, 65535]] * 2, 12, root_token=131071)
    # Bits far below 2^-24: sums in fixed point are not exact here, the order of operations decides.
    fine = -(words(SEED, 2, np.arange(7 * 24))[:, 0].astype(np.float32) * np.float32(2.0**-60)).reshape(7, 24)
    _add(file, "fine_bits", np.sort(fine, axis=1)[:, ::-1], _ids(2, 7, 24, 4096), 200)
    mixed = np.sort(np.concatenate([fine[:, :12], _lists(2, 7, 12)], axis=1), axis=1)[:, ::-1]
    _add(file, "mixed_magnitudes", mixed, _ids(3, 7, 24, 4096), 200)
    return file


def _random() -> GoldenFile:
    file = GoldenFile("tree_random", "tree", SEED, "Drafter-like lists over the whole range of depth and budget.")
    stream = 10
    for depths, budgets in {1: (1, 40), 3: (33,), 7: (16, 32, 64, 128, 256), 15: (31, 64, 256), 31: (64, 300)}.items():
        for budget in budgets:
            stream += 1
            lists = _lists(stream, depths, budget)
            ids = _ids(stream, depths, budget, 163840)
            _add(file, f"l{depths}_b{budget}", lists, ids, budget, root_token=stream, prefix_length=97 * stream)
    # Lists shorter than the budget, and flat ones, where the tree is wide.
    _add(file, "l7_k8_b256", _lists(40, 7, 8), _ids(40, 7, 8, 4096), 256, prefix_length=1)
    _add(file, "l15_flat_b200", _lists(41, 15, 200, 0.05), _ids(41, 15, 200, 4096), 200, prefix_length=63)
    _add(file, "l7_sharp_b200", _lists(42, 7, 200, 40.0), _ids(42, 7, 200, 4096), 200, prefix_length=64)
    _add(file, "l7_b1024", _lists(43, 7, 1024), _ids(43, 7, 1024, 163840), 1024, prefix_length=262143)
    _add(file, "l31_b1024", _lists(45, 31, 128, 1.0), _ids(45, 31, 128, 163840), 1024, prefix_length=1000)
    return file
