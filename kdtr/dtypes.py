"""Element types: codes, names, sizes, the NumPy (or ml_dtypes) type of each, and packing of those below eight bits.

ml_dtypes is optional and imported only when an array of one of its types is asked for.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kdtr.errors import TensorTypeError

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. `numpy_name` is its name in `library`: numpy, or ml_dtypes, which is optional.

    `is_float` (real or complex floating point): neighbouring values exist, so distances can be counted in ULPs.
    """

    code: int
    name: str
    bits: int
    numpy_name: str
    library: str
    is_float: bool

    @property
    def packed(self) -> bool:
        """In the file several elements share a byte; in memory each has its own."""
        return self.bits < 8

    @property
    def restricted(self) -> bool:
        """Not every payload of the right size is legal."""
        return self.bits < 8 or self.name == "bool"

    @property
    def illegal(self) -> str:
        """What makes a payload illegal, in words."""
        return "a bool byte that is neither 0 nor 1" if self.name == "bool" else "spare bits that are not zero"

    def nbytes(self, numel: int) -> int:
        """Payload bytes of `numel` elements."""
        return (numel * self.bits + 7) // 8

    def spare_bits(self, shape: tuple[int, ...]) -> int:
        """Bits of the last payload byte that belong to no element."""
        return -math.prod(shape) * self.bits % 8

    def legal(self, payload: Bytes, shape: tuple[int, ...]) -> bool:
        """Whether bool bytes are 0 or 1 and spare bits zero. `payload` may be a part; of packed types, the end."""
        if self.name == "bool":
            return bool(payload.max(initial=0) <= 1)
        spare = self.spare_bits(shape)
        return not (spare and payload[-1] >> (8 - spare))

    def numpy(self) -> np.dtype[Any]:
        """The type that holds an element in memory. Raises TYPE where ml_dtypes is needed and missing or too old."""
        if self.library == "numpy":
            return np.dtype(self.numpy_name)
        try:
            scalar: type[np.generic] = getattr(importlib.import_module(self.library), self.numpy_name)
        except (ImportError, AttributeError) as error:
            raise TensorTypeError(
                f"an array of {self.name} needs ml_dtypes.{self.numpy_name} ({error}): install or upgrade ml_dtypes, "
                f"or take the packed bytes with raw() or read_bytes()"
            ) from error
        return np.dtype(scalar)


DTYPES: Final = (
    DType(1, "bool", 8, "bool", "numpy", False),
    DType(2, "u8", 8, "uint8", "numpy", False),
    DType(3, "i8", 8, "int8", "numpy", False),
    DType(4, "u16", 16, "uint16", "numpy", False),
    DType(5, "i16", 16, "int16", "numpy", False),
    DType(6, "u32", 32, "uint32", "numpy", False),
    DType(7, "i32", 32, "int32", "numpy", False),
    DType(8, "u64", 64, "uint64", "numpy", False),
    DType(9, "i64", 64, "int64", "numpy", False),
    DType(10, "f16", 16, "float16", "numpy", True),
    DType(11, "bf16", 16, "bfloat16", "ml_dtypes", True),
    DType(12, "f32", 32, "float32", "numpy", True),
    DType(13, "f64", 64, "float64", "numpy", True),
    DType(14, "c64", 64, "complex64", "numpy", True),
    DType(15, "c128", 128, "complex128", "numpy", True),
    DType(16, "f8_e4m3fn", 8, "float8_e4m3fn", "ml_dtypes", True),
    DType(17, "f8_e5m2", 8, "float8_e5m2", "ml_dtypes", True),
    DType(18, "f8_e4m3fnuz", 8, "float8_e4m3fnuz", "ml_dtypes", True),
    DType(19, "f8_e5m2fnuz", 8, "float8_e5m2fnuz", "ml_dtypes", True),
    DType(20, "f8_e8m0fnu", 8, "float8_e8m0fnu", "ml_dtypes", True),
    DType(21, "f8_e3m4", 8, "float8_e3m4", "ml_dtypes", True),
    DType(22, "f8_e4m3", 8, "float8_e4m3", "ml_dtypes", True),
    DType(23, "f8_e4m3b11fnuz", 8, "float8_e4m3b11fnuz", "ml_dtypes", True),
    DType(24, "i4", 4, "int4", "ml_dtypes", False),
    DType(25, "u4", 4, "uint4", "ml_dtypes", False),
    DType(26, "i2", 2, "int2", "ml_dtypes", False),
    DType(27, "u2", 2, "uint2", "ml_dtypes", False),
    DType(28, "f4_e2m1fn", 4, "float4_e2m1fn", "ml_dtypes", True),
    DType(29, "f6_e2m3fn", 6, "float6_e2m3fn", "ml_dtypes", True),
    DType(30, "f6_e3m2fn", 6, "float6_e3m2fn", "ml_dtypes", True),
)
BY_CODE: Final[Mapping[int, DType]] = MappingProxyType({dtype.code: dtype for dtype in DTYPES})
BY_NAME: Final[Mapping[str, DType]] = MappingProxyType({dtype.name: dtype for dtype in DTYPES})
_BY_NUMPY_NAME: Final = {dtype.numpy_name: dtype for dtype in DTYPES}
_BY_NUMPY: Final = {dtype.numpy(): dtype for dtype in DTYPES if dtype.library == "numpy"}


def from_numpy(dtype: np.dtype[Any]) -> DType | None:
    """The element type of arrays of `dtype` (in any byte order), or None where the format has none."""
    if (found := _BY_NUMPY.get(dtype)) is not None:
        return found
    found = _BY_NUMPY_NAME.get(dtype.name)
    if found is None or dtype.itemsize != max(1, found.bits // 8):
        return None
    return found


def pack(array: npt.NDArray[Any], dtype: DType) -> Bytes:
    """Payload of a C-ordered native array: its bytes or, below eight bits, the elements packed low bits first."""
    raw = array.reshape(-1).view(np.uint8)
    if not dtype.packed:
        return raw
    per_group, group_bytes = _group(dtype)
    codes = np.zeros((-(-raw.size // per_group), per_group), np.uint32)
    codes.reshape(-1)[: raw.size] = raw & np.uint8((1 << dtype.bits) - 1)
    words = np.bitwise_or.reduce(codes << _shifts(dtype, per_group), axis=1)
    return np.ascontiguousarray(words.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :group_bytes]).reshape(-1)[
        : dtype.nbytes(raw.size)
    ]


def unpack(payload: Bytes, dtype: DType, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Array of its own memory from the payload of a type below eight bits: the inverse of `pack`."""
    numel = math.prod(shape)
    per_group, group_bytes = _group(dtype)
    groups = np.zeros((-(-numel // per_group), 4), np.uint8)
    padded = np.zeros(groups.shape[0] * group_bytes, np.uint8)
    padded[: payload.size] = payload
    groups[:, :group_bytes] = padded.reshape(-1, group_bytes)
    codes = groups.view("<u4") >> _shifts(dtype, per_group) & np.uint32((1 << dtype.bits) - 1)
    return codes.astype(np.uint8).reshape(-1)[:numel].copy().view(dtype.numpy()).reshape(shape)


def _group(dtype: DType) -> tuple[int, int]:
    """Elements and bytes of the smallest group that ends on a byte."""
    common = math.gcd(dtype.bits, 8)
    return 8 // common, dtype.bits // common


def _shifts(dtype: DType, per_group: int) -> npt.NDArray[np.uint32]:
    return np.arange(per_group, dtype=np.uint32) * np.uint32(dtype.bits)
