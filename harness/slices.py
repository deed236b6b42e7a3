"""Slices of big models: a few layers at full width with random weights, plain decoding against the memory's roofline,
what N rows cost beside the experts that they touch, and trees whose acceptance is given.

The bytes of a pass are those of the weights and cache rows that it must read once: activations are small beside them.
Every tree is decoded once with its logits, whose bits must be plain decoding's.
"""

from __future__ import annotations

import functools
import importlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

import kdtr
from engine.abi import EngineError, Library
from engine.checkpoint import Random
from engine.decode_abi import STAGES
from engine.engine import Engine
from engine.generation import Generation
from engine.request import NoisyOracle, Replay, Request
from engine.run import Run
from harness import stats
from harness.cases import GPU, Chosen, Slice, digest
from harness.curve import made_up_lists
from harness.gpu_builders import NoGpuError
from harness.gpu_decoder import first_round, timed
from harness.parity import reason
from harness.records import Difference, Parity, Row, Scalar
from harness.systems import Bench
from harness.timing import Clock, ClockReader, interleave

SAMPLES = 10
BLOCK = 8  # of the trees
TOKENS = 32  # of an output
PREFILL_ROWS = 1024  # in one pass
WIDTH, SLOPE = 64, 0.5  # of the lists: a token is this much less likely than the one before
MISS, MAX_RANK = 0.1, 2  # of the noisy oracle
COPIED = 2**31  # bytes
STRIDE = 7919  # between made-up tokens; a prime that divides no vocabulary

# As published: Kimi-K2-Instruct, without its number of layers.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "kimi-k2": {
        "vocab_size": 163_840,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50_000.0,
    }
}


class Device(Protocol):
    """Where slices run. stream: of CuPy, None where there is none."""

    library: Library
    stream: Any
    clock: Clock
    reader: ClockReader | None
    name: str


def rows(bench: Bench, chosen: Chosen) -> Iterator[Row]:
    """Plain decoding, trees, and a pass over N rows. Where the model does not fit, one row says so."""
    case = chosen.case
    assert isinstance(case, Slice)
    case_hash = hash_of(case, bench.seed)
    if bench.is_done(chosen, case_hash):
        return
    with ExitStack() as held:
        try:
            device: Device = bench.need_engine()
            engine = held.enter_context(opened(device, case, bench.seed))
        except (NoGpuError, EngineError) as error:
            yield from bench.not_run(case, "bench", [GPU], str(error), case_hash=case_hash, params=params_of(case))
            return
        try:
            measurement = Measurement(bench, case, case_hash, device, engine)
        except EngineError as error:
            why = f"plain decoding failed: {error}"
            yield bench.row(case, case_hash, "replay", f"{GPU}-ar", reason=why, params=params_of(case))
            return
        yield from measurement.rows(chosen.arms)


def config_of(case: Slice) -> dict[str, Any]:
    return {**CONFIGS[case.model], "num_hidden_layers": case.layers}


def hash_of(case: Slice, seed: int) -> str:
    """Of all that the work depends on; the weights are made from the seed."""
    sizes = [TOKENS, BLOCK, WIDTH, SLOPE, MISS, MAX_RANK]
    return digest(case, json.dumps(config_of(case), sort_keys=True), seed, json.dumps(sizes))


def params_of(case: Slice) -> dict[str, Scalar]:
    return {"dataset": case.model, "layers": case.layers, "prefix": case.prefix, "dtype": case.dtype}


def opened(device: Device, case: Slice, seed: int, gemm: str = "row_invariant") -> Engine:
    """The slice's engine. Raises EngineError, for want of memory for one."""
    return Engine.load(
        Random(config_of(case), seed),
        dtype=case.dtype,
        library=device.library,
        capacity=case.prefix + TOKENS + max(case.rows),
        max_budget=max(*case.rows, *case.budgets),
        prefill_rows=min(case.prefix, PREFILL_ROWS),
        block_size=BLOCK,
        gemm=gemm,
    )


