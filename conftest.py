"""Rules for every test: slow ones are asked for; GPU ones skip with the reason or, where a GPU is required, fail."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Generator

import pytest


@functools.cache
def gpu_missing() -> str | None:
    """Why no CUDA device can be used here, or None. Asks the driver itself, so that no GPU package is needed to ask."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver (libcuda.so.1 cannot be loaded)"
    if (error := driver.cuInit(0)) != 0:
        return f"the CUDA driver does not start (cuInit: error {error})"
    count = ctypes.c_int()
    if (error := driver.cuDeviceGetCount(ctypes.byref(count))) != 0:
        return f"the CUDA driver cannot count devices (error {error})"
    return None if count.value > 0 else "the CUDA driver shows no device"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--require-gpu", action="store_true", help="a test marked gpu that is skipped counts as failed")
    parser.addoption(
        "--require-nvcc", action="store_true", help="a test that compiles with nvcc fails where there is none"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--run-slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --run-slow"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := gpu_missing()):
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where a GPU is required, a GPU test that did not run is a failure, whatever made it skip."""
    report = yield
    if report.skipped and item.get_closest_marker("gpu") and item.config.getoption("--require-gpu"):
        report.outcome = "failed"
        report.longrepr = f"a GPU test must run here, and this one was skipped: {report.longrepr}"
    return report
