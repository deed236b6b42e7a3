"""A device with an error: who is told of it. That the test is named which made it, is in test_pytest_plugin.py."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from engine.tests.backends import open_ops
from harness.environment import CHECKOUT
from harness.gpu_fault import device_fault


@pytest.mark.parametrize(("error", "fault"), [(0, None), (3, None), (201, None), (716, "CUDA error 716")])
def test_a_device_that_nothing_ran_on_has_no_fault(error, fault):
    driver = SimpleNamespace(cuCtxSynchronize=lambda: error, cuGetErrorName=lambda *_: 1)  # which knows no name
    assert device_fault(driver) == fault


FAULTY = """
from engine import abi, build
library = abi.Library(build.library("cuda"))
nowhere = 1 << 20
fields = dict.fromkeys(("node_count", "tokens", "parents", "choices", "accepted", "path", "bonus", "status"), nowhere)
args = abi.TreeAcceptArgs(requests=1, budget=1, depth_limit=1, **fields)
for _ in range(2):
    try:
        library.call("tree_accept", args)
        print("nothing found")
    except abi.EngineError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.gpu
def test_an_illegal_access_is_named_by_the_call_that_made_it():
    """Case C40: without the switch, the call that finds it may be any later one."""
    open_ops("cuda")
    done = subprocess.run(
        [sys.executable, "-c", FAULTY],
        capture_output=True,
        text=True,
        check=True,
        cwd=CHECKOUT,
        env={**os.environ, "KDTREE_LAUNCH_BLOCKING": "1"},
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("CudaError tree_accept_kernel: cudaErrorIllegalAddress: ")
    assert second.startswith("CudaError ")  # nothing works any more in that process
