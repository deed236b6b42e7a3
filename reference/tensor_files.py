"""Named tensors in files, as they are stored: safetensors (one file or shards with an index) and KDTR.

A stored array of a type that NumPy lacks is given as its bits: bf16 as uint16, FP8 as uint8. Everything is checked when
a file is opened, before any tensor is read; `TensorFileError` names file, tensor, expected and actual numbers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

import kdtr
from reference.numerics import Array, bf16_bits_to_float32

# Stored type (KDTR's name) -> NumPy type of the array or of its bits, and safetensors' name.
BITS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        name: np.dtype(kind)
        for name, kind in {
            "f64": "<f8",
            "f32": "<f4",
            "f16": "<f2",
            "bf16": "<u2",
            "f8_e4m3fn": "u1",
            "i64": "<i8",
            "i32": "<i4",
            "u8": "u1",
            "bool": "?",
        }.items()
    }
)
_SAFETENSORS_NAMES = {"f8_e4m3fn": "F8_E4M3"} | {name: name.upper() for name in BITS if name != "f8_e4m3fn"}
_FROM_SAFETENSORS = {theirs: ours for ours, theirs in _SAFETENSORS_NAMES.items()}
_MAX_HEADER = 100_000_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class TensorFileError(ValueError):
    """A file of tensors that is damaged, incomplete or inconsistent."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies and what it is. dtype: KDTR's name, or the file's own for a type not known here."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0


class TensorSource(Protocol):
    """Tensors by name; `bits` reads one."""

    @property
    def tensors(self) -> Mapping[str, Stored]: ...

    def bits(self, name: str) -> Array: ...


def to_float(bits: Array, dtype: str) -> Array:
    """Stored bits of a float type as float32 (float64 stays); exact. ValueError for other types, FP8 included."""
    if dtype == "bf16":
        return bf16_bits_to_float32(bits)
    if dtype in ("f16", "f32"):
        return bits.astype(np.float32)
    if dtype == "f64":
        return bits
    raise ValueError(f"a weight of type {dtype} is not a plain float (bf16, f16, f32, f64)")


@dataclass(frozen=True)
class SafetensorsSource:
    """Tensors of one or several safetensors files."""

    tensors: Mapping[str, Stored]

    def bits(self, name: str) -> Array:
        """The tensor's array, or its bits for bf16 and FP8."""
        stored = self.tensors[name]
        if stored.dtype not in BITS:
            raise TensorFileError(f"{stored.file}: {name} has type {stored.dtype}, known are {', '.join(BITS)}")
        count = math.prod(stored.shape)
        flat = np.fromfile(stored.file, BITS[stored.dtype], count, offset=stored.offset)
        if len(flat) != count:
            raise TensorFileError(f"{stored.file}: {name} has {count} elements, {len(flat)} could be read")
        return flat.reshape(stored.shape)


class KdtrSource:
    """Tensors of a KDTR file; every read is verified."""

    def __init__(self, path: Path) -> None:
        with kdtr.open(path) as container:
            self.kind = container.kind
            self.tensors: Mapping[str, Stored] = {
                name: Stored(path, info.dtype, info.shape) for name, info in container.info.items()
            }
        self._path = path

    def bits(self, name: str) -> Array:
        """The tensor's array, or its bits for bf16 and FP8."""
        stored = self.tensors[name]
        if stored.dtype not in BITS:
            raise TensorFileError(f"{self._path}: {name} has type {stored.dtype}, known are {', '.join(BITS)}")
        with kdtr.open(self._path) as container:
            return np.frombuffer(container.raw(name).data, BITS[stored.dtype]).reshape(stored.shape)


