"""Reading: level 1 and 2 against a plain reader on damaged files, handles, views, threads."""

from __future__ import annotations

import gc
import itertools
import math
import os
import pickle
import resource
import struct
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

import kdtr
from kdtr import errors
from kdtr.tests.plain_reader import verdict
from kdtr.tests.raw_file import BITS, File, Tensor

SMALL = File(
    [
        Tensor(b"a", "bool", (3,)),
        Tensor(b"b/x", "i4", (5,), role="expected", mode="bits"),
        Tensor(b"b/y.z", "f32", (2, 3), role="expected", mode="close", atol=1e-5, rtol=1e-3, limit=0.25),
        Tensor(b"c", "u8", (0, 7)),
        Tensor(b"d", "f16", (), role="expected", mode="ulp", max_ulp=2),
    ]
)
SMALL_BYTES = SMALL.to_bytes()


def verdict_of_library(path: Path, level: int = 2) -> str:
    try:
        with kdtr.open(path) as handle:
            if level == 2:
                handle.verify()
    except kdtr.KDTRError as error:
        return error.code if str(path) in str(error) else f"{error.code} without the path"
    return "OK"


def verdict_on_bytes(data: bytes) -> str:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        return verdict_of_library(Path(file.name))


def reseal(data: bytearray, payloads: bool) -> bytes:
    """Right sums for a changed file, so that the checks behind them are reached."""
    n, names_len, meta_len = struct.unpack_from("<III", data, 24)
    data_off = -(-(128 + 128 * n + names_len + meta_len) // 4096) * 4096
    if payloads and n < 100:
        for i in range(n):
            offset, nbytes = struct.unpack_from("<QQ", data, 128 + 128 * i + 8)
            if offset + nbytes <= len(data):
                struct.pack_into(
                    "<Q", data, 128 + 128 * i + 24, xxh3_64_intdigest(bytes(data[offset : offset + nbytes]))
                )
    struct.pack_into("<Q", data, 112, xxh3_64_intdigest(bytes(data[128:data_off])))
    struct.pack_into("<Q", data, 120, xxh3_64_intdigest(bytes(data[:120])))
    return bytes(data)


def test_small_file_is_legal(tmp_path):
    (tmp_path / "a.kdtr").write_bytes(SMALL_BYTES)
    assert verdict_of_library(tmp_path / "a.kdtr") == verdict(SMALL_BYTES) == "OK"


def test_every_flipped_bit_is_detected(tmp_path):
    """Outside the payload padding of level 1, too: level 2 sees each bit of the file."""
    path = tmp_path / "a.kdtr"
    path.write_bytes(SMALL_BYTES)
    data = bytearray(SMALL_BYTES)
    # All bits of the prefix but its padding, of which a few, and all bits around the payloads.
    used = SMALL.used
    places = [*range(used), used, 2000, 4095, *range(4096, 4096 + 5 * 256 + 8), 7000, 8191]
    with path.open("r+b", buffering=0) as file:
        for at in places:
            for bit in range(8):
                data[at] ^= 1 << bit
                os.pwrite(file.fileno(), data[at : at + 1], at)
                code = verdict_of_library(path)
                assert code != "OK", (at, bit)
                assert code == verdict(bytes(data)), (at, bit)
                data[at] ^= 1 << bit
            os.pwrite(file.fileno(), data[at : at + 1], at)


@pytest.mark.parametrize(
    "length", [*range(132), 255, 1000, SMALL.used, 4095, 4096, 4097, *range(4200, 8192, 200), 8191]
)
def test_cut_anywhere_is_truncated(tmp_path, length):
    path = tmp_path / "a.kdtr"
    path.write_bytes(SMALL_BYTES[:length])
    assert verdict_of_library(path, level=1) == "TRUNCATED"
    for read in (kdtr.read, lambda p: kdtr.open(p).view("a")):
        with pytest.raises(errors.TruncatedError, match=f"has {length} bytes"):
            read(path)


@pytest.mark.parametrize("extra", [1, 4096])
def test_trailing_bytes(tmp_path, extra):
    path = tmp_path / "a.kdtr"
    path.write_bytes(SMALL_BYTES + bytes(extra))
    with pytest.raises(errors.TrailingError, match=f"has {8192 + extra} bytes, its header says 8192"):
        kdtr.open(path)


INTERESTING = [0, 1, 2, 3, 6, 7, 30, 31, 127, 128, 255, 256, 4096, 2**16 - 1, 2**20 + 1, 2**31, 2**32 - 1]
INTERESTING += [2**48, 2**48 + 1, 2**63, 2**64 - 256, 2**64 - 1]
FIELDS = [(0, "I"), (4, "H"), (6, "B"), (7, "B"), (8, "Q"), (16, "Q"), (24, "Q"), (96, "B"), (97, "B"), (98, "H")]
FIELDS += [(100, "I"), (104, "Q"), (112, "Q"), (120, "Q"), *((32 + 8 * i, "Q") for i in range(8))]
HEADER_FIELDS = [
    (8, "H"),
    (10, "H"),
    (12, "I"),
    (16, "Q"),
    (24, "I"),
    (28, "I"),
    (32, "I"),
    (36, "I"),
    (40, "B"),
    (90, "B"),
]


@st.composite
def mutants(draw):
    data = bytearray(SMALL_BYTES)
    for _ in range(draw(st.integers(1, 3))):
        match draw(st.integers(0, 4)):
            case 0:
                at, kind = draw(st.sampled_from(HEADER_FIELDS))
            case 1 | 2:
                at, kind = draw(st.sampled_from(FIELDS))
                at += 128 + 128 * draw(st.integers(0, 4))
            case 3:  # names
                at, kind = draw(st.integers(128 + 640, 128 + 640 + len(SMALL.names_block) - 1)), "B"
            case _:  # payloads and padding
                at, kind = draw(st.one_of(st.integers(SMALL.used, 8191), st.integers(4096, 5400))), "B"
        size = struct.calcsize(kind)
        old = int.from_bytes(data[at : at + size], "little")
        value = draw(st.one_of(st.sampled_from(INTERESTING), st.integers(old - 2, old + 2)))
        value = draw(st.one_of(st.just(value), st.sampled_from(b"/.aB\0"))) if kind == "B" else value
        data[at : at + size] = (value % (1 << (8 * size))).to_bytes(size, "little")
    return reseal(data, draw(st.booleans()))


@settings(max_examples=1000, deadline=None)
@given(mutants())
def test_resealed_mutants_get_the_verdict_of_the_plain_reader(mutant):
    assert verdict_on_bytes(mutant) == verdict(mutant)


SEGMENTS = [b"a", b"b", b"a", b"b", b"ab", b"a.", b".b", b"...", b".", b"..", b"", b"a\xff", b"a b", b"\0"]
NAMES = st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=3).map(b"/".join)


