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
from harness.tests.processes import plain_environment

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
NO_GPU = gpu_missing() is not None


DEVICE_TESTS = """
import pytest
from fake_device import launch_what_fails

@pytest.fixture
def device():
    yield
    print("released")

@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.gpu
def test_on_the_device(number, device):
    if number == 3:
        launch_what_fails(assertion=%r)
"""
# A kernel's error shows when something waits for the device, and from then on in every call.
FAKE_DEVICE = """
from harness import gpu_fault, pytest_plugin

class Driver:
    error = 0
    def cuCtxSynchronize(self): return self.error
    def cuGetErrorName(self, error, name): name._obj.value = b"CUDA_ERROR_ILLEGAL_ADDRESS"; return 0

def launch_what_fails(assertion):
    Driver.error = 700
    assert not assertion, "the result is wrong"

pytest_plugin._gpu_missing = lambda: None
pytest_plugin.device_fault = lambda: gpu_fault.device_fault(Driver())
"""
# The same with a GPU: CuPy compiles a kernel that writes where nothing is.
DEVICE = """
def launch_what_fails(assertion):
    import cupy
    cupy.RawKernel('extern "C" __global__ void f(int* x) { *x = 1; }', "f")((1,), (1,), (4096,))
    assert not assertion, "the result is wrong"
"""


@pytest.fixture
def run(tmp_path: Path):
    """Runs pytest on TESTS in a folder of its own; returns the exit status and the output."""
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["harness.pytest_plugin"]\n')
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    gpu: x\n    nvcc: x\n    slow: x\naddopts = --strict-markers\n"
    )

    def call(*arguments: object, **environment: str) -> tuple[int, str]:
        paths = os.pathsep.join([str(CHECKOUT), str(tmp_path)])
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *map(str, arguments)],
            cwd=tmp_path,
            env={**plain_environment(), "PYTHONPATH": paths, **environment},
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
    status, said = run("--benchmark-only", *arguments)
    assert status == 4
    assert f"xdist is to use {arguments[1]} workers" in said
    assert "Traceback" not in said
    assert run("--benchmark-only", "-k", "sum", "--numprocesses", 0)[0] == 0
    assert run("--benchmark-only", PYTEST_ADDOPTS="--numprocesses 2")[0] == 4
    assert run("--benchmark-skip", "-k", "plain", *arguments)[0] == 0


@pytest.mark.parametrize("assertion", [False, True])
@pytest.mark.parametrize("device", [FAKE_DEVICE, pytest.param(DEVICE, marks=pytest.mark.gpu)], ids=["fake", "gpu"])
def test_the_test_that_breaks_the_device_is_named_and_the_run_ends_there(run, tmp_path, device, assertion):
    """Case C40: also when that test fails anyway. Public issues: NVIDIA/cuml#7906, microsoft/skala#124."""
    (tmp_path / "fake_device.py").write_text(device)
    (tmp_path / "test_it.py").write_text(DEVICE_TESTS % assertion)
    status, said = run("-v", "-s", "--tb=short")
    assert status == 2
    named = "test_it.py::test_on_the_device[3] left the device with CUDA_ERROR_ILLEGAL_ADDRESS"
    assert said.count(named) == 1
    assert "ERROR at teardown of test_on_the_device[3]" in said
    assert "this test left the device with CUDA_ERROR_ILLEGAL_ADDRESS; KDTREE_LAUNCH_BLOCKING=1 finds" in said
    assert ("the result is wrong" in said) is assertion
    assert f"{'1 failed, 2' if assertion else '3'} passed, 1 error" in said
    assert said.count("released") == 3
    for later in (4, 5, 6):
        assert f"test_on_the_device[{later}]" not in said
