"""The C++ headers: compiled by every compiler at hand without a warning, and in agreement with the Python library."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

import kdtr
from kdtr import dtypes
from kdtr.tests import cpp_build
from kdtr.tests.cpp_build import INCLUDE, SOURCES, WARNINGS, build
from kdtr.tests.make_vectors import VECTORS, vectors

HEADERS = sorted((INCLUDE / "kdtr").glob("*.hpp"))
PROGRAMS = sorted(SOURCES.glob("kdtr_*.cpp"))


def needs(*tools: str):
    reason = cpp_build.missing(*tools)
    return pytest.mark.skipif(reason is not None, reason=str(reason))


def run(program: Path, *args: object) -> str:
    result = subprocess.run([program, *map(str, args)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def tool() -> Path:
    return build(SOURCES / "kdtr_tool.cpp")


@pytest.fixture(scope="module")
def every_dtype(tmp_path_factory) -> Path:
    """All codes of the types of at most 16 bits, and special and random values of the wider ones."""
    rng = np.random.default_rng(20)
    arrays: dict[str, kdtr.Raw] = {}
    for dtype in dtypes.DTYPES:
        if dtype.name == "bool":
            payload = np.array([0, 1, 1], np.uint8)
        elif dtype.bits < 8:
            codes = np.arange(1 << dtype.bits, dtype=np.uint8)
            stream = np.unpackbits(codes, bitorder="little").reshape(-1, 8)[:, : dtype.bits].reshape(-1)
            payload = np.packbits(stream, bitorder="little")
        elif dtype.bits <= 16:
            payload = np.arange(1 << dtype.bits, dtype=f"<u{dtype.bits // 8}").view(np.uint8)
        else:
            payload = rng.integers(0, 256, 64 * dtype.bits // 8, dtype=np.uint8)
            width = dtype.bits // 16 if dtype.name[0] == "c" else dtype.bits // 8
            special = [0, 1, -1, np.inf, -np.inf, np.nan, -0.0, 5e-324, 1e-45] if dtype.is_float else [0, 1]
            if dtype.is_float:
                payload[: width * 9] = np.array(special, f"<f{width}").view(np.uint8)
        arrays[dtype.name] = kdtr.Raw(payload, dtype.name, (payload.size * 8 // dtype.bits,))
    path: Path = tmp_path_factory.mktemp("cpp") / "every_dtype.kdtr"
    kdtr.save(path, arrays, kind="any", meta=kdtr.provenance())
    return path


# --- compilers --------------------------------------------------------------------------------------------------------


def test_headers_are_short():
    lengths = {header.name: len(header.read_text().splitlines()) for header in HEADERS}
    assert set(lengths) >= {"kdtr.hpp", "format.hpp", "xxh3.hpp", "compare.hpp", "writer.hpp"}
    assert max(lengths.values()) <= 300, lengths


def test_sources_are_formatted():
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if (formatter := shutil.which("clang-format", path=folders)) is None:
        pytest.skip("no clang-format on this machine")
    subprocess.run([formatter, "--dry-run", "--Werror", *HEADERS, *sorted(SOURCES.iterdir())], check=True)


@pytest.mark.parametrize(("compiler", "standard"), [("g++", "c++17"), ("g++", "c++20"), ("clang++", "c++17")])
@pytest.mark.parametrize("source", PROGRAMS, ids=lambda p: p.name)
def test_no_warning(source, compiler, standard, tmp_path):
    if reason := cpp_build.missing(compiler):
        pytest.skip(reason)
    command = [compiler, f"-std={standard}", "-fsyntax-only", *WARNINGS, "-I", INCLUDE, source]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@needs("nvcc")
def test_no_warning_from_nvcc(tmp_path):
    unit = tmp_path / "unit.cu"
    device_type = (
        "\n#include <cuda_bf16.h>\n"
        "template <> inline constexpr kdtr::DType kdtr::dtype_of<__nv_bfloat16> = kdtr::DType::bf16;\n"
        "const __nv_bfloat16* data(const kdtr::Tensor& t);\n"
        "const __nv_bfloat16* data(const kdtr::Tensor& t) { return t.as<__nv_bfloat16>().data; }\n"
    )
    unit.write_text((SOURCES / "kdtr_api.cpp").read_text() + device_type)  # includes all headers
    warnings = [flag for name in WARNINGS if name != "-Wpedantic" for flag in ("-Xcompiler", name)]  # nvcc's own output
    command = [
        "nvcc",
        "-std=c++17",
        "-Werror",
        "all-warnings",
        *warnings,
        "-I",
        INCLUDE,
        "-c",
        unit,
        "-o",
        tmp_path / "o",
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@needs("g++")
def test_headers_stand_alone_and_link_twice(tmp_path):
    for header in HEADERS:
        unit = tmp_path / f"{header.stem}.cpp"
        unit.write_text(f"#include <kdtr/{header.name}>\n#include <kdtr/{header.name}>\n")
        subprocess.run(["g++", "-std=c++17", "-fsyntax-only", *WARNINGS, "-I", INCLUDE, unit], check=True)
    both = "#include <kdtr/compare.hpp>\n#include <kdtr/writer.hpp>\n"
    (tmp_path / "main.cpp").write_text(both + "int other();\nint main() { return other(); }\n")
    (tmp_path / "other.cpp").write_text(both + "int other();\nint other() { return 0; }\n")
    units = [tmp_path / "main.cpp", tmp_path / "other.cpp"]
    subprocess.run(["g++", "-std=c++17", *WARNINGS, "-I", INCLUDE, *units, "-o", tmp_path / "program"], check=True)


@needs("g++")
def test_big_endian_hosts_are_refused(tmp_path):
    unit = tmp_path / "unit.cpp"
    unit.write_text("#include <kdtr/kdtr.hpp>\n")
    flags = ["-U__BYTE_ORDER__", "-D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__"]
    command = ["g++", "-std=c++17", "-fsyntax-only", *flags, "-I", INCLUDE, unit]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert "little-endian" in result.stderr


@needs("cmake", "g++")
def test_cmake_package(tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(user CXX)\n"
        f"find_package(kdtr {kdtr.__version__} CONFIG REQUIRED)\n"
        "add_executable(user user.cpp)\ntarget_link_libraries(user PRIVATE kdtr::kdtr)\n"
    )
    (tmp_path / "user.cpp").write_text(
        "#include <kdtr/kdtr.hpp>\n#include <cstdio>\n"
        'int main(int, char** argv) { std::printf("%d", int(kdtr::File(argv[1]).size())); }\n'
    )
    build_dir = tmp_path / "build"
    subprocess.run(
        ["cmake", "-S", tmp_path, "-B", build_dir, f"-Dkdtr_DIR={kdtr.cmake_dir()}"], check=True, capture_output=True
    )
    subprocess.run(["cmake", "--build", build_dir], check=True, capture_output=True)
    assert run(build_dir / "user", VECTORS / "ok_pair.kdtr") == "2"


def test_versions_agree():
    assert f'WRITER_VERSION = "{kdtr.__version__}"' in (INCLUDE / "kdtr" / "writer.hpp").read_text()
    config = kdtr.cmake_dir() / "kdtr-config-version.cmake"
    assert f"set(PACKAGE_VERSION {kdtr.__version__})" in config.read_text()
    assert kdtr.include_dir() == INCLUDE


# --- behaviour --------------------------------------------------------------------------------------------------------


@needs("g++")
def test_public_api(tmp_path):
    assert run(build(SOURCES / "kdtr_api.cpp", "-O0"), tmp_path) == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "bad.kdtr",
        "fifo",
        "held.kdtr",
        "refused.kdtr",
        "sample.kdtr",
    ]  # no temporary is left behind
    with kdtr.open(tmp_path / "sample.kdtr") as sample:
        sample.validate()
        assert sample.meta["command"] == 'kdtr_api "quoted" \\ \t\x01 é'
        assert sample["matrix"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert sample.info["matrix"].tolerance == kdtr.Tolerance.close(1e-6, 1e-5, 0.25)
        assert sample["packed"].astype(int).tolist() == [1, 2, 3]


@needs("g++")
def test_names_of_classes_and_types_are_those_of_python(tmp_path):
    source = tmp_path / "names.cpp"
    source.write_text(
        "#include <kdtr/kdtr.hpp>\n#include <cstdio>\nint main() {\n"
        'for (const char* name : kdtr::ERROR_NAMES) std::printf("%s ", name);\nstd::puts("");\n'
        "for (int i = 1; i < kdtr::DTYPES; ++i)\n"
        '  std::printf("%s:%d ", kdtr::DTYPE_NAMES[i], int(kdtr::DTYPE_BITS[i]));\nstd::puts("");\n'
        'for (const char* name : kdtr::COMPARE_NAMES) std::printf("%s ", name);\n'
        'std::printf("%d", int(kdtr::Role::aux));\n}\n'
    )
    errors, types, modes = run(build(source, "-O0")).splitlines()
    assert set(errors.split()) == {cls.code for cls in kdtr.KDTRError.__subclasses__()}
    assert types.split() == [f"{d.name}:{d.bits}" for d in dtypes.DTYPES]
    assert modes == " ".join([*kdtr.format.MODES, str(kdtr.format.ROLES.index("aux"))])


@needs("g++")
def test_checksum(tmp_path):
    """XXH3 of every length of each branch, at every alignment of the first bytes."""
    source = tmp_path / "sum.cpp"
    source.write_text(
        "#include <kdtr/xxh3.hpp>\n#include <cstdio>\nint main() {\n  static unsigned char data[1 << 15];\n"
        "  for (unsigned long i = 0; i < sizeof data; ++i) data[i] = (unsigned char)(i * i * 31 + i / 251);\n"
        "  for (unsigned long n = 0; n < 3000; ++n)\n"
        '    std::printf("%llu\\n", (unsigned long long)kdtr::xxh3_64(data + n % 9, n));\n'
        "  for (unsigned long n = 1024; n <= sizeof data - 9; n += 997)\n"
        '    std::printf("%llu\\n", (unsigned long long)kdtr::xxh3_64(data + n % 9, n));\n}\n'
    )
    data = bytes((i * i * 31 + i // 251) % 256 for i in range(1 << 15))
    lengths = [*range(3000), *range(1024, (1 << 15) - 8, 997)]
    expected = [xxhash.xxh3_64_intdigest(data[n % 9 : n % 9 + n]) for n in lengths]
    assert [int(line) for line in run(build(source, "-O2")).split()] == expected


@needs("g++")
def test_values(tool, every_dtype):
    """C++ decodes every code of the small types, and odd values of the large ones, to the number that NumPy has."""
    lines = {line.split()[0]: line.split()[1:] for line in run(tool, "values", every_dtype).splitlines()}
    with kdtr.open(every_dtype) as container:
        assert set(lines) == set(container.names)
        for name in container.names:
            array = container[name]
            if array.dtype.kind == "c":
                array = array.view(array.real.dtype)
            with np.errstate(invalid="ignore"):  # signalling NaN
                expected = array.astype(np.float64)
            found = np.array([float.fromhex(text) for text in lines[name]])
            np.testing.assert_array_equal(found, expected, err_msg=name)
            sign = ~np.isnan(expected)
            np.testing.assert_array_equal(np.signbit(found[sign]), np.signbit(expected[sign]), err_msg=name)


@needs("g++")
def test_round_trip_through_cpp(tool, every_dtype, tmp_path):
    """Python writes, C++ reads and writes anew, the bytes are equal and Python reads them."""
    good = [VECTORS / f"{v.name}.kdtr" for v in vectors() if v.expect == "OK"]
    minor = "ok_minor_65535.kdtr"  # the one field that a writer does not take over
    for path in [every_dtype, *(p for p in good if p.name != minor)]:
        copy = tmp_path / path.name
        run(tool, "copy", path, copy)
        assert copy.read_bytes() == path.read_bytes(), path.name
    with kdtr.open(tmp_path / every_dtype.name) as container:
        container.validate()


@needs("g++")
def test_every_flip_and_every_cut_is_noticed(tool):
    size = (VECTORS / "ok_pair.kdtr").stat().st_size
    counts = f"{8 * size} flips, 0 unnoticed; {size} cuts, 0 not TRUNCATED\n"
    assert run(tool, "damage", VECTORS / "ok_pair.kdtr") == counts


@needs("g++")
def test_python_writes_the_vectors_of_cpp(tmp_path):
    """The content of each good vector, saved by Python, is that vector: the encoders agree."""
    for vector in (v for v in vectors() if (v.expect, v.level) == ("OK", 3) and v.name != "ok_minor_65535"):
        with kdtr.open(VECTORS / f"{vector.name}.kdtr") as c:
            info = {name: c.info[name] for name in c.names}
            kdtr.save(
                tmp_path / "copy.kdtr",
                {name: c.raw(name) for name in reversed(c.names)},
                kind=c.kind,
                kind_version=c.kind_version,
                meta=c.meta_bytes,
                roles={name: i.role for name, i in info.items()},
                tolerances={name: i.tolerance for name, i in info.items() if i.tolerance},
            )
        assert (tmp_path / "copy.kdtr").read_bytes() == vector.data, vector.name


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


# --- speed ------------------------------------------------------------------------------------------------------------


@pytest.mark.bench
@needs("g++")
def test_bench_open_of_10_000_tensors(tool, tmp_path, benchmark, capsys):
    """Goal: C++ opens 10,000 tensors with full validation in 2.5 ms, warm; printed beside Python's time."""
    path = tmp_path / "many.kdtr"
    kdtr.save(path, {f"layer/{i:05}/some.weight": np.full(8, i, np.float32) for i in range(10_000)}, kind="any")
    rows = [line.split() for line in run(tool, "time", path, 25).splitlines()]

    def opened():
        with kdtr.open(path):
            pass

    benchmark.pedantic(opened, rounds=25, warmup_rounds=2)
    python = benchmark.stats.stats.median * 1e3
    with capsys.disabled():
        print()
        for mode in ("map", "copy"):
            level_1 = [float(row[1]) for row in rows[2:] if row[0] == mode]
            level_2 = [float(row[2]) for row in rows[2:] if row[0] == mode]
            median = statistics.median(level_1)
            print(
                f"C++ {mode}: open {median:.2f} ms (minimum {min(level_1):.2f}), {python / median:.1f}x faster than "
                f"Python's {python:.2f} ms; verify {statistics.median(level_2):.2f} ms"
            )
            if mode == "map":
                assert min(level_1) <= 2.5
