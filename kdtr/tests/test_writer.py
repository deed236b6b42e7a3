"""Writing: what is refused, streaming, and that a file is whole or not there at all."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdtr
from kdtr import errors

GOOD = {"x": np.arange(1000.0)}


def left_over(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def previous(tmp_path):
    """A good file that a failed write must leave alone."""
    path = tmp_path / "a.kdtr"
    kdtr.save(path, GOOD, kind="any")
    before = path.read_bytes()
    yield path
    assert path.read_bytes() == before
    assert left_over(tmp_path) == ["a.kdtr"]


REFUSED: dict[str, Any] = {
    "object": np.array([None]),
    "ragged": [[1], [2, 3]],
    "text": np.array(["a"]),
    "python text": "a",
    "bytes": np.array([b"a"]),
    "void": np.zeros(2, "V2"),
    "structured": np.zeros(2, [("a", "f4")]),
    "datetime": np.zeros(2, "M8[s]"),
    "timedelta": np.zeros(2, "m8[s]"),
    "longdouble": np.zeros(2, np.longdouble),
    "clongdouble": np.zeros(2, np.clongdouble),
    "masked": np.ma.masked_array([1.0, 2.0], [True, False]),
    "huge integer": 2**64,
    "none": None,
    "dict": {"a": 1},
    "bool of 2": np.array([2], np.uint8).view(np.bool_),
    "raw too short": kdtr.Raw(b"123", "f32", (1,)),
    "raw too long": kdtr.Raw(b"12345", "f32", (1,)),
    "raw of no dtype": kdtr.Raw(b"1234", "float32", (1,)),
    "raw with spare bits": kdtr.Raw(b"\x10", "u4", (1,)),
    "raw bool": kdtr.Raw(b"\x02", "bool", (1,)),
    "raw of negative shape": kdtr.Raw(b"", "u8", (-1,)),
    "raw of 9 dimensions": kdtr.Raw(b"1", "u8", (1,) * 9),
    "raw over the cap": kdtr.Raw(b"", "u8", (2**48 + 1, 0)),
    "raw product over the cap": kdtr.Raw(b"", "u8", (2**40, 0, 2**40)),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_refused_values(previous, name):
    with pytest.raises(errors.EncodeError) as caught:
        kdtr.save(previous, {"good": np.ones(3), "bad": REFUSED[name]}, kind="any")
    assert (caught.value.tensor, caught.value.path) == ("bad", str(previous))


@pytest.mark.parametrize(
    "name",
    ["", "/a", "a/", "a//b", ".", "..", "a/..", "a b", "a\\b", "a:b", "é", "a\0", "a\n", "x" * 256, "x" * 70_000],
)
def test_refused_names(previous, name):
    with pytest.raises(errors.EncodeError, match="name"):
        kdtr.save(previous, {"good": np.ones(3), name: np.ones(1)}, kind="any")


def test_name_that_is_no_text(previous):
    with pytest.raises(errors.EncodeError, match="name 3"):
        kdtr.save(previous, {3: np.ones(1)}, kind="any")  # type: ignore[dict-item]


@pytest.mark.parametrize("kind", ["", "a b", "é", "\ud800", "x" * 33, "a\0b", "\x7f"])
def test_refused_kinds(previous, kind):
    with pytest.raises(errors.EncodeError, match="kind"):
        kdtr.save(previous, GOOD, kind=kind)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind_version": -1},
        {"kind_version": 2**32},
        {"roles": {"x": "expected"}},
        {"roles": {"x": "golden"}},
        {"roles": {"y": "input"}},
        {"tolerances": {"y": kdtr.Tolerance.bits()}},
        {"meta": {"a": 0.5}},
        {"meta": {"a": 2**53}},
        {"meta": {"a": b"x"}},
        {"meta": {"a": {1: 2}}},
        {"meta": {"a": "\ud800"}},
        {"meta": {"a": np.int64(3)}},
        {"meta": {"a": {1, 2}}},
        {"meta": {"kind_schema": "other/1"}},
        {"meta": {"a": [[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]}},
        {"meta": {"a": "x" * (16 << 20)}},
        {"meta": b'{"a":"' + b"x" * (16 << 20) + b'"}'},
        {"meta": b'{"a": 1}'},
        {"meta": b'{"kind_schema":"other/1"}'},
    ],
    ids=lambda arguments: str(arguments)[:40],
)
def test_refused_arguments(previous, arguments):
    with pytest.raises(errors.EncodeError) as caught:
        kdtr.save(previous, GOOD, kind="any", **arguments)
    assert caught.value.path == str(previous)


def test_ulp_tolerance_of_integers(previous):
    with pytest.raises(errors.EncodeError, match="tensor 'x': compare mode ulp on i32"):
        kdtr.save(previous, {"x": np.zeros(3, np.int32)}, kind="any", tolerances={"x": kdtr.Tolerance.ulp(1)})


@pytest.mark.parametrize(
    "make",
    [
        lambda: kdtr.Tolerance("none"),
        lambda: kdtr.Tolerance("closest"),
        lambda: kdtr.Tolerance.close(-1, 0),
        lambda: kdtr.Tolerance.close(-0.0, 0),
        lambda: kdtr.Tolerance.close(float("nan"), 0),
        lambda: kdtr.Tolerance.close(0, float("inf")),
        lambda: kdtr.Tolerance.close(0, 0, 1.5),
        lambda: kdtr.Tolerance.ulp(-1),
        lambda: kdtr.Tolerance.ulp(2**32),
        lambda: kdtr.Tolerance.nmse(float("inf")),
        lambda: kdtr.Tolerance("bits", atol=1.0),
        lambda: kdtr.Tolerance("ulp", max_ulp=1.5),  # type: ignore[arg-type]
        lambda: kdtr.Tolerance("close", atol="1"),  # type: ignore[arg-type]
    ],
)
def test_refused_tolerances(make):
    with pytest.raises(errors.EncodeError):
        make()


def test_meta_is_optional_and_completed(tmp_path):
    kdtr.save(tmp_path / "a", GOOD, kind="op")
    meta = kdtr.read(tmp_path / "a").meta
    assert meta == {"generator": {"name": "kdtr", "version": kdtr.__version__}, "kind_schema": "op/1"}
    kdtr.save(tmp_path / "a", GOOD, kind="op", meta={"generator": {"name": "mine", "version": "2"}})
    assert kdtr.read(tmp_path / "a").meta["generator"]["name"] == "mine"


SPECS = {
    "a": kdtr.TensorSpec("u8", (5,)),
    "b": kdtr.TensorSpec("f32", (100_000,), "expected", kdtr.Tolerance.ulp(1)),
    "c": kdtr.TensorSpec("i4", (3,)),
    "d": kdtr.TensorSpec("f64", (0,)),
    "e": kdtr.TensorSpec("bool", (2, 300_000)),
}


def test_streaming_in_any_order_gives_the_bytes_of_save(tmp_path):
    rng = np.random.default_rng(0)
    b, e = rng.standard_normal(100_000).astype(np.float32), rng.random((2, 300_000)) < 0.5
    c = kdtr.Raw(b"\x21\x03", "i4", (3,))
    with kdtr.Writer(tmp_path / "a", SPECS, kind="any", meta={"z": 1}) as writer:
        flags = memoryview(e.tobytes())
        writer.write("e", flags[:10])
        for at in range(0, b.nbytes, 70_001):
            writer.write("b", memoryview(b.tobytes())[at : at + 70_001])
            writer.write("a", b"") if at else writer.write("a", b"abc")
        writer.put("c", c)
        writer.write("a", bytearray(b"de"))
        writer.write("e", np.frombuffer(flags[10:], np.uint8))
        assert left_over(tmp_path) != ["a"]
        assert not (tmp_path / "a").exists()
    kdtr.save(
        tmp_path / "b",
        {"a": np.frombuffer(b"abcde", np.uint8), "b": b, "c": c, "d": np.zeros(0), "e": e},
        kind="any",
        meta={"z": 1},
        roles={"b": "expected"},
        tolerances={"b": kdtr.Tolerance.ulp(1)},
    )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert left_over(tmp_path) == ["a", "b"]


def test_copy_of_a_file(tmp_path):
    kdtr.save(tmp_path / "a", GOOD, kind="any", meta=kdtr.provenance(seed=4), roles={"x": "input"})
    with kdtr.open(tmp_path / "a") as source:
        specs = {name: info.spec for name, info in source.info.items()}
        with kdtr.Writer(tmp_path / "b", specs, kind=source.kind, meta=source.meta_bytes) as writer:
            for name in source:
                writer.write(name, source.read_bytes(name))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (lambda w: None, "0 of 5 bytes written; 4 tensors are incomplete"),
        (lambda w: w.write("a", b"1234"), "tensor 'a': 4 of 5 bytes"),
        (lambda w: w.write("a", b"123456"), "6 bytes were given, the payload has 5"),
        (lambda w: [w.write("a", b"123"), w.write("a", b"456")], "6 bytes were given"),
        (lambda w: [w.write("a", b"1"), w.put("a", np.zeros(5, np.uint8))], "1 bytes are written already"),
        (lambda w: w.put("a", np.zeros(5, np.int8)), r"is i8 \(5,\), declared was u8 \(5,\)"),
        (lambda w: w.put("a", np.zeros((5, 1), np.uint8)), r"is u8 \(5, 1\)"),
        (lambda w: w.write("f", b""), "tensor 'f': was not declared"),
        (lambda w: w.write("e", b"\2"), "neither 0 nor 1"),
        (lambda w: [w.write("c", b"\1"), w.write("c", b"\x10")], "spare bits"),
    ],
)
def test_streaming_mistakes_leave_nothing(previous, fill, message):
    with pytest.raises(errors.EncodeError, match=message), kdtr.Writer(previous, SPECS, kind="any") as writer:
        fill(writer)


def test_an_exception_in_the_block_leaves_nothing(previous):
    with pytest.raises(ZeroDivisionError), kdtr.Writer(previous, SPECS, kind="any") as writer:
        writer.write("a", bytes([1, 2, 1 // 0]))


def test_a_forgotten_writer_leaves_nothing(previous):
    writer = kdtr.Writer(previous, SPECS, kind="any")
    writer.write("a", b"12345")
    del writer


def test_closed_writer(tmp_path):
    with kdtr.Writer(tmp_path / "a", {}, kind="any") as writer:
        pass
    writer.close()
    writer.abort()
    with pytest.raises(errors.EncodeError, match="closed"):
        writer.write("a", b"")
    assert kdtr.read(tmp_path / "a").kind == "any"


def test_where_nothing_can_be_written(tmp_path):
    for path in (tmp_path / "absent" / "a", tmp_path):
        with pytest.raises(errors.FileIOError) as caught:
            kdtr.save(path, GOOD, kind="any")
        assert caught.value.path == str(path)
    assert left_over(tmp_path) == []


def test_mode_follows_the_umask_and_a_link_is_followed(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "a")
    old = os.umask(0o027)
    try:
        kdtr.save(tmp_path / "link", GOOD, kind="any")
    finally:
        os.umask(old)
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "deep" / "a").stat().st_mode) == 0o640
    assert left_over(tmp_path / "deep") == ["a"]


def test_arrays_that_need_no_copy_are_not_copied(tmp_path):
    """20 MB in C order are written with a peak of a few blocks."""
    import tracemalloc

    big = np.zeros(20 << 20, np.uint8)
    tracemalloc.start()
    try:
        kdtr.save(tmp_path / "a", {"x": big}, kind="any")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("limit", [100, 50_000, 2_000_000])
def test_full_disk_leaves_the_previous_file(previous, limit):
    """The system refuses to let the file grow, at once or on the way."""
    code = f"""
