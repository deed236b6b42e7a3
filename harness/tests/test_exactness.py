"""The exactness suite on a micro pair and the host library; and divergences, planted one by one, that it must count."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets.evaluation.prompts import SETS, Prompt
from engine import build
from engine.abi import EngineError
from engine.engine import Engine
from engine.generation import Generation
from engine.tests.backends import open_ops
from engine.tests.decoding import VOCABULARY, micro_drafter, micro_target, write_model
from harness import cli, exactness, exactness_cost, exactness_groups, records
from harness.engine_library import library_path
from harness.exactness import Plan, Unit, compare, most_requests, units
from harness.records import Row
from harness.tests.examples import make_environment
from reference.sampling import SamplingParams
from reference.tests.models import random_weights

PROMPTS = tuple(
    Prompt("humaneval", f"humaneval/{i}", "made up", "", tuple((7 * i + j * j) % VOCABULARY for j in range(2 + i)))
    for i in range(3)
)
NEW = 4
Change = Callable[[str, list[Generation]], list[Generation]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    open_ops("host")  # skips without a compiler
    folder = tmp_path_factory.mktemp("pair")
    for name, config in (("target", micro_target()), ("drafter", micro_drafter())):
        write_model(folder / f"{name}.kdtr", config, random_weights(config))
    return folder


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few short prompts; facts about the machine are not looked up again for each run."""
    monkeypatch.setattr(exactness_groups, "mixed", lambda: PROMPTS)
    monkeypatch.setattr(exactness_groups, "capture", lambda **_: make_environment())


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """faulty(change): what the engine gives is changed by change(method, generations)."""
    sound = Engine.generate

    def plant(change: Change) -> None:
        def generate(self: Engine, prompts: Any, *, method: Any, **options: Any) -> Any:
            return change(method, sound(self, prompts, method=method, **options))

        monkeypatch.setattr(Engine, "generate", generate)

    return plant


def run(models: Path, out: Path, *more: str) -> tuple[int, dict[str, Row]]:
    """(exit status, rows by arm). The pair in float32, unless `more` says otherwise."""
    sizes = ("--tokens", "20", "--new-tokens", str(NEW), "--batch", "2", "--budgets", "1", "5", "--block-size", "3")
    group = ("--heads", "2", "--dtype", "float32")
    arguments = ("exactness", "--kind", "host", "--models", str(models), "--out", str(out / "rows.jsonl"))
    code = cli.main([*arguments, *sizes, *group, *more])
    return code, {row.arm: row for row in records.latest(records.read(out / "rows.jsonl"))}


def command(models: Path, out: Path, open_engine: Callable[..., Engine], *more: str) -> int:
    """The exit status of a small run of the pair in float32 on engines that are opened so."""
    parser = argparse.ArgumentParser()
    exactness_groups.configure(parser)
    files = ("--models", str(models), "--out", str(out / "rows.jsonl"), "--kind", "host", "--heads", "2")
    sizes = ("--tokens", "8", "--new-tokens", str(NEW), "--batch", "2", "--budgets", "5", "--block-size", "3")
    return exactness_groups.command(parser.parse_args([*files, *sizes, "--dtype", "float32", *more]), open_engine)


