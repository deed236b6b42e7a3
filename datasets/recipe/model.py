"""The pair in plain PyTorch: an MLA + MoE target (DeepSeek-V3 shape) and its DFlash drafter.

All shapes are static: the routed experts are computed for every token and weighted by zero where they were not
chosen, so the experts of a layer are two ordinary matrix products. What the target computes is what transformers'
`DeepseekV3ForCausalLM` computes from the exported checkpoint: interleaved rotary pairs, latent norms with epsilon
1e-6, router and its scores in float32, correction bias for choosing only, dropped groups at minus infinity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class TargetConfig:
    """Published field names of a DeepSeek-V3 config.json; the defaults are the shipped target."""

    vocab_size: int = 4096
    hidden_size: int = 320
    intermediate_size: int = 768
    moe_intermediate_size: int = 96
    num_hidden_layers: int = 5
    num_attention_heads: int = 16
    q_lora_rank: int = 192
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 64
    v_head_dim: int = 32
    n_routed_experts: int = 12
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 1024

    def published(self) -> dict[str, object]:
        """The whole config.json of the checkpoint."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **vars(self),
            "num_key_value_heads": self.num_attention_heads,
            "hidden_act": "silu",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "moe_layer_freq": 1,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_scaling": None,
            "rope_interleave": True,
            "tie_word_embeddings": False,
            "num_nextn_predict_layers": 0,
            "initializer_range": 0.02,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "use_cache": True,
            "torch_dtype": "bfloat16",
        }


