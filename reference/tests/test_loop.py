"""Bookkeeping of the loops: rounds, stops, limits, errors, records. test_lossless.py compares the output at large."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from reference.cache import CapacityError
from reference.drafter import NoisyOracleDrafter, OracleDrafter
from reference.loop import STAGES, ar_generate, chain_generate, ddtree_generate, tau
from reference.sampling import SamplingParams, TargetRowError
from reference.tests.toys import HashTarget, Poisoned, RandomDrafter, WatchingDrafter
from reference.topk import DraftError

VOCABULARY = 23
PROMPT = np.array([5, 1, 17, 3], np.int32)
LOOPS: dict[str, Any] = {"chain": chain_generate, "ddtree": ddtree_generate}
ALL_LOOPS: dict[str, Any] = {"ar": ar_generate, **LOOPS}


def golden(target, count, **options):
    return ar_generate(target, None, PROMPT, max_new_tokens=count, **options)


def noisy(tokens, block_size=8, seed=0, **options):
    return NoisyOracleDrafter(tokens, VOCABULARY, block_size, seed=seed, **options)


def streamed(loop, target, drafter, **options):
    """The generation, after checking that the callback saw exactly its tokens, none of them empty-handed."""
    calls: list[tuple[int, ...]] = []
    result = loop(target, drafter, PROMPT, on_tokens=calls.append, **options)
    assert all(calls)
    assert tuple(token for tokens in calls for token in tokens) == result.tokens
    return result


def traced(r) -> Any:
    assert r.trace is not None
    return r.trace


# --- Rounds and tau


@pytest.mark.parametrize("loop", LOOPS)
def test_24_golden_tokens_with_block_8_take_3_rounds_and_tau_is_8(loop):
    target = HashTarget(VOCABULARY)
    plain = golden(target, 24)
    result = streamed(LOOPS[loop], target, OracleDrafter(plain.tokens, VOCABULARY, 8), max_new_tokens=24, budget=20)
    assert result.tokens == plain.tokens
    assert [r.accepted for r in result.rounds] == [7, 7, 7]
    assert [r.depth_limit for r in result.rounds] == [7, 7, 7]
    assert result.tau == 8.0
    assert result.finish_reason == "length"
    assert result.cache_length == len(PROMPT) + 24


def test_plain_decoding_is_one_token_a_round():
    target = HashTarget(VOCABULARY)
    result = streamed(ar_generate, target, None, max_new_tokens=24)
    assert len(result.tokens) == len(result.rounds) == 24
    assert result.tau == 1.0
    assert target.widths == [len(PROMPT)] + [1] * 24
    assert result.cache_length == len(PROMPT) + 24


def test_tau_pools_over_rounds():
    target = HashTarget(VOCABULARY)
    tokens = golden(target, 40).tokens
    one = ddtree_generate(target, OracleDrafter(tokens, VOCABULARY, 8), PROMPT, max_new_tokens=40)
    other = ddtree_generate(target, OracleDrafter(tokens, VOCABULARY, 8, right=0), PROMPT, max_new_tokens=40)
    assert (one.tau, other.tau) == (8.0, 1.0)
    assert tau(one.rounds + other.rounds) == 1 + 35 / 45
    assert math.isnan(tau(()))


def test_a_drafter_that_is_wrong_from_some_token_on_costs_one_round_a_token_from_there():
    target = HashTarget(VOCABULARY)
    tokens = golden(target, 24).tokens
    result = ddtree_generate(
        target, OracleDrafter(tokens, VOCABULARY, 8, right=10), PROMPT, max_new_tokens=24, budget=7
    )
    assert result.tokens == tokens
    assert [r.accepted for r in result.rounds] == [7, 1] + [0] * 14


@pytest.mark.parametrize("loop", LOOPS)
def test_a_drafter_without_proposals_falls_back_to_one_token_a_round(loop):
    """Block of one (public issue: sgl-project/sglang#38351), no rows, and for the tree a budget of 0."""
    target = HashTarget(VOCABULARY)
    tokens = golden(target, 9).tokens
    options = [{"block_size": 1}, {"block_size": 8, "rows": 0}] + [{"block_size": 8, "budget": 0}] * (loop == "ddtree")
    for option in options:
        budget = option.pop("budget", 16)
        drafter = RandomDrafter(VOCABULARY, **option)
        result = LOOPS[loop](target, drafter, PROMPT, max_new_tokens=9, budget=budget)
        assert result.tokens == tokens
        assert [r.nodes for r in result.rounds] == [0] * 9


def test_records_of_a_round_describe_its_tree_and_path():
    target = HashTarget(VOCABULARY)
    tokens = golden(target, 60).tokens
    result = ddtree_generate(target, noisy(tokens), PROMPT, max_new_tokens=60, budget=30, keep_traces=True)
    length, emitted = len(PROMPT), 0
    for r in result.rounds:
        tree, choices = traced(r).tree, traced(r).choices
        assert r.prefix_length == length
        assert r.nodes == tree.node_count <= 30
        assert r.path == tuple(i for i in tree.paths()[r.path[-1]] if i >= 0)
        assert r.ranks == tuple(tree.ranks[list(r.path[1:])])
        assert r.accepted == tree.depths[r.path[-1]] <= r.depth_limit
        assert tuple(tree.tokens[list(r.path)]) == tokens[emitted : emitted + 1 + r.accepted]
        assert choices[list(r.path[:-1])].tolist() == tree.tokens[list(r.path[1:])].tolist()
        assert traced(r).bonus == choices[r.path[-1]]
        assert traced(r).lists.ids.shape == (r.depth_limit, min(30, VOCABULARY)) or r.depth_limit == 0
        assert tuple(r.seconds) == STAGES
        assert min(r.seconds.values()) >= 0
        assert 0 < sum(r.seconds.values()) <= r.wall_seconds
        length, emitted = length + 1 + r.accepted, emitted + 1 + r.accepted
    assert emitted == 60
    assert any(r.moved_rows for r in result.rounds)
    plain = golden(target, 3, keep_traces=True)
    assert [traced(r).lists for r in plain.rounds] == [None] * 3
    assert golden(target, 3).rounds[0].trace is None


@pytest.mark.parametrize("loop", LOOPS)
def test_drafter_is_told_every_committed_position_once_with_its_features(loop):
    """The root and the accepted rows, in path order; before the first round the prompt."""
    target, drafter = HashTarget(3), WatchingDrafter(3, 6)
    prompt = np.array([1, 2, 0, 1], np.int32)
    result = LOOPS[loop](target, drafter, prompt, max_new_tokens=50, budget=40)
    assert drafter.seen == [*prompt, *result.tokens]
    assert result.tau > 1.2


# --- Stop tokens (public issue: huggingface/transformers#47912)


def test_output_ends_at_the_first_stop_token_wherever_it_falls():
    """Path index 0, 1, middle, last, bonus; streamed, counted and cached alike; equal to plain decoding."""
    places = set()
    target = HashTarget(VOCABULARY)
    tokens = golden(target, 30).tokens
    for block_size, miss, seed in ((8, 0.0, 1), (8, 0.2, 2), (5, 0.1, 3), (2, 0.0, 4)):
        for stop in sorted(set(tokens)):
            cut = tokens[: tokens.index(stop) + 1]
            plain = streamed(ar_generate, target, None, max_new_tokens=30, stop_tokens=[stop])
            assert (plain.tokens, plain.finish_reason) == (cut, "stop")
            drafter = noisy(tokens, block_size, seed, miss=miss, max_rank=1)
            result = streamed(
                ddtree_generate, target, drafter, max_new_tokens=30, budget=24, stop_tokens=[stop, 99], keep_traces=True
            )
            assert (result.tokens, result.finish_reason) == (cut, "stop")
            in_path = sum(1 + r.accepted for r in result.rounds)
            assert result.cache_length == len(PROMPT) + in_path == target.caches[-1].length
            assert len(cut) - in_path in (0, 1)
            if not result.rounds:
                places.add("first root")
            elif in_path < len(cut):
                places.add("bonus")
            else:
                last = result.rounds[-1]
                walked = 1 + last.accepted
                whole = (
                    traced(last).choices[last.path[-1]]
                    in traced(last).tree.tokens[traced(last).tree.parents == last.path[-1]]
                )
                places.add("middle" if whole and walked > 2 else "first draft" if walked == 2 else "end of the path")
    assert places == {"first root", "first draft", "middle", "end of the path", "bonus"}


def test_a_stop_token_in_a_rejected_branch_has_no_effect():
    target = HashTarget(VOCABULARY)
    tokens = golden(target, 30).tokens
    unused = [token for token in range(VOCABULARY) if token not in tokens]
    result = ddtree_generate(
        target, noisy(tokens), PROMPT, max_new_tokens=30, budget=40, stop_tokens=unused, keep_traces=True
    )
    assert any(set(unused) & set(traced(r).tree.tokens.tolist()) for r in result.rounds)
    assert (result.tokens, result.finish_reason) == (tokens, "length")


@pytest.mark.parametrize("loop", LOOPS)
def test_of_stop_and_cap_the_earlier_wins(loop):
    target = HashTarget(VOCABULARY)
    tokens = golden(target, 30).tokens
    place = next(i for i in range(4, 20) if tokens[i] not in tokens[:i])
    for cap, reason in ((place, "length"), (place + 1, "stop"), (place + 2, "stop"), (30, "stop")):
        drafter = OracleDrafter(tokens, VOCABULARY, 8)
        result = LOOPS[loop](target, drafter, PROMPT, max_new_tokens=cap, stop_tokens={tokens[place]})
        assert result.tokens == tokens[: min(cap, place + 1)]
        assert result.finish_reason == reason
        plain = golden(target, cap, stop_tokens={tokens[place]})
        assert (plain.tokens, plain.finish_reason) == (result.tokens, reason)


@pytest.mark.parametrize("special", [0, VOCABULARY - 1])
def test_a_genuine_pad_or_mask_token_stays_in_the_text(special):
    """Lengths come from the commit counter, never from token values (public issue: z-lab/dflash#73)."""
    first = len(PROMPT)
    for places in ((0,), (1,), (3, 4), (7,), (8,), (11,), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)):
        target = HashTarget(VOCABULARY, script={first + i: special for i in places})
        tokens = golden(target, 12).tokens
        assert all(tokens[i] == special for i in places)
        for drafter in (OracleDrafter(tokens, VOCABULARY, 8), noisy(tokens)):
            result = ddtree_generate(target, drafter, PROMPT, max_new_tokens=12, budget=20)
            assert result.tokens == tokens
            stop = next((i for i in range(12) if tokens[i] not in (*tokens[:i], special)), None)
            if stop is not None:
                cut = ddtree_generate(target, drafter, PROMPT, max_new_tokens=12, stop_tokens=[tokens[stop]])
                assert cut.tokens == tokens[: stop + 1]


