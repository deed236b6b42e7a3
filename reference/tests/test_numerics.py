"""bf16 rounding against its definition, and the small operations of the precision modes."""

from __future__ import annotations

import numpy as np
import pytest

from reference.numerics import PRECISIONS, Numerics, bf16_bits_to_float32, float32_to_bf16_bits, round_to_bf16


def test_every_bf16_value_stays_and_every_midpoint_goes_to_even():
    bits = np.arange(0x10000, dtype=np.uint32).astype(np.uint16)
    values = bf16_bits_to_float32(bits)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(round_to_bf16(values)[finite], values[finite])
    np.testing.assert_array_equal(float32_to_bf16_bits(values)[~np.isnan(values)], bits[~np.isnan(values)])
    low = bits[finite & (bits & 0x7FFF < 0x7F7F)].astype(np.uint32)
    for offset, up in ((0x7FFF, np.zeros_like(low)), (0x8000, low & 1), (0x8001, np.ones_like(low))):
        between = (low << np.uint32(16) | np.uint32(offset)).view(np.float32)
        np.testing.assert_array_equal(float32_to_bf16_bits(between), (low + up).astype(np.uint16))


def test_rounding_of_special_values():
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, -0.0, 1e-45], np.float32)
    rounded = round_to_bf16(special)
    assert np.isnan(rounded[:2]).all()
    assert rounded[2:6].tolist() == [np.inf, -np.inf, np.inf, -np.inf]
    assert np.signbit(rounded[6])
    assert rounded[7] == 0
    payload = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)  # would carry to infinity or to -0
    assert np.isnan(round_to_bf16(payload)).all()


def test_rounding_agrees_with_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes (extra `convert`)")
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(float32_to_bf16_bits(values), expected)


def test_rounding_keeps_shape_and_takes_any_layout():
    x = np.arange(24, dtype=np.float64).reshape(2, 3, 4).transpose(2, 0, 1) / 7
    assert round_to_bf16(x).shape == (4, 2, 3)
    np.testing.assert_array_equal(round_to_bf16(x), round_to_bf16(np.ascontiguousarray(x)))
    assert round_to_bf16(np.array(1.0)).shape == ()


@pytest.mark.parametrize("name", PRECISIONS)
def test_rms_norm(name):
    numerics = Numerics.of(name)
    rng = np.random.default_rng(0)
    x, weight = numerics.store(rng.standard_normal((5, 24)) * 3), numerics.store(rng.standard_normal(24))
    out = numerics.rms_norm(x, weight, 1e-2)
    expected = weight * (x / np.sqrt((x.astype(float) ** 2).mean(axis=1, keepdims=True) + 1e-2))
    tolerance = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 0.02}[name]
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=0)
    assert out.dtype == numerics.dtype


def test_rms_norm_multiplies_the_weight_after_rounding_back():
    """As published: round the normed row, multiply, round again. Rounding once gives other values."""
    numerics = PRECISIONS["bfloat16"]
    rng = np.random.default_rng(1)
    x, weight = numerics.store(rng.standard_normal((50, 24))), numerics.store(rng.standard_normal(24))
    normed = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + np.float32(1e-6))
    out = numerics.rms_norm(x, weight, 1e-6)
    np.testing.assert_array_equal(out, round_to_bf16(weight * round_to_bf16(normed)))
    assert (out != round_to_bf16(weight * normed)).any()
