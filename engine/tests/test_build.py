"""Builds: only what is new is made, faults are told, and the three ways to build read one list."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine import build, contents, sources, toolkit
from engine.build import BuildError, Plan
from engine.tests import build_project

CHECKOUT = sources.CHECKOUT
needs_cxx = pytest.mark.skipif(shutil.which(os.environ.get("CXX") or "g++") is None, reason="no C++ compiler")


@pytest.fixture
def cuda_home() -> Path:
    """The folder of the toolkit; skips with the reason where there is none."""
    try:
        return toolkit.find().root
    except toolkit.ToolkitError as error:
        pytest.skip(str(error))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = build_project.make(tmp_path)
    monkeypatch.setattr(sources, "INCLUDES", (root, root / "include"))
    return root


def host(project: Path) -> Plan:
    return build.plan_host(project.parent / "cache", project / "sources.txt")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def call(path: Path, name: str) -> int:
    """The result of a function without arguments, called in a process of its own."""
    script = f"import ctypes; print(ctypes.CDLL({str(path)!r}).{name}())"
    return int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)


@needs_cxx
def test_what_is_there_is_not_made_again(project: Path):
    first = host(project).run()
    assert (first.made, list(first.logs)) == (5, ["plain.cu", "wide.cu", "plain.cpp", "engine.cpp"])
    assert call(first.path, "answer") == 42
    (project / "kernels" / "plain.cu").touch()  # time stamps say nothing
    again = host(project).run()
    assert (again.made, again.path) == (0, first.path)


@needs_cxx
def test_a_changed_file_is_made_alone(project: Path):
    first = host(project).run()
    edit(project / "kernels" / "wide.cu", "2 * x", "3 * x")
    second = host(project).run()
    assert second.made == 2  # the object and the library
    assert call(second.path, "answer") == 63
    edit(project / "kernels" / "part.h", "21", "10")  # one file includes it
    third = host(project).run()
    assert third.made == 2
    assert call(third.path, "answer") == 30
    edit(project / "kernels" / "part.h", "10", "21")
    edit(project / "kernels" / "wide.cu", "3 * x", "2 * x")
    assert (host(project).run().made, host(project).path) == (0, first.path)


@needs_cxx
def test_other_flags_are_another_library(project: Path, monkeypatch: pytest.MonkeyPatch):
    first = host(project).run()
    monkeypatch.setattr(build, "HOST_FLAGS", (*build.HOST_FLAGS, "-DANOTHER"))
    second = host(project).run()
    assert (second.made, second.path != first.path) == (5, True)


@needs_cxx
def test_processes_at_the_same_time_make_every_file_once(project: Path):
    script = (
        "from pathlib import Path; from engine import build, sources; "
        f"root = Path({str(project)!r}); sources.INCLUDES = (root, root / 'include'); "
        "print(build.plan_host(root.parent / 'cache', root / 'sources.txt').run().made)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    # Who comes first may be another for the objects than for the library.
    assert sum(int(process.communicate()[0]) for process in processes) == 5


@needs_cxx
def test_what_does_not_compile_is_told_and_leaves_nothing(project: Path):
    edit(project / "kernels" / "wide.cu", "2 * x", "2 * y")
    with pytest.raises(BuildError, match=r"wide.cu(.|\n)*‘y’ was not declared|wide.cu(.|\n)*undeclared identifier"):
        host(project).run()
    objects = [path.name for path in (project.parent / "cache" / "objects").iterdir()]
    assert not [name for name in objects if name.startswith("wide")]


@needs_cxx
def test_what_does_not_link_is_told(project: Path):
    edit(project / "kernels" / "wide.cu", "int twice", "int thrice")
    with pytest.raises(BuildError, match="twice"):
        host(project).run()


@needs_cxx
def test_warnings_are_kept_with_the_object(project: Path):
    edit(project / "kernels" / "wide.cu", "return 2 * x", "int unused; return 2 * x")
    for made in (5, 0):
        built = host(project).run()
        assert built.made == made
        assert any("unused" in fault for fault in contents.faults((), (), built.logs))


def test_a_source_that_is_not_there(project: Path):
    (project / "kernels" / "wide.cu").unlink()
    with pytest.raises(BuildError, match=r"wide.cu is in the list of sources but does not exist"):
        host(project)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler: no-such-compiler is not on PATH"):
        build.host_recipe()


def test_kinds():
    with pytest.raises(ValueError, match="kind is 'rocm', expected 'cuda' or 'host'"):
        build.library("rocm")


def test_a_plan_for_cuda(project: Path, monkeypatch: pytest.MonkeyPatch):
    """Architectures: what is asked for, else $KDTREE_CUDA_ARCH, else all. Flags: strict rounding."""
    monkeypatch.setattr(build, "find", lambda: toolkit.Toolkit(Path("/cuda"), Path("/cuda/bin/nvcc"), "13.0.88", ()))
    monkeypatch.delenv("KDTREE_CUDA_ARCH", raising=False)

    def plan(*asked: str) -> Plan:
        return build.plan_cuda(asked, project.parent / "cache", project / "sources.txt")

    assert plan().targets == ("sm_90", "sm_90a", "sm_100", "sm_120", "ptx_80")
    monkeypatch.setenv("KDTREE_CUDA_ARCH", "120")
    assert plan().targets == ("sm_120",)
    assert plan("90").targets == ("sm_90", "sm_90a")
    command = plan("90").objects["wide.cu"].command
    assert command[0] == "/cuda/bin/nvcc"
    assert "-gencode=arch=compute_90a,code=sm_90a" in command
    assert '-DKDTREE_ARCHITECTURES="sm_90 sm_90a"' in command
    assert "-fmad=false" in command
    assert not [word for word in command if "fast" in word]
    program = build.plan_cuda_program(
        sources.Source("etest", project / "tests" / "test_c.c"),
        ("90",),
        project.parent / "cache",
        project / "sources.txt",
    )
    assert program.first is not None
    assert program.first.path == plan("90").path
    assert str(plan("90").path) in program.link.command
    assert list(program.objects) == ["test_c.c"]


def said(program: Path) -> str:
    function = ctypes.CDLL(str(program)).architectures
    function.restype = ctypes.c_char_p
    text: bytes = function()
    return text.decode()


ARCHITECTURES = "90,80-virtual"
SAID = "sm_90 sm_90a ptx_80"


@pytest.mark.nvcc
def test_python_builds_for_every_target(project: Path, cuda_home: Path):
    plan = build.plan_cuda(sources.architectures(ARCHITECTURES), project.parent / "cache", project / "sources.txt")
    built = plan.run()
    assert (built.made, plan.targets) == (5, tuple(SAID.split()))
    assert plan.run().made == 0
    assert said(built.path) == SAID
    found = {(k.name, k.target) for log in built.logs.values() for k in contents.kernels(log)}
    assert found == {("_Z5plainPf", "sm_90"), ("_Z4widePf", "sm_90a")}
    assert [line for log in built.logs.values() for line in contents.warnings(log)] == []
    if (reader := toolkit.find().tool("cuobjdump")) is not None:
        assert contents.targets(built.path, reader) == set(plan.targets)


@pytest.mark.nvcc
def test_script_builds_and_runs_the_tests(project: Path, cuda_home: Path):
    environment = {**os.environ, "CUDA_HOME": str(cuda_home), "KDTREE_CUDA_ARCH": ARCHITECTURES}
    environment.pop("KDTREE_BUILD_DIR", None)

    def script(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([project / "scripts" / name], env=environment, capture_output=True, text=True)

    done = script("build_nvcc.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "[1/5] kernel objects",
        *("  kernels/plain.cu", "  kernels/wide.cu", "  common/plain.cpp"),
        *("[2/5] engine objects", "  model/engine.cpp"),
        *("[3/5] shared C-ABI lib", f"  libkdtree_engine.so: {SAID}"),
        *(
            "[4/5] kernel unit tests + bench",
            "  tests/test_kernel.cu",
            "  tests/test_skips.cu",
            "  no bench sources yet",
        ),
        *("[5/5] engine tests + demo", "  tests/test_engine.cpp", "  tests/test_c.c", "  demo/show.cpp"),
        "done -> build/",
    ]
    assert said(project / "build" / "libkdtree_engine.so") == SAID
    assert subprocess.run([project / "build" / "show"]).returncode == 0

    done = script("run_tests_nvcc.sh")
    lines = ["PASS test_kernel", "PASS test_engine", "PASS test_c", "SKIP test_skips (no device)"]
    assert (done.returncode, done.stdout.splitlines()) == (0, [*lines, "3 passed, 1 skipped, 0 failed"])

    (project / "build" / "test_engine").write_text("#!/bin/sh\necho broken\nexit 3\n")
    (project / "build" / "test_c").unlink()
    done = script("run_tests_nvcc.sh")
    assert done.returncode == 1
    assert "FAIL test_engine (exit status 3)\n  broken\nFAIL test_c (exit status 127)" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 passed, 1 skipped, 2 failed"

    edit(project / "tests" / "test_kernel.cu", "42", "forty_two")
    (project / "sources.txt").write_text("engine model/engine.cpp\nktest tests/test_kernel.cu\n")  # all is made anew
    done = script("build_nvcc.sh")
    assert done.returncode != 0
    assert "forty_two" in done.stderr
    assert "done" not in done.stdout


@pytest.mark.nvcc
def test_cmake_builds_and_runs_the_tests(project: Path, cuda_home: Path, tmp_path: Path):
    if shutil.which("cmake") is None:
        pytest.skip("no cmake on PATH")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True)

    folder = str(tmp_path / "cmake")
    configure = ["cmake", "-S", str(project), "-B", folder, f"-DCMAKE_CUDA_COMPILER={cuda_home}/bin/nvcc"]
    done = run(*configure, f"-DKDTREE_CUDA_ARCH={ARCHITECTURES}")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run("cmake", "--build", folder, "--target", "help")
    for target in ("kdtree_kernels", "kdtree_engine", "test_kernel", "test_engine", "test_c", "show"):
        assert f"... {target}\n" in done.stdout, target
    done = run("cmake", "--build", folder, "--parallel", str(len(os.sched_getaffinity(0))))
    assert done.returncode == 0, done.stdout + done.stderr
    assert said(tmp_path / "cmake" / "libkdtree_engine.so") == SAID
    done = run("ctest", "--test-dir", folder)
    assert done.returncode == 0, done.stdout
    assert "100% tests passed, 0 tests failed out of 4" in done.stdout
    assert "test_skips (Skipped)" in done.stdout
    for wrong in ("-DKDTREE_CUDA_ARCH=sm_90", "-DKDTREE_CUDA_ARCH=90a"):
        assert "is no architecture" in run(*configure, wrong).stderr
    edit(project / "sources.txt", "kernel kernels/plain.cu\n", "kernel kernels/plain.cu fast\n")
    assert "sources.txt: 'kernel kernels/plain.cu fast'" in run(*configure, "-DKDTREE_CUDA_ARCH=90").stderr


def test_script_without_nvcc(project: Path, tmp_path: Path):
    script = str(project / "scripts" / "build_nvcc.sh")
    environment = {"PATH": "/usr/bin:/bin", "CUDA_HOME": str(tmp_path)}
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"'{tmp_path}/bin/nvcc' cannot be run; set CUDA_HOME" in done.stderr
    assert "[1/5]" not in done.stdout
    environment |= {"NVCC": "true", "KDTREE_CUDA_ARCH": "sm_90"}
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "'sm_90' is no architecture" in done.stderr
