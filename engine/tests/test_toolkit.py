"""Where a CUDA toolkit is looked for, in which order, and what is said when there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine import toolkit
from engine.toolkit import ToolkitError, find

CHECKOUT = Path(__file__).resolve().parents[2]
COMPILER = ("bin/nvcc", "bin/ptxas", "bin/fatbinary", "nvvm/bin/cicc")
RUNTIME = ("include/cuda_runtime.h", "include/cuda_runtime_api.h", "include/crt/host_config.h")


def fake(root: Path, *files: str, version: str = "13.0.88") -> Path:
    """A folder with these files; its nvcc tells its version and, in a dry run, its own folder."""
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    major, minor, _ = version.split(".")
    if (header := root / "include" / "cuda_runtime_api.h").exists():
        header.write_text(f"#define CUDART_VERSION  {int(major) * 1000 + int(minor) * 10}\n")
    if (nvcc := root / "bin" / "nvcc").exists():
        top = root / "bin" / ".."
        nvcc.write_text(
            f'#!/bin/sh\nif [ "$1" = -dryrun ]; then echo "#$ TOP={top}" >&2; exit 0; fi\n'
            f"echo 'Cuda compilation tools, release {major}.{minor}, V{version}'\n"
        )
        nvcc.chmod(0o755)
    return root


def fake_toolkit(root: Path, version: str = "13.0.88") -> Path:
    return fake(root, *COMPILER, *RUNTIME, "lib64/libcudart_static.a", version=version)


def fake_wheels(site_packages: Path, *more: str) -> Path:
    return fake(site_packages / "nvidia" / "cu13", *COMPILER, *RUNTIME, "lib/libcudart_static.a", *more)


def test_a_whole_toolkit_is_taken_as_it_is(tmp_path: Path):
    root = fake_toolkit(tmp_path / "cuda")
    found = find(environment={"CUDA_HOME": str(root)}, site_packages=[], views=tmp_path / "views")
    assert (found.root, found.nvcc, found.version) == (root, root / "bin" / "nvcc", "13.0.88")
    assert not (tmp_path / "views").exists()


def test_wheels_get_the_usual_shape(tmp_path: Path):
    wheels = fake_wheels(tmp_path / "site", "lib/libcudart.so.13", "bin/cuobjdump")
    found = find(environment={}, site_packages=[tmp_path / "site"], views=tmp_path / "views")
    assert found.root.parent == tmp_path / "views"
    for file in ("lib64/libcudart_static.a", "lib64/libcudart.so", "lib64/libcudart.so.13", "nvvm/bin/cicc"):
        assert (found.root / file).resolve().is_relative_to(wheels), file
    for file in ("lib/libcudart.so", f"targets/{toolkit.TARGET}/include/crt/host_config.h", "bin/ptxas"):
        assert (found.root / file).exists(), file
    assert found.version == "13.0.88"
    assert found.tool("cuobjdump") == found.root / "bin" / "cuobjdump"
    assert found.tool("no-such-tool") is None


def test_a_view_is_made_once_and_again_when_its_files_change(tmp_path: Path):
    wheels = fake_wheels(tmp_path / "site")
    first = find(environment={}, site_packages=[tmp_path / "site"], views=tmp_path / "views").root
    assert find(environment={}, site_packages=[tmp_path / "site"], views=tmp_path / "views").root == first
    (wheels / "lib" / "libcublas.so.13").write_text("")
    second = find(environment={}, site_packages=[tmp_path / "site"], views=tmp_path / "views").root
    assert second != first
    assert (second / "lib64" / "libcublas.so").exists()
    assert sorted(path.name for path in (tmp_path / "views").iterdir()) == sorted([first.name, second.name])


def test_order(tmp_path: Path):
    home, wheels = fake_toolkit(tmp_path / "home", "13.1.1"), fake_wheels(tmp_path / "site")
    on_path = fake_toolkit(tmp_path / "path", "13.2.2")
    path, site = f"{on_path}/bin", [tmp_path / "site"]
    views = tmp_path / "views"
    assert find(environment={"CUDA_HOME": str(home), "PATH": path}, site_packages=site, views=views).root == home
    assert find(environment={"CUDA_PATH": str(home), "PATH": path}, site_packages=site, views=views).root == home
    assert find(environment={"PATH": path}, site_packages=site, views=views).version == "13.0.88"
    (wheels / "nvvm" / "bin" / "cicc").unlink()  # a compiler that cannot compile is passed over
    assert find(environment={"PATH": path}, site_packages=site, views=views).root == on_path


def test_nvcc_on_path_may_be_a_script_that_calls_it(tmp_path: Path):
    root = fake_toolkit(tmp_path / "cuda")
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec {root}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    found = find(environment={"PATH": str(tmp_path / "bin")}, site_packages=[], views=tmp_path / "views")
    assert found.root == root


def test_what_the_first_place_lacks_comes_from_another_of_its_version(tmp_path: Path):
    bare = fake_toolkit(tmp_path / "cuda")
    cublas = fake(tmp_path / "site" / "nvidia" / "cu13", "include/cublas_v2.h", "lib/libcublas.so.13")

    def find_cublas() -> toolkit.Toolkit:
        needed = ("compiler", "runtime", "cublas")
        return find(needed, {"PATH": f"{bare}/bin"}, [tmp_path / "site"], tmp_path / "views")

    found = find_cublas()
    assert found.places == (bare, cublas)
    assert (found.root / "include" / "cublas_v2.h").resolve() == cublas / "include" / "cublas_v2.h"
    assert (found.root / "lib64" / "libcublas.so").exists()
    assert (found.root / "include" / "cuda_runtime.h").resolve() == bare / "include" / "cuda_runtime.h"
    fake(cublas, "include/cuda_runtime_api.h", version="13.2.0")  # headers of two versions are never mixed
    with pytest.raises(ToolkitError, match=r"missing: include/cublas_v2.h, lib64/libcublas.so"):
        find_cublas()


def test_no_toolkit(tmp_path: Path):
    with pytest.raises(ToolkitError) as caught:
        find(environment={"CUDA_HOME": str(tmp_path)}, site_packages=[tmp_path], views=tmp_path / "views")
    text = str(caught.value)
    assert f"looked at $CUDA_HOME: {tmp_path}, lacks bin/nvcc, bin/ptxas" in text
    assert "looked at $CUDA_PATH (not set)" in text
    assert "looked at wheels (none installed for this Python)" in text
    assert "looked at nvcc on PATH (none)" in text
    assert f"pip install '{toolkit.WHEELS}'" in text


def test_the_runtime_is_missing(tmp_path: Path):
    fake(tmp_path / "cuda", *COMPILER)
    with pytest.raises(ToolkitError) as caught:
        find(environment={"PATH": f"{tmp_path}/cuda/bin"}, site_packages=[], views=tmp_path / "views")
    assert "missing: include/cuda_runtime.h, include/crt/host_config.h, lib64/libcudart_static.a" in str(caught.value)
    assert "bin/nvcc" not in str(caught.value).splitlines()[0]


def test_nvcc_that_does_not_run(tmp_path: Path):
    root = fake_toolkit(tmp_path / "cuda")
    (root / "bin" / "nvcc").write_text("#!/bin/sh\necho 'cannot run' >&2\nexit 1\n")
    with pytest.raises(ToolkitError, match="does not tell its version: cannot run"):
        find(environment={"CUDA_HOME": str(root)}, site_packages=[], views=tmp_path / "views")


@pytest.mark.slow
def test_wheels_alone_build_the_library(tmp_path: Path):
    """Installs the wheels of the toolkit; nvcc is not on PATH."""
    path = os.pathsep.join(["/usr/bin", "/bin"])
    if shutil.which("nvcc", path=path) or not shutil.which("g++", path=path):
        pytest.skip("needs g++, and no nvcc, in /usr/bin")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    wheels = [toolkit.WHEELS, "nvidia-cuda-cuobjdump"]
    subprocess.run([str(python), "-m", "pip", "install", "-q", *wheels], check=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "PYTHON", "KDTREE"))}
    done = subprocess.run(
        [str(python), "-m", "engine", "build", "--arch", "90,80-virtual", "--check"],
        cwd=CHECKOUT,
        env={**clean, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "inside: ptx_80 sm_90\n" in done.stdout
    assert "check passed" in done.stdout
