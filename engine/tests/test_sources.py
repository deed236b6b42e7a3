"""The list of sources: complete, and read as it is written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from engine import sources
from engine.build import all_targets
from engine.sources import Source

FOLDERS = {  # of engine/cuda: the stages whose files lie there
    "common": {"kernel"},
    "kernels": {"kernel"},
    "model": {"kernel", "engine"},
    "loop": {"kernel", "engine"},
    "host": {"host"},
    "tests": {"ktest", "etest"},
    "bench": {"bench"},
    "demo": {"demo"},
}


def test_every_source_is_listed_once_in_its_stage():
    listed = Counter(source.path.relative_to(sources.CUDA) for source in sources.read())
    there = {
        path.relative_to(sources.CUDA)
        for folder in FOLDERS
        for path in (sources.CUDA / folder).glob("*")
        if path.suffix in (".cu", ".cpp", ".c")
    }
    assert set(listed) == there
    assert [path for path, count in listed.items() if count != 1] == []
    for source in sources.read():
        assert source.stage in FOLDERS[source.path.parent.name], source


def test_programs_have_names_of_their_own():
    """They end up in one folder."""
    names = Counter(source.path.stem for source in sources.read() if source.stage not in ("host", "kernel", "engine"))
    assert max(names.values()) == 1
    objects = Counter(source.path.name for source in sources.read())
    assert max(objects.values()) == 1


def test_read(tmp_path: Path):
    path = tmp_path / "sources.txt"
    path.write_text("# a comment\n\nkernel a.cu\nktest  tests/b.cu # why\nkernel\tc.cu wgmma\n")
    assert sources.read(path) == (
        Source("kernel", tmp_path / "a.cu"),
        Source("ktest", tmp_path / "tests" / "b.cu"),
        Source("kernel", tmp_path / "c.cu", wgmma=True),
    )


@pytest.mark.parametrize("line", ["kernel", "kernels a.cu", "kernel a.cu fast", "kernel a.cu wgmma wgmma", "a.cu"])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str):
    path = tmp_path / "sources.txt"
    path.write_text(f"kernel a.cu\n{line}\n")
    with pytest.raises(ValueError, match=f"sources.txt, line 2: .*found '{line}'"):
        sources.read(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, sources.ARCHITECTURES),
        ("", sources.ARCHITECTURES),
        ("90", ("90",)),
        ("90,120", ("90", "120")),
        ("120; 90;", ("120", "90")),
        ("90 80-virtual 90", ("90", "80-virtual")),
    ],
)
def test_architectures(text: str | None, expected: tuple[str, ...]):
    assert sources.architectures(text) == expected


@pytest.mark.parametrize("text", ["sm_90", "90a", "9", "virtual", "90-real", "90,,x"])
def test_architectures_that_are_none(text: str):
    with pytest.raises(ValueError, match="is no architecture"):
        sources.architectures(text)


def test_a_file_that_needs_wgmma_is_made_for_sm_90a():
    assert sources.targets(("90", "100", "80-virtual")) == ("sm_90", "sm_100", "ptx_80")
    assert sources.targets(("90", "100", "80-virtual"), wgmma=True) == ("sm_90a", "sm_100", "ptx_80")
    assert sources.gencode("sm_90a") == "-gencode=arch=compute_90a,code=sm_90a"
    assert sources.gencode("ptx_80") == "-gencode=arch=compute_80,code=compute_80"
    plain, wgmma = Source("kernel", Path("a.cu")), Source("kernel", Path("b.cu"), wgmma=True)
    assert all_targets(("90", "120"), [plain]) == ("sm_90", "sm_120")
    assert all_targets(("90", "120", "80-virtual"), [wgmma, plain]) == ("sm_90", "sm_90a", "sm_120", "ptx_80")


def test_what_a_file_includes(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.cu").write_text('#include <vector>\n#ifdef X\n  #  include "b/b.h"\n#endif\n')
    (tmp_path / "b" / "b.h").write_text('#include "c.h"\n#include "common/error.h"\n')
    (tmp_path / "b" / "c.h").write_text('#include "../a.cu"\n')
    found = sources.with_headers(tmp_path / "a.cu")
    assert len(found) == len(set(found))
    names = {path.name for path in found}
    # error.h lies in engine/cuda, and brings port.h, the C ABI and what executes kernels on the CPU.
    assert {"a.cu", "b.h", "c.h", "error.h", "port.h", "kdtree_engine.h", "kdtree_heap_tree.h", "simt.h"} <= names
