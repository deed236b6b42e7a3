"""Results as one JSON object a line, appended as they are measured, so that a stopped run goes on where it was."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """Every whole row of a file, none when it does not exist. A torn last line is left out with a warning.

    ValueError naming file and line for any other line that is not a JSON object.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        print(f"{path}: the last line is torn and is measured again", file=sys.stderr)
        lines.pop()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: a row is an object, found {type(row).__name__}")
        rows.append(row)
    return rows


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows in one write; a torn last line left by an earlier run is cut off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        end = file.seek(0, 2)
        file.seek(0)
        if end and not (data := file.read()).endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)
        file.write("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows).encode())
