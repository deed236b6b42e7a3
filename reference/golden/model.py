"""Two tiny targets and a tiny drafter: weights, prompt, golden tokens, logits and every activation.

tiny is small in every dimension. tiny_mla has the latent sizes of the real models (512 + 64) and 16 heads, so that the
production kernels run on it; its weights are bf16 values. <name>.kdtr (kind model or drafter) holds config and weights,
<name>_run.kdtr (kind generation) what the model makes of a prompt: greedy decoding of 24 tokens, one tree pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kdtr
from reference.config import DrafterConfig, ModelConfig
from reference.dflash import DFlash
from reference.drafter import OracleDrafter
from reference.golden.attention import tree_parents, visibility_of
from reference.golden.files import EXACT, GoldenFile, rounded
from reference.golden.inputs import gaussian, integers
from reference.golden.topk import bf16
from reference.loop import ar_generate, ddtree_generate
from reference.model import Model

SEED = 20260417
NEW_TOKENS = 24
BLOCK = 8
PROMPT = 11
# What an engine in float32 must reach: logits of a few units, sums of some hundred terms, four layers.
LOGITS = kdtr.Tolerance.close(8e-6, 0)
ACTIVATIONS = kdtr.Tolerance.close(1e-5, 1e-5)
_LARGE = 1 << 16

TINY: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
}
TINY_MLA: dict[str, Any] = {
    **TINY,
    "vocab_size": 160,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 64,
    "v_head_dim": 8,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
TINY_DRAFTER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "block_size": BLOCK,
    "num_target_layers": 5,
    "vocab_size": 101,
    "dflash_config": {"mask_token_id": 100, "target_layer_ids": [1, 2]},
}


def golden_files() -> list[GoldenFile]:
    tiny = _Target("tiny", ModelConfig.from_dict(TINY), SEED, _same)
    mla = _Target("tiny_mla", ModelConfig.from_dict(TINY_MLA), SEED + 1000, bf16)
    return [*tiny.files(), *mla.files(), *_drafter(tiny)]


def _wide(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(array, np.float64) for name, array in arrays.items()}


def _same(x: NDArray[Any]) -> NDArray[Any]:
    return x


def random_weights(
    config: ModelConfig | DrafterConfig, seed: int, stored: Callable[[NDArray[Any]], NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Weights that keep activations of order one: norms near 1, a routing bias that matters; one stream a tensor."""
    weights = {}
    for stream, (name, shape) in enumerate(config.weight_shapes().items()):
        draw = gaussian(seed, stream, *shape)
        if name.endswith("norm.weight"):
            draw = 1 + draw * np.float32(0.125)
        elif name.endswith("e_score_correction_bias"):
            draw = draw * np.float32(0.125)
        elif not name.endswith("embed_tokens.weight"):
            draw = draw * np.float32((1.5 if "lm_head" in name else 1.0) / np.sqrt(shape[-1]))
        # The published routing bias stays float32 in bf16 checkpoints.
        weights[name] = draw if name.endswith("e_score_correction_bias") else stored(draw)
    return weights


