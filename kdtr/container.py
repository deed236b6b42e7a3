"""Reading: `open()` gives a lazy handle, `read()` verified arrays; the checks are in kdtr/format.py, section 9."""

from __future__ import annotations

import io
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kdtr.dtypes import Bytes
from kdtr.errors import FileIOError, MetaError, NotFoundError, TensorTypeError
from kdtr.index import Index
from kdtr.metadata import decode_meta, meta_problems
from kdtr.payloads import PayloadReader, Progress, aligned
from kdtr.prefix import pread, read_prefix

PathLike = str | os.PathLike[str]


class Raw(NamedTuple):
    """Payload bytes as the file has them, the element type's name and the shape: for copying without ml_dtypes."""

    data: bytes | bytearray | memoryview | Bytes
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Fixture(Mapping[str, npt.NDArray[Any]]):
    """Verified arrays by name: owned, writable, C-ordered. `info` tells dtype, shape, role and tolerance of each."""

    path: str
    kind: str
    kind_version: int
    info: Index
    meta_bytes: bytes
    arrays: Mapping[str, npt.NDArray[Any]]

    @cached_property
    def meta(self) -> dict[str, Any]:
        """Parsed metadata. Raises META if they are not legal."""
        return decode_meta(self.meta_bytes, self.path)

    @property
    def cases(self) -> tuple[str, ...]:
        """First segments of the names that have more than one: the cases of a file that holds several."""
        return tuple(sorted({name.split("/", 1)[0] for name in self.arrays if "/" in name}))

    def case(self, case: str) -> Fixture:
        """The arrays `<case>/...` under the rest of their names. Raises NOT_FOUND if there is none."""
        info = self.info.below(f"{case}/")
        arrays = {name: self.arrays[f"{case}/{name}"] for name in info if f"{case}/{name}" in self.arrays}
        return Fixture(self.path, self.kind, self.kind_version, info, self.meta_bytes, arrays)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        array = self.arrays.get(name)
        if array is None:
            self.info.position(name)  # tells the nearest names
            raise NotFoundError("is in the file but was not asked for when it was read", path=self.path, tensor=name)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