def test_all_names_of_some_segments_get_the_verdict_of_the_plain_reader():
    """Name boundaries are known to the vectorised check only through positions: the neighbours matter."""
    segments = [b"a", b".", b"..", b"...", b".a", b"a.", b""]
    for count in (1, 2, 3):
        for name in map(b"/".join, itertools.product(segments, repeat=count)):
            for tensors in ([Tensor(name)], [Tensor(b"%"), Tensor(name), Tensor(b"z")]):
                data = File(tensors).to_bytes()
                assert verdict_on_bytes(data) == verdict(data), name


@settings(max_examples=300, deadline=None)
@given(st.lists(NAMES, max_size=4), st.booleans())
def test_names_get_the_verdict_of_the_plain_reader(names, ascending):
    data = File([Tensor(name) for name in (sorted(set(names)) if ascending else names)]).to_bytes()
    assert verdict_on_bytes(data) == verdict(data)


def test_all_shapes_of_some_dims_get_the_verdict_of_the_plain_reader():
    """Products at the cap, over it, wrapping to 0 and to small numbers; sizes that would fit them."""
    dims = [0, 1, 3, 2**16, 2**24, 2**48, 2**48 + 1, 2**63, 2**64 - 1]
    for shape in itertools.product(dims, repeat=3):
        for dtype in ("u8", "f6_e2m3fn"):
            nbytes = (math.prod(shape) * BITS[dtype] + 7) // 8 % 2**64
            data = File([Tensor(b"x", dtype, (0, 0, 0), raw={"dim": shape, "nbytes": nbytes})]).to_bytes()
            assert verdict_on_bytes(data) == verdict(data), shape


