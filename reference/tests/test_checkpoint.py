"""Checkpoints: round trips in every storage, the published layout, and how they are written."""

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
from reference.model import Model
from reference.numerics import round_to_bf16
from reference.tests.checkpoint_files import BIAS, rewrite, sharded
from reference.tests.models import YARN, drafter_config, random_weights, target_config
from reference.weights import WeightError

META = kdtr.provenance(seed=0, rng="PCG64")


@pytest.fixture
def folder(tmp_path):
    return sharded(tmp_path)


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
