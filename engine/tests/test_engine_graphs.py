"""Rounds replayed as a CUDA graph against rounds launched kernel by kernel: the same tokens, records and bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from engine import sources
from engine.decode_abi import STAGES
from engine.engine import Engine, Method
from engine.generation import Generation
from engine.request import NoisyOracle, Oracle, Request
from engine.run import DecodeError, Run
from engine.tests.backends import open_ops
from engine.tests.decoding import PROMPT, World, micro_target, write_model
from engine.tests.test_engine_bf16 import FAST
from reference.numerics import round_to_bf16
from reference.tests.models import random_weights

pytestmark = pytest.mark.gpu
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 12, "top_p": 0.875, "seed": 2**40 + 3}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Of the CUDA library alone: the host library has no graphs."""
    made = World(open_ops("cuda").library, tmp_path_factory.mktemp("models"))
    yield made
    made.close()


def finished(run: Run) -> list[Generation]:
    left = run.prefill()
    while left:
        left = run.round()
    return [run.generation(request) for request in range(run.requests)]


def both(engine: Engine, requests: Sequence[Request], method: Method, **options: Any) -> list[Generation]:
    """What replayed rounds give, after it was compared with single launches; all but the first are replayed."""
    kept = {"keep_logits": True, "keep_traces": True, **options}
    with engine.run(requests, method, graphs=False, **kept) as run:
        expected = finished(run)
        assert run.replayed == 0
    for first in (True, False):  # the second time the graph is there
        with engine.run(requests, method, **kept) as run:
            found = finished(run)
            rounds = max(len(each.rounds) for each in found)
            assert rounds - 1 <= run.replayed <= rounds if first else run.replayed == rounds
        for ours, theirs in zip(found, expected, strict=True):
            assert_equal(ours, theirs)
    return expected


def assert_equal(ours: Generation, theirs: Generation) -> None:
    assert (ours.tokens, ours.finish_reason, ours.cache_length) == (
        theirs.tokens,
        theirs.finish_reason,
        theirs.cache_length,
    )
    assert_array_equal(ours.logits.view("u4"), theirs.logits.view("u4"))
    assert len(ours.rounds) == len(theirs.rounds)
    for one, other in zip(ours.rounds, theirs.rounds, strict=True):
        assert one.trace is not None
        assert other.trace is not None
        for name in ("prefix_length", "nodes", "depth_limit", "path", "ranks"):
            assert getattr(one, name) == getattr(other, name), name
        for name in ("tokens", "parents", "depths", "ranks", "scores"):
            assert_array_equal(getattr(one.trace.tree, name), getattr(other.trace.tree, name), strict=True)
        assert_array_equal(one.trace.choices, other.trace.choices)
        assert (one.trace.lists is None) == (other.trace.lists is None)
        if one.trace.lists is not None and other.trace.lists is not None:
            for name in ("ids", "lp", "logz"):
                assert_array_equal(getattr(one.trace.lists, name), getattr(other.trace.lists, name), strict=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["ar", "chain", "ddtree"])
def test_the_drafter(world, method, sampling, dtype):
    both(world.engine(dtype=dtype), [Request(PROMPT, 14, 9, **sampling)], method)


@pytest.mark.parametrize("budget", [0, 1, 3, 9, 32, 50, 64])
def test_trees_of_every_size(world, budget):
    """Between the steps of 1, 2, 4, 8, ... as well: the arrays are wider than the trees."""
    drafter = NoisyOracle(world.plain().tokens, 8, miss=0.05, max_rank=1, seed=budget)
    both(world.engine(), [Request(PROMPT, 20, budget, drafter=drafter)], "ddtree")


@pytest.mark.parametrize("method", ["ar", "chain", "ddtree"])
@pytest.mark.parametrize("options", [{}, {"cache_block_size": 3}, {"attention": "mask"}], ids=str)
def test_a_batch_of_different_requests(world, method, options):
    """Lengths, budgets, drafters, sampling, stop tokens and capacities of their own; some end long before others."""
    tokens = world.plain().tokens
    requests = [
        Request(PROMPT, 20, 9, drafter=NoisyOracle(tokens, 8, seed=3)),
        Request([7], 3, 3),
        Request(range(9), 16, 0, **SAMPLED),
        Request(PROMPT, 24, 30, drafter=Oracle(tokens, 4), stop_tokens=[tokens[11], tokens[17]]),
        Request(PROMPT, 24, 5, drafter=Oracle(tokens, 8), capacity=len(PROMPT) + 9),
        Request(PROMPT, 0, 5),
    ]
    made = both(world.engine(max_requests=6, **options), requests, method)
    assert [each.finish_reason for each in made] == ["length", "length", "length", "stop", "capacity", "length"]


