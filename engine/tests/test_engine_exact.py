"""Proofs that logits have plain decoding's bits on a GPU: the shipped pair, the golden models, latents of 512 + 64.

All of it in float32 and in bf16.

Plain decoding is done alone, one request after the other; chain and trees in company. test_engine_bits.py asks more of
a smaller model, on the CPU too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kdtr
from datasets.evaluation import prompts
from engine.engine import Engine, Method
from engine.generation import Generation
from engine.request import DFlash, Drafter, NoisyOracle, Oracle, Request
from engine.sources import CHECKOUT
from engine.tests.backends import open_ops
from engine.tests.decoding import World, write_model
from reference.tests.models import YARN, random_weights, target_config

MODELS, GOLDEN = CHECKOUT / "datasets" / "models", CHECKOUT / "datasets" / "golden"
BLOCKS, BUDGETS = (8, 16), (1, 7, 16, 64, 256)
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
Prompt = Sequence[int]
DrafterOf = Callable[[int, Generation], Drafter]  # (number of the request, its plain decoding)


def made_world(kind: str, factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(open_ops(kind).library, factory.mktemp("models"))
    yield made
    made.close()


@pytest.fixture(scope="module", params=[ON_GPU])
def gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from made_world(request.param, tmp_path_factory)


@pytest.fixture(scope="module", params=[pytest.param("host", marks=pytest.mark.slow), ON_GPU])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from made_world(request.param, tmp_path_factory)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@dataclass
class Visits:
    """Where committed rows were computed: slots in the pass of each (request, row); depths and ranks that were met."""

    slots: dict[tuple[int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    depths: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)

    def add(self, request: int, made: Generation) -> None:
        path = [node for done in made.rounds for node in done.path]
        for row, node in enumerate(path):
            self.slots[request, row].add(node)
        self.depths.update(done.accepted for done in made.rounds)
        self.ranks.update(rank for done in made.rounds for rank in done.ranks)

    def places(self) -> float:
        """Mean number of slots of a row."""
        return float(np.mean([len(found) for found in self.slots.values()]))


def plain(engine: Engine, given: Sequence[Prompt], count: int) -> list[Generation]:
    made = [engine.generate([Request(p, count)], method="ar", keep_logits=True)[0] for p in given]
    for one in made:
        assert (len(one.tokens), len(one.logits)) == (count, 1 + count)
        assert np.isfinite(one.logits).all()
    return made


def hold(
    engine: Engine,
    given: Sequence[Prompt],
    truth: Sequence[Generation],
    method: Method,
    budget: int,
    drafter: DrafterOf,
    visits: Visits | None = None,
) -> None:
    """Decode the prompts together; tokens and logits must be those of the truth, bit for bit."""
    asked = [
        Request(p, len(one.tokens), budget, drafter=drafter(i, one))
        for i, (p, one) in enumerate(zip(given, truth, strict=True))
    ]
    made = engine.generate(asked, method=method, keep_logits=True)
    for i, (found, expected) in enumerate(zip(made, truth, strict=True)):
        where = f"request {i} of {len(given)}, {method}, budget {budget}"
        assert found.tokens == expected.tokens, where
        assert_array_equal(found.logits.view(np.uint32), expected.logits.view(np.uint32), where, strict=True)
        if visits is not None:
            visits.add(i, found)


def noise(seed: int, block_size: int, max_rank: int = 3) -> DrafterOf:
    """Noisy oracles with seeds of their own: the first is always right at rank 0, the next ones err up to max_rank."""

    def drafter(i: int, truth: Generation) -> Drafter:
        rank = i % (max_rank + 1)
        return NoisyOracle(truth.tokens, block_size, 0.05 if rank else 0.0, rank, seed=100 * seed + i)

    return drafter


# --- The shipped pair

SHIPPED = tuple(p.tokens for name in prompts.SETS for p in prompts.subset(prompts.load(name), 2))
NEW = 48


def shipped_engine(world: World, block_size: int, dtype: str) -> Engine:
    return world.engine(
        dtype=dtype,
        target=MODELS / "target.kdtr",
        drafter=MODELS / "drafter.kdtr",
        block_size=block_size,
        max_requests=len(SHIPPED),
        max_budget=256,
        capacity=max(map(len, SHIPPED)) + NEW + 256,
        prefill_rows=512,
    )


@pytest.fixture(scope="module")
def shipped(gpu: World, dtype: str) -> list[Generation]:
    engine = shipped_engine(gpu, 8, dtype)
    assert set(engine.paths.values()) == {"general" if dtype == "float32" else "tensor_cores"}
    return plain(engine, SHIPPED, NEW)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("block_size", BLOCKS)
def test_trees_of_the_shipped_drafter(gpu, shipped, dtype, block_size, budget):
    visits = Visits()
    hold(shipped_engine(gpu, block_size, dtype), SHIPPED, shipped, "ddtree", budget, lambda *_: DFlash(), visits)
    assert max(visits.depths) >= 1


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("block_size", BLOCKS)
def test_trees_of_noisy_oracles_on_the_shipped_target(gpu, shipped, dtype, block_size, budget):
    visits = Visits()
    for seed in range(2):
        hold(
            shipped_engine(gpu, block_size, dtype), SHIPPED, shipped, "ddtree", budget, noise(seed, block_size), visits
        )
    assert max(visits.depths) >= min(budget, 7)
    assert visits.ranks >= set(range(min(budget, 3)))


@pytest.mark.parametrize("block_size", BLOCKS)
def test_chains_on_the_shipped_target(gpu, shipped, dtype, block_size):
    engine = shipped_engine(gpu, block_size, dtype)
    drafters: list[DrafterOf] = [
        lambda *_: DFlash(),
        noise(0, block_size, 1),
        lambda i, truth: Oracle(truth.tokens, block_size, right=5 * i),
    ]
    for drafter in drafters:
        hold(engine, SHIPPED, shipped, "chain", 0, drafter)


def test_any_slot_of_a_row_on_the_shipped_target(gpu, shipped, dtype):
    """The true path runs through other ranks, and so other slots, with every seed."""
    visits = Visits()
    for seed in range(8):
        hold(shipped_engine(gpu, 8, dtype), SHIPPED, shipped, "ddtree", 256, noise(seed, 8, 7), visits)
    assert visits.depths == visits.ranks == set(range(8))
    assert visits.places() >= 4
    assert max(max(found) for found in visits.slots.values()) > 128


# --- The golden models

RANKS = 4  # noisy oracles are right at ranks 0..RANKS


def all_sorts(seed: int) -> DrafterOf:
    """Block sizes from 2 on, some that are always right at rank 0, others that miss."""
    return lambda i, truth: NoisyOracle(truth.tokens, 2 + i, 0.02 * i, max_rank=i % (RANKS + 1), seed=10 * seed + i)


@pytest.mark.parametrize("name", ["tiny", "tiny_mla"])
def test_golden_models_at_all_depths_and_ranks(gpu, dtype, name):
    """q_lora_rank, shared experts and groups; latents of 512 + 64 in the second."""
    engine = gpu.engine(
        target=GOLDEN / f"{name}.kdtr",
        dtype=dtype,
        drafter=None,
        block_size=8,
        max_requests=6,
        max_budget=256,
        capacity=340,
    )
    prompt = kdtr.read(GOLDEN / f"{name}_run.kdtr")["prompt"].tolist()
    truth = plain(engine, [prompt], 64) * 6
    visits = Visits()
    for budget in (1, 2, 5, 16, 33, 128, 256):
        for seed in range(2):
            hold(engine, [prompt] * 6, truth, "ddtree", budget, all_sorts(seed), visits)
    hold(engine, [prompt] * 6, truth, "chain", 0, lambda i, one: Oracle(one.tokens, 2 + i, right=60 - 7 * i), visits)
    assert visits.depths == set(range(7))
    assert visits.ranks == set(range(RANKS + 1))


# --- Latents of 512 + 64 with the heads of big models

LENGTHS = (3, 233, 17, 262)  # two of them meet the 257th key, where another chunk of keys begins, in the output


def latent_engine(
    world: World, dtype: str, heads: int, block_rows: int, lengths: Sequence[int], count: int, budget: int
) -> Engine:
    """Two layers, one dense and one of experts. block_rows: of a paged cache, 0: contiguous."""
    file = world.folder / f"heads{heads}.kdtr"
    if not file.exists():
        config = target_config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=heads,
            kv_lora_rank=512,
            qk_nope_head_dim=8,
            qk_rope_head_dim=64,
            v_head_dim=8,
            rope_scaling=YARN if heads == 64 else None,
        )
        write_model(file, config, random_weights(config, heads))
    return world.engine(
        target=file,
        dtype=dtype,
        drafter=None,
        block_size=8,
        max_requests=len(lengths),
        max_budget=budget,
        capacity=max(lengths) + count + budget,
        prefill_rows=64 * len(lengths),
        cache_block_size=block_rows,
    )


WIDE = {
    "vocab_size": 512,
    "hidden_size": 7168,
    "intermediate_size": 2048,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}


@pytest.fixture(scope="module")
def wide_file(gpu: World) -> Path:
    """Two layers, one dense and one of four experts, of the widths of the big models: 1.9 GB in float32."""
    config = target_config(**WIDE)
    return write_model(gpu.folder / "wide.kdtr", config, random_weights(config))


def wide_engine(world: World, dtype: str, file: Path, lengths: Sequence[int], count: int) -> Engine:
    return world.new_engine(
        target=file,
        dtype=dtype,
        drafter=None,
        block_size=8,
        max_requests=len(lengths),
        max_budget=64,
        capacity=max(lengths) + count + 64,
        prefill_rows=16 * len(lengths),
    )


@pytest.mark.slow
def test_the_widths_of_big_models(gpu, dtype, wide_file):
    """Products so wide are cut otherwise than small ones."""
    count, lengths = 24, (3, 40)
    given = texts(lengths, WIDE["vocab_size"])
    with wide_engine(gpu, dtype, wide_file, (40,), count) as alone:
        truth = plain(alone, given, count)
        assert set(alone.paths.values()) == {"general" if dtype == "float32" else "tensor_cores"}
    visits = Visits()
    with wide_engine(gpu, dtype, wide_file, lengths, count) as engine:
        for budget in (1, 16, 33, 64):
            hold(engine, given, truth, "ddtree", budget, noise(budget, 8), visits)
        hold(engine, given, truth, "chain", 0, noise(2, 8, 1))
    assert visits.places() >= 2


def texts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    return [[(7 * i * i + i + length) % vocab_size for i in range(length)] for length in lengths]


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("block_rows", [0, 48])
def test_latents_of_big_models(gpu, dtype, heads, block_rows):
    count = 40
    given = texts(LENGTHS, 61)
    truth = plain(latent_engine(gpu, dtype, heads, 0, LENGTHS, count, 256), given, count)
    engine = latent_engine(gpu, dtype, heads, block_rows, LENGTHS, count, 256)
    visits = Visits()
    for budget in (1, 16, 64, 256):
        for seed in range(2):
            hold(engine, given, truth, "ddtree", budget, noise(seed, 8), visits)
    hold(engine, given, truth, "chain", 0, noise(2, 8, 1))
    assert visits.depths == set(range(8))
    assert visits.ranks == set(range(4))
    assert visits.places() >= 3


@pytest.mark.parametrize("heads", [16, 128])
def test_latents_of_big_models_in_small(either, dtype, heads):
    count, lengths = 5, (2, 5)
    given = texts(lengths, 61)
    truth = plain(latent_engine(either, dtype, heads, 0, lengths, count, 7), given, count)
    visits = Visits()
    for block_rows in (0, 4):
        engine = latent_engine(either, dtype, heads, block_rows, lengths, count, 7)
        hold(engine, given, truth, "ddtree", 7, noise(block_rows, 4, 1), visits)
    assert visits.places() > 1
