"""Statistics and bitwise differences of tensors against plain NumPy on whole arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kdtr
from kdtr import Raw, difference
from kdtr import statistics as module
from kdtr.difference import Difference, differences
from kdtr.dtypes import BY_NAME
from kdtr.statistics import statistics


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    "dtype",
    [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, np.complex64, np.int16, bool],
)
def test_against_numpy(monkeypatch: pytest.MonkeyPatch, block: int, dtype: Any) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    rng = np.random.default_rng(11)
    values = rng.normal(size=(5, 6)) * 20
    values[1, 2], values[0, 0], values[4, 5], values[4, 4] = np.nan, np.inf, -np.inf, 0
    is_float = np.dtype(dtype).kind not in "ib"
    array = (values if is_float else np.nan_to_num(values, posinf=9, neginf=-9)).astype(dtype)
    if dtype is np.complex64:
        array.imag = rng.normal(size=(5, 6))
    found = statistics(array)
    parts = array.view(np.float32) if dtype is np.complex64 else array
    wide = parts.astype(np.float64).reshape(-1)
    kept = wide[np.isfinite(wide)]
    assert found.count == wide.size
    assert (found.nan, found.positive_infinite, found.negative_infinite) == ((1, 1, 1) if is_float else (0, 0, 0))
    assert found.zero == np.count_nonzero(wide == 0)
    assert found.low is not None
    assert found.high is not None
    assert (float(found.low.value), float(found.high.value)) == (kept.min(), kept.max())
    per_element = wide.reshape(*array.shape, -1)
    assert kept.min() in per_element[found.low.at]
    assert kept.max() in per_element[found.high.at]
    assert found.mean == pytest.approx(kept.mean(), rel=1e-12)
    assert found.std == pytest.approx(kept.std(), rel=1e-12)
    assert found.bins == tuple(np.histogram(kept, bins=48)[0]) or dtype is ml_dtypes.float8_e5m2
    assert sum(found.bins) == kept.size
    assert found.first == tuple(str(value) for value in array.reshape(-1)[:8])


def test_nothing_finite() -> None:
    for array in (np.zeros((0, 3)), np.full(3, np.nan)):
        found = statistics(array)
        assert (found.low, found.high, found.mean, found.std, found.histogram()) == (None, None, None, None, "")


def test_numbers_that_float64_cannot_tell_apart_or_subtract() -> None:
    found = statistics(np.array([2**63 - 2, 2**63 - 1, 2**63 - 3]))
    assert found.low is not None
    assert found.high is not None
    assert (found.low.value, found.high.value) == (2**63 - 3, 2**63 - 1)
    assert (found.low.at, found.high.at) == ((2,), (1,))
    most = np.finfo(np.float64).max
    wide = statistics(np.array([most, -most, most]))
    assert wide.mean == pytest.approx(most / 3)
    assert (wide.bins[0], wide.bins[-1], sum(wide.bins)) == (1, 2, 3)
    scalar = statistics(np.array(-3, np.int8))
    assert (scalar.low, scalar.mean, scalar.std, scalar.bins[0]) == ((-3, ()), -3.0, 0.0, 1)


@pytest.mark.parametrize("name", ["bool", "u8", "bf16", "f32", "c128", "i4", "u2", "f6_e2m3fn", "f4_e2m1fn"])
def test_differing_elements_are_counted_and_the_first_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(difference, "_BLOCK", 48)
    dtype = BY_NAME[name]
    shape = (5, 20)
    data = bytearray(dtype.nbytes(100))
    changed = {3: 1, 7: 1, 61: 1, 99: 1}
    other = bytearray(data)
    for element in changed:
        bit = element * dtype.bits + (dtype.bits - 1 if name != "bool" else 0)  # the highest bit of each
        other[bit // 8] ^= 1 << bit % 8
    for file, payload in (("a", data), ("b", other)):
        kdtr.save(tmp_path / f"{file}.kdtr", {"x": Raw(bytes(payload), name, shape)}, kind="any")
    with kdtr.open(tmp_path / "a.kdtr") as a, kdtr.open(tmp_path / "b.kdtr") as b:
        (found,) = differences(a, b)
        assert list(differences(a, a)) == []
    digits = -(-dtype.bits // 4)
    top = 1 if name == "bool" else 1 << dtype.bits - 1
    assert (found.where, found.what) == ("x", "4 elements, first at [0, 3]")
    assert found.golden.endswith(f"(0x{0:0{digits}x})")
    assert found.actual.endswith(f"(0x{top:0{digits}x})")


def test_metadata_differences_are_found_to_the_leaf(tmp_path: Path) -> None:
    one = {"list": [1, {"a": None}], "same": {"x": 1}, "true": True}
    other = {"list": [1, {"a": 0}, 5], "same": {"x": 1}, "true": 1}
    for file, meta in (("a", one), ("b", other)):
        kdtr.save(tmp_path / f"{file}.kdtr", {}, kind="any", meta=meta)
    with kdtr.open(tmp_path / "a.kdtr") as a, kdtr.open(tmp_path / "b.kdtr") as b:
        assert list(differences(a, b)) == [
            Difference("metadata/list/1/a", "value", "null", "0"),
            Difference("metadata/list/2", "value", "(none)", "5"),
            Difference("metadata/true", "value", "true", "1"),
        ]
