"""Lists for the tree builder, one kind for each way in which a tree may go wrong, and what the reference makes of them.

Shapes: lp float32 and ids int32 [R, L, K], rows sorted, ids distinct within a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.topk import DraftError
from reference.tree import build_tree

Shape = tuple[int, int, int]
FINEST = 2.0**-149  # the smallest float32 above 0
REASONS = {  # of the reference, and the codes that stand for them (kdtree_request_status)
    "is NaN": 1,
    "is +inf": 2,
    "outside the vocabulary": 3,
    "above that of the rank before": 4,
    "stands twice": 5,
}


def _drafter(rng, shape):
    """As a drafter's: float32 logit - float32 logZ, so that all are multiples of 2^-24."""
    logits = (rng.normal(size=shape) * rng.choice([0.05, 1.0, 3.0, 8.0])).astype(np.float32)
    return logits - (logits.max(axis=2, initial=1, keepdims=True) + np.float32(rng.exponential(2)))


def _equal(rng, shape):
    return np.full(shape, -np.log(rng.integers(2, 40)))


def _halves(rng, shape):
    """1/2, 1/4, ... at every depth: a deep node ties with a shallow one."""
    return np.broadcast_to(np.log(2.0) * -np.arange(1, shape[2] + 1), shape)


def _quarters(rng, shape):
    return -rng.integers(0, rng.integers(2, 40), shape) / 4


def _zeros(rng, shape):
    """Of both signs, and a few steps down."""
    return np.where(rng.random(shape) < rng.choice([0.3, 0.9, 1.0]), rng.choice([0.0, -0.0], shape), -0.5)


def _fine(rng, shape):
    """log_softmax of sharp logits: bits far below 2^-24, whose sums round."""
    return -np.exp(-rng.exponential(8, shape)) * rng.choice([1e-30, 1.0, 10.0])


def _positive(rng, shape):
    """No log-probabilities, but sorted: a child may outscore its parent."""
    return rng.normal(0.2, 1, shape)


def _huge(rng, shape):
    return -rng.random(shape) * rng.choice([65504.0, 1e30, 3e38], shape)


def _huge_steps(rng, shape):
    return -rng.integers(0, 50, shape) * 2.0**104


def _denormal(rng, shape):
    return -rng.integers(0, 1000, shape) * FINEST


def _steep(rng, shape):
    """The tails cost more than 32 bits hold in units of the heads' lowest bit."""
    tail = np.arange(shape[2]) >= rng.integers(1, shape[2] + 1)
    return np.where(tail, -rng.integers(257, 10**6, shape).astype(np.float64), -rng.integers(1, 2**26, shape) / 2**24)


def _one_finite(rng, shape):
    lp = np.full(shape, -np.inf)
    lp[:, :, :1] = -rng.exponential(1)
    return lp


KINDS = {
    "drafter": _drafter,
    "equal": _equal,
    "halves": _halves,
    "quarters": _quarters,
    "zeros": _zeros,
    "fine": _fine,
    "positive": _positive,
    "huge": _huge,
    "huge steps": _huge_steps,
    "denormal": _denormal,
    "steep": _steep,
    "one finite": _one_finite,
}


