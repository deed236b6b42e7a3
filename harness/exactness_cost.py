"""What exactness costs: the pair's tokens per second with the row-invariant products against cuBLAS's, by method.

Nothing is kept of the logits here, and prompts are read before the time starts. Arms of both take turns. Their kernels
are launched one by one, since there are no graphs with cuBLAS.
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
from harness.records import Environment, Row
from harness.timing import WallClock, interleave

if TYPE_CHECKING:
    from harness.exactness_groups import Group, Session

SAMPLES = 5
SECONDS = 8.0  # after which a case takes no further sample


@dataclass(frozen=True)
class Decoded:
    """Rounds of one run from end to end, and what they gave."""

    seconds: float
    tokens: int


def rows(session: Session, groups: Sequence[Group], environment: Environment) -> Iterator[Row]:
    """One row for each number type, batch (1 and the plan's), product and method of the pair. Raises EngineError."""
    pair = next(group.model for group in groups if group.model.name == "pair")
    for dtype in dict.fromkeys(group.dtype for group in groups):
        plan = session.plan(pair, 0, 0.0)
        with (
            session.engine(pair, dtype, "row-invariant", plan) as exact,
            session.engine(pair, dtype, "cublas", plan) as other,
        ):
            engines = {"row-invariant": exact, "cublas": other}
            for batch in sorted({1, plan.batch}):
                yield from _case(session, engines, replace(plan, batch=batch), dtype, pair.digest, environment)


def _case(
    session: Session, engines: Mapping[str, Engine], plan: Plan, dtype: str, digest: str, environment: Environment
) -> Iterator[Row]:
    arms = {f"{gemm}-{arm.name}": (gemm, arm) for arm in (AR, *plan.arms) for gemm in engines}
    held = list(islice(units(plan), SAMPLES * plan.batch))
    now, tokens = [0], {name: [0] * SAMPLES for name in arms}

    def call(engine: Engine, arm: Arm) -> Callable[[], Decoded]:
        return lambda: decode(engine, plan, arm, held[now[0] * plan.batch : (now[0] + 1) * plan.batch])

    def begin(number: int) -> None:
        now[0] = number

    def keep(name: str, _: int, found: Decoded) -> None:
        tokens[name][now[0]] = found.tokens

    measured = interleave(
        {name: call(engines[gemm], arm) for name, (gemm, arm) in arms.items()},
        samples=SAMPLES,
        clock=WallClock(),
        launch="eager",
        reader=SmiClockReader(uuid=gpu_uuid()) if session.kind == "cuda" else None,
        time_limit_s=SECONDS,
        begin=begin,
        inspect=keep,
        seconds=lambda found: float(found.seconds),
        sample="prompt",
    )
    inputs = [digest, dtype, plan.batch, plan.new_tokens, [[unit.tokens, unit.sampling.seed] for unit in held]]
    for name, (gemm, arm) in arms.items():
        timing, failure, numbers = measured[name].timing, measured[name].failure, measured[name].numbers
        seconds = sum(sample for sample in timing.samples_s if sample is not None)
        speed = stats.ratio(sum(tokens[name][number] for number in numbers), seconds)
        yield Row(
            suite="exactness",
            block="bench",
            case=f"exactness/cost/{dtype}/batch{plan.batch}",
            case_hash=hashlib.sha256(json.dumps(inputs).encode()).hexdigest(),
            arm=name,
            against=None if gemm == "cublas" else f"cublas-{arm.name}",
            params={"dtype": dtype, "gemm": gemm, "batch": plan.batch, "method": arm.method, "budget": arm.budget},
            seed=plan.seed,
            status="OK" if failure is None else "INVALID",
            reason=failure,
            parity=None,
            metrics={"tokens_per_s": speed.value},
            environment=environment,
            timing=timing,
        )


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
        return Decoded(seconds, sum(len(run.tokens(number)) for number in range(run.requests)))


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Speeds of both products side by side; "slower": by how much the exact one is."""
    found = {(row.case, row.arm): row for row in rows}
    lines: list[tuple[str, ...]] = [
        ("dtype", "batch", "method", "row-invariant tokens/s", "cublas tokens/s", "slower, %")
    ]
    for row in rows:
        base = found.get((row.case, row.against or ""))
        if base is None:
            continue
        ours, theirs = row.metrics["tokens_per_s"], base.metrics["tokens_per_s"]
        told = [f"{speed:.0f}" if speed else "INVALID" for speed in (ours, theirs)]
        slower = f"{100 * (theirs / ours - 1):.1f}" if ours and theirs else "-"
        name = row.arm.removeprefix("row-invariant-")
        lines.append((str(row.params["dtype"]), str(row.params["batch"]), name, *told, slower))
    return lines
