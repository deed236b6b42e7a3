"""Logits of committed rows have the same bits whatever the method, the tree, the caches, the passes of the prompt and
the company, in float32 and in bf16 (public issues: ggml-org/llama.cpp#27407, ggml-org/llama.cpp#25618,
ml-explore/mlx-lm#1423)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kdtr
from engine.engine import Engine, Method
from engine.request import DFlash, NoisyOracle, Oracle, Replay, Request
from engine.sources import CHECKOUT
from engine.tests.decoding import PROMPT, VOCABULARY, World, micro_target, noisy, write_model
from reference.tests.models import random_weights

GOLDEN = CHECKOUT / "datasets" / "golden"
COUNT = 16


@dataclass(frozen=True, eq=False)
class Side:
    """A world in one dtype."""

    world: World
    dtype: str

    def engine(self, **options: Any) -> Engine:
        return self.world.engine(dtype=self.dtype, **options)

    @functools.cache  # noqa: B019  # lives as long as the module's tests
    def tokens(self, prompt: tuple[int, ...] = PROMPT, count: int = 24) -> tuple[int, ...]:
        """Plain decoding's: of the reference in float32; bf16 has the engine's own."""
        if self.dtype == "float32":
            return self.world.plain(prompt, count).tokens
        return self.engine().generate(prompt, method="ar", max_new_tokens=count).tokens

    def logits(self, request: Request, method: Method, **options: Any) -> np.ndarray:
        """uint32 [rows, V]: bits of the logits from the prompt's last row on."""
        made = self.engine(**options).generate([request], method=method, keep_logits=True)[0]
        assert made.tokens == self.tokens(tuple(request.prompt), request.max_new_tokens)
        assert made.logits.shape == (1 + len(made.tokens), VOCABULARY)
        assert np.isfinite(made.logits).all()
        bits: np.ndarray = made.logits.view(np.uint32)
        return bits


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def side(world, request):
    return Side(world, request.param)


@pytest.fixture(scope="module")
def plain(side):
    """Bits of plain decoding."""
    return side.logits(Request(PROMPT, COUNT), "ar")


@pytest.mark.parametrize("budget", [1, 2, 7, 32, 64])
def test_of_trees_of_every_size(side, plain, budget):
    tokens = side.tokens()
    drafter = NoisyOracle(tokens, 8, miss=0.05, max_rank=1, seed=budget)
    found = side.logits(Request(PROMPT, COUNT, budget, drafter=drafter), "ddtree")
    assert_array_equal(found, plain)


@pytest.mark.parametrize("method", ["chain", "ddtree"])
def test_of_real_proposals(side, plain, method):
    assert_array_equal(side.logits(Request(PROMPT, COUNT, 6, drafter=DFlash()), method), plain)


@pytest.mark.parametrize("block_size", [2, 5, 8])
def test_of_chains(side, plain, block_size):
    tokens = side.tokens()
    assert_array_equal(side.logits(Request(PROMPT, COUNT, drafter=Oracle(tokens, block_size)), "chain"), plain)


@pytest.mark.parametrize("cache_block_size", [1, 3, 16, 200])
def test_of_paged_caches(side, plain, cache_block_size):
    request = Request(PROMPT, COUNT, 9, drafter=noisy(side.tokens()))
    assert_array_equal(side.logits(request, "ddtree", cache_block_size=cache_block_size), plain)


@pytest.mark.parametrize("method", ["ar", "ddtree"])
@pytest.mark.parametrize("prefill_rows", [1, 2, 3, 4, 64])
def test_of_prompts_in_passes_of_any_size(side, plain, method, prefill_rows):
    request = Request(PROMPT, COUNT if method == "ar" else 6, 5)
    assert_array_equal(side.logits(request, method, prefill_rows=prefill_rows), plain[: 1 + request.max_new_tokens])


def test_of_a_long_prompt_and_of_its_parts(side):
    """A pass per row, a chunk of them, the whole: and what plain decoding wrote, read as a prompt."""
    prompt = tuple((7 * i * i + i) % VOCABULARY for i in range(45))
    whole = side.logits(Request(prompt, 2), "ar", prefill_rows=45)
    for rows in (1, 7, 16):
        assert_array_equal(side.logits(Request(prompt, 2), "ar", prefill_rows=rows), whole)
    text = (*PROMPT, *side.tokens()[:9])
    again = side.logits(Request(text, 3), "ar")
    assert_array_equal(again, side.logits(Request(PROMPT, 12), "ar")[9:])


