"""Recorded drafter lists: what real rounds of the shipped pair saw, as fixtures of kind "drafter_lists".

One case per generation, arrays under `<set>_<n>_<greedy|sampled>/` (R rounds with the full depth L = b-1, K entries a
list, B the budget):

| array | role | meaning |
|---|---|---|
| prompt i32 [P], tokens i32 [M] | aux | prompt and output; a round's root is the token at its prefix length |
| block_size, budget i32 [], temperature f64 [], seed u64 [] | aux | how it was generated |
| prefix_length i32 [R], root_token i32 [R] | input | committed rows before the round; its root |
| lp f32 [R, L, K], ids i32 [R, L, K] | input | the drafter's lists, best first |
| choices i32 [R, 1+B] | input | the target's token after each node; -1 past the last node |
| node_count i32 [R] | expected | non-root nodes of the tree |
| path i32 [R, L+1] | expected | accepted nodes, root first; -1 past the last |
| bonus i32 [R] | expected | the target's token after the last accepted node |
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import kdtr
from datasets.evaluation import prompts
from datasets.evaluation.loops import Method
from datasets.evaluation.measure import sampling
from datasets.evaluation.pair import Pair
from datasets.evaluation.prompts import Prompt
from reference.loop import Round
from reference.numerics import Array

FOLDER = Path(__file__).resolve().parent.parent / "golden"
EXPECTED = ("node_count", "path", "bonus")
INPUT = ("prefix_length", "root_token", "lp", "ids", "choices")


@dataclass(frozen=True)
class Plan:
    """One file. K is the budget: a tree never reaches further down a list. rounds: kept from each generation."""

    block: int
    budget: int
    prompts: int
    rounds: int

    @property
    def file(self) -> str:
        return f"drafter_lists_b{self.block}_k{self.budget}.kdtr"


PLANS = (Plan(8, 128, 3, 4), Plan(8, 256, 1, 1), Plan(16, 128, 1, 5), Plan(16, 256, 1, 1))
TEMPERATURES = (0.0, 1.0)


def write(pair: Pair, folder: Path) -> int:
    """Write every planned file, over all prompt sets, greedy and at T=1."""
    folder.mkdir(parents=True, exist_ok=True)
    for plan in PLANS:
        arrays: dict[str, Array] = {}
        for name in prompts.SETS:
            for temperature in TEMPERATURES:
                long_enough = filter(None, (generation(pair, plan, p, temperature) for p in spread(prompts.load(name))))
                for number, case in enumerate(itertools.islice(long_enough, plan.prompts)):
                    label = f"{name}_{number}_{'sampled' if temperature else 'greedy'}"
                    arrays |= {f"{label}/{key}": array for key, array in case.items()}
        save(pair, plan, arrays, folder / plan.file)
        size = (folder / plan.file).stat().st_size
        print(f"{plan.file}: {sum(len(v) for k, v in arrays.items() if k.endswith('/bonus'))} rounds, {size:,} bytes")
    return 0


def save(pair: Pair, plan: Plan, arrays: dict[str, Array], path: Path) -> None:
    part = {name: name.rpartition("/")[2] for name in arrays}
    kdtr.save(
        path,
        arrays,
        kind="drafter_lists",
        roles={n: "expected" if p in EXPECTED else "input" if p in INPUT else "aux" for n, p in part.items()},
        tolerances={n: kdtr.Tolerance.bits() for n, p in part.items() if p in EXPECTED},
        meta=kdtr.provenance(
            command="python -m datasets.evaluation record",
            license="Apache-2.0",
            notes=f"lists of the shipped pair (SHA-256 {pair.digest}), block {plan.block}, budget {plan.budget}",
        ),
    )


def spread(held: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
    """The quick subset of a set, its middle first."""
    chosen = prompts.subset(held)
    return chosen[8:] + chosen[:8]


def generation(pair: Pair, plan: Plan, prompt: Prompt, temperature: float) -> dict[str, Array] | None:
    """The arrays of one case: rounds with the full depth, spread over the generation. None when it ends too early."""
    wanted = 4 * plan.rounds + 2 * plan.block
    run = Method("ddtree", plan.block, plan.budget).run(pair, prompt, temperature, wanted, keep_traces=True)
    # The last round may be cut by a stop token, so that its path is not what its choices alone would give.
    whole = [r for r in run.rounds[:-1] if r.depth_limit == plan.block - 1]
    if len(whole) < plan.rounds:
        return None
    kept = [whole[(2 * i + 1) * len(whole) // (2 * plan.rounds)] for i in range(plan.rounds)]
    columns = [of_round(r, plan) for r in kept]
    draws = sampling(prompt, temperature)
    return {
        "prompt": np.array(prompt.tokens, np.int32),
        "tokens": np.array(run.tokens, np.int32),
        "block_size": np.array(plan.block, np.int32),
        "budget": np.array(plan.budget, np.int32),
        "temperature": np.array(draws.temperature),
        "seed": np.array(draws.seed, np.uint64),
        **{name: np.stack([column[name] for column in columns]) for name in columns[0]},
    }


def of_round(r: Round, plan: Plan) -> dict[str, Array]:
    """One row of every per-round array."""
    assert r.trace is not None
    assert r.trace.lists is not None
    return {
        "prefix_length": np.array(r.prefix_length, np.int32),
        "root_token": r.trace.tree.tokens[0],
        "lp": r.trace.lists.lp,
        "ids": r.trace.lists.ids,
        "choices": filled(r.trace.choices, plan.budget + 1),
        "node_count": np.array(r.nodes, np.int32),
        "path": filled(np.array(r.path), plan.block),
        "bonus": np.array(r.trace.bonus, np.int32),
    }


def filled(values: Array, length: int) -> Array:
    """i32 [length]: the values, then -1."""
    whole = np.full(length, -1, np.int32)
    whole[: len(values)] = values
    return whole
