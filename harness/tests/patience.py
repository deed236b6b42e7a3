"""For limits that a busy machine may break for a while."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    """Try until `holds()` is true; fail if it is not once in `seconds`. It asserts itself what must always be true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"did not hold in {seconds:g} s"
