"""`python -m kdtr.benchmarks FILE.json`: the tables of a stored run of `pytest --benchmark-only`.

Exit codes: 0 printed; 2 the file cannot be read or holds no measurement of kdtr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from kdtr.benchmarks.tables import of_file
from kdtr.console import Console


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kdtr.benchmarks", description=__doc__)
    parser.add_argument("file", metavar="FILE.json", help="made by pytest --benchmark-only --benchmark-json=FILE.json")
    console = Console()
    args = parser.parse_args(argv)
    try:
        with open(args.file, encoding="utf-8") as opened:
            measured = of_file(json.load(opened))
    except (OSError, ValueError, KeyError, TypeError) as error:
        console.complain(f"{args.file}: is no file of pytest-benchmark that can be read: {error}")
        return 2
    if not measured:
        console.complain(f"{args.file}: holds no measurement of kdtr")
        return 2
    for each in measured:
        console.print(*each.lines(), "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
