"""The GPU among the builders, with the host library in the GPU's place: its rows, its faults, and their absence."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import engine.ops
from engine.abi import SizeError, UnsupportedError
from engine.ops import Ops
from engine.tests.backends import open_ops
from engine.toolkit import ToolkitError
from harness import builders, cases, cli, gpu_builders, heap_tree, logits, records
from harness.cases import Builder, Logits, digest
from harness.compare import BASELINES
from harness.environment import CHECKOUT
from harness.gpu_builders import POISON, CupyGpu, NoGpuError, open_gpu
from harness.records import Row
from harness.systems import Systems
from harness.tests.host_gpu import FLAG, Arrays, HostGpu
from harness.tests.pairs import write_lists, write_pair
from harness.tests.processes import plain_environment
from reference.topk import topk_logprob

SMALL: tuple[cases.Case, ...] = (
    Builder(8, 16, lists=8),
    Builder(8, 16, batch=4, lists=8),
    Logits(6, 2, 3, 300),
    Logits(6, 12, 3, 300),
)


@pytest.fixture(autouse=True)
def _small_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and short cases, measured no oftener than their rows need."""
    monkeypatch.setitem(cases.SUITES, "quick", SMALL)
    monkeypatch.setattr(builders, "BEST_OF", 1)
    monkeypatch.setattr(gpu_builders, "CALLS", 9)
    monkeypatch.setattr(logits, "CALLS", 3)


@pytest.fixture(scope="module")
def ops() -> Ops:
    return open_ops("host")


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lists(write_pair(tmp_path_factory.mktemp("pair")), tmp_path_factory.mktemp("lists"))


def run(folder: Path, lists: Path, chosen: str, gpu: Any, *more: str) -> tuple[int, dict[tuple[str, str], Row]]:
    """(exit status, rows by case and arm). gpu: a HostGpu, or what opening one raises."""

    def opened(_: str | None) -> Any:
        if isinstance(gpu, Exception):
            raise gpu
        return gpu

    arguments = ("run", "-k", chosen, "--out", str(folder), "--models", str(lists), "--lists", str(lists), *more)
    code = cli.main(arguments, Systems(gpu=opened))
    return code, {(row.case, row.arm): row for row in records.read(folder / "rows.jsonl")}


def test_the_gpu_takes_turns_with_the_other_builders_and_stands_in_the_report(ops, lists, tmp_path, capsys):
    code, rows = run(tmp_path, lists, "builder", HostGpu(ops))
    assert code == 0
    for batch in (1, 4):
        case = f"builder/depth7/b16/batch{batch}"
        row, heap = rows[case, "gpu"], rows[case, "heapq"]
        assert (row.status, row.against, row.params["contract"]) == ("OK", "heapq", "ddtree")
        assert row.parity is not None
        assert row.parity.against == "reference.build_tree"
        assert row.parity.compared >= 8 * 16
        assert row.timing is not None
        assert heap.timing is not None
        assert (row.timing.method, row.timing.launch, row.timing.l2) == ("graph", "graph", "warm")
        assert (heap.timing.method, heap.timing.launch, heap.timing.l2) == ("cpu", None, None)
        assert len(row.timing.samples_s) == len(heap.timing.samples_s) == builders.SAMPLES
        assert row.params["trees"] == {1: 16, 4: 40}[batch]  # whole turns of all batches, 9 calls or more
        assert row.metrics["nodes"] == heap.metrics["nodes"]
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if line.startswith("|     16 |     7 |     4 |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert all(float(cell) > 0 for cell in (*cells[3:6], *cells[6:8]))
    assert cells[8:] == ["yes", "OK"]
    assert "GPU us: device time of graph replays" in said


def spoiled(written: Arrays) -> None:
    """A wrong node in every tree."""
    for array in written:
        if array.ndim == 2 and array.shape[1] == 17:
            array[:, 4] += 1


def refused(written: Arrays) -> None:
    """The device says that request 0 failed."""
    written[0][0] = (1, 2, 3)


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        ({"fault": spoiled}, "tree.tokens"),
        ({"fault": refused}, "RequestError: request 0, depth 2"),
        ({"replays": False}, "RequestError: request 0: unknown status 77"),  # a graph that does nothing
    ],
)
def test_a_wrong_result_of_the_gpu_makes_its_row_invalid_and_no_other(ops, lists, tmp_path, gpu, reason):
    code, rows = run(tmp_path, lists, "builder/depth7/b16/batch1", HostGpu(ops, **gpu))
    assert code == 1
    invalid = {arm: row for (_, arm), row in rows.items() if row.status == "INVALID"}
    assert invalid.keys() == {"gpu"}
    assert reason in str(invalid["gpu"].reason)


