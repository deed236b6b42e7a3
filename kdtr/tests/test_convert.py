"""Conversion to and from npz, safetensors and HDF5: bit for bit, or refused by name with nothing written."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
import textwrap
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import h5py
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import kdtr
from kdtr import Raw, Tolerance
from kdtr.convert import convert
from kdtr.dtypes import BY_NAME, DTYPES, DType
from kdtr.foreign import DESCRIPTION, escape_name

SUFFIXES = (".npz", ".safetensors", ".h5")
SHAPES = ((), (0,), (3, 0, 2), (1,) * 8, (5,), (2, 3, 4))


def payload(dtype: DType, shape: tuple[int, ...], seed: int) -> Raw:
    """Any legal bits: NaN payloads, infinities, subnormals and negative zeros come of themselves."""
    numel = math.prod(shape)
    data = np.random.default_rng([seed, dtype.code]).integers(0, 256, dtype.nbytes(numel), np.uint8)
    if dtype.name == "bool":
        data &= 1
    if data.size and (spare := -numel * dtype.bits % 8):
        data[-1] &= 0xFF >> spare
    return Raw(data.tobytes(), dtype.name, shape)


def everything(path: Path) -> None:
    """All 30 element types in all odd shapes, all tolerances, all roles, metadata with every kind of value."""
    arrays: dict[str, Any] = {
        f"{dtype.name}/shape{i}": payload(dtype, shape, i) for dtype in DTYPES for i, shape in enumerate(SHAPES)
    }
    arrays["special"] = np.array([np.nan, -np.nan, -0.0, np.inf, 5e-324], np.float64)
    arrays["nan_payloads"] = np.array([0x7F800001, 0xFFC12345, 0x80000000], np.uint32).view(np.float32)
    names = sorted(arrays)
    floats = [name for name in names if "/" in name and BY_NAME[name.partition("/")[0]].is_float]
    tolerances = {
        "special": Tolerance.close(0.1, 1e-300, 0.125),
        "nan_payloads": Tolerance.bits(),
        floats[0]: Tolerance.ulp(4294967295, 0.3),
        floats[1]: Tolerance.similarity(5e-324),
        floats[2]: Tolerance.nmse(1.7976931348623157e308),
        floats[3]: Tolerance.equal(),
    }
    roles = {name: ("none", "input", "param", "intermediate", "aux")[i % 5] for i, name in enumerate(names)}
    roles |= dict.fromkeys(tolerances, "expected")
    meta = kdtr.provenance(seed=7, tensors={"special": {"desc": 'tab\t "é" \U0001f600', "dims": [None]}}, notes="x\ny")
    kdtr.save(path, arrays, kind="any", meta=meta, roles=roles, tolerances=tolerances, kind_version=3)


@pytest.fixture
def full(tmp_path: Path) -> Path:
    path = tmp_path / "full.kdtr"
    everything(path)
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_everything_comes_back_bit_for_bit(full: Path, tmp_path: Path, suffix: str) -> None:
    other, back = tmp_path / f"other{suffix}", tmp_path / "back.kdtr"
    assert convert(full, other) == ()
    convert(other, back)
    assert back.read_bytes() == full.read_bytes()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_tensors_come_back(tmp_path: Path, suffix: str) -> None:
    kdtr.save(tmp_path / "a.kdtr", {}, kind="any")
    convert(tmp_path / "a.kdtr", tmp_path / f"b{suffix}")
    convert(tmp_path / f"b{suffix}", tmp_path / "c.kdtr")
    assert (tmp_path / "c.kdtr").read_bytes() == (tmp_path / "a.kdtr").read_bytes()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_equal_content_gives_equal_bytes(full: Path, tmp_path: Path, suffix: str) -> None:
    digests = set()
    for i in range(2):
        convert(full, tmp_path / f"{i}{suffix}")
        digests.add(hashlib.sha256((tmp_path / f"{i}{suffix}").read_bytes()).hexdigest())
    assert len(digests) == 1


def test_npz_is_what_numpy_reads(full: Path, tmp_path: Path) -> None:
    convert(full, tmp_path / "a.npz")
    golden = kdtr.read(full)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as found:
        assert set(found.files) == {*golden, DESCRIPTION}
        for name, info in golden.info.items():
            dtype = BY_NAME[info.dtype]
            array = found[name]
            assert array.flags.c_contiguous
            if dtype.library == "numpy":
                assert (array.dtype, array.shape) == (dtype.numpy(), info.shape)
            elif dtype.packed:
                assert (array.dtype, array.shape) == (np.uint8, (info.nbytes,))
            else:
                assert (array.dtype, array.shape) == (f"u{dtype.bits // 8}", info.shape)
            with kdtr.open(full) as handle:
                assert array.tobytes() == handle.read_bytes(name)


def test_safetensors_is_what_its_package_reads(full: Path, tmp_path: Path) -> None:
    convert(full, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    golden = kdtr.read(full)
    native = {"f16": "F16", "bf16": "BF16", "f8_e4m3fn": "F8_E4M3", "f8_e5m2": "F8_E5M2", "bool": "BOOL", "c64": "C64"}
    found = dict(safetensors.deserialize(data))
    assert set(found) == set(golden)
    with kdtr.open(full) as handle:
        for name, info in golden.info.items():
            assert bytes(found[name]["data"]) == handle.read_bytes(name)
            if info.dtype in native:
                assert (found[name]["dtype"], tuple(found[name]["shape"])) == (native[info.dtype], info.shape)
    offset = 8 + int.from_bytes(data[:8], "little")
    assert offset % 8 == 0


def test_safetensors_checkpoint_of_its_package(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "model.layers.0.self_attn.q_a_proj.weight": rng.normal(size=(6, 4)).astype(ml_dtypes.bfloat16),
        "model.norm.weight": rng.normal(size=4).astype(np.float32),
        "scale": np.array(3, np.int64),
        "e": rng.normal(size=(3, 3)).astype(ml_dtypes.float8_e4m3fn),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "m.safetensors", {"format": "pt", "é": "ü\n"})
    convert(tmp_path / "m.safetensors", tmp_path / "m.kdtr", kind="any", role="param")
    found = kdtr.read(tmp_path / "m.kdtr")
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
        assert found.info[name].role == "param"
    assert found.meta["converted"] == {"format": "safetensors", "metadata": {"format": "pt", "é": "ü\n"}}
    assert found.meta["parents"] == [hashlib.sha256((tmp_path / "m.safetensors").read_bytes()).hexdigest()]
    with kdtr.open(tmp_path / "m.kdtr") as handle:
        handle.validate()

    convert(tmp_path / "m.kdtr", tmp_path / "again.safetensors")
    with safetensors.safe_open(tmp_path / "again.safetensors", "np") as opened:
        text = opened.metadata()
    assert {key: value for key, value in text.items() if key != DESCRIPTION} == {"format": "pt", "é": "ü\n"}
    again = dict(safetensors.deserialize((tmp_path / "again.safetensors").read_bytes()))
    assert {n: bytes(v["data"]) for n, v in again.items()} == {n: a.tobytes() for n, a in arrays.items()}


def test_bf16_needs_no_ml_dtypes(tmp_path: Path) -> None:
    values = np.array([[1, -2], [3, -0.0]], ml_dtypes.bfloat16)
    safetensors.numpy.save_file({"w": values}, tmp_path / "w.safetensors")
    code = """
        import sys
        sys.modules["ml_dtypes"] = sys.modules["h5py"] = sys.modules["safetensors"] = None
        from kdtr.convert import convert
        folder = sys.argv[1]
        convert(f"{folder}/w.safetensors", f"{folder}/w.kdtr")
        convert(f"{folder}/w.kdtr", f"{folder}/w.npz")
        convert(f"{folder}/w.npz", f"{folder}/back.kdtr")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], check=True)
    assert (tmp_path / "back.kdtr").read_bytes() == (tmp_path / "w.kdtr").read_bytes()
    found = kdtr.read(tmp_path / "back.kdtr")["w"]
    assert found.dtype == ml_dtypes.bfloat16
    assert found.tobytes() == values.tobytes()


