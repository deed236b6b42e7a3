"""Comparing: every mode against the definition written out element by element, and what counts as a failure."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kdtr
from kdtr import dtypes, errors
from kdtr.index import Tolerance


def parts(value: Any) -> list[Any]:
    """Real parts of an element as NumPy scalars of the part's type."""
    return [value.real, value.imag] if np.asarray(value).dtype.kind == "c" else [value]


def key(value: Any, bits: int, unsigned: bool) -> int:
    code = int.from_bytes(np.asarray(value).tobytes(), "little") & ((1 << bits) - 1)
    sign = 1 << (bits - 1)
    return code if unsigned else -(code - sign) if code & sign else code


def passes(dtype: dtypes.DType, golden: np.ndarray, actual: np.ndarray, t: Tolerance) -> bool:
    """Section 7 of kdtr/format.py with Python numbers; sums are rounded once, which a sum in float64 comes close to."""
    g, x = list(golden.ravel()), list(actual.ravel())
    pairs = [(p, q) for a, b in zip(x, g, strict=True) for p, q in zip(parts(a), parts(b), strict=True)]
    if t.mode == "bits":
        return golden.tobytes() == actual.tobytes()
    if t.mode == "equal":
        if not dtype.is_float:
            return all(int(p) == int(q) for p, q in pairs)
        return all(float(p) == float(q) or (math.isnan(float(p)) and math.isnan(float(q))) for p, q in pairs)
    for p, q in ((float(p), float(q)) for p, q in pairs):
        if math.isnan(p) != math.isnan(q) or math.isinf(p) != math.isinf(q) or (math.isinf(p) and p != q):
            return False
    clean = [(float(p), float(q)) if math.isfinite(float(p)) else (0.0, 0.0) for p, q in pairs]
    if t.mode in ("similarity", "nmse"):
        top = math.fsum((p - q) * (p - q) for p, q in clean)
        low = math.fsum(q * q + (p * p if t.mode == "similarity" else 0.0) for p, q in clean)
        return top == 0 or (low != 0 and top / low <= t.limit)
    width = len(parts(g[0])) if g else 1
    bad = 0
    for i in range(0, len(clean), width):
        group = clean[i : i + width]
        if t.mode == "close":
            distance, size = math.hypot(*(p - q for p, q in group)), math.hypot(*(q for _, q in group))
            bad += not distance <= t.atol + t.rtol * size
        else:
            bits, unsigned = dtype.bits // width, dtype.name == "f8_e8m0fnu"
            apart = [
                abs(key(p, bits, unsigned) - key(q, bits, unsigned)) if math.isfinite(float(p)) else 0
                for p, q in pairs[i : i + width]
            ]
            bad += max(apart) > t.max_ulp
    return bad <= t.limit * len(g)


@st.composite
def comparisons(draw):
    dtype = draw(st.sampled_from(dtypes.DTYPES))
    numpy_dtype = dtype.numpy()
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(0, 9))
    width = 2 if numpy_dtype.kind == "c" else 1
    size = numpy_dtype.itemsize // width
    raw = rng.integers(0, 256, (n * width, size), dtype=np.uint8)
    if dtype.is_float and draw(st.booleans()):  # ordinary magnitudes
        raw = (
            rng.standard_normal(n * width)
            .astype(numpy_dtype if width == 1 else f"f{size}")
            .view(np.uint8)
            .reshape(-1, size)
        )
    if dtype.name == "bool":
        raw &= 1
    if dtype.packed:
        raw &= (1 << dtype.bits) - 1
    near = raw.copy()
    for _ in range(draw(st.integers(0, 3)) if n else 0):
        at = draw(st.integers(0, n * width - 1))
        step = draw(st.sampled_from([1, 2, 3, 0x80, 255]))
        near[at, draw(st.sampled_from([0, size - 1]))] ^= np.uint8(step)
    if dtype.name == "bool":
        near &= 1
    if dtype.packed:
        near &= (1 << dtype.bits) - 1
    golden, actual = (a.copy().reshape(-1).view(numpy_dtype) for a in (raw, near))
    limit = draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    modes = [Tolerance.bits(), Tolerance.equal(), Tolerance.similarity(limit), Tolerance.nmse(limit)]
    modes.append(
        Tolerance.close(draw(st.sampled_from([0.0, 1e-3, 1.0])), draw(st.sampled_from([0.0, 1e-2, 1.0])), limit)
    )
    if dtype.is_float:
        modes.append(Tolerance.ulp(draw(st.sampled_from([0, 1, 2, 2**31])), limit))
    return dtype, golden, actual, draw(st.sampled_from(modes))


