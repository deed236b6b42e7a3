"""The NumPy DFlash drafter against a PyTorch one written from the published description (arXiv 2602.06036).

The PyTorch module is the training form: many blocks of one sequence in a single masked pass, without any cache. Its
state dict must take the checkpoint's tensors strictly, so names and shapes are checked with it.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="parity tests need torch (extra `parity`)")

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from reference.checkpoint import load_drafter, save_hf
from reference.config import DrafterConfig
from reference.model import Model
from reference.tests.models import drafter_config, random_weights, target_config


class Attention(nn.Module):  # type: ignore[misc]
    """Queries of all blocks against [features ; blocks], each block masked to its own past features and itself."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, self.dim = config.hidden_size, config.head_dim
        query, key = config.num_attention_heads * self.dim, config.num_key_value_heads * self.dim
        self.q_proj, self.o_proj = nn.Linear(hidden, query, bias=False), nn.Linear(query, hidden, bias=False)
        self.k_proj, self.v_proj = nn.Linear(hidden, key, bias=False), nn.Linear(hidden, key, bias=False)
        self.q_norm = nn.RMSNorm(self.dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.dim, eps=config.rms_norm_eps)
        self.theta = config.rope.rope_theta

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Complex rotation of the pairs (i, i + dim/2); x [rows, heads, dim]."""
        half = self.dim // 2
        speed = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = positions.double()[:, None, None] * speed
        z = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], -1).to(x.dtype)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        both = torch.cat([context, x])
        where = torch.cat([torch.arange(len(context)), positions])
        query = self.turn(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim))), positions)
        key = self.turn(self.k_norm(self.k_proj(both).unflatten(-1, (-1, self.dim))), where)
        value = self.v_proj(both).unflatten(-1, (-1, self.dim))
        heads = (part.transpose(0, 1)[None] for part in (query, key, value))
        out = scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)[0]
        return self.o_proj(out.transpose(0, 1).flatten(1))


class Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, positions, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class TorchDrafter(nn.Module):  # type: ignore[misc]
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        taps = len(config.target_layer_ids)
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))

    def forward(
        self, features: Tensor, tokens: Tensor, roots: Tensor, block: int, embed: Tensor, head: Tensor
    ) -> Tensor:
        """Blocks that start at positions `roots` of a sequence `tokens` with `features`: logits [roots, block-1, V]."""
        context = self.hidden_norm(self.fc(features))
        inputs = torch.full((len(roots), block), self.config.mask_token_id)
        inputs[:, 0] = tokens[roots]
        positions = (roots[:, None] + torch.arange(block)).flatten()
        owner = torch.arange(len(roots)).repeat_interleave(block)
        past = torch.arange(len(features))[None] < roots[owner][:, None]
        mask = torch.cat([past, owner[:, None] == owner[None]], 1)
        x = embed[inputs.flatten()]
        for layer in self.layers:
            x = layer(x, context, positions, mask)
        return (self.norm(x) @ head.T).unflatten(0, (len(roots), block))[:, 1:]


@pytest.mark.parametrize(
    ("dtype", "precision", "tolerance"), [(torch.float32, "float32", 2e-5), (torch.float64, "float64", 1e-12)]
)
@pytest.mark.parametrize("block", [16, 8, 2])
@pytest.mark.parametrize("grouping", [(4, 2), (4, 4), (6, 1)])
def test_blocks_of_a_decode_equal_the_masked_training_pass(tmp_path, dtype, precision, tolerance, block, grouping):
    heads, shared = grouping
    config = drafter_config(
        block_size=16, num_attention_heads=heads, num_key_value_heads=shared, head_dim=8, rms_norm_eps=1e-5
    )
    save_hf(tmp_path / "drafter", config, random_weights(config, 4), "f64")
    target_shape = target_config()
    target = Model(target_shape, random_weights(target_shape), precision)
    drafter = load_drafter(tmp_path / "drafter", target, block_size=block)
    module = TorchDrafter(config).to(dtype)
    module.load_state_dict(load_file(tmp_path / "drafter" / "model.safetensors"), strict=True)

    tokens = np.random.default_rng(0).integers(0, 61, 40)
    features = target.forward(tokens, target.new_cache(40), taps=config.target_layer_ids).features
    roots = [1, 2, 7, 8, 20, 39]
    with torch.no_grad():
        expected = module(
            torch.tensor(features),
            torch.tensor(tokens),
            torch.tensor(roots),
            block,
            *map(torch.tensor, (target.embedding, target.head)),
        ).numpy()
    drafter.reset(tokens[:1])
    seen = 0
    for index, root in enumerate(roots):
        drafter.observe(tokens[seen:root], features[seen:root])
        seen = root
        np.testing.assert_allclose(drafter.propose(int(tokens[root]), 31), expected[index], rtol=0, atol=tolerance)
    assert np.abs(expected).max() > 1