def test_npz_of_numpy(tmp_path: Path) -> None:
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    arrays: dict[str, Any] = {
        "c": base,
        "fortran": np.asfortranarray(base),
        "transposed": base.T,
        "strided": base[:, ::2],
        "reversed": base[::-1],
        "broadcast": np.broadcast_to(base[0, 0], (3, 4)),
        "big": base.astype(">f4"),
        "big_complex": (base + 1j * base).astype(">c16"),
        "scalar": np.float64(2.5),
        "empty": np.zeros((3, 0), np.uint16),
        "flag": np.array([True, False]),
        "max": np.array(2**64 - 1, np.uint64),
    }
    for writer in (np.savez, np.savez_compressed):
        writer(tmp_path / "a.npz", **arrays)
        convert(tmp_path / "a.npz", tmp_path / "a.kdtr")
        found = kdtr.read(tmp_path / "a.kdtr")
        assert set(found) == set(arrays)
        for name, array in arrays.items():
            native = np.asarray(array).dtype.newbyteorder("=")
            assert (found[name].dtype, found[name].shape) == (native, np.shape(array))
            np.testing.assert_array_equal(found[name], array)


ODD_NAMES = [
    "a b",
    "/lead",
    "trail/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "a/./b",
    "100%",
    "é/ü",
    "a\nb",
    "%41",
    "a\\b",
    "file",
]


