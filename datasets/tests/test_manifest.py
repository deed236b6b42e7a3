"""Every data file that is shipped is listed with its SHA-256, licence and origin."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdtr import manifest

PATH = Path(__file__).resolve().parent.parent / "manifest.toml"
SUFFIXES = (".kdtr", ".jsonl", ".json", ".txt")
FOLDERS = ("golden", "models", "prompts")
LICENCES = ("Apache-2.0", "MIT", "BSD-3-Clause")


def test_files_are_as_listed():
    assert manifest.check(PATH) == ()


def test_every_data_file_is_listed():
    listed = {entry.path for entry in manifest.load(PATH).entries}
    found = {
        path.relative_to(PATH.parent).as_posix()
        for folder in FOLDERS
        for path in (PATH.parent / folder).rglob("*")
        if path.suffix in SUFFIXES
    }
    assert found - listed == set()


def test_licences_are_known_and_origins_told():
    for entry in manifest.load(PATH).entries:
        assert entry.licence in LICENCES, entry.path
        assert entry.generator, entry.path


def test_a_changed_file_is_told(tmp_path):
    entry = manifest.load(PATH).entries[-1]
    (tmp_path / entry.path).parent.mkdir(parents=True)
    data = bytearray((PATH.parent / entry.path).read_bytes())
    (tmp_path / entry.path).write_bytes(data)
    manifest.save(tmp_path / "manifest.toml", manifest.Manifest((entry,)))
    assert manifest.check(tmp_path / "manifest.toml") == ()
    data[0] ^= 1
    (tmp_path / entry.path).write_bytes(data)
    (fault,) = manifest.check(tmp_path / "manifest.toml")
    assert (fault.path, fault.what) == (entry.path, "changed")


@pytest.mark.parametrize("folder", FOLDERS)
def test_sizes_stay_within_their_share(folder):
    """Models at most 38 MiB with card and rows, golden files 10 with the recorded lists, prompts 1."""
    size = sum(e.bytes for e in manifest.load(PATH).entries if e.path.startswith(folder + "/"))
    assert size <= {"models": 38, "golden": 10, "prompts": 1}[folder] * 2**20
