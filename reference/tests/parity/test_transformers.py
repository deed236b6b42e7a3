"""The NumPy target against transformers' DeepseekV3ForCausalLM."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="parity tests need torch (extra `parity`)")
pytest.importorskip("transformers", reason="parity tests need transformers (extra `parity`)")

import torch
from transformers import DynamicCache

from reference.model import Model
from reference.tests.parity import oracle

TOKENS = 40


def prompt(vocab_size, length=TOKENS):
    return np.random.default_rng(1).integers(0, vocab_size, length)


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor(ids)[None]).logits[0].numpy()


@pytest.mark.parametrize("attention", ["absorbed", "expanded"])
@pytest.mark.parametrize("name", oracle.CONFIGS)
def test_float32_logits(name, attention):
    published, config = oracle.random_oracle(name)
    model = Model(config, oracle.published_weights(published, config), "float32", attention)
    ids = prompt(config.vocab_size)
    expected = logits_of(published, ids)
    actual = model.forward(ids, model.new_cache(TOKENS)).logits
    assert 1 < np.abs(expected).max() < 10
    np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("attention", ["absorbed", "expanded"])
@pytest.mark.parametrize("name", oracle.CONFIGS)
def test_float64_logits_with_the_islands_widened(name, attention):
    with oracle.widened_islands():
        published, config = oracle.random_oracle(name, dtype=torch.float64)
        ids = prompt(config.vocab_size)
        expected = logits_of(published, ids)
    model = Model(config, oracle.published_weights(published, config), "float64", attention)
    actual = model.forward(ids, model.new_cache(TOKENS)).logits
    assert expected.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


def additive_mask(visibility: np.ndarray, prefix: int) -> torch.Tensor:
    """[1, 1, N, prefix + N] with 0 where a row sees and the lowest float where it does not."""
    sees = np.concatenate([np.ones((len(visibility), prefix), bool), visibility], axis=1)
    return torch.tensor(np.where(sees, 0.0, np.finfo(np.float32).min), dtype=torch.float32)[None, None]


@pytest.mark.parametrize("name", ["base", "kimi_yarn", "half_rope", "no_q_lora", "latent_512_rope_64"])
@pytest.mark.parametrize("prefix", [0, 1, 25])
def test_tree_step_with_explicit_mask_and_positions(name, prefix):
    published, config = oracle.random_oracle(name)
    model = Model(config, oracle.published_weights(published, config), "float32")
    ids = prompt(config.vocab_size, prefix + 9)
    parents = [-1, 0, 0, 1, 1, 3, 2, 6, 5]
    visibility = np.eye(9, dtype=bool)
    for row, parent in enumerate(parents[1:], 1):
        visibility[row] |= visibility[parent]
    positions = prefix + visibility.sum(axis=1) - 1

    cache = model.new_cache(prefix + 9)
    kept = DynamicCache(config=published.config)
    if prefix:
        model.forward(ids[:prefix], cache)
        cache.commit(np.arange(prefix))
        with torch.no_grad():
            published(torch.tensor(ids[:prefix])[None], cache=kept, use_cache=True)
    with torch.no_grad():
        expected = published(
            torch.tensor(ids[prefix:])[None],
            attention_mask=additive_mask(visibility, prefix),
            position_ids=torch.tensor(positions)[None],
            cache=kept,
            use_cache=True,
        ).logits[0]
    actual = model.forward(ids[prefix:], cache, positions=positions, visibility=visibility).logits
    np.testing.assert_allclose(actual, expected.numpy(), rtol=0, atol=5e-5)
    # Each node against a causal replay of its own path.
    for node in range(9):
        path = np.flatnonzero(visibility[node]) + prefix
        replay = logits_of(published, ids[[*range(prefix), *path]])[-1]
        np.testing.assert_allclose(actual[node], replay, rtol=0, atol=5e-5)


def test_cache_rows_are_the_published_latents_and_keys():
    """Same latents; same rotated keys, but transformers stores the even channels of the interleaved layout first."""
    published, config = oracle.random_oracle("kimi_yarn")
    model = Model(config, oracle.published_weights(published, config), "float32")
    ids = prompt(config.vocab_size)
    cache, kept = model.new_cache(TOKENS), DynamicCache(config=published.config)
    model.forward(ids, cache)
    with torch.no_grad():
        published(torch.tensor(ids)[None], cache=kept, use_cache=True)
    for layer in range(config.num_hidden_layers):
        latent, rope_key = cache.read(layer, TOKENS)
        np.testing.assert_allclose(latent, kept.layers[layer].keys[0, 0].numpy(), rtol=0, atol=1e-5)
        evens_first = np.concatenate([rope_key[:, 0::2], rope_key[:, 1::2]], axis=1)
        np.testing.assert_allclose(evens_first, kept.layers[layer].values[0, 0].numpy(), rtol=0, atol=1e-5)


def test_features_are_hidden_states_after_the_tapped_layers():
    published, config = oracle.random_oracle("base")
    model = Model(config, oracle.published_weights(published, config), "float32")
    ids = prompt(config.vocab_size)
    with torch.no_grad():
        hidden = published(torch.tensor(ids)[None], output_hidden_states=True).hidden_states
    forward = model.forward(ids, model.new_cache(TOKENS), taps=(0, 1))
    expected = np.concatenate([hidden[1][0].numpy(), hidden[2][0].numpy()], axis=1)
    np.testing.assert_allclose(forward.features, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("attention", ["absorbed", "expanded"])
@pytest.mark.parametrize("name", ["all_dense", "base", "kimi_yarn"])
def test_bfloat16_emulation_errs_as_much_as_published_bfloat16(name, attention, tmp_path):
    """Medians, because a router near a tie flips an expert of single rows in either implementation."""
    published, config = oracle.random_oracle(name)
    weights = oracle.published_weights(published, config)
    ids = prompt(config.vocab_size)
    truth = logits_of(published, ids)
    published.save_pretrained(tmp_path / "a")
    # Loaded, not converted: `.to(bfloat16)` would also round the router and the rotary frequencies.
    loaded = type(published).from_pretrained(tmp_path / "a", dtype=torch.bfloat16, attn_implementation="eager")
    loaded.config._experts_implementation = "eager"
    with torch.no_grad():
        rounded = loaded(torch.tensor(ids)[None]).logits[0].float().numpy()
    model = Model(config, weights, "bfloat16", attention)
    actual = model.forward(ids, model.new_cache(TOKENS)).logits
    noise = np.median(np.abs(rounded - truth))
    assert 0.6 * noise < np.median(np.abs(actual - truth)) < 1.4 * noise
    assert np.median(np.abs(actual - rounded)) < noise
