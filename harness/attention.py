"""Verify attention of N rows of a tree over a prefix: the engine's kernels beside what others have for it.

A call is one layer's attention of all requests. A sample is a replay of a CUDA graph of several calls, divided by their
number: over one cache that stays in L2 as far as it fits (warm), or over caches in turns that L2 does not hold together
(flushed; queries stay). Every arm is held against sums in float64, FlashMLA's without a mask against sums without one.
The engine's must besides have the bits of plain decoding, row by row: those of a single row behind its path's rows, in
every number of rows, whatever the rows of other branches hold.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from engine.abi import UnsupportedError
from harness import attention_input, torch_gpu
from harness.attention_engine import SYSTEMS, EngineAttention
from harness.attention_input import RANK, ROPE, Input, Truth, check_values
from harness.attention_peers import MASKLESS, NoPeerError, Peers, missing, software
from harness.cases import GPU, Attention, Chosen, digest
from harness.gpu_builders import Gpu, GpuArm, NoGpuError
from harness.parity import Check, combine, reason
from harness.records import Row, Scalar
from harness.slices import copy_bandwidth
from harness.systems import Bench
from harness.timing import interleave

SAMPLES = 10
CALLS, KEYS = 2, 2**17  # of a replay, at least: calls, and rows of a request's cache that they pass over together
# The largest error of a head's row that is rounding. Weights and results of bfloat16 are rounded by 2^-9 each; where
# PyTorch multiplies (all others), scores are too, and those of nodes reach 8.
TOLERANCES = {"gpu-float32": 2.0**-14, "gpu-wgmma": 2.0**-7, "gpu-portable": 2.0**-7, "flashmla": 2.0**-7}
OTHERS = 2.0**-5
PRODUCT = 8192  # rows, columns and sums of the product whose rate bounds others


def rows(bench: Bench, chosen: Chosen) -> Iterator[Row]:
    """A row for each arm and number of rows; one row where there is no GPU."""
    case = chosen.case
    assert isinstance(case, Attention)
    constants = [getattr(attention_input, name) for name in ("SCALE", "LATENTS", "NODES", "DEPTH", "ROTATED")]
    case_hash = digest(case, bench.seed, json.dumps(constants))
    if bench.is_done(chosen, case_hash, [arm for arm in chosen.arms if absent(arm)]):
        return
    try:
        gpu = bench.need_gpu()
        release(gpu)
        measurement = Measurement(bench, case, case_hash, gpu)
    except (NoGpuError, MemoryError) as error:
        yield from bench.not_run(case, "attention", [GPU], str(error), case_hash=case_hash, params=params_of(case))
        return
    yield from measurement.rows(chosen.arms)


def params_of(case: Attention) -> dict[str, Scalar]:
    return {"heads": case.heads, "batch": case.batch, "prefix": case.prefix}


def split(arm: str) -> tuple[str, int]:
    """Who computes it, for how many rows."""
    system, _, number = arm.rpartition("-n")
    return system, int(number)


def absent(arm: str) -> str | None:
    """Why an arm cannot be measured, as far as that is known before it is tried."""
    system, _ = split(arm)
    return None if system in SYSTEMS else missing(system)


class Measurement:
    """One case on one GPU."""

    def __init__(self, bench: Bench, case: Attention, case_hash: str, gpu: Gpu):
        self._bench, self._case, self._case_hash = bench, case, case_hash
        self._given = Input(gpu, case, bench.seed)
        with self._given.on():
            self._truth = Truth(self._given)
        self._ours: dict[str, EngineAttention] = {}
        self._calls = max(CALLS, KEYS // case.prefix)

    def rows(self, wanted: tuple[str, ...]) -> Iterator[Row]:
        arms: dict[str, GpuArm] = {}
        others: list[Row] = []
        for name in wanted:
            try:
                arms[name] = self._arm(*split(name))
            except (NoPeerError, UnsupportedError) as error:
                others.append(self._row(name, None, reason=str(error), not_run=True))
            except (RuntimeError, MemoryError) as error:
                others.append(self._row(name, None, reason=f"{type(error).__name__}: {error}"))
        if arms:
            yield from self._measured(arms)
        yield from others

    def _measured(self, arms: dict[str, GpuArm]) -> Iterator[Row]:
        gpu = self._given.gpu
        l2: Literal["flushed", "warm"] = "flushed" if self._case.cold else "warm"
        rates = Rates.of(gpu)
        taken = interleave(
            {name: arm.run for name, arm in arms.items()},
            samples=SAMPLES,
            clock=gpu.clock,
            reader=gpu.reader,
            own={name: replace(arm.own, l2=l2) for name, arm in arms.items()},
        )
        for name, arm in arms.items():
            system, n = split(name)
            failure, parity = taken[name].failure, None
            metrics: dict[str, float | int | None] = {}
            per_call = [None if s is None else s / arm.calls for s in taken[name].timing.samples_s]
            warmup = taken[name].timing.warmup_s
            timing = replace(
                taken[name].timing,
                samples_s=tuple(per_call),
                warmup_s=None if warmup is None else warmup / arm.calls,
            )
            nulls: dict[str, str] = {}
            if failure is None:
                with self._given.on():
                    checks, error = self._checks(system, n, arm.results()[0])
                parity = combine(self._against(system), checks)
                failure = reason(parity)
                seconds = float(np.median([s for s in per_call if s is not None]))
                metrics, nulls = self._speeds(n, seconds, rates)
                metrics["error"] = error
            base = f"{MASKLESS}-n{n}"
            yield self._row(
                name,
                None if name == base or base not in arms else base,
                reason=failure,
                parity=parity,
                metrics=metrics,
                timing=timing,
                nulls=nulls,
            )

    def _arm(self, system: str, n: int) -> GpuArm:
        return self._own(system).arm(n) if system in SYSTEMS else self._peers.arm(system, n)

    def _own(self, system: str) -> EngineAttention:
        if system not in self._ours:
            with self._given.on():
                self._ours[system] = EngineAttention(self._given, *SYSTEMS[system], self._calls)
        return self._ours[system]

    @functools.cached_property
    def _peers(self) -> Peers:
        return Peers(self._given, self._calls)

    def _checks(self, system: str, n: int, found: Any) -> tuple[list[Check], float]:
        """What the arm's values were held against, and their largest error."""
        tree, allowed = system != MASKLESS, TOLERANCES.get(system, OTHERS)
        values, error = check_values(f"{n} rows", self._given, self._truth, found, tree=tree, allowed=allowed)
        return [values, *(self._own(system).checks(n, found) if system in SYSTEMS else [])], error

    def _against(self, system: str) -> str:
        sums = "sums in float64" + (", without a mask" if system == MASKLESS else "")
        return f"{sums}, and with plain decoding's bits" if system in SYSTEMS else sums

    def _speeds(self, n: int, seconds: float, rates: Rates) -> tuple[dict[str, float | int | None], dict[str, str]]:
        """By what the tree's rows need: their keys once each, cache rows, queries and results once."""
        case, head_values = self._case, n * self._case.heads * (2 * RANK + ROPE)
        flops = 2.0 * case.batch * self._given.keys(n) * case.heads * (2 * RANK + ROPE)
        moved = 2.0 * case.batch * ((case.prefix + n) * (RANK + ROPE) + head_values)
        bound, why = rates.seconds(flops, moved)
        metrics: dict[str, float | int | None] = {
            "tflop_per_s": 1e-12 * flops / seconds,
            "gb_per_s": 1e-9 * moved / seconds,
            "roofline_share": None if bound is None else bound / seconds,
        }
        return metrics, {} if why is None else {"metrics.roofline_share": why}

    def _row(self, arm: str, against: str | None, **others: Any) -> Row:
        system, n = split(arm)
        params: dict[str, Scalar] = {
            **params_of(self._case),
            "attention": system,
            "rows": n,
            "dtype": SYSTEMS[system][0] if system in SYSTEMS else "bfloat16",
            "mask": "none" if system == MASKLESS else "tree",
            "software": None if system in SYSTEMS or others.get("not_run") else software(system),
        }
        return self._bench.row(self._case, self._case_hash, "attention", arm, against=against, params=params, **others)


