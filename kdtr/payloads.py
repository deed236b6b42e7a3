"""Reading payloads: block by block, each block summed while it is still in the cache (steps 17.1 to 17.3)."""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from kdtr import dtypes
from kdtr.dtypes import Bytes, DType
from kdtr.errors import DataSumError, DataValueError, FileIOError, PaddingError, TensorTypeError, TruncatedError
from kdtr.format import PAYLOAD_ALIGN
from kdtr.index import Index
from kdtr.prefix import pread

BLOCK: Final = 1 << 18  # fits the second-level cache
HUGE_PAGE: Final = 1 << 21
LARGE: Final = 1 << 22  # NumPy asks for huge pages from here on

Progress = Callable[[int], object]


def aligned(size: int) -> Bytes:
    """New memory of `size` bytes, aligned for a device copy; large memory to huge pages, which NumPy asks for.

    Only whole huge pages count: reading is a third faster for it. What lies before the boundary is never touched.
    """
    boundary = PAYLOAD_ALIGN if size < LARGE else HUGE_PAGE
    memory = np.empty(size + boundary, np.uint8)
    start = -memory.ctypes.data % boundary
    return memory[start : start + size]


class Payload(NamedTuple):
    """Where one payload is: bytes [start, start + size), then padding up to `stop`."""

    dtype: DType
    shape: tuple[int, ...]
    start: int
    size: int
    stop: int
    sum: int


def payloads(index: Index, file_size: int) -> list[Payload]:
    """All payloads in the order of the index."""
    records = index.records
    starts = records["offset"].tolist()
    return list(
        map(
            Payload,
            map(dtypes.BY_CODE.__getitem__, records["dtype"].tolist()),
            [tuple(dim[:ndim]) for dim, ndim in zip(records["dim"].tolist(), records["ndim"].tolist(), strict=True)],
            starts,
            records["nbytes"].tolist(),
            [*starts[1:], file_size],
            records["data_sum"].tolist(),
        )
    )


