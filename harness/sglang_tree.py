"""The per-request tree builder of SGLang's open DDTree pull request, from its description, for side-by-side runs.

It builds another tree than the contract (reference.tree): per depth only K = min(max(B // L + 1, 2), V, 6) candidates;
a child's score gets a bonus of 0.2; a branch whose score lies below the first one - ln B - 1 is left out unless all its
ranks are 0 (the spine); with B <= L the tree is the top-1 chain; nodes are numbered breadth first, siblings together.
B counts non-root nodes, as here, so budgets need no conversion.
Source: github.com/sgl-project/sglang, pull request 29907.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEPTH_BONUS = 0.2
WIDTH_CAP = 6


@dataclass(frozen=True, eq=False)
class Nodes:
    """1+n nodes in breadth-first order, the root first: tokens, parents, depths, ranks int32; scores float64."""

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    ranks: NDArray[np.int32]
    scores: NDArray[np.float64]

    def arrays(self) -> dict[str, NDArray[Any]]:
        names = ("tokens", "parents", "depths", "ranks", "scores")
        return {"node_count": np.array(len(self.tokens) - 1, np.int32), **{name: getattr(self, name) for name in names}}


def width(budget: int, depth_limit: int, vocab_size: int) -> int:
    """Candidates per depth."""
    return min(max(budget // depth_limit + 1, 2), vocab_size, WIDTH_CAP) if depth_limit else 0


def build(lp: NDArray[np.float32], ids: NDArray[np.int32], budget: int, root_token: int = 0) -> Nodes:
    """The tree of one request from lp float32 [L, K'] and ids int32 [L, K'], best first."""
    depth_limit = len(lp)
    candidates = width(budget, depth_limit, lp.shape[1])
    if budget <= depth_limit:
        chosen = {(0,) * depth: float(lp[:depth, 0].sum(dtype=np.float64)) for depth in range(1, budget + 1)}
        return _breadth_first(chosen, ids, root_token)
    values: list[list[float]] = lp[:, :candidates].tolist()
    floor = values[0][0] - math.log(budget) - 1.0
    chosen = {}
    heap: list[tuple[float, tuple[int, ...]]] = [(-values[0][0], (0,))]
    while heap and len(chosen) < budget:
        negative, path = heapq.heappop(heap)
        score, rank = -negative, path[-1]
        chosen[path] = score
        row = values[len(path) - 1]
        if rank + 1 < candidates:
            sibling = (*path[:-1], rank + 1)
            sibling_score = (score - row[rank]) + row[rank + 1]
            if sibling_score >= floor:
                heapq.heappush(heap, (-sibling_score, sibling))
        if len(path) < depth_limit:
            child_score = (score + values[len(path)][0]) + DEPTH_BONUS
            if child_score >= floor or not any(path):
                heapq.heappush(heap, (-child_score, (*path, 0)))
    return _breadth_first(chosen, ids, root_token)


def build_slowly(lp: NDArray[np.float32], ids: NDArray[np.int32], budget: int, root_token: int = 0) -> Nodes:
    """The same tree without a heap: scores every rank tuple that can be reached, then looks for the best one left."""
    depth_limit = len(lp)
    candidates = width(budget, depth_limit, lp.shape[1])
    chain = budget <= depth_limit
    values = lp.astype(np.float64)
    floor = float(values[0, 0]) - math.log(budget) - 1.0 if budget and depth_limit else 0.0
    chosen: dict[tuple[int, ...], float] = {}
    scores: dict[tuple[int, ...], float] = {}
    while len(chosen) < budget:
        for path in [(), *chosen]:
            if len(path) < depth_limit and (*path, 0) not in scores:
                added = float(values[len(path), 0])
                scores[*path, 0] = (chosen[path] + added) + (0.0 if chain else DEPTH_BONUS) if path else added
            if path and not chain and path[-1] + 1 < candidates:
                rank, row = path[-1], values[len(path) - 1]
                scores[*path[:-1], rank + 1] = (chosen[path] - float(row[rank])) + float(row[rank + 1])
        open_paths = [p for p, s in scores.items() if p not in chosen and (chain or s >= floor or not any(p))]
        if not open_paths:
            break
        best = min(open_paths, key=lambda path: (-scores[path], path))
        chosen[best] = scores[best]
    return _breadth_first(chosen, ids, root_token)


def _breadth_first(chosen: dict[tuple[int, ...], float], ids: NDArray[np.int32], root_token: int) -> Nodes:
    """Numbers the chosen rank tuples by depth, then by the number of the parent, then by rank."""
    order = sorted(chosen, key=lambda path: (len(path), path))
    number = {(): 0, **{path: i for i, path in enumerate(order, 1)}}
    return Nodes(
        np.array([root_token, *(ids[len(path) - 1, path[-1]] for path in order)], np.int32),
        np.array([-1, *(number[path[:-1]] for path in order)], np.int32),
        np.array([0, *(len(path) for path in order)], np.int32),
        np.array([0, *(path[-1] for path in order)], np.int32),
        np.array([0.0, *(chosen[path] for path in order)], np.float64),
    )