@dataclass(frozen=True)
class Decoded:
    """One output; seconds: of its rounds, by the device's clock."""

    generation: Generation
    seconds: float


class Measurement:
    """One slice on one engine."""

    def __init__(self, bench: Bench, case: Slice, case_hash: str, device: Device, engine: Engine):
        """Decodes the truth. Raises EngineError."""
        self._bench, self._case, self._case_hash, self._config = bench, case, case_hash, config_of(case)
        self._params = {**params_of(case), "system": device.name}
        self._device, self._engine = device, engine
        self._launch: Literal["eager", "graph"] = "graph" if engine.graphs else "eager"
        self._prompt = spread(case.prefix, self._config["vocab_size"])
        self._truth = self.decode("ar", 0, keep_logits=True).generation

    @functools.cached_property
    def _bytes_per_s(self) -> float | None:
        return copy_bandwidth(self._device.library, self._device.stream, self._device.clock)

    def rows(self, wanted: Sequence[str]) -> Iterator[Row]:
        yield from self._decodings(wanted)
        yield from self._passes(wanted)

    # Outputs

    def _decodings(self, wanted: Sequence[str]) -> Iterator[Row]:
        arms = {f"{GPU}-ar": 0, **{f"{GPU}-ddtree-b{budget}": budget for budget in self._case.budgets}}
        arms = {name: budget for name, budget in arms.items() if not budget or name in wanted}
        found: dict[str, Generation] = {}
        measured = interleave(
            {name: self._decoding(budget) for name, budget in arms.items()},
            samples=SAMPLES,
            clock=self._device.clock,
            launch=self._launch,
            reader=self._device.reader,
            inspect=lambda name, _, made: found.update({name: made.generation}),
            seconds=lambda made: float(made.seconds),
        )
        base = next(iter(arms))
        plain = measured[base].timing
        taken = [sample for sample in plain.samples_s if sample is not None]
        step = sum(taken) / len(taken) / TOKENS if taken else None
        for name, budget in arms.items():
            timing, why, parity = measured[name].timing, measured[name].failure, None
            metrics: dict[str, float | int | None] = {}
            if why is None:
                parity = self.same_bits(name, self.decode("ddtree", budget, keep_logits=True).generation)
                why = reason(parity)
                metrics = {"tau": found[name].tau, "rounds": len(found[name].rounds), "tokens": len(found[name].tokens)}
                if budget:
                    metrics |= self._use(budget, found[name].tau, stats.times_faster(plain, timing).value, step)
                elif step is not None:
                    keys = self._case.prefix + TOKENS // 2
                    metrics |= {"step_s": step, **self._roofline(step, 1, self._touched(0), keys)}
            yield self.row(
                "replay",
                name,
                None if name == base else base,
                {"budget": budget, "acceptance": "noisy oracle", "max_new_tokens": TOKENS, "block_size": BLOCK},
                reason=why,
                parity=parity,
                metrics=metrics,
                timing=timing,
            )

    def _decoding(self, budget: int) -> Callable[[], Decoded]:
        return lambda: self.decode("ddtree" if budget else "ar", budget)

    def decode(self, method: Any, budget: int, *, keep_logits: bool = False, graphs: bool = True) -> Decoded:
        def opened() -> Run:
            return self._run(method, self._request(budget), keep_logits=keep_logits, graphs=graphs)

        return Decoded(*timed(opened, self._device.clock, replayed=graphs and self._engine.graphs))

    def _use(self, budget: int, tau: float, gain: float | None, step: float | None) -> dict[str, float | int | None]:
        """How the loop uses what its stages allow; these are timed in a run of their own."""
        request = self._request(budget)

        def opened() -> Run:
            return self._run("ddtree", request, timed=True)

        rounds = timed(opened, self._device.clock, replayed=self._engine.graphs)[0].rounds
        draft, verify = (sum(r.seconds[stage] for r in rounds) / len(rounds) for stage in ("draft", "verify"))
        efficiency = stats.loop_efficiency(gain, tau, step, draft, verify)
        return {"draft_s": draft, "verify_s": verify, "loop_efficiency": efficiency.value}

    # Single passes

    def _passes(self, wanted: Sequence[str]) -> Iterator[Row]:
        counts = {f"{GPU}-n{n}": n for n in self._case.rows if n == 1 or f"{GPU}-n{n}" in wanted}
        measured = interleave(
            {name: self.verify(n) for name, n in counts.items()},
            samples=SAMPLES,
            clock=self._device.clock,
            launch=self._launch,
            reader=self._device.reader,
            seconds=float,
        )
        for name, n in counts.items():
            timing, why, parity, metrics = measured[name].timing, measured[name].failure, None, {}
            if why is None:
                made = self.passed(n)
                parity = self.same_bits(name, made)
                nodes = made.rounds[0].nodes
                why = reason(parity) or (f"{nodes + 1} rows were verified, not {n}" if nodes != n - 1 else None)
                touched = self._touched(n - 1)
                seconds = float(np.median([s for s in timing.samples_s if s is not None]))
                metrics = {
                    "experts_per_layer": float(np.mean(touched)) if touched else 0.0,
                    **self._roofline(seconds, n, touched, self._case.prefix + n),
                }
            yield self.row(
                "curve",
                name,
                None if n == 1 else f"{GPU}-n1",
                {"rows": n},
                reason=why,
                parity=parity,
                metrics=metrics,
                timing=timing,
            )

    def verify(self, n: int, *, graphs: bool = True) -> Callable[[], float]:
        """Seconds that the stage of N rows takes, each time it is called."""

        return lambda: self._first_round(n, graphs=graphs).rounds[0].seconds["verify"]

    def passed(self, n: int, *, graphs: bool = True) -> Generation:
        """What a first round of N rows gave, with logits."""
        return self._first_round(n, keep_logits=True, graphs=graphs)

    def _first_round(self, n: int, *, keep_logits: bool = False, graphs: bool = True) -> Generation:
        def opened() -> Run:
            return self._run("ddtree", self._along(n), keep_logits=keep_logits, graphs=graphs, timed=True)

        return first_round(opened, replayed=graphs and self._engine.graphs)

    def _along(self, n: int) -> Request:
        """Its first round verifies a tree of n - 1 nodes, whose best path is what plain decoding says."""
        lists = {self._case.prefix: lists_along(self._truth.tokens, self._config["vocab_size"])}
        return Request(self._prompt, TOKENS, n - 1, drafter=Replay(lists, BLOCK))

    def _touched(self, budget: int) -> list[int]:
        """Different experts of each layer that has some, in a first round of budget + 1 rows."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "verify.kdtr"
            with self._run("ddtree", self._along(budget + 1)) as run:
                run.prefill()
                for stage in STAGES[:3]:
                    run.stage(stage, file if stage == "verify" else None)
            with kdtr.open(file) as dumped:
                ids = [dumped.get(name) for name in sorted(dumped.info) if name.endswith("expert_ids")]
        return [len(np.unique(chosen[: budget + 1])) for chosen in ids]

    # What they share

    def _request(self, budget: int) -> Request:
        golden = self._truth.tokens if budget else ()
        return Request(self._prompt, TOKENS, budget, drafter=NoisyOracle(golden, BLOCK, MISS, MAX_RANK))

    def _run(
        self, method: Any, request: Request, *, keep_logits: bool = False, graphs: bool = True, timed: bool = False
    ) -> Run:
        stream = 0 if self._device.stream is None else self._device.stream.ptr
        return self._engine.run([request], method, keep_logits=keep_logits, graphs=graphs, timed=timed, stream=stream)

    def same_bits(self, name: str, made: Generation) -> Parity:
        """The logits of the committed rows against plain decoding's."""
        rows = min(len(made.logits), len(self._truth.logits))
        ours, theirs = (one.logits[:rows].view(np.uint32) for one in (made, self._truth))
        bad = np.flatnonzero((ours != theirs).any(axis=1))
        first = None
        if len(bad):
            row = int(bad[0])
            entry = int((ours[row] != theirs[row]).argmax())
            values = float(self._truth.logits[row, entry]), float(made.logits[row, entry])
            first = Difference("logits", name, None, row, *values, self._bench.seed, None)
        return Parity("ar", rows, len(bad), first_difference=first)

    def _roofline(self, seconds: float, n: int, touched: Sequence[int], keys: int) -> dict[str, float | int | None]:
        read = pass_bytes(self._config, n, touched, keys, 2 if self._case.dtype == "bfloat16" else 4)
        if self._bytes_per_s is None:
            return {"bytes": float(read)}
        least = read / self._bytes_per_s
        return {"bytes": float(read), "copy_bytes_per_s": self._bytes_per_s, "roofline_share": least / seconds}

    def row(self, block: str, arm: str, against: str | None, params: Mapping[str, Scalar], **fields: Any) -> Row:
        return self._bench.row(
            self._case, self._case_hash, block, arm, against=against, params={**self._params, **params}, **fields
        )


