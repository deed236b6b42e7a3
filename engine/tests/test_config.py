"""Configs of KDTR files: the library takes those that the reference takes, to the same numbers, and refuses the others.

What a config means is seen in the logits: they must have the bits of the same model in the plain spelling.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kdtr
from engine import abi
from engine.abi import Library
from engine.checkpoint import config_tensors, eos_tokens
from engine.engine import Engine
from engine.tests.backends import open_ops
from engine.tests.decoding import META, PROMPT, micro_drafter, micro_target, write_model
from reference.checkpoint import CheckpointError, read_drafter, read_target
from reference.config import ConfigError
from reference.tests.models import YARN, random_weights

Raw = dict[str, Any]
THETA = {"rope_theta": 10000.0}
REST = {key: value for key, value in YARN.items() if key != "type"}
PARAMETERS = {"rope_type": "yarn", **THETA, **REST}
PLAIN = {key: value for key, value in micro_target().to_dict().items() if not key.startswith("rope_")}
VISION = {"vision_config": {"hidden_size": 3, "merge": [1, 2]}, "media_placeholder_token_id": 3, "ignore_index": -100}
EXTRA = np.ones((2, 3), np.float32)


def without(raw: Raw, *keys: str) -> Raw:
    return {key: value for key, value in raw.items() if key not in keys}


def nested(text: Raw, **outer: Any) -> Raw:
    return {"model_type": "kimi_k25", **VISION, **outer, "text_config": {**PLAIN, **text}}


TAKEN: dict[str, Raw] = {
    "scaling": {**PLAIN, **THETA, "rope_scaling": YARN},
    "parameters": {**PLAIN, "rope_parameters": PARAMETERS},
    "both": {**PLAIN, **THETA, "rope_scaling": YARN, "rope_parameters": PARAMETERS},
    "both without theta outside": {**PLAIN, "rope_scaling": {**YARN, **THETA}, "rope_parameters": PARAMETERS},
    "both with theta outside alone": {
        **PLAIN,
        **THETA,
        "rope_scaling": YARN,
        "rope_parameters": without(PARAMETERS, "rope_theta"),
    },
    "both, whole numbers in one": {
        **PLAIN,
        "rope_theta": 10000,
        "rope_scaling": {**YARN, "factor": 8, "mscale": 1},
        "rope_parameters": {**PARAMETERS, "beta_fast": 4.0},
    },
    "both, words alike": {
        **PLAIN,
        **THETA,
        "rope_scaling": {**YARN, "rope_type": "yarn"},
        "rope_parameters": {**PARAMETERS, "type": "yarn"},
    },
    "both of no scaling": {
        **PLAIN,
        **THETA,
        "rope_scaling": {"type": "default"},
        "rope_parameters": {"rope_type": "default", **THETA},
    },
    "both, the type said once": {**PLAIN, "rope_scaling": {"type": "default", **THETA}, "rope_parameters": THETA},
    "partial rotary of the whole": {**PLAIN, "rope_parameters": {**PARAMETERS, "partial_rotary_factor": 1.0}},
    "nested": nested({**THETA, "rope_scaling": YARN}),
    "nested, both": nested({**THETA, "rope_scaling": YARN, "rope_parameters": PARAMETERS}),
    "nested, theta outside": nested({"rope_scaling": YARN}, **THETA),
    "nested, rope outside": nested({}, rope_parameters=PARAMETERS),
    "nested, rope inside and out": nested({**THETA, "rope_scaling": YARN}, rope_scaling={**YARN, "factor": 8}, **THETA),
    "nested, tied as outside": nested({**THETA, "tie_word_embeddings": False}, tie_word_embeddings=False),
    "nested, other tokens outside": nested({**THETA, "eos_token_id": [7, 9]}, eos_token_id=3, bos_token_id=4),
    "nested, neutral keys": nested({**THETA, "top_k": 5}, torch_dtype="float16", video_max_pixels=3, mm_hidden=1),
}
REFUSED: dict[str, tuple[Raw, str]] = {
    "factors": (
        {**PLAIN, **THETA, "rope_scaling": {**YARN, "factor": 2.0}, "rope_parameters": PARAMETERS},
        "target config: rope_scaling differs from rope_parameters",
    ),
    "a key of one": (
        {**PLAIN, **THETA, "rope_scaling": {**YARN, "truncate": True}, "rope_parameters": PARAMETERS},
        "rope_scaling differs",
    ),
    "a key of the other": (
        {**PLAIN, **THETA, "rope_scaling": without(YARN, "beta_slow"), "rope_parameters": PARAMETERS},
        "rope_scaling differs",
    ),
    "types": (
        {**PLAIN, **THETA, "rope_scaling": {"type": "default"}, "rope_parameters": {**PARAMETERS}},
        "rope_scaling differs",
    ),
    "thetas": (
        {**PLAIN, "rope_scaling": {**YARN, "rope_theta": 5.0}, "rope_parameters": PARAMETERS},
        "rope_scaling differs",
    ),
    "theta outside": (
        {**PLAIN, "rope_theta": 5.0, "rope_scaling": YARN, "rope_parameters": PARAMETERS},
        "rope_theta differs from that of the rope parameters",
    ),
    "theta of one alone": ({**PLAIN, "rope_scaling": YARN, "rope_parameters": PARAMETERS}, "rope_theta is missing"),
    "both not understood": (
        {
            **PLAIN,
            **THETA,
            "rope_scaling": {**YARN, "new": 1},
            "rope_parameters": {**PARAMETERS, "new": 1},
        },
        "not understood and possibly changing the numbers: new = 1",
    ),
    "part of the dimensions": (
        {**PLAIN, "rope_parameters": {**PARAMETERS, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5, supported is 1",
    ),
    "nested theta": (nested(THETA, rope_theta=5.0), "multimodal config: rope_theta differs from that of text_config"),
    "nested rope": (
        nested({**THETA, "rope_scaling": YARN}, rope_scaling={**YARN, "factor": 2.0}),
        "multimodal config: rope_scaling differs",
    ),
    "nested head": (
        nested({**THETA, "tie_word_embeddings": True}, tie_word_embeddings=False),
        "multimodal config: tie_word_embeddings differs",
    ),
    "a size outside": (
        nested(THETA, hidden_size=12, max_position_embeddings=64),
        "multimodal config: not understood .*: hidden_size = 12, max_position_embeddings = 64",
    ),
    "an unknown key inside": (nested({**THETA, "new": 2}), "target config: not understood .*: new = 2"),
    "a text_config that is none": ({**PLAIN, **THETA, "text_config": 3}, "text_config = 3"),
    "a vision config of a plain model": ({**PLAIN, **THETA, **VISION}, "ignore_index = -100"),
}


@pytest.fixture(scope="module")
def library() -> Library:
    return open_ops("host").library


@pytest.fixture(scope="module")
def plain_bits(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """plain_bits(config): logits of the same weights with the config in its plain spelling."""
    folder = tmp_path_factory.mktemp("plain")

    @functools.cache
    def made(config: Any) -> np.ndarray:
        path = folder / f"{made.cache_info().misses}.kdtr"
        return logits(library, write_model(path, config, random_weights(config)))

    return made


def write(path: Path, raw: Raw, weights: dict[str, np.ndarray], kind: str = "model") -> Path:
    config = config_tensors(raw)
    roles = {**dict.fromkeys(config, "aux"), **dict.fromkeys(weights, "param")}
    kdtr.save(path, {**config, **weights}, kind=kind, meta=META, roles=roles)
    return path


def multimodal(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights beside those of a vision tower."""
    named = {f"language_model.{name}": array for name, array in weights.items()}
    return {**named, "vision_tower.patch.weight": EXTRA, "mm_projector.weight": EXTRA}


