"""Compiles the engine's libraries and test programs, each file once for equal contents, flags and compiler.

The CUDA library needs a toolkit (engine/toolkit.py), the host library - the same kernels executed on the CPU, see
cuda/host/README.md - a C++20 compiler alone. Everything lies under build/engine/ and may be deleted at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine import sources
from engine.sources import Source
from engine.toolkit import BuildError, Toolkit, find

CACHE = sources.CHECKOUT / "build" / "engine"
HOST_NAME = "libkdtree_engine_host.so"
CUDA_NAME = "libkdtree_engine.so"
WARNINGS = ("-Wall", "-Wextra")
HOST_FLAGS = ("-std=c++20", "-DKDTREE_HOST", "-g1", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", *WARNINGS)
SANITIZERS = {
    "none": ("-O2",),
    "thread": ("-O1", "-fsanitize=thread"),
    "address": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
}
Sanitizer = Literal["none", "thread", "address"]


@dataclass(frozen=True)
class Recipe:
    """How one target is made. identity: what the compilers say of themselves."""

    name: str
    program: str
    flags: tuple[str, ...]
    link: tuple[str, ...]
    identity: str
    architectures: tuple[str, ...] = ()

    def command(self, source: Source) -> tuple[str, ...]:
        """Compiles `source`; what is missing is the name of the object."""
        flags = self.flags
        if self.architectures:
            flags += tuple(map(sources.gencode, sources.targets(self.architectures, source.wgmma)))
        elif source.path.name == "simt.cpp":
            # The scheduler switches stacks behind the sanitizer's back: it announces that itself.
            flags = tuple(flag for flag in flags if not flag.startswith("-fsanitize=thread"))
        language = () if self.architectures else ("-x", "c++")
        folders = tuple(f"-I{folder}" for folder in sources.INCLUDES)
        return (self.program, *flags, *folders, *language, "-c", str(source.path), "-o")


@dataclass(frozen=True)
class Built:
    """A finished file, what the compilers printed for each source, and how many files had to be made for it."""

    path: Path
    logs: dict[str, str]
    made: int


def library(kind: str) -> Path:
    """The library of a kind, "cuda" or "host", built if anything is new. Raises BuildError."""
    if kind == "host":
        return host_library()
    if kind == "cuda":
        return cuda_library()
    raise ValueError(f"kind is '{kind}', expected 'cuda' or 'host'")


def host_library() -> Path:
    """Kernels as a shared library whose C ABI takes host pointers. Raises BuildError."""
    return build_host().path


def cuda_library(architectures: Sequence[str] | None = None) -> Path:
    """The engine for these architectures (None: $KDTREE_CUDA_ARCH, else all). Raises BuildError, ToolkitError."""
    return build_cuda(architectures).path


def build_host(cache: Path = CACHE, list_file: Path = sources.LIST, jobs: int | None = None) -> Built:
    listed = sources.of_stage(sources.read(list_file), "host", "kernel")
    return _link(listed, host_recipe(), HOST_NAME, ("-shared", "-Wl,-z,defs"), cache, jobs)


def build_cuda(
    architectures: Sequence[str] | None = None,
    cache: Path = CACHE,
    list_file: Path = sources.LIST,
    jobs: int | None = None,
) -> Built:
    chosen = tuple(architectures or sources.architectures(os.environ.get("KDTREE_CUDA_ARCH")))
    listed = sources.of_stage(sources.read(list_file), "kernel", "engine")
    recipe = cuda_recipe(find(), chosen, listed)
    return _link(listed, recipe, CUDA_NAME, ("-shared", "-Xlinker", "-z,defs"), cache, jobs)


def host_program(
    test: Source,
    sanitizer: Sanitizer = "none",
    cache: Path = CACHE,
    list_file: Path = sources.LIST,
    jobs: int | None = None,
) -> Built:
    """A test of kernels as a program that runs on the CPU. Raises BuildError."""
    listed = sources.of_stage(sources.read(list_file), "host", "kernel")
    return _link((*listed, test), host_recipe(sanitizer), test.path.stem, (), cache, jobs)


def host_recipe(sanitizer: Sanitizer = "none") -> Recipe:
    """$CXX, else g++. Raises BuildError without one."""
    program = os.environ.get("CXX") or "g++"
    if shutil.which(program) is None:
        raise BuildError(f"no C++ compiler: {program} is not on PATH (the host library needs g++ 11 or newer)")
    flags = SANITIZERS[sanitizer]
    name = "host" if sanitizer == "none" else f"host-{sanitizer}"
    return Recipe(name, program, (*HOST_FLAGS, *flags), (*flags, "-pthread"), _output([program, "--version"]))


def cuda_recipe(toolkit: Toolkit, architectures: tuple[str, ...], listed: Iterable[Source]) -> Recipe:
    """Strict rounding: no fast-math, and a*b+c is fused only where the source says fma."""
    made = dict.fromkeys(t for source in listed for t in sources.targets(architectures, source.wgmma))
    names = sorted(made, key=lambda t: (t.startswith("ptx"), int(t.partition("_")[2].rstrip("a")), t))
    flags = (
        *("-std=c++17", "-O3", "-fmad=false", "-lineinfo", "-Xptxas", "-v"),
        *("-Xcompiler", ",".join((*WARNINGS, "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"))),
        f'-DKDTREE_ARCHITECTURES="{" ".join(names)}"',
    )
    host = os.environ.get("CXX") or "g++"
    flags = (*(("-ccbin", host) if "CXX" in os.environ else ()), *flags)
    identity = f"{toolkit.version}\n{_output([host, '--version']) if shutil.which(host) else ''}"
    return Recipe("cuda", str(toolkit.nvcc), flags, ("-cudart=static",), identity, architectures)


def _link(
    listed: Iterable[Source], recipe: Recipe, name: str, options: tuple[str, ...], cache: Path, jobs: int | None
) -> Built:
    listed = tuple(listed)
    with _alone(cache), ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(lambda source: _object(source, recipe, cache / "objects"), listed))
        command = (recipe.program, *options, *(str(built.path) for built in objects), *recipe.link, "-o")
        path = cache / f"{recipe.name}-{_key(recipe, command)}" / name
        made = _make(command, path)
    logs = {source.path.name: _log(built.path) for source, built in zip(listed, objects, strict=True)}
    return Built(path, logs, made + sum(built.made for built in objects))


def _object(source: Source, recipe: Recipe, folder: Path) -> Built:
    if not source.path.is_file():
        raise BuildError(f"{source.path.relative_to(sources.CHECKOUT)} is in sources.txt but does not exist")
    command = recipe.command(source)
    contents = (file.read_bytes() for file in sources.with_headers(source.path))
    path = folder / f"{source.path.stem}-{recipe.name}-{_key(recipe, command, contents)}.o"
    return Built(path, {}, _make(command, path))


def _make(command: Sequence[str], path: Path) -> int:
    """Run `command` for `path` unless that exists; what it prints is kept beside it. Returns how often it ran."""
    if path.exists():
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    done = subprocess.run([*command, str(partial)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        raise BuildError(f"{' '.join((*command, path.name))}\n{done.stdout}{done.stderr}".rstrip())
    path.with_name(f"{path.name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    partial.replace(path)
    return 1


def _key(recipe: Recipe, command: Sequence[str], contents: Iterable[bytes] = ()) -> str:
    digest = hashlib.sha256()
    for part in (recipe.identity.encode(), *map(str.encode, command), *contents):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


def _log(path: Path) -> str:
    return path.with_name(f"{path.name}.log").read_text(encoding="utf-8")


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Two processes do not make the same files: the second waits and finds them."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