def test_an_engine_that_refuses_the_call_is_invalid_too(ops, lists, tmp_path):
    class Refusing:
        @property
        def tree_build(self) -> Any:
            def plan(*_: Any, **__: Any) -> Any:
                raise UnsupportedError("a block needs 300 KB of shared memory, this device has 99")

            return SimpleNamespace(plan=plan)

    code, rows = run(tmp_path, lists, "builder/depth7/b16/batch1", HostGpu(Refusing()))  # type: ignore[arg-type]
    row = rows["builder/depth7/b16/batch1", "gpu"]
    assert (code, row.status) == (1, "INVALID")
    assert row.reason == "UnsupportedError: a block needs 300 KB of shared memory, this device has 99"


def test_without_a_gpu_or_an_engine_its_rows_say_why(lists, tmp_path):
    code, rows = run(tmp_path, lists, "builder or logits", NoGpuError("the engine cannot be used: no nvcc"))
    assert code == 0
    for case in SMALL:
        row = rows[case.id, "gpu"]
        assert (row.status, row.reason) == ("NOT_RUN", "the engine cannot be used: no nvcc")
    small, large = SMALL[2].id, SMALL[3].id
    assert {rows[small, arm].status for arm in ("heapq", "cpp-heap")} == {"OK"}
    assert (rows[small, "topk"].status, rows[small, "topk"].reason) == ("NOT_RUN", "no PyTorch on a GPU")
    for arm in ("heapq", "cpp-heap", "topk"):
        assert rows[large, arm].status == "NOT_RUN"
        assert "no PyTorch on a GPU" in str(rows[large, arm].reason)


def test_resuming_with_a_gpu_adds_its_rows(ops, lists, tmp_path):
    chosen = "builder/depth7/b16/batch1"
    _, first = run(tmp_path, lists, chosen, NoGpuError("no CUDA driver"))
    assert first[f"{chosen}", "gpu"].status == "NOT_RUN"
    code, second = run(tmp_path, lists, chosen, HostGpu(ops), "--resume")
    assert (code, second[chosen, "gpu"].status) == (0, "OK")
    before = (tmp_path / "rows.jsonl").read_bytes()
    assert run(tmp_path, lists, chosen, HostGpu(ops), "--resume")[0] == 0
    assert (tmp_path / "rows.jsonl").read_bytes() == before


