"""Models of random weights: their bits are those of files that NumPy makes by the same rule, in both types."""

from __future__ import annotations

import numpy as np
import pytest

from engine.abi import SizeError
from engine.checkpoint import Random, load
from engine.engine import Engine
from engine.tests.decoding import PROMPT, World, micro_drafter, micro_target, write_model
from reference.config import DrafterConfig, ModelConfig
from reference.sampling import philox4x32

SEED = 2**40 + 7


def weights(config: ModelConfig | DrafterConfig) -> dict[str, np.ndarray]:
    """What the engine makes, tensor by tensor in the order of their names."""
    made = {}
    for number, (name, shape) in enumerate(sorted(config.weight_shapes().items())):
        count = int(np.prod(shape))
        counter = np.zeros((-(-count // 4), 4), np.uint32)
        counter[:, 0], counter[:, 2] = np.arange(len(counter)), number
        words = philox4x32(counter, (SEED & 0xFFFFFFFF, SEED >> 32))
        unit = (words.view(np.int32).reshape(-1)[:count] >> 8).astype(np.float32) * np.float32(2**-23)
        centre, variance = (1.0, 0.04) if name.endswith("norm.weight") else (0.0, 2.25 / shape[-1])
        if name.endswith("e_score_correction_bias"):
            variance = 0.0004
        elif name.endswith("embed_tokens.weight"):
            variance = 1.0
        made[name] = (np.float32(centre) + np.float32(np.sqrt(3 * variance)) * unit).reshape(shape)
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_weights_are_those_of_a_file_bit_for_bit(world: World, tmp_path, dtype):
    target, drafter = micro_target(), micro_drafter()
    files = [
        write_model(tmp_path / f"{name}.kdtr", config, weights(config))
        for name, config in (("target", target), ("drafter", drafter))
    ]
    made = [Random(config.to_dict(), SEED) for config in (target, drafter)]
    found = []
    for models in (files, made):
        with Engine.load(*models, library=world.library, dtype=dtype, capacity=64, max_budget=8) as engine:
            one = engine.generate(PROMPT, method="ddtree", max_new_tokens=6, keep_logits=True)
        found.append(one)
    assert found[0].tokens == found[1].tokens
    np.testing.assert_array_equal(found[0].logits.view(np.uint32), found[1].logits.view(np.uint32))
    assert [r.nodes for r in found[0].rounds] == [r.nodes for r in found[1].rounds]


def test_another_seed_gives_another_text_and_the_same_seed_the_same(world: World):
    config = micro_target().to_dict()
    texts = []
    for seed in (1, 1, 2):
        with Engine.load(Random(config, seed), library=world.library, capacity=64, max_budget=1) as engine:
            texts.append(engine.generate(PROMPT, method="ar", max_new_tokens=8, keep_logits=True).logits)
    np.testing.assert_array_equal(texts[0], texts[1])
    assert not np.array_equal(texts[0], texts[2])


def test_what_is_refused(world: World):
    config = micro_target().to_dict()
    with pytest.raises(SizeError, match="seed of random weights is -1"):
        load(world.library, Random(config, -1), "model")
    with pytest.raises(SizeError, match="kv_lora_rank"):
        load(world.library, Random({k: v for k, v in config.items() if k != "kv_lora_rank"}), "model")
    with load(world.library, Random(config), "model") as model, pytest.raises(SizeError, match="surplus"):
        model.call("random", 3)
