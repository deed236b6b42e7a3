"""What is measured behind one small interface: decoders (the NumPy reference, the native engine) and builders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from datasets.evaluation.pair import Pair
from engine.abi import Library
from harness import builders, gpu_builders, gpu_decoder
from harness.cases import GPU, Arm, Case, Chosen, digest
from harness.environment import CHECKOUT
from harness.gpu_decoder import Lists
from harness.records import Environment, Parity, Row, Scalar, Timing
from harness.timing import Clock, ClockReader, Stages, cpu_clock, stages_of
from reference.dflash import DFlash
from reference.loop import Generation, Options, Round, ar_generate, chain_generate, ddtree_generate


class Decoder(Protocol):
    """A system that decodes. clock: what times it. name: "reference", "engine" ... reader: of a GPU's clocks."""

    name: str
    launch: Literal["eager", "graph"] | None
    clock: Clock
    reader: ClockReader | None

    def decode(self, arm: Arm, prompt: Sequence[int], block_size: int, options: Options) -> Generation:
        """Decode one prompt. Rounds carry traces; seconds are those of `clock`."""

    def split(self, arm: Arm, prompt: Sequence[int], block_size: int, options: Options) -> tuple[Generation, Stages]:
        """Decode one prompt, its time split into stages."""


class NativeDecoder(Decoder, Protocol):
    """A decoder of several number types that takes lists in place of its drafter's."""

    dtype: str
    library: Library
    stream: Any  # of CuPy, None without a GPU

    def of(self, dtype: str, graphs: bool = True) -> NativeDecoder:
        """The same in a number type, with graphs or without."""

    def decode(
        self, arm: Arm, prompt: Sequence[int], block_size: int, options: Options, *, keep_traces: bool = True
    ) -> Generation:
        """Decode one prompt. Traces take time."""

    def replay(self, arm: Arm, prompt: Sequence[int], block_size: int, options: Options, lists: Lists) -> Generation:
        """Decode one prompt with lists that are given, the drafter working for nothing."""

    def first_round(self, arm: Arm, prompt: Sequence[int], block_size: int, options: Options, lists: Lists) -> Round:
        """The first round with lists that are given, its time by stage, its trace; the target works alone."""


class ReferenceDecoder:
    """The loops of reference.loop on a target and a drafter, timed in processor time if NumPy has one thread."""

    name = "reference"
    launch: Literal["eager", "graph"] | None = None
    reader: ClockReader | None = None

    def __init__(self, pair: Pair):
        clock = cpu_clock()
        self.clock: Clock = clock
        self._now = clock.now
        self._pair = pair
        self._drafters: dict[int, DFlash] = {}

    def decode(self, arm: Arm, prompt: Sequence[int], block_size: int, options: Options) -> Generation:
        timed: Options = {**options, "clock": self._now, "keep_traces": True, "budget": arm.budget}
        if arm.method == "ar":
            return ar_generate(self._pair.target, None, prompt, **timed)
        if block_size not in self._drafters:
            self._drafters[block_size] = self._pair.drafter(block_size)
        generate = chain_generate if arm.method == "chain" else ddtree_generate
        return generate(self._pair.target, self._drafters[block_size], prompt, **timed)

    def split(self, arm: Arm, prompt: Sequence[int], block_size: int, options: Options) -> tuple[Generation, Stages]:
        """Its rounds always time themselves by stage; around them is what the prompt did not take."""
        start = self.clock.mark()
        result = self.decode(arm, prompt, block_size, options)
        around = self.clock.seconds(start, self.clock.mark()) - result.prefill_seconds
        return result, stages_of([r.seconds for r in result.rounds], around, result.decode_seconds)


@dataclass(frozen=True)
class Systems:
    """How decoders and builders are made; the tests put others in their place, with faults."""

    decoder: Callable[[Pair], Decoder] = ReferenceDecoder
    builder: Callable[[str, NDArray[np.float32], NDArray[np.int32], int], builders.Build] = builders.make
    gpu: Callable[[str | None], gpu_builders.Gpu] = gpu_builders.open_gpu
    engine: Callable[[Path, str | None], NativeDecoder] = gpu_decoder.open_decoder