def test_budgets_that_a_policy_chooses(world):
    """A graph for each; the choices are those of single launches."""
    costs = {1: 1e-3, 9: 1.5e-3, 17: 4e-3}
    requests = [Request(PROMPT, 24, 30, drafter=NoisyOracle(world.plain().tokens, 8, seed=3)), Request([7], 20, 9)]
    with world.new_engine(max_requests=2) as engine:
        found, replayed = [], []
        for graphs in (False, True, True):
            with engine.run(requests, graphs=graphs, keep_logits=True, keep_traces=True, costs=costs) as run:
                found.append(finished(run))
                replayed.append(run.replayed)
    assert replayed[0] == 0 < replayed[1] < replayed[2]
    for made in found[1:]:
        for ours, theirs in zip(made, found[0], strict=True):
            assert_equal(ours, theirs)
            assert [r.prediction for r in ours.rounds] == [r.prediction for r in theirs.rounds]
    assert len({r.nodes for r in found[0][0].rounds}) > 1


def test_requests_share_a_graph_and_each_has_its_own_state(world):
    """Prompts, lengths, seeds and stop tokens are no part of a graph, and nothing is left from one to the next."""
    with world.new_engine() as engine:
        tokens = world.plain().tokens
        for number, request in enumerate(
            [
                Request(PROMPT, 12, 12),
                Request(range(11), 17, 9, stop_tokens=[3]),
                Request([5], 9, 10, **SAMPLED),
                Request([5], 9, 11, temperature=0.5, seed=1),
                Request(PROMPT, 12, 9, drafter=NoisyOracle(tokens, 8)),
            ]
        ):
            with engine.run([request], graphs=False, keep_logits=True, keep_traces=True) as run:
                expected = finished(run)[0]
            with engine.run([request], keep_logits=True, keep_traces=True) as run:
                found = finished(run)[0]
                shares = number in (1, 3)
                assert run.replayed == len(found.rounds) - (0 if shares else 1)
            assert_equal(found, expected)


def test_more_shapes_than_are_kept(world):
    """The oldest goes, and comes back as a new one, whose first round is made kernel by kernel."""

    def first_rounds(budget: int, method: Method = "ddtree") -> Any:
        with engine.run([Request(PROMPT, 8, budget)], method) as run:
            made = finished(run)[0]
            assert made.tokens == world.plain().tokens[:8]
            return len(made.rounds) - run.replayed

    budgets = (1, 2, 3, 4, 8, 12, 15, 16, 24, 32, 48, 64, 96, 128)
    with world.new_engine(max_budget=128, capacity=512) as engine:
        made = [first_rounds(budget) for budget in budgets] + [first_rounds(0, "chain"), first_rounds(0, "ar")]
        assert made == [1] * 16
        assert first_rounds(1) == 0
        assert first_rounds(128) == 0
        with engine.run([Request(PROMPT, 8, 4, temperature=1.0)]) as run:
            finished(run)
        assert [first_rounds(1), first_rounds(128), first_rounds(2)] == [0, 0, 1]


def test_a_batch_of_many(world):
    """Top-k has a way of its own for many rows, and so have the kernels of control for many requests."""
    requests = [Request([1 + r % 7, r % 5], 6, 1 + r % 9) for r in range(66)]
    both(world.engine(max_requests=66, prefill_rows=132, capacity=32, max_budget=16), requests, "ddtree")


@pytest.mark.parametrize("heads", [16, 64])
def test_attention_on_tensor_cores_and_a_wide_vocabulary(world, tmp_path, heads):
    """The plan of attention follows the cache's rows and their keys; the choice among many logits is made in parts."""
    config = micro_target(**{**FAST, "num_attention_heads": heads, "vocab_size": 9008})
    weights = {name: round_to_bf16(array) for name, array in random_weights(config).items()}
    target = write_model(tmp_path / "target.kdtr", config, weights)
    prompt = [(7 * i * i) % 9001 for i in range(530)]
    sizes: dict[str, Any] = {"target": target, "drafter": None, "dtype": "bfloat16", "prefill_rows": 128}
    with world.new_engine(capacity=600, **sizes) as short, world.new_engine(capacity=5000, **sizes) as long:
        assert set(short.paths.values()) == {"tensor_cores"}
        plain = short.generate(prompt, method="ar", max_new_tokens=24, keep_logits=True)
        drafter = NoisyOracle(plain.tokens, 8, miss=0.2, max_rank=2, seed=heads)
        for engine in (short, long):
            for request in (
                Request(prompt, 24, 20, drafter=drafter),
                Request(prompt, 24, 9, drafter=drafter, capacity=560),
                Request(prompt, 8, 20, drafter=drafter, **SAMPLED),
            ):
                made = both(engine, [request], "ddtree")[0]
                if not request.temperature:
                    assert made.tokens == plain.tokens
                    assert_array_equal(made.logits.view("u4"), plain.logits.view("u4"))


