"""A model's tensors for the library: a KDTR file, which it reads itself, or a Hugging Face folder.

A folder holds config.json beside model.safetensors, or beside shards and model.safetensors.index.json. Names behind
`language_model.` and a nested text_config (Kimi-K2.5 and later) are understood; vision tensors, multi-token-prediction
layers and stored rotary frequencies are left out. That the tensors are those of the config is checked by the library,
with one list of all that is missing, surplus or misshapen; so is every key of the config.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kdtr
from engine.abi import EngineError, Library, SizeError
from engine.decode_abi import Handle, Tensor
from kdtr.convert_safetensors import SafetensorsSource
from kdtr.foreign import ConvertError

Kind = Literal["model", "drafter"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PREFIX = "config/"
FLOATS = ("bf16", "f16", "f32", "f64")
_ENTRY_TYPES = {"int64": "i64", "float64": "f64", "bool": "bool", "uint8": "u8"}
_ROTARY_BUFFER = ".rotary_emb.inv_freq"
_BESIDE_THE_LANGUAGE_MODEL = ("vision_tower.", "mm_projector.")
# Keys of a multimodal config that say nothing of its language model, and those that may stand inside or outside.
_OUTER_KEYS = ("model_type", "bos_token_id", "eos_token_id", "ignore_index", "use_unified_vision_chunk",
               "projection_hidden_size", "projection_layer_norm_eps")  # fmt: skip
_OUTER_PREFIXES = ("vision_", "image_", "video_", "media_", "mm_")
_SHARED_KEYS = ("tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters")


class CheckpointError(EngineError, ValueError):
    """A model's files are damaged, incomplete, or of a kind that the engine does not take."""


class Entry(NamedTuple):
    """One tensor. dtype: KDTR's name. data: its elements in C order, of a type of the same size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[Any]


@dataclass(frozen=True)
class Random:
    """A model of random weights in place of files. config: as config.json holds it; equal seeds give equal weights."""

    config: Mapping[str, Any]
    seed: int = 0


def load(library: Library, source: str | Path | Random, kind: Kind) -> Handle:
    """The model of a folder or a KDTR file of that kind, in host memory; of Random, none of its weights are.

    Raises CheckpointError, EngineError.
    """
    model = Handle(library, "model", kind.encode())
    try:
        if isinstance(source, Random):
            _make(model, source)
        else:
            _read(model, Path(source), kind)
    except BaseException:
        model.close()
        raise
    return model


def eos_tokens(path: str | Path) -> tuple[int, ...]:
    """The tokens that end a text, as the config of a target says. Raises CheckpointError."""
    path = Path(path)
    if path.is_dir():
        raw = _json_object(path / "config.json")
        found = raw.get("text_config", raw).get("eos_token_id")
    else:
        try:
            with kdtr.open(path) as container:
                nested = any(name.startswith(PREFIX + "text_config/") for name in container.info)
                name = PREFIX + ("text_config/" if nested else "") + "eos_token_id"
                found = container.get(name) if name in container.info else None
        except (OSError, kdtr.KDTRError) as error:
            raise CheckpointError(str(error)) from error
    return () if found is None else tuple(np.atleast_1d(found).tolist())


def folder_tensors(folder: Path, kind: Kind) -> Iterator[Entry]:
    """The config's entries, then the weights, one in memory at a time.

    Raises CheckpointError before the first weight if a file is damaged, absent or not what the index says, or if a
    weight is quantised.
    """
    raw = _json_object(folder / "config.json")
    text = raw.get("text_config", raw)
    if (quantised := text.get("quantization_config", raw.get("quantization_config"))) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise CheckpointError(f"{folder}: quantised weights ({method}) are not supported, only {', '.join(FLOATS)}")
    config = _language_model(folder, raw) if text is not raw else raw
    if kind == "drafter" and _all_attend_fully(config):
        config = {key: value for key, value in config.items() if key != "layer_types"}
    yield from _config_entries(config)
    with ExitStack() as opened:
        sources = _open(folder, opened)
        names = {stored: _published(stored, raw, text) if kind == "model" else stored for stored in sources}
        wanted = {stored: name for stored, name in names.items() if name is not None}
        types = {stored: sources[stored].tensors[stored].dtype for stored in wanted}
        if other := sorted(stored for stored, dtype in types.items() if dtype not in FLOATS):
            shown = ", ".join(f"{stored} ({types[stored]})" for stored in other[:8])
            raise CheckpointError(f"{folder}: {len(other)} weights are none of {', '.join(FLOATS)}: {shown}")
        for stored, name in wanted.items():
            held = sources[stored].tensors[stored]
            yield Entry(name, held.dtype, held.shape, _data(sources[stored], stored, held.nbytes))


def config_tensors(tree: Mapping[str, Any], prefix: str = PREFIX) -> dict[str, NDArray[Any]]:
    """The `config/...` entries of a config object: 0-d int64, float64 or bool, 1-d int64 for lists, 1-d uint8 for text.

    null is left out. What has no such form is given as its JSON text: the library ignores it where the key means
    nothing to a forward pass, and refuses the key by name elsewhere.
    """
    tensors: dict[str, NDArray[Any]] = {}
    for key, value in tree.items():
        match value:
            case None:
                continue
            case Mapping():
                tensors |= config_tensors(value, f"{prefix}{key}/")
                continue
            case bool():
                array: NDArray[Any] = np.array(value, np.bool_)
            case int() if _fits(value):
                array = np.array(value, np.int64)
            case float():
                array = np.array(value, np.float64)
            case str():
                array = _text(value)
            case list() if all(isinstance(item, int) and _fits(item) for item in value):
                array = np.array(value, np.int64)
            case _:
                array = _text(json.dumps(value))
        tensors[prefix + key] = array
    return tensors


def _config_entries(config: Mapping[str, Any]) -> Iterator[Entry]:
    for name, array in config_tensors(config).items():
        yield Entry(name, _ENTRY_TYPES[array.dtype.name], array.shape, array)


def _fits(value: int) -> bool:
    return -(2**63) <= value < 2**63


def _text(value: str) -> NDArray[np.uint8]:
    return np.frombuffer(value.encode(), np.uint8)


def _make(model: Handle, source: Random) -> None:
    if not 0 <= source.seed < 2**64:
        raise SizeError(f"seed of random weights is {source.seed}, it must be in 0..{2**64 - 1}")
    for entry in _config_entries(source.config):
        _put(model, entry)
    model.call("random", source.seed)


def _read(model: Handle, path: Path, kind: Kind) -> None:
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if not path.is_dir():
        model.call("read", bytes(path))
        return
    for entry in folder_tensors(path, kind):
        _put(model, entry)


def _put(model: Handle, entry: Entry) -> None:
    data = np.ascontiguousarray(entry.data)
    shape = np.array(entry.shape, np.int64)
    tensor = Tensor(
        struct_size=ctypes.sizeof(Tensor),
        ndim=len(shape),
        name=entry.name.encode(),
        dtype=entry.dtype.encode(),
        shape=shape.ctypes.data,
        data=data.ctypes.data,
        size=data.nbytes,
    )
    model.call("put", ctypes.byref(tensor))


def _language_model(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The nested text config, with what the outer one may say for it. Keys that are left go behind `<key>/outer`,
    where the library ignores those that mean nothing to a forward pass and refuses the others."""
    text = dict(raw["text_config"])
    for key, value in raw.items():
        if key in _SHARED_KEYS and value is not None:
            if text.setdefault(key, value) != value:
                raise CheckpointError(
                    f"{folder}/config.json: {key} is {value!r} outside text_config, {text[key]!r} in it"
                )
        elif key not in ("text_config", *_OUTER_KEYS) and not key.startswith(_OUTER_PREFIXES):
            text[f"{key}/outer"] = value
    return text


