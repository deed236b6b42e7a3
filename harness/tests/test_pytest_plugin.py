"""The rules of the plugin in test runs of their own: GPU marks, benchmarks under xdist, nothing measured, rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import records
from harness.environment import CHECKOUT, gpu_missing

TESTS = """
import pytest
from harness.parity import check_tokens, combine

def test_plain(): assert True

@pytest.mark.gpu
def test_on_a_gpu(): assert True

@pytest.mark.gpu
def test_bench_on_a_gpu(benchmark): benchmark(lambda: 1)

@pytest.mark.nvcc
def test_with_nvcc(): pytest.skip("no nvcc here")

def test_bench_sum(benchmark, bench_row):
    found = benchmark.pedantic(sum, args=([1, 2],), rounds=3)
    bench_row(case="bench/sum", arm="cpu", case_hash="0" * 64, parity=combine("3", [check_tokens("s", [3], [found])]))
"""
XDIST = """
def pytest_addoption(parser):
    parser.addoption("--numprocesses", type=int, default=None)
    parser.addoption("--dist", default="no")
    parser.addoption("--tx", default=None)
"""
NO_GPU = gpu_missing() is not None


@pytest.fixture
def run(tmp_path: Path):
    """Runs pytest on TESTS in a folder of its own; returns the exit status and the output."""
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "fake_xdist.py").write_text(XDIST)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["harness.pytest_plugin"]\n')
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    gpu: x\n    nvcc: x\n    slow: x\naddopts = --strict-markers\n"
    )

    def call(*arguments: object, **environment: str) -> tuple[int, str]:
        paths = os.pathsep.join([str(CHECKOUT), str(tmp_path)])
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths, **environment},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    return call


@pytest.mark.skipif(not NO_GPU, reason="a GPU is here")
def test_without_a_gpu_its_tests_skip_with_the_reason_or_fail_where_one_is_required(run):
    status, said = run("--benchmark-skip")
    assert status == 0
    assert str(gpu_missing()) in said
    status, said = run("--benchmark-skip", "-m", "gpu", "--require-gpu")
    assert status == 1
    assert "a GPU test must run here" in said
    assert "1 skipped, 3 deselected, 1 error" in said  # the benchmark was not asked for


def test_where_nvcc_is_required_its_tests_may_not_skip(run):
    status, said = run("-m", "nvcc")
    assert (status, "1 skipped" in said) == (0, True)
    status, said = run("-m", "nvcc", "--require-nvcc")
    assert status == 1
    assert "a test of nvcc must run here, and this one was skipped" in said
    assert "no nvcc here" in said


def test_rows_of_benchmarks(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    status, said = run("--benchmark-only", "--benchmark-rows", path, "--benchmark-json", tmp_path / "b.json")
    assert status == 0
    (row,) = records.read(path)
    assert (row.block, row.case, row.arm, row.status) == ("bench", "bench/sum", "cpu", "OK")
    assert row.timing is not None
    assert len(row.timing.samples_s) == 3
    assert row.parity is not None
    assert row.parity.passed
    facts = json.loads((tmp_path / "b.json").read_text())["machine_info"]["harness"]
    assert facts["hardware_key"] == row.environment.hardware_key
    assert ("gpu" in facts, "gpu_missing" in facts) == (True, True)
    if NO_GPU:
        assert "1 benchmarks measured, 1 GPU benchmarks not run" in said
        assert f"1 not run: {gpu_missing()}" in said


def test_nothing_measured_is_no_success(run):
    status, said = run("--benchmark-only", "-k", "plain")
    assert (status, "0 benchmarks measured" in said) == (5, True)
    assert run("--benchmark-skip", "-k", "plain")[0] == 0
    assert run("--benchmark-only", "--collect-only", "-q")[0] == 0


@pytest.mark.parametrize("arguments", [("--numprocesses", 1), ("--numprocesses", 4)])
def test_benchmarks_are_refused_under_xdist(run, arguments):
    status, said = run("-p", "fake_xdist", "--benchmark-only", *arguments)
    assert status == 4
    assert f"xdist is to use {arguments[1]} workers" in said
    assert "Traceback" not in said
    assert run("-p", "fake_xdist", "--benchmark-only", "-k", "sum", "--numprocesses", 0)[0] == 0
    assert run("-p", "fake_xdist", "--benchmark-only", PYTEST_ADDOPTS="--numprocesses 2")[0] == 4
    assert run("-p", "fake_xdist", "--benchmark-skip", "-k", "plain", *arguments)[0] == 0
