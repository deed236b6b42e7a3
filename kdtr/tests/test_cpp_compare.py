"""Comparing in C++ gives the verdicts of kdtr.compare."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest

import kdtr
from kdtr import dtypes
from kdtr.tests.cpp_build import SOURCES, build, needs, run


@pytest.fixture(scope="module")
def tool() -> Path:
    return build(SOURCES / "kdtr_tool.cpp")


TOLERANCES = {
    "bits": kdtr.Tolerance.bits(),
    "equal": kdtr.Tolerance.equal(),
    "close": kdtr.Tolerance.close(0.05, 0.1),
    "close_some": kdtr.Tolerance.close(0.0, 0.02, 0.25),
    "ulp": kdtr.Tolerance.ulp(2),
    "ulp_some": kdtr.Tolerance.ulp(0, 0.3),
    "similarity": kdtr.Tolerance.similarity(1e-3),
    "nmse": kdtr.Tolerance.nmse(1e-3),
}


def perturbed(rng: np.random.Generator, codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of which some are one or a few steps off, have another sign, or are any at all."""
    out = codes.copy()
    for i in np.flatnonzero(rng.random(codes.size) < rng.choice([0.0, 0.1, 0.5])):
        change = rng.integers(6)
        step = int(rng.integers(1, 4))
        new = int(out[i])
        new = [new + 1, new - 1, new + step, new ^ 1 << bits - 1, int(rng.integers(1 << min(bits, 62))), 0][change]
        out[i] = new % (1 << bits)
    return out


@needs("g++")
def test_compare_gives_the_verdicts_of_python(tool, tmp_path):
    """Random and special values of every dtype under every mode it can have: the same arrays pass."""
    rng = np.random.default_rng(7)
    golden: dict[str, kdtr.Raw] = {}
    actual: dict[str, kdtr.Raw] = {}
    tolerances: dict[str, kdtr.Tolerance] = {}
    for dtype in dtypes.DTYPES:
        bits = dtype.bits // 2 if dtype.name in ("c64", "c128") else dtype.bits
        parts = 2 if dtype.name in ("c64", "c128") else 1
        word = f"<u{max(bits, 8) // 8}"
        for mode, tolerance in TOLERANCES.items():
            if mode.startswith("ulp") and not dtype.is_float:
                continue
            for trial in range(16):
                name = f"{dtype.name}/{mode}/{trial:02}"
                count = int(rng.integers(0, 12))
                top = 1 if dtype.name == "bool" else (1 << bits) - 1
                if dtype.is_float and bits >= 16 and trial % 4:  # near 1, so that tolerances have something to decide
                    values = rng.normal(size=count * parts)
                    codes = values.astype(dtype.numpy() if parts == 1 else f"f{bits // 8}").view(word)
                else:
                    codes = rng.integers(0, top, count * parts, dtype=word, endpoint=True)
                near = codes.copy() if dtype.name == "bool" else perturbed(rng, codes, bits)
                if dtype.name == "bool" and count and trial % 2:
                    near[0] ^= 1
                for arrays, held in ((golden, codes), (actual, near)):
                    array = held.view(dtype.numpy()) if not dtype.packed else held.astype(np.uint8)
                    payload = dtypes.pack(array.view(dtype.numpy()) if dtype.packed else array, dtype)
                    arrays[name] = kdtr.Raw(payload, dtype.name, (count,))
                tolerances[name] = tolerance
    kdtr.save(
        tmp_path / "golden.kdtr", golden, kind="any", roles=dict.fromkeys(golden, "expected"), tolerances=tolerances
    )
    kdtr.save(tmp_path / "actual.kdtr", actual, kind="any")
    lines = [
        line.split("\t")
        for line in run(tool, "compare", tmp_path / "golden.kdtr", tmp_path / "actual.kdtr").splitlines()
    ]
    rows = {row.name: row for row in kdtr.compare(tmp_path / "golden.kdtr", kdtr.read(tmp_path / "actual.kdtr")).rows}
    assert [name for name, *_ in lines] == sorted(golden)
    wrong = []
    for name, ok, _, measure, message in lines:
        row = rows[name]
        if (ok == "1") != row.ok:
            wrong.append(f"{name}: C++ {message}; Python {row}")
        if np.isfinite(row.error) and name.split("/")[1] in ("similarity", "nmse"):
            assert float(measure) == pytest.approx(row.error, rel=1e-12), name
    assert not wrong
    passed = {mode: [rows[n].ok for n in rows if n.split("/")[1] == mode] for mode in TOLERANCES}
    assert all(0.1 < statistics.fmean(ok) < 0.95 for ok in passed.values()), "a mode that only passes tests nothing"


