"""What the loops ask of a drafter, and the drafters that stand in for a real one (reference.dflash).

Oracle: the golden tokens, at rank 0. Noisy oracle: the golden token at a random rank, or missing; it reaches every
depth, rank and compaction pattern. Replay: recorded lists of a real drafter. Each is a function of its data, seed and
position alone, so a run repeats exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reference.sampling import philox4x32

# Third counter word of the noisy oracle's random numbers: apart from those of sampling, which have 0 there.
_NOISE_STREAM = 1


class Drafter(Protocol):
    """Proposes tokens for the positions after the root. One request at a time: `reset` starts the next one."""

    @property
    def block_size(self) -> int:
        """b: the root's slot and b-1 proposals."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose output `observe` needs; empty if none."""

    def reset(self, prompt: NDArray[np.int32]) -> None:
        """Start a request with `prompt` int32 [P]; its P positions are observed next."""

    def observe(self, tokens: NDArray[np.int32], features: NDArray[Any] | None) -> None:
        """Newly committed positions, in order: tokens int32 [m], target features [m, len(taps) * hidden]."""

    def propose(self, root_token: int, depth_limit: int) -> NDArray[Any]:
        """Logits [L, V], L <= min(block_size - 1, depth_limit): row d is about the token at depth d+1."""


class _StandIn:
    """Common to the stand-ins: they need no features, only how many positions are committed."""

    taps: tuple[int, ...] = ()

    def __init__(self, vocab_size: int, block_size: int):
        if vocab_size < 1 or block_size < 1:
            raise ValueError(f"vocabulary size {vocab_size} and block size {block_size} must be at least 1")
        self.vocab_size, self.block_size = vocab_size, block_size
        self._prompt_length = self._committed = 0

    def reset(self, prompt: NDArray[np.int32]) -> None:
        self._prompt_length, self._committed = len(prompt), 0

    def observe(self, tokens: NDArray[np.int32], features: NDArray[Any] | None) -> None:
        self._committed += len(tokens)

    def _rows(self, depth_limit: int) -> int:
        return min(depth_limit, self.block_size - 1)


