"""bf16: how near its numbers are to those of the reference, which kernels it takes, and that no row's bits move there.

The truth is the reference in float64 with the same bf16 weights; what bf16 costs against it is measured with the
reference's own emulation of bf16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kdtr
from engine import checkpoint, decode_abi
from engine.abi import UnsupportedError
from engine.request import DFlash, NoisyOracle, Oracle, Request
from engine.tests.decoding import META, VOCABULARY, micro_drafter, micro_target, write_model
from reference.checkpoint import load_drafter, load_target, save_kdtr
from reference.numerics import round_to_bf16
from reference.tests.models import random_weights

PROMPT = (5, 1, 17, 3, 20, 8, 2)
# Sizes that the tensor cores take: of products, multiples of 8; of attention, 512 + 64 latents and 16 heads.
FAST = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 64,
    "v_head_dim": 8,
}
FAST_DRAFTER = {"hidden_size": 32, "intermediate_size": 24, "head_dim": 8, "num_target_layers": 2}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "general": ({}, {}),
    "tensor_cores": (FAST, {**FAST_DRAFTER, "dflash_config": {"mask_token_id": 22, "target_layer_ids": [0]}}),
}


def narrow_weights(config, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights that bf16 holds, but for the router, which stays float32."""
    return {
        name: array if ".mlp.gate." in name else round_to_bf16(array)
        for name, array in random_weights(config, seed).items()
    }


def write_pair(folder: Path, target_sizes: dict[str, Any], drafter_sizes: dict[str, Any]) -> tuple[Path, Path]:
    """A target and its drafter with weights that bf16 holds."""
    target, drafter = micro_target(**target_sizes), micro_drafter(**drafter_sizes)
    return (
        write_model(folder / "target.kdtr", target, narrow_weights(target)),
        write_model(folder / "drafter.kdtr", drafter, narrow_weights(drafter, 5)),
    )


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """(path that its kernels take, target, drafter)."""
    return (request.param, *write_pair(tmp_path_factory.mktemp("pair"), *MODELS[request.param]))


@pytest.fixture(scope="module")
def engine(world, pair):
    _, target, drafter = pair
    with world.new_engine(target=target, drafter=drafter, dtype="bfloat16", max_requests=2, block_size=5) as made:
        yield made


def error(found: np.ndarray, true: np.ndarray) -> float:
    """Root of the mean square of the difference, in parts of that of the truth."""
    return float(np.sqrt(np.mean((found.astype(np.float64) - true) ** 2) / np.mean(true**2)))


def assert_near(found: np.ndarray, emulated: np.ndarray, true: np.ndarray, what: str) -> None:
    """As near to the truth as bf16 of the reference, give or take what another order of rounding does; below 5 %."""
    ours, theirs = error(found, true), error(emulated, true)
    assert ours < max(2 * theirs, 2**-9), f"{what}: {ours:.3g}, the reference's own error is {theirs:.3g}"
    assert ours < 0.05, f"{what}: {ours:.3g}"


def test_its_kernels_and_sizes_are_told(engine, pair):
    path, target, _ = pair
    config = load_target(target).config
    assert (engine.dtype, engine.paths) == ("bfloat16", {"products": path, "attention": path})
    assert engine.row_bytes == 2 * (config.kv_lora_rank + config.qk_rope_head_dim)


def test_weights_and_caches_take_half_the_memory(world, pair, engine):
    _, target, drafter = pair
    with world.new_engine(target=target, drafter=drafter, max_requests=2, block_size=5) as wide:
        assert wide.paths == {"products": "general", "attention": "general"}
        assert engine.cache_bytes * 2 == wide.cache_bytes
        # Tables and routers stay float32, and every array begins at a multiple of 256 bytes.
        assert engine.model_bytes < 0.8 * wide.model_bytes


