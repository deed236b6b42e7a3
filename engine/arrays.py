"""Arrays of any library as addresses: what a kernel call needs, checked before the launch, never copied.

Taken are objects with `__cuda_array_interface__` (CuPy, Numba, PyTorch), `__array_interface__` (NumPy) or DLPack
(`__dlpack__`, `__dlpack_device__`; bfloat16 too). A view keeps its object alive, and with DLPack the capsule: that is
never consumed, so its own destructor gives the tensor back when the view is gone.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

CPU, CUDA, CUDA_MANAGED = 1, 2, 13  # DLDeviceType
LEGACY_STREAM = 1  # how both protocols write CUDA's default stream, whose handle is 0
_READ_ONLY, _COPIED = 1, 2  # flags of a versioned DLPack tensor
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}  # DLDataTypeCode; 6 is bool


class ArrayError(ValueError):
    """An array that a call cannot take: `call`, `argument`, what was `expected` and what it is (`actual`)."""

    def __init__(self, call: str, argument: str, expected: str, actual: str):
        super().__init__(f"{call}: {argument} must be {expected}, got {actual}")
        self.call, self.argument, self.expected, self.actual = call, argument, expected, actual


@dataclass(frozen=True)
class Device:
    """Where an array lies: DLPack's device type and number."""

    kind: int
    number: int = 0

    def __str__(self) -> str:
        return {CPU: "the CPU", CUDA: f"CUDA device {self.number}", CUDA_MANAGED: "managed memory"}.get(
            self.kind, f"a device of DLPack type {self.kind}"
        )


@dataclass(frozen=True)
class View:
    """Memory of an array. strides: in bytes. stream: of the producer, whose work there may not be done; None: it is.

    dtype: NumPy's name, "bfloat16", or for what has no name what DLPack says of it.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    strides: tuple[int, ...]
    device: Device
    read_only: bool
    stream: int | None
    owner: Any

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def contiguous(self, axes: int | None = None) -> bool:
        """Whether the last `axes` axes (all by default) lie in C order without gaps."""
        first = 0 if axes is None else len(self.shape) - axes
        pairs = zip(self.shape[first:], packed(self.shape, self.itemsize)[first:], self.strides[first:], strict=True)
        return self.size == 0 or all(n == 1 or wanted == found for n, wanted, found in pairs)


def packed(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a C-contiguous array."""
    return tuple(itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))


