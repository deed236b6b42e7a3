"""KDTR files packed by `struct` straight from the specification, right or deliberately wrong.

Nothing of the library is used, so that a fault of its writer or reader cannot hide in the tests that start here.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

MAGIC = b"\x89KDTR\r\n\x1a"
DTYPES = ["bool", "u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f16", "bf16", "f32", "f64", "c64", "c128"]
DTYPES += ["f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz", "f8_e8m0fnu", "f8_e3m4", "f8_e4m3", "f8_e4m3b11fnuz"]
DTYPES += ["i4", "u4", "i2", "u2", "f4_e2m1fn", "f6_e2m3fn", "f6_e3m2fn"]
BITS = dict(
    zip(DTYPES, [8, 8, 8, 16, 16, 32, 32, 64, 64, 16, 16, 32, 64, 64, 128, *[8] * 8, 4, 4, 2, 2, 4, 6, 6], strict=True)
)
ROLE = {"none": 0, "input": 1, "expected": 2, "param": 3, "intermediate": 4, "aux": 5}
MODE = {"none": 0, "bits": 1, "equal": 2, "close": 3, "ulp": 4, "similarity": 5, "nmse": 6}


def checksum(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def align(n: int, to: int) -> int:
    return -(-n // to) * to


def metadata(kind: str = "any", version: int = 1, /, **changes: Any) -> bytes:
    """Legal metadata of a kind; a change to `...` leaves that key out."""
    content: dict[str, Any] = {
        "command": None,
        "generator": {"name": "make_vectors", "version": "1"},
        "kind_schema": f"{kind}/{version}",
        "libs": {},
        "platform": {"arch": None, "device": None, "os": None},
        "rng": None,
        "seed": None,
        "source": {"dirty": None, "git_sha": None, "repo": None},
    }
    content = {key: value for key, value in (content | changes).items() if value is not ...}
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass(frozen=True)
class Tensor:
    """A tensor as it is meant; `raw` holds fields of its index record that are set against the meaning."""

    name: bytes
    dtype: str = "f32"
    shape: tuple[int, ...] = (0,)
    data: bytes | None = None  # None: bytes counting up (for bool: 0 and 1 in turn)
    role: str = "input"
    mode: str = "none"
    max_ulp: int = 0
    atol: float = 0.0
    rtol: float = 0.0
    limit: float = 0.0
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return (math.prod(self.shape) * BITS[self.dtype] + 7) // 8

    def payload(self) -> bytes:
        if self.data is not None:
            return self.data
        if self.dtype == "bool":
            return bytes(i % 2 for i in range(self.nbytes))
        return bytes(i % 63 + 1 for i in range(self.nbytes))

    def record(self, name_off: int, offset: int) -> bytes:
        fields: dict[str, Any] = {
            "name_off": name_off,
            "name_len": len(self.name),
            "dtype": DTYPES.index(self.dtype) + 1,
            "ndim": len(self.shape),
            "offset": offset,
            "nbytes": self.nbytes,
            "data_sum": checksum(self.payload()),
            "dim": self.shape,
            "role": ROLE[self.role],
            "cmp": MODE[self.mode],
            "flags": 0,
            "max_ulp": self.max_ulp,
            "atol": self.atol,
            "rtol": self.rtol,
            "limit": self.limit,
        } | dict(self.raw)
        fields["dim"] = tuple(fields["dim"]) + (0,) * (8 - len(fields["dim"]))
        order = ("name_off", "name_len", "dtype", "ndim", "offset", "nbytes", "data_sum")
        head = struct.pack("<IHBBQQQ", *(fields[key] for key in order))
        tail = struct.pack("<BBHI", *(fields[key] for key in ("role", "cmp", "flags", "max_ulp")))
        return (
            head
            + struct.pack("<8Q", *fields["dim"])
            + tail
            + struct.pack("<3d", *(fields[k] for k in ("atol", "rtol", "limit")))
        )


@dataclass(frozen=True)
class File:
    """A file as it is meant, and how it departs from that.

    `header` sets header fields; `poke` sets bytes before the sums are taken, `flip` flips a bit of a byte afterwards;
    `names` replaces the name block; `pages` adds to the size. Tensors are laid out in the order given.
    """

    tensors: Sequence[Tensor] = ()
    kind: bytes = b"any"
    meta: bytes = metadata()
    header: Mapping[str, Any] = field(default_factory=dict)
    poke: Mapping[int, int] = field(default_factory=dict)
    flip: Sequence[int] = ()
    names: bytes | None = None
    pages: int = 0

    @property
    def names_block(self) -> bytes:
        return b"".join(t.name for t in self.tensors) if self.names is None else self.names

    @property
    def used(self) -> int:
        """Where the metadata ends."""
        return 128 + 128 * len(self.tensors) + len(self.names_block) + len(self.meta)

    @property
    def data_off(self) -> int:
        return align(self.used, 4096)

    def offset(self, index: int) -> int:
        """Where the payload of a tensor starts."""
        cursor = self.data_off
        for tensor in self.tensors[:index]:
            cursor = align(cursor + len(tensor.payload()), 256)
        return cursor

    def to_bytes(self) -> bytes:
        size = align(self.offset(len(self.tensors)), 4096) + 4096 * self.pages
        out = bytearray(size)
        name_off = 0
        for i, tensor in enumerate(self.tensors):
            out[128 + 128 * i : 256 + 128 * i] = tensor.record(name_off, self.offset(i))
            out[self.offset(i) : self.offset(i) + len(tensor.payload())] = tensor.payload()
            name_off += len(tensor.name)
        text = 128 + 128 * len(self.tensors)
        out[text : self.used] = self.names_block + self.meta
        for at, value in self.poke.items():
            out[at] = value
        fields: dict[str, Any] = {
            "magic": MAGIC,
            "major": 1,
            "minor": 0,
            "required_flags": 0,
            "file_size": size,
            "n_tensors": len(self.tensors),
            "names_len": len(self.names_block),
            "meta_len": len(self.meta),
            "kind_version": 1,
            "kind": self.kind,
            "reserved": b"",
            "prefix_sum": checksum(bytes(out[128 : self.data_off])),
        } | dict(self.header)
        out[:120] = struct.pack("<8sHHIQIIII32s40sQ", *fields.values())
        out[120:128] = struct.pack("<Q", checksum(bytes(out[:120])))
        for at in self.flip:
            out[at] ^= 1 << (at % 8)
        return bytes(out)
