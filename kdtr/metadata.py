"""Metadata: the one legal JSON spelling, the provenance keys, and the checks of level 3 (kdtr/format.py, section 8)."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

import numpy as np

from kdtr.errors import EncodeError, MetaError
from kdtr.format import MAX_META, MAX_META_DEPTH, MAX_META_INT

VERSION: Final = "0.1.0"

_STRING: Final = (str,)
_OPTIONAL_STRING: Final = (str, type(None))
# Key path -> allowed types of the required keys.
_REQUIRED: Final = {
    "generator/name": _STRING,
    "generator/version": _STRING,
    "seed": (int, str, type(None)),
    "rng": _OPTIONAL_STRING,
    "source/repo": _OPTIONAL_STRING,
    "source/git_sha": _OPTIONAL_STRING,
    "source/dirty": (bool, type(None)),
    "libs": (dict,),
    "platform/arch": _OPTIONAL_STRING,
    "platform/os": _OPTIONAL_STRING,
    "platform/device": _OPTIONAL_STRING,
    "command": _OPTIONAL_STRING,
    "kind_schema": _STRING,
}


def provenance(
    *,
    seed: int | str | None = None,
    rng: str | None = None,
    source: Mapping[str, Any] | None = None,
    command: str | None = None,
    device: str | None = None,
    libs: Mapping[str, str] | None = None,
    **optional: Any,
) -> dict[str, Any]:
    """The metadata that `validate()` requires, beyond what `save()` derives by itself.

    `source` is {"repo", "git_sha", "dirty"}, null where not given; `libs` defaults to the versions of Python and NumPy;
    the interpreter is asked for architecture and system. No clock, no host name, no path, no git. `optional` are
    further keys: tensors, parents, license, notes or your own.
    """
    return {
        "seed": seed,
        "rng": rng,
        "source": {"repo": None, "git_sha": None, "dirty": None, **(source or {})},
        "libs": dict(libs) if libs is not None else {"python": platform.python_version(), "numpy": np.__version__},
        "platform": {"arch": platform.machine(), "os": sys.platform, "device": device},
        "command": command,
        **optional,
    }


def encode_meta(meta: Mapping[str, Any] | bytes | None, kind: str, kind_version: int, path: str | None = None) -> bytes:
    """Canonical JSON of `meta` with `generator` and `kind_schema` filled in; bytes stay as they are, if legal.

    Raises ENCODE for what the format cannot hold.
    """
    if isinstance(meta, bytes):
        text = meta
        try:
            full = decode_meta(text)
        except MetaError as error:
            raise EncodeError(error.message, path=path) from error
    else:
        full = {
            "generator": {"name": "kdtr", "version": VERSION},
            "kind_schema": f"{kind}/{kind_version}",
            **({} if meta is None else meta),
        }
        if fault := next(_unfit(full, "metadata", 1), None):
            raise EncodeError(fault, path=path)
        try:
            text = _spell(full)
        except UnicodeEncodeError as error:
            raise EncodeError(f"metadata holds an unpaired surrogate: {error}", path=path) from error
    if (schema := full.get("kind_schema", f"{kind}/{kind_version}")) != f"{kind}/{kind_version}":
        raise EncodeError(f"metadata kind_schema is {schema!r}, the file is {kind}/{kind_version}", path=path)
    if len(text) > MAX_META:
        raise EncodeError(f"metadata takes {len(text)} bytes, at most {MAX_META}", path=path)
    return text


def decode_meta(text: bytes, path: str | None = None) -> dict[str, Any]:
    """Parsed metadata. Raises META unless `text` is one object in its only legal spelling."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in pairs:
            if key in out:
                raise ValueError(f"key {key!r} comes twice")
            out[key] = value
        return out

    def refuse(number: str) -> NoReturn:
        raise ValueError(f"number {number}: only integers are allowed")

    try:
        meta = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_float=refuse, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise MetaError(f"metadata is not legal JSON: {reason}", path=path) from error
    if not isinstance(meta, dict):
        raise MetaError(f"metadata is a JSON {type(meta).__name__}, must be an object", path=path)
    if fault := next(_unfit(meta, "metadata", 1), None):
        raise MetaError(fault, path=path)
    try:
        spelled = _spell(meta)
    except UnicodeEncodeError as error:
        raise MetaError(f"metadata holds an unpaired surrogate: {error}", path=path) from error
    if spelled != text:
        at = next(
            (i for i, (a, b) in enumerate(zip(text, spelled, strict=False)) if a != b), min(len(text), len(spelled))
        )
        raise MetaError(
            f"metadata is not in its canonical spelling, from byte {at} on: {text[at : at + 24]!r}, "
            f"must be {spelled[at : at + 24]!r}",
            path=path,
        )
    return meta