def test_first_faulty_record_is_reported_and_named(tmp_path):
    tensors = [Tensor(f"t{i:04}".encode(), "u8", (i % 7,)) for i in range(600)]
    tensors[234] = Tensor(b"t0234", "u8", (3,), raw={"dtype": 77})
    tensors[400] = Tensor(b"t0399", "u8", (3,))
    path = tmp_path / "a.kdtr"
    path.write_bytes(File(tensors).to_bytes())
    with pytest.raises(errors.DTypeError, match=r"tensor 't0234': dtype code is 77, known are 1\.\.30"):
        kdtr.open(path)


def test_messages_name_file_tensor_found_and_expected(tmp_path):
    path = tmp_path / "a.kdtr"
    data = bytearray(SMALL_BYTES)
    data[4096 + 512] ^= 1
    path.write_bytes(data)
    with kdtr.open(path) as handle, pytest.raises(errors.DataSumError) as caught:
        handle.verify()
    stored = handle.info["b/y.z"].data_sum
    assert (caught.value.path, caught.value.tensor) == (str(path), "b/y.z")
    assert f"{stored:016x}" in str(caught.value)
    assert str(caught.value).startswith(f"DATA_SUM: {path}: tensor 'b/y.z': ")


def test_get_refuses_damaged_data_and_leaves_the_rest_readable(tmp_path):
    path = tmp_path / "a.kdtr"
    data = bytearray(SMALL_BYTES)
    data[4096 + 512] ^= 1
    path.write_bytes(data)
    with kdtr.open(path) as handle:
        for ask in (handle.get, handle.raw, handle.__getitem__):
            with pytest.raises(errors.DataSumError):
                ask("b/y.z")
        assert handle.get("b/y.z", verify=False).shape == (2, 3)
        assert handle["a"].tolist() == [False, True, False]
        with pytest.raises(errors.DataSumError):
            handle.read(["a", "b/y.z"])
    with pytest.raises(errors.DataSumError):
        kdtr.read(path)
    assert list(kdtr.read(path, ["a"])) == ["a"]


@pytest.mark.parametrize("size", [3, 300_000])
def test_values_in_small_and_large_payloads(tmp_path, size):
    """A wrong bool anywhere, also in a block that is not the last."""
    path = tmp_path / "a.kdtr"
    payload = bytearray(size)
    payload[1] = 2
    path.write_bytes(File([Tensor(b"x", "bool", (size,), bytes(payload))]).to_bytes())
    with kdtr.open(path) as handle:
        for check in (handle.verify, handle.read, lambda: handle.get("x")):
            with pytest.raises(errors.DataValueError, match="neither 0 nor 1"):
                check()


