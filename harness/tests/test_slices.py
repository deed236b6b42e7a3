"""Slices on the host library, with a tiny model in the place of a big one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.abi import EngineError, Library
from engine.engine import Engine
from engine.generation import Generation
from engine.run import Run
from engine.tests.backends import open_ops
from engine.tests.decoding import micro_target
from harness import cases, cli, records, slice_cost, slices
from harness.cases import Slice, SliceCost
from harness.exactness_groups import random_target
from harness.gpu_builders import NoGpuError
from harness.gpu_decoder import EngineDecoder
from harness.records import Row
from harness.slices import CONFIGS, lists_along, pass_bytes
from harness.systems import Systems
from harness.timing import WallClock

CASE = Slice("tiny", layers=3, rows=(1, 4), budgets=(3,), prefix=5)
ARMS = ["gpu-ar", "gpu-ddtree-b3", "gpu-n1", "gpu-n4"]


@pytest.fixture(scope="module")
def library() -> Library:
    return open_ops("host").library


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cases.SUITES, "slice", (CASE,))
    monkeypatch.setattr(slices, "CONFIGS", {"tiny": micro_target(q_lora_rank=6).to_dict()})
    monkeypatch.setattr(slices, "TOKENS", 6)
    monkeypatch.setattr(slices, "SAMPLES", 2)
    monkeypatch.setattr(slices, "COPIED", 2**26)


def run(folder: Path, library: Library | None, *more: str) -> tuple[int, list[Row]]:
    def opened(models: Path, missing: str | None) -> EngineDecoder:
        if library is None:
            raise NoGpuError("the driver is asleep")
        return EngineDecoder(models, library)

    code = cli.main(["run", "--suite", "slice", "--out", str(folder), *more], Systems(engine=opened))
    return code, records.read(folder / "rows.jsonl")


def test_decodings_and_passes_stand_beside_their_roofline_and_experts(library, tmp_path, capsys):
    code, rows = run(tmp_path, library)
    said = " ".join((tmp_path / "report.md").read_text().split())
    assert code == 0
    assert [row.arm for row in rows] == ARMS
    assert {row.case_hash for row in rows} == {slices.hash_of(CASE, 0)}
    for row in rows:
        assert row.status == "OK", row.reason
        assert row.parity is not None
        assert (row.parity.against, row.parity.differences) == ("ar", 0)
        assert row.timing is not None
        assert len(row.timing.samples_s) == 2
    plain, tree, one, four = rows
    assert plain.metrics["tokens"] == tree.metrics["tokens"] == 6
    assert (tree.metrics["tau"] or 0) > 1
    assert (tree.metrics["loop_efficiency"] or 0) > 0
    assert plain.parity is not None
    assert plain.parity.compared == 7
    assert (plain.metrics["roofline_share"] or 0) > 0
    assert one.metrics["experts_per_layer"] == 2
    assert 2 <= (four.metrics["experts_per_layer"] or 0) <= 4
    assert four.parity is not None
    assert four.parity.compared > 2
    assert four.against == "gpu-n1"
    assert "experts" in said
    assert "of the memory's roofline" in said
    assert run(tmp_path, library, "--resume") == (0, rows)


def test_what_exactness_costs_is_told_against_the_other_products(library, tmp_path, monkeypatch):
    """With the own products in the place of cuBLAS's, which the host has not."""
    given: list[str] = []

    def opened(device: Any, case: Slice, seed: int, gemm: str) -> Engine:
        given.append(gemm)
        return slices.opened(device, case, seed)

    monkeypatch.setattr(slice_cost, "opened", opened)
    case = SliceCost("tiny", layers=3, rows=(1, 4), budgets=(3,), prefix=5)
    monkeypatch.setitem(cases.SUITES, "slice", (case,))
    code, rows = run(tmp_path, library)
    assert code == 0
    assert given == ["row_invariant", "cublas"]
    assert [row.arm for row in rows] == [f"gpu-{of}{work}" for work in ("ar", "n1", "n4") for of in ("", "cublas-")]
    for row in rows:
        assert row.status == "OK", row.reason
        assert row.metrics["rows_differ"] == 0
        assert (row.metrics["rows_compared"] or 0) >= (7 if row.arm.endswith("ar") else 2)
        exact = row.params["gemm"] == "row_invariant"
        assert (row.parity is not None) == exact
        assert row.against == (row.arm.replace("gpu-", "gpu-cublas-") if exact else None)
    assert "times as fast" in (tmp_path / "report.md").read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASE, SliceCost("tiny", layers=2, rows=(1, 17), budgets=(16,), prefix=300)])
