"""Checkpoints to be read, changed and damaged."""

from __future__ import annotations

import json

import numpy as np

from reference.checkpoint import save_hf
from reference.tensor_files import read_header, write_safetensors
from reference.tests.models import random_weights, target_config

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def sharded(tmp_path):
    """A sound bf16 checkpoint in two shards."""
    config = target_config()
    save_hf(tmp_path / "target", config, random_weights(config), max_shard_bytes=40_000)
    return tmp_path / "target"


def single(tmp_path, config=None):
    """A sound bf16 checkpoint in one file."""
    config = config or target_config()
    save_hf(tmp_path / "one", config, random_weights(config))
    return tmp_path / "one"


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
