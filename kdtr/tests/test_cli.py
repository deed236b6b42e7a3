"""The command line: answers, exit codes, one-line errors; nothing lost or half written."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kdtr
from kdtr import Raw, Tolerance, console
from kdtr.__main__ import main

META = kdtr.provenance(seed=3, notes="\x1b[31mred é\n")


def golden(path: Path) -> Path:
    arrays: dict[str, Any] = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3) - 2,
        "case/y": np.array([1.5, np.nan, -np.inf, -0.0]),
        "w[0]": np.array([1, 2], ml_dtypes.bfloat16),
        "q": Raw(b"\x21\x03", "i4", (3,)),
        "1e10": np.array(7, np.uint64),
    }
    kdtr.save(
        path,
        arrays,
        kind="any",
        meta=META,
        roles={"x": "expected", "case/y": "expected", "w[0]": "param"},
        tolerances={"x": Tolerance.close(1.0, 0.0), "case/y": Tolerance.bits()},
    )
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return golden(tmp_path / "golden.kdtr")


def run(*args: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return code, out, err


def one_line(text: str) -> str:
    assert text.count("\n") == 1
    assert "Traceback" not in text
    return text


def test_ls(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("ls", file, capsys=capsys)
    assert (code, err) == (0, "")
    assert out == textwrap.dedent(f"""\
        {file}: any/1, 5 tensors, 8.0 KiB
        name    dtype  shape   role      tolerance          bytes
        ------  -----  ------  --------  -----------------  -----
        1e10    u64    []      none      -                      8
        case/y  f64    [4]     expected  bits                  32
        q       i4     [3]     none      -                      2
        w[0]    bf16   [2]     param     -                      4
        x       f32    [2, 3]  expected  |x-g| <= 1 + 0|g|     24
        """)
    kdtr.save(file.parent / "empty.kdtr", {}, kind="any")
    code, out, _ = run("ls", file.parent / "empty.kdtr", file, capsys=capsys)
    assert out.startswith(f"{file.parent / 'empty.kdtr'}: any/1, 0 tensors, 4.0 KiB\n\n{file}: any/1")


def test_show(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("show", file, "case/y", "x*", "w[?]", "q", capsys=capsys)
    assert code == 0
    with kdtr.open(file) as handle:
        data_off = handle.data_off
    assert out == textwrap.dedent(f"""\
        case/y: f64 [4], expected, bits, 32 B at {data_off + 256}
          numbers    4: 1 NaN, 0 +inf, 1 -inf, 1 zero
          range      -0.0 at [3] .. 1.5 at [0]
          mean, std  0.75, 0.75
          histogram  -0.0 [@{" " * 46}@] 1.5
          first      1.5, nan, -inf, -0.0

        x: f32 [2, 3], expected, |x-g| <= 1 + 0|g|, 24 B at {data_off + 1024}
          numbers    6: 0 NaN, 0 +inf, 0 -inf, 1 zero
          range      -2.0 at [0, 0] .. 3.0 at [1, 2]
          mean, std  0.5, 1.70783
          histogram  -2.0 [@        @         @        @         @        @] 3.0
          first      -2.0, -1.0, 0.0, 1.0, 2.0, 3.0

        w[0]: bf16 [2], param, 4 B at {data_off + 768}
          numbers    2: 0 NaN, 0 +inf, 0 -inf, 0 zero
          range      1 at [0] .. 2 at [1]
          mean, std  1.5, 0.5
          histogram  1 [@{" " * 46}@] 2
          first      1, 2

        q: i4 [3], none, 2 B at {data_off + 512}
          numbers    3: 0 NaN, 0 +inf, 0 -inf, 0 zero
          range      1 at [0] .. 3 at [2]
          mean, std  2, 0.816497
          histogram  1 [@{" " * 23}@{" " * 22}@] 3
          first      1, 2, 3
        """)


def test_show_metadata_cannot_touch_the_terminal(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("show", file, capsys=capsys)
    head, text = out.split("\n", 1)
    assert (code, json.loads(text)["notes"]) == (0, "\x1b[31mred é\n")
    assert "\x1b" not in out
    assert "golden.kdtr: any/1" in head


def test_verify_and_validate(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", file, capsys=capsys) == (0, f"{file}: ok, 5 tensors, 8.0 KiB\n", "")
    assert run("validate", file, capsys=capsys)[0] == 0
    data = bytearray(file.read_bytes())
    with kdtr.open(file) as handle:
        data[handle.info["x"].offset] ^= 1
    damaged = file.parent / "damaged.kdtr"
    damaged.write_bytes(data)
    for command in ("verify", "validate"):
        code, out, err = run(command, damaged, file, capsys=capsys)
        assert (code, out) == (1, f"{file}: ok, 5 tensors, 8.0 KiB\n")  # the files after it are checked, too
        assert one_line(err).startswith(f"kdtr: DATA_SUM: {damaged}: tensor 'x': ")
    code, _, err = run("verify", file.parent / "absent.kdtr", damaged, capsys=capsys)
    assert (code, err.count("\n")) == (2, 2)
    bare = file.parent / "bare.kdtr"
    kdtr.save(bare, {"x": np.zeros(2)}, kind="any")
    assert run("verify", bare, capsys=capsys)[0] == 0
    code, _, err = run("validate", bare, capsys=capsys)
    assert (code, err.split("\n")[0]) == (1, f"kdtr: META: {bare}: metadata key seed is missing")
    file.write_bytes(b"PK\x03\x04 not this")
    code, _, err = run("verify", file, capsys=capsys)
    assert code == 1
    assert "NOT_KDTR" in one_line(err)


def test_diff(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", file, file, capsys=capsys)[0] == 0
    actual = file.parent / "actual.kdtr"
    values = kdtr.read(file)
    x = values["x"].copy()
    x[1, 1] = 2.75
    kdtr.save(actual, {"x": x, "case/y": values["case/y"], "1e10": np.uint64(8)}, kind="any")
    code, out, _ = run("diff", file, actual, capsys=capsys)
    assert code == 0
    assert out == textwrap.dedent("""\
        tensor  is  tolerance          worst error  at      golden  actual  bad
        ------  --  -----------------  -----------  ------  ------  ------  ------
        case/y  ok  bits               0            -       -       -       0 of 4
        x       ok  |x-g| <= 1 + 0|g|  0.75         [1, 1]  2.0     2.75    0 of 6
        0 of 2 tensors failed; not compared: 1 without tolerance
        """)
    x[1, 1] = 3.25
    kdtr.save(actual, {"x": x, "stray": x}, kind="any")
    code, out, _ = run("diff", file, actual, capsys=capsys)
    assert code == 1
    assert re.search(r"^x +FAIL .* 1.25 +\[1, 1\] +2.0 +3.25 +1 of 6$", out, re.MULTILINE)
    assert "FAIL case/y: expected, but not among the tested arrays\n" in out
    assert "FAIL stray: the golden file has no such array\n" in out
    assert out.endswith("3 of 3 tensors failed\n")
    kdtr.save(file, {"a": np.zeros(1)}, kind="any")
    kdtr.save(actual, {"a": np.zeros(1)}, kind="any")
    code, out, _ = run("diff", file, actual, capsys=capsys)
    assert code == 1
    assert "nothing was compared" in out
    assert run("diff", file, file.parent / "absent.kdtr", capsys=capsys)[0] == 2
    actual.write_bytes(b"")
    code, _, err = run("diff", file, actual, capsys=capsys)
    assert (code, one_line(err)[:17]) == (2, "kdtr: TRUNCATED: ")


def test_diff_all(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = golden(file.parent / "same.kdtr")
    assert run("diff", "--all", file, same, capsys=capsys) == (0, "equal bit for bit: 5 tensors, 8.0 KiB\n", "")
    other = file.parent / "other.kdtr"
    values: dict[str, Any] = dict(kdtr.read(file))
    values["case/y"][3] = 0.0
    values["x"] = values["x"].T
    values["q"] = Raw(b"\x21\x07", "i4", (3,))  # the last element
    del values["1e10"]
    values["new"] = np.zeros(0, np.int8)
    kdtr.save(
        other,
        values,
        kind="op",
        meta={**META, "notes": "other", "parents": ["0" * 64]},
        roles={"x": "expected", "case/y": "expected", "w[0]": "aux"},
        tolerances={"x": Tolerance.close(0.5, 0.0), "case/y": Tolerance.bits()},
        kind_version=2,
    )
    code, out, _ = run("diff", file, other, "--all", capsys=capsys)
    assert code == 1
    zeros = '"' + "0" * 64 + '"'
    notes = '"\\u001b[31mred \\u00e9\\n"'
    expected = [
        ("header", "kind", "any", "op"),
        ("header", "kind_version", "1", "2"),
        ("metadata/kind_schema", "value", '"any/1"', '"op/2"'),
        ("metadata/notes", "value", notes, '"other"'),
        ("metadata/parents", "value", "(none)", f"[{zeros}]"),
        ("1e10", "tensor", "u64 [] none", "(none)"),
        ("case/y", "1 element, first at [3]", "-0.0 (0x8000000000000000)", "0.0 (0x0000000000000000)"),
        ("new", "tensor", "(none)", "i8 [0] none"),
        ("q", "1 element, first at [2]", "3 (0x3)", "7 (0x7)"),
        ("w[0]", "role", "param", "aux"),
        ("x", "shape", "[2, 3]", "[3, 2]"),
        ("x", "tolerance", "|x-g| <= 1 + 0|g|", "|x-g| <= 0.5 + 0|g|"),
    ]
    assert out.splitlines()[2:-1] == [
        line.rstrip() for line in console.table(("where", "what", "golden", "actual"), expected)[2:]
    ]
    assert out.endswith("12 differences\n")


def test_convert(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = file.parent / "a.npz"
    code, out, _ = run("convert", file, target, "--drop", "w[0]", capsys=capsys)
    assert (code, out) == (0, f"dropped w[0]\nwrote {target}: {console.size(target.stat().st_size)}\n")
    code, _, err = run("convert", file, target, capsys=capsys)
    assert code == 2
    assert "exists already; --force replaces it" in one_line(err)
    assert run("convert", file, target, "--force", capsys=capsys)[0] == 0
    np.savez(target, bad=np.array(["text"]))
    code, _, err = run("convert", target, file.parent / "b.kdtr", capsys=capsys)
    assert code == 2
    assert one_line(err).startswith(f"kdtr: CONVERT: {target}: tensor 'bad': has NumPy type <U4")
    np.savez(target, x=np.zeros(2))
    assert run("convert", target, file.parent / "b.kdtr", "--role", "param", "--kind", "op", capsys=capsys)[0] == 0
    with kdtr.open(file.parent / "b.kdtr") as handle:
        assert (handle.kind, handle.info["x"].role) == ("op", "param")
    assert run("convert", file.parent / "absent.npz", file.parent / "c.kdtr", capsys=capsys)[0] == 2


def test_extract(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = file.parent / "out"
    code, out, _ = run("extract", file, folder, capsys=capsys)
    assert code == 0
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
    assert files == ["1e10.npy", "case/y.npy", "q.i4.bin", "w[0].bf16.bin", "x.npy"]
    assert [line.split()[0] for line in out.splitlines()[2:]] == files
    values = kdtr.read(file)
    for name in ("1e10", "case/y", "x"):
        found = np.load(folder / f"{name}.npy")
        assert (found.dtype, found.shape, found.tobytes()) == (
            values[name].dtype, values[name].shape, values[name].tobytes()
        )  # fmt: skip
    assert (folder / "q.i4.bin").read_bytes() == b"\x21\x03"
    code, _, err = run("extract", file, folder, "x", capsys=capsys)
    assert code == 2
    assert one_line(err) == f"kdtr: IO: {folder / 'x.npy'}: exists already\n"
    assert run("extract", file, folder, "x", "--force", capsys=capsys)[0] == 0
    assert run("extract", file, folder, "x", "--raw", capsys=capsys)[0] == 0
    assert (folder / "x.f32.bin").read_bytes() == values["x"].tobytes()
    assert run("extract", file, folder, "nope", capsys=capsys)[0] == 2


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("A/x", "a/y"), "'A' of 'A/x' and 'a' differ only in case"),
        (("x", "X"), "'X' and 'x' differ only in case"),
        (("a", "A.npy/b"), "needs a folder where 'a' needs a file"),
    ],
)
def test_extract_refuses_collisions(
    file: Path, capsys: pytest.CaptureFixture[str], names: tuple[str, str], message: str
) -> None:
    kdtr.save(file, {name: np.zeros(2) for name in names}, kind="any")
    folder = file.parent / "out"
    code, _, err = run("extract", file, folder, capsys=capsys)
    assert code == 2
    assert message in one_line(err)
    assert not folder.exists()
    assert run("extract", file, folder, names[0], capsys=capsys)[0] == 0


def test_extract_stays_in_its_folder(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = file.parent / "out"
    folder.mkdir()
    (file.parent / "elsewhere").mkdir()
    (folder / "case").symlink_to(file.parent / "elsewhere")
    code, _, err = run("extract", file, folder, capsys=capsys)
    assert code == 2
    assert "'case/y.npy' would leave the folder" in one_line(err)
    assert list((file.parent / "elsewhere").iterdir()) == []
    assert [path.name for path in folder.iterdir()] == ["case"]


def test_extract_checks_names_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are checked on opening; the writer of files does not rely on it."""
    from kdtr.extract import extract

    with kdtr.open(file) as handle:
        info = handle.info["x"]
        monkeypatch.setattr(type(handle.info), "__getitem__", lambda self, name: info)
        with pytest.raises(kdtr.KDTRError, match="NAME"):
            extract(handle, file.parent / "out", ["../x"])