def test_a_run_that_is_given_up_leaves_graph_and_engine_as_they_were(world):
    request = Request(PROMPT, 16, 6)
    with world.new_engine() as engine:
        expected = engine.generate([request], keep_logits=True, keep_traces=True)[0]
        for rounds in (0, 1, 2, 3):
            with engine.run([request]) as run:
                run.prefill()
                for _ in range(rounds):
                    run.round()
            assert_equal(engine.generate([request], keep_logits=True, keep_traces=True)[0], expected)


@pytest.mark.parametrize("method", ["ar", "chain", "ddtree"])
def test_stages_between_replayed_rounds(world, tmp_path, method):
    """Steps are graphs of their own, on the same arrays; with a dump they are launched kernel by kernel."""
    request = Request(PROMPT, 20, 6)
    engine = world.engine()
    expected = engine.generate([request], method=method, graphs=False, keep_logits=True, keep_traces=True)[0]
    with engine.run([request], method, keep_logits=True, keep_traces=True) as run:
        left, number, replayed = run.prefill(), 0, 0
        while left:
            if number % 3 == 1:
                for stage in STAGES:
                    left = run.stage(stage, tmp_path / "dump" if number % 2 and stage != "commit" else None)
            else:
                left = run.round()
            assert run.replayed - replayed in ((0,) if number % 3 == 1 else (0, 1) if number == 0 else (1,))
            number, replayed = number + 1, run.replayed
        assert_equal(run.generation(0), expected)


@pytest.mark.parametrize("builder", ["gpu", "heap"])
def test_rounds_are_launched_while_the_drafter_takes_the_rows_of_the_one_before(world, builder):
    """Nothing else is kept that the host would wait for."""
    requests = [Request(PROMPT, 40, 9), Request([7, 3], 31, 30), Request(range(9), 25, 4, **SAMPLED)]
    engine = world.engine(max_requests=3, prefill_rows=48)
    expected = engine.generate(requests, graphs=False, keep_traces=True)
    for _ in range(8):
        for ours, theirs in zip(engine.generate(requests, builder=builder), expected, strict=True):
            assert ours.tokens == theirs.tokens
            assert [(r.path, r.ranks, r.nodes) for r in ours.rounds] == [
                (r.path, r.ranks, r.nodes) for r in theirs.rounds
            ]


def test_a_request_that_fails_while_another_goes_on(world):
    """Its logits are NaN behind one token."""
    weights = random_weights(micro_target())
    tokens = world.plain().tokens
    token = next(token for token in tokens[5:] if token not in (*tokens[:5], *PROMPT))
    weights["model.embed_tokens.weight"][token] = np.nan
    engine = world.engine(target=write_model(world.folder / "poisoned.kdtr", micro_target(), weights), max_requests=2)
    requests = [Request(PROMPT, 24, 5, drafter=Oracle(tokens, 4)), Request([7, 1], 24, 5, drafter=Oracle(tokens, 4))]
    found = []
    for graphs in (False, True, True):
        with pytest.raises(DecodeError) as error:
            engine.generate(requests, graphs=graphs, keep_logits=True, keep_traces=True)
        found.append((str(error.value), error.value.round, error.value.generations))
    for said, number, generations in found[1:]:
        assert (said, number) == found[0][:2]
        for ours, theirs in zip(generations, found[0][2], strict=True):
            assert_equal(ours, theirs)


def test_cublas_has_no_graphs(world):
    engine = world.engine(gemm="cublas")
    assert not engine.graphs
    with engine.run([Request(PROMPT, 6, 4)]) as run:
        assert len(finished(run)[0].tokens) == 6
        assert run.replayed == 0


def test_launches_that_wait_are_not_captured():
    text = (
        "import tempfile; from pathlib import Path; from engine.tests.backends import open_ops\n"
        "from engine.tests.decoding import PROMPT, World\n"
        "e = World(open_ops('cuda').library, Path(tempfile.mkdtemp())).engine()\n"
        "print(e.graphs, len(e.generate(PROMPT, max_new_tokens=5).tokens))"
    )
    for value, said in (("1", "False 5\n"), ("0", "True 5\n")):
        environment = {**os.environ, "KDTREE_LAUNCH_BLOCKING": value}
        command = [sys.executable, "-c", text]
        done = subprocess.run(command, capture_output=True, text=True, cwd=sources.CHECKOUT, env=environment)
        assert done.stdout == said, done.stderr
