"""The C ABI of cuda/include/kdtree_decode.h for ctypes: its structs, its numbers, and its calls by name.

As in engine/abi.py, names, order and types are those of the header, and a test holds every field against the C
compiler. Handles of models, decoders and runs are addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from types import MappingProxyType
from typing import Any, ClassVar

from engine.abi import F32, F64, I32, MAX_DEPTH, Fields, Library

STAGES = ("draft", "tree_build", "verify", "commit")  # kdtree_stage
METHODS = ("ar", "chain", "ddtree")  # kdtree_method
BUILDERS = ("gpu", "heap")  # kdtree_builder
DRAFTERS = ("dflash", "oracle", "noisy", "replay")  # kdtree_drafter_kind
GEMMS = ("row_invariant", "cublas")  # kdtree_gemm
ATTENTIONS = ("exact", "mask")  # kdtree_attention
PATHS = ("general", "tensor_cores")  # kdtree_path
DTYPES = ("float32", "bfloat16")  # kdtree_dtype
ATTENTION_KERNELS = ("general", "mma", "wgmma")  # kdtree_attention_kernel
FINISHES = ("running", "stop", "length", "capacity", "error")  # kdtree_finish


class I64(c_void_p):
    """Address of int64."""

    dtype: ClassVar[str] = "int64"


def _all(kind: type[Any], names: str) -> Fields:
    return tuple((name, kind) for name in names.split())


class Tensor(ctypes.Structure):
    """kdtree_tensor."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("ndim", c_int32),
        *_all(c_char_p, "name dtype"),
        ("shape", I64),
        ("data", c_void_p),
        ("size", c_size_t),
    )


class DecoderArgs(ctypes.Structure):
    """kdtree_decoder_args."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("device", c_int32),
        *_all(c_void_p, "target drafter"),
        *_all(c_int32, "max_requests capacity max_budget block_size prefill_rows cache_block_size gemm attention"),
        *_all(c_int32, "dtype cache_rows"),
    )


class DecoderInfo(ctypes.Structure):
    """kdtree_decoder_info."""

    _fields_ = (
        ("struct_size", c_uint32),
        *_all(c_int32, "vocab_size hidden_size layers block_size row_bytes"),
        *_all(c_uint64, "model_bytes cache_bytes scratch_bytes"),
        *_all(c_int32, "dtype products_path attention_path graphs cache_rows attention_kernel"),
    )


class Request(ctypes.Structure):
    """kdtree_request."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("prompt_length", c_int32),
        ("prompt", I32),
        *_all(c_int32, "max_new_tokens budget capacity top_k"),
        *_all(c_float, "temperature top_p"),
        ("seed", c_uint64),
        ("stop_tokens", I32),
        *_all(c_int32, "stop_count drafter block_size golden_count"),
        ("golden", I32),
        *_all(c_int32, "right max_rank"),
        ("miss", c_double),
        ("noise_seed", c_uint64),
        *_all(c_int32, "list_count list_depths list_width"),
        *_all(I32, "list_positions list_ids"),
        ("list_lp", F32),
    )


class RunArgs(ctypes.Structure):
    """kdtree_run_args."""

    _fields_ = (
        ("struct_size", c_uint32),
        *_all(c_int32, "method requests keep_traces keep_logits full_cost"),
        ("request", POINTER(Request)),
        ("stream", c_void_p),
        *_all(c_int32, "eager cost_count"),
        ("cost_rows", I32),
        ("cost_seconds", F64),
        *_all(c_int32, "timed builder"),
    )


class RequestState(ctypes.Structure):
    """kdtree_request_state."""

    _fields_ = (
        ("struct_size", c_uint32),
        *_all(c_int32, "finish token_count rounds"),
        ("tokens", I32),
        ("cache_length", c_int32),
        ("status", c_int32 * 3),
    )


class Round(ctypes.Structure):
    """kdtree_round."""

    _fields_ = (
        *_all(c_int32, "prefix_length nodes depth_limit accepted"),
        ("path", c_int32 * (MAX_DEPTH + 1)),
        ("ranks", c_int32 * (MAX_DEPTH + 1)),
        ("seconds", c_double * len(STAGES)),
        ("wall_seconds", c_double),
    )


class Prediction(ctypes.Structure):
    """kdtree_prediction."""

    _fields_ = (
        *_all(c_int32, "budget reserved"),
        *_all(c_double, "tokens seconds"),
    )


class Trace(ctypes.Structure):
    """kdtree_trace."""

    _fields_ = (
        ("struct_size", c_uint32),
        *_all(c_int32, "depths width"),
        ("ids", I32),
        *_all(F32, "lp logz"),
        *_all(c_int32, "nodes bonus"),
        *_all(I32, "tokens parents node_depths ranks"),
        ("scores", F64),
        ("choices", I32),
    )


_HANDLE = POINTER(c_void_p)
# Arguments of each call; all but the destroying ones return a kdtree_status.
CALLS: Mapping[str, tuple[type[Any], ...]] = MappingProxyType(
    {
        "model_create": (c_char_p, _HANDLE),
        "model_put": (c_void_p, POINTER(Tensor)),
        "model_read": (c_void_p, c_char_p),
        "model_random": (c_void_p, c_uint64),
        "decoder_create": (POINTER(DecoderArgs), _HANDLE),
        "decoder_query": (c_void_p, POINTER(DecoderInfo)),
        "run_create": (c_void_p, POINTER(RunArgs), _HANDLE),
        "run_prefill": (c_void_p,),
        "run_round": (c_void_p, POINTER(c_int32)),
        "run_replayed": (c_void_p, POINTER(c_int32)),
        "run_stage": (c_void_p, c_int32, c_char_p, POINTER(c_int32)),
        "run_state": (c_void_p, c_int32, POINTER(RequestState)),
        "run_rounds": (c_void_p, c_int32, c_int32, c_int32, POINTER(Round)),
        "run_prediction": (c_void_p, c_int32, POINTER(Prediction)),
        "run_trace": (c_void_p, c_int32, c_int32, POINTER(Trace)),
        "run_logits": (c_void_p, c_int32, POINTER(c_int32), F32),
    }
)
DESTROYERS = ("model_destroy", "decoder_destroy", "run_destroy")


def call(library: Library, name: str, *arguments: Any) -> None:
    """Call kdtree_<name>. Structs and results go by reference. Raises the EngineError of its status."""
    if status := library.function(name, c_int32, *CALLS[name])(*arguments):
        library.check(name, status)


class Handle:
    """An object of the library, destroyed by `close`, at the end of a `with`, or with the last reference to it."""

    def __init__(self, library: Library, kind: str, *arguments: Any):
        """kdtree_<kind>_create with these arguments. Raises EngineError."""
        self.library, self.kind = library, kind
        self._address = c_void_p()
        self._destroy = library.function(f"{kind}_destroy", None, c_void_p)
        call(library, f"{kind}_create", *arguments, ctypes.byref(self._address))

    @property
    def address(self) -> int:
        """Raises ValueError once it is closed."""
        if not self._address.value:
            raise ValueError(f"this {self.kind} is closed")
        return self._address.value

    def call(self, name: str, *arguments: Any) -> None:
        """kdtree_<kind>_<name> on the object. Raises EngineError."""
        call(self.library, f"{self.kind}_{name}", self.address, *arguments)

    def close(self) -> None:
        if self._address.value:
            self._destroy(self._address)
            self._address.value = None

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_destroy"):
            self.close()
