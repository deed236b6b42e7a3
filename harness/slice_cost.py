"""What exactness costs on a slice of a big model: the same work with row-invariant products and with cuBLAS's.

Kernels are launched one by one, since there are no graphs with cuBLAS. The exact engine's tree must have its plain
decoding's bits; how many rows of cuBLAS's have them is told and no demand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from engine.abi import EngineError
from harness import slices
from harness.cases import GPU, Chosen, SliceCost, digest
from harness.gpu_builders import NoGpuError
from harness.parity import reason
from harness.records import Row
from harness.slices import Device, Measurement, config_of, opened, params_of
from harness.systems import Bench
from harness.timing import interleave

GEMMS = {"row_invariant": f"{GPU}-", "cublas": f"{GPU}-cublas-"}  # how its arms begin


def rows(bench: Bench, chosen: Chosen) -> Iterator[Row]:
    """Seconds of a token of plain decoding, and of a pass over N rows, by both. One row where they do not fit."""
    case = chosen.case
    assert isinstance(case, SliceCost)
    case_hash = digest(case, json.dumps(config_of(case), sort_keys=True))
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
    parity = {
        gemm: one.same_bits(gemm, one.decode("ddtree", case.budgets[0], keep_logits=True).generation)
        for gemm, one in found.items()
    }
    for name, (gemm, work) in arms.items():
        exact = gemm == "row_invariant"
        yield found[gemm].row(
            "bench",
            name,
            f"{GEMMS['cublas']}{work}" if exact else None,
            {"gemm": gemm},
            reason=measured[name].failure or (reason(parity[gemm]) if exact else None),
            parity=parity[gemm] if exact else None,
            metrics={"rows_compared": parity[gemm].compared, "rows_differ": parity[gemm].differences},
            timing=measured[name].timing,
        )


def _token(one: Measurement) -> Callable[[], float]:
    return lambda: one.decode("ar", 0, graphs=False).seconds / slices.TOKENS


def _pass(n: int) -> Callable[[Measurement], Callable[[], float]]:
    return lambda one: one.verify(n, graphs=False)
