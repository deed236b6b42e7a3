"""Where and with what code a measurement is made.

Facts come from files and child processes: this process loads no GPU library. Nothing that names a person or a machine
is kept: no host name, no absolute path, of the GPU's UUID a hash only.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.records import Clocks, Environment, Gpu

CHECKOUT = Path(__file__).resolve().parent.parent
CUDA_MAJOR = 13  # of the extra `gpu`: cupy-cuda13x and the 13.0 toolkit
OLDEST_CARD = (8, 0)  # least compute capability that the engine is built for
MODULES = ("kdtr", "reference", "engine", "harness", "numpy", "cupy")
THREAD_SETTINGS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
SOURCES = ("*.py", "*.cpp", "*.hpp", "*.h", "*.cu", "*.cuh")
BUSY_PERCENT = 10

THROTTLE_BITS = {  # nvmlClocksEventReasons
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


def capture(root: Path = CHECKOUT, *, libraries: Mapping[str, Path] | None = None) -> Environment:
    """All facts about this machine, this process and the checkout at `root`. Takes about a second; call it once a run.

    libraries: native libraries in use by name; their SHA-256 is kept. Raises OSError for one that cannot be read.
    """
    probe = _probe_gpu()
    gpu = _gpu(probe)
    installed = _cupy_packages(
        (d.metadata["Name"], d.version) for d in importlib.metadata.distributions() if d.metadata["Name"]
    )
    modules = {name: origin(sys.modules[name].__file__, root) for name in MODULES if name in sys.modules}
    cpu, cores = _cpu_model(), _usable_cores()
    versions = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": _blas(),
        "compiler": _first_line([os.environ.get("CXX") or shutil.which("g++") or "c++", "--version"]),
        "nvcc": _nvcc(),
        "driver_cuda": probe.get("driver_cuda"),
        "cuda_runtime": probe.get("cuda_runtime"),
        "cupy": probe.get("cupy"),
    }
    commit, dirty, code = code_identity(root)
    return Environment(
        hardware_key=hardware_key(cpu, cores, gpu, versions["cuda_runtime"] or versions["driver_cuda"]),
        os=f"{platform.system()} {platform.release()}",
        arch=platform.machine(),
        cpu=cpu,
        cores=cores,
        commit=commit,
        dirty=dirty,
        code=code,
        modules=modules,
        versions=versions,
        threads={name: os.environ.get(name) for name in THREAD_SETTINGS},
        libraries={name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in (libraries or {}).items()},
        gpu=gpu,
        gpu_missing=probe["missing"],
        problems=(
            *cupy_problems(installed, probe.get("driver_cuda")),
            *_cupy_import_problem(probe, installed),
            *_card_problem(gpu),
            *origin_problems(modules),
        ),
    )


def hardware_key(cpu: str, cores: int, gpu: Gpu | None, cuda: str | None) -> str:
    """File name of the baselines of this hardware: cpu-<model>-<cores>, or gpu-<name>-<driver major>-cuda<version>."""
    if gpu is None:
        return f"cpu-{_slug(cpu)}-{cores}"
    return f"gpu-{_slug(gpu.name)}-{driver_major(gpu.driver) or 'unknown'}-cuda{cuda or '-unknown'}"


def driver_major(driver: str | None) -> str | None:
    """ "570" of "570.124.06"."""
    return driver.split(".")[0] if driver else None


def cupy_problems(packages: Iterable[tuple[str, str]], driver_cuda: str | None) -> list[str]:
    """What is wrong with the installed CuPy packages, (name, version) each, in sentences that name them.

    Public reports: gpustack/gpustack#5459 (two wheels side by side), cupy/cupy#9719.
    """
    found = sorted(packages)
    problems = []
    if len(found) > 1:
        names = ", ".join(f"{name} {version}" for name, version in found)
        problems.append(f"{len(found)} CuPy packages are installed side by side ({names}): keep one, remove the others")
    for name, version in found:
        wheel = re.fullmatch(r"cupy-cuda(\d+?)(?:x|\d)", name)
        if wheel is None:
            continue
        major = int(wheel[1])
        if major != CUDA_MAJOR:
            problems.append(f"{name} {version} is made for CUDA {major}; this project needs cupy-cuda{CUDA_MAJOR}x")
        if driver_cuda is not None and major > int(driver_cuda.split(".")[0]):
            problems.append(
                f"{name} {version} is made for CUDA {major}, but the driver serves CUDA {driver_cuda} at most"
            )
    return problems


def origin(file: str | None, root: Path = CHECKOUT) -> str:
    """Where a module comes from, without the machine's paths: "checkout/..", "site-packages/.." or "elsewhere/..".."""
    if file is None:
        return "unknown"
    path = Path(file).resolve()
    if "site-packages" in path.parts:
        last = len(path.parts) - 1 - path.parts[::-1].index("site-packages")
        return "/".join(path.parts[last:])
    if path.is_relative_to(root.resolve()):
        return f"checkout/{path.relative_to(root.resolve()).as_posix()}"
    return f"elsewhere/{path.parent.name}/{path.name}"


