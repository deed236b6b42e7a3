"""Strict reading of a config object, and its form as `config/...` tensors. Used by reference.config only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reference.numerics import Array
from reference.rope import RopeParameters

PREFIX = "config/"

# Keys that cannot change a forward pass: bookkeeping, training, generation defaults, tokens.
NEUTRAL_KEYS = frozenset(
    """
    architectures auto_map _name_or_path _attn_implementation _attn_implementation_autoset _commit_hash
    transformers_version torch_dtype dtype tokenizer_class use_cache return_dict output_attentions
    output_hidden_states output_scores output_router_logits torchscript use_bfloat16 tf_legacy_loss problem_type
    finetuning_task task_specific_params id2label label2id pruned_heads is_decoder is_encoder_decoder
    add_cross_attention cross_attention_hidden_size tie_encoder_decoder chunk_size_feed_forward
    initializer_range attention_dropout aux_loss_alpha seq_aux ep_size pretraining_tp num_nextn_predict_layers
    num_mtp_layers pad_token_id sep_token_id decoder_start_token_id prefix bad_words_ids begin_suppress_tokens
    suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences remove_invalid_values
    repetition_penalty return_dict_in_generate temperature top_k top_p typical_p
    """.split()  # noqa: SIM905
)

_REQUIRED: Any = object()


class ConfigError(ValueError):
    """A config that cannot be followed to the letter; the message names the key, its value and what is supported."""


class KeyReader:
    """Takes the keys of `raw` one by one, checking type and range; `finish` refuses what nobody took."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where
        self._taken: set[str] = set()

    def peek(self, key: str) -> Any:
        """The raw value, None if absent; does not count as taken."""
        return self.raw.get(key)

    def ignore(self, *keys: str) -> None:
        """Allow keys that are read elsewhere or mean nothing here."""
        self._taken.update(keys)

    def only(self, key: str, *supported: Any, required: bool = False) -> None:
        """The key may be absent unless required; otherwise its value must be one of `supported`."""
        self._taken.add(key)
        if required:
            self._take(key, _REQUIRED)
        if key in self.raw and not any(_same(self.raw[key], value) for value in supported):
            expected = " or ".join(repr(value) for value in supported)
            raise ConfigError(f"{self.where}: {key} is {self.raw[key]!r}, supported is {expected}")

    def integer(self, key: str, default: Any = _REQUIRED, *, minimum: int = 1) -> int:
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{self.where}: {key} must be an integer >= {minimum}, got {value!r}")
        return value

    def integer_or_null(self, key: str, default: Any = _REQUIRED, *, minimum: int = 1) -> int | None:
        return None if self._take(key, default) is None else self.integer(key, default, minimum=minimum)

    def integers(self, key: str, default: Any = _REQUIRED, *, minimum: int) -> tuple[int, ...]:
        """A list of integers; a single one and null are read as lists of one and none."""
        value = self._take(key, default)
        items = [] if value is None else list(value) if isinstance(value, Sequence) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < minimum for item in items):
            raise ConfigError(f"{self.where}: {key} must hold integers >= {minimum}, got {value!r}")
        return tuple(items)

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (np.isfinite(value) and value > 0):
            raise ConfigError(f"{self.where}: {key} must be a positive number, got {value!r}")
        return float(value)

    def number_or_null(self, key: str) -> float | None:
        """A number >= 0 or null."""
        value = self._take(key, None)
        return value if value is None or (value == 0 and not isinstance(value, bool)) else self.number(key)

    def boolean(self, key: str, default: Any = _REQUIRED) -> bool:
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key} must be true or false, got {value!r}")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self._take(key, _REQUIRED)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: {key} must be an object, got {value!r}")
        return value

    def finish(self) -> None:
        unknown = sorted(set(self.raw) - self._taken - NEUTRAL_KEYS)
        if unknown:
            shown = ", ".join(f"{key} = {self.raw[key]!r}" for key in unknown)
            raise ConfigError(f"{self.where}: not understood and possibly changing the numbers: {shown}")

    def _take(self, key: str, default: Any) -> Any:
        self._taken.add(key)
        if key not in self.raw and default is _REQUIRED:
            raise ConfigError(f"{self.where}: {key} is missing")
        return self.raw.get(key, default)