class _Golden(_StandIn):
    """A stand-in that knows `golden` [G], the tokens that follow the prompt; past them it proposes nothing."""

    def __init__(self, golden: ArrayLike, vocab_size: int, block_size: int):
        super().__init__(vocab_size, block_size)
        self.golden = np.array(golden, np.int64).reshape(-1)
        if self.golden.size and not (self.golden.min() >= 0 and self.golden.max() < vocab_size):
            first, last = self.golden.min(), self.golden.max()
            raise ValueError(f"golden tokens {first}..{last} are outside the vocabulary of {vocab_size}")

    def _drafted(self, depth_limit: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(indices in golden, tokens) of the positions to propose for; the root stands at committed - prompt length."""
        first = self._committed - self._prompt_length + 1
        tokens = self.golden[first : first + self._rows(depth_limit)]
        return np.arange(first, first + len(tokens)), tokens


class OracleDrafter(_Golden):
    """Proposes the golden tokens at rank 0 of every depth.

    From index `right` on (default G) it is wrong: the next id stands at rank 0, and the golden token nowhere, so that
    nothing there is the target's choice. Past the G tokens nothing is known to be wrong, so nothing is proposed.
    """

    def __init__(self, golden: ArrayLike, vocab_size: int, block_size: int, right: int | None = None):
        super().__init__(golden, vocab_size, block_size)
        self.right = len(self.golden) if right is None else right
        if self.right < len(self.golden) and vocab_size == 1:
            raise ValueError("a vocabulary of one token leaves no wrong proposal")

    def propose(self, root_token: int, depth_limit: int) -> NDArray[np.float32]:
        """float32 [L, V]: 0 for the proposed token, then -8, -16, ... for the ids after it, cyclically.

        So steep that the whole chain outscores any other node, and a budget of L suffices for it.
        """
        indices, tokens = self._drafted(depth_limit)
        wrong = indices >= self.right
        best = (tokens + wrong) % self.vocab_size
        behind = (np.arange(self.vocab_size) - best[:, None]) % self.vocab_size
        logits: NDArray[np.float32] = -8 * behind.astype(np.float32)
        is_wrong = np.flatnonzero(wrong)
        logits[is_wrong, tokens[is_wrong]] = -np.inf
        return logits


class NoisyOracleDrafter(_Golden):
    """Proposes the golden token at a random rank 0..max_rank or, with probability `miss`, not at all.

    All is a function of (seed, index), index being that of the drafted token in golden. With x0..x3 = Philox4x32-10(
    key = seed, counter = (index, 0, 1, 0)): the token is missing if (x0 + 0.5) / 2^32 < miss; its rank is
    x1 mod (min(max_rank, V-1) + 1); the other ranks hold the remaining ids in cyclic order from x2 mod V on; the logit
    of rank r is -r * 4 / 2^(x3 mod 4). A missing token has -inf. Past the golden tokens nothing is proposed.
    """

    def __init__(
        self, golden: ArrayLike, vocab_size: int, block_size: int, miss: float = 0.1, max_rank: int = 2, seed: int = 0
    ):
        super().__init__(golden, vocab_size, block_size)
        if not 0 <= miss <= 1 or max_rank < 0 or not 0 <= seed < 2**64:
            raise ValueError(f"miss {miss}, max_rank {max_rank} or seed {seed} is out of range")
        self.miss, self.max_rank, self.seed = miss, max_rank, seed

    def propose(self, root_token: int, depth_limit: int) -> NDArray[np.float32]:
        """float32 [L, V]."""
        indices, tokens = self._drafted(depth_limit)
        counter = np.zeros((len(indices), 4), np.uint32)
        counter[:, 0] = indices
        counter[:, 2] = _NOISE_STREAM
        words = philox4x32(counter, (self.seed & 0xFFFFFFFF, self.seed >> 32)).tolist()

        logits = np.empty((len(tokens), self.vocab_size), np.float32)
        for row, token, (x0, x1, x2, x3) in zip(logits, tokens.tolist(), words, strict=True):
            rank = x1 % (min(self.max_rank, self.vocab_size - 1) + 1)
            ids = (np.arange(self.vocab_size) + x2) % self.vocab_size
            best_first = np.insert(ids[ids != token], rank, token)
            row[best_first] = -np.arange(self.vocab_size) * (4 / 2 ** (x3 % 4))
            if (x0 + 0.5) * 2.0**-32 < self.miss:
                row[token] = -np.inf
        return logits


class ReplayDrafter(_StandIn):
    """Proposes recorded lists: `lists` maps the root's absolute position to (ids int [L, K], lp float32 [L, K]).

    The probability that a list leaves over goes in equal parts to the ids that it does not name, never above its last
    entry, so that the top-k stage finds the recorded order and, up to rounding, the recorded lp. A list that ends in
    lp = -inf was complete: nothing else is proposed, and the ids there are not read. At positions that were not
    recorded nothing is proposed.
    """

    def __init__(self, lists: Mapping[int, tuple[NDArray[Any], NDArray[Any]]], vocab_size: int, block_size: int):
        super().__init__(vocab_size, block_size)
        for position, (ids, lp) in lists.items():
            if ids.ndim != 2 or ids.shape != lp.shape or (len(ids) and ids.shape[1] == 0):
                raise ValueError(
                    f"position {position}: ids {list(ids.shape)} and lp {list(lp.shape)} must be [L, K > 0]"
                )
            if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
                raise ValueError(
                    f"position {position}: ids {ids.min()}..{ids.max()} exceed a vocabulary of {vocab_size}"
                )
        self._lists = lists

    def propose(self, root_token: int, depth_limit: int) -> NDArray[np.float32]:
        """float32 [L, V]."""
        if self._committed not in self._lists:
            return np.empty((0, self.vocab_size), np.float32)
        ids, lp = (array[: self._rows(depth_limit)] for array in self._lists[self._committed])
        logits = np.empty((len(ids), self.vocab_size), np.float32)
        for row, listed, values in zip(logits, ids, lp, strict=True):
            named = np.isfinite(values)
            unnamed = self.vocab_size - len(np.unique(listed))
            left = 1.0 - np.exp(values.astype(np.float64)).sum()
            share = np.log(left / unnamed) if unnamed and left > 0 else -np.inf
            row[:] = min(share, np.nextafter(values[-1], np.float32(-np.inf)))
            row[listed[named]] = values[named]
        return logits
