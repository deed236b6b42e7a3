"""Checkpoints: round trips in every storage, and every way in which one can be broken, refused by name."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

import kdtr
from reference.checkpoint import (
    CheckpointError,
    load_drafter,
    load_target,
    read_drafter,
    read_target,
    save_hf,
    save_kdtr,
)
from reference.config import ConfigError
from reference.model import Model
from reference.numerics import round_to_bf16
from reference.quant import dequantize_fp8_block, dequantize_int4, fp8_scale_shape
from reference.tensor_files import TensorFileError, read_header, write_safetensors
from reference.tests.models import YARN, drafter_config, random_weights, target_config
from reference.tests.test_quant import FP8_CONFIG, INT4_CONFIG, pack
from reference.weights import WeightError

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
META = kdtr.provenance(seed=0, rng="PCG64")


@pytest.fixture
def folder(tmp_path):
    """A sound sharded bf16 checkpoint to be damaged."""
    config = target_config()
    save_hf(tmp_path / "target", config, random_weights(config), max_shard_bytes=40_000)
    return tmp_path / "target"


def rewrite(folder, change, file="model.safetensors"):
    """Replace a file's tensors {name: (dtype, bits)} by what `change` makes of them."""
    header = read_header(folder / file)
    kinds = {"bf16": "<u2", "f32": "<f4", "f8_e4m3fn": "u1", "i32": "<i4", "i64": "<i8"}
    tensors = {
        name: (s.dtype, np.fromfile(s.file, kinds[s.dtype], int(np.prod(s.shape)), offset=s.offset).reshape(s.shape))
        for name, s in header.items()
    }
    change(tensors)
    write_safetensors(folder / file, tensors)


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def as_stored(weights):
    """What bf16 storage keeps of the weights."""
    return {name: a if name.endswith("_bias") else round_to_bf16(a) for name, a in weights.items()}


@pytest.mark.parametrize("limit", [None, 40_000, 1])
@pytest.mark.parametrize("changes", [{}, {"rope_scaling": YARN, "q_lora_rank": None}, {"tie_word_embeddings": True}])
def test_folder_round_trip(tmp_path, limit, changes):
    config = target_config(**changes)
    weights = random_weights(config)
    save_hf(tmp_path / "a", config, weights, max_shard_bytes=limit)
    read_config, read = read_target(tmp_path / "a")
    assert read_config == config
    assert list(read) == list(weights)
    for name, expected in as_stored(weights).items():
        np.testing.assert_array_equal(read[name], expected, err_msg=name)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == {None: 1, 1: len(weights)}.get(limit, 2)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f64"])
@pytest.mark.parametrize("kind", ["folder", "kdtr"])
def test_types_of_storage(tmp_path, dtype, kind):
    config = target_config()
    weights = {name: a.astype(np.float64) + 1e-12 for name, a in random_weights(config).items()}
    path = tmp_path / ("a.kdtr" if kind == "kdtr" else "a")
    if kind == "kdtr":
        save_kdtr(path, config, weights, dtype, META)
    else:
        save_hf(path, config, weights, dtype)
    read_config, read = read_target(path)
    assert read_config == config
    name = "model.norm.weight"
    expected = (
        round_to_bf16(weights[name]) if dtype == "bf16" else weights[name].astype("f4" if dtype == "f32" else "f8")
    )
    np.testing.assert_array_equal(read[name], expected)
    assert read[name].dtype == (np.float64 if dtype == "f64" else np.float32)
    np.testing.assert_array_equal(read[BIAS], weights[BIAS].astype(np.float64 if dtype == "f64" else np.float32))


def test_kdtr_round_trip_and_what_it_holds(tmp_path):
    config = target_config(rope_scaling=YARN, eos_token_id=[1, 2])
    weights = random_weights(config)
    save_kdtr(tmp_path / "target.kdtr", config, weights, meta=META)
    with kdtr.open(tmp_path / "target.kdtr") as container:
        assert container.kind == "model"
        container.verify()
        assert container.info["lm_head.weight"].dtype == "bf16"
        assert container.info["lm_head.weight"].role == "param"
        assert container.info[BIAS].dtype == "f32"
        assert container.get("config/rope_scaling/factor") == 8.0
    model = load_target(tmp_path / "target.kdtr", "float64")
    expected = Model(config, as_stored(weights), "float64")
    tokens = np.arange(9)
    np.testing.assert_array_equal(
        model.forward(tokens, model.new_cache(9)).logits, expected.forward(tokens, expected.new_cache(9)).logits
    )