def read_rope(read: KeyReader) -> RopeParameters:
    """Both spellings: rope_theta beside rope_scaling{type, ...}, and rope_parameters{rope_type, rope_theta, ...}."""
    parts = [dict(part) for key in ("rope_parameters", "rope_scaling") if (part := read.peek(key)) is not None]
    read.ignore("rope_parameters", "rope_scaling")
    if not parts:
        return RopeParameters(rope_theta=read.number("rope_theta"))
    for part in parts:
        part["rope_type"] = part.pop("type", part.get("rope_type", "default"))
        if read.peek("rope_theta") is not None:
            part.setdefault("rope_theta", read.peek("rope_theta"))
        if part.get("rope_theta") != read.raw.get("rope_theta", part.get("rope_theta")):
            raise ConfigError(f"{read.where}: rope_theta is {read.peek('rope_theta')!r} and {part['rope_theta']!r}")
    if any(part != parts[0] for part in parts):
        raise ConfigError(f"{read.where}: rope_parameters {parts[0]} and rope_scaling {parts[1]} differ")
    read.ignore("rope_theta")
    inner = KeyReader(parts[0], f"{read.where}, rope parameters")
    inner.only("rope_type", "default", "yarn")
    inner.only("partial_rotary_factor", 1.0)
    if inner.peek("rope_type") == "default":
        rope = RopeParameters(rope_theta=inner.number("rope_theta"))
    else:
        rope = RopeParameters(
            rope_theta=inner.number("rope_theta"),
            kind="yarn",
            factor=inner.number("factor"),
            original_max_position_embeddings=inner.integer("original_max_position_embeddings"),
            beta_fast=inner.number("beta_fast", 32.0),
            beta_slow=inner.number("beta_slow", 1.0),
            mscale=inner.number_or_null("mscale"),
            mscale_all_dim=inner.number_or_null("mscale_all_dim"),
            attention_factor=inner.number_or_null("attention_factor"),
            truncate=inner.boolean("truncate", True),
        )
    inner.finish()
    return rope


def write_rope(rope: RopeParameters) -> dict[str, Any]:
    """The published spelling: rope_theta and rope_scaling, null unless YaRN; fields left out of the config stay out."""
    scaling = {
        key: value for key, value in rope.__dict__.items() if key not in ("rope_theta", "kind") and value is not None
    }
    if scaling["truncate"]:  # the default, which older readers do not know
        del scaling["truncate"]
    return {"rope_theta": rope.rope_theta, "rope_scaling": {"type": "yarn", **scaling} if rope.kind == "yarn" else None}


def tree_to_tensors(tree: Mapping[str, Any], prefix: str = PREFIX) -> dict[str, Array]:
    """`config/...` tensors of a config object; null and lists of strings (architectures) are left out."""
    tensors: dict[str, Array] = {}
    for key, value in tree.items():
        match value:
            case None:
                continue
            case Mapping():
                tensors |= tree_to_tensors(value, f"{prefix}{key}/")
            case bool():
                tensors[prefix + key] = np.array(value, np.bool_)
            case int():
                tensors[prefix + key] = np.array(value, np.int64)
            case float():
                tensors[prefix + key] = np.array(value, np.float64)
            case str():
                tensors[prefix + key] = np.frombuffer(value.encode(), np.uint8).copy()
            case _ if all(isinstance(item, int) for item in value):
                tensors[prefix + key] = np.array(value, np.int64)
            case _ if key == "architectures":
                continue
            case _:
                raise ConfigError(f"{prefix}{key}: {value!r} has no tensor form")
    return tensors


def tensors_to_tree(tensors: Mapping[str, Array]) -> dict[str, Any]:
    """The config object whose tensors are those of `tensors` that start with `config/`."""
    tree: dict[str, Any] = {}
    for name in tensors:
        if not name.startswith(PREFIX):
            continue
        *path, key = name[len(PREFIX) :].split("/")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{name}: {part} is both a value and an object")
        array = np.asarray(tensors[name])
        if array.ndim == 0 and array.dtype in (np.bool_, np.int64, np.float64):
            node[key] = array.item()
        elif array.ndim == 1 and array.dtype == np.int64:
            node[key] = array.tolist()
        elif array.ndim == 1 and array.dtype == np.uint8:
            node[key] = array.tobytes().decode()
        else:
            raise ConfigError(
                f"{name}: {array.dtype}{list(array.shape)} is no config value (0-d i64, f64, bool; 1-d i64, u8)"
            )
    return tree


def _same(value: Any, supported: Any) -> bool:
    """Equal, and of the same kind: 1 is not True, but 1 is 1.0."""
    return isinstance(value, bool) == isinstance(supported, bool) and bool(value == supported)
