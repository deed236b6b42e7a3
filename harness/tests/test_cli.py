"""The command line, from cases to reports and exit statuses, on a small random pair; and faults that it must notice."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import builders, cases, cli, heap_tree, parity, records, timing
from harness.cases import Arm, SelectionError, select
from harness.environment import CHECKOUT
from harness.parity import main as reproduce
from harness.run import Progress
from harness.systems import ReferenceDecoder, Systems
from harness.tests.pairs import write_lists, write_pair
from reference.loop import Generation
from reference.sampling import SamplingParams

FEW = "humaneval and decode and (chain or b16)"
SMALL: tuple[cases.Case, ...] = (
    cases.Decode("humaneval", budgets=(16, 64), prompts=3, max_new_tokens=12, staged=("ar", "ddtree-b16")),
    *(cases.Builder(8, budget, lists=8) for budget in (7, 16, 64)),
    cases.Curve((1, 8), 8),
    cases.Replay("humaneval", repeats=2),
    cases.Replay("humaneval", forced=3, repeats=2),
)


@pytest.fixture(autouse=True)
def _small_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and shorter cases under the name of the default suite."""
    monkeypatch.setitem(cases.SUITES, "quick", SMALL)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def lists(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lists(models, tmp_path_factory.mktemp("lists"))


def status(*arguments: object, **others: Any) -> int:
    return cli.main([*map(str, arguments)], **others)


def ran(folder: Path) -> dict[tuple[str, str], records.Row]:
    return {(row.case, row.arm): row for row in records.read(folder / "rows.jsonl")}


def test_a_run_measures_checks_and_reports(models, lists, tmp_path, capsys):
    chosen = "humaneval and (chain or b16 or replay) or builder/depth7/b64"
    assert status("run", "-k", chosen, "--out", tmp_path, "--models", models, "--lists", lists) == 0
    said = capsys.readouterr()
    rows = ran(tmp_path)
    decode = {arm: row for (case, arm), row in rows.items() if case.startswith("decode/humaneval/block8/greedy")}
    assert {"ar", "chain", "ddtree-b16"} <= decode.keys()
    assert not {"ddtree-b64", "gpu"} & decode.keys()
    for arm, row in decode.items():
        if row.status == "NOT_RUN":  # every output of a random target may loop; their rows then stand apart
            assert "loop" in str(row.reason)
            row = rows[f"{row.case}/looping", arm]
        assert row.status == "OK", row.reason
        assert row.parity is not None
        assert row.timing is not None
        tokens, seconds = row.metrics["tokens"], [s for s in row.timing.samples_s if s]
        assert isinstance(tokens, int)
        assert row.parity.compared >= tokens
        assert row.parity.differences == row.parity.margins == 0
        assert row.timing is not None
        assert (row.timing.sample, row.timing.method, len(row.timing.samples_s)) == (
            "prompt",
            "cpu",
            row.metrics["prompts"],
        )
        assert row.depth_histogram is not None
        assert sum(row.depth_histogram) == row.metrics["rounds"]
        assert row.metrics["tokens_per_s"] == pytest.approx(tokens / sum(seconds))
    tree = next(row for (_, arm), row in rows.items() if arm == "ddtree-b16" and row.trees).trees[0]
    assert len(tree.tokens) == 17
    assert tree.accepted[0] == 0
    cpp = rows["builder/depth7/b64/batch1", "cpp-heap"]
    if heap_tree.compiler() is None:
        assert (cpp.status, "compiler" in str(cpp.reason)) == ("NOT_RUN", True)
    else:
        assert (cpp.status, cpp.against) == ("OK", "heapq")
    assert rows["builder/depth7/b64/batch1", "sglang-heapq"].params["contract"] == "sglang"
    gpu = rows["builder/depth7/b64/batch1", "gpu"]
    assert gpu.status == "NOT_RUN"
    assert gpu.reason
    for case in ("replay/humaneval/block8/recorded", "replay/humaneval/block8/forced3"):
        assert rows[case, "ddtree-b64"].status == "OK", rows[case, "ddtree-b64"].reason
        assert rows[case, "ddtree-b64"].block == "replay"
    assert rows["replay/humaneval/block8/forced3", "ddtree-b64"].metrics["tau"] == 4.0
    assert "report.html" in said.out
    assert (tmp_path / "report.html").is_file()
    assert all(line.startswith("[") for line in said.err.splitlines())
    assert status("report", tmp_path, "--out", tmp_path / "again") == 0
    for name in os.listdir(tmp_path / "again"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


class Faulty(ReferenceDecoder):
    """A decoder with one fault, in trees of 16 nodes only."""

    fault = ""

    def decode(self, arm: Arm, *others: Any) -> Generation:
        result = super().decode(arm, *others)
        if arm.budget != 16:
            return result
        rounds = list(result.rounds)
        if self.fault == "token":
            tokens = list(result.tokens)
            tokens[5] = (tokens[5] + 1) % 4096
            return dataclasses.replace(result, tokens=tuple(tokens))
        if self.fault == "node":
            trace = rounds[2].trace
            assert trace is not None
            wrong = trace.tree.tokens.copy()
            wrong[5] += 1
            tree = dataclasses.replace(trace.tree, tokens=wrong)
            rounds[2] = dataclasses.replace(rounds[2], trace=dataclasses.replace(trace, tree=tree))
        if self.fault == "length":
            child = int(np.flatnonzero(rounds[1].trace.tree.parents == rounds[1].path[-1])[0])  # type: ignore[union-attr]
            rounds[1] = dataclasses.replace(rounds[1], path=(*rounds[1].path, child))
        if self.fault == "raise":
            raise MemoryError("cache")
        return dataclasses.replace(result, rounds=tuple(rounds))


@pytest.mark.parametrize(
    ("fault", "told"),
    [("token", "tokens of"), ("node", "tree.tokens of"), ("length", "accepted of"), ("raise", "MemoryError in turn 0")],
)
def test_a_fault_of_a_decoder_makes_its_row_invalid_and_the_status_1(models, tmp_path, capsys, fault, told):
    decoder = type("Decoder", (Faulty,), {"fault": fault})
    code = status("run", "-k", FEW, "--out", tmp_path, "--models", models, systems=Systems(decoder=decoder))
    assert code == 1
    wrong = [row for row in ran(tmp_path).values() if row.status == "INVALID"]
    assert wrong
    assert {row.arm for row in wrong} == {"ddtree-b16"}  # the others are right
    assert all(told in str(row.reason) for row in wrong)
    assert "INVALID" in capsys.readouterr().out
    if fault != "raise":
        stored = next(row.parity.reproduce for row in wrong if row.parity)
        assert reproduce([str(tmp_path / str(stored))]) == 1


class Disturbed(ReferenceDecoder):
    """A decoder after whose work something else runs for a while; `times` for how many of the last calls, which are
    the staged ones."""

    times = 0

    def __init__(self, *others: Any):
        super().__init__(*others)
        self._calls = 0

    def decode(self, arm: Arm, *others: Any) -> Generation:
        result = super().decode(arm, *others)
        self._calls += arm.budget == 16
        if 4 < self._calls <= 4 + self.times:  # one call to warm up, and one for each of the 3 prompts
            start = self.clock.mark()
            while self.clock.seconds(start, self.clock.mark()) < 0.02 + 0.1 * result.decode_seconds:
                pass
        return result


@pytest.mark.parametrize(("times", "expected"), [(0, "OK"), (2, "OK"), (3, "INVALID")])
def test_stages_that_do_not_explain_the_time_are_measured_again(models, tmp_path, times, expected):
    decoder = type("Decoder", (Disturbed,), {"times": times})
    code = status("run", "-k", FEW, "--out", tmp_path, "--models", models, systems=Systems(decoder=decoder))
    row = ran(tmp_path)["stage/humaneval/block8/greedy", "ddtree-b16"]
    assert (row.status, code) == (expected, 0 if expected == "OK" else 1), row.reason
    assert ("sum to" in str(row.reason)) == (expected == "INVALID")


class Turned(ReferenceDecoder):
    """In trees of 16 nodes another output, right in itself: as if rounding had turned a choice of the target."""

    def decode(self, arm: Arm, prompt: Any, block_size: int, options: Any) -> Generation:
        if arm.budget == 16:
            options = {**options, "sampling": SamplingParams(temperature=1.0, seed=5)}
        return super().decode(arm, prompt, block_size, options)


@pytest.mark.parametrize(("margin", "expected"), [(float("inf"), "OK"), (0.0, "INVALID")])
def test_a_choice_that_rounding_turned_is_counted_and_what_follows_is_held_to_itself(
    models, tmp_path, monkeypatch, margin, expected
):
    """Of 28,709 draws at T = 1 some hundred stand nearer to another one than float32 sums agree."""
    monkeypatch.setattr(parity, "MARGIN", margin)
    status("run", "-k", FEW, "--out", tmp_path, "--models", models, systems=Systems(decoder=Turned))
    rows = [row for row in ran(tmp_path).values() if row.arm == "ddtree-b16" and row.status != "NOT_RUN"]
    assert rows
    assert {row.status for row in rows} == {expected}
    assert all(row.parity is not None and row.parity.margins > 0 for row in rows) == (expected == "OK")


def test_a_wrong_node_of_a_builder_makes_its_row_invalid_and_the_status_1(models, lists, tmp_path):
    def faulty(name: str, lp: Any, ids: Any, budget: int) -> builders.Build:
        build = builders.make(name, lp, ids, budget)
        if name not in ("cpp-heap", "sglang-heapq"):
            return build

        def wrong(batch: int) -> Any:
            trees = build(batch)

            def spoil() -> Any:
                found = [{key: array.copy() for key, array in tree.items()} for tree in trees()]
                found[0]["parents"][4] = 0 if found[0]["parents"][4] else 1
                return found

            return spoil

        return wrong

    arguments = ("run", "-k", "builder/depth7/b16/", "--out", tmp_path, "--models", models, "--lists", lists)
    assert status(*arguments, systems=Systems(builder=faulty)) == 1
    rows = {arm: row for (_, arm), row in ran(tmp_path).items()}
    assert rows["heapq"].status == "OK"
    for arm in ("cpp-heap", "sglang-heapq") if heap_tree.compiler() else ("sglang-heapq",):
        assert rows[arm].status == "INVALID"
        assert "tree.parents" in str(rows[arm].reason)


def test_resume_measures_what_is_missing_and_only_that(models, lists, tmp_path):
    def run(expression: str, *more: str) -> tuple[int, list[records.Row]]:
        code = status(
            "run", "-k", expression, "--out", tmp_path, "--models", models, "--lists", lists, "--resume", *more
        )
        return code, records.read(tmp_path / "rows.jsonl")

    code, first = run("builder/depth7/b7/ and heapq")
    assert (code, {row.arm for row in first}) == (0, {"heapq", "sglang-heapq"})
    code, second = run("(builder/depth7/b7/ or builder/depth7/b16/) and heapq")
    assert code == 0
    assert second[: len(first)] == first
    assert {row.case for row in second[len(first) :]} == {"builder/depth7/b16/batch1"}
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"schema":1,"suite":"qu')  # torn by a crash
    code, third = run("(builder/depth7/b7/ or builder/depth7/b16/) and heapq")
    assert (code, third) == (0, second)
    assert status("run", "-k", "builder/depth7/b7/", "--out", tmp_path, "--models", models, "--lists", lists) == 0
    assert (tmp_path / "rows.previous.jsonl").is_file()  # without --resume a run starts anew, and nothing is lost


def test_nothing_measured_is_status_3_and_says_why(tmp_path, capsys):
    nowhere = ("--models", tmp_path, "--lists", tmp_path)
    assert status("run", "-k", "humaneval or builder", "--out", tmp_path / "out", *nowhere) == 3
    said = capsys.readouterr().out
    assert "target.kdtr is absent" in said
    assert "drafter_lists_b8_k128.kdtr is absent" in said
    assert {row.status for row in ran(tmp_path / "out").values()} == {"NOT_RUN"}
    for mode in ("--ci", "--strict"):
        assert status("run", "-k", "builder", "--out", tmp_path / "out", *nowhere, mode) == 3


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Systems]:
    """Makes builders that take 1 ms a call on a clock that only they move, SGLang's with 16 nodes `slow` ms: one number
    for each time that it is measured, the last one from then on."""
    spent = [0]
    monkeypatch.setattr(timing.CpuClock, "mark", lambda _: spent[0])

    def systems(*slow: float) -> Systems:
        paces = iter(slow)

        def builder(name: str, lp: Any, ids: Any, budget: int) -> builders.Build:
            build = builders.make(name, lp, ids, budget)
            pace = next(paces, slow[-1]) if (name, budget) == ("sglang-heapq", 16) else 1.0

            def call(batch: int) -> Any:
                spent[0] += round(1e6 * pace)
                return build(batch)

            return call

        return Systems(builder=builder)

    return systems


@pytest.mark.parametrize(
    ("mode", "slow", "code", "measured"),
    [
        ("--ci", (2.0,), 0, 1),
        ("--ci", (3.9,), 0, 1),  # machines differ
        ("--ci", (4.1,), 1, 3),
        ("--ci", (0.9,), 1, 3),
        ("--ci", (20.0, 2.0), 0, 2),
        ("--ci", (20.0, 20.0, 2.0), 0, 3),
        ("--strict", (2.0,), 0, 1),
        ("--strict", (2.4,), 1, 3),
        ("--strict", (2.4, 2.0), 0, 2),
    ],
)
def test_what_is_slow_against_the_baseline_is_measured_again_and_fails_if_it_stays_so(
    paced, models, lists, tmp_path, capsys, mode, slow, code, measured
):
    chosen = "(builder/depth7/b7/ or builder/depth7/b16/) and heapq"
    arguments = ("run", "-k", chosen, "--models", models, "--lists", lists)
    base = tmp_path / "base"
    assert status(*arguments, "--out", tmp_path / "one", "--ci", "--baselines", base, systems=paced(2.0)) == 3
    with records.RowFile(base / "here.jsonl") as file:
        for row in records.read(tmp_path / "one" / "rows.jsonl"):
            file.append(row)
    capsys.readouterr()
    folder = tmp_path / "two"
    assert status(*arguments, "--out", folder, mode, "--baselines", base, systems=paced(*slow)) == code
    said = capsys.readouterr()
    assert ("FAIL" in said.out) == (code == 1)
    assert said.err.count("measured again, since times fail: builder/depth7/b16/batch1\n") == measured - 1
    counts = Counter((row.case, row.arm) for row in records.read(folder / "rows.jsonl"))
    both = ("heapq", "sglang-heapq")
    assert counts == {(f"builder/depth7/b{b}/batch1", arm): measured if b == 16 else 1 for b in (7, 16) for arm in both}


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("measure",),
        ("run", "--suite", "huge"),
        ("run", "-k", "and"),
        ("run", "-k", "no-such-case"),
        ("report", "absent"),
        ("compare", "absent"),
    ],
)
def test_wrong_use_is_status_2(arguments, capsys, tmp_path):
    assert status(*(tmp_path / a if a == "absent" else a for a in arguments)) == 2
    assert capsys.readouterr().err


