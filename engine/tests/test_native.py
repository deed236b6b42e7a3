"""Every C++ test of kernels, executed on the CPU: in the default order of warps and in three adversarial ones, and with
tiny grids under ThreadSanitizer (which sees a missing barrier whatever the order) and AddressSanitizer."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess

import pytest

from engine import build, sources
from engine.build import Sanitizer
from engine.sources import Source

TESTS = sources.of_stage(sources.read(), "ktest")
SEEDS = (None, 1, 2, 3)
TIMEOUT_S = 300
# A block is a thread's stack that the leak checker cannot follow.
QUIET = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}

pytestmark = pytest.mark.skipif(shutil.which(os.environ.get("CXX") or "g++") is None, reason="no C++ compiler")
each_test = pytest.mark.parametrize("test", TESTS, ids=lambda source: source.path.stem)


def run(test: Source, settings: dict[str, str], sanitizer: Sanitizer = "none") -> None:
    """Fails with all that the program printed unless it exits with 0: no case may be skipped on the CPU."""
    program = str(build.plan_host_program(test, sanitizer).run().path)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KDTREE_")}
    command = [program]
    for _ in range(2):
        done = subprocess.run(command, env=kept | QUIET | settings, capture_output=True, text=True, timeout=TIMEOUT_S)
        if "unexpected memory mapping" not in done.stderr:
            break
        command = ["setarch", platform.machine(), "-R", program]  # ThreadSanitizer asks for fixed addresses here
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-12000:]}"
    assert " cases, 0 failed" in done.stdout


@pytest.mark.parametrize("seed", SEEDS)
@each_test
def test_order_of_warps(test: Source, seed: int | None) -> None:
    run(test, {} if seed is None else {"KDTREE_HOST_SEED": str(seed)})


@each_test
def test_no_race(test: Source) -> None:
    run(test, {"KDTREE_TINY": "1"}, "thread")


@each_test
def test_no_access_outside(test: Source) -> None:
    run(test, {"KDTREE_TINY": "1"}, "address")
