"""What decoding gives: the output of a request with a record of its rounds, fields as in reference/loop.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Lists:
    """Candidates of each depth, best first: ids int32 [L, K], lp float32 [L, K], logz float32 [L]."""

    ids: NDArray[np.int32]
    lp: NDArray[np.float32]
    logz: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Tree:
    """1+n nodes, the root first: tokens, parents, depths, ranks int32 [1+n]; scores float64 [1+n]."""

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    ranks: NDArray[np.int32]
    scores: NDArray[np.float64]

    @property
    def node_count(self) -> int:
        """n: nodes without the root."""
        return len(self.tokens) - 1


@dataclass(frozen=True, eq=False)
class Trace:
    """What one round saw: `lists` (None without proposals), `tree`, the target's `choices` int32 [1+n], and `bonus`."""

    lists: Lists | None
    tree: Tree
    choices: NDArray[np.int32]
    bonus: int


@dataclass(frozen=True)
class Prediction:
    """What a policy expected of a round of all requests of the run: that trees of `budget` nodes give `tokens` in
    `seconds`; None of a first round."""

    budget: int
    tokens: float | None
    seconds: float | None


@dataclass(frozen=True)
class Round:
    """prefix_length: rows committed before it, also the root's position. nodes: n. depth_limit: deepest depth that may
    be drafted. path: nodes whose rows were committed, the root (0) first. ranks: those of path[1:]. seconds: of the
    device by stage, empty unless the run is timed or the round was made in steps. In a timed round they are those
    inside its graph: they add up to the round, which takes a little longer than an untimed one, for kernels of two
    stages do not overlap there; in steps each has the start of its own launch. What the drafter takes of the committed
    rows, behind the commit, is drafting. wall_seconds: on the host, until it was told. prediction: the
    policy's, if one chose the budget."""

    prefix_length: int
    nodes: int
    depth_limit: int
    path: tuple[int, ...]
    ranks: tuple[int, ...]
    seconds: dict[str, float]
    wall_seconds: float
    trace: Trace | None = None
    prediction: Prediction | None = None

    @property
    def accepted(self) -> int:
        """a: committed draft nodes, also the depth of the last one."""
        return len(self.path) - 1

    @property
    def moved_rows(self) -> int:
        """Committed rows that compaction had to move."""
        return sum(node != place for place, node in enumerate(self.path))


@dataclass(frozen=True)
class Generation:
    """tokens: the output, prompt excluded, a stop token included. finish_reason: "stop", "length" or "capacity"; of a
    request that failed "error", of one that is not done "running". prefill_seconds: of all prompts that were read
    together. cache_length: committed rows at the end, prompt included. logits: on request, float32 [rows, V] of the
    committed rows from the prompt's last one on."""

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]
    finish_reason: str
    prefill_seconds: float
    cache_length: int
    logits: Any = None

    @property
    def decode_seconds(self) -> float:
        """All rounds from end to end, prefill excluded."""
        return sum(r.wall_seconds for r in self.rounds)

    @property
    def tau(self) -> float:
        """Acceptance length; NaN without rounds."""
        return tau(self.rounds)


def tau(rounds: Iterable[Round]) -> float:
    """1 + accepted / rounds, pooled over all rounds given; NaN for none."""
    accepted = [r.accepted for r in rounds]
    return 1 + sum(accepted) / len(accepted) if accepted else float("nan")
