"""Dequantisation of the two published weight formats, to exactly the values that their own tools give.

FP8 block (DeepSeek-V3, Kimi-K2): X.weight float8_e4m3fn [out, in] and X.weight_scale_inv [ceil(out/b0), ceil(in/b1)];
blocks at the edges are partial. value * scale (multiplied, despite the name), in float32. Activations of the reference
stay unquantised.

INT4 pack-quantized (compressed-tensors; routed experts of Kimi-K2-Thinking and K2.5): X.weight_packed int32
[out, ceil(in/8)], X.weight_scale [out, ceil(in/group)], X.weight_shape [2] = (out, in). Eight offset-binary nibbles per
word, the first channel in the lowest bits: (nibble - 8) * scale of its group, rounded to the dtype of the scale, as
compressed-tensors 0.20 does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.config_reader import ConfigError, KeyReader
from reference.numerics import Array, round_to_bf16


@dataclass(frozen=True)
class Fp8Block:
    """weight_block_size of a config: rows and columns that share a scale."""

    block: tuple[int, int]


@dataclass(frozen=True)
class Int4Pack:
    """group_size of a config: neighbouring input channels that share a scale."""

    group_size: int


def read_quantization(raw: Mapping[str, Any] | None) -> Fp8Block | Int4Pack | None:
    """The quantization_config of a published config, None if not quantised; ConfigError for any other kind."""
    if raw is None:
        return None
    read = KeyReader(raw, "quantization_config")
    read.only("quant_method", "fp8", "compressed-tensors", required=True)
    if raw.get("quant_method") == "fp8":
        read.only("fmt", "e4m3")
        read.only("activation_scheme", "dynamic")
        read.only("scale_fmt", None)
        read.ignore("modules_to_not_convert")
        block = read.integers("weight_block_size", minimum=1)
        if len(block) != 2:
            raise ConfigError(f"quantization_config: weight_block_size must be [rows, columns], got {list(block)}")
        read.finish()
        return Fp8Block((block[0], block[1]))
    read.only("format", "pack-quantized", required=True)
    read.only("kv_cache_scheme", None)
    read.only("sparsity_config", None, {})
    read.only("transform_config", None, {})
    read.ignore("quantization_status", "ignore", "version", "global_compression_ratio")
    groups = read.mapping("config_groups")
    if len(groups) != 1:
        raise ConfigError(f"quantization_config: config_groups must hold one group, got {sorted(groups)}")
    read.finish()
    return _read_group(next(iter(groups.items())))


def _read_group(item: tuple[str, Any]) -> Int4Pack:
    where = f"quantization_config, config_groups.{item[0]}"
    group = KeyReader(item[1], where)
    group.only("format", "pack-quantized", None)
    group.only("input_activations", None)
    group.only("output_activations", None)
    group.ignore("targets")
    weights = KeyReader(group.mapping("weights"), where + ".weights")
    group.finish()
    weights.only("num_bits", 4, required=True)
    weights.only("strategy", "group", required=True)
    weights.only("type", "int")
    weights.only("symmetric", True)
    weights.only("dynamic", False)
    weights.only("actorder", None)
    weights.only("block_structure", None)
    weights.only("zp_dtype", None)
    weights.ignore("observer", "observer_kwargs", "scale_dtype")
    size = weights.integer("group_size")
    weights.finish()
    return Int4Pack(size)


def e4m3fn_values() -> npt.NDArray[np.float32]:
    """float32 [256]: the value of each float8_e4m3fn code: 1 sign, 4 exponent, 3 mantissa bits; 7f and ff are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


def fp8_scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the block scales of a weight of `shape` [out, in]."""
    return tuple(-(-size // step) for size, step in zip(shape, block, strict=True))


def dequantize_fp8_block(codes: npt.NDArray[np.uint8], scale: Array, block: tuple[int, int]) -> npt.NDArray[np.float32]:
    """codes uint8 [out, in] (raw e4m3fn), scale float [ceil(out/b0), ceil(in/b1)] -> float32 [out, in]."""
    expected = fp8_scale_shape(codes.shape, block)
    if scale.shape != expected:
        raise ValueError(
            f"a weight {list(codes.shape)} in blocks {list(block)} needs scales {list(expected)}, "
            f"got {list(scale.shape)}"
        )
    rows, columns = codes.shape
    per_row = np.repeat(scale.astype(np.float32), block[0], axis=0)[:rows]
    return e4m3fn_values()[codes] * np.repeat(per_row, block[1], axis=1)[:, :columns]


def unpack_int4(packed: npt.NDArray[np.int32], columns: int) -> npt.NDArray[np.int8]:
    """packed int32 [out, ceil(columns/8)] -> int8 [out, columns] in -8..7."""
    if packed.ndim != 2 or packed.shape[1] != -(-columns // 8):
        raise ValueError(f"{columns} int4 columns need [out, {-(-columns // 8)}] words, got {list(packed.shape)}")
    nibbles = (packed.view(np.uint32)[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & np.uint32(15)
    return (nibbles.reshape(len(packed), -1)[:, :columns].astype(np.int8) - np.int8(8)).astype(np.int8)


def dequantize_int4(
    packed: npt.NDArray[np.int32], scale: Array, scale_dtype: str, shape: tuple[int, int], group_size: int
) -> npt.NDArray[np.float32]:
    """packed int32 [out, ceil(in/8)] and scale [out, ceil(in/group)], as float32 -> float32 [out, in].

    scale_dtype: the type that the scales are stored in, "bf16", "f16" or "f32"; every product is rounded to it.
    """
    expected = (shape[0], -(-shape[1] // group_size))
    if scale.shape != expected:
        raise ValueError(
            f"a weight {list(shape)} in groups of {group_size} needs scales {list(expected)}, got {list(scale.shape)}"
        )
    if len(packed) != shape[0]:
        raise ValueError(f"a weight {list(shape)} needs {shape[0]} packed rows, got {len(packed)}")
    per_column = np.repeat(scale.astype(np.float32), group_size, axis=1)[:, : shape[1]]
    product: npt.NDArray[np.float32] = unpack_int4(packed, shape[1]).astype(np.float32) * per_column
    if scale_dtype == "bf16":
        return round_to_bf16(product)
    if scale_dtype == "f16":
        return product.astype(np.float16).astype(np.float32)
    if scale_dtype == "f32":
        return product
    raise ValueError(f"scales of an int4 weight must be bf16, f16 or f32, got {scale_dtype}")
