"""npz: a zip of .npy members. Written uncompressed and with a fixed date, so that equal content gives equal bytes."""

from __future__ import annotations

import contextlib
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from kdtr import dtypes
from kdtr.foreign import (
    BLOCK,
    DESCRIPTION,
    NUMPY_NATIVE,
    Blocks,
    ConvertError,
    Format,
    Item,
    Stored,
    little_endian,
    read_exactly,
)

_ZIP64_FROM: Final = 1 << 30  # smaller members can do without the zip64 fields, which simple readers do not know
_READ_HEADER: Final = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_FAULTS: Final = (ValueError, EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error)


class _Member(NamedTuple):
    """Where a tensor lies in the zip: its member, the length of the .npy header, NumPy's element type and order."""

    info: zipfile.ZipInfo
    header: int
    dtype: np.dtype[Any]
    fortran: bool
    shape: tuple[int, ...]


class NpzSource:
    """An open npz. Raises CONVERT for what cannot be carried: pickled, string, structured, void and date arrays."""

    def __init__(self, path: str, dropped: Callable[[str], bool], attributes: bool) -> None:
        self._path = path
        self._members: dict[str, _Member] = {}
        self.tensors: dict[str, Stored] = {}
        self.text: Mapping[str, str] = {}
        self.description: bytes | None = None
        try:
            self._zip = zipfile.ZipFile(path)
        except zipfile.BadZipFile as error:
            raise ConvertError(f"is not an npz file: {error}", path=path) from error
        try:
            for info in self._zip.infolist():
                name = info.filename.removesuffix(".npy")
                if name == DESCRIPTION or not dropped(name):
                    self._add(info, name)
            if DESCRIPTION in self.tensors:
                self.description = b"".join(bytes(block) for block in self.blocks(DESCRIPTION))
                del self.tensors[DESCRIPTION]
        except BaseException:
            self.close()
            raise

    def blocks(self, name: str) -> Blocks:
        """Bytes of a tensor. The zip's own CRC is checked when the last is taken."""
        member = self._members[name]
        nbytes = self.tensors[name].nbytes
        with self._faults(name), self._zip.open(member.info) as file:
            read_exactly(file.read, member.header, self._path, name)
            if member.fortran:
                data = read_exactly(file.read, nbytes, self._path, name)
                yield little_endian(np.frombuffer(data, member.dtype).reshape(member.shape[::-1]).T)
                return
            for start in range(0, nbytes, BLOCK):
                data = read_exactly(file.read, min(BLOCK, nbytes - start), self._path, name)
                yield little_endian(np.frombuffer(data, member.dtype))

    def close(self) -> None:
        """Give the file back."""
        self._zip.close()

    def _add(self, info: zipfile.ZipInfo, name: str) -> None:
        if name == info.filename:
            raise ConvertError(f"member '{name}' is no array (.npy)", path=self._path)
        if name in self._members:
            raise ConvertError("is in the file twice", path=self._path, tensor=name)
        with self._faults(name), self._zip.open(info) as file:
            version = np.lib.format.read_magic(file)
            if version not in _READ_HEADER:
                raise ValueError(f"npy version {version[0]}.{version[1]}, which only structured arrays need")
            shape, fortran, dtype = _READ_HEADER[version](file)
            member = _Member(info, file.tell(), dtype, fortran, shape)
        found = dtypes.from_numpy(dtype)
        if found is None or found.name not in NUMPY_NATIVE:
            raise ConvertError(_refusal(dtype), path=self._path, tensor=name)
        payload, nbytes = info.file_size - member.header, math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or nbytes != payload:
            raise ConvertError(
                f"{found.name} {list(shape)} takes {nbytes} bytes, the member holds {payload}",
                path=self._path,
                tensor=name,
            )
        self._members[name], self.tensors[name] = member, Stored(found.name, shape)

    @contextlib.contextmanager
    def _faults(self, name: str) -> Iterator[None]:
        """Errors of zipfile, zlib and NumPy's header parser as one that names file and tensor."""
        try:
            yield
        except _FAULTS as error:
            raise ConvertError(f"cannot be read: {error}", path=self._path, tensor=name) from error


def write_npz(path: str, items: list[Item], description: bytes, text: Mapping[str, str]) -> None:
    """Make an npz that `numpy.load` reads without pickle; the description is one more array of bytes."""
    described = Item(DESCRIPTION, Stored("u8", (len(description),)), lambda: iter([description]))
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as file:
        for item in [*items, described]:
            info = zipfile.ZipInfo(f"{item.name}.npy", (1980, 1, 1, 0, 0, 0))
            if info.filename != f"{item.name}.npy":  # zip ends a name at NUL
                raise ConvertError("npz cannot hold this name", tensor=item.name)
            info.create_system, info.external_attr = 3, 0o644 << 16  # the same on every system
            dtype = dtypes.BY_NAME[item.stored.dtype].numpy().newbyteorder("<")
            header = {"descr": dtype.str, "fortran_order": False, "shape": item.stored.shape}
            with file.open(info, "w", force_zip64=item.stored.nbytes >= _ZIP64_FROM) as member:
                np.lib.format.write_array_header_1_0(member, header)
                for block in item.blocks():
                    member.write(block)


def _refusal(dtype: np.dtype[Any]) -> str:
    if dtype.hasobject:
        return "is pickled Python objects"
    if dtype.kind == "V" and dtype.names is None:
        return f"is {dtype.str} (bytes without a type; so NumPy stores bf16 and fp8): store a view as unsigned integers"
    return f"has NumPy type {dtype}, which KDTR has not"


NPZ: Final = Format("npz", NUMPY_NATIVE, NpzSource, write_npz)
