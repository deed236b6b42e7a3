"""CUDA memory through a stand-in of CuPy: what is asked of it, on which stream and in which order.

The stand-in keeps its arrays in host memory and shows them as device memory, so that the host library can compute on
them: the whole path of a CUDA array runs, without a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.abi import LibraryError
from engine.arrays import CUDA, ArrayError, Device
from engine.memory import CudaMemory, HostMemory
from engine.ops import Ops
from engine.sources import CHECKOUT
from engine.tests.backends import open_ops


class FakeArray:
    """A NumPy array that says it lies on the device, in use on the stream that is current when it is asked."""

    def __init__(self, cupy: FakeCupy, held: Any):
        self._cupy, self.held = cupy, held
        self.data = SimpleNamespace(ptr=held.ctypes.data)
        self.shape, self.dtype = held.shape, held.dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.held.__array_interface__, "stream": self._cupy.current.ptr or 1}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA, self._cupy.device)

    def __getitem__(self, key: Any) -> FakeArray:
        return FakeArray(self._cupy, self.held[key])

    def get(self) -> Any:
        self._cupy.log.append(("get", self._cupy.current.ptr))
        return self.held.copy()


class FakeStream:
    def __init__(self, cupy: FakeCupy, ptr: int):
        self._cupy, self.ptr = cupy, ptr
        self._before: list[FakeStream] = []

    def __enter__(self) -> FakeStream:
        self._before.append(self._cupy.current)
        self._cupy.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._cupy.current = self._before.pop()

    def record(self) -> tuple[str, int]:
        return ("event", self.ptr)

    def wait_event(self, event: tuple[str, int]) -> None:
        self._cupy.log.append(("wait", self.ptr, event[1]))


class FakeCupy:
    """As much of CuPy as the engine uses. log: what it was asked for, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.device = 0
        null = FakeStream(self, 0)
        self.current = null
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(getDevice=lambda: self.device),
            get_current_stream=lambda: self.current,
            Stream=SimpleNamespace(
                null=null, from_external=lambda stream: FakeStream(self, stream.__cuda_stream__()[1])
            ),
        )

    def empty(self, shape: tuple[int, ...], dtype: str) -> FakeArray:
        self.log.append(("empty", shape, self.current.ptr))
        return FakeArray(self, np.empty(shape, dtype))

    def asarray(self, array: Any) -> FakeArray:
        return array if isinstance(array, FakeArray) else FakeArray(self, np.array(array))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    made = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


@pytest.fixture
def device_ops(cupy: FakeCupy) -> Ops:
    """Operations of the host library on arrays that claim to be device memory."""
    return Ops(open_ops("host").library, CudaMemory())


def tree(cupy: FakeCupy) -> tuple[FakeArray, ...]:
    """tokens, parents, node_count, choices of a chain 5 -> 6 -> 7 that is accepted to its end."""
    tokens, parents = np.array([[5, 6, 7]], np.int32), np.array([[-1, 0, 1]], np.int32)
    choices, count = np.array([[6, 7, 9]], np.int32), np.array([2], np.int32)
    return tuple(cupy.asarray(array) for array in (tokens, parents, count, choices))


def test_results_lie_in_device_memory_and_come_back_after_their_stream(cupy, device_ops):
    found = device_ops.tree_accept(*tree(cupy), 4)
    assert isinstance(found.path, FakeArray)
    assert found.path.held.tolist() == [[0, 1, 2, -1, -1]]
    found.raise_for_status()
    on_host = found.to_host()
    assert (on_host.accepted.tolist(), on_host.bonus.tolist()) == ([2], [9])
    assert {entry[-1] for entry in cupy.log} == {0}
    assert not [entry for entry in cupy.log if entry[0] == "wait"]  # one stream is in order by itself


