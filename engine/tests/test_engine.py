"""Decoding against the reference, token for token and round for round, for every method and every drafter.

How output ends: test_engine_ends.py. Bits of logits: test_engine_bits.py. Failures and use: test_engine_use.py.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import kdtr
from engine.request import DFlash, NoisyOracle, Oracle, Replay, Request
from engine.sources import CHECKOUT
from engine.tests.decoding import PROMPT, assert_same, compare, noisy
from reference.checkpoint import load_target
from reference.loop import ar_generate

GOLDEN = CHECKOUT / "datasets" / "golden"
METHODS = ("chain", "ddtree")
ALL_METHODS = ("ar", *METHODS)
SAMPLED = {"temperature": 1.0, "top_k": 12, "top_p": 0.875, "seed": 2**40 + 3}


# --- The golden runs


@pytest.mark.parametrize("name", ["tiny", "tiny_mla"])
def test_golden_tokens_and_logits_with_right_proposals(world, name):
    """24 tokens with block 8 take 3 rounds: tau 8."""
    golden = kdtr.read(GOLDEN / f"{name}_run.kdtr")
    engine = world.engine(target=GOLDEN / f"{name}.kdtr", drafter=None, block_size=8, max_budget=7)
    made = engine.generate(
        golden["prompt"], method="ddtree", max_new_tokens=24, drafter=Oracle(golden["tokens"]), keep_logits=True
    )
    assert made.tokens == tuple(golden["tokens"].tolist())
    assert [r.accepted for r in made.rounds] == [7, 7, 7]
    assert made.tau == 8.0
    assert (made.finish_reason, made.cache_length) == ("length", len(golden["prompt"]) + 24)
    assert np.abs(made.logits[:24] - golden["logits"]).max() <= 8e-6


def test_golden_tokens_by_plain_decoding(world):
    golden = kdtr.read(GOLDEN / "tiny_run.kdtr")
    engine = world.engine(target=GOLDEN / "tiny.kdtr", drafter=None, block_size=8, max_budget=7)
    made = engine.generate(golden["prompt"], method="ar", max_new_tokens=24, keep_logits=True)
    assert made.tokens == tuple(golden["tokens"].tolist())
    assert [r.accepted for r in made.rounds] == [0] * 24
    assert np.abs(made.logits[:24] - golden["logits"]).max() <= 8e-6


# --- Every method with every drafter


@pytest.mark.parametrize(
    "sampling", [{}, SAMPLED, {"temperature": 0.5, "seed": 7}], ids=["greedy", "filtered", "sampled"]
)
def test_plain_decoding(world, sampling):
    compare(world, Request(PROMPT, 24, **sampling), "ar")


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_stand_ins(world, method, sampling):
    tokens = world.plain(**sampling).tokens
    for drafter in (
        Oracle(tokens, 5, right=7),
        Oracle(tokens[:9], 8),
        noisy(tokens),
        NoisyOracle(tokens, 4, miss=0.5, max_rank=30, seed=2**63 + 5),
    ):
        made = compare(world, Request(PROMPT, 14, 9, drafter=drafter, **sampling), method)
        assert made.tokens == tokens[:14]


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_the_drafter(world, method, sampling):
    """Its lists come from float32 passes, so they agree up to rounding; its trees are the same."""
    made = compare(world, Request(PROMPT, 12, 9, **sampling), method, 2e-5)
    assert made.tokens == world.plain(count=12, **sampling).tokens
    assert all(r.nodes for r in made.rounds[:-1])
    short = compare(world, Request(PROMPT, 4, 9, **sampling), method, 2e-5, block_size=3)
    assert short.rounds[0].depth_limit == 2


@pytest.mark.parametrize("method", METHODS)
def test_recorded_lists_give_the_recorded_run(world, method):
    """Lists of unequal depth, at positions in any order, and one that was complete."""
    tokens = world.plain().tokens
    request = Request(PROMPT, 24, 10, drafter=NoisyOracle(tokens, 8, miss=0.3, max_rank=2, seed=3))
    recorded = world.reference(request, method)
    lists = {
        r.prefix_length: (r.trace.lists.ids, r.trace.lists.lp)
        for r in reversed(recorded.rounds)
        if r.trace is not None and r.trace.lists is not None and r.trace.lists.ids.size
    }
    assert len({len(ids) for ids, _ in lists.values()}) > 1
    made = compare(world, Request(PROMPT, 24, 10, drafter=Replay(lists, 8)), method)
    assert [r.path for r in made.rounds] == [r.path for r in recorded.rounds]
    ids, _ = next(iter(lists.values()))
    complete = {len(PROMPT): (ids[:1, :3], np.array([[-0.5, -1.5, -np.inf]], np.float32)[:, : ids.shape[1]])}
    some = compare(world, Request(PROMPT, 3, 10, drafter=Replay(complete, 8)), method)
    assert some.tokens == tokens[:3]
    assert compare(world, Request(PROMPT, 2, 10, drafter=Replay({}, 8)), method).tokens == tokens[:2]


@pytest.mark.parametrize(("block_size", "max_rank", "seed"), [(4, 2, 1), (5, 1, 4)])
def test_every_depth_rank_and_number_of_moved_rows_is_reached(world, block_size, max_rank, seed):
    tokens = world.plain(count=32).tokens
    drafter = NoisyOracle(tokens, block_size, miss=0.05, max_rank=max_rank, seed=seed)
    made = compare(world, Request(PROMPT, 32, 12, drafter=drafter), "ddtree")
    assert made.tokens == tokens
    depths = Counter(r.accepted for r in made.rounds)
    ranks = Counter(rank for r in made.rounds for rank in r.ranks)
    moved = Counter(r.moved_rows for r in made.rounds)
    assert depths.keys() == moved.keys() == set(range(block_size))
    assert ranks.keys() == set(range(max_rank + 1))


# --- Degenerate rounds (public issue: sgl-project/sglang#38351)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("block_size", [1, 2])
def test_blocks_of_one_and_two(world, method, block_size):
    tokens = world.plain().tokens
    made = compare(world, Request(PROMPT, 7, 4, drafter=Oracle(tokens, block_size)), method)
    assert made.tokens == tokens[:7]
    assert max(r.accepted for r in made.rounds) == block_size - 1


@pytest.mark.parametrize("budget", [0, 1, 64])
def test_budgets_that_leave_the_root_alone_or_exceed_the_vocabulary(world, budget):
    tokens = world.plain().tokens
    for drafter in (Oracle(tokens, 3), DFlash()):
        made = compare(world, Request(PROMPT, 5, budget, drafter=drafter), "ddtree", 2e-5)
        assert made.tokens == tokens[:5]
        assert max(r.nodes for r in made.rounds) <= budget


@pytest.mark.parametrize("method", ALL_METHODS)
def test_a_prompt_of_one_token(world, method):
    tokens = world.plain((4,), 9).tokens
    for drafter in (noisy(tokens), DFlash()):
        compare(world, Request([4], 9, 8, drafter=drafter), method, 2e-5)


# --- Batches (public issue: trymirai/lalamo#207)


@pytest.mark.parametrize("sampled", [False, True])
def test_requests_of_a_batch_are_those_of_solo_runs(world, sampled):
    """Other prompts, lengths, budgets, drafters, draws and ends side by side; and the callback hears each of them."""
    prompts = [PROMPT, (2,), tuple(range(20)), (9, 9, 4)]
    golden = [world.plain(prompt, 12).tokens for prompt in prompts]
    requests = [
        Request(prompts[0], 12, 7, drafter=noisy(golden[0])),
        Request(prompts[1], 3, 0, drafter=Oracle(golden[1], 8)),
        Request(prompts[2], 9, 24, drafter=DFlash()),
        Request(prompts[3], 12, 1, drafter=NoisyOracle(golden[3], 3), stop_tokens=golden[3][5:6], capacity=12),
    ]
    if sampled:
        for number, request in enumerate(requests):
            if number != 1:
                object.__setattr__(request, "temperature", 1.0)
                object.__setattr__(request, "seed", number)
    heard: dict[int, list[int]] = {number: [] for number in range(4)}
    engine = world.engine(max_requests=4, prefill_rows=20)
    made = engine.generate(
        requests, method="ddtree", keep_traces=True, on_tokens=lambda number, tokens: heard[number].extend(tokens)
    )
    for request, one in zip(requests, made, strict=True):
        assert_same(one, world.reference(request, "ddtree"), 2e-5)
    assert [tuple(tokens) for tokens in heard.values()] == [one.tokens for one in made]


@pytest.mark.parametrize(
    "world", [pytest.param("host", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
def test_the_shipped_pair_writes_the_references_text(world):
    models = CHECKOUT / "datasets" / "models"
    prompt = tuple(range(40, 52))
    target = load_target(models / "target.kdtr")
    expected = ar_generate(target, None, np.array(prompt), max_new_tokens=4).tokens
    with world.new_engine(target=models / "target.kdtr", drafter=models / "drafter.kdtr", max_budget=4) as engine:
        for method in ALL_METHODS:
            assert engine.generate(prompt, method=method, max_new_tokens=4).tokens == expected