def test_logits_are_as_near_to_the_truth_as_the_references_bf16(engine, pair):
    _, file, _ = pair
    made = engine.generate(PROMPT, method="ar", max_new_tokens=12, keep_logits=True)
    text = np.array((*PROMPT, *made.tokens), np.int32)
    logits = {}
    for precision in ("bfloat16", "float64"):
        target = load_target(file, precision)
        logits[precision] = target.forward(text, target.new_cache(len(text))).logits[len(PROMPT) - 1 :]
    assert_near(made.logits, logits["bfloat16"], logits["float64"], "logits")


def test_every_array_of_a_round_is_as_near_to_the_truth_as_the_references_bf16(engine, pair, tmp_path):
    """Of the drafter's pass and of the target's over a tree; each array by the name that the reference gives it."""
    _, target_file, drafter_file = pair
    with engine.run([Request(PROMPT, 4, 6)], "ddtree", keep_traces=True) as run:
        run.prefill()
        for stage in ("draft", "tree_build", "verify"):
            run.stage(stage, tmp_path / f"{stage}.kdtr")
        run.stage("commit")
        first = run.generation(0)
    root, tree = first.tokens[0], first.rounds[0].trace.tree
    nodes = len(tree.tokens)
    sees = np.eye(nodes, dtype=np.bool_)
    for node in range(1, nodes):
        sees[node] |= sees[tree.parents[node]]
    traces = {}
    for precision in ("bfloat16", "float64"):
        target = load_target(target_file, precision)
        drafter = load_drafter(drafter_file, target, block_size=5)
        cache = target.new_cache(96)
        features = target.forward(np.array(PROMPT), cache, taps=drafter.taps).features
        cache.commit(range(len(PROMPT)))
        drafter.reset(np.array(PROMPT))
        drafter.observe(np.array(PROMPT), features)
        drafted: dict[str, np.ndarray] = {}
        verified: dict[str, np.ndarray] = {}
        drafter.block_logits(root, drafted)
        target.forward(tree.tokens, cache, visibility=sees, trace=verified)
        traces[precision] = (drafted, verified)
    compared = 0
    for place, stage in enumerate(("draft", "verify")):
        found = kdtr.read(tmp_path / f"{stage}.kdtr")
        emulated, true = (traces[precision][place] for precision in ("bfloat16", "float64"))
        for name, expected in true.items():
            if expected.dtype.kind != "f":
                continue
            ours = found[name.replace("/", ".")].reshape(-1, *expected.shape[1:])[: len(expected)]
            assert_near(ours, emulated[name].astype(np.float64), expected.astype(np.float64), f"{stage} {name}")
            compared += 1
    assert compared > 40


@pytest.mark.parametrize("method", ["chain", "ddtree"])
def test_rows_keep_plain_decodings_bits(world, pair, engine, method):
    """In company, by real proposals and by made-up ones, from contiguous and from paged caches."""
    _, target, drafter = pair
    truth = engine.generate([Request(PROMPT, 6)], method="ar", keep_logits=True)[0]
    paged = world.engine(
        target=target, drafter=drafter, dtype="bfloat16", max_requests=2, block_size=5, cache_block_size=3
    )
    made_up = NoisyOracle(truth.tokens, 5, 0.1, 2, seed=9) if method == "ddtree" else Oracle(truth.tokens, 5, right=4)
    for other, proposer in ((engine, DFlash()), (paged, made_up)):
        asked = [Request(PROMPT[:2], 3, 3), Request(PROMPT, 6, 9, drafter=proposer)]
        made = other.generate(asked, method=method, keep_logits=True)[1]
        assert made.tokens == truth.tokens
        assert_array_equal(made.logits.view(np.uint32), truth.logits.view(np.uint32))


def test_prompts_in_passes_of_any_size_keep_their_bits(world, pair, engine):
    _, target, drafter = pair
    truth = engine.generate([Request(PROMPT, 3)], method="ar", keep_logits=True)[0]
    for rows in (1, 3):
        other = world.engine(target=target, drafter=drafter, dtype="bfloat16", prefill_rows=rows, block_size=5)
        made = other.generate([Request(PROMPT, 3)], method="ar", keep_logits=True)[0]
        assert_array_equal(made.logits.view(np.uint32), truth.logits.view(np.uint32))


