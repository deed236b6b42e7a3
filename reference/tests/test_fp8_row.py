"""Cache rows in e4m3: codes against a search among all values, what a row keeps, and attention over a cache of them."""

from __future__ import annotations

import numpy as np
import pytest

from reference.cache import CapacityError
from reference.fp8_row import (
    GROUP,
    LATENT,
    ROPE,
    ROW_BYTES,
    Fp8Cache,
    dequantize_rows,
    e4m3fn_codes,
    group_scales,
    quantize_rows,
)
from reference.mla import latent_attention
from reference.numerics import Numerics, round_to_bf16
from reference.quant import e4m3fn_values

VALUES = e4m3fn_values()[:0x7F]  # ascending


def random_rows(count, seed=0):
    """Latents whose groups differ in size, and rope keys, all bf16 numbers."""
    rng = np.random.default_rng(seed)
    sizes = np.repeat(2.0 ** rng.integers(-6, 7, (count, LATENT // GROUP)), GROUP, axis=1)
    return round_to_bf16(rng.normal(size=(count, LATENT)) * sizes), round_to_bf16(rng.normal(size=(count, ROPE)))


def test_the_row_has_the_published_layout():
    latent, rope = random_rows(3)
    rows = quantize_rows(latent, rope)
    assert rows.shape == (3, ROW_BYTES) == (3, 656)
    scales = rows[:, 512:528].copy().view("<f4")
    np.testing.assert_array_equal(scales, group_scales(latent))
    np.testing.assert_array_equal(rows[:, 528:].copy().view("<u2"), (rope.view(np.uint32) >> 16).astype(np.uint16))
    np.testing.assert_array_equal(e4m3fn_values()[rows[:, 130]] * scales[:, 1], dequantize_rows(rows)[0][:, 130])


def test_codes_are_the_nearest_ties_to_even():
    between = (VALUES[1:] + VALUES[:-1]) / 2
    numbers = np.concatenate(
        [VALUES, between, np.nextafter(between, 0), np.nextafter(between, np.float32(np.inf)), np.geomspace(1e-9, 448)]
    ).astype(np.float32)
    distance = np.abs(VALUES.astype(np.float64) - numbers[:, None].astype(np.float64))
    nearest = [min(np.flatnonzero(row == row.min()), key=lambda code: code % 2) for row in distance]
    np.testing.assert_array_equal(e4m3fn_codes(numbers), nearest)
    np.testing.assert_array_equal(e4m3fn_codes(-numbers), np.array(nearest) | 0x80)
    np.testing.assert_array_equal(e4m3fn_codes(np.array([np.nan, -np.nan], np.float32)), [0x7F, 0x7F])


def test_scales_are_the_least_powers_of_two_that_are_enough():
    sizes = round_to_bf16(np.concatenate([2.0 ** np.arange(-100, 100), 1.75 * 2.0 ** np.arange(-100, 100)]))
    sizes = np.concatenate([sizes, round_to_bf16(sizes * (1 + 2**-7))])
    latent = np.zeros((len(sizes), LATENT), np.float32)
    latent[:, 200] = -sizes
    scales = group_scales(latent)[:, 1]
    assert (np.frexp(scales)[0] == 0.5).all()
    assert (sizes <= 448 * scales).all()
    assert (sizes > 224 * scales).all()
    assert (group_scales(latent)[:, [0, 2, 3]] == 2.0**-117).all()  # of zeros


def test_what_a_row_keeps_is_kept_for_good_and_near():
    latent, rope = random_rows(50)
    kept, kept_rope = dequantize_rows(quantize_rows(latent, rope))
    np.testing.assert_array_equal(kept_rope, rope)
    largest = np.repeat(np.abs(latent).reshape(50, -1, GROUP).max(axis=-1), GROUP, axis=1)
    # Half a step of three bits of mantissa, and below 2**-6 times the scale half a step of 2**-9.
    assert (np.abs(kept - latent) <= np.maximum(np.abs(latent) * 2**-4, largest * 2**-17)).all()
    np.testing.assert_array_equal(kept, round_to_bf16(kept))
    np.testing.assert_array_equal(dequantize_rows(quantize_rows(kept, rope))[0], kept)


def test_zeros_the_smallest_and_the_largest_come_back():
    latent, rope = np.zeros((1, LATENT), np.float32), np.zeros((1, ROPE), np.float32)
    assert (quantize_rows(latent, rope)[:, :LATENT] == 0).all()
    for size in (2.0**-126, 2.0**-120, 2.0**126, 1.75 * 2.0**127):
        latent[0, :3] = size, -size, 0
        np.testing.assert_array_equal(dequantize_rows(quantize_rows(latent, rope))[0], latent)
    latent[0, 0] = 2.0**-133  # the least bf16 number; a group with that alone keeps 2**-126 and more
    np.testing.assert_array_equal(dequantize_rows(quantize_rows(np.abs(latent) * 0 + latent[0, 0], rope))[0], 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_nan_or_an_infinity_makes_its_group_nan(bad):
    latent, rope = random_rows(2)
    clean = dequantize_rows(quantize_rows(latent, rope))[0]
    latent[1, 300] = bad
    kept = dequantize_rows(quantize_rows(latent, rope))[0]
    assert np.isnan(kept[1, 256:384]).all()
    kept[1, 256:384] = clean[1, 256:384]
    np.testing.assert_array_equal(kept, clean)


def test_any_scale_is_read_and_its_products_are_rounded():
    rows = quantize_rows(*random_rows(2))
    rows[:, 512:528] = np.array([[0.1, 3, 1e-3, 7]] * 2, "<f4").view(np.uint8)
    latent = dequantize_rows(rows)[0]
    products = e4m3fn_values()[rows[:, :128]] * np.float32(0.1)
    np.testing.assert_array_equal(latent[:, :128], round_to_bf16(products))
    assert (latent[:, :128] != products).any()


def test_other_shapes_are_refused():
    latent, rope = random_rows(2)
    with pytest.raises(ValueError, match=r"expected latent \[N, 512\] and rope key \[N, 64\], got \[2, 511\]"):
        quantize_rows(latent[:, 1:], rope)
    with pytest.raises(ValueError, match=r"expected rows uint8 \[N, 656\], got uint8 \[2, 655\]"):
        dequantize_rows(quantize_rows(latent, rope)[:, 1:])


def test_a_cache_of_them_moves_bytes_and_attends_to_what_they_stand_for():
    latent, rope = random_rows(9)
    cache = Fp8Cache(2, 12)
    for layer in range(2):
        cache.write(layer, latent[:4], rope[:4])
    cache.commit(range(4))
    for layer in range(2):
        cache.write(layer, latent[4:], rope[4:])
    cache.commit([0, 2, 3])
    kept = [0, 1, 2, 3, 4, 6, 7]
    np.testing.assert_array_equal(cache.storage[1, :7], quantize_rows(latent, rope)[kept])
    held = cache.read(1, 7)
    expected = dequantize_rows(quantize_rows(latent[kept], rope[kept]))
    for ours, theirs in zip(held, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    query = np.random.default_rng(1).normal(size=(1, 2, LATENT + ROPE)).astype(np.float32)
    numerics = Numerics.of("float32")
    outs = [
        latent_attention(query[..., :LATENT], query[..., LATENT:], values, keys, 0.01, numerics)[0]
        for values, keys in (held, (latent[kept], rope[kept]))
    ]
    off = np.sqrt(np.mean((outs[0] - outs[1]) ** 2) / np.mean(outs[1] ** 2))
    assert 0 < off < 2**-4
    with pytest.raises(CapacityError, match="needs 6 cache rows, 5 are available"):
        cache.write(0, latent[:6], rope[:6])
