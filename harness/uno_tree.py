"""SGLang's UNO tree builder, one Triton program a request, run from its own package beside the contract's builders.

Its tree: the best 1 + B nodes by float32 sums of log-probabilities; of equal ones the shallower, then the lower rank,
the lower token, the lower parent. Nodes come best first, as in the contract, whose float64 sums break other ties.
At most Q = 1 + B = 128 nodes, and Q * K <= 2048 candidates, K a depth. Tokens and edges (parent * K + rank) are 64-bit.
Source: sglang 0.5.23, sglang/kernels/ops/speculative/uno_tree.py; imported where it is installed.
"""

from __future__ import annotations

import heapq
import importlib
import importlib.util
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.gpu_builders import POISON

MODULE = "sglang.kernels.ops.speculative.uno_tree"
MOST_NODES = 128
MOST_CANDIDATES = 2048
Arrays = dict[str, NDArray[Any]]


class NoUnoError(RuntimeError):
    """The builder is not here, or does not take these sizes; the message says what is missing."""


def width(budget: int, listed: int) -> int:
    """Candidates per depth of `listed` ones. Raises NoUnoError for a budget that it does not take."""
    nodes = budget + 1
    if nodes > MOST_NODES:
        raise NoUnoError(f"its trees have at most {MOST_NODES} nodes, the root included; asked for {nodes}")
    return min(listed, MOST_CANDIDATES // nodes)


def build(lp: NDArray[np.float32], ids: NDArray[np.int32], budget: int, root_token: int = 0) -> Arrays:
    """The tree of its rules from lp float32 and ids int32 [L, K'], best first. Raises NoUnoError as `width` does."""
    depth_limit, candidates = len(lp), width(budget, lp.shape[1])
    tokens, parents, depths, ranks, scores = [root_token], [-1], [0], [0], [np.float32(0)]
    open_edges: list[tuple[float, int, int, int, int]] = []
    while len(tokens) <= budget:
        parent = len(tokens) - 1
        depth = depths[parent]
        if depth < depth_limit:
            for rank in range(candidates):
                mass = scores[parent] + lp[depth, rank]  # float32
                heapq.heappush(open_edges, (-float(mass), depth + 1, rank, int(ids[depth, rank]), parent))
        negative, depth, rank, token, parent = heapq.heappop(open_edges)
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        ranks.append(rank)
        scores.append(np.float32(-negative))
    return _arrays(tokens, parents, depths, ranks, scores)


def is_here() -> bool:
    """Whether its package is installed."""
    return importlib.util.find_spec("sglang") is not None


def load() -> ModuleType:
    """The builder's module. Raises NoUnoError."""
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        raise NoUnoError(f"SGLang's UNO builder is not here: {error}") from error


class UnoTrees:
    """Its kernel for lists [batches, R, L, K'] on the GPU, as its package launches it behind top-k."""

    def __init__(self, lp: NDArray[np.float32], ids: NDArray[np.int32], budget: int):
        """Raises NoUnoError."""
        self._requests, self._depth_limit, listed = lp.shape[1:]
        self._nodes, self._candidates = budget + 1, width(budget, listed)
        self._kernel = load()._build_tree_kernel
        self._torch: Any = importlib.import_module("torch")
        taken = slice(self._candidates)
        self._batches = [
            (self._on_gpu(one[..., taken].astype(np.int64)), self._on_gpu(other[..., taken]), self._results())
            for one, other in zip(ids, lp, strict=True)
        ]

    def build(self) -> None:
        """Launches the kernel for each batch."""
        for ids, lp, results in self._batches:
            self._kernel[(self._requests,)](
                ids,
                lp,
                *results,
                **_strides("TOKEN", ids),
                **_strides("PROB", lp),
                PARENT_BATCH_STRIDE=results[2].stride(0),
                NUM_DEPTHS=self._depth_limit,
                K=self._candidates,
                Q=self._nodes,
                BLOCK_CANDIDATES=1 << (self._nodes * self._candidates - 1).bit_length(),
                num_warps=8,
                num_stages=1,
            )

    def trees(self) -> list[Arrays]:
        """What was built last, request by request."""
        self._torch.cuda.synchronize()
        found = []
        for _, _, results in self._batches:
            tokens, edges, _, depths, scores = (array.cpu().numpy() for array in results)
            parents, ranks = np.divmod(edges, self._candidates)
            found += [
                _arrays([0, *tokens[r]], [-1, *parents[r]], depths[r], [0, *ranks[r]], scores[r])
                for r in range(self._requests)
            ]
        return found

    def _on_gpu(self, array: NDArray[Any]) -> Any:
        return self._torch.from_numpy(np.ascontiguousarray(array)).cuda()

    def _results(self) -> list[Any]:
        """Tokens, edges and its parent list, int64; depths int32 and masses float32 of all nodes."""
        requests, nodes, torch = self._requests, self._nodes, self._torch
        widths = (nodes - 1, nodes - 1, self._candidates * max(self._depth_limit - 1, 0) + 1, nodes, nodes)
        types = (torch.int64, torch.int64, torch.int64, torch.int32, torch.float32)
        return [
            torch.full((requests, wide), POISON, dtype=dtype, device="cuda")
            for wide, dtype in zip(widths, types, strict=True)
        ]


def _strides(name: str, array: Any) -> dict[str, int]:
    return {f"{name}_{axis}_STRIDE": array.stride(i) for i, axis in enumerate(("BATCH", "DEPTH", "RANK"))}


def _arrays(tokens: Any, parents: Any, depths: Any, ranks: Any, scores: Any) -> Arrays:
    return {
        "node_count": np.array(len(tokens) - 1, np.int32),
        "tokens": np.asarray(tokens, np.int32),
        "parents": np.asarray(parents, np.int32),
        "depths": np.asarray(depths, np.int32),
        "ranks": np.asarray(ranks, np.int32),
        "scores": np.asarray(scores, np.float32),
    }