@settings(max_examples=1500, deadline=None)
@given(comparisons())
def test_every_mode_is_the_definition(case):
    dtype, golden, actual, tolerance = case
    row = kdtr.compare_array("x", golden, actual, tolerance)
    if tolerance.mode in ("similarity", "nmse") and not math.isfinite(row.error):
        assert not row.ok  # sums that overflow fail, and so does a mismatch of non-finite values
        return
    with np.errstate(all="ignore"):
        assert row.ok == passes(dtype, golden, actual, tolerance), row


@pytest.mark.parametrize("dtype", [d for d in dtypes.DTYPES if d.is_float and d.bits <= 8], ids=lambda d: d.name)
def test_ulp_counts_representable_values(dtype):
    """Neighbours in the order of the values are one apart, across zero, too."""
    codes = np.arange(1 << dtype.bits, dtype=np.uint8).view(dtype.numpy())
    values = codes.astype(np.float64)
    ordered = [codes[i] for i in np.argsort(values, kind="stable") if np.isfinite(values[i])]
    distinct = [v for i, v in enumerate(ordered) if i == 0 or float(ordered[i - 1]) != float(v)]
    for a, b in itertools.pairwise(distinct):
        pair = np.array([a], dtype.numpy()), np.array([b], dtype.numpy())
        assert kdtr.compare_array("x", *pair, Tolerance.ulp(1)).ok
        assert not kdtr.compare_array("x", *pair, Tolerance.ulp(0)).ok


def test_ulp_over_the_whole_range_of_f64():
    top = np.finfo(np.float64).max
    row = kdtr.compare_array("x", np.array([-top]), np.array([top]), Tolerance.ulp(2**32 - 1))
    assert not row.ok
    assert row.error == float(2 * 0x7FEFFFFFFFFFFFFF)
    assert kdtr.compare_array("x", np.array([-0.0]), np.array([0.0]), Tolerance.ulp(0)).ok


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "t",
    [Tolerance.close(1e9, 1e9, 1.0), Tolerance.ulp(2**32 - 1, 1.0), Tolerance.similarity(1e300), Tolerance.nmse(1e300)],
    ids=str,
)
@pytest.mark.parametrize(
    ("g", "x"), [(1, NAN), (NAN, 1), (1, INF), (INF, 1), (INF, -INF), (INF, NAN), (NAN, -INF), (-INF, 0)]
)
def test_non_finite_mismatch_fails_whatever_the_fraction(t, g, x):
    golden = np.array([1.0] * 5 + [g] + [2.0] * 100_000)
    actual = np.array([1.0] * 5 + [x] + [2.0] * 100_000)
    row = kdtr.compare_array("y", golden, actual, t)
    assert "NaN or infinity" in row.problem
    assert (row.index, row.bad, row.error) == ((5,), 1, INF)
    assert kdtr.compare_array("y", golden, golden, t).ok


def test_matching_non_finite_values_do_not_spoil_the_rest():
    golden = np.array([NAN, INF, -INF, 3.0, 4.0])
    actual = np.array([-NAN, INF, -INF, 3.0, 4.5])
    assert kdtr.compare_array("y", golden, actual, Tolerance.nmse(0.01)).error == 0.25 / 25
    assert kdtr.compare_array("y", golden, actual, Tolerance.similarity(0.01)).error == 0.25 / (25 + 29.25)
    assert kdtr.compare_array("y", golden, actual, Tolerance.close(0.5, 0)).ok
    assert kdtr.compare_array("y", golden, actual, Tolerance.close(0.4, 0)).bad == 1


