"""What a request asks for, and who proposes tokens for it: the engine's drafter, or a stand-in of known behaviour.

The stand-ins are those of reference/drafter.py, which says what each proposes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine import decode_abi
from engine.abi import RequestError, SizeError

INT32_MAX = 2**31 - 1
Prompt = Sequence[int] | NDArray[Any]


@dataclass(frozen=True)
class DFlash:
    """The drafter that the engine was loaded with, at the engine's block size."""


@dataclass(frozen=True, eq=False)
class Oracle:
    """Proposes `golden`, the tokens that follow the prompt, and from index `right` on (None: never) wrong ones."""

    golden: ArrayLike
    block_size: int = 8
    right: int | None = None


@dataclass(frozen=True, eq=False)
class NoisyOracle:
    """Proposes the golden token at a random rank 0..max_rank or, with probability `miss`, not at all."""

    golden: ArrayLike
    block_size: int = 8
    miss: float = 0.1
    max_rank: int = 2
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Replay:
    """Proposes recorded lists: root's absolute position -> (ids int [L, K], lp float32 [L, K]), of one width K.

    The shorter ones of several are filled up with depths that propose nothing.
    """

    lists: Mapping[int, tuple[NDArray[Any], NDArray[Any]]]
    block_size: int = 8


Drafter = DFlash | Oracle | NoisyOracle | Replay
_KINDS = {DFlash: "dflash", Oracle: "oracle", NoisyOracle: "noisy", Replay: "replay"}


@dataclass(frozen=True, eq=False)
class Request:
    """prompt: integers [P], P at least 1. budget: DDTree's non-root nodes per round, None: the engine's most.

    temperature 0 is greedy; top_k 0 and top_p 1 switch the filters off. capacity: cache rows it may use, None: room for
    the prompt, the new tokens and a whole tree, as far as there is.
    """

    prompt: Prompt
    max_new_tokens: int
    budget: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: Collection[int] = ()
    drafter: Drafter = field(default_factory=DFlash)
    capacity: int | None = None


class Options(TypedDict, total=False):
    """The fields of a Request that stand beside its prompt."""

    max_new_tokens: int
    budget: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_tokens: Collection[int]
    drafter: Drafter
    capacity: int | None


class Filled:
    """Requests as the structs of the C ABI, `structs`, with the arrays that they point to."""

    def __init__(self, requests: Sequence[Request], max_budget: int):
        """Raises SizeError or RequestError, naming the request, for what the C types cannot say; the rest is checked
        by the library."""
        self._kept: list[NDArray[Any]] = []
        self.structs = (decode_abi.Request * len(requests))()
        for number, request in enumerate(requests):
            self._fill(number, self.structs[number], request, max_budget)

    def _fill(self, number: int, struct: decode_abi.Request, request: Request, max_budget: int) -> None:
        def whole(name: str, value: int, least: int = 0, most: int = INT32_MAX) -> int:
            if not least <= value <= most:
                raise SizeError(f"request {number}: {name} is {value}, it must be in {least}..{most}")
            return int(value)

        def integers(name: str, values: ArrayLike) -> NDArray[np.int32]:
            given = np.asarray(values)
            if given.size == 0 and given.ndim == 1:
                return given.astype(np.int32)
            if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
                raise SizeError(f"request {number}: {name} must be integers [N], got {given.dtype} {list(given.shape)}")
            whole(name, int(given.min()), -INT32_MAX)
            whole(name, int(given.max()), -INT32_MAX)
            return given.astype(np.int32)

        prompt = integers("prompt", request.prompt)
        if not len(prompt):
            raise SizeError(f"request {number}: the prompt must hold at least one token")
        if request.capacity is not None and request.capacity < len(prompt):
            raise RequestError(number, 11, len(prompt), request.capacity)
        stop = integers("stop_tokens", sorted(set(request.stop_tokens)))
        budget = max_budget if request.budget is None else request.budget
        if not math.isfinite(request.temperature):
            raise SizeError(f"request {number}: temperature is {request.temperature}, it must be finite")
        struct.struct_size = ctypes.sizeof(struct)
        struct.prompt, struct.prompt_length = self._keep(prompt), len(prompt)
        struct.max_new_tokens = whole("max_new_tokens", request.max_new_tokens)
        struct.budget = whole("budget", budget)
        struct.capacity = whole("capacity", request.capacity or 0)
        struct.temperature, struct.top_p = request.temperature, request.top_p
        struct.top_k = whole("top_k", request.top_k)
        struct.seed = whole("seed", request.seed, most=2**64 - 1)
        struct.stop_tokens, struct.stop_count = self._keep(stop), len(stop)

        drafter = request.drafter
        struct.drafter = decode_abi.DRAFTERS.index(_KINDS[type(drafter)])
        if isinstance(drafter, DFlash):
            return
        struct.block_size = whole("block_size", drafter.block_size, 1)
        if isinstance(drafter, Replay):
            self._fill_lists(number, struct, drafter)
            return
        golden = integers("golden", np.asarray(drafter.golden).reshape(-1))
        struct.golden, struct.golden_count = self._keep(golden), len(golden)
        struct.right = len(golden)
        if isinstance(drafter, NoisyOracle):
            struct.max_rank, struct.miss = whole("max_rank", drafter.max_rank), drafter.miss
            struct.noise_seed = whole("seed of the noise", drafter.seed, most=2**64 - 1)
        elif drafter.right is not None:
            struct.right = whole("right", drafter.right)

    def _fill_lists(self, number: int, struct: decode_abi.Request, drafter: Replay) -> None:
        if not drafter.lists:
            return
        widths = {ids.shape[1] for ids, lp in drafter.lists.values() if ids.ndim == 2 and ids.shape == lp.shape}
        if len(widths) != 1 or any(ids.ndim != 2 or ids.shape != lp.shape for ids, lp in drafter.lists.values()):
            shapes = sorted({f"ids {list(ids.shape)} and lp {list(lp.shape)}" for ids, lp in drafter.lists.values()})
            raise SizeError(f"request {number}: lists must be [L, K] of one width K, got {'; '.join(shapes)}")
        depths, (width,) = max(len(ids) for ids, _ in drafter.lists.values()), widths
        positions = np.array(list(drafter.lists), np.int32)
        ids = np.zeros((len(positions), depths, width), np.int32)
        lp = np.full((len(positions), depths, width), -np.inf, np.float32)
        for place, (own_ids, own_lp) in enumerate(drafter.lists.values()):
            ids[place, : len(own_ids)], lp[place, : len(own_lp)] = own_ids, own_lp
        struct.list_count, struct.list_depths, struct.list_width = len(positions), depths, width
        struct.list_positions, struct.list_ids, struct.list_lp = map(self._keep, (positions, ids, lp))

    def _keep(self, array: NDArray[Any]) -> int:
        self._kept.append(array)
        return array.ctypes.data
