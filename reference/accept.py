"""Accept stage: walk the tree along the target's own choices.

From the root, go to the child whose token is the target's choice at the current node, while there is one. The choice at
the last node reached is the bonus token, the next round's root. The drafter's probabilities play no part: with the
draws of `reference.sampling` the output is the target's own, greedy or sampled (DDTree paper, arXiv 2604.12989).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference.sampling import TargetRowError


@dataclass(frozen=True, eq=False)
class Accepted:
    """nodes int32 [a+1]: accepted node indices, the root first, strictly increasing. bonus: token id."""

    nodes: NDArray[np.int32]
    bonus: int


def accept(
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    choices: NDArray[np.int32],
    node_count: int | None = None,
    *,
    request: int = 0,
) -> Accepted:
    """Longest path of the tree (`tokens`, `parents`, int32 [1+n]) that follows `choices` int32 [1+n].

    With `node_count` the arrays may be longer than 1+node_count; what lies past it is never read.
    choices[i] is the target's token after node i, or NO_CHOICE (-1) for a row without one; such a row matters only on
    the accepted path. A child is matched by (parent, token).
    Raises TargetRowError naming request and node when the walk stands on a row without a choice (public issue:
    vllm-project/vllm#53029), ValueError for a tree with equal siblings or parents that do not precede their children.
    """
    sizes = (len(tokens), len(parents), len(choices))
    rows = sizes[0] if node_count is None else 1 + node_count
    if rows < 1 or min(sizes) < rows or (node_count is None and max(sizes) > rows):
        raise ValueError(f"request {request}: tokens, parents, choices hold {sizes} rows, the tree has {rows}")

    child_of: dict[tuple[int, int], int] = {}
    for node in range(1, rows):
        parent, token = int(parents[node]), int(tokens[node])
        if not 0 <= parent < node:
            raise ValueError(f"request {request}, node {node}: parent {parent} does not precede it")
        if (parent, token) in child_of:
            twin = child_of[parent, token]
            raise ValueError(f"request {request}: nodes {twin} and {node} are siblings with the same token {token}")
        child_of[parent, token] = node

    path = [0]
    while True:
        node = path[-1]
        choice = int(choices[node])
        if choice < 0:
            raise TargetRowError(request=request, node=node)
        child = child_of.get((node, choice))
        if child is None:
            return Accepted(np.array(path, np.int32), choice)
        path.append(child)
