"""What is recorded about machine and code, with faked answers of the programs that are asked."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import codec, environment
from harness.environment import CHECKOUT, gpu_missing
from harness.records import Environment, Gpu

H200 = Gpu("NVIDIA H200", "0123456789ab", 132, "9.0", 150_000_000_000, "570.124.06", 700.0, 1980, False)
PROBE = {
    "missing": None,
    "name": "NVIDIA H200",
    "uuid": "GPU-01234567-89ab-cdef-0123-456789abcdef",
    "sm_count": 132,
    "compute_capability": "9.0",
    "memory_bytes": 150_000_000_000,
    "driver_cuda": "13.0",
    "cupy": "14.2.0",
    "cuda_runtime": "13.0",
}


@pytest.fixture(scope="module")
def captured() -> Environment:
    return environment.capture()


def test_the_facts_of_this_machine(captured):
    assert captured.os.startswith(platform.system())
    assert captured.versions["python"] == platform.python_version()
    assert captured.cores >= 1
    assert captured.modules["harness"] == "checkout/harness/__init__.py"
    assert (captured.gpu is None) == (captured.gpu_missing is not None)
    assert captured.gpu_missing == gpu_missing()
    assert captured.hardware_key.startswith("cpu-" if captured.gpu is None else "gpu-")
    assert re.fullmatch(r"[a-z0-9.-]+", captured.hardware_key)


def test_nothing_names_the_machine_or_a_home(captured):
    text = json.dumps(codec.to_dict(captured))
    for secret in (platform.node(), str(Path.home()) + "/", str(CHECKOUT), sys.prefix, f"/{getpass.getuser()}/"):
        assert secret not in text
    assert not re.search(r'[": ]/[a-z]', text)


def test_importing_the_package_starts_nothing_and_a_fork_works_afterwards():
    names = [path.stem for path in sorted((CHECKOUT / "harness").glob("*.py")) if not path.stem.startswith("_")]
    script = f"""
import os, subprocess, sys
def refuse(*_, **__): raise AssertionError("import starts a process")
subprocess.Popen.__init__ = refuse
for name in {names}: __import__("harness." + name)
assert not any(name.split(".")[0] in ("cupy", "torch") for name in sys.modules), "a GPU library is loaded"
maps = open("/proc/self/maps").read() if os.path.exists("/proc/self/maps") else ""
assert "libcuda" not in maps and "libnvidia" not in maps
child = os.fork()
if child == 0: os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


BROKEN = {
    "no cupy": "",
    "cupy that raises": "raise ImportError('libcublas.so.13: cannot open shared object file')",
    "cupy that kills the process": "import os; os.abort()",
    "cupy without driver": """
__version__ = "14.2.0"
class cuda:
    class runtime:
        @staticmethod
        def runtimeGetVersion(): return 13000
""",
}


@pytest.mark.parametrize("state", BROKEN)
def test_capture_works_whatever_state_cupy_is_in(state, tmp_path, monkeypatch):
    if state != "no cupy":
        (tmp_path / "cupy.py").write_text(BROKEN[state])
        info = tmp_path / "cupy_cuda13x-14.2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cupy-cuda13x\nVersion: 14.2.0\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.syspath_prepend(tmp_path)
    found = environment.capture()
    assert found.gpu_missing == gpu_missing()
    if state == "no cupy":
        return
    problems = " ".join(found.problems)
    assert ("cupy-cuda13x 14.2.0 cannot be imported" in problems) is (state != "cupy without driver")
    assert ("libcublas.so.13" in problems) is (state == "cupy that raises")
    assert ("ended the process" in problems) is (state == "cupy that kills the process")
    assert found.versions["cupy"] == ("14.2.0" if state == "cupy without driver" else None)


@pytest.mark.parametrize(
    ("packages", "driver", "expected"),
    [
        ([], None, []),
        ([("cupy-cuda13x", "14.2.0")], "13.0", []),
        ([("cupy-cuda13x", "14.2.0")], None, []),
        (
            [("cupy-cuda13x", "14.2.0"), ("cupy-cuda12x", "13.6.0")],
            "13.0",
            [
                "2 CuPy packages are installed side by side (cupy-cuda12x 13.6.0, cupy-cuda13x 14.2.0): "
                "keep one, remove the others",
                "cupy-cuda12x 13.6.0 is made for CUDA 12; this project needs cupy-cuda13x",
            ],
        ),
        (
            [("cupy-cuda112", "12.0.0")],
            None,
            ["cupy-cuda112 12.0.0 is made for CUDA 11; this project needs cupy-cuda13x"],
        ),
        (
            [("cupy-cuda13x", "14.2.0")],
            "12.8",
            ["cupy-cuda13x 14.2.0 is made for CUDA 13, but the driver serves CUDA 12.8 at most"],
        ),
        ([("cupy", "14.2.0")], "12.8", []),
    ],
)
def test_two_cupy_packages_or_one_for_another_cuda_are_named(packages, driver, expected):
    assert environment.cupy_problems(packages, driver) == expected


