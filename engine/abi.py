"""The C ABI of cuda/include/kdtree_engine.h for ctypes: its structs, a loaded library, and its errors as exceptions.

A pointer's type says what the array holds (`F32.dtype`); names, order and types are those of the header, and a test
holds every field against what the C compiler makes of it.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, ClassVar

VERSION = 1
MAX_DEPTH = 31
MAX_BUDGET = 1024
MAX_REQUESTS = 65535


class F32(c_void_p):
    """Address of float32."""

    dtype: ClassVar[str] = "float32"


class F64(c_void_p):
    """Address of float64."""

    dtype: ClassVar[str] = "float64"


class I32(c_void_p):
    """Address of int32."""

    dtype: ClassVar[str] = "int32"


class U32(c_void_p):
    """Address of uint32."""

    dtype: ClassVar[str] = "uint32"


class U64(c_void_p):
    """Address of uint64."""

    dtype: ClassVar[str] = "uint64"


Fields = tuple[tuple[str, type[Any]], ...]


def _all(kind: type[Any], names: str) -> Fields:
    return tuple((name, kind) for name in names.split())


_WORKSPACE: Fields = (("workspace", c_void_p), ("workspace_size", c_size_t))


class DeviceInfo(ctypes.Structure):
    """kdtree_device_info."""

    _fields_ = (
        ("struct_size", c_uint32),
        *_all(c_int32, "device compute_capability multiprocessors shared_memory_optin driver runtime usable"),
        ("total_memory", c_uint64),
        ("name", c_char * 64),
    )


class TopkLogprobArgs(ctypes.Structure):
    """kdtree_topk_logprob_args."""

    _fields_ = (
        ("struct_size", c_uint32),
        *_all(c_int32, "requests depth_limit vocab_size k dtype"),
        ("row_stride", c_int64),
        ("logits", c_void_p),
        *_all(I32, "depth_limits before ids"),
        *_all(F32, "lp logz"),
        ("status", I32),
        *_WORKSPACE,
        ("stream", c_void_p),
    )


class TreeBuildArgs(ctypes.Structure):
    """kdtree_tree_build_args."""

    _fields_ = (
        ("struct_size", c_uint32),
        *_all(c_int32, "requests depth_limit width budget vocab_size checked shared_memory_limit"),
        ("lp", F32),
        *_all(I32, "ids root_tokens prefix_lengths depth_limits budgets before"),
        *_all(I32, "node_count tokens parents depths ranks"),
        ("scores", F64),
        ("positions", I32),
        ("visibility", U32),
        *_all(I32, "paths first_child next_sibling route status"),
        *_WORKSPACE,
        ("stream", c_void_p),
    )


class TargetChoiceArgs(ctypes.Structure):
    """kdtree_target_choice_args."""

    _fields_ = (
        ("struct_size", c_uint32),
        *_all(c_int32, "requests rows vocab_size dtype"),
        ("row_stride", c_int64),
        ("logits", c_void_p),
        *_all(I32, "node_count positions"),
        ("temperatures", F32),
        ("top_k", I32),
        ("top_p", F32),
        ("seeds", U64),
        *_all(I32, "before choices"),
        *_WORKSPACE,
        ("stream", c_void_p),
    )


class TreeAcceptArgs(ctypes.Structure):
    """kdtree_tree_accept_args."""

    _fields_ = (
        ("struct_size", c_uint32),
        *_all(c_int32, "requests budget depth_limit"),
        *_all(I32, "node_count tokens parents choices before accepted path bonus status"),
        ("stream", c_void_p),
    )


class CacheView(ctypes.Structure):
    """kdtree_cache_view."""

    _fields_ = (
        ("base", c_void_p),
        *_all(c_int64, "layer_stride request_stride row_stride"),
        *_all(c_int32, "row_bytes layers capacity block_size table_stride reserved"),
        ("block_table", I32),
    )


class KvCompactArgs(ctypes.Structure):
    """kdtree_kv_compact_args."""

    _fields_ = (
        ("struct_size", c_uint32),
        *_all(c_int32, "requests depth_limit reserved"),
        ("cache", CacheView),
        *_all(I32, "prefix_lengths accepted path before status moved"),
        ("stream", c_void_p),
    )


class MlaAttentionArgs(ctypes.Structure):
    """kdtree_mla_attention_args."""

    _fields_ = (
        ("struct_size", c_uint32),
        *_all(c_int32, "requests rows heads rank rope dtype cache_rows path layer longest path_stride"),
        ("scale", c_float),
        ("cache", CacheView),
        ("q", c_void_p),
        *_all(I32, "node_count prefix_lengths positions paths"),
        ("out", c_void_p),
        ("lse", F32),
        *_WORKSPACE,
        ("stream", c_void_p),
    )


class HeapTreeArgs(ctypes.Structure):
    """kdtree_heap_tree_args, of kdtree_heap_tree.h."""

    _fields_ = (
        ("struct_size", c_uint32),
        *_all(c_int32, "requests depth_limit width budget vocab_size checked"),
        ("lp", F32),
        *_all(I32, "ids root_tokens prefix_lengths depth_limits budgets"),
        *_all(I32, "node_count tokens parents depths ranks"),
        ("scores", F64),
        *_all(I32, "positions first_child next_sibling"),
        ("visibility", U32),
        *_all(I32, "paths status"),
        *_WORKSPACE,
    )


ARGUMENTS: dict[str, tuple[type[ctypes.Structure], ...]] = {
    "topk_logprob": (TopkLogprobArgs,),
    "tree_build": (TreeBuildArgs,),
    "logits_tree": (TopkLogprobArgs, TreeBuildArgs),
    "target_choice": (TargetChoiceArgs,),
    "tree_accept": (TreeAcceptArgs,),
    "kv_compact": (KvCompactArgs,),
    "mla_attention": (MlaAttentionArgs,),
    "heap_tree": (HeapTreeArgs,),
}
# Sizes that the query takes.
WORKSPACES = {"topk_logprob": 4, "tree_build": 4, "target_choice": 3, "mla_attention": 6, "heap_tree": 3}
DTYPES = {"float32": 0, "bfloat16": 1}  # kdtree_dtype
ROUTES = ("none", "parallel", "serial")  # kdtree_route
CACHES = ("dtype", "fp8")  # kdtree_cache_rows
FP8_ROW_BYTES = 656
ATTENTION_PATHS = ("best", "portable", "wgmma")  # kdtree_attention_path


class EngineError(RuntimeError):
    """A call of the library failed; nothing was computed. code: its kdtree_status, None if it was not called."""

    code: int | None = None


class LibraryError(EngineError):
    """The library cannot be loaded, is of another version, or lacks a call."""


class VersionError(EngineError):
    """A struct is that of another version of the header."""

    code = 1


class SizeError(EngineError, ValueError):
    """A size is out of range."""

    code = 2


class PointerError(EngineError, ValueError):
    """A required array is missing."""

    code = 3


class AlignmentError(EngineError, ValueError):
    """An array is not aligned to its elements."""

    code = 4


class WorkspaceError(EngineError):
    """The workspace is too small."""

    code = 5


class UnsupportedError(EngineError):
    """The device has too little shared memory, or the library holds no code for it."""

    code = 6


class CudaError(EngineError):
    """CUDA reported an error; the message has its name."""

    code = 7


ERRORS: dict[int, type[EngineError]] = {
    error.code: error
    for error in (VersionError, SizeError, PointerError, AlignmentError, WorkspaceError, UnsupportedError, CudaError)
    if error.code is not None
}
# kdtree_heap_tree_result, which brings no message: 0 and 1 are fine, for a refused request has its status.
_HEAP_TREE_RESULTS = {2: 2, 3: 3, 4: 5, 5: 1}


class Library:
    """A loaded library. Every call may be missing from it, which shows when it is used and not before."""

    def __init__(self, path: Path):
        """Raises LibraryError if `path` cannot be loaded or is of another ABI version."""
        self.path = path
        self._functions: dict[str, Any] = {}
        self._usable: set[int] = set()
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise LibraryError(f"{path.name} cannot be loaded: {error}") from error
        version = self.function("abi_version", c_int32)()
        if version != VERSION:
            raise LibraryError(f"{path.name} has version {version} of the C ABI, this package needs {VERSION}")
        self._last_error = self.function("last_error", ctypes.c_char_p)

    def function(self, name: str, result: type[Any] | None, *arguments: type[Any]) -> Any:
        """kdtree_<name> with its prototype. Raises LibraryError if the library has no such function."""
        if name not in self._functions:
            try:
                found = self._library[f"kdtree_{name}"]
            except AttributeError:
                raise LibraryError(f"{self.path.name} has no function kdtree_{name}") from None
            found.restype, found.argtypes = result, arguments
            self._functions[name] = found
        return self._functions[name]

    def stage(self, name: str) -> Any:
        """The function of a stage: pointers to its structs -> status. For `check` if it is not 0."""
        return self.function(name, c_int32, *(ctypes.POINTER(struct) for struct in ARGUMENTS[name]))

    def call(self, name: str, *structs: ctypes.Structure) -> None:
        """Run one stage; fills in struct_size. Raises the EngineError of its status."""
        for struct in structs:
            struct.struct_size = ctypes.sizeof(struct)
        status = self.stage(name)(*map(ctypes.byref, structs))
        if status:
            self.check(name, status)

    def check(self, name: str, status: int) -> None:
        """Raise what a status other than 0 means, with the library's message."""
        if name == "heap_tree":
            if status == 1:
                return
            error = ERRORS.get(_HEAP_TREE_RESULTS.get(status, 0), EngineError)
            raise error(f"kdtree_heap_tree: {error.__doc__ or ''}".rstrip("."))
        message = self._last_error().decode("utf-8", "replace")
        raise ERRORS.get(status, EngineError)(message or f"kdtree_{name}: status {status}")

    def workspace(self, name: str, *sizes: int) -> int:
        """Bytes that a stage needs for sizes in the order of the header; 0: none, or a size is out of range."""
        size: int = self.function(f"{name}_workspace", c_size_t, *(c_int32,) * WORKSPACES[name])(*sizes)
        return size

    @property
    def architectures(self) -> str:
        """What the library was built for, "host" for the one that runs on the CPU."""
        text: bytes = self.function("architectures", ctypes.c_char_p)()
        return text.decode()

    def require(self, device: int) -> None:
        """Raise UnsupportedError if the library holds no code for a CUDA device; asked once for each.

        Public issues: flashinfer-ai/flashinfer#5355, deepseek-ai/FlashMLA#39 (a binary for one architecture alone).
        """
        if device in self._usable:
            return
        info = self.device(device)
        if not info.usable:
            capability = f"{info.compute_capability // 10}.{info.compute_capability % 10}"
            raise UnsupportedError(
                f"device {device} ({info.name.decode('utf-8', 'replace')}) has compute capability {capability}; "
                f"{self.path.name} was built for {self.architectures}"
            )
        self._usable.add(device)

    def device_count(self) -> int:
        """Number of CUDA devices, 0 without a driver. Raises CudaError."""
        count = c_int32()
        if status := self.function("device_count", c_int32, ctypes.POINTER(c_int32))(ctypes.byref(count)):
            self.check("device_count", status)
        return count.value

    def device(self, number: int = 0) -> DeviceInfo:
        """Facts about a device. Raises SizeError if there is none of this number."""
        info = DeviceInfo(struct_size=ctypes.sizeof(DeviceInfo), device=number)
        if status := self.function("device_query", c_int32, ctypes.POINTER(DeviceInfo))(ctypes.byref(info)):
            self.check("device_query", status)
        return info