def test_the_mask_form_is_near_the_exact_one(world, pair, engine):
    _, target, drafter = pair
    truth = engine.generate([Request(PROMPT, 6)], method="ar", keep_logits=True)[0]
    masked = world.engine(target=target, drafter=drafter, dtype="bfloat16", attention="mask", block_size=5)
    oracle = NoisyOracle(truth.tokens, 5, 0.0, 1, seed=2)
    made = masked.generate([Request(PROMPT, 6, 9, drafter=oracle)], method="ddtree", keep_logits=True)[0]
    assert error(made.logits[0], truth.logits[0].astype(np.float64)) < 0.04  # the same text up to here at least


def test_cublas_is_a_cross_check(world, pair, engine):
    """It is selected as in float32; the library for the CPU says that it has none."""
    _, target, drafter = pair
    other = world.engine(target=target, drafter=drafter, dtype="bfloat16", gemm="cublas", block_size=5)
    if world.library.architectures == "host":
        with pytest.raises(UnsupportedError, match="there is no cuBLAS on the CPU"):
            other.generate(PROMPT, method="ar", max_new_tokens=1)
        return
    truth = engine.generate([Request(PROMPT, 1)], method="ar", keep_logits=True)[0]
    made = other.generate([Request(PROMPT, 1)], method="ar", keep_logits=True)[0]
    assert error(made.logits[0], truth.logits[0].astype(np.float64)) < 0.04


def test_files_of_any_type_give_the_same_bits(world, tmp_path):
    """What bf16 holds exactly is the same whether the file has it as bf16, float32 or float64."""
    pytest.importorskip("ml_dtypes")
    config = micro_target(**FAST)
    weights = {
        name: array if name.endswith("bias") else round_to_bf16(array) for name, array in random_weights(config).items()
    }
    bits = []
    for kind in ("bf16", "f32", "f64"):
        save_kdtr(tmp_path / f"{kind}.kdtr", config, weights, kind, META)
        with world.new_engine(target=tmp_path / f"{kind}.kdtr", drafter=None, dtype="bfloat16") as made:
            bits.append(made.generate(PROMPT, method="ar", max_new_tokens=3, keep_logits=True).logits.view(np.uint32))
    assert_array_equal(bits[1], bits[0])
    assert_array_equal(bits[2], bits[0])


def test_weights_that_bf16_does_not_hold_are_rounded_to_the_nearest(world, tmp_path):
    """Ties to even, as NumPy rounds; the router alone keeps its float32."""
    config = micro_target(**FAST)
    wide, bits = random_weights(config), []
    for name, weights in (("wide", wide), ("narrow", narrow_weights(config))):
        file = write_model(tmp_path / f"{name}.kdtr", config, weights)
        with world.new_engine(target=file, drafter=None, dtype="bfloat16") as made:
            bits.append(made.generate(PROMPT, method="ar", max_new_tokens=3, keep_logits=True).logits.view(np.uint32))
    assert bits[0].shape == (4, VOCABULARY)
    assert_array_equal(bits[1], bits[0])


def test_callers_of_the_structs_before_there_was_a_dtype_get_float32(world):
    """An args struct that ends where it ended then, and an info struct too."""
    args, info = decode_abi.DecoderArgs, decode_abi.DecoderInfo
    with world.new_engine() as made:
        expected = made.row_bytes
    with checkpoint.load(world.library, world.target_file, "model") as model:
        old = args(struct_size=args.dtype.offset, target=model.address, max_requests=1, capacity=8, dtype=77)
        with decode_abi.Handle(world.library, "decoder", old) as decoder:
            told = info(struct_size=info.dtype.offset, dtype=77, attention_path=78)
            decoder.call("query", told)
            assert (told.struct_size, told.row_bytes) == (info.dtype.offset, expected)
            assert (told.dtype, told.attention_path) == (77, 78)  # not written


def test_is_asked_for_by_its_whole_name(world):
    with pytest.raises(ValueError, match="dtype is 'bf16', expected one of float32, bfloat16"):
        world.new_engine(dtype="bf16")
