"""Small models for tests of decoding, in both worlds: engines of either library, and the same models of the reference.

The fixture `world` (engine/tests/conftest.py) is a World for the host library and, on a GPU, one for the CUDA library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

import kdtr
from engine.abi import Library
from engine.engine import Engine, Method
from engine.generation import Generation
from engine.request import DFlash, Drafter, NoisyOracle, Oracle, Replay, Request
from reference import drafter as reference_drafter
from reference import loop
from reference.checkpoint import load_drafter, load_target, save_kdtr
from reference.config import DrafterConfig, ModelConfig
from reference.model import Model
from reference.sampling import SamplingParams
from reference.tests.models import drafter_config, random_weights, target_config

VOCABULARY = 23
PROMPT = (5, 1, 17, 3)
META = kdtr.provenance(seed=0, rng="PCG64")
LOOPS: dict[str, Any] = {"ar": loop.ar_generate, "chain": loop.chain_generate, "ddtree": loop.ddtree_generate}


def micro_target(**changes: Any) -> ModelConfig:
    """Three layers, one of them dense, of few threads and few barriers."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 12,
        "intermediate_size": 8,
        "moe_intermediate_size": 4,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 6,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
    }
    return target_config(**{**sizes, **changes})


def micro_drafter(**changes: Any) -> DrafterConfig:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 12,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "num_target_layers": 3,
        "dflash_config": {"mask_token_id": VOCABULARY - 1, "target_layer_ids": [0, 1]},
    }
    return drafter_config(**{**sizes, **changes})


def write_model(path: Path, config: ModelConfig | DrafterConfig, weights: Mapping[str, np.ndarray]) -> Path:
    save_kdtr(path, config, weights, "f32", META)
    return path


@dataclass
class World:
    """Models in `folder`, engines of `library`. Engines are made once for equal options and used again."""

    library: Library
    folder: Path
    _engines: dict[tuple[Any, ...], Engine] = field(default_factory=dict)

    @functools.cached_property
    def target_file(self) -> Path:
        config = micro_target()
        return write_model(self.folder / "target.kdtr", config, random_weights(config))

    @functools.cached_property
    def drafter_file(self) -> Path:
        config = micro_drafter()
        return write_model(self.folder / "drafter.kdtr", config, random_weights(config, 5))

    @functools.cached_property
    def target(self) -> Model:
        return load_target(self.target_file)

    def engine(self, **options: Any) -> Engine:
        key = tuple(sorted(options.items()))
        if key not in self._engines:
            self._engines[key] = self.new_engine(**options)
        return self._engines[key]

    def new_engine(self, **options: Any) -> Engine:
        """target, drafter: other files; all else as Engine.load, in small."""
        small = {"capacity": 96, "max_budget": 64, "prefill_rows": 16, "drafter": self.drafter_file}
        chosen = {"target": self.target_file, **small, **options}
        target, drafter = chosen.pop("target"), chosen.pop("drafter")
        return Engine.load(target, drafter, library=self.library, **chosen)

    @functools.cached_property
    def plain(self) -> Callable[..., loop.Generation]:
        """Plain decoding of the reference, computed once for each prompt, length and sampling."""

        @functools.cache
        def made(prompt: tuple[int, ...] = PROMPT, count: int = 24, **sampling: Any) -> loop.Generation:
            return loop.ar_generate(
                self.target, None, np.array(prompt), max_new_tokens=count, sampling=SamplingParams(**sampling)
            )

        return made

    def reference(
        self, request: Request, method: Method, block_size: int | None = None, target: Model | None = None
    ) -> loop.Generation:
        """The same request decoded by the reference. block_size: of the drafter, None: the trained one."""
        chosen = target or self.target
        return LOOPS[method](  # type: ignore[no-any-return]
            chosen,
            self.reference_drafter(request.drafter, chosen, block_size),
            np.asarray(request.prompt),
            max_new_tokens=request.max_new_tokens,
            budget=request.budget or 0,
            sampling=SamplingParams(request.temperature, request.top_k, request.top_p, request.seed),
            stop_tokens=request.stop_tokens,
            capacity=request.capacity,
            keep_traces=True,
        )

    def reference_drafter(self, drafter: Drafter, target: Model, block_size: int | None) -> reference_drafter.Drafter:
        size = target.vocab_size
        match drafter:
            case DFlash():
                return load_drafter(self.drafter_file, target, block_size=block_size)
            case Oracle():
                return reference_drafter.OracleDrafter(drafter.golden, size, drafter.block_size, drafter.right)
            case NoisyOracle(golden, block_size, miss, max_rank, seed):
                return reference_drafter.NoisyOracleDrafter(golden, size, block_size, miss, max_rank, seed)
            case Replay():
                return reference_drafter.ReplayDrafter(drafter.lists, size, drafter.block_size)

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def assert_same(actual: Generation, expected: loop.Generation, lp_tolerance: float = 0.0) -> None:
    """Output, records and, where kept, what the rounds saw. lp_tolerance: of lists and scores."""
    assert actual.tokens == expected.tokens
    assert (actual.finish_reason, actual.cache_length) == (expected.finish_reason, expected.cache_length)
    assert len(actual.rounds) == len(expected.rounds)
    for ours, theirs in zip(actual.rounds, expected.rounds, strict=True):
        for name in ("prefix_length", "nodes", "depth_limit", "path", "ranks", "accepted", "moved_rows"):
            assert getattr(ours, name) == getattr(theirs, name), name
        if ours.trace is not None:
            assert_same_trace(ours.trace, theirs.trace, lp_tolerance)


def assert_same_trace(actual: Any, expected: Any, lp_tolerance: float) -> None:
    proposed = expected.lists is not None and expected.lists.ids.size > 0
    assert (actual.lists is not None) == proposed
    if proposed:
        assert_array_equal(actual.lists.ids, expected.lists.ids, strict=True)
        for name in ("lp", "logz"):
            ours, theirs = getattr(actual.lists, name), getattr(expected.lists, name)
            assert_allclose(ours, theirs, rtol=0, atol=lp_tolerance, strict=True)
    for name in ("tokens", "parents", "depths", "ranks"):
        assert_array_equal(getattr(actual.tree, name), getattr(expected.tree, name), strict=True)
    assert_allclose(actual.tree.scores, expected.tree.scores, rtol=0, atol=8 * lp_tolerance, strict=True)
    assert_array_equal(actual.choices, expected.choices, strict=True)
    assert actual.bonus == expected.bonus


def noisy(tokens: Sequence[int], seed: int = 0, **options: Any) -> NoisyOracle:
    return NoisyOracle(tokens, seed=seed, **options)


def compare(world: World, request: Request, method: Method, lp_tolerance: float = 2e-6, **options: Any) -> Generation:
    """The engine's generation, with traces, after it was compared with the reference's."""
    made = world.engine(**options).generate([request], method=method, keep_traces=True)[0]
    assert_same(made, world.reference(request, method, options.get("block_size")), lp_tolerance)
    return made
