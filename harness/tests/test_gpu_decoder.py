"""The native engine among the decoders, with the host library in the GPU's place: its rows, its faults, its absence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets.evaluation import pair, prompts
from engine import build
from engine.abi import Library, SizeError
from engine.run import Run
from engine.tests.backends import open_ops
from engine.toolkit import ToolkitError
from harness import cases, cli, gpu_decoder, records
from harness.cases import AR, CHAIN, Arm, Decode
from harness.environment import CHECKOUT
from harness.gpu_builders import NoGpuError
from harness.gpu_decoder import EngineDecoder, open_decoder
from harness.records import Row
from harness.systems import ReferenceDecoder, Systems
from harness.tests.pairs import write_pair
from reference.loop import Generation, Options
from reference.sampling import SamplingParams

CASE = Decode("humaneval", 3, budgets=(3,), prompts=2, max_new_tokens=4, staged=("ar", "ddtree-b3"))
NATIVE = {"gpu-ar": "ar", "gpu-chain": "chain", "gpu-ddtree-b3": "ddtree-b3"}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One short case with short prompts."""
    monkeypatch.setitem(cases.SUITES, "quick", (CASE,))
    monkeypatch.setattr(
        prompts, "subset", lambda found, count: [dataclasses.replace(p, tokens=p.tokens[:6]) for p in found[:count]]
    )


@pytest.fixture(scope="module")
def library() -> Library:
    return open_ops("host").library


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


def run(
    folder: Path, models: Path, engine: Callable[..., Any], chosen: str = "decode", *more: str
) -> tuple[int, dict[tuple[str, str], Row]]:
    """(exit status, rows by block and arm, those of looping outputs in place of the others)."""
    arguments = ("run", "-k", chosen, "--out", str(folder), "--models", str(models), *more)
    code = cli.main(arguments, Systems(engine=engine))
    rows = records.read(folder / "rows.jsonl")
    return code, {(row.block, row.arm): row for row in rows if "loop" not in str(row.reason)}


def test_the_engines_rows_stand_beside_the_references_with_its_tokens(library, models, tmp_path, capsys):
    code, rows = run(tmp_path, models, lambda folder, missing: EngineDecoder(folder, library, prefill_rows=6))
    said = capsys.readouterr().out
    assert code == 0
    assert {arm for block, arm in rows if block == "decode"} == {*NATIVE, *NATIVE.values()}
    for arm, theirs in NATIVE.items():
        row, other = rows["decode", arm], rows["decode", theirs]
        assert row.status == "OK", row.reason
        assert row.case_hash == other.case_hash
        assert (row.params["system"], other.params["system"]) == ("engine", "reference")
        assert row.against == (None if arm == "gpu-ar" else "gpu-ar")
        assert row.parity is not None
        assert (row.parity.against, row.parity.differences) == ("ar", 0)
        assert row.timing is not None
        assert (row.timing.method, row.timing.launch, row.timing.sample) == ("wall", "eager", "prompt")
        assert len(row.timing.samples_s) == row.metrics["prompts"] == CASE.prompts
        for name in ("tau", "tokens", "rounds", "nodes_per_round"):
            assert row.metrics[name] == other.metrics[name]
        assert row.depth_histogram == other.depth_histogram
        assert (row.metrics["draft_s"], "runs of their own" in row.nulls["metrics.draft_s"]) == (None, True)
    assert {arm for block, arm in rows if block == "stage"} == {"ar", "ddtree-b3", "gpu-ar", "gpu-ddtree-b3"}
    for arm in ("gpu-ar", "gpu-ddtree-b3"):
        stages = rows["stage", arm].stages
        assert stages is not None
        assert list(stages) == ["draft", "tree_build", "verify", "commit", "other"]
        assert rows["stage", arm].status == "OK", rows["stage", arm].reason
    assert "system engine, wall clock, eager launches" in " ".join(said.split())
    code, again = run(tmp_path, models, lambda folder, missing: Forbidden(folder, library), "decode", "--resume")
    assert code == 0
    assert again == rows


def test_the_engine_alone_is_held_against_the_reference_too(library, models, tmp_path, monkeypatch):
    monkeypatch.setitem(cases.SUITES, "quick", (dataclasses.replace(CASE, prompts=1, staged=()),))
    code, rows = run(tmp_path, models, lambda folder, missing: EngineDecoder(folder, library, prefill_rows=6), "gpu")
    assert code == 0
    assert {arm for _, arm in rows} == set(NATIVE)
    assert all(row.parity is not None and row.parity.against == "ar" for row in rows.values())


class Forbidden(EngineDecoder):
    def decode(self, *_: Any, **__: Any) -> Generation:
        raise AssertionError("this was measured already")


class Wrong(EngineDecoder):
    """Its chain ends with another token; its trees fail."""

    def decode(self, arm: Arm, prompt: Any, block_size: int, options: Options, **more: Any) -> Generation:
        if arm.method == "ddtree":
            raise SizeError("kdtree_run_create: no room")
        made = super().decode(arm, prompt, block_size, options, **more)
        if arm.method == "chain":
            made = dataclasses.replace(made, tokens=(*made.tokens[:-1], made.tokens[-1] ^ 1))
        return made


