"""An fp8 cache: what it costs against bf16, that no row's bits move there either, and where it does not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from engine import checkpoint, decode_abi
from engine.abi import SizeError
from engine.request import DFlash, NoisyOracle, Oracle, Request
from engine.tests.test_engine_bf16 import MODELS, PROMPT, error, write_pair
from reference.checkpoint import load_target
from reference.fp8_row import ROW_BYTES, Fp8Cache

HEADS = {"mma": 16, "general": 2}  # of the attention that serves so many


@pytest.fixture(scope="module", params=list(HEADS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """(kernel of its attention, target, drafter)."""
    target, drafter = MODELS["tensor_cores"]
    heads = {"num_attention_heads": HEADS[request.param]}
    return (request.param, *write_pair(tmp_path_factory.mktemp("pair"), {**target, **heads}, drafter))


@pytest.fixture(scope="module")
def new_engine(world, pair):
    """An engine over bf16 models, with an fp8 cache unless told otherwise."""

    def made(**options):
        chosen = {"target": pair[1], "drafter": pair[2], "dtype": "bfloat16", "cache": "fp8", "block_size": 5}
        return world.engine(**{**chosen, **options})

    return made


@pytest.fixture(scope="module")
def engine(new_engine):
    return new_engine(max_requests=2)


def test_its_rows_and_the_kernel_that_reads_them_are_told(engine, new_engine, pair):
    assert (engine.dtype, engine.cache, engine.row_bytes) == ("bfloat16", "fp8", ROW_BYTES)
    assert engine.attention_kernel == pair[0]
    assert engine.cache_bytes == 2 * 2 * 96 * ROW_BYTES  # layers, requests, rows
    plain = new_engine(max_requests=2, cache="dtype")
    assert (plain.cache, plain.row_bytes) == ("dtype", 2 * (512 + 64))
    assert plain.attention_kernel in ((pair[0],) if pair[0] == "general" else ("mma", "wgmma"))


def test_logits_are_as_near_to_the_truth_as_those_of_the_reference_with_such_a_cache(engine, new_engine, pair):
    """And farther than those of bf16 rows: the cache is read as it is kept."""
    made = engine.generate(PROMPT, method="ar", max_new_tokens=12, keep_logits=True)
    text = np.array((*PROMPT, *made.tokens), np.int32)
    true_target, emulation = load_target(pair[1], "float64"), load_target(pair[1], "bfloat16")
    true = true_target.forward(text, true_target.new_cache(len(text))).logits[len(PROMPT) - 1 :]
    emulated = [
        emulation.forward(text, cache).logits[len(PROMPT) - 1 :]
        for cache in (emulation.new_cache(len(text)), Fp8Cache(2, len(text)))
    ]
    ours, (bf16, fp8) = error(made.logits, true), (error(logits, true) for logits in emulated)
    assert bf16 < fp8 < 0.1
    assert ours < 2 * fp8
    # The same roundings of the cache, which are the larger part: nearer to that reference than either is to the truth.
    assert error(made.logits, emulated[1].astype(np.float64)) < fp8
    forced = new_engine(max_requests=2, cache="dtype").generate(PROMPT, method="ar", max_new_tokens=1, keep_logits=True)
    assert (made.logits[0] != forced.logits[0]).any()


@pytest.mark.parametrize("method", ["chain", "ddtree"])
def test_rows_keep_plain_decodings_bits(engine, new_engine, method):
    """In company, by real proposals and by made-up ones, from contiguous and from paged caches."""
    truth = engine.generate([Request(PROMPT, 6)], method="ar", keep_logits=True)[0]
    paged = new_engine(max_requests=2, cache_block_size=3)
    made_up = NoisyOracle(truth.tokens, 5, 0.1, 2, seed=9) if method == "ddtree" else Oracle(truth.tokens, 5, right=4)
    for other, proposer in ((engine, DFlash()), (paged, made_up)):
        asked = [Request(PROMPT[:2], 3, 3), Request(PROMPT, 6, 9, drafter=proposer)]
        made = other.generate(asked, method=method, keep_logits=True)[1]
        assert made.tokens == truth.tokens
        assert_array_equal(made.logits.view(np.uint32), truth.logits.view(np.uint32))


def test_prompts_in_passes_of_any_size_keep_their_bits(engine, new_engine):
    truth = engine.generate([Request(PROMPT, 3)], method="ar", keep_logits=True)[0]
    for rows in (1, 3):
        made = new_engine(prefill_rows=rows).generate([Request(PROMPT, 3)], method="ar", keep_logits=True)[0]
        assert_array_equal(made.logits.view(np.uint32), truth.logits.view(np.uint32))


def test_the_mask_form_reads_the_same_rows(engine, new_engine):
    truth = engine.generate([Request(PROMPT, 6)], method="ar", keep_logits=True)[0]
    oracle = NoisyOracle(truth.tokens, 5, 0.0, 1, seed=2)
    masked = new_engine(attention="mask")
    made = masked.generate([Request(PROMPT, 6, 9, drafter=oracle)], method="ddtree", keep_logits=True)[0]
    assert error(made.logits[0], truth.logits[0].astype(np.float64)) < 0.04  # the same text up to here at least


def test_what_does_not_fit_is_refused_with_the_numbers(world, new_engine):
    with pytest.raises(ValueError, match="cache is 'e4m3', expected one of dtype, fp8"):
        new_engine(cache="e4m3")
    with pytest.raises(SizeError, match="an fp8 cache holds rows of bf16, and the dtype is float32"):
        new_engine(dtype="float32")
    with pytest.raises(SizeError, match=r"an fp8 cache holds rows of 512 \+ 64 values, and the model's have 6 \+ 4"):
        world.engine(dtype="bfloat16", cache="fp8")


def test_callers_of_the_info_struct_before_there_was_a_choice_get_what_they_know(world):
    """The args struct had zero in the place of the choice."""
    args, info = decode_abi.DecoderArgs, decode_abi.DecoderInfo
    with checkpoint.load(world.library, world.target_file, "model") as model:
        asked = args(struct_size=args.cache_rows.offset + 4, target=model.address, max_requests=1, capacity=8)
        with decode_abi.Handle(world.library, "decoder", asked) as decoder:
            told = info(struct_size=info.cache_rows.offset, cache_rows=77, attention_kernel=78)
            decoder.call("query", told)
            assert (told.struct_size, told.row_bytes) == (info.cache_rows.offset, 4 * (6 + 4))
            assert (told.cache_rows, told.attention_kernel) == (77, 78)  # not written