def test_installed_packages_are_found_under_any_spelling(tmp_path, monkeypatch):
    for name in ("cupy_cuda12x", "CuPy-CUDA13x", "cupy-xarray"):
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    problems = environment.capture().problems
    assert problems[0].startswith("2 CuPy packages are installed side by side (cupy-cuda12x 1.0, cupy-cuda13x 1.0)")


def fake_programs(monkeypatch, answers: dict[str, str | None]) -> list[list[str]]:
    """Answer child processes by the first word in `answers` that the command line holds; others run as usual."""
    calls: list[list[str]] = []
    real = environment._output

    def output(command, timeout_s=20.0):
        calls.append(command)
        for word, answer in answers.items():
            if word in " ".join(command):
                return answer
        return real(command, timeout_s)

    monkeypatch.setattr(environment, "_output", output)
    return calls


def test_gpu_facts(monkeypatch):
    pid = os.getpid()
    fake_programs(
        monkeypatch,
        {
            "gpu_probe.py driver": json.dumps(PROBE),
            "gpu_probe.py cupy": json.dumps({"cupy": "14.2.0", "cuda_runtime": "13.0"}),
            "--query-gpu=driver_version": "570.124.06, 700.00, 1980, 3\n",
            "--query-compute-apps": f"{pid}\n",
        },
    )
    found = environment.capture()
    assert found.gpu is not None
    assert found.hardware_key == "gpu-nvidia-h200-570-cuda13.0"
    assert found.gpu == Gpu(
        "NVIDIA H200", found.gpu.uuid_hash, 132, "9.0", 150_000_000_000, "570.124.06", 700.0, 1980, False
    )
    assert "01234567" not in json.dumps(codec.to_dict(found))
    assert found.versions["cuda_runtime"] == "13.0"
    assert found.gpu_missing is None


@pytest.mark.parametrize(
    ("utilization", "processes", "busy"),
    [("0", "", False), ("55", "", True), ("0", "1\n", True), ("0", f"{os.getpid()}\n", False), ("[N/A]", "1\n", None)],
    ids=["idle", "working", "another process", "own process", "not told"],
)
def test_a_busy_gpu_is_seen(monkeypatch, utilization, processes, busy):
    fake_programs(
        monkeypatch,
        {
            "gpu_probe.py driver": json.dumps(PROBE),
            "gpu_probe.py cupy": "{}",
            "--query-gpu": f"570.1, 700.00, 1980, {utilization}",
            "--query-compute-apps": processes,
        },
    )
    gpu = environment.capture().gpu
    assert gpu is not None
    assert gpu.busy is busy


def test_a_gpu_without_nvidia_smi_is_described_as_far_as_known(monkeypatch):
    fake_programs(
        monkeypatch, {"gpu_probe.py driver": json.dumps(PROBE), "gpu_probe.py cupy": "{}", "nvidia-smi": None}
    )
    found = environment.capture()
    assert found.gpu is not None
    assert (found.gpu.sm_count, found.gpu.driver, found.gpu.power_limit_w, found.gpu.busy) == (132, None, None, None)
    assert found.hardware_key == "gpu-nvidia-h200-unknown-cuda13.0"


def test_a_card_that_is_too_old_is_named_with_the_minimum(monkeypatch):
    old = {**PROBE, "name": "Tesla T4", "compute_capability": "7.5"}
    fake_programs(monkeypatch, {"gpu_probe.py driver": json.dumps(old), "gpu_probe.py cupy": "{}", "nvidia-smi": None})
    assert "Tesla T4 has compute capability 7.5; the engine needs 8.0 or newer" in environment.capture().problems


def test_a_probe_that_dies_is_a_reason_not_a_crash(monkeypatch):
    fake_programs(monkeypatch, {"gpu_probe.py": None})
    assert environment.capture().gpu_missing == "the CUDA driver ended the process that asked it"


def test_hardware_keys():
    assert (
        environment.hardware_key("Intel(R) Xeon(R) CPU E5-2686 v4 @ 2.30GHz", 4, None, None)
        == "cpu-intel-xeon-e5-2686-v4-4"
    )
    assert environment.hardware_key("x", 4, H200, "13.0") == "gpu-nvidia-h200-570-cuda13.0"
    assert environment.hardware_key("x", 4, H200, None) == "gpu-nvidia-h200-570-cuda-unknown"
    assert environment.hardware_key("???", 1, None, None) == "cpu-unknown-1"


