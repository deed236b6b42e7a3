"""Requests that fail, runs that are given up, runs in steps, and what an engine refuses."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kdtr
from engine import abi, checkpoint, decode_abi
from engine.build import CUDA_NAME
from engine.decode_abi import STAGES, Handle
from engine.engine import Engine
from engine.request import DFlash, Filled, NoisyOracle, Oracle, Replay, Request
from engine.run import DecodeError
from engine.tests.decoding import PROMPT, VOCABULARY, assert_same, compare, micro_target, noisy, write_model
from reference.checkpoint import load_target
from reference.sampling import TargetRowError
from reference.tests.models import random_weights
from reference.topk import DraftError

METHODS = ("ar", "chain", "ddtree")


# --- NaN in the target (public issue: vllm-project/vllm#53029)


@pytest.fixture(scope="module")
def poisoned(world):
    """(file, token): the target with NaN in the embedding of a token that plain decoding outputs, not at the start."""
    weights = random_weights(micro_target())
    tokens = world.plain().tokens
    token = next(token for token in tokens[5:] if token not in (*tokens[:5], *PROMPT))
    weights["model.embed_tokens.weight"][token] = np.nan
    return write_model(world.folder / "poisoned.kdtr", micro_target(), weights), token


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_nan_on_the_accepted_path_names_request_and_node_and_commits_nothing_of_the_round(
    world, poisoned, method, sampled
):
    file, token = poisoned
    sampling: dict[str, Any] = {"temperature": 0.125, "seed": 4} if sampled else {}
    tokens = world.plain(**sampling).tokens
    assert token in tokens, "these draws do not draw it"
    index = tokens.index(token)
    engine = world.engine(target=file)
    drafter = Oracle(tokens, 4)
    request = Request(PROMPT, 24, 5, drafter=drafter, **sampling)
    heard: list[int] = []
    with pytest.raises(DecodeError) as error:
        engine.generate([request], method=method, on_tokens=lambda _, new: heard.extend(new))
    before = index if method == "ar" else index // 4 * 4
    assert heard == list(tokens[:before])
    with pytest.raises(TargetRowError) as expected:
        world.reference(request, method, target=load_target(file))
    assert str(error.value) == str(expected.value)
    assert (error.value.request, error.value.code, error.value.place) == (0, 6, index - before)
    assert error.value.round == (before if method == "ar" else before // 4)
    failed = error.value.generations[0]
    assert (failed.tokens, failed.finish_reason) == (tokens[:before], "error")
    assert failed.cache_length == len(PROMPT) + before
    assert len(failed.rounds) == error.value.round


def test_nan_in_one_request_leaves_the_others_alone(world, poisoned):
    file, token = poisoned
    tokens = world.plain().tokens
    index = tokens.index(token)
    sound = Request(PROMPT, index, 7, drafter=noisy(tokens))
    failing = Request(PROMPT, 24, 7, drafter=noisy(tokens))
    engine = world.engine(target=file, max_requests=3, prefill_rows=12)
    with pytest.raises(DecodeError, match=r"^request 1, node \d+: the target's logits hold NaN") as error:
        engine.generate([sound, failing, failing], method="ddtree", keep_traces=True, keep_logits=True)
    assert [note.split(",")[0] for note in error.value.__notes__] == ["request 2"]
    made = error.value.generations
    assert [one.finish_reason for one in made] == ["length", "error", "error"]
    assert_same(made[0], world.reference(sound, "ddtree"), 2e-6)
    assert made[0].tokens == tokens[:index]
    assert not np.isnan(made[0].logits).any()


def test_nan_off_the_path_has_no_effect(world, poisoned):
    file, token = poisoned
    tokens = world.plain().tokens
    index = tokens.index(token)
    request = Request(PROMPT, index, 20, drafter=NoisyOracle(tokens, 4, miss=0.2, max_rank=2))
    made = world.engine(target=file).generate([request], method="ddtree", keep_traces=True)[0]
    assert made.tokens == tokens[:index]
    assert any(token in r.trace.tree.tokens for r in made.rounds)


@pytest.mark.parametrize("method", ["ar", "ddtree"])
def test_nan_after_a_prompt_names_request_and_position(world, poisoned, method):
    file, token = poisoned
    engine = world.engine(target=file, max_requests=3, prefill_rows=12)
    requests = [Request(PROMPT, 2), Request([1, 2, token, 4, 5], 2), Request([token], 2)]
    with pytest.raises(DecodeError, match=r"^request 1, position 4: the target's logits hold NaN") as error:
        engine.generate(requests, method=method)
    assert error.value.__notes__[0].startswith("request 2, position 0: ")
    assert error.value.round is None
    assert [(g.tokens, g.cache_length) for g in error.value.generations[1:]] == [((), 0), ((), 0)]
    assert error.value.generations[0].tokens == world.plain(count=2).tokens


@pytest.mark.parametrize("method", ["chain", "ddtree"])
def test_a_drafter_with_nan_is_refused_by_request_depth_and_token(world, method):
    """Public issue: vllm-project/vllm#41834. NaN in the embedding of the mask token, which only drafted rows read."""
    weights = random_weights(micro_target())
    weights["model.embed_tokens.weight"][VOCABULARY - 1] = np.nan
    file = write_model(world.folder / "masked.kdtr", micro_target(), weights)
    requests = [Request(PROMPT, 5, 3, drafter=noisy(world.plain().tokens)), Request(PROMPT, 5, 3)]
    with pytest.raises(DraftError) as expected:
        world.reference(requests[1], method, target=load_target(file))
    engine = world.engine(target=file, max_requests=2, prefill_rows=8)
    with pytest.raises(DecodeError) as error:
        engine.generate(requests, method=method)
    assert str(error.value) == str(expected.value).replace("request 0", "request 1")
    assert error.value.round == 0
    assert [len(g.tokens) for g in error.value.generations] == [5, 0]
    assert error.value.generations[1].cache_length == len(PROMPT)