# --- Limits (public issues: unslothai/llama.cpp#224, NVIDIA/TensorRT-LLM#16826, vllm-project/vllm#57941,
# ggml-org/llama.cpp#26478)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("wanted", [0, 1, 2, 7, 8, 9, 15, 16, 17])
def test_exactly_the_wanted_tokens_and_the_depth_shrinks(loop, wanted):
    target = HashTarget(VOCABULARY)
    tokens = golden(target, 20).tokens
    result = streamed(LOOPS[loop], target, OracleDrafter(tokens, VOCABULARY, 8), max_new_tokens=wanted, budget=20)
    assert result.tokens == tokens[:wanted]
    assert result.finish_reason == "length"
    left = wanted
    for r in result.rounds:
        assert r.depth_limit == min(7, left - 1)
        left -= 1 + r.accepted
    assert left == 0
    assert len(result.rounds) == -(-wanted // 8)


@pytest.mark.parametrize("block_size", [None, 4])
@pytest.mark.parametrize("loop", ALL_LOOPS)
@pytest.mark.parametrize("room", [0, 1, 2, 7, 8, 19, 20, 21, 22, 39, 40, 41])
def test_the_capacity_ends_the_output_and_nothing_is_written_past_it(loop, room, block_size):
    """Prefix = C-1, C-2, C-depth, C-nodes, C-nodes-1 for 20 nodes and depth 7; guard rows behind the cache stay."""
    target = HashTarget(VOCABULARY, block_size=block_size, guard=64)
    tokens = golden(HashTarget(VOCABULARY), 40).tokens
    result = ALL_LOOPS[loop](
        target, noisy(tokens, max_rank=1), PROMPT, max_new_tokens=40, capacity=len(PROMPT) + room, budget=20
    )
    assert result.tokens == tokens[:room]
    assert result.finish_reason == ("capacity" if room < 40 else "length")
    assert result.cache_length == len(PROMPT) + min(room, 40)
    cache = target.caches[-1]
    beyond = np.setdiff1d(np.arange(cache.storage.shape[1]), cache._slots)
    assert len(beyond) >= 64
    assert (cache.storage[:, beyond] == 777).all()
    length = len(PROMPT)
    for r in result.rounds:  # consecutive after each round
        assert r.prefix_length == length
        assert r.nodes + 1 <= cache.capacity - length
        length += 1 + r.accepted


@pytest.mark.parametrize("loop", LOOPS)
def test_a_drafter_may_reach_less_deep_than_its_block(loop):
    target = HashTarget(VOCABULARY)
    tokens = golden(target, 20).tokens
    result = LOOPS[loop](target, OracleDrafter(tokens[:9], VOCABULARY, 8), PROMPT, max_new_tokens=20)
    assert result.tokens == tokens
    assert [r.accepted for r in result.rounds] == [7, 0] + [0] * 11
    short = LOOPS[loop](target, RandomDrafter(VOCABULARY, 8, rows=2), PROMPT, max_new_tokens=20)
    assert short.tokens == tokens


def test_a_drafter_that_goes_too_deep_is_refused():
    class Deep(RandomDrafter):
        def propose(self, root_token, depth_limit):
            return super().propose(root_token, 7)

    with pytest.raises(ValueError, match="request 3: 7 depths proposed, at most 4 asked for"):
        ddtree_generate(HashTarget(VOCABULARY), Deep(VOCABULARY, 8), PROMPT, max_new_tokens=5, request=3)


@pytest.mark.parametrize("loop", ALL_LOOPS)
def test_a_prompt_beyond_the_capacity_names_needed_and_available_rows(loop):
    with pytest.raises(CapacityError, match="request 2: the prompt needs 4 cache rows, 3 are available"):
        ALL_LOOPS[loop](HashTarget(9), RandomDrafter(9, 8), [1, 2, 3, 4], max_new_tokens=5, capacity=3, request=2)


def test_requests_that_make_no_sense_are_refused():
    target, drafter = HashTarget(9), RandomDrafter(9, 8)
    for wanted, budget in ((-1, 8), (1, -1)):
        with pytest.raises(ValueError, match=f"max_new_tokens {wanted} and budget {budget} must be at least 0"):
            ddtree_generate(target, drafter, [1], max_new_tokens=wanted, budget=budget)
    for prompt in ([], [1.5], [[1, 2]], 3):
        with pytest.raises(ValueError, match="the prompt must be integers"):
            ddtree_generate(target, drafter, prompt, max_new_tokens=1)
    with pytest.raises(TypeError, match=r"unknown options \['stop_token'\]"):
        ddtree_generate(target, drafter, [1], max_new_tokens=1, stop_token=[3])  # type: ignore[call-arg]
    assert target.widths == [], "refused before any work"


# --- Padded vocabulary


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, seed=3)])
def test_padded_target_and_drafter_columns_are_never_chosen_or_drafted(sampling):
    narrow, padded = HashTarget(VOCABULARY), HashTarget(VOCABULARY, padding=9)
    padded.table[:, :VOCABULARY] = narrow.table
    tokens = golden(narrow, 30, sampling=sampling).tokens
    drafter = RandomDrafter(VOCABULARY + 9, 8)
    result = ddtree_generate(padded, drafter, PROMPT, max_new_tokens=30, sampling=sampling, keep_traces=True)
    assert result.tokens == tokens
    assert all((traced(r).tree.tokens < VOCABULARY).all() for r in result.rounds)
    small = ddtree_generate(padded, RandomDrafter(5, 8), PROMPT, max_new_tokens=30, sampling=sampling)
    assert small.tokens == tokens