def test_drafter_round_trips_and_is_bound_to_its_target(tmp_path):
    target = target_config()
    save_kdtr(tmp_path / "target.kdtr", target, random_weights(target), meta=META)
    model = load_target(tmp_path / "target.kdtr", "float64")
    config = drafter_config()
    weights = random_weights(config, 2)
    save_kdtr(tmp_path / "drafter.kdtr", config, weights, meta=META)
    save_hf(tmp_path / "drafter", config, weights)
    logits = []
    for path in ("drafter.kdtr", "drafter"):
        drafter = load_drafter(tmp_path / path, model, block_size=5)
        assert drafter.config == config
        assert drafter.numerics is model.numerics
        logits.append(drafter.propose(3, 31))
    np.testing.assert_array_equal(logits[0], logits[1])
    assert load_drafter(tmp_path / "drafter", model, "float32").numerics.name == "float32"
    for key, wrong in (("num_target_layers", 5), ("vocab_size", 62)):
        other = drafter_config(**{key: wrong})
        save_hf(tmp_path / key, other, random_weights(other))
        with pytest.raises(CheckpointError, match=f"the drafter says {key} {wrong}, the target has"):
            load_drafter(tmp_path / key, model)
    with pytest.raises(CheckpointError, match="kind 'drafter', expected 'model'"):
        load_target(tmp_path / "drafter.kdtr")


def test_published_layout_of_the_files(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["model.embed_tokens.weight"] == "model-00001-of-00002.safetensors"
    assert index["metadata"]["total_size"] == sum(
        (folder / f).stat().st_size - 8 - struct.unpack("<Q", (folder / f).read_bytes()[:8])[0]
        for f in set(index["weight_map"].values())
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"


def test_safetensors_library_reads_what_is_written(folder):
    safetensors = pytest.importorskip("safetensors.numpy", reason="needs safetensors (extra `convert`)")
    pytest.importorskip("ml_dtypes", reason="needs ml_dtypes (extra `convert`)")
    _, weights = read_target(folder)
    theirs: dict[str, np.ndarray] = {}
    for shard in folder.glob("*.safetensors"):
        theirs |= safetensors.load_file(shard)
    assert set(theirs) == set(weights)
    for name, array in theirs.items():
        np.testing.assert_array_equal(array.astype(np.float32), weights[name])
        assert str(array.dtype) == ("float32" if name.endswith("_bias") else "bfloat16")


# Damaged checkpoints.


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


def single(tmp_path, config=None):
    config = config or target_config()
    save_hf(tmp_path / "one", config, random_weights(config))
    return tmp_path / "one"


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


# Quantised checkpoints.

ROUTED = "model.layers.1.mlp.experts.0.up_proj"
LATENT = "model.layers.2.self_attn.kv_a_proj_with_mqa"


def quantised_fp8(tmp_path, block=(5, 7)):
    folder = single(tmp_path)
    rng = np.random.default_rng(0)
    given = {}

    def quantise(tensors):
        for base in (ROUTED, LATENT):
            shape = tensors[base + ".weight"][1].shape
            codes = rng.integers(0, 0x7F, shape).astype(np.uint8)
            scale = rng.uniform(0.5, 2, fp8_scale_shape(shape, block)).astype(np.float32)
            tensors[base + ".weight"] = ("f8_e4m3fn", codes)
            tensors[base + ".weight_scale_inv"] = ("f32", scale)
            given[base] = codes, scale

    rewrite(folder, quantise)
    quantization = {**FP8_CONFIG, "weight_block_size": list(block)}
    edit_json(folder / "config.json", lambda content: content.update(quantization_config=quantization))
    return folder, given


def test_fp8_weights_are_dequantised(tmp_path):
    folder, given = quantised_fp8(tmp_path)
    _, weights = read_target(folder)
    for base, (codes, scale) in given.items():
        np.testing.assert_array_equal(weights[base + ".weight"], dequantize_fp8_block(codes, scale, (5, 7)))
    load_target(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(LATENT + ".weight_scale_inv"), rf"missing {LATENT}.weight_scale_inv \[5, 4\]"),
        (
            lambda t: t.update({LATENT + ".weight_scale_inv": ("f32", np.ones((4, 4), np.float32))}),
            r"weight_scale_inv in model.safetensors has shape \[4, 4\], the config says \[5, 4\]",
        ),
        (
            lambda t: t.update({LATENT + ".weight": ("bf16", np.zeros((24, 24), np.uint16))}),
            f"surplus {LATENT}.weight_scale_inv",
        ),
    ],
)
def test_fp8_scales_that_do_not_fit(tmp_path, damage, message):
    folder, _ = quantised_fp8(tmp_path)
    rewrite(folder, damage)
    with pytest.raises(CheckpointError, match=message):
        load_target(folder)


def test_fp8_scales_may_be_bf16(tmp_path):
    folder, given = quantised_fp8(tmp_path)
    rewrite(folder, lambda t: t.update({LATENT + ".weight_scale_inv": ("bf16", np.full((5, 4), 0x4000, np.uint16))}))
    _, weights = read_target(folder)
    expected = dequantize_fp8_block(given[LATENT][0], np.full((5, 4), 2.0, np.float32), (5, 7))
    np.testing.assert_array_equal(weights[LATENT + ".weight"], expected)