# --- Runs


def test_a_run_that_is_given_up_leaves_the_engine_as_it_was(world):
    tokens = world.plain().tokens
    request = Request(PROMPT, 12, 5, drafter=noisy(tokens))
    with world.new_engine() as engine:
        expected = engine.generate([request], method="ddtree", keep_logits=True)[0]

        def fail(number, new):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.generate([request], method="ddtree", on_tokens=fail)
        with engine.run([request]) as run:
            with pytest.raises(abi.SizeError, match="the engine has a run already"):
                engine.run([request])
            with pytest.raises(abi.SizeError, match="the prompts were not read yet"):
                run.round()
            run.prefill()
            run.stage("draft")
            with pytest.raises(abi.SizeError, match="a round in steps is not at its end"):
                run.round()
            with pytest.raises(abi.SizeError, match="stage 2 asked for, 1 is next"):
                run.stage("verify")
        with pytest.raises(ValueError, match="this run is closed"):
            run.round()
        again = engine.generate([request], method="ddtree", keep_logits=True)[0]
        assert again.tokens == expected.tokens
        assert_array_equal(again.logits, expected.logits)
        left = engine.run([request])
        left.prefill()
        del left
        gc.collect()
        open_run = engine.run([request])
        open_run.prefill()
    with pytest.raises(ValueError, match="this run is closed"):
        open_run.round()
    with pytest.raises(ValueError, match="this decoder is closed"):
        engine.run([request])


def test_two_engines_take_turns(world, tmp_path):
    other = write_model(tmp_path / "other.kdtr", micro_target(), random_weights(micro_target(), 9))
    tokens = world.plain().tokens
    with world.new_engine() as one, world.new_engine(target=other, cache_block_size=4) as two:
        alone = two.generate(PROMPT, method="ar", max_new_tokens=8)
        with (
            one.run([Request(PROMPT, 8, 6, drafter=noisy(tokens))]) as first,
            two.run([Request(PROMPT, 8, 6, drafter=noisy(alone.tokens))]) as second,
        ):
            left = [first.prefill(), second.prefill()]
            while any(left):
                left = [first.round(), second.round()]
            found = first.generation(0).tokens, second.generation(0).tokens
    assert found == (tokens[:8], alone.tokens)
    assert alone.tokens != tokens[:8]


