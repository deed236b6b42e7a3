"""What a built CUDA library holds: architectures (cuobjdump), and what each kernel takes (the assembler's report)."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SHARED_LIMIT = 101_376  # bytes of shared memory a block may have on sm_120, the least of all targets
_SIZES = re.compile(
    r"(?:(?P<stack>\d+) bytes stack frame)|(?:(?P<stores>\d+) bytes spill stores)|(?:(?P<loads>\d+) bytes spill loads)"
    r"|(?:Used (?P<registers>\d+) registers)|(?:(?P<shared>\d+) bytes smem)"
)


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture. shared: static bytes a block; stack, spilled: bytes a thread."""

    name: str
    target: str
    registers: int
    shared: int
    stack: int
    spilled: int


def kernels(log: str) -> tuple[Kernel, ...]:
    """Of the output of `ptxas -v`: every entry function, names as the compiler mangles them."""
    found: list[Kernel] = []
    for part in re.split(r"^ptxas info\s*: Compiling entry function ", log, flags=re.MULTILINE)[1:]:
        head = re.match(r"'(.+?)' for '(.+?)'", part)
        if head is None:
            raise ValueError(f"the assembler's report has changed its form: {part[:100]}")
        # A called function's own report follows under its own "Function properties": the kernel's is the first.
        sizes = dict.fromkeys(("stack", "stores", "loads", "registers", "shared"), 0)
        for match in reversed(list(_SIZES.finditer(part))):
            sizes |= {key: int(value) for key, value in match.groupdict().items() if value is not None}
        spilled = sizes["stores"] + sizes["loads"]
        found.append(Kernel(head[1], head[2], sizes["registers"], sizes["shared"], sizes["stack"], spilled))
    return tuple(found)


def warnings(log: str) -> list[str]:
    """The lines of a compiler's output that are not the assembler's report."""
    return [
        line
        for line in log.splitlines()
        if line.strip() and not re.match(r"ptxas info\s*:|\s+\d+ bytes (stack frame|gmem)", line)
    ]


def targets(library: Path, cuobjdump: Path) -> frozenset[str]:
    """ "sm_90", "ptx_80": what is inside. Raises ValueError if cuobjdump cannot read the file."""
    found: set[str] = set()
    for option, kind in (("--list-elf", "sm"), ("--list-ptx", "ptx")):
        said = subprocess.run([str(cuobjdump), option, str(library)], capture_output=True, text=True, check=False)
        names = re.findall(rf"\.sm_(\w+)\.{'cubin' if kind == 'sm' else 'ptx'}", said.stdout)
        if said.returncode != 0 and not names and "no device code" not in (said.stdout + said.stderr).lower():
            raise ValueError(f"{cuobjdump.name} {option} {library.name}: {(said.stdout + said.stderr).strip()[:300]}")
        found |= {f"{kind}_{name}" for name in names}
    return frozenset(found)


def faults(asked: Iterable[str], inside: Iterable[str], logs: Mapping[str, str]) -> list[str]:
    """What is wrong with a library, in sentences. asked, inside: targets; logs: the compiler's output by file."""
    asked, inside = frozenset(asked), frozenset(inside)
    found = [f"{target} was asked for and is not inside" for target in sorted(asked - inside)]
    found += [f"{target} is inside and was not asked for" for target in sorted(inside - asked)]
    for file, log in logs.items():
        found += [f"{file}: {line}" for line in warnings(log)]
        for kernel in kernels(log):
            name = f"{file}: {demangle((kernel.name,))[0]} for {kernel.target}"
            if kernel.shared > SHARED_LIMIT:
                found.append(f"{name} has {kernel.shared} bytes of shared memory, the limit is {SHARED_LIMIT}")
            if kernel.spilled:
                found.append(f"{name} spills {kernel.spilled} bytes of registers a thread")
    return found


def demangle(names: Iterable[str]) -> tuple[str, ...]:
    """Names of kernels as one reads them, without arguments; as they are where c++filt is missing."""
    names = tuple(names)
    if not names or shutil.which("c++filt") is None:
        return names
    # Without the parameter list, and without the hash that nvcc puts into the name of an unnamed namespace.
    said = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True)
    plain = (re.sub(r"\(anonymous namespace\)::|_GLOBAL__N__\w+::", "", line) for line in said.stdout.splitlines())
    return tuple(name.removeprefix("void ").replace("kdtree::", "") for name in plain)


def table(found: Iterable[Kernel]) -> str:
    """One line a kernel and architecture."""
    found = tuple(found)
    rows: list[tuple[str, ...]] = [("kernel", "target", "registers", "shared", "stack", "spilled")]
    for kernel, name in zip(found, demangle(kernel.name for kernel in found), strict=True):
        sizes = (kernel.registers, kernel.shared, kernel.stack, kernel.spilled)
        rows.append((name, kernel.target, *map(str, sizes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