def test_methods_agree_bit_for_bit_over_passes_of_which_the_first_is_greedy(models, tmp_path, capsys):
    code, rows = run(models, tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert code == 0
    assert list(rows) == ["ar", "chain", "ddtree-b1", "ddtree-b5"]
    assert rows["ar"].metrics["tokens"] == 20
    for name in ("chain", "ddtree-b1", "ddtree-b5"):
        row = rows[name]
        assert row.parity is not None
        assert (row.status, row.parity.compared, row.parity.differences) == ("OK", 25, 0)
        assert {name: row.metrics[name] for name in ("prompts", "tokens_compared", "rows_differ")} == {
            "prompts": 5,
            "tokens_compared": 20,
            "rows_differ": 0,
        }
    assert rows["ddtree-b5"].params["gemm"] == "row-invariant"
    assert said[0].split()[:3] == ["heads", "model", "dtype"]
    expected = "2 pair float32 row-invariant general/general eager ddtree 5 20 0 25 0 0"
    assert said[4].split()[:13] == expected.split()
    assert not any("wanted" in line or "first difference" in line for line in said)
    assert (
        "row-invariant: 60 tokens and 75 rows of logits compared with plain decoding's, 0 tokens and 0 rows" in said[5]
    )


def test_bf16_is_a_case_of_its_own_that_agrees_as_well(models, tmp_path):
    code, rows = run(models, tmp_path, "--dtype", "bfloat16")
    assert code == 0
    assert {row.case for row in rows.values()} == {"exactness/heads2/dflash/block3/bfloat16/row-invariant"}
    for name in ("chain", "ddtree-b1", "ddtree-b5"):
        row = rows[name]
        assert row.parity is not None
        assert (row.status, row.parity.compared, row.parity.differences) == ("OK", 25, 0)
        said = {key: row.params[key] for key in ("dtype", "products", "attention")}
        assert said == {"dtype": "bfloat16", "products": "general", "attention": "general"}


def test_other_heads_are_models_of_random_weights_and_each_group_has_its_rows(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        exactness_groups, "random_target", lambda heads: micro_target(num_attention_heads=heads).to_dict()
    )
    more = ("--heads", "2", "3", "--dtype", "float32", "bfloat16", "--tokens", "8", "--budgets", "5")
    code, _ = run(models, tmp_path, *more)
    said = capsys.readouterr().out
    assert code == 0
    rows = records.read(tmp_path / "rows.jsonl")
    assert all(row.status == "OK" for row in rows)
    groups = dict.fromkeys((row.params["heads"], row.params["model"], row.params["dtype"]) for row in rows)
    both = ("bfloat16", "float32")
    assert list(groups) == [(heads, model, dtype) for dtype in both for heads, model in ((2, "pair"), (3, "random"))]
    random = [row for row in rows if row.params["model"] == "random"]
    assert [row.arm for row in random] == 2 * ["ar", "chain", "ddtree-b5"]
    assert {row.params["drafter"] for row in random} == {"noisy"}
    assert all(row.metrics["tokens_compared"] == 8 for row in random if row.arm != "ar")
    assert "64 tokens and 80 rows of logits compared" in said


def test_noisy_proposals_need_no_drafter(models, tmp_path):
    (tmp_path / "target.kdtr").write_bytes((models / "target.kdtr").read_bytes())
    code, rows = run(tmp_path, tmp_path, "--drafter", "noisy", "--methods", "ddtree")
    assert code == 0
    assert list(rows) == ["ar", "ddtree-b1", "ddtree-b5"]
    rounds = rows["ddtree-b5"].metrics["rounds"]
    assert rounds is not None
    assert rounds < 20


def one_bit(method: str, made: list[Generation]) -> list[Generation]:
    """A tree's logit of the second row of the first request is the next float32."""
    if method == "ddtree":
        entry = made[0].logits[1, 3:4]
        entry[:] = np.nextafter(entry, np.float32(np.inf))
    return made


def test_one_bit_of_one_row_is_counted_and_is_a_regression(models, tmp_path, capsys, faulty):
    faulty(one_bit)
    code, rows = run(models, tmp_path)
    said = capsys.readouterr().out
    assert code == 1
    assert (rows["ar"].status, rows["chain"].status) == ("OK", "OK")
    groups = 3  # of 2, 2 and 1
    for name in ("ddtree-b1", "ddtree-b5"):
        row = rows[name]
        assert row.parity is not None
        assert (row.status, row.parity.differences) == ("INVALID", groups)
        assert row.reason == f"{groups} of 25 rows of logits and 0 tokens differ"
        assert 0 < float(row.metrics["largest_difference"] or 0) < 1e-6
        first = row.parity.first_difference
        assert first is not None
        assert (first.what, first.round, first.index) == ("logits", 0, 1)
        assert first.margin is not None
        assert first.margin > 0
    assert said.count("first difference: logits of humaneval/") == 2


def another_token(method: str, made: list[Generation]) -> list[Generation]:
    """The chain's third token is another one, and so are its later rows."""
    if method != "chain":
        return made
    for one in made:
        one.logits[3:] += 1
    tokens = [(*one.tokens[:2], one.tokens[2] ^ 1, *one.tokens[3:]) for one in made]
    return [dataclasses.replace(one, tokens=found) for one, found in zip(made, tokens, strict=True)]


def test_another_token_is_counted_and_nothing_behind_it_is_compared(models, tmp_path, capsys, faulty):
    faulty(another_token)
    code, rows = run(models, tmp_path)
    assert code == 1
    found = rows["chain"]
    assert found.reason == "0 of 15 rows of logits and 5 tokens differ"
    assert (found.metrics["tokens_compared"], found.metrics["tokens_differ"]) == (15, 5)
    assert found.parity is not None
    assert found.parity.first_difference is not None
    assert (found.parity.first_difference.what, found.parity.first_difference.index) == ("tokens", 2)
    assert rows["ddtree-b5"].status == "OK"
    assert "first difference: tokens of humaneval/" in capsys.readouterr().out


def test_missing_rows_and_failing_runs_end_their_arm(models, tmp_path, capsys, faulty):
    def change(method: str, made: list[Generation]) -> list[Generation]:
        if method == "ddtree":
            raise EngineError("the device is on fire")
        return [dataclasses.replace(one, logits=one.logits[:-1]) for one in made] if method == "chain" else made

    faulty(change)
    code, rows = run(models, tmp_path)
    assert code == 1
    assert rows["ddtree-b5"].reason == "EngineError: the device is on fire"
    assert "4 tokens and logits of 4 rows, expected 4 and 5" in str(rows["chain"].reason)
    assert "chain failed: EngineError" in capsys.readouterr().out

    def plain(method: str, made: list[Generation]) -> list[Generation]:
        raise EngineError("no warp moves")

    faulty(plain)
    code, rows = run(models, tmp_path)
    assert code == 1
    assert {row.status for row in rows.values()} == {"INVALID"}
    assert rows["chain"].reason == "plain decoding failed: EngineError: no warp moves"


def test_a_group_without_an_engine_hides_no_difference_of_another(models, tmp_path, capsys, faulty):
    def opened(*files: Any, gemm: str, **options: Any) -> Engine:
        if gemm == "cublas":
            raise EngineError("no such library")
        return Engine.load(*files, gemm=gemm, **options)

    more = ("--gemm", "row-invariant", "cublas")
    assert command(models, tmp_path, opened, *more) == 3
    said = capsys.readouterr()
    assert "no such library" in said.err
    assert "0 tokens and 0 rows differ" in said.out
    faulty(one_bit)
    assert command(models, tmp_path, opened, *more) == 1
    assert "first difference: logits" in capsys.readouterr().out


def test_a_time_box_ends_the_run_after_a_group(models, tmp_path, capsys):
    code, rows = run(models, tmp_path, "--seconds", "0")
    assert code == 3
    assert rows["chain"].metrics["tokens_compared"] == 8
    assert "20 tokens of each method were wanted; the time ended before" in capsys.readouterr().out


def test_wrong_use_and_what_the_host_cannot(models, tmp_path, capsys):
    out = ("--out", str(tmp_path / "rows.jsonl"), "--kind", "host")
    assert cli.main(["exactness", *out, "--models", str(tmp_path)]) == 2
    assert "target.kdtr" in capsys.readouterr().err
    assert cli.main(["exactness", *out, "--models", str(models), "--tokens", "0"]) == 2
    cublas = ("exactness", *out, "--models", str(models), "--gemm", "cublas")
    assert cli.main([*cublas]) == 2
    assert "its heads were not chosen" in capsys.readouterr().err
    assert cli.main([*cublas, "--heads", "2"]) in (1, 3)
    assert "cuBLAS" in str(capsys.readouterr())


BOTH = ("--gemm", "row-invariant", "cublas")


def with_own(*files: Any, gemm: str, **options: Any) -> Engine:
    """The own products in the place of cuBLAS's, which the host has not."""
    return Engine.load(*files, gemm="row_invariant", **options)


def test_what_exactness_costs_is_told_by_number_type_batch_and_method(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exactness_cost, "SAMPLES", 2)
    given: list[str] = []

    def opened(*files: Any, gemm: str, **options: Any) -> Engine:
        given.append(gemm)
        return with_own(*files, gemm=gemm, **options)

    assert command(models, tmp_path, opened, *BOTH) == 0
    said = capsys.readouterr().out
    assert given == ["row_invariant", "cublas"] * 2
    rows = [row for row in records.read(tmp_path / "rows.jsonl") if "cost" in row.case]
    assert list(dict.fromkeys(row.case for row in rows)) == [f"exactness/cost/float32/batch{batch}" for batch in (1, 2)]
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        assert row.timing is not None
        assert (row.status, len(row.timing.samples_s)) == ("OK", 2)
        tokens = 2 * NEW * int(row.params["batch"] or 0)
        assert row.metrics["tokens_per_s"] == pytest.approx(tokens / sum(s or 0 for s in row.timing.samples_s))
        assert row.timing.launch == "eager"
        checked = row.arm.startswith("row-invariant") and row.arm != "row-invariant-ar"
        assert (row.parity.compared if row.parity else 0) == (tokens if checked else 0)
    table = said.split("What exactness costs")[1].splitlines()
    assert [line.split()[:3] for line in table[2:]] == [
        ["float32", str(batch), name] for batch in (1, 2) for name in ("ar", "chain", "ddtree-b5")
    ]


def test_a_wrong_token_has_no_cost_and_is_a_regression(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exactness_cost, "SAMPLES", 1)
    sound = exactness_cost.decode

    def decode(engine: Engine, plan: Plan, arm: Any, group: Any, *, graphs: bool) -> Any:
        made = sound(engine, plan, arm, group, graphs=graphs)
        if arm.method != "chain":
            return made
        (*first, last), *others = made.tokens
        return dataclasses.replace(made, tokens=((*first, last ^ 1), *others))

    monkeypatch.setattr(exactness_cost, "decode", decode)
    assert command(models, tmp_path, with_own, *BOTH, "--batch", "1", "--tokens", "4", "--methods", "chain") == 1
    rows = [row for row in records.read(tmp_path / "rows.jsonl") if "cost" in row.case]
    assert {row.arm for row in rows if row.status == "INVALID"} == {"row-invariant-chain"}
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[:3] == ["float32", "1", "chain"])
    assert line.split()[3] == "INVALID"
    assert line.split()[6:] == ["-", "-", "-"]


