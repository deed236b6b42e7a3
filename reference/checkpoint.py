"""Checkpoints in and out: Hugging Face folders with published names, and KDTR files.

`load_target` and `load_drafter` read a folder (config.json beside model.safetensors, or beside shards and their
index) or a .kdtr file of kind "model" or "drafter" (tensors under the same names, the config as `config/...`).
Nothing is computed before every tensor is known to be there with its shape; all that is missing, surplus or misshapen
is listed in one `CheckpointError`. FP8 block-scaled and INT4 pack-quantized weights are dequantised (reference.quant).

Names behind `language_model.` and a nested text_config (Kimi-K2.5 and later) are understood; the vision tensors of such
a checkpoint are skipped, so are the multi-token-prediction layers after the last one (as many as
num_nextn_predict_layers says) and stored rotary frequencies, which the config gives.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import kdtr
from reference.config import DrafterConfig, ModelConfig, load_config_json
from reference.config_reader import PREFIX, tensors_to_tree
from reference.dflash import DFlash
from reference.model import AttentionForm, Model
from reference.numerics import Array, Numerics, float32_to_bf16_bits
from reference.quant import (
    Fp8Block,
    Int4Pack,
    dequantize_fp8_block,
    dequantize_int4,
    fp8_scale_shape,
    read_quantization,
)
from reference.tensor_files import (
    INDEX_NAME,
    SINGLE_NAME,
    KdtrSource,
    Stored,
    TensorSource,
    open_safetensors,
    to_float,
    write_safetensors,
)
from reference.weights import check_weights

StoredFloat = Literal["bf16", "f32", "f64"]
Shape = tuple[int, ...]

_BESIDE_THE_LANGUAGE_MODEL = ("vision_tower.", "mm_projector.")
_ROTARY_BUFFER = ".rotary_emb.inv_freq"
_SELECTION_BIAS = ".e_score_correction_bias"
_FLOATS = ("bf16", "f16", "f32", "f64")


class CheckpointError(ValueError):
    """A checkpoint that does not hold what its config says; the message lists every fault."""


def load_target(
    path: str | Path, precision: str | Numerics = "float32", attention: AttentionForm = "absorbed"
) -> Model:
    """The target of a folder or .kdtr file, ready to run. precision and attention: see reference.model.Model."""
    config, weights = read_target(path)
    return Model(config, weights, precision, attention)


def load_drafter(
    path: str | Path, target: Model, precision: str | Numerics | None = None, block_size: int | None = None
) -> DFlash:
    """The drafter of a folder or .kdtr file, bound to the embedding and head of `target`.

    precision: default that of the target. CheckpointError if the drafter was made for a target of other sizes.
    """
    config, weights = read_drafter(path)
    for ours, theirs in (("num_target_layers", "num_hidden_layers"), ("hidden_size",) * 2, ("vocab_size",) * 2):
        if getattr(config, ours) != getattr(target.config, theirs):
            raise CheckpointError(
                f"{path}: the drafter says {ours} {getattr(config, ours)}, "
                f"the target has {theirs} {getattr(target.config, theirs)}"
            )
    numerics = target.numerics if precision is None else Numerics.of(precision)
    return DFlash(config, weights, target.embedding, target.head, numerics, block_size)


def read_target(path: str | Path) -> tuple[ModelConfig, dict[str, Array]]:
    """Config and dequantised weights (float32; float64 where stored so) by published name."""
    raw, source = _open(Path(path), "model")
    config = ModelConfig.from_tree(raw) if isinstance(source, KdtrSource) else ModelConfig.from_dict(raw)
    head = {"lm_head.weight": (config.vocab_size, config.hidden_size)} if config.tie_word_embeddings else {}
    text = raw.get("text_config", raw)
    predicted = text.get("num_nextn_predict_layers", text.get("num_mtp_layers", 0)) or 0
    layers = range(config.num_hidden_layers, config.num_hidden_layers + int(predicted))
    skipped = (*(f"model.layers.{layer}." for layer in layers), *_BESIDE_THE_LANGUAGE_MODEL * ("text_config" in raw))
    names = {}
    for stored in source.tensors:
        name = stored.removeprefix("language_model.") if "text_config" in raw else stored
        if not name.startswith((PREFIX, *skipped)) and not name.endswith(_ROTARY_BUFFER):
            names[name] = stored
    quantization = read_quantization(text.get("quantization_config", raw.get("quantization_config")))
    return config, _read(Path(path), source, names, config.weight_shapes(), head, quantization)


def read_drafter(path: str | Path) -> tuple[DrafterConfig, dict[str, Array]]:
    """Config and weights (float32; float64 where stored so) by published name."""
    raw, source = _open(Path(path), "drafter")
    config = DrafterConfig.from_dict(raw)
    names = {name: name for name in source.tensors if not name.startswith(PREFIX)}
    return config, _read(Path(path), source, names, config.weight_shapes(), {}, None)


def save_hf(
    directory: str | Path,
    config: ModelConfig | DrafterConfig,
    weights: Mapping[str, Array],
    dtype: StoredFloat = "bf16",
    max_shard_bytes: int | None = None,
) -> None:
    """Write a new folder: config.json and model.safetensors, or shards of at most max_shard_bytes with an index.

    weights by published name, any float dtype; stored as `dtype`, router biases at least as float32. The folder appears
    at once and whole; FileExistsError if it is there already, WeightError for weights that do not fit the config.
    """
    directory = Path(directory)
    if directory.exists():
        raise FileExistsError(f"{directory} exists; a checkpoint is written to a new folder")
    stored = _stored_weights(config, weights, dtype)
    torch_dtype = {"bf16": "bfloat16", "f32": "float32", "f64": "float64"}[dtype]
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        shards = _shards(stored, max_shard_bytes)
        if len(shards) == 1:
            write_safetensors(partial / SINGLE_NAME, stored)
        else:
            files = {f"model-{n + 1:05}-of-{len(shards):05}.safetensors": shard for n, shard in enumerate(shards)}
            for file, shard in files.items():
                write_safetensors(partial / file, {name: stored[name] for name in shard})
            total = sum(bits.nbytes for _, bits in stored.values())
            where = {name: file for file, shard in files.items() for name in shard}
            _write_json(partial / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": where})
        architecture = {"architectures": ["DeepseekV3ForCausalLM"]} if isinstance(config, ModelConfig) else {}
        _write_json(partial / "config.json", {**architecture, **config.to_dict(), "torch_dtype": torch_dtype})
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_kdtr(
    path: str | Path,
    config: ModelConfig | DrafterConfig,
    weights: Mapping[str, Array],
    dtype: StoredFloat = "bf16",
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Write a KDTR file of kind "model" or "drafter": weights (role param) and `config/...`. bf16 needs ml_dtypes."""
    arrays = config.to_tensors()
    roles = dict.fromkeys(arrays, "aux")
    for name, (kind, bits) in _stored_weights(config, weights, dtype).items():
        arrays[name] = _as_ml_dtype(bits) if kind == "bf16" else bits
        roles[name] = "param"
    kind = "model" if isinstance(config, ModelConfig) else "drafter"
    kdtr.save(path, arrays, kind=kind, meta=meta, roles=roles)


