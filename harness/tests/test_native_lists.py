"""Replays and verify curves of the native engine, with the host library in the GPU's place: rows, faults, absence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets.evaluation import pair, prompts
from engine.abi import Library, SizeError
from engine.tests.backends import open_ops
from harness import cases, cli, curve, details, records
from harness.cases import Arm, Case, NativeCurve, Replay
from harness.environment import CHECKOUT
from harness.gpu_builders import NoGpuError
from harness.gpu_decoder import EngineDecoder, Lists
from harness.records import Row
from harness.replay import forced_script, recorded_script, tell
from harness.systems import Systems
from harness.tables import Measured
from harness.tests.pairs import VOCAB, write_lists, write_pair
from reference.drafter import ReplayDrafter
from reference.loop import Generation, Options, Round, ar_generate, ddtree_generate
from reference.tree import build_tree

FORCED = Replay("humaneval", block_size=3, budget=3, forced=1, repeats=1, max_new_tokens=4)
RECORDED = Replay("humaneval", budget=3, repeats=1, max_new_tokens=4)
SHORT = NativeCurve(rows=(1, 3, 4), prefix=3)


@pytest.fixture(scope="module")
def library() -> Library:
    return open_ops("host").library


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def lists(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lists(models, tmp_path_factory.mktemp("lists"))


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        prompts, "subset", lambda found, count: [dataclasses.replace(p, tokens=p.tokens[:6]) for p in found[:count]]
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, models: Path, lists: Path) -> Callable[..., Any]:
    """run(case, engine, *more) -> (exit status, rows by arm)."""

    def run(case: Case, engine: Callable[..., Any], *more: str) -> tuple[int, dict[str, Row]]:
        monkeypatch.setitem(cases.SUITES, "quick", (case,))
        places = ("--out", str(tmp_path), "--models", str(models), "--lists", str(lists))
        code = cli.main(["run", *places, *more], Systems(engine=engine))
        return code, {row.arm: row for row in records.read(tmp_path / "rows.jsonl")}

    return run


def opened(library: Library, kind: type[EngineDecoder] = EngineDecoder) -> Callable[..., EngineDecoder]:
    return lambda folder, missing: kind(folder, library, prefill_rows=6)


def absent(folder: Path, missing: str | None) -> EngineDecoder:
    raise NoGpuError("the driver is asleep")


# --- Replay


def test_a_forced_acceptance_is_what_the_engine_does(library, run):
    code, rows = run(FORCED, opened(library))
    assert code == 0
    assert set(rows) == {"ar", "ddtree-b3", "gpu-ar", "gpu-ddtree-b3"}
    ours, theirs = rows["gpu-ddtree-b3"], rows["ddtree-b3"]
    assert (ours.status, ours.reason) == ("OK", None)
    assert (ours.block, ours.against, ours.case_hash) == ("replay", "gpu-ar", theirs.case_hash)
    for name in ("tau", "rounds", "tokens"):
        assert ours.metrics[name] == theirs.metrics[name]
    assert ours.metrics["tau"] == 2.0
    assert rows["gpu-ar"].metrics["tau"] == 1.0
    assert (ours.params["system"], ours.params["acceptance"]) == ("engine", "forced: 1 nodes a round")
    assert ours.timing is not None
    assert (ours.timing.method, ours.timing.launch, len(ours.timing.samples_s)) == ("wall", "eager", 1)
    assert ours.parity is not None
    assert ours.parity.compared == 2 + 4  # rounds, tokens
    again = run(FORCED, opened(library, Forbidden), "--resume")
    assert again == (0, rows)


class Forbidden(EngineDecoder):
    def decode(self, *_: Any, **__: Any) -> Generation:
        raise AssertionError("this was measured already")

    def replay(self, *_: Any) -> Generation:
        raise AssertionError("this was measured already")

    def first_round(self, *_: Any) -> Round:
        raise AssertionError("this was measured already")


def test_recorded_rounds_are_replayed_by_the_engine_alone(library, run):
    code, rows = run(RECORDED, opened(library), "-k", "gpu")
    assert code == 0
    assert set(rows) == {"gpu-ar", "gpu-ddtree-b3"}
    assert [(row.status, row.reason) for row in rows.values()] == [("OK", None)] * 2


class Deaf(EngineDecoder):
    """It does not take the lists that it is given."""

    def replay(self, arm: Arm, prompt: Any, block_size: int, options: Options, lists: Lists) -> Generation:
        return self.decode(arm, prompt, block_size, options)


class Broken(EngineDecoder):
    def replay(self, *_: Any) -> Generation:
        raise SizeError("no room")

    def first_round(self, arm: Arm, *others: Any) -> Round:
        if arm.budget == 2:
            raise SizeError("no room")
        return super().first_round(arm, *others)


def test_another_acceptance_and_a_failure_are_told(library, run):
    code, rows = run(FORCED, opened(library, Deaf), "-k", "gpu")
    assert code == 1
    assert (rows["gpu-ar"].status, rows["gpu-ddtree-b3"].status) == ("OK", "INVALID")
    parity = rows["gpu-ddtree-b3"].parity
    assert parity is not None
    assert parity.first_difference is not None
    assert (parity.first_difference.what, parity.first_difference.expected) == ("accepted", 1)
    code, rows = run(FORCED, opened(library, Broken), "-k", "gpu")
    assert code == 1
    assert "SizeError in turn 0: no room" in str(rows["gpu-ddtree-b3"].reason)


@pytest.mark.parametrize("source", ["forced", "recorded"])
def test_a_told_script_accepts_what_the_script_accepts(models, lists, source):
    """Held against the reference's own loop with these lists."""
    held = pair.load(models)
    if source == "forced":
        script, budget, depths = forced_script(2, 3, VOCAB), 6, 3
    else:
        script, budget, depths = recorded_script(lists / "drafter_lists_b8_k128.kdtr", "humaneval", 6, VOCAB), 6, 7
    prompt = prompts.load("humaneval")[0].tokens[:6]
    text = ar_generate(held.target, None, prompt, max_new_tokens=40).tokens
    told = tell(script, len(prompt), text, budget, VOCAB)
    steps = [script[i % len(script)] for i in range(len(told.accepted))]
    assert list(told.accepted) == [len(step.said) - 1 for step in steps]
    assert len(told.accepted) > 2
    drafter = ReplayDrafter(told.lists, VOCAB, depths + 1)
    made = ddtree_generate(held.target, drafter, prompt, budget=budget, max_new_tokens=40 - depths - 2)
    assert made.tokens == text[: 40 - depths - 2]
    for number, done in enumerate(made.rounds):
        assert done.accepted == min(told.accepted[number], done.depth_limit)


