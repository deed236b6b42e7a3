"""KDTR: golden data for kernels and decoders. kdtr/format.py is the byte-level specification.

Example, with arrays x, y and a function under test:

    import kdtr
    kdtr.save("case.kdtr", {"x": x, "y": y}, kind="op", meta=kdtr.provenance(seed=1),
              roles={"x": "input", "y": "expected"}, tolerances={"y": kdtr.Tolerance.ulp(2)})
    golden = kdtr.read("case.kdtr")
    kdtr.compare(golden, {"y": kernel(golden["x"])}).raise_if_failed()
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if sys.byteorder != "little":
    raise ImportError(
        "KDTR files are little-endian and this library does not swap: big-endian machines are not supported"
    )

from kdtr.compare import Comparison, MismatchError, Row, compare, compare_array
from kdtr.container import Container, Fixture, Raw, open, read
from kdtr.errors import KDTRError
from kdtr.index import Index, TensorInfo, TensorSpec, Tolerance
from kdtr.metadata import VERSION, provenance

if TYPE_CHECKING:
    from pathlib import Path

    from kdtr.writer import Writer, save

__version__ = VERSION

__all__ = [
    "Comparison",
    "Container",
    "Fixture",
    "Index",
    "KDTRError",
    "MismatchError",
    "Raw",
    "Row",
    "TensorInfo",
    "TensorSpec",
    "Tolerance",
    "Writer",
    "__version__",
    "cmake_dir",
    "compare",
    "compare_array",
    "include_dir",
    "open",
    "provenance",
    "read",
    "save",
]


def __getattr__(name: str) -> object:
    """Writing is imported by who writes: most processes only read, and start faster for it."""
    if name in ("Writer", "save"):
        from kdtr import writer

        globals().update(Writer=writer.Writer, save=writer.save)
        return globals()[name]
    raise AttributeError(f"module 'kdtr' has no attribute '{name}'")


def include_dir() -> Path:
    """Folder for the include path of a C++ compiler: `#include <kdtr/...>` finds the C++ headers there."""
    from pathlib import Path  # costs a tenth of importing this package

    return Path(__file__).parent / "include"


def cmake_dir() -> Path:
    """Folder of the CMake package: `-Dkdtr_DIR=<folder>` lets `find_package(kdtr)` give the target kdtr::kdtr."""
    from pathlib import Path

    return Path(__file__).parent / "cmake"
