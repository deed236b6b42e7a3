"""What npz, safetensors and HDF5 files cannot carry, or say wrongly, is refused by name and leaves nothing behind."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import kdtr
from kdtr.convert import convert
from kdtr.foreign import DESCRIPTION, ConvertError
from kdtr.tests.raw_file import File, Tensor, metadata

SUFFIXES = (".npz", ".safetensors", ".h5")


def refused(source: Path, target: Path, message: str, **options: Any) -> ConvertError:
    """The conversion fails with a message, leaves no file behind and an old one as it was."""
    target.write_bytes(b"old")
    before = sorted(target.parent.iterdir())
    with pytest.raises(ConvertError, match=message) as caught:
        convert(source, target, **options)
    assert target.read_bytes() == b"old"
    assert sorted(target.parent.iterdir()) == before
    assert str(source) in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([{}], object), "pickled Python objects"),
        (np.array(["text"]), "NumPy type <U4"),
        (np.array([b"text"]), r"NumPy type \|S4"),
        (np.array([1], "M8[s]"), "datetime64"),
        (np.zeros(2, [("x", "f4")]), "which KDTR has not"),
        (np.zeros(2, ml_dtypes.bfloat16), "bytes without a type"),
        (np.zeros(2, ml_dtypes.float8_e5m2), "cannot be read"),
        (np.zeros(2, np.longdouble), "which KDTR has not"),
    ],
)
def test_npz_refusals(tmp_path: Path, value: np.ndarray, message: str) -> None:
    np.savez(tmp_path / "a.npz", good=np.zeros(3), bad=value)
    error = refused(tmp_path / "a.npz", tmp_path / "a.kdtr", message)
    assert error.tensor == "bad"
    assert convert(tmp_path / "a.npz", tmp_path / "b.kdtr", drop=["b*"]) == ("bad",)
    assert kdtr.read(tmp_path / "b.kdtr").info.names == ("good",)


def test_npz_that_is_not_sound(tmp_path: Path) -> None:
    source, target = tmp_path / "a.npz", tmp_path / "a.kdtr"
    np.savez(source, x=np.arange(1000.0))
    data = bytearray(source.read_bytes())
    at = data.index(np.arange(1000.0).tobytes()) + 4000
    data[at] ^= 1
    source.write_bytes(data)
    assert refused(source, target, "CRC").tensor == "x"
    source.write_bytes(data[: len(data) // 2])
    refused(source, target, "not an npz file")
    source.write_bytes(b"")
    refused(source, target, "not an npz file")
    with zipfile.ZipFile(source, "w") as file:
        file.writestr("readme.txt", "hello")
    refused(source, target, "'readme.txt' is no array")

    def member(header: str, body: bytes) -> None:
        raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + body
        with zipfile.ZipFile(source, "w") as file:
            file.writestr("x.npy", raw)

    member("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}\n", b"12345678")
    assert refused(source, target, "takes 8000000000000 bytes, the member holds 8").tensor == "x"
    member("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -1)}\n", b"12345678")
    refused(source, target, "takes 8 bytes, the member holds 8")
    member("{'descr': '<f8', 'fortran_order': False, 'shape': (1,)}\n", b"123456789")
    refused(source, target, "takes 8 bytes, the member holds 9")
    member("{'descr': '|b1', 'fortran_order': False, 'shape': (1,)}\n", b"\x02")
    with pytest.raises(kdtr.KDTRError, match="tensor 'x'"):
        convert(source, target)
    np.save(tmp_path / "1.npy", 1)
    one = (tmp_path / "1.npy").read_bytes()
    with zipfile.ZipFile(source, "w") as file:
        file.writestr("x.npy", one)
        file.writestr("y.npy", one)
    source.write_bytes(source.read_bytes().replace(b"y.npy", b"x.npy"))
    refused(source, target, "in the file twice")


def sealed(header: dict[str, object] | bytes, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "a header of 0 bytes in a file of 0"),
        ((1 << 63).to_bytes(8, "little"), "a header of 9223372036854775808 bytes"),
        (sealed({"x": entry()}, bytes(7)), "take 8 bytes, the file holds 7"),
        (sealed({"x": entry()}, bytes(9)), "take 8 bytes, the file holds 9"),
        (sealed({"x": entry(shape=(3,))}, bytes(8)), r"f32 \[3\] takes 12 bytes, its data_offsets hold 8"),
        (sealed({"x": entry(offsets=(8, 0))}, bytes(8)), "hold -8"),
        (sealed({"x": entry(offsets=(-8, 0))}, bytes(8)), "two positions"),
        (sealed({"x": entry(shape=(True, 2))}, bytes(8)), "list of sizes"),
        (sealed({"x": entry(dtype="Q4_0")}, bytes(8)), "has dtype 'Q4_0'"),
        (sealed({"x": entry(dtype=["F32"])}, bytes(8)), "has dtype"),
        (sealed({"x": entry(dtype="F4", shape=(3,), offsets=(0, 2))}, bytes(2)), "whole bytes"),
        (sealed({"x": entry(offsets=(4, 12))}, bytes(12)), "starts at 4, the tensors before it end at 0"),
        (sealed({"x": entry(), "y": entry()}, bytes(8)), "'y': starts at 0, the tensors before it end at 8"),
        (sealed({"x": entry(more=1)}, bytes(8)), "must hold dtype, shape and data_offsets"),
        (sealed({"__metadata__": {"a": 1}}, b""), "__metadata__"),
        (sealed(b'{"x":{},"x":{}}', b""), "key 'x' comes twice"),
        (sealed(b"[1]", b""), "starts with b'\\['"),
        (sealed(b"{'x'", b""), "not JSON"),
        (sealed(b"\xff{", b""), "not JSON"),
        (sealed(b'{"x":' * 5000, b""), "not JSON"),
        (sealed({"__metadata__": {DESCRIPTION: "{}"}}, b""), "not one that KDTR wrote"),
        (sealed({"__metadata__": {DESCRIPTION: '{"tensors":{"x":1}}'}}, b""), "not one that KDTR wrote"),
        (sealed({"x" * 256: entry()}, bytes(8)), "cannot be named in KDTR: escaped, the name has 256 bytes"),
        (sealed(b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", bytes(8)), "cannot be named in KDTR"),
    ],
)
def test_safetensors_that_is_not_sound(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(data)
    refused(tmp_path / "a.safetensors", tmp_path / "a.kdtr", message)


def test_safetensors_reserved_name(tmp_path: Path) -> None:
    kdtr.save(tmp_path / "a.kdtr", {"__metadata__": np.zeros(2)}, kind="any")
    assert refused(tmp_path / "a.kdtr", tmp_path / "a.safetensors", "reserves").tensor == "__metadata__"


def attribute(file: h5py.File) -> None:
    file["x"] = [1]
    file["x"].attrs["unit"] = "m"


def group_attribute(file: h5py.File) -> None:
    file["g/x"] = [1]
    file["g"].attrs["note"] = 1


def soft(file: h5py.File) -> None:
    file["x"] = [1]
    file["y"] = h5py.SoftLink("/x")


def external(file: h5py.File) -> None:
    file["y"] = h5py.ExternalLink("/etc/passwd", "/x")


def loop(file: h5py.File) -> None:
    file["g/x"] = [1]
    file["g/self"] = file["g"]


def odd_float(file: h5py.File) -> None:
    """Eight bits, which h5py would widen to f16."""
    kind = h5py.h5t.IEEE_F16LE.copy()
    kind.set_fields(7, 3, 4, 0, 3)
    kind.set_precision(8)
    kind.set_size(1)
    kind.set_ebias(7)
    h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((2,)))


def odd_int(file: h5py.File) -> None:
    kind = h5py.h5t.STD_I16LE.copy()
    kind.set_precision(12)
    h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((2,)))


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (attribute, "x", r"has 1 attributes \('unit'\)"),
        (group_attribute, "g/", "attributes"),
        (lambda f: f.attrs.update(a=1), "/", "attributes"),
        (lambda f: f.create_group("g/empty"), "g/empty/", "the group is empty"),
        (soft, "y", "is a SoftLink to '/x'"),
        (external, "y", "is a ExternalLink"),
        (loop, "g/self/", "reached by two links"),
        (lambda f: f.create_dataset("x", data="text"), "x", "HDF5 type string"),
        (lambda f: f.create_dataset("x", data=[b"fixed"]), "x", "HDF5 type string"),
        (lambda f: f.create_dataset("x", data=h5py.Empty("f4")), "x", "null dataspace"),
        (lambda f: f.create_dataset("x", data=np.zeros(2, [("a", "f4")])), "x", "HDF5 type compound"),
        (lambda f: f.create_dataset("x", (2,), h5py.enum_dtype({"A": 1}, "i1")), "x", "HDF5 type enum"),
        (lambda f: f.create_dataset("x", (2,), h5py.vlen_dtype("f4")), "x", "HDF5 type vlen"),
        (lambda f: f.create_dataset("x", (2,), h5py.ref_dtype), "x", "HDF5 type"),
        (lambda f: f.create_dataset("x", (2,), np.dtype(("f4", (3,)))), "x", "HDF5 type array"),
        (lambda f: f.create_dataset("x", data=np.zeros(2, "V2")), "x", "HDF5 type opaque"),
        (lambda f: f.create_dataset("x", (2,), "f4", external="/etc/passwd"), "x", "in other files"),
        (lambda f: f.__setitem__("t", np.dtype("f4")), "t", "neither group nor dataset"),
        (odd_float, "x", "number type of another layout"),
        (odd_int, "x", "number type of another layout"),
    ],
)
def test_hdf5_refusals(tmp_path: Path, make: Callable[[h5py.File], object], name: str, message: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        make(file)
    error = refused(tmp_path / "a.h5", tmp_path / "a.kdtr", message)
    assert error.tensor == name


def test_hdf5_attributes_can_be_dropped(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        attribute(file)
        group_attribute(file.create_group("below"))
    convert(tmp_path / "a.h5", tmp_path / "a.kdtr", drop_attributes=True)
    assert kdtr.read(tmp_path / "a.kdtr").info.names == ("below/g/x", "x")


def test_hdf5_virtual(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(4)
        layout = h5py.VirtualLayout((4,), "i8")
        layout[:] = h5py.VirtualSource(file["x"])
        file.create_virtual_dataset("v", layout)
    assert refused(tmp_path / "a.h5", tmp_path / "a.kdtr", "in other files").tensor == "v"


def test_hdf5_cannot_hold_a_name_below_a_name(tmp_path: Path) -> None:
    kdtr.save(tmp_path / "a.kdtr", {"w": np.zeros(2), "w/scale": np.zeros(1)}, kind="any")
    assert refused(tmp_path / "a.kdtr", tmp_path / "a.h5", "beside 'w/scale'").tensor == "w"
    convert(tmp_path / "a.kdtr", tmp_path / "a.npz")


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kdtr.save(tmp_path / "a.kdtr", {"w": np.zeros(2)}, kind="any")
    monkeypatch.setitem(sys.modules, "h5py", None)
    refused(tmp_path / "a.kdtr", tmp_path / "a.h5", r"needs h5py: pip install 'kdtr\[convert\]'")


def test_damaged_kdtr_is_not_carried_on(tmp_path: Path) -> None:
    full = tmp_path / "full.kdtr"
    kdtr.save(full, {"first": np.zeros(9), "special": np.arange(3.0)}, kind="any")
    data = bytearray(full.read_bytes())
    with kdtr.open(full) as handle:
        data[handle.info["special"].offset] ^= 1
    full.write_bytes(data)
    for suffix in SUFFIXES:
        with pytest.raises(kdtr.KDTRError, match=r"DATA_SUM.*special"):
            convert(full, tmp_path / f"a{suffix}")
        assert not (tmp_path / f"a{suffix}").exists()


def test_metadata_of_another_kind_is_not_carried_on(tmp_path: Path) -> None:
    """It could not be written again."""
    data = File([Tensor(b"x", "f32", (3,))], kind=b"tree", meta=metadata("topk")).to_bytes()
    (tmp_path / "a.kdtr").write_bytes(data)
    for suffix in SUFFIXES:
        with pytest.raises(kdtr.KDTRError, match=r"a\.kdtr: metadata kind_schema is 'topk/1', the file is tree/1"):
            convert(tmp_path / "a.kdtr", tmp_path / f"a{suffix}")
        assert not (tmp_path / f"a{suffix}").exists()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_changed_file_does_not_pass_for_the_described_one(tmp_path: Path, suffix: str) -> None:
    kdtr.save(tmp_path / "a.kdtr", {"x": np.zeros(3, np.float32), "y": np.zeros(2)}, kind="any")
    other = tmp_path / f"a{suffix}"
    convert(tmp_path / "a.kdtr", other)
    if suffix == ".npz":
        with np.load(other) as file:
            arrays = {**file, "x": np.zeros(4, np.float32)}
        np.savez(other, **arrays)
    elif suffix == ".h5":
        with h5py.File(other, "r+") as file:
            del file["x"]
            file["x"] = np.zeros(4, np.float32)
    else:
        with safetensors.safe_open(other, "np") as file:
            text, arrays = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        safetensors.numpy.save_file({**arrays, "x": np.zeros(4, np.float32)}, other, text)
    error = refused(other, tmp_path / "b.kdtr", r"expects f32 \[3\], found f32 \[4\]")
    assert error.tensor == "x"


def test_one_side_is_kdtr(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(2))
    kdtr.save(tmp_path / "a.kdtr", {"x": np.zeros(2)}, kind="any")
    refused(tmp_path / "a.npz", tmp_path / "a.h5", "one side must be .kdtr")
    refused(tmp_path / "a.kdtr", tmp_path / "b.kdtr", "one side must be .kdtr")
    refused(tmp_path / "a.pt", tmp_path / "c.kdtr", "suffix '.pt' is none of .kdtr, .npz")
    refused(tmp_path / "absent.npz", tmp_path / "c.kdtr", "No such file")


def test_metadata_that_no_conversion_made(tmp_path: Path) -> None:
    """What it says is not trusted: a name is restored only if it is the one that was escaped."""

    def save(name: str, original: object, converted: dict[str, Any]) -> Path:
        meta = {"converted": converted, "tensors": {name: {"original": original}}}
        kdtr.save(tmp_path / "a.kdtr", {name: np.zeros(2)}, kind="any", meta=meta)
        return tmp_path / "a.kdtr"

    for original in ("y", 7, None, "a" * 300, ["x"]):
        target = tmp_path / "b.npz"
        convert(save("x", original, {"format": "npz"}), target)
        with np.load(target) as file:
            assert set(file.files) == {"x", DESCRIPTION}
    refused(save("x%00y", "x\0y", {"format": "npz"}), tmp_path / "c.npz", "npz cannot hold this name")
    refused(save("x/%2E/y", "x/./y", {"format": "hdf5"}), tmp_path / "c.h5", "HDF5 cannot hold this name")
    for text in ({"a": 1}, ["a"], {DESCRIPTION: "x"}):
        converted = {"format": "safetensors", "metadata": text}
        refused(save("x", "x", converted), tmp_path / "c.safetensors", "cannot be restored")
    for tensors in (7, ["x"], {"x": 1}):
        meta = {"converted": {"format": "npz"}, "tensors": tensors}
        kdtr.save(tmp_path / "a.kdtr", {"x": np.zeros(2)}, kind="any", meta=meta)
        convert(tmp_path / "a.kdtr", tmp_path / "b.npz")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    kdtr.save(tmp_path / "a.kdtr", {"x": np.zeros(3), "y": np.zeros(3)}, kind="any")
    read_bytes = kdtr.Container.read_bytes

    def fail(self: kdtr.Container, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if name == "y":
            raise OSError(5, "Input/output error")
        return read_bytes(self, name, start, stop)

    monkeypatch.setattr(kdtr.Container, "read_bytes", fail)
    refused(tmp_path / "a.kdtr", tmp_path / f"a{suffix}", "Input/output error")