def test_what_the_exact_engine_gives_as_it_is_used_stands_beside_it(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exactness_cost, "SAMPLES", 2)
    given: list[tuple[bool, bool]] = []
    sound = exactness_cost.decode

    def decode(engine: Engine, plan: Plan, arm: Any, group: Any, *, graphs: bool) -> Any:
        given.append((engine.graphs, graphs))
        return sound(engine, plan, arm, group, graphs=graphs)

    def opened(*files: Any, gemm: str, **options: Any) -> Engine:
        engine = with_own(*files, gemm=gemm, **options)
        engine.graphs = gemm == "row_invariant"
        return engine

    monkeypatch.setattr(exactness_cost, "decode", decode)
    assert command(models, tmp_path, opened, *BOTH, "--batch", "1", "--tokens", "4", "--methods", "chain") == 0
    assert set(given) == {(False, False), (True, False), (True, True)}
    rows = {row.arm: row for row in records.read(tmp_path / "rows.jsonl") if "cost" in row.case}
    assert set(rows) == {f"{way}-{name}" for way in ("row-invariant", "cublas", "replayed") for name in ("ar", "chain")}
    for name in ("ar", "chain"):
        row = rows[f"replayed-{name}"]
        assert (row.status, row.against, row.parity is not None) == ("OK", f"cublas-{name}", True)
        assert row.timing is not None
        assert row.timing.launch == "graph"
    lines = capsys.readouterr().out.split("What exactness costs")[1].splitlines()
    assert all(line.split()[-1].endswith("]") for line in lines[2:4])


