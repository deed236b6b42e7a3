"""Tables of the measurements at the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kdtr.benchmarks.tables import Measured

_TABLES = pytest.StashKey[list[Measured]]()


@pytest.fixture
def keep(request: pytest.FixtureRequest, benchmark: Any) -> Callable[[Measured], None]:
    """Stores a measurement in the benchmark's JSON and shows it at the end."""

    def store(measured: Measured) -> None:
        benchmark.extra_info["kdtr"] = measured.info()
        request.config.stash.setdefault(_TABLES, []).append(measured)

    return store


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for measured in config.stash.get(_TABLES, []):
        terminalreporter.write_line("")
        for line in measured.lines():
            terminalreporter.write_line(line)
