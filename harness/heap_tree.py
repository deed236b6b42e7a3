"""The C++ heap builder (engine/cuda/common/heap_tree.cpp), compiled on the spot and called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.environment import CHECKOUT
from reference.topk import DraftError

SOURCE = CHECKOUT / "engine" / "cuda" / "common" / "heap_tree.cpp"
HEADER = CHECKOUT / "engine" / "cuda" / "include" / "kdtree_heap_tree.h"
CACHE = CHECKOUT / "build" / "harness"
FLAGS = ("-std=c++17", "-O3", "-fno-fast-math", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
FAULTS = {  # kdtree_list_status
    1: "the log-probability is NaN",
    2: "the log-probability is +inf",
    3: "the token id is outside the vocabulary",
    4: "the log-probability is above that of the rank before",
    5: "the token id stands twice in this list",
}
RESULTS = {  # kdtree_heap_tree_result
    2: "a size is out of range",
    3: "a required array is missing",
    4: "the workspace is too small",
    5: "the library is of another version",
}
REFUSED = 1
OUTPUTS = ("node_count", "tokens", "parents", "depths", "ranks", "scores")
OPTIONAL = ("positions", "first_child", "next_sibling", "visibility", "paths")

Arrays = dict[str, NDArray[Any]]


class CompilerError(RuntimeError):
    """There is no C++ compiler, or it fails; the message says which and how."""


class _Args(ctypes.Structure):
    """kdtree_heap_tree_args of kdtree_heap_tree.h."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("requests", "depth_limit", "width", "budget", "vocab_size", "checked")),
        *(
            (name, ctypes.c_void_p)
            for name in ("lp", "ids", "root_tokens", "prefix_lengths", "depth_limits", "budgets", *OUTPUTS, *OPTIONAL)
        ),
        ("status", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
    )


def compiler() -> str | None:
    """$CXX, else g++, else c++; None if there is none."""
    chosen = os.environ.get("CXX")
    return shutil.which(chosen) if chosen else shutil.which("g++") or shutil.which("c++")


def compile_library(cache: Path = CACHE, flags: tuple[str, ...] = FLAGS) -> Path:
    """The shared library of the builder; compiled only when source, flags or compiler are new. Raises CompilerError."""
    program = compiler()
    if program is None:
        raise CompilerError(f"no C++ compiler ({os.environ.get('CXX') or 'g++'} is not on PATH)")
    version = subprocess.run([program, "--version"], capture_output=True, check=False).stdout
    parts = [SOURCE.read_bytes(), HEADER.read_bytes(), repr(flags).encode(), version]
    key = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]
    library = cache / f"heap_tree-{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            [program, *flags, f"-I{HEADER.parent}", str(SOURCE), "-o", str(partial)],
            capture_output=True,
            check=False,
            text=True,
        )
        if done.returncode != 0:
            partial.unlink(missing_ok=True)
            raise CompilerError(f"{Path(program).name} cannot compile {SOURCE.name}: {done.stderr.strip()[:500]}")
        os.replace(partial, library)
    return library


class HeapTree:
    """Builds the trees of a batch of equally long lists. Buffers are made once; each call writes into the same ones."""

    def __init__(self, library: Path, requests: int, depth_limit: int, width: int, budget: int, optional: bool = True):
        """optional: also make positions, first_child, next_sibling, visibility and paths."""
        self._library = ctypes.CDLL(str(library))
        self._library.kdtree_heap_tree_workspace.restype = ctypes.c_size_t
        self._library.kdtree_heap_tree_workspace.argtypes = (ctypes.c_int32,) * 3
        size = self._library.kdtree_heap_tree_workspace(depth_limit, width, budget)
        if size == 0:
            raise ValueError(f"no tree of {budget} nodes from lists [{depth_limit}, {width}]: {RESULTS[2]}")
        rows, words = budget + 1, (budget + 32) // 32
        int_shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
            ("tokens", "parents", "depths", "ranks"), (requests, rows)
        )
        if optional:
            int_shapes |= dict.fromkeys(("positions", "first_child", "next_sibling"), (requests, rows))
            int_shapes["paths"] = (requests, rows, depth_limit + 1)
        self.arrays: Arrays = {"node_count": np.empty(requests, np.int32)}
        self.arrays |= {name: np.empty(shape, np.int32) for name, shape in int_shapes.items()}
        self.arrays["scores"] = np.empty((requests, rows), np.float64)
        if optional:
            self.arrays["visibility"] = np.empty((requests, rows, words), np.uint32)
        self.status = np.empty((requests, 3), np.int32)
        self._workspace = np.empty(-(-size // 8), np.uint64)
        self._shape = (requests, depth_limit, width)
        self._args = _Args(
            struct_size=ctypes.sizeof(_Args),
            requests=requests,
            depth_limit=depth_limit,
            width=width,
            budget=budget,
            status=self.status.ctypes.data,
            workspace=self._workspace.ctypes.data,
            workspace_size=self._workspace.nbytes,
            **{name: array.ctypes.data for name, array in self.arrays.items()},
        )
        self._pointer = ctypes.byref(self._args)
        self._given: dict[str, NDArray[Any]] = {}  # keeps the inputs alive that the arguments point to

    def give(
        self,
        lp: NDArray[np.float32],
        ids: NDArray[np.int32],
        *,
        vocab_size: int = 0,
        checked: bool = False,
        root_tokens: NDArray[np.int32] | None = None,
        prefix_lengths: NDArray[np.int32] | None = None,
        depth_limits: NDArray[np.int32] | None = None,
        budgets: NDArray[np.int32] | None = None,
    ) -> None:
        """The input of the next calls: lp float32 and ids int32 [R, L, K], the others int32 [R]; not copied.

        checked: the lists are known to be sound, and are not looked through again.
        """
        given = {
            "lp": lp,
            "ids": ids,
            "root_tokens": root_tokens,
            "prefix_lengths": prefix_lengths,
            "depth_limits": depth_limits,
            "budgets": budgets,
        }
        self._given = {}
        for name, array in given.items():
            shape = self._shape if name in ("lp", "ids") else self._shape[:1]
            dtype = np.float32 if name == "lp" else np.int32
            if array is None:
                setattr(self._args, name, None)
                continue
            if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
                raise ValueError(
                    f"{name} must be contiguous {np.dtype(dtype)} {list(shape)}, got {array.dtype} {list(array.shape)}"
                )
            setattr(self._args, name, array.ctypes.data)
            self._given[name] = array
        self._args.vocab_size, self._args.checked = vocab_size, checked

    def call(self) -> int:
        """Build all trees. Returns 0, or 1 if the lists of some requests were refused (see `refusals`)."""
        result: int = self._library.kdtree_heap_tree(self._pointer)
        if result > REFUSED:
            raise ValueError(RESULTS[result])
        return result

    def refusals(self) -> list[DraftError]:
        """Why requests were refused in the last call."""
        return [
            DraftError(FAULTS[int(code)], request=request, depth=int(depth), rank=int(rank))
            for request, (code, depth, rank) in enumerate(self.status)
            if code
        ]

    def tree(self, request: int) -> Arrays:
        """The arrays of one request, views of the buffers."""
        return {name: array[request] for name, array in self.arrays.items()}
