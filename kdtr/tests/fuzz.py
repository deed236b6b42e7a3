"""Runs the mutation fuzzer of the C++ reader (cpp/fuzz.cpp) and compares its verdicts with those of the Python reader.

    python -m kdtr.tests.fuzz --executions 100000000 --state fuzz.json
    python -m kdtr.tests.fuzz --differential 100000 --state fuzz.json

Both may be interrupted and given again: the state file has what is done, and executions go on where they stopped. It
belongs to one state of the sources; after a change of the headers a new one begins. Exit code 1, and a mutant kept
beside the state file, mean a sanitizer report, an allocation above 1 MiB, a hang, or two readers that disagree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import kdtr
from kdtr.tests import cpp_build
from kdtr.tests.make_vectors import VECTORS

SANITIZED = ("-O2", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
CHUNK = 500_000  # executions of one process
BATCH = 4_000  # mutants of one dump: some 30 MB


class FuzzError(Exception):
    """A fault of a reader, with the mutant that shows it."""


def sources_digest() -> str:
    """Identifies the headers, the fuzzer and the files that it starts from."""
    digest = hashlib.sha256()
    for file in sorted([*(cpp_build.INCLUDE / "kdtr").iterdir(), cpp_build.SOURCES / "fuzz.cpp", *VECTORS.iterdir()]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@dataclass
class State:
    """What was run so far on one state of the sources; `sources` is their digest."""

    sources: str
    executions: int = 0
    seconds: float = 0.0
    verdicts: dict[str, int] = field(default_factory=dict)
    compared: int = 0
    compared_seconds: float = 0.0

    @classmethod
    def load(cls, path: Path | None) -> Self:
        """The state of a file, a fresh one without. Raises FuzzError if it is of other sources."""
        sources = sources_digest()
        if path is None or not path.exists():
            return cls(sources)
        state = cls(**json.loads(path.read_text()))
        if state.sources != sources:
            raise FuzzError(f"{path} is of sources {state.sources}, these are {sources}: give another state file")
        return state

    def save(self, path: Path | None) -> None:
        """Written beside it and renamed, so that an interruption leaves the state before."""
        if path is not None:
            part = path.with_suffix(".part")
            part.write_text(json.dumps(asdict(self), indent=1) + "\n")
            part.replace(path)


def bases() -> list[Path]:
    """Files to mutate: all vectors of at most two pages, good ones eight times as often as bad ones."""
    small = sorted(p for p in VECTORS.glob("*.kdtr") if p.stat().st_size <= 8192)
    return small + 7 * [p for p in small if p.name.startswith("ok_")]


def fuzz(
    first: int, count: int, folder: Path, *, dump: Path | None = None, seed: int = 1, include: Path = cpp_build.INCLUDE
) -> Counter[str]:
    """Verdicts of executions first to first + count. Raises FuzzError with the report of what went wrong."""
    flags = (*SANITIZED, *cpp_build.WARNINGS)
    program = cpp_build.build(cpp_build.SOURCES / "fuzz.cpp", *flags, include=include)
    command = [str(program), str(seed), str(first), str(count), str(dump or "-"), *map(str, bases())]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if result.returncode != 0 or result.stderr:
        raise FuzzError(f"{folder / 'crash.kdtr'}: exit code {result.returncode}\n{result.stderr}")
    lines = [line.split() for line in result.stdout.splitlines()]
    verdicts = Counter({name: int(number) for name, number in lines[1:]})
    if lines[0] != ["executions", str(count)] or verdicts.total() != count:
        raise FuzzError(f"{count} executions asked for, reported were\n{result.stdout}")
    return verdicts


def mutants(dump: Path) -> Iterator[tuple[str, str, bytes]]:
    """C++ verdict, tensor and bytes of each mutant of a dump."""
    with dump.open("rb") as stream:
        while head := stream.read(4):
            code, tensor = (stream.read(stream.read(1)[0]).decode() for _ in range(2))
            yield code, tensor, stream.read(int.from_bytes(head, "little"))


def python_verdict(path: str) -> tuple[str, str]:
    """Class up to level 2, and the tensor that is named."""
    try:
        with kdtr.open(path) as container:
            container.verify()
    except kdtr.KDTRError as error:
        return error.code, error.tensor or ""
    return "OK", ""


def compare(first: int, count: int, folder: Path) -> None:
    """Give mutants to both readers. Raises FuzzError, with the mutant kept in `folder`, when they disagree."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as scratch:
        dump, path = Path(scratch) / "dump", os.path.join(scratch, "mutant.kdtr")
        fuzz(first, count, folder, dump=dump, seed=2)
        seen = 0
        for code, tensor, data in mutants(dump):
            Path(path).write_bytes(data)
            if (found := python_verdict(path)) != (code, tensor):
                kept = folder / "disagreement.kdtr"
                kept.write_bytes(data)
                raise FuzzError(f"{kept}: execution {first + seen}: C++ says {(code, tensor)}, Python {found}")
            seen += 1
        if seen != count:
            raise FuzzError(f"{count} mutants asked for, {seen} were dumped")


def machine() -> str:
    """Processor and number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = "unknown processor"
    return f"{model}, {os.cpu_count()} cores"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kdtr.tests.fuzz", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--executions", type=int, default=0, help="total of executions to reach, those of the state included"
    )
    parser.add_argument("--differential", type=int, default=0, help="total of mutants to give to both readers")
    parser.add_argument("--state", type=Path, help="JSON file that holds what is done; made if it is not there")
    options = parser.parse_args()
    if reason := cpp_build.missing("g++"):
        print(f"cannot run: {reason}", file=sys.stderr)
        return 2
    try:
        state = State.load(options.state)
        folder = options.state.resolve().parent if options.state else Path.cwd()
        while state.executions < options.executions:
            count = min(CHUNK, options.executions - state.executions)
            start = time.monotonic()
            verdicts = fuzz(state.executions, count, folder)
            took = time.monotonic() - start
            state.verdicts = dict(sorted((Counter(state.verdicts) + verdicts).items()))
            if sources_digest() != state.sources:
                raise FuzzError(
                    "the sources were changed during the run: what it did since the last line is not counted"
                )
            state.executions, state.seconds = state.executions + count, state.seconds + took
            state.save(options.state)
            print(f"{state.executions:,} of {options.executions:,} executions, {count / took:,.0f}/s", flush=True)
        while state.compared < options.differential:
            count = min(BATCH, options.differential - state.compared)
            start = time.monotonic()
            compare(state.compared, count, folder)
            took = time.monotonic() - start
            state.compared, state.compared_seconds = state.compared + count, state.compared_seconds + took
            state.save(options.state)
            print(f"{state.compared:,} of {options.differential:,} mutants agree, {count / took:,.0f}/s", flush=True)
    except FuzzError as error:
        print(f"FAULT: {error}", file=sys.stderr)
        return 1
    print(f"sources {state.sources} on {machine()}")
    print(f"{state.executions:,} executions in {state.seconds:,.0f} s without a fault")
    print("verdicts: " + ", ".join(f"{name} {number:,}" for name, number in state.verdicts.items()))
    print(f"{state.compared:,} mutants in {state.compared_seconds:,.0f} s: the readers agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
