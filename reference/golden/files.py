"""What a golden file holds, how it is written, and how a stored one is compared with a fresh computation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import kdtr

EXACT = kdtr.Tolerance.bits()
Expected = Mapping[str, tuple[ArrayLike, kdtr.Tolerance]]


@dataclass(frozen=True)
class GoldenFile:
    """One file in the making: `name` without suffix; arrays are collected by `add`."""

    name: str
    kind: str
    seed: int
    notes: str
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    tolerances: dict[str, kdtr.Tolerance] = field(default_factory=dict)

    def add(
        self,
        case: str,
        inputs: Mapping[str, ArrayLike] | None = None,
        expected: Expected | None = None,
        aux: Mapping[str, ArrayLike] | None = None,
        params: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Add the arrays of one case; case "" puts them at the top level."""
        at = f"{case}/" if case else ""
        for role, arrays in (("input", inputs), ("aux", aux), ("param", params)):
            for name, array in (arrays or {}).items():
                self._put(at + name, array, role)
        for name, (array, tolerance) in (expected or {}).items():
            self._put(at + name, array, "expected")
            self.tolerances[at + name] = tolerance

    def _put(self, name: str, array: ArrayLike, role: str) -> None:
        if name in self.arrays:
            raise ValueError(f"{self.name}: '{name}' is given twice")
        self.arrays[name], self.roles[name] = np.array(array), role  # a copy: the caller may go on with its own

    def save(self, folder: Path) -> Path:
        """Write <folder>/<name>.kdtr and check it against the schema of its kind."""
        path = folder / f"{self.name}.kdtr"
        # Which NumPy computed it is left out: it does not show in the values, and must not show in the bytes.
        meta = kdtr.provenance(
            seed=self.seed,
            rng="Philox4x32-10, counters as in reference/golden/inputs.py",
            command=f"python -m reference.golden {self.name}",
            libs={},
            notes=self.notes,
        )
        meta["platform"] = {"arch": None, "os": None, "device": None}
        kdtr.save(path, self.arrays, kind=self.kind, meta=meta, roles=self.roles, tolerances=self.tolerances)
        with kdtr.open(path) as handle:
            handle.validate()
        return path

    def differences(self, path: Path) -> Iterator[str]:
        """Where the stored file differs from this computation by more than another machine's libm explains."""
        stored = kdtr.read(path)
        for name in sorted(self.arrays.keys() ^ stored.keys()):
            yield f"{path}: '{name}' is {'not in the file' if name in self.arrays else 'not computed any more'}"
        for name in sorted(self.arrays.keys() & stored.keys()):
            info, fresh, golden = stored.info[name], self.arrays[name], stored[name]
            described = (info.role, info.tolerance, fresh.dtype, fresh.shape)
            if described != (self.roles[name], self.tolerances.get(name), golden.dtype, golden.shape):
                found = (info.role, info.tolerance, golden.dtype, golden.shape)
                yield f"{path}: '{name}' is stored as {found}, now {described}"
                continue
            floating = fresh.dtype.kind == "f" and self.roles[name] == "expected"
            # A result near zero by cancellation keeps the absolute accuracy of its neighbours, not its own.
            row = kdtr.compare_array(name, golden, fresh, kdtr.Tolerance.ulp(1) if floating else EXACT)
            if not row.ok:
                yield f"{path}: '{name}': {row.problem} at {row.index}: stored {row.golden}, computed {row.actual}"


def text(value: str) -> NDArray[np.uint8]:
    """Text as a 1-d u8 array."""
    return np.frombuffer(value.encode(), np.uint8).copy()


def rounded(x: NDArray[Any], dtype: Any = np.float32) -> NDArray[Any]:
    """A float64 result, rounded once."""
    return x.astype(dtype)
