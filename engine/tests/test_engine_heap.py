"""Trees that the host's heap builds inside the rounds, against the GPU's: the same decoding, node for node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kdtr
from engine.decode_abi import STAGES
from engine.generation import Generation
from engine.request import NoisyOracle, Oracle, Request
from engine.run import DecodeError
from engine.tests.decoding import PROMPT, World, assert_same, micro_drafter, micro_target, write_model
from reference.tests.models import random_weights

BUILDERS = ("gpu", "heap")


def decoded(world: World, requests: list[Request], builder: str, sizes: dict[str, Any], **options: Any):
    """Generations with traces and logits, and those of failed requests with what was said of them."""
    engine = world.engine(max_requests=6, **sizes)
    try:
        made = engine.generate(
            requests, method="ddtree", builder=builder, keep_traces=True, keep_logits=True, **options
        )
    except DecodeError as error:
        return error.generations, (str(error), error.round)
    return made, None


def assert_equal(found: list[Generation], expected: list[Generation]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)  # type: ignore[arg-type]  # both of the engine
        assert_array_equal(ours.logits.view("u4"), theirs.logits.view("u4"))


@pytest.mark.parametrize("sizes", [{"cache_block_size": 3}, {"attention": "mask"}], ids=str)
def test_a_batch_of_different_requests(world, sizes):
    """Lengths, budgets, sampling, capacities and stop tokens of their own. Some end long before others."""
    tokens = world.plain().tokens
    requests = [
        Request(PROMPT, 12, 9, drafter=NoisyOracle(tokens, 8, seed=3)),
        Request([7], 3, 3),
        Request(range(9), 6, 0, temperature=1.0, top_k=12, seed=5),
        Request(PROMPT, 24, 15, drafter=Oracle(tokens, 4), stop_tokens=[tokens[11], tokens[17]]),
        Request(PROMPT, 24, 22, drafter=NoisyOracle(tokens, 8, miss=0.2, max_rank=3), capacity=len(PROMPT) + 18),
        Request(PROMPT, 0, 5),
    ]
    found, expected = (decoded(world, requests, builder, sizes)[0] for builder in BUILDERS)
    assert_equal(found, expected)
    assert [each.finish_reason for each in found] == ["length", "length", "length", "stop", "capacity", "length"]
    assert max(r.nodes for r in found[4].rounds) > 10


def test_budgets_that_a_policy_chooses(world):
    costs = {1: 1e-3, 9: 1.5e-3, 17: 4e-3}
    requests = [Request(PROMPT, 24, 30, drafter=NoisyOracle(world.plain().tokens, 8, seed=3)), Request([7], 20, 9)]
    found, expected = (decoded(world, requests, builder, {}, costs=costs)[0] for builder in BUILDERS)
    assert_equal(found, expected)
    assert len({r.nodes for r in found[0].rounds}) > 1


def test_a_request_that_fails_while_another_goes_on(world):
    """Its target's logits are NaN behind one token, and its drafter has nothing sound to say in the round after."""
    weights = random_weights(micro_target())
    tokens = world.plain().tokens
    token = next(token for token in tokens[5:] if token not in (*tokens[:5], *PROMPT))
    weights["model.embed_tokens.weight"][token] = np.nan
    sizes = {"target": write_model(world.folder / "poisoned.kdtr", micro_target(), weights)}
    requests = [Request(PROMPT, 24, 5, drafter=Oracle(tokens, 4)), Request([7, 1], 24, 5, drafter=Oracle(tokens, 4))]
    (found, said), (expected, told) = (decoded(world, requests, builder, sizes) for builder in BUILDERS)
    assert said == told is not None
    assert_equal(found, expected)


def test_a_drafter_whose_logits_are_nan(world, tmp_path):
    """No list to build from: the request fails as it does on the GPU, the other's tree is whole."""
    weights = random_weights(micro_drafter(), 5)
    weights["norm.weight"][:] = np.nan
    sizes = {"drafter": write_model(tmp_path / "drafter.kdtr", micro_drafter(), weights)}
    requests = [Request(PROMPT, 9, 5), Request(PROMPT, 9, 5, drafter=Oracle(world.plain().tokens, 3))]
    (found, said), (expected, told) = (decoded(world, requests, builder, sizes) for builder in BUILDERS)
    assert said == told
    assert "NaN" in said[0]
    assert_equal(found, expected)
    assert [each.finish_reason for each in found] == ["error", "length"]


def test_stages_and_their_dumps(world, tmp_path):
    """Every array of every step of a round, by the names of the reference's traces."""
    request = Request(PROMPT, 20, 12, drafter=NoisyOracle(world.plain().tokens, 8, miss=0.1, max_rank=2))
    dumps = []
    for builder in BUILDERS:
        with world.new_engine() as engine, engine.run([request], builder=builder) as run:
            left = run.prefill()
            files: list[Path] = []
            while left:
                for stage in STAGES:
                    files.append(tmp_path / f"{builder}-{len(files)}.kdtr")
                    left = run.stage(stage, files[-1])
            dumps.append(files)
    assert len(dumps[0]) == len(dumps[1]) > len(STAGES)
    for one, other in zip(*dumps, strict=True):
        with kdtr.open(one) as theirs, kdtr.open(other) as ours:
            assert list(ours) == list(theirs)
            for name in ours:
                assert_array_equal(ours[name], theirs[name], strict=True)


@pytest.mark.gpu
def test_rounds_are_replayed_as_graphs(world):
    """The heap is a host function among the kernels. Those of the host library are launched one by one."""
    tokens = world.plain().tokens
    with world.new_engine(max_requests=2) as engine:
        for budget in (1, 9, 30, 64):
            requests = [
                Request(PROMPT, 20, budget, drafter=NoisyOracle(tokens, 8, miss=0.1, seed=budget)),
                Request([7, 3], 9, 4),
            ]
            expected = engine.generate(requests, keep_traces=True, keep_logits=True)
            for timed in (False, True):
                for first in (True, False):
                    with engine.run(requests, builder="heap", keep_traces=True, keep_logits=True, timed=timed) as run:
                        left, rounds = run.prefill(), 0
                        while left:
                            left, rounds = run.round(), rounds + 1
                        assert_equal([run.generation(r) for r in range(2)], expected)
                        assert run.replayed == engine.graphs * (rounds - (first and not timed))
                        assert all(("tree_build" in r.seconds) == timed for r in run.generation(0).rounds)


def test_it_is_for_trees_alone(world):
    engine = world.engine()
    with pytest.raises(ValueError, match="builder 'heap' is for method 'ddtree', not for 'chain'"):
        engine.run([Request(PROMPT, 4)], "chain", builder="heap")
    with pytest.raises(ValueError, match="builder is 'cpu', expected one of gpu, heap"):
        engine.run([Request(PROMPT, 4)], builder="cpu")