def logits(library: Library, target: Path) -> np.ndarray:
    with Engine.load(target, library=library, capacity=8, max_budget=0, prefill_rows=4) as engine:
        made: np.ndarray = engine.generate(PROMPT, method="ar", max_new_tokens=1, keep_logits=True).logits
    return made


def stored(folder: Path, raw: Raw) -> Path:
    weights = random_weights(micro_target())
    return write(folder / "target.kdtr", raw, multimodal(weights) if "vision_config" in raw else weights)


@pytest.mark.parametrize("name", TAKEN)
def test_a_config_that_the_reference_takes_gives_its_numbers(library, plain_bits, tmp_path, name):
    path = stored(tmp_path, TAKEN[name])
    config, _ = read_target(path)
    assert_array_equal(logits(library, path), plain_bits(config))
    assert eos_tokens(path) == config.eos_token_id


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_the_reference_refuses_is_refused(library, tmp_path, name):
    raw, said = REFUSED[name]
    path = stored(tmp_path, raw)
    with pytest.raises((ConfigError, CheckpointError)):
        read_target(path)
    with pytest.raises(abi.EngineError, match=said):
        logits(library, path)


def test_the_numbers_show_what_a_config_says(plain_bits):
    """Else all of the above would pass whatever was read."""
    configs = [micro_target(), micro_target(rope_scaling=YARN), micro_target(rope_scaling={**YARN, "factor": 2.0})]
    found = [plain_bits(config) for config in (*configs, micro_target(rope_theta=5.0))]
    assert len({bits.tobytes() for bits in found}) == len(found)