def test_a_timed_round_is_the_round_and_tells_the_time_of_its_stages(world):
    tokens = world.plain().tokens
    requests = [Request(PROMPT, 8, 6, drafter=noisy(tokens)), Request([7], 4, 3)]
    engine = world.engine(max_requests=2)
    for method in METHODS:
        whole = engine.generate(requests, method=method, keep_logits=True)
        for _ in range(2):  # on a GPU the second time as a graph
            with engine.run(requests, method, keep_logits=True, timed=True) as run:
                left = run.prefill()
                while left:
                    left = run.round()
                made, replayed = [run.generation(request) for request in range(2)], run.replayed
            for ours, theirs in zip(made, whole, strict=True):
                assert ours.tokens == theirs.tokens
                assert_array_equal(ours.logits.view("u4"), theirs.logits.view("u4"))
                for done, other in zip(ours.rounds, theirs.rounds, strict=True):
                    assert (done.path, other.seconds) == (other.path, {})
                    assert tuple(done.seconds) == STAGES
                    assert min(done.seconds.values()) > 0
                    assert sum(done.seconds.values()) <= done.wall_seconds
        assert replayed == (max(len(each.rounds) for each in made) if engine.graphs else 0)


def test_a_round_in_steps_is_the_round_and_dumps_what_it_saw(world, tmp_path):
    tokens = world.plain().tokens
    requests = [Request(PROMPT, 8, 6, drafter=noisy(tokens)), Request([7], 4, 3)]
    engine = world.engine(max_requests=2)
    whole = engine.generate(requests, method="ddtree", keep_traces=True)
    with engine.run(requests, "ddtree", keep_traces=True) as run:
        assert run.prefill() == 2
        left, number = 2, 0
        while left:
            for stage in STAGES:
                left = run.stage(stage, tmp_path / f"{number}.{stage}.kdtr" if stage != "commit" else None)
            number += 1
        made = [run.generation(request) for request in range(2)]
    for ours, theirs in zip(made, whole, strict=True):
        assert ours.tokens == theirs.tokens
        assert [r.path for r in ours.rounds] == [r.path for r in theirs.rounds]
        for done, other in zip(ours.rounds, theirs.rounds, strict=True):
            assert tuple(done.seconds) == STAGES
            assert min(done.seconds.values()) > 0
            assert sum(done.seconds.values()) <= done.wall_seconds
            assert other.seconds == {}
            assert other.wall_seconds > 0
    for number, done in enumerate(made[0].rounds):
        tree = kdtr.read(tmp_path / f"{number}.tree_build.kdtr")
        assert done.trace is not None
        rows = done.nodes + 1
        for name in ("tokens", "parents", "depths", "ranks", "scores"):
            assert_array_equal(tree[f"tree.{name}"][0][:rows], getattr(done.trace.tree, name))
        if done.trace.lists is not None:
            depths, width = done.trace.lists.ids.shape
            assert_array_equal(tree["lists.ids"][0][:depths, :width], done.trace.lists.ids)
            assert_array_equal(tree["lists.lp"][0][:depths, :width], done.trace.lists.lp)
        verified = kdtr.read(tmp_path / f"{number}.verify.kdtr")["logits"].reshape(2, -1, VOCABULARY)[0, :rows]
        assert_array_equal(verified.argmax(axis=1), done.trace.choices)
    assert {"final_norm", "logits"} <= set(kdtr.read(tmp_path / "0.draft.kdtr"))


