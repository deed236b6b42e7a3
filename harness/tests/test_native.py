"""Decodings and verify costs of the engine alone, in both number types, with the host library in the GPU's place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datasets.evaluation import pair, prompts
from datasets.evaluation.prompts import Prompt
from engine.abi import EngineError, Library
from engine.engine import Engine
from engine.tests.backends import open_ops
from engine.tests.decoding import VOCABULARY, micro_drafter, micro_target, write_model
from harness import cases, cli, native, parity, records
from harness.cases import AR, DTYPES, GPU, Arm, Native, NativeCurve
from harness.environment import CHECKOUT
from harness.gpu_builders import NoGpuError
from harness.gpu_decoder import EngineDecoder
from harness.records import Row
from harness.systems import Systems
from reference.loop import Generation, Options, Round
from reference.tests.models import random_weights

BASELINE = CHECKOUT / "reports" / "baseline"
CASES = tuple(
    Native("humaneval", 3, budgets=(3,), heaps=(3,), prompts=1, max_new_tokens=3, dtype=dtype) for dtype in DTYPES
)
POLICY = Native("humaneval", 3, budgets=(7,), prompts=2, max_new_tokens=8, policy=True)
ARMS = ("gpu-ar", "gpu-chain", "gpu-ddtree-b3", "gpu-ddtree-heap-b3")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short cases with short prompts, whose outputs, short as they are, do not count as looping."""
    curves = tuple(NativeCurve((1, 4), prefix=3, dtype=dtype) for dtype in DTYPES)
    monkeypatch.setitem(cases.SUITES, "engine", (*CASES, *curves))
    load = prompts.load

    def small(name: str) -> tuple[Prompt, ...]:
        found = load(name)[:3]
        return tuple(dataclasses.replace(p, tokens=tuple(t % VOCABULARY for t in p.tokens[:6])) for p in found)

    monkeypatch.setattr(prompts, "load", small)
    monkeypatch.setattr("harness.runners.distinct_ratio", lambda tokens: 1.0)


@pytest.fixture(scope="module")
def library() -> Library:
    return open_ops("host").library


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    for name, config in (("target", micro_target()), ("drafter", micro_drafter())):
        write_model(folder / f"{name}.kdtr", config, random_weights(config))
    return folder


def run(folder: Path, models: Path, engine: Callable[..., Any], *more: str) -> tuple[int, list[Row]]:
    arguments = ("run", "--suite", "engine", "--out", str(folder), "--models", str(models), *more)
    return cli.main(arguments, Systems(engine=engine)), records.read(folder / "rows.jsonl")


def opened(library: Library, kind: type[EngineDecoder] = EngineDecoder) -> Callable[..., EngineDecoder]:
    return lambda folder, missing: kind(folder, library, prefill_rows=6)


def test_every_arm_is_held_against_the_engines_own_plain_decoding_in_its_type(library, models, tmp_path, capsys):
    code, rows = run(tmp_path, models, opened(library))
    said = capsys.readouterr().out
    assert code == 0
    decoded = {(row.params["dtype"], row.arm): row for row in rows if row.block == "decode"}
    assert list(decoded) == [(dtype, arm) for dtype in DTYPES for arm in ARMS]
    for (dtype, arm), row in decoded.items():
        assert row.status == "OK", row.reason
        assert row.case == f"decode/humaneval/block3/greedy/{dtype}"
        assert row.parity is not None
        assert row.parity.differences == 0
        assert row.against == (None if arm == "gpu-ar" else "gpu-ar")
        assert row.parity.against == ("one pass over the whole output" if arm == "gpu-ar" else "ar")
        for name in ("tau", "tokens_per_s", "draft_s", "verify_s", "loop_efficiency"):
            assert (row.metrics[name] or 0) > 0
    tokens = {dtype: decoded[dtype, "gpu-ddtree-b3"].metrics["tokens"] for dtype in DTYPES}
    assert set(tokens.values()) == {3}
    staged = [row for row in rows if row.block == "stage"]
    assert [(row.params["dtype"], row.arm) for row in staged] == [(d, a) for d in DTYPES for a in ARMS[:2]]
    assert all(list(row.stages or ()) == ["draft", "tree_build", "verify", "commit", "other"] for row in staged)
    curve = {(row.params["dtype"], row.params["rows"]): row for row in rows if row.block == "curve"}
    assert list(curve) == [(dtype, n) for dtype in DTYPES for n in (1, 4)]
    assert all(row.status == "OK" for row in curve.values()), [row.reason for row in curve.values()]
    said = " ".join(said.split())
    assert "dtype bfloat16" in said
    assert "| 3 heap |" in said
    assert "times as fast where the GPU builds the trees as where the host's C++ heap does." in said
    code, again = run(tmp_path, models, opened(library, Forbidden), "--resume")
    assert (code, again) == (0, rows)


