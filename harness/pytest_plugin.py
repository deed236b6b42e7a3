"""Rules for every test, and rows from benchmarks.

Slow tests are asked for. GPU tests skip with the probe's reason or, where a GPU is required, fail. One that leaves the
device with an error is named, and the run ends there: nothing works on the device any more. Benchmarks measure
in one process, say how many were measured and why others were not (none: exit status 5), and can store rows:
pytest --benchmark-only --benchmark-rows=FILE. Collecting touches no GPU library: the driver is asked in a child
process, once, when it matters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from harness import codec, records
from harness.environment import capture, gpu_missing
from harness.gpu_fault import device_fault
from harness.records import Environment, Parity, Row, Scalar, Timing

_ROWS = pytest.StashKey[list[dict[str, Any]]]()
_SKIPPED = pytest.StashKey[dict[str, int]]()
ENVIRONMENT = pytest.StashKey[Environment]()

RowFields = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--require-gpu", action="store_true", help="a test marked gpu that is skipped counts as failed")
    parser.addoption(
        "--require-nvcc", action="store_true", help="a test that compiles with nvcc fails where there is none"
    )
    parser.addoption("--benchmark-rows", type=Path, metavar="FILE", help="store rows of the benchmarks (JSON lines)")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS], config.stash[_SKIPPED] = [], {}
    if _only_benchmarks(config) and (workers := _workers(config)):
        raise pytest.UsageError(
            f"benchmarks are measured in one process, but pytest-xdist is to use {workers}: "
            "their numbers would disturb each other; run with -n 0"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--run-slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --run-slow"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _gpu_missing()):
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """The device is asked before the test's fixtures end, whether the test passed or not."""
    fault = device_fault() if item.get_closest_marker("gpu") and not _gpu_missing() else None
    try:
        yield
    finally:
        if fault is not None:
            item.session.shouldstop = f"{item.nodeid} left the device with {fault}"
            pytest.fail(
                f"this test left the device with {fault}; KDTREE_LAUNCH_BLOCKING=1 finds the kernel", pytrace=False
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where a GPU (or nvcc) is required, a test of it that did not run is a failure, whatever made it skip."""
    report = yield
    if report.skipped and item.get_closest_marker("nvcc") and item.config.getoption("--require-nvcc"):
        report.outcome = "failed"
        report.longrepr = f"a test of nvcc must run here, and this one was skipped: {report.longrepr}"
    if report.skipped and item.get_closest_marker("gpu"):
        if item.config.getoption("--require-gpu") and not _left_to_benchmarks(item):
            report.outcome = "failed"
            report.longrepr = f"a GPU test must run here, and this one was skipped: {report.longrepr}"
        elif _is_benchmark(item) and _only_benchmarks(item.config):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            reason = reason.removeprefix("Skipped: ")
            item.config.stash[_SKIPPED][reason] = item.config.stash[_SKIPPED].get(reason, 0) + 1
    return report


@pytest.fixture
def bench_row(request: pytest.FixtureRequest, benchmark: Any) -> RowFields:
    """Turns the finished benchmark of this test into a row.

    bench_row(case=..., arm=..., case_hash=..., params=..., parity=...): parity is that of the measured result.
    """

    def store(
        *,
        case: str,
        arm: str,
        case_hash: str,
        parity: Parity,
        params: dict[str, Scalar] | None = None,
        calls: int = 1,
        timing: Timing | None = None,
    ) -> None:
        """calls: how often one measured call does the work; times are divided by it. timing: instead of wall clock."""
        if benchmark.stats is None:
            return  # benchmarks are switched off, the test only checked its result
        if timing is None:
            samples = tuple(float(s) / calls for s in benchmark.stats.stats.data)
            timing = Timing("wall", "e2e", samples, None, dropped=0, capped=False)
        passed = parity.passed
        request.config.stash[_ROWS].append(
            {
                "case": case,
                "arm": arm,
                "case_hash": case_hash,
                "params": params or {},
                "parity": parity,
                "status": "OK" if passed else "INVALID",
                "reason": None if passed else "the result is not that of the reference",
                "timing": timing,
            }
        )

    return store


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """The facts that make two measurements comparable, in pytest-benchmark's own JSON."""
    machine_info["harness"] = codec.to_dict(_environment(config))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if not _only_benchmarks(config):
        return
    path = config.getoption("--benchmark-rows")
    if path is not None and config.stash[_ROWS]:
        with records.RowFile(path) as file:
            for fields in config.stash[_ROWS]:
                file.append(_row(fields, _environment(config)))
    if exitstatus == 0 and _measured(config) == 0 and not config.option.collectonly:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not _only_benchmarks(config) or config.option.collectonly:
        return
    skipped = config.stash[_SKIPPED]
    terminalreporter.write_line(
        f"{_measured(config)} benchmarks measured, {sum(skipped.values())} GPU benchmarks not run"
    )
    for reason, count in sorted(skipped.items()):
        terminalreporter.write_line(f"  {count} not run: {reason}")


def _row(fields: dict[str, Any], environment: Environment) -> Row:
    return Row(
        suite="benchmarks", block="bench", against=None, seed=None, metrics={}, environment=environment, **fields
    )


def _environment(config: pytest.Config) -> Environment:
    if ENVIRONMENT not in config.stash:
        config.stash[ENVIRONMENT] = capture()
    return config.stash[ENVIRONMENT]


@functools.cache
def _gpu_missing() -> str | None:
    return gpu_missing()


def _only_benchmarks(config: pytest.Config) -> bool:
    return bool(config.getoption("benchmark_only", default=False))


def _is_benchmark(item: pytest.Item) -> bool:
    return "benchmark" in getattr(item, "fixturenames", ())


def _left_to_benchmarks(item: pytest.Item) -> bool:
    """Whether pytest-benchmark skips this test because benchmarks are not asked for."""
    return _is_benchmark(item) and bool(item.config.getoption("benchmark_skip", default=False))


def _measured(config: pytest.Config) -> int:
    session = getattr(config, "_benchmarksession", None)
    return len(session.benchmarks) if session is not None else 0


def _workers(config: pytest.Config) -> str | None:
    """What pytest-xdist was told to spread the tests over, None for one process."""
    if hasattr(config, "workerinput"):  # of a worker alone; its environment is also that of what its tests start
        return "workers"
    count = config.getoption("numprocesses", default=None)
    if count not in (None, 0):
        return f"{count} workers"
    distribution = config.getoption("dist", default="no")
    return f"--dist {distribution}" if distribution != "no" and config.getoption("tx", default=None) else None
