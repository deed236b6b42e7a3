"""Cheap targets and drafters for the loop tests. The targets live on a real LatentCache and notice wrong rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference.cache import LatentCache


@dataclass(frozen=True)
class Output:
    logits: np.ndarray
    features: np.ndarray


def causal(rows: int) -> np.ndarray:
    return np.tri(rows, dtype=bool)


class HashTarget:
    """Logits are a table row picked by an exact hash of all tokens that a row sees, so equal context gives equal bits.

    Each cache row holds token, running hash and position (layer 1: their negatives). Every pass checks that the
    committed rows are one sequence at positions 0, 1, 2, ... with the hashes of its tokens, and that every new row
    stands one after the row it continues. Features are (token, position) per tap.
    script: position -> token that is the greedy choice for this position whatever the context.
    """

    def __init__(
        self,
        vocab_size: int,
        seed: int = 0,
        *,
        levels: int = 0,
        padding: int = 0,
        script: Mapping[int, int] | None = None,
        block_size: int | None = None,
        guard: int = 0,
    ):
        rng = np.random.default_rng(seed)
        self.vocab_size, self.script, self.block_size, self.guard = vocab_size, script or {}, block_size, guard
        table = rng.normal(0, 2, (509, vocab_size + padding))
        self.table = np.round(table * levels) / levels if levels else table
        self.table[:, vocab_size:] = 1e9  # padded ids would win if they took part
        self.caches: list[LatentCache] = []
        self.widths: list[int] = []

    def new_cache(self, capacity: int) -> LatentCache:
        blocks = -(-capacity // (self.block_size or 1))
        pool = np.full((2, blocks * (self.block_size or 1) + self.guard, 3), 777.0)
        table = np.random.default_rng(capacity).permutation(blocks) if self.block_size else None
        self.caches.append(LatentCache(2, 2, 1, capacity, np.float64, self.block_size, table, pool))
        return self.caches[-1]

    def forward(
        self,
        tokens: np.ndarray,
        cache: LatentCache,
        *,
        positions: np.ndarray | None = None,
        visibility: np.ndarray | None = None,
        taps: Sequence[int] = (),
    ) -> Output:
        rows, prefix = len(tokens), cache.length
        self.widths.append(rows)
        visible = causal(rows) if visibility is None else visibility
        places = prefix + np.arange(rows) if positions is None else np.asarray(positions)
        parents = last_visible(visible)
        known = self.checked_prefix(cache)
        hashes: list[int] = []
        for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True):
            hashes.append(mixed(hashes[parent] if parent >= 0 else known, token))
        before = np.where(parents >= 0, places[parents], prefix - 1)
        np.testing.assert_array_equal(places, before + 1)
        new = np.stack([np.asarray(tokens, float), np.array(hashes, float)], axis=1)
        for layer, sign in enumerate((1, -1)):
            cache.write(layer, sign * new, sign * places[:, None].astype(float))
        logits = self.table[np.array(hashes) % len(self.table)].copy()
        for row, place in enumerate(places):
            if place + 1 in self.script:
                logits[row, self.script[place + 1]] = 1e3
        features = np.stack([np.asarray(tokens, float), places.astype(float)], axis=1)
        return Output(logits, np.tile(features, len(taps)) if taps else features[:, :0])

    @staticmethod
    def checked_prefix(cache: LatentCache) -> int:
        """Hash of the committed rows, after checking that they are one sequence in both layers."""
        (latent, position), (mirror, mirrored) = (cache.read(layer, cache.length) for layer in range(2))
        np.testing.assert_array_equal(position[:, 0], np.arange(cache.length))
        np.testing.assert_array_equal(mirror, -latent)
        np.testing.assert_array_equal(mirrored, -position)
        tokens, hashes = latent.astype(np.int64).T
        before = np.concatenate([[1], hashes])
        np.testing.assert_array_equal(hashes, mixed(before[:-1], tokens))
        return int(before[-1])


def mixed(known: Any, token: Any) -> Any:
    """Hash of a sequence from that of all but its last token, and this token."""
    return (known * 48271 + token + 1) % 2147483647


def last_visible(visible: np.ndarray) -> np.ndarray:
    """Index of the last row that each row sees before itself, -1 where there is none."""
    before = np.tril(visible, -1)
    last = len(before) - 1 - before[:, ::-1].argmax(axis=1)
    return np.where(before.any(axis=1), last, -1)


class TinyNet:
    """Two layers of attention over a latent cache, position in the rope part: rounding depends on the row count."""

    HIDDEN, LATENT, ROPE = 24, 12, 4

    def __init__(self, vocab_size: int, seed: int = 0, dtype: Any = np.float64):
        rng = np.random.default_rng(seed)
        self.vocab_size, self.dtype = vocab_size, np.dtype(dtype)

        def weight(*shape: int) -> np.ndarray:
            values: np.ndarray = (rng.normal(size=shape) / np.sqrt(shape[0])).astype(dtype)
            return values

        self.embedding = rng.normal(size=(vocab_size, self.HIDDEN)).astype(dtype)
        width = self.LATENT + self.ROPE
        self.layers = [
            (weight(self.HIDDEN, self.LATENT), weight(self.HIDDEN, width), weight(self.LATENT, self.HIDDEN),
             weight(self.HIDDEN, 48), weight(48, self.HIDDEN))
            for _ in range(2)
        ]  # fmt: skip
        self.head = 3 * weight(self.HIDDEN, vocab_size)
        self.caches: list[LatentCache] = []

    def new_cache(self, capacity: int) -> LatentCache:
        self.caches.append(LatentCache(2, self.LATENT, self.ROPE, capacity, self.dtype))
        return self.caches[-1]

    def forward(
        self,
        tokens: np.ndarray,
        cache: LatentCache,
        *,
        positions: np.ndarray | None = None,
        visibility: np.ndarray | None = None,
        taps: Sequence[int] = (),
    ) -> Output:
        rows, prefix = len(tokens), cache.length
        visible = causal(rows) if visibility is None else visibility
        sees = np.concatenate([np.ones((rows, prefix), bool), visible], axis=1)
        places = prefix + np.arange(rows) if positions is None else np.asarray(positions)
        angles = places[:, None] * np.array([1.0, 0.1])
        rope = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(self.dtype)
        x = self.embedding[np.asarray(tokens)]
        after = []
        for layer, (w_latent, w_query, w_out, w_up, w_down) in enumerate(self.layers):
            normed = x / np.sqrt((x * x).mean(axis=1, keepdims=True))
            cache.write(layer, normed @ w_latent, rope)
            latent, rope_key = cache.read(layer, prefix + rows)
            query = normed @ w_query
            scores = query[:, : self.LATENT] @ latent.T + query[:, self.LATENT :] @ rope_key.T
            scores = np.where(sees, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            x = x + (weights / weights.sum(axis=1, keepdims=True)) @ latent @ w_out
            x = x + np.tanh(x @ w_up) @ w_down
            after.append(x)
        logits = x / np.sqrt((x * x).mean(axis=1, keepdims=True)) @ self.head
        features = [after[tap] for tap in taps]
        return Output(logits, np.concatenate(features, axis=1) if features else x[:, :0])


class RandomDrafter:
    """Uniform noise over the vocabulary, a function of (seed, root position). `rows` limits its depth."""

    taps: tuple[int, ...] = ()

    def __init__(self, vocab_size: int, block_size: int, seed: int = 0, rows: int = 99):
        self.vocab_size, self.block_size, self.seed, self.rows = vocab_size, block_size, seed, rows
        self.committed = 0

    def reset(self, prompt: np.ndarray) -> None:
        self.committed = 0

    def observe(self, tokens: np.ndarray, features: np.ndarray | None) -> None:
        self.committed += len(tokens)

    def propose(self, root_token: int, depth_limit: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, self.committed])
        depths = min(depth_limit, self.block_size - 1, self.rows)
        logits: np.ndarray = rng.normal(0, 1.5, (depths, self.vocab_size)).astype(np.float32)
        return logits


class WatchingDrafter(RandomDrafter):
    """Asks for features of two taps and checks that it is told every committed position once and in order."""

    taps = (0, 1)

    def __init__(self, vocab_size: int, block_size: int):
        super().__init__(vocab_size, block_size)
        self.seen: list[int] = []

    def reset(self, prompt: np.ndarray) -> None:
        super().reset(prompt)
        self.prompt, self.seen = np.array(prompt), []

    def observe(self, tokens: np.ndarray, features: np.ndarray | None) -> None:
        super().observe(tokens, features)
        assert features is not None
        assert features.shape == (len(tokens), 4)
        positions = len(self.seen) + np.arange(len(tokens))
        np.testing.assert_array_equal(features[:, :2], np.stack([tokens, positions], axis=1))
        np.testing.assert_array_equal(features[:, :2], features[:, 2:])
        self.seen += list(tokens)

    def propose(self, root_token: int, depth_limit: int) -> np.ndarray:
        assert self.seen[: len(self.prompt)] == self.prompt.tolist()
        return super().propose(root_token, depth_limit)


class Poisoned:
    """A target whose logits are NaN in the rows that `bad(position, token)` names; keeps its cache for inspection."""

    def __init__(self, target: HashTarget, bad: Any):
        self.target, self.bad, self.vocab_size = target, bad, target.vocab_size

    def new_cache(self, capacity: int) -> LatentCache:
        return self.target.new_cache(capacity)

    def forward(self, tokens: np.ndarray, cache: LatentCache, *, positions: Any = None, **options: Any) -> Output:
        output = self.target.forward(tokens, cache, positions=positions, **options)
        places = cache.length + np.arange(len(tokens)) if positions is None else positions
        for row, (place, token) in enumerate(zip(places, tokens, strict=True)):
            if self.bad(int(place), int(token)):
                output.logits[row] = np.nan
        return output
