"""Compiles the C++ programs of the tests on the spot, once for equal sources and flags."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

INCLUDE = Path(__file__).parents[1] / "include"
SOURCES = Path(__file__).parent / "cpp"
BUILD = Path(__file__).parents[2] / "build" / "kdtr-cpp"

WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Wpedantic", "-Werror")


def missing(*compilers: str) -> str | None:
    """Why these compilers cannot be used, or None."""
    absent = [c for c in compilers if shutil.which(c) is None]
    return f"no {' and no '.join(absent)} on this machine" if absent else None


def needs(*tools: str) -> pytest.MarkDecorator:
    """Skips a test, with the reason, where one of these programs is absent."""
    reason = missing(*tools)
    return pytest.mark.skipif(reason is not None, reason=str(reason))


def build(source: Path, *flags: str, compiler: str = "g++", include: Path = INCLUDE) -> Path:
    """The compiled program. Raises RuntimeError with the compiler's output when it warns or fails."""
    command = [compiler, "-std=c++17", *(flags or ("-O2", *WARNINGS)), "-I", str(include), str(source)]
    digest = hashlib.sha256(" ".join(command).encode())
    for file in sorted([*(include / "kdtr").iterdir(), *SOURCES.iterdir(), source]):
        digest.update(file.read_bytes())
    program = BUILD / f"{source.stem}-{digest.hexdigest()[:16]}"
    if program.exists():
        return program
    BUILD.mkdir(parents=True, exist_ok=True)
    made = program.with_suffix(f".{os.getpid()}")
    result = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
    if result.returncode != 0 or result.stderr:
        raise RuntimeError(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    made.replace(program)
    return program


def run(program: Path, *args: object) -> str:
    """Output of a program. Fails the test with all that it printed if it does not exit with 0."""
    result = subprocess.run([program, *map(str, args)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
