"""The commands of `kdtr`: each prints its answer and returns the exit code."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy.typing as npt

from kdtr import manifest
from kdtr.compare import compare
from kdtr.console import Console, Progress, size
from kdtr.container import Container
from kdtr.convert import convert
from kdtr.difference import differences
from kdtr.errors import FileIOError, KDTRError, MetaError
from kdtr.extract import extract
from kdtr.index import TensorInfo
from kdtr.statistics import Extreme, statistics

OK: Final = 0
NEGATIVE: Final = 1
TROUBLE: Final = 2


def ls(args: argparse.Namespace, console: Console) -> int:
    """Tensors of each file: element type, shape, role, tolerance, bytes."""
    for i, path in enumerate(args.file):
        with Container(path) as container:
            console.print(*([""] if i else []), _headline(container))
            rows = [
                (info.name, info.dtype, _shape(info), info.role, str(info.tolerance or "-"), str(info.nbytes))
                for info in container.info.values()
            ]
        if rows:
            console.table(("name", "dtype", "shape", "role", "tolerance", "bytes"), rows, right=("bytes",))
    return OK


def show(args: argparse.Namespace, console: Console) -> int:
    """Metadata of a file, or what some of its tensors hold."""
    with Container(args.file) as container:
        if not args.name:
            console.print(_headline(container), *json.dumps(container.meta, indent=2, sort_keys=True).split("\n"))
        for i, name in enumerate(_selected(container, args.name)):
            info = container.info[name]
            tolerance = f", {info.tolerance}" if info.tolerance is not None else ""
            console.print(
                *([""] if i else []),
                f"{name}: {info.dtype} {_shape(info)}, {info.role}{tolerance}, {size(info.nbytes)} at {info.offset}",
                *_statistics(container, name),
            )
    return OK


def verify(args: argparse.Namespace, console: Console) -> int:
    """Checksums, padding and values of each file."""
    return max(_judge(path, console, Container.verify) for path in args.file)


def validate(args: argparse.Namespace, console: Console) -> int:
    """All of verify, then metadata and the rules of the fixture kind."""
    return max(_judge(path, console, Container.validate) for path in args.file)


def diff(args: argparse.Namespace, console: Console) -> int:
    """Arrays of one file against the goldens of another, by the golden file's tolerances."""
    with Container(args.golden) as golden, Container(args.actual) as actual:
        asserted = [name for name in actual if name not in golden or golden.info[name].tolerance is not None]
        found = compare(golden, _Chosen(actual, asserted))
    rows = []
    for row in found.rows:
        worst, values = f"{row.error:.6g}" if row.numel else "-", ("-", "-", "-")
        if row.index is not None:
            values = (str(list(row.index)), str(row.golden), str(row.actual))
        bad = f"{row.bad} of {row.numel}"
        rows.append((row.name, "ok" if row.ok else "FAIL", str(row.tolerance or "-"), worst, *values, bad))
    if rows:
        console.table(("tensor", "is", "tolerance", "worst error", "at", "golden", "actual", "bad"), rows)
    failed = [row for row in found.rows if not row.ok]
    console.print(*(f"FAIL {row.name}: {row.problem}" for row in failed))
    if not found.rows:
        console.print("nothing was compared: no tensor of either file has a tolerance in the golden one")
    else:
        left_out = len(actual) - len(asserted)
        without = f"; not compared: {left_out} without tolerance" if left_out else ""
        console.print(f"{len(failed)} of {_count(len(found.rows), 'tensor')} failed{without}")
    return OK if found.ok else NEGATIVE


def diff_all(args: argparse.Namespace, console: Console) -> int:
    """Every difference between two files, metadata included."""
    with Container(args.golden) as golden, Container(args.actual) as actual:
        with console.progress("diff", 2 * (golden.file_size + actual.file_size)) as progress:
            found = list(differences(golden, actual, progress))
        if not found:
            console.print(f"equal bit for bit: {_count(len(golden), 'tensor')}, {size(golden.file_size)}")
            return OK
        console.table(("where", "what", "golden", "actual"), found)
        console.print(_count(len(found), "difference"))
    return NEGATIVE


def convert_file(args: argparse.Namespace, console: Console) -> int:
    """Convert between KDTR and npz, safetensors or HDF5."""
    if not args.force and os.path.lexists(args.target):
        raise FileIOError("exists already; --force replaces it", path=args.target)
    total = 2 * os.path.getsize(args.source) if os.path.isfile(args.source) else 0
    with console.progress(f"convert {args.source}", total) as progress:
        dropped = convert(
            args.source,
            args.target,
            kind=args.kind,
            role=args.role,
            drop=args.drop,
            drop_attributes=args.drop_attributes,
            progress=progress,
        )
    console.print(*(f"dropped {name}" for name in dropped))
    console.print(f"wrote {args.target}: {size(os.path.getsize(args.target))}")
    return OK


