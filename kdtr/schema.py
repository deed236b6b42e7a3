"""Fixture kinds: which arrays a file of each kind holds (level 3 of kdtr/format.py, section 9)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdtr.container import Container

KINDS = ("any",)


def schema_problems(handle: Container) -> Iterator[str]:
    """What the kind's schema does not allow."""
    if handle.kind not in KINDS:
        yield f"kind '{handle.kind}' is not known"
