"""Names and values of checkpoints, both ways, against transformers, safetensors, torch and compressed-tensors."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="parity tests need torch (extra `parity`)")
pytest.importorskip("transformers", reason="parity tests need transformers (extra `parity`)")

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM

from reference.checkpoint import load_target, read_target, save_hf
from reference.moe import MoeWeights
from reference.quant import dequantize_fp8_block, dequantize_int4, e4m3fn_values, unpack_int4
from reference.tests.models import YARN, random_weights, target_config
from reference.tests.parity import oracle

TOKENS = np.random.default_rng(1).integers(0, 61, 30)


def logits_of(model, ids=TOKENS):
    with torch.no_grad():
        return model.eval()(torch.tensor(ids)[None]).logits[0].float().numpy()


@pytest.mark.parametrize("name", ["base", "kimi_yarn", "no_q_lora", "shared_2", "tied", "half_rope", "all_dense"])
@pytest.mark.parametrize("shard", ["5GB", "60KB"])
def test_what_transformers_saves_is_read(tmp_path, name, shard):
    published, config = oracle.random_oracle(name)
    published.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    assert (len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1) == (shard == "60KB")
    read_config, weights = read_target(tmp_path / "theirs")
    assert read_config.weight_shapes() == config.weight_shapes()
    for key, array in oracle.published_weights(published, config).items():
        np.testing.assert_array_equal(weights[key], array, err_msg=key)
    model = load_target(tmp_path / "theirs")
    actual = model.forward(TOKENS, model.new_cache(30)).logits
    np.testing.assert_allclose(actual, logits_of(published), rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": YARN, "rope_theta": 50000.0},
        {"q_lora_rank": None, "rope_interleave": False, "n_shared_experts": 2},
        {"tie_word_embeddings": True, "eos_token_id": [3, 4]},
    ],
)
@pytest.mark.parametrize(("dtype", "shard"), [("f32", None), ("bf16", 30_000)])
def test_what_is_saved_is_loaded_by_transformers(tmp_path, changes, dtype, shard):
    config = target_config(**changes)
    save_hf(tmp_path / "ours", config, random_weights(config), dtype, shard)
    published, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert type(published) is DeepseekV3ForCausalLM
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model = load_target(tmp_path / "ours")
    expected = logits_of(published)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(model.forward(TOKENS, model.new_cache(30)).logits, expected, rtol=0, atol=1e-4)


def test_names_in_memory_are_not_those_of_a_checkpoint(tmp_path):
    """The oracle's own conversion of fused experts agrees with what transformers writes."""
    published, config = oracle.random_oracle("base")
    published.save_pretrained(tmp_path / "theirs")
    saved = load_file(tmp_path / "theirs" / "model.safetensors")
    weights = oracle.published_weights(published, config)
    assert set(saved) == set(weights) == set(config.weight_shapes())
    for key, tensor in saved.items():
        np.testing.assert_array_equal(tensor.numpy(), weights[key])


def test_router_weights_keep_their_precision_when_loaded_as_bfloat16(tmp_path):
    config = target_config()
    save_hf(tmp_path / "ours", config, random_weights(config), "f32")
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    router = published.model.layers[1].mlp.gate
    assert router.weight.dtype == router.e_score_correction_bias.dtype == torch.float32
    model = load_target(tmp_path / "ours", "bfloat16")
    mixture = model.layers[1].mlp
    assert isinstance(mixture, MoeWeights)
    np.testing.assert_array_equal(mixture.router.T, router.weight.detach().numpy())
    np.testing.assert_array_equal(mixture.bias, router.e_score_correction_bias.numpy())


def test_fp8_codes_equal_torch():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    np.testing.assert_array_equal(e4m3fn_values(), codes)
    assert (np.signbit(e4m3fn_values()) == np.signbit(codes))[np.isfinite(codes)].all()