def test_what_exactness_costs_takes_none_of_the_time_that_is_over(models, tmp_path, capsys):
    small = ("--batch", "1", "--tokens", "4", "--methods", "chain")
    assert command(models, tmp_path, with_own, *BOTH, *small, "--seconds", "0") == 0  # a batch is all that is demanded
    assert "what it costs was not measured" in capsys.readouterr().err
    assert not any("cost" in row.case for row in records.read(tmp_path / "rows.jsonl"))


def test_a_library_that_is_compiled_first_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "library", lambda kind: tmp_path / kind)
    plan = build.plan_host
    monkeypatch.setattr(build, "plan_host", lambda: plan(tmp_path))
    assert library_path("host") == tmp_path / "host"
    assert "compiling the engine: " in capsys.readouterr().err
    for step in plan(tmp_path).objects.values():
        step.path.parent.mkdir(exist_ok=True)
        step.path.touch()
    library_path("host")
    assert capsys.readouterr().err == ""


def test_differences_that_comparing_numbers_would_miss():
    """Signs of zeros and NaN; infinities that are equal are no difference."""
    rows = np.array([[0.0, 1.0], [np.inf, -np.inf], [2.0, 3.0]], np.float32)
    unit = Unit("x", (1, 2), SamplingParams(0.0, seed=0))

    def made(logits: Any) -> Generation:
        return Generation((1, 0), (), "length", 0.0, 4, logits)

    assert compare(unit, made(rows), made(rows.copy())).rows_differ == 0
    signed = rows.copy()
    signed[0, 0] = -0.0
    found = compare(unit, made(rows), made(signed))
    assert (found.rows_differ, found.largest) == (1, 0.0)
    wrong = rows.copy()
    wrong[1:] = np.nan
    found = compare(unit, made(rows), made(wrong))
    assert (found.rows, found.rows_differ, found.largest) == (3, 2, np.inf)
    assert found.first is not None
    assert (found.first.index, found.first.expected) == (1, np.inf)


