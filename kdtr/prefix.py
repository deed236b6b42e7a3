"""The part of a file before the payloads: steps 1 to 16 of kdtr/format.py, section 9, on a file descriptor."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from kdtr.errors import (
    FileIOError,
    HeaderError,
    HeaderSumError,
    LimitError,
    NotKdtrError,
    PaddingError,
    PrefixSumError,
    TrailingError,
    TruncatedError,
    UnsupportedError,
    VersionError,
)
from kdtr.format import (
    HEADER,
    HEADER_SIZE,
    MAGIC,
    MAJOR,
    MAX_META,
    MAX_NAMES,
    MAX_TENSORS,
    RECORD,
    RECORD_SIZE,
    SECTION_ALIGN,
)
from kdtr.index import Index, check_records

# First bytes of what is taken for a KDTR file most often.
_KNOWN: Final = (
    (b"", "one of an unknown format"),
    (b"version https://git-lfs.", "a Git-LFS pointer, not the data: fetch it with `git lfs pull`"),
    (b"\x89KDTR", "KDTR damaged by a text-mode or line-ending conversion"),
    (b"PK\x03\x04", "a zip archive (npz)"),
    (b"\x93NUMPY", "a NumPy array (npy)"),
    (b"\x89HDF", "HDF5"),
    (b"GGUF", "GGUF"),
)


class Prefix(NamedTuple):
    """Checked contents of the prefix; `meta` is the metadata as bytes."""

    kind: str
    kind_version: int
    minor: int
    file_size: int
    data_off: int
    tensors: Index
    meta: bytes


def read_prefix(fd: int, path: str) -> Prefix:
    """Read and check level 1. Raises the class of the first step that fails."""
    real_size = os.fstat(fd).st_size
    head = pread(fd, min(HEADER_SIZE, real_size), 0, path)
    _check_magic(head, path)
    if real_size < HEADER_SIZE:
        raise TruncatedError(f"the file has {real_size} bytes, the header alone takes {HEADER_SIZE}", path=path)
    header = np.frombuffer(head, HEADER)[0]
    data_off = _check_header(header, head, path)
    file_size, n = int(header["file_size"]), int(header["n_tensors"])
    if real_size < file_size:
        raise TruncatedError(f"the file has {real_size} bytes, its header says {file_size}", path=path)
    if real_size > file_size:
        raise TrailingError(f"the file has {real_size} bytes, its header says {file_size}", path=path)

    body = pread(fd, data_off - HEADER_SIZE, HEADER_SIZE, path)
    if (found := xxh3_64_intdigest(body)) != header["prefix_sum"]:
        raise PrefixSumError(
            f"index, names or metadata are damaged: checksum {found:016x}, stored {int(header['prefix_sum']):016x}",
            path=path,
        )
    names_at = n * RECORD_SIZE
    meta_at = names_at + int(header["names_len"])
    pad_at = meta_at + int(header["meta_len"])
    if body.count(0, pad_at) != len(body) - pad_at:
        raise PaddingError(f"a byte is not zero between the metadata and the payloads at {data_off}", path=path)
    records = np.frombuffer(body, RECORD, n)
    names = check_records(records, body[names_at:meta_at], data_off, file_size, path)
    kind = head[40:72].rstrip(b"\0").decode("ascii")
    index = Index(records, names, path)
    return Prefix(
        kind, int(header["kind_version"]), int(header["minor"]), file_size, data_off, index, body[meta_at:pad_at]
    )


def pread(fd: int, size: int, offset: int, path: str) -> bytes:
    """Exactly `size` bytes. Raises TRUNCATED if the file has become shorter, IO if the system refuses."""
    try:
        data = os.pread(fd, size, offset)
        while len(data) < size:  # the system reads at most about 2 GiB at once
            more = os.pread(fd, size - len(data), offset + len(data))
            if not more:
                raise TruncatedError(f"the file shrank: only {len(data)} of {size} bytes at {offset}", path=path)
            data += more
    except OSError as error:
        raise FileIOError(f"reading {size} bytes at {offset}: {error}", path=path) from error
    return data


def _check_magic(head: bytes, path: str) -> None:
    start = head[: len(MAGIC)]
    if start == MAGIC[: len(start)]:
        return
    what = next(text for signature, text in reversed(_KNOWN) if head.startswith(signature))
    raise NotKdtrError(f"not a KDTR file but {what}: starts with {start!r}, must be {MAGIC!r}", path=path)


def _check_header(header: np.void, head: bytes, path: str) -> int:
    """Steps 3 to 7; returns data_off."""
    if header["major"] != MAJOR:
        raise VersionError(f"format version {header['major']}.{header['minor']}, this reader knows {MAJOR}", path=path)
    if (found := xxh3_64_intdigest(head[:120])) != header["header_sum"]:
        raise HeaderSumError(
            f"the header is damaged: checksum {found:016x}, stored {int(header['header_sum']):016x}", path=path
        )
    if header["required_flags"]:
        raise UnsupportedError(
            f"required_flags are {header['required_flags']:#010x}, this reader knows none", path=path
        )
    if any(head[72:112]):
        raise HeaderError(f"reserved bytes are not zero: {head[72:112].hex()}", path=path)
    kind = head[40:72]
    if not kind_is_legal(kind.rstrip(b"\0")):
        raise HeaderError(f"kind is {kind!r}, must be 1 to 32 bytes in 0x21..0x7E, then zeros", path=path)
    for field, cap in (("n_tensors", MAX_TENSORS), ("names_len", MAX_NAMES), ("meta_len", MAX_META)):
        if header[field] > cap:
            raise LimitError(f"{field} is {header[field]}, at most {cap}", path=path)
    used = HEADER_SIZE + sum(
        int(header[k]) * s for k, s in (("n_tensors", RECORD_SIZE), ("names_len", 1), ("meta_len", 1))
    )
    data_off = -(-used // SECTION_ALIGN) * SECTION_ALIGN
    file_size = int(header["file_size"])
    if file_size < data_off or file_size % SECTION_ALIGN:
        raise HeaderError(
            f"file_size is {file_size}, must be a multiple of {SECTION_ALIGN} and at least {data_off}", path=path
        )
    return data_off


def kind_is_legal(kind: bytes) -> bool:
    """1 to 32 printable ASCII bytes without blanks."""
    return 1 <= len(kind) <= 32 and all(0x21 <= byte <= 0x7E for byte in kind)
