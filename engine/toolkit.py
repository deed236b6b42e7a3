"""Finds a CUDA toolkit."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


class BuildError(RuntimeError):
    """Something cannot be built; the message says what and why."""


class ToolkitError(BuildError):
    """There is no usable CUDA toolkit; the message lists what was looked at and what is missing."""


@dataclass(frozen=True)
class Toolkit:
    """nvcc: the program; root: its folder; version: what it says of itself."""

    nvcc: Path
    root: Path
    version: str


def find() -> Toolkit:
    """nvcc on PATH. Raises ToolkitError."""
    found = shutil.which("nvcc")
    if found is None:
        raise ToolkitError("no nvcc on PATH")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return Toolkit(Path(found), Path(found).parent.parent, version)
