"""Every way in which a checkpoint can be broken, refused by name."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

import kdtr
from reference.checkpoint import CheckpointError, load_target, read_target
from reference.config import ConfigError
from reference.tensor_files import TensorFileError, read_header
from reference.tests.checkpoint_files import BIAS, edit_json, rewrite, sharded, single
from reference.tests.models import target_config
from reference.weights import WeightError


@pytest.fixture
def folder(tmp_path):
    return sharded(tmp_path)


def test_absent_shard_names_file_and_tensors(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(TensorFileError, match=r"1 of 2 shards are absent: model-00002.*lm_head\.weight"):
        load_target(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a file of 0 bytes cannot hold a header"),
        (b"\x00" * 7, "a file of 7 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n", "Git-LFS pointer"),
        (struct.pack("<Q", 2**63) + b"{}", "cannot hold a header of 9223372036854775808 bytes"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 2) + b"{{", "not a JSON object"),
        (struct.pack("<Q", 2) + b"{}x", "describes 10 bytes, the file has 11"),
        (struct.pack("<Q", 19) + b'{"a": {}, "a": {}} ', "'a' comes twice"),
        (struct.pack("<Q", 16) + b'{"a": {"b": 1}} ', "a is described by"),
    ],
)
def test_shards_that_are_no_safetensors(folder, content, message):
    (folder / "model-00002-of-00002.safetensors").write_bytes(content)
    with pytest.raises(TensorFileError, match=message):
        load_target(folder)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, r"F32\[2\] cannot take 4 bytes"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "is described by"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "is described by"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, r"lies at \[4, 8\), expected to begin at 0"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "describes .* bytes, the file has"),
        ({"dtype": "F32", "shape": [1]}, "is described by"),
    ],
)
def test_headers_that_lie(tmp_path, entry, message):
    text = json.dumps({"a": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\x00" * 4)
    with pytest.raises(TensorFileError, match=message):
        read_header(path)


@pytest.mark.parametrize("keep", [0.2, 0.999])
def test_truncated_file(folder, keep):
    file = folder / "model-00001-of-00002.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data))])
    with pytest.raises(TensorFileError, match=r"model-00001-of-00002\.safetensors: the header describes"):
        load_target(folder)


def test_tensor_in_the_wrong_shard_or_in_none(folder):
    index = folder / "model.safetensors.index.json"
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    edit_json(index, lambda content: content["weight_map"].update({"lm_head.weight": first}))
    with pytest.raises(TensorFileError, match=f"lm_head.weight: the index says {first}, {second} holds it"):
        load_target(folder)
    edit_json(index, lambda content: content["weight_map"].update({"lm_head.weight": second, "ghost": second}))
    with pytest.raises(TensorFileError, match=f"ghost: the index says {second}, no shard holds it"):
        load_target(folder)

    def forget(content):
        del content["weight_map"]["ghost"], content["weight_map"]["lm_head.weight"]

    edit_json(index, forget)
    with pytest.raises(TensorFileError, match=f"lm_head.weight: in {second}, not in the index"):
        load_target(folder)


def test_tensor_in_two_shards(folder):
    rewrite(
        folder,
        lambda t: t.update({"model.embed_tokens.weight": ("bf16", np.zeros((61, 24), np.uint16))}),
        "model-00002-of-00002.safetensors",
    )
    with pytest.raises(
        TensorFileError, match=r"model.embed_tokens.weight: in model-00002.* too, the index says model-00001"
    ):
        load_target(folder)


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b"}}'])
def test_index_that_is_none(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(TensorFileError, match=r"index\.json: no weight_map"):
        load_target(folder)


def test_folders_without_or_with_two_sets_of_weights(folder, tmp_path):
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(TensorFileError, match="holds both"):
        load_target(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(TensorFileError, match="holds neither"):
        load_target(folder)
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load_target(tmp_path)
    with pytest.raises(kdtr.KDTRError):
        load_target(tmp_path / "nothing.kdtr")


def test_every_missing_surplus_and_misshapen_tensor_is_named_at_once(tmp_path):
    folder = single(tmp_path)

    def damage(tensors):
        del tensors["model.norm.weight"], tensors[BIAS], tensors["model.layers.3.mlp.experts.7.down_proj.weight"]
        tensors["model.layers.1.self_attn.q_a_proj.bias"] = ("bf16", np.zeros(10, np.uint16))
        tensors["model.layers.4.input_layernorm.weight"] = ("bf16", np.zeros(24, np.uint16))
        kind, bits = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = (kind, bits[:60].copy())
        tensors["model.layers.0.input_layernorm.weight"] = ("i32", np.zeros(24, np.int32))

    rewrite(folder, damage)
    with pytest.raises(CheckpointError) as error:
        load_target(folder)
    for part in (
        f"{folder}: 7 faults",
        "missing model.norm.weight [24]",
        f"missing {BIAS} [8]",
        "missing model.layers.3.mlp.experts.7.down_proj.weight [24, 12]",
        "surplus model.layers.1.self_attn.q_a_proj.bias",
        "surplus model.layers.4.input_layernorm.weight",
        "lm_head.weight in model.safetensors has shape [60, 24], the config says [61, 24]",
        "model.layers.0.input_layernorm.weight has type i32",
    ):
        assert part in str(error.value)


def test_unknown_config_key_is_refused_before_the_weights(tmp_path):
    folder = single(tmp_path)
    edit_json(folder / "config.json", lambda content: content.update(attention_sink=True))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(b"\x02" + b"\x00" * 7 + b"{}")
    with pytest.raises(ConfigError, match="attention_sink = True"):
        load_target(folder)


def test_heads_tied_and_untied(tmp_path):
    tied = single(tmp_path, target_config(tie_word_embeddings=True))
    model = load_target(tied)
    np.testing.assert_array_equal(model.head, model.embedding)
    embedding = {}
    rewrite(tied, lambda t: embedding.update(t) or t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    same = load_target(tied)
    np.testing.assert_array_equal(same.head, same.embedding)
    rewrite(tied, lambda t: t["lm_head.weight"][1].__setitem__((0, 0), 0x3F80))
    with pytest.raises(WeightError, match=r"lm_head\.weight differs"):
        load_target(tied)
    edit_json(tied / "config.json", lambda content: content.update(tie_word_embeddings=False))
    rewrite(tied, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing lm_head.weight \[61, 24\]"):
        load_target(tied)


@pytest.mark.parametrize("declared", [0, 1])
def test_prediction_layers_are_skipped_only_if_declared(tmp_path, declared):
    folder = single(tmp_path)
    rewrite(folder, lambda t: t.update({"model.layers.4.eh_proj.weight": ("bf16", np.zeros((24, 48), np.uint16))}))
    edit_json(folder / "config.json", lambda content: content.update(num_nextn_predict_layers=declared))
    if declared:
        load_target(folder)
    else:
        with pytest.raises(CheckpointError, match=r"surplus model\.layers\.4\.eh_proj\.weight"):
            load_target(folder)


def test_stored_rotary_frequencies_are_skipped(tmp_path):
    folder = single(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda t: t.update({name: ("f32", np.zeros(4, np.float32))}))
    load_target(folder)


def test_multimodal_layout(tmp_path):
    """Kimi-K2.5: nested text_config, names behind language_model., vision tensors beside it."""
    folder = single(tmp_path)
    _, plain = read_target(folder)
    vision = {
        "vision_tower.a.weight": ("bf16", np.zeros(3, np.uint16)),
        "mm_projector.b": ("f32", np.zeros(3, np.float32)),
    }

    def nest(tensors):
        moved = {f"language_model.{name}": value for name, value in tensors.items()}
        tensors.clear()
        tensors.update(moved | vision)

    rewrite(folder, nest)
    with pytest.raises(CheckpointError, match=r"missing model.norm.weight.*surplus language_model.lm_head.weight"):
        load_target(folder)
    text = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "kimi_k25", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(outer))
    config, nested = read_target(folder)
    assert config == target_config()
    for name, array in plain.items():
        np.testing.assert_array_equal(nested[name], array)
    rewrite(folder, lambda t: t.update({"audio_tower.c": ("f32", np.zeros(3, np.float32))}))
    with pytest.raises(CheckpointError, match=r"surplus audio_tower\.c"):
        load_target(folder)