def test_env_and_list(capsys):
    assert status("env", "--json") == 0
    assert json.loads(capsys.readouterr().out)["hardware_key"]
    assert status("env") == 0
    assert "hardware_key" in capsys.readouterr().out
    assert status("list") == 0
    names = capsys.readouterr().out.split()
    assert len(names) == len(set(names))
    assert "decode/humaneval/block8/greedy/ddtree-b64" in names


def test_selection():
    every = cases.SUITES["quick"]

    def names(expression: str) -> set[str]:
        return {f"{each.case.id}/{arm}" for each in select(every, expression) for arm in each.arms}

    whole = {f"{case.id}/{arm}" for case in every for arm in case.arms}
    assert {f"{each.case.id}/{arm}" for each in select(every) for arm in each.arms} == whole
    for expression, wanted in (
        ("b64", lambda n: "b64" in n),
        ("HumanEval and not replay", lambda n: "humaneval" in n and "replay" not in n),
        ("builder or decode and chain", lambda n: "builder" in n or ("decode" in n and "chain" in n)),
        ("(builder or decode) and b16", lambda n: ("builder" in n or "decode" in n) and "b16" in n),
        ("not not curve", lambda n: "curve" in n),
    ):
        assert names(expression) == {name for name in whole if wanted(name)}
    for wrong in ("", "and", "a b", "(a", "a)", "not", "a or", "()", "a and or b"):
        with pytest.raises(SelectionError):
            select(every, wrong)


