"""What is written comes back bit for bit, whatever type, shape and memory order; equal content gives equal bytes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kdtr
from kdtr import dtypes
from kdtr.tests.raw_file import File, Tensor, metadata

SHAPES = [(), (0,), (1,), (5,), (3, 0, 2), (7, 3), (1,) * 8, (2, 1, 3, 1, 2, 1, 1, 2), (65_537,)]


def random_array(dtype: dtypes.DType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Any bits that the type allows: NaN payloads, denormals, both zeros and infinities come up by themselves."""
    numpy_dtype = dtype.numpy()
    raw = rng.integers(0, 256, (int(np.prod(shape)), numpy_dtype.itemsize), dtype=np.uint8)
    if dtype.name == "bool":
        raw &= 1
    if dtype.packed:
        raw &= (1 << dtype.bits) - 1
    return raw.reshape(-1).view(numpy_dtype).reshape(shape)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=lambda d: d.name)
def test_every_dtype_and_shape(tmp_path, dtype):
    rng = np.random.default_rng(dtype.code)
    arrays = {f"s{i}": random_array(dtype, shape, rng) for i, shape in enumerate(SHAPES)}
    path = tmp_path / "a.kdtr"
    kdtr.save(path, arrays, kind="any")
    fixture = kdtr.read(path)
    with kdtr.open(path) as handle:
        handle.verify()
        for name, array in arrays.items():
            for back in (fixture[name], handle[name], handle.get(name, verify=False)):
                assert same(back, array)
                assert back.flags.writeable
                assert back.flags.c_contiguous
                assert back.base is None or dtype.packed
            if not dtype.packed:
                assert same(handle.view(name), array)
            assert handle.info[name][1:3] == (dtype.name, array.shape)
            assert handle.info[name].offset % 256 == 0
    copy = tmp_path / "b.kdtr"
    with kdtr.open(path) as handle:
        kdtr.save(copy, {name: handle.raw(name) for name in handle}, kind="any", meta=handle.meta_bytes)
    assert copy.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("dtype", [d for d in dtypes.DTYPES if d.packed], ids=lambda d: d.name)
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 4, 5, 7, 8, 1001])
def test_packing_is_the_bit_stream_of_the_specification(dtype, numel):
    codes = np.random.default_rng(numel).integers(0, 1 << dtype.bits, numel)
    stream = sum(int(code) << (i * dtype.bits) for i, code in enumerate(codes))
    packed = stream.to_bytes(dtype.nbytes(numel), "little")
    array = codes.astype(np.uint8).view(dtype.numpy())
    assert dtypes.pack(array, dtype).tobytes() == packed
    assert same(dtypes.unpack(np.frombuffer(packed, np.uint8), dtype, (numel,)), array)


def test_unused_high_bits_of_packed_types_are_dropped(tmp_path):
    """ml_dtypes gives the same value to 0x0F and 0xFF; the file must not depend on it."""
    clean = np.array([-1, 3], ml_dtypes.int4)
    dirty = (clean.view(np.uint8) | 0xF0).view(ml_dtypes.int4)
    assert (clean == dirty).all()
    for name, array in (("a", clean), ("b", dirty)):
        kdtr.save(tmp_path / name, {"x": array}, kind="any")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_special_values(tmp_path):
    floats = np.array([0x7FF8000000000001, 0xFFF0000000000001, 0x8000000000000000, 1, 0x7FEFFFFFFFFFFFFF], np.uint64)
    arrays = {
        "floats": floats.view(np.float64),
        "u64": np.array([0, 2**64 - 1], np.uint64),
        "i64": np.array([-(2**63), 2**63 - 1]),
        "bf16": np.array([0x7FC1, 0xFF81, 0x8000, 0x0001], np.uint16).view(ml_dtypes.bfloat16),
    }
    kdtr.save(tmp_path / "a", arrays, kind="any")
    back = kdtr.read(tmp_path / "a")
    assert all(same(back[name], array) for name, array in arrays.items())


