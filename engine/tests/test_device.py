"""What the machine has: the probe, the command line, and imports that load nothing of CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine import __main__ as command
from engine import abi, build, device, sources, toolkit
from engine.device import Device, Probe

needs_cxx = pytest.mark.skipif(shutil.which(os.environ.get("CXX") or "g++") is None, reason="no C++ compiler")
CARD = Device("a card", "9.0", 132, 2**37, 232448, usable=True)
MODULES = "abi arrays build contents device ops sources toolkit __main__"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine", *arguments],
        cwd=sources.CHECKOUT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_importing_loads_nothing_of_cuda():
    script = (
        f"import importlib, sys\nfor name in {MODULES!r}.split(): importlib.import_module('engine.' + name)\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('cupy', 'torch', 'cuda')])\n"
        "print([line for line in open('/proc/self/maps') if 'libcuda' in line or 'kdtree' in line])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=sources.CHECKOUT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n[]\n", "")


@needs_cxx
def test_probe_of_the_host_library():
    found = device.probe(build.host_library())
    assert (found.architectures, found.driver) == ("host", device.driver())
    (card,) = found.devices
    assert (card.name, card.compute_capability, card.usable) == ("host", "0.0", True)
    assert card.shared_memory >= 48 * 1024


def test_a_probe_says_why_nothing_runs():
    old = Device("old card", "7.5", 40, 2**33, 65536, usable=False)
    assert Probe("sm_90", "13.0", (CARD,)).missing is None
    assert Probe("sm_90", "13.0", (old, CARD)).missing is None
    assert Probe("sm_90", None, ()).missing == "no CUDA driver: libcuda.so.1 cannot be loaded"
    assert Probe("sm_90", "13.0", ()).missing == "no CUDA device (the driver, CUDA 13.0, is there)"
    assert Probe("sm_90 ptx_80", "13.0", (old,)).missing == (
        "the library is built for sm_90 ptx_80, which does not fit old card (compute capability 7.5)"
    )


def test_a_file_that_is_no_library(tmp_path: Path):
    (tmp_path / "lib.so").write_text("text")
    with pytest.raises(abi.LibraryError, match=r"lib.so cannot be loaded"):
        device.probe(tmp_path / "lib.so")


@needs_cxx
def test_build_prints_the_path_and_what_was_made(capsys: pytest.CaptureFixture[str]):
    for _ in range(2):
        assert command.main(["build", "--host", "--check"]) == 0
        said = capsys.readouterr().out
    path, _, rest = said.partition(" ")
    assert Path(path) == build.host_library()
    count = len(sources.of_stage(sources.read(), "host", "kernel", "engine")) + 1
    assert rest == f"(0 files made, {count} were there)\ncheck passed\n"


@needs_cxx
def test_info_of_a_machine_that_has_nothing(tmp_path: Path):
    done = run("info", PATH=str(tmp_path), CUDA_HOME="", CUDA_PATH="", CXX="")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "host compiler: missing: no C++ compiler: g++ is not on PATH (the host library needs g++ 11 or newer)"
    )
    assert lines[1].startswith("toolkit:       missing: no usable CUDA toolkit") or "nvidia/cu13" in done.stdout
    for name in ("driver:", "library:", "host library:"):
        assert sum(line.startswith(name) for line in lines) == 1, name


@needs_cxx
def test_info_shows_a_library_that_is_built(capsys: pytest.CaptureFixture[str]):
    path = build.host_library()
    assert command.main(["info"]) == 0
    said = capsys.readouterr().out
    assert f"host library:  {path}\n               built for host\n               device 0: host, compute" in said


def test_info_of_what_is_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plan = build.Plan({}, build.Step((), tmp_path / build.CUDA_NAME), tmp_path)
    monkeypatch.setattr(build, "plan_cuda", lambda: plan)
    assert command.main(["info"]) == 0
    assert "library:       not built for the present sources: python -m engine build\n" in capsys.readouterr().out


def test_what_cannot_be_built_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def missing() -> toolkit.Toolkit:
        raise toolkit.ToolkitError("no toolkit here")

    monkeypatch.setattr(toolkit, "find", missing)
    monkeypatch.setattr(build, "find", missing)
    for arguments in (["build"], ["toolkit"]):
        assert command.main(arguments) == 2
        assert capsys.readouterr().err == "engine: no toolkit here\n"
    for arguments in (["build", "--arch", "sm_90"], ["build", "--host", "--arch", "90"]):
        assert command.main(arguments) == 2
        assert "engine: " in capsys.readouterr().err


def test_a_bare_python_can_build():
    script = "import sys; sys.modules['numpy'] = None; from engine.__main__ import main; sys.exit(main(['info']))"
    done = subprocess.run([sys.executable, "-c", script], cwd=sources.CHECKOUT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_runs_with_the_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    found = toolkit.Toolkit(tmp_path, tmp_path / "bin" / "nvcc", "13.0.88", (tmp_path,))
    monkeypatch.setattr(toolkit, "find", lambda: found)
    text = 'test "$CUDA_HOME" = "$0" && case "$PATH" in "$0/bin":*) exit 7;; esac'
    assert command.main(["toolkit", "sh", "-c", text, str(tmp_path)]) == 7
    assert command.main(["toolkit", "no-such-command"]) == 2


def test_a_failed_check_is_exit_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    built = build.Built(Path("lib.so"), {"a.cu": "a.cu(1): warning: unused"}, 2)
    monkeypatch.setattr(build.Plan, "run", lambda self, jobs: built)
    assert command.main(["build", "--host", "--check"]) == 1
    said = capsys.readouterr().out
    assert "FAULT: a.cu: a.cu(1): warning: unused\n" in said
    assert said.endswith("check failed: 1 faults\n")


@pytest.mark.gpu
def test_probe_of_the_cuda_library():
    found = device.probe(build.cuda_library())
    assert found.missing is None
    assert found.driver is not None
    for card in found.devices:
        assert card.shared_memory >= 101_376 - 1024
        assert card.memory > 2**30