# --- NaN in the target (public issue: vllm-project/vllm#53029)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, seed=5)])
@pytest.mark.parametrize("loop", ALL_LOOPS)
def test_nan_on_the_accepted_path_stops_before_anything_of_the_round_is_committed(loop, sampling):
    tokens = golden(HashTarget(VOCABULARY), 30, sampling=sampling).tokens
    for index in (0, 1, 4, 7, 8, 12):
        position = len(PROMPT) + index
        target = HashTarget(VOCABULARY)
        poisoned = Poisoned(target, lambda place, token, p=position, t=tokens[index]: (place, token) == (p, t))
        heard: list[int] = []
        with pytest.raises(TargetRowError, match="request 6, node") as error:
            ALL_LOOPS[loop](
                poisoned, OracleDrafter(tokens, VOCABULARY, 8), PROMPT,
                max_new_tokens=30, sampling=sampling, request=6, budget=12, on_tokens=heard.extend,
            )  # fmt: skip
        rounds_before = index if loop == "ar" else index // 8 * 8
        assert target.caches[-1].length == len(PROMPT) + rounds_before
        assert heard == list(tokens[:rounds_before])
        if loop != "ddtree":
            assert error.value.node == index - rounds_before


def test_nan_off_the_path_has_no_effect_and_nan_after_the_prompt_is_named():
    target = HashTarget(VOCABULARY)
    tokens = golden(target, 30).tokens
    hit = []

    def off_path(place, token):
        wrong = place >= len(PROMPT) and tokens[place - len(PROMPT)] != token
        hit.append(wrong)
        return wrong

    result = ddtree_generate(Poisoned(target, off_path), noisy(tokens), PROMPT, max_new_tokens=30, budget=40)
    assert result.tokens == tokens
    assert sum(hit) > 30
    for loop in (ar_generate, ddtree_generate):
        with pytest.raises(TargetRowError, match="request 1, position 3"):
            loop(Poisoned(target, lambda place, token: True), noisy(tokens), PROMPT, max_new_tokens=3, request=1)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_drafter_with_nan_is_refused_by_request_depth_and_token_before_the_target_runs(loop):
    """Public issue: vllm-project/vllm#41834. A depth of -inf alone is no fault: drafting ends above it."""

    class Broken(RandomDrafter):
        fill: float = np.nan

        def propose(self, root_token, depth_limit):
            logits = super().propose(root_token, depth_limit)
            logits[2:3, 11 if np.isnan(self.fill) else slice(None)] = self.fill
            return logits

    target, drafter = HashTarget(VOCABULARY), Broken(VOCABULARY, 8)
    with pytest.raises(DraftError, match="request 5, depth 3, token 11: the logit is NaN"):
        LOOPS[loop](target, drafter, PROMPT, max_new_tokens=9, request=5)
    assert target.widths == [len(PROMPT)]
    drafter.fill = -np.inf
    result = LOOPS[loop](target, drafter, PROMPT, max_new_tokens=9, keep_traces=True)
    assert result.tokens == golden(target, 9).tokens
    assert traced(result.rounds[0]).tree.depths.max() == 2


def test_a_failing_callback_or_target_leaves_a_consistent_cache():
    target = HashTarget(VOCABULARY)
    tokens = golden(target, 30).tokens

    def fail(emitted):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ddtree_generate(target, OracleDrafter(tokens, VOCABULARY, 8), PROMPT, max_new_tokens=30, on_tokens=fail)
    assert target.caches[-1].length == len(PROMPT) + 8
    again = ddtree_generate(target, OracleDrafter(tokens, VOCABULARY, 8), PROMPT, max_new_tokens=30)
    assert again.tokens == tokens
