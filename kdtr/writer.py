"""Writing: a file appears under its name complete and synchronised, or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from kdtr import dtypes
from kdtr.container import PathLike, Raw
from kdtr.dtypes import Bytes, DType
from kdtr.errors import EncodeError, FileIOError
from kdtr.format import HEADER, HEADER_SIZE, MAGIC, MAJOR, MINOR, PAYLOAD_ALIGN
from kdtr.index import TensorSpec, Tolerance
from kdtr.layout import lay_out
from kdtr.metadata import encode_meta
from kdtr.payloads import BLOCK
from kdtr.prefix import kind_is_legal

SMALL: Final = 1 << 12  # below this a copy is cheaper than a view
LARGE: Final = 1 << 15  # from here on a system call is cheaper than a copy


class Writer:
    """Writes one file piece by piece: tensors are declared first, their payloads follow in any order of tensors.

        with Writer(path, {"x": TensorSpec("f32", (2, 3))}, kind="any", meta=provenance()) as writer:
            writer.write("x", first_bytes)
            writer.write("x", the_rest)

    Leaving the `with` publishes the file or, if an exception passes, drops it; so do close() and abort(). Until then
    nothing is visible under `path` and a file of that name stays as it was. Raises ENCODE for what the format cannot
    hold and IO if the system refuses. `meta` as bytes is canonical JSON, taken as it is: to copy a file.
    """

    def __init__(
        self,
        path: PathLike,
        specs: Mapping[str, TensorSpec],
        *,
        kind: str,
        meta: Mapping[str, Any] | bytes | None = None,
        kind_version: int = 1,
    ) -> None:
        self._temporary: str | None = None
        self._fd: int | None = None
        self.path: Final = os.fspath(path)
        self._names: Final = _checked_names(specs, self.path)
        self._row: Final = {name: row for row, name in enumerate(self._names)}
        if not (kind.isascii() and kind_is_legal(kind.encode())):
            self._refuse(f"kind is {kind!r}, must be 1 to 32 bytes in 0x21..0x7E")
        if not 0 <= kind_version < 1 << 32:
            self._refuse(f"kind_version is {kind_version}, must be in 0..{(1 << 32) - 1}")
        self._kind: Final = (kind.encode(), kind_version)
        self._meta: Final = encode_meta(meta, kind, kind_version, self.path)
        self._specs: Final = [specs[name] for name in self._names]
        self._layout: Final = lay_out(self._names, self._specs, len(self._meta), self.path)
        self._dtypes: Final = [dtypes.BY_NAME[spec.dtype] for spec in self._specs]
        self._starts: Final[list[int]] = self._layout.records["offset"].tolist()
        self._sizes: Final[list[int]] = self._layout.records["nbytes"].tolist()
        self._written: Final = [0] * len(self._names)
        self._sums: Final = [xxh3_64_intdigest(b"")] * len(self._names)
        self._partial: Final[dict[int, xxh3_64]] = {}
        self._run = bytearray()  # small neighbours, collected to be written at once
        self._run_start = 0
        self._create()

    def write(self, name: str, chunk: bytes | bytearray | memoryview | Bytes) -> None:
        """Append bytes to the payload of one tensor, as the file has them: C order, little-endian, packed."""
        data = chunk.data if isinstance(chunk, np.ndarray) else memoryview(chunk)
        self._append(self._find(name), data.cast("B"))

    def put(self, name: str, value: npt.ArrayLike | Raw) -> None:
        """Write the whole payload of one tensor from an array of the declared dtype and shape, in any memory order."""
        row = self._find(name)
        array, dtype, shape = _adopt(name, value, self.path)
        spec = self._specs[row]
        if (dtype.name, shape) != (spec.dtype, tuple(spec.shape)):
            self._refuse(f"the array is {dtype.name} {shape}, declared was {spec.dtype} {spec.shape}", name)
        if self._written[row]:
            self._refuse(f"{self._written[row]} bytes are written already", name)
        self._put(row, name, array, dtype)

    def _put(self, row: int, name: str, array: npt.NDArray[Any] | Raw, dtype: DType) -> None:
        data = _payload(array, dtype)
        if len(data) != self._sizes[row]:
            self._refuse(f"{len(data)} bytes were given, the payload has {self._sizes[row]}", name)
        self._append(row, data)

    def close(self) -> None:
        """Publish the file. Raises ENCODE, and drops it, if a payload is not complete."""
        if self._fd is None:
            return
        try:
            missing = [i for i, size in enumerate(self._sizes) if self._written[i] != size]
            if missing:
                row = missing[0]
                self._refuse(
                    f"{self._written[row]} of {self._sizes[row]} bytes written; {len(missing)} tensors are incomplete",
                    self._names[row],
                )
            try:
                self._publish(self._fd)
            except OSError as error:
                raise FileIOError(f"cannot be written: {error}", path=self.path) from error
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Drop what was written; harmless after close()."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        self.abort()

    def _refuse(self, message: str, tensor: str | None = None) -> NoReturn:
        raise EncodeError(message, path=self.path, tensor=tensor)

    def _find(self, name: str) -> int:
        if self._fd is None:
            self._refuse("the writer is closed")
        row = self._row.get(name)
        if row is None:
            self._refuse(f"was not declared; declared are {len(self._names)} tensors", name)
        return row

    def _create(self) -> None:
        target = os.path.realpath(self.path)
        if os.path.isdir(target):
            raise FileIOError("is a directory", path=self.path)
        self._target = target
        temporary = os.path.join(os.path.dirname(target), f".kdtr-{os.urandom(8).hex()}.tmp")
        try:
            self._fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._temporary = temporary
            os.ftruncate(self._fd, self._layout.file_size)
        except OSError as error:
            self.abort()
            raise FileIOError(f"cannot be written: {error}", path=self.path) from error

    def _append(self, row: int, data: memoryview | bytes) -> None:
        dtype, size, done = self._dtypes[row], self._sizes[row], self._written[row]
        end = done + len(data)
        if end > size:
            self._refuse(f"{end} bytes were given, the payload has {size}", self._names[row])
        if data and (dtype.name == "bool" or (dtype.packed and end == size)):
            payload = np.frombuffer(data, np.uint8)
            if not dtype.legal(payload, tuple(self._specs[row].shape)):
                self._refuse(f"the payload has {dtype.illegal}", self._names[row])
        try:
            if len(data) == size <= BLOCK:
                self._sums[row] = xxh3_64_intdigest(data)
                self._emit(self._starts[row], data)
            else:
                self._append_blocks(row, memoryview(data), done)
        except OSError as error:
            self.abort()
            raise FileIOError(f"cannot be written: {error}", path=self.path, tensor=self._names[row]) from error
        self._written[row] = end

    def _append_blocks(self, row: int, data: memoryview, done: int) -> None:
        state = self._partial.setdefault(row, xxh3_64())
        for at in range(0, len(data), BLOCK):
            block = data[at : at + BLOCK]
            state.update(block)
            self._emit(self._starts[row] + done + at, block)
        if done + len(data) == self._sizes[row]:
            self._sums[row] = self._partial.pop(row).intdigest()

    def _emit(self, offset: int, data: memoryview | bytes) -> None:
        """Write a block, or collect it with its neighbours if it is small."""
        run = self._run
        gap = offset - self._run_start - len(run)
        if len(data) >= LARGE:
            self._pwrite(memoryview(data), offset)
        elif 0 <= gap < PAYLOAD_ALIGN and len(run) + gap + len(data) <= BLOCK:
            run += bytes(gap)
            run += data
        else:
            self._flush()
            self._run_start = offset
            self._run += data

    def _flush(self) -> None:
        if self._run:
            self._pwrite(memoryview(self._run), self._run_start)
            self._run = bytearray()

    def _pwrite(self, data: memoryview, offset: int) -> None:
        assert self._fd is not None
        while data.nbytes:
            count = os.pwrite(self._fd, data, offset)
            data, offset = data[count:], offset + count

    def _publish(self, fd: int) -> None:
        self._flush()
        records, names, data_off, file_size = self._layout
        records["data_sum"] = self._sums
        body = b"".join([records.tobytes(), names, self._meta])
        body += bytes(data_off - HEADER_SIZE - len(body))
        header = np.zeros((), HEADER)
        header["magic"] = np.void(MAGIC)
        header["major"], header["minor"] = MAJOR, MINOR
        header["file_size"], header["n_tensors"] = file_size, len(records)
        header["names_len"], header["meta_len"] = len(names), len(self._meta)
        header["kind"], header["kind_version"] = np.void(self._kind[0].ljust(32, b"\0")), self._kind[1]
        header["prefix_sum"] = xxh3_64_intdigest(body)
        header["header_sum"] = xxh3_64_intdigest(header.tobytes()[:120])
        self._pwrite(memoryview(header.tobytes() + body), 0)
        os.fsync(fd)
        assert self._temporary is not None
        os.replace(self._temporary, self._target)
        self._temporary = None
        self.abort()
        directory = os.open(os.path.dirname(self._target), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def save(
    path: PathLike,
    arrays: Mapping[str, npt.ArrayLike | Raw],
    *,
    kind: str,
    meta: Mapping[str, Any] | bytes | None = None,
    roles: Mapping[str, str] | None = None,
    tolerances: Mapping[str, Tolerance] | None = None,
    kind_version: int = 1,
) -> None:
    """Write arrays (of any memory order and byte order, scalars, or `Raw` payloads) to one file.

    `roles` are those of kdtr/format.py, section 6, by name, "none" where not given; each tensor with role "expected"
    needs a tolerance. Equal arrays and metadata give equal bytes, whatever the order. `meta` gets `generator` and
    `kind_schema` filled in; validate() asks for the rest of `provenance()`, too. Raises ENCODE for what the format
    cannot hold (object, text, void, structured, datetime, long double and masked arrays; illegal names, roles,
    tolerances), IO if the system refuses; a file of that name then stays as it was.
    """
    where = os.fspath(path)
    roles, tolerances = roles or {}, tolerances or {}
    for what, mapping in (("role", roles), ("tolerance", tolerances)):
        if unknown := sorted(set(mapping) - set(arrays)):
            raise EncodeError(f"has a {what} but no array", path=where, tensor=unknown[0])
    held = {name: _adopt(name, value, where) for name, value in arrays.items()}
    specs = {
        name: TensorSpec(dtype.name, shape, roles.get(name, "none"), tolerances.get(name))
        for name, (_, dtype, shape) in held.items()
    }
    with Writer(path, specs, kind=kind, meta=meta, kind_version=kind_version) as writer:
        for row, name in enumerate(writer._names):
            array, dtype, _ = held[name]
            writer._put(row, name, array, dtype)


def _checked_names(names: Sequence[str] | Mapping[str, Any], path: str) -> list[str]:
    for name in names:
        if not isinstance(name, str) or not name.isascii():
            raise EncodeError(f"name {name!r} is not ASCII text", path=path)
    return sorted(names)


def _adopt(name: str, value: Any, path: str) -> tuple[npt.NDArray[Any] | Raw, DType, tuple[int, ...]]:
    """The value as an array, not copied if it is one, with its element type and shape."""
    if type(value) is np.ndarray and (dtype := dtypes.from_numpy(value.dtype)) is not None:
        return value, dtype, value.shape
    if isinstance(value, Raw):
        raw_dtype = dtypes.BY_NAME.get(value.dtype)
        if raw_dtype is None:
            raise EncodeError(f"dtype {value.dtype!r} is none of {', '.join(dtypes.BY_NAME)}", path=path, tensor=name)
        return value, raw_dtype, tuple(value.shape)
    masked = sys.modules.get("numpy.ma")  # not imported: then the value is none, and the import costs more than a write
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise EncodeError("is a masked array: fill it or store the mask beside it", path=path, tensor=name)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise EncodeError(f"cannot be made an array: {error}", path=path, tensor=name) from error
    found = dtypes.from_numpy(array.dtype)
    if found is None:
        raise EncodeError(f"NumPy dtype {array.dtype} has no element type in this format", path=path, tensor=name)
    return array, found, array.shape


def _payload(array: npt.NDArray[Any] | Raw, dtype: DType) -> memoryview | bytes:
    """Payload bytes; a large array that is native and C-ordered already is not copied."""
    if isinstance(array, Raw):
        data = array.data.data if isinstance(array.data, np.ndarray) else memoryview(array.data)
        return data.cast("B")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.nbytes < SMALL and not dtype.packed:
        return array.tobytes()  # in C order whatever the array's
    return dtypes.pack(np.asarray(array, order="C"), dtype).data