def origin_problems(modules: Mapping[str, str]) -> list[str]:
    """Our own packages that do not come from the checkout whose commit is recorded."""
    return [
        f"{name} is imported from {place}, not from the checkout"
        for name, place in modules.items()
        if name in ("kdtr", "reference", "engine", "harness") and not place.startswith("checkout/")
    ]


def code_identity(root: Path = CHECKOUT) -> tuple[str | None, bool | None, str]:
    """(commit, dirty, code). code: the commit, with a hash of the changed and untracked files if there are any; without
    git a hash of all source files. Two runs with equal code ran the same code."""
    top = _git(root, "rev-parse", "--show-toplevel")
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    status = _git(root, "status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames")
    if top is None or commit is None or status is None or Path(top.strip()).resolve() != root.resolve():
        files = sorted({path for pattern in SOURCES for path in root.rglob(pattern)})
        return None, None, f"files-{_hash_files(root, [path.relative_to(root).as_posix() for path in files])}"
    commit = commit.strip()
    changed = [entry[3:] for entry in status.split("\0") if entry]
    return commit, bool(changed), f"{commit}+{_hash_files(root, changed)}" if changed else commit


class SmiClockReader:
    """Reads the clocks of one GPU through nvidia-smi, some 50 ms a reading; a reading that fails holds None."""

    def __init__(self, nominal_mhz: int | None = None, uuid: str | None = None):
        self.nominal_mhz = nominal_mhz
        self._uuid = uuid

    def read(self) -> Clocks:
        for reasons in ("clocks_event_reasons", "clocks_throttle_reasons"):  # new and old name of the same field
            if fields := _smi(f"clocks.sm,clocks.mem,{reasons}.active", self._uuid):
                return parse_clocks(fields)
        return parse_clocks(None)


def parse_clocks(fields: list[str] | None) -> Clocks:
    """Clocks from the three fields that SmiClockReader asks for."""
    if fields is None or len(fields) != 3:
        return Clocks(None, None)
    reasons = int(fields[2], 16) if re.fullmatch(r"0x[0-9a-fA-F]+", fields[2]) else 0
    return Clocks(
        _whole(fields[0]), _whole(fields[1]), tuple(name for bit, name in THROTTLE_BITS.items() if reasons & bit)
    )


def gpu_uuid() -> str | None:
    """UUID of the first CUDA device, for SmiClockReader; never stored in a row."""
    found: str | None = _probe_gpu().get("uuid")
    return found


def gpu_missing() -> str | None:
    """Why no CUDA device can be used here, or None; the driver is asked in a child process."""
    found: str | None = (_ask("driver") or {"missing": "the CUDA driver ended the process that asked it"})["missing"]
    return found


def _gpu(probe: Mapping[str, Any]) -> Gpu | None:
    if probe["missing"] is not None:
        return None
    uuid = probe["uuid"]
    fields = _smi("driver_version,power.limit,clocks.max.sm,utilization.gpu", uuid) or [""] * 4
    busy_percent = _whole(fields[3])
    return Gpu(
        name=probe["name"],
        uuid_hash=hashlib.sha256(uuid.encode()).hexdigest()[:12],
        sm_count=probe["sm_count"],
        compute_capability=probe["compute_capability"],
        memory_bytes=probe["memory_bytes"],
        driver=fields[0] or None,
        power_limit_w=float(fields[1]) if re.fullmatch(r"\d+(\.\d+)?", fields[1]) else None,
        max_sm_mhz=_whole(fields[2]),
        busy=None if busy_percent is None else busy_percent > BUSY_PERCENT or _others_on_gpu(uuid),
    )


