"""Kernels executed on the CPU (engine/cuda/host): right results in every order, planted faults are caught.

test_native.py runs the same and all other C++ tests under the sanitizers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine import build
from engine.sources import CUDA, Source

LIST = CUDA / "host" / "tests" / "sources.txt"  # the host library without the engine's kernels
FAULTS = CUDA / "host" / "tests" / "faults.cu"
SEMANTICS, TILES = CUDA / "tests" / "test_simt.cu", CUDA / "tests" / "test_ptx.cu"
STUCK = 86  # exit status of a program whose kernel breaks a rule of barriers, masks or alignment
ORDERS = {
    "plain": {},
    **{f"seed {seed}": {"KDTREE_HOST_SEED": str(seed)} for seed in (1, 2, 3)},
    "two OS threads": {"KDTREE_HOST_THREADS": "2"},
    "99 KiB": {"KDTREE_HOST_SHARED_MEMORY": "101376"},
}
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Callable[[build.Sanitizer], Sequence[str]]:
    """What to put before the command of a sanitized program; skips where the compiler has no such sanitizer.

    Where the system spreads addresses widely, ThreadSanitizer's memory fits by luck only: setarch -R stops that.
    """
    folder = tmp_path_factory.mktemp("sanitizer")
    found: dict[build.Sanitizer, Sequence[str] | str] = {}

    def look(sanitizer: build.Sanitizer) -> Sequence[str] | str:
        recipe = build.host_recipe(sanitizer)
        source, program = folder / "empty.cpp", folder / sanitizer
        source.write_text("int main() {}\n", encoding="utf-8")
        made = _run([recipe.program, *recipe.link, str(source), "-o", str(program)])
        if made.returncode != 0:
            return f"{recipe.program} has no {sanitizer} sanitizer: {made.stderr.strip().splitlines()[-1]}"
        for before in (["setarch", "-R"], []):
            if (not before or shutil.which(before[0])) and _run([*before, str(program)]).returncode == 0:
                return before
        return f"programs with the {sanitizer} sanitizer do not start here"

    def prefix(sanitizer: build.Sanitizer) -> Sequence[str]:
        if sanitizer == "none":
            return []
        if sanitizer not in found:
            found[sanitizer] = look(sanitizer)
        answer = found[sanitizer]
        if isinstance(answer, str):
            pytest.skip(answer)
        return answer

    return prefix


@pytest.fixture(scope="module")
def run(prefix: Callable[[build.Sanitizer], Sequence[str]]) -> Run:
    """run(program, *arguments, sanitizer="none", **environment): its source is built when first asked for."""
    built: dict[tuple[Path, build.Sanitizer], Path] = {}

    def run(
        program: Path, *arguments: str, sanitizer: build.Sanitizer = "none", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        if shutil.which(os.environ.get("CXX") or "g++") is None:
            pytest.skip("no C++ compiler")
        before = prefix(sanitizer)
        if (program, sanitizer) not in built:
            plan = build.plan_host_program(Source("ktest", program), sanitizer, list_file=LIST)
            built[program, sanitizer] = plan.run().path
        return _run([*before, str(built[program, sanitizer]), *arguments], **environment)

    return run


def _run(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KDTREE_", "TSAN_", "ASAN_"))}
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**kept, **environment})


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return f"exit status {done.returncode}\n{done.stdout}{done.stderr}"


def _lines(fault: str) -> set[int]:
    """The lines of faults.cu that are marked as those that race in `fault`."""
    text = FAULTS.read_text(encoding="utf-8").splitlines()
    return {number for number, line in enumerate(text, 1) if line.endswith(f"// races in {fault}")}


@pytest.mark.parametrize("program", [SEMANTICS, TILES], ids=lambda path: path.stem)
@pytest.mark.parametrize("order", ORDERS)
def test_right_results_in_every_order(run: Run, program: Path, order: str) -> None:
    done = run(program, **ORDERS[order])
    assert done.returncode == 0, _said(done)


def test_stacks_switched_by_the_c_library(run: Run, tmp_path: Path) -> None:
    """Where there is no assembly for the processor, ucontext switches."""
    run(SEMANTICS, "indices")
    plan = build.plan_host_program(Source("ktest", SEMANTICS), list_file=LIST)
    compiler, *rest = plan.objects["simt.cpp"].command
    scheduler = tmp_path / "simt.o"
    made = _run([compiler, "-DKDTREE_HOST_UCONTEXT", *rest, str(scheduler)])
    assert made.returncode == 0, _said(made)
    instead = str(plan.objects["simt.cpp"].path)
    command = [str(scheduler) if word == instead else word for word in plan.link.command]
    link = replace(plan.link, command=tuple(command), path=tmp_path / "test_simt")
    assert link.run() == 1
    done = _run([str(link.path)])
    assert done.returncode == 0, _said(done)


@pytest.mark.parametrize("fault", ["missing_barrier", "missing_warp_barrier", "next_block"])
def test_the_plain_order_hides_what_a_seed_shows(run: Run, fault: str) -> None:
    assert run(FAULTS, fault).returncode == 0
    assert run(FAULTS, fault, KDTREE_HOST_SEED="1").returncode == 1


@pytest.mark.parametrize("fault", ["missing_barrier", "missing_warp_barrier", "shuffle_for_a_barrier"])
def test_the_race_detector_names_the_line(run: Run, fault: str) -> None:
    done = run(FAULTS, fault, sanitizer="thread")
    summary = re.search(r"SUMMARY: ThreadSanitizer: data race \S*faults\.cu:(\d+)", done.stderr)
    assert summary, _said(done)
    assert int(summary[1]) in _lines(fault)


@pytest.mark.parametrize("fault", ["weak_wait", "unwritten_dynamic", "unwritten_static", "lane_out_of_mask"])
def test_what_was_never_written_is_a_nan(run: Run, fault: str) -> None:
    done = run(FAULTS, fault)
    assert done.returncode == 1, _said(done)


def test_a_copy_lands_where_the_wait_is_strong_enough(run: Run) -> None:
    done = run(FAULTS, "right_wait")
    assert done.returncode == 0, _said(done)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("overrun_dynamic", r"SUMMARY: AddressSanitizer: heap-buffer-overflow \S*faults\.cu:\d+"),
        ("overrun_static", r"SUMMARY: AddressSanitizer: global-buffer-overflow|faults\.cu:\d+.* insufficient space"),
        ("overrun_global", r"SUMMARY: AddressSanitizer: heap-buffer-overflow \S*faults\.cu:\d+"),
    ],
)
def test_overruns_of_memory_are_seen(run: Run, fault: str, message: str) -> None:
    done = run(FAULTS, fault, sanitizer="address")
    assert done.returncode != 0
    assert re.search(message, done.stderr), _said(done)


@pytest.mark.parametrize("order", ["plain", "seed 2"])
@pytest.mark.parametrize(
    ("fault", "why", "who"),
    [
        (
            "barrier_in_a_branch",
            "waits for lanes that do not come",
            r"threads 0-39: __syncthreads at \S+faults\.cu:\d+",
        ),
        ("two_barriers", "wait at different barriers", r"threads 32-63: __syncthreads at \S+faults\.cu:\d+"),
        ("returned_lane", "a lane of the mask has returned", r"threads 5-5: returned"),
        ("absent_lane", "waits for lanes that do not come", r"threads 6-31: __shfl_xor_sync at .* with mask ffffffff"),
        ("foreign_mask", "not in its own mask", r"__shfl_sync at \S+faults\.cu:\d+ with mask 0000ffff"),
        ("two_operations", "different warp operations", r"__ballot_sync at \S+faults\.cu:\d+ with mask ffffffff"),
        ("misaligned_copy", "misaligned address in cp.async", r"runs"),
        ("misaligned_rows", "misaligned address in ldmatrix", r"runs"),
    ],
)
def test_broken_rules_stop_the_program_and_say_who_waits_where(
    run: Run, fault: str, why: str, who: str, order: str
) -> None:
    done = run(FAULTS, fault, **ORDERS[order])
    assert done.returncode == STUCK, _said(done)
    assert why in done.stderr
    assert re.search(who, done.stderr), done.stderr