class PayloadReader:
    """Payloads of an open file whose prefix has passed level 1."""

    def __init__(self, file: io.FileIO, index: Index, file_size: int, path: str) -> None:
        self._file = file
        self._index = index
        self._file_size = file_size
        self._path = path

    def fd(self) -> int:
        """The descriptor. Raises IO if the file is closed."""
        try:
            return self._file.fileno()
        except ValueError as error:
            raise FileIOError("the handle is closed", path=self._path) from error

    def payload(self, row: int) -> Payload:
        """The payload of one row."""
        record = self._index.records[row]
        stop = self._file_size if row + 1 == len(self._index) else int(self._index.records["offset"][row + 1])
        return Payload(
            dtypes.BY_CODE[int(record["dtype"])],
            tuple(record["dim"][: record["ndim"]].tolist()),
            int(record["offset"]),
            int(record["nbytes"]),
            stop,
            int(record["data_sum"]),
        )

    def numpy(self, row: int, dtype: DType) -> np.dtype[Any]:
        """The type that holds an element in memory. Raises TYPE, naming the tensor, where it is not available."""
        try:
            return dtype.numpy()
        except TensorTypeError as error:
            raise TensorTypeError(error.message, path=self._path, tensor=self._index.names[row]) from error

    def raw(self, row: int) -> Bytes:
        """Verified payload bytes of one row."""
        payload = self.payload(row)
        out = np.empty(payload.size, np.uint8)
        self._read(row, payload, out)
        return out

    def array(self, row: int, *, verify: bool) -> npt.NDArray[Any]:
        """One row as an array of its own memory."""
        payload = self.payload(row)
        array, out = self._target(row, payload)
        if verify:
            self._read(row, payload, out)
        else:
            self._fill(out.data, payload.start)
        return dtypes.unpack(out, payload.dtype, payload.shape) if payload.dtype.packed else array

    def scan(self, *, take: bool, progress: Progress) -> Iterator[npt.NDArray[Any] | None]:
        """Level 2 in the order of the index; gives the array of each row, or None unless they are to be taken.

        Neighbours that fit one block are read together.
        """
        rows = payloads(self._index, self._file_size)
        stops = [payload.stop for payload in rows]
        row = 0
        while row < len(rows):
            last = bisect_right(stops, rows[row].start + BLOCK, row)
            if last > row:
                yield from self._scan_small(row, rows[row:last], take)
                progress(sum(payload.size for payload in rows[row:last]))
                row = last
            else:
                yield self._scan_large(row, rows[row], take, progress)
                row += 1

    def section(self, base: int, out: Bytes) -> None:
        """Level 2 while everything from `base`, where the payloads begin, to the end of the file is read into `out`."""
        for row, payload in enumerate(payloads(self._index, self._file_size)):
            end = payload.start + payload.size
            legal = self._sum(row, payload, out[payload.start - base : end - base], lambda _: None)
            padding = out[end - base : payload.stop - base]
            self._fill(padding.data, end)
            if padding.any():
                self._fail_padding(row)
            if not legal:
                self._fail_values(row)

    def _scan_small(self, first: int, rows: list[Payload], take: bool) -> Iterator[npt.NDArray[Any] | None]:
        base = rows[0].start
        block = pread(self.fd(), rows[-1].stop - base, base, self._path)
        view = memoryview(block)
        held: dict[DType, np.dtype[Any]] = {}
        for row, (dtype, shape, start, size, stop, data_sum) in enumerate(rows, start=first):
            at, end, pad_end = start - base, start - base + size, stop - base
            if (found := xxh3_64_intdigest(view[at:end])) != data_sum:
                self._fail_sum(row, found, data_sum)
            if block.count(0, end, pad_end) != pad_end - end:
                self._fail_padding(row)
            if dtype.restricted and not dtype.legal(np.frombuffer(view[at:end], np.uint8), shape):
                self._fail_values(row)
            if not take:
                yield None
            elif dtype.packed:
                self.numpy(row, dtype)
                yield dtypes.unpack(np.frombuffer(view[at:end], np.uint8), dtype, shape)
            else:
                if (kind := held.get(dtype)) is None:
                    kind = held[dtype] = self.numpy(row, dtype)
                yield np.ndarray(shape, kind, block, at).copy()

    def _scan_large(self, row: int, payload: Payload, take: bool, progress: Progress) -> npt.NDArray[Any] | None:
        array, out = self._target(row, payload) if take else (None, None)
        legal = self._sum(row, payload, out, progress)
        end = payload.start + payload.size
        padding = pread(self.fd(), payload.stop - end, end, self._path)
        if padding.count(0) != len(padding):
            self._fail_padding(row)
        if not legal:
            self._fail_values(row)
        return dtypes.unpack(out, payload.dtype, payload.shape) if out is not None and payload.dtype.packed else array

    def _target(self, row: int, payload: Payload) -> tuple[npt.NDArray[Any], Bytes]:
        """Memory for a payload, as an array and as bytes; for packed types both are the packed bytes."""
        kind = self.numpy(row, payload.dtype)
        if payload.size < LARGE:
            array = np.empty(payload.size, np.uint8) if payload.dtype.packed else np.empty(payload.shape, kind)
            return array, array.reshape(-1).view(np.uint8)
        out = aligned(payload.size)
        return (out if payload.dtype.packed else out.view(kind).reshape(payload.shape)), out

    def _read(self, row: int, payload: Payload, out: Bytes) -> None:
        if not self._sum(row, payload, out, lambda _: None):
            self._fail_values(row)

    def _sum(self, row: int, payload: Payload, out: Bytes | None, progress: Progress) -> bool:
        """Read a payload, into `out` if there is one, and check its sum; tells whether its values are legal."""
        scratch = np.empty(min(BLOCK, payload.size), np.uint8) if out is None else out
        state = xxh3_64()
        legal = True
        for start in range(0, payload.size, BLOCK):
            size = min(BLOCK, payload.size - start)
            block = scratch[:size] if out is None else out[start : start + size]
            self._fill(block.data, payload.start + start)
            state.update(block.data)
            if payload.dtype.name == "bool" or (payload.dtype.packed and start + size == payload.size):
                legal &= payload.dtype.legal(block, payload.shape)
            progress(size)
        if (found := state.intdigest()) != payload.sum:
            self._fail_sum(row, found, payload.sum)
        return legal

    def _fill(self, out: memoryview, offset: int) -> None:
        fd = self.fd()
        try:
            while out.nbytes:
                if not (count := os.preadv(fd, [out], offset)):
                    raise TruncatedError(f"the file shrank: {out.nbytes} bytes at {offset} are gone", path=self._path)
                out, offset = out[count:], offset + count
        except OSError as error:
            raise FileIOError(f"reading {out.nbytes} bytes at {offset}: {error}", path=self._path) from error

    def _fail_sum(self, row: int, found: int, stored: int) -> NoReturn:
        raise DataSumError(
            f"the payload is damaged: checksum {found:016x}, the index says {stored:016x}",
            path=self._path,
            tensor=self._index.names[row],
        )

    def _fail_padding(self, row: int) -> NoReturn:
        raise PaddingError("a byte after the payload is not zero", path=self._path, tensor=self._index.names[row])

    def _fail_values(self, row: int) -> NoReturn:
        illegal = self.payload(row).dtype.illegal
        raise DataValueError(f"the payload has {illegal}", path=self._path, tensor=self._index.names[row])