def test_the_drafter_works_beside_stand_ins_where_its_cost_is_wanted(world, tmp_path):
    """What it says is dropped: the rounds are the same. That it worked is seen in what a dump of the stage holds."""
    tokens = world.plain().tokens
    requests = [Request(PROMPT, 9, 6, drafter=noisy(tokens)), Request(PROMPT, 9, 5, drafter=Oracle(tokens, 3))]
    engine = world.engine(max_requests=2)
    for method in METHODS:
        expected = engine.generate(requests, method=method, keep_logits=True, keep_traces=True)
        with engine.run(requests, method, keep_logits=True, keep_traces=True, full_cost=True) as run:
            left, number = run.prefill(), 0
            while left:
                for stage in STAGES:
                    left = run.stage(stage, tmp_path / f"{method}.{number}.{stage}.kdtr" if stage == "draft" else None)
                number += 1
            made = [run.generation(request) for request in range(2)]
        for ours, theirs in zip(made, expected, strict=True):
            assert ours.tokens == theirs.tokens == tokens[:9]
            assert [r.path for r in ours.rounds] == [r.path for r in theirs.rounds]
            assert_array_equal(ours.logits, theirs.logits)
            for one, other in zip(ours.rounds, theirs.rounds, strict=True):
                assert one.trace is not None
                assert other.trace is not None
                assert_array_equal(one.trace.tree.scores, other.trace.tree.scores)
        worked = [path for path in tmp_path.glob(f"{method}.*.kdtr") if "final_norm" in kdtr.read(path)]
        assert len(worked) == (0 if method == "ar" else len(made[0].rounds))
    drafted = engine.generate(PROMPT, max_new_tokens=9, budget=6, keep_traces=True)
    with engine.run([Request(PROMPT, 9, 6)], keep_traces=True, full_cost=True) as run:  # the drafter itself
        left = run.prefill()
        while left:
            left = run.round()
        assert [r.path for r in run.generation(0).rounds] == [r.path for r in drafted.rounds]
    with world.new_engine(drafter=None) as alone, pytest.raises(abi.SizeError, match="full_cost is that of a drafter"):
        alone.run(requests[:1], "ddtree", full_cost=True)


def test_the_callback_hears_each_round(world):
    tokens = world.plain().tokens
    heard = []
    made = world.engine().generate(
        PROMPT, max_new_tokens=10, drafter=Oracle(tokens, 4), on_tokens=lambda number, new: heard.append((number, new))
    )
    assert heard == [(0, tokens[0:4]), (0, tokens[4:8]), (0, tokens[8:10])]
    assert (made.tokens, made.prefill_seconds > 0) == (tokens[:10], True)
    assert made.decode_seconds == sum(r.wall_seconds for r in made.rounds)
    stopped = []
    engine = world.engine()
    engine.generate(PROMPT, max_new_tokens=9, stop_tokens=[tokens[0]], on_tokens=lambda _, new: stopped.append(new))
    assert stopped == [tokens[:1]]


# --- What is refused


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"prompt": []}, abi.SizeError, "request 1: the prompt must hold at least one token"),
        ({"prompt": [1.5]}, abi.SizeError, r"request 1: prompt must be integers \[N\], got float64 \[1\]"),
        ({"prompt": [[1]]}, abi.SizeError, r"request 1: prompt must be integers \[N\], got int64 \[1, 1\]"),
        ({"prompt": [1, VOCABULARY]}, abi.SizeError, "request 1: prompt token 23 at 1 is outside the vocabulary"),
        ({"prompt": [-1]}, abi.SizeError, "request 1: prompt token -1 at 0 is outside"),
        ({"prompt": [2**40]}, abi.SizeError, "request 1: prompt is 1099511627776"),
        ({"prompt": range(4), "capacity": 3}, abi.RequestError, "request 1: needs 4 cache rows, 3 are available"),
        ({"prompt": [1] * 97}, abi.SizeError, "request 1: the prompt needs 97 cache rows, 96 are available"),
        ({"capacity": 97}, abi.SizeError, "request 1: capacity is 97, the engine has 96 rows"),
        ({"max_new_tokens": -1}, abi.SizeError, "request 1: max_new_tokens is -1"),
        ({"budget": -1}, abi.SizeError, "request 1: budget is -1"),
        ({"budget": 65}, abi.SizeError, "request 1: budget is 65, the engine was made for 64"),
        ({"temperature": -1.0}, abi.SizeError, "request 1: temperature -1"),
        ({"temperature": float("nan")}, abi.SizeError, "request 1: temperature is nan"),
        ({"temperature": float("inf")}, abi.SizeError, "request 1: temperature is inf"),
        ({"top_p": 0.0}, abi.SizeError, "request 1: .*top_p 0"),
        ({"top_k": -1}, abi.SizeError, "request 1: top_k is -1"),
        ({"seed": 2**64}, abi.SizeError, "request 1: seed is 18446744073709551616"),
        ({"drafter": Oracle([1, 2], 0)}, abi.SizeError, "request 1: block_size is 0"),
        ({"drafter": Oracle([1, 2], 9)}, abi.SizeError, "request 1: block_size is 9, the engine was made for 8"),
        ({"drafter": Oracle([1, 23], 8)}, abi.SizeError, "request 1: golden token 23 at 1 is outside"),
        ({"drafter": NoisyOracle([1], miss=1.5)}, abi.SizeError, "request 1: miss is 1.5"),
        ({"drafter": NoisyOracle([1], max_rank=-1)}, abi.SizeError, "request 1: max_rank is -1"),
        (
            {"drafter": Replay({3: (np.zeros((1, 2), np.int32), np.zeros((1, 3), np.float32))})},
            abi.SizeError,
            r"request 1: lists must be \[L, K\] of one width K, got ids \[1, 2\] and lp \[1, 3\]",
        ),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_by_number_before_anything_runs(world, change, error, said):
    heard: list[int] = []
    fields = {"prompt": PROMPT, "max_new_tokens": 2, **change}
    with pytest.raises(error, match=said):
        world.engine(max_requests=2, prefill_rows=12).generate(
            [Request(PROMPT, 2), Request(**fields)], on_tokens=lambda number, new: heard.append(number)
        )
    assert not heard


