"""A manifest: SHA-256, size and origin of every data file, in TOML beside the files: what fixtures are trusted by.

The checksums inside a KDTR file detect accidents; whether a file is the published one is told by its SHA-256 here.

    folders = ["golden"]                    # every file below these must be listed

    [[files]]
    path = "golden/tree_ties.kdtr"          # relative to the manifest, with "/"
    sha256 = "0f3c..."
    bytes = 8192
    licence = "Apache-2.0"
    seed = 7                                # integer or string; left out where nothing was drawn
    generator = "python -m reference.golden"

Files are sorted by path and keys come in this order, so equal content gives equal text. Unknown keys are errors.
Files and folders whose names begin with "." are not looked at, nor are `__pycache__` and the manifest itself.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from kdtr.container import Container
from kdtr.errors import KDTRError
from kdtr.foreign import whole_file

Progress = Callable[[int], object]
_BLOCK: Final = 1 << 20
_LFS: Final = b"version https://git-lfs.github.com/spec/"
_CONTROL: Final = re.compile(r'[\x00-\x1f\x7f"\\]')


class ManifestError(KDTRError):
    """The manifest cannot be read or written: where, what was expected and what was found."""

    code: ClassVar[str] = "MANIFEST"


@dataclass(frozen=True, slots=True)
class Entry:
    """One listed file: path relative to the manifest, SHA-256 in lower-case hex, size in bytes, and its origin."""

    path: str
    sha256: str
    bytes: int
    licence: str
    seed: int | str | None
    generator: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Entries sorted by path, and the folders in which no other file may lie."""

    entries: tuple[Entry, ...]
    folders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """One difference between manifest and files: `what` is "missing", "extra" or "changed"."""

    path: str
    what: str
    detail: str


@dataclass(frozen=True, slots=True)
class Update:
    """What `update()` did, by path."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]


def load(path: str | os.PathLike[str]) -> Manifest:
    """Read a manifest. Raises MANIFEST with the entry and key at fault."""
    where = os.fspath(path)
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ManifestError(f"cannot be read: {error.strerror or error}", path=where) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ManifestError(f"is not TOML: {error}", path=where) from error
    if unknown := set(table) - {"folders", "files"}:
        raise ManifestError(f"unknown key {min(unknown)!r}; known are folders, files", path=where)
    folders, files = table.get("folders", []), table.get("files", [])
    if not (isinstance(folders, list) and all(isinstance(folder, str) for folder in folders)):
        raise ManifestError(f"folders is {folders!r}, must be a list of strings", path=where)
    if not isinstance(files, list):
        raise ManifestError("files must be written as [[files]]", path=where)
    entries = tuple(_entry(row, at, where) for at, row in enumerate(files))
    for folder in folders:
        _check_path(folder, where)
    entries = tuple(sorted(entries, key=lambda entry: entry.path))
    for one, other in itertools.pairwise(entries):
        if one.path == other.path:
            raise ManifestError(f"'{one.path}' is listed twice", path=where)
    return Manifest(entries, tuple(folders))


def dumps(manifest: Manifest) -> str:
    """The text of a manifest: the same for equal content."""
    lines = []
    if manifest.folders:
        lines.append(f"folders = [{', '.join(_quote(folder) for folder in sorted(set(manifest.folders)))}]")
    for entry in sorted(manifest.entries, key=lambda entry: entry.path):
        lines += ["", "[[files]]"] if lines else ["[[files]]"]
        for field in fields(entry):
            value = getattr(entry, field.name)
            if value is not None:
                lines.append(f"{field.name} = {_quote(value) if isinstance(value, str) else value}")
    return "\n".join(lines) + "\n"


def save(path: str | os.PathLike[str], manifest: Manifest) -> None:
    """Write a manifest, whole or not at all. Raises MANIFEST for paths that `load` refuses, and if it cannot write."""
    where = os.fspath(path)
    text = dumps(manifest)
    for entry in manifest.entries:
        _check_path(entry.path, where)
    try:
        with whole_file(path) as temporary:
            Path(temporary).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise ManifestError(f"cannot be written: {error.strerror or error}", path=where) from error


def check(
    path: str | os.PathLike[str], folders: Iterable[str] = (), progress: Progress | None = None
) -> tuple[Fault, ...]:
    """Every missing, extra and changed file, sorted by path; empty when all is as listed.

    `folders`, relative to the manifest, are searched for extra files beside those that the manifest names.
    `progress` is told the bytes of each step done.
    """
    manifest = load(path)
    base = Path(path).parent
    listed = {entry.path: entry for entry in manifest.entries}
    faults = []
    for entry in manifest.entries:
        file = base / entry.path
        if not file.is_file():
            faults.append(Fault(entry.path, "missing", "is a folder" if file.is_dir() else "no such file"))
            continue
        size = file.stat().st_size
        if size != entry.bytes:
            faults.append(Fault(entry.path, "changed", f"expected {entry.bytes} bytes, found {size}{_pointer(file)}"))
        elif (digest := sha256(file, progress)) != entry.sha256:
            faults.append(Fault(entry.path, "changed", f"expected sha256 {entry.sha256}, found {digest}"))
    found = _files(path, {*manifest.folders, *folders})
    faults += [Fault(name, "extra", "not listed") for name in found if name not in listed]
    return tuple(sorted(faults, key=lambda fault: fault.path))


def update(
    path: str | os.PathLike[str],
    folders: Iterable[str] = (),
    *,
    licence: str | None = None,
    generator: str | None = None,
    seed: int | str | None = None,
    progress: Progress | None = None,
) -> Update:
    """Bring the manifest (made where there is none) to what lies on disk, and say what changed.

    Listed files keep their origin and get their new sums; files that are gone are taken off; files of the folders that
    were not listed are added. Licence, generator and seed of those come from the arguments or else, for a KDTR file,
    from its metadata (`license`, `command`, `seed`). `folders` are remembered in the manifest. Raises MANIFEST, with
    nothing written, for a new file whose licence or generator is not known.
    """
    where = os.fspath(path)
    old = load(path) if Path(path).exists() else Manifest(())
    base = Path(path).parent
    searched = {*old.folders, *folders}
    listed = {entry.path: entry for entry in old.entries}
    entries, added, changed, removed = [], [], [], []
    for name in sorted({*listed, *_files(path, searched)}):
        file = base / name
        if not file.is_file():
            removed.append(name)
            continue
        known = listed.get(name)
        digest, size = sha256(file, progress), file.stat().st_size
        if known is None:
            origin = _origin(file, where, name, licence, generator, seed)
            entries.append(Entry(name, digest, size, *origin))
            added.append(name)
        else:
            entries.append(replace(known, sha256=digest, bytes=size))
            if entries[-1] != known:
                changed.append(name)
    new = Manifest(tuple(entries), tuple(sorted(searched)))
    if new != old or not Path(path).exists():
        save(path, new)
    return Update(tuple(added), tuple(changed), tuple(removed))


def sha256(path: str | os.PathLike[str], progress: Progress | None = None) -> str:
    """SHA-256 of a file in hex; `progress` is told the bytes of each step. Raises MANIFEST where it cannot be read."""
    state = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                state.update(block)
                if progress:
                    progress(len(block))
    except OSError as error:
        raise ManifestError(f"cannot be read: {error.strerror or error}", path=os.fspath(path)) from error
    return state.hexdigest()


def _entry(row: Any, at: int, where: str) -> Entry:
    if not isinstance(row, dict):
        raise ManifestError("files must be written as [[files]]", path=where)
    named = f"files[{at}] ('{row.get('path', '')}')"
    known = [field.name for field in fields(Entry)]
    if unknown := set(row) - set(known):
        raise ManifestError(f"{named}: unknown key {min(unknown)!r}; known are {', '.join(known)}", path=where)
    kinds: Mapping[str, tuple[type, ...]] = {"bytes": (int,), "seed": (int, str)}
    for key in known:
        if key not in row and key != "seed":
            raise ManifestError(f"{named}: key {key!r} is missing", path=where)
        value = row.get(key)
        kind = kinds.get(key, (str,))
        if key in row and (not isinstance(value, kind) or isinstance(value, bool)):
            allowed = " or ".join(each.__name__ for each in kind)
            raise ManifestError(f"{named}: {key} is {value!r}, must be {allowed}", path=where)
    _check_path(row["path"], where)
    if not re.fullmatch(r"[0-9a-f]{64}", row["sha256"]):
        raise ManifestError(f"{named}: sha256 is '{row['sha256']}', must be 64 lower-case hex digits", path=where)
    if row["bytes"] < 0:
        raise ManifestError(f"{named}: bytes is {row['bytes']}, must not be negative", path=where)
    return Entry(row["path"], row["sha256"], row["bytes"], row["licence"], row.get("seed"), row["generator"])


def _check_path(path: str, where: str) -> None:
    """A listed path stays below the manifest's folder on every system."""
    if not _is_text(path):
        raise ManifestError(f"path {path!r} is not Unicode text", path=where)
    if path != "." and ("\\" in path or ":" in path or {"", ".", ".."} & set(path.split("/"))):
        raise ManifestError(f"path '{path}' must be relative, with '/', without '.', '..', ':' and '\\'", path=where)


