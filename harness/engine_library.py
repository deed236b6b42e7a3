"""The engine's library, and a word on stderr where it is compiled first: that may take minutes."""

from __future__ import annotations

import contextlib
from pathlib import Path

from engine import build
from engine.toolkit import BuildError
from harness.console import say


def library_path(kind: str) -> Path:
    """The library of a kind, "cuda" or "host", built if anything is new. Raises BuildError."""
    with contextlib.suppress(BuildError):  # which the build itself tells
        plan = build.plan_cuda() if kind == "cuda" else build.plan_host()
        missing = sum(not step.path.exists() for step in plan.objects.values())
        if missing:
            choice = " ($KDTREE_CUDA_ARCH chooses them)" if kind == "cuda" else ""
            of = f"{missing} of {len(plan.objects)} files"
            say(f"compiling the engine: {of} for {', '.join(plan.targets) or 'the host'}{choice}", error=True)
    return build.library(kind)
