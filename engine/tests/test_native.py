"""Every C++ test of kernels, executed on the CPU, which is slow: in the default order of warps; with tiny grids in
three adversarial orders; and under AddressSanitizer and under ThreadSanitizer (each compiles all kernels once more),
which sees a missing barrier whatever the order.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from engine import build, sources
from engine.build import Plan
from engine.sources import Source

TESTS = sources.of_stage(sources.read(), "ktest")
# A whole model launches thousands of blocks, minutes under the race detector: its kernels have tests of their own.
RACED = tuple(test for test in TESTS if not test.path.stem.startswith("test_model"))
PROGRAMS = sources.of_stage(sources.read(), "ktest", "bench", "etest", "demo")
TINY = {"KDTREE_TINY": "1"}
ORDERS = ({}, *({"KDTREE_HOST_SEED": str(seed)} | TINY for seed in (1, 2, 3)))
TIMEOUT_S = 300
# What only a suspended thread of a block points to looks lost to the leak checker.
QUIET = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}

pytestmark = [
    pytest.mark.skipif(shutil.which(os.environ.get("CXX") or "g++") is None, reason="no C++ compiler"),
    pytest.mark.timeout(1800),  # with the first of its cases a function compiles for all
]
PLANS: dict[str, Callable[[Source], Plan]] = {  # how each test function builds its programs
    "test_order_of_warps": build.plan_host_program,
    "test_other_programs": build.plan_host_program,
    "test_no_race": partial(build.plan_host_program, sanitizer="thread"),
    "test_no_access_outside": partial(build.plan_host_program, sanitizer="address"),
    "test_on_the_device": build.plan_cuda_program,
    "test_with_the_cuda_library_on_any_machine": build.plan_cuda_program,
}


@pytest.fixture(scope="module")
def compiled() -> set[str]:
    """Names of the test functions whose objects are made."""
    return set()


@pytest.fixture
def program(request: pytest.FixtureRequest, compiled: set[str], test: Source) -> str:
    """The program of this test. With the first of a test function the objects of all its chosen cases are made, side by
    side: one that does not compile is then told by its own case."""
    plan = PLANS[request.function.__name__]
    if request.function.__name__ not in compiled:
        compiled.add(request.function.__name__)
        cases = (item for item in request.session.items if isinstance(item, pytest.Function))
        chosen: list[Any] = [item.callspec.params["test"] for item in cases if item.function is request.function]
        with contextlib.suppress(build.BuildError):
            build.compile_objects([plan(each) for each in chosen])
    return str(plan(test).run().path)


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


def for_each(tests: tuple[Source, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("test", tests, ids=lambda source: source.path.stem)


@pytest.mark.slow
@for_each(TESTS)
def test_order_of_warps(program: str) -> None:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(lambda order: check_passed([program], order), ORDERS):
            pass


@pytest.mark.slow
@for_each(RACED)
def test_no_race(program: str) -> None:
    check_passed([program], TINY)


@pytest.mark.slow
@for_each(TESTS)
def test_no_access_outside(program: str) -> None:
    check_passed([program], TINY)


@for_each(sources.of_stage(sources.read(), "bench", "etest", "demo"))
def test_other_programs(program: str) -> None:
    check_passed([program], TINY)


@pytest.mark.gpu
@for_each(PROGRAMS)
def test_on_the_device(program: str, test: Source) -> None:
    watched = os.environ.get("KDTREE_TINY") == "1"  # by a sanitizer
    check_passed([program], TINY if watched or test.stage == "bench" else {})


@pytest.mark.nvcc
@pytest.mark.slow
@for_each(PROGRAMS)
def test_with_the_cuda_library_on_any_machine(program: str, test: Source) -> None:
    """Compiles, links and starts: what needs a device says so and exits with 77, what needs none passes."""
    done = subprocess.run([program], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode in (0, 77), done.stdout + done.stderr
    assert test.stage != "etest" or done.returncode == 0, done.stdout
    assert done.returncode == 0 or done.stdout.startswith("SKIP: "), done.stdout
