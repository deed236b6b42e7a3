"""Models of odd sizes, where rows of weights and caches begin off 16 bytes, and trees behind long prompts."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from engine.generation import Generation
from engine.request import DFlash, Drafter, NoisyOracle, Oracle, Request
from engine.tests.decoding import LOOPS, VOCABULARY, assert_same, micro_drafter, micro_target, write_model
from reference.checkpoint import load_drafter, load_target
from reference.loop import ar_generate
from reference.tests.models import YARN, random_weights

ODD = {
    "hidden_size": 13,
    "intermediate_size": 7,
    "moe_intermediate_size": 5,
    "num_attention_heads": 3,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "n_routed_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 3,
}
PROMPT = (5, 1, 17)
CLOSE = 5e-5  # float32 alone moves these logits, of up to 13, by up to 1e-5 against float64; devices round otherwise


@pytest.mark.parametrize(
    "changes",
    [
        {"q_lora_rank": 9, "rope_scaling": YARN},
        {"tie_word_embeddings": True, "rope_interleave": False, "vocab_size": 25},
        {"qk_rope_head_dim": 6, "kv_lora_rank": 1, "v_head_dim": 1, "qk_nope_head_dim": 1, "moe_intermediate_size": 1},
    ],
    ids=["odd", "tied", "ones"],
)
def test_models_of_odd_sizes(world, tmp_path, changes):
    """Case C38, in the layers. Public issue: lightseekorg/tokenspeed#683."""
    config = micro_target(**{**ODD, **changes})
    sizes = {"vocab_size": config.vocab_size, "hidden_size": 13, "intermediate_size": 9, "num_attention_heads": 3}
    drafting = micro_drafter(**sizes, head_dim=6, block_size=5)
    file = write_model(tmp_path / "target.kdtr", config, random_weights(config))
    drafter_file = write_model(tmp_path / "drafter.kdtr", drafting, random_weights(drafting, 5))
    target = load_target(file)
    found: list[Generation] = []
    with world.new_engine(target=file, drafter=drafter_file, cache_block_size=3) as engine:
        for method, budget in (("ar", 0), ("chain", 0), ("ddtree", 11)):
            request = Request(PROMPT, 7, budget)
            found += engine.generate([request], method=method, keep_traces=True, keep_logits=True)
            drafter = None if method == "ar" else load_drafter(drafter_file, target)
            expected = LOOPS[method](
                target, drafter, np.array(PROMPT), max_new_tokens=7, budget=budget, keep_traces=True
            )
            assert_same(found[-1], expected, CLOSE)
    for other in found[1:]:
        assert_array_equal(other.logits.view(np.uint32), found[0].logits.view(np.uint32))
    text = np.array([*PROMPT, *found[0].tokens], np.int32)
    true = target.forward(text, target.new_cache(len(text))).logits[len(PROMPT) - 1 :, : config.vocab_size]
    assert_allclose(found[0].logits, true, rtol=0, atol=CLOSE)


def test_the_nodes_of_a_path_have_the_same_logits_in_every_tree_behind_prefixes_of_any_length(world):
    """Case C09: a chain, the chain with one useless sibling, and bushy trees; positions go on behind what was accepted.

    Public issues: lablup/mlxcel#1214, sgl-project/sglang#25015.
    """
    lengths = (1, 15, 64) if world.library.architectures == "host" else (1, 15, 16, 63, 64, 65, 255, 256, 1000)
    engine = world.engine(capacity=1100, prefill_rows=64)
    rng = np.random.default_rng(0)
    for length in lengths:
        prompt = tuple(rng.integers(0, VOCABULARY, length).tolist())
        plain = engine.generate(prompt, method="ar", max_new_tokens=7, keep_logits=True)
        assert plain.tokens == ar_generate(world.target, None, np.array(prompt), max_new_tokens=7).tokens
        drafters: tuple[tuple[str, int, Drafter], ...] = (
            ("chain", 0, Oracle(plain.tokens, 4)),
            ("ddtree", 4, NoisyOracle(plain.tokens, 4, miss=0, max_rank=0)),
            ("ddtree", 30, NoisyOracle(plain.tokens, 4, miss=0.1, max_rank=2, seed=length)),
            ("ddtree", 9, DFlash()),
        )
        for method, budget, drafter in drafters:
            request = Request(prompt, 7, budget, drafter=drafter)
            made = engine.generate([request], method=method, keep_logits=True)[0]
            assert made.tokens == plain.tokens, (length, method, budget)
            assert_array_equal(made.logits.view(np.uint32), plain.logits.view(np.uint32), str((length, budget)))
            places = [r.prefix_length for r in made.rounds]
            assert places == [length + sum(1 + r.accepted for r in made.rounds[:i]) for i in range(len(places))]
