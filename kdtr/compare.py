"""Comparing tested arrays with golden ones by the stored tolerances; the arithmetic is kdtr/format.py, section 7."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kdtr import dtypes
from kdtr.container import Container, Fixture, PathLike
from kdtr.dtypes import DType
from kdtr.index import TensorInfo, Tolerance

_BLOCK: Final = 1 << 13  # elements at a time: temporaries of 64 KiB, which the allocator reuses instead of mapping anew

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class MismatchError(AssertionError):
    """Tested arrays do not match their goldens; `comparison` has the rows."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__(str(comparison))
        self.comparison = comparison


@dataclass(frozen=True, slots=True)
class Row:
    """What one array was compared by and how it went.

    `problem` says why the array failed, "" if it passed. `error` is the worst error in the units of the mode: |x - g|
    (bits, equal, close), ULPs, or the ratio (similarity, nmse); infinite where only one side is finite. `index`,
    `golden`, `actual` are those of the worst element (bits, equal: of the first that differs; similarity, nmse: of the
    largest |x - g|), None without one. `bad` of `numel` elements are outside the tolerance (similarity, nmse: all or
    none).
    """

    name: str
    problem: str
    tolerance: Tolerance | None = None
    error: float = 0.0
    index: tuple[int, ...] | None = None
    golden: object = None
    actual: object = None
    bad: int = 0
    numel: int = 0

    @property
    def ok(self) -> bool:
        """Whether the array passed."""
        return not self.problem

    @property
    def bad_fraction(self) -> float:
        """bad / numel, 0 without elements."""
        return self.bad / self.numel if self.numel else 0.0

    def __str__(self) -> str:
        text = f"{'ok  ' if self.ok else 'FAIL'} {self.name}"
        if self.tolerance is not None:
            text += f" [{self.tolerance}]"
        if self.problem:
            text += f": {self.problem}"
        if self.index is not None:
            text += f"; worst {self.error:.6g} at {list(self.index)}: "
            text += f"golden {self._shown(self.golden)}, actual {self._shown(self.actual)}"
        if self.bad:
            text += f"; {self.bad} of {self.numel} bad ({self.bad_fraction:.3g})"
        return text

    def _shown(self, value: object) -> str:
        if self.tolerance is None or self.tolerance.mode != "bits":
            return str(value)
        return f"{value} (bits {np.asarray(value).tobytes()[::-1].hex()})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row for each array that was, or had to be, compared. Without any, nothing was asserted: that is a failure."""

    path: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether there are rows and all passed."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    def raise_if_failed(self) -> None:
        """Raise MismatchError, with all rows in its text, unless ok."""
        if not self.ok:
            raise MismatchError(self)

    def __str__(self) -> str:
        failed = sum(not row.ok for row in self.rows)
        head = (
            f"{self.path}: {failed} of {len(self.rows)} arrays failed"
            if self.rows
            else f"{self.path}: nothing was compared"
        )
        return "\n".join([head, *(f"  {row}" for row in sorted(self.rows, key=lambda row: row.ok))])


def compare(
    golden: Fixture | Container | PathLike,
    actual: Mapping[str, npt.ArrayLike],
    *,
    tolerances: Mapping[str, Tolerance] | None = None,
) -> Comparison:
    """Compare arrays with the goldens of the same names.

    Each golden with role "expected" must be in `actual`. Other goldens that have a tolerance (intermediate results) are
    compared if they are. An array that has no golden, or one without a tolerance, another dtype or another shape fails.
    `tolerances` replace the stored ones.
    """
    if isinstance(golden, str | os.PathLike):
        with Container(golden) as handle:
            return compare(handle, actual, tolerances=tolerances)
    replaced = tolerances or {}
    rows = []
    for name in sorted({*golden, *actual}):
        if name not in golden:
            rows.append(Row(name, "the golden file has no such array"))
            continue
        info = golden.info[name]
        tolerance = replaced.get(name, info.tolerance)
        if name not in actual:
            if info.role == "expected":
                rows.append(Row(name, "expected, but not among the tested arrays", tolerance))
        elif tolerance is None:
            rows.append(Row(name, f"its golden (role {info.role}) has no tolerance: nothing would be asserted"))
        else:
            rows.append(_compare_stored(golden, info, np.asarray(actual[name]), tolerance))
    return Comparison(golden.path, tuple(rows))