@dataclass(frozen=True)
class Rates:
    """What the device does at best: bytes a second of a copy, operations a second of a product of bfloat16."""

    copy: float | None
    product: float | None

    @classmethod
    def of(cls, gpu: Gpu) -> Rates:
        copy = copy_bandwidth(gpu.ops.library, gpu.stream, gpu.clock)
        return cls(copy, None if gpu.stream is None or missing("torch") else _product())

    def seconds(self, flops: float, moved: float) -> tuple[float | None, str | None]:
        """The least time for so much, or why it is not known."""
        if self.copy is None or self.product is None:
            return None, "it takes CuPy and PyTorch on a GPU to time copies and products"
        return max(flops / self.product, moved / self.copy), None


def _product() -> float:
    """Operations a second of PyTorch's product of two squares, the best of ten."""
    torch: Any = importlib.import_module("torch")
    a, b = (torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    run, own = torch_gpu.replayed(lambda: torch.matmul(a, b), 1)

    def seconds() -> float:
        start = own.clock.mark()
        run()
        return own.clock.seconds(start, own.clock.mark())

    return 2 * PRODUCT**3 / min(seconds() for _ in range(10))


def release(gpu: Gpu) -> None:
    """Give back what cases before left in the pools: PyTorch's and CuPy's know nothing of each other."""
    if gpu.stream is not None:
        gc.collect()
        importlib.import_module("cupy").get_default_memory_pool().free_all_blocks()
        if missing("torch") is None:
            importlib.import_module("torch").cuda.empty_cache()
