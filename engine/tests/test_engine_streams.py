"""Runs on a stream of the caller's and on a device that is not the current one: the same bits as on the default ones.

On a GPU every stream has work queued when the engine comes: a kernel that spins for tens of milliseconds. What is not
ordered behind it on its own stream, or not done before another stream may come, shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from engine import abi
from engine.decode_abi import STAGES
from engine.generation import Generation
from engine.request import NoisyOracle, Request
from engine.run import Run
from engine.tests.backends import open_ops
from engine.tests.decoding import PROMPT, World
from reference.topk import topk_logprob
from reference.tree import build_tree

SPIN = 'extern "C" __global__ void spin(long long cycles) { long long t = clock64(); while (clock64() - t < cycles); }'
CYCLES = 1 << 26  # some 30 ms
LEGACY, PER_THREAD = 1, 2  # cudaStreamLegacy, cudaStreamPerThread

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Of the CUDA library alone: the host library has no streams and one device."""
    made = World(open_ops("cuda").library, tmp_path_factory.mktemp("models"))
    yield made
    made.close()


def busy(cupy: Any, stream: Any) -> Any:
    """The stream, with work that keeps it busy for a while."""
    with stream:
        cupy.RawKernel(SPIN, "spin")((1,), (1,), (np.int64(CYCLES),))
    return stream


def new_stream(cupy: Any) -> Any:
    return busy(cupy, cupy.cuda.Stream(non_blocking=True))


def finished(*runs: Run) -> list[Generation]:
    """Runs in turns, round by round, to their ends."""
    left = [run.prefill() for run in runs]
    while any(left):
        left = [run.round() for run in runs]
    return [run.generation(0) for run in runs]


def assert_bits(actual: Generation, expected: Generation) -> None:
    assert (actual.tokens, actual.finish_reason) == (expected.tokens, expected.finish_reason)
    assert [r.path for r in actual.rounds] == [r.path for r in expected.rounds]
    assert_array_equal(actual.logits, expected.logits)


@pytest.fixture(scope="module")
def request_of(world: World) -> Request:
    return Request(PROMPT, 12, 6, drafter=NoisyOracle(world.plain().tokens, 4))


@pytest.mark.parametrize("kind", ["non-blocking", "blocking", "legacy", "per thread"])
def test_a_run_on_a_stream_that_is_busy(cupy, world, request_of, kind):
    engine = world.engine()
    expected = engine.generate([request_of], keep_logits=True)[0]
    stream = {"legacy": cupy.cuda.Stream.null, "per thread": cupy.cuda.Stream.ptds}.get(kind)
    stream = busy(cupy, stream or cupy.cuda.Stream(non_blocking=kind == "non-blocking"))
    handle = {"legacy": LEGACY, "per thread": PER_THREAD}.get(kind, stream.ptr)
    with engine.run([request_of], keep_logits=True, stream=handle) as run:
        assert_bits(finished(run)[0], expected)
    assert_bits(engine.generate([request_of], keep_logits=True)[0], expected)


def test_the_drafters_run_in_steps_on_a_stream_that_is_busy(cupy, world):
    engine, request = world.engine(), Request(PROMPT, 8, 6)
    expected = engine.generate([request], keep_logits=True)[0]
    stream = new_stream(cupy)
    with engine.run([request], keep_logits=True, stream=stream.ptr) as run:
        left = run.prefill()
        while left:
            for stage in STAGES:
                left = run.stage(stage)
        assert_bits(run.generation(0), expected)


def test_generate_where_the_current_stream_is_not_the_default_one(cupy, world, request_of):
    engine = world.engine()
    expected = engine.generate([request_of], keep_logits=True)[0]
    with new_stream(cupy):
        assert_bits(engine.generate([request_of], keep_logits=True)[0], expected)


def test_engines_on_streams_of_their_own_take_turns(cupy, world, request_of):
    """What one loads or finishes is not in the other's way; the second is made while the first one's stream is busy."""
    streams = [new_stream(cupy), new_stream(cupy)]
    with (
        world.new_engine() as first,
        first.run([request_of], keep_logits=True, stream=streams[0].ptr) as one,
        world.new_engine(cache_block_size=4) as second,
    ):
        with second.run([request_of], keep_logits=True, stream=streams[1].ptr) as two:
            found = finished(one, two)
        expected = second.generate([request_of], keep_logits=True)[0]
    for each in found:
        assert_bits(each, expected)


def test_a_run_that_is_given_up_leaves_no_work_behind(cupy, world, request_of):
    engine = world.engine()
    expected = engine.generate([request_of], keep_logits=True)[0]
    for stream in (new_stream(cupy), new_stream(cupy)):
        with engine.run([request_of], stream=stream.ptr) as run:
            run.prefill()
            busy(cupy, stream)
            run.stage("draft")
        assert_bits(engine.generate([request_of], keep_logits=True)[0], expected)


def test_stages_on_what_a_non_blocking_stream_has_just_been_told_to_make(cupy):
    """Inputs of the same stream, and of another one, which the call then follows."""
    ops = open_ops("cuda")
    logits = np.random.default_rng(3).standard_normal((1, 4, 999)).astype(np.float32)
    lists = topk_logprob(logits[0], 20)
    tree = build_tree(lists.lp, lists.ids, 20)
    kept = cupy.asarray(logits)
    cupy.cuda.Device().synchronize()
    producer, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    for stream in (producer, other):
        with producer:
            given = cupy.full(logits.shape, cupy.nan, cupy.float32)
            busy(cupy, producer)
            given[...] = kept
            found = ops.topk_logprob(given, 20, stream=stream)
        trees = ops.tree_build(found.lp, found.ids, 20, before=found, stream=stream)
        trees.raise_for_status()
        ours = trees.tree(0)
        assert_array_equal(ours["tokens"][1:], tree.tokens[1:])
        assert_array_equal(ours["parents"], tree.parents)
        assert_array_equal(found.to_host().ids[0], lists.ids)


def test_an_engine_works_on_its_own_device_whichever_is_current(cupy, world, request_of):
    """Every device as the engine's with every one as the current one; the one that does not exist is refused."""
    runtime = cupy.cuda.runtime
    count, before = runtime.getDeviceCount(), runtime.getDevice()
    expected = world.engine().generate([request_of], keep_logits=True)[0]
    try:
        for own, current in itertools.product(range(count), repeat=2):
            runtime.setDevice(current)
            with world.new_engine(device=own) as engine:
                for now in range(count):  # made with another device current than used
                    runtime.setDevice(now)
                    with engine.run([request_of], keep_logits=True) as run:
                        assert_bits(finished(run)[0], expected)
                    assert runtime.getDevice() == now
            assert runtime.getDevice() == count - 1
        with pytest.raises(abi.CudaError, match="cudaErrorInvalidDevice"):
            world.new_engine(device=count)
        assert runtime.getDevice() == count - 1
    finally:
        runtime.setDevice(before)