def test_ids_are_unique_and_hashes_tell_fields_and_inputs_apart():
    suites: list[tuple[cases.Case, ...]] = [SMALL, cases.SUITES["full"]]
    for suite in suites:
        assert len({case.id for case in suite}) == len(suite)
    case = cases.Decode("x")
    hashes = [
        cases.digest(case, b"a", "b"),
        cases.digest(case, "b", b"a"),
        cases.digest(case, b"a", "c"),
        cases.digest(dataclasses.replace(case, max_new_tokens=25), b"a", "b"),
        cases.digest(case, b'a"b"', ""),
    ]
    assert len(set(hashes)) == len(hashes)
    assert cases.digest(case, (1, 2), 3) == cases.digest(cases.Decode("x"), (1, 2), 3)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_plain_lines_without_a_terminal_and_one_changing_line_on_one(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for stream, changing in ((io.StringIO(), False), (Terminal(), True)):
        progress = Progress(4.0, 2, stream)
        progress.start("one", 1.0)
        progress.show(0.5)
        progress.start("two", 3.0)
        progress.end()
        said = stream.getvalue()
        assert ("\r" in said) == changing
        assert "[2/2] two" in said
        assert "to go" in said
        assert said.count("\n") == (0 if changing else 2)
    monkeypatch.setenv("TERM", "dumb")
    dumb = Terminal()
    Progress(1.0, 1, dumb).start("one", 1.0)
    assert "\r" not in dumb.getvalue()


def test_the_module_runs_as_a_program_and_sets_one_thread(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-m", "harness", "env", "--json"], cwd=CHECKOUT, env=environment, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["threads"]["OMP_NUM_THREADS"] == "1"