def test_of_the_drafters_lists(side):
    """What it proposes after prompts in passes of any size, from caches of any kind and in any company."""
    request = Request(PROMPT, 6, 5)
    found = []
    for options, company in (
        ({}, 0),
        ({"prefill_rows": 1}, 0),
        ({"prefill_rows": 3, "cache_block_size": 2}, 0),
        ({"max_requests": 3, "prefill_rows": 12}, 2),
    ):
        requests = [*[Request(range(9), 6, 5)] * company, request]
        made = side.engine(**options).generate(requests, method="ddtree", keep_traces=True)[-1]
        found.append([r.trace.lists for r in made.rounds if r.trace.lists is not None])
    assert len(found[0]) > 1
    for other in found[1:]:
        for ours, theirs in zip(other, found[0], strict=True):
            assert_array_equal(ours.ids, theirs.ids)
            assert_array_equal(ours.lp.view(np.uint32), theirs.lp.view(np.uint32))


def test_of_requests_in_any_company(side, plain):
    """Batches of other lengths and budgets, at any place of the batch, against the request alone."""
    tokens = side.tokens()
    own = Request(PROMPT, COUNT, 7, drafter=noisy(tokens))
    others = [
        Request(range(17), 9, 20, drafter=DFlash()),
        Request([3], 2, 0, drafter=Oracle(side.tokens((3,), 2))),
    ]
    engine = side.engine(max_requests=3, prefill_rows=12)
    for place in range(3):
        made = engine.generate([*others[:place], own, *others[place:]], method="ddtree", keep_logits=True)
        assert_array_equal(made[place].logits.view(np.uint32), plain)


def test_of_two_runs(side, plain):
    request = Request(PROMPT, COUNT, 7, drafter=noisy(side.tokens()))
    with side.world.new_engine(dtype=side.dtype) as engine:
        for _ in range(2):
            made = engine.generate([request], method="ddtree", keep_logits=True)[0]
            assert_array_equal(made.logits.view(np.uint32), plain)


@pytest.mark.parametrize("name", ["tiny", pytest.param("tiny_mla", marks=pytest.mark.slow)])
def test_of_the_golden_models(side, name):
    """q_lora_rank, shared experts and groups; latents of 512 + 64 in the second."""
    golden = kdtr.read(GOLDEN / f"{name}_run.kdtr")
    engine = side.engine(target=GOLDEN / f"{name}.kdtr", drafter=None, block_size=8, max_budget=16)
    found = []
    tokens = tuple(golden["tokens"].tolist())
    for method, drafter in (("ar", DFlash()), ("chain", Oracle(tokens)), ("ddtree", noisy(tokens))):
        request = Request(golden["prompt"], 9, 16, drafter=drafter)
        found.append(engine.generate([request], method=method, keep_logits=True)[0].logits.view(np.uint32))
    assert_array_equal(found[1], found[0])
    assert_array_equal(found[2], found[0])


def test_ties_go_to_the_lowest_id_on_every_path(side, tmp_path):
    """Two tokens with equal embeddings and heads: their logits are equal bits, and the lower one is chosen."""
    config, weights = micro_target(), random_weights(micro_target())
    tokens = side.tokens()
    low, high = sorted((tokens[0], next(t for t in range(VOCABULARY) if t not in tokens)))
    for table in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[table][[low, high]] = weights[table][tokens[0]]
    expected = tuple(low if token == tokens[0] else token for token in tokens[:COUNT])
    with side.world.new_engine(
        dtype=side.dtype, target=write_model(tmp_path / "target.kdtr", config, weights)
    ) as engine:
        for method, drafter in (("ar", DFlash()), ("ddtree", noisy(expected))):
            request = Request(PROMPT, COUNT, 6, drafter=drafter)
            made = engine.generate([request], method=method, keep_logits=True)[0]
            assert made.tokens == expected
            assert_array_equal(made.logits[:, low], made.logits[:, high])
    assert low in expected


def test_of_replayed_lists_in_which_every_branch_is_wrong(side, plain):
    """Rows of nothing but rejected nodes change nothing."""
    tokens = side.tokens()
    lists = {}
    for place in range(COUNT):
        wrong = [t for t in range(VOCABULARY) if t not in tokens[place + 1 : place + 3]][:3]
        lists[len(PROMPT) + place] = (np.array([wrong, wrong], np.int32), np.log(np.full((2, 3), 0.25, np.float32)))
    found = side.logits(Request(PROMPT, COUNT, 9, drafter=Replay(lists, 3)), "ddtree")
    assert_array_equal(found, plain)
