"""Second opinions for the tests: slow, obvious, and written independently of the package."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

import numpy as np


def enumerated_tree(lp: np.ndarray, ids: np.ndarray, budget: int, root_token: int = 0) -> dict[str, list[Any]]:
    """Every prefix of the product of the lists, sorted by (-score, rank tuple), the first `budget` of them.

    Right whenever no successor outscores its generator (all lp <= 0 and exact sums). Exponential: small cases only.
    """
    prefixes: dict[tuple[int, ...], float] = {}
    width = lp.shape[1]
    for depth in range(1, lp.shape[0] + 1):
        for ranks in itertools.product(range(width), repeat=depth):
            if all(np.isfinite(lp[d, : r + 1]).all() for d, r in enumerate(ranks)):
                prefixes[ranks] = sum(float(lp[d, r]) for d, r in enumerate(ranks))
    chosen = sorted(prefixes, key=lambda ranks: (-prefixes[ranks], ranks))[:budget]
    number = {(): 0} | {ranks: i + 1 for i, ranks in enumerate(chosen)}
    return {
        "tokens": [root_token] + [int(ids[len(r) - 1, r[-1]]) for r in chosen],
        "parents": [-1] + [number[r[:-1]] for r in chosen],
        "depths": [0] + [len(r) for r in chosen],
        "ranks": [0] + [r[-1] for r in chosen],
        "scores": [0.0] + [prefixes[r] for r in chosen],
    }


def published_tree(lp: np.ndarray, ids: np.ndarray, budget: int, root_token: int = 0) -> dict[str, Any]:
    """The public algorithm (arXiv 2604.12989; behaviour of github.com/liranringel/ddtree at c96427a), re-implemented.

    As there: heap entries carry (-score, ranks, parent, depth, rank, score), children are maps from token to node, the
    visibility matrix is filled row by row from the parent's row. Lists must be free of -inf, which it does not define.
    """
    levels, width = lp.shape
    entries: list[tuple[float, tuple[int, ...], int, int, int, float]] = []
    if budget > 0 and levels > 0 and width > 0:
        start = float(lp[0][0])
        entries = [(-start, (0,), 0, 1, 0, start)]
    node_tokens: list[int] = []
    node_depths: list[int] = []
    node_ranks: list[int] = []
    node_scores: list[float] = []
    parents: list[int] = [-1]
    children: list[dict[int, int]] = [{}]
    while entries and len(node_tokens) < budget:
        _, ranks, parent, depth, rank, score = heapq.heappop(entries)
        token = int(ids[depth - 1][rank])
        current = len(node_tokens) + 1
        node_tokens.append(token)
        node_depths.append(depth)
        node_ranks.append(rank)
        node_scores.append(score)
        parents.append(parent)
        children.append({})
        children[parent][token] = current
        if rank + 1 < width:
            beside = score - float(lp[depth - 1][rank]) + float(lp[depth - 1][rank + 1])
            heapq.heappush(entries, (-beside, (*ranks[:-1], rank + 1), parent, depth, rank + 1, beside))
        if depth < levels:
            below = score + float(lp[depth][0])
            heapq.heappush(entries, (-below, (*ranks, 0), current, depth + 1, 0, below))
    count = len(node_tokens)
    visible = np.zeros((count + 1, count + 1), bool)
    visible[0, 0] = True
    for i in range(1, count + 1):
        visible[i, :i] = visible[parents[i], :i]
        visible[i, i] = True
    return {
        "tokens": [root_token, *node_tokens],
        "parents": parents,
        "depths": [0, *node_depths],
        "ranks": [0, *node_ranks],
        "scores": [0.0, *node_scores],
        "children": children,
        "visibility": visible,
    }


def walked(tokens: np.ndarray, parents: np.ndarray, choices: np.ndarray) -> tuple[list[int], int]:
    """Accepted nodes and bonus token, found by scanning all nodes for the wanted child at every step."""
    nodes = [0]
    while True:
        wanted = choices[nodes[-1]]
        found = [i for i in range(len(tokens)) if parents[i] == nodes[-1] and tokens[i] == wanted]
        if not found:
            return nodes, int(wanted)
        nodes.append(found[0])
