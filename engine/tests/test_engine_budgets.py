"""The policy that chooses the budgets of rounds by what they cost: off by default, and it changes no token."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from engine import abi
from engine.request import DFlash, NoisyOracle, Replay, Request
from engine.tests.decoding import PROMPT, World

FLAT = {1: 1e-3, 65: 1e-3}  # a row costs nothing: the widest trees
STEEP = {1: 1e-6, 65: 1.0}  # a row costs all: the smallest


def decoded(world: World, costs: dict[int, float] | None, requests: list[Request]):
    """Generations, with traces and logits."""
    engine = world.engine(max_requests=2)
    with engine.run(requests, "ddtree", keep_traces=True, keep_logits=True, costs=costs) as run:
        left = run.prefill()
        while left:
            left = run.round()
        return [run.generation(request) for request in range(len(requests))]


@pytest.mark.parametrize("costs", [FLAT, STEEP, {1: 1e-3, 9: 1.5e-3, 17: 4e-3}], ids=["flat", "steep", "bent"])
@pytest.mark.parametrize("drafter", ["dflash", "noisy"])
def test_tokens_and_bits_are_those_of_fixed_budgets(world, costs, drafter):
    proposals = DFlash() if drafter == "dflash" else NoisyOracle(world.plain().tokens, 8, seed=4)
    requests = [Request(PROMPT, 16, 24, drafter=proposals), Request([7, 2], 5, 9)]
    fixed = decoded(world, None, requests)
    for ours, theirs in zip(decoded(world, costs, requests), fixed, strict=True):
        assert (ours.tokens, ours.finish_reason) == (theirs.tokens, theirs.finish_reason)
        assert_array_equal(ours.logits.view("u4"), theirs.logits.view("u4"))
        assert all(r.prediction is None for r in theirs.rounds)
        assert ours.rounds[0].prediction.budget == 24
        assert ours.rounds[0].prediction.tokens is None
        for done in ours.rounds[1:]:
            assert done.nodes <= done.prediction.budget
            assert done.prediction.tokens > 0


def test_costs_decide(world):
    request = Request(PROMPT, 20, 24)
    for costs, budget in ((FLAT, 24), (STEEP, 1)):
        rounds = decoded(world, costs, [request])[0].rounds
        assert {r.prediction.budget for r in rounds[1:]} == {budget}


def test_what_is_expected_is_the_best_by_probability_over_time(world):
    """Lists that say the same in every round: the choice is that of the sums of exp(score), worked out here."""
    probabilities = np.array([0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002])
    rng = np.random.default_rng(2)
    lists = {}
    for position in range(4, 96):
        ids = np.stack([rng.permutation(23)[:8] for _ in range(3)]).astype(np.int32)
        lists[position] = (ids, np.tile(np.log(probabilities), (3, 1)).astype(np.float32))
    costs = {1: 10e-3, 5: 11e-3, 9: 14e-3, 25: 40e-3}
    made = decoded(world, costs, [Request(PROMPT, 12, 24, drafter=Replay(lists, 4))])[0]
    scores = made.rounds[0].trace.tree.scores
    assert len(scores) == 25
    expected = {m: 1 + np.exp(scores[1 : 1 + m]).sum() for m in (1, 2, 4, 8, 12, 16, 24)}
    seconds = {m: float(np.interp(1 + m, list(costs), list(costs.values()))) for m in expected}
    best = max(expected, key=lambda m: expected[m] / seconds[m])
    second = made.rounds[1].prediction
    assert 1 < best < 24
    assert second.budget == best
    assert second.tokens == pytest.approx(expected[best], rel=1e-12)
    assert second.seconds == pytest.approx(seconds[best], rel=1e-12)


def test_costs_that_make_no_sense_are_refused(world):
    engine = world.engine(max_requests=2)
    for costs, said in (({4: 0.0}, "number 0 is 0"), ({0: 1.0}, "of 0 rows"), ({3: 1.0, 4: float("nan")}, "number 1")):
        with pytest.raises(abi.SizeError, match=said):
            engine.run([Request(PROMPT, 4, 2)], costs=costs)
    with pytest.raises(abi.SizeError, match="cost_count is 1"):
        engine.run([Request(PROMPT, 4)], "chain", costs={1: 1.0})