def test_what_an_engine_cannot_be_or_do_is_told(world, tmp_path):
    with pytest.raises(ValueError, match="dtype is 'float16', expected one of float32, bfloat16"):
        world.new_engine(dtype="float16")
    with pytest.raises(ValueError, match="gemm is 'fast', expected one of row_invariant, cublas"):
        world.new_engine(gemm="fast")
    with pytest.raises(ValueError, match="attention is 'flash', expected one of exact, mask"):
        world.new_engine(attention="flash")
    with pytest.raises(abi.SizeError, match=f"capacity is {2**31}"):
        world.new_engine(capacity=2**31)
    with pytest.raises(abi.SizeError, match="max_budget is 1025"):
        world.new_engine(max_budget=1025)
    with pytest.raises(abi.SizeError, match="max_requests is 0"):
        world.new_engine(max_requests=0)
    engine = world.engine()
    with pytest.raises(ValueError, match="method is 'beam', expected one of ar, chain, ddtree"):
        engine.generate(PROMPT, method="beam", max_new_tokens=1)
    with pytest.raises(abi.SizeError, match="requests is 2"):
        engine.generate([PROMPT, PROMPT], max_new_tokens=1)
    with (
        world.new_engine(drafter=None) as alone,
        pytest.raises(abi.SizeError, match="request 0: the engine has no draft"),
    ):
        alone.generate(PROMPT, max_new_tokens=1)
    with pytest.raises(TypeError, match="stop_token"):
        engine.generate(PROMPT, max_new_tokens=1, stop_token=3)


def test_whether_rounds_are_replayed_is_told(world):
    """Kernels executed on the CPU have no graphs. On a GPU: test_engine_graphs.py."""
    with world.new_engine() as engine:
        assert engine.graphs == (world.library.path.name == CUDA_NAME)
        for graphs in (False, True):
            with engine.run([Request(PROMPT, 4)], "ar", graphs=graphs) as run:
                left = run.prefill()
                while left:
                    left = run.round()
                assert run.replayed == (3 if graphs and engine.graphs else 0)


@pytest.mark.parametrize("end", ["eager", "timed"])
def test_a_caller_of_the_struct_of_a_run_before_it_had(end, world):
    """What stands behind its end is not read."""
    filled = Filled([Request(PROMPT, 3)], 0)
    old = decode_abi.RunArgs(
        struct_size=getattr(decode_abi.RunArgs, end).offset, requests=1, request=filled.structs, timed=79, builder=80
    )
    if end == "eager":
        old.eager, old.cost_count = 77, 78
    with checkpoint.load(world.library, world.target_file, "model") as model:
        sizes = decode_abi.DecoderArgs(
            struct_size=ctypes.sizeof(decode_abi.DecoderArgs), target=model.address, max_requests=1, capacity=8
        )
        with (
            Handle(world.library, "decoder", sizes) as decoder,
            Handle(world.library, "run", decoder.address, old) as run,
        ):
            run.call("prefill")
            state = decode_abi.RequestState(struct_size=ctypes.sizeof(decode_abi.RequestState))
            run.call("state", 0, ctypes.byref(state))
            assert state.cache_length == len(PROMPT)
            old.struct_size += 4
            with pytest.raises(abi.VersionError, match=f"struct_size is {old.struct_size}"):
                Handle(world.library, "run", decoder.address, old)


