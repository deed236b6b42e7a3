"""Lossless conversion between KDTR and npz, safetensors and HDF5; what cannot be carried is refused by name.

From KDTR: each tensor under its name, native where the other format has the element type, else as raw u8 or u16; and a
description (in safetensors the metadata key, else an array of bytes, "kdtr#description") with kind, metadata, and each
tensor's element type, shape, role and tolerance. Back from that, the KDTR file is the same bit for bit.

To KDTR without such a description: values, element types, shapes and names; a name outside KDTR's grammar is
percent-escaped and kept as metadata `tensors/<name>/original`. `converted` in the metadata tells the format and, for
safetensors, its metadata; `parents` has the SHA-256 of the source. Going back to the same format restores names and
metadata. How a format stores bytes (memory and byte order, compression, chunks, order of members) is not content.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Final

from kdtr.container import Container, PathLike
from kdtr.convert_hdf5 import HDF5
from kdtr.convert_npz import NPZ
from kdtr.convert_safetensors import SAFETENSORS
from kdtr.errors import KDTRError, MetaError
from kdtr.foreign import (
    BLOCK,
    DESCRIPTION,
    Blocks,
    ConvertError,
    Format,
    Item,
    Source,
    Stored,
    carriage,
    escape_name,
    whole_file,
)
from kdtr.index import TensorSpec, Tolerance, name_fault
from kdtr.manifest import sha256
from kdtr.metadata import decode_meta, encode_meta, provenance
from kdtr.writer import Writer

FORMATS: Final[Mapping[str, Format | None]] = {
    ".kdtr": None,
    ".npz": NPZ,
    ".safetensors": SAFETENSORS,
    ".h5": HDF5,
    ".hdf5": HDF5,
}
Progress = Callable[[int], object]


def convert(
    source: PathLike,
    target: PathLike,
    *,
    kind: str = "any",
    role: str = "none",
    drop: Sequence[str] = (),
    drop_attributes: bool = False,
    progress: Progress | None = None,
) -> tuple[str, ...]:
    """Convert a file; the formats follow from the suffixes, one of which is .kdtr. Returns the names that were dropped.

    `kind` and `role` are for a KDTR file made from one without description. `drop` tells tensors to leave out, by their
    names in the source, with "*" and "?" as wildcards; `drop_attributes` leaves out those of HDF5. `progress` is told
    the bytes of each step done. Holds one tensor in memory at most. `target` is replaced when complete and left as it
    was otherwise. Raises CONVERT for what cannot be carried, or the error of reading and writing KDTR.
    """
    source, target = os.fspath(source), os.fspath(target)
    ours, theirs = _format(source), _format(target)
    tell = progress or (lambda nbytes: None)
    names = Dropped(drop)
    try:
        if ours is None and theirs is not None:
            _export(source, target, theirs, names, tell)
        elif ours is not None and theirs is None:
            _import(source, target, ours, kind, role, names, drop_attributes, tell)
        else:
            raise ConvertError(f"to '{target}': one side must be .kdtr and the other not", path=source)
    except OSError as error:
        if isinstance(error, KDTRError):
            raise
        raise ConvertError(f"{error.filename or target}: {error.strerror or error}", path=source) from error
    return names.seen


class Dropped:
    """Tells by patterns whether a name is left out, and remembers those that were."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [pattern.replace("[", "[[]") for pattern in patterns]  # brackets are part of names
        self._seen: dict[str, None] = {}

    def __call__(self, name: str) -> bool:
        found = any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)
        if found:
            self._seen[name] = None
        return found

    @property
    def seen(self) -> tuple[str, ...]:
        """Names left out so far."""
        return tuple(self._seen)


def _format(path: str) -> Format | None:
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in FORMATS:
        raise ConvertError(f"suffix '{suffix}' is none of {', '.join(FORMATS)}", path=path)
    return FORMATS[suffix]


# --- from KDTR --------------------------------------------------------------------------------------------------------


def _export(source: str, target: str, theirs: Format, dropped: Dropped, progress: Progress) -> None:
    with Container(source) as container:
        container.verify(progress)
        # Refuses what could not be written again on the way back.
        encode_meta(container.meta_bytes, container.kind, container.kind_version, source)
        origin = container.meta.get("converted")
        converted = origin if isinstance(origin, dict) and origin.get("format") == theirs.name else {}
        names = {name: _original(container.meta, name) if converted else name for name in container.names}
        text = converted.get("metadata", {})
        items: list[Item] = []
        tensors: dict[str, dict[str, Any]] = {}
        for name, stored_name in names.items():
            if dropped(name):
                continue
            info = container.info[name]
            stored = carriage(Stored(info.dtype, info.shape), theirs.native)
            items.append(Item(stored_name, stored, functools.partial(_payload, container, name, info.nbytes, progress)))
            tensors[stored_name] = {"name": name, "dtype": info.dtype, "shape": list(info.shape), "role": info.role}
            if info.tolerance is not None:
                tensors[stored_name]["tolerance"] = _tolerance_out(info.tolerance)
        if len(tensors) != len(items) or DESCRIPTION in tensors or not _is_text(text):
            raise ConvertError("the names or the metadata under `converted` cannot be restored", path=source)
        meta = _without(container.meta_bytes, dropped.seen, container.kind, container.kind_version).decode()
        described = {"kind": container.kind, "kind_version": container.kind_version, "meta": meta, "tensors": tensors}
        description = json.dumps(described, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
        try:
            with whole_file(target) as temporary:
                theirs.write(temporary, items, description, text)
        except ConvertError as error:
            raise ConvertError(error.message, path=error.path or source, tensor=error.tensor) from error


def _payload(container: Container, name: str, nbytes: int, progress: Progress) -> Blocks:
    for start in range(0, nbytes, BLOCK):
        block = container.read_bytes(name, start, min(nbytes, start + BLOCK))
        progress(len(block))
        yield block


def _original(meta: Mapping[str, Any], name: str) -> str:
    """The name that a converted tensor had."""
    entries = meta.get("tensors")
    entry = entries.get(name) if isinstance(entries, dict) else None
    original = entry.get("original") if isinstance(entry, dict) else None
    return original if isinstance(original, str) and escape_name(original) == name else name


def _is_text(text: Any) -> bool:
    return isinstance(text, dict) and DESCRIPTION not in text and all(isinstance(value, str) for value in text.values())


def _without(meta: bytes, names: Sequence[str], kind: str, kind_version: int) -> bytes:
    """Metadata without the entries of tensors that were left out."""
    if not names:
        return meta
    parsed = decode_meta(meta)
    if isinstance(entries := parsed.get("tensors"), dict):
        parsed["tensors"] = {name: entry for name, entry in entries.items() if name not in names}
    return encode_meta(parsed, kind, kind_version)


def _tolerance_out(tolerance: Tolerance) -> dict[str, Any]:
    """Reals as the shortest text that gives the same float64 again."""
    reals = {key: repr(getattr(tolerance, key)) for key in ("atol", "rtol", "limit")}
    return {"mode": tolerance.mode, "max_ulp": tolerance.max_ulp, **reals}


# --- to KDTR ----------------------------------------------------------------------------------------------------------


def _import(
    source: str,
    target: str,
    ours: Format,
    kind: str,
    role: str,
    dropped: Dropped,
    drop_attributes: bool,
    progress: Progress,
) -> None:
    with closing(ours.open(source, dropped, drop_attributes)) as opened:
        if opened.description is not None:
            kind, kind_version, meta, names, specs = _described(source, ours, opened, dropped)
        else:
            kind_version = 1
            names, meta = _foreign(source, ours, opened, kind, progress)
            specs = {name: TensorSpec(*opened.tensors[stored], role) for name, stored in names.items()}
        with Writer(target, specs, kind=kind, kind_version=kind_version, meta=meta) as writer:
            for name, stored in names.items():
                for block in opened.blocks(stored):
                    writer.write(name, block)
                    progress(len(block))


def _foreign(source: str, ours: Format, opened: Source, kind: str, progress: Progress) -> tuple[dict[str, str], bytes]:
    """KDTR name -> name in a file that KDTR did not make, and the metadata."""
    names: dict[str, str] = {}
    for stored in opened.tensors:
        try:
            name = escape_name(stored)
        except UnicodeEncodeError as error:
            raise ConvertError(f"cannot be named in KDTR: {error}", path=source, tensor=stored) from error
        if fault := name_fault(name.encode()):
            raise ConvertError(f"cannot be named in KDTR: escaped, {fault}", path=source, tensor=stored)
        names[name] = stored
    original = {name: {"original": stored} for name, stored in sorted(names.items()) if name != stored}
    converted: dict[str, Any] = {"format": ours.name, **({"metadata": dict(opened.text)} if opened.text else {})}
    meta = provenance(libs={}, parents=[sha256(source, progress)], converted=converted)
    meta["platform"] = dict.fromkeys(meta["platform"])  # the same file from every machine
    return names, encode_meta(meta | ({"tensors": original} if original else {}), kind, 1)


def _described(
    source: str, ours: Format, opened: Source, dropped: Dropped
) -> tuple[str, int, bytes, dict[str, str], dict[str, TensorSpec]]:
    """Kind, version, metadata, KDTR name -> name in the file, and specs, all from the description that KDTR wrote."""
    try:
        described = json.loads((opened.description or b"").decode())
        tensors = described["tensors"]
        names = {entry["name"]: stored for stored, entry in tensors.items() if not dropped(stored)}
        specs = {
            entry["name"]: TensorSpec(
                entry["dtype"], tuple(entry["shape"]), entry["role"], _tolerance_in(entry.get("tolerance"))
            )
            for stored, entry in tensors.items()
            if not dropped(stored)
        }
        kind, kind_version = described["kind"], described["kind_version"]
        left_out = [entry["name"] for entry in tensors.values() if entry["name"] not in specs]
        meta = _without(described["meta"].encode(), left_out, kind, kind_version)
        expected = {names[n]: carriage(Stored(spec.dtype, spec.shape), ours.native) for n, spec in specs.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MetaError) as error:
        raise ConvertError(f"'{DESCRIPTION}' is not one that KDTR wrote: {error!r}", path=source) from error
    for stored in sorted({*expected, *opened.tensors}):
        want, found = expected.get(stored), opened.tensors.get(stored)
        if want != found:
            raise ConvertError(
                f"'{DESCRIPTION}' expects {want or 'no such tensor'}, found {found or 'none'}",
                path=source,
                tensor=stored,
            )
    return kind, kind_version, meta, names, specs


def _tolerance_in(entry: Mapping[str, Any] | None) -> Tolerance | None:
    if entry is None:
        return None
    reals = {key: float(entry[key]) for key in ("atol", "rtol", "limit")}
    return Tolerance(entry["mode"], max_ulp=entry["max_ulp"], **reals)