@needs("g++")
def test_compare_at_the_edge(tool, tmp_path):
    """Rules of the specification that random data hardly reach."""
    nan, inf = np.nan, np.inf
    cases: dict[str, tuple[np.ndarray, np.ndarray, kdtr.Tolerance, bool]] = {
        # name: golden, actual, tolerance, passes
        "absent_elements": (np.zeros((0, 3)), np.zeros((0, 3)), kdtr.Tolerance.nmse(0), True),
        "shape": (np.zeros((2, 3)), np.zeros((3, 2)), kdtr.Tolerance.equal(), False),
        "rank": (np.zeros(1), np.zeros(()), kdtr.Tolerance.equal(), False),
        "dtype": (np.zeros(2, np.int32), np.zeros(2, np.uint32), kdtr.Tolerance.equal(), False),
        "zero_signs_equal": (np.array([0.0]), np.array([-0.0]), kdtr.Tolerance.equal(), True),
        "zero_signs_bits": (np.array([0.0]), np.array([-0.0]), kdtr.Tolerance.bits(), False),
        "zero_signs_ulp": (np.array([0.0]), np.array([-0.0]), kdtr.Tolerance.ulp(0), True),
        "across_zero_ulp": (np.array([5e-324]), np.array([-5e-324]), kdtr.Tolerance.ulp(2), True),
        "across_zero_ulp_1": (np.array([5e-324]), np.array([-5e-324]), kdtr.Tolerance.ulp(1), False),
        "extremes_ulp": (np.array([1.7e308]), np.array([-1.7e308]), kdtr.Tolerance.ulp(2**32 - 1), False),
        "nan_close": (np.array([nan, 1]), np.array([nan, 1]), kdtr.Tolerance.close(0, 0), True),
        "nan_for_all_it_may": (np.array([1.0, 1]), np.array([nan, 1]), kdtr.Tolerance.close(9, 9, 1.0), False),
        "infinite_sign": (np.array([inf]), np.array([-inf]), kdtr.Tolerance.similarity(9), False),
        "infinite_same": (np.array([-inf, 1]), np.array([-inf, 1]), kdtr.Tolerance.similarity(0), True),
        "infinite_is_large": (np.array([1.7e308]), np.array([inf]), kdtr.Tolerance.ulp(9, 1.0), False),
        "overflow": (np.array([1e200]), np.array([2e200]), kdtr.Tolerance.nmse(9), False),
        "zero_by_zero": (np.zeros(3), np.zeros(3), kdtr.Tolerance.nmse(0), True),
        "by_zero": (np.zeros(3), np.ones(3), kdtr.Tolerance.nmse(1e300), False),
        "fraction_met": (np.zeros(4), np.array([1.0, 0, 0, 0]), kdtr.Tolerance.close(0.5, 0, 0.25), True),
        "fraction_passed": (np.zeros(4), np.array([1.0, 1, 0, 0]), kdtr.Tolerance.close(0.5, 0, 0.25), False),
        "integers_beyond_2_53": (np.array([2**53]), np.array([2**53 + 1]), kdtr.Tolerance.equal(), False),
        "integers_rounded": (np.array([2**53]), np.array([2**53 + 1]), kdtr.Tolerance.close(0, 0), True),
        "hypot": (np.array([0j]), np.array([0.3 + 0.4j]), kdtr.Tolerance.close(0.5, 0), True),
        "hypot_beyond": (np.array([0j]), np.array([0.3 + 0.41j]), kdtr.Tolerance.close(0.5, 0), False),
        "complex_part_ulp": (np.array([1 + 1j]), np.array([1 + np.nextafter(1, 2) * 1j]), kdtr.Tolerance.ulp(0), False),
    }
    expected = {name: ok for name, (*_, ok) in cases.items()} | {"missing": False}
    golden = {name: case[0] for name, case in cases.items()} | {"missing": np.zeros(1)}
    tolerances = {name: case[2] for name, case in cases.items()} | {"missing": kdtr.Tolerance.bits()}
    kdtr.save(tmp_path / "g.kdtr", golden, kind="any", roles=dict.fromkeys(golden, "expected"), tolerances=tolerances)
    kdtr.save(tmp_path / "x.kdtr", {name: case[1] for name, case in cases.items()}, kind="any")
    lines = [line.split("\t") for line in run(tool, "compare", tmp_path / "g.kdtr", tmp_path / "x.kdtr").splitlines()]
    assert {name: ok == "1" for name, ok, *_ in lines} == expected
    python = kdtr.compare(tmp_path / "g.kdtr", {name: case[1] for name, case in cases.items()})
    assert {row.name: row.ok for row in python.rows} == expected


@needs("g++")
def test_products_are_rounded_by_themselves(tmp_path):
    """A fused multiply-add would let this element pass; built for a machine that has one."""
    if "fma" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no fused multiply-add")
    fused = build(SOURCES / "kdtr_tool.cpp", "-O2", "-mfma", "-ffp-contract=fast")
    rtol = g = 1 + 2.0**-30  # rtol * g is 1 + 2^-29 + 2^-60, whose last term float64 drops
    atol = 2.0**-53  # half an ulp of 1: with that last term the sum would be rounded up, without it is not
    x = -(2.0**-30 + 2.0**-52)  # |x - g| is 1 + 2^-29 + 2^-52, one ulp above the sum that is not fused
    kdtr.save(
        tmp_path / "g.kdtr",
        {"x": np.array([g])},
        kind="any",
        roles={"x": "expected"},
        tolerances={"x": kdtr.Tolerance.close(atol, rtol)},
    )
    kdtr.save(tmp_path / "x.kdtr", {"x": np.array([x])}, kind="any")
    python = kdtr.compare(tmp_path / "g.kdtr", {"x": np.array([x])})
    found = run(fused, "compare", tmp_path / "g.kdtr", tmp_path / "x.kdtr").split("\t")
    assert (found[1], python.ok) == ("0", False)
