"""Text for people that reaches any terminal, file or pipe without changing the exit status."""

from __future__ import annotations

import os
import sys


def say(text: str, *, error: bool = False) -> None:
    """Print a line; characters that the stream cannot show are escaped, and a reader that is gone is not an error."""
    stream = sys.stderr if error else sys.stdout
    encoding = stream.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except BrokenPipeError:
        # The interpreter flushes once more at exit, which must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