def test_a_wrong_token_makes_its_row_invalid_with_its_margin_and_a_failure_its_own(library, models, tmp_path):
    code, rows = run(tmp_path, models, lambda folder, missing: Wrong(folder, library, prefill_rows=6))
    assert code == 1
    found = {arm: row for (block, arm), row in rows.items() if block == "decode"}
    assert {arm for arm, row in found.items() if row.status == "INVALID"} == {"gpu-chain", "gpu-ddtree-b3"}
    chain = found["gpu-chain"]
    assert chain.parity is not None
    first = chain.parity.first_difference
    assert first is not None
    assert (first.what, first.index, int(first.actual or 0)) == ("tokens", 3, int(first.expected or 0) ^ 1)
    assert first.margin is not None
    assert first.margin > 1e-5
    assert chain.parity.reproduce is not None
    assert (tmp_path / chain.parity.reproduce).is_file()
    assert "SizeError in turn 0: kdtree_run_create: no room" in str(found["gpu-ddtree-b3"].reason)


def test_without_a_gpu_one_row_says_why(models, tmp_path):
    def opened(folder: Path, missing: str | None) -> EngineDecoder:
        raise NoGpuError("the driver is asleep")

    code, rows = run(tmp_path, models, opened)
    assert code == 0
    row = rows["decode", "gpu"]
    assert (row.status, row.reason) == ("NOT_RUN", "the driver is asleep")
    assert row.case_hash == rows["decode", "ar"].case_hash
    assert not set(NATIVE) & {arm for _, arm in rows}


def test_plain_decoding_that_failed_leaves_nothing_to_hold_the_engine_against(library, models, tmp_path):
    class Broken(ReferenceDecoder):
        def decode(self, arm: Arm, *others: Any) -> Generation:
            raise RuntimeError("broken")

    systems = Systems(decoder=Broken, engine=lambda folder, missing: EngineDecoder(folder, library))
    code = cli.main(["run", "--out", str(tmp_path), "--models", str(models)], systems)
    assert code == 1
    rows = {row.arm: row for row in records.read(tmp_path / "rows.jsonl")}
    assert (rows["gpu"].status, rows["gpu"].reason) == ("NOT_RUN", "plain decoding by the reference failed")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ToolkitError("no nvcc\nanywhere"), "the engine cannot be used: ToolkitError: no nvcc"),
        (SizeError(""), "the engine cannot be used: SizeError: "),
    ],
)
def test_why_the_engine_cannot_be_opened(monkeypatch, models, library, error, said):
    def library_of(kind: str) -> Path:
        assert kind == "cuda"
        raise error

    monkeypatch.setattr(build, "library", library_of)
    with pytest.raises(NoGpuError, match=said):
        open_decoder(models, None)
    with pytest.raises(NoGpuError, match=r"^no driver$"):
        open_decoder(models, "no driver")

    monkeypatch.setattr(build, "library", lambda kind: library.path)
    monkeypatch.setattr(Library, "device", lambda self, number: Card())
    with pytest.raises(NoGpuError, match="it was built for host, not for Old"):
        open_decoder(models, None)


class Card:
    usable, name = 0, b"Old"


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, 9, 0.75, 2**63 + 1)])
def test_a_generation_is_the_references_field_for_field(library, models, sampling, monkeypatch):
    """Engines are made anew where one is too small, and kept where not."""
    monkeypatch.setattr(gpu_decoder, "BUDGET", 2)
    engine, reference = EngineDecoder(models, library, prefill_rows=6), ReferenceDecoder(pair.load(models))
    prompt = prompts.load("humaneval")[0].tokens[:6]
    options: Options = {"max_new_tokens": 3, "sampling": sampling, "stop_tokens": {3}}
    for arm, block_size in ((AR, 4), (CHAIN, 4), (Arm("ddtree", 3), 4), (Arm("ddtree", 1), 2)):
        ours, theirs = (d.decode(arm, prompt, block_size, options) for d in (engine, reference))
        for name in ("tokens", "finish_reason", "cache_length", "tau"):
            assert getattr(ours, name) == getattr(theirs, name)
        for one, other in zip(ours.rounds, theirs.rounds, strict=True):
            for name in ("prefix_length", "nodes", "depth_limit", "path", "ranks"):
                assert getattr(one, name) == getattr(other, name)
            assert one.trace is not None
            assert other.trace is not None
            np.testing.assert_array_equal(one.trace.tree.tokens, other.trace.tree.tokens)
            np.testing.assert_array_equal(one.trace.choices, other.trace.choices)
            assert one.trace.bonus == other.trace.bonus


def test_a_decoding_whose_graph_had_to_be_captured_is_made_again(library, models, monkeypatch):
    counts = iter((1, 3, 3))
    monkeypatch.setattr(Run, "replayed", property(lambda self: next(counts)))
    decoder = EngineDecoder(models, library, prefill_rows=6)
    assert decoder.launch == "eager"
    decoder.launch = "graph"
    made = decoder.decode(AR, prompts.load("humaneval")[0].tokens[:6], 4, {"max_new_tokens": 3})
    assert len(made.rounds) == 3
    assert list(counts) == [3]


@pytest.mark.gpu
def test_the_shipped_pair_on_the_gpu(tmp_path, monkeypatch):
    monkeypatch.undo()
    case = dataclasses.replace(CASE, block_size=8, budgets=(7, 64), max_new_tokens=24)
    monkeypatch.setitem(cases.SUITES, "quick", (case,))
    code = cli.main(["run", "--out", str(tmp_path), "--models", str(CHECKOUT / "datasets" / "models")])
    assert code == 0
    rows = [row for row in records.read(tmp_path / "rows.jsonl") if row.arm.startswith("gpu")]
    assert {row.arm for row in rows} == {"gpu-ar", "gpu-chain", "gpu-ddtree-b7", "gpu-ddtree-b64"}
    assert all(row.status == "OK" or "loop" in str(row.reason) for row in rows)