def extract_tensors(args: argparse.Namespace, console: Console) -> int:
    """Write tensors to files of their own."""
    with Container(args.file) as container:
        names = _selected(container, args.name) if args.name else None
        with console.progress(f"extract {args.file}", container.file_size) as progress:
            written = extract(container, args.folder, names, raw=args.raw, replace=args.force, progress=progress)
    rows = [(each.file, each.dtype, str(list(each.shape)), str(each.nbytes)) for each in written]
    console.table(("file", "dtype", "shape", "bytes"), rows, right=("bytes",))
    return OK


def manifest_file(args: argparse.Namespace, console: Console) -> int:
    """List, check or update a manifest."""
    if args.update:
        with console.progress(args.file, _listed_bytes(args.file)) as progress:
            done = manifest.update(
                args.file,
                args.folder,
                licence=args.licence,
                generator=args.generator,
                seed=args.seed,
                progress=progress,
            )
        for what in ("added", "changed", "removed"):
            console.print(*(f"{what}  {path}" for path in getattr(done, what)))
        console.print(f"{args.file}: {_count(len(manifest.load(args.file).entries), 'file')}")
        return OK
    listed = manifest.load(args.file)
    if not args.check:
        rows = [
            (e.path, e.sha256[:16], str(e.bytes), e.licence, "-" if e.seed is None else str(e.seed), e.generator)
            for e in listed.entries
        ]
        console.table(("path", "sha256 (first 16)", "bytes", "licence", "seed", "generator"), rows, right=("bytes",))
        return OK
    with console.progress(args.file, _listed_bytes(args.file)) as progress:
        faults = manifest.check(args.file, args.folder, progress)
    if faults:
        console.table(("file", "is", "detail"), [(fault.path, fault.what, fault.detail) for fault in faults])
        console.print(f"{args.file}: {_count(len(faults), 'fault')}, {_count(len(listed.entries), 'listed file')}")
        return NEGATIVE
    total = size(sum(entry.bytes for entry in listed.entries))
    console.print(f"{args.file}: {_count(len(listed.entries), 'file')} as listed, {total}")
    return OK


class _Chosen(Mapping[str, npt.NDArray[Any]]):
    """Some tensors of a file, read when asked for."""

    def __init__(self, container: Container, names: Sequence[str]) -> None:
        self._container = container
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._container.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def _judge(path: str, console: Console, check: Callable[[Container, Progress], None]) -> int:
    """One file checked; a file that cannot be read is trouble, one that breaks the format is the negative answer."""
    try:
        with Container(path) as container:
            with console.progress(path, container.file_size) as progress:
                check(container, progress)
            console.print(f"{path}: ok, {_count(len(container), 'tensor')}, {size(container.file_size)}")
    except MetaError as error:
        for problem in error.problems:
            console.complain(str(MetaError(problem, path=path, tensor=error.tensor)))
        return NEGATIVE
    except KDTRError as error:
        console.complain(str(error))
        return TROUBLE if isinstance(error, FileIOError) else NEGATIVE
    return OK


def _headline(container: Container) -> str:
    content = f"{_count(len(container), 'tensor')}, {size(container.file_size)}"
    return f"{container.path}: {container.kind}/{container.kind_version}, {content}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _shape(info: TensorInfo) -> str:
    return str(list(info.shape))


def _selected(container: Container, wanted: Sequence[str]) -> list[str]:
    """Names by name or by pattern; "*" and "?" cannot be in a name, brackets can."""
    found: dict[str, None] = {}
    for pattern in wanted:
        if "*" in pattern or "?" in pattern:
            matching = fnmatch.filter(container.names, pattern.replace("[", "[[]"))
            found |= dict.fromkeys(matching or [pattern])
        else:
            found[pattern] = None
    for name in found:
        container.info.position(name)  # raises NOT_FOUND
    return list(found)


def _statistics(container: Container, name: str) -> list[str]:
    """What a tensor holds, as lines."""
    found = statistics(container.get(name))
    infinite = f"{found.positive_infinite} +inf, {found.negative_infinite} -inf"
    lines = [f"  numbers    {found.count}: {found.nan} NaN, {infinite}, {found.zero} zero"]
    if found.low is not None and found.high is not None:
        lines += [
            f"  range      {_place(found.low)} .. {_place(found.high)}",
            f"  mean, std  {found.mean:.6g}, {found.std:.6g}",
            f"  histogram  {found.low.value!s} [{found.histogram()}] {found.high.value!s}",
        ]
    more = ", ..." if len(found.first) < found.count else ""
    return [*lines, f"  first      {', '.join(found.first)}{more}"] if found.first else lines


def _place(found: Extreme) -> str:
    return f"{found.value!s} at {list(found.at)}"


def _listed_bytes(path: str) -> int:
    return sum(entry.bytes for entry in manifest.load(path).entries) if os.path.exists(path) else 0
