"""Dequantisation against element-wise formulas; odd sizes; what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from reference.config import ConfigError
from reference.quant import (
    Fp8Block,
    Int4Pack,
    dequantize_fp8_block,
    dequantize_int4,
    e4m3fn_values,
    fp8_scale_shape,
    read_quantization,
    unpack_int4,
)

FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT4_WEIGHTS = {
    "num_bits": 4,
    "group_size": 32,
    "strategy": "group",
    "type": "int",
    "symmetric": True,
    "dynamic": False,
    "actorder": None,
    "block_structure": None,
    "observer": "minmax",
    "observer_kwargs": {},
}
INT4_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": INT4_WEIGHTS,
        }
    },
}


def test_e4m3fn_codes():
    value = e4m3fn_values()
    assert value[0] == 0
    assert np.signbit(value[0x80])
    assert value[0x01] == 2.0**-9
    assert value[0x08] == 2.0**-6
    assert value[0x38] == 1.0
    assert value[0x7E] == 448.0
    assert value[0xFE] == -448.0
    assert np.isnan(value[[0x7F, 0xFF]]).all()
    assert np.isfinite(np.delete(value, [0x7F, 0xFF])).all()
    assert (np.diff(value[:0x7F]) > 0).all()


@pytest.mark.parametrize(
    ("shape", "block"), [((576, 256), (128, 128)), ((1000, 130), (128, 128)), ((1, 1), (128, 128)), ((7, 5), (2, 3))]
)
def test_fp8_blocks_with_partial_edges(shape, block):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7F, shape).astype(np.uint8)
    scale_shape = fp8_scale_shape(shape, block)
    scale = (1 + np.arange(np.prod(scale_shape))).reshape(scale_shape).astype(np.float32)
    out = dequantize_fp8_block(codes, scale, block)
    assert out.dtype == np.float32
    value = e4m3fn_values()
    expected = np.empty(shape, np.float32)
    for r, c in itertools.product(range(shape[0]), range(shape[1])):
        expected[r, c] = value[codes[r, c]] * scale[r // block[0], c // block[1]]
    np.testing.assert_array_equal(out, expected)


def test_the_latent_projection_of_deepseek_needs_five_rows_of_scales():
    assert fp8_scale_shape((576, 7168), (128, 128)) == (5, 56)
    codes = np.zeros((576, 256), np.uint8)
    for wrong in ((4, 2), (5, 1), (2, 5), (5, 2, 1)):
        with pytest.raises(
            ValueError, match=r"a weight \[576, 256\] in blocks \[128, 128\] needs scales \[5, 2\], got"
        ):
            dequantize_fp8_block(codes, np.ones(wrong, np.float32), (128, 128))


def pack(values):
    """int8 [out, in] in -8..7 -> int32 words, one nibble at a time."""
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns // 8)), np.uint32)
    for r, c in itertools.product(range(rows), range(columns)):
        words[r, c // 8] |= np.uint32(int(values[r, c]) + 8) << np.uint32(4 * (c % 8))
    return words.view(np.int32)


@pytest.mark.parametrize("columns", [8, 32, 33, 37, 64, 100])
@pytest.mark.parametrize("scale_dtype", ["bf16", "f16", "f32"])
def test_int4_groups_of_any_width(columns, scale_dtype):
    rng = np.random.default_rng(columns)
    values = rng.integers(-8, 8, (5, columns)).astype(np.int8)
    scale = rng.standard_normal((5, -(-columns // 32))).astype(np.float32)
    if scale_dtype == "bf16":
        scale = (scale.view(np.uint32) & 0xFFFF0000).view(np.float32)
    elif scale_dtype == "f16":
        scale = scale.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(unpack_int4(pack(values), columns), values)
    out = dequantize_int4(pack(values), scale, scale_dtype, (5, columns), 32)
    exact = np.array([[int(values[r, c]) * float(scale[r, c // 32]) for c in range(columns)] for r in range(5)])
    step = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-24}[scale_dtype]
    np.testing.assert_allclose(out, exact, rtol=step, atol=0)
    bits = out.view(np.uint32)
    if scale_dtype == "bf16":
        assert not (bits & 0xFFFF).any()
        assert np.abs(out - exact).max() > 0  # the product needs more bits than bf16 has
    elif scale_dtype == "f16":
        assert not (bits & 0x1FFF).any()


def test_int4_word_by_hand():
    """0x76543210 holds -8..-1, first channel lowest."""
    word = np.array([[0x76543210]], np.int32)
    assert unpack_int4(word, 8).tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1]]
    assert unpack_int4(np.array([[-1]], np.int32), 3).tolist() == [[7, 7, 7]]


def test_int4_sizes_that_do_not_fit():
    packed, scale = np.zeros((5, 8), np.int32), np.ones((5, 2), np.float32)
    with pytest.raises(ValueError, match=r"int4 columns need \[out, 8\] words, got \[5, 7\]"):
        dequantize_int4(packed[:, :7], scale, "bf16", (5, 64), 32)
    with pytest.raises(ValueError, match=r"needs scales \[5, 2\], got \[5, 1\]"):
        dequantize_int4(packed, scale[:, :1], "bf16", (5, 64), 32)
    with pytest.raises(ValueError, match="needs 5 packed rows, got 4"):
        dequantize_int4(packed[:4], scale, "bf16", (5, 64), 32)
    with pytest.raises(ValueError, match="must be bf16, f16 or f32, got f8_e4m3fn"):
        dequantize_int4(packed, scale, "f8_e4m3fn", (5, 64), 32)


def test_configs_that_are_understood():
    assert read_quantization(None) is None
    assert read_quantization(FP8_CONFIG) == Fp8Block((128, 128))
    assert read_quantization({**FP8_CONFIG, "weight_block_size": [64, 32]}) == Fp8Block((64, 32))
    assert read_quantization(INT4_CONFIG) == Int4Pack(32)


def changed_group(**changes):
    group = {**INT4_CONFIG["config_groups"]["group_0"], "weights": {**INT4_WEIGHTS, **changes}}
    return {**INT4_CONFIG, "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "quant_method is missing"),
        ({"quant_method": "gptq"}, "quant_method is 'gptq', supported is 'fp8' or 'compressed-tensors'"),
        ({**FP8_CONFIG, "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({**FP8_CONFIG, "scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
        ({**FP8_CONFIG, "weight_block_size": [128]}, r"weight_block_size must be \[rows, columns\], got \[128\]"),
        ({k: v for k, v in FP8_CONFIG.items() if k != "weight_block_size"}, "weight_block_size is missing"),
        ({**INT4_CONFIG, "format": "int-quantized"}, "format is 'int-quantized'"),
        ({**INT4_CONFIG, "config_groups": {}}, r"one group, got \[\]"),
        ({**INT4_CONFIG, "surprise": 1}, "surprise = 1"),
        (changed_group(num_bits=8), "num_bits is 8, supported is 4"),
        (changed_group(symmetric=False), "symmetric is False"),
        (changed_group(strategy="channel"), "strategy is 'channel'"),
        (changed_group(actorder="group"), "actorder is 'group'"),
        (changed_group(group_size=None), "group_size must be an integer"),
        (changed_group(rotation=True), "rotation = True"),
    ],
)
def test_configs_that_are_not(raw, message):
    with pytest.raises(ConfigError, match=message):
        read_quantization(raw)