def test_trees_from_logits_are_measured_beside_the_hosts_way(ops, lists, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # whether or not PyTorch is here
    code, rows = run(tmp_path, lists, "logits", HostGpu(ops))
    assert code == 0
    for case in SMALL[2:]:
        assert isinstance(case, Logits)
        row = rows[case.id, "gpu"]
        assert (row.status, row.params["vocab"], row.params["batch"]) == ("OK", 300, case.batch)
        assert row.parity is not None
        assert row.parity.compared == case.batch * (3 * 2 * 6 + 7)  # ids and lp of three lists, and a tree
        assert row.against == ("heapq" if case.batch == 2 else None)
    assert rows[SMALL[2].id, "heapq"].timing.method == "cpu"  # type: ignore[union-attr]
    said = capsys.readouterr().out
    assert "Time per tree from logits of 300 tokens" in said


def wrong_lists(written: Arrays) -> None:
    for array in written:
        if array.dtype == np.float32 and array.ndim == 3:
            array[0, 1, 2] += 1e-4


def test_wrong_log_probabilities_from_logits_make_the_row_invalid(ops, lists, tmp_path):
    code, rows = run(tmp_path, lists, "logits and batch2", HostGpu(ops, wrong_lists))
    row = rows[SMALL[2].id, "gpu"]
    assert (code, row.status) == (1, "INVALID")
    assert "lists.lp of 'request 0 depth 2' differ at index 2" in str(row.reason)


def test_lists_are_equal_in_order_for_us_and_in_value_for_others():
    row = np.array([[1.0, 3.0, 3.0, 2.0, 0.0]], np.float32)
    truth = topk_logprob(row, 3)
    swapped = truth.ids[:, [1, 0, 2]]

    def differs(lp: Any, ids: Any, error: float) -> bool:
        checks = list(logits.check_lists("x", lp, ids, row, truth, error))
        assert len(checks) == 2
        return any(check.difference is not None for check in checks)

    assert not differs(truth.lp, truth.ids, logits.OURS)
    assert differs(truth.lp, swapped, logits.OURS)
    assert not differs(truth.lp, swapped, logits.TORCHS)
    assert differs(truth.lp, truth.ids[:, [0, 2, 1]], logits.TORCHS)
    for wrong in (np.float32(np.nan), truth.lp[0, 1] + np.float32(1e-4)):
        lp = truth.lp.copy()
        lp[0, 1] = wrong
        assert differs(lp, truth.ids, logits.OURS)
        assert differs(lp, truth.ids, logits.TORCHS)


def test_the_mask_of_the_public_implementation_is_the_references():
    from reference.tree import build_tree

    made = topk_logprob(np.random.default_rng(0).standard_normal((4, 50), np.float32), 9)
    tree = build_tree(made.lp, made.ids, 9)
    np.testing.assert_array_equal(logits.visibility(tree.parents), tree.visibility())


def test_the_gpu_is_opened_where_there_is_one_and_an_engine_for_it(monkeypatch):
    with pytest.raises(NoGpuError, match=r"^no CUDA driver$"):
        open_gpu("no CUDA driver")

    def opening(error: Exception) -> Callable[[str], Ops]:
        def fail(kind: str) -> Ops:
            assert kind == "cuda"
            raise error

        return fail

    for error, said in (
        (ToolkitError("no nvcc is on PATH\nand more"), "ToolkitError: no nvcc is on PATH"),
        (SizeError("x"), "SizeError: x"),
    ):
        monkeypatch.setattr(engine.ops, "open", opening(error))
        with pytest.raises(NoGpuError, match=f"^the engine cannot be used: {said}$"):
            open_gpu(None)


class FakeStream:
    ptr = 9

    def __init__(self, log: list[str], non_blocking: bool = False):
        assert non_blocking
        self._log = log

    def __enter__(self) -> None:
        self._log.append("enter")

    def __exit__(self, *_: object) -> None:
        self._log.append("exit")

    def begin_capture(self) -> None:
        self._log.append("begin")

    def end_capture(self) -> Any:
        self._log.append("end")
        return SimpleNamespace(launch=lambda stream: self._log.append(f"launch {stream.ptr}"))

    def synchronize(self) -> None:
        self._log.append("wait")


def test_a_graph_is_captured_after_a_call_whose_results_are_wiped(monkeypatch, ops):
    log: list[str] = []
    fake = SimpleNamespace(
        cuda=SimpleNamespace(Stream=lambda non_blocking: FakeStream(log, non_blocking)),
        asarray=lambda array: array.copy(),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(gpu_builders, "gpu_uuid", lambda: None)
    gpu = CupyGpu(ops)
    out = np.zeros(3, np.int32)
    assert gpu.to_device(out) is not out
    log.clear()
    run = gpu.capture(lambda: log.append(f"work {out[0]}"), [out])
    assert log == ["enter", "work 0", "wait", "begin", f"work {POISON}", "end", "exit"]
    run()
    gpu.synchronize()
    assert log[-2:] == ["launch 9", "wait"]
    assert gpu.clock.method == "graph"

    def failing() -> None:
        if log[-1] == "begin":
            raise SizeError("in the capture")

    with pytest.raises(SizeError):
        gpu.capture(failing, [])
    assert log[-2:] == ["end", "exit"]  # no stream is left in a capture


def test_arms_and_suites_leave_the_hashes_of_stored_builder_rows_as_they_are(monkeypatch):
    monkeypatch.undo()
    stored: dict[str, set[str]] = {}
    for file in BASELINES.glob("*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["block"] == "builder":
                stored.setdefault(row["case"], set()).add(row["case_hash"])
    suites = {
        name: {case.id: case for case in cases.SUITES[name] if isinstance(case, Builder | Logits)}
        for name in cases.SUITES
    }
    assert suites["quick"].keys() <= stored.keys() <= {name for suite in suites.values() for name in suite}
    for name, hashes in stored.items():
        for case in {suite[name] for suite in suites.values() if name in suite}:
            if isinstance(case, Logits):
                given = [logits.make_logits(case).tobytes()]
            else:
                given = [array.tobytes() for array in builders.load_lists(CHECKOUT / "datasets" / "golden", case)]
            assert hashes == {digest(case, *given)}, name


def test_the_suite_of_trees_reaches_large_batches_and_names_no_case_twice():
    suite = cases.SUITES["trees"]
    names = [case.id for case in suite]
    assert len(set(names)) == len(names)
    for kind in (Builder, Logits):
        assert {case.batch for case in suite if isinstance(case, kind)} == {1, 8, 64, 128, 256}
    assert all(cases.GPU in case.arms for case in suite)
    assert dataclasses.asdict(Logits(64)).keys() == {"budget", "batch", "depth_limit", "vocab"}


def test_the_benchmarks_measure_the_gpu_in_replays_of_a_graph(ops, tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "harness.tests.host_gpu", "--benchmark-only"]
    chosen = "gpu and (accept and 16 or compact and 4 and not 61 or topk and 4096 or tree and 16 and not 163840)"
    rows_file = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [*command, "harness/benchmarks", "-k", chosen, f"--benchmark-rows={rows_file}"],
        cwd=CHECKOUT,
        env={**plain_environment(), FLAG: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = {row.case: row for row in records.read(rows_file) if row.arm == "gpu"}
    assert rows.keys() == {"bench/accept/b16", "bench/compact/layers4", "bench/topk/v4096", "bench/tree/b16"}
    for row in rows.values():
        assert row.status == "OK"
        assert row.timing is not None
        assert (row.timing.method, row.timing.launch, row.timing.l2) == ("graph", "graph", "warm")
        assert (len(row.timing.samples_s), row.timing.warmups) == (20, 3)


@pytest.mark.skipif(heap_tree.compiler() is None, reason="no C++ compiler")
def test_a_batch_larger_than_the_recording_repeats_its_lists(lists):
    lp, _ = builders.load_lists(lists, Builder(8, 16, batch=64))
    assert len(lp) == 64
