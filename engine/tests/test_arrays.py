"""Arrays of every protocol as addresses, with all that is refused before a launch; nothing here needs a GPU."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from engine.arrays import CPU, CUDA, CUDA_MANAGED, ArrayError, Device, check, packed, view

ml_dtypes = pytest.importorskip("ml_dtypes")
HOST, GPU = Device(CPU), Device(CUDA, 0)


class Dlpack:
    """A NumPy array that only DLPack can see. new: whether the producer knows version 1."""

    def __init__(self, array: Any, new: bool = True):
        self._array, self._new = array, new

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0)

    def __dlpack__(self, **options: Any) -> Any:
        if not self._new and options:
            raise TypeError("unexpected keyword argument")
        return self._array.__dlpack__(**options)


class Interface:
    """Whatever a dictionary says, as `__array_interface__` or `__cuda_array_interface__`."""

    def __init__(self, cuda: bool, array: Any, **changes: Any):
        self._array = array
        entries = {"version": 3, **array.__array_interface__, **changes}
        setattr(self, "__cuda_array_interface__" if cuda else "__array_interface__", entries)


Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Tensor:
    """A DLPack tensor made by hand, which counts how often it is given back and on which streams it was asked for."""

    def __init__(self, array: Any, device: tuple[int, int], versioned: bool = True, **changes: int):
        self._array, self._device, self._versioned, self._changes = array, device, versioned, changes
        self.freed = 0
        self.streams: list[int | None] = []
        self._destructor = Destructor(self._free)
        self._kept: Any = None

    def _free(self, _: int) -> None:
        self.freed += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None, copy: Any = None) -> Any:
        self.streams.append(stream)
        fields = {
            "data": self._array.ctypes.data,
            "code": 4,
            "bits": 16,
            "lanes": 1,
            "strides": 0,
            "byte_offset": 0,
            "major": 1,
            "flags": 0,
            **self._changes,
        }
        shape = (ctypes.c_int64 * self._array.ndim)(*self._array.shape)
        tensor = [
            *(fields["data"].to_bytes(8, "little"), *(n.to_bytes(4, "little") for n in self._device)),
            self._array.ndim.to_bytes(4, "little"),
            bytes([fields["code"], fields["bits"]]) + fields["lanes"].to_bytes(2, "little"),
            *(n.to_bytes(8, "little") for n in (ctypes.addressof(shape), fields["strides"], fields["byte_offset"])),
        ]
        nothing = bytes(16)
        head = fields["major"].to_bytes(8, "little") + nothing + fields["flags"].to_bytes(8, "little")
        whole = (head if self._versioned else b"") + b"".join(tensor) + (b"" if self._versioned else nothing)
        block = ctypes.create_string_buffer(whole, len(whole))
        self._kept = (shape, block)
        new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, Destructor)(
            ("PyCapsule_New", ctypes.pythonapi)
        )
        return new(ctypes.addressof(block), b"dltensor_versioned" if self._versioned else b"dltensor", self._destructor)


def host(array: Any, **others: Any) -> Any:
    return view("call", "x", array, HOST, **others)


def gpu(array: Any, **others: Any) -> Any:
    return view("call", "x", array, GPU, **others)


@pytest.mark.parametrize("make", [lambda a: a, Dlpack, lambda a: Dlpack(a, new=False), lambda a: Interface(False, a)])
def test_numpy_dlpack_and_the_array_interface_give_the_same_view(make):
    arrays = (np.arange(12, dtype=np.int32).reshape(3, 4), np.zeros((2, 5, 8))[:, ::2], np.array(3, np.float32))
    for array in arrays:
        found = host(make(array))
        assert (found.pointer, found.shape, found.dtype) == (array.ctypes.data, array.shape, array.dtype.name)
        assert (found.strides, found.itemsize, found.device) == (array.strides, array.itemsize, HOST)
        assert found.contiguous() == array.flags.c_contiguous
        assert not found.read_only
        assert found.stream is None


def test_a_view_keeps_its_array_alive():
    array = np.arange(1000, dtype=np.int32)
    there = weakref.ref(array)
    found = host(Dlpack(array))
    del array
    gc.collect()
    assert there() is not None
    del found
    gc.collect()
    assert there() is None


@pytest.mark.parametrize("versioned", [True, False])
def test_bfloat16_comes_through_dlpack_and_the_tensor_is_given_back_once(versioned):
    values = np.array([[1.5, -2.0, 3.25]], ml_dtypes.bfloat16)
    tensor = Tensor(values, (CPU, 0), versioned)
    found = host(tensor)
    assert (found.dtype, found.shape, found.itemsize, found.strides) == ("bfloat16", (1, 3), 2, (6, 2))
    assert found.pointer == values.ctypes.data
    gc.collect()
    assert tensor.freed == 0
    del found
    gc.collect()
    assert tensor.freed == 1


def test_a_dlpack_tensor_begins_behind_its_offset_and_has_strides_in_elements():
    values = np.arange(20, dtype=np.uint16).reshape(2, 10)
    strides = (ctypes.c_int64 * 2)(20, 2)
    found = host(Tensor(values, (CPU, 0), byte_offset=6, strides=ctypes.addressof(strides)))
    assert (found.pointer, found.strides) == (values.ctypes.data + 6, (40, 4))


def test_a_dlpack_producer_is_asked_for_the_stream_of_the_call():
    values = np.zeros(4, np.uint16)
    tensor = Tensor(values, (CUDA, 0))
    assert [gpu(tensor, stream=stream).stream for stream in (0, 77)] == [None, None]
    assert tensor.streams == [1, 77]  # 1: the default stream
    on_host = Tensor(values, (CPU, 0))
    host(on_host)
    assert on_host.streams == [None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lanes": 2}, "2 lanes of 16 bits"),
        ({"bits": 4}, "1 lanes of 4 bits"),
        ({"major": 2}, "DLPack version is 2.0, not 1"),
    ],
)
def test_dlpack_tensors_that_cannot_be_taken(changes, message):
    with pytest.raises(ArrayError, match=f"call: x must be an array on the CPU, got one that refuses: .*{message}"):
        host(Tensor(np.zeros(4, np.uint16), (CPU, 0), **changes))


def test_dtypes_that_numpy_has_no_name_for_keep_a_name_and_a_size():
    found = host(Tensor(np.zeros(4, np.uint8), (CPU, 0), code=10, bits=8))
    assert (found.dtype, found.itemsize) == ("8 bits of DLPack type 10", 1)
    assert host(Tensor(np.zeros(4, np.uint8), (CPU, 0), code=6, bits=8)).dtype == "bool"
    with pytest.raises(ArrayError, match=r"x must be int32 \[4\], got 8 bits of DLPack type 10 \[4\]"):
        check("call", "x", found, "int32", (4,))


def test_what_a_call_writes_must_be_writable():
    array = np.zeros(4, np.int32)
    array.setflags(write=False)
    host(array)
    for given in (array, Dlpack(array), Interface(False, array)):
        with pytest.raises(ArrayError, match="call: x must be writable, got a read-only array"):
            host(given, written=True)
    for flag in (1, 2):  # read-only, a copy
        with pytest.raises(ArrayError, match="writable"):
            host(Tensor(np.zeros(4, np.uint16), (CPU, 0), flags=flag), written=True)


def test_bfloat16_in_numpy_and_as_bits():
    values = np.array([1.0, 2.0], ml_dtypes.bfloat16)
    assert host(values).dtype == "bfloat16"
    assert host(Interface(False, values)).dtype == "bfloat16"
    assert host(values.view(np.uint16)).dtype == "uint16"
    assert host(values.view(np.uint16), dtype="bfloat16").dtype == "bfloat16"
    assert host(values.astype(np.float32), dtype="bfloat16").dtype == "float32"  # only bits are taken at their word


def test_the_cuda_interface_with_stream_device_and_mask():
    array = np.zeros((2, 3), np.float32)
    found = gpu(Interface(True, array, stream=5, strides=None))
    assert (found.pointer, found.strides, found.stream, found.device) == (array.ctypes.data, (12, 4), 5, GPU)
    assert gpu(Interface(True, array)).stream is None
    assert gpu(Interface(True, np.zeros(3, np.uint16), typestr="<V2")).dtype == "bfloat16"
    with pytest.raises(ArrayError, match="refuses: it is masked"):
        gpu(Interface(True, array, mask=array))
    with pytest.raises(ArrayError, match="writable"):
        gpu(Interface(True, array, data=(array.ctypes.data, True)), written=True)


def test_the_device_must_be_the_one_of_the_call():
    class There(Interface):
        where = (CUDA, 1)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.where

    array = There(True, np.zeros(3, np.int32))
    with pytest.raises(ArrayError, match="x must be on CUDA device 0, got one on CUDA device 1"):
        gpu(array)
    array.where = (CUDA_MANAGED, 0)
    assert gpu(array).device.kind == CUDA_MANAGED
    with pytest.raises(ArrayError, match="on CUDA device 0, got one on CUDA device 1"):
        gpu(Tensor(np.zeros(4, np.uint16), (CUDA, 1)))
    with pytest.raises(ArrayError, match="x must be on the CPU, got one on CUDA device 0"):
        host(Tensor(np.zeros(4, np.uint16), (CUDA, 0)))
    with pytest.raises(ArrayError, match="on CUDA device 0, got one on the CPU"):
        gpu(np.zeros(3))
    with pytest.raises(ArrayError, match="an array on CUDA device 0, got Interface in host memory"):
        gpu(Interface(False, np.zeros(3)))
    with pytest.raises(ArrayError, match="an array on the CPU, got Interface in device memory"):
        host(Interface(True, np.zeros(3)))


@pytest.mark.parametrize("thing", [[1, 2], 3, None, "x"])
def test_what_is_no_array_is_refused(thing):
    with pytest.raises(ArrayError, match=rf"x must be an array on the CPU, got {type(thing).__name__}, which is no"):
        host(thing)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.zeros((2, 3), np.int64), r"x must be int32 \[2, 3\], got int64 \[2, 3\]"),
        (np.zeros((2, 4), np.int32), r"x must be int32 \[2, 3\], got int32 \[2, 4\]"),
        (np.zeros(6, np.int32), r"x must be int32 \[2, 3\], got int32 \[6\]"),
        (np.zeros((2, 6), np.int32)[:, ::2], r"C-contiguous, got int32 \[2, 3\] with strides \[24, 8\] in bytes"),
        (np.zeros((3, 2), np.int32).T, r"C-contiguous, got int32 \[2, 3\] with strides \[4, 8\] in bytes"),
        (np.zeros((3, 3), np.int32)[::-1][:2], r"C-contiguous"),
        (np.broadcast_to(np.int32(1), (2, 3)), r"C-contiguous"),
        (np.zeros(26, np.uint8)[2:].view(np.int32).reshape(2, 3), r"aligned to 4 bytes, got int32 \[2, 3\] at address"),
        (np.zeros((2, 3), ">i4"), r"got int32 of the other byte order"),
    ],
)
def test_dtype_shape_gaps_alignment_and_byte_order_are_checked(array, expected):
    with pytest.raises(ArrayError, match=expected) as caught:
        check("call", "x", host(array), "int32", (2, 3))
    assert (caught.value.call, caught.value.argument) == ("call", "x")


def test_axes_before_the_strided_ones_may_have_gaps_and_empty_arrays_have_none():
    rows = np.zeros((4, 10), np.float32)[:, :7]
    check("call", "x", host(rows), "float32", (4, 7), strided_from=1)
    with pytest.raises(ArrayError, match="C-contiguous"):
        check("call", "x", host(rows), "float32", (4, 7))
    with pytest.raises(ArrayError, match="C-contiguous"):
        check("call", "x", host(rows[:, ::2]), "float32", (4, 4), strided_from=1)
    check("call", "x", host(np.zeros((9, 0, 3), np.float32)[::2]), "float32", (5, 0, 3))
    check("call", "x", host(np.zeros((8, 1, 3), np.float32)[:1, :, :]), "float32", (1, 1, 3))
    assert packed((2, 3, 4), 8) == (96, 32, 8)
    assert packed((), 8) == ()
