"""One run: a batch of requests decoded by one method, round by round or stage by stage."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from ctypes import c_int32
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import decode_abi
from engine.abi import RequestError
from engine.decode_abi import BUILDERS, FINISHES, METHODS, STAGES, Handle
from engine.generation import Generation, Lists, Prediction, Round, Trace, Tree
from engine.request import Filled, Request


class DecodeError(RequestError):
    """A request that failed while others went on; the notes name further ones. round: in which it failed, None: in its
    prompt. generations: what all requests of the call have, those that failed up to the round before."""

    def __init__(self, request: int, code: int, place: int, detail: int, round: int | None):
        super().__init__(request, code, place, detail, of_logits=True)
        self.round = round
        self.generations: list[Generation] = []


class Run:
    """A run of an engine, which has one at a time. `close`, or the end of a `with`, ends it whatever its state."""

    def __init__(
        self,
        decoder: Handle,
        vocab_size: int,
        max_budget: int,
        requests: Sequence[Request],
        method: str,
        *,
        keep_traces: bool = False,
        keep_logits: bool = False,
        full_cost: bool = False,
        graphs: bool = True,
        timed: bool = False,
        costs: Mapping[int, float] | None = None,
        builder: str = BUILDERS[0],
        stream: int = 0,
    ):
        """Makes the buffers; nothing is computed yet. Raises EngineError, RequestError if a request is refused."""
        filled = Filled(requests, max_budget)
        costs = dict(sorted((costs or {}).items()))
        cost_rows = np.array(list(costs), np.int32)
        cost_seconds = np.array(list(costs.values()), np.float64)
        args = decode_abi.RunArgs(
            struct_size=ctypes.sizeof(decode_abi.RunArgs),
            method=METHODS.index(method),
            requests=len(requests),
            keep_traces=keep_traces,
            keep_logits=keep_logits,
            full_cost=full_cost,
            request=filled.structs,
            stream=stream,
            eager=not graphs,
            cost_count=len(costs),
            cost_rows=cost_rows.ctypes.data,
            cost_seconds=cost_seconds.ctypes.data,
            timed=timed,
            builder=BUILDERS.index(builder),
        )
        self._decoder = decoder  # must outlive the run
        self._handle = Handle(decoder.library, "run", decoder.address, ctypes.byref(args))
        self._vocab_size, self._keep_traces, self._keep_logits = vocab_size, keep_traces, keep_logits
        self._predicts = bool(costs)
        self.requests = len(requests)
        self.prefill_seconds = 0.0

    def prefill(self) -> int:
        """Read the prompts and choose each request's first root; how many requests are not finished."""
        started = time.perf_counter()
        self._handle.call("prefill")
        self.prefill_seconds = time.perf_counter() - started
        return sum(self._state(r).finish == 0 for r in range(self.requests))

    def round(self) -> int:
        """One round of every request that is not finished; how many are still not. Raises EngineError."""
        active = c_int32()
        self._handle.call("round", ctypes.byref(active))
        return active.value

    def stage(self, name: str, dump: str | Path | None = None) -> int:
        """One stage of a round, in the order of STAGES; how many requests are not finished. Raises EngineError.

        dump: gets every array of the stage, a KDTR file with the names of the reference's traces; it is then launched
        kernel by kernel.
        """
        active = c_int32()
        path = None if dump is None else bytes(Path(dump))
        self._handle.call("stage", STAGES.index(name), path, ctypes.byref(active))
        return active.value

    @property
    def replayed(self) -> int:
        """How many rounds were replayed as a CUDA graph."""
        rounds = c_int32()
        self._handle.call("replayed", ctypes.byref(rounds))
        return rounds.value

    def tokens(self, request: int, start: int = 0) -> tuple[int, ...]:
        """Output so far, from index `start` on."""
        state = self._state(request)
        return tuple(_array(state.tokens, state.token_count, np.int32)[start:].tolist())

    def error(self, request: int) -> DecodeError | None:
        """What a request failed with."""
        state = self._state(request)
        if FINISHES[state.finish] != "error":
            return None
        code, place, detail = state.status
        in_prompt = place < 0
        return DecodeError(request, code, place, detail, None if in_prompt else state.rounds)

    def generation(self, request: int) -> Generation:
        """What a request has given so far."""
        state = self._state(request)
        return Generation(
            tokens=self.tokens(request),
            rounds=self._rounds(request, state.rounds),
            finish_reason=FINISHES[state.finish],
            prefill_seconds=self.prefill_seconds,
            cache_length=state.cache_length,
            logits=self._logits(request) if self._keep_logits else None,
        )

    def close(self) -> None:
        self._handle.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _state(self, request: int) -> decode_abi.RequestState:
        state = decode_abi.RequestState(struct_size=ctypes.sizeof(decode_abi.RequestState))
        self._handle.call("state", request, ctypes.byref(state))
        return state

    def _rounds(self, request: int, count: int) -> tuple[Round, ...]:
        found = (decode_abi.Round * count)()
        self._handle.call("rounds", request, 0, count, found)
        return tuple(self._round(request, number, each) for number, each in enumerate(found))

    def _round(self, request: int, number: int, found: decode_abi.Round) -> Round:
        seconds = dict(zip(STAGES, found.seconds, strict=True))
        return Round(
            prefix_length=found.prefix_length,
            nodes=found.nodes,
            depth_limit=found.depth_limit,
            path=tuple(found.path[: found.accepted + 1]),
            ranks=tuple(found.ranks[: found.accepted]),
            seconds=seconds if any(seconds.values()) else {},
            wall_seconds=found.wall_seconds,
            trace=self._trace(request, number) if self._keep_traces else None,
            prediction=self._prediction(number) if self._predicts else None,
        )

    def _prediction(self, number: int) -> Prediction:
        found = decode_abi.Prediction()
        self._handle.call("prediction", number, ctypes.byref(found))
        return Prediction(found.budget, found.tokens or None, found.seconds or None)

    def _trace(self, request: int, number: int) -> Trace:
        t = decode_abi.Trace(struct_size=ctypes.sizeof(decode_abi.Trace))
        self._handle.call("trace", request, number, ctypes.byref(t))
        shape, nodes = (t.depths, t.width), t.nodes + 1
        entries = t.depths * t.width
        lists = Lists(
            _array(t.ids, entries, np.int32).reshape(shape),
            _array(t.lp, entries, np.float32).reshape(shape),
            _array(t.logz, t.depths, np.float32),
        )
        tokens, parents, depths, ranks, choices = (
            _array(address, nodes, np.int32) for address in (t.tokens, t.parents, t.node_depths, t.ranks, t.choices)
        )
        tree = Tree(tokens, parents, depths, ranks, _array(t.scores, nodes, np.float64))
        return Trace(lists if entries else None, tree, choices, t.bonus)

    def _logits(self, request: int) -> NDArray[np.float32]:
        rows = c_int32()
        self._handle.call("logits", request, ctypes.byref(rows), None)
        found = np.empty((rows.value, self._vocab_size), np.float32)
        self._handle.call("logits", request, None, found.ctypes.data)
        return found


def _array(address: Any, count: int, dtype: Any) -> NDArray[Any]:
    """A copy of `count` elements at an address."""
    return np.frombuffer(ctypes.string_at(address, count * np.dtype(dtype).itemsize) if count else b"", dtype)
