"""python -m reference.golden [--out FOLDER] [--check] [--list] [NAME ...]: write or check the golden files.

Exit status: 0 fine, 1 a file differs from what is computed, 2 usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from reference.golden import accept, attention, model, op, topk, tree
from reference.golden.files import GoldenFile

FOLDER = Path(__file__).parents[2] / "datasets" / "golden"
STAGES = (tree, topk, accept, attention, op, model)


def golden_files() -> dict[str, GoldenFile]:
    """Every golden file by name, freshly computed."""
    return {file.name: file for stage in STAGES for file in stage.golden_files()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reference.golden", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="files to write or check, without suffix; default all")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the files (default datasets/golden)")
    parser.add_argument(
        "--check", action="store_true", help="compare the files with a fresh computation, write nothing"
    )
    parser.add_argument("--list", action="store_true", help="print what there is")
    options = parser.parse_args(arguments)
    files = golden_files()
    if unknown := sorted(set(options.names) - files.keys()):
        parser.error(f"no golden file is called {', '.join(unknown)}; there are {', '.join(files)}")
    chosen = [file for name, file in files.items() if not options.names or name in options.names]
    wrong = 0
    for file in chosen:
        path = options.out / f"{file.name}.kdtr"
        if options.list:
            print(f"{file.name:18} {file.kind:10} {len(file.arrays):5} arrays  {file.notes}")
        elif options.check:
            problems = list(file.differences(path))
            wrong += bool(problems)
            print("\n".join(problems) if problems else f"{path}: as computed")
        else:
            options.out.mkdir(parents=True, exist_ok=True)
            print(f"{file.save(options.out)}: {len(file.arrays)} arrays")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