def test_fp8_without_a_quantization_config(tmp_path):
    folder, _ = quantised_fp8(tmp_path)
    edit_json(folder / "config.json", lambda content: content.pop("quantization_config"))
    with pytest.raises(CheckpointError, match=f"{LATENT}.weight is FP8, but the config has no quantization_config"):
        load_target(folder)


def quantised_int4(tmp_path, shape_dtype="i32"):
    folder = single(tmp_path)
    rng = np.random.default_rng(0)
    values = rng.integers(-8, 8, (12, 24)).astype(np.int8)
    scale = (rng.uniform(0.5, 2, (12, 1)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    def quantise(tensors):
        del tensors[ROUTED + ".weight"]
        tensors[ROUTED + ".weight_packed"] = ("i32", pack(values))
        tensors[ROUTED + ".weight_scale"] = ("bf16", scale)
        kind = {"i32": np.int32, "i64": np.int64}[shape_dtype]
        tensors[ROUTED + ".weight_shape"] = (shape_dtype, np.array([12, 24], kind))

    rewrite(folder, quantise)
    edit_json(folder / "config.json", lambda content: content.update(quantization_config=INT4_CONFIG))
    return folder, values, scale


@pytest.mark.parametrize("shape_dtype", ["i32", "i64"])
def test_int4_weights_are_dequantised(tmp_path, shape_dtype):
    folder, values, scale = quantised_int4(tmp_path, shape_dtype)
    _, weights = read_target(folder)
    floats = (scale.astype(np.uint32) << 16).view(np.float32)
    expected = round_to_bf16(values.astype(np.float32) * floats)
    np.testing.assert_array_equal(weights[ROUTED + ".weight"], expected)
    np.testing.assert_array_equal(expected, dequantize_int4(pack(values), floats, "bf16", (12, 24), 32))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(ROUTED + ".weight_scale"), rf"missing {ROUTED}.weight_scale \[12, 1\]"),
        (lambda t: t.pop(ROUTED + ".weight_shape"), rf"missing {ROUTED}.weight_shape \[2\]"),
        (
            lambda t: t.update({ROUTED + ".weight_shape": ("i32", np.array([24, 12], np.int32))}),
            r"weight_shape says \[24, 12\], the config says \[12, 24\]",
        ),
        (
            lambda t: t.update({ROUTED + ".weight_packed": ("i32", np.zeros((12, 4), np.int32))}),
            r"weight_packed in model.safetensors has shape \[12, 4\], the config says \[12, 3\]",
        ),
        (
            lambda t: t.update({ROUTED + ".weight_packed": ("f32", np.zeros((12, 3), np.float32))}),
            "weight_packed in model.safetensors has type f32, expected i32",
        ),
        (
            lambda t: t.update({ROUTED + ".weight_zero_point": ("i32", np.zeros((2, 1), np.int32))}),
            f"surplus {ROUTED}.weight_zero_point",
        ),
    ],
)
def test_int4_parts_that_do_not_fit(tmp_path, damage, message):
    folder, _, _ = quantised_int4(tmp_path)
    rewrite(folder, damage)
    with pytest.raises(CheckpointError, match=message):
        load_target(folder)


# Writing.


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path):
    config = target_config()
    weights = random_weights(config)
    save_hf(tmp_path / "a", config, weights)
    with pytest.raises(FileExistsError, match="a checkpoint is written to a new folder"):
        save_hf(tmp_path / "a", config, weights)
    del weights["model.norm.weight"]
    for save, path in ((save_hf, tmp_path / "b"), (save_kdtr, tmp_path / "b.kdtr")):
        with pytest.raises(WeightError, match=r"missing model\.norm\.weight"):
            save(path, config, weights)
        assert not path.exists()


def test_a_write_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    config = target_config()

    def fail(path, arrays):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("reference.checkpoint.write_safetensors", fail)
    with pytest.raises(OSError, match="disk full"):
        save_hf(tmp_path / "a", config, random_weights(config))
    assert not list(tmp_path.iterdir())


def test_drafter_weights_are_read_like_the_target_s(tmp_path):
    config = drafter_config(rope_scaling=YARN | {"attention_factor": 1.0})
    weights = random_weights(config)
    save_hf(tmp_path / "a", config, weights, "f32")
    read_config, read = read_drafter(tmp_path / "a")
    assert read_config == config
    for name, array in weights.items():
        np.testing.assert_array_equal(read[name], array)
    rewrite(tmp_path / "a", lambda t: t.update({"lm_head.weight": ("f32", np.zeros((61, 24), np.float32))}))
    with pytest.raises(CheckpointError, match=r"surplus lm_head\.weight"):
        read_drafter(tmp_path / "a")