def compare_array(name: str, golden: npt.ArrayLike, actual: npt.ArrayLike, tolerance: Tolerance) -> Row:
    """Compare one array with its golden."""
    g, x = np.asarray(golden), np.asarray(actual)
    dtype = dtypes.from_numpy(g.dtype)
    if dtype is None:
        return Row(name, f"golden of NumPy dtype {g.dtype}, which the format does not have", tolerance)
    if tolerance.mode == "ulp" and not dtype.is_float:
        return Row(name, f"compare mode ulp on {dtype.name}, which has no ulp", tolerance)
    if problem := _misfit(dtype, g.shape, x):
        return Row(name, problem, tolerance)
    return _Judge(name, dtype, g, x, tolerance).row()


def _compare_stored(golden: Fixture | Container, info: TensorInfo, actual: Array, tolerance: Tolerance) -> Row:
    if problem := _misfit(dtypes.BY_NAME[info.dtype], info.shape, actual):
        return Row(info.name, problem, tolerance)
    return compare_array(info.name, golden[info.name], actual, tolerance)


def _misfit(dtype: DType, shape: tuple[int, ...], actual: Array) -> str:
    found = dtypes.from_numpy(actual.dtype)
    if found is not dtype:
        return f"dtype is {found.name if found else actual.dtype}, must be {dtype.name}"
    if actual.shape != shape:
        return f"shape is {actual.shape}, must be {shape}"
    return ""