def test_complex_values_are_compared_by_parts():
    golden = np.array([3 + 4j, complex(NAN, 1), complex(INF, -INF)], np.complex64)
    assert kdtr.compare_array("z", golden, golden, Tolerance.close(0, 0)).ok
    shifted = golden + np.array([3e-1 + 4e-1j, 0, 0], np.complex64)
    assert kdtr.compare_array("z", golden, shifted, Tolerance.close(0.5001, 0)).ok
    assert not kdtr.compare_array("z", golden, shifted, Tolerance.close(0.4999, 0)).ok
    assert kdtr.compare_array("z", golden, shifted, Tolerance.close(0, 0.1001)).ok  # of |g| = 5
    flipped = golden.copy()
    flipped[2] = complex(INF, INF)
    assert not kdtr.compare_array("z", golden, flipped, Tolerance.close(9, 9, 1.0)).ok


def test_bad_fraction_is_inclusive():
    golden = np.zeros(8)
    for bad, ok in ((2, True), (3, False)):
        actual = np.where(np.arange(8) < bad, 1.0, 0.0)
        row = kdtr.compare_array("y", golden, actual, Tolerance.close(0.5, 0, 0.25))
        assert (row.ok, row.bad, row.bad_fraction) == (ok, bad, bad / 8)


def test_ratios_of_zeros_and_overflow():
    zeros, ones = np.zeros(3), np.ones(3)
    for t in (Tolerance.similarity(0.0), Tolerance.nmse(0.0)):
        assert kdtr.compare_array("y", zeros, zeros, t).ok
    assert kdtr.compare_array("y", zeros, ones, Tolerance.nmse(1e300)).error == INF
    assert not kdtr.compare_array("y", zeros, ones, Tolerance.nmse(1e300)).ok
    assert kdtr.compare_array("y", zeros, ones, Tolerance.similarity(1.0)).ok
    assert not kdtr.compare_array("y", zeros, ones, Tolerance.similarity(0.999)).ok
    huge = np.full(3, 1e200)
    assert not kdtr.compare_array("y", huge, -huge, Tolerance.nmse(1e300)).ok
    row = kdtr.compare_array("y", ones, ones + 1e-9, Tolerance.similarity(1e-17))  # cancellation would give 0 or 2e-16
    assert row.error == pytest.approx(0.5e-18, rel=1e-6)


@pytest.mark.parametrize("mode", ["bits", "equal", "close", "ulp", "similarity", "nmse"])
def test_large_arrays_are_compared_to_the_last_element(mode):
    """Blocks, and the index of the worst in three dimensions; the tested array may be strided."""
    golden = np.random.default_rng(0).standard_normal((3, 5, 20_011)).astype(np.float32)
    backing = np.zeros((3, 5, 40_022), np.float32)
    actual = backing[:, :, ::2]
    actual[...] = golden
    tolerance = {
        "close": Tolerance.close(1e-3, 0),
        "ulp": Tolerance.ulp(4),
        "similarity": Tolerance.similarity(0),
        "nmse": Tolerance.nmse(0),
    }
    t = tolerance.get(mode, Tolerance(mode) if mode in ("bits", "equal") else None)
    assert t is not None
    assert kdtr.compare_array("y", golden, actual, t).ok
    actual[2, 4, 20_010] += 0.01
    row = kdtr.compare_array("y", golden, actual, t)
    assert not row.ok
    assert row.index == (2, 4, 20_010)
    assert (row.golden, row.actual) == (golden[2, 4, 20_010], actual[2, 4, 20_010])
    assert row.bad == (golden.size if mode in ("similarity", "nmse") else 1)


def test_worst_is_the_largest_violation():
    golden = np.array([1.0, 1000.0, 1.0])
    actual = np.array([1.3, 1001.0, 1.5])  # 1001 is within the tolerance although its distance is the largest
    row = kdtr.compare_array("y", golden, actual, Tolerance.close(0.1, 0.01))
    assert (row.index, row.error, row.bad) == ((2,), 0.5, 2)


def test_64_bit_integers_are_compared_exactly():
    golden = np.array([2**63 - 1, -(2**63)])
    actual = golden - np.array([1, 0])
    for t in (Tolerance.bits(), Tolerance.equal()):
        row = kdtr.compare_array("y", golden, actual, t)
        assert (row.ok, row.index) == (False, (0,))


def test_unused_bits_of_packed_types_do_not_count():
    clean = np.array([-1, 3], ml_dtypes.int4)
    dirty = (clean.view(np.uint8) | 0xF0).view(ml_dtypes.int4)
    assert kdtr.compare_array("q", clean, dirty, Tolerance.bits()).ok