def test_odd_names_come_back(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        for i, name in enumerate(ODD_NAMES):
            with file.open(zipfile.ZipInfo(f"{name}.npy"), "w") as member:
                np.lib.format.write_array(member, np.array(i))
    convert(tmp_path / "a.npz", tmp_path / "a.kdtr")
    golden = kdtr.read(tmp_path / "a.kdtr")
    entries = golden.meta["tensors"]
    for name, array in golden.items():
        original = ODD_NAMES[int(array)]
        assert name == escape_name(original)
        assert entries.get(name, {"original": name})["original"] == original
    convert(tmp_path / "a.kdtr", tmp_path / "b.npz")
    with zipfile.ZipFile(tmp_path / "b.npz") as file:
        assert set(file.namelist()) == {f"{name}.npy" for name in [*ODD_NAMES, DESCRIPTION]}
    convert(tmp_path / "b.npz", tmp_path / "b.kdtr")
    assert (tmp_path / "b.kdtr").read_bytes() == (tmp_path / "a.kdtr").read_bytes()
    # Another format does not have those names: it gets KDTR's.
    convert(tmp_path / "a.kdtr", tmp_path / "c.h5")
    convert(tmp_path / "c.h5", tmp_path / "c.kdtr")
    assert (tmp_path / "c.kdtr").read_bytes() == (tmp_path / "a.kdtr").read_bytes()


def test_escaping_is_injective() -> None:
    rng = np.random.default_rng(5)
    letters = list("a./%~é2E")
    names = {"".join(rng.choice(letters, rng.integers(0, 8))) for _ in range(20000)} | {"", *ODD_NAMES}
    escaped = {escape_name(name): name for name in names}
    assert len(escaped) == len(names)
    assert all((unquote(found) if found != "%" else "") == name for found, name in escaped.items())


def test_hdf5_of_h5py(tmp_path: Path) -> None:
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["g/deep/x"] = base
        file["g/big"] = base.astype(">f4")
        file["g/name with space"] = np.array([1, 2], np.int16)
        file["flag"] = np.array([True, False])
        file["c"] = base.astype(np.complex64)
        file["half"] = base.astype(np.float16)
        file["scalar"] = 7
        file["empty"] = np.zeros((0, 3))
        file.create_dataset("chunked", data=np.arange(3e5), chunks=(1000,), compression="gzip", shuffle=True)
    convert(tmp_path / "a.h5", tmp_path / "a.kdtr")
    found = kdtr.read(tmp_path / "a.kdtr")
    with h5py.File(tmp_path / "a.h5") as file:
        for name, original in {**{n: n for n in found}, "g/name%20with%20space": "g/name with space"}.items():
            np.testing.assert_array_equal(found[name], file[original][()])
            assert (found[name].shape, found[name].dtype) == (
                file[original].shape,
                file[original].dtype.newbyteorder("="),
            )
    assert set(found) == {
        "g/deep/x", "g/big", "g/name%20with%20space", "flag", "c", "half", "scalar", "empty", "chunked"
    }  # fmt: skip


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_dropped_tensors_take_their_metadata_along(tmp_path: Path, suffix: str) -> None:
    meta = kdtr.provenance(tensors={"x": {"desc": "stays"}, "y[0]": {"desc": "goes"}})
    arrays: dict[str, Any] = {"x": np.zeros(3, np.float32), "y[0]": np.zeros(2), "y0": np.zeros(1)}
    kdtr.save(tmp_path / "a.kdtr", arrays, kind="any", meta=meta)
    convert(tmp_path / "a.kdtr", tmp_path / f"all{suffix}")
    assert convert(tmp_path / "a.kdtr", tmp_path / f"b{suffix}", drop=["y[0]", "none"]) == ("y[0]",)
    convert(tmp_path / f"b{suffix}", tmp_path / "out.kdtr")
    assert convert(tmp_path / f"all{suffix}", tmp_path / "in.kdtr", drop=["y[0]"]) == ("y[0]",)
    assert (tmp_path / "in.kdtr").read_bytes() == (tmp_path / "out.kdtr").read_bytes()
    with kdtr.open(tmp_path / "in.kdtr") as handle:
        handle.validate()
        assert handle.names == ("x", "y0")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_streams(tmp_path: Path, suffix: str) -> None:
    """A tensor passes in pieces: Python's memory stays far below its size."""
    kdtr.save(tmp_path / "a.kdtr", {"x": np.ones(8 << 20, np.float32), "y": np.ones(3)}, kind="any")
    for source, target in (
        (tmp_path / "a.kdtr", tmp_path / f"b{suffix}"),
        (tmp_path / f"b{suffix}", tmp_path / "c.kdtr"),
    ):
        tracemalloc.start()
        convert(source, target)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 14 << 20
    assert (tmp_path / "c.kdtr").read_bytes() == (tmp_path / "a.kdtr").read_bytes()


def test_progress_adds_up(full: Path, tmp_path: Path) -> None:
    steps: list[int] = []
    convert(full, tmp_path / "a.npz", progress=steps.append)
    with kdtr.open(full) as handle:
        nbytes = sum(info.nbytes for info in handle.info.values())
    assert sum(steps) == 2 * nbytes
    assert min(steps) >= 0