def _is_text(path: str) -> bool:
    """False for the name of a file that is not in the system's encoding."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _files(manifest: str | os.PathLike[str], folders: Iterable[str]) -> list[str]:
    """Paths of all files below the folders, relative to the manifest's own folder."""
    base, own = Path(manifest).parent, os.path.realpath(manifest)
    found = set()
    for folder in folders:
        _check_path(folder, os.fspath(manifest))
        if not (base / folder).is_dir():
            raise ManifestError(f"folder '{folder}' does not exist", path=os.fspath(manifest))
        for at, below, names in os.walk(base / folder):
            below[:] = sorted(name for name in below if not name.startswith(".") and name != "__pycache__")
            files = (Path(at) / name for name in names if not name.startswith("."))
            found |= {file.relative_to(base).as_posix() for file in files if os.path.realpath(file) != own}
    return sorted(found)


def _origin(
    file: Path, where: str, name: str, licence: str | None, generator: str | None, seed: int | str | None
) -> tuple[str, int | str | None, str]:
    """Licence, seed and generator of a file that is new in the manifest."""
    meta: Mapping[str, Any] = {}
    if file.suffix == ".kdtr" and not (licence and generator and seed is not None):
        with Container(file) as container:
            meta = container.meta
    licence = licence or meta.get("license")
    generator = generator or meta.get("command")
    for key, value in (("licence", licence), ("generator", generator)):
        if not value:
            raise ManifestError(f"new file '{name}': its {key} is not known; give it as an argument", path=where)
    return str(licence), meta.get("seed") if seed is None else seed, str(generator)


def _pointer(file: Path) -> str:
    with file.open("rb") as opened:
        return ": a Git-LFS pointer, fetch the data with `git lfs pull`" if opened.read(len(_LFS)) == _LFS else ""


def _quote(text: str) -> str:
    """A TOML basic string."""
    return f'"{_CONTROL.sub(lambda at: _escape(at.group()), text)}"'


def _escape(character: str) -> str:
    return f"\\{character}" if character in '"\\' else f"\\u{ord(character):04x}"