def pass_bytes(config: Mapping[str, Any], rows: int, touched: Sequence[int], keys: int, size: int) -> int:
    """Bytes that a pass over `rows` rows behind `keys` cache rows reads at least, once each.

    touched: experts of each layer that has some. size: bytes of a weight; the router's are float32.
    """
    c = dict(config)
    hidden, heads, rank, rope = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    nope, v, query = c["qk_nope_head_dim"], c["v_head_dim"], c["q_lora_rank"]
    attention = hidden * (query + rank + rope) + query * heads * (nope + rope) + heads * rank * (nope + v)
    attention += heads * v * hidden
    expert = 3 * hidden * c["moe_intermediate_size"]
    dense = 3 * hidden * c["intermediate_size"] * (c["num_hidden_layers"] - len(touched))
    mixed = sum(expert * (count + c["n_shared_experts"]) for count in touched)
    weights = attention * c["num_hidden_layers"] + dense + mixed + hidden * (c["vocab_size"] + rows)
    cache = c["num_hidden_layers"] * keys * (rank + rope)
    return int((weights + cache) * size + len(touched) * c["n_routed_experts"] * hidden * 4)


def spread(count: int, vocab_size: int) -> list[int]:
    """Tokens that differ from their neighbours."""
    return [(STRIDE * i + i * i) % vocab_size for i in range(count)]