def test_prompts_whose_output_loops_are_left_out_and_counted(library, models, tmp_path, monkeypatch):
    ratios = iter([0.5, 0.9, 0.5])
    monkeypatch.setattr("harness.native.runners.loops", lambda tokens: next(ratios) < 0.8)
    code, rows = run(tmp_path, models, opened(library), "-k", "decode and float32")
    assert code == 0
    decoded = [row for row in rows if row.block == "decode"]
    assert {(row.metrics["prompts"], row.metrics["looping_left_out"]) for row in decoded} == {(1, 1)}
    assert "1 prompts, 1 whose output loops were left out" in (tmp_path / "report.md").read_text()
    monkeypatch.setattr("harness.native.runners.loops", lambda tokens: True)
    code, rows = run(tmp_path / "none", models, opened(library), "-k", "decode and float32")
    assert code == 3
    assert {(row.status, row.reason) for row in rows} == {("NOT_RUN", "the outputs of all 3 prompts loop")}


def test_a_policy_tells_what_it_expected(library, models, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(cases.SUITES, "engine", (POLICY,))
    code, rows = run(tmp_path, models, opened(library))
    assert code == 0
    found = {row.arm: row for row in rows if row.block == "decode"}
    assert list(found) == ["gpu-ar", "gpu-chain", "gpu-ddtree-b7"]
    assert all(row.case == "decode/humaneval/block3/greedy/float32/policy" for row in found.values())
    assert "predicted_tokens" not in found["gpu-chain"].metrics
    tree = found["gpu-ddtree-b7"]
    assert tree.status == "OK", tree.reason
    for name in ("predicted_tokens", "round_tokens"):
        assert 1 <= (tree.metrics[name] or 0) <= 3
    for name in ("predicted_s", "round_s"):
        assert (tree.metrics[name] or 0) > 0
    assert "budgets by the policy" in " ".join(capsys.readouterr().out.split())
    assert "Budgets chosen by the policy" in (tmp_path / "report.md").read_text()


def test_costs_of_the_policy_are_those_of_rounds_with_so_many_rows():
    def decode(arm: Arm) -> Generation:
        rounds = tuple(
            Round(prefix_length=4, nodes=0, depth_limit=0, path=(0,), ranks=(), seconds={}, wall_seconds=seconds)
            for seconds in (arm.budget * 1e-3, arm.budget * 3e-3)
        )
        return Generation((1, 2), rounds, "length", 0.0, 6)

    assert native._costs(20, decode) == tuple((budget + 1, budget * 2e-3) for budget in (1, 3, 7, 15, 20))
    assert native._costs(1, decode) == ((2, 2e-3),)


class Forbidden(EngineDecoder):
    def _run(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("this was measured already")


class Wrong(EngineDecoder):
    """bf16 trees end with another token, and so does plain decoding in float32."""

    def decode(self, arm: Arm, prompt: Any, block_size: int, options: Options, **more: Any) -> Generation:
        made = super().decode(arm, prompt, block_size, options, **more)
        if (self.dtype, arm.method) in {("bfloat16", "ddtree"), ("float32", "ar")}:
            made = dataclasses.replace(made, tokens=(*made.tokens[:-1], made.tokens[-1] ^ 1))
        return made


def test_another_token_is_no_rounding(library, models, tmp_path):
    """In the trees no margin excuses it; in plain decoding the reference's does where it is small enough."""
    code, rows = run(tmp_path, models, opened(library, Wrong), "-k", "decode")
    assert code == 1
    bad = {(row.params["dtype"], row.arm): row for row in rows if row.status == "INVALID" and row.block == "decode"}
    assert {key for key in bad if key[0] == "bfloat16"} == {("bfloat16", arm) for arm in ARMS[2:]}
    assert "parity with one pass over the whole output" in str(bad["float32", "gpu-ar"].reason)
    assert {arm for dtype, arm in bad if dtype == "float32"} == set(ARMS)


def test_arms_are_chosen_by_name_and_plain_decoding_comes_along(library, models, tmp_path):
    code, rows = run(tmp_path, models, opened(library), "-k", "ddtree-b3 and bfloat16")
    assert code == 0
    assert [row.arm for row in rows if row.block == "decode"] == ["gpu-ar", "gpu-ddtree-b3"]


def test_without_a_gpu_one_row_of_each_case_says_why(models, tmp_path):
    def absent(folder: Path, missing: str | None) -> EngineDecoder:
        raise NoGpuError("the driver is asleep")

    code, rows = run(tmp_path, models, absent)
    assert code == 3
    assert [(row.block, row.arm) for row in rows] == 2 * [("decode", GPU)] + 2 * [("curve", GPU)]
    assert {(row.status, row.reason) for row in rows} == {("NOT_RUN", "the driver is asleep")}


def test_without_graphs_a_case_is_another_one_and_its_runs_are_eager(library, models, monkeypatch):
    given: list[bool] = []
    sound = Engine.run

    def run(self: Engine, *requests: Any, graphs: bool, **options: Any) -> Any:
        given.append(graphs)
        return sound(self, *requests, graphs=graphs, **options)

    monkeypatch.setattr(Engine, "run", run)
    monkeypatch.setattr(Library, "architectures", "90")
    assert Native("humaneval", graphs=False).id == "decode/humaneval/block8/greedy/float32/eager"
    replaying = EngineDecoder(models, library, prefill_rows=6)
    eager = replaying.of("float32", graphs=False)
    assert (replaying.launch, eager.launch) == ("graph", "eager")
    assert replaying.of("float32") is replaying
    eager.decode(AR, (1, 2), 3, {"max_new_tokens": 1})
    with pytest.raises(EngineError, match="0 of 1 rounds were replayed as a CUDA graph in run 3, all must be"):
        replaying.decode(AR, (1, 2), 3, {"max_new_tokens": 1})  # the host has none: its time is not that of graphs
    assert given == [False, True, True, True]


def test_the_heap_arm_takes_its_trees_from_the_heap(library, models, monkeypatch):
    given: list[tuple[str, str]] = []
    sound = Engine.run

    def run(self: Engine, requests: Any, method: Any, *, builder: str, **options: Any) -> Any:
        given.append((method, builder))
        return sound(self, requests, method, builder=builder, **options)

    monkeypatch.setattr(Engine, "run", run)
    decoder = EngineDecoder(models, library, prefill_rows=6)
    arms = Native("humaneval", budgets=(7,), heaps=(7,)).decodings
    assert [arm.name for arm in arms] == ["ar", "chain", "ddtree-b7", "ddtree-heap-b7"]
    made = [decoder.decode(arm, (1, 2), 3, {"max_new_tokens": 4}) for arm in arms]
    assert given == [("ar", "gpu"), ("chain", "gpu"), ("ddtree", "gpu"), ("ddtree", "heap")]
    assert len({each.tokens for each in made}) == 1


def test_stored_rows_of_decodings_keep_their_hashes(monkeypatch):
    """Arms beside the others, such as the heap's, are no other input: old rows are what they are held against."""
    stored = {row.case: row.case_hash for file in BASELINE.glob("gpu-*.jsonl") for row in records.read(file)}
    monkeypatch.undo()
    digest_of_pair = pair.load(CHECKOUT / "datasets" / "models").digest
    checked = [case for case in cases.SUITES["engine"] if isinstance(case, Native) and case.id in stored]
    for case in checked:
        pool = native.units(case, 0)
        assert (
            cases.digest(case, digest_of_pair, *(u.prompt.tokens for u in pool), *(0 for _ in pool)) == stored[case.id]
        )
    assert any(case.heaps for case in checked)
    plain = Native("humaneval")
    assert cases.digest(plain) == cases.digest(dataclasses.replace(plain, heaps=(64,)))
    assert cases.digest(plain) != cases.digest(dataclasses.replace(plain, budgets=(64,)))


def test_choices_that_differ_are_told_by_their_largest_margin():
    margins = (1.0, 0.2, 0.4, 3.0)
    assert parity.check_choices("x", [1, 2, 3, 4], [1, 2, 3, 4], margins, 0.5).difference is None
    near = parity.check_choices("x", [1, 2, 3, 4], [1, 9, 8, 4], margins, 0.5)
    assert near.near
    assert near.difference is not None
    assert (near.compared, near.difference.index, near.difference.margin) == (4, 2, 0.4)
    far = parity.check_choices("x", [1, 2, 3, 4], [7, 9, 8, 4], margins, 0.5)
    assert not far.near
    assert far.difference is not None
    assert (far.difference.index, far.difference.expected, far.difference.actual) == (0, 1, 7)
    with pytest.raises(ValueError, match="3 choices, the pass made 4"):
        parity.check_choices("x", [1, 2, 3, 4], [1, 2, 3], margins, 0.5)


@pytest.mark.gpu
def test_the_shipped_pair_on_the_gpu(tmp_path, monkeypatch):
    monkeypatch.undo()
    decodings = tuple(
        Native("heldout_code", budgets=(16, 64), heaps=(64,), prompts=2, max_new_tokens=32, dtype=dtype, graphs=graphs)
        for dtype in DTYPES
        for graphs in (True, False)
    )
    curves = tuple(NativeCurve((1, 17), dtype=dtype) for dtype in DTYPES)
    monkeypatch.setitem(cases.SUITES, "engine", (*decodings, *curves))
    assert cli.main(["run", "--suite", "engine", "--out", str(tmp_path)]) == 0
    rows = records.read(tmp_path / "rows.jsonl")
    assert {row.status for row in rows if "loop" not in str(row.reason)} == {"OK"}
    for row in rows:
        if row.timing is not None:
            assert row.timing.launch == ("eager" if row.case.endswith("eager") else "graph")
        if row.block == "decode" and row.timing is not None:
            assert row.timing.method == "events"
            assert (row.metrics["loop_efficiency"] or 0) > 0  # how much says who else uses the device