class _Judge:
    """One comparison, block by block over the flat arrays."""

    def __init__(self, name: str, dtype: DType, golden: Array, actual: Array, tolerance: Tolerance) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = golden.shape
        self.golden = _flat(golden)
        self.actual = _flat(actual)
        self.tolerance = tolerance
        self.parts = 2 if golden.dtype.kind == "c" else 1
        self.bad = 0
        self.worst = -np.inf  # how bad the worst element is; `error` is what is told of it
        self.error = 0.0
        self.at: int | None = None
        self.nonfinite: int | None = (
            None  # first element that is finite, NaN or infinite in another way than its golden
        )
        self.difference = 0.0  # sum((x - g)^2)
        self.energy = 0.0  # sum(x^2 + g^2) or sum(g^2)

    def row(self) -> Row:
        """The verdict."""
        step: Callable[[int, Array, Array], None] = getattr(self, f"_{self.tolerance.mode}")
        with np.errstate(all="ignore"):
            for start in range(0, self.golden.size, _BLOCK):
                step(start, self.golden[start : start + _BLOCK], self.actual[start : start + _BLOCK])
        problem = self._problem()
        if self.nonfinite is not None:
            self.at, self.error = self.nonfinite, np.inf
        index = None if self.at is None else tuple(int(i) for i in np.unravel_index(self.at, self.shape))
        golden, actual = (None, None) if self.at is None else (self.golden[self.at], self.actual[self.at])
        return Row(
            self.name, problem, self.tolerance, float(self.error), index, golden, actual, self.bad, self.golden.size
        )

    def _problem(self) -> str:
        if self.nonfinite is not None:
            return "NaN or infinity where the golden has none, or the other way round"
        if not self.golden.size:
            return ""
        mode, limit = self.tolerance.mode, self.tolerance.limit
        if mode in ("similarity", "nmse"):
            self.error = self.difference / self.energy if self.energy else (np.inf if self.difference else 0.0)
            if np.isfinite(self.error) and self.error <= limit:
                return ""
            self.bad = self.golden.size
            return f"{'1 - similarity' if mode == 'similarity' else 'nmse'} is {self.error:.6g}, at most {limit:g}"
        if self.bad <= limit * self.golden.size:
            return ""
        if limit:
            return f"a fraction of {self.bad / self.golden.size:.6g} is outside the tolerance, at most {limit:g}"
        return {"bits": "bits differ", "equal": "values differ"}.get(mode, "outside the tolerance")

    # One step a mode, on the block that starts at element `start`.

    def _bits(self, start: int, g: Array, x: Array) -> None:
        self._count(start, g, x, self._per_element(_codes(g, self.dtype) != _codes(x, self.dtype)))

    def _equal(self, start: int, g: Array, x: Array) -> None:
        if not self.dtype.is_float:  # equal bits are equal values, and 64-bit integers stay exact
            self._bits(start, g, x)
            return
        gp, xp = self._floats(g), self._floats(x)
        self._count(start, g, x, self._per_element(~((gp == xp) | (np.isnan(gp) & np.isnan(xp)))))

    def _close(self, start: int, g: Array, x: Array) -> None:
        gp, xp, _ = self._finite(start, g, x)
        distance, size = self._magnitude(xp - gp), self._magnitude(gp)
        bound = self.tolerance.atol + self.tolerance.rtol * size
        self.bad += int(np.count_nonzero(~(distance <= bound)))
        self._keep_worst(start, np.nan_to_num(distance - bound, nan=-np.inf, posinf=np.inf, neginf=-np.inf), distance)

    def _ulp(self, start: int, g: Array, x: Array) -> None:
        _, _, finite = self._finite(start, g, x)
        g_size, g_sign = _sign_and_size(g, self.dtype)
        x_size, x_sign = _sign_and_size(x, self.dtype)
        apart = np.where(g_sign == x_sign, np.maximum(g_size, x_size) - np.minimum(g_size, x_size), g_size + x_size)
        apart = np.where(finite, apart, 0).astype(np.uint64).reshape(-1, self.parts).max(axis=1)
        self.bad += int(np.count_nonzero(apart > self.tolerance.max_ulp))
        self._keep_worst(start, apart, apart)

    def _similarity(self, start: int, g: Array, x: Array) -> None:
        gp, xp = self._add_difference(start, g, x)
        self.energy += float((xp * xp + gp * gp).sum())

    def _nmse(self, start: int, g: Array, x: Array) -> None:
        gp, _ = self._add_difference(start, g, x)
        self.energy += float((gp * gp).sum())

    def _add_difference(self, start: int, g: Array, x: Array) -> tuple[Floats, Floats]:
        gp, xp, _ = self._finite(start, g, x)
        apart = xp - gp
        self.difference += float((apart * apart).sum())
        distance = self._magnitude(apart)
        self._keep_worst(start, distance, distance)
        return gp, xp

    def _finite(self, start: int, g: Array, x: Array) -> tuple[Floats, Floats, Mask]:
        """Parts in float64 with 0 for those that are not finite, and which are; notes the first that disagree."""
        gp, xp = self._floats(g), self._floats(x)
        finite: Mask = np.isfinite(gp) & np.isfinite(xp)
        if not finite.all():
            agree = finite | (np.isnan(gp) & np.isnan(xp)) | (gp == xp)
            if not agree.all():
                wrong = self._per_element(~agree)
                self.bad += int(np.count_nonzero(wrong))
                if self.nonfinite is None:
                    self.nonfinite = start + int(wrong.argmax())
            gp, xp = np.where(finite, gp, 0.0), np.where(finite, xp, 0.0)
        return gp, xp, finite

    def _floats(self, block: Array) -> Floats:
        part = block.view(block.real.dtype) if self.parts == 2 else block
        return part.astype(np.float64, copy=False)

    def _magnitude(self, part: Floats) -> Floats:
        return np.hypot(part[0::2], part[1::2]) if self.parts == 2 else np.abs(part)

    def _per_element(self, wrong: Mask) -> Mask:
        return np.logical_or.reduce(wrong.reshape(-1, 2), axis=1) if self.parts == 2 else wrong

    def _count(self, start: int, g: Array, x: Array, wrong: Mask) -> None:
        self.bad += int(np.count_nonzero(wrong))
        if self.at is None and wrong.any():
            at = int(wrong.argmax())
            self.at = start + at
            apart = self._magnitude(self._floats(x[at : at + 1]) - self._floats(g[at : at + 1]))
            self.error = float(apart[0]) if np.isfinite(apart[0]) else np.inf

    def _keep_worst(self, start: int, badness: Array, error: Array) -> None:
        at = int(badness.argmax())
        if badness[at] > self.worst or self.at is None:
            self.worst, self.error, self.at = badness[at], error[at], start + at


def _flat(array: Array) -> Array:
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return np.asarray(native, order="C").reshape(-1)


def _codes(block: Array, dtype: DType) -> Array:
    """Bits of each part as unsigned integers."""
    width = min(block.dtype.itemsize, 8) if block.dtype.kind != "c" else block.dtype.itemsize // 2
    codes = block.view(f"u{width}")
    return np.bitwise_and(codes, np.uint8((1 << dtype.bits) - 1)) if dtype.packed else codes


def _sign_and_size(block: Array, dtype: DType) -> tuple[npt.NDArray[np.uint64], Mask]:
    """Magnitude code and sign of each part."""
    codes = _codes(block, dtype).astype(np.uint64)
    if dtype.name == "f8_e8m0fnu":  # unsigned
        return codes, np.zeros(codes.shape, np.bool_)
    bits = dtype.bits // 2 if block.dtype.kind == "c" else dtype.bits
    top = np.uint64(1 << (bits - 1))
    negative: Mask = codes >= top
    return codes & (top - np.uint64(1)), negative
