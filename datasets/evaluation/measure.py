"""Acceptance of one prompt under every method, from one plain decode and one drafter pass per position.

A row (JSON object) is one prompt, decoded one way: case (what it was measured from), pair (the models' digest), set,
id, temperature, seed, block, new (tokens asked for), tokens (tokens given), stopped, accepted ({budget: histogram by
accepted draft tokens}, budget 0 being the chain), distinct (share of distinct 8-grams), least_margin and tight
(smallest distance of a choice from another one, and how many lie below TIGHT; see reference.sampling.choice_margins),
output (SHA-256 of the tokens).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from datasets.evaluation.batched import BatchDrafter, Decoded, decode
from datasets.evaluation.pair import Pair
from datasets.evaluation.prompts import Prompt
from datasets.evaluation.report import CHAIN
from datasets.evaluation.rows import Row
from datasets.evaluation.statistics import distinct_ratio
from reference.accept import accept
from reference.numerics import Array
from reference.sampling import SamplingParams
from reference.topk import TopK, topk_logprob
from reference.tree import build_tree

TIGHT = 1e-5
"""A choice nearer than this to another one may turn by rounding alone in float32."""


@dataclass(frozen=True)
class Settings:
    """What is measured. budgets: non-root nodes per tree.

    So small a target falls into loops when it goes on greedily for long: at 64 tokens enough outputs of every set are
    still free of them.
    """

    temperatures: tuple[float, ...] = (0.0, 1.0)
    blocks: tuple[int, ...] = (8, 16)
    budgets: tuple[int, ...] = (7, 16, 32, 64, 128)
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        if min(self.blocks) < 2 or min(self.budgets) < 1 or self.max_new_tokens < 1:
            raise ValueError(f"blocks from 2, budgets and new tokens from 1: {self}")


def sampling(prompt: Prompt, temperature: float) -> SamplingParams:
    """Every prompt draws its own numbers: the seed comes from its id."""
    digest = hashlib.sha256(f"{prompt.set}/{prompt.id}".encode()).digest()
    return SamplingParams(temperature=temperature, seed=int.from_bytes(digest[:8], "little"))


def case(pair: Pair, prompt: Prompt, temperature: float, settings: Settings) -> str:
    """Identity of a measurement: equal cases give equal rows."""
    parts: list[object] = [
        pair.digest,
        prompt.set,
        prompt.id,
        list(prompt.tokens),
        asdict(sampling(prompt, temperature)),
    ]
    parts += [settings.budgets, settings.blocks, settings.max_new_tokens]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def measure(pair: Pair, prompts: Sequence[Prompt], settings: Settings) -> Iterator[Row]:
    """Rows of some prompts (decoded together) at every temperature and block size."""
    jobs = [(prompt, temperature) for prompt in prompts for temperature in settings.temperatures]
    decoded = decode(
        pair.target,
        [prompt.tokens for prompt, _ in jobs],
        [sampling(prompt, temperature) for prompt, temperature in jobs],
        taps=pair.drafter_config.target_layer_ids,
        stop_tokens=pair.stop_tokens,
        max_new_tokens=settings.max_new_tokens,
    )
    drafter = pair.batch_drafter()
    for (prompt, temperature), text in zip(jobs, decoded, strict=True):
        for block in settings.blocks:
            found = accepted_at(drafter, text, block, settings)
            yield {
                "case": case(pair, prompt, temperature, settings),
                "pair": pair.digest[:16],
                "set": prompt.set,
                "id": prompt.id,
                "temperature": temperature,
                "seed": sampling(prompt, temperature).seed,
                "block": block,
                "new": settings.max_new_tokens,
                "tokens": len(text.tokens),
                "stopped": text.stopped,
                "accepted": {str(b): histogram(rounds(text, by_root)) for b, by_root in found.items()},
                "distinct": distinct_ratio(text.tokens),
                "least_margin": float(text.margins.min()),
                "tight": int((text.margins < TIGHT).sum()),
                "output": hashlib.sha256(np.array(text.tokens, "<i4").tobytes()).hexdigest()[:16],
            }


def accepted_at(drafter: BatchDrafter, text: Decoded, block: int, settings: Settings) -> dict[int, NDArray[np.int64]]:
    """{budget: i64 [M]}: how many draft tokens a round accepts whose root is output token p, for every p.

    A tree of a smaller budget is the beginning of a tree of a larger one, so one tree serves all budgets. As in
    reference.loop, no more depth is drafted than tokens are still wanted.
    """
    found = {budget: np.zeros(len(text.tokens), np.int64) for budget in (CHAIN, *settings.budgets)}
    for p, logits in enumerate(
        drafter.proposals(text.features, text.tokens[: len(text.tokens)], len(text.prompt), block)
    ):
        depth_limit = min(block - 1, settings.max_new_tokens - p - 1)
        lists = topk_logprob(logits[:depth_limit], max(settings.budgets))
        rest = np.full(depth_limit + 1, len(logits[0]), np.int32)  # past the end: an id that no node has
        rest[: len(text.tokens) - p - 1] = text.tokens[p + 1 : p + 1 + len(rest)]
        path = tree_path(lists, rest, max(settings.budgets))
        found[CHAIN][p] = int(np.cumprod(lists.ids[:, 0] == rest[:-1]).sum())
        for budget in settings.budgets:
            found[budget][p] = int((path <= budget).sum()) - 1
    return found


def tree_path(lists: TopK, rest: NDArray[np.int32], budget: int) -> NDArray[np.int32]:
    """Nodes that a round accepts when the target's output goes on with `rest` [L+1]; the root first."""
    tree = build_tree(lists.lp, lists.ids, budget)
    return accept(tree.tokens, tree.parents, rest[tree.depths]).nodes


def rounds(text: Decoded, accepted: Array) -> list[int]:
    """Draft tokens accepted in each round of a loop over this output. A stop token as bonus token needs no round."""
    end, start, taken = len(text.tokens) - text.stopped, 0, []
    while start < end:
        taken.append(int(accepted[start]))
        start += taken[-1] + 1
    return taken


def histogram(taken: Sequence[int]) -> list[int]:
    """Entry a: rounds that accepted a draft tokens."""
    return [int(n) for n in np.bincount(np.array(taken, np.int64))]