@dataclass(frozen=True)
class Bench:
    """What the cases of one run share. folder: for divergences. seed: shifts the draws of sampled decoding.

    done: keys of rows that need not be measured again.
    """

    suite: str
    environment: Environment
    folder: Path
    models: Path
    lists: Path
    seed: int = 0
    systems: Systems = field(default_factory=Systems)
    done: frozenset[tuple[str, str, str]] = frozenset()

    @functools.cached_property
    def pair(self) -> Pair:
        """The models; FileNotFoundError if they are not there."""
        from datasets.evaluation import pair

        for name in ("target.kdtr", "drafter.kdtr"):
            if not (self.models / name).is_file():
                raise FileNotFoundError(f"{short(self.models / name)} is absent")
        return pair.load(self.models)

    @functools.cached_property
    def decoder(self) -> Decoder:
        return self.systems.decoder(self.pair)

    @functools.cached_property
    def text(self) -> Callable[[int], str]:
        """Text of one token; its number where there is no tokenizer."""
        file = self.models / "tokenizer.json"
        try:
            from tokenizers import Tokenizer
        except ImportError:
            return str
        if not file.is_file():
            return str
        tokenizer = Tokenizer.from_file(str(file))
        return functools.cache(lambda token: str(tokenizer.decode([token], skip_special_tokens=False)))

    def is_done(self, chosen: Chosen, case_hash: str, unable: Collection[str] = (GPU,)) -> bool:
        """Whether every chosen arm that can be measured has its row. unable: those that cannot."""
        arms = [arm for arm in chosen.arms if arm not in unable]
        return bool(arms) and all((chosen.case.id, case_hash, arm) in self.done for arm in arms)

    @functools.cached_property
    def _gpu(self) -> gpu_builders.Gpu | gpu_builders.NoGpuError:
        try:
            return self.systems.gpu(self.environment.gpu_missing)
        except gpu_builders.NoGpuError as error:
            return error

    @property
    def gpu(self) -> gpu_builders.Gpu | None:
        """Where builders run on the GPU, None if they cannot."""
        return None if isinstance(self._gpu, gpu_builders.NoGpuError) else self._gpu

    def need_gpu(self) -> gpu_builders.Gpu:
        """The same. Raises NoGpuError, which says why."""
        if isinstance(self._gpu, gpu_builders.NoGpuError):
            raise self._gpu
        return self._gpu

    @functools.cached_property
    def _engine(self) -> NativeDecoder | gpu_builders.NoGpuError:
        try:
            return self.systems.engine(self.models, self.environment.gpu_missing)
        except gpu_builders.NoGpuError as error:
            return error

    @property
    def engine(self) -> NativeDecoder | None:
        """The decoder on the GPU, None if there is none."""
        return None if isinstance(self._engine, gpu_builders.NoGpuError) else self._engine

    def need_engine(self) -> NativeDecoder:
        """The same. Raises NoGpuError, which says why."""
        if isinstance(self._engine, gpu_builders.NoGpuError):
            raise self._engine
        return self._engine

    def row(
        self,
        case: Case,
        case_hash: str,
        block: str,
        arm: str,
        *,
        name: str | None = None,
        reason: str | None = None,
        not_run: bool = False,
        against: str | None = None,
        params: Mapping[str, Scalar] | None = None,
        parity: Parity | None = None,
        metrics: Mapping[str, float | int | None] | None = None,
        timing: Timing | None = None,
        **others: Any,
    ) -> Row:
        """A row of this run. name: instead of the case's id."""
        return Row(
            suite=self.suite,
            block=block,  # type: ignore[arg-type]  # checked by Row
            case=name or case.id,
            case_hash=case_hash,
            arm=arm,
            against=against,
            params=dict(params or {}),
            seed=self.seed,
            status="OK" if reason is None else "NOT_RUN" if not_run else "INVALID",
            reason=reason,
            parity=parity,
            metrics=dict(metrics or {}),
            environment=self.environment,
            timing=timing,
            **others,
        )

    def not_run(self, case: Case, block: str, arms: Sequence[str], reason: str, **others: Any) -> Iterator[Row]:
        """Rows of arms that were not run. Their hash is that of the case alone where there is no input."""
        case_hash = others.pop("case_hash", digest(case))
        for arm in arms:
            yield self.row(case, case_hash, block, arm, reason=reason, not_run=True, **others)


def short(path: Path) -> str:
    """A path for people: relative to the checkout where it lies in it."""
    whole = path.resolve()
    return whole.relative_to(CHECKOUT).as_posix() if whole.is_relative_to(CHECKOUT) else str(path)
