"""The fast way to tau against the real loops, on a small random pair with every kind of end."""

from __future__ import annotations

import json

import numpy as np
import pytest

from datasets.evaluation import __main__ as command
from datasets.evaluation import loops, measure, prompts, rows
from datasets.evaluation.batched import decode
from datasets.evaluation.loops import Method
from datasets.evaluation.measure import Settings
from datasets.evaluation.pair import Pair
from datasets.evaluation.prompts import Prompt
from reference.config import DrafterConfig, ModelConfig
from reference.model import Model

VOCABULARY = 10
SETTINGS = Settings(blocks=(2, 5), budgets=(1, 7, 40), max_new_tokens=20)


@pytest.fixture(scope="module")
def pair() -> Pair:
    config = ModelConfig.from_dict(
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 24,
            "intermediate_size": 40,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.0,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "eos_token_id": 0,
        }
    )
    drafter = DrafterConfig.from_dict(
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "block_size": 5,
            "num_target_layers": 3,
            "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1]},
        }
    )
    draw = np.random.default_rng(5)

    def weights(shapes):
        return {
            n: (1.0 + draw.standard_normal(s) / 4 if len(s) == 1 else draw.standard_normal(s))
            for n, s in shapes.items()
        }

    return Pair(Model(config, weights(config.weight_shapes())), drafter, weights(drafter.weight_shapes()), "random")


@pytest.fixture(scope="module")
def small_prompts() -> list[Prompt]:
    draw = np.random.default_rng(6)
    return [
        Prompt("humaneval", str(i), "random", "", tuple(int(t) for t in draw.integers(2, VOCABULARY, 3 + i)))
        for i in range(12)
    ]


def test_counts_are_those_of_the_real_loops(pair, small_prompts):
    """Every method, both temperatures: the same tokens and, round by round, the same accepted counts."""
    drafter, found = pair.batch_drafter(), []
    for prompt in small_prompts[:6]:
        for temperature in SETTINGS.temperatures:
            found += list(loops.compare(pair, drafter, prompt, temperature, SETTINGS))
    assert [row for row in found if not (row["same_tokens"] and row["same_counts"])] == []
    assert len(found) == 6 * 2 * 9
    assert loops.verdict(found).holds
    assert {row["tokens"] < SETTINGS.max_new_tokens for row in found} == {True, False}  # stop token and cap
    accepted = [row["tokens"] - row["rounds"] for row in found if row["budget"] == 40 and row["block"] == 5]
    assert np.mean(accepted) > 3


def test_rows_add_up(pair, small_prompts):
    found = list(measure.measure(pair, small_prompts, SETTINGS))
    assert len(found) == 12 * 2 * 2
    ends = set()
    for row in found:
        assert json.loads(json.dumps(row)) == row
        assert set(row["accepted"]) == {"0", "1", "7", "40"}
        for taken in row["accepted"].values():
            committed = sum((a + 1) * n for a, n in enumerate(taken))
            assert row["tokens"] - committed in ((0, 1) if row["stopped"] else (0,))
            ends.add((row["stopped"], row["tokens"] - committed))
    assert ends == {(False, 0), (True, 0), (True, 1)}  # cap; stop on the path; stop as bonus token


def test_other_counts_and_tokens_are_seen(pair, small_prompts, monkeypatch):
    """A drafter of other weights in the fast way: other counts. Another temperature in it: other tokens."""
    other = Pair(pair.target, pair.drafter_config, {n: w * 1.5 for n, w in pair.drafter_weights.items()}, "other")
    found = list(loops.compare(pair, other.batch_drafter(), small_prompts[8], 0.0, SETTINGS))
    assert all(row["same_tokens"] for row in found)
    assert not all(row["same_counts"] for row in found)
    assert not loops.verdict(found).holds
    warm = measure.sampling
    monkeypatch.setattr(loops, "decode", lambda *a, **k: decode(a[0], a[1], [warm(small_prompts[8], 5.0)], **k))
    found = list(loops.compare(pair, pair.batch_drafter(), small_prompts[8], 0.0, SETTINGS))
    verdict = loops.verdict(found)
    assert verdict.other_tokens == len(found)
    assert not verdict.holds
    assert not loops.verdict([]).holds


def test_batches_do_not_change_rows(pair, small_prompts):
    together = list(measure.measure(pair, small_prompts, SETTINGS))
    alone = [row for prompt in small_prompts for row in measure.measure(pair, [prompt], SETTINGS)]
    for one, other in zip(together, alone, strict=True):
        assert one["least_margin"] == pytest.approx(other["least_margin"], abs=1e-4)
        assert {k: v for k, v in one.items() if k != "least_margin"} == {
            k: v for k, v in other.items() if k != "least_margin"
        }


def test_a_stopped_run_goes_on(pair, small_prompts, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert command.measure_all(pair, small_prompts, SETTINGS, out, minutes=0) == 0
    assert len(rows.read(out)) == 8 * 4
    assert "the same command goes on" in capsys.readouterr().err
    assert command.measure_all(pair, small_prompts, SETTINGS, out, minutes=5) == 0
    assert [row["id"] for row in rows.read(out)[::4]] == [p.id for p in small_prompts]
    assert command.measure_all(pair, small_prompts, SETTINGS, out, minutes=5) == 0
    assert len(rows.read(out)) == 12 * 4
    assert command.compare_all(pair, small_prompts[:1], SETTINGS, tmp_path / "loops.jsonl", minutes=5) == 0
    assert "18 loops: 0 with other tokens" in capsys.readouterr().out


def test_a_case_is_what_it_was_measured_from(pair, small_prompts):
    one = measure.case(pair, small_prompts[0], 0.0, SETTINGS)
    others = [
        measure.case(pair, small_prompts[1], 0.0, SETTINGS),
        measure.case(pair, small_prompts[0], 1.0, SETTINGS),
        measure.case(pair, small_prompts[0], 0.0, Settings(blocks=(2,), budgets=(1, 7, 40), max_new_tokens=20)),
        measure.case(Pair(pair.target, pair.drafter_config, {}, "x"), small_prompts[0], 0.0, SETTINGS),
    ]
    assert len({one, *others}) == 5
    assert one == measure.case(pair, small_prompts[0], 0.0, SETTINGS)


def test_methods_name_themselves():
    found = loops.methods(Settings())
    assert len(found) == len(set(found)) == 1 + 2 * 6
    assert found[0] == Method("ar", 0, 0)


def test_every_part_of_the_list_holds_its_share_of_every_set():
    chosen = command.interleaved([prompts.load(name) for name in prompts.SETS], None)
    assert len(chosen) == len(set(chosen)) == 472
    half = [sum(p.set == name for p in chosen[:236]) for name in prompts.SETS]
    assert half == [82, 40, 50, 64]
    assert len(command.interleaved([prompts.load("gsm8k")], 5)) == 5
