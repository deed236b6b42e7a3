"""The judge: what passes, what fails, what is not compared, and which exit status says so."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import compare as judge
from harness import parity, records, timing
from harness.compare import NOT_COMPARABLE, OFF, Baseline, Exit, compare
from harness.environment import CHECKOUT, capture
from harness.parity import combine
from harness.records import Gpu, Parity, Row, Timing
from harness.stats import Verdict, summarise
from harness.tests.examples import make_environment, make_row
from harness.timing import CpuClock, interleave
from reference.drafter import NoisyOracleDrafter
from reference.loop import Generation, ar_generate, ddtree_generate
from reference.tests.lists import random_lists
from reference.tests.toys import HashTarget
from reference.tree import build_tree

H200 = Gpu("NVIDIA H200", "0123456789ab", 132, "9.0", 150_000_000_000, "570.124.06", 700.0, 1980, False)
GPU_HOST = make_environment(
    hardware_key="gpu-nvidia-h200-570-cuda13.0",
    gpu=H200,
    gpu_missing=None,
    versions={"python": "3.11.9", "cuda_runtime": "13.0"},
)


def times(median: float, n: int = 12) -> tuple[float, ...]:
    return tuple(median * (1 + 0.01 * x) for x in np.linspace(-1, 1, n))


def timed(median: float, **change: Any) -> Timing:
    fields: dict[str, Any] = {
        "method": "wall",
        "mode": "e2e",
        "samples_s": times(median),
        "warmup_s": 2 * median,
        "dropped": 0,
        "capped": False,
    }
    return Timing(**{**fields, **change})


def run(ar: float = 1.0, tree: float = 0.5, tau: float = 3.5, **change: Any) -> list[Row]:
    """A run of plain decoding and a tree that took turns."""
    ar_row = make_row(arm="ar", against=None, parity=None, timing=timed(ar), metrics={"tau": 1.0}, **change)
    return [ar_row, make_row(timing=timed(tree), metrics={"tau": tau}, **change)]


def against(rows: list[Row], *baselines: list[Row], **mode: bool) -> judge.Comparison:
    return compare(rows, [Baseline(f"b{i}.jsonl", tuple(old)) for i, old in enumerate(baselines)], **mode)


def results(found: judge.Comparison, check: str) -> list[str]:
    return [line.result for line in found.lines if line.check == check]


def test_equal_runs_pass_and_the_baseline_is_named():
    found = against(run(), run())
    assert (found.exit, found.summary) == (Exit.FINE, "PASSED: 5 checks")
    assert results(found, "time") == [Verdict.SAME, Verdict.SAME]
    assert results(found, "tau") == [Verdict.SAME, Verdict.SAME]
    assert results(found, "ratio") == [Verdict.SAME]
    assert found.notices == (f"compared with b0.jsonl: 2 rows, commit {'a' * 12}, this hardware",)


def test_a_slower_run_fails_and_a_faster_one_does_not():
    slower, faster = against(run(tree=0.58), run()), against(run(tree=0.42), run())
    assert slower.exit == Exit.REGRESSION
    assert [(line.result, line.row.arm) for line in slower.lines if line.fails] == [(Verdict.SLOW, "ddtree-b64")]
    assert slower.lines[0].fails
    assert slower.lines[0].change == pytest.approx(0.16)
    assert faster.exit == Exit.FINE
    assert Verdict.FAST in results(faster, "time")


def test_kernels_need_ten_percent_and_two_microseconds():
    for old, new, verdict in (
        (1e-4, 1.08e-4, Verdict.SAME),
        (1e-5, 1.15e-5, Verdict.SAME),
        (1e-4, 1.2e-4, Verdict.SLOW),
    ):
        rows = [make_row(block="builder", timing=timed(t)) for t in (new, old)]
        assert results(against(rows[:1], rows[1:]), "time") == [verdict]


def test_an_ambiguous_time_does_not_fail():
    few = make_row(timing=timed(2.0, samples_s=times(2.0, 5)))
    found = against([few], [make_row(timing=timed(1.0))])
    assert (results(found, "time"), found.exit) == ([Verdict.AMBG], Exit.FINE)


@pytest.mark.parametrize("tau", [1.0, 3.46, 3.54, math.nan])
def test_tau_off_its_baseline_fails_on_any_machine(tau):
    elsewhere = make_environment(hardware_key="cpu-other-8")
    for old in (run(), run(environment=elsewhere)):
        for mode in ({}, {"ci": True}):
            found = against(run(tau=tau), old, **mode)
            assert (found.exit, found.lines[0].check, found.lines[0].result) == (Exit.REGRESSION, "tau", OFF)
    assert against(run(tau=3.52), run(), ci=True).exit == Exit.FINE


def test_a_ratio_off_by_more_than_two_fails_wherever_both_sides_were_measured_in_the_job():
    here, elsewhere = make_environment(), make_environment(hardware_key="cpu-other-8", cpu="Other CPU")
    base = run(ar=1.0, tree=0.5, environment=here)
    for ar, tree, off in ((10.0, 5.0, False), (10.0, 9.5, False), (10.0, 10.5, True), (10.0, 2.4, True)):
        found = against(run(ar=ar, tree=tree, environment=elsewhere), base, ci=True)
        assert found.exit == (Exit.REGRESSION if off else Exit.FINE)
        assert results(found, "ratio") == [OFF if off else Verdict.SAME]
        assert set(results(found, "time")) == {NOT_COMPARABLE}


def test_in_ci_a_slow_time_is_shown_and_does_not_fail():
    found = against(run(ar=1.5, tree=0.75), run(), ci=True)
    assert (results(found, "time"), found.exit) == ([Verdict.SLOW, Verdict.SLOW], Exit.FINE)


def test_a_ratio_needs_samples_of_the_same_turns():
    rows = run()
    rows[0] = dataclasses.replace(rows[0], timing=timed(1.0, samples_s=times(1.0, 11)))
    assert results(against(rows, run()), "ratio") == [NOT_COMPARABLE]
    assert results(against(run()[1:], run()), "ratio") == [NOT_COMPARABLE]
    reasons = [line.reason for line in against(run()[1:], run()).lines if line.check == "ratio"]
    assert reasons == ["arm ar was not measured"]


def changed(
    gpu: dict[str, Any] | None = None, versions: dict[str, Any] | None = None, **change: Any
) -> records.Environment:
    return dataclasses.replace(
        GPU_HOST,
        gpu=dataclasses.replace(H200, **(gpu or {})),
        versions={**GPU_HOST.versions, **(versions or {})},
        **change,
    )


OTHER_MACHINES = {
    "GPU is NVIDIA H200, the baseline's is NVIDIA H100": changed(
        {"name": "NVIDIA H100"}, hardware_key="gpu-nvidia-h100-570-cuda13.0"
    ),
    "driver major is 570, the baseline's is 550": changed(
        {"driver": "550.1"}, hardware_key="gpu-nvidia-h200-550-cuda13.0"
    ),
    "power limit is 700.0, the baseline's is 400.0": changed({"power_limit_w": 400.0}),
    "CUDA runtime is 13.0, the baseline's is 12.8": changed(versions={"cuda_runtime": "12.8"}),
    "GPU is NVIDIA H200, the baseline's is none": make_environment(),
    "processor is Example CPU, 2 cores, the baseline's is Other, 2 cores": changed(cpu="Other"),
    "thread settings": changed(threads={"OMP_NUM_THREADS": "8"}),
}


@pytest.mark.parametrize("reason", OTHER_MACHINES)
def test_other_machines_are_not_comparable_for_a_named_reason(reason):
    old = make_row(timing=timed(1.0), environment=OTHER_MACHINES[reason])
    for seconds in (1.0, 3.0, 0.3):
        found = against([make_row(timing=timed(seconds), environment=GPU_HOST)], [old])
        line = next(line for line in found.lines if line.check == "time")
        assert line.result == NOT_COMPARABLE
        assert reason in str(line.reason)
        assert not line.fails
        assert found.exit == Exit.NOTHING  # neither green nor red
    new = make_row(timing=timed(1.0), environment=GPU_HOST)
    assert against([new], [old], ci=True).exit == Exit.FINE  # tau was compared
    assert against([new], [old], ci=True, strict=True).exit == Exit.NOTHING


@pytest.mark.parametrize(
    ("field", "value"), [("method", "events"), ("launch", "graph"), ("l2", "flushed"), ("best_of", 5)]
)
def test_other_ways_of_timing_are_not_comparable(field, value):
    found = against([make_row(timing=timed(3.0))], [make_row(timing=timed(1.0, **{field: value}))])
    line = next(line for line in found.lines if line.check == "time")
    assert (line.result, found.exit) == (NOT_COMPARABLE, Exit.NOTHING)
    assert f"timing {field} is" in str(line.reason)


def test_an_older_driver_of_the_same_major_is_comparable():
    old = make_row(timing=timed(1.0), environment=changed({"driver": "570.86"}))
    assert results(against([make_row(timing=timed(1.0), environment=GPU_HOST)], [old]), "time") == [Verdict.SAME]


def test_staged_times_are_never_compared():
    staged = make_row(block="stage", timing=timed(9.0, mode="staged"), stages={"draft": 1.0, "other": 0.1})
    found = against([staged], [make_row(timing=timed(1.0))])
    assert results(found, "time") == results(found, "ratio") == []


def test_the_baseline_of_this_hardware_is_chosen_and_the_latest_row_counts():
    other = run(tree=5.0, environment=make_environment(hardware_key="cpu-aaa-8"))
    mine = [*run(tree=7.0), *run(tree=0.5)]
    found = against(run(), other, mine)
    assert found.exit == Exit.FINE
    assert [n for n in found.notices if "compared with" in n] == [
        f"compared with b1.jsonl: 2 rows, commit {'a' * 12}, this hardware"
    ]


def test_what_is_new_missing_or_not_run_is_told_and_fails_only_when_strict():
    new = make_row(arm="ddtree-b7", timing=timed(1.0))
    skipped = make_row(arm="gpu", status="NOT_RUN", reason="no CUDA device", parity=None)
    gone = make_row(arm="ddtree-b32", timing=timed(1.0))
    for rows, old, told in (
        ([*run(), new], run(), "no baseline holds this case with this input"),
        ([*run(), skipped], run(), "gpu: not run: no CUDA device"),
        (run(), [*run(), gone], "ddtree-b32: in b0.jsonl, but not measured now"),
        ([*run(), dataclasses.replace(skipped, arm="ddtree-b32")], [*run(), gone], "but not measured now"),
    ):
        found = against(rows, old)
        assert found.exit == Exit.FINE
        assert told in judge.render(found)
        assert against(rows, old, strict=True).exit == (Exit.FINE if told.startswith("gpu") else Exit.NOTHING)


def test_another_input_is_not_compared():
    found = against([make_row(timing=timed(9.0), case_hash="d" * 64)], run())
    assert (found.exit, results(found, "time")) == (Exit.NOTHING, [NOT_COMPARABLE])


def test_nothing_measured_is_exit_3():
    skipped = make_row(status="NOT_RUN", reason="no CUDA device", parity=None)
    for rows in ([], [skipped]):
        found = against(rows, run())
        assert (found.exit, found.summary) == (Exit.NOTHING, "NOTHING MEASURED")
    assert against(run()).exit == Exit.NOTHING
    assert against(run(), ci=True).exit == Exit.NOTHING


@pytest.mark.parametrize(
    ("samples", "verdict"),
    [
        ((), Verdict.INVALID),
        ((1.0,), Verdict.AMBG),
        ((1.0, 1.0), Verdict.AMBG),
        ((1.0,) * 12, Verdict.SAME),
        ((1.0,) * 11 + (math.nan,), Verdict.INVALID),
        ((1.0,) * 11 + (math.inf,), Verdict.INVALID),
        ((0.0,) * 12, Verdict.INVALID),
        ((1.0,) * 11 + (1000.0,), Verdict.SAME),
    ],
)
def test_odd_samples_give_valid_json_a_table_and_no_false_pass(tmp_path, samples, verdict):
    odd, plain = make_row(timing=timed(1.0, samples_s=samples)), make_row(timing=timed(1.0))
    records.append(tmp_path / "rows.jsonl", odd)
    assert records.read(tmp_path / "rows.jsonl") == [odd]
    found = against([odd], [plain])
    assert results(found, "time") == [verdict]
    assert found.exit == (Exit.REGRESSION if verdict == Verdict.INVALID else Exit.FINE)
    assert "nan" not in judge.render(found)
    turned = against([plain], [odd])  # as a baseline it says nothing against the new row
    assert results(turned, "time") == [verdict if verdict != Verdict.INVALID else NOT_COMPARABLE]
    assert turned.exit == (Exit.NOTHING if verdict == Verdict.INVALID else Exit.FINE)


def test_a_baseline_holds_the_rows_of_its_hardware(tmp_path):
    path = judge.write_baseline([*run(), make_row(arm="gpu", status="NOT_RUN", reason="none", parity=None)], tmp_path)
    assert path == tmp_path / "cpu-example-2.jsonl"
    assert [row.arm for row in records.read(path)] == ["ar", "ddtree-b64"]
    judge.write_baseline([make_row(arm="ddtree-b7", timing=timed(1.0)), *run(tree=0.4)[1:]], tmp_path)
    rows = {row.arm: row for row in records.read(path)}
    assert sorted(rows) == ["ar", "ddtree-b64", "ddtree-b7"]
    assert rows["ddtree-b64"].timing == timed(0.4)
    assert os.listdir(tmp_path) == ["cpu-example-2.jsonl"]
    (loaded,) = judge.load_baselines(folder=tmp_path)
    assert against(run(tree=0.4), list(loaded.rows)).exit == Exit.FINE


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "nothing was measured"),
        (run(environment=make_environment(dirty=True)), "uncommitted changes"),
        (run(environment=make_environment(dirty=None, commit=None)), "uncommitted changes"),
        (run(environment=changed({"busy": True})), "the GPU was busy"),
        (
            [*run(), make_row(arm="x", status="INVALID", reason="parity", parity=Parity("ar", 3, 1))],
            "INVALID rows: decode/x x",
        ),
        ([*run(), *run(environment=GPU_HOST, case="decode/y")], "rows of 2 machines"),
        ([*run(), *run(environment=make_environment(code="b"), case="decode/y")], "rows of 2 versions of the code"),
    ],
)
def test_what_may_not_become_a_baseline(tmp_path, rows, reason):
    with pytest.raises(judge.BaselineRefusedError, match=reason):
        judge.write_baseline(rows, tmp_path)
    assert os.listdir(tmp_path) == []


def stored(path: Path, rows: list[Row]) -> Path:
    with records.RowFile(path) as file:
        for row in rows:
            file.append(row)
    return path


def test_exit_statuses_of_the_command(tmp_path, capsys):
    good, slow, none = (stored(tmp_path / n, r) for n, r in (("good", run()), ("slow", run(tree=0.9)), ("none", [])))
    base = tmp_path / "base"

    def status(*arguments: object) -> tuple[int, str, str]:
        try:
            code = judge.main([*map(str, arguments)])
        except SystemExit as error:  # argparse
            code = int(str(error.code))
        return code, *capsys.readouterr()

    assert status(none, "--baselines", base)[0] == 3
    code, said, errors = status(none, "--baselines", base, "--write-baseline")
    assert (code, said, errors) == (2, "", "no baseline was written: nothing was measured\n")
    code, said, errors = status(good, "--baselines", base, "--write-baseline")
    assert (code, errors) == (0, "")
    assert "cpu-example-2.jsonl" in said
    code, said, errors = status(good, "--baselines", base)
    assert (code, errors) == (0, "")
    assert "PASSED" in said
    assert "cpu-example-2.jsonl" in said
    assert status(slow, "--baselines", base)[0] == 1
    assert status(slow, "--baselines", base, "--ci")[0] == 0
    assert status(good, "--baselines", tmp_path / "empty")[0] == 3
    assert status(good, "--baseline", good, "--strict")[0] == 0
    for wrong in ([], [tmp_path / "absent"], [base], [good, "--baseline", tmp_path / "absent"], [good, "--guess"]):
        code, said, errors = status(*wrong)
        assert (code, said) == (2, "")
        assert errors


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_character_that_cannot_be_shown_does_not_change_the_exit_status(tmp_path, encoding):
    row = make_row(status="INVALID", reason="token \u03c4|\u2028", parity=Parity("ar", 0, 0))
    done = subprocess.run(
        [sys.executable, "-m", "harness.compare", str(stored(tmp_path / "rows", [row]))],
        cwd=CHECKOUT,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert (done.returncode, done.stderr) == (1, b"")
    assert rb"\u03c4|\u2028" in done.stdout


def test_a_closed_pipe_does_not_change_the_exit_status(tmp_path):
    records.append(tmp_path / "rows", make_row())
    program = f"{sys.executable} -m harness.compare {tmp_path / 'rows'} --baseline {tmp_path / 'rows'}"
    done = subprocess.run(
        ["bash", "-c", f"({program}; echo $? >{tmp_path / 'status'}) | (exec 0<&-; sleep 1)"],
        cwd=CHECKOUT,
        capture_output=True,
        check=True,
    )
    assert ((tmp_path / "status").read_text(), done.stderr) == ("0\n", b"")


# The judge itself, on a real run: a tree loop against a toy target, some milliseconds a call.

PROMPT, VOCAB = np.array([5, 3, 8], np.int32), 32


@pytest.fixture(scope="module")
def workload() -> tuple[HashTarget, NoisyOracleDrafter, tuple[int, ...]]:
    target = HashTarget(VOCAB)
    truth = ar_generate(target, None, PROMPT, max_new_tokens=16).tokens
    return target, NoisyOracleDrafter(truth, VOCAB, 8, seed=1), truth


TRIALS, LIMIT_S, QUIET = 20, 60.0, 0.05


@pytest.mark.slow
def test_on_a_real_run_the_judge_is_never_wrong_and_decides_unless_the_turns_disagree(workload):
    """The same build twice, and a delay of 15 %, measured in turns until each is decided 20 times, or for a minute.

    However busy the machine is, no verdict may be wrong; and none may be missing where the ratios of the turns are
    within a few percent. That all are decided in spite of noise is held where the noise is known, in test_stats.
    """
    target, drafter, _ = workload
    clock = CpuClock()

    def decode() -> Generation:
        return ddtree_generate(target, drafter, PROMPT, max_new_tokens=2, budget=4)

    def delayed() -> Generation:
        start = clock.mark()
        generation = decode()
        wanted = 1.15 * clock.seconds(start, clock.mark())
        while clock.seconds(start, clock.mark()) < wanted:
            pass
        return generation

    environment = capture()
    undecided = {"new": TRIALS, "late": TRIALS}
    begun = time.monotonic()
    while any(undecided.values()) and time.monotonic() - begun < LIMIT_S:
        arms = interleave({"old": decode, "new": decode, "late": delayed}, samples=40, best_of=2, clock=clock)
        for arm, right in (("new", Verdict.SAME), ("late", Verdict.SLOW)):
            # In pairs, as the prompts of two runs are compared, and as two runs that know nothing of each other.
            for sample in ("repeat", "prompt"):
                old, row = (
                    make_row(timing=dataclasses.replace(arms[name].timing, sample=sample), environment=environment)
                    for name in ("old", arm)
                )
                found = against([row], [old])
                (verdict,) = results(found, "time")
                assert verdict in (right, Verdict.AMBG), (arm, found.lines, old.timing, row.timing)
                assert found.exit == (Exit.REGRESSION if verdict == Verdict.SLOW else Exit.FINE)
            undecided[arm] -= undecided[arm] > 0 and verdict == right  # that of the pairs
            turns = summarise([b / a for a, b in zip(*(arms[n].timing.samples_s for n in ("old", arm)), strict=True)])
            assert turns.median is not None
            assert verdict == right or turns.spread > QUIET * turns.median, (arm, found.lines, turns)


def judged(checks: list[parity.Check], folder: Any) -> judge.Comparison:
    """What compare says of a row with these checks, made as a run makes it."""
    result = combine("ar", checks, folder)
    reason = parity.reason(result)
    row = make_row(
        parity=result,
        status="OK" if result.passed else "INVALID",
        reason=reason,
        timing=timed(0.5),
        metrics={"tau": 3.5},
    )
    records.append(folder / "rows.jsonl", row)
    return against(records.read(folder / "rows.jsonl"), run())


def test_a_wrong_token_node_or_accept_length_makes_the_row_invalid_and_the_exit_status_1(workload, tmp_path):
    target, drafter, truth = workload
    found = ddtree_generate(target, drafter, PROMPT, max_new_tokens=16, budget=8, keep_traces=True)
    _, lp, ids = next(case for case in random_lists(3, 60, 7, 8) if min(case[1].shape) >= 4)
    tree = build_tree(lp, ids, 12)

    def checks(tokens: Any = found.tokens, rounds: Any = found.rounds, nodes: Any = tree) -> list[parity.Check]:
        return [
            parity.check_tokens("p", truth, tokens),
            parity.check_accepted("p", truth, rounds),
            parity.check_tree("l", nodes, lp, ids, 12),
        ]

    right = judged(checks(), tmp_path / "right")
    assert (right.exit, results(right, "parity")) == (Exit.FINE, [])

    tokens = [*found.tokens]
    tokens[9] = (tokens[9] + 1) % VOCAB
    nodes = tree.padded(12, len(lp))
    nodes["tokens"][5] += 1
    number = next(i for i, r in enumerate(found.rounds) if r.accepted)
    rounds = [*found.rounds]
    rounds[number] = dataclasses.replace(rounds[number], path=rounds[number].path[:-1])
    for name, wrong in (("token", {"tokens": tokens}), ("node", {"nodes": nodes}), ("accepted", {"rounds": rounds})):
        comparison = judged(checks(**wrong), tmp_path / name)
        assert comparison.exit == Exit.REGRESSION
        assert results(comparison, "parity") == [Verdict.INVALID]
        assert results(comparison, "time") == []  # no speed for a wrong result
        assert "parity with ar" in judge.render(comparison)


def test_a_run_from_samples_to_verdict_with_an_arm_that_raises(workload):
    target, drafter, _ = workload

    def broken() -> None:
        raise MemoryError("cache")

    arms = interleave({"ar": lambda: ar_generate(target, None, PROMPT, max_new_tokens=2), "bad": broken}, samples=10)
    bad = make_row(arm="bad", status="INVALID", reason=arms["bad"].failure, parity=None, timing=arms["bad"].timing)
    assert timing.Arm(arms["bad"].timing, arms["bad"].error) == arms["bad"]
    found = against([bad], run())
    assert (found.exit, found.lines[0].reason) == (Exit.REGRESSION, "MemoryError in turn 0: cache")
    assert drafter.block_size == 8