def lists_of(
    kind: str, rng: np.random.Generator, shape: Shape, ends: float = 0.2
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """(lp, ids) of a kind. ends: how many of the rows end early with -inf, wherever, the first entry included."""
    lp = np.ascontiguousarray(-np.sort(-KINDS[kind](rng, shape).astype(np.float32), axis=2))
    last = np.where(rng.random(shape[:2]) < ends, rng.integers(0, shape[2] + 1, shape[:2]), shape[2])
    lp[np.arange(shape[2]) >= last[..., None]] = -np.inf
    return lp, ids_of(rng, shape)


def ids_of(rng: np.random.Generator, shape: Shape) -> NDArray[np.int32]:
    """Distinct ids: a start and an odd stride modulo a power of two, at times all of them multiples of 4096."""
    size = 1 << int(shape[2] + rng.integers(0, 1000)).bit_length()
    start, stride = rng.integers(0, size, (2, *shape[:2], 1))
    ids = (start + (stride | 1) * np.arange(shape[2])) % size
    scattered: NDArray[np.int32] = (ids * rng.choice([1, 1, 1, 4096])).astype(np.int32)
    return scattered


def mixed_batch(rng, depth=7, width=40):
    """One request of every kind, and a refused one."""
    pairs = [lists_of(kind, rng, (1, depth, width)) for kind in KINDS]
    lp, ids = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    lp[3, 2, 5] = np.nan
    return lp, ids


def spoiled(rng, lp, ids, faults, vocab_size):
    """Copies of the lists of one request with some faults of any kind."""
    lp, ids = lp.copy(), ids.copy()
    depth, width = lp.shape
    for _ in range(faults):
        d, r, other = int(rng.integers(depth)), int(rng.integers(width)), int(rng.integers(width))
        match rng.integers(9):
            case 0:
                lp[d, r] = np.nan
            case 1:
                lp[d, r] = -np.float32(np.nan)
            case 2:
                lp[d, r] = np.inf
            case 3:
                ids[d, r] = rng.choice([-1, -(2**31)])
            case 4:
                ids[d, r] = rng.choice([vocab_size, 2**31 - 1])
            case 5:
                lp[d, r:] = np.nextafter(lp[d, r - 1] if r else lp[d, r], np.float32(np.inf))
            case 6:
                ids[d, r] = ids[d, other]  # a repeat only if both are finite and not one
            case 7:
                lp[d, r] = -np.inf  # unsorted unless it ends the row
            case _:
                ids[d:, r] = ids[d:, other]  # in several rows
    return lp, ids


def size_of(rng: np.random.Generator, largest_budget: int) -> tuple[int, int, int]:
    """(L, K, B): mostly small, with the edges of every range more often than chance has them."""
    depth = int(rng.choice([1, 2, 3, 7, 15, 31, int(rng.integers(1, 32))]))
    edges = (0, 1, 2, 31, 32, 33, 64, 65, 128, 129, 256, 257, 384, 385, 512, 513, 1023, 1024)
    budgets = [edge for edge in edges if edge <= largest_budget]
    budget = int(rng.choice([*budgets, int(rng.integers(largest_budget))]))
    width = int(rng.choice([1, 2, 3, 8, budget, budget + 1, 2 * budget, int(rng.integers(1, 64))]))
    return depth, min(max(width, 1), 1024), budget


def drawn_options(rng, shape, budget):
    """Roots, prefixes and sizes of their own for some of the calls."""
    options = {
        "root_tokens": rng.integers(0, 2**31, shape[0]),
        "prefix_lengths": rng.integers(0, 2**20, shape[0]),
        "depth_limits": rng.integers(0, shape[1] + 1, shape[0]),
        "budgets": rng.integers(0, budget + 1, shape[0]),
    }
    return {name: array.astype(np.int32) for name, array in options.items() if rng.random() < 0.5}


def wanted(
    lp: NDArray[np.float32],
    ids: NDArray[np.int32],
    budget: int,
    *,
    root_tokens: NDArray[np.int32] | None = None,
    prefix_lengths: NDArray[np.int32] | None = None,
    depth_limits: NDArray[np.int32] | None = None,
    budgets: NDArray[np.int32] | None = None,
    vocab_size: int = 0,
) -> dict[str, NDArray[Any]]:
    """All arrays that the reference gives, [R, ...], fillers and status included."""
    trees = []
    for r in range(len(lp)):
        root = 0 if root_tokens is None else int(root_tokens[r])
        prefix = 0 if prefix_lengths is None else int(prefix_lengths[r])
        depth = lp.shape[1] if depth_limits is None else int(depth_limits[r])
        own = budget if budgets is None else int(budgets[r])
        status = [0, 0, 0]
        try:
            tree = build_tree(lp[r, :depth], ids[r, :depth], own, root, vocab_size=vocab_size or None)
        except DraftError as error:
            code = next(code for reason, code in REASONS.items() if reason in error.reason)
            status = [code, error.depth, error.rank or 0]
            tree = build_tree(lp[r, :0], ids[r, :0], 0, root)
        trees.append(tree.padded(budget, lp.shape[1], prefix) | {"status": np.array(status, np.int32)})
    return {name: np.stack([tree[name] for tree in trees]) for name in trees[0]}
