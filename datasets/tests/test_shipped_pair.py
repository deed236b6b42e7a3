"""The shipped pair on real prompts: lossless in every loop, and the tables of its model card."""

from __future__ import annotations

import pytest

from datasets.evaluation import loops, pair, prompts, record, report, rows
from datasets.evaluation.measure import Settings
from datasets.tests.test_drafter_lists import cases
from reference.drafter import ReplayDrafter
from reference.loop import ddtree_generate
from reference.sampling import SamplingParams

BUDGETS = (7, 16, 32, 64)


@pytest.fixture(scope="module")
def held() -> pair.Pair:
    return pair.load()


@pytest.mark.slow
@pytest.mark.parametrize("name", prompts.SETS)
def test_every_loop_gives_the_plain_tokens(held, name, capsys):
    """16 fixed prompts a set, float32: the same tokens, and the accepted counts of the fast way, round by round.

    Blocks, temperatures and budgets take turns over the prompts.
    """
    drafter, found = held.batch_drafter(), []
    for i, prompt in enumerate(prompts.subset(prompts.load(name))):
        settings = Settings(blocks=(8, 16)[i % 2 : i % 2 + 1], budgets=(BUDGETS[i // 4],), max_new_tokens=16)
        found += list(loops.compare(held, drafter, prompt, (0.0, 1.0)[i // 2 % 2], settings))
    verdict = loops.verdict(found)
    with capsys.disabled():
        print(f"\n{name}: {verdict}")
    assert verdict.holds, [row for row in found if not (row["same_tokens"] and row["same_counts"])]
    assert verdict.loops == 16 * 3


def test_recorded_lists_drive_a_whole_loop(held):
    """The replay drafter instead of the real one: the same output, and the recorded rounds among its rounds."""
    case, arrays = next(cases(record.FOLDER / record.PLANS[0].file))
    lists = {int(p): (i, v) for p, i, v in zip(arrays["prefix_length"], arrays["ids"], arrays["lp"], strict=True)}
    run = ddtree_generate(
        held.target,
        ReplayDrafter(lists, held.target.vocab_size, int(arrays["block_size"])),
        arrays["prompt"],
        max_new_tokens=len(arrays["tokens"]),
        budget=int(arrays["budget"]),
        sampling=SamplingParams(temperature=float(arrays["temperature"]), seed=int(arrays["seed"])),
        stop_tokens=held.stop_tokens,
    )
    assert list(run.tokens) == arrays["tokens"].tolist(), case
    paths = {r.prefix_length: list(r.path) for r in run.rounds}
    for at, path in zip(arrays["prefix_length"].tolist(), arrays["path"], strict=True):
        assert paths[at] == path[path >= 0].tolist()


def test_the_card_shows_the_measured_rows(held):
    """The tables of the card are made from acceptance.jsonl, which was measured on these very files."""
    measured = rows.read(pair.FOLDER / "acceptance.jsonl")
    found = report.groups(measured)
    assert {group.set for group in found} == set(prompts.SETS)
    assert {group.temperature for group in found} == {0.0, 1.0}
    assert {group.block for group in found} == {8, 16}
    assert {row["pair"] for row in measured} == {held.digest[:16]}
    assert report.text(found) in (pair.FOLDER / "MODEL_CARD.md").read_text(encoding="utf-8")
