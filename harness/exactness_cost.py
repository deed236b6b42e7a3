"""What exactness costs: the pair's tokens per second with the row-invariant products against cuBLAS's, by method.

Nothing is kept of the logits here, and prompts are read before the time starts. Arms of both take turns. Their kernels
are launched one by one, since there are no graphs with cuBLAS. The exact chain and trees must give the tokens of exact
plain decoding.
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
from harness.timing import WallClock, interleave

if TYPE_CHECKING:
    from harness.exactness_groups import Group, Session

SAMPLES = 10
EXACT, OTHER = "row-invariant", "cublas"  # how arms begin


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
        self._arms = {f"{gemm}-{arm.name}": (gemm, arm) for arm in (AR, *plan.arms) for gemm in engines}
        self._units = list(islice(units(plan), SAMPLES * plan.batch))
        self._found: dict[str, dict[int, Decoded]] = {name: {} for name in self._arms}

    def rows(self, environment: Environment, seconds: float) -> Iterator[Row]:
        plan, now = self._plan, [0]

        def call(engine: Engine, arm: Arm) -> Callable[[], Decoded]:
            return lambda: decode(engine, plan, arm, self._group(now[0]))

        def begin(number: int) -> None:
            now[0] = number

        def keep(name: str, _: int, found: Decoded) -> None:
            self._found[name][now[0]] = found

        measured = interleave(
            {name: call(self._engines[gemm], arm) for name, (gemm, arm) in self._arms.items()},
            samples=SAMPLES,
            clock=WallClock(),
            launch="eager",
            reader=SmiClockReader(uuid=gpu_uuid()) if self._session.kind == "cuda" else None,
            time_limit_s=seconds,
            begin=begin,
            inspect=keep,
            seconds=lambda found: float(found.seconds),
            sample="prompt",
        )
        for name, (gemm, arm) in self._arms.items():
            timing, why, numbers = measured[name].timing, measured[name].failure, measured[name].numbers
            parity = self._parity(name, numbers) if gemm == EXACT and arm != AR and why is None else None
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


def decode(engine: Engine, plan: Plan, arm: Arm, group: Sequence[Unit]) -> Decoded:
    """One run, its prompts read before the time starts. Raises EngineError, RequestError."""
    asked = [request(engine, plan, arm, unit) for unit in group]
    with engine.run(asked, cast(Method, arm.method), graphs=False) as run:
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
    """Speeds of both products side by side; "slower": how much longer the exact one takes for the same samples."""
    found = {(row.case, row.arm): row for row in rows}
    head = ("dtype", "batch", "method", f"{EXACT} tokens/s", f"{OTHER} tokens/s", "samples", "slower, % [95 %]")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        base = found.get((row.case, row.against or ""))
        if base is None:
            continue
        told = [f"{one.metrics['tokens_per_s']:.0f}" if one.status == "OK" else one.status for one in (row, base)]
        taken, longer = row.timing.samples_s if row.timing else (), faster(row, base)
        ends = [f"{100 * (end - 1):.1f}" for end in (longer.value, longer.low, longer.high) if end is not None]
        slower = f"{ends[0]} [{', '.join(ends[1:])}]" if len(ends) == 3 else ends[0] if ends else "-"
        name = row.arm.removeprefix(f"{EXACT}-")
        lines.append((str(row.params["dtype"]), str(row.params["batch"]), name, *told, str(len(taken)), slower))
    return lines
