"""Tables and verdicts from measured rows; the same rows give the same text.

A row is one prompt, decoded one way (see measure.py). Read here: set, id, temperature, block, accepted (for each
budget, 0 being the chain, a histogram by accepted draft tokens), distinct (share of distinct 8-grams of the output).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from datasets.evaluation.rows import Row
from datasets.evaluation.statistics import Acceptance, Interval, bootstrap, split_looping

CHAIN = 0


@dataclass(frozen=True)
class Group:
    """The rows of one prompt set at one temperature and block size: per budget one histogram for each prompt."""

    set: str
    temperature: float
    block: int
    histograms: dict[int, dict[str, Sequence[int]]]
    distinct: dict[str, float]

    @property
    def label(self) -> tuple[str, str, int]:
        return self.set, "greedy" if self.temperature == 0 else f"T={self.temperature:g}", self.block

    @property
    def budgets(self) -> list[int]:
        """0 (the chain), then the tree budgets ascending."""
        return sorted(self.histograms)

    def acceptance(self, budget: int, ids: Iterable[str]) -> Acceptance:
        return Acceptance.of(self.histograms[budget][i] for i in ids)


def groups(rows: Iterable[Row]) -> list[Group]:
    """Groups in the order in which they first appear; a row measured twice counts once, the later one.

    ValueError when the methods of a group do not cover the same prompts: their intervals could not be paired.
    """
    found: dict[tuple[str, float, int], Group] = {}
    for row in rows:
        key = (row["set"], row["temperature"], row["block"])
        group = found.setdefault(key, Group(*key, {}, {}))
        for budget, histogram in row["accepted"].items():
            group.histograms.setdefault(int(budget), {})[row["id"]] = histogram
        group.distinct[row["id"]] = row["distinct"]
    for group in found.values():
        for budget, histograms in group.histograms.items():
            if missing := set(group.distinct) - set(histograms):
                raise ValueError(
                    f"{group.label} budget {budget}: {len(missing)} prompts are missing, e.g. {min(missing)}"
                )
    return list(found.values())


def name(budget: int) -> str:
    return "chain" if budget == CHAIN else str(budget)


def tau_table(found: Sequence[Group], *, looping: bool) -> str:
    """Markdown: tau of every method with its 95 % interval, of the headline or of the looping prompts; "" for none."""
    budgets = sorted({b for group in found for b in group.histograms})
    lines: list[list[str | int]] = []
    for group in found:
        ids = split_looping(group.distinct)[looping]
        if not ids:
            continue
        rounds = int(group.acceptance(CHAIN, ids).rounds.sum())
        cells = [interval(bootstrap(group.acceptance(b, ids))) for b in budgets]
        lines.append([*group.label, len(ids), rounds, *cells])
    if not lines:
        return ""
    headers = ["set", "decoding", "block", "prompts", "chain rounds", *map(name, budgets)]
    return str(tabulate(lines, headers, tablefmt="pipe"))


def prompt_table(found: Sequence[Group]) -> str:
    """Markdown: mean over the headline prompts of their own tau, and rounds of every method."""
    budgets = sorted({b for group in found for b in group.histograms})
    lines: list[list[str | int]] = []
    for group in found:
        ids = split_looping(group.distinct)[0]
        sides = [group.acceptance(b, ids) for b in budgets]
        lines.append([*group.label, *(f"{s.tau_per_prompt:.2f} / {int(s.rounds.sum()):,}" for s in sides)])
    return str(tabulate(lines, ["set", "decoding", "block", *map(name, budgets)], tablefmt="pipe"))


def step_table(found: Sequence[Group]) -> str:
    """Markdown: what each step of the budget adds to tau, with paired 95 % intervals, over the headline prompts."""
    budgets = sorted({b for group in found for b in group.histograms})
    pairs = list(itertools.pairwise(budgets))
    lines: list[list[str | int]] = []
    for group in found:
        ids = split_looping(group.distinct)[0]
        steps = [bootstrap(group.acceptance(high, ids), group.acceptance(low, ids)) for low, high in pairs]
        lines.append([*group.label, *map(interval, steps)])
    headers = ["set", "decoding", "block", *(f"{name(low)} -> {name(high)}" for low, high in pairs)]
    return str(tabulate(lines, headers, tablefmt="pipe"))


def text(found: Sequence[Group]) -> str:
    """All tables, as they stand in the model card."""
    looping = tau_table(found, looping=True)
    return "\n\n".join(
        [
            "tau [95 % interval over prompts]; prompts whose output has at least 0.8 distinct 8-grams:",
            tau_table(found, looping=False),
            "What each step of the budget adds to tau [paired 95 % interval], same prompts:",
            step_table(found),
            "Mean of the prompts' own tau / rounds, same prompts:",
            prompt_table(found),
            "tau of the looping prompts (below 0.8 distinct 8-grams):",
            looping if looping else "There are none.",
        ]
    )


def interval(value: Interval) -> str:
    return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


@dataclass(frozen=True)
class Claim:
    """One thing that must hold, what was found, and whether it does."""

    text: str
    found: str
    holds: bool


def claims(found: Sequence[Group], *, chain_floor: float = 2.5) -> list[Claim]:
    """The acceptance that the shipped pair must show, over the headline prompts.

    Chain tau >= `chain_floor` at block 8 on held-out code, greedy; in every group tau at budget 64 above tau at 7 above
    the chain's (lower end of the paired 95 % interval above 0); no step of the budget that falls beyond noise (upper
    end below 0). A group without any headline prompt holds nothing.
    """
    result = []
    for group in found:
        ids = split_looping(group.distinct)[0]
        label = " ".join(map(str, group.label[:2])) + f" block {group.block}"
        if group.label == ("heldout_code", "greedy", 8):
            tau = group.acceptance(CHAIN, ids).tau
            result.append(Claim(f"{label}: chain tau >= {chain_floor}", f"{tau:.3f}", tau >= chain_floor))
        for low, high in ((CHAIN, 7), (7, 64)):
            step = bootstrap(group.acceptance(high, ids), group.acceptance(low, ids))
            result.append(Claim(f"{label}: tau {name(high)} above {name(low)}", interval(step), step.low > 0))
        falling = []
        for low, high in zip(group.budgets, group.budgets[1:], strict=False):
            step = bootstrap(group.acceptance(high, ids), group.acceptance(low, ids))
            if not step.high >= 0:
                falling.append(f"{name(low)} -> {name(high)}: {interval(step)}")
        result.append(Claim(f"{label}: no step falls", "; ".join(falling) or "none", not falling))
    return result
