"""The C++ headers are short, formatted, and compile without a warning by every compiler at hand, alone and by CMake."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kdtr
from kdtr.tests import cpp_build
from kdtr.tests.cpp_build import INCLUDE, SOURCES, WARNINGS, needs, run
from kdtr.tests.make_vectors import VECTORS

HEADERS = sorted((INCLUDE / "kdtr").glob("*.hpp"))
PROGRAMS = sorted(SOURCES.glob("kdtr_*.cpp"))


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


@pytest.mark.nvcc
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