def test_a_small_model_on_the_gpu(tmp_path, monkeypatch, case):
    monkeypatch.setattr(slices, "CONFIGS", {"tiny": random_target(64)})
    monkeypatch.setitem(cases.SUITES, "slice", (case,))
    assert cli.main(["run", "--suite", "slice", "--out", str(tmp_path)]) == 0
    rows = records.read(tmp_path / "rows.jsonl")
    assert {row.status for row in rows} == {"OK"}
    assert {row.timing.launch for row in rows if row.timing} == {"eager" if isinstance(case, SliceCost) else "graph"}


def test_one_bit_makes_a_row_invalid(library, tmp_path, monkeypatch):
    sound = Run.generation

    def faulty(self: Run, request: int) -> Generation:
        made = sound(self, request)
        if made.logits is not None and made.rounds[0].nodes:
            made.logits[-1, 2:3] = np.nextafter(made.logits[-1, 2:3], np.float32(np.inf))
        return made

    monkeypatch.setattr(Run, "generation", faulty)
    code, rows = run(tmp_path, library)
    assert code == 1
    assert {row.arm for row in rows if row.status == "INVALID"} == {"gpu-ddtree-b3", "gpu-n4"}
    assert "parity with ar: logits of 'gpu-n4' differ" in str(rows[-1].reason)


def test_another_seed_is_another_model_whose_rows_are_not_compared():
    assert slices.hash_of(CASE, 0) == slices.hash_of(CASE, 0) != slices.hash_of(CASE, 1)


def test_a_gpu_without_cupy_has_no_roofline(library, monkeypatch):
    """What a copy on the host takes says nothing of the memory of a GPU."""
    assert (slices.copy_bandwidth(library, None, WallClock()) or 0) > 0
    monkeypatch.setattr(Library, "architectures", "90")
    assert slices.copy_bandwidth(library, None, WallClock()) is None


def test_without_a_gpu_or_memory_one_row_says_why(library, tmp_path, monkeypatch):
    code, (row,) = run(tmp_path / "none", None)
    assert (code, row.status, row.reason) == (3, "NOT_RUN", "the driver is asleep")

    def load(*_: Any, **__: Any) -> Engine:
        raise EngineError("cudaMalloc: out of memory")

    monkeypatch.setattr(Engine, "load", load)
    code, (row,) = run(tmp_path / "full", library)
    assert (code, row.status, row.reason) == (3, "NOT_RUN", "cudaMalloc: out of memory")


def test_the_bytes_of_a_pass():
    """By hand, of a model whose sizes are all different."""
    config = {
        "hidden_size": 2,
        "num_attention_heads": 3,
        "kv_lora_rank": 5,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 7,
        "v_head_dim": 11,
        "q_lora_rank": 13,
        "moe_intermediate_size": 17,
        "intermediate_size": 19,
        "num_hidden_layers": 2,
        "n_shared_experts": 1,
        "n_routed_experts": 23,
        "vocab_size": 29,
    }
    attention = 2 * 13 + 2 * (5 + 4) + 13 * 3 * (7 + 4) + 3 * 5 * (7 + 11) + 3 * 11 * 2
    dense, expert = 3 * 2 * 19, 3 * 2 * 17
    weights = 2 * attention + dense + (6 + 1) * expert + 2 * 29 + 2 * 3
    cache = 2 * 10 * (5 + 4)
    assert pass_bytes(config, 3, [6], 10, 2) == 2 * (weights + cache) + 4 * 23 * 2


def test_lists_put_first_what_follows():
    ids, lp = lists_along(range(100, 140), 1000)
    assert ids.shape == lp.shape == (7, 64)
    assert ids[:, 0].tolist() == list(range(101, 108))
    assert all(len(set(row)) == 64 for row in ids.tolist())
    assert (np.diff(lp, axis=1) < 0).all()


def test_the_published_model_is_whole():
    """A slice of it is a config that the reference reads, too."""
    from reference.config import ModelConfig

    config = ModelConfig.from_dict({**CONFIGS["kimi-k2"], "num_hidden_layers": 2})
    assert (config.num_attention_heads, config.n_routed_experts) == (64, 384)