def test_a_script_ends_with_its_text():
    script = forced_script(2, 3, 50)
    assert tell(script, 9, range(4), 6, 50).accepted == ()
    told = tell(script, 9, range(5), 6, 50)
    assert (told.accepted, list(told.lists)) == ((2,), [9])
    assert list(tell(script, 9, range(12), 6, 50).lists) == [9, 12, 15]


# --- Curve


def test_the_engine_verifies_n_rows_and_is_timed_in_that_stage_alone(library, run, tmp_path):
    code, rows = run(SHORT, opened(library))
    assert code == 0
    assert set(rows) == {"gpu-n1", "gpu-n3", "gpu-n4"}
    for n in SHORT.rows:
        row = rows[f"gpu-n{n}"]
        assert (row.status, row.reason) == ("OK", None)
        assert row.against == (None if n == 1 else "gpu-n1")
        assert row.params == {"rows": n, "prefix": 3, "system": "engine", "dtype": "float32"}
        assert row.parity is not None
        assert row.parity.compared == n
        assert row.timing is not None
        assert (row.timing.method, row.timing.launch, len(row.timing.samples_s)) == ("wall", "eager", 10)
    measured = Measured(rows.values())
    cost = details.verify_cost(measured, rows["gpu-n4"]).value
    assert cost is not None
    assert cost > 0
    assert "system engine" in (tmp_path / "report.md").read_text()
    assert run(SHORT, opened(library, Forbidden), "--resume") == (0, rows)