class RequestError(ValueError):
    """What the device found wrong in one request. code, place, detail: as kdtree_request_status says; of a row of the
    prompt, which has no node, place is -1 and detail the position.

    of_logits: whether detail is a token id (True), a rank (False), or either (None), where both can be.
    """

    def __init__(self, request: int, code: int, place: int, detail: int, of_logits: bool | None = False):
        self.request, self.code, self.place, self.detail = request, code, place, detail
        super().__init__(f"request {request}{_described(code, place, detail, of_logits)}")


def _described(code: int, place: int, detail: int, of_logits: bool | None) -> str:
    value, unit = {
        True: ("logit", "token"),
        False: ("log-probability", "rank"),
        None: ("logit or log-probability", "token or rank"),
    }[of_logits]
    match code:
        case 1:
            return f", depth {place}, {unit} {detail}: the {value} is NaN"
        case 2:
            return f", depth {place}, {unit} {detail}: the {value} is +inf"
        case 3:
            return f", depth {place}, rank {detail}: the token id is outside the vocabulary"
        case 4:
            return f", depth {place}, rank {detail}: the log-probability is above that of the rank before"
        case 5:
            return f", depth {place}, rank {detail}: the token id stands twice in this list"
        case 6:
            reason = "the target's logits hold NaN or have no finite maximum, so no token can be chosen"
            return f", position {detail}: {reason}" if place < 0 else f", node {place}: {reason}"
        case 7:
            return f", node {place}: parent {detail} does not precede it"
        case 8:
            return f": nodes {detail} and {place} are siblings with the same token"
        case 9:
            return f": its own size {place} is not in 0..{detail}"
        case 10:
            return f", path index {place}: node {detail} does not lie behind the one before"
        case 11:
            return f": needs {place} cache rows, {detail} are available"
        case _:
            return f": unknown status {code} with place {place} and detail {detail}"
