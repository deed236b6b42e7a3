"""Corpus of the trained pair: text of permissively licensed packages, locked by version and hash.

    python datasets/recipe/corpus.py lock       # write corpus.lock from sources.toml (newest versions)
    python datasets/recipe/corpus.py download   # fetch exactly what corpus.lock names; hashes are checked
    python datasets/recipe/corpus.py build      # work/corpus/{train,heldout}.xz and report.json

Whole packages are held out. Documents that share a 13-word run with a benchmark, near-duplicates, data tables and
licence headers are dropped. A part of the code files is cut into stand-alone functions, so that the model also
learns where a function ends.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import gzip
import hashlib
import io
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import time
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RECIPE = Path(__file__).resolve().parent
WORK = RECIPE / "work"
SEPARATOR = "\0"
PERMISSIVE = re.compile(r"MIT|BSD|Apache|PSF|Python Software Foundation|HPND|ISC|Zlib|Biopython|Unlicense", re.I)
COPYLEFT = re.compile(r"GPL|GNU|MPL|Mozilla|EUPL|CC-BY-NC", re.I)


class CorpusError(Exception):
    """A source that is missing, changed, or not permissively licensed."""


@dataclass(frozen=True)
class Source:
    """One locked file. kind: wheel, sdist, deb; split: train, heldout, benchmark."""

    name: str
    version: str
    file: str
    sha256: str
    licence: str
    kind: str
    split: str


@dataclass(frozen=True)
class Rules:
    """Filters of `build`. Sizes are in characters."""

    package_cap: int = 4_000_000
    file_min: int = 300
    file_max: int = 150_000
    functions_share: float = 0.25
    duplicate_share: float = 0.3
    benchmark_words: int = 13


def sha256_of(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def read_lock(path: Path) -> list[Source]:
    return [Source(**entry) for entry in tomllib.loads(path.read_text())["file"]]


def write_lock(path: Path, sources: list[Source]) -> None:
    lines = ["# Written by corpus.py lock. Every file the corpus is made of, with its hash and licence."]
    for source in sorted(sources, key=lambda s: (s.split, s.kind, s.name)):
        lines.append("\n[[file]]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in vars(source).items()]
    path.write_text("\n".join(lines) + "\n")


def fetch(name: str, version: str | None, kind: str, folder: Path) -> None:
    """Download one package by name through pip or apt-get into `folder`."""
    if kind == "deb":
        subprocess.run(
            ["apt-get", "download", "-q", name + (f"={version}" if version else "")],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return
    form = "--only-binary=:all:" if kind == "wheel" else "--no-binary=:all:"
    wanted = name + (f"=={version}" if version else "")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", form, "-d", str(folder), wanted], check=True
    )


def licence_of(path: Path) -> str:
    """Licence as the package states it: SPDX expression, else classifiers, else the License field."""
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        header = archive.read(name).decode("utf-8", "replace").split("\n\n")[0].splitlines()
    for prefix in ("License-Expression: ", "Classifier: License :: OSI Approved :: ", "License: "):
        found = [line[len(prefix) :].strip() for line in header if line.startswith(prefix)]
        if found:
            return " AND ".join(found)
    return ""


def check_licence(name: str, licence: str) -> None:
    options = [part for part in re.split(r"\bOR\b", licence) if PERMISSIVE.search(part) and not COPYLEFT.search(part)]
    if not options:
        raise CorpusError(f"{name}: licence {licence!r} is not in the permissive list")


def find_file(folder: Path, name: str, kind: str) -> Path:
    suffix = {"wheel": ".whl", "sdist": ".tar.gz", "deb": ".deb"}[kind]
    plain = re.sub(r"[-_.]+", "-", name).lower()
    for path in sorted(folder.iterdir()):
        stem = path.name.split("_")[0] if kind == "deb" else path.name
        if kind == "deb" and stem == name:
            return path
        if path.name.endswith(suffix) and re.sub(r"[-_.]+", "-", stem).lower().startswith(plain + "-"):
            rest = re.sub(r"[-_.]+", "-", stem).lower()[len(plain) + 1 :]
            if rest[:1].isdigit():
                return path
    raise CorpusError(f"{name}: no {kind} in {folder} after the download")


def lock(sources_path: Path, lock_path: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = tomllib.loads(sources_path.read_text())
    stated: dict[str, str] = wanted.get("licences", {})
    out = []
    for group in wanted["group"]:
        for name in group["names"]:
            kind = group["kind"]
            try:
                path = find_file(folder, name, kind)
            except CorpusError:
                fetch(name, None, kind, folder)
                path = find_file(folder, name, kind)
            licence = stated.get(name) or (licence_of(path) if kind == "wheel" else "")
            check_licence(name, licence)
            parts = path.name.removesuffix(".tar.gz").split("_" if kind == "deb" else "-")
            version = parts[-1] if kind == "sdist" else parts[1].replace("%3a", ":")
            out.append(Source(name, version, path.name, sha256_of(path), licence, kind, group["split"]))
    write_lock(lock_path, out)
    print(f"{lock_path}: {len(out)} files")


def download(lock_path: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sources = read_lock(lock_path)
    for number, source in enumerate(sources, 1):
        path = folder / source.file
        if not path.exists():
            print(f"[{number}/{len(sources)}] {source.name} {source.version}", flush=True)
            fetch(source.name, source.version, source.kind, folder)
        if not path.exists():
            raise CorpusError(f"{source.name}=={source.version}: expected file {source.file}, not delivered")
        if (actual := sha256_of(path)) != source.sha256:
            raise CorpusError(f"{path}: sha256 {actual}, corpus.lock has {source.sha256}")


WHEEL_NO = (
    "*/test*",
    "*conftest*",
    "*_pb2*",
    "*/locale/*",
    "*/locales/*",
    "*/_vendor/*",
    "*/vendored/*",
    "*version*.py",
)
DEB_NO = ("*/changelog*", "*/whats_new/*", "*/whatsnew/*", "*/generated/*", "*copyright*", "*/reference/api/*")


def members(path: Path, kind: str) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the text files of one package, in the order of their names."""
    if kind == "wheel":
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".py") and not any(fnmatch.fnmatch("/" + name.lower(), no) for no in WHEEL_NO):
                    yield name, archive.read(name)
        return
    if kind == "deb":
        packed = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], check=True, stdout=subprocess.PIPE).stdout
        archive_file: io.BytesIO | gzip.GzipFile = io.BytesIO(packed)
        ends: tuple[str, ...] = (".py", ".rst", ".rst.txt", ".txt")
    else:
        archive_file, ends = gzip.open(path), (".rst", ".txt")  # noqa: SIM115 - tarfile closes nothing it was given
    with tarfile.open(fileobj=archive_file) as tar:
        for info in sorted((i for i in tar if i.isfile()), key=lambda i: i.name):
            name = info.name.lower()
            wanted = name.endswith(ends) and (kind == "deb" or "/docs/" in name or "/doc/" in name)
            if wanted and not any(fnmatch.fnmatch(name, no) for no in (*DEB_NO, *WHEEL_NO)):
                member = tar.extractfile(info)
                assert member is not None  # a regular file
                yield info.name, member.read()
    archive_file.close()


