"""The command of the exactness suite: models by their heads, number types and products, all in one run.

The pair of a folder is decoded with its own drafter. For the other numbers of heads there are small models of random
weights with the latents of the big ones, 512 + 64, and the noisy oracle: what their bits go through is the same. With
cuBLAS's products a row's bits depend on its neighbours; how often that shows, and what the own products cost, is told
beside it and demanded of nobody.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kdtr
from engine.abi import EngineError, Library
from engine.checkpoint import Random
from engine.decode_abi import DTYPES
from engine.engine import Engine
from engine.toolkit import BuildError
from harness import exactness_cost, records
from harness.cases import AR, CHAIN, Arm
from harness.compare import Exit
from harness.console import say
from harness.engine_library import library_path
from harness.environment import CHECKOUT, capture, gpu_missing
from harness.exactness import Plan, Tally, measure, mixed, most_requests
from harness.records import Environment, Parity, Row, Scalar
from harness.run import ROWS, Progress

HEADS = (16, 64, 128)
GEMMS = ("row-invariant", "cublas")
PREFILL_ROWS = 32  # of a request in one pass
BATCH = {"cuda": 64, "host": 2}
NEW_TOKENS = {"cuda": 128, "host": 8}
CONTRAST_TOKENS = 16_384  # of each method with cuBLAS at most
COST_SHARE = 0.1  # of the time, for what exactness costs
LEAST_TURNS = 3  # that this takes: a warm-up and a sample of whole batches, and of single requests


@dataclass(frozen=True)
class Model:
    """files: target and drafter, or the target alone; or a target of random weights. digest: of all that it is."""

    name: str
    heads: int
    vocab_size: int
    files: tuple[Path | Random, ...]
    digest: str


@dataclass(frozen=True)
class Group:
    """One engine's share of the suite. tokens: wanted of each method."""

    model: Model
    dtype: str
    gemm: str
    tokens: int

    @property
    def exact(self) -> bool:
        """Whether a difference is a fault."""
        return self.gemm == GEMMS[0]

    @property
    def title(self) -> str:
        return f"{self.model.name} heads {self.model.heads} {self.dtype} {self.gemm}"


@dataclass(frozen=True)
class Result:
    """params: of the rows of a group."""

    group: Group
    plan: Plan
    tallies: dict[str, Tally]
    params: dict[str, Scalar]

    @property
    def short(self) -> bool:
        """Whether less was compared than the group demands, for want of time."""
        counts = [self.tallies[arm.name].tokens for arm in self.plan.arms]
        return self.group.exact and min(counts, default=0) < self.group.tokens

    @property
    def turn_s(self) -> float:
        """Seconds of one batch decoded by every method."""
        pace = sum(tally.seconds / tally.made for tally in self.tallies.values() if tally.made)
        return pace * self.plan.batch * self.plan.new_tokens


