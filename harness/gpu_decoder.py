"""The native engine among the decoders: its rows stand beside those of the reference, whose tokens it must give.

A decoding is timed by one pair of events around its rounds; prompts are read before. Stages are timed in a run of its
own, by events inside the graph that is replayed. Lists may be given in place of the drafter's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from numpy.typing import NDArray

import engine.generation as native
from engine.abi import EngineError, Library
from engine.engine import Engine, Method
from engine.request import DFlash, Replay, Request
from engine.run import Run
from engine.toolkit import BuildError
from harness.cases import Arm
from harness.engine_library import library_path
from harness.environment import SmiClockReader, gpu_uuid
from harness.gpu_builders import NoGpuError
from harness.timing import Clock, ClockReader, CupyEvents, EventClock, Stages, WallClock, stages_of
from reference.loop import Generation, Options, Round, Trace
from reference.sampling import GREEDY
from reference.topk import TopK
from reference.tree import Tree

Lists = Mapping[int, tuple[NDArray[Any], NDArray[Any]]]  # position of a root -> ids int [L, K], lp float32 [L, K]

# An engine is made for at least as many, so that few are made.
ROWS, BUDGET = 1024, 128
TRIES = 3  # to find all rounds of a run replayed


def open_decoder(models: Path, missing: str | None) -> EngineDecoder:
    """The engine on the GPU with the models of a folder. Raises NoGpuError. missing: why there is no GPU, if known."""
    if missing is not None:
        raise NoGpuError(missing)
    try:
        library = Library(library_path("cuda"))
        card = library.device(0)
    except (BuildError, EngineError) as error:
        first = str(error).splitlines()[0] if str(error) else ""
        raise NoGpuError(f"the engine cannot be used: {type(error).__name__}: {first}") from error
    if not card.usable:
        name = card.name.decode("utf-8", "replace")
        raise NoGpuError(f"the engine cannot be used: it was built for {library.architectures}, not for {name}")
    return EngineDecoder(models, library, SmiClockReader(uuid=gpu_uuid()), stream=_stream())


def _stream() -> Any:
    """A CuPy stream, for its events; None without CuPy."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        return None
    return cupy.cuda.Stream(non_blocking=True)


@dataclass(frozen=True)
class Timed(Generation):
    """measured_seconds: of the rounds from end to end, by the decoder's clock. predictions: of each round, None where
    there is no policy."""

    measured_seconds: float = 0.0
    predictions: tuple[native.Prediction | None, ...] = ()

    @property
    def decode_seconds(self) -> float:
        return self.measured_seconds


