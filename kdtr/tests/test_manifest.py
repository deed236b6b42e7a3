"""The manifest names every missing, extra and changed file, and its text depends on its content only."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kdtr
from kdtr import manifest
from kdtr.manifest import Entry, Fault, Manifest, ManifestError, Update

SUM = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc", FIPS 180-2 appendix B.1


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """Two files in a folder and one beside it, all listed."""
    for name in ("golden/a.bin", "golden/deep/b.bin", "readme.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"abc")
    path = tmp_path / "manifest.toml"
    entries = [
        Entry("readme.txt", SUM, 3, 'MIT "or"\n\\ Apache', "0x7f", "by hand \x7f\té"),
        Entry("golden/a.bin", SUM, 3, "MIT", 7, "python -m reference.golden"),
        Entry("golden/deep/b.bin", SUM, 3, "MIT", None, "python -m reference.golden"),
    ]
    manifest.save(path, Manifest(tuple(entries), ("golden",)))
    return path


def test_text_comes_back_and_is_sorted(listed: Path) -> None:
    found = manifest.load(listed)
    assert [entry.path for entry in found.entries] == ["golden/a.bin", "golden/deep/b.bin", "readme.txt"]
    assert found.entries[2] == Entry("readme.txt", SUM, 3, 'MIT "or"\n\\ Apache', "0x7f", "by hand \x7f\té")
    assert (found.entries[0].seed, found.entries[1].seed) == (7, None)
    assert found.folders == ("golden",)
    again = Manifest(tuple(reversed(found.entries)), found.folders)
    assert manifest.dumps(again) == listed.read_text(encoding="utf-8")


def test_nothing_to_say(listed: Path) -> None:
    steps: list[int] = []
    assert manifest.check(listed, progress=steps.append) == ()
    assert sum(steps) == 9


def test_every_fault_is_named(listed: Path) -> None:
    base = listed.parent
    (base / "golden/a.bin").write_bytes(b"abd")
    (base / "readme.txt").write_bytes(b"abcd")
    (base / "golden/deep/b.bin").unlink()
    (base / "golden/deep/new.bin").write_bytes(b"")
    (base / "outside.bin").write_bytes(b"")
    for ignored in ("golden/.hidden", "golden/__pycache__/x.pyc", "golden/.cache/x"):
        (base / ignored).parent.mkdir(exist_ok=True)
        (base / ignored).write_bytes(b"")
    faults = manifest.check(listed)
    assert [(fault.path, fault.what) for fault in faults] == [
        ("golden/a.bin", "changed"),
        ("golden/deep/b.bin", "missing"),
        ("golden/deep/new.bin", "extra"),
        ("readme.txt", "changed"),
    ]
    assert faults[0].detail.startswith(
        f"expected sha256 {SUM}, found a52d159f262b2c6ddb724a61840befc36eb30c88877a4030b65"
    )
    assert faults[3].detail == "expected 3 bytes, found 4"
    assert Fault("outside.bin", "extra", "not listed") in manifest.check(listed, ["."])


def test_a_git_lfs_pointer_is_named(listed: Path) -> None:
    (listed.parent / "golden/a.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    (fault,) = manifest.check(listed)
    assert "Git-LFS pointer" in fault.detail


def test_update(listed: Path, tmp_path: Path) -> None:
    base = listed.parent
    before = manifest.load(listed)
    assert manifest.update(listed) == Update((), (), ())
    (base / "readme.txt").write_bytes(b"other")
    (base / "golden/a.bin").unlink()
    meta = kdtr.provenance(seed=5, command="python make.py", license="CC0-1.0")
    kdtr.save(base / "golden/c.kdtr", {"x": np.zeros(2)}, kind="any", meta=meta)
    (base / "more").mkdir()
    (base / "more/d.bin").write_bytes(b"abc")
    with pytest.raises(ManifestError, match=r"new file 'more/d.bin': its licence is not known"):
        manifest.update(listed, ["more"])
    assert manifest.load(listed) == before  # nothing written
    done = manifest.update(listed, ["more"], licence="MIT", generator="by hand")
    assert done == Update(("golden/c.kdtr", "more/d.bin"), ("readme.txt",), ("golden/a.bin",))
    after = {entry.path: entry for entry in manifest.load(listed).entries}
    assert after["golden/c.kdtr"].licence == "MIT"  # what is asked for wins over the file's own
    assert after["golden/c.kdtr"].seed == 5
    assert after["readme.txt"] == replace(before.entries[2], sha256=manifest.sha256(base / "readme.txt"), bytes=5)
    assert manifest.load(listed).folders == ("golden", "more")
    assert manifest.check(listed) == ()


def test_update_makes_a_manifest_from_what_the_files_say(tmp_path: Path) -> None:
    meta = kdtr.provenance(seed=5, command="python make.py", license="CC0-1.0")
    kdtr.save(tmp_path / "c.kdtr", {"x": np.zeros(2)}, kind="any", meta=meta)
    done = manifest.update(tmp_path / "m.toml", ["."])
    assert done.added == ("c.kdtr",)
    (entry,) = manifest.load(tmp_path / "m.toml").entries
    assert (entry.licence, entry.seed, entry.generator) == ("CC0-1.0", 5, "python make.py")
    assert manifest.check(tmp_path / "m.toml") == ()
    manifest.update(tmp_path / "empty.toml")
    assert manifest.load(tmp_path / "empty.toml") == Manifest(())


GOOD = f'[[files]]\npath = "a"\nsha256 = "{SUM}"\nbytes = 3\nlicence = "MIT"\ngenerator = "x"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[files", "is not TOML"),
        ("\xff", "is not TOML"),
        ("version = 1", "unknown key 'version'"),
        ('folders = "golden"', "must be a list of strings"),
        ('folders = ["/etc"]', "path '/etc' must be relative"),
        ("[files]\na = 1", r"written as \[\[files\]\]"),
        ("files = [1]", r"written as \[\[files\]\]"),
        (GOOD + "extra = 1", r"files\[0\] \('a'\): unknown key 'extra'"),
        (GOOD.replace("bytes = 3\n", ""), "key 'bytes' is missing"),
        (GOOD.replace("= 3", "= true"), "bytes is True, must be int"),
        (GOOD.replace("= 3", "= -3"), "must not be negative"),
        (GOOD + "seed = 1.5", "seed is 1.5, must be int or str"),
        (GOOD.replace("ba78", "BA78"), "64 lower-case hex digits"),
        (GOOD.replace('"a"', '"../a"'), r"path '\.\./a' must be relative"),
        (GOOD.replace('"a"', '"a//b"'), "must be relative"),
        (GOOD.replace('"a"', '"c:/b"'), "must be relative"),
        (GOOD.replace('"a"', "'a\\b'"), "must be relative"),
        (GOOD * 2, "'a' is listed twice"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "m.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ManifestError, match=message) as caught:
        manifest.load(path)
    assert str(path) in str(caught.value)


def test_no_file_and_no_folder(tmp_path: Path, listed: Path) -> None:
    with pytest.raises(ManifestError, match="No such file"):
        manifest.load(tmp_path / "absent.toml")
    with pytest.raises(ManifestError, match="folder 'absent' does not exist"):
        manifest.check(listed, ["absent"])


def test_a_file_name_that_is_no_text(tmp_path: Path) -> None:
    try:
        (tmp_path / os.fsdecode(b"\xff.bin")).write_bytes(b"")
    except OSError:
        pytest.skip("the file system takes only names in Unicode")
    with pytest.raises(ManifestError, match="is not Unicode text"):
        manifest.update(tmp_path / "m.toml", ["."], licence="MIT", generator="x")
    assert not (tmp_path / "m.toml").exists()