def test_units_and_groups():
    plan = Plan((), PROMPTS, tokens=100, new_tokens=127, batch=64, seed=5)
    source = units(plan)
    found = [next(source) for _ in range(7)]
    assert [u.sampling.temperature for u in found] == [0, 0, 0, 1, 1, 1, 1]
    assert [u.sampling.seed for u in found] == list(range(5, 12))
    assert found[3].name == "humaneval/0 pass 1"
    assert [most_requests(127, vocab) for vocab in (4096, 163_840, 10**9)] == [170, 4, 1]


def test_the_shipped_prompts_come_in_turns(monkeypatch):
    monkeypatch.undo()
    found = exactness.mixed()
    assert [prompt.set for prompt in found[:8]] == [*SETS, *SETS]
    assert len({prompt.id for prompt in found}) == len(found) == 472


@pytest.mark.gpu
def test_the_shipped_pair_on_the_gpu(tmp_path, monkeypatch):
    monkeypatch.undo()
    out = tmp_path / "rows.jsonl"
    sizes = ("--tokens", "512", "--new-tokens", "32", "--batch", "16", "--budgets", "16", "64")
    for drafter in ("dflash", "noisy"):
        more = ("--drafter", drafter, "--gemm", "row-invariant", "--out", str(out))
        assert cli.main(["exactness", "--kind", "cuda", *more, *sizes]) == 0
    rows = records.read(out)
    assert len(rows) == 2 * 3 * 2 * 4
    assert all(row.metrics["tokens"] == 512 for row in rows)
    fast = [row for row in rows if row.params["dtype"] == "bfloat16"]
    assert {row.params[path] for row in fast for path in ("products", "attention")} == {"tensor_cores"}


@pytest.mark.gpu
def test_with_cublas_differences_are_told_and_are_no_regression(tmp_path, monkeypatch, capsys, record_property):
    """Its bits for a row change with the number of rows; how often that changes a token is a fact, not a demand."""
    monkeypatch.undo()
    out = tmp_path / "rows.jsonl"
    sizes = ("--tokens", "2048", "--new-tokens", "64", "--batch", "16", "--budgets", "16", "64")
    more = ("--gemm", "cublas", "--heads", "16", "--dtype", "float32", "--out", str(out))
    assert cli.main(["exactness", "--kind", "cuda", *more, *sizes]) == 0
    said = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{said}")
    for row in records.read(out)[1:4]:
        assert (row.status, row.parity) == ("OK", None)
        found = {name: float(row.metrics[name] or 0) for name in ("rows_compared", "rows_differ", "tokens_differ")}
        for name, value in found.items():
            record_property(f"{row.arm}.{name}", value)
        assert found["rows_compared"] > 0
        assert row.metrics["largest_difference"] is not None, row.nulls  # infinite: NaN among them
