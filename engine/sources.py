"""What is compiled (cuda/sources.txt), for which architectures, and what a file includes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
CUDA = CHECKOUT / "engine" / "cuda"
LIST = CUDA / "sources.txt"
INCLUDES = (CUDA, CUDA / "include", CHECKOUT / "kdtr" / "include")
STAGES = ("host", "kernel", "engine", "ktest", "bench", "etest", "demo")
# As CMake spells them: a number is code for that architecture alone, -virtual is PTX for it and all later ones.
ARCHITECTURES = ("90", "100", "120", "80-virtual")


@dataclass(frozen=True)
class Source:
    """One line of the list. path: absolute; wgmma: needs sm_90a in place of sm_90."""

    stage: str
    path: Path
    wgmma: bool = False


def read(path: Path = LIST) -> tuple[Source, ...]:
    """The list in its order. Raises ValueError naming the line that is none."""
    found: list[Source] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) < 2 or words[0] not in STAGES or words[2:] not in ([], ["wgmma"]):
            raise ValueError(
                f"{path.name}, line {number}: expected '<{'|'.join(STAGES)}> <path> [wgmma]', found '{line}'"
            )
        found.append(Source(words[0], path.parent / words[1], len(words) == 3))
    return tuple(found)


def of_stage(sources: Iterable[Source], *stages: str) -> tuple[Source, ...]:
    return tuple(source for source in sources if source.stage in stages)


def architectures(text: str | None) -> tuple[str, ...]:
    """ "90", "90,120", "90;80-virtual" or "90 120" as a tuple; None or "" is all. ValueError for anything else."""
    words = tuple(dict.fromkeys(re.split(r"[,;\s]+", (text or "").strip(" ,;"))))
    if words == ("",):
        return ARCHITECTURES
    for word in words:
        if not re.fullmatch(r"\d{2,3}(-virtual)?", word):
            raise ValueError(f"'{word}' is no architecture: expected a number such as 90, or 80-virtual for PTX")
    return words


def targets(words: Iterable[str], wgmma: bool = False) -> tuple[str, ...]:
    """The names of what is made: "sm_90", "sm_90a" for a file that needs wgmma, "ptx_80"."""
    return tuple(
        f"ptx_{word.removesuffix('-virtual')}"
        if word.endswith("-virtual")
        else "sm_90a"
        if word == "90" and wgmma
        else f"sm_{word}"
        for word in words
    )


def gencode(target: str) -> str:
    """nvcc's option for one target."""
    kind, _, number = target.partition("_")
    return f"-gencode=arch=compute_{number},code={'compute' if kind == 'ptx' else 'sm'}_{number}"


def with_headers(path: Path) -> tuple[Path, ...]:
    """A file and all that it includes from this checkout, conditional or not, in the order they are met."""
    found: dict[Path, None] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found[file] = None
            waiting += _included(file)
    return tuple(found)


def _included(file: Path) -> Iterator[Path]:
    for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', file.read_text(encoding="utf-8"), re.MULTILINE):
        for folder in (file.parent, *INCLUDES):
            if (folder / name).is_file():
                yield (folder / name).resolve()
                break
