"""The real loops of `reference.loop` on a prompt, held against the plain decode and the counts of `measure`.

A row (JSON object) is one loop: case, set, id, temperature, block, method ("ar", "chain", "ddtree"), budget, new,
tokens, rounds, same_tokens, same_counts (accepted draft tokens of every round), first_difference (index of the first
other token) with its margin, or null; seconds.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from datasets.evaluation.batched import BatchDrafter, Decoded, decode
from datasets.evaluation.measure import TIGHT, Settings, accepted_at, case, rounds, sampling
from datasets.evaluation.pair import Pair
from datasets.evaluation.prompts import Prompt
from datasets.evaluation.report import CHAIN
from datasets.evaluation.rows import Row
from reference.loop import Generation, Options, ar_generate, chain_generate, ddtree_generate


@dataclass(frozen=True)
class Method:
    """One loop: "ar" (block 0, budget 0), "chain" (budget 0) or "ddtree"."""

    name: str
    block: int
    budget: int

    def run(
        self, pair: Pair, prompt: Prompt, temperature: float, max_new_tokens: int, keep_traces: bool = False
    ) -> Generation:
        drafter = pair.drafter(self.block) if self.block else None
        options: Options = {
            "max_new_tokens": max_new_tokens,
            "sampling": sampling(prompt, temperature),
            "stop_tokens": pair.stop_tokens,
            "budget": self.budget,
            "keep_traces": keep_traces,
        }
        if drafter is None:
            return ar_generate(pair.target, None, prompt.tokens, **options)
        if self.budget == CHAIN:
            return chain_generate(pair.target, drafter, prompt.tokens, **options)
        return ddtree_generate(pair.target, drafter, prompt.tokens, **options)


def methods(settings: Settings) -> list[Method]:
    """Plain decoding, then chain and trees at every block size."""
    found = [Method("ar", 0, 0)]
    for block in settings.blocks:
        found.append(Method("chain", block, CHAIN))
        found += [Method("ddtree", block, budget) for budget in settings.budgets]
    return found


def compare(pair: Pair, drafter: BatchDrafter, prompt: Prompt, temperature: float, settings: Settings) -> Iterator[Row]:
    """One row a method."""
    text = decode(
        pair.target,
        [prompt.tokens],
        [sampling(prompt, temperature)],
        taps=pair.drafter_config.target_layer_ids,
        stop_tokens=pair.stop_tokens,
        max_new_tokens=settings.max_new_tokens,
    )[0]
    counts = {block: accepted_at(drafter, text, block, settings) for block in settings.blocks}
    for method in methods(settings):
        started = time.perf_counter()
        run = method.run(pair, prompt, temperature, settings.max_new_tokens)
        seconds = time.perf_counter() - started
        expected = [0] * len(rounds(text, np.zeros(len(text.tokens), np.int64)))
        if method.block:
            expected = rounds(text, counts[method.block][method.budget])
        at = first_difference(text, run)
        yield {
            "case": case(pair, prompt, temperature, settings),
            "set": prompt.set,
            "id": prompt.id,
            "temperature": temperature,
            "block": method.block,
            "method": method.name,
            "budget": method.budget,
            "new": settings.max_new_tokens,
            "tokens": len(run.tokens),
            "rounds": len(run.rounds),
            "output": hashlib.sha256(repr(run.tokens).encode()).hexdigest()[:16],
            "same_tokens": at is None,
            "same_counts": [r.accepted for r in run.rounds] == expected,
            "first_difference": at,
            "margin": None if at is None else float(text.margins[min(at, len(text.margins) - 1)]),
            "seconds": round(seconds, 4),
        }


def first_difference(text: Decoded, run: Generation) -> int | None:
    """Index of the first output token in which a loop leaves the plain decode, None if it does not."""
    for at, (one, other) in enumerate(zip(text.tokens, run.tokens, strict=False)):
        if one != other:
            return at
    return None if len(text.tokens) == len(run.tokens) else min(len(text.tokens), len(run.tokens))


@dataclass(frozen=True)
class Verdict:
    """loops: runs compared. other_tokens, other_counts: those that differ; excused: of the former, those that differ
    first at a choice nearer than TIGHT to another one."""

    loops: int
    other_tokens: int
    other_counts: int
    excused: int

    @property
    def holds(self) -> bool:
        return self.loops > 0 and self.other_tokens == self.excused and self.other_counts <= self.excused

    def __str__(self) -> str:
        return (
            f"{self.loops} loops: {self.other_tokens} with other tokens than plain decoding "
            f"({self.excused} of them at a margin below {TIGHT:g}), {self.other_counts} with other accepted counts"
        )


def verdict(found: list[Row]) -> Verdict:
    other = [row for row in found if not row["same_tokens"]]
    return Verdict(
        len(found),
        len(other),
        sum(not row["same_counts"] for row in found),
        sum(row["margin"] < TIGHT for row in other),
    )