BASE = np.arange(24, dtype=np.float32).reshape(4, 6)
BIG_ENDIAN = BASE.astype(">f4")
READ_ONLY = BASE.copy()
READ_ONLY.flags.writeable = False
AWKWARD = {
    "transposed": BASE.T,
    "fortran": np.asfortranarray(BASE),
    "strided": BASE[::2],
    "columns": BASE[:, 1:4],
    "reversed": BASE[:, ::-1],
    "both reversed": BASE[::-1, ::-1],
    "broadcast": np.broadcast_to(BASE[0], (5, 6)),
    "broadcast scalar": np.broadcast_to(np.float32(3), (2, 2)),
    "big endian": BIG_ENDIAN,
    "big endian transposed": BIG_ENDIAN.T,
    "big endian scalar": np.array(7, ">i8"),
    "read only": READ_ONLY,
    "unaligned": np.frombuffer(b"x" + BASE.tobytes(), np.float32, 24, 1),
    "field": np.array([(1, 2.0), (3, 4.0)], [("a", "u1"), ("b", "f8")])["b"],
    "subclass": BASE.view(np.recarray),
    "memmap view": BASE.astype(np.complex64).real,
    "bf16 transposed": BASE.astype(ml_dtypes.bfloat16).T,
    "int4 reversed": (BASE % 8).astype(ml_dtypes.int4)[::-1],
    "0-d of a view": BASE[1, 2, ...],
    "empty strided": BASE[:0, ::2],
    "large transposed": np.arange(1_000_000, dtype=np.int32).reshape(1000, 1000).T,
    "large reversed": np.arange(1_000_000)[::-1],
    "large big endian": np.arange(300_000, dtype=">u2"),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_memory_order_never_matters(tmp_path, name):
    array = AWKWARD[name]
    path = tmp_path / "a.kdtr"
    kdtr.save(path, {"x": array}, kind="any")
    plain = np.array(array.astype(array.dtype.newbyteorder("=")) if not array.dtype.isnative else array, order="C")
    assert same(kdtr.read(path)["x"], plain.view(np.ndarray))
    other = tmp_path / "b.kdtr"
    kdtr.save(other, {"x": plain}, kind="any")
    assert path.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (True, "bool", ()),
        (3, "i64", ()),
        (2**63, "u64", ()),
        (2.5, "f64", ()),
        (1j, "c128", ()),
        (np.float32(2), "f32", ()),
        (np.int8(-1), "i8", ()),
        (ml_dtypes.bfloat16(1), "bf16", ()),
        ([1.0, 2.0], "f64", (2,)),
        ([], "f64", (0,)),
        ([[True], [False]], "bool", (2, 1)),
    ],
)
def test_scalars_and_lists(tmp_path, value, dtype, shape):
    kdtr.save(tmp_path / "a", {"x": value}, kind="any")
    back = kdtr.read(tmp_path / "a")
    assert (back.info["x"].dtype, back["x"].shape) == (dtype, shape)
    assert np.array_equal(back["x"], np.asarray(value))


def test_no_arrays(tmp_path):
    kdtr.save(tmp_path / "a", {}, kind="any", meta=kdtr.provenance())
    assert dict(kdtr.read(tmp_path / "a")) == {}
    with kdtr.open(tmp_path / "a") as handle:
        handle.validate()
        assert handle.file_size == 4096


