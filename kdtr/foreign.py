"""What the converters of npz, safetensors and HDF5 share: the types between them, raw carriage, names, whole files.

A format that lacks an element type carries its bytes as u8 or u16: same shape for 8 and 16 bits, one axis of bytes more
for wider ones, one flat list of bytes for those below eight bits.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kdtr import dtypes
from kdtr.container import PathLike
from kdtr.errors import KDTRError

BLOCK: Final = 4 << 20  # bytes held at a time while streaming
DESCRIPTION: Final = "kdtr#description"  # "#" cannot be in a KDTR name
_NOT_IN_NAME: Final = re.compile(rb"[^A-Za-z0-9_.+=,@\[\]/-]")
NUMPY_NATIVE: Final = frozenset(dtype.name for dtype in dtypes.DTYPES if dtype.library == "numpy")

Blocks = Iterator[bytes | memoryview]


class ConvertError(KDTRError):
    """Cannot be carried without loss, or the other format's file is not sound: nothing was written."""

    code: ClassVar[str] = "CONVERT"


class Stored(NamedTuple):
    """A tensor as another format holds it: KDTR's name of the element type, and the shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements in KDTR's order."""
        return dtypes.BY_NAME[self.dtype].nbytes(math.prod(self.shape))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor to write into another format: its name there, how it is stored, and its bytes piece by piece."""

    name: str
    stored: Stored
    blocks: Callable[[], Blocks]

    def array(self) -> npt.NDArray[Any]:
        """All bytes as an array of the stored element type, which NumPy must have."""
        out = np.empty(self.stored.nbytes, np.uint8)
        at = 0
        for block in self.blocks():
            out[at : at + len(block)] = np.frombuffer(block, np.uint8)
            at += len(block)
        return out.view(dtypes.BY_NAME[self.stored.dtype].numpy()).reshape(self.stored.shape)


class Source(Protocol):
    """An open file of another format. `tensors` is checked as a whole before any byte is taken."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """How each tensor is stored, by its name there."""

    @property
    def text(self) -> Mapping[str, str]:
        """Metadata of the format itself."""

    @property
    def description(self) -> bytes | None:
        """What `write` was given as the description."""

    def blocks(self, name: str) -> Blocks:
        """Bytes of a tensor: C order, little-endian, as in a KDTR payload."""

    def close(self) -> None:
        """Give the file back."""


class Format(NamedTuple):
    """Another format. `open(path, dropped, attributes)` skips the names that `dropped` accepts; `write(path, items,
    description, text)` makes a new file; `native` are the element types that it holds as such."""

    name: str
    native: frozenset[str]
    open: Callable[[str, Callable[[str], bool], bool], Source]
    write: Callable[[str, list[Item], bytes, Mapping[str, str]], None]


def carriage(stored: Stored, native: frozenset[str]) -> Stored:
    """How a format that has the `native` element types holds a tensor: as it is, or raw."""
    dtype = dtypes.BY_NAME[stored.dtype]
    if dtype.name in native and 8 * stored.nbytes == math.prod(stored.shape) * dtype.bits:  # fills its bytes
        return stored
    if dtype.packed:
        return Stored("u8", (stored.nbytes,))
    if dtype.bits <= 16:
        return Stored(f"u{dtype.bits}", stored.shape)
    return Stored("u8", (*stored.shape, dtype.bits // 8))


def escape_name(name: str) -> str:
    """A KDTR name for any name: what the grammar lacks, "%" itself, and "/" or "." where they may not stand, as %XX.

    It can be longer than a KDTR name may be. Raises UnicodeEncodeError if the name is not Unicode text.
    """
    escaped = _NOT_IN_NAME.sub(lambda at: b"%%%02X" % at.group()[0], name.encode()).decode()
    segments = [segment.replace(".", "%2E") if segment in (".", "..") else segment for segment in escaped.split("/")]
    out = segments[0]
    for segment in segments[1:]:
        # A slash next to an empty segment separates nothing.
        out += ("/" if out and not out.endswith("/") and segment else "%2F") + segment
    return out or "%"


def read_exactly(read: Callable[[int], bytes], nbytes: int, where: str, tensor: str) -> bytes:
    """`nbytes` bytes of a stream. Raises CONVERT where it ends before."""
    parts, left = [], nbytes
    while left and (part := read(left)):
        parts.append(part)
        left -= len(part)
    if left:
        raise ConvertError(f"ends {left} bytes before its {nbytes} bytes are read", path=where, tensor=tensor)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def little_endian(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of an array in C order, little-endian."""
    ordered = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return ordered.reshape(-1).view(np.uint8).data


@contextlib.contextmanager
def whole_file(path: PathLike) -> Iterator[str]:
    """A name to write to beside `path`; that file replaces `path` at the end, or is removed on an exception."""
    target = os.path.realpath(path)
    temporary = os.path.join(os.path.dirname(target), f".kdtr-{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
