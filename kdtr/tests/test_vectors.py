"""Both readers reach the verdict of every conformance vector, and the vectors are those of their script."""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
from typing import Any

import pytest

import kdtr
from kdtr.errors import BY_CODE
from kdtr.tests import cpp_build
from kdtr.tests.make_vectors import VECTORS, listing, vectors

LISTED: list[dict[str, Any]] = json.loads((VECTORS / "vectors.json").read_text())


def expected(vector: dict[str, Any], level: int) -> tuple[str, str]:
    """Class, and tensor to be named, of a vector read up to a level."""
    return (vector["expect"], vector.get("tensor", "")) if level >= vector["level"] else ("OK", "")


def python_verdict(path: str, level: int) -> tuple[str, str]:
    try:
        with kdtr.open(path) as container:
            if level >= 2:
                container.verify()
            if level >= 3:
                container.validate()
    except kdtr.KDTRError as error:
        return (error.code if path in str(error) else f"{error.code} without the path"), error.tensor or ""
    return "OK", ""


def test_checked_in_vectors_are_those_of_the_script():
    made = vectors()
    assert (VECTORS / "vectors.json").read_text() == listing(made)
    assert sorted(p.name for p in VECTORS.glob("*.kdtr")) == [f"{v.name}.kdtr" for v in made]
    for vector in LISTED:
        assert hashlib.sha256((VECTORS / vector["file"]).read_bytes()).hexdigest() == vector["sha256"], vector["file"]
    assert len(made) >= 80
    assert sum(len(v.data) for v in made) < 1.5 * 2**20


def test_every_class_of_a_file_has_a_vector():
    outside = {"NOT_FOUND", "TYPE", "IO", "ENCODE"}
    assert {v["expect"] for v in LISTED} == set(BY_CODE) - outside | {"OK"}


@pytest.mark.parametrize("vector", LISTED, ids=lambda v: v["file"])
def test_python_reader(vector):
    path = str(VECTORS / vector["file"])
    for level in range(1, vector["level"] + 1):
        assert python_verdict(path, level) == expected(vector, level), f"level {level}"


MEMORY = 32 << 20  # address space of the C++ reader, its libraries included: nothing large is allocated


@cpp_build.needs("g++")
@pytest.mark.parametrize("level", [1, 2])
def test_cpp_reader(level):
    program = cpp_build.build(cpp_build.SOURCES / "kdtr_check.cpp")
    paths = [str(VECTORS / v["file"]) for v in LISTED]
    result = subprocess.run(
        [program, str(level), *paths],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
    )
    assert (result.returncode, result.stderr) == (0, "")
    verdicts = [line.split("\t") for line in result.stdout.splitlines()]
    assert len(verdicts) == len(LISTED)
    wrong = []
    for vector, path, (code, *rest) in zip(LISTED, paths, verdicts, strict=True):
        tensor, message = rest or ("", path)
        if (code, tensor) != expected(vector, level) or path not in message:
            wrong.append(f"{vector['file']}: {code} {tensor!r} {message!r}, expected {expected(vector, level)}")
    assert not wrong
