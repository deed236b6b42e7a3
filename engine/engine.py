"""The native engine: a target, perhaps a drafter, and the caches of its requests, on one device.

    with Engine.load("target.kdtr", "drafter.kdtr") as engine:
        plain = engine.generate(tokens, method="ar", max_new_tokens=64)
        tree = engine.generate(tokens, method="ddtree", max_new_tokens=64, budget=64)

The models are KDTR files, Hugging Face folders, or checkpoint.Random: random weights of a config. Methods: "ar" plain
decoding, "chain" one drafted chain a round, "ddtree" one tree a round. An engine serves one thread and has one run at a
time; several engines may live side by side.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import numpy as np

from engine import checkpoint, decode_abi
from engine.abi import CACHES, Library, SizeError
from engine.checkpoint import Random
from engine.decode_abi import ATTENTION_KERNELS, ATTENTIONS, BUILDERS, DTYPES, GEMMS, METHODS, PATHS, Handle
from engine.generation import Generation
from engine.request import Options, Prompt, Request
from engine.run import Run

Method = Literal["ar", "chain", "ddtree"]
Listener = Callable[[int, tuple[int, ...]], object]  # (number of the request, tokens of one round)

DEFAULT_CAPACITY = 2048
DEFAULT_BUDGET = 64


class Engine:
    """Made by `load`; frees everything at `close`, or at the end of a `with`.

    Sizes of the models: vocab_size, hidden_size, layers, block_size. Bytes: of a cache row, weights, caches, scratch.
    dtype: of weights, activations and caches. cache: of the target's cache rows, "dtype" or "fp8". paths: whether
    products and attention run on tensor cores, "tensor_cores" or, where sizes or dtype do not fit those kernels,
    "general"; the mask form of attention is general. attention_kernel: which attention serves the exact form,
    "general", "mma" (tensor cores of any device) or "wgmma". graphs: whether rounds are replayed as CUDA graphs: not on
    the host, with gemm "cublas" or with KDTREE_LAUNCH_BLOCKING=1.
    """

    def __init__(self, decoder: Handle, max_requests: int, max_budget: int):
        self._decoder, self.max_requests, self.max_budget = decoder, max_requests, max_budget
        self._run: weakref.ref[Run] | None = None
        info = decode_abi.DecoderInfo(struct_size=ctypes.sizeof(decode_abi.DecoderInfo))
        decoder.call("query", ctypes.byref(info))
        self.vocab_size, self.hidden_size, self.layers = info.vocab_size, info.hidden_size, info.layers
        self.block_size, self.row_bytes = info.block_size, info.row_bytes
        self.model_bytes, self.cache_bytes, self.scratch_bytes = info.model_bytes, info.cache_bytes, info.scratch_bytes
        self.dtype, self.cache = DTYPES[info.dtype], CACHES[info.cache_rows]
        self.attention_kernel = ATTENTION_KERNELS[info.attention_kernel]
        self.graphs = bool(info.graphs)
        self.paths = {"products": PATHS[info.products_path], "attention": PATHS[info.attention_path]}

    @classmethod
    def load(
        cls,
        target: str | Path | Random,
        drafter: str | Path | Random | None = None,
        *,
        dtype: str = "float32",
        cache: str = "dtype",
        kind: Literal["cuda", "host"] = "cuda",
        device: int = 0,
        max_requests: int = 1,
        capacity: int = DEFAULT_CAPACITY,
        max_budget: int = DEFAULT_BUDGET,
        block_size: int = 0,
        prefill_rows: int = 0,
        cache_block_size: int = 0,
        gemm: str = "row_invariant",
        attention: str = "exact",
        library: Library | None = None,
    ) -> Engine:
        """The engine on a device. kind "host": the same kernels executed on the CPU, slowly, for tests.

        dtype: "float32" or "bfloat16", whatever the files hold; logits are float32, and so is what the published models
        keep so: the router, the statistics of norms, rotations and softmax. cache: "dtype", or "fp8": the target's
        cache keeps its latents in e4m3 with a scale for each 128 of a row, 656 bytes a row instead of 1152; dtype
        "bfloat16" and rows of 512 + 64 values only.
        capacity: cache rows of a request. block_size 0: the drafter's own, without one 16. prefill_rows: prompt rows of
        all requests in one pass, 0: 256. cache_block_size: rows of a cache block, 0: contiguous caches. library: one
        that is loaded already. Raises CheckpointError, BuildError, EngineError.
        """
        numbers = {
            "dtype": _number("dtype", dtype, DTYPES),
            "cache_rows": _number("cache", cache, CACHES),
            "gemm": _number("gemm", gemm, GEMMS),
            "attention": _number("attention", attention, ATTENTIONS),
            "device": device,
            "max_requests": max_requests,
            "capacity": capacity,
            "max_budget": max_budget,
            "block_size": block_size,
            "prefill_rows": prefill_rows,
            "cache_block_size": cache_block_size,
        }
        if wrong := [name for name, value in numbers.items() if not 0 <= value < 2**31]:
            raise SizeError(f"{wrong[0]} is {numbers[wrong[0]]}, it must be in 0..{2**31 - 1}")
        if library is None:
            from engine import build

            library = Library(build.library(kind))
        models = []
        try:
            models = [checkpoint.load(library, target, "model")]
            if drafter is not None:
                models.append(checkpoint.load(library, drafter, "drafter"))
            args = decode_abi.DecoderArgs(
                struct_size=ctypes.sizeof(decode_abi.DecoderArgs),
                target=models[0].address,
                drafter=models[1].address if drafter is not None else None,
                **numbers,
            )
            decoder = Handle(library, "decoder", ctypes.byref(args))
        finally:
            for model in models:
                model.close()
        return cls(decoder, max_requests, max_budget)

    def run(
        self,
        requests: Iterable[Request],
        method: Method = "ddtree",
        *,
        keep_traces: bool = False,
        keep_logits: bool = False,
        full_cost: bool = False,
        graphs: bool = True,
        timed: bool = False,
        costs: Mapping[int, float] | None = None,
        builder: str = BUILDERS[0],
        stream: int = 0,
    ) -> Run:
        """A run of at most max_requests requests, to be made round by round or stage by stage.

        full_cost: where a stand-in proposes, the drafter works too, and what it says is dropped: so the time of given
        acceptance can be measured. graphs: rounds are replayed as CUDA graphs where the engine has any, with the same
        bits, and so are stages without a dump. timed: rounds tell the seconds of their stages, see Round.seconds, and
        take some 20 us longer on an H200. costs: {rows: seconds} that a round whose verify pass has so many rows, of
        all requests, was measured to take: a policy then chooses the budgets of rounds, at most the largest of the
        requests, so that the tokens that the drafter's probabilities promise come the fastest, see Round.prediction.
        builder: who builds the trees of "ddtree", "gpu" or "heap": the host's, inside every round, the same node for
        node, which is what the GPU's is measured against. stream: handle of a CUDA stream. Raises EngineError,
        RequestError for a request that is refused, and while another run is open.
        """
        _number("method", method, METHODS)
        if _number("builder", builder, BUILDERS) and method != "ddtree":
            raise ValueError(f"builder {builder!r} is for method 'ddtree', not for {method!r}")
        made = Run(
            self._decoder,
            self.vocab_size,
            self.max_budget,
            list(requests),
            method,
            keep_traces=keep_traces,
            keep_logits=keep_logits,
            full_cost=full_cost,
            graphs=graphs,
            timed=timed,
            costs=costs,
            builder=builder,
            stream=stream,
        )
        self._run = weakref.ref(made)
        return made

    @overload
    def generate(
        self,
        prompts: Prompt,
        *,
        method: Method = ...,
        on_tokens: Listener | None = ...,
        keep_traces: bool = ...,
        keep_logits: bool = ...,
        graphs: bool = ...,
        costs: Mapping[int, float] | None = ...,
        builder: str = ...,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt | Request],
        *,
        method: Method = ...,
        on_tokens: Listener | None = ...,
        keep_traces: bool = ...,
        keep_logits: bool = ...,
        graphs: bool = ...,
        costs: Mapping[int, float] | None = ...,
        builder: str = ...,
        **options: Unpack[Options],
    ) -> list[Generation]: ...

    def generate(
        self,
        prompts: Any,
        *,
        method: Method = "ddtree",
        on_tokens: Listener | None = None,
        keep_traces: bool = False,
        keep_logits: bool = False,
        graphs: bool = True,
        costs: Mapping[int, float] | None = None,
        builder: str = BUILDERS[0],
        **options: Unpack[Options],
    ) -> Any:
        """Decode one prompt (tokens [P]) to a Generation, or several, max_requests at most, to a list.

        options: fields of Request, for all prompts; of several, some may be Requests of their own. graphs, costs,
        builder: as in `run`. on_tokens(request, tokens) is called after each round with what it gave. Raises
        EngineError; RequestError for a request that is refused, before anything runs; DecodeError for one that failed,
        once the others are done.
        """
        single = _is_prompt(prompts)
        asked = [p if isinstance(p, Request) else Request(p, **options) for p in ([prompts] if single else prompts)]
        with self.run(
            asked,
            method,
            keep_traces=keep_traces,
            keep_logits=keep_logits,
            graphs=graphs,
            costs=costs,
            builder=builder,
        ) as run:
            _finish(run, on_tokens)
            done = [run.generation(r) for r in range(run.requests)]
            errors = [error for r in range(run.requests) if (error := run.error(r)) is not None]
        if errors:
            errors[0].generations = done
            for other in errors[1:]:
                errors[0].add_note(str(other))
            raise errors[0]
        return done[0] if single else done

    def close(self) -> None:
        """Ends an open run as well."""
        run = self._run() if self._run is not None else None
        if run is not None:
            run.close()
        self._decoder.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _finish(run: Run, on_tokens: Listener | None) -> None:
    """Prompts and all rounds of a run."""
    told = [0] * run.requests

    def tell() -> None:
        for request in range(run.requests):
            if on_tokens is not None and (new := run.tokens(request, told[request])):
                told[request] += len(new)
                on_tokens(request, new)

    active = run.prefill()
    tell()
    while active:
        active = run.round()
        tell()


def _is_prompt(prompts: Any) -> bool:
    """Whether this is one prompt and not several."""
    if isinstance(prompts, np.ndarray):
        return prompts.ndim < 2
    return not len(prompts) or not isinstance(prompts[0], Sequence | np.ndarray | Request)


def _number(name: str, word: str, words: tuple[str, ...]) -> int:
    if word not in words:
        raise ValueError(f"{name} is {word!r}, expected one of {', '.join(words)}")
    return words.index(word)