def _all_attend_fully(config: Mapping[str, Any]) -> bool:
    """Whether a drafter's layer_types say nothing that is not so anyway."""
    return config.get("layer_types") == ["full_attention"] * (config.get("num_hidden_layers") or 0)


def _published(stored: str, raw: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    """The published name of a target's stored tensor, None for one that no forward pass reads."""
    nested = text is not raw
    name = stored.removeprefix("language_model.") if nested else stored
    layers, predicted = text.get("num_hidden_layers"), text.get("num_nextn_predict_layers", text.get("num_mtp_layers"))
    skipped: tuple[str, ...] = _BESIDE_THE_LANGUAGE_MODEL if nested else ()
    if isinstance(layers, int) and isinstance(predicted, int):
        skipped += tuple(f"model.layers.{layer}." for layer in range(layers, layers + predicted))
    return None if name.startswith(skipped) or name.endswith(_ROTARY_BUFFER) else name


def _open(folder: Path, opened: ExitStack) -> dict[str, SafetensorsSource]:
    """{stored name: the open file that holds it}. Raises CheckpointError for files that do not fit the index."""
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if index.exists() == single.exists():
        found = "both" if index.exists() else "neither"
        raise CheckpointError(f"{folder}: holds {found} of {SINGLE_NAME} and {INDEX_NAME}, expected one of them")
    if single.exists():
        source = _source(single, opened)
        return dict.fromkeys(source.tensors, source)
    where = _json_object(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(s, str) and Path(s).name == s for s in where.values()):
        raise CheckpointError(f"{index}: no weight_map of tensor names to file names")
    shards = sorted(set(where.values()))
    if absent := [shard for shard in shards if not (folder / shard).is_file()]:
        lost = sorted(name for name, shard in where.items() if shard in absent)
        shown = ", ".join(lost[:8])
        raise CheckpointError(
            f"{folder}: shards {', '.join(absent)} are absent, with them {len(lost)} tensors: {shown}"
        )
    held = {shard: _source(folder / shard, opened) for shard in shards}
    faults = [f"{name} is not in {shard}" for name, shard in where.items() if name not in held[shard].tensors]
    faults += [
        f"{name} is in {shard}, the index says {where.get(name, 'nothing')}"
        for shard, source in held.items()
        for name in source.tensors
        if where.get(name) != shard
    ]
    if faults:
        raise CheckpointError(f"{index}: {len(faults)} faults: {'; '.join(sorted(faults))}")
    return {name: held[shard] for name, shard in where.items()}


def _source(file: Path, opened: ExitStack) -> SafetensorsSource:
    try:
        source = SafetensorsSource(str(file), lambda name: False, False)
    except (ConvertError, OSError) as error:
        raise CheckpointError(str(error)) from error
    opened.callback(source.close)
    return source


def _data(source: SafetensorsSource, name: str, size: int) -> NDArray[np.uint8]:
    data, at = np.empty(size, np.uint8), 0
    try:
        for block in source.blocks(name):
            data[at : at + len(block)] = np.frombuffer(block, np.uint8)
            at += len(block)
    except (ConvertError, OSError) as error:
        raise CheckpointError(str(error)) from error
    return data


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: must hold an object, got {type(found).__name__}")
    return found