def open_safetensors(directory: Path) -> SafetensorsSource:
    """The tensors of a checkpoint folder: model.safetensors, or the shards that model.safetensors.index.json names.

    Refused: both or neither; shards that are absent; index entries that their shard does not hold (with the shard that
    does); tensors in a shard that the index does not mention or puts elsewhere.
    """
    index, single = directory / INDEX_NAME, directory / SINGLE_NAME
    if index.exists() and single.exists():
        raise TensorFileError(f"{directory}: holds both {INDEX_NAME} and {SINGLE_NAME}; which one counts?")
    if single.exists():
        return SafetensorsSource(read_header(single))
    if not index.exists():
        raise TensorFileError(f"{directory}: holds neither {SINGLE_NAME} nor {INDEX_NAME}")
    where = _weight_map(index)
    shards = sorted(set(where.values()))
    if absent := [shard for shard in shards if not (directory / shard).is_file()]:
        lost = sorted(name for name, shard in where.items() if shard in absent)
        raise TensorFileError(
            f"{directory}: {len(absent)} of {len(shards)} shards are absent: {', '.join(absent)}; "
            f"with them {len(lost)} tensors: {', '.join(lost)}"
        )
    held = {shard: read_header(directory / shard) for shard in shards}
    faults = []
    for name, shard in where.items():
        if name not in held[shard]:
            others = [other for other in shards if name in held[other]]
            faults.append(
                f"{name}: the index says {shard}, " + (f"{others[0]} holds it" if others else "no shard holds it")
            )
    for shard, tensors in held.items():
        faults += [f"{name}: in {shard}, not in the index" for name in tensors if name not in where]
        faults += [
            f"{name}: in {shard} too, the index says {where[name]}"
            for name in tensors
            if name in where and where[name] != shard and name in held[where[name]]
        ]
    if faults:
        raise TensorFileError(f"{index}: {len(faults)} faults: " + "; ".join(sorted(faults)))
    return SafetensorsSource({name: held[shard][name] for name, shard in where.items()})


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file, after checking that header and data agree to the byte."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start.startswith(b"version "):
            raise TensorFileError(f"{path}: this is a Git-LFS pointer, the data were not downloaded")
        if len(start) < 8 or length > min(size - 8, _MAX_HEADER):
            raise TensorFileError(f"{path}: a file of {size} bytes cannot hold a header of {length} bytes")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_distinct)
        except ValueError as error:
            raise TensorFileError(f"{path}: the header is not a JSON object ({error})") from error
    if not isinstance(header, dict):
        raise TensorFileError(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)
    data = 8 + length
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, Stored] = {}
    for name, entry in header.items():
        try:
            dtype, (begin, end) = str(entry["dtype"]), entry["data_offsets"]
            shape = tuple(entry["shape"])
            counts = (*shape, begin, end)
        except (TypeError, KeyError, ValueError) as error:
            raise TensorFileError(f"{path}: {name} is described by {entry!r}") from error
        if any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in counts):
            raise TensorFileError(f"{path}: {name} is described by {entry!r}")
        ours = _FROM_SAFETENSORS.get(dtype, dtype)
        if ours in BITS and math.prod(shape) * BITS[ours].itemsize != end - begin:
            raise TensorFileError(f"{path}: {name} {dtype}{list(shape)} cannot take {end - begin} bytes")
        tensors[name] = Stored(path, ours, shape, data + begin)
        spans.append((begin, end, name))
    cursor = 0
    for begin, end, name in sorted(spans):
        if begin != cursor or end < begin:
            raise TensorFileError(f"{path}: {name} lies at [{begin}, {end}), expected to begin at {cursor}")
        cursor = end
    if data + cursor != size:
        raise TensorFileError(f"{path}: the header describes {data + cursor} bytes, the file has {size}")
    return tensors


def write_safetensors(path: Path, arrays: Mapping[str, tuple[str, Array]]) -> None:
    """One safetensors file of {name: (stored type, array or bits)}, written beside `path` and then moved there."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    cursor = 0
    for name, (dtype, bits) in arrays.items():
        span = [cursor, cursor + bits.nbytes]
        header[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": list(bits.shape), "data_offsets": span}
        cursor += bits.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for _, bits in arrays.values():
                file.write(np.ascontiguousarray(bits).data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        where = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_distinct)["weight_map"]
        if not all(isinstance(shard, str) and Path(shard).name == shard for shard in where.values()):
            raise ValueError("a shard must be a plain file name")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TensorFileError(f"{index}: no weight_map of tensor names to file names ({error!r})") from error
    return dict(where)


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object, refused if a key comes twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} comes twice")
    return result
