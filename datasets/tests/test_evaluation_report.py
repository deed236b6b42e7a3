"""Rows, statistics and verdicts of the evaluation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from datasets.evaluation import __main__ as command
from datasets.evaluation import report, rows
from datasets.evaluation.statistics import Acceptance, bootstrap, distinct_ratio, split_looping


def row(prompt: int, accepted: dict[int, list[int]], distinct: float = 1.0, **other) -> rows.Row:
    plain = {"set": "heldout_code", "id": str(prompt), "temperature": 0.0, "block": 8, "distinct": distinct}
    return plain | {"accepted": {str(budget): h for budget, h in accepted.items()}} | other


def test_tau_counts_tokens_per_target_pass():
    side = Acceptance.of([[1, 0, 2], [3]])  # 3 rounds accept 0, 2, 2; 3 rounds accept nothing
    assert side.tau == pytest.approx(1 + 4 / 6)
    assert side.tau_per_prompt == pytest.approx(((1 + 4 / 3) + 1) / 2)
    assert math.isnan(Acceptance.of([[0], []]).tau)
    assert Acceptance.of([[0], [0, 1]]).tau_per_prompt == 2.0  # the prompt without a round does not count


def test_distinct_ratio_of_8_grams():
    assert distinct_ratio(list(range(20))) == 1.0
    assert distinct_ratio([1, 2] * 10) == pytest.approx(2 / 13)
    assert distinct_ratio([1] * 7) == 1.0
    assert split_looping({"a": 0.8, "b": 0.79}) == (["a"], ["b"])


def test_paired_interval_is_narrower_than_the_spread_of_prompts():
    """Prompts differ widely, the two methods by a constant: only pairing sees the difference."""
    rounds = np.full(60, 40)
    base = Acceptance(np.random.default_rng(1).integers(0, 200, 60), rounds)
    better = Acceptance(base.accepted + 8, rounds)
    step = bootstrap(better, base)
    assert step.value == pytest.approx(0.2)
    assert step.low == pytest.approx(0.2)
    assert step.high == pytest.approx(0.2)
    alone = bootstrap(better)
    assert alone.high - alone.low > 0.4
    with pytest.raises(ValueError, match="60 and 59"):
        bootstrap(better, Acceptance(base.accepted[1:], rounds[1:]))


def test_interval_covers_the_truth_about_as_often_as_it_says():
    draw, hits = np.random.default_rng(2), 0
    for trial in range(200):
        sides = [Acceptance(draw.poisson(rate, 50) * 10, np.full(50, 10)) for rate in (2.0, 2.5)]
        step = bootstrap(sides[1], sides[0], samples=400, seed=trial)
        hits += step.low <= 0.5 <= step.high
    assert 175 <= hits <= 198


def test_claims_hold_only_where_the_interval_says_so():
    good = [row(i, {b: [2, 3 + b // 8, 2] for b in (0, 7, 64)}) for i in range(12)]
    good += [row(i, {b: [0, b, 60] for b in (0, 7, 64)}, block=16) for i in range(12)]
    found = report.groups(good)
    verdict = {c.text: c.holds for c in report.claims(found, chain_floor=1.5)}
    assert verdict["heldout_code greedy block 8: chain tau >= 1.5"]
    assert not {c.text: c.holds for c in report.claims(found)}["heldout_code greedy block 8: chain tau >= 2.5"]
    # accepting 1 instead of 2 more often: the second group falls with the budget, and is told so
    assert not verdict["heldout_code greedy block 16: tau 64 above 7"]
    assert not verdict["heldout_code greedy block 16: no step falls"]
    flat = report.groups(row(i, {b: [5, 5] for b in (0, 7, 64)}) for i in range(12))
    verdict = {c.text: c.holds for c in report.claims(flat, chain_floor=1.5)}
    assert verdict["heldout_code greedy block 8: no step falls"]
    assert not verdict["heldout_code greedy block 8: tau 7 above chain"]


def test_looping_prompts_stand_apart():
    data = [row(0, {0: [0, 4], 7: [0, 4]}), row(1, {0: [0, 0, 4], 7: [0, 0, 4]}, 0.3)]
    found = report.groups(data)
    assert "2.00 [2.00, 2.00]" in report.tau_table(found, looping=False)
    assert "3.00" not in report.tau_table(found, looping=False)
    assert "3.00 [3.00, 3.00]" in report.tau_table(found, looping=True)
    only = report.groups([row(1, {b: [0, 0, 4] for b in (0, 7, 64)}, 0.3)])
    assert not any(c.holds for c in report.claims(only))


def test_a_method_without_all_prompts_is_refused():
    with pytest.raises(ValueError, match=r"budget 7: 1 prompts are missing, e\.g\. 2"):
        report.groups([row(1, {0: [1], 7: [1]}), row(2, {0: [1]})])


def test_the_card_gets_the_tables_once(tmp_path):
    card = tmp_path / "MODEL_CARD.md"
    card.write_text("# Card\n\nText.\n")
    command.fill_card("first", card)
    command.fill_card("second", card)
    assert card.read_text() == f"# Card\n\nText.\n\n{command.MARKS[0]}\nsecond\n{command.MARKS[1]}\n"
    card.write_text(card.read_text() + "more\n")
    command.fill_card("third", card)
    assert card.read_text().endswith(f"{command.MARKS[0]}\nthird\n{command.MARKS[1]}\nmore\n")


def test_rows_survive_a_torn_line(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    assert rows.read(path) == []
    rows.append(path, [{"a": 1}, {"a": 2}])
    with path.open("ab") as file:
        file.write(b'{"a": 3')
    assert rows.read(path) == [{"a": 1}, {"a": 2}]
    assert "torn" in capsys.readouterr().err
    rows.append(path, [{"a": 4}])
    assert rows.read(path) == [{"a": 1}, {"a": 2}, {"a": 4}]
    path.write_text('{"a": 1}\nnot json\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:2: not JSON"):
        rows.read(path)
