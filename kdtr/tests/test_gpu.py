"""On a CUDA device: one copy of the payload section brings all tensors, each as aligned as its own allocation."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdtr
from kdtr import Raw
from kdtr.dtypes import BY_NAME, DTYPES

pytestmark = pytest.mark.gpu

SHAPES = ((), (0,), (3, 0, 2), (1,), (7,), (5, 3), (129, 257))


@pytest.fixture(scope="module")
def cupy() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what cupy thinks of its environment is not tested here
        return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every element type in odd sizes, so that nothing would be aligned by chance, and many tiny tensors."""
    rng = np.random.default_rng(9)
    arrays: dict[str, Any] = {}
    for dtype in DTYPES:
        for i, shape in enumerate(SHAPES):
            numel = math.prod(shape)
            data = rng.integers(0, 256, dtype.nbytes(numel), np.uint8)
            if dtype.name == "bool":
                data &= 1
            if data.size and (spare := -numel * dtype.bits % 8):
                data[-1] &= 0xFF >> spare
            arrays[f"{dtype.name}/{i}"] = Raw(data.tobytes(), dtype.name, shape)
    arrays |= {f"tiny/{i:03d}": rng.random(3, np.float32) for i in range(500)}
    path = tmp_path_factory.mktemp("gpu") / "all.kdtr"
    kdtr.save(path, arrays, kind="any")
    return path


def check(cupy: Any, handle: kdtr.Container, device: Any) -> None:
    """Every tensor is a 256-aligned view into one device buffer, with the file's bytes and, as a type, its values."""
    assert device.data.ptr % 256 == 0
    numbers = 0
    for name, info in handle.info.items():
        start = info.offset - handle.data_off
        view = device[start : start + info.nbytes]
        if info.nbytes:
            assert view.data.ptr == device.data.ptr + start
        assert (device.data.ptr + start) % 256 == 0
        assert cupy.asnumpy(view).tobytes() == handle.read_bytes(name)
        dtype = BY_NAME[info.dtype]
        if dtype.library == "numpy" and info.nbytes:
            typed = view.view(dtype.numpy()).reshape(info.shape)
            golden = handle.get(name)
            assert typed.data.ptr == view.data.ptr  # no copy was made
            assert cupy.asnumpy(typed).tobytes() == golden.tobytes()
            if golden.dtype.kind in "iu":  # the device computes with it
                assert int(typed.astype(cupy.int64).sum()) == int(golden.astype(np.int64).sum())
                numbers += 1
    assert numbers


def test_one_copy_of_the_payload_section(cupy: Any, path: Path) -> None:
    with kdtr.open(path) as handle:
        host = handle.read_payload()
        device = cupy.empty(host.size, cupy.uint8)
        # The only host-to-device copy of this test.
        cupy.cuda.runtime.memcpy(device.data.ptr, host.ctypes.data, host.nbytes, cupy.cuda.runtime.memcpyHostToDevice)
        check(cupy, handle, device)


def test_one_copy_from_page_locked_memory(cupy: Any, path: Path) -> None:
    with kdtr.open(path) as handle:
        size = handle.file_size - handle.data_off
        pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)
        host = handle.read_payload(pinned)
        stream = cupy.cuda.Stream(non_blocking=True)
        device = cupy.empty(size, cupy.uint8)
        cupy.cuda.runtime.memcpyAsync(
            device.data.ptr, host.ctypes.data, size, cupy.cuda.runtime.memcpyHostToDevice, stream.ptr
        )
        stream.synchronize()
        check(cupy, handle, device)


def test_back_into_a_file(cupy: Any, path: Path, tmp_path: Path) -> None:
    """Results of a device, also a strided view of one, come back as the device has them."""
    golden = kdtr.read(path, ["f32/6"])["f32/6"]
    device = cupy.asarray(golden)[::2, ::-3].T
    kdtr.save(tmp_path / "back.kdtr", {"x": cupy.asnumpy(device)}, kind="any")
    assert kdtr.read(tmp_path / "back.kdtr")["x"].tobytes() == np.ascontiguousarray(golden[::2, ::-3].T).tobytes()
