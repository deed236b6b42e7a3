"""Best-first draft tree of DDTree: per-depth lists -> the B most probable prefixes, as a tree.

A candidate is a rank tuple (its rank in the list of every depth along its path) with a float64 score. The best
candidate is popped, becomes the next node, and pushes its next sibling and its first child. Equal scores: the
lexicographically smaller rank tuple first, a prefix before its extensions. Node 0 is the root, nodes 1..n follow in pop
order, so a parent always precedes its children and siblings stand in rank order.
Source: DDTree paper (arXiv 2604.12989), algorithm 1, and the behaviour of its public implementation
(github.com/liranringel/ddtree, commit c96427a); -inf, ties and refusals, which these leave open, are fixed here.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.topk import DraftError

WORD_BITS = 32


@dataclass(frozen=True, eq=False)
class Tree:
    """A draft tree of n non-root nodes; all arrays have 1+n entries, the root first, and are read-only.

    tokens int32 (tokens[0] is the root token), parents int32 (-1 for the root, else an earlier node), depths int32
    (0 for the root), ranks int32 (position in the depth's list), scores float64 (log-probability of the path, 0 for the
    root). Raises ValueError when the arrays do not describe a tree.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    ranks: NDArray[np.int32]
    scores: NDArray[np.float64]

    def __post_init__(self) -> None:
        for name in ("tokens", "parents", "depths", "ranks", "scores"):
            dtype = np.float64 if name == "scores" else np.int32
            array = np.array(getattr(self, name), dtype)  # a copy: the tree owns its arrays
            array.setflags(write=False)
            object.__setattr__(self, name, array)
            if array.shape != self.tokens.shape or array.ndim != 1 or len(array) == 0:
                raise ValueError(
                    f"{name} must have shape [1+n] like tokens {list(self.tokens.shape)}, got {array.shape}"
                )
        if self.parents[0] != -1 or self.depths[0] != 0:
            raise ValueError(f"node 0 is not a root: parent {self.parents[0]}, depth {self.depths[0]}")
        nodes, parents = np.arange(1, len(self.tokens)), self.parents[1:]
        wrong = (parents < 0) | (parents >= nodes)
        wrong |= self.depths[1:] != self.depths[np.where(wrong, 0, parents)] + 1
        if wrong.any():
            i = int(nodes[wrong][0])
            raise ValueError(f"node {i}: parent {self.parents[i]} and depth {self.depths[i]} do not fit a tree")

    @property
    def node_count(self) -> int:
        """n, the number of non-root nodes."""
        return len(self.tokens) - 1

    def visibility(self) -> NDArray[np.bool_]:
        """bool [1+n, 1+n]: row i sees column j if j is an ancestor of i or i itself."""
        sees = np.eye(len(self.tokens), dtype=np.bool_)
        for node in range(1, len(sees)):
            sees[node] |= sees[self.parents[node]]
        return sees

    def visibility_words(self) -> NDArray[np.uint32]:
        """uint32 [1+n, ceil((1+n)/32)]: bit j%32 of word j//32 of row i is visibility()[i, j]; spare bits are 0."""
        return pack_words(self.visibility())

    def paths(self, depth_limit: int | None = None) -> NDArray[np.int32]:
        """int32 [1+n, depth_limit+1]: node indices from the root to the node itself, then -1.

        `depth_limit` defaults to the deepest node's depth.
        """
        deepest = int(self.depths.max())
        columns = (deepest if depth_limit is None else depth_limit) + 1
        if columns <= deepest:
            raise ValueError(f"depth limit {columns - 1} is below the deepest node, {deepest}")
        paths = np.full((len(self.tokens), columns), -1, np.int32)
        paths[0, 0] = 0
        for node in range(1, len(paths)):
            paths[node] = paths[self.parents[node]]
            paths[node, self.depths[node]] = node
        return paths

    def positions(self, prefix_length: int) -> NDArray[np.int32]:
        """int32 [1+n]: prefix length + depth. Siblings share a position (public issue: lablup/mlxcel#1214)."""
        return self.depths + np.int32(prefix_length)

    def links(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(first_child, next_sibling), int32 [1+n] each, -1 where there is none; children in node order."""
        first_child = np.full(len(self.tokens), -1, np.int32)
        next_sibling = np.full(len(self.tokens), -1, np.int32)
        last_child: dict[int, int] = {}
        for node in range(1, len(self.tokens)):
            parent = int(self.parents[node])
            if parent in last_child:
                next_sibling[last_child[parent]] = node
            else:
                first_child[parent] = node
            last_child[parent] = node
        return first_child, next_sibling

    def padded(self, budget: int, depth_limit: int, prefix_length: int = 0) -> dict[str, NDArray[Any]]:
        """All arrays of the tree in the fixed shapes of (budget, depth_limit), with the documented filler past node n.

        node_count int32 []; tokens, parents, depths, ranks, positions, first_child, next_sibling int32 [1+B];
        scores float64 [1+B]; visibility uint32 [1+B, ceil((1+B)/32)]; paths int32 [1+B, L+1].
        Filler: -1 in parents, first_child, next_sibling and paths, 0 elsewhere. It is never read: sizes come from
        node_count.
        """
        if budget < self.node_count:
            raise ValueError(f"a tree of {self.node_count} nodes does not fit a budget of {budget}")
        first_child, next_sibling = self.links()
        visible = np.zeros((len(self.tokens), budget + 1), np.bool_)
        visible[:, : len(self.tokens)] = self.visibility()
        filled: dict[str, tuple[NDArray[Any], int]] = {
            "tokens": (self.tokens, 0),
            "parents": (self.parents, -1),
            "depths": (self.depths, 0),
            "ranks": (self.ranks, 0),
            "positions": (self.positions(prefix_length), 0),
            "first_child": (first_child, -1),
            "next_sibling": (next_sibling, -1),
            "scores": (self.scores, 0),
            "visibility": (pack_words(visible), 0),
            "paths": (self.paths(depth_limit), -1),
        }
        arrays: dict[str, NDArray[Any]] = {"node_count": np.array(self.node_count, np.int32)}
        for name, (array, filler) in filled.items():
            arrays[name] = np.full((budget + 1, *array.shape[1:]), filler, array.dtype)
            arrays[name][: len(array)] = array
        return arrays


def pack_words(visible: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """bool [R, C] -> uint32 [R, ceil(C/32)], bit j%32 of word j//32 of a row is column j."""
    rows, columns = visible.shape
    words = -(-columns // WORD_BITS)
    whole = np.zeros((rows, words * WORD_BITS), np.bool_)
    whole[:, :columns] = visible
    packed = np.packbits(whole, axis=1, bitorder="little")
    return packed.view("<u4").astype(np.uint32)


def build_tree(
    lp: NDArray[np.float32],
    ids: NDArray[np.int32],
    budget: int,
    root_token: int = 0,
    *,
    vocab_size: int | None = None,
    request: int = 0,
) -> Tree:
    """The best-first tree of at most `budget` non-root nodes from the lists `lp` float32 [L, K] and `ids` int32 [L, K].

    Row d lists the candidates of depth d+1, best first. lp = -inf ends its row: neither it nor anything after it is
    drafted. Scores are float64 in this order of operations: first = lp[0,0]; next sibling = (score - lp[d,r]) +
    lp[d,r+1]; first child = score + lp[d+1,0]. L = 0, K = 0 or budget = 0 give a tree of the root alone.
    Raises ValueError for a negative budget, TypeError for other dtypes, DraftError naming request, depth and rank for
    NaN, +inf, an id outside [0, vocab_size), a row that is not sorted, or a token twice in a row.
    """
    if budget < 0:
        raise ValueError(f"request {request}: budget must be at least 0, got {budget}")
    if lp.ndim != 2 or lp.shape != ids.shape:
        raise ValueError(f"request {request}: lp {list(lp.shape)} and ids {list(ids.shape)} must both be [L, K]")
    if lp.dtype != np.float32 or ids.dtype != np.int32:
        raise TypeError(f"request {request}: lp must be float32 and ids int32, got {lp.dtype} and {ids.dtype}")
    _refuse_bad_lists(lp, ids, vocab_size, request)

    values: list[list[float]] = lp.astype(np.float64).tolist()
    depth_limit, width = lp.shape
    tokens, parents, depths, ranks, scores = [root_token], [-1], [0], [0], [0.0]
    # heapq pops the smallest: (-score, rank tuple) is the order of the contract, and rank tuples never repeat.
    heap: list[tuple[float, tuple[int, ...], int]] = []
    if depth_limit and width and math.isfinite(values[0][0]):
        heap.append((-values[0][0], (0,), 0))

    while heap and len(tokens) <= budget:
        negative_score, path, parent = heapq.heappop(heap)
        score, depth, rank, node = -negative_score, len(path), path[-1], len(tokens)
        tokens.append(int(ids[depth - 1, rank]))
        parents.append(parent)
        depths.append(depth)
        ranks.append(rank)
        scores.append(score)

        row = values[depth - 1]
        if rank + 1 < width and math.isfinite(row[rank + 1]):
            sibling_score = (score - row[rank]) + row[rank + 1]
            heapq.heappush(heap, (-sibling_score, (*path[:-1], rank + 1), parent))
        if depth < depth_limit and math.isfinite(values[depth][0]):
            child_score = score + values[depth][0]
            heapq.heappush(heap, (-child_score, (*path, 0), node))

    return Tree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        np.array(ranks, np.int32),
        np.array(scores, np.float64),
    )


def _refuse_bad_lists(lp: NDArray[np.float32], ids: NDArray[np.int32], vocab_size: int | None, request: int) -> None:
    """Raise DraftError for the first bad entry in (depth, rank) order."""
    beyond = ids < 0
    if vocab_size is not None:
        beyond |= ids >= vocab_size
    unsorted = np.zeros(lp.shape, np.bool_)
    unsorted[:, 1:] = lp[:, 1:] > lp[:, :-1]
    faults = [
        (np.isnan(lp), "the log-probability is NaN"),
        (np.isposinf(lp), "the log-probability is +inf"),
        (beyond, "the token id {id} is outside the vocabulary" + ("" if vocab_size is None else f" of {vocab_size}")),
        (unsorted, "the log-probability {lp} is above that of the rank before"),
        (_repeated(ids, np.isfinite(lp)), "the token id {id} stands twice in this list"),
    ]
    bad = np.any([mask for mask, _ in faults], axis=0)
    if bad.any():
        depth, rank = (int(i) for i in np.argwhere(bad)[0])
        reason = next(text for mask, text in faults if mask[depth, rank])
        reason = reason.format(id=int(ids[depth, rank]), lp=float(lp[depth, rank]))
        raise DraftError(reason, request=request, depth=depth + 1, rank=rank)


def _repeated(ids: NDArray[np.int32], counted: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """bool [L, K]: this counted entry repeats the id of an earlier counted entry of its row."""
    distinct = np.where(counted, ids, -1 - np.arange(ids.shape[1]))  # what does not count equals nothing
    order = np.argsort(distinct, axis=1, kind="stable")
    in_order = np.take_along_axis(distinct, order, axis=1)
    repeated = np.zeros(ids.shape, np.bool_)
    np.put_along_axis(repeated, order[:, 1:], in_order[:, 1:] == in_order[:, :-1], axis=1)
    return repeated & counted