@pytest.mark.parametrize("multi", [False, True])
def test_what_no_forward_pass_reads_is_left_out(library, plain_bits, tmp_path, multi):
    """Layers that predict several tokens, stored frequencies; but no layers beyond, and no vision of a plain model."""
    count = micro_target().num_hidden_layers
    text = {**PLAIN, **THETA, "num_nextn_predict_layers": 2}
    raw = nested(without(text, *PLAIN)) if multi else text
    weights = random_weights(micro_target())
    unread = [f"model.layers.{layer}.eh_proj.weight" for layer in (count, count + 1)]
    unread += ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    whole = {**weights, **dict.fromkeys(unread, EXTRA)}
    put = multimodal if multi else dict
    path = write(tmp_path / "target.kdtr", raw, put(whole))
    assert_array_equal(logits(library, path), plain_bits(micro_target()))
    read_target(path)
    surplus = f"model.layers.{count + 2}.eh_proj.weight", "audio_tower.weight"
    for name in (*surplus, *(() if multi else ("vision_tower.patch.weight", "language_model.model.norm.weight"))):
        path = write(tmp_path / "surplus.kdtr", raw, put({**whole, name: EXTRA}))
        with pytest.raises(CheckpointError, match=f"surplus .*{name}"):
            read_target(path)
        with pytest.raises(abi.EngineError, match=f"surplus {name}"):
            logits(library, path)


def test_a_weight_that_is_there_with_and_without_the_prefix_is_refused(library, tmp_path):
    weights = multimodal(random_weights(micro_target()))
    path = write(tmp_path / "target.kdtr", nested(THETA), {**weights, "model.norm.weight": EXTRA})
    with pytest.raises(abi.EngineError, match=r"model\.norm\.weight is there twice"):
        logits(library, path)


@pytest.mark.parametrize("changed", [False, True])
def test_both_spellings_of_a_drafter(library, tmp_path, changed):
    scaling = {**YARN, "attention_factor": 1.25}
    config = micro_drafter(rope_scaling=scaling)
    weights = random_weights(config, 5)
    raw = {
        **{key: value for key, value in config.to_dict().items() if key != "architectures"},
        "rope_parameters": {**PARAMETERS, "attention_factor": 1.5 if changed else 1.25},
    }
    target = write_model(tmp_path / "target.kdtr", micro_target(), random_weights(micro_target()))
    path = write(tmp_path / "drafter.kdtr", raw, weights, kind="drafter")
    if changed:
        with pytest.raises(ConfigError):
            read_drafter(path)
        with pytest.raises(abi.EngineError, match="drafter config: rope_scaling differs from rope_parameters"):
            Engine.load(target, path, library=library)
        return
    drafters = [path, write_model(tmp_path / "plain.kdtr", config, weights)]
    assert read_drafter(path)[0] == config
    lists = []
    for drafter in drafters:
        with Engine.load(target, drafter, library=library, capacity=16, max_budget=4, prefill_rows=4) as engine:
            trace = engine.generate(PROMPT, max_new_tokens=2, keep_traces=True).rounds[0].trace
            assert trace is not None
            lists.append(trace.lists)
    for name in ("ids", "lp", "logz"):
        assert_array_equal(getattr(lists[0], name), getattr(lists[1], name))


def test_more_heads_of_a_drafter_than_a_grid_has_places(library, tmp_path):
    config = micro_drafter(num_hidden_layers=2, num_attention_heads=32768, num_key_value_heads=32768, head_dim=2)
    raw = {key: value for key, value in config.to_dict().items() if key != "architectures"}
    target = write_model(tmp_path / "target.kdtr", micro_target(), random_weights(micro_target()))
    path = write(tmp_path / "drafter.kdtr", raw, {}, kind="drafter")
    with pytest.raises(
        abi.EngineError, match="num_key_value_heads of all layers are 65536, at most 65535 are possible"
    ):
        Engine.load(target, path, library=library)
