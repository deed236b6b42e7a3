"""Attention and its peers on the host library: truth, bits, and what becomes of arms that are wrong or absent."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from engine.tests.backends import open_ops
from harness import attention, attention_peers, cases, cli, records
from harness.attention import Rates
from harness.attention_engine import EngineAttention
from harness.attention_input import RANK, SCALE, Input, Tree, Truth, check_values, narrow, widen
from harness.attention_peers import NAMES, NoPeerError, Peers
from harness.cases import Attention
from harness.curve import made_up_lists
from harness.details import details
from harness.gpu_builders import NoGpuError
from harness.plots import figures
from harness.records import Row
from harness.systems import Systems
from harness.tables import Measured
from harness.tests.examples import make_row
from harness.tests.host_gpu import HostGpu
from harness.tests.runs import timed
from reference.tree import build_tree

CASE = Attention(40, heads=16, batch=2, rows=(1, 4))
OURS = ("gpu-portable", "gpu-float32")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cases.SUITES, "attention", (CASE,))
    monkeypatch.setattr(attention, "SAMPLES", 2)
    monkeypatch.setattr(attention, "CALLS", 1)
    monkeypatch.setattr(attention, "KEYS", 1)
    monkeypatch.setattr("harness.attention_input.ROTATED", 2**17)
    monkeypatch.setattr("harness.slices.COPIED", 2**26)


def host(fault: Callable[..., object] = lambda _: None) -> HostGpu:
    return HostGpu(open_ops("host"), fault)


def run(folder: Path, gpu: HostGpu | None, *more: str) -> tuple[int, dict[str, Row]]:
    def opened(missing: str | None) -> HostGpu:
        if gpu is None:
            raise NoGpuError("the driver is asleep")
        return gpu

    code = cli.main(["run", "--suite", "attention", "--out", str(folder), *more], Systems(gpu=opened))
    return code, {row.arm: row for row in records.read(folder / "rows.jsonl")}


def test_the_engines_rows_are_true_and_those_of_others_say_what_is_missing(tmp_path):
    code, rows = run(tmp_path, host())
    said = " ".join((tmp_path / "report.md").read_text().split())
    assert code == 0
    assert set(rows) == set(CASE.arms)
    for n in (1, 4):
        for system in OURS:
            row = rows[f"{system}-n{n}"]
            assert row.status == "OK", row.reason
            assert row.against is None
            assert row.parity is not None
            assert row.parity.compared > 2 * n * 16 * RANK
            assert row.timing is not None
            assert (row.timing.l2, row.timing.launch, len(row.timing.samples_s)) == ("flushed", "graph", 2)
            assert 0 < (row.metrics["error"] or 0) < 2**-7
            assert row.metrics["roofline_share"] is None
            assert row.params["rows"] == n
        assert rows[f"gpu-wgmma-n{n}"].status == "NOT_RUN"
        assert "no wgmma here" in (rows[f"gpu-wgmma-n{n}"].reason or "")
        for system in NAMES:
            assert rows[f"{system}-n{n}"].status == "NOT_RUN"
            reason = rows[f"{system}-n{n}"].reason or ""
            assert "is not installed" in reason or "no PyTorch on a GPU" in reason
    assert (rows["gpu-float32-n4"].metrics["error"] or 1) < 2**-18
    assert "| mma.sync |" in said
    assert "FlashMLA, FlashMLA + tree, two products, SDPA: not run" in said
    again, resumed = run(tmp_path, host(), "--resume", "-k", "portable or float32")
    assert (again, resumed) == (0, rows)


def test_without_a_gpu_one_row_says_why(tmp_path):
    code, rows = run(tmp_path, None)
    assert (code, [(arm, row.status, row.reason) for arm, row in rows.items()]) == (
        3,
        [("gpu", "NOT_RUN", "the driver is asleep")],
    )


def test_without_memory_one_row_says_why(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise MemoryError("out of memory allocating 9 bytes")

    monkeypatch.setattr(attention, "Truth", full)
    code, rows = run(tmp_path, host())
    assert (code, rows["gpu"].status, rows["gpu"].reason) == (3, "NOT_RUN", "out of memory allocating 9 bytes")


def test_the_roofline_is_the_slower_of_copies_and_products():
    rates = Rates(4e12, 8e14)
    assert rates.seconds(8e14, 4e11) == (1.0, None)
    assert rates.seconds(8e13, 4e12) == (1.0, None)
    for unknown in (Rates(None, 8e14), Rates(4e12, None)):
        seconds, why = unknown.seconds(1.0, 1.0)
        assert seconds is None
        assert why


def test_values_that_are_wrong_show_no_time(tmp_path):
    def fault(written: Any) -> None:
        written[0][-1, -1, -1] = written[0][0, 0, 0]

    code, rows = run(tmp_path, host(fault), "-k", "portable")
    assert code == 1
    row = rows["gpu-portable-n4"]
    assert row.status == "INVALID"
    assert "request 1, row 3, head 15" in (row.reason or "")
    lines = [line.split("|") for line in (tmp_path / "report.md").read_text().splitlines() if "| mma.sync" in line]
    assert [[line[i].strip() for i in (2, 4, 9)] for line in lines] == [[n, "INVALID", "INVALID"] for n in ("1", "4")]


def test_one_bit_is_enough(tmp_path):
    def fault(written: Any) -> None:
        written[0][0, 0, 0, 7] ^= 1

    code, rows = run(tmp_path, host(fault), "-k", "portable-n4")
    assert code == 1
    assert "attention bits of '4 rows among 4' differ at index 7" in (rows["gpu-portable-n4"].reason or "")


def test_a_row_that_sees_another_branch_is_found(tmp_path, monkeypatch):
    """Of a chain each row sees all before it."""
    right = EngineAttention._run

    def chain(self: Any, ops: Any, q: Any, cache: Any, sizes: Any, paths: Any, longest: int, out: Any) -> None:
        counts, prefixes, positions = sizes
        if paths is not None:
            positions = np.tile(CASE.prefix + np.arange(q.shape[1], dtype=np.int32), (CASE.batch, 1))
        right(self, ops, q, cache, (counts, prefixes, positions), None, longest, out)

    monkeypatch.setattr(EngineAttention, "_run", chain)
    code, rows = run(tmp_path, host(), "-k", "portable")
    assert code == 1
    assert rows["gpu-portable-n1"].status == "INVALID"  # its bits are those of a node of the larger tree
    assert "attention's error of '4 rows" in (rows["gpu-portable-n4"].reason or "")


@pytest.mark.parametrize(("what", "unit"), [("_single", "by plain decoding"), ("_attend", "among NaN")])
def test_bits_of_single_rows_and_of_rows_among_garbage_count(monkeypatch, what, unit):
    arm = EngineAttention(Input(host(), CASE, 0), "bfloat16", "portable", 1)
    whole = arm._whole
    assert [check.difference for check in arm.checks(4, whole)] == [None] * 5
    right = getattr(EngineAttention, what)

    def wrong(self: Any, *given: Any) -> Any:
        made = right(self, *given)
        made[-1, -1, -1, -1] ^= 1
        return made

    arm = EngineAttention(Input(host(), CASE, 0), "bfloat16", "portable", 1)
    assert arm._whole is not None
    monkeypatch.setattr(EngineAttention, what, wrong)
    bad = [check.unit for check in arm.checks(4, whole) if check.difference is not None]
    assert bad
    assert all(unit in name for name in bad)


def test_trees_of_fewer_rows_begin_the_larger_ones():
    large = Tree.of(33)
    for rows in (1, 2, 9, 33):
        np.testing.assert_array_equal(large.mask(rows), large.mask(33)[:rows, :rows])
    ids, lp = made_up_lists(7, 32)
    np.testing.assert_array_equal(large.mask(33), build_tree(lp, ids, 32).visibility())


@pytest.mark.parametrize("tree", [True, False])
def test_the_truth_is_the_softmax_over_all_keys_at_once(monkeypatch, tree):
    monkeypatch.setattr("harness.attention_input.CHUNK", 16)
    given = Input(host(), CASE, 3)
    keys = widen(np, given.caches[0, 1, : CASE.prefix + 3]).astype(np.float64)
    q = widen(np, given.q[1, :3]).astype(np.float64)
    scores = SCALE * np.einsum("nhd,kd->nhk", q, keys)
    if tree:
        scores[:, :, CASE.prefix :][np.broadcast_to(~given.tree.mask(3)[:, None], (3, 16, 3))] = -np.inf
    weights = np.exp(scores)
    wanted = np.einsum("nhk,kd->nhd", weights / weights.sum(axis=2, keepdims=True), keys[:, :RANK])
    truth = Truth(given)
    np.testing.assert_allclose(truth.values(1, 3, tree=tree), wanted.reshape(-1, RANK), rtol=1e-12, atol=1e-14)
    found = narrow(np, np.stack([truth.values(r, 3, tree=tree).reshape(3, 16, RANK) for r in (0, 1)]))
    check, error = check_values("rows", given, truth, found, tree=tree, allowed=2**-8)
    assert check.difference is None
    assert error > 0
    found[1, 2, 5, 0] = 0x7FC1
    check, error = check_values("rows", given, truth, found, tree=tree, allowed=2**-8)
    assert check.difference is not None
    assert (error, check.difference.index) == (np.inf, 2 * 16 + 5)


def test_arms_that_write_out_their_scores_end_where_these_grow_large():
    whole = Attention(131_072)
    assert "unfused-n33" in whole.arms
    assert not {"unfused-n65", "sdpa-n8", "gpu-float32-n1"} & set(whole.arms)
    assert {"gpu-wgmma-n129", "flashmla-tree-n129"} < set(whole.arms)


def fake_flash_mla(torch: Any, calls: list[int]) -> ModuleType:
    """Its interface, on the CPU."""
    module = ModuleType("flash_mla")

    def attend(q, pages, table, lengths, width, schedule, softmax_scale, causal, use_legacy):
        assert (schedule, causal, use_legacy, table.dtype) == ("schedule", False, True, torch.int32)
        calls.append(int(lengths[0]))
        keys = pages[table.long()].flatten(1, 3)[:, : int(lengths[0])].double()
        scores = softmax_scale * torch.einsum("bnhd,bkd->bhnk", q.double(), keys)
        values = torch.einsum("bhnk,bkd->bnhd", torch.softmax(scores, -1), keys[..., :width])
        return values.to(q.dtype), torch.logsumexp(scores, -1).float()

    module.get_mla_metadata = lambda: ("schedule", None)  # type: ignore[attr-defined]
    module.flash_mla_with_kvcache = attend  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("name", NAMES)
def test_peers_find_the_truth(monkeypatch, name):
    """On the CPU, with FlashMLA's interface in the place of its kernel."""
    torch = pytest.importorskip("torch")
    calls: list[int] = []
    monkeypatch.setitem(sys.modules, "flash_mla", fake_flash_mla(torch, calls))
    monkeypatch.setattr(attention_peers, "missing", lambda _: None)
    given = Input(host(), CASE, 0)
    peers, truth = Peers(given, 1), Truth(given)
    for rows in (1, 4):
        found = peers.bits(peers.attend(name, rows)(peers.first_cache()))
        check, error = check_values("rows", given, truth, found, tree=name != "flashmla", allowed=2**-5)
        assert check.difference is None, check.difference
        assert error > 0
    prefixes = {"flashmla": [41, 44], "flashmla-tree": [40, 40]}
    assert calls == prefixes.get(name, [])
    with pytest.raises(NoPeerError, match="no PyTorch on a GPU"):
        peers.arm(name, 1)


