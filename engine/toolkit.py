"""Finds a CUDA toolkit: CUDA_HOME, the wheels of `cuda-toolkit[nvcc,cccl]`, or nvcc on PATH.

nvcc and CMake expect one folder with bin, nvvm, include and lib64. Wheels have lib in place of lib64 and no .so links,
and a machine may have nvcc in one place and a library in another: then a view is made, a folder of symlinks in the
usual shape, under build/engine/.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VIEWS = Path(__file__).resolve().parent.parent / "build" / "engine"
WHEELS = "cuda-toolkit[nvcc,cccl]==13.0.3.*"
TARGET = "sbsa-linux" if platform.machine() == "aarch64" else f"{platform.machine()}-linux"
INCLUDES = ("include", f"targets/{TARGET}/include")
LIBRARIES = ("lib64", f"targets/{TARGET}/lib", "lib")
# What can be asked for: the files, in the usual shape, that tell whether it is there.
PIECES = {
    "compiler": ("bin/nvcc", "bin/ptxas", "bin/fatbinary", "nvvm/bin/cicc"),
    "runtime": ("include/cuda_runtime.h", "include/crt/host_config.h", "lib64/libcudart_static.a"),
    "cublas": ("include/cublas_v2.h", "lib64/libcublas.so"),
}
NEEDED = ("compiler", "runtime")


class BuildError(RuntimeError):
    """Something cannot be built; the message says what and why."""


class ToolkitError(BuildError):
    """There is no usable CUDA toolkit; the message lists what was looked at and what is missing."""


@dataclass(frozen=True)
class Toolkit:
    """root: a folder in the usual shape; nvcc: its compiler; version: "13.0.88"; places: where its files really are."""

    root: Path
    nvcc: Path
    version: str
    places: tuple[Path, ...]

    def tool(self, name: str) -> Path | None:
        """A program of the toolkit or of one of its places, else of PATH."""
        for folder in (self.root, *self.places):
            if (folder / "bin" / name).exists():
                return folder / "bin" / name
        found = shutil.which(name)
        return Path(found) if found else None


@dataclass(frozen=True)
class _Place:
    """A folder that was looked at; why: how it came to be looked at."""

    why: str
    root: Path | None


def find(
    needed: Iterable[str] = NEEDED,
    environment: Mapping[str, str] | None = None,
    site_packages: Sequence[Path] | None = None,
    views: Path = VIEWS,
) -> Toolkit:
    """The first place with a compiler, completed from the others of the same CUDA version.

    needed: of PIECES. environment, site_packages: None is this process's own. Raises ToolkitError.
    """
    needed = tuple(needed)
    looked = tuple(_places(os.environ if environment is None else environment, site_packages))
    roots = tuple(dict.fromkeys(place.root for place in looked if place.root is not None))
    main = next((root for root in roots if not _missing(root, ("compiler",))), None)
    if main is None:
        raise ToolkitError(_explain(looked, needed, roots[0] if roots else None))
    if all((main / file).exists() for piece in needed for file in PIECES[piece]):
        others = tuple(root for root in roots if root != main)
        return Toolkit(main, main / "bin" / "nvcc", _nvcc_version(main / "bin" / "nvcc"), (main, *others))
    release = _release(main)
    places = (main, *(root for root in roots if root != main and _release(root) in (release, None)))
    links = _links(places)
    if absent := [file for piece in needed for file in PIECES[piece] if not _covered(file, links)]:
        raise ToolkitError(_explain(looked, needed, main, absent))
    root = _view(links, views)
    return Toolkit(root, root / "bin" / "nvcc", _nvcc_version(root / "bin" / "nvcc"), places)


def _places(environment: Mapping[str, str], site_packages: Sequence[Path] | None) -> Iterator[_Place]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        value = environment.get(variable)
        yield _Place(f"${variable}{'' if value else ' (not set)'}", Path(value) if value else None)
    wheels = _wheels(site_packages)
    complete = [root for root in wheels if not _missing(root, NEEDED)]
    yield from (_Place("wheels", root) for root in complete)
    if not wheels:
        yield _Place("wheels (none installed for this Python)", None)
    program = shutil.which("nvcc", path=environment.get("PATH", ""))
    yield _Place("nvcc on PATH", _top(program)) if program else _Place("nvcc on PATH (none)", None)
    yield from (_Place("wheels", root) for root in wheels if root not in complete)


def _wheels(site_packages: Sequence[Path] | None) -> list[Path]:
    folders = (
        site_packages if site_packages is not None else [Path(sysconfig.get_path("purelib")), *map(Path, sys.path)]
    )
    roots = (folder / "nvidia" / "cu13" for folder in folders)
    return list(dict.fromkeys(root.resolve() for root in roots if root.is_dir()))


def _top(program: str) -> Path | None:
    """The folder above nvcc's own bin; asked of nvcc itself, because the command may be a script that calls it."""
    command = [program, "-dryrun", "-E", "-x", "cu", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^#\$ TOP=(.+)$", said.stderr + said.stdout, re.MULTILINE)
    return Path(found[1].strip()).resolve() if found else None


def _variants(file: str) -> tuple[str, ...]:
    """Where a file of the usual shape may lie in another shape."""
    top, _, rest = file.partition("/")
    if top == "include":
        return tuple(f"{folder}/{rest}" for folder in INCLUDES)
    if top == "lib64":
        names = (rest, f"{rest}.13") if rest.endswith(".so") else (rest,)
        return tuple(f"{folder}/{name}" for folder in LIBRARIES for name in names)
    return (file,)


def _missing(root: Path, pieces: Iterable[str]) -> list[str]:
    files = (file for piece in pieces for file in PIECES[piece])
    return [file for file in files if not any((root / variant).exists() for variant in _variants(file))]


def _release(root: Path) -> str | None:
    """ "13.0" as the headers say, None without headers."""
    for folder in INCLUDES:
        header = root / folder / "cuda_runtime_api.h"
        if header.is_file():
            text = header.read_text(encoding="utf-8", errors="replace")
            found = re.search(r"^#define CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
            return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else None
    return None


def _nvcc_version(nvcc: Path) -> str:
    said = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release [\d.]+, V([\d.]+)", said.stdout)
    if found is None:
        raise ToolkitError(f"{nvcc} does not tell its version: {(said.stdout + said.stderr).strip()[:300]}")
    return found[1]


def _links(places: Iterable[Path]) -> dict[str, Path]:
    """The view: name in the usual shape -> file or folder that it stands for. The first place that has a name wins."""
    links: dict[str, Path] = {}
    for root in places:
        for inside, folders in (("bin", ("bin",)), ("include", INCLUDES), ("lib64", LIBRARIES)):
            for folder in folders:
                for file in sorted((root / folder).iterdir()) if (root / folder).is_dir() else ():
                    links.setdefault(f"{inside}/{file.name}", file)
                    if inside == "lib64" and (found := re.match(r"(lib.+?\.so)\.\d", file.name)):
                        links.setdefault(f"lib64/{found[1]}", file)
        if (root / "nvvm").is_dir():
            links.setdefault("nvvm", root / "nvvm")
    return links


def _covered(file: str, links: Mapping[str, Path]) -> bool:
    """Whether the view has `file`, itself or inside a folder that is linked as one."""
    parts = file.split("/")
    for n in range(len(parts), 0, -1):
        if (target := links.get("/".join(parts[:n]))) is not None:
            return target.joinpath(*parts[n:]).exists()
    return False


def _view(links: Mapping[str, Path], views: Path) -> Path:
    text = "\n".join(f"{name} {target}" for name, target in sorted(links.items()))
    root = views / f"toolkit-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if root.is_dir():
        return root
    views.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=views) as name:
        made = Path(name) / "view"
        for link, target in links.items():
            (made / link).parent.mkdir(parents=True, exist_ok=True)
            (made / link).symlink_to(target)
        (made / "lib").symlink_to("lib64")
        (made / "targets").mkdir()
        (made / "targets" / TARGET).symlink_to("..")
        try:
            made.rename(root)
        except OSError:  # another process made the same one
            if not root.is_dir():
                raise
    return root


def _explain(
    looked: Iterable[_Place], needed: tuple[str, ...], nearest: Path | None, absent: Sequence[str] | None = None
) -> str:
    files = absent if absent is not None else [file for piece in needed for file in PIECES[piece]]
    if absent is None and nearest is not None:
        files = _missing(nearest, needed)
    lines = [f"no usable CUDA toolkit; missing: {', '.join(files)}"]
    for place in looked:
        lacks = "" if place.root is None else f", lacks {', '.join(_missing(place.root, needed)) or 'nothing'}"
        lines.append(f"  looked at {place.why}{'' if place.root is None else f': {place.root}'}{lacks}")
    lines.append(f"install a CUDA 13 toolkit and set CUDA_HOME, or: pip install '{WHEELS}'")
    return "\n".join(lines)