class Container(Mapping[str, npt.NDArray[Any]]):
    """Lazy, immutable handle of a file whose prefix has passed level 1. Threads may share it: it only uses `pread`.

    As a mapping it gives verified arrays. Close it, or use it in a `with`; arrays and views outlive it.
    """

    def __init__(self, path: PathLike) -> None:
        self.path: Final = os.fspath(path)
        self._file: Final = _open_file(self.path)
        try:
            prefix = read_prefix(self._file.fileno(), self.path)
        except BaseException:
            self._file.close()
            raise
        self.kind: Final = prefix.kind
        self.kind_version: Final = prefix.kind_version
        self.file_size: Final = prefix.file_size
        self.data_off: Final = prefix.data_off
        self.info: Final = prefix.tensors
        self.names: Final = self.info.names
        self.meta_bytes: Final = prefix.meta
        self._payloads: Final = PayloadReader(self._file, self.info, self.file_size, self.path)

    @cached_property
    def meta(self) -> dict[str, Any]:
        """Parsed metadata. Raises META if they are not legal."""
        return decode_meta(self.meta_bytes, self.path)

    def get(self, name: str, *, verify: bool = True) -> npt.NDArray[Any]:  # type: ignore[override]
        """One tensor as an owned, writable array; `verify` checks its sum and values while reading.

        Raises NOT_FOUND, DATA_SUM, VALUE, and TYPE for a dtype that needs ml_dtypes where it is missing.
        """
        return self._payloads.array(self.info.position(name), verify=verify)

    def raw(self, name: str) -> Raw:
        """One tensor, verified, as the bytes of the file."""
        row = self.info.position(name)
        payload = self._payloads.payload(row)
        return Raw(self._payloads.raw(row), payload.dtype.name, payload.shape)

    def read_bytes(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Payload bytes [start, stop), unverified. Raises ValueError outside 0 <= start <= stop <= nbytes."""
        info = self.info[name]
        end = info.nbytes if stop is None else stop
        if not 0 <= start <= end <= info.nbytes:
            raise ValueError(f"{self.path}: tensor '{name}': bytes [{start}, {end}) are not within [0, {info.nbytes})")
        return pread(self._payloads.fd(), end - start, info.offset + start, self.path)

    def view(self, name: str) -> npt.NDArray[Any]:
        """One tensor as a read-only, unverified view of the mapped file; nothing is read before it is touched.

        It stays valid after `close()` and after the file is replaced by another; truncating the file in place, which
        this library never does, kills the process on access. Raises TYPE for types below eight bits.
        """
        row = self.info.position(name)
        payload = self._payloads.payload(row)
        if payload.dtype.packed:
            raise TensorTypeError(
                f"{payload.dtype.name} is packed in the file and cannot be viewed: use get() or raw()",
                path=self.path,
                tensor=name,
            )
        kind = self._payloads.numpy(row, payload.dtype)
        return np.ndarray(payload.shape, kind, self._map, payload.start)

    def read_payload(self, out: Bytes | None = None) -> Bytes:
        """The payload section in one piece, verified (level 2): one copy to a device carries all tensors.

        The bytes of a tensor are [info.offset - data_off, info.offset - data_off + info.nbytes); all these starts are
        multiples of 256, and so is the address of the new array. `out`, a writable contiguous u8 array of file_size -
        data_off elements, is filled instead of a new one: page-locked memory, for example.
        """
        size = self.file_size - self.data_off
        if out is None:
            out = aligned(size)
        elif out.dtype != np.uint8 or out.shape != (size,) or not (out.flags.c_contiguous and out.flags.writeable):
            raise TensorTypeError(
                f"out is {out.dtype} {out.shape}, must be a writable contiguous array of {size} u8", path=self.path
            )
        self._payloads.section(self.data_off, out)
        return out

    def verify(self, progress: Progress | None = None) -> None:
        """Level 2: every payload against its sum, padding, values. `progress` is told the bytes of each step done.

        Raises DATA_SUM, PADDING or VALUE for the first tensor that fails, in the order of the index.
        """
        for _ in self._payloads.scan(take=False, progress=progress or (lambda _: None)):
            pass

    def validate(self, progress: Progress | None = None) -> None:
        """Level 3, after level 2: metadata, provenance and the schema of the kind. Raises META with all `problems`."""
        from kdtr.schema import schema_problems

        self.verify(progress)
        shapes = {name: self.info[name].shape for name in self.names}
        problems = [*meta_problems(self.meta, self.kind, self.kind_version, shapes), *schema_problems(self)]
        if problems:
            text = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise MetaError(text, path=self.path, problems=tuple(problems))

    def read(self, names: Iterable[str] | None = None) -> Fixture:
        """All arrays, with the checks of level 2, or those of some names, with the checks of `get()`."""
        if names is None:
            scanned = self._payloads.scan(take=True, progress=lambda _: None)
            arrays = {name: array for name, array in zip(self.names, scanned, strict=True) if array is not None}
        else:
            arrays = {name: self.get(name) for name in names}
        return Fixture(self.path, self.kind, self.kind_version, self.info, self.meta_bytes, arrays)

    def close(self) -> None:
        """Give the descriptor back. Harmless when done twice."""
        self._file.close()
        self.__dict__.pop("_map", None)  # views keep it alive as long as they need it

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.info

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<KDTR {self.path}: {self.kind}/{self.kind_version}, {len(self)} tensors, {self.file_size} bytes>"

    @cached_property
    def _map(self) -> mmap.mmap:
        try:
            return mmap.mmap(self._payloads.fd(), self.file_size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise FileIOError(f"cannot be mapped: {error}", path=self.path) from error


def open(path: PathLike) -> Container:
    """Handle of a file after level 1: its prefix is checked, no payload is read.

    Raises IO if the system refuses, else the class of the first failing step of kdtr/format.py, section 9.
    """
    return Container(path)


def read(path: PathLike, names: Iterable[str] | None = None) -> Fixture:
    """Arrays of a file, all (after level 2) or those of some names: verified, owned, writable."""
    with Container(path) as handle:
        return handle.read(names)


def _open_file(path: str) -> io.FileIO:
    # Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
    try:
        file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except (OSError, ValueError) as error:
        raise FileIOError(f"cannot be opened: {error}", path=path) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileIOError("not a regular file", path=path)
    return file