def lists_along(tokens: Sequence[int], vocab_size: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """ids, lp [L, K]: at each depth first the token that follows, then others; tokens[0] is the root."""
    width = min(WIDTH, vocab_size - 1)
    ids, lp = made_up_lists(BLOCK - 1, width, SLOPE)
    for depth, true in enumerate(tokens[1:BLOCK]):
        others = ((131 * depth + STRIDE * i) % vocab_size for i in range(width + 1))
        ids[depth] = [true, *(token for token in others if token != true)][:width]
    return ids, lp


def copy_bandwidth(library: Library, stream: Any, clock: Clock) -> float | None:
    """Bytes a second that a copy in the device's memory reads and writes together, the best of ten.

    None of a GPU without CuPy: a copy on the host would say nothing of it.
    """
    if stream is None:
        if library.architectures != "host":
            return None
        source = np.zeros(COPIED // 64, np.uint8)
        return 2 * len(source) / min(_seconds(clock, source.copy) for _ in range(10))
    cupy = importlib.import_module("cupy")
    with stream:
        source, to = (cupy.zeros(COPIED, cupy.uint8) for _ in range(2))
        return 2 * COPIED / min(_seconds(clock, lambda: cupy.copyto(to, source)) for _ in range(10))


def _seconds(clock: Clock, work: Callable[[], object]) -> float:
    start = clock.mark()
    work()
    return clock.seconds(start, clock.mark())
