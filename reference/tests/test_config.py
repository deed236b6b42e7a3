"""Published configs are read to the letter or refused by name; and the round trips through JSON and tensors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from reference.config import ConfigError, DrafterConfig, ModelConfig, default_target_layer_ids, load_config_json
from reference.config_reader import tensors_to_tree, tree_to_tensors
from reference.tests.models import DRAFTER, TARGET, YARN, drafter_config, target_config

# The published config.json of Kimi-K2-Instruct (without its file names), sizes and all.
KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def test_kimi_k2():
    config = ModelConfig.from_dict(KIMI_K2)
    assert config.rope.rope_theta == 50000.0
    assert config.rope.kind == "yarn"
    assert config.rope_layout == "interleaved"
    assert config.latent_norm_eps == 1e-6
    assert config.softmax_scale == pytest.approx(0.13086, abs=5e-6)
    shapes = config.weight_shapes()
    assert shapes["model.layers.60.mlp.experts.383.down_proj.weight"] == (7168, 2048)
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (18432, 7168)
    assert shapes["model.layers.3.self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert sum(np.prod(shape) for shape in shapes.values()) == pytest.approx(1.026e12, rel=1e-3)


def test_deepseek_v3_softmax_scale():
    config = target_config(
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        rope_scaling=YARN | {"factor": 40, "original_max_position_embeddings": 4096},
    )
    assert config.softmax_scale == pytest.approx(0.13523, abs=5e-6)


def test_nested_text_config_is_read_and_must_agree_with_the_outer_one():
    outer = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": {**TARGET, "model_type": "kimi_k2"},
        "vision_config": {"patch_size": 14},
        "media_placeholder_token_id": 3,
        "ignore_index": -100,
        "tie_word_embeddings": False,
    }
    assert ModelConfig.from_dict(outer) == target_config()
    with pytest.raises(ConfigError, match="tie_word_embeddings is True, supported is False"):
        ModelConfig.from_dict(
            {**outer, "text_config": {**TARGET, "tie_word_embeddings": False}, "tie_word_embeddings": True}
        )
    assert ModelConfig.from_dict({**outer, "tie_word_embeddings": True}).tie_word_embeddings
    with pytest.raises(ConfigError, match="residual_scale = 2"):
        ModelConfig.from_dict({**outer, "residual_scale": 2})


def test_both_rope_spellings():
    old = target_config(rope_scaling=YARN)
    spelled = {key: value for key, value in TARGET.items() if not key.startswith("rope")}
    parameters = {"rope_theta": 10000.0, "rope_type": "yarn", **{k: v for k, v in YARN.items() if k != "type"}}
    assert ModelConfig.from_dict({**spelled, "rope_parameters": parameters}) == old
    assert ModelConfig.from_dict({**spelled, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}) == (
        target_config()
    )
    with pytest.raises(ConfigError, match=r"rope_theta is 5.0 and 10000.0"):
        ModelConfig.from_dict({**spelled, "rope_theta": 5.0, "rope_parameters": parameters})
    with pytest.raises(ConfigError, match="differ"):
        ModelConfig.from_dict({**TARGET, "rope_scaling": YARN | {"factor": 2.0}, "rope_parameters": parameters})
    with pytest.raises(ConfigError, match="rope_theta"):
        ModelConfig.from_dict(spelled)


def test_absent_mscale_is_not_one():
    without = {key: value for key, value in YARN.items() if not key.startswith("mscale")}
    rope = target_config(rope_scaling=without).rope
    assert rope.mscale is None
    assert rope.amplitude() == pytest.approx(0.1 * np.log(8) + 1)
    assert rope.softmax_scale(16) == 0.25
    assert target_config(rope_scaling=YARN).rope.amplitude() == 1.0


@pytest.mark.parametrize("key", sorted(set(TARGET) - {"rope_theta", "rope_scaling"}))
def test_every_required_key_is_missed_by_name(key):
    raw = {name: value for name, value in TARGET.items() if name != key}
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_sink": True}, "not understood.*attention_sink = True"),
        ({"kv_lora_ranc": 512}, "kv_lora_ranc = 512"),
        ({"model_type": "kimi_linear"}, "model_type is 'kimi_linear', supported is 'deepseek_v3' or 'kimi_k2'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1, supported is 3"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"head_dim": 128}, "head_dim is 128, supported is 8"),
        ({"hidden_size": 0}, "hidden_size must be an integer >= 1, got 0"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"hidden_size": "24"}, "hidden_size must be an integer"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be a positive number"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor must be a positive number"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": YARN | {"scale_everything": 2.0}}, "scale_everything = 2.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position_embeddings is missing"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ({"n_group": 3}, "n_routed_experts 8 must be n_group 3 times"),
        ({"n_group": 8}, "n_routed_experts 8 must be n_group 8 times at least 2"),
        ({"topk_group": 5}, "topk_group 5 is more than n_group 4"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than the 4 experts"),
        ({"eos_token_id": [1, -2]}, "eos_token_id must hold integers"),
    ],
)
def test_what_is_not_understood_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        target_config(**changes)


def test_neutral_keys_change_nothing():
    assert target_config(torch_dtype="bfloat16", use_cache=False, aux_loss_alpha=0.1, top_p=0.9) == target_config()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": YARN},
        {"rope_scaling": YARN | {"attention_factor": 1.0, "truncate": False}},
        {"q_lora_rank": None, "rope_interleave": False, "tie_word_embeddings": True},
        {"eos_token_id": [1, 2], "bos_token_id": 0, "latent_norm_eps": 1e-5, "max_position_embeddings": 99},
    ],
)
def test_round_trips(changes):
    config = target_config(**changes)
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    tensors = config.to_tensors()
    assert ModelConfig.from_tensors({**tensors, "lm_head.weight": np.zeros(1)}) == config
    nested = tree_to_tensors({"model_type": "kimi_k25", "text_config": config.to_dict()})
    assert ModelConfig.from_tensors(nested) == config
    assert ("config/q_lora_rank" in tensors) == (config.q_lora_rank is not None)
    assert tensors["config/kv_lora_rank"].dtype == np.int64
    assert tensors["config/kv_lora_rank"].shape == ()
    assert tensors["config/rms_norm_eps"].dtype == np.float64
    assert tensors["config/norm_topk_prob"].dtype == np.bool_
    assert tensors["config/hidden_act"].tobytes() == b"silu"
    assert ("config/rope_scaling/factor" in tensors) == (config.rope.kind == "yarn")


def test_config_tensors_of_a_wrong_type_are_named():
    tensors = target_config().to_tensors()
    for wrong in (np.array(3, np.int32), np.zeros((2, 2), np.int64), np.array([1.0])):
        with pytest.raises(ConfigError, match="config/kv_lora_rank"):
            ModelConfig.from_tensors({**tensors, "config/kv_lora_rank": wrong})
    with pytest.raises(ConfigError, match="unheard_of = 3"):
        ModelConfig.from_tensors({**tensors, "config/unheard_of": np.array(3)})
    with pytest.raises(ConfigError, match="both a value and an object"):
        tensors_to_tree({"config/a": np.array(1), "config/a/b": np.array(1)})
    with pytest.raises(ConfigError, match="no tensor form"):
        tree_to_tensors({"names": ["a"]})


def test_drafter_round_trips_and_names():
    for changes in ({}, {"rope_scaling": YARN | {"attention_factor": 1.0}}):
        config = drafter_config(**changes)
        assert DrafterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        assert DrafterConfig.from_tensors(config.to_tensors()) == config
    tensors = drafter_config().to_tensors()
    assert tensors["config/dflash_config/target_layer_ids"].tolist() == [0, 2]
    shapes = drafter_config().weight_shapes()
    assert shapes["fc.weight"] == (24, 48)
    assert shapes["layers.1.self_attn.k_proj.weight"] == (12, 24)
    assert len(shapes) == 3 + 2 * 11


@pytest.mark.parametrize("key", sorted(set(DRAFTER) - {"rope_theta", "rope_scaling"}))
def test_every_required_drafter_key_is_missed_by_name(key):
    raw = {name: value for name, value in DRAFTER.items() if name != key}
    with pytest.raises(ConfigError, match=key):
        DrafterConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"dflash_config": {"mask_token_id": 60, "target_layer_ids": [0, 2], "projector_type": "x"}}, "projector_type"),
        ({"dflash_config": {"mask_token_id": 61, "target_layer_ids": [0, 2]}}, "mask_token_id 61 is outside"),
        ({"dflash_config": {"mask_token_id": 60, "target_layer_ids": [0, 3]}}, "below the last target layer, 3"),
        ({"dflash_config": {"mask_token_id": 60, "target_layer_ids": [2, 0]}}, "strictly increasing"),
        ({"dflash_config": {"mask_token_id": 60, "target_layer_ids": []}}, "strictly increasing and not empty"),
        ({"mask_token_id": 3}, "mask_token_id is 3, supported is 60"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"rope_scaling": YARN}, "attention_factor"),
        ({"markov_rank": 4}, "markov_rank = 4"),
    ],
)
def test_what_a_drafter_config_must_not_say(changes, message):
    with pytest.raises(ConfigError, match=message):
        drafter_config(**changes)


def test_published_drafter_spellings():
    nested = {**DRAFTER["dflash_config"], "block_size": 8}
    raw = {key: value for key, value in DRAFTER.items() if key != "block_size"}
    assert DrafterConfig.from_dict({**raw, "dflash_config": nested}) == drafter_config()
    with pytest.raises(ConfigError, match="block_size is 8, supported is 16"):
        DrafterConfig.from_dict({**raw, "block_size": 16, "dflash_config": nested})
    extra: dict[str, Any] = {
        "model_type": "qwen3",
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "auto_map": {},
    }
    assert drafter_config(**extra, max_window_layers=2, tie_word_embeddings=False) == drafter_config()


def test_default_taps_are_those_of_the_published_drafter():
    assert default_target_layer_ids(61, 6) == (1, 12, 24, 35, 47, 58)
    assert default_target_layer_ids(61, 1) == (30,)


def test_config_files_that_are_no_config(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load_config_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_config_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must be an object, got list"):
        load_config_json(tmp_path / "config.json")
