"""Reading and writing beside np.tofile, npz, safetensors and HDF5 in one run: large tensors and many small ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import safetensors
import safetensors.numpy

import kdtr
from kdtr.benchmarks.measure import Arm, Sample, measure, timed
from kdtr.benchmarks.tables import Goal, Measured, confirmed
from kdtr.tests import cpp_build

pytestmark = pytest.mark.bench

MIB = int(os.environ.get("KDTREE_BENCH_MIB", "256"))
ROUNDS = 7
N_LARGE, N_SMALL = max(1, 100 * MIB // 1024), 10_000  # large ones have 10 MiB whatever their number
PAGE = 4096

Arrays = dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """On tmpfs if there is room for five files and the arrays themselves."""
    memory = Path("/dev/shm")
    room = memory.is_dir() and shutil.disk_usage(memory).free > 7 * MIB << 20
    with tempfile.TemporaryDirectory(prefix="kdtr-bench-", dir=memory if room else None) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def large() -> Arrays:
    rng = np.random.default_rng(0)
    count = (1 << 30) // 100 // 4
    return {f"layers.{i:03d}.weight": rng.random(count, np.float32) for i in range(N_LARGE)}


@pytest.fixture(scope="module")
def small() -> Arrays:
    values = np.random.default_rng(1).random((N_SMALL, 8), np.float32)
    return {f"layers.{i // 10:04d}.experts.{i % 10}.scale": values[i].copy() for i in range(N_SMALL)}


def where(folder: Path) -> str:
    return "tmpfs" if folder.parent == Path("/dev/shm") else "disk (kdtr synchronises, the others do not)"


def finish(
    benchmark: Any,
    keep: Callable[[Measured], None],
    title: str,
    arms: Mapping[str, Arm],
    goals: dict[str, Goal],
    slow: Collection[str] = (),
) -> None:
    """Measure, store, and fail only where a goal is missed by more than noise can explain, each time anew."""
    baseline = next(iter(arms))
    first = benchmark.pedantic(measure, args=(arms, ROUNDS, slow), rounds=1, iterations=1)
    measured = confirmed(
        Measured(title, baseline, first, goals),
        lambda: Measured(title, baseline, measure(arms, ROUNDS, slow), goals),
    )
    keep(measured)
    if measured.grossly_missed():
        pytest.fail("\n".join(measured.lines()))


# --- writers and readers, each of a whole set of arrays ---------------------------------------------------------------


def write_raw(path: Path, arrays: Arrays) -> None:
    with path.open("wb") as file:
        for array in arrays.values():
            array.tofile(file)


def write_hdf5(path: Path, arrays: Arrays) -> None:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)


def write_kdtr(path: Path, arrays: Arrays) -> None:
    kdtr.save(path, arrays, kind="any")


WRITERS: dict[str, tuple[str, Callable[[Path, Arrays], object]]] = {
    "np.tofile": ("bin", write_raw),
    "kdtr.save": ("kdtr", write_kdtr),
    "safetensors": ("safetensors", lambda path, arrays: safetensors.numpy.save_file(arrays, path)),
    "np.savez": ("npz", lambda path, arrays: np.savez(path, **arrays)),  # type: ignore[arg-type]
    "h5py": ("h5", write_hdf5),
}


def read_raw(path: Path, like: Arrays) -> Arrays:
    with path.open("rb") as file:
        return {name: np.fromfile(file, array.dtype, array.size) for name, array in like.items()}


def read_kdtr_unverified(path: Path) -> Arrays:
    with kdtr.open(path) as handle:
        return {name: handle.get(name, verify=False) for name in handle.names}


def read_npz(path: Path) -> Arrays:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def read_hdf5(path: Path) -> Arrays:
    with h5py.File(path) as file:
        return {name: file[name][()] for name in file}


def touch(views: Mapping[str, npt.NDArray[Any]]) -> int:
    """Read one byte of every page."""
    return sum(int(view.reshape(-1).view(np.uint8)[::PAGE].sum()) for view in views.values())


def view_kdtr(path: Path) -> int:
    with kdtr.open(path) as handle:
        return touch({name: handle.view(name) for name in handle.names})


def view_raw(path: Path, like: Arrays) -> int:
    views, at = {}, 0
    for name, array in like.items():
        views[name] = np.memmap(path, array.dtype, "r", at, array.shape)
        at += array.nbytes
    return touch(views)


def same(arrays: Arrays) -> Callable[[Mapping[str, npt.NDArray[Any]]], bool]:
    """As many arrays, and the first and the last equal: cheap enough for every sample."""
    ends = [min(arrays), max(arrays)]
    return lambda found: len(found) == len(arrays) and all(np.array_equal(found[end], arrays[end]) for end in ends)


def write_all(folder: Path, arrays: Arrays) -> dict[str, Path]:
    paths = {name: folder / f"read.{suffix}" for name, (suffix, _) in WRITERS.items()}
    for name, (_, write) in WRITERS.items():
        write(paths[name], arrays)
    return paths


def writing(folder: Path, arrays: Arrays) -> dict[str, Arm]:
    """Each writer makes a file that is not there, so that no arm pays for freeing another's pages."""

    def arm(path: Path, write: Callable[[Path, Arrays], object]) -> Arm:
        least = sum(array.nbytes for array in arrays.values())
        return timed(
            lambda: write(path, arrays),
            before=lambda: path.unlink(missing_ok=True),
            check=lambda _: path.stat().st_size >= least,
        )

    return {name: arm(folder / f"write.{suffix}", write) for name, (suffix, write) in WRITERS.items()}


# --- goal 1: large tensors --------------------------------------------------------------------------------------------


