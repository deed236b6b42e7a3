"""Plain text for people: tables, one-line errors and progress that survive any terminal, encoding and closed pipe.

Cells are strings made by the caller and are never parsed, so a name like 1e10 or 0012 stays as it is.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self, TextIO

Row = Sequence[str]
_PROGRESS_AFTER: Final = 0.5  # seconds
_PROGRESS_EVERY: Final = 0.1


def visible(text: str) -> str:
    """`text` with control, format and unpaired surrogate characters escaped: one line, no effect on the terminal."""
    if text.isprintable():
        return text
    return "".join(c if unicodedata.category(c)[0] != "C" else c.encode("unicode_escape").decode() for c in text)


def table(header: Row, rows: Sequence[Row], *, right: Sequence[str] = (), width: int | None = None) -> list[str]:
    """Lines of a table; the columns named in `right` are aligned to the right.

    Where the table is wider than `width`, each row becomes a paragraph of "column: cell" lines: nothing is cut off.
    """
    cells = [[visible(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(_columns, column)) for column in zip(*cells, strict=True)]
    if width is not None and rows and sum(widths) + 2 * (len(widths) - 1) > width:
        label = max(map(len, header)) + 1
        blocks = [
            [f"{name + ':':<{label}} {cell}".rstrip() for name, cell in zip(header, r, strict=True)] for r in cells[1:]
        ]
        return [line for block in blocks for line in (*block, "")][:-1]
    to_right = [name in right for name in header]
    lines = []
    for row in (cells[0], ["-" * w for w in widths], *cells[1:]):
        padded = [
            " " * (w - _columns(cell)) + cell if flush else cell + " " * (w - _columns(cell))
            for cell, w, flush in zip(row, widths, to_right, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def size(nbytes: int) -> str:
    """A number of bytes with a binary unit: 512 B, 1.5 KiB, 27.3 MiB."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


class Console:
    """Where a command prints: `out` for its answer, `error` for one-line errors and progress.

    A character that the encoding lacks is written as an escape. Once the reader has closed the pipe, writing does
    nothing, so that the exit code still tells the answer.
    """

    def __init__(self, out: TextIO | None = None, error: TextIO | None = None) -> None:
        self._out: TextIO | None = out if out is not None else sys.stdout
        self._error: TextIO | None = error if error is not None else sys.stderr

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None where the answer goes elsewhere."""
        return shutil.get_terminal_size().columns if _is_terminal(self._out) else None

    def print(self, *lines: str) -> None:
        """Write lines of the answer."""
        self._out = _write(self._out, "".join(f"{visible(line)}\n" for line in lines))

    def table(self, header: Row, rows: Sequence[Row], *, right: Sequence[str] = ()) -> None:
        """Write a table, as wide as the terminal allows."""
        self.print(*table(header, rows, right=right, width=self.width))

    def complain(self, message: str) -> None:
        """Write one line to the error stream."""
        self._error = _write(self._error, f"kdtr: {visible(message)}\n")

    def progress(self, label: str, total: int) -> Progress:
        """Counts bytes; shown only where it takes long and the terminal can return to the start of a line."""
        shown = _is_terminal(self._error) and os.environ.get("TERM", "dumb") != "dumb"
        return Progress(self._error if shown else None, visible(label), total)

    def close(self) -> None:
        """Flush, so that a closed pipe is noticed here and not while the interpreter ends."""
        self._out = _write(self._out, "")
        self._error = _write(self._error, "")


class Progress:
    """Call it with the bytes of each step done; as a context it clears its line at the end."""

    def __init__(self, stream: TextIO | None, label: str, total: int) -> None:
        self._stream = stream
        self._label = label
        self._total = total
        self._done = 0
        self._start = time.monotonic()
        self._next = self._start + _PROGRESS_AFTER
        self._shown = 0

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if self._stream is None or now < self._next:
            return
        self._next = now + _PROGRESS_EVERY
        rate = self._done / (now - self._start)
        percent = 100 * self._done // max(1, self._total)
        left = max(0.0, (self._total - self._done) / rate)
        room = shutil.get_terminal_size().columns - 1
        line = f"{self._label}: {percent}% of {size(self._total)}, {size(int(rate))}/s, {left:.0f} s left"[:room]
        self._stream = _write(self._stream, f"\r{line}{' ' * (self._shown - len(line))}")
        self._shown = len(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            _write(self._stream, f"\r{' ' * self._shown}\r")


def _columns(text: str) -> int:
    """Columns that a text takes on a terminal."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _write(stream: TextIO | None, text: str) -> TextIO | None:
    """Write and flush; None once nobody listens any more."""
    if stream is None:
        return None
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (BrokenPipeError, ValueError):  # closed by the other side, or by this one
        _silence(stream)
        return None
    except OSError:
        _silence(stream)
        raise
    return stream


def _silence(stream: TextIO) -> None:
    """What is still buffered must not fail again when the interpreter ends: it goes to the null device."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):
        return