def test_ten_thousand_tiny_arrays(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {f"layer{i % 7}/t{i}": rng.standard_normal(i % 9).astype(np.float32) for i in range(10_000)}
    kdtr.save(tmp_path / "a", arrays, kind="any")
    back = kdtr.read(tmp_path / "a")
    assert list(back) == sorted(arrays)
    assert all(same(back[name], array) for name, array in arrays.items())


def test_bytes_are_those_packed_by_hand(tmp_path):
    """Writer against struct: the same file, byte for byte."""
    tensors = [
        Tensor(b"a", "bool", (3,), bytes([0, 1, 1]), role="input"),
        Tensor(b"b/q", "u4", (3,), bytes([0x21, 0x03]), role="aux"),
        Tensor(b"b/w", "f32", (2, 2), np.arange(4, dtype="<f4").tobytes(), role="param"),
        Tensor(b"empty", "f64", (0, 3), b"", role="none"),
        Tensor(b"y", "f16", (), b"\x00\x3c", role="expected", mode="ulp", max_ulp=3, limit=0.5),
        Tensor(b"z", "c64", (1,), bytes(8), role="intermediate", mode="close", atol=0.5, rtol=0.25, limit=0.125),
    ]
    kdtr.save(
        tmp_path / "a",
        {
            "z": np.zeros(1, np.complex64),
            "y": np.float16(1),
            "empty": np.zeros((0, 3)),
            "b/w": np.arange(4, dtype=np.float32).reshape(2, 2),
            "b/q": np.array([1, 2, 3], ml_dtypes.uint4),
            "a": np.array([False, True, True]),
        },
        kind="demo",
        kind_version=7,
        meta=json.loads(metadata("demo", 7)),
        roles={"a": "input", "b/q": "aux", "b/w": "param", "y": "expected", "z": "intermediate"},
        tolerances={"y": kdtr.Tolerance.ulp(3, 0.5), "z": kdtr.Tolerance.close(0.5, 0.25, 0.125)},
    )
    made = File(tensors, kind=b"demo", meta=metadata("demo", 7), header={"kind_version": 7}).to_bytes()
    assert (tmp_path / "a").read_bytes() == made


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_round_trip_and_determinism_of_random_files(data):
    names = data.draw(
        st.lists(st.from_regex(r"[a-z%=@]{1,4}(/[A-Z0-9_.]x){0,2}", fullmatch=True), unique=True, max_size=12)
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
    arrays = {n: random_array(data.draw(st.sampled_from(dtypes.DTYPES)), data.draw(shapes), rng) for n in names}
    tolerances = {n: kdtr.Tolerance.close(0.5, 1e-9, 0.25) for n in names[::2]}
    roles = dict.fromkeys(names[::2], "expected")
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "a"), Path(folder, "b")
        kdtr.save(first, arrays, kind="any", meta={"b": 1, "a": [2]}, roles=roles, tolerances=tolerances)
        order = data.draw(st.permutations(names))
        kdtr.save(
            second,
            {n: arrays[n] for n in order},
            kind="any",
            meta={"a": [2], "b": 1},
            roles={n: roles[n] for n in reversed(order) if n in roles},
            tolerances=tolerances,
        )
        assert first.read_bytes() == second.read_bytes()
        fixture = kdtr.read(first)
        assert list(fixture) == sorted(names)
        for name, array in arrays.items():
            assert same(fixture[name], array)
            assert fixture.info[name].tolerance == tolerances.get(name)


# One hash on every interpreter, NumPy, machine and insertion order. Taken once; a change of the bytes is a new version.
KNOWN_SHA256 = "776ca43c7bd8d28215e5e57d63f46fee89592f1afdf2c300af3de26bad66da55"


def test_known_sha256(tmp_path):
    arrays: dict[str, npt.ArrayLike] = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "m": np.array([True, False]),
        "group/n": np.int64(-5),
    }
    meta = {"generator": {"name": "test", "version": "1"}, "notes": "é\n", "seed": 3}
    tolerances = {"x": kdtr.Tolerance.close(1e-6, 1e-5)}
    kdtr.save(tmp_path / "a", arrays, kind="op", meta=meta, roles={"x": "expected"}, tolerances=tolerances)
    assert hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest() == KNOWN_SHA256


def test_import_is_light():
    """Neither ml_dtypes nor anything else that is heavy comes with `import kdtr`, nor what only writers need."""
    code = "import numpy, xxhash, sys; old = set(sys.modules); import kdtr; print(*sorted(set(sys.modules) - old))"
    new = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "kdtr.container" in new
    assert not {"kdtr.writer", "ml_dtypes", "h5py", "safetensors", "multiprocessing", "subprocess", "numpy.ma"} & set(
        new
    )