def _others_on_gpu(uuid: str) -> bool:
    """Whether another process computes on the GPU."""
    listed = _output(["nvidia-smi", "-i", uuid, "--query-compute-apps=pid", "--format=csv,noheader"]) or ""
    return any(pid.strip().isdigit() and int(pid) != os.getpid() for pid in listed.splitlines())


def _probe_gpu() -> dict[str, Any]:
    driver = _ask("driver") or {"missing": "the CUDA driver ended the process that asked it"}
    cupy = _ask("cupy") or {"cupy_error": "importing it ended the process"}
    return {**driver, **cupy}


def _ask(subject: str) -> dict[str, Any]:
    script = Path(__file__).with_name("gpu_probe.py")
    text = _output([sys.executable, "-P", str(script), subject], timeout_s=60)  # -P: our html.py hides no other
    try:
        facts: dict[str, Any] = json.loads((text or "").strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {}
    return facts


def _cupy_packages(distributions: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    named = {(re.sub(r"[-_.]+", "-", name).lower(), version) for name, version in distributions}
    return sorted((n, v) for n, v in named if re.fullmatch(r"cupy(-cuda\d+x?|-rocm-[\d-]+)?", n))


def _cupy_import_problem(probe: Mapping[str, Any], installed: list[tuple[str, str]]) -> list[str]:
    if installed and probe.get("cupy_error"):
        names = ", ".join(f"{name} {version}" for name, version in installed)
        return [f"{names} cannot be imported: {probe['cupy_error']}"]
    return []


def _card_problem(gpu: Gpu | None) -> list[str]:
    if gpu is None or gpu.compute_capability is None:
        return []
    if tuple(map(int, gpu.compute_capability.split("."))) >= OLDEST_CARD:
        return []
    least = ".".join(map(str, OLDEST_CARD))
    return [f"{gpu.name} has compute capability {gpu.compute_capability}; the engine needs {least} or newer"]


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or "unknown"


def _usable_cores() -> int:
    """Cores that this process may use, which containers make fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _blas() -> str | None:
    built: Any = np.show_config(mode="dicts")
    blas = built.get("Build Dependencies", {}).get("blas", {})
    return f"{blas['name']} {blas.get('version', '')}".strip() if blas.get("name") else None


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    program = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    found = re.search(r"release [\d.]+, V([\d.]+)", _output([program, "--version"]) or "") if program else None
    return found[1] if found else None


def _smi(query: str, uuid: str | None) -> list[str] | None:
    """The answers of nvidia-smi to one query about one GPU, or None."""
    chosen = ["-i", uuid] if uuid else ["-i", "0"]
    text = _output(["nvidia-smi", *chosen, f"--query-gpu={query}", "--format=csv,noheader,nounits"])
    fields = [field.strip() for field in text.strip().splitlines()[0].split(",")] if text and text.strip() else []
    return fields if len(fields) == query.count(",") + 1 else None


def _git(root: Path, *arguments: str) -> str | None:
    return _output(["git", "--no-optional-locks", "-C", str(root), *arguments])


def _output(command: list[str], timeout_s: float = 20) -> str | None:
    """What a program prints, or None if it is absent, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None


def _first_line(command: list[str]) -> str | None:
    lines = (_output(command) or "").splitlines()
    return lines[0].strip() if lines else None


def _hash_files(root: Path, names: list[str]) -> str:
    """Hash of names and contents; a file that is gone counts by its name."""
    total = hashlib.sha256()
    for name in sorted(names):
        path = root / name
        total.update(name.encode("utf-8", "surrogateescape") + b"\0")
        if path.is_file():
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:16]


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _slug(text: str) -> str:
    """Letters, digits and single dashes; without the marks and the frequency that processor names carry."""
    plain = re.sub(r"\((?:r|tm|c)\)|@.*$|\bcpu\b", " ", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "unknown"
