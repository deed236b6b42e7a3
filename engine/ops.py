"""The engine's stages on arrays: each takes and gives what the C header says, on CUDA memory or on the host.

    ops = engine.ops.open("cuda")  # "host": the same kernels executed on the CPU, on NumPy arrays
    trees = ops.logits_tree(logits, 64, 64)  # returns at once; the stream does the work
    accepted = ops.tree_accept(trees.tokens, trees.parents, trees.node_count, choices, 7, before=trees)
    accepted.raise_for_status()

Every stage takes `before`, the result (or status) of the stage whose failed requests it passes over; `out`, arrays to
write to by name, where others would be made; and `stream` (CuPy's current one if None). `ops.tree_build.plan(...)`
prepares a call for repetition and for graph capture. Shapes are [R, ...], R requests, checked before the launch
(ArrayError, SizeError); what only the device finds stands in the result's status. One Ops serves one thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from engine import abi
from engine.arrays import ArrayError, View, check, packed
from engine.memory import CudaMemory, HostMemory
from engine.plan import INT32_MAX, Call, Owner, Plan, stage
from engine.results import Accepted, Compacted, Origin, Result, TopK, Trees

Out = Mapping[str, Any] | None


def open(kind: str = "cuda") -> Ops:
    """The operations of a library, "cuda" or "host", which is built first if need be.

    Raises BuildError (ToolkitError without a toolkit), LibraryError.
    """
    from engine import build

    library = abi.Library(build.library(kind))
    return Ops(library, HostMemory() if kind == "host" else CudaMemory())


@dataclass(frozen=True, eq=False)
class Cache:
    """A latent KV cache of any dtype, whose rows are what stands behind the first three axes.

    rows: [layers, R, capacity, ...], or with block_table int32 [R, blocks of a request] a pool [layers, blocks,
    block_size, ...]. Gaps between rows are fine, none within one. capacity: rows of a request, None: all there are.
    """

    rows: Any
    block_table: Any = None
    capacity: int | None = None


class Ops(Owner):
    """The stages of one library."""

    @stage
    def topk_logprob(
        self,
        logits: Any,
        k: int,
        *,
        vocab_size: int | None = None,
        depth_limits: Any = None,
        before: Any = None,
        dtype: str | None = None,
        out: Out = None,
        stream: Any = None,
    ) -> Plan[TopK]:
        """The min(k, V) best entries of each row of logits [R, L, >=V] float32 or bfloat16, with log-probabilities.

        vocab_size: V, None: the last axis. Rows may lie apart. dtype "bfloat16": logits are its bits in uint16.
        depth_limits int32 [R]: lists past them are not written. Public issue: vllm-project/vllm#41834 (NaN).
        """
        call = Call(self.library, self.memory, "topk_logprob", abi.TopkLogprobArgs, stream)
        result = _topk(call, logits, k, vocab_size, depth_limits, before, dtype, out)
        return Plan("topk_logprob", (call,), result)

    @stage
    def tree_build(
        self,
        lp: Any,
        ids: Any,
        budget: int,
        *,
        vocab_size: int = 0,
        checked: bool = False,
        shared_memory_limit: int = 0,
        root_tokens: Any = None,
        prefix_lengths: Any = None,
        depth_limits: Any = None,
        budgets: Any = None,
        before: Any = None,
        arrays: Collection[str] = Trees.OPTIONAL,
        out: Out = None,
        stream: Any = None,
    ) -> Plan[Trees]:
        """The best-first trees of at most `budget` nodes from lp float32 and ids int32 [R, L, K].

        vocab_size 0: not known. checked: the lists are those of topk_logprob. root_tokens, prefix_lengths,
        depth_limits, budgets: int32 [R]. arrays: which of the optional ones are wanted.
        """
        call = Call(self.library, self.memory, "tree_build", abi.TreeBuildArgs, stream)
        requests, depth_limit, width = call.view("lp", lp, axes=3).shape
        own = {
            "root_tokens": root_tokens,
            "prefix_lengths": prefix_lengths,
            "depth_limits": depth_limits,
            "budgets": budgets,
        }
        call.sizes(vocab_size=vocab_size, checked=int(checked), shared_memory_limit=shared_memory_limit)
        result = _tree(call, lp, ids, (requests, depth_limit, width), budget, own, before, arrays, out)
        return Plan("tree_build", (call,), result)

    @stage
    def logits_tree(
        self,
        logits: Any,
        k: int,
        budget: int,
        *,
        vocab_size: int | None = None,
        shared_memory_limit: int = 0,
        root_tokens: Any = None,
        prefix_lengths: Any = None,
        depth_limits: Any = None,
        budgets: Any = None,
        before: Any = None,
        dtype: str | None = None,
        arrays: Collection[str] = Trees.OPTIONAL,
        out: Out = None,
        stream: Any = None,
    ) -> Plan[Trees]:
        """topk_logprob and tree_build in one call; the lists are the result's `lists`. out: of the trees."""
        lists = Call(self.library, self.memory, "topk_logprob", abi.TopkLogprobArgs, stream)
        topk = _topk(lists, logits, k, vocab_size, depth_limits, before, dtype, None)
        call = Call(self.library, self.memory, "tree_build", abi.TreeBuildArgs, stream)
        own = {
            "root_tokens": root_tokens,
            "prefix_lengths": prefix_lengths,
            "depth_limits": depth_limits,
            "budgets": budgets,
        }
        call.sizes(vocab_size=lists.struct.vocab_size, checked=1, shared_memory_limit=shared_memory_limit)
        shape = (lists.struct.requests, lists.struct.depth_limit, lists.struct.k)
        result = _tree(call, topk.lp, topk.ids, shape, budget, own, topk, arrays, out, lists=topk)
        return Plan("logits_tree", (lists, call), result)

    @stage
    def target_choice(
        self,
        logits: Any,
        *,
        vocab_size: int | None = None,
        node_count: Any = None,
        positions: Any = None,
        temperatures: Any = None,
        top_k: Any = None,
        top_p: Any = None,
        seeds: Any = None,
        before: Any = None,
        dtype: str | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> Plan[Any]:
        """choices int32 [R, N]: the target's token after each row of logits [R, N, >=V], -1 where there is none.

        node_count int32 [R]: rows past it are neither read nor written. positions int32 [R, N] of the rows, only for
        sampling; temperatures float32, top_k int32, top_p float32, seeds uint64 [R]; none: greedy. out: the choices.
        """
        call = Call(self.library, self.memory, "target_choice", abi.TargetChoiceArgs, stream)
        found = _logits(call, logits, dtype)
        requests, rows, physical = found.shape
        vocab_size = physical if vocab_size is None else vocab_size
        call.within("vocab_size", vocab_size, 1, physical)
        call.sizes(requests=requests, rows=rows, vocab_size=vocab_size)
        call.read(
            {
                "node_count": (node_count, (requests,)),
                "positions": (positions, (requests, rows)),
                "temperatures": (temperatures, (requests,)),
                "top_k": (top_k, (requests,)),
                "top_p": (top_p, (requests,)),
                "seeds": (seeds, (requests,)),
                "before": (_status(before), (requests, 3)),
            }
        )
        made = call.write({"choices": (requests, rows)}, None if out is None else {"choices": out})
        call.workspace(requests, rows, vocab_size)
        return Plan("target_choice", (call,), made["choices"])

    @stage
    def tree_accept(
        self,
        tokens: Any,
        parents: Any,
        node_count: Any,
        choices: Any,
        depth_limit: int,
        *,
        before: Any = None,
        out: Out = None,
        stream: Any = None,
    ) -> Plan[Accepted]:
        """The longest paths of the trees that follow the target's choices; tokens, parents, choices int32 [R, 1+B],
        node_count int32 [R], no node deeper than depth_limit. Public issue: vllm-project/vllm#53029 (no choice)."""
        call = Call(self.library, self.memory, "tree_accept", abi.TreeAcceptArgs, stream)
        requests, nodes = call.view("tokens", tokens, axes=2).shape
        call.within("depth_limit", depth_limit, 0, abi.MAX_DEPTH)
        call.sizes(requests=requests, budget=nodes - 1, depth_limit=depth_limit)
        call.read(
            {
                "tokens": (tokens, (requests, nodes)),
                "parents": (parents, (requests, nodes)),
                "node_count": (node_count, (requests,)),
                "choices": (choices, (requests, nodes)),
                "before": (_status(before), (requests, 3)),
            }
        )
        each = (requests,)
        shapes = {"accepted": each, "path": (requests, depth_limit + 1), "bonus": each, "status": (requests, 3)}
        made = call.write(shapes, out)
        return Plan("tree_accept", (call,), Accepted(**made, origin=_origin(call, before, made["status"])))

    @stage
    def kv_compact(
        self,
        cache: Cache,
        prefix_lengths: Any,
        accepted: Any,
        path: Any,
        *,
        before: Any = None,
        out: Out = None,
        stream: Any = None,
    ) -> Plan[Compacted]:
        """The rows of accepted nodes move to directly behind the prefix, in every layer of `cache`, in place.

        prefix_lengths, accepted int32 [R] and path int32 [R, L+1] are those of tree_accept; accepted -1: nothing to do.
        """
        call = Call(self.library, self.memory, "kv_compact", abi.KvCompactArgs, stream)
        requests, length = call.view("path", path, axes=2).shape
        call.sizes(requests=requests, depth_limit=length - 1)
        call.read(
            {
                "prefix_lengths": (prefix_lengths, (requests,)),
                "accepted": (accepted, (requests,)),
                "path": (path, (requests, length)),
                "before": (_status(before), (requests, 3)),
            }
        )
        made = call.write({"status": (requests, 3), "moved": (requests,)}, out)
        call.struct.cache = _cache(call, cache, requests)
        return Plan("kv_compact", (call,), Compacted(**made, origin=_origin(call, before, made["status"])))

    @stage
    def mla_attention(
        self,
        q: Any,
        cache: Cache,
        node_count: Any,
        prefix_lengths: Any,
        positions: Any,
        *,
        scale: float,
        rank: int = 512,
        paths: Any = None,
        layer: int = 0,
        longest: int | None = None,
        path: str = "best",
        lse: Any = None,
        dtype: str | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> Plan[Any]:
        """MLA attention [R, N, heads, rank] of the rows of trees over a layer of `cache`, bit for bit plain decoding's.

        q [R, N, heads, rank + rope] float32 or bfloat16, as cache and result are; beside bfloat16, rows of the cache of
        656 bytes, uint8, are those of an fp8 one (kdtree_cache_rows in the C header), which has no wgmma path.
        node_count, prefix_lengths int32 [R]; positions int32 [R, N]; paths int32 [R, N, L+1] are those of tree_build,
        None: row i sees rows 0..i. longest: the most keys of a row, None: the cache's capacity. path: one of
        abi.ATTENTION_PATHS. lse: float32 [R, N, heads] to write to, None: it is not wanted. dtype "bfloat16": q is its
        bits in uint16, and so is the result, that of any bfloat16. Raises UnsupportedError for a path that the device
        does not have.
        """
        call = Call(self.library, self.memory, "mla_attention", abi.MlaAttentionArgs, stream)
        found = call.view("q", q, axes=4, dtype=dtype)
        requests, rows, heads, width = found.shape
        if found.dtype not in abi.DTYPES:
            raise ArrayError(call.name, "q", " or ".join(abi.DTYPES), found.dtype)
        check(call.name, "q", found, found.dtype, found.shape)
        call.point("q", found)
        call.within("rank", rank, 1, width)
        if path not in abi.ATTENTION_PATHS:
            raise ArrayError(call.name, "path", f"one of {', '.join(abi.ATTENTION_PATHS)}", path)
        call.struct.cache, call.struct.scale = _cache(call, cache, requests, written=False), scale
        longest = call.struct.cache.capacity if longest is None else longest
        kind, length = abi.DTYPES[found.dtype], 0
        fp8 = found.dtype == "bfloat16" and call.struct.cache.row_bytes == abi.FP8_ROW_BYTES
        call.sizes(cache_rows=abi.CACHES.index("fp8" if fp8 else "dtype"))
        if paths is not None:
            length = call.view("paths", paths, axes=3).shape[2]
        call.sizes(requests=requests, rows=rows, heads=heads, rank=rank, rope=width - rank, dtype=kind)
        call.sizes(path=abi.ATTENTION_PATHS.index(path), layer=layer, longest=longest, path_stride=length)
        call.read(
            {
                "node_count": (node_count, (requests,)),
                "prefix_lengths": (prefix_lengths, (requests,)),
                "positions": (positions, (requests, rows)),
                "paths": (paths, (requests, rows, length)),
            }
        )
        if lse is not None:
            call.write({"lse": (requests, rows, heads)}, {"lse": lse})
        shape, bits = (requests, rows, heads, rank), "uint16" if found.dtype == "bfloat16" else found.dtype
        made = call.memory.empty(shape, bits, call.stream) if out is None else out
        written = call.view("out", made, written=True, dtype=found.dtype)
        check(call.name, "out", written, found.dtype, shape)
        call.point("out", written)
        call.workspace(requests, rows, heads, rank, longest, kind)
        return Plan("mla_attention", (call,), made)

    @stage
    def heap_tree(
        self,
        lp: Any,
        ids: Any,
        budget: int,
        *,
        vocab_size: int = 0,
        root_tokens: Any = None,
        prefix_lengths: Any = None,
        depth_limits: Any = None,
        budgets: Any = None,
        checked: bool = False,
        arrays: Collection[str] = Trees.OPTIONAL,
        out: Out = None,
    ) -> Plan[Trees]:
        """tree_build by the C++ heap: on the CPU and on NumPy arrays in every library, done when it returns."""
        call = Call(self.library, self.host, "heap_tree", abi.HeapTreeArgs, None)
        requests, depth_limit, width = call.view("lp", lp, axes=3).shape
        own = {
            "root_tokens": root_tokens,
            "prefix_lengths": prefix_lengths,
            "depth_limits": depth_limits,
            "budgets": budgets,
        }
        call.sizes(vocab_size=vocab_size, checked=int(checked))
        result = _tree(call, lp, ids, (requests, depth_limit, width), budget, own, None, arrays, out)
        return Plan("heap_tree", (call,), result)


def _topk(
    call: Call, logits: Any, k: int, vocab_size: int | None, depth_limits: Any, before: Any, dtype: str | None, out: Out
) -> TopK:
    found = _logits(call, logits, dtype)
    requests, depth_limit, physical = found.shape
    vocab_size = physical if vocab_size is None else vocab_size
    call.within("vocab_size", vocab_size, 1, physical)
    width = min(call.within("k", k, 0, INT32_MAX), vocab_size)
    call.within("k", width, 0, abi.MAX_BUDGET)
    call.sizes(requests=requests, depth_limit=depth_limit, vocab_size=vocab_size, k=width)
    call.read({"depth_limits": (depth_limits, (requests,)), "before": (_status(before), (requests, 3))})
    lists = (requests, depth_limit, width)
    shapes = {"ids": lists, "lp": lists, "logz": lists[:2], "status": (requests, 3)}
    made = call.write(shapes, out)
    call.workspace(requests, depth_limit, vocab_size, width)
    return TopK(**made, origin=_origin(call, before, made["status"], of_logits=True))


def _tree(
    call: Call,
    lp: Any,
    ids: Any,
    shape: tuple[int, int, int],
    budget: int,
    own: Mapping[str, Any],
    before: Any,
    arrays: Collection[str],
    out: Out,
    lists: TopK | None = None,
) -> Trees:
    """What tree_build and heap_tree share. own: arrays [R] by name."""
    requests, depth_limit, width = shape
    each, nodes = (requests,), call.within("budget", budget, 0, abi.MAX_BUDGET) + 1
    call.sizes(requests=requests, depth_limit=depth_limit, width=width, budget=budget)
    call.read({"lp": (lp, shape), "ids": (ids, shape), **{name: (array, each) for name, array in own.items()}})
    if before is not None:
        call.read({"before": (_status(before), (requests, 3))})
    if unknown := set(arrays) - set(Trees.OPTIONAL):
        raise ArrayError(call.name, "arrays", f"some of {', '.join(Trees.OPTIONAL)}", ", ".join(sorted(unknown)))
    shapes: dict[str, tuple[int, ...]] = {"node_count": each}
    names = ("tokens", "parents", "depths", "ranks", "scores", *arrays)
    shapes |= dict.fromkeys(names, (requests, nodes))
    if "visibility" in arrays:
        shapes["visibility"] = (requests, nodes, (nodes + 31) // 32)
    if "paths" in arrays:
        shapes["paths"] = (requests, nodes, depth_limit + 1)
    if call.name == "tree_build":
        shapes["route"] = each
    shapes["status"] = (requests, 3)
    made = call.write(shapes, out)
    sizes = (requests, depth_limit, width, budget)
    call.workspace(*(sizes if call.name == "tree_build" else sizes[1:]))
    of_logits = call.name == "tree_build" and bool(call.struct.checked)
    return Trees(**made, lists=lists, origin=_origin(call, before, made["status"], of_logits=of_logits))


def _logits(call: Call, logits: Any, dtype: str | None) -> View:
    """Set logits, their dtype and the distance of their rows; axes [R, N, V]."""
    found = call.view("logits", logits, axes=3, dtype=dtype)
    if found.dtype not in abi.DTYPES:
        raise ArrayError(call.name, "logits", " or ".join(abi.DTYPES), found.dtype)
    check(call.name, "logits", found, found.dtype, found.shape, strided_from=2)
    call.sizes(dtype=abi.DTYPES[found.dtype])
    call.struct.row_stride = _row_stride(call, "logits", found) // found.itemsize
    call.point("logits", found)
    return found


def _row_stride(call: Call, argument: str, found: View) -> int:
    """The bytes from row to row of [R, N, V], the same within and between requests."""
    requests, rows, row_bytes = found.shape[0], found.shape[1], packed(found.shape, found.itemsize)[1]
    if requests * rows <= 1 or not found.size:
        return row_bytes
    step = found.strides[1] if rows > 1 else found.strides[0]
    apart = requests == 1 or found.strides[0] == rows * step
    if step < row_bytes or step % found.itemsize or not apart:
        actual = f"{found.dtype} {list(found.shape)} with strides {list(found.strides)} in bytes"
        raise ArrayError(call.name, argument, "rows at one distance, not overlapping", actual)
    return step


def _cache(call: Call, cache: Cache, requests: int, *, written: bool = True) -> abi.CacheView:
    found = call.view("cache.rows", cache.rows, written=written)
    actual = f"{found.dtype} {list(found.shape)} with strides {list(found.strides)} in bytes"
    if len(found.shape) < 3 or not found.contiguous(len(found.shape) - 3) or min(found.strides[:3]) < 0:
        raise ArrayError(call.name, "cache.rows", "[layers, R or blocks, rows, ...] without gaps in a row", actual)
    layers, blocks, rows = found.shape[:3]
    row_bytes = packed(found.shape, found.itemsize)[2]
    row_stride = found.strides[2] if rows > 1 else max(row_bytes, found.strides[1] if blocks > 1 else 0)
    filled = abi.CacheView(
        base=found.pointer if found.size else None,
        layer_stride=found.strides[0],
        row_stride=row_stride,
        row_bytes=call.within("row_bytes", row_bytes, 1, INT32_MAX),
        layers=layers,
    )
    if cache.block_table is None:
        if blocks != requests:
            raise ArrayError(call.name, "cache.rows", f"of {requests} requests", actual)
        filled.request_stride, filled.capacity = found.strides[1], _capacity(call, cache, rows)
        return filled
    if blocks > 1 and found.strides[1] != rows * row_stride:
        raise ArrayError(call.name, "cache.rows", "blocks of rows at one distance", actual)
    table = call.view("cache.block_table", cache.block_table, axes=2)
    check(call.name, "cache.block_table", table, "int32", (requests, table.shape[1]), strided_from=1)
    filled.block_size, filled.capacity = rows, _capacity(call, cache, table.shape[1] * rows)
    filled.table_stride = table.strides[0] // table.itemsize if requests > 1 else table.shape[1]
    filled.block_table = table.pointer if table.size else None
    return filled


def _capacity(call: Call, cache: Cache, rows: int) -> int:
    return rows if cache.capacity is None else call.within("cache.capacity", cache.capacity, 0, rows)


def _status(before: Any) -> Any:
    return before.status if isinstance(before, Result) else before


def _origin(call: Call, before: Any, status: Any, of_logits: bool = False) -> Origin:
    return Origin(call.memory, call.stream, of_logits, before, overwritten=_status(before) is status)