@pytest.mark.parametrize("shape", [(576, 256), (1000, 130), (128, 128), (3, 300)])
def test_fp8_blocks_equal_torch(shape):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape, generator=generator) * 50).to(torch.float8_e4m3fn)
    scale = torch.rand((-(-shape[0] // 128), -(-shape[1] // 128)), generator=generator)
    rows, columns = (torch.arange(size) // 128 for size in shape)
    expected = weight.to(torch.float32) * scale[rows][:, columns]
    actual = dequantize_fp8_block(weight.view(torch.uint8).numpy(), scale.numpy(), (128, 128))
    np.testing.assert_array_equal(actual, expected.numpy())


def test_fp8_checkpoint_written_by_torch(tmp_path):
    config = target_config()
    save_hf(tmp_path / "a", config, random_weights(config), "f32")
    file = tmp_path / "a" / "model.safetensors"
    tensors = load_file(file)
    key = "model.layers.2.self_attn.kv_a_proj_with_mqa.weight"
    coded = (tensors[key] * 30).to(torch.float8_e4m3fn)
    scale = torch.full((1, 1), 1 / 30)
    save_file({**tensors, key: coded, key + "_scale_inv": scale}, file, {"format": "pt"})
    path = tmp_path / "a" / "config.json"
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    _, weights = read_target(tmp_path / "a")
    np.testing.assert_array_equal(weights[key], (coded.float() * scale).numpy())
    assert 0 < np.abs(weights[key] - tensors[key].numpy()).max() < 0.1


@pytest.mark.parametrize("columns", [32, 64, 160, 37])
@pytest.mark.parametrize(("kind", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.float32, "f32")])
def test_int4_equals_compressed_tensors(columns, kind, name):
    compressed = pytest.importorskip("compressed_tensors", reason="needs compressed-tensors (extra `parity`)")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    generator = torch.Generator().manual_seed(columns)
    values = torch.randint(-8, 8, (12, columns), generator=generator, dtype=torch.int8)
    packed = pack_to_int32(values, 4)
    np.testing.assert_array_equal(unpack_int4(packed.numpy(), columns), values.numpy())
    np.testing.assert_array_equal(values, unpack_from_int32(packed, 4, values.shape))
    if columns % 32:  # their dequantiser wants whole groups
        return
    scale = torch.rand((12, columns // 32), generator=generator).to(kind)
    arguments = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    state = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(values.shape)}
    expected = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    assert expected.dtype == kind, compressed.__name__
    actual = dequantize_int4(packed.numpy(), scale.float().numpy(), name, (12, columns), 32)
    np.testing.assert_array_equal(actual, expected.float().numpy())


def test_int4_checkpoint_written_by_compressed_tensors(tmp_path):
    """A routed expert compressed by compressed-tensors, as the published Kimi-K2.5 shards hold them."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors (extra `parity`)")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    config = target_config(hidden_size=64, moe_intermediate_size=32)
    save_hf(tmp_path / "a", config, random_weights(config), "bf16")
    file = tmp_path / "a" / "model.safetensors"
    tensors = load_file(file)
    arguments = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    expected = {}
    for key in [key for key in tensors if ".mlp.experts." in key]:
        weight = tensors.pop(key)
        scale = (weight.float().reshape(weight.shape[0], -1, 32).abs().amax(-1) / 7).to(torch.bfloat16)
        state = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        expected[key] = PackedQuantizationCompressor.decompress(dict(state), scheme)["weight"].float().numpy()
        tensors |= {key.removesuffix("weight") + part: value for part, value in state.items()}
    save_file(tensors, file, {"format": "pt"})
    path = tmp_path / "a" / "config.json"
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    _, weights = read_target(tmp_path / "a")
    assert len(expected) == 3 * 8 * 3
    for key, array in expected.items():
        np.testing.assert_array_equal(weights[key], array)


def test_a_bfloat16_checkpoint_widens_to_the_same_float32_model(tmp_path):
    config = target_config(rope_scaling=YARN)
    save_hf(tmp_path / "ours", config, random_weights(config), "bf16")
    published = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    for attention in ("absorbed", "expanded"):
        model = load_target(tmp_path / "ours", "float32", attention)
        actual = model.forward(TOKENS, model.new_cache(30)).logits
        np.testing.assert_allclose(actual, logits_of(published), rtol=0, atol=1e-4)