class EngineDecoder:
    """target.kdtr and drafter.kdtr of a folder on engines: one a block size, made anew where it is too small."""

    name = "engine"

    def __init__(
        self,
        models: Path,
        library: Library,
        reader: ClockReader | None = None,
        prefill_rows: int = 0,
        *,
        stream: Any = None,
        dtype: str = "float32",
        graphs: bool = True,
    ):
        """prefill_rows: prompt rows in one pass, 0: as the engine likes. stream: of CuPy, its events are the clock."""
        self.clock: Clock = WallClock() if stream is None else EventClock(CupyEvents(stream))
        self.launch: Literal["eager", "graph"] | None = (
            "graph" if graphs and library.architectures != "host" else "eager"
        )
        self.reader, self.dtype = reader, dtype
        self.library, self.stream = library, stream
        self._models, self._prefill_rows = models, prefill_rows
        self._engines: dict[int, tuple[Engine, int]] = {}
        self._siblings = {(dtype, graphs): self}

    def of(self, dtype: str, graphs: bool = True) -> EngineDecoder:
        """The same models in a number type, their rounds replayed as graphs or launched kernel by kernel."""
        if (dtype, graphs) not in self._siblings:
            made = type(self)(
                self._models,
                self.library,
                self.reader,
                self._prefill_rows,
                stream=self.stream,
                dtype=dtype,
                graphs=graphs,
            )
            self._siblings[dtype, graphs] = made
        return self._siblings[dtype, graphs]

    def decode(
        self, arm: Arm, prompt: Sequence[int], block_size: int, options: Options, *, keep_traces: bool = True
    ) -> Generation:
        """Decode one prompt. Rounds carry traces, which take time, and no stages. Raises EngineError, RequestError."""

        def opened() -> Run:
            return self._run(arm, prompt, block_size, options, keep_traces=keep_traces)

        if arm.costs:  # budgets that no prompt before has had: the graphs of their rounds are captured here
            self._timed(opened)
        return self._timed(opened)

    def _timed(self, opened: Callable[[], Run]) -> Generation:
        made, seconds = timed(opened, self.clock, replayed=self.launch == "graph")
        predictions = tuple(done.prediction for done in made.rounds)
        return Timed(**vars(_translated(made)), measured_seconds=seconds, predictions=predictions)

    def split(self, arm: Arm, prompt: Sequence[int], block_size: int, options: Options) -> tuple[Generation, Stages]:
        """Decode one prompt in rounds that tell the time of their stages; "other" is what the host takes between and
        around them. Raises EngineError, RequestError."""

        def opened() -> Run:
            return self._run(arm, prompt, block_size, options, keep_traces=False, timed=True)

        if arm.costs:
            self._timed(opened)
        made, around = timed(opened, WallClock(), replayed=self.launch == "graph")
        result = _translated(made)
        return result, stages_of([r.seconds for r in result.rounds], around, result.decode_seconds)

    def replay(self, arm: Arm, prompt: Sequence[int], block_size: int, options: Options, lists: Lists) -> Generation:
        """Decode one prompt with these lists in place of what the drafter says, which works for nothing."""
        return self._timed(
            lambda: self._run(arm, prompt, block_size, options, keep_traces=True, lists=lists, full_cost=True)
        )

    def first_round(self, arm: Arm, prompt: Sequence[int], block_size: int, options: Options, lists: Lists) -> Round:
        """The first round with these lists, the target working alone: its seconds by stage, and its trace."""

        def opened() -> Run:
            return self._run(arm, prompt, block_size, options, keep_traces=True, lists=lists, timed=True)

        return _round(first_round(opened, replayed=self.launch == "graph").rounds[0])

    def _run(
        self,
        arm: Arm,
        prompt: Sequence[int],
        block_size: int,
        options: Options,
        keep_traces: bool,
        lists: Lists | None = None,
        full_cost: bool = False,
        timed: bool = False,
    ) -> Run:
        sampling = options.get("sampling", GREEDY)
        request = Request(
            prompt,
            options["max_new_tokens"],
            arm.budget,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop_tokens=options.get("stop_tokens", ()),
            drafter=DFlash() if lists is None else Replay(lists, block_size),
        )
        rows = len(prompt) + request.max_new_tokens + arm.budget
        engine = self._engine(block_size, rows, arm.budget)
        return engine.run(
            [request],
            cast(Method, arm.method),
            keep_traces=keep_traces,
            full_cost=full_cost,
            graphs=self.launch == "graph",
            timed=timed,
            costs=dict(arm.costs),
            builder="heap" if arm.heap else "gpu",
            stream=0 if self.stream is None else self.stream.ptr,
        )

    def _engine(self, block_size: int, rows: int, budget: int) -> Engine:
        held, capacity = self._engines.get(block_size, (None, 0))
        if held is not None and rows <= capacity and budget <= held.max_budget:
            return held
        budget, capacity = max(budget, BUDGET), max(capacity, -(-rows // ROWS) * ROWS)
        if held is not None:
            budget = max(budget, held.max_budget)
            held.close()
        made = Engine.load(
            self._models / "target.kdtr",
            self._models / "drafter.kdtr",
            capacity=capacity,
            max_budget=budget,
            block_size=block_size,
            dtype=self.dtype,
            prefill_rows=self._prefill_rows,
            library=self.library,
        )
        self._engines[block_size] = made, capacity
        return made


def timed(opened: Callable[[], Run], clock: Clock, *, replayed: bool) -> tuple[native.Generation, float]:
    """The request of a run, and seconds of its rounds from end to end, the prompt read before.

    replayed: the rounds must be; where some were launched one by one, or captured, the run after that one counts.
    Raises EngineError where they never are all, RequestError.
    """
    for _ in range(TRIES):
        with opened() as run:
            active = run.prefill()
            start = clock.mark()
            while active:
                active = run.round()
            seconds = clock.seconds(start, clock.mark())
            made, count = finished(run), run.replayed
        if not replayed or count == len(made.rounds):
            return made, seconds
    raise EngineError(f"{count} of {len(made.rounds)} rounds were replayed as a CUDA graph in run {TRIES}, all must be")


def first_round(opened: Callable[[], Run], *, replayed: bool) -> native.Generation:
    """The request of a run after its first round. replayed: that must be, as in `timed`. Raises EngineError,
    RequestError."""
    for _ in range(TRIES):
        with opened() as run:
            run.prefill()
            run.round()
            if run.replayed or not replayed:
                return finished(run)
    raise EngineError(f"the first round was not replayed as a CUDA graph in run {TRIES}, it must be")


def finished(run: Run) -> native.Generation:
    """The first request of a run. Raises RequestError where it failed."""
    if (error := run.error(0)) is not None:
        raise error
    return run.generation(0)


def _translated(made: native.Generation) -> Generation:
    rounds = tuple(_round(done) for done in made.rounds)
    return Generation(made.tokens, rounds, made.finish_reason, made.prefill_seconds, made.cache_length)


def _round(done: native.Round) -> Round:
    trace = done.trace
    return Round(
        prefix_length=done.prefix_length,
        nodes=done.nodes,
        depth_limit=done.depth_limit,
        path=done.path,
        ranks=done.ranks,
        seconds=done.seconds,
        wall_seconds=done.wall_seconds,
        trace=None if trace is None else _trace(trace),
    )


def _trace(trace: native.Trace) -> Trace:
    lists, tree = trace.lists, trace.tree
    return Trace(
        None if lists is None else TopK(lists.ids, lists.lp, lists.logz),
        Tree(tree.tokens, tree.parents, tree.depths, tree.ranks, tree.scores),
        trace.choices,
        trace.bonus,
    )
