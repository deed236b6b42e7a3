"""How output ends - stop tokens, wanted tokens, cache rows - as in the reference, wherever the end falls."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from engine.generation import Round, Trace
from engine.request import DFlash, NoisyOracle, Oracle, Request
from engine.tests.decoding import PROMPT, VOCABULARY, compare, micro_target, noisy, write_model
from reference.tests.models import random_weights

ALL_METHODS = ("ar", "chain", "ddtree")


def traced(done: Round) -> Trace:
    assert done.trace is not None
    return done.trace


# --- Stop tokens (public issue: huggingface/transformers#47912)


def test_output_ends_at_the_first_stop_token_wherever_it_falls(world):
    """First root, first draft, middle and end of the path, bonus."""
    places = set()
    tokens = world.plain().tokens
    for drafter in (Oracle(tokens, 8), NoisyOracle(tokens, 5, miss=0.2, max_rank=1, seed=4)):
        for stop in sorted(set(tokens)):
            request = Request(PROMPT, 24, 12, stop_tokens=[stop, VOCABULARY + 70], drafter=drafter)
            made = compare(world, request, "ddtree")
            assert (made.tokens, made.finish_reason) == (tokens[: tokens.index(stop) + 1], "stop")
            in_path = sum(1 + r.accepted for r in made.rounds)
            assert made.cache_length == len(PROMPT) + in_path
            if not made.rounds:
                places.add("first root")
            elif in_path < len(made.tokens):
                places.add("bonus")
            else:
                last = made.rounds[-1]
                seen = traced(last)
                after = seen.tree.parents == last.path[-1]
                walked_on = seen.choices[last.path[-1]] in seen.tree.tokens[after]
                places.add(("middle" if walked_on else "end") if last.accepted else "root")
    assert places >= {"first root", "middle", "end", "bonus"}


@pytest.mark.parametrize("method", ["ar", "chain"])
def test_stop_tokens_of_the_other_methods(world, method):
    tokens = world.plain().tokens
    for stop in sorted(set(tokens))[::3]:
        request = Request(PROMPT, 24, stop_tokens={stop}, drafter=noisy(tokens))
        assert compare(world, request, method).tokens == tokens[: tokens.index(stop) + 1]


def test_a_stop_token_in_a_rejected_branch_has_no_effect(world):
    tokens = world.plain().tokens
    unused = [token for token in range(VOCABULARY) if token not in tokens]
    made = compare(world, Request(PROMPT, 16, 20, stop_tokens=unused, drafter=noisy(tokens)), "ddtree")
    assert any(set(unused) & set(traced(r).tree.tokens.tolist()) for r in made.rounds)
    assert (made.tokens, made.finish_reason) == (tokens[:16], "length")


@pytest.mark.parametrize("special", [0, VOCABULARY - 1])
def test_a_genuine_pad_or_mask_token_stays_in_the_text(world, tmp_path, special):
    """Public issue: z-lab/dflash#73. The model's tokens are renamed so that a frequent one has the special id."""
    config, tokens = micro_target(), world.plain().tokens
    frequent = Counter(tokens).most_common(1)[0][0]
    assert tokens.count(frequent) > 1
    name = np.arange(VOCABULARY)
    name[[frequent, special]] = name[[special, frequent]]
    weights = random_weights(config)
    for table in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[table] = weights[table][name]
    file = write_model(tmp_path / "target.kdtr", config, weights)
    expected = tuple(name[list(tokens)].tolist())
    with world.new_engine(target=file) as engine:
        for method, drafter in (
            ("ar", DFlash()),
            ("chain", Oracle(expected)),
            ("ddtree", noisy(expected)),
            ("ddtree", DFlash()),
        ):
            request = Request(name[list(PROMPT)], 24, 12, drafter=drafter)
            assert engine.generate([request], method=method)[0].tokens == expected
    assert expected.count(special) == tokens.count(frequent)


# --- Limits (public issues: unslothai/llama.cpp#224, NVIDIA/TensorRT-LLM#16826, vllm-project/vllm#57941,
# ggml-org/llama.cpp#26478)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_exactly_the_wanted_tokens(world, method):
    tokens = world.plain().tokens
    for wanted in (0, 1, 2, 7, 8, 9, 16, 17):
        made = compare(world, Request(PROMPT, wanted, 9, drafter=Oracle(tokens, 8)), method)
        assert (made.tokens, made.finish_reason) == (tokens[:wanted], "length")


@pytest.mark.parametrize("method", ALL_METHODS)
def test_of_stop_and_cap_the_earlier_wins(world, method):
    tokens = world.plain().tokens
    place = next(i for i in range(4, 20) if tokens[i] not in tokens[:i])
    for cap, reason in ((place, "length"), (place + 1, "stop"), (place + 2, "stop")):
        request = Request(PROMPT, cap, 9, stop_tokens={tokens[place]}, drafter=Oracle(tokens, 8))
        made = compare(world, request, method)
        assert (made.tokens, made.finish_reason) == (tokens[: min(cap, place + 1)], reason)


@pytest.mark.parametrize("cache_block_size", [0, 4])
@pytest.mark.parametrize("method", ALL_METHODS)
def test_the_capacity_ends_the_output(world, method, cache_block_size):
    """Prefix = C-1, C-depth, C-nodes, C-nodes-1 in the first round, for 12 nodes and depth 7."""
    tokens = world.plain().tokens
    for room in (0, 1, 7, 12, 13, 14):
        drafter = NoisyOracle(tokens, 8, max_rank=1)
        request = Request(PROMPT, 14, 12, drafter=drafter, capacity=len(PROMPT) + room)
        made = compare(world, request, method, cache_block_size=cache_block_size)
        assert made.tokens == tokens[:room]
        assert made.finish_reason == ("capacity" if room < 14 else "length")
        assert made.cache_length == len(PROMPT) + room


def test_the_engines_own_capacity_ends_the_output_too(world):
    tokens = world.plain().tokens
    with world.new_engine(capacity=13) as engine:
        made = engine.generate(PROMPT, method="ddtree", max_new_tokens=24, budget=12, drafter=Oracle(tokens, 8))
        whole = engine.generate(range(13), method="ar", max_new_tokens=4)
    assert (made.tokens, made.finish_reason, made.cache_length) == (tokens[:9], "capacity", 13)
    assert (whole.tokens, whole.finish_reason, whole.cache_length) == ((), "capacity", 13)
