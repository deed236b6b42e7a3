"""Folders and files of models: the library gets the tensors that the reference reads, and what is broken, quantised or
not understood is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import kdtr
from engine import abi
from engine.abi import Library
from engine.checkpoint import CheckpointError, Entry, config_tensors, eos_tokens, folder_tensors, load
from engine.engine import Engine
from engine.tests.backends import open_ops
from reference.checkpoint import save_hf, save_kdtr
from reference.config_reader import tree_to_tensors
from reference.numerics import float32_to_bf16_bits
from reference.tensor_files import open_safetensors, write_safetensors
from reference.tests.models import DRAFTER, TARGET, YARN, drafter_config, random_weights, target_config

META = kdtr.provenance(seed=0, rng="PCG64")
SHARD = 40_000
Stored = dict[str, tuple[str, np.ndarray]]


def held(folder: Path, kind: str = "model") -> dict[str, Entry]:
    return {entry.name: entry for entry in folder_tensors(folder, kind)}  # type: ignore[arg-type]


def stored(folder: Path) -> Stored:
    source = open_safetensors(folder)
    return {name: (found.dtype, source.bits(name)) for name, found in source.tensors.items()}


def edit(folder: Path, file: str = "config.json", **changes) -> None:
    """Change keys of a JSON file; None takes one out."""
    path = folder / file
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def rewrite(folder: Path, tensors: Stored) -> None:
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "model.safetensors", tensors)


@pytest.fixture
def folder(tmp_path):
    """A sound checkpoint in one file, to be damaged."""
    config = target_config(rope_scaling=YARN, eos_token_id=[7, 9])
    save_hf(tmp_path / "target", config, random_weights(config))
    return tmp_path / "target"


@pytest.fixture
def shards(tmp_path):
    config = target_config()
    save_hf(tmp_path / "shards", config, random_weights(config), max_shard_bytes=SHARD)
    return tmp_path / "shards"


# --- What is read


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f64"])
@pytest.mark.parametrize("limit", [None, SHARD])
@pytest.mark.parametrize("make", [target_config, drafter_config])
def test_a_folder_gives_the_entries_and_weights_that_were_stored(tmp_path, make, limit, dtype):
    config = make()
    save_hf(tmp_path / "model", config, random_weights(config), dtype, limit)
    entries = held(tmp_path / "model", "drafter" if make is drafter_config else "model")
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    expected = tree_to_tensors(raw)
    del entries["config/architectures"]  # a list of words, which tells a forward pass nothing
    assert [name for name in entries if name.startswith("config/")] == list(expected)
    types = {"i64": np.int64, "f64": np.float64, "bool": np.bool_, "u8": np.uint8}
    for name, array in expected.items():
        assert types[entries[name].dtype] == array.dtype
        np.testing.assert_array_equal(entries[name].data, array, strict=True)
    tensors = stored(tmp_path / "model")
    assert entries.keys() - expected.keys() == tensors.keys() == set(config.weight_shapes())
    for name, (kind, bits) in tensors.items():
        entry = entries[name]
        assert (entry.dtype, entry.shape) == (kind, bits.shape)
        assert entry.data.tobytes() == bits.tobytes()


def test_a_multimodal_folder_gives_the_same_as_its_language_model_alone(folder):
    """Kimi-K2.5: names behind `language_model.`, a nested config, a vision tower, layers that predict several tokens,
    stored rotary frequencies."""
    plain = held(folder)
    raw, tensors = json.loads((folder / "config.json").read_text()), stored(folder)
    extra = ("f32", np.ones((2, 3), np.float32))
    theta, layers = raw.pop("rope_theta"), raw["num_hidden_layers"]
    outer = {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "rope_theta": theta,
        "torch_dtype": "float16",
        "vision_config": {"hidden_size": 3, "merge": [[1, 2]]},
        "media_placeholder_token_id": 3,
        "use_unified_vision_chunk": True,
        "ignore_index": -100,
        "text_config": {**raw, "num_nextn_predict_layers": 2},
    }
    (folder / "config.json").write_text(json.dumps(outer))
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    for layer in (layers, layers + 1):
        named[f"language_model.model.layers.{layer}.eh_proj.weight"] = extra
    named["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = extra
    named |= {"vision_tower.patch.weight": extra, "mm_projector.weight": extra}
    rewrite(folder, named)
    found = held(folder)
    neutral = {"config/architectures/outer", "config/torch_dtype/outer", "config/num_nextn_predict_layers"}
    assert found.keys() - plain.keys() == neutral
    for name, entry in plain.items():
        assert (found[name].dtype, found[name].shape) == (entry.dtype, entry.shape)
        assert found[name].data.tobytes() == entry.data.tobytes()
    assert eos_tokens(folder) == (7, 9)


def test_layers_past_those_that_predict_are_surplus_and_a_plain_config_skips_no_vision(folder):
    edit(folder, num_nextn_predict_layers=1)
    extra = ("f32", np.ones(3, np.float32))
    names = ["model.layers.4.a", "model.layers.5.a", "model.layers.40.a", "vision_tower.a", "language_model.a"]
    rewrite(folder, stored(folder) | dict.fromkeys(names, extra))
    assert [name for name in held(folder) if name.endswith(".a")] == names[1:]


def test_what_has_no_tensor_form_goes_as_json_text_for_the_library_to_judge():
    tree = {
        "none": None,
        "huge": 2**63,
        "words": ["a", "é"],
        "pairs": [[1], [2]],
        "reals": [0.5, 1],
        "small": -(2**63),
        "empty": [],
        "nested": {"on": True, "word": "é"},
    }
    found = config_tensors(tree)
    texts = {name: array.tobytes().decode() for name, array in found.items() if array.dtype == np.uint8}
    assert texts == {
        "config/huge": "9223372036854775808",
        "config/words": '["a", "\\u00e9"]',
        "config/pairs": "[[1], [2]]",
        "config/reals": "[0.5, 1]",
        "config/nested/word": "é",
    }
    assert found["config/small"] == -(2**63)
    np.testing.assert_array_equal(found["config/empty"], np.array([], np.int64), strict=True)
    assert found["config/nested/on"].dtype == np.bool_
    assert "config/none" not in found


def test_layers_of_a_drafter_that_all_attend_fully_are_no_news(tmp_path):
    config = drafter_config()
    save_hf(tmp_path / "drafter", config, random_weights(config))
    for types, told in ((["full_attention"] * 2, False), (["full_attention", "sliding_attention"], True)):
        edit(tmp_path / "drafter", layer_types=types)
        assert ("config/layer_types" in held(tmp_path / "drafter", "drafter")) is told


def test_tokens_that_end_a_text(tmp_path, folder):
    assert eos_tokens(folder) == (7, 9)
    edit(folder, eos_token_id=3)
    assert eos_tokens(folder) == (3,)
    edit(folder, eos_token_id=None)
    assert eos_tokens(folder) == ()
    for tokens in ((), (4, 5)):
        config = target_config(eos_token_id=list(tokens) or None)
        save_kdtr(tmp_path / "target.kdtr", config, random_weights(config), "f32", META)
        assert eos_tokens(tmp_path / "target.kdtr") == tokens
    (tmp_path / "target.kdtr").write_bytes(b"no")
    with pytest.raises(CheckpointError, match=r"target\.kdtr"):
        eos_tokens(tmp_path / "target.kdtr")


# --- What is refused


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_quantised_weights_are_refused_by_their_method(folder, method, inside):
    config = {"quantization_config": {"quant_method": method}}
    edit(folder, **({"text_config": {"hidden_size": 1, **config}} if inside else config))
    with pytest.raises(CheckpointError, match=rf"target: quantised weights \({method}\) are not supported, only bf16"):
        held(folder)


def test_weights_of_other_types_are_refused_by_name_before_any_is_read(folder):
    tensors = stored(folder)
    shape = tensors["lm_head.weight"][1].shape
    rewrite(folder, {**tensors, "lm_head.weight": ("f8_e4m3fn", np.zeros(shape, np.uint8))})
    with pytest.raises(CheckpointError, match=r"1 weights are none of bf16, .*: lm_head\.weight \(f8_e4m3fn\)"):
        held(folder)


def test_a_folder_without_or_with_two_kinds_of_files_is_refused(folder):
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds both of"):
        held(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weight_map"):
        held(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="holds neither of"):
        held(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config\.json: must hold an object, got list"):
        held(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not JSON"):
        held(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        held(folder)


@pytest.mark.parametrize("keep", [4, 300, -1])
def test_a_file_that_ends_early_is_refused(folder, keep):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        held(folder)


def test_shards_that_are_absent_or_not_what_the_index_says_are_refused(shards):
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    where = index["weight_map"]
    files = sorted(set(where.values()))
    moved, lost = (next(name for name, file in where.items() if file == f) for f in files[:2])
    edit(shards, "model.safetensors.index.json", weight_map={**where, moved: files[1]} | {"new": files[0]})
    with pytest.raises(CheckpointError, match=r"3 faults: .*new is not in ") as error:
        held(shards)
    assert f"{moved} is in {files[0]}, the index says {files[1]}" in str(error.value)
    assert f"{moved} is not in {files[1]}" in str(error.value)
    edit(shards, "model.safetensors.index.json", weight_map={n: f for n, f in where.items() if n != lost})
    with pytest.raises(CheckpointError, match=f"{lost} is in {files[1]}, the index says nothing"):
        held(shards)
    edit(shards, "model.safetensors.index.json", weight_map={**where, moved: "../escaped.safetensors"})
    with pytest.raises(CheckpointError, match="no weight_map of tensor names to file names"):
        held(shards)
    edit(shards, "model.safetensors.index.json", weight_map=where)
    (shards / files[1]).unlink()
    with pytest.raises(
        CheckpointError,
        match=f"shards {files[1]} are absent, with them {list(where.values()).count(files[1])} tensors: .*{lost}",
    ):
        held(shards)


def test_a_multimodal_config_whose_halves_disagree_is_refused(folder):
    raw = json.loads((folder / "config.json").read_text())
    outer = {"text_config": raw, "rope_theta": 5.0}
    (folder / "config.json").write_text(json.dumps(outer))
    with pytest.raises(CheckpointError, match=r"rope_theta is 5\.0 outside text_config, 10000\.0 in it"):
        held(folder)


# --- Through the library


@pytest.fixture(scope="module")
def library() -> Library:
    return open_ops("host").library


def logits(library: Library, target: Path, drafter: Path | None = None) -> np.ndarray:
    with Engine.load(target, drafter, library=library, capacity=16, max_budget=0, prefill_rows=8) as engine:
        made: np.ndarray = engine.generate([5, 3, 8], method="ar", max_new_tokens=2, keep_logits=True).logits
    return made


def test_a_folder_and_a_file_of_the_same_model_decode_alike(library, tmp_path):
    config = target_config(rope_scaling=YARN)
    weights = random_weights(config)
    save_kdtr(tmp_path / "target.kdtr", config, weights, meta=META)
    save_hf(tmp_path / "one", config, weights)
    save_hf(tmp_path / "many", config, weights, max_shard_bytes=SHARD)
    expected = logits(library, tmp_path / "target.kdtr")
    for name in ("one", "many"):
        np.testing.assert_array_equal(logits(library, tmp_path / name), expected)


def test_a_file_of_another_kind_or_none_is_refused(library, tmp_path):
    config = drafter_config()
    save_kdtr(tmp_path / "drafter.kdtr", config, random_weights(config), "f32", META)
    with pytest.raises(abi.EngineError, match=r"drafter\.kdtr: a KDTR file of kind 'drafter', expected 'model'"):
        load(library, tmp_path / "drafter.kdtr", "model")
    with pytest.raises(CheckpointError, match=r"absent\.kdtr: no such file or folder"):
        load(library, tmp_path / "absent.kdtr", "model")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is gelu, supported is silu"),
        ({"new_key": 3}, "not understood and possibly changing the numbers: new_key = 3"),
        ({"new_key": ["a"]}, r'new_key = \["a"\]'),
        ({"n_group": 2**63}, "n_group must be an integer"),
        ({"text_config": TARGET, "rope_scaling": None}, "hidden_size/outer = 24"),
    ],
)
def test_the_library_refuses_what_it_does_not_understand_by_name(library, folder, change, said):
    edit(folder, **change)
    with pytest.raises(abi.EngineError, match=said):
        logits(library, folder)


def test_keys_that_mean_nothing_to_a_forward_pass_may_hold_anything(library, folder):
    expected = logits(library, folder)
    edit(folder, id2label={"0": "a"}, bad_words_ids=[[1], [2]], auto_map={"AutoModel": "x.y"}, torch_dtype="bfloat16")
    np.testing.assert_array_equal(logits(library, folder), expected)


def test_weights_that_are_missing_surplus_or_misshapen_are_all_named(library, folder):
    tensors = stored(folder)
    del tensors["model.norm.weight"]
    tensors["more.weight"] = ("f32", np.ones(3, np.float32))
    tensors["lm_head.weight"] = ("bf16", float32_to_bf16_bits(np.ones((3, 4), np.float32)))
    rewrite(folder, tensors)
    with pytest.raises(abi.EngineError) as error:
        logits(library, folder)
    for word in ("model.norm.weight", "more.weight", "lm_head.weight"):
        assert word in str(error.value)


def test_a_drafter_for_another_target_is_refused(library, folder, tmp_path):
    config = drafter_config(**{**DRAFTER, "vocab_size": 62})
    save_hf(tmp_path / "drafter", config, random_weights(config))
    with pytest.raises(abi.EngineError, match="vocab_size"):
        logits(library, folder, tmp_path / "drafter")
