"""A small random target with its drafter, over the vocabulary of the shipped prompts, and lists recorded from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from datasets.evaluation import pair, prompts, record
from reference.checkpoint import save_kdtr
from reference.config import DrafterConfig, ModelConfig
from reference.tests.models import DRAFTER, TARGET

VOCAB = 4096


def write_pair(folder: Path, block_size: int = 8) -> Path:
    """target.kdtr and drafter.kdtr in a folder."""
    rng = np.random.default_rng(0)
    small = {"target_layer_ids": [0, 2], "mask_token_id": 1}
    target: dict[str, Any] = {**TARGET, "vocab_size": VOCAB, "eos_token_id": [0]}
    drafter: dict[str, Any] = {**DRAFTER, "vocab_size": VOCAB, "block_size": block_size, "dflash_config": small}
    for name, config in (("target", ModelConfig.from_dict(target)), ("drafter", DrafterConfig.from_dict(drafter))):
        weights = {}
        for weight, shape in config.weight_shapes().items():
            scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.01
            values = np.ones(shape) if weight.endswith("norm.weight") else rng.standard_normal(shape) * scale
            weights[weight] = values.astype(np.float32)
        save_kdtr(folder / f"{name}.kdtr", config, weights)
    return folder


def write_lists(models: Path, folder: Path) -> Path:
    """drafter_lists_b8_k128.kdtr with a few real rounds of the pair."""
    held = pair.load(models)
    plan = record.Plan(block=8, budget=128, prompts=1, rounds=8)
    case = record.generation(held, plan, prompts.load("humaneval")[0], 0.0)
    assert case is not None
    record.save(held, plan, {f"humaneval_0_greedy/{key}": array for key, array in case.items()}, folder / plan.file)
    return folder