def test_facts_about_an_engine(world):
    with world.new_engine(block_size=3, max_budget=5, drafter=None) as engine:
        assert (engine.vocab_size, engine.hidden_size, engine.layers, engine.block_size) == (VOCABULARY, 12, 3, 3)
        assert engine.row_bytes == 4 * (6 + 4)
        assert engine.cache_bytes == 3 * 96 * engine.row_bytes
        assert engine.model_bytes >= 4 * sum(map(np.size, random_weights(micro_target()).values()))
        assert engine.scratch_bytes > 0
    assert world.engine().block_size == 8


def test_one_prompt_or_several(world):
    engine = world.engine(max_requests=2)
    one = engine.generate(PROMPT, method="ar", max_new_tokens=3)
    assert one.tokens == world.plain(count=3).tokens
    for prompts in ([PROMPT, [2]], [np.array(PROMPT), Request([2], 3)], np.array([PROMPT, PROMPT])):
        made = engine.generate(prompts, method="ar", max_new_tokens=3)
        assert [len(made), made[0].tokens] == [2, one.tokens]
    assert isinstance(engine, Engine)
    assert isinstance(Request(PROMPT, 1).drafter, DFlash)


@pytest.mark.parametrize("whole", [False, True], ids=["stages", "round"])
def test_a_run_of_which_a_launch_failed_goes_on_with_nothing(whole, world, monkeypatch):
    """The device had committed the round by then, and the host had not been told: nobody knows where to go on. The host
    library alone can be made to fail between two kernels."""
    with Engine.load(world.target_file, world.drafter_file, kind="host", capacity=96, prefill_rows=16) as engine:
        with engine.run([Request(PROMPT, 20, 5)]) as run:
            run.prefill()
            before = run.tokens(0)
            for stage in () if whole else STAGES[:-1]:
                run.stage(stage)
            monkeypatch.setenv("KDTREE_HOST_SHARED_MEMORY", "6400")
            with pytest.raises(abi.EngineError, match="linear_tile_kernel"):
                run.round() if whole else run.stage(STAGES[-1])
            monkeypatch.delenv("KDTREE_HOST_SHARED_MEMORY")
            for call in (run.round, lambda: run.stage("draft"), lambda: run.stage("commit")):
                with pytest.raises(abi.EngineError, match=r"the run failed before|a round in steps|is next"):
                    call()
            assert run.tokens(0) == before
        assert engine.generate(PROMPT, max_new_tokens=20, budget=5).tokens == world.plain().tokens[:20]


@pytest.mark.parametrize("stop", [None, 29, 30, 31, 32])
@pytest.mark.parametrize("method", METHODS[1:])
def test_the_longest_block_and_stop_tokens_on_its_last_places(method, stop, world):
    """A path of 31 nodes behind the root: a lane of the warp that ends a round for each."""
    tokens = world.plain(count=70).tokens
    request = Request(PROMPT, 70, 40, drafter=Oracle(tokens, 32), stop_tokens=() if stop is None else (tokens[stop],))
    made = compare(world, request, method, capacity=160, drafter=None, block_size=32)
    assert made.finish_reason == ("length" if stop is None else "stop")
    assert stop is not None or max(r.accepted for r in made.rounds) == 31


@pytest.mark.parametrize("builder", ["gpu", "heap"])
def test_blocks_of_one_token_and_trees_of_none(builder, world):
    tokens = world.plain().tokens
    for sizes, requests in (
        (
            {"drafter": None},
            [Request(PROMPT, 6, 0, drafter=Oracle(tokens, 1)), Request(PROMPT, 5, 9, drafter=Oracle(tokens, 1))],
        ),
        ({}, [Request(PROMPT, 6, 0), Request(PROMPT, 5, 0)]),
    ):
        for costs in (None, {1: 1e-3, 9: 2e-3}):
            made = world.engine(max_requests=2, **sizes).generate(requests, builder=builder, costs=costs)
            assert [each.tokens for each in made] == [tokens[:6], tokens[:5]]
