"""The DDTree authors' public code (github.com/liranringel/ddtree, c96427a) on the shipped pair: its tokens, its counts.

The fixture holds what that code gave for the exported pair in float32 (transformers 4.57.3, CPU): the greedy output of
16 prompts and, for every block size and budget, the draft tokens that each round accepted. Its loop asks for `asked`
tokens, some more than are kept, because ours drafts less deep near the end and its own token buffer is too short there
when budget + 1 < block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

import kdtr
from datasets.evaluation import pair, prompts, record
from datasets.evaluation.batched import decode
from datasets.evaluation.loops import Method
from datasets.evaluation.measure import Settings, accepted_at, rounds
from datasets.evaluation.prompts import Prompt
from datasets.evaluation.report import CHAIN
from reference.sampling import SamplingParams

FIXTURE = record.FOLDER / "ddtree_public_rounds.kdtr"
BLOCKS, BUDGETS = (8, 16), (CHAIN, 7, 16, 64)


def cases() -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    fixture = kdtr.read(FIXTURE)
    for case in sorted({name.partition("/")[0] for name in fixture}):
        yield case, {name.partition("/")[2]: array for name, array in fixture.items() if name.startswith(case + "/")}


def recorded(arrays: dict[str, np.ndarray], block: int, budget: int) -> list[int]:
    return [int(a) for a in arrays[f"accepted_b{block}_{'chain' if budget == CHAIN else budget}"]]


@pytest.fixture(scope="module")
def held() -> pair.Pair:
    return pair.load()


def test_the_fixture_is_of_the_shipped_pair_and_covers_every_set(held):
    with kdtr.open(FIXTURE) as container:
        container.validate()
        assert held.digest in container.meta["notes"]
    found = dict(cases())
    assert {case.rsplit("_", 1)[0] for case in found} == set(prompts.SETS)
    assert len(found) == 4 * len(prompts.SETS)
    counts = [recorded(arrays, b, k) for arrays in found.values() for b, k in itertools.product(BLOCKS, BUDGETS)]
    assert sum(map(len, counts)) > 1000
    assert max(map(max, counts)) >= 7


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_plain_decode_and_one_drafter_pass_give_their_counts(held, half):
    """Every prompt, block and budget, round by round; every second prompt in the quick run."""
    drafter = held.batch_drafter()
    for case, arrays in itertools.islice(cases(), half, None, 2):
        asked = int(arrays["asked"])
        settings = Settings((0.0,), BLOCKS, tuple(b for b in BUDGETS if b != CHAIN), asked)
        text = decode(
            held.target,
            [arrays["prompt"].tolist()],
            [SamplingParams()],
            taps=held.drafter_config.target_layer_ids,
            stop_tokens=held.stop_tokens,
            max_new_tokens=asked,
        )[0]
        assert list(text.tokens[: len(arrays["tokens"])]) == arrays["tokens"].tolist(), case
        for block in BLOCKS:
            for budget, by_root in accepted_at(drafter, text, block, settings).items():
                theirs = recorded(arrays, block, budget)
                assert rounds(text, by_root)[: len(theirs)] == theirs, (case, block, budget)


@pytest.mark.parametrize("index", range(len(prompts.SETS)))
def test_our_loops_give_their_counts(held, index):
    """One prompt of every set, chain and one tree: the real loops."""
    case, arrays = next(itertools.islice(cases(), 4 * index, None))
    prompt = Prompt(prompts.SETS[0], case, "", "", tuple(arrays["prompt"].tolist()))
    for method in (Method("chain", 8, CHAIN), Method("ddtree", 16, 16)):
        run = method.run(held, prompt, 0.0, int(arrays["asked"]))
        theirs = recorded(arrays, method.block, method.budget)
        assert list(run.tokens[: len(arrays["tokens"])]) == arrays["tokens"].tolist(), case
        assert [r.accepted for r in run.rounds][: len(theirs)] == theirs, (case, method)