def meta_problems(
    meta: Mapping[str, Any], kind: str, kind_version: int, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """What is missing or wrong in parsed metadata of a file whose tensors have these shapes."""
    for key, types in _REQUIRED.items():
        found: Any = meta
        for part in key.split("/"):
            found = found.get(part, _MISSING) if isinstance(found, dict) else _MISSING
        if found is _MISSING:
            yield f"metadata key {key} is missing"
        elif not isinstance(found, types) or (isinstance(found, bool) and bool not in types):
            allowed = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            yield f"metadata key {key} is {found!r}, must be {allowed}"
    if isinstance(libs := meta.get("libs"), dict):
        yield from (f"metadata libs/{k} is {v!r}, must be a string" for k, v in libs.items() if not isinstance(v, str))
    if isinstance(found := meta.get("kind_schema"), str) and found != f"{kind}/{kind_version}":
        yield f"metadata kind_schema is '{found}', the header says {kind}/{kind_version}"
    for key in ("license", "notes"):
        if not isinstance(meta.get(key, ""), str):
            yield f"metadata key {key} is {meta[key]!r}, must be a string"
    parents = meta.get("parents", [])
    if not (isinstance(parents, list) and all(isinstance(p, str) and _is_sha256(p) for p in parents)):
        yield "metadata key parents must be a list of SHA-256 sums, 64 hexadecimal digits in lower case"
    entries = meta.get("tensors", {})
    if not isinstance(entries, dict):
        yield "metadata key tensors must be an object"
        return
    for name, entry in entries.items():
        yield from _entry_problems(name, entry, shapes)


def _entry_problems(name: str, entry: Any, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    where = f"metadata tensors/{name}"
    if name not in shapes:
        yield f"{where}: the file has no such tensor"
        return
    if not isinstance(entry, dict):
        yield f"{where} must be an object"
        return
    for key in ("desc", "layout"):
        if not isinstance(entry.get(key, ""), str):
            yield f"{where}: {key} must be a string"
    dims, ndim = entry.get("dims"), len(shapes[name])
    if dims is not None and not (
        isinstance(dims, list) and len(dims) == ndim and all(isinstance(d, _OPTIONAL_STRING) for d in dims)
    ):
        yield f"{where}: dims is {dims!r}, must name (or leave null) each of the {ndim} dimensions"
    quant = entry.get("quant")
    if quant is None:
        return
    if not isinstance(quant, dict):
        yield f"{where}: quant must be an object"
        return
    if not (isinstance(scale := quant.get("scale"), str) and scale in shapes):
        yield f"{where}: quant scale {scale!r} is not a tensor of the file"
    block = quant.get("block")
    if not (isinstance(block, list) and all(isinstance(b, int) and not isinstance(b, bool) and b > 0 for b in block)):
        yield f"{where}: quant block is {block!r}, must be a list of positive integers"


def _spell(meta: Mapping[str, Any]) -> bytes:
    return json.dumps(meta, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode("utf-8")


def _unfit(value: Any, where: str, depth: int) -> Iterator[str]:
    """What the format's JSON cannot hold, from the outside in."""
    if isinstance(value, bool | str) or value is None:
        return
    if isinstance(value, int):
        if abs(value) > MAX_META_INT:
            yield f"{where} is {value}, over +-(2^53 - 1): give it as a string"
    elif not isinstance(value, dict | list | tuple):
        yield f"{where} is {value!r} ({type(value).__name__}): not text, integer, true, false, null, list or object"
    elif depth > MAX_META_DEPTH:
        yield f"{where} is nested more than {MAX_META_DEPTH} deep"
    else:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict) and not isinstance(key, str):
                yield f"{where} has the key {key!r}, which is not text"
            else:
                yield from _unfit(item, f"{where}/{key}", depth + 1)


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


_MISSING: Final = object()
