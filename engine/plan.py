"""A stage prepared once, to be called many times: arrays checked, outputs and workspace made, its struct filled in."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from engine import abi
from engine.arrays import CUDA, ArrayError, View, check, view
from engine.memory import HostMemory, Memory

T = TypeVar("T")
P = ParamSpec("P")
Take = Callable[[int], tuple[int, Any]]  # bytes -> (address aligned to 256, what keeps it alive)
INT32_MAX = 2**31 - 1


class Workspace:
    """Scratch memory for all calls of one thread on one stream, which take turns there. It grows and never shrinks.

    A block that became too small goes back to the pool of its stream, which gives it to later work on that stream only:
    so it outlives the calls that still use it.
    """

    def __init__(self, memory: Memory, stream: int):
        self._memory, self._stream = memory, stream
        self._size = 0
        self._block: tuple[int, Any] = (0, None)

    def take(self, size: int) -> tuple[int, Any]:
        """(address, what keeps it alive) of at least `size` bytes."""
        if size > self._size:
            self._block = self._memory.workspace(size, self._stream)
            self._size = size
        return self._block


class Call:
    """One argument struct while it is filled in; what does not fit raises ArrayError or SizeError."""

    def __init__(self, library: abi.Library, memory: Memory, name: str, struct: type[ctypes.Structure], stream: Any):
        self.library, self.memory, self.name = library, memory, name
        self.device, self.stream = memory.device, memory.stream(stream)
        if self.device.kind == CUDA:
            library.require(self.device.number)
        self.struct: Any = struct(struct_size=ctypes.sizeof(struct))
        self.kept: list[object] = []
        self.workspace_size = 0
        self._types: dict[str, Any] = {field[0]: field[1] for field in struct._fields_}
        if "stream" in self._types:
            self.struct.stream = self.stream

    def sizes(self, **values: int) -> None:
        """Set sizes; ctypes would cut off what does not fit an int32."""
        for name, value in values.items():
            setattr(self.struct, name, self.within(name, value, -INT32_MAX, INT32_MAX))

    def within(self, name: str, value: int, least: int, most: int) -> int:
        """A size that something is allocated from. Raises SizeError."""
        if not least <= value <= most:
            raise abi.SizeError(f"kdtree_{self.name}: {name} is {value}, it must be in [{least}, {most}]")
        return int(value)

    def view(
        self, argument: str, array: Any, *, axes: int | None = None, written: bool = False, **as_type: Any
    ) -> View:
        """The memory of an array, of `axes` axes. Work on our stream follows that of its producer."""
        found = view(self.name, argument, array, self.device, self.stream, written=written, **as_type)
        if axes is not None and len(found.shape) != axes:
            raise ArrayError(self.name, argument, f"an array of {axes} axes", f"{found.dtype} {list(found.shape)}")
        if found.stream is not None:
            self.memory.follow(self.stream, found.stream)
        self.kept.append(found.owner)
        return found

    def read(self, shapes: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
        """Set the arrays that the stage reads, {argument: (array or None, shape)}."""
        for name, (array, shape) in shapes.items():
            if array is not None:
                found = self.view(name, array)
                check(self.name, name, found, self._types[name].dtype, shape)
                self.point(name, found)

    def write(self, shapes: Mapping[str, tuple[int, ...]], given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Set the arrays that the stage writes, {argument: shape}: those of `given`, all others made here.

        Returns {argument: array}. What is given must have a name that the stage knows.
        """
        given = given or {}
        if unknown := given.keys() - shapes.keys():
            raise ArrayError(self.name, "out", f"of {', '.join(shapes)}", ", ".join(sorted(unknown)))
        arrays = {}
        for name, shape in shapes.items():
            dtype = self._types[name].dtype
            array = given.get(name)
            arrays[name] = self.memory.empty(shape, dtype, self.stream) if array is None else array
            found = self.view(name, arrays[name], written=True)
            check(self.name, name, found, dtype, shape)
            self.point(name, found)
        return arrays

    def point(self, name: str, found: View) -> None:
        """Set a pointer. The library asks for one to every required array, and an empty array may have none: then the
        struct's own address stands for it, which nothing reads."""
        setattr(self.struct, name, found.pointer if found.size else ctypes.addressof(self.struct))

    def workspace(self, *sizes: int) -> None:
        """Ask the library how much scratch memory it needs."""
        self.workspace_size = self.library.workspace(self.name, *sizes)


class Plan(Generic[T]):
    """`call()` runs the stage again on the same arrays: one call into the library, nothing checked, nothing allocated.

    result: the arrays that every call writes. A plan keeps its arrays and its workspace alive: keep the plan as long as
    the device works on them, and as long as there is a graph that its call was captured in.
    """

    def __init__(self, name: str, calls: tuple[Call, ...], result: T):
        self.result, self.memory, self.stream = result, calls[0].memory, calls[0].stream
        self._name, self._calls, self._library = name, calls, calls[0].library
        self._scratch: object = None
        self._invoke = partial(self._library.stage(name), *(ctypes.byref(call.struct) for call in calls))

    def scratch(self, take: Take) -> None:
        """Give the structs their workspaces, one after the other in one block of `take`."""
        sizes = [-(-call.workspace_size // 256) * 256 for call in self._calls]
        if not sum(sizes):
            return
        address, self._scratch = take(sum(sizes))
        for call, size in zip(self._calls, sizes, strict=True):
            if size:
                call.struct.workspace, call.struct.workspace_size = address, call.workspace_size
                address += size

    def call(self) -> T:
        """Enqueue the stage. Raises EngineError."""
        status = self._invoke()
        if status:
            self._library.check(self._name, status)
        return self.result


class Owner:
    """Whose stages these are: the library, its memory, and one workspace a stream. For one thread."""

    def __init__(self, library: abi.Library, memory: Memory):
        self.library, self.memory, self.host = library, memory, HostMemory()
        self._workspaces: dict[tuple[Memory, int], Workspace] = {}

    def workspace(self, memory: Memory, stream: int) -> Workspace:
        """The workspace that all calls on a stream share."""
        return self._workspaces.setdefault((memory, stream), Workspace(memory, stream))


class Stage(Generic[P, T]):
    """`ops.stage(...)` runs a stage once and returns its result; `ops.stage.plan(...)` takes the same arguments and
    prepares it for many calls. A plan has a workspace of its own, so it may run or be replayed beside other work."""

    def __init__(self, owner: Owner, prepare: Callable[Concatenate[Any, P], Plan[T]]):
        self._owner, self._prepare = owner, prepare
        self.__doc__ = prepare.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        plan = self._prepare(self._owner, *args, **kwargs)
        plan.scratch(self._owner.workspace(plan.memory, plan.stream).take)
        return plan.call()

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Plan[T]:
        plan = self._prepare(self._owner, *args, **kwargs)
        plan.scratch(lambda size: plan.memory.workspace(size, plan.stream))
        return plan


class stage(Generic[P, T]):  # noqa: N801  # used as a decorator
    """Makes a Stage of a method that returns a plan."""

    def __init__(self, prepare: Callable[Concatenate[Any, P], Plan[T]]):
        self._prepare = prepare
        self.__doc__ = prepare.__doc__

    def __get__(self, owner: Any, kind: type | None = None) -> Stage[P, T]:
        return Stage(owner, self._prepare)
