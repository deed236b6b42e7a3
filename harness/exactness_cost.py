"""What exactness costs: the pair's tokens per second with the row-invariant products against cuBLAS's, by method.

Nothing is kept of the logits here, and prompts are read before the time starts. Arms of both take turns. Their kernels
are launched one by one, since there are no graphs with cuBLAS: that tells the products apart. What the exact engine
gives as it is used, its rounds replayed, stands beside it. All exact arms must give the tokens of exact plain decoding.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, cast

from engine.engine import Engine, Method
from harness import stats
from harness.cases import AR, Arm
from harness.environment import SmiClockReader, gpu_uuid
from harness.exactness import Plan, Unit, request, units
from harness.parity import check_tokens, combine, reason
from harness.records import Environment, Parity, Row, Scalar
from harness.tables import faster
from harness.timing import Own, WallClock, interleave

if TYPE_CHECKING:
    from harness.exactness_groups import Group, Session

SAMPLES = 10
EXACT, OTHER, REPLAYED = "row-invariant", "cublas", "replayed"  # how arms begin; the last are EXACT as it is used


@dataclass(frozen=True)
class Way:
    """How one arm decodes: with the products of one engine, replayed as graphs or launched kernel by kernel."""

    gemm: str
    arm: Arm
    graphs: bool = False


@dataclass(frozen=True)
class Decoded:
    """Rounds of one run from end to end, and what they gave by request."""

    seconds: float
    tokens: tuple[tuple[int, ...], ...]


def rows(session: Session, groups: Sequence[Group], environment: Environment, seconds: float) -> Iterator[Row]:
    """One row for each number type, batch (1 and the plan's), product and method of the pair. Raises EngineError.

    seconds: time for all. Each batch has its share of what is left, and a warm-up and one sample whatever they take.
    """
    deadline = time.perf_counter() + seconds
    pair = next(group.model for group in groups if group.model.name == "pair")
    plan = session.plan(pair, 0, 0.0)
    batches = sorted({1, plan.batch})
    todo = [(dtype, batch) for dtype in dict.fromkeys(group.dtype for group in groups) for batch in batches]
    for dtype in dict.fromkeys(dtype for dtype, _ in todo):
        with (
            session.engine(pair, dtype, EXACT, plan) as exact,
            session.engine(pair, dtype, OTHER, plan) as other,
        ):
            for batch in batches:
                share = (deadline - time.perf_counter()) / (len(todo) - todo.index((dtype, batch)))
                case = _Case(session, {EXACT: exact, OTHER: other}, replace(plan, batch=batch), dtype, pair.digest)
                yield from case.rows(environment, share)


class _Case:
    """One number type and batch."""

    def __init__(self, session: Session, engines: Mapping[str, Engine], plan: Plan, dtype: str, digest: str):
        self._session, self._engines, self._plan, self._dtype, self._digest = session, engines, plan, dtype, digest
        decodings = (AR, *plan.arms)
        self._ways = {f"{gemm}-{arm.name}": Way(gemm, arm) for arm in decodings for gemm in engines}
        if engines[EXACT].graphs:
            self._ways |= {f"{REPLAYED}-{arm.name}": Way(EXACT, arm, graphs=True) for arm in decodings}
        self._units = list(islice(units(plan), SAMPLES * plan.batch))
        self._found: dict[str, dict[int, Decoded]] = {name: {} for name in self._ways}

    def rows(self, environment: Environment, seconds: float) -> Iterator[Row]:
        plan, now, clock = self._plan, [0], WallClock()

        def call(way: Way) -> Callable[[], Decoded]:
            return lambda: decode(self._engines[way.gemm], plan, way.arm, self._group(now[0]), graphs=way.graphs)

        def begin(number: int) -> None:
            now[0] = number

        def keep(name: str, _: int, found: Decoded) -> None:
            self._found[name][now[0]] = found

        measured = interleave(
            {name: call(way) for name, way in self._ways.items()},
            samples=SAMPLES,
            clock=clock,
            launch="eager",
            own={name: Own(clock, launch="graph") for name, way in self._ways.items() if way.graphs},
            reader=SmiClockReader(uuid=gpu_uuid()) if self._session.kind == "cuda" else None,
            time_limit_s=seconds,
            begin=begin,
            inspect=keep,
            seconds=lambda found: float(found.seconds),
            sample="prompt",
        )
        for name, way in self._ways.items():
            gemm, arm = way.gemm, way.arm
            timing, why, numbers = measured[name].timing, measured[name].failure, measured[name].numbers
            told = gemm == EXACT and name != f"{EXACT}-{AR.name}" and why is None
            parity = self._parity(name, numbers) if told else None
            why = why or (reason(parity) if parity is not None else None)
            tokens = sum(len(one) for number in numbers for one in self._found[name][number].tokens)
            speed = stats.ratio(tokens, sum(sample for sample in timing.samples_s if sample is not None))
            params: dict[str, Scalar] = {"dtype": self._dtype, "gemm": gemm, "batch": plan.batch, "method": arm.method}
            yield Row(
                suite="exactness",
                block="bench",
                case=f"exactness/cost/{self._dtype}/batch{plan.batch}",
                case_hash=self._hash(),
                arm=name,
                against=None if gemm == OTHER else f"{OTHER}-{arm.name}",
                params={**params, "budget": arm.budget, "block_size": self._engines[gemm].block_size},
                seed=plan.seed,
                status="OK" if why is None else "INVALID",
                reason=why,
                parity=parity,
                metrics={"tokens_per_s": speed.value},
                nulls={} if speed.value is not None else {"metrics.tokens_per_s": speed.reason or "not finite"},
                environment=environment,
                timing=timing,
            )

    def _group(self, number: int) -> list[Unit]:
        return self._units[number * self._plan.batch : (number + 1) * self._plan.batch]

    def _parity(self, name: str, numbers: Sequence[int]) -> Parity:
        """The tokens of all samples against those of exact plain decoding."""
        base = f"{EXACT}-{AR.name}"
        checks = [
            check_tokens(unit.name, truth, tokens, seed=unit.sampling.seed)
            for number in numbers
            if number in self._found[base]
            for unit, truth, tokens in zip(
                self._group(number), self._found[base][number].tokens, self._found[name][number].tokens, strict=True
            )
        ]
        return combine(base, checks)

    def _hash(self) -> str:
        """Of the work: what is decoded, and by what models and blocks."""
        plan, engine = self._plan, self._engines[EXACT]
        asked = [[unit.tokens, unit.sampling.temperature, unit.sampling.seed] for unit in self._units]
        cache = self._session.given.cache_block_size
        inputs = [self._digest, self._dtype, plan.batch, plan.new_tokens, engine.block_size, cache, asked]
        return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def decode(engine: Engine, plan: Plan, arm: Arm, group: Sequence[Unit], *, graphs: bool) -> Decoded:
    """One run, its prompts read before the time starts. Raises EngineError, RequestError."""
    asked = [request(engine, plan, arm, unit) for unit in group]
    with engine.run(asked, cast(Method, arm.method), graphs=graphs) as run:
        active = run.prefill()
        start = time.perf_counter()
        while active:
            active = run.round()
        seconds = time.perf_counter() - start
        for number in range(run.requests):
            if (error := run.error(number)) is not None:
                raise error
        return Decoded(seconds, tuple(run.tokens(number) for number in range(run.requests)))


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Speeds of both products side by side, and of the exact ones replayed; "slower": how much longer they take than
    cuBLAS's for the same samples, below 0 where they are faster."""
    found = {(row.case, row.arm): row for row in rows}
    slower = "slower, % [95 %]"
    speeds = (f"{name} tokens/s" for name in (EXACT, OTHER))
    head = ("dtype", "batch", "method", *speeds, "samples", slower, f"{REPLAYED} tokens/s", slower)
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        base = found.get((row.case, row.against or ""))
        if base is None or not row.arm.startswith(EXACT):
            continue
        name = row.arm.removeprefix(f"{EXACT}-")
        replayed = found.get((row.case, f"{REPLAYED}-{name}"))
        lines.append(
            (
                str(row.params["dtype"]),
                str(row.params["batch"]),
                name,
                _speed(row),
                _speed(base),
                str(len(row.timing.samples_s if row.timing else ())),
                _slower(row, base),
                *(("-", "-") if replayed is None else (_speed(replayed), _slower(replayed, base))),
            )
        )
    return lines


def _speed(row: Row) -> str:
    return f"{row.metrics['tokens_per_s']:.0f}" if row.status == "OK" else row.status


def _slower(row: Row, base: Row) -> str:
    longer = faster(row, base)
    ends = [f"{100 * (end - 1):.1f}" for end in (longer.value, longer.low, longer.high) if end is not None]
    return f"{ends[0]} [{', '.join(ends[1:])}]" if len(ends) == 3 else ends[0] if ends else "-"