import resource, numpy, kdtr
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    kdtr.save({str(previous)!r}, {{"x": numpy.ones(1_000_000)}}, kind="any")
except kdtr.KDTRError as error:
    assert error.code == "IO", error
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_error_while_payloads_are_written(previous, monkeypatch):
    """As above, but the space runs out in the middle, which a limit known beforehand cannot show."""
    real, calls = os.pwrite, []

    def pwrite(fd, data, offset):
        calls.append(offset)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(errors.FileIOError, match="No space left"):
        kdtr.save(previous, {"x": np.ones(1_000_000)}, kind="any")
    assert len(calls) == 3


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[: 1 + len(data) // 2], offset))
    kdtr.save(tmp_path / "a", {"x": np.arange(200_000.0), "y": np.ones(3)}, kind="any")
    monkeypatch.undo()
    assert np.array_equal(kdtr.read(tmp_path / "a")["x"], np.arange(200_000.0))


@pytest.mark.parametrize("moment", ["payload", "prefix", "rename"])
def test_killed_writer_leaves_the_previous_file(tmp_path, moment):
    path = tmp_path / "a.kdtr"
    kdtr.save(path, GOOD, kind="any")
    before = path.read_bytes()
    code = f"""
import os, time, numpy, kdtr
def stop(*_):
    print("here", flush=True)
    time.sleep(600)
writer = kdtr.Writer({str(path)!r}, {{"x": kdtr.TensorSpec("u8", (1 << 22,))}}, kind="any")
writer.write("x", bytes(1 << 21))
if {moment!r} == "payload":
    stop()
writer.write("x", bytes(1 << 21))
setattr(os, {{"prefix": "fsync", "rename": "replace"}}[{moment!r}], stop)
writer.close()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert path.read_bytes() == before
    assert [name for name in left_over(tmp_path) if not name.startswith(".kdtr-")] == ["a.kdtr"]
    kdtr.save(path, {"x": np.ones(2)}, kind="any")
    assert kdtr.read(path)["x"].tolist() == [1, 1]


def test_readers_never_see_half_a_file(tmp_path):
    """One process replaces the file again and again, this one reads it again and again."""
    path = tmp_path / "a.kdtr"
    kdtr.save(path, {"x": np.zeros(50_000)}, kind="any")
    code = f"""
import numpy, kdtr, itertools
for i in itertools.count(1):
    kdtr.save({str(path)!r}, {{"x": numpy.full(50_000, float(i))}}, kind="any")
    print(i, flush=True) if i == 1 else None
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        begun = time.monotonic()
        seen: set[float] = set()
        while (spent := time.monotonic() - begun) < 1.5 or len(seen) < 10:
            assert spent < 120, f"only {len(seen)} of the files were seen"
            x = kdtr.read(path)["x"]
            assert (x == x[0]).all()
            seen.add(float(x[0]))
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_descriptors_come_back(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, hard), hard))
    try:
        for _ in range(200):
            kdtr.save(tmp_path / "a", {"x": np.ones(1)}, kind="any")
            with pytest.raises(errors.EncodeError):
                kdtr.save(tmp_path / "a", {"x": np.array([None])}, kind="any")
            with pytest.raises(errors.EncodeError), kdtr.Writer(tmp_path / "a", SPECS, kind="any"):
                pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