def test_write_large(benchmark: Any, keep: Callable[[Measured], None], folder: Path, large: Arrays) -> None:
    goals = {"kdtr.save": Goal("minimum", "np.tofile", 0.9)}
    arms = writing(folder, large)
    finish(benchmark, keep, f"Write {MIB} MiB in {N_LARGE} tensors, {where(folder)}", arms, goals)
    for path in folder.glob("write.*"):
        path.unlink()


def test_read_large(benchmark: Any, keep: Callable[[Measured], None], folder: Path, large: Arrays) -> None:
    paths = write_all(folder, large)
    check = same(large)
    raw, own = paths["np.tofile"], paths["kdtr.save"]
    count = touch(large)
    arms = {
        "np.fromfile": timed(lambda: read_raw(raw, large), check=check),
        "kdtr.read (verified)": timed(lambda: kdtr.read(own), check=check),
        "kdtr get (unverified)": timed(lambda: read_kdtr_unverified(own), check=check),
        "safetensors": timed(lambda: safetensors.numpy.load_file(paths["safetensors"]), check=check),
        "np.load npz": timed(lambda: read_npz(paths["np.savez"]), check=check),
        "h5py": timed(lambda: read_hdf5(paths["h5py"]), check=check),
        "np.memmap": timed(lambda: view_raw(raw, large), check=lambda found: found == count),
        "kdtr view": timed(lambda: view_kdtr(own), check=lambda found: found == count),
    }
    goals = {
        "kdtr.read (verified)": Goal("median", "np.fromfile", 0.9),
        "kdtr get (unverified)": Goal("median", "np.fromfile", 1.0),
        "kdtr view": Goal("median", "np.memmap", 0.95),
    }
    finish(benchmark, keep, f"Read {MIB} MiB in {N_LARGE} tensors, {where(folder)}, warm", arms, goals)
    for path in paths.values():
        path.unlink()


# --- goal 2: many small tensors ---------------------------------------------------------------------------------------


def test_write_small(benchmark: Any, keep: Callable[[Measured], None], folder: Path, small: Arrays) -> None:
    arms = writing(folder, small)
    arms = {"safetensors": arms.pop("safetensors"), **arms}  # the neighbour that is best at this
    goals = {"kdtr.save": Goal(milliseconds=40)}
    finish(
        benchmark, keep, f"Write {N_SMALL} tensors of 8 f32, {where(folder)}", arms, goals, slow=("np.savez", "h5py")
    )


def test_open_small(benchmark: Any, keep: Callable[[Measured], None], folder: Path, small: Arrays) -> None:
    paths = write_all(folder, small)
    own = paths["kdtr.save"]
    names = sorted(small)
    some = names[N_SMALL // 3]
    right = small[some]

    def with_kdtr(path: Path) -> npt.NDArray[Any]:
        with kdtr.open(path) as handle:
            return handle.get(some)

    def list_kdtr(path: Path) -> int:
        with kdtr.open(path) as handle:
            return len(handle.names)

    def list_safetensors(path: Path) -> int:
        with safetensors.safe_open(path, "np") as file:
            return len(list(file.keys()))

    def list_npz(path: Path) -> int:
        with np.load(path) as file:
            return len(file.files)

    def list_hdf5(path: Path) -> int:
        with h5py.File(path) as file:
            return len(list(file))

    everything = lambda found: found == N_SMALL  # noqa: E731
    arms = {
        "safetensors open": timed(lambda: list_safetensors(paths["safetensors"]), check=everything),
        "kdtr open": timed(lambda: list_kdtr(own), check=everything),
        "npz open": timed(lambda: list_npz(paths["np.savez"]), check=everything),
        "h5py open": timed(lambda: list_hdf5(paths["h5py"]), check=everything),
        "kdtr open + one get": timed(lambda: with_kdtr(own), check=lambda found: np.array_equal(found, right)),
    }
    goals = {"kdtr open": Goal(milliseconds=6), "kdtr get, opened": Goal(milliseconds=0.5)}
    if cpp_build.missing("g++") is None:
        program = cpp_build.build(cpp_build.SOURCES / "kdtr_tool.cpp")
        arms["kdtr open, C++"] = lambda: opened_by_cpp(program, own)
        goals["kdtr open, C++"] = Goal(milliseconds=2.5)
    with kdtr.open(own) as handle:
        arms["kdtr get, opened"] = timed(lambda: handle.get(some), check=lambda found: np.array_equal(found, right))
        finish(benchmark, keep, f"Open a file of {N_SMALL} tensors and list them", arms, goals)


def opened_by_cpp(program: Path, path: Path) -> Sample:
    """Open with full validation, mapped, as the program itself timed it; it is one thread that only computes."""
    done = subprocess.run([program, "time", path, "1"], capture_output=True, text=True, check=True)
    seconds = float(done.stdout.split()[1]) / 1000
    return Sample(seconds, seconds)


def test_read_small(benchmark: Any, keep: Callable[[Measured], None], folder: Path, small: Arrays) -> None:
    paths = write_all(folder, small)
    check = same(small)
    arms = {
        "safetensors": timed(lambda: safetensors.numpy.load_file(paths["safetensors"]), check=check),
        "kdtr.read (verified)": timed(lambda: kdtr.read(paths["kdtr.save"]), check=check),
        "np.fromfile": timed(lambda: read_raw(paths["np.tofile"], small), check=check),
        "np.load npz": timed(lambda: read_npz(paths["np.savez"]), check=check),
        "h5py": timed(lambda: read_hdf5(paths["h5py"]), check=check),
    }
    goals = {"kdtr.read (verified)": Goal(milliseconds=40)}
    title = f"Read {N_SMALL} tensors of 8 f32, {where(folder)}, warm"
    finish(benchmark, keep, title, arms, goals, slow=("np.load npz", "h5py"))
