"""Latent KV cache of one request: per layer one row per position, the normalised latent beside the rotated rope key.

Rows 0..length-1 are committed. A forward pass writes its N rows behind them as scratch; `commit` keeps an increasing
choice of the scratch rows, moved to directly behind the prefix, in every layer; the rest is dropped. The rows lie
contiguously, or in blocks named by a block table, so that several requests share one pool (paged cache).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray


class CapacityError(RuntimeError):
    """More cache rows are needed than there are."""

    def __init__(self, what: str, *, needed: int, available: int):
        super().__init__(f"{what} needs {needed} cache rows, {available} are available")
        self.needed, self.available = needed, available


class LatentCache:
    """Cache of `n_layers` layers and `capacity` rows of latent_dim + rope_dim values.

    block_size None: row i lies at i. Otherwise at block_table[i // block_size] * block_size + i % block_size; the table
    (default 0, 1, 2, ...) names distinct blocks. storage [n_layers, rows, latent_dim + rope_dim] may be given to share
    a pool; a new one is filled with NaN, so that the use of a row never written shows.
    """

    def __init__(
        self,
        n_layers: int,
        latent_dim: int,
        rope_dim: int,
        capacity: int,
        dtype: DTypeLike,
        block_size: int | None = None,
        block_table: Sequence[int] | NDArray[Any] | None = None,
        storage: NDArray[Any] | None = None,
    ):
        if capacity < 0 or (block_size is not None and block_size < 1):
            raise ValueError(f"capacity {capacity} and block size {block_size} are not a cache")
        if block_table is not None and block_size is None:
            raise ValueError("a block table needs a block size")
        self.capacity, self.length, self.block_size = capacity, 0, block_size
        self.latent_dim, self.rope_dim = latent_dim, rope_dim
        self._slots = _slots(capacity, block_size, block_table)  # intp [capacity]: where each row lies in the storage
        rows = int(self._slots.max()) + 1 if capacity else 0
        if storage is None:
            blocks = -(-rows // (block_size or 1))
            storage = np.full((n_layers, blocks * (block_size or 1), latent_dim + rope_dim), np.nan, dtype)
        elif (
            storage.dtype != np.dtype(dtype)
            or storage.ndim != 3
            or storage.shape[::2] != (n_layers, latent_dim + rope_dim)
        ):
            wanted = f"{np.dtype(dtype)} [{n_layers}, rows, {latent_dim + rope_dim}]"
            raise ValueError(f"storage must be {wanted}, got {storage.dtype} {list(storage.shape)}")
        elif storage.shape[1] < rows:
            raise CapacityError(
                "the block table" if block_size else "the cache", needed=rows, available=storage.shape[1]
            )
        self.storage = storage
        self._filled = [0] * n_layers  # rows written so far in each layer, committed and scratch

    @property
    def room(self) -> int:
        """Free rows behind the committed ones."""
        return self.capacity - self.length

    def write(self, layer: int, latent: NDArray[Any], rope_key: NDArray[Any]) -> None:
        """Put N scratch rows, latent [N, latent_dim] and rope_key [N, rope_dim], at length..length+N-1 of `layer`.

        Scratch rows written before are overwritten or dropped. Raises CapacityError, before writing, when N > room.
        """
        count = len(latent)
        if latent.shape != (count, self.latent_dim) or rope_key.shape != (count, self.rope_dim):
            raise ValueError(
                f"expected latent [N, {self.latent_dim}] and rope key [N, {self.rope_dim}], "
                f"got {list(latent.shape)} and {list(rope_key.shape)}"
            )
        if count > self.room:
            raise CapacityError(f"a pass at length {self.length}", needed=count, available=self.room)
        slots = self._slots[self.length : self.length + count]
        self.storage[layer, slots, : self.latent_dim] = latent
        self.storage[layer, slots, self.latent_dim :] = rope_key
        self._filled[layer] = self.length + count

    def read(self, layer: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """(latent [count, latent_dim], rope_key [count, rope_dim]) of the first `count` rows of `layer`; do not modify.

        Raises ValueError for rows that hold nothing.
        """
        if not 0 <= count <= self._filled[layer]:
            raise ValueError(f"layer {layer} holds {self._filled[layer]} rows, {count} asked for")
        where = slice(count) if self.block_size is None else self._slots[:count]
        rows = self.storage[layer, where]
        return rows[:, : self.latent_dim], rows[:, self.latent_dim :]

    def commit(self, rows: ArrayLike) -> None:
        """Keep the scratch rows `rows` (strictly increasing, counted from `length`) as the next rows of every layer.

        All rows are read before the first is written, so overlapping source and target ranges are safe. Nothing changes
        when the rows are refused (ValueError).
        """
        kept = np.asarray(rows, np.intp).reshape(-1)
        scratch = min(self._filled, default=self.length) - self.length
        if len(kept) and (kept[0] < 0 or kept[-1] >= scratch or (np.diff(kept) <= 0).any()):
            raise ValueError(
                f"rows to commit must increase strictly within the {scratch} scratch rows, got {kept.tolist()}"
            )
        source = self._slots[self.length + kept]
        target = self._slots[self.length : self.length + len(kept)]
        if (source != target).any():
            self.storage[:, target] = self.storage[:, source]  # the right side is gathered into a copy first
        self._set_length(self.length + len(kept))

    def crop(self, length: int) -> None:
        """Drop all rows from `length` on, scratch rows too. Raises ValueError unless 0 <= length <= self.length."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} rows to {length}")
        self._set_length(length)

    def _set_length(self, length: int) -> None:
        self.length = length
        self._filled = [length] * len(self._filled)


def _slots(capacity: int, block_size: int | None, table: Sequence[int] | NDArray[Any] | None) -> NDArray[np.intp]:
    """intp [capacity]: storage row of each cache row."""
    rows = np.arange(capacity)
    if block_size is None:
        return rows
    blocks = -(-capacity // block_size)
    names = np.arange(blocks) if table is None else np.asarray(table, np.intp)
    if names.ndim != 1 or len(names) < blocks:
        raise CapacityError("the block table", needed=capacity, available=names.size * block_size)
    names = names[:blocks]
    if (names < 0).any() or len(np.unique(names)) != len(names):
        raise ValueError(f"the block table must name distinct blocks >= 0, got {names.tolist()}")
    slots: NDArray[np.intp] = names[rows // block_size] * block_size + rows % block_size
    return slots