class Wrong(EngineDecoder):
    """Its trees of 3 nodes lack one; the choices of those of 2 nodes are off."""

    def first_round(self, arm: Arm, prompt: Any, block_size: int, options: Options, lists: Lists) -> Round:
        done = super().first_round(Arm("ddtree", min(arm.budget, 2)), prompt, block_size, options, lists)
        assert done.trace is not None
        if arm.budget == 2:
            done = dataclasses.replace(done, trace=dataclasses.replace(done.trace, choices=done.trace.choices ^ 1))
        return done


def test_wrong_choices_and_trees_of_another_size_are_no_measurement(library, run):
    code, rows = run(SHORT, opened(library, Wrong), "-k", "gpu")
    assert code == 1
    assert {arm: row.status for arm, row in rows.items()} == {"gpu-n1": "OK", "gpu-n3": "INVALID", "gpu-n4": "INVALID"}
    assert rows["gpu-n4"].reason == "3 rows were verified, 4 were asked for"
    parity = rows["gpu-n3"].parity
    assert parity is not None
    assert parity.first_difference is not None
    assert (parity.first_difference.what, parity.first_difference.index) == ("tokens", 0)
    code, rows = run(SHORT, opened(library, Broken), "-k", "gpu")
    assert code == 1
    assert "SizeError in turn 0: no room" in str(rows["gpu-n3"].reason)
    assert rows["gpu-n4"].status == "OK"


@pytest.mark.parametrize(("depths", "width"), [(7, 256), (7, 64), (1, 1), (3, 7)])
def test_made_up_lists_are_lists_with_full_trees(depths, width):
    ids, lp = curve.made_up_lists(depths, width)
    assert np.exp(lp.astype(np.float64)).sum(axis=1).max() < 1
    tree = build_tree(lp, ids, width)
    assert tree.node_count == width
    assert width < 8 or tree.depths.max() > 1


# --- Without a GPU


def test_without_a_gpu_one_row_says_why(run):
    code, rows = run(FORCED, absent)
    assert code == 0
    assert (rows["gpu"].status, rows["gpu"].reason) == ("NOT_RUN", "the driver is asleep")
    assert rows["gpu"].block == "replay"
    assert not any(arm.startswith("gpu-") for arm in rows)
    assert {row.case_hash for row in rows.values()} == {rows["gpu"].case_hash}


def test_a_plain_decoding_that_fails_is_told(library, run):
    class Silent(EngineDecoder):
        def decode(self, *_: Any, **__: Any) -> Generation:
            raise SizeError("no room")

    code, rows = run(FORCED, opened(library, Silent), "-k", "gpu")
    assert code == 1
    assert {(row.status, row.reason) for row in rows.values()} == {("INVALID", "plain decoding failed: no room")}
    assert set(rows) == {"gpu-ar", "gpu-ddtree-b3"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [Replay("humaneval", repeats=2), Replay("humaneval", forced=3, repeats=2), NativeCurve()]
)
def test_the_shipped_pair_on_the_gpu(tmp_path, monkeypatch, case):
    monkeypatch.undo()
    monkeypatch.setitem(cases.SUITES, "quick", (case,))
    models = str(CHECKOUT / "datasets" / "models")
    assert cli.main(["run", "-k", "gpu", "--out", str(tmp_path), "--models", models]) == 0
    rows = [row for row in records.read(tmp_path / "rows.jsonl") if row.arm.startswith("gpu")]
    assert [(row.status, row.reason) for row in rows] == [("OK", None)] * (9 if isinstance(case, NativeCurve) else 2)
