"""Checks of tree-shaped input: who sees whom, and at which position."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def check_visibility(visibility: npt.NDArray[np.bool_], rows: int) -> npt.NDArray[np.bool_]:
    """The mask itself, after checking that it describes a tree (or forest) over `rows` rows in parent-first order.

    bool [rows, rows], True = sees. Every row sees itself and otherwise exactly what its parent sees, its last visible
    predecessor. An inverted, transposed, flattened, packed or additive mask fails here: ValueError with the reason.
    """
    mask = np.asarray(visibility)
    if mask.dtype != np.bool_:
        raise ValueError(f"visibility must be bool (True = sees), got {mask.dtype}")
    if mask.shape != (rows, rows):
        raise ValueError(f"visibility must have shape [{rows}, {rows}] (new rows only), got {list(mask.shape)}")
    blind = np.flatnonzero(~mask.diagonal())
    if blind.size:
        raise ValueError(
            f"visibility: row {blind[0]} does not see itself (True = sees; an inverted mask looks like this)"
        )
    ahead = np.argwhere(np.triu(mask, 1))
    if ahead.size:
        raise ValueError(
            f"visibility: row {ahead[0][0]} sees the later row {ahead[0][1]} (a transposed mask looks like this)"
        )
    parent = parents_of(mask)
    inherited = np.where(parent[:, None] >= 0, mask[parent], False) | np.eye(rows, dtype=np.bool_)
    broken = np.flatnonzero((inherited != mask).any(axis=1))
    if broken.size:
        row = int(broken[0])
        raise ValueError(
            f"visibility: row {row} sees {np.flatnonzero(mask[row]).tolist()}, its parent {parent[row]} implies "
            f"{np.flatnonzero(inherited[row]).tolist()}"
        )
    return mask


def parents_of(visibility: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Index of the last row that each row sees before itself, -1 if there is none. visibility: bool [N, N]."""
    before = np.tril(visibility, -1)
    last: npt.NDArray[np.intp] = len(before) - 1 - before[:, ::-1].argmax(axis=1)
    last[~before.any(axis=1)] = -1
    return last


def check_positions(
    positions: npt.ArrayLike | None, visibility: npt.NDArray[np.bool_], prefix: int
) -> npt.NDArray[Any]:
    """int64 positions [N] of the rows: given ones, checked, or prefix + depth.

    Along every path positions grow by one, so siblings share theirs; ValueError names the first row that does not
    (numbering rows by index instead of depth looks like this). A path may start anywhere.
    """
    rows = len(visibility)
    if positions is None:
        return np.asarray(prefix + visibility.sum(axis=1, dtype=np.int64) - 1)
    place = np.asarray(positions)
    if place.shape != (rows,) or not np.issubdtype(place.dtype, np.integer):
        raise ValueError(f"positions must be integers of shape [{rows}], got {place.dtype}{list(place.shape)}")
    place = place.astype(np.int64)
    if (place < 0).any():
        raise ValueError(f"positions: row {int(np.argmax(place < 0))} has {int(place.min())}, must be >= 0")
    parent = parents_of(visibility)
    wrong = np.flatnonzero((parent >= 0) & (place != place[parent] + 1))
    if wrong.size:
        row = int(wrong[0])
        raise ValueError(
            f"positions: row {row} has {place[row]}, its parent row {parent[row]} has {place[parent[row]]}: "
            "a child comes one later"
        )
    return place
