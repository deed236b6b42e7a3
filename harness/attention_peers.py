"""What others do for the verify attention of a tree, in bfloat16 on the GPU, through PyTorch.

unfused        a product, a softmax, a product, with the tree's mask
sdpa           scaled_dot_product_attention of PyTorch with the mask
flashmla       FlashMLA's dense decoding: without a mask, so that every row sees all nodes
flashmla-tree  the same over the prefix, the nodes by PyTorch with the mask, both joined by their log-sum-exp

FlashMLA: package sgl-flash-mla 1.0.0, whose legacy part keeps the dense kernel for compute capability 9.0. Its cache is
ours in pages of 64 rows, its log-sum-exp natural, [R, H, N].
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import torch_gpu
from harness.attention_input import PAGE, RANK, ROPE, SCALE, Input
from harness.gpu_builders import GpuArm

WIDTH = RANK + ROPE
MASKLESS = "flashmla"
NAMES = ("flashmla", "flashmla-tree", "unfused", "sdpa")


class NoPeerError(RuntimeError):
    """A peer cannot be measured here; the message says what is missing."""


def missing(name: str) -> str | None:
    """Why a peer cannot be measured, as far as that is known before it is tried."""
    modules = {"torch": "PyTorch"} | ({"flash_mla": "package sgl-flash-mla"} if name.startswith(MASKLESS) else {})
    absent = [words for module, words in modules.items() if importlib.util.find_spec(module) is None]
    return f"{' and '.join(absent)} is not installed" if absent else None


def software(name: str) -> str:
    """The packages of a peer that is here, with their versions."""
    torch = f"PyTorch {importlib.import_module('torch').__version__}"
    if not name.startswith(MASKLESS):
        return torch
    return f"sgl-flash-mla {importlib.import_module('flash_mla').__version__}, {torch}"


class Peers:
    """The peers on one input. calls: of a replay, at least. Raises NoPeerError."""

    def __init__(self, given: Input, calls: int):
        if (absent := missing("torch")) is not None:
            raise NoPeerError(absent)
        self._torch: Any = importlib.import_module("torch")
        self._given, self._case, self._least = given, given.case, calls
        self._q = self._tensor(given.q)
        self._caches = [self._tensor(cache) for cache in given.caches]
        self._idle = self._torch.from_dlpack(given.idle)
        self._held: list[object] = []  # what graphs know by its address alone

    def arm(self, name: str, rows: int) -> GpuArm:
        """Replays of calls over all copies of the cache in turns, the first one last."""
        if self._given.gpu.stream is None:
            raise NoPeerError("no PyTorch on a GPU")
        attend, torch = self.attend(name, rows), self._torch
        self._held.append(attend)
        order = list(reversed(self._caches)) * -(-self._least // len(self._caches))
        found: list[Any] = []

        def work() -> None:
            for cache in order:
                found[:] = [attend(cache)]

        run, own = torch_gpu.replayed(work, 1)
        found[0].fill_(float("nan"))

        def results() -> list[Any]:
            torch.cuda.synchronize()
            return [self.bits(found[0])]

        return GpuArm(run, len(order), replace(own, before=self._idle.zero_) if self._case.cold else own, results)

    def attend(self, name: str, rows: int) -> Callable[[Any], Any]:
        """cache bfloat16 [R, capacity, 576] -> [R, rows, H, 512] of the first rows."""
        if (absent := missing(name)) is not None:
            raise NoPeerError(absent)
        makers = {
            "flashmla": self._flashmla,
            "flashmla-tree": self._flashmla_tree,
            "unfused": self._unfused,
            "sdpa": self._sdpa,
        }
        return makers[name](rows)

    def first_cache(self) -> Any:
        return self._caches[0]

    def bits(self, values: Any) -> Any:
        """The bits of a bfloat16 tensor, as the arrays of the input are."""
        whole = values.contiguous().view(self._torch.int16)
        return self._given.xp.from_dlpack(whole).view(self._given.xp.uint16)

    def _tensor(self, bits: Any) -> Any:
        return self._torch.from_dlpack(bits.view(self._given.xp.int16)).view(self._torch.bfloat16)

    def _queries(self, rows: int) -> Any:
        """[R, rows, H, 576], whose rows and heads are one axis of a product."""
        return self._q[:, :rows].contiguous()

    def _hidden(self, rows: int) -> Any:
        """[rows * H, rows]: what a head of a row does not see of the nodes."""
        seen = self._torch.from_numpy(self._given.tree.mask(rows)).to(self._q.device)
        return (~seen).repeat_interleave(self._case.heads, dim=0)

    def _unfused(self, rows: int) -> Callable[[Any], Any]:
        torch, prefix = self._torch, self._case.prefix
        queries, hidden = self._queries(rows), self._hidden(rows)
        flat = queries.view(len(queries), -1, WIDTH)

        def attend(cache: Any) -> Any:
            keys = cache[:, : prefix + rows]
            scores = torch.baddbmm(queries.new_empty(1, 1, 1), flat, keys.transpose(1, 2), beta=0, alpha=SCALE)
            scores[..., prefix:].masked_fill_(hidden, -torch.inf)
            weights = torch.softmax(scores, -1)
            return torch.bmm(weights, keys[..., :RANK]).view(*queries.shape[:3], RANK)

        return attend

    def _sdpa(self, rows: int) -> Callable[[Any], Any]:
        """Heads of all rows as the rows of one head: they share their keys."""
        torch, prefix = self._torch, self._case.prefix
        queries, hidden = self._queries(rows), self._hidden(rows)
        flat = queries.view(len(queries), 1, -1, WIDTH)
        seen = torch.ones(flat.shape[2], prefix + rows, dtype=torch.bool, device=flat.device)
        seen[:, prefix:] = ~hidden

        def attend(cache: Any) -> Any:
            keys = cache[:, None, : prefix + rows]
            made = torch.nn.functional.scaled_dot_product_attention(
                flat, keys, keys[..., :RANK], attn_mask=seen, scale=SCALE
            )
            return made.view(*queries.shape[:3], RANK)

        return attend

    def _decode(self, rows: int, keys: int) -> Callable[[Any], tuple[Any, Any]]:
        """FlashMLA over the first `keys` rows of the cache: values [R, rows, H, 512], log-sum-exp [R, H, rows]."""
        torch, flash_mla = self._torch, importlib.import_module("flash_mla")
        queries = self._queries(rows)
        requests, pages = len(queries), self._given.capacity // PAGE
        table = torch.arange(requests * pages, dtype=torch.int32, device=queries.device).view(requests, pages)
        lengths = torch.full((requests,), keys, dtype=torch.int32, device=queries.device)
        schedule, _ = flash_mla.get_mla_metadata()

        def decode(cache: Any) -> tuple[Any, Any]:
            paged = cache.view(-1, PAGE, 1, WIDTH)
            made: tuple[Any, Any] = flash_mla.flash_mla_with_kvcache(
                queries, paged, table, lengths, RANK, schedule, softmax_scale=SCALE, causal=False, use_legacy=True
            )
            return made

        return decode

    def _flashmla(self, rows: int) -> Callable[[Any], Any]:
        decode = self._decode(rows, self._case.prefix + rows)
        return lambda cache: decode(cache)[0]

    def _flashmla_tree(self, rows: int) -> Callable[[Any], Any]:
        torch, prefix = self._torch, self._case.prefix
        queries, hidden, decode = self._queries(rows), self._hidden(rows), self._decode(rows, prefix)
        flat = queries.view(len(queries), -1, WIDTH)

        def attend(cache: Any) -> Any:
            before, sums = decode(cache)
            keys = cache[:, prefix : prefix + rows]
            scores = torch.baddbmm(queries.new_empty(1, 1, 1), flat, keys.transpose(1, 2), beta=0, alpha=SCALE).float()
            scores.masked_fill_(hidden, -torch.inf)
            nodes = torch.logsumexp(scores, -1, keepdim=True)
            values = torch.bmm(torch.exp(scores - nodes).to(queries.dtype), keys[..., :RANK])
            share = torch.sigmoid(nodes - sums.transpose(1, 2).reshape(nodes.shape))  # of the nodes in all weights
            return (
                torch.lerp(before.view(values.shape).float(), values.float(), share)
                .to(queries.dtype)
                .view(before.shape)
            )

        return attend