def test_big_endian_arrays_are_compared_by_value():
    golden = np.arange(5, dtype=np.float32)
    for t in (Tolerance.bits(), Tolerance.equal(), Tolerance.ulp(0)):
        assert kdtr.compare_array("y", golden, golden.astype(">f4"), t).ok


@pytest.fixture
def golden(tmp_path):
    arrays = {
        "in": np.ones(3, np.float32),
        "out": np.array([1.0, 2.0], np.float32),
        "mid": np.array([5, 6]),
        "w": np.ones(2),
    }
    kdtr.save(
        tmp_path / "g.kdtr",
        arrays,
        kind="any",
        roles={"in": "input", "out": "expected", "mid": "intermediate", "w": "param"},
        tolerances={"out": Tolerance.close(1e-3, 0), "mid": Tolerance.equal()},
    )
    return tmp_path / "g.kdtr"


def problems(comparison: kdtr.Comparison) -> dict[str, str]:
    return {row.name: row.problem for row in comparison.rows}


def test_what_is_asserted(golden):
    good = {"out": np.array([1.0, 2.0005], np.float32)}
    with kdtr.open(golden) as handle:
        for source in (golden, str(golden), kdtr.read(golden), handle):
            assert problems(kdtr.compare(source, good)) == {"out": ""}
    both = kdtr.compare(golden, {**good, "mid": np.array([5, 7])})
    assert problems(both) == {"out": "", "mid": "values differ"}
    assert not both.ok
    with pytest.raises(
        kdtr.MismatchError, match=r"1 of 2 arrays failed\n  FAIL mid \[equal\]: values differ; worst 1 at \[1\]"
    ):
        both.raise_if_failed()
    assert issubclass(kdtr.MismatchError, AssertionError)


@pytest.mark.parametrize(
    ("actual", "name", "problem"),
    [
        ({}, "out", "expected, but not among the tested arrays"),
        ({"out": np.ones(2, np.float32), "extra": 1}, "extra", "the golden file has no such array"),
        ({"out": np.ones(2, np.float32), "in": np.ones(3, np.float32)}, "in", "(role input) has no tolerance"),
        ({"out": np.ones(2)}, "out", "dtype is f64, must be f32"),
        ({"out": np.ones((2, 1), np.float32)}, "out", "shape is (2, 1), must be (2,)"),
        ({"out": np.float32(1)}, "out", "shape is (), must be (2,)"),
        ({"out": np.array([None, None])}, "out", "dtype is object, must be f32"),
        ({"out": "text"}, "out", "must be f32"),
    ],
)
def test_missing_extra_and_misfitting_arrays_fail(golden, actual, name, problem):
    comparison = kdtr.compare(golden, actual)
    assert not comparison.ok
    assert problem in problems(comparison)[name]
    with pytest.raises(kdtr.MismatchError):
        comparison.raise_if_failed()


def test_replaced_tolerances(golden):
    actual = {"out": np.array([1.0, 2.5], np.float32), "in": np.ones(3, np.float32)}
    loose = {"out": Tolerance.close(1, 0), "in": Tolerance.bits()}
    assert kdtr.compare(golden, actual, tolerances=loose).ok
    assert (
        "no ulp"
        in problems(kdtr.compare(golden, {**actual, "mid": np.array([5, 6])}, tolerances={"mid": Tolerance.ulp(1)}))[
            "mid"
        ]
    )


def test_comparing_nothing_is_a_failure(tmp_path):
    kdtr.save(tmp_path / "g", {"x": np.ones(1)}, kind="any")
    comparison = kdtr.compare(tmp_path / "g", {})
    assert not comparison.ok
    with pytest.raises(kdtr.MismatchError, match="nothing was compared"):
        comparison.raise_if_failed()


def test_damaged_golden_is_an_error_not_a_verdict(golden):
    data = bytearray(golden.read_bytes())
    with kdtr.open(golden) as handle:
        data[handle.info["out"].offset] ^= 1
    golden.write_bytes(data)
    with pytest.raises(errors.DataSumError):
        kdtr.compare(golden, {"out": np.array([1.0, 2.0], np.float32)})


def test_golden_as_read_with_some_names(golden):
    """Only what was read is asserted."""
    assert problems(kdtr.compare(kdtr.read(golden, ["mid"]), {"mid": np.array([5, 6])})) == {"mid": ""}
