"""The exactness suite: the target's logits of every committed row have plain decoding's bits, whatever the method.

Prompts are decoded in groups. Plain decoding of a group is the truth; then the chain and each tree decode it too, its
requests in another order, and tokens and logits are compared. The first pass over the prompts is greedy, the following
ones draw at temperature 1 with seeds of their own, so that a long run sees text after text.

Row i of an output has read the prompt and i tokens, and the token at i follows from it. Behind a token that differs
there is another text, so nothing is compared there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, zip_longest
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from datasets.evaluation import prompts
from datasets.evaluation.prompts import Prompt
from engine import build
from engine.abi import EngineError, Library, RequestError
from engine.decode_abi import DTYPES
from engine.engine import Engine, Method
from engine.generation import Generation
from engine.request import DFlash, NoisyOracle, Request
from engine.toolkit import BuildError
from harness import records
from harness.cases import AR, CHAIN, Arm
from harness.compare import Exit
from harness.console import say
from harness.environment import CHECKOUT, capture, gpu_missing
from harness.records import Difference, Environment, Parity, Row, Scalar
from harness.run import ROWS, Progress
from reference.sampling import SamplingParams, choice_margins

LOGITS_BYTES = 2**30  # of a group: the truth's, and those of one method twice, in the library and outside
PREFILL_ROWS = 32  # of a request in one pass
BATCH = {"cuda": 64, "host": 2}
NEW_TOKENS = {"cuda": 128, "host": 8}
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


def group_size(plan: Plan, vocab_size: int) -> int:
    """Requests of a group: as many as the plan asks for and the memory for logits allows."""
    row = 3 * 4 * vocab_size
    return max(1, min(plan.batch, LOGITS_BYTES // ((plan.new_tokens + 1) * row)))


def measure(engine: Engine, plan: Plan, progress: Callable[[int, str], None] = lambda *_: None) -> dict[str, Tally]:
    """The tallies by the names of the arms, plain decoding first. progress(tokens, first unit): called for a group."""
    tallies = {arm.name: Tally() for arm in (AR, *plan.arms)}
    size, source = group_size(plan, engine.vocab_size), units(plan)
    started, longest, number = time.perf_counter(), 0.0, 0
    while (left := plan.tokens - tallies["ar"].made) > 0 and not all(tallies[arm.name].failure for arm in plan.arms):
        begun = time.perf_counter()
        if number and plan.seconds is not None and begun - started + longest > plan.seconds:
            break
        group = [next(source) for _ in range(min(size, -(-left // plan.new_tokens)))]
        progress(len(group) * plan.new_tokens, group[0].name)
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
    asked = [
        Request(
            unit.tokens,
            plan.new_tokens,
            arm.budget,
            temperature=unit.sampling.temperature,
            seed=unit.sampling.seed,
            drafter=DFlash()
            if truth is None or not plan.noisy
            else NoisyOracle(truth[i].tokens, engine.block_size, MISS, MAX_RANK, unit.sampling.seed),
        )
        for i, unit in enumerate(group)
    ]
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


# --- The command


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the suite to a command line."""
    parser.add_argument("--models", type=Path, default=CHECKOUT / "datasets" / "models", help="folder of the pair")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="wanted of each method (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=("chain", "ddtree"), default=["chain", "ddtree"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[16, 64], help="of the trees (default: 16 64)")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the engine (default: %(default)s)")
    parser.add_argument("--gemm", choices=("row-invariant", "cublas"), default="row-invariant")
    parser.add_argument("--drafter", choices=("dflash", "noisy"), default="dflash", help="noisy: right at random ranks")
    parser.add_argument("--block-size", type=int, default=0, help="of the drafter (default: its own)")
    parser.add_argument("--new-tokens", type=int, help="of a prompt (default: 128; 8 on the host)")
    parser.add_argument("--batch", type=int, help="requests decoded together at most (default: 64; 2 on the host)")
    parser.add_argument("--cache-block-size", type=int, default=0, help="rows of a cache block (default: contiguous)")
    parser.add_argument("--seconds", type=float, default=540.0, help="time for all groups (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="shifts all draws (default: %(default)s)")
    parser.add_argument(
        "--kind", choices=("auto", "cuda", "host"), default="auto", help="auto: the GPU if there is one"
    )
    out = CHECKOUT / "reports" / "exactness" / ROWS
    parser.add_argument("--out", type=Path, default=out, help=f"gets the rows (default: reports/exactness/{ROWS})")


def command(given: argparse.Namespace, open_engine: Callable[..., Engine] = Engine.load) -> Exit:
    """Run the suite, print its table, append its rows. REGRESSION: something failed, or differs where nothing may."""
    kind = given.kind if given.kind != "auto" else "host" if gpu_missing() else "cuda"
    arms = [CHAIN] if "chain" in given.methods else []
    arms += [Arm("ddtree", budget) for budget in given.budgets] if "ddtree" in given.methods else []
    plan = Plan(
        arms=tuple(arms),
        prompts=mixed(),
        tokens=given.tokens,
        new_tokens=given.new_tokens or NEW_TOKENS[kind],
        batch=given.batch or BATCH[kind],
        seed=given.seed,
        noisy=given.drafter == "noisy",
        seconds=given.seconds,
    )
    if min(plan.tokens, plan.new_tokens, plan.batch) < 1 or plan.seed < 0:
        say("exactness: --tokens, --new-tokens and --batch must be at least 1, --seed at least 0", error=True)
        return Exit.USAGE
    files = [given.models / f"{name}.kdtr" for name in ("target", *(() if plan.noisy else ("drafter",)))]
    digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
    try:
        library = build.library(kind)
        plan, engine = _opened(given, plan, Library(library), files, open_engine)
    except (BuildError, EngineError) as error:
        say(f"exactness: {error}", error=True)
        return Exit.NOTHING
    environment = capture(libraries={"engine": library})
    with engine:
        progress = Progress(plan.tokens, -(-plan.tokens // (plan.batch * plan.new_tokens)))
        tallies = measure(engine, plan, lambda tokens, name: progress.start(name, tokens))
        progress.end()
    exact = given.gemm == "row-invariant"
    params: dict[str, Scalar] = {
        "dtype": given.dtype,
        "gemm": given.gemm,
        "drafter": given.drafter,
        "products": engine.paths["products"],
        "attention": engine.paths["attention"],
        "block_size": engine.block_size,
        "new_tokens": plan.new_tokens,
        "batch": plan.batch,
        "cache_block_size": given.cache_block_size,
        "library": kind,
    }
    rows = [_row(plan, arm, tallies[arm.name], exact, params, digest, environment) for arm in (AR, *plan.arms)]
    with records.RowFile(given.out) as file:
        for row in rows:
            file.append(row)
    say(table(plan, tallies, given.gemm))
    if any(row.status == "INVALID" for row in rows):
        return Exit.REGRESSION
    return Exit.FINE


def _opened(
    given: argparse.Namespace, plan: Plan, library: Library, files: Sequence[Path], open_engine: Callable[..., Engine]
) -> tuple[Plan, Engine]:
    """The engine, made for the longest prompt, and the plan with groups that fit the memory."""
    budget = max((arm.budget for arm in plan.arms), default=0)

    def opened(batch: int) -> Engine:
        return open_engine(
            *files,
            library=library,
            max_requests=batch,
            capacity=max(len(prompt.tokens) for prompt in plan.prompts) + plan.new_tokens + max(budget, 1),
            max_budget=budget,
            block_size=given.block_size,
            prefill_rows=PREFILL_ROWS * batch,
            cache_block_size=given.cache_block_size,
            dtype=given.dtype,
            gemm=given.gemm.replace("-", "_"),
        )

    engine = opened(plan.batch)
    if (size := group_size(plan, engine.vocab_size)) < plan.batch:
        engine.close()
        engine = opened(size)
    return replace(plan, batch=size), engine


def _row(
    plan: Plan, arm: Arm, tally: Tally, exact: bool, params: dict[str, Scalar], digest: str, environment: Environment
) -> Row:
    reason = tally.failure or ("nothing was compared" if arm != AR and not tally.rows else None)
    parity = None
    if arm != AR and exact:
        parity = Parity(AR.name, tally.rows, tally.differ, first_difference=tally.first)
        if reason is None and not parity.passed:
            reason = f"{tally.rows_differ} of {tally.rows} rows of logits and {tally.tokens_differ} tokens differ"
    metrics: dict[str, float | int | None] = {"prompts": tally.units, "tokens": tally.made, "rounds": tally.rounds}
    if arm != AR:
        metrics |= {
            "tokens_compared": tally.tokens,
            "tokens_differ": tally.tokens_differ,
            "rows_compared": tally.rows,
            "rows_differ": tally.rows_differ,
            "largest_difference": tally.largest,
        }
    metrics["seconds"] = tally.seconds
    given = [params, plan.tokens, plan.seed, [prompt.tokens for prompt in plan.prompts], digest]
    return Row(
        suite="exactness",
        block="bench",
        case=f"exactness/{params['drafter']}/block{params['block_size']}/{params['dtype']}/{params['gemm']}",
        case_hash=hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest(),
        arm=arm.name,
        against=None if arm == AR else AR.name,
        params={**params, "budget": arm.budget},
        seed=plan.seed,
        status="OK" if reason is None else "INVALID",
        reason=reason,
        parity=parity,
        metrics=metrics,
        environment=environment,
    )


def table(plan: Plan, tallies: dict[str, Tally], gemm: str) -> str:
    """The tallies as plain text, below it the first difference of each arm and what else must be known."""
    lines: list[tuple[str, ...]] = [
        ("method", "budget", "gemm", "prompts", "tokens", "tokens differ", "rows", "rows differ", "largest", "tokens/s")
    ]
    notes = []
    for arm in (AR, *plan.arms):
        tally = tallies[arm.name]
        speed = f"{tally.made / tally.seconds:.1f}" if tally.seconds else "-"
        found: tuple[Any, ...] = (tally.made, "-", "-", "-", "-")
        if arm != AR:
            found = (tally.tokens, tally.tokens_differ, tally.rows, tally.rows_differ, f"{tally.largest:.3g}")
        head = (arm.method, arm.budget if arm.method == "ddtree" else "-", gemm, tally.units)
        lines.append(tuple(map(str, (*head, *found, speed))))
        if tally.failure is not None:
            notes.append(f"{arm.name} failed: {tally.failure}")
        if (first := tally.first) is not None:
            place = "before the first round" if first.round is None else f"round {first.round}"
            notes.append(
                f"{arm.name}, first difference: {first.what} of {first.unit}, row {first.index}, {place}: "
                f"expected {first.expected!r}, got {first.actual!r}; margin of the choice {first.margin:.3g}, seed "
                f"{first.seed}"
            )
    if tallies[AR.name].made < plan.tokens:
        notes.append(f"{plan.tokens} tokens were wanted; the run ended before")
    notes.append("tokens/s: of whole runs, prompts and the copying of logits included")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    drawn = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*drawn, *notes])