def _open(path: Path, kind: str) -> tuple[dict[str, Any], TensorSource]:
    """The raw config and the tensors of a folder or of a KDTR file of that kind."""
    if path.is_dir():
        return load_config_json(path / "config.json"), open_safetensors(path)
    source = KdtrSource(path)
    if source.kind != kind:
        raise CheckpointError(f"{path}: a KDTR file of kind {source.kind!r}, expected {kind!r}")
    tree = tensors_to_tree({name: source.bits(name) for name in source.tensors if name.startswith(PREFIX)})
    return tree, source


@dataclass(frozen=True)
class _Finder:
    """Finds, for each expected weight, the stored tensors that make it up; collects faults instead of raising."""

    source: TensorSource
    names: Mapping[str, str]  # published name -> stored name
    quantization: Fp8Block | Int4Pack | None
    taken: set[str]
    faults: list[str]

    def find(self, name: str, shape: Shape) -> Callable[[], Array] | None:
        """A function that reads the weight `name`; None, with a fault, if it cannot be read."""
        base = name.removesuffix(".weight")
        plain = self._stored(name)
        if plain is not None and plain.dtype == "f8_e4m3fn":
            return self._fp8(name, base, shape)
        if plain is not None:
            if plain.dtype not in _FLOATS:
                return self._fault(f"{name} has type {plain.dtype}, a plain weight is one of {', '.join(_FLOATS)}")
            return (lambda: self._floats(name)) if self._has(name, shape) else None
        if f"{base}.weight_packed" in self.names:
            return self._int4(base, shape)
        return self._fault(f"missing {name} {list(shape)}")

    def _fp8(self, name: str, base: str, shape: Shape) -> Callable[[], Array] | None:
        scale = f"{base}.weight_scale_inv"
        if not isinstance(self.quantization, Fp8Block):
            return self._fault(f"{name} is FP8, but the config has no quantization_config with quant_method fp8")
        block = self.quantization.block
        if not (self._has(name, shape) & self._has(scale, fp8_scale_shape(shape, block))):
            return None
        return lambda: dequantize_fp8_block(self._bits(name), self._floats(scale), block)

    def _int4(self, base: str, shape: Shape) -> Callable[[], Array] | None:
        packed, scale, given = (f"{base}.weight_{part}" for part in ("packed", "scale", "shape"))
        if not isinstance(self.quantization, Int4Pack):
            return self._fault(f"{packed}: the config has no quantization_config with format pack-quantized")
        rows, columns = shape
        group = self.quantization.group_size
        found = self._has(packed, (rows, -(-columns // 8)), ("i32",)) & self._has(scale, (rows, -(-columns // group)))
        if not (found & self._has(given, (2,), ("i32", "i64"))):
            return None
        if (actual := self._bits(given).tolist()) != [rows, columns]:
            return self._fault(f"{given} says {actual}, the config says {[rows, columns]}")
        kind = self.source.tensors[self.names[scale]].dtype
        return lambda: dequantize_int4(self._bits(packed), self._floats(scale), kind, (rows, columns), group)

    def _has(self, name: str, shape: Shape, types: tuple[str, ...] = (*_FLOATS, "f8_e4m3fn")) -> bool:
        """Whether a tensor is there with its shape and one of the types."""
        stored = self._stored(name)
        if stored is None:
            self._fault(f"missing {name} {list(shape)}")
        elif stored.shape != shape:
            self._fault(f"{name} in {stored.file.name} has shape {list(stored.shape)}, the config says {list(shape)}")
        elif stored.dtype not in types:
            self._fault(f"{name} in {stored.file.name} has type {stored.dtype}, expected {' or '.join(types)}")
        else:
            return True
        return False

    def _stored(self, name: str) -> Stored | None:
        if name not in self.names:
            return None
        self.taken.add(name)
        return self.source.tensors[self.names[name]]

    def _fault(self, text: str) -> Callable[[], Array] | None:
        self.faults.append(text)
        return None

    def _bits(self, name: str) -> Array:
        return self.source.bits(self.names[name])

    def _floats(self, name: str) -> Array:
        return to_float(self._bits(name), self.source.tensors[self.names[name]].dtype)


def _read(
    path: Path,
    source: TensorSource,
    names: Mapping[str, str],
    shapes: Mapping[str, Shape],
    optional: Mapping[str, Shape],
    quantization: Fp8Block | Int4Pack | None,
) -> dict[str, Array]:
    """Every weight of `shapes`, and of `optional` those that are there."""
    finder = _Finder(source, names, quantization, set(), [])
    wanted = {**shapes, **{name: shape for name, shape in optional.items() if name in names}}
    readers = {name: finder.find(name, shape) for name, shape in wanted.items()}
    faults = finder.faults + [f"surplus {name}" for name in sorted(set(names) - finder.taken)]
    if faults:
        raise CheckpointError(f"{path}: {len(faults)} faults: " + "; ".join(faults))
    return {name: reader() for name, reader in readers.items() if reader is not None}


def _stored_weights(
    config: ModelConfig | DrafterConfig, weights: Mapping[str, Array], dtype: StoredFloat
) -> dict[str, tuple[str, Array]]:
    """{name: (stored type, bits)} of exactly the weights of the config, in its order."""
    shapes = config.weight_shapes()
    check_weights(weights, shapes)
    stored: dict[str, tuple[str, Array]] = {}
    for name in shapes:
        array = np.asarray(weights[name])
        if dtype == "bf16" and not name.endswith(_SELECTION_BIAS):
            stored[name] = "bf16", float32_to_bf16_bits(array)
        elif dtype == "f64":
            stored[name] = "f64", np.ascontiguousarray(array, np.float64)
        else:
            stored[name] = "f32", np.ascontiguousarray(array, np.float32)
    return stored


def _shards(stored: Mapping[str, tuple[str, Array]], limit: int | None) -> list[list[str]]:
    """Names in order, cut where the next tensor would pass `limit` bytes; a larger tensor gets a shard of its own."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, (_, bits) in stored.items():
        if limit is not None and shards[-1] and size + bits.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += bits.nbytes
    return shards


def _as_ml_dtype(bits: Array) -> Array:
    try:
        import ml_dtypes
    except ImportError as error:
        raise CheckpointError("storing bf16 in a KDTR file needs ml_dtypes (extra `convert`)") from error
    return bits.view(ml_dtypes.bfloat16)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