def clean(text: str) -> str | None:
    """Normalised text without its licence header, or None for tables, generated and minified files."""
    text = text.replace("\r\n", "\n").replace("\f", "").replace(SEPARATOR, "").expandtabs(4)
    lines = [line.rstrip() for line in text.split("\n")]
    start = 0
    while start < len(lines) and (lines[start].startswith("#") or not lines[start]):
        start += 1
    if re.search(r"copyright|licen[sc]e|coding[:=]|^#!", "\n".join(lines[:start]), re.I | re.M):
        lines = lines[start:]
    if not lines or max(map(len, lines)) > 1000:
        return None
    out = re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n") + "\n"
    letters = sum(map(str.isalpha, out))
    digits = sum(map(str.isdigit, out))
    foreign = sum(ord(c) > 127 for c in out)
    if letters < 0.4 * len(out) or digits > 0.12 * len(out) or foreign > 0.05 * len(out):
        return None
    return None if re.search(r"do not edit|automatically generated|autogenerated", out[:1000], re.I) else out


def functions(text: str) -> list[str]:
    """Documented functions of a module as documents of their own, methods included, dedented."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines, out = text.split("\n"), []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and node.end_lineno:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            body = lines[first - 1 : node.end_lineno]
            if 5 <= len(body) <= 120:
                out.append(textwrap.dedent("\n".join(body)) + "\n")
    return out


def word_runs(text: str, n: int) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return zip(*(words[i:] for i in range(n)), strict=False)


def benchmark_texts(path: Path) -> Iterator[str]:
    """Every string of the benchmark files in a package: prompts, questions, solutions."""

    def strings(value: object) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            for part in value.values():
                yield from strings(part)
        elif isinstance(value, list):
            for part in value:
                yield from strings(part)

    pattern = re.compile(r"(HumanEval\.jsonl\.gz|gsm8k/cases\.jsonl|humaneval/cases\.json|mt_bench/question\.jsonl)$")
    with zipfile.ZipFile(path) as archive:
        for name in sorted(n for n in archive.namelist() if pattern.search(n)):
            raw = archive.read(name)
            text = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode()
            for item in [json.loads(text)] if name.endswith(".json") else map(json.loads, text.splitlines()):
                yield from strings(item)


class Seen:
    """Windows of five lines already in the corpus; a document made mostly of them is a near-duplicate."""

    def __init__(self) -> None:
        self.windows: set[int] = set()

    def share(self, text: str) -> tuple[float, set[int]]:
        lines = [line.strip() for line in text.split("\n") if len(line.strip()) > 8]
        keys = {
            int.from_bytes(hashlib.blake2b("\n".join(lines[i : i + 5]).encode(), digest_size=8).digest(), "little")
            for i in range(max(1, len(lines) - 4))
        }
        return len(keys & self.windows) / len(keys), keys


def build(lock_path: Path, folder: Path, out: Path, rules: Rules, preset: int = 6) -> dict[str, object]:
    """Write {train,heldout}.xz (documents joined by NUL) and report.json; returns the report."""
    sources = read_lock(lock_path)
    benchmarks: set[tuple[str, ...]] = set()
    for source in sources:
        if source.split == "benchmark":
            for text in benchmark_texts(folder / source.file):
                benchmarks.update(word_runs(text, rules.benchmark_words))
    seen, rows, start = Seen(), [], time.monotonic()
    documents: dict[str, list[tuple[str, str]]] = {"heldout": [], "train": []}
    order = sorted((s for s in sources if s.split != "benchmark"), key=lambda s: (s.split, s.name))
    for source in order:  # the held-out packages first, so that training copies of their text are the duplicates
        row = dict.fromkeys(("characters", "documents", "duplicates", "benchmark", "unfit", "over_cap"), 0)
        files = [(hashlib.sha256(name.encode()).hexdigest(), name, raw) for name, raw in members_of(source, folder)]
        for key, name, raw in sorted(files):
            text = clean(raw.decode("utf-8", "replace"))
            if text is None or not rules.file_min <= len(text) <= rules.file_max:
                row["unfit"] += 1
                continue
            if row["characters"] >= rules.package_cap and source.split == "train":
                row["over_cap"] += 1
                continue
            share, keys = seen.share(text)
            if share > rules.duplicate_share:
                row["duplicates"] += 1
                continue
            if not benchmarks.isdisjoint(word_runs(text, rules.benchmark_words)):
                row["benchmark"] += 1
                continue
            seen.windows |= keys
            parts = [text]
            if source.split == "train" and name.endswith(".py") and int(key[:8], 16) < rules.functions_share * 2**32:
                parts = functions(text) or parts
            documents[source.split] += [(key + str(i), part) for i, part in enumerate(parts)]
            row["documents"] += len(parts)
            row["characters"] += sum(map(len, parts))
        rows.append({"name": source.name, "split": source.split, **row})
        print(f"{time.monotonic() - start:6.0f} s {source.split:8s} {source.name:24s} {row}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, object] = {"packages": rows}
    for split, parts_of_split in documents.items():
        # Ordering by hash mixes the packages; files cut into functions have the lowest hashes and come first.
        text = SEPARATOR.join(part for _, part in sorted(parts_of_split))
        part_file = out / f"{split}.xz.part"
        part_file.write_bytes(lzma.compress(text.encode(), preset=preset))
        part_file.replace(out / f"{split}.xz")
        report[split] = {
            "documents": len(parts_of_split),
            "characters": len(text),
            "bytes": (out / f"{split}.xz").stat().st_size,
            "sha256": sha256_of(out / f"{split}.xz"),
        }
        print(split, report[split], flush=True)
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def members_of(source: Source, folder: Path) -> Iterator[tuple[str, bytes]]:
    path = folder / source.file
    if not path.exists():
        raise CorpusError(f"{path}: missing; run `corpus.py download`")
    return members(path, source.kind)


def read_documents(path: Path) -> list[str]:
    """Documents of a built {train,heldout}.xz."""
    return lzma.decompress(path.read_bytes()).decode().split(SEPARATOR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("lock", "download", "build"))
    parser.add_argument("--lock", type=Path, default=RECIPE / "corpus.lock")
    parser.add_argument("--downloads", type=Path, default=WORK / "downloads")
    parser.add_argument("--out", type=Path, default=WORK / "corpus")
    args = parser.parse_args()
    if args.command != "build" and shutil.which("apt-get") is None:
        print("apt-get is missing: the reST sources of the Debian documentation packages cannot be fetched here")
    if args.command == "lock":
        lock(RECIPE / "sources.toml", args.lock, args.downloads)
    elif args.command == "download":
        download(args.lock, args.downloads)
    else:
        build(args.lock, args.downloads, args.out, Rules())


if __name__ == "__main__":
    main()