def view(
    call: str,
    argument: str,
    array: Any,
    device: Device,
    stream: int = 0,
    dtype: str | None = None,
    written: bool = False,
) -> View:
    """The memory of `array`, which must lie on `device`; `stream` is where it will be used.

    dtype: what 16-bit elements are taken as ("bfloat16" in uint16). Raises ArrayError.
    """
    try:
        found = _view(array, device, stream)
        place = found.device if found is not None else _dlpack_device(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArrayError(call, argument, f"an array on {device}", f"one that refuses: {error}") from error
    if place is not None and not _reaches(device, place):
        raise ArrayError(call, argument, f"on {device}", f"one on {place}")
    if found is None:
        raise ArrayError(call, argument, f"an array on {device}", _kind_of(array))
    if written and found.read_only:
        raise ArrayError(call, argument, "writable", "a read-only array")
    if dtype is not None and found.dtype in ("uint16", "int16") and dtype == "bfloat16":
        return replace(found, dtype=dtype)
    return found


def check(
    call: str, argument: str, found: View, dtype: str, shape: tuple[int, ...], strided_from: int | None = None
) -> None:
    """Raise ArrayError unless a view has this dtype and shape, is aligned and C-contiguous.

    strided_from: only the axes from here on must be contiguous; the caller looks at the strides of those before.
    """
    actual = f"{found.dtype} {list(found.shape)}"
    if found.dtype != dtype or found.shape != shape:
        raise ArrayError(call, argument, f"{dtype} {list(shape)}", actual)
    if not found.contiguous(None if strided_from is None else len(shape) - strided_from):
        raise ArrayError(call, argument, "C-contiguous", f"{actual} with strides {list(found.strides)} in bytes")
    if found.size and found.pointer % found.itemsize:
        raise ArrayError(
            call, argument, f"aligned to {found.itemsize} bytes", f"{actual} at address {found.pointer:#x}"
        )


def _reaches(device: Device, place: Device) -> bool:
    return place == device or (device.kind == CUDA and place.kind == CUDA_MANAGED)


def _view(array: Any, device: Device, stream: int) -> View | None:
    """None if the array has no protocol for this kind of device."""
    interface = getattr(array, "__array_interface__" if device.kind == CPU else "__cuda_array_interface__", None)
    if isinstance(interface, dict):
        if interface.get("mask") is not None:
            raise ValueError("it is masked")
        place = device if device.kind == CPU else _dlpack_device(array) or device  # the interface does not say which
        return _of_interface(array, interface, place)
    found = _dlpack_device(array)
    return _of_dlpack(array, found, stream) if found is not None and _reaches(device, found) else None


def _of_interface(array: Any, interface: dict[str, Any], device: Device) -> View:
    pointer, read_only = interface["data"]
    shape = tuple(interface["shape"])
    itemsize = int(interface["typestr"][2:])
    strides = interface.get("strides")
    return View(
        pointer or 0,
        shape,
        _name(interface["typestr"]),
        itemsize,
        packed(shape, itemsize) if strides is None else tuple(strides),
        device,
        bool(read_only),
        interface.get("stream"),
        array,
    )


@functools.cache
def _name(typestr: str) -> str:
    """NumPy's name of a type; bfloat16, which it has no letter for, goes as two opaque bytes."""
    if typestr[1:] == "V2":
        return "bfloat16"
    dtype = np.dtype(typestr)
    return dtype.name if dtype.isnative else f"{dtype.name} of the other byte order"


def _kind_of(array: Any) -> str:
    for name, where in (("__cuda_array_interface__", "device"), ("__array_interface__", "host")):
        if isinstance(getattr(array, name, None), dict):
            return f"{type(array).__qualname__} in {where} memory"
    return f"{type(array).__qualname__}, which is no array"


def _dlpack_device(array: Any) -> Device | None:
    ask = getattr(array, "__dlpack_device__", None)
    if ask is None:
        return None
    kind, number = ask()
    return Device(int(kind), int(number))


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _DLTensor), ("manager", c_void_p), ("deleter", c_void_p))


class _ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned, major version 1."""

    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _DLTensor),
    )


def _of_dlpack(array: Any, device: Device, stream: int) -> View:
    """The producer makes its stream safe to use on ours, so the view needs no further order."""
    ordered = None if device.kind == CPU else stream or LEGACY_STREAM
    try:
        capsule = array.__dlpack__(stream=ordered, max_version=(1, 0), copy=False)
    except TypeError:  # a producer from before version 1
        capsule = array.__dlpack__() if ordered is None else array.__dlpack__(stream=ordered)
    tensor, flags = _unpack(capsule)
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.lanes != 1 or tensor.bits % 8:
        raise ValueError(f"its elements are {tensor.lanes} lanes of {tensor.bits} bits")
    itemsize = tensor.bits // 8
    return View(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        _dlpack_name(tensor.code, tensor.bits),
        itemsize,
        tuple(s * itemsize for s in tensor.strides[: tensor.ndim]) if tensor.strides else packed(shape, itemsize),
        device,
        bool(flags & (_READ_ONLY | _COPIED)),
        None,
        (array, capsule),
    )


def _dlpack_name(code: int, bits: int) -> str:
    if code == 6:
        return "bool"
    kind = _DLPACK_KINDS.get(code)
    return f"{kind}{bits}" if kind is not None else f"{bits} bits of DLPack type {code}"


def _unpack(capsule: Any) -> tuple[_DLTensor, int]:
    """The tensor in a capsule and its flags; both live as long as the capsule."""
    valid = _api("PyCapsule_IsValid", ctypes.c_int)
    pointer = _api("PyCapsule_GetPointer", c_void_p)
    if valid(capsule, b"dltensor_versioned"):
        managed = _ManagedVersioned.from_address(pointer(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            raise ValueError(f"its DLPack version is {managed.major}.{managed.minor}, not 1")
        return managed.tensor, int(managed.flags)
    if valid(capsule, b"dltensor"):
        return _Managed.from_address(pointer(capsule, b"dltensor")).tensor, 0
    raise ValueError("its __dlpack__ gives no capsule of a tensor")


def _api(name: str, result: type[Any]) -> Callable[[Any, bytes], Any]:
    return ctypes.PYFUNCTYPE(result, ctypes.py_object, ctypes.c_char_p)((name, ctypes.pythonapi))