@pytest.mark.parametrize("size", [5, 700_001])
def test_spare_bits_in_small_and_large_payloads(tmp_path, size):
    path = tmp_path / "a.kdtr"
    payload = bytearray((size + 1) // 2)
    payload[-1] = 0x10
    path.write_bytes(File([Tensor(b"x", "u4", (size,), bytes(payload))]).to_bytes())
    with kdtr.open(path) as handle:
        for check in (handle.verify, handle.read, lambda: handle.get("x"), lambda: handle.raw("x")):
            with pytest.raises(errors.DataValueError, match="spare bits"):
                check()


@pytest.mark.parametrize("size", [10, 300_000])
def test_padding_after_small_and_large_payloads(tmp_path, size):
    path = tmp_path / "a.kdtr"
    file = File([Tensor(b"x", "u8", (size,)), Tensor(b"y", "u8", (1,))])
    data = bytearray(file.to_bytes())
    data[file.offset(0) + size] = 1
    path.write_bytes(data)
    with kdtr.open(path) as handle, pytest.raises(errors.PaddingError, match="tensor 'x'"):
        handle.verify()


def test_handle_is_a_mapping(tmp_path):
    path = tmp_path / "a.kdtr"
    path.write_bytes(SMALL_BYTES)
    with kdtr.open(path) as handle:
        assert (list(handle), len(handle), "b/x" in handle, "b" in handle) == (
            ["a", "b/x", "b/y.z", "c", "d"],
            5,
            True,
            False,
        )
        assert handle.names == tuple(handle)
        assert handle.info["b/y.z"].tolerance == kdtr.Tolerance.close(1e-5, 1e-3, 0.25)
        assert handle.info["d"].tolerance == kdtr.Tolerance.ulp(2)
        assert handle.info["c"][:5] == ("c", "u8", (0, 7), "input", None)
        assert handle["c"].shape == (0, 7)
        assert handle["d"].shape == ()
        assert (handle.kind, handle.kind_version, handle.meta["seed"]) == ("any", 1, None)
        assert "any/1, 5 tensors, 8192 bytes" in repr(handle)


def test_absent_names(tmp_path):
    path = tmp_path / "a.kdtr"
    path.write_bytes(SMALL_BYTES)
    fixture = kdtr.read(path, ["a", "d"])
    with kdtr.open(path) as handle:
        for ask in (
            handle.get,
            handle.view,
            handle.raw,
            handle.read_bytes,
            handle.info.__getitem__,
            fixture.__getitem__,
        ):
            with pytest.raises(errors.NotFoundError, match=r"tensor 'b/xx': .*5 tensors.*'b/x', 'b/y.z'") as caught:
                ask("b/xx")
            assert isinstance(caught.value, KeyError)
        with pytest.raises(errors.NotFoundError):
            kdtr.read(path, ["b/xx"])
    assert fixture.get("nothing") is None
    with pytest.raises(errors.NotFoundError, match="tensor 'c': is in the file but was not asked for"):
        fixture["c"]


def test_read_bytes(tmp_path):
    path = tmp_path / "a.kdtr"
    path.write_bytes(SMALL_BYTES)
    with kdtr.open(path) as handle:
        whole = handle.read_bytes("b/y.z")
        assert whole == handle["b/y.z"].tobytes()
        assert handle.read_bytes("b/y.z", 5, 9) == whole[5:9]
        assert handle.read_bytes("b/y.z", 24) == b""
        for start, stop in ((-1, 4), (5, 4), (0, 25), (25, None)):
            with pytest.raises(ValueError, match=r"not within \[0, 24\)"):
                handle.read_bytes("b/y.z", start, stop)


def test_raw_needs_no_ml_dtypes(tmp_path, monkeypatch):
    path = tmp_path / "a.kdtr"
    path.write_bytes(File([Tensor(b"h", "bf16", (3,)), Tensor(b"q", "i4", (3,))]).to_bytes())
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with kdtr.open(path) as handle:
        handle.validate()
        for name, dtype in (("h", "bf16"), ("q", "i4")):
            for ask in (handle.get, *([handle.view] if dtype == "bf16" else [])):
                with pytest.raises(
                    errors.TensorTypeError, match=rf"tensor '{name}': an array of {dtype} needs ml_dtypes"
                ):
                    ask(name)
            assert handle.raw(name).dtype == dtype
        with pytest.raises(errors.TensorTypeError, match="tensor 'h'"):
            handle.read()
        copy = tmp_path / "b.kdtr"
        kdtr.save(
            copy,
            {n: handle.raw(n) for n in handle.names},
            kind="any",
            meta=handle.meta_bytes,
            roles={"h": "input", "q": "input"},
        )
    assert copy.read_bytes() == path.read_bytes()


def test_view_is_read_only_and_outlives_handle_and_file(tmp_path):
    path = tmp_path / "a.kdtr"
    first, second = np.arange(5000, dtype=np.float32), np.zeros(5000, np.float32)
    kdtr.save(path, {"x": first}, kind="any")
    with kdtr.open(path) as handle:
        view = handle.view("x")
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    assert view.ctypes.data % 256 == 0
    kdtr.save(path, {"x": second}, kind="any")
    gc.collect()
    assert np.array_equal(view, first)
    assert np.array_equal(kdtr.read(path)["x"], second)


def test_view_of_packed_types_is_refused(tmp_path):
    path = tmp_path / "a.kdtr"
    path.write_bytes(SMALL_BYTES)
    with kdtr.open(path) as handle:
        with pytest.raises(errors.TensorTypeError, match="packed"):
            handle.view("b/x")
        assert handle.view("c").shape == (0, 7)


def test_closed_handle(tmp_path):
    path = tmp_path / "a.kdtr"
    path.write_bytes(SMALL_BYTES)
    handle = kdtr.open(path)
    handle.close()
    handle.close()
    for ask in (handle.get, handle.view, handle.raw, handle.read_bytes):
        with pytest.raises(errors.FileIOError, match="closed"):
            ask("a")
    with pytest.raises(errors.FileIOError, match="closed"):
        handle.verify()


def test_what_cannot_be_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    irregular = "not a regular file"
    reasons = {
        "absent": "No such file",
        ".": "Is a directory",
        "pipe": irregular,
        "/dev/null": irregular,
        "a\0b": "null byte",
    }
    for path, reason in reasons.items():
        with pytest.raises(errors.FileIOError, match=reason) as caught:
            kdtr.open(os.path.join(tmp_path, path))
        assert isinstance(caught.value, OSError)


def test_file_that_shrinks_under_a_handle(tmp_path):
    path = tmp_path / "a.kdtr"
    kdtr.save(path, {"x": np.ones(100_000), "y": np.ones(3)}, kind="any")
    with kdtr.open(path) as handle:
        os.truncate(path, 8192)
        for ask in (lambda: handle.get("x"), lambda: handle.read_bytes("x"), handle.verify, lambda: handle.get("y")):
            with pytest.raises(errors.TruncatedError, match="shrank"):
                ask()


def test_ten_thousand_handles_with_64_descriptors(tmp_path):
    path = tmp_path / "a.kdtr"
    path.write_bytes(SMALL_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, hard), hard))
    try:
        views: list[np.ndarray] = []
        closed: list[kdtr.Container] = []
        for i in range(10_000):
            with kdtr.open(path) as handle:
                views = [handle.view("a")]
            closed = [*closed[-100:], handle]  # kept, but without a descriptor
            if i % 100 == 0:
                with pytest.raises(kdtr.KDTRError):
                    kdtr.open(tmp_path)  # a failed open keeps nothing, either
        assert views[0].tolist() == [False, True, False]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_eight_threads_on_one_handle(tmp_path):
    path = tmp_path / "a.kdtr"
    arrays = {f"t{i}": np.full(50_000 + i, i, np.int64) for i in range(16)}
    kdtr.save(path, arrays, kind="any")
    wrong: list[object] = []

    def work(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(16)
        try:
            wrong.extend(i for i in [*order, *order] if not np.array_equal(handle[f"t{i}"], arrays[f"t{i}"]))
            wrong.extend(i for i in order if handle.view(f"t{i}")[-1] != i)
            handle.verify()
        except Exception as error:
            wrong.append(error)

    with kdtr.open(path) as handle:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_progress_adds_up(tmp_path):
    path = tmp_path / "a.kdtr"
    kdtr.save(path, {"big": np.zeros(1_000_000), "small": np.zeros(3), "tiny": np.zeros(1)}, kind="any")
    done: list[int] = []
    with kdtr.open(path) as handle:
        handle.verify(done.append)
        assert sum(done) == sum(info.nbytes for info in handle.info.values())
    assert max(done) < 1 << 21


def test_cases_of_a_fixture(tmp_path):
    path = tmp_path / "a.kdtr"
    arrays = {"one/x": np.zeros(2), "one/sub/y": np.ones(3), "two/x": np.full(1, 7.0), "top": np.zeros(())}
    kdtr.save(path, arrays, kind="any", roles={"two/x": "expected"}, tolerances={"two/x": kdtr.Tolerance.equal()})
    fixture = kdtr.read(path)
    assert fixture.cases == ("one", "two")
    assert set(fixture.case("one")) == {"x", "sub/y"}
    two = fixture.case("two")
    assert two["x"].tolist() == [7.0]
    assert two.info["x"].role == "expected"
    assert kdtr.compare(two, {"x": np.full(1, 7.0)}).ok
    with pytest.raises(errors.NotFoundError):
        fixture.case("three")


def test_errors_survive_pickling():
    for cls in errors.BY_CODE.values():
        error = cls("text", path="p", tensor="t")
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.code, again.path) == (cls, str(error), error.code, "p")


def test_every_float_type_of_the_format_is_one_here():
    from kdtr import dtypes
    from kdtr.tests.plain_reader import FLOATS

    assert {d.code for d in dtypes.DTYPES if d.is_float} == FLOATS
    assert {d.name: d.bits for d in dtypes.DTYPES} == BITS