def random_target(heads: int) -> dict[str, Any]:
    """The config of a small target: a dense layer and one of experts, sizes that tensor cores take."""
    return {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the suite to a command line."""
    parser.add_argument("--models", type=Path, default=CHECKOUT / "datasets" / "models", help="folder of the pair")
    parser.add_argument("--heads", nargs="+", type=int, default=list(HEADS), help="of the models (default: 16 64 128)")
    parser.add_argument("--tokens", type=int, default=100_000, help="of each method and group (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=("chain", "ddtree"), default=["chain", "ddtree"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[16, 64], help="of the trees (default: 16 64)")
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="of the engines (default: all)"
    )
    parser.add_argument("--gemm", nargs="+", choices=GEMMS, help="default: all; on the host row-invariant")
    parser.add_argument("--drafter", choices=("dflash", "noisy"), default="dflash", help="noisy: right at random ranks")
    parser.add_argument("--block-size", type=int, default=0, help="of the drafter (default: its own)")
    parser.add_argument("--new-tokens", type=int, help="of a prompt (default: 128; 8 on the host)")
    parser.add_argument("--batch", type=int, help="requests decoded together at most (default: 64; 2 on the host)")
    parser.add_argument("--cache-block-size", type=int, default=0, help="rows of a cache block (default: contiguous)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=440.0,
        help="time for all after the build; each group decodes one batch, whatever it takes (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="shifts all draws (default: %(default)s)")
    parser.add_argument(
        "--kind", choices=("auto", "cuda", "host"), default="auto", help="auto: the GPU if there is one"
    )
    out = CHECKOUT / "reports" / "exactness" / ROWS
    parser.add_argument("--out", type=Path, default=out, help=f"gets the rows (default: reports/exactness/{ROWS})")


@dataclass(frozen=True)
class Session:
    """What the groups of one command share. open_engine: as Engine.load."""

    given: argparse.Namespace
    kind: str
    library: Library
    open_engine: Callable[..., Engine]
    arms: tuple[Arm, ...]
    new_tokens: int
    batch: int

    def plan(self, model: Model, tokens: int, seconds: float) -> Plan:
        return Plan(
            arms=self.arms,
            prompts=tuple(replace(p, tokens=tuple(t % model.vocab_size for t in p.tokens)) for p in mixed()),
            tokens=tokens,
            new_tokens=self.new_tokens,
            batch=min(self.batch, most_requests(self.new_tokens, model.vocab_size)),
            seed=self.given.seed,
            noisy=self.given.drafter == "noisy" or len(model.files) == 1,
            seconds=seconds,
        )

    def engine(self, model: Model, dtype: str, gemm: str, plan: Plan) -> Engine:
        """Made for the longest prompt. Raises EngineError."""
        budget = max((arm.budget for arm in plan.arms), default=0)
        return self.open_engine(
            *model.files,
            library=self.library,
            max_requests=plan.batch,
            capacity=max(len(prompt.tokens) for prompt in plan.prompts) + plan.new_tokens + max(budget, 1),
            max_budget=budget,
            block_size=self.given.block_size,
            prefill_rows=PREFILL_ROWS * plan.batch,
            cache_block_size=self.given.cache_block_size,
            dtype=dtype,
            gemm=gemm.replace("-", "_"),
        )

    def result(self, group: Group, seconds: float, progress: Callable[[float], None]) -> Result:
        """One group decoded and compared; progress(its share that is done). Raises EngineError without an engine."""
        plan = self.plan(group.model, group.tokens, seconds)
        with self.engine(group.model, group.dtype, group.gemm, plan) as engine:
            tallies = measure(engine, plan, lambda tokens: progress(tokens / group.tokens))
            return Result(group, plan, tallies, self.params(group, plan, engine))

    def params(self, group: Group, plan: Plan, engine: Engine) -> dict[str, Scalar]:
        return {
            "model": group.model.name,
            "heads": group.model.heads,
            "dtype": group.dtype,
            "gemm": group.gemm,
            "drafter": "noisy" if plan.noisy else "dflash",
            "products": engine.paths["products"],
            "attention": engine.paths["attention"],
            "launch": "graph" if engine.graphs else "eager",
            "block_size": engine.block_size,
            "new_tokens": plan.new_tokens,
            "batch": plan.batch,
            "cache_block_size": self.given.cache_block_size,
            "library": self.kind,
        }


def command(given: argparse.Namespace, open_engine: Callable[..., Engine] = Engine.load) -> Exit:
    """Run the suite, print its tables, append its rows. REGRESSION: something failed, or differs where nothing may.
    NOTHING: there is no engine, or time for less than is demanded of a group."""
    kind = given.kind if given.kind != "auto" else "host" if gpu_missing() else "cuda"
    new_tokens, batch = given.new_tokens or NEW_TOKENS[kind], given.batch or BATCH[kind]
    if min(given.tokens, new_tokens, batch, *given.heads) < 1 or given.seed < 0:
        say("exactness: --heads, --tokens, --new-tokens and --batch must be at least 1, --seed at least 0", error=True)
        return Exit.USAGE
    gemms = given.gemm or (GEMMS if kind == "cuda" else GEMMS[:1])
    groups = _groups(given, gemms)
    if not groups:
        say("exactness: nothing to decode: with cublas only the pair is, and its heads were not chosen", error=True)
        return Exit.USAGE
    arms = [CHAIN] if "chain" in given.methods else []
    arms += [Arm("ddtree", budget) for budget in given.budgets] if "ddtree" in given.methods else []
    results: list[Result] = []
    costs: list[Row] = []
    whole = False
    try:
        path = library_path(kind)
        session = Session(given, kind, Library(path), open_engine, tuple(arms), new_tokens, batch)
        environment = capture(libraries={"engine": path})
        with records.RowFile(given.out) as file:
            for row in _rows(session, groups, environment, results, costs):
                file.append(row)
        whole = True
    except (BuildError, EngineError) as error:
        say(f"exactness: {error}", error=True)
    if results:
        say(table(results))
    if costs:
        say("\nWhat exactness costs the pair, without logits:\n" + aligned(exactness_cost.table(costs)))
    bad = [row.reason for row in costs if row.status == "INVALID"]
    if bad or any(problem(result, arm) for result in results for arm in (AR, *arms)):
        return Exit.REGRESSION
    return Exit.FINE if whole and not any(result.short for result in results) else Exit.NOTHING


def _rows(
    session: Session, groups: Sequence[Group], environment: Environment, results: list[Result], costs: list[Row]
) -> Iterator[Row]:
    """The rows of all groups, then those of what exactness costs; both lists get what is there. Raises EngineError."""
    seconds = float(session.given.seconds)
    compared = set(GEMMS) <= {group.gemm for group in groups} and session.given.drafter == "dflash"
    end = time.perf_counter() + seconds
    of_groups = end - COST_SHARE * seconds if compared else end
    progress = Progress(sum(group.tokens for group in groups), len(groups))
    try:
        for place, group in enumerate(groups):
            progress.start(group.title, group.tokens)
            share = group.tokens / sum(other.tokens for other in groups[place:])
            results.append(session.result(group, max(0.0, share * (of_groups - time.perf_counter())), progress.show))
            for arm in (AR, *session.arms):
                yield _row(results[-1], arm, environment)
    finally:
        progress.end()
    if not compared:
        return
    least = LEAST_TURNS * sum(result.turn_s for result in results if result.group.model.name == "pair")
    if (left := end - time.perf_counter()) < least:
        say(f"exactness: what it costs was not measured: that takes {least:.0f} s, {left:.0f} s are left", error=True)
        return
    left = min(left, COST_SHARE * seconds)
    say(f"what exactness costs: {left:.0f} s at most, or a sample of each", error=True)
    for row in exactness_cost.rows(session, groups, environment, left):
        costs.append(row)
        yield row


def _groups(given: argparse.Namespace, gemms: Sequence[str]) -> list[Group]:
    """bf16 comes before float32, which takes what time it leaves. With cuBLAS the pair alone is decoded."""
    pair = _pair(given)
    models = [pair] if pair.heads in given.heads else []
    models += [_random(heads, given.seed) for heads in given.heads if heads != pair.heads]
    groups = []
    for gemm in gemms:
        chosen = models if gemm == GEMMS[0] else [model for model in models if model.name == "pair"]
        tokens = given.tokens if gemm == GEMMS[0] else min(given.tokens, CONTRAST_TOKENS)
        groups += [Group(model, dtype, gemm, tokens) for dtype in sorted(set(given.dtype)) for model in chosen]
    return groups


def _pair(given: argparse.Namespace) -> Model:
    files = tuple(given.models / f"{name}.kdtr" for name in ("target", "drafter"))
    files = files[:1] if given.drafter == "noisy" else files
    digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
    with kdtr.open(files[0]) as target:
        heads, vocab = (int(target.get(f"config/{key}")) for key in ("num_attention_heads", "vocab_size"))
    return Model("pair", heads, vocab, files, digest)


def _random(heads: int, seed: int) -> Model:
    config = random_target(heads)
    digest = hashlib.sha256(json.dumps([config, seed], sort_keys=True).encode()).hexdigest()
    return Model("random", heads, config["vocab_size"], (Random(config, seed),), digest)


def problem(result: Result, arm: Arm) -> str | None:
    """Why an arm of a group is no success, or None."""
    tally = result.tallies[arm.name]
    if tally.failure is not None:
        return tally.failure
    if arm != AR and not tally.rows:
        return "nothing was compared"
    if arm == AR or not result.group.exact or not tally.differ:
        return None
    return f"{tally.rows_differ} of {tally.rows} rows of logits and {tally.tokens_differ} tokens differ"


def _row(result: Result, arm: Arm, environment: Environment) -> Row:
    tally, plan, params = result.tallies[arm.name], result.plan, result.params
    exact = arm != AR and result.group.exact
    parity = Parity(AR.name, tally.rows, tally.differ, first_difference=tally.first) if exact else None
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
    given = [params, plan.tokens, plan.seed, [prompt.tokens for prompt in plan.prompts], result.group.model.digest]
    reason = problem(result, arm)
    names = (f"heads{params['heads']}", params["drafter"], f"block{params['block_size']}")
    return Row(
        suite="exactness",
        block="bench",
        case="/".join(map(str, ("exactness", *names, params["dtype"], params["gemm"]))),
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


def table(results: Sequence[Result]) -> str:
    """The tallies as plain text; below, the first difference of each arm, what failed or is missing, and the sums."""
    head = "heads model dtype gemm paths launch method budget tokens differ rows differ largest tokens/s"
    lines: list[tuple[str, ...]] = [tuple(head.split())]
    notes = []
    for result in results:
        group, plan, params = result.group, result.plan, result.params
        paths = "/".join(str(params[name]).replace("_", " ") for name in ("products", "attention"))
        for arm in (AR, *plan.arms):
            tally = result.tallies[arm.name]
            speed = f"{tally.made / tally.seconds:.0f}" if tally.seconds else "-"
            found: tuple[Any, ...] = (tally.made, "-", "-", "-", "-")
            if arm != AR:
                found = (tally.tokens, tally.tokens_differ, tally.rows, tally.rows_differ, f"{tally.largest:.3g}")
            model = (group.model.heads, group.model.name, group.dtype, group.gemm, paths, params["launch"])
            lines.append(tuple(map(str, (*model, arm.method, arm.budget or "-", *found, speed))))
            name = f"{group.title}, {arm.name}"
            if tally.failure is not None:
                notes.append(f"{name} failed: {tally.failure}")
            if (first := tally.first) is not None:
                place = "before the first round" if first.round is None else f"round {first.round}"
                notes.append(
                    f"{name}, first difference: {first.what} of {first.unit}, row {first.index}, {place}: expected "
                    f"{first.expected!r}, got {first.actual!r}; margin of the choice {first.margin:.3g}, seed "
                    f"{first.seed}"
                )
        if result.short:
            notes.append(f"{group.title}: {plan.tokens} tokens of each method were wanted; the time ended before")
    exact = [r.tallies[arm.name] for r in results if r.group.exact for arm in r.plan.arms]
    if exact:
        tokens, rows = sum(t.tokens for t in exact), sum(t.rows for t in exact)
        wrong, bad = sum(t.tokens_differ for t in exact), sum(t.rows_differ for t in exact)
        notes.append(
            f"row-invariant: {tokens} tokens and {rows} rows of logits compared with plain decoding's, "
            f"{wrong} tokens and {bad} rows differ"
        )
        least = min(exact, key=lambda tally: tally.tokens)
        notes.append(
            f"row-invariant: at least {least.tokens} tokens in each of {len(exact)} groups of heads, type and method"
        )
    notes.append(
        "tokens/s: of whole runs, with prompts, first launches and the copying of logits; not to be compared across "
        "launches"
    )
    return "\n".join([aligned(lines), *notes])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns, to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
