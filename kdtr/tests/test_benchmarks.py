"""The measuring itself: interleaved rounds, ratios, goals, tables from a stored run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from kdtr.benchmarks.__main__ import main
from kdtr.benchmarks.measure import Arm, Sample, measure, timed
from kdtr.benchmarks.tables import Goal, Measured, confirmed


def arm(log: list[str], name: str) -> Arm:
    def run() -> Sample:
        log.append(name)
        return Sample(float(len(log)), 0.5)

    return run


def test_rounds_are_interleaved_shuffled_and_warmed() -> None:
    log: list[str] = []
    samples = measure({name: arm(log, name) for name in "abcdef"}, 5, slow=("c",))
    assert {name: len(found) for name, found in samples.items()} == dict.fromkeys("abdef", 5) | {"c": 3}
    pairs = list(zip(log[::2], log[1::2], strict=True))
    assert all(warm == measured for warm, measured in pairs)
    rounds = [[name for name, _ in pairs[i : i + 6]] for i in range(0, 18, 6)]
    assert all(sorted(names) == list("abcdef") for names in rounds)
    assert len({"".join(names) for names in rounds}) > 1
    assert [sample.wall for sample in samples["a"]] == [float(i + 1) for i in range(1, len(log), 2) if log[i] == "a"]


def test_only_the_operation_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("kdtr.benchmarks.measure.time.perf_counter", lambda: clock[0])

    def spend(seconds: float) -> bool:
        clock[0] += seconds
        return True

    measured = timed(lambda: spend(2.0), before=lambda: spend(100.0), check=lambda found: spend(1000.0) and found)
    assert measured().wall == 2.0
    with pytest.raises(AssertionError, match="a fast wrong answer has no time"):
        timed(lambda: 1, check=lambda found: found == 2)()


def example(samples: Mapping[str, tuple[float, ...]]) -> Measured:
    goals = {"ours": Goal("minimum", "base", 0.9), "small": Goal(milliseconds=5)}
    taken = {name: [Sample(wall, 2 * wall) for wall in walls] for name, walls in samples.items()}
    return Measured("A title", "base", taken, goals)


def test_table_and_goals() -> None:
    measured = example({"base": (0.010, 0.020, 0.030), "ours": (0.012, 0.010, 0.9), "small": (0.006, 0.010, 0.002)})
    assert measured.lines() == [
        "A title",
        "arm    n  median ms  minimum ms  x median  x minimum  x cpu  goal                    is",
        "-----  -  ---------  ----------  --------  ---------  -----  ----------------------  ---------------",
        "base   3      20.00       10.00      1.00       1.00   1.00",
        "ours   3      12.00       10.00      1.67       1.00   1.00  >= 0.9x base (minimum)  met",
        "small  3       6.00        2.00      3.33       5.00   5.00  <= 5 ms (median)        MISSED by 1.20x",
        "x: time of base / time of the arm (higher is faster); cpu: minimum of processor time",
    ]
    assert measured.shortfall("ours") == pytest.approx(0.9)
    assert measured.shortfall("ours", "median") == pytest.approx(0.9 * 12 / 20)
    assert measured.shortfall("small", "cpu") == pytest.approx(4 / 5)


@pytest.mark.parametrize(
    ("ours", "small", "missed"),
    [
        (0.020, 0.009, []),
        (0.023, 0.009, ["ours"]),
        (0.020, 0.011, ["small"]),
        (0.023, 0.011, ["ours", "small"]),
    ],
)
def test_a_goal_is_grossly_missed_by_the_clock_and_in_processor_time(
    ours: float, small: float, missed: list[str]
) -> None:
    samples = {"base": (0.010,), "ours": (ours,), "small": (small,)}
    assert example(samples).grossly_missed() == missed
    fast = {
        name: [Sample(each.wall, each.wall / 10) for each in taken] for name, taken in example(samples).samples.items()
    }
    assert Measured("", "base", {**fast, "base": [Sample(0.010, 0.010)]}, example(samples).goals).grossly_missed() == []


def test_a_slow_machine_misses_no_goal_in_milliseconds() -> None:
    assert example({"base": (0.1,), "ours": (0.1,), "small": (0.09,)}).grossly_missed() == []


@pytest.mark.parametrize(("taken", "used"), [((1,), 0), ((9, 1), 1), ((9, 9, 1), 2), ((9, 9, 9, 1), 2)])
def test_a_gross_miss_is_measured_again_before_it_counts(taken: tuple[int, ...], used: int) -> None:
    each = [example({"base": (0.010,), "ours": (0.010 * times,), "small": (0.001,)}) for times in taken]
    further = iter(each[1:])
    assert confirmed(each[0], lambda: next(further)) is each[used]
    assert len(list(further)) == len(taken) - 1 - used


def test_tables_come_back_from_a_stored_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = example({"base": (0.010,), "ours": (0.012,), "small": (0.006,)})
    path = tmp_path / "bench.json"
    stored = {"benchmarks": [{"extra_info": {}}, {"extra_info": {"kdtr": measured.info()}}]}
    path.write_text(json.dumps(stored), encoding="utf-8")
    assert main([str(path)]) == 0
    assert capsys.readouterr().out.rstrip("\n").split("\n") == measured.lines()
    for text in ("", "[]", '{"benchmarks": []}', '{"benchmarks": [{"extra_info": {"kdtr": {}}}]}'):
        path.write_text(text, encoding="utf-8")
        assert main([str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    assert main([str(tmp_path / "absent.json")]) == 2
