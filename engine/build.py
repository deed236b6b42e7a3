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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engine import contents, sources
from engine.sources import Source
from engine.toolkit import BuildError as BuildError
from engine.toolkit import Toolkit, find

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
CUDA_LINK = ("-cudart=static", "-nodlink")  # no relocatable device code: nothing of the device's to link
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
        if source.path.suffix == ".c" and self.architectures:
            flags = tuple("-Xcompiler=-std=c99" if flag == "-std=c++17" else flag for flag in flags)
        if self.architectures:
            flags += tuple(map(sources.gencode, sources.targets(self.architectures, source.wgmma)))
        elif source.path.name == "simt.cpp":
            # The scheduler switches stacks behind the sanitizer's back: it announces that itself.
            flags = tuple(flag for flag in flags if not flag.startswith("-fsanitize=thread"))
        language = () if self.architectures else ("-x", "c++")
        folders = tuple(f"-I{folder}" for folder in sources.INCLUDES)
        return (self.program, *flags, *folders, *language, "-c", str(source.path), "-o")


@dataclass(frozen=True)
class Step:
    """One run of a compiler: `command` and then `path` is what is run; what it prints is kept in a .log beside it."""

    command: tuple[str, ...]
    path: Path

    def run(self) -> bool:
        """Make `path` unless it exists; whether it had to be made. Raises BuildError with the compiler's output."""
        if self.path.exists():
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        done = subprocess.run([*self.command, str(partial)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            partial.unlink(missing_ok=True)
            said = "\n".join(contents.warnings(done.stdout + done.stderr))
            command = " ".join((*self.command, self.path.name))
            raise BuildError(f"{command}\n{said or f'exit status {done.returncode}, no output'}")
        self.path.with_name(f"{self.path.name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
        partial.replace(self.path)
        return True

    def log(self) -> str:
        return self.path.with_name(f"{self.path.name}.log").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Plan:
    """What is to be made for one file.

    targets: of a CUDA library, what it is to hold. first: what must be there before, the library of a program.
    """

    objects: dict[str, Step]
    link: Step
    cache: Path
    targets: tuple[str, ...] = ()
    first: Plan | None = None

    @property
    def path(self) -> Path:
        return self.link.path

    def run(self, jobs: int | None = None) -> Built:
        """Make what is not there yet. jobs: compilers at a time, None: one a core. Raises BuildError."""
        made = self.first.run(jobs).made if self.first else 0
        made += compile_objects([self], jobs)
        with _alone(self.cache):
            made += self.link.run()
        return Built(self.path, {name: step.log() for name, step in self.objects.items()}, made)


@dataclass(frozen=True)
class Built:
    """A finished file, what the compilers printed for each source, and how many files had to be made for it."""

    path: Path
    logs: dict[str, str]
    made: int


def compile_objects(plans: Sequence[Plan], jobs: int | None = None) -> int:
    """Make the objects of plans of one cache, side by side; how many had to be made. Raises BuildError."""
    steps = {step.path: step for plan in plans for step in plan.objects.values()}
    with _alone(plans[0].cache), ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        return sum(pool.map(Step.run, steps.values()))


def library(kind: str) -> Path:
    """The library of a kind, "cuda" or "host", built if anything is new. Raises BuildError."""
    if kind == "host":
        return host_library()
    if kind == "cuda":
        return cuda_library()
    raise ValueError(f"kind is '{kind}', expected 'cuda' or 'host'")


def host_library() -> Path:
    """Kernels as a shared library whose C ABI takes host pointers. Raises BuildError."""
    return plan_host().run().path


def cuda_library(architectures: Sequence[str] | None = None) -> Path:
    """The engine for these architectures (None: $KDTREE_CUDA_ARCH, else all). Raises BuildError, ToolkitError."""
    return plan_cuda(architectures).run().path


def plan_host(cache: Path = CACHE, list_file: Path = sources.LIST) -> Plan:
    listed = sources.of_stage(sources.read(list_file), "host", "kernel", "engine")
    return _plan(listed, host_recipe(), HOST_NAME, ("-shared", "-Wl,-z,defs"), cache)


def plan_host_program(
    test: Source, sanitizer: Sanitizer = "none", cache: Path = CACHE, list_file: Path = sources.LIST
) -> Plan:
    """A test, bench or demo as a program that runs kernels on the CPU."""
    listed = sources.of_stage(sources.read(list_file), "host", "kernel", "engine")
    return _plan((*listed, test), host_recipe(sanitizer), test.path.stem, (), cache)


def plan_cuda(architectures: Sequence[str] | None = None, cache: Path = CACHE, list_file: Path = sources.LIST) -> Plan:
    chosen = tuple(architectures or sources.architectures(os.environ.get("KDTREE_CUDA_ARCH")))
    listed = sources.of_stage(sources.read(list_file), "kernel", "engine")
    plan = _plan(listed, cuda_recipe(find(), chosen, listed), CUDA_NAME, ("-shared", "-Xlinker", "-z,defs"), cache)
    return replace(plan, targets=all_targets(chosen, listed))


def plan_cuda_program(
    test: Source,
    architectures: Sequence[str] | None = None,
    cache: Path = CACHE,
    list_file: Path = sources.LIST,
) -> Plan:
    """A program: ktest and bench hold the objects of the library, etest and demo load the library."""
    library = plan_cuda(architectures, cache, list_file)
    chosen = tuple(architectures or sources.architectures(os.environ.get("KDTREE_CUDA_ARCH")))
    listed = sources.of_stage(sources.read(list_file), "kernel", "engine")
    recipe = cuda_recipe(find(), chosen, listed)
    if test.stage in ("ktest", "bench"):
        return _plan((*listed, test), recipe, test.path.stem, (), cache)
    options = (str(library.path), "-Xlinker", f"-rpath,{library.path.parent}")
    return replace(_plan((test,), recipe, test.path.stem, options, cache), first=library)


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
    flags = (
        *("-std=c++17", "-O3", "-fmad=false", "-lineinfo", "-Xptxas", "-v"),
        *("-Xcompiler", ",".join((*WARNINGS, "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"))),
        f'-DKDTREE_ARCHITECTURES="{" ".join(all_targets(architectures, listed))}"',
    )
    host = os.environ.get("CXX") or "g++"
    compiler = ("-ccbin", host) if "CXX" in os.environ else ()
    identity = f"{toolkit.version}\n{_output([host, '--version']) if shutil.which(host) else ''}"
    return Recipe("cuda", str(toolkit.nvcc), (*compiler, *flags), (*compiler, *CUDA_LINK), identity, architectures)


def all_targets(architectures: Iterable[str], listed: Iterable[Source]) -> tuple[str, ...]:
    """What a library of these sources holds, as it says of itself: "sm_90", "sm_90a", "ptx_80"."""
    kinds = sorted({source.wgmma for source in listed})
    return tuple(dict.fromkeys(t for word in architectures for kind in kinds for t in sources.targets((word,), kind)))


def _plan(listed: Iterable[Source], recipe: Recipe, name: str, options: tuple[str, ...], cache: Path) -> Plan:
    objects = {}
    for source in listed:
        if not source.path.is_file():
            raise BuildError(f"{source.path} is in the list of sources but does not exist")
        command = recipe.command(source)
        read = (file.read_bytes() for file in sources.with_headers(source.path))
        key = _key(recipe, command, read)
        path = cache / "objects" / f"{source.path.stem}-{recipe.name}-{key}.o"
        objects[source.path.name] = Step(command, path)
    command = (recipe.program, *(str(step.path) for step in objects.values()), *options, *recipe.link, "-o")
    return Plan(objects, Step(command, cache / f"{recipe.name}-{_key(recipe, command)}" / name), cache)


def _key(recipe: Recipe, command: Sequence[str], contents: Iterable[bytes] = ()) -> str:
    digest = hashlib.sha256()
    for part in (recipe.identity.encode(), *map(str.encode, command), *contents):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Two processes do not make the same files: the second waits and finds them."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