def test_clocks_of_nvidia_smi():
    clocks = environment.parse_clocks(["1980", "2619", "0x0000000000000024"])
    assert (clocks.sm_mhz, clocks.memory_mhz, clocks.throttle) == (1980, 2619, ("sw_power_cap", "sw_thermal_slowdown"))
    assert environment.parse_clocks(["[N/A]", "2619", "[N/A]"]).sm_mhz is None
    assert environment.parse_clocks(None).throttle == ()


def test_the_clock_reader_asks_for_its_gpu(monkeypatch):
    calls = fake_programs(monkeypatch, {"nvidia-smi": "1980, 2619, 0x0000000000000008\n"})
    reader = environment.SmiClockReader(1980, "GPU-x")
    assert reader.read().throttle == ("hw_slowdown",)
    assert calls[0][1:3] == ["-i", "GPU-x"]
    fake_programs(monkeypatch, {"clocks_event_reasons": None, "clocks_throttle_reasons": "1980, 2619, 0x40\n"})
    assert reader.read().throttle == ("hw_thermal_slowdown",)
    fake_programs(monkeypatch, {"nvidia-smi": None})
    assert reader.read().sm_mhz is None


def test_where_modules_come_from(tmp_path):
    root = tmp_path / "work"
    assert environment.origin(str(root / "kdtr" / "__init__.py"), root) == "checkout/kdtr/__init__.py"
    venv = root / ".venv" / "lib" / "python3.11" / "site-packages" / "kdtr" / "__init__.py"
    assert environment.origin(str(venv), root) == "site-packages/kdtr/__init__.py"
    assert environment.origin("/home/somebody/other/kdtr/__init__.py", root) == "elsewhere/kdtr/__init__.py"
    assert environment.origin(None, root) == "unknown"
    modules = {"kdtr": "site-packages/kdtr/__init__.py", "numpy": "site-packages/numpy/__init__.py"}
    assert environment.origin_problems(modules) == [
        "kdtr is imported from site-packages/kdtr/__init__.py, not from the checkout"
    ]


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_identity_of_the_code_follows_every_change(tmp_path):
    root = tmp_path / "checkout"
    root.mkdir()
    (root / ".gitignore").write_text("ignored\n")
    (root / "a.py").write_text("1\n")
    unversioned = environment.code_identity(root)
    assert unversioned[:2] == (None, None)
    assert unversioned[2].startswith("files-")

    git(root, "init", "-q")
    assert environment.code_identity(root)[0] is None  # no commit yet
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "one")
    commit, dirty, code = environment.code_identity(root)
    assert (dirty, code) == (False, commit)

    seen = {code, unversioned[2]}
    for change in ("2\n", "3\n"):
        (root / "a.py").write_text(change)
        assert environment.code_identity(root)[:2] == (commit, True)
        seen.add(environment.code_identity(root)[2])
    (root / "a b\u00e9.py").write_text("new\n")
    seen.add(environment.code_identity(root)[2])
    (root / "a.py").unlink()
    seen.add(environment.code_identity(root)[2])
    assert len(seen) == 6

    (root / "a b\u00e9.py").unlink()
    (root / "a.py").write_text("1\n")
    (root / "ignored").write_text("rows")
    assert environment.code_identity(root) == (commit, False, code)
    inner = root / "inner"
    inner.mkdir()
    (inner / "b.py").write_text("x")
    assert environment.code_identity(inner)[0] is None  # the outer repository says nothing about a folder in it


def test_without_git_the_source_files_are_the_identity(tmp_path, monkeypatch):
    fake_programs(monkeypatch, {"git": None})
    (tmp_path / "a.py").write_text("1")
    first = environment.code_identity(tmp_path)
    assert first == environment.code_identity(tmp_path)
    (tmp_path / "notes.txt").write_text("no source")
    assert first == environment.code_identity(tmp_path)
    (tmp_path / "k.cu").write_text("__global__")
    assert first != environment.code_identity(tmp_path)


def test_libraries_are_hashed(tmp_path):
    library = tmp_path / "lib.so"
    library.write_bytes(b"code")
    hashed = environment.capture(libraries={"engine": library}).libraries
    assert hashed == {"engine": "5694d08a2e53ffcae0c3103e5ad6f6076abd960eb1f8a56577040bc1028f702b"}
    with pytest.raises(OSError, match=r"absent\.so"):
        environment.capture(libraries={"engine": tmp_path / "absent.so"})


@pytest.mark.gpu
def test_the_facts_of_a_real_gpu():
    found = environment.capture()
    assert found.gpu is not None
    assert found.gpu.sm_count is not None
    assert found.gpu.sm_count > 0
    assert found.gpu.driver
    clocks = environment.SmiClockReader(uuid=environment.gpu_uuid()).read()
    assert clocks.sm_mhz is not None
    assert clocks.sm_mhz > 0
