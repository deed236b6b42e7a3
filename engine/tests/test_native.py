"""Every C++ test of kernels, executed on the CPU: in the default order of warps; with tiny grids in three adversarial
orders; and (slow: each compiles all kernels once more) under AddressSanitizer and under ThreadSanitizer, which sees a
missing barrier whatever the order.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine import build, sources
from engine.build import Sanitizer
from engine.sources import Source

TESTS = sources.of_stage(sources.read(), "ktest")
# A whole model launches thousands of blocks, minutes under the race detector: its kernels have tests of their own.
RACED = tuple(test for test in TESTS if not test.path.stem.startswith("test_model"))
PROGRAMS = sources.of_stage(sources.read(), "ktest", "etest", "demo")
TINY = {"KDTREE_TINY": "1"}
ORDERS = ({}, *({"KDTREE_HOST_SEED": str(seed)} | TINY for seed in (1, 2, 3)))
TIMEOUT_S = 300
# What only a suspended thread of a block points to looks lost to the leak checker.
QUIET = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}

pytestmark = pytest.mark.skipif(shutil.which(os.environ.get("CXX") or "g++") is None, reason="no C++ compiler")
each_test = pytest.mark.parametrize("test", TESTS, ids=lambda source: source.path.stem)


def run(test: Source, settings: dict[str, str], sanitizer: Sanitizer = "none") -> None:
    """Fails with all that the program printed unless it exits with 0: no case may be skipped on the CPU."""
    check_passed([str(build.plan_host_program(test, sanitizer).run().path)], settings)


def check_passed(command: list[str], settings: dict[str, str]) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KDTREE_")}
    done = subprocess.run(command, env=kept | QUIET | settings, capture_output=True, text=True, timeout=TIMEOUT_S)
    if "unexpected memory mapping" in done.stderr and command[0] != "setarch":
        # ThreadSanitizer wants what it maps at fixed addresses.
        check_passed(["setarch", platform.machine(), "-R", *command], settings)
        return
    again = " ".join([*(f"{name}={value}" for name, value in settings.items()), *command])
    assert done.returncode == 0, (
        f"{again}\nexit status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-12000:]}"
    )


@each_test
def test_order_of_warps(test: Source) -> None:
    program = [str(build.plan_host_program(test).run().path)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(lambda order: check_passed(program, order), ORDERS):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("test", RACED, ids=lambda source: source.path.stem)
def test_no_race(test: Source) -> None:
    run(test, TINY, "thread")


@pytest.mark.slow
@each_test
def test_no_access_outside(test: Source) -> None:
    run(test, TINY, "address")


@pytest.mark.parametrize("demo", sources.of_stage(sources.read(), "etest", "demo"), ids=lambda source: source.path.stem)
def test_programs_of_the_c_abi(demo: Source) -> None:
    run(demo, {})


@pytest.mark.gpu
@pytest.mark.parametrize("test", PROGRAMS, ids=lambda source: source.path.stem)
def test_on_the_device(test: Source) -> None:
    check_passed([str(build.plan_cuda_program(test).run().path)], {})


@pytest.mark.nvcc
@pytest.mark.slow
@pytest.mark.parametrize("test", PROGRAMS, ids=lambda source: source.path.stem)
def test_with_the_cuda_library_on_any_machine(test: Source) -> None:
    """Compiles, links and starts: what needs a device says so and exits with 77, what needs none passes."""
    program = build.plan_cuda_program(test).run().path
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode in (0, 77), done.stdout + done.stderr
    assert test.stage != "etest" or done.returncode == 0, done.stdout
    assert done.returncode == 0 or done.stdout.startswith("SKIP: "), done.stdout
