"""Random builder inputs, many of them full of ties."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

KINDS = ("smooth", "quarters", "equal", "halves", "mixed scales", "same tokens", "normalised")


def random_lists(seed: int, count: int, max_depth: int, max_width: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(kind, lp float32 [L, K], ids int32 [L, K]) with sorted rows and distinct ids per row."""
    rng = np.random.default_rng(seed)
    for case in range(count):
        kind = KINDS[case % len(KINDS)]
        shape = int(rng.integers(1, max_depth + 1)), int(rng.integers(1, max_width + 1))
        if kind == "smooth":
            values = rng.normal(-3, 2, shape)
        elif kind == "quarters":  # multiples of 1/4: many equal sums along different paths
            values = -rng.integers(0, 12, shape) / 4
        elif kind == "equal":
            values = np.full(shape, -np.log(shape[1]))
        elif kind == "halves":  # probabilities 1/2, 1/4, ...: a deep node ties with a shallow one
            values = np.broadcast_to(np.log(2.0) * -np.arange(1, shape[1] + 1), shape)
        elif kind == "mixed scales":  # sums that round in float64, so that the order of operations shows
            values = -rng.exponential(1, shape) * 10.0 ** rng.integers(-9, 5, (shape[0], 1))
        elif kind == "same tokens":
            values = np.broadcast_to(-np.sort(rng.exponential(1, shape[1])), shape)
        else:
            values = np.log(rng.dirichlet(np.full(shape[1], 0.3), shape[0]) + 1e-30)
        lp = -np.sort(-values.astype(np.float32), axis=1)
        if kind == "same tokens":
            ids = np.broadcast_to(np.arange(shape[1]), shape)
        else:
            ids = rng.random((shape[0], shape[1] + 8)).argsort(axis=1)[:, : shape[1]]
        yield kind, lp, ids.astype(np.int32)