def made_up(system: str, prefix: int, n: int, seconds: float, **change: Any) -> Row:
    fields: dict[str, Any] = {
        "block": "attention",
        "case": f"attention/heads64/batch1/prefix{prefix}/cold",
        "arm": f"{system}-n{n}",
        "against": None if system == "flashmla" else f"flashmla-n{n}",
        "params": {"heads": 64, "batch": 1, "prefix": prefix, "attention": system, "rows": n, "software": "FlashMLA 1"},
        "metrics": {"tflop_per_s": 410.0, "gb_per_s": 77.0, "roofline_share": 0.52, "error": 0.002},
        "timing": timed(seconds, method="graph", sample="repeat", launch="graph", l2="flushed"),
    }
    return make_row(**{**fields, **change})


def test_the_table_sets_every_row_beside_flashmla_and_the_plots_show_both():
    rows = [
        made_up(system, prefix, n, seconds * n)
        for prefix in (1024, 8192)
        for n in (8, 1, 17, 33)
        for system, seconds in (("flashmla", 2e-5), ("gpu-wgmma", 1e-5), ("unfused", 4e-5))
    ]
    measured = Measured([*rows, made_up("gpu-wgmma", 32_768, 1, 1e-5)])
    section = next(part for part in details(measured) if part.title.startswith("Verify attention"))
    (table,) = section.tables
    assert table.heading == "heads 64, CUDA events, CUDA graph, flushed L2"
    cells = [line.cells for line in table.lines]
    assert [(c[0], c[1]) for c in cells[:4]] == [("1024", "1")] * 3 + [("1024", "8")]
    assert cells[1] == ("1024", "1", "wgmma", "10.0", "410", "77.0", "52.0", "2.00", "OK")
    assert [c[7] for c in cells[:3]] == ["-", "2.00", "0.500"]
    assert cells[-1][7] == "-"
    assert "FlashMLA, wgmma, two products: FlashMLA 1" in table.notes
    drawn = [figure for figure in figures(measured) if "Verify attention" in figure.title]
    assert [figure.title for figure in drawn] == [f"Verify attention over {n} cached rows" for n in (1024, 8192)]
    for figure in drawn:
        assert "FlashMLA: " in figure.svg
        assert "wgmma: 330" in figure.svg
        assert "two products" not in figure.svg


@pytest.mark.gpu
def test_every_arm_that_is_installed_on_the_gpu(tmp_path, monkeypatch):
    case = Attention(1000, batch=2, rows=(1, 5, 33))
    monkeypatch.setitem(cases.SUITES, "attention", (case,))
    code = cli.main(["run", "--suite", "attention", "--out", str(tmp_path)])
    rows = records.read(tmp_path / "rows.jsonl")
    assert code == 0
    for row in rows:
        assert row.status == (
            "NOT_RUN" if attention.absent(row.arm) or "no wgmma here" in (row.reason or "") else "OK"
        ), row.reason
    assert {row.arm for row in rows if row.status == "OK"} >= {"gpu-portable-n33", "gpu-float32-n5"}
