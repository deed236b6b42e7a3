"""The fixtures `ops`, `host_ops` and `world` for the tests of the engine."""

from collections.abc import Iterator

import pytest

from engine.tests.backends import KINDS, host_ops, open_ops, ops
from engine.tests.decoding import World

__all__ = ["host_ops", "ops", "world"]


@pytest.fixture(scope="module", params=KINDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Models and engines on the host library, and where there is a GPU on the CUDA library."""
    made = World(open_ops(request.param).library, tmp_path_factory.mktemp("models"))
    yield made
    made.close()