class _Target:
    """A tiny target, its prompt and its golden tokens, all in float64."""

    def __init__(
        self, name: str, config: ModelConfig, seed: int, stored: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> None:
        self.name, self.config, self.seed = name, config, seed
        self.weights = random_weights(config, seed, stored)
        self.model = Model(config, _wide(self.weights), "float64")
        self.prompt = integers(seed, 900, config.vocab_size, PROMPT)
        self.tokens = np.array(ar_generate(self.model, None, self.prompt, max_new_tokens=NEW_TOKENS).tokens, np.int32)

    def files(self) -> list[GoldenFile]:
        weights = GoldenFile(self.name, "model", self.seed, "Random weights; reference/golden/model.py says how drawn.")
        weights.add("", aux=self.config.to_tensors(), params=self.weights)
        return [weights, self._run()]

    def _run(self) -> GoldenFile:
        """prefill.*: activations of the prompt. logits: before each token. tree.*: one tree pass after the prompt."""
        notes = (
            "logits[t] chose tokens[t]; ddtree: the oracle drafter with block 8 gives the same tokens in 3 rounds. "
            "Names behind prefill and tree are those of reference/model.py, with . for /; "
            ".last_row: of the last row only."
        )
        file = GoldenFile(f"{self.name}_run", "generation", self.seed, notes)
        cache = self.model.new_cache(PROMPT + NEW_TOKENS)
        trace: dict[str, NDArray[Any]] = {}
        result = self.model.forward(self.prompt, cache, trace=trace)
        cache.commit(np.arange(PROMPT))
        logits = [result.logits[-1]]
        tree = self._tree(cache)
        for token in self.tokens[:-1]:
            logits.append(self.model.forward(np.array([token]), cache).logits[0])
            cache.commit([0])
        chosen = np.stack(logits)
        if not np.array_equal(chosen.argmax(axis=1), self.tokens):
            raise AssertionError(f"{self.name}: the logits do not choose the golden tokens")
        oracle = ddtree_generate(
            self.model,
            OracleDrafter(self.tokens, self.config.vocab_size, BLOCK),
            self.prompt,
            max_new_tokens=NEW_TOKENS,
            budget=BLOCK - 1,
        )
        file.add(
            "",
            inputs={"prompt": self.prompt},
            expected={
                "tokens": (self.tokens, EXACT),
                "logits": (rounded(chosen), LOGITS),
                "ddtree.tokens": (np.array(oracle.tokens, np.int32), EXACT),
                "ddtree.accepted": (np.array([r.accepted for r in oracle.rounds], np.int32), EXACT),
            },
        )
        file.add("", expected=_activations("prefill", trace))
        file.add("", **tree)
        return file

    def _tree(self, cache: Any) -> dict[str, Any]:
        """A tree pass of 21 rows that hangs on the first golden token."""
        rows = 21
        parents = tree_parents(self.seed, rows)
        tokens = integers(self.seed, 901, self.config.vocab_size, rows)
        tokens[0] = self.tokens[0]
        trace: dict[str, NDArray[Any]] = {}
        self.model.forward(tokens, cache, visibility=visibility_of(parents), trace=trace)
        inputs = {"tree.tokens": tokens, "tree.parents": parents}
        return {"inputs": inputs, "expected": _activations("tree", trace)}


def _activations(part: str, trace: dict[str, NDArray[Any]]) -> dict[str, tuple[NDArray[Any], kdtr.Tolerance]]:
    """{part.name: (value, tolerance)}; "/" in a name becomes ".", so that the file stays one case.

    What is larger than _LARGE bytes is kept for its last row only, as name.last_row.
    """
    expected: dict[str, tuple[NDArray[Any], kdtr.Tolerance]] = {}
    for name, array in trace.items():
        if array.nbytes > _LARGE:
            expected[f"{part}.{name.replace('/', '.')}.last_row"] = (rounded(array[-1:]), ACTIVATIONS)
            continue
        at = f"{part}.{name.replace('/', '.')}"
        if array.dtype.kind == "i":
            expected[at] = (array, EXACT)
        else:
            expected[at] = (rounded(array), LOGITS if name == "logits" else ACTIVATIONS)
    return expected


def _drafter(target: _Target) -> list[GoldenFile]:
    config = DrafterConfig.from_dict(TINY_DRAFTER)
    seed = SEED + 2000
    weights = random_weights(config, seed, _same)
    file = GoldenFile("tiny_drafter", "drafter", seed, "Random weights; made for the target tiny.kdtr.")
    file.add("", aux=config.to_tensors(), params=weights)
    drafter = DFlash(
        config,
        _wide(weights),
        target.model.embedding,
        target.model.head,
        "float64",
    )
    notes = (
        "features: the target's residual stream after its tapped layers, at the prompt and then at 3 more positions; "
        "round 0 and round 1 are the blocks drafted after each. Names are those of reference/dflash.py, with . for /."
    )
    run = GoldenFile("tiny_drafter_run", "generation", seed, notes)
    cache = target.model.new_cache(PROMPT + NEW_TOKENS)
    committed = [target.prompt, target.tokens[:3]]
    roots = [int(target.tokens[0]), int(target.tokens[3])]
    run.add("", inputs={"prompt": target.prompt}, expected={"tokens": (target.tokens, EXACT)})
    drafter.reset(target.prompt)
    for index, (tokens, root) in enumerate(zip(committed, roots, strict=True)):
        features = target.model.forward(tokens, cache, taps=config.target_layer_ids).features
        cache.commit(np.arange(len(tokens)))
        trace: dict[str, NDArray[Any]] = {}
        stored = rounded(features)  # the drafter starts from what the file holds
        drafter.observe(tokens, stored.astype(np.float64), trace)
        drafter.block_logits(root, trace)
        inputs: dict[str, NDArray[Any]] = {"features": stored, "tokens": tokens, "root_token": np.array(root, np.int32)}
        run.add(
            "",
            inputs={f"round_{index}.{name}": array for name, array in inputs.items()},
            expected=_activations(f"round_{index}", trace),
        )
    return [file, run]
