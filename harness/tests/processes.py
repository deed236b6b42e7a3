"""What processes that tests start are given."""

from __future__ import annotations

import os


def plain_environment() -> dict[str, str]:
    """This process's variables without those that tell a process that it is a worker of pytest-xdist."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
