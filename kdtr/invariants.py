"""What ties the values of a fixture together, by kind. Each function gives the violations found in one case.

Names and shapes are those of kdtr/schema.py, which has checked them before: sizes has L, K, B and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Group = Mapping[str, npt.NDArray[Any]]
Sizes = Mapping[str, int]
Ints = npt.NDArray[np.int64]


def tree_lists(case: Group, sizes: Sizes) -> Iterator[str]:
    """Lists are descending, without NaN and +inf, ids not negative; the budget is B."""
    yield from _lists(case["lp"], case["ids"])
    if case["budget"] != sizes["B"]:
        yield f"budget is {case['budget']}, the node arrays have room for {sizes['B']}"


def tree_nodes(case: Group, sizes: Sizes) -> Iterator[str]:
    """Nodes in pop order, each from its list entry, parents first; filler past the last."""
    n, prefix = int(case["node_count"]), int(case["prefix_length"])
    if not 0 <= n <= sizes["B"]:
        yield f"node_count is {n}, must be in 0..{sizes['B']}"
        return
    if prefix < 0:
        yield f"prefix_length is {prefix}"
    parents, depths, ranks = (case[name].astype(np.int64) for name in ("parents", "depths", "ranks"))
    node = np.arange(1, 1 + n)
    wrong = (parents[1 : 1 + n] < 0) | (parents[1 : 1 + n] >= node)
    if parents[0] != -1 or wrong.any():
        at = 0 if parents[0] != -1 else 1 + int(wrong.argmax())
        yield f"parents[{at}] is {parents[at]}: the root has -1, any other node one before it"
        return
    yield from _same("depths", depths, _padded(depths[parents[node]] + 1, 0, sizes))
    low, high = (depths[node].min(initial=1), depths[node].max(initial=1))
    if low < 1 or high > max(1, sizes["L"]) or (ranks[node] < 0).any() or (ranks[node] >= sizes["K"]).any():
        yield f"depths or ranks are outside 1..{sizes['L']}, 0..{sizes['K'] - 1}"
        return
    yield from _same("ranks", ranks, _padded(ranks[node], 0, sizes))
    tokens = case["ids"][depths[node] - 1, ranks[node]] if n else node
    yield from _same("tokens", case["tokens"], _padded(tokens, int(case["root_token"]), sizes))
    yield from _same("positions", case["positions"], _padded(prefix + depths[node], prefix, sizes))
    scores = case["scores"]
    if scores[0] != 0 or (scores[1 + n :] != 0).any() or not (np.diff(scores[1 : 1 + n]) <= 0).all():
        yield "scores must be 0 for the root, non-increasing from node 1 on, 0 past the last node"
    if len({(int(p), int(r)) for p, r in zip(parents[node], ranks[node], strict=True)}) != n:
        yield "two siblings have the same rank"


def tree_links(case: Group, sizes: Sizes) -> Iterator[str]:
    """paths, visibility, first_child and next_sibling are the tree that parents describe."""
    parents, depths = case["parents"].astype(np.int64), case["depths"].astype(np.int64)
    n = int(case["node_count"])
    legal = 0 <= n <= sizes["B"] and all(0 <= parents[i] < i and 0 <= depths[i] <= sizes["L"] for i in range(1, 1 + n))
    if not legal:  # told by tree_nodes
        return
    paths = np.full((1 + sizes["B"], 1 + sizes["L"]), -1, np.int64)
    sees = np.zeros((1 + sizes["B"], 1 + sizes["B"]), np.bool_)
    first_child, next_sibling, last_child = (np.full(1 + sizes["B"], -1, np.int64) for _ in range(3))
    paths[0, 0], sees[0, 0] = 0, True
    for i in range(1, 1 + n):
        parent = parents[i]
        paths[i], sees[i] = paths[parent], sees[parent]
        paths[i, depths[i]], sees[i, i] = i, True
        if first_child[parent] < 0:
            first_child[parent] = i
        else:
            next_sibling[last_child[parent]] = i
        last_child[parent] = i
    yield from _same("paths", case["paths"], paths)
    words = -(-(1 + sizes["B"]) // 32)
    if sizes["W"] != words:
        yield f"visibility has {sizes['W']} words a row, {1 + sizes['B']} nodes take {words}"
    else:
        bits = np.zeros((1 + sizes["B"], words * 32), np.bool_)
        bits[:, : 1 + sizes["B"]] = sees
        yield from _same("visibility", case["visibility"], np.packbits(bits, axis=1, bitorder="little").view("<u4"))
    for name, expected in (("first_child", first_child), ("next_sibling", next_sibling)):
        if name in case:
            yield from _same(name, case[name], expected)


def topk(case: Group, sizes: Sizes) -> Iterator[str]:
    """K is the smaller of k and the logical vocabulary, ids lie in it, lists are descending."""
    k, vocabulary = int(case["k"]), int(case["vocab_size"])
    if not 0 <= vocabulary <= sizes["V"]:
        yield f"vocab_size is {vocabulary}, the logits have {sizes['V']} columns"
    if sizes["K"] != min(k, vocabulary):
        yield f"lists have {sizes['K']} entries, must have min(k, vocab_size) = {min(k, vocabulary)}"
    yield from _lists(case["lp"], case["ids"])
    if (case["ids"] >= vocabulary).any():
        yield f"ids go up to {case['ids'].max()}, the vocabulary ends at {vocabulary - 1}"


def accept(case: Group, sizes: Sizes) -> Iterator[str]:
    """Choices or logits are given; accepted is a path from the root."""
    n = int(case["node_count"])
    if not 0 <= n < sizes["N"]:
        yield f"node_count is {n}, the node arrays have room for {sizes['N'] - 1}"
        return
    if ("choices" in case) == ("logits" in case):
        yield "either choices or logits must be given"
    path = case["accepted"].astype(np.int64)
    if not path.size or path[0] != 0 or path.min() < 0 or path.max() > n:
        yield f"accepted is {path.tolist()}, must start with the root and stay within 0..{n}"
    elif not np.array_equal(case["parents"][path[1:]], path[:-1]):
        yield f"accepted {path.tolist()} is not a path: the parents of its nodes are {case['parents'][path].tolist()}"


def compact(case: Group, sizes: Sizes) -> Iterator[str]:
    """Accepted nodes are strictly increasing from the root and fit the capacity."""
    path, prefix = case["accepted"].astype(np.int64), int(case["prefix_length"])
    if not path.size or path[0] != 0 or (np.diff(path) <= 0).any():
        yield f"accepted is {path.tolist()}, must start with the root and increase strictly"
    elif prefix < 0 or prefix + path[-1] >= sizes["capacity"]:
        yield f"row {prefix + path[-1]} of prefix_length {prefix} is past the capacity {sizes['capacity']}"
    if case["rows"].dtype != case["rows_after"].dtype:
        yield f"rows are {case['rows'].dtype}, rows_after {case['rows_after'].dtype}"
    if ("block_table" in case) != ("block_size" in case):
        yield "block_table and block_size go together"


def attention(case: Group, sizes: Sizes) -> Iterator[str]:
    """All arrays of the stored form, or all of the generated form; sampled pairs lie in the rows and heads."""
    stored, generated = (
        {"q_latent", "q_rope", "latent", "rope_key", "out"},
        {"seed", "heads", "prefix_length", "parents", "pairs", "sampled_out"},
    )
    if not any(form <= set(case) for form in (stored, generated)):
        missing = min((form - set(case) for form in (stored, generated)), key=len)
        yield f"neither stored nor generated as a whole: {', '.join(sorted(missing))} missing"
    elif generated <= set(case):
        pairs, limits = case["pairs"].astype(np.int64), (sizes["N"], int(case["heads"]))
        if (pairs < 0).any() or (pairs >= limits).any():
            yield f"pairs go up to {pairs.max(axis=0).tolist()}, there are {limits[0]} rows and {limits[1]} heads"


def drafter_lists(case: Group, sizes: Sizes) -> Iterator[str]:
    """Lists as in a tree; budget, block size, node counts, paths and choices agree."""
    yield from _lists(case["lp"], case["ids"])
    if case["budget"] != sizes["B"] or case["block_size"] != sizes["L"] + 1:
        yield (
            f"budget {case['budget']} and block_size {case['block_size']} do not fit choices for {sizes['B']} nodes "
            f"and lists of depth {sizes['L']}"
        )
    count = case["node_count"][:, None]
    if (count < 0).any() or (count > sizes["B"]).any():
        yield f"node_count is {case['node_count'].tolist()}, must be in 0..{sizes['B']}"
    past = np.arange(1 + sizes["B"]) > count
    if ((case["choices"] == -1) != past).any() or (case["choices"] < -1).any():
        yield "choices must be tokens up to the last node and -1 past it"
    path = case["path"].astype(np.int64)
    steps = path[:, 1:]
    if (path[:, 0] != 0).any() or ((steps <= path[:, :-1]) & (steps != -1)).any() or (steps > count).any():
        yield "path must start with the root and increase strictly within the nodes, then be -1"
    elif ((path[:, :-1] == -1) & (steps != -1)).any():
        yield "path has a node after -1"


def _lists(lp: npt.NDArray[Any], ids: npt.NDArray[Any]) -> Iterator[str]:
    if np.isnan(lp).any() or np.isposinf(lp).any():
        yield "lp has NaN or +inf"
    elif (lp[..., 1:] > lp[..., :-1]).any():
        yield "lp is not descending"
    if (ids < 0).any():
        yield f"ids has {ids.min()}"


def _padded(values: npt.NDArray[Any], root: int, sizes: Sizes) -> npt.NDArray[Any]:
    """Root value, node values, 0 past the last node."""
    padded = np.zeros(1 + sizes["B"], values.dtype)
    padded[0] = root
    padded[1 : 1 + len(values)] = values
    return padded


def _same(name: str, actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> Iterator[str]:
    if not np.array_equal(actual, expected):
        at = tuple(int(i) for i in np.argwhere(actual != expected)[0])
        yield f"{name}{list(at)} is {actual[at]}, must be {expected[at]}"
