"""Output of the command line on any terminal, in any encoding, into closed pipes and full disks."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdtr
from kdtr import Tolerance, console
from kdtr.console import Console


def golden(path: Path) -> Path:
    arrays: dict[str, Any] = {"x": np.zeros((2, 3), np.float32), "case/y": np.zeros(4), "1e10": np.uint64(7)}
    kdtr.save(path, arrays, kind="any", roles={"x": "expected"}, tolerances={"x": Tolerance.close(1.0, 0.0)})
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return golden(tmp_path / "golden.kdtr")


def spawn(*args: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "PYTHONIOENCODING", "TERM")}
    command = [sys.executable, "-m", "kdtr", *map(str, args)]
    return subprocess.run(command, capture_output=True, env={**env, **environment}, check=False)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8", "utf-16"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    file = golden(tmp_path / "gölden µ \u4e2d.kdtr")
    done = spawn("verify", file, PYTHONIOENCODING=encoding, TERM="dumb")
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode(encoding)
    assert text.endswith(": ok, 3 tensors, 8.0 KiB\n")
    assert ("\u4e2d" in text) == encoding.startswith("utf")
    assert ("\\u4e2d" in text) != encoding.startswith("utf")
    done = spawn("verify", tmp_path / "\u4e2d", PYTHONIOENCODING=encoding)
    assert done.returncode == 2
    assert done.stderr.decode(encoding).count("\n") == 1


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    try:
        file = golden(tmp_path / os.fsdecode(b"\xff\n.kdtr"))
    except kdtr.KDTRError:
        pytest.skip("the file system takes only names in Unicode")
    done = spawn("verify", file)
    assert (done.returncode, done.stdout.count(b"\n")) == (0, 1)
    assert b"\\udcff\\n.kdtr" in done.stdout


@pytest.mark.parametrize(("args", "code"), [(("ls",), 0), (("verify",), 0), (("diff", "--all"), 1)])
def test_closed_pipe_keeps_the_answer(file: Path, args: tuple[str, ...], code: int) -> None:
    """The reader goes before the first byte comes: no complaint, and the exit code still tells the answer."""
    files = [file]
    if args[0] == "diff":
        kdtr.save(file.parent / "other.kdtr", {f"x{i}": np.zeros(1) for i in range(3000)}, kind="any")
        files.append(file.parent / "other.kdtr")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kdtr", *args, *map(str, files)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (code, b"")


def test_no_output_at_all(file: Path) -> None:
    done = subprocess.run(["sh", "-c", f'"{sys.executable}" -m kdtr ls "{file}" >&-'], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_full_disk_is_an_error(file: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kdtr", "ls", str(file)], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"No space left" in done.stderr


def on_terminal(columns: int, *args: object, term: str = "xterm") -> str:
    """Output of a command on a terminal of some width."""
    main_end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        [sys.executable, "-m", "kdtr", *map(str, args)], stdout=terminal, stderr=terminal, env={**env, "TERM": term}
    ) as process:
        os.close(terminal)
        parts = []
        while True:
            try:
                part = os.read(main_end, 65536)
            except OSError:
                break
            if not part:
                break
            parts.append(part)
        assert process.wait() == 0
    os.close(main_end)
    return b"".join(parts).decode().replace("\r\n", "\n")


def test_wide_and_narrow_terminal(file: Path) -> None:
    wide = on_terminal(100, "ls", file)
    assert "case/y  f64    [4]     none      -                     32\n" in wide
    narrow = on_terminal(30, "ls", file, term="dumb")
    assert "name:      case/y\ndtype:     f64\nshape:     [4]\nrole:      none\ntolerance: -\nbytes:     32\n" in narrow
    assert "\r" not in narrow
    assert "\x1b" not in narrow


HARD = (
    "1234e567",
    "0012345",
    "20200407_2",
    "1_000",
    "nan",
    "inf",
    "True",
    "18.0",
    "a|b\nc",
    "\u4e2d\u6587",
    "µ",
    "\x1b[0m",
)


def test_cells_stay_as_they_are() -> None:
    rows = [(cell, str(i), cell) for i, cell in enumerate(HARD)]
    lines = console.table(("first", "number", "last"), rows, right=("number",))
    shown = (
        "1234e567",
        "0012345",
        "20200407_2",
        "1_000",
        "nan",
        "inf",
        "True",
        "18.0",
        "a|b\\nc",
        "\u4e2d\u6587",
        "µ",
        "\\x1b[0m",
    )
    for i, (line, cell) in enumerate(zip(lines[2:], shown, strict=True)):
        assert line.split() == [cell, str(i), cell]
    narrow = console.table(("first", "number", "last"), rows, width=5)
    assert [line.split(None, 1)[1] for line in narrow if line.startswith("first:")] == list(shown)
    for line, cell in zip(lines[2:], shown, strict=True):
        before = line[: line.index(cell, len(cell))]
        assert len(before) + sum(c in "\u4e2d\u6587" for c in before) == len(lines[0]) - len("last")
    assert console.table(("a", "b"), []) == ["a  b", "-  -"]


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "term", "shown"), [(True, "xterm", True), (True, "dumb", False), (False, "xterm", False)]
)
def test_progress(monkeypatch: pytest.MonkeyPatch, terminal: bool, term: str, shown: bool) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "40")
    clock = iter(np.arange(0.0, 100.0, 0.4).tolist())
    monkeypatch.setattr("kdtr.console.time.monotonic", lambda: next(clock))
    out, error = io.StringIO(), FakeTerminal() if terminal else io.StringIO()
    with Console(out, error).progress("a very long file name\n.kdtr", 4 << 20) as progress:
        for _ in range(4):
            progress(1 << 20)
    text = error.getvalue()
    assert out.getvalue() == ""
    if not shown:
        assert text == ""
        return
    updates = text.split("\r")
    assert all(len(update) <= 39 for update in updates)
    assert "\n" not in text
    assert any("50% of 4.0 MiB" in update or "a very long file name\\n.kdtr: 50%" in update for update in updates)
    assert updates[-1] == ""  # the line is cleared at the end
    assert set(updates[-2]) == {" "}


def test_short_work_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    error = FakeTerminal()
    with Console(io.StringIO(), error).progress("file", 100) as progress:
        progress(100)
    assert error.getvalue() == ""