@dataclass(frozen=True)
class DrafterConfig:
    """DFlash drafter; `target_layer_ids` are the target layers whose output it reads, never the last one."""

    hidden_size: int = 320
    intermediate_size: int = 960
    num_hidden_layers: int = 3
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    target_layer_ids: tuple[int, ...] = (1, 2, 3)
    mask_token_id: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    vocab_size: int = 4096
    num_target_layers: int = 5
    max_position_embeddings: int = 1024

    def published(self) -> dict[str, object]:
        """The whole config.json of the drafter."""
        own = {k: v for k, v in vars(self).items() if k not in ("target_layer_ids", "mask_token_id")}
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **own,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "use_cache": True,
            "torch_dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    """Statistics in float32; the weight is multiplied in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def rotary(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos, sin [..., dim/2] in float32."""
    angle = positions[..., None].float() * theta ** (-torch.arange(0, dim, 2, device=positions.device).float() / dim)
    return angle.cos(), angle.sin()


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved layout: channel 2i turns with 2i+1; the result holds the even channels first."""
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channel i turns with i + dim/2 (the drafter's layout)."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class FFN(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(hidden, inner),
            linear(hidden, inner),
            linear(inner, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Routed experts of a layer, stacked, and the shared expert."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        experts, inner, hidden = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
        self.router = nn.Parameter(torch.empty(experts, hidden))
        self.gate_proj = nn.Parameter(torch.empty(experts, inner, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        self.shared_experts = FFN(hidden, inner * c.n_shared_experts)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def choose(self, x: Tensor) -> Tensor:
        """Weights [tokens, experts], zero for experts that were not chosen."""
        c = self.c
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(functional.linear(x.float(), self.router.float()))
        biased = scores.detach() + self.bias
        groups = biased.view(-1, c.n_group, c.n_routed_experts // c.n_group)
        kept = groups.topk(2, -1).values.sum(-1).topk(c.topk_group, -1).indices
        open_group = torch.zeros_like(groups[..., 0]).scatter(1, kept, 1.0)
        masked = groups.masked_fill(open_group[..., None] == 0, -math.inf).flatten(1)
        chosen = torch.zeros_like(scores).scatter(1, masked.topk(c.num_experts_per_tok, -1).indices, 1.0)
        weights = scores * chosen
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] -> (output [tokens, hidden], tokens per expert [experts])."""
        weights = self.choose(x)
        inner = functional.silu(functional.linear(x, self.gate_proj.flatten(0, 1))) * functional.linear(
            x, self.up_proj.flatten(0, 1)
        )
        inner = inner.unflatten(-1, (self.c.n_routed_experts, -1)) * weights.to(inner.dtype)[..., None]
        routed = functional.linear(inner.flatten(1), self.down_proj.transpose(0, 1).flatten(1))
        return routed + self.shared_experts(x), (weights.detach() > 0).sum(0)

    @torch.no_grad()
    def balance(self, load: Tensor, rate: float) -> None:
        """Loss-free balancing: the bias moves towards an even load (DeepSeek-V3, section 2.1.2)."""
        load = load.float()
        self.bias += rate * torch.sign(load.mean() - load)
        self.bias -= self.bias.mean()


class Attention(nn.Module):
    """Multi-head latent attention, expanded form."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c, self.pad_values = c, True
        heads, qk = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_a_proj, self.q_b_proj = linear(c.hidden_size, c.q_lora_rank), linear(c.q_lora_rank, heads * qk)
        self.kv_a_proj_with_mqa = linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_b_proj = linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = linear(heads * c.v_head_dim, c.hidden_size)
        self.q_a_layernorm, self.kv_a_layernorm = RMSNorm(c.q_lora_rank, 1e-6), RMSNorm(c.kv_lora_rank, 1e-6)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, hidden] -> q, k [B, heads, T, nope + rope], v [B, heads, T, v_head_dim]."""
        c, (B, T, _) = self.c, x.shape
        heads, nope = c.num_attention_heads, c.qk_nope_head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(B, T, heads, -1).transpose(1, 2)
        latent, rope_key = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(B, T, heads, -1).transpose(1, 2)
        rope_key = rotate_pairs(rope_key, *rope)[:, None].expand(-1, heads, -1, -1)
        q = torch.cat([q[..., :nope], rotate_pairs(q[..., nope:], *rope)], -1)
        return q, torch.cat([kv[..., :nope], rope_key], -1), kv[..., nope:]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of T rows over themselves. Fused kernels other than cuDNN's want v as wide as q and k."""
        B, _, T, width = q.shape
        wide = functional.pad(v, (0, width - v.shape[-1])) if self.pad_values else v
        out = functional.scaled_dot_product_attention(q, k, wide, is_causal=True)
        return self.o_proj(out[..., : v.shape[-1]].transpose(1, 2).reshape(B, T, -1))

    def attend_one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One new row a sequence over its whole cache: q [B, heads, 1, d], k, v [B, heads, S, .]."""
        scores = (q.to(k.dtype) @ k.mT).float() * q.shape[-1] ** -0.5
        return self.o_proj((scores.softmax(-1).to(v.dtype) @ v).flatten(1)[:, None])


class TargetLayer(nn.Module):
    def __init__(self, c: TargetConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.dense = index < c.first_k_dense_replace
        self.mlp: nn.Module = FFN(c.hidden_size, c.intermediate_size) if self.dense else MoE(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        h = self.post_attention_layernorm(x)
        if self.dense:
            return x + self.mlp(h), None
        out, load = self.mlp(h.flatten(0, 1))
        return x + out.view(x.shape), load


@dataclass(frozen=True)
class TargetOutput:
    """logits [B, T, V]; features [B, T, taps * hidden]; load [MoE layers, experts]."""

    logits: Tensor
    features: Tensor | None = None
    load: Tensor | None = None


@dataclass(frozen=True)
class KVCache:
    """Expanded keys and values of a batch, [B, heads, capacity, width] a layer, written in place."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Target(nn.Module):
    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(TargetLayer(c, i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = linear(c.hidden_size, c.vocab_size)
        for name, p in self.named_parameters():
            if p.ndim >= 2:
                out = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
                std = 0.5 if "embed" in name else 0.02 / (math.sqrt(2 * c.num_hidden_layers) if out else 1)
                nn.init.normal_(p, 0, std)

    def forward(self, tokens: Tensor, taps: tuple[int, ...] = (), logits: bool = True) -> TargetOutput:
        """tokens [B, T], causal over the whole row. Without logits it stops after the last tap and returns its x."""
        x, features, loads = self.embed_tokens(tokens), [], []
        rope = rotary(torch.arange(tokens.shape[1], device=tokens.device), self.c.qk_rope_head_dim, self.c.rope_theta)
        for index, layer in enumerate(self.layers):
            x = x + layer.self_attn.attend(*layer.self_attn.project(layer.input_layernorm(x), rope))
            x, load = layer.feed_forward(x)
            loads += [] if load is None else [load]
            if index in taps:
                features.append(x)
            if not logits and index >= max(taps):
                break
        out = self.lm_head(self.norm(x)) if logits else x
        return TargetOutput(out, torch.cat(features, -1) if taps else None, torch.stack(loads) if loads else None)

    def step(self, tokens: Tensor, start: int, cache: KVCache) -> Tensor:
        """The prefill (start 0) or one decoding step (T = 1): tokens [B, T] at start.. -> logits [B, V], last row."""
        T = tokens.shape[1]
        if start and T != 1:
            raise ValueError(f"a step after the prefill takes one token a row, got {T}")
        positions = torch.arange(start, start + T, device=tokens.device)
        rope = rotary(positions, self.c.qk_rope_head_dim, self.c.rope_theta)
        x = self.embed_tokens(tokens)
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), rope)
            keys[:, :, start : start + T], values[:, :, start : start + T] = k, v
            if start:
                x = x + layer.self_attn.attend_one(q, keys[:, :, : start + 1], values[:, :, : start + 1])
            else:
                x = x + layer.self_attn.attend(q, k, v)
            x, _ = layer.feed_forward(x)
        return self.lm_head(self.norm(x[:, -1]))

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype) -> KVCache:
        c, device = self.c, self.lm_head.weight.device
        widths = (c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim)
        keys, values = (
            [
                torch.zeros(batch, c.num_attention_heads, capacity, width, dtype=dtype, device=device)
                for _ in self.layers
            ]
            for width in widths
        )
        return KVCache(keys, values)

    def published(self) -> dict[str, Tensor]:
        """Weights under the published checkpoint names."""
        out: dict[str, Tensor] = {}
        for name, value in self.state_dict().items():
            stem, _, last = name.rpartition(".")
            if stem.endswith("mlp") and last == "router":
                out[f"model.{stem}.gate.weight"] = value
            elif stem.endswith("mlp") and last == "bias":
                out[f"model.{stem}.gate.e_score_correction_bias"] = value
            elif stem.endswith("mlp") and last in ("gate_proj", "up_proj", "down_proj"):
                for expert, weight in enumerate(value):
                    out[f"model.{stem}.experts.{expert}.{last}.weight"] = weight.contiguous()
            else:
                out[name if name.startswith("lm_head") else f"model.{name}"] = value
        return out


class DrafterLayer(nn.Module):
    """Attention over [context | own block] without a causal mask; the context skips the input norm."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c, hidden, d = c, c.hidden_size, c.head_dim
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(hidden, c.num_attention_heads * d),
                "k_proj": linear(hidden, c.num_key_value_heads * d),
                "v_proj": linear(hidden, c.num_key_value_heads * d),
                "o_proj": linear(c.num_attention_heads * d, hidden),
                "q_norm": RMSNorm(d, c.rms_norm_eps),
                "k_norm": RMSNorm(d, c.rms_norm_eps),
            }
        )
        self.mlp = FFN(hidden, c.intermediate_size)
        self.input_layernorm = RMSNorm(hidden, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden, c.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        rope: tuple[Tensor, Tensor],
        rope_own: tuple[Tensor, Tensor],
        before: Tensor,
        within: Tensor | None,
    ) -> Tensor:
        """x [B, R, b, hidden], context [B, S, hidden], before bool [B, R, S]: the context a block sees.

        within bool [B, R, b]: what a block sees of itself; None: all of it.

        Context and own block are two score matrices under one softmax: blocks never meet, so nothing is masked away.
        """
        a, c, (B, R, b, _), S = self.self_attn, self.c, x.shape, context.shape[1]
        d, kv, share = c.head_dim, c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads
        h = self.input_layernorm(x)
        q = rotate_half(a["q_norm"](a["q_proj"](h).view(B, R, b, kv * share, d)), *(t[..., None, :] for t in rope_own))
        q = q.view(B, R, b, kv, share, d).permute(0, 3, 1, 4, 2, 5) * d**-0.5  # [B, kv, R, share, b, d]
        own_k = rotate_half(a["k_norm"](a["k_proj"](h).view(B, R, b, kv, d)), *(t[..., None, :] for t in rope_own))
        own_k, own_v = own_k.permute(0, 3, 1, 2, 4), a["v_proj"](h).view(B, R, b, kv, d).permute(0, 3, 1, 2, 4)
        ctx_k = a["k_norm"](a["k_proj"](context).view(B, S, kv, d).transpose(1, 2))
        ctx_k, ctx_v = rotate_half(ctx_k, *rope), a["v_proj"](context).view(B, S, kv, d).transpose(1, 2)
        seen = (q.reshape(B, kv, -1, d) @ ctx_k.mT).view(B, kv, R, share * b, S).float()
        seen = seen.masked_fill(~before[:, None, :, None], -math.inf)
        own = (q.reshape(B, kv, R, share * b, d) @ own_k.mT).float()
        if within is not None:
            own = own.masked_fill(~within[:, None, :, None], -math.inf)
        p_seen, p_own = torch.cat([seen, own], -1).softmax(-1).to(ctx_v.dtype).split([S, b], -1)
        out = (p_seen.reshape(B, kv, -1, S) @ ctx_v).view(B, kv, R, share * b, d) + p_own @ own_v
        out = out.view(B, kv, R, share, b, d).permute(0, 2, 4, 1, 3, 5).reshape(B, R, b, -1)
        x = x + a["o_proj"](out)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c = c
        self.fc = linear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size)
        self.hidden_norm, self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps), RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(c) for _ in range(c.num_hidden_layers))
        for name, p in self.named_parameters():
            if p.ndim == 2:
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, 0, 0.02 / (math.sqrt(2 * c.num_hidden_layers) if out else 1))

    def forward(
        self, noise: Tensor, features: Tensor, roots: Tensor, block: int, sizes: Tensor | None = None
    ) -> Tensor:
        """noise [B, R, block, hidden], features [B, S, F], roots [B, R] positions -> hidden [B, R, block, hidden].

        Every block sees the features strictly before its root and itself; blocks do not see each other. sizes [B, R]:
        so many first rows of a block are those of a block of that size, the others mean nothing; None: whole blocks.
        """
        S, device, c = features.shape[1], features.device, self.c
        rope = rotary(torch.arange(S, device=device), c.head_dim, c.rope_theta)
        rope_own = rotary(roots[..., None] + torch.arange(block, device=device), c.head_dim, c.rope_theta)
        before = torch.arange(S, device=device) < roots[..., None]
        within = None if sizes is None else torch.arange(block, device=device) < sizes[..., None]
        context, x = self.hidden_norm(self.fc(features)), noise
        for layer in self.layers:
            x = layer(x, context, rope, rope_own, before, within)
        return self.norm(x)
