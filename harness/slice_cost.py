"""What exactness costs on a slice of a big model: the same work with row-invariant products and with cuBLAS's.

Kernels are launched one by one, since there are no graphs with cuBLAS. The exact engine's passes and trees must have
its plain decoding's bits; how many rows of cuBLAS's have them is told and no demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

from engine.abi import EngineError
from harness import slices
from harness.cases import GPU, Chosen, SliceCost
from harness.gpu_builders import NoGpuError
from harness.parity import reason
from harness.records import Parity, Row
from harness.slices import Device, Measurement, hash_of, opened, params_of
from harness.systems import Bench
from harness.timing import interleave

GEMMS = {"row_invariant": f"{GPU}-", "cublas": f"{GPU}-cublas-"}  # how its arms begin


def rows(bench: Bench, chosen: Chosen) -> Iterator[Row]:
    """Seconds of a token of plain decoding, and of a pass over N rows, by both. One row where they do not fit."""
    case = chosen.case
    assert isinstance(case, SliceCost)
    case_hash = hash_of(case, bench.seed)
    if bench.is_done(chosen, case_hash):
        return
    with ExitStack() as held:
        try:
            device: Device = bench.need_engine()
            engines = {gemm: held.enter_context(opened(device, case, bench.seed, gemm)) for gemm in GEMMS}
            found = {gemm: Measurement(bench, case, case_hash, device, engines[gemm]) for gemm in GEMMS}
        except (NoGpuError, EngineError) as error:
            yield from bench.not_run(case, "bench", [GPU], str(error), case_hash=case_hash, params=params_of(case))
            return
        yield from _rows(case, found, device)


def _rows(case: SliceCost, found: dict[str, Measurement], device: Device) -> Iterator[Row]:
    works: dict[str, Callable[[Measurement], Callable[[], float]]] = {"ar": _token}
    works |= {f"n{n}": _pass(n) for n in case.rows}
    arms = {f"{start}{work}": (gemm, work) for work in works for gemm, start in GEMMS.items()}
    measured = interleave(
        {name: works[work](found[gemm]) for name, (gemm, work) in arms.items()},
        samples=slices.SAMPLES,
        clock=device.clock,
        launch="eager",
        reader=device.reader,
        seconds=float,
    )
    for name, (gemm, work) in arms.items():
        exact, why = gemm == "row_invariant", measured[name].failure
        parity = _parity(found[gemm], name, work, case) if why is None else None
        counts = {} if parity is None else {"rows_compared": parity.compared, "rows_differ": parity.differences}
        yield found[gemm].row(
            "bench",
            name,
            f"{GEMMS['cublas']}{work}" if exact else None,
            {"gemm": gemm},
            reason=why or (reason(parity) if exact and parity is not None else None),
            parity=parity if exact else None,
            metrics=counts,
            timing=measured[name].timing,
        )


def _parity(one: Measurement, name: str, work: str, case: SliceCost) -> Parity:
    """Of the pass itself; of plain decoding, which is the truth, a tree's."""
    if work == "ar":
        made = one.decode("ddtree", case.budgets[0], keep_logits=True, graphs=False).generation
    else:
        made = one.passed(int(work.removeprefix("n")), graphs=False)
    return one.same_bits(name, made)


def _token(one: Measurement) -> Callable[[], float]:
    return lambda: one.decode("ar", 0, graphs=False).seconds / slices.TOKENS


def _pass(n: int) -> Callable[[Measurement], Callable[[], float]]:
    return lambda one: one.verify(n, graphs=False)
