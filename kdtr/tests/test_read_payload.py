"""The payload section as one aligned piece of memory, for one copy to a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kdtr
from kdtr import errors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    arrays: dict[str, npt.NDArray[Any]] = {f"x{i}": rng.random(i * 37, np.float32) for i in range(20)}
    arrays |= {"big": rng.random(300_000), "flag": np.array([True, False]), "scalar": np.array(1.5)}
    kdtr.save(tmp_path / "a.kdtr", arrays, kind="any")
    return tmp_path / "a.kdtr"


def test_all_tensors_lie_aligned_in_one_array(path: Path) -> None:
    golden = kdtr.read(path)
    with kdtr.open(path) as handle:
        whole = handle.read_payload()
        assert whole.ctypes.data % 256 == 0
        assert whole.nbytes == handle.file_size - handle.data_off
        for name, info in handle.info.items():
            start = info.offset - handle.data_off
            assert start % 256 == 0
            assert whole[start : start + info.nbytes].tobytes() == golden[name].tobytes()
        mine = np.full_like(whole, 255)
        assert handle.read_payload(mine) is mine
        assert np.array_equal(mine, whole)
    assert whole.tobytes() == path.read_bytes()[-whole.nbytes :]


def test_no_tensors(tmp_path: Path) -> None:
    kdtr.save(tmp_path / "a.kdtr", {}, kind="any")
    with kdtr.open(tmp_path / "a.kdtr") as handle:
        assert handle.read_payload().shape == (0,)


def test_it_is_verified(path: Path) -> None:
    data = path.read_bytes()
    with kdtr.open(path) as handle:
        big, flag, last = handle.info["big"], handle.info["flag"], handle.info["x9"]
    for at, error in (
        (big.offset + big.nbytes - 1, errors.DataSumError),
        (flag.offset + flag.nbytes, errors.PaddingError),
        (last.offset + last.nbytes, errors.PaddingError),
        (len(data) - 1, errors.PaddingError),
    ):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x80]) + data[at + 1 :])
        with kdtr.open(path) as handle, pytest.raises(error, match=r"a\.kdtr"):
            handle.read_payload()


def test_memory_that_does_not_fit(path: Path) -> None:
    with kdtr.open(path) as handle:
        size = handle.file_size - handle.data_off
        fixed = np.zeros(size, np.uint8)
        fixed.flags.writeable = False
        for out in (np.zeros(size - 1, np.uint8), np.zeros(size, np.int8), np.zeros(2 * size, np.uint8)[::2], fixed):
            with pytest.raises(errors.TensorTypeError, match=f"contiguous array of {size} u8"):
                handle.read_payload(out)  # type: ignore[arg-type]
