"""Latent cache rows in 656 bytes, the layout that FlashMLA and vLLM call fp8_ds_mla.

A row is 512 latents as float8_e4m3fn codes, four float32 scales, one for each 128 of them, and 64 rope key channels in
bfloat16. A latent is code * scale, the float32 product rounded to bfloat16, whoever wrote the row.

What is written here: of the latents rounded to bfloat16, each group's scale is the least power of two that brings the
largest to 448 or less. vLLM divides the largest by 448 itself; a power of two costs no precision but at the end of the
range, since codes are floats, and every product is a bfloat16 number already. No scale is less than 2**-117, below
which products would lose bits; a group of zeros has that scale. A NaN or an infinity makes its group's scale a NaN, and
all latents of the group with it. Codes are rounded to nearest, ties to even.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from reference.cache import LatentCache
from reference.numerics import Array, bf16_bits_to_float32, float32_to_bf16_bits, round_to_bf16
from reference.quant import e4m3fn_values

LATENT, ROPE, GROUP = 512, 64, 128
SCALES = slice(LATENT, LATENT + 4 * (LATENT // GROUP))  # bytes
ROW_BYTES = SCALES.stop + 2 * ROPE
LEAST_EXPONENT = -117  # of a scale


def group_scales(latent: Array) -> npt.NDArray[np.float32]:
    """Scales float32 [N, 4] of the latents [N, 512]."""
    largest = np.abs(round_to_bf16(latent)).reshape(len(latent), -1, GROUP).max(axis=-1)
    finite = np.isfinite(largest)
    # largest = fraction * 2**exponent, 448 = 0.875 * 2**9
    fraction, exponent = np.frexp(np.where(finite, np.maximum(largest, 2.0**LEAST_EXPONENT), 1))
    scale = np.ldexp(np.float32(1), np.maximum(exponent - 9 + (fraction > 0.875), LEAST_EXPONENT))
    return np.where(finite, scale, np.float32(np.nan)).astype(np.float32)


def e4m3fn_codes(values: Array) -> npt.NDArray[np.uint8]:
    """The nearest codes of float32 values of any shape, ties to even, of at most 448; a NaN gives 0x7f."""
    values = np.asarray(values, np.float32, order="C")
    bits = values.view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    normal = ((size + np.uint32(0x7FFFF) + ((size >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)) - np.uint32(960)
    # Below 2**-6 codes are multiples of 2**-9.
    with np.errstate(invalid="ignore"):
        small = np.rint(np.minimum(np.abs(values), 1) * np.float32(512)).astype(np.uint32)
    code = np.minimum(np.where(size < np.uint32(121 << 23), small, normal), np.uint32(0x7E))
    code |= (bits >> np.uint32(31)) << np.uint32(7)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


def quantize_rows(latent: Array, rope_key: Array) -> npt.NDArray[np.uint8]:
    """latent [N, 512] and rope_key [N, 64] -> rows uint8 [N, 656]. Raises ValueError for other shapes."""
    if latent.shape != (len(latent), LATENT) or rope_key.shape != (len(latent), ROPE):
        raise ValueError(
            f"expected latent [N, {LATENT}] and rope key [N, {ROPE}], "
            f"got {list(latent.shape)} and {list(rope_key.shape)}"
        )
    scale = group_scales(latent)
    with np.errstate(invalid="ignore"):
        codes = e4m3fn_codes(round_to_bf16(latent) / np.repeat(scale, GROUP, axis=1))
    parts = codes, scale.astype("<f4").view(np.uint8), float32_to_bf16_bits(rope_key).astype("<u2").view(np.uint8)
    return np.concatenate(parts, axis=1)


def dequantize_rows(rows: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """rows uint8 [N, 656] -> (latent [N, 512], rope_key [N, 64]), float32 of bfloat16 values. Raises ValueError."""
    if rows.dtype != np.uint8 or rows.shape[1:] != (ROW_BYTES,):
        raise ValueError(f"expected rows uint8 [N, {ROW_BYTES}], got {rows.dtype} {list(rows.shape)}")
    scale = np.ascontiguousarray(rows[:, SCALES]).view("<f4").astype(np.float32)
    latent = round_to_bf16(e4m3fn_values()[rows[:, :LATENT]] * np.repeat(scale, GROUP, axis=1))
    return latent, bf16_bits_to_float32(np.ascontiguousarray(rows[:, SCALES.stop :]).view("<u2").astype(np.uint16))


class Fp8Cache(LatentCache):
    """A cache of such rows: what attention reads of it is what the rows stand for. Storage uint8 [layers, rows, 656],
    0xff where nothing was written: NaN."""

    def __init__(self, n_layers: int, capacity: int):
        storage = np.full((n_layers, capacity, ROW_BYTES), 0xFF, np.uint8)
        super().__init__(n_layers, ROW_BYTES, 0, capacity, np.uint8, storage=storage)

    def write(self, layer: int, latent: npt.NDArray[Any], rope_key: npt.NDArray[Any]) -> None:
        """Put N scratch rows, as LatentCache does. Raises ValueError unless latent is [N, 512] and rope_key [N, 64]."""
        rows = quantize_rows(latent, rope_key)
        super().write(layer, rows, rows[:, :0])

    def read(self, layer: int, count: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """(latent [count, 512], rope_key [count, 64]) float32 of the first `count` rows of `layer`."""
        return dequantize_rows(super().read(layer, count)[0])