def test_manifest(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listing = file.parent / "manifest.toml"
    code, _, err = run("manifest", listing, capsys=capsys)
    assert code == 2
    assert "No such file" in one_line(err)
    code, out, _ = run(
        "manifest", "--update", listing, "--folder", ".", "--licence", "MIT", "--generator", "me", capsys=capsys
    )
    assert (code, out) == (0, f"added  golden.kdtr\n{listing}: 1 file\n")
    code, out, _ = run("manifest", "--check", listing, capsys=capsys)
    assert (code, out) == (0, f"{listing}: 1 file as listed, 8.0 KiB\n")
    code, out, _ = run("manifest", listing, capsys=capsys)
    assert code == 0
    assert re.search(r"^golden.kdtr +[0-9a-f]{16} +8192 +MIT +3 +me$", out, re.MULTILINE)
    file.write_bytes(b"")
    (file.parent / "stray").write_bytes(b"")
    code, out, _ = run("manifest", "--check", listing, capsys=capsys)
    assert code == 1
    assert "golden.kdtr  changed  expected 8192 bytes, found 0" in out
    assert "stray        extra    not listed" in out
    assert out.endswith("2 faults, 1 listed file\n")
    code, _, err = run("manifest", "--update", listing, capsys=capsys)
    assert code == 2
    assert "new file 'stray': its licence is not known" in one_line(err)


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version", capsys=capsys)[:2] == (0, f"kdtr {kdtr.__version__}\n")
    code, out, _ = run("--help", capsys=capsys)
    assert code == 0
    assert "Exit codes: 0 fine; 1 the negative answer" in out
    for wrong in ((), ("nope",), ("ls",), ("ls", "--nope", "x"), ("diff", "one")):
        code, out, err = run(*wrong, capsys=capsys)
        assert (code, out) == (2, "")
        assert "usage: kdtr" in err
