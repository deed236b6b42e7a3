"""What the stages return: frozen dataclasses of arrays, in the memory of the library, sizes as in the C header.

The arrays are not done when a call returns but when its stream is; what brings something to the host waits for it.
R requests, L depth limit, K list width, B budget.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.abi import ROUTES, RequestError
from engine.memory import HostMemory, Memory

Self = TypeVar("Self", bound="Result")


@dataclass(frozen=True)
class Origin:
    """Of which stage a status is. of_logits: what this stage looks for NaN in, logits or lists.

    before: result or status array of the stage whose failures are carried on; overwritten: in the same array.
    """

    memory: Memory
    stream: int
    of_logits: bool
    before: Any = None
    overwritten: bool = False


@dataclass(frozen=True, eq=False)
class Result:
    """status int32 [R, 3]: code (kdtree_request_status, 0 is fine), place, detail of each request."""

    status: Any
    origin: Origin = field(repr=False)

    def errors(self) -> list[RequestError]:
        """What went wrong in this stage and those before it, one for each request that failed."""
        status = self._host(self.status).tolist()
        return [
            RequestError(request, code, place, detail, self._of_logits(request))
            for request, (code, place, detail) in enumerate(status)
            if code
        ]

    def raise_for_status(self) -> None:
        """Raise the RequestError of the first request that failed; its notes name the others."""
        errors = self.errors()
        if errors:
            for other in errors[1:]:
                errors[0].add_note(str(other))
            raise errors[0]

    def to_host(self: Self) -> Self:
        """The same result in NumPy arrays of its own."""
        held = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "origin"}
        copies = {
            name: value.to_host() if isinstance(value, Result) else self._host(value)
            for name, value in held.items()
            if value is not None
        }
        origin = dataclasses.replace(self.origin, memory=HostMemory(), stream=0)
        return dataclasses.replace(self, **copies, origin=origin)

    def _host(self, array: Any) -> NDArray[Any]:
        return self.origin.memory.to_host(array, self.origin.stream)

    def _of_logits(self, request: int) -> bool | None:
        """Whether a NaN of this request was found in logits, None if the status alone cannot say so."""
        own, before = self.origin.of_logits, self.origin.before
        if before is None:
            return own
        if not isinstance(before, Result):
            return own or None
        carried = before._of_logits(request)
        if self.origin.overwritten:
            return own if own == carried else None
        return carried if before._host(before.status)[request, 0] else own


@dataclass(frozen=True, eq=False)
class TopK(Result):
    """ids int32 [R, L, K], lp float32 [R, L, K], logz float32 [R, L]."""

    ids: Any
    lp: Any
    logz: Any


@dataclass(frozen=True, eq=False)
class Trees(Result):
    """node_count int32 [R]; tokens, parents, depths, ranks int32 [R, 1+B]; scores float64 [R, 1+B]; route int32 [R].

    If asked for: positions, first_child, next_sibling int32 [R, 1+B], visibility uint32 [R, 1+B, ceil((1+B)/32)],
    paths int32 [R, 1+B, L+1]. lists: what the trees were built from, if logits_tree did.
    """

    OPTIONAL: ClassVar[tuple[str, ...]] = ("positions", "visibility", "paths", "first_child", "next_sibling")

    node_count: Any
    tokens: Any
    parents: Any
    depths: Any
    ranks: Any
    scores: Any
    positions: Any = None
    visibility: Any = None
    paths: Any = None
    first_child: Any = None
    next_sibling: Any = None
    route: Any = None
    lists: TopK | None = None

    def tree(self, request: int) -> dict[str, NDArray[Any]]:
        """The arrays of one request on the host, cut to its 1+n nodes; node_count is int32 [].

        Many of them: take `to_host()` first.
        """
        count = self._host(self.node_count[request : request + 1]).reshape(())
        rows = int(count) + 1
        found = {"node_count": count}
        for name in ("tokens", "parents", "depths", "ranks", "scores", *self.OPTIONAL):
            array = getattr(self, name)
            if array is not None:
                found[name] = self._host(array[request, :rows])
        if "visibility" in found:
            found["visibility"] = np.ascontiguousarray(found["visibility"][:, : (rows + 31) // 32])
        return found

    def routes(self) -> list[str]:
        """How each tree was built: "none", "parallel" or "serial"."""
        return [ROUTES[route] for route in self._host(self.route).tolist()]


@dataclass(frozen=True, eq=False)
class Accepted(Result):
    """accepted int32 [R] nodes without the root, -1 where a request failed; path int32 [R, L+1]; bonus int32 [R]."""

    accepted: Any
    path: Any
    bonus: Any


@dataclass(frozen=True, eq=False)
class Compacted(Result):
    """moved int32 [R]: rows that changed their place."""

    moved: Any
