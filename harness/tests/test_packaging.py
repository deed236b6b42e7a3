"""What an installation is: what imports without a GPU or a network, what the wheel holds, how tox finds its stack."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from harness.tests.patience import eventually

ROOT = Path(__file__).parents[2]

# Nothing that needs a GPU, a network or an extra may be imported; a socket is an attempt to reach a registry.
BARE = """
import sys, socket
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
def refuse(*args, **kwargs): raise AssertionError("a connection was tried")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import {modules}
"""
OPTIONAL = ("cupy", "torch", "transformers", "h5py", "safetensors", "ml_dtypes", "tabulate", "tokenizers", "pandas")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "modules", ["kdtr, kdtr.__main__", "reference.loop, reference.checkpoint", "harness, harness.compare"]
)
def test_packages_import_bare(modules):
    """Public issues: cupy/cupy#1790, #2549: an import that needs a driver takes the CPU part down with it."""
    python(BARE.format(blocked=OPTIONAL, modules=modules))


def test_importing_kdtr_costs_little_beside_numpy(tmp_path, monkeypatch):
    """Compiled, as installed: less than 30 ms of processor time, or on a slower machine less than 0.3 of NumPy's."""
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    code = (
        "import sys, time; now = time.process_time; a = now(); import numpy; b = now(); import kdtr; c = now(); "
        "print(b - a, c - b, 'ml_dtypes' in sys.modules)"
    )
    told: list[list[str]] = []

    def holds() -> bool:
        told.append(python(code).split())
        assert told[-1][2] == "False"
        numpy, ours = (min(float(row[column]) for row in told) for column in (0, 1))
        return len(told) >= 5 and ours < max(0.030, 0.3 * numpy)

    eventually(holds)


def test_the_wheel_holds_kdtr_alone():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"] == ["kdtr"]
    named = {need.partition(">")[0] for need in project["project"]["dependencies"]}
    assert named == {"numpy", "xxhash"}
    assert not (ROOT / "datasets" / "__init__.py").exists(), "it would shadow the well-known library of that name"


@pytest.mark.parametrize(
    ("present", "switch", "used"),
    [(True, None, True), (True, "1", True), (True, "0", False), (False, None, False)],
)
def test_tox_uses_a_preinstalled_stack_and_installs_nothing_then(monkeypatch, present, switch, used):
    """Public issue: pypa/pip#12270: an isolated environment wants the index although everything is there."""
    monkeypatch.setattr(os, "environ", {} if switch is None else {"KDTREE_PREINSTALLED": switch})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if present else None)
    runpy.run_path(str(ROOT / "toxfile.py"))
    assert ("KDTREE_GPU_DEPS" in os.environ) == used
    assert os.environ.get("KDTREE_PYTHON") == (sys.executable if used else None)


def test_gpu_environments_of_tox_take_what_toxfile_found():
    text = (ROOT / "tox.ini").read_text()
    assert "deps = {env:KDTREE_GPU_DEPS:.[test,gpu]}" in text
    assert "{env:KDTREE_PYTHON:python} -m pytest -m gpu --require-gpu" in text


def test_no_property_fails_because_the_machine_is_slow():
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
