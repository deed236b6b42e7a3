"""Checkpoints with quantised weights: FP8 with scales of blocks, packed INT4."""

from __future__ import annotations

import numpy as np
import pytest

from reference.checkpoint import CheckpointError, load_target, read_target
from reference.numerics import round_to_bf16
from reference.quant import dequantize_fp8_block, dequantize_int4, fp8_scale_shape
from reference.tests.checkpoint_files import edit_json, rewrite, single
from reference.tests.test_quant import FP8_CONFIG, INT4_CONFIG, pack

ROUTED = "model.layers.1.mlp.experts.0.up_proj"
LATENT = "model.layers.2.self_attn.kv_a_proj_with_mqa"


def quantised_fp8(tmp_path, block=(5, 7)):
    folder = single(tmp_path)
    rng = np.random.default_rng(0)
    given = {}

    def quantise(tensors):
        for base in (ROUTED, LATENT):
            shape = tensors[base + ".weight"][1].shape
            codes = rng.integers(0, 0x7F, shape).astype(np.uint8)
            scale = rng.uniform(0.5, 2, fp8_scale_shape(shape, block)).astype(np.float32)
            tensors[base + ".weight"] = ("f8_e4m3fn", codes)
            tensors[base + ".weight_scale_inv"] = ("f32", scale)
            given[base] = codes, scale

    rewrite(folder, quantise)
    quantization = {**FP8_CONFIG, "weight_block_size": list(block)}
    edit_json(folder / "config.json", lambda content: content.update(quantization_config=quantization))
    return folder, given


def test_fp8_weights_are_dequantised(tmp_path):
    folder, given = quantised_fp8(tmp_path)
    _, weights = read_target(folder)
    for base, (codes, scale) in given.items():
        np.testing.assert_array_equal(weights[base + ".weight"], dequantize_fp8_block(codes, scale, (5, 7)))
    load_target(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(LATENT + ".weight_scale_inv"), rf"missing {LATENT}.weight_scale_inv \[5, 4\]"),
        (
            lambda t: t.update({LATENT + ".weight_scale_inv": ("f32", np.ones((4, 4), np.float32))}),
            r"weight_scale_inv in model.safetensors has shape \[4, 4\], the config says \[5, 4\]",
        ),
        (
            lambda t: t.update({LATENT + ".weight": ("bf16", np.zeros((24, 24), np.uint16))}),
            f"surplus {LATENT}.weight_scale_inv",
        ),
    ],
)
def test_fp8_scales_that_do_not_fit(tmp_path, damage, message):
    folder, _ = quantised_fp8(tmp_path)
    rewrite(folder, damage)
    with pytest.raises(CheckpointError, match=message):
        load_target(folder)


def test_fp8_scales_may_be_bf16(tmp_path):
    folder, given = quantised_fp8(tmp_path)
    rewrite(folder, lambda t: t.update({LATENT + ".weight_scale_inv": ("bf16", np.full((5, 4), 0x4000, np.uint16))}))
    _, weights = read_target(folder)
    expected = dequantize_fp8_block(given[LATENT][0], np.full((5, 4), 2.0, np.float32), (5, 7))
    np.testing.assert_array_equal(weights[LATENT + ".weight"], expected)


def test_fp8_without_a_quantization_config(tmp_path):
    folder, _ = quantised_fp8(tmp_path)
    edit_json(folder / "config.json", lambda content: content.pop("quantization_config"))
    with pytest.raises(CheckpointError, match=f"{LATENT}.weight is FP8, but the config has no quantization_config"):
        load_target(folder)


def quantised_int4(tmp_path, shape_dtype="i32"):
    folder = single(tmp_path)
    rng = np.random.default_rng(0)
    values = rng.integers(-8, 8, (12, 24)).astype(np.int8)
    scale = (rng.uniform(0.5, 2, (12, 1)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    def quantise(tensors):
        del tensors[ROUTED + ".weight"]
        tensors[ROUTED + ".weight_packed"] = ("i32", pack(values))
        tensors[ROUTED + ".weight_scale"] = ("bf16", scale)
        kind = {"i32": np.int32, "i64": np.int64}[shape_dtype]
        tensors[ROUTED + ".weight_shape"] = (shape_dtype, np.array([12, 24], kind))

    rewrite(folder, quantise)
    edit_json(folder / "config.json", lambda content: content.update(quantization_config=INT4_CONFIG))
    return folder, values, scale


@pytest.mark.parametrize("shape_dtype", ["i32", "i64"])
def test_int4_weights_are_dequantised(tmp_path, shape_dtype):
    folder, values, scale = quantised_int4(tmp_path, shape_dtype)
    _, weights = read_target(folder)
    floats = (scale.astype(np.uint32) << 16).view(np.float32)
    expected = round_to_bf16(values.astype(np.float32) * floats)
    np.testing.assert_array_equal(weights[ROUTED + ".weight"], expected)
    np.testing.assert_array_equal(expected, dequantize_int4(pack(values), floats, "bf16", (12, 24), 32))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(ROUTED + ".weight_scale"), rf"missing {ROUTED}.weight_scale \[12, 1\]"),
        (lambda t: t.pop(ROUTED + ".weight_shape"), rf"missing {ROUTED}.weight_shape \[2\]"),
        (
            lambda t: t.update({ROUTED + ".weight_shape": ("i32", np.array([24, 12], np.int32))}),
            r"weight_shape says \[24, 12\], the config says \[12, 24\]",
        ),
        (
            lambda t: t.update({ROUTED + ".weight_packed": ("i32", np.zeros((12, 4), np.int32))}),
            r"weight_packed in model.safetensors has shape \[12, 4\], the config says \[12, 3\]",
        ),
        (
            lambda t: t.update({ROUTED + ".weight_packed": ("f32", np.zeros((12, 3), np.float32))}),
            "weight_packed in model.safetensors has type f32, expected i32",
        ),
        (
            lambda t: t.update({ROUTED + ".weight_zero_point": ("i32", np.zeros((2, 1), np.int32))}),
            f"surplus {ROUTED}.weight_zero_point",
        ),
    ],
)
def test_int4_parts_that_do_not_fit(tmp_path, damage, message):
    folder, _, _ = quantised_int4(tmp_path)
    rewrite(folder, damage)
    with pytest.raises(CheckpointError, match=message):
        load_target(folder)
