"""What is read out of a library and out of the assembler's report."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import contents
from engine.contents import Kernel

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN6kdtree12_GLOBAL__N_16kernelILi3EEEvPi' for 'sm_90'
ptxas info    : Function properties for _ZN6kdtree12_GLOBAL__N_16kernelILi3EEEvPi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 4128 bytes smem
ptxas info    : Compile time = 12.5 ms
ptxas info    : Compiling entry function 'big' for 'sm_120'
ptxas info    : Function properties for big
    200 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Function properties for called
    16 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 200 bytes cumulative stack size, 110000 bytes smem
ptxas info    : Compile time = 1.5 ms
"""


def test_kernels():
    assert contents.kernels(LOG) == (
        Kernel("_ZN6kdtree12_GLOBAL__N_16kernelILi3EEEvPi", "sm_90", registers=24, shared=4128, stack=0, spilled=0),
        Kernel("big", "sm_120", registers=255, shared=110000, stack=200, spilled=20),
    )
    assert contents.kernels("") == ()
    with pytest.raises(ValueError, match="changed its form"):
        contents.kernels("ptxas info : Compiling entry function big\n")


def test_warnings_are_what_is_no_report():
    assert contents.warnings(LOG) == []
    line = 'a.cu(3): warning #177-D: variable "x" was declared but never referenced'
    assert contents.warnings(f"{LOG}{line}\n") == [line]
    assert contents.warnings("ptxas warning : Stack size cannot be determined") != []


def test_faults():
    asked = ("sm_90", "sm_120")
    found = contents.faults(asked, ("sm_90", "sm_120"), {"a.cu": LOG})
    assert found == [
        f"a.cu: big for sm_120 has 110000 bytes of shared memory, the limit is {contents.SHARED_LIMIT}",
        "a.cu: big for sm_120 spills 20 bytes of registers a thread",
    ]
    good = LOG.partition("ptxas info    : Compiling entry function 'big'")[0]
    assert contents.faults(asked, ("sm_90", "sm_120"), {"a.cu": good}) == []
    assert contents.faults(asked, ("sm_90", "ptx_80"), {"a.cu": "a.cu: warning: w\n"}) == [
        "sm_120 was asked for and is not inside",
        "ptx_80 is inside and was not asked for",
        "a.cu: a.cu: warning: w",
    ]


def test_table_names_kernels_as_one_reads_them():
    lines = contents.table(contents.kernels(LOG)).splitlines()
    assert lines[0].split() == ["kernel", "target", "registers", "shared", "stack", "spilled"]
    assert lines[2].split() in (
        ["kernel<3>", "sm_90", "24", "4128", "0", "0"],
        ["_ZN6kdtree12_GLOBAL__N_16kernelILi3EEEvPi", "sm_90", "24", "4128", "0", "0"],  # without c++filt
    )
    assert lines[3].split() == ["big", "sm_120", "255", "110000", "200", "20"]


def fake_cuobjdump(folder: Path, elf: str, ptx: str, status: int = 0) -> Path:
    """A program that answers --list-elf and --list-ptx."""
    path = folder / "cuobjdump"
    path.write_text(f"#!/bin/sh\nif [ $1 = --list-elf ]; then echo '{elf}'; else echo '{ptx}'; fi\nexit {status}\n")
    path.chmod(0o755)
    return path


def test_targets(tmp_path: Path):
    elf = "ELF file    1: a.sm_90.cubin\nELF file    2: b.sm_90a.cubin\nELF file    3: a.sm_100.cubin"
    program = fake_cuobjdump(tmp_path, elf, "PTX file    1: a.sm_80.ptx")
    assert contents.targets(tmp_path / "lib.so", program) == {"sm_90", "sm_90a", "sm_100", "ptx_80"}
    # Nothing inside is an answer; a file that cannot be read is none.
    none = fake_cuobjdump(tmp_path, "", "File lib.so does not contain device code", 255)
    with pytest.raises(ValueError, match=r"cuobjdump --list-elf lib\.so"):
        contents.targets(tmp_path / "lib.so", none)
