"""Where the arrays of a library lie: host memory (NumPy) or that of a CUDA device (CuPy, imported when it is used)."""

from __future__ import annotations

import functools
import importlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.abi import LibraryError
from engine.arrays import CPU, CUDA, LEGACY_STREAM, Device

WORKSPACE_ALIGNMENT = 256


class Memory(Protocol):
    """Allocation and order of work. Streams are handles, 0 for the default one."""

    @property
    def device(self) -> Device: ...

    def stream(self, given: Any) -> int:
        """The handle of a stream object, or of the current stream for None."""

    def empty(self, shape: tuple[int, ...], dtype: str, stream: int) -> Any:
        """A new array, uninitialised, to be used on `stream`."""

    def workspace(self, size: int, stream: int) -> tuple[int, Any]:
        """(address aligned to 256, what keeps it alive) of `size` bytes to be used on `stream`."""

    def follow(self, stream: int, producer: int) -> None:
        """Work on `stream` waits for what `producer` has been given so far."""

    def to_host(self, array: Any, stream: int) -> NDArray[Any]:
        """A NumPy array of what `array` holds once `stream` has done its work."""


class HostMemory:
    """Of the library that runs on the CPU: no streams, every call is done when it returns."""

    device = Device(CPU)

    def stream(self, given: Any) -> int:
        if given is not None:
            raise ValueError(f"the host library has no streams, got {given!r}")
        return 0

    def empty(self, shape: tuple[int, ...], dtype: str, stream: int) -> NDArray[Any]:
        return np.empty(shape, dtype)

    def workspace(self, size: int, stream: int) -> tuple[int, Any]:
        block = np.empty(size + WORKSPACE_ALIGNMENT, np.uint8)
        return block.ctypes.data + -block.ctypes.data % WORKSPACE_ALIGNMENT, block

    def follow(self, stream: int, producer: int) -> None:
        pass

    def to_host(self, array: Any, stream: int) -> NDArray[Any]:
        return np.array(array)


class CudaMemory:
    """Of the CUDA device that is current in this thread, through CuPy's pool.

    The pool hands freed memory out again in the order of the stream it was made for, so everything is made for the
    stream it is used on: it may be dropped while the device still works with it.
    """

    @functools.cached_property
    def _cupy(self) -> Any:
        try:
            cupy = importlib.import_module("cupy")
            cupy.cuda.runtime.getDevice()
        except ImportError as error:
            raise LibraryError(f"CuPy cannot be imported, which holds the CUDA engine's arrays: {error}") from error
        except RuntimeError as error:
            raise LibraryError(f"no CUDA device can be used: {error}") from error
        return cupy

    @property
    def device(self) -> Device:
        return Device(CUDA, self._cupy.cuda.runtime.getDevice())

    def stream(self, given: Any) -> int:
        """Of CuPy (ptr), PyTorch (cuda_stream), cuda.core (__cuda_stream__), or a handle."""
        if given is None:
            return int(self._cupy.cuda.get_current_stream().ptr)
        if isinstance(given, int):
            return _handle(given)
        if hasattr(given, "__cuda_stream__"):
            protocol = given.__cuda_stream__
            return _handle((protocol() if callable(protocol) else protocol)[1])
        for name in ("ptr", "cuda_stream"):
            if hasattr(given, name):
                return _handle(getattr(given, name))
        raise TypeError(f"{type(given).__qualname__} is no stream")

    def empty(self, shape: tuple[int, ...], dtype: str, stream: int) -> Any:
        with self._on(stream):
            return self._cupy.empty(shape, dtype)

    def workspace(self, size: int, stream: int) -> tuple[int, Any]:
        block = self.empty((size + WORKSPACE_ALIGNMENT,), "uint8", stream)
        return block.data.ptr + -block.data.ptr % WORKSPACE_ALIGNMENT, block

    def follow(self, stream: int, producer: int) -> None:
        if _handle(producer) != stream:
            self._stream(stream).wait_event(self._stream(_handle(producer)).record())

    def to_host(self, array: Any, stream: int) -> NDArray[Any]:
        with self._on(stream):
            found: NDArray[Any] = self._cupy.asarray(array).get()
        return found

    def _on(self, stream: int) -> AbstractContextManager[object]:
        if stream == self._cupy.cuda.get_current_stream().ptr:
            return nullcontext()
        chosen: AbstractContextManager[object] = self._stream(stream)
        return chosen

    def _stream(self, handle: int) -> Any:
        return self._cupy.cuda.Stream.from_external(_Stream(handle)) if handle else self._cupy.cuda.Stream.null


@dataclass(frozen=True)
class _Stream:
    """A stream of somebody else's, in the protocol by which libraries hand streams to each other."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _handle(number: int) -> int:
    return 0 if number == LEGACY_STREAM else int(number)
