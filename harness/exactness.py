"""The exactness suite: the target's logits of every committed row have plain decoding's bits, whatever the method.

Prompts are decoded in groups. Plain decoding of a group is the truth; then the chain and each tree decode it too, its
requests in another order, and tokens and logits are compared. The first pass over the prompts is greedy, the following
ones draw at temperature 1 with seeds of their own, so that a long run sees text after text.

Row i of an output has read the prompt and i tokens, and the token at i follows from it. Behind a token that differs
there is another text, so nothing is compared there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, zip_longest
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from datasets.evaluation import prompts
from datasets.evaluation.prompts import Prompt
from engine.abi import EngineError, RequestError
from engine.engine import Engine, Method
from engine.generation import Generation
from engine.request import DFlash, NoisyOracle, Request
from harness.cases import AR, Arm
from harness.records import Difference, Scalar
from reference.sampling import SamplingParams, choice_margins

LOGITS_BYTES = 2**30  # of a group: the truth's, and those of one method twice, in the library and outside
MISS, MAX_RANK = 0.05, 3  # of the noisy oracle


@dataclass(frozen=True)
class Plan:
    """What is decoded. tokens: wanted of each method. new_tokens: of a prompt. batch: requests decoded together.

    noisy: proposals of the noisy oracle instead of the drafter's. seconds: no group is begun that would end later.
    """

    arms: tuple[Arm, ...]
    prompts: tuple[Prompt, ...]
    tokens: int
    new_tokens: int
    batch: int
    seed: int = 0
    noisy: bool = False
    seconds: float | None = None


@dataclass(frozen=True)
class Unit:
    """One decoding: a prompt with its draws."""

    name: str
    tokens: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True)
class Found:
    """Two decodings of a unit compared. tokens, rows: how many were; largest: difference of two logits, inf for NaN."""

    tokens: int
    tokens_differ: int
    rows: int
    rows_differ: int
    largest: float
    first: Difference | None


@dataclass
class Tally:
    """All units of one arm. differ: units with a difference. seconds: of the whole runs. failure: what ended them."""

    units: int = 0
    differ: int = 0
    tokens: int = 0
    tokens_differ: int = 0
    rows: int = 0
    rows_differ: int = 0
    largest: float = 0.0
    seconds: float = 0.0
    made: int = 0
    rounds: int = 0
    first: Difference | None = None
    failure: str | None = None

    def ran(self, made: Sequence[Generation], seconds: float) -> None:
        self.units += len(made)
        self.made += sum(len(one.tokens) for one in made)
        self.rounds += sum(len(one.rounds) for one in made)
        self.seconds += seconds

    def add(self, found: Found) -> None:
        self.differ += found.first is not None
        self.tokens += found.tokens
        self.tokens_differ += found.tokens_differ
        self.rows += found.rows
        self.rows_differ += found.rows_differ
        self.largest = max(self.largest, found.largest)
        self.first = self.first or found.first


def units(plan: Plan) -> Iterator[Unit]:
    """Without end: pass after pass over the prompts."""
    for number in count():
        for place, prompt in enumerate(plan.prompts):
            seed = (plan.seed + number * len(plan.prompts) + place) % 2**64
            draws = SamplingParams(temperature=1.0 if number else 0.0, seed=seed)
            yield Unit(f"{prompt.id} pass {number}", prompt.tokens, draws)


def mixed(folder: Path = prompts.FOLDER) -> tuple[Prompt, ...]:
    """The shipped prompts, those of the sets in turns."""
    turns = zip_longest(*(prompts.load(name, folder) for name in prompts.SETS))
    return tuple(prompt for turn in turns for prompt in turn if prompt is not None)


def most_requests(new_tokens: int, vocab_size: int) -> int:
    """Requests that can be decoded together, by the memory for their logits."""
    return max(1, LOGITS_BYTES // ((new_tokens + 1) * 3 * 4 * vocab_size))


def measure(engine: Engine, plan: Plan, progress: Callable[[int], None] = lambda _: None) -> dict[str, Tally]:
    """The tallies by the names of the arms, plain decoding first. progress(tokens that are done): called for a group
    before it begins."""
    tallies = {arm.name: Tally() for arm in (AR, *plan.arms)}
    source = units(plan)
    started, longest, number = time.perf_counter(), 0.0, 0
    while (left := plan.tokens - tallies["ar"].made) > 0 and not all(tallies[arm.name].failure for arm in plan.arms):
        begun = time.perf_counter()
        if number and plan.seconds is not None and begun - started + longest > plan.seconds:
            break
        group = [next(source) for _ in range(min(plan.batch, -(-left // plan.new_tokens)))]
        progress(tallies["ar"].made)
        _group(engine, plan, group, number, tallies)
        longest, number = max(longest, time.perf_counter() - begun), number + 1
    return tallies


def _group(engine: Engine, plan: Plan, group: Sequence[Unit], number: int, tallies: dict[str, Tally]) -> None:
    try:
        truth = _decode(engine, plan, AR, group, None, tallies["ar"])
    except (EngineError, RequestError) as error:
        tallies["ar"].failure = _sentence(error)
        for arm in plan.arms:
            tallies[arm.name].failure = f"plain decoding failed: {_sentence(error)}"
        return
    for place, arm in enumerate(plan.arms):
        tally = tallies[arm.name]
        if tally.failure is not None:
            continue
        order = np.random.default_rng([plan.seed, number, place]).permutation(len(group)).tolist()
        mine, theirs = [group[i] for i in order], [truth[i] for i in order]
        try:
            made = _decode(engine, plan, arm, mine, theirs, tally)
        except (EngineError, RequestError) as error:
            tally.failure = _sentence(error)
            continue
        for unit, expected, actual in zip(mine, theirs, made, strict=True):
            tally.add(compare(unit, expected, actual))


def _decode(
    engine: Engine, plan: Plan, arm: Arm, group: Sequence[Unit], truth: Sequence[Generation] | None, tally: Tally
) -> list[Generation]:
    asked = [request(engine, plan, arm, unit, truth[i] if truth is not None else None) for i, unit in enumerate(group)]
    started = time.perf_counter()
    made = engine.generate(asked, method=cast(Method, arm.method), keep_logits=True)
    tally.ran(made, time.perf_counter() - started)
    for unit, one in zip(group, made, strict=True):
        if len(one.tokens) != plan.new_tokens or len(one.logits) != 1 + len(one.tokens):
            raise EngineError(
                f"{unit.name}: {len(one.tokens)} tokens and logits of {len(one.logits)} rows, expected "
                f"{plan.new_tokens} and {plan.new_tokens + 1}"
            )
    return made


def request(engine: Engine, plan: Plan, arm: Arm, unit: Unit, truth: Generation | None = None) -> Request:
    """truth: of plain decoding, where the noisy oracle needs it."""
    return Request(
        unit.tokens,
        plan.new_tokens,
        arm.budget,
        temperature=unit.sampling.temperature,
        seed=unit.sampling.seed,
        drafter=NoisyOracle(truth.tokens, engine.block_size, MISS, MAX_RANK, unit.sampling.seed)
        if truth is not None and plan.noisy
        else DFlash(),
    )


def compare(unit: Unit, truth: Generation, found: Generation) -> Found:
    """Outputs of equal length, with logits [1 + length, V]."""
    length = len(truth.tokens)
    pairs = zip(truth.tokens, found.tokens, strict=True)
    parting = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    rows = 1 + (length if parting is None else parting)
    tokens = length if parting is None else parting + 1
    first = None
    if parting is not None:
        first = _difference(unit, truth, found, "tokens", parting, truth.tokens[parting], found.tokens[parting])
    ours, theirs = found.logits[:rows], truth.logits[:rows]
    if np.array_equal(_bits(ours), _bits(theirs)):
        return Found(tokens, int(parting is not None), rows, 0, 0.0, first)
    unequal = _bits(ours) != _bits(theirs)
    bad = np.flatnonzero(unequal.any(axis=1))
    with np.errstate(invalid="ignore"):
        sizes = np.abs(ours[unequal].astype(np.float64) - theirs[unequal])
    largest = float(np.where(np.isnan(sizes), np.inf, sizes).max())
    row = int(bad[0])
    entry = int(unequal[row].argmax())
    first = _difference(unit, truth, found, "logits", row, float(theirs[row, entry]), float(ours[row, entry]))
    return Found(tokens, int(parting is not None), rows, len(bad), largest, first)


def _difference(
    unit: Unit, truth: Generation, found: Generation, what: str, row: int, expected: Scalar, actual: Scalar
) -> Difference:
    """At a row of the output. Its margin is that of plain decoding's choice, its round the one that committed it."""
    rounds = np.repeat(np.arange(len(found.rounds)), [r.accepted + 1 for r in found.rounds])
    position = np.array([len(unit.tokens) - 1 + row])
    margin = float(choice_margins(truth.logits[row : row + 1], unit.sampling, position)[0])
    of_round = int(rounds[row - 1]) if 0 < row <= len(rounds) else None
    return Difference(what, unit.name, of_round, row, expected, actual, unit.sampling.seed, margin)


def _bits(logits: NDArray[np.float32]) -> NDArray[np.uint32]:
    return logits.view(np.uint32)


def _sentence(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