def test_everything_is_made_for_the_stream_of_the_call_which_follows_that_of_its_inputs(cupy, device_ops):
    arrays = tree(cupy)
    found = device_ops.tree_accept(*arrays, 4, stream=SimpleNamespace(ptr=40))
    assert {entry[2] for entry in cupy.log if entry[0] == "empty"} == {40}
    assert ("wait", 40, 0) in cupy.log  # the inputs are in use on the default stream
    assert cupy.current.ptr == 0
    cupy.log.clear()
    found.raise_for_status()
    assert cupy.log == [("get", 40)]
    cupy.log.clear()
    with FakeStream(cupy, 50):
        device_ops.tree_accept(*arrays, 4)
    assert {entry[-1] for entry in cupy.log if entry[0] == "empty"} == {50}
    assert not [entry for entry in cupy.log if entry[0] == "wait"]


def test_a_plan_waits_for_nothing_and_allocates_nothing_when_it_is_called(cupy, device_ops):
    arrays = tree(cupy)
    plan = device_ops.tree_accept.plan(*arrays, 4, stream=70)
    cupy.log.clear()
    for bonus in (9, 11):
        arrays[3].held[0, 2] = bonus
        plan.call()
        assert plan.result.bonus.held.tolist() == [bonus]
    assert cupy.log == []


def test_arrays_of_another_device_or_in_host_memory_are_refused(cupy, device_ops):
    tokens, parents, count, choices = tree(cupy)
    with pytest.raises(ArrayError, match="tree_accept: choices must be on CUDA device 0, got one on the CPU"):
        device_ops.tree_accept(tokens, parents, count, choices.held, 4)
    elsewhere = FakeCupy()
    elsewhere.device = 1
    with pytest.raises(ArrayError, match="choices must be on CUDA device 0, got one on CUDA device 1"):
        device_ops.tree_accept(tokens, parents, count, FakeArray(elsewhere, choices.held), 4)


@pytest.mark.parametrize(
    ("given", "handle"),
    [
        (0, 0),
        (1, 0),  # the default stream as both array protocols write it
        (77, 77),
        (SimpleNamespace(ptr=78), 78),
        (SimpleNamespace(cuda_stream=79), 79),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 80)), 80),
        (SimpleNamespace(__cuda_stream__=(0, 81)), 81),
    ],
)
def test_streams_of_every_library_are_taken(cupy, given, handle):
    assert CudaMemory().stream(given) == handle


def test_what_is_no_stream_is_refused(cupy):
    with pytest.raises(TypeError, match="str is no stream"):
        CudaMemory().stream("main")
    with pytest.raises(ValueError, match="the host library has no streams, got 3"):
        HostMemory().stream(3)


@pytest.mark.parametrize("memory", [HostMemory(), CudaMemory()])
def test_a_workspace_is_aligned(cupy, memory):
    for size in (1, 255, 4096):
        address, kept = memory.workspace(size, 0)
        assert address % 256 == 0
        held = kept.held if isinstance(kept, FakeArray) else kept
        assert held.ctypes.data <= address <= address + size <= held.ctypes.data + held.nbytes


def test_without_cupy_the_first_use_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    memory = CudaMemory()
    with pytest.raises(LibraryError, match="CuPy cannot be imported, which holds the CUDA engine's arrays"):
        _ = memory.device
    with pytest.raises(LibraryError, match="CuPy cannot be imported"):
        memory.stream(None)


def test_without_a_driver_the_first_use_says_so(cupy):
    def fail() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")

    cupy.cuda.runtime.getDevice = fail
    with pytest.raises(LibraryError, match="no CUDA device can be used: cudaErrorInsufficientDriver"):
        CudaMemory().stream(None)


def test_the_device_is_the_one_that_is_current(cupy):
    memory = CudaMemory()
    cupy.device = 3
    assert memory.device == Device(CUDA, 3)


def test_importing_the_engine_loads_no_gpu_library():
    names = "abi arrays memory ops plan results"
    work = (
        "import sys\n"
        f"for name in '{names}'.split(): __import__('engine.' + name)\n"
        "bad = {'cupy', 'torch', 'ml_dtypes'} & set(sys.modules)\n"
        "maps = open('/proc/self/maps').read() if sys.platform == 'linux' else ''\n"
        "assert not bad and 'libcuda' not in maps, bad"
    )
    subprocess.run([sys.executable, "-c", work], cwd=CHECKOUT, check=True, env={"PYTHONPATH": str(CHECKOUT)})
