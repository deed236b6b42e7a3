"""Trees from drafter logits: top-k with its normaliser, transfers where the tree is built on the host, and the tree.

On a GPU with PyTorch the arms `heapq` and `cpp-heap` are the public implementation's way (torch.topk and logsumexp,
lists to the host, tree and mask there, arrays back to the device), and `topk` is its first step alone; elsewhere the
reference's top-k in NumPy stands in for it. Truth is the reference's lists for the same logits, and for each arm's own
lists the reference's tree.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from harness import gpu_builders, heap_tree, torch_gpu
from harness.builders import Arrays, Candidate, Checked, UnableError, heapq_tree, measure
from harness.cases import GPU, Chosen, Logits, digest
from harness.parity import Check, check_tokens, check_tree
from harness.records import Difference, Row, Scalar
from harness.timing import Own, WallClock, cpu_clock
from reference.topk import TopK, topk_logprob

if TYPE_CHECKING:
    from harness.systems import Bench

BASE, TOPK = "heapq", "topk"
SAMPLES = 10
CALLS = 16  # in one graph
DISTINCT = 8  # requests with logits of their own; a larger batch repeats them
OURS, TORCHS = 4e-6, 2e-5  # largest error of a log-probability: 2 ulp below 16, and a float32 sum of 163,840 terms


class Source(Protocol):
    """Where the host's tree builders get their lists from."""

    name: str
    own: Own | None

    def lists(self) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """(lp, ids) [R, L, K] in host memory."""

    def back(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Arrays of a tree to where the target reads them."""


class NumpySource:
    """The reference's top-k, request by request."""

    name = "numpy"
    own: Own | None = None

    def __init__(self, logits: NDArray[np.float32], k: int):
        self._logits, self._k = logits, k

    def lists(self) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        found = [topk_logprob(each, self._k) for each in self._logits]
        return np.stack([f.lp for f in found]), np.stack([f.ids for f in found])

    def back(self, arrays: Sequence[NDArray[Any]]) -> None:
        pass


class TorchSource:
    """torch.topk and logsumexp on the logits' device, which is waited for."""

    name = "torch"

    def __init__(self, logits: Any, k: int):
        self._torch: Any = importlib.import_module("torch")
        self._logits, self._k = self._torch.from_dlpack(logits), k
        self.on_gpu = bool(self._logits.is_cuda)
        wait = self._torch.cuda.synchronize if self.on_gpu else None
        self.own: Own | None = Own(WallClock(wait), None, "eager", "warm")

    def topk(self) -> tuple[Any, Any]:
        """(lp float32, ids int64) on the device."""
        best, ids = self._torch.topk(self._logits, self._k, dim=-1)
        return best - self._torch.logsumexp(self._logits, dim=-1, keepdim=True), ids

    def lists(self) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        lp, ids = (found.cpu().numpy() for found in self.topk())
        return lp, ids.astype(np.int32)

    def back(self, arrays: Sequence[NDArray[Any]]) -> None:
        for array in arrays:
            self._torch.from_numpy(array).to(self._logits.device)

    def graph(self, calls: int) -> tuple[Callable[[], object], Own, Callable[[], tuple[Any, Any]]]:
        """(replays `calls` times `topk`, how it is timed, the lists (lp, ids) of the last replay)."""
        found: list[Any] = []

        def work() -> None:
            found[:] = self.topk()

        run, own = torch_gpu.replayed(work, calls)

        def lists() -> tuple[Any, Any]:
            self._torch.cuda.synchronize()
            lp, ids = (array.cpu().numpy() for array in found)
            return lp, ids.astype(np.int32)

        return run, own, lists


class _Arms:
    """The arms of one case, made when they are asked for."""

    def __init__(self, bench: Bench, case: Logits, logits: NDArray[np.float32]):
        self._bench, self._case, self._logits = bench, case, logits
        self._k = min(case.budget, case.vocab)

    def candidate(self, name: str) -> Candidate:
        """Raises NoGpuError, UnableError, CompilerError where an arm cannot be measured, EngineError where it fails."""
        if name == GPU:
            return self._native()
        if name == TOPK:
            return self._topk()
        return self._host(name)

    @functools.cached_property
    def source(self) -> Source:
        if self._bench.gpu is not None and importlib.util.find_spec("torch") is not None:
            return TorchSource(self._on_device, self._k)
        if self._case.batch > len(self._logits):
            raise UnableError(f"no PyTorch on a GPU for the top-k of {self._case.batch} requests")
        return NumpySource(self._logits, self._k)

    @functools.cached_property
    def _on_device(self) -> Any:
        return self._bench.need_gpu().to_device(self._logits[np.arange(self._case.batch) % len(self._logits)])

    @functools.cached_property
    def _truth(self) -> list[TopK]:
        return [topk_logprob(each, self._k) for each in self._logits]

    def _native(self) -> Candidate:
        """One call of the engine, logits to trees."""
        gpu = self._bench.need_gpu()
        plan = gpu.ops.logits_tree.plan(self._on_device, self._k, self._case.budget, stream=gpu.stream)
        arm = gpu_builders.prepare(gpu, [plan], CALLS)

        def check() -> Checked:
            (result,) = arm.results()
            result.raise_for_status()
            trees = [result.tree(request) for request in range(self._case.batch)]
            return self._checked(result.lists.lp, result.lists.ids, trees, OURS)

        return Candidate(arm.run, arm.calls * self._case.batch, check, arm.own)

    def _topk(self) -> Candidate:
        """torch.topk and logsumexp alone."""
        if not isinstance(self.source, TorchSource) or not self.source.on_gpu:
            raise UnableError("no PyTorch on a GPU")
        run, own, lists = self.source.graph(CALLS)

        def check() -> Checked:
            lp, ids = lists()
            return self._checked(lp, ids, None, TORCHS)

        return Candidate(run, CALLS * self._case.batch, check, own)

    def _host(self, name: str) -> Candidate:
        """Lists from the source, trees on the host, and back."""
        source, case = self.source, self._case
        left: list[Any] = []
        if name == "cpp-heap":
            native = heap_tree.HeapTree(
                heap_tree.compile_library(), case.batch, case.depth_limit, self._k, case.budget, optional=True
            )

            def build(lp: NDArray[np.float32], ids: NDArray[np.int32]) -> list[Arrays]:
                native.give(lp, ids, checked=True)
                if native.call():
                    raise native.refusals()[0]
                source.back([native.arrays[array] for array in ("tokens", "positions", "parents", "visibility")])
                return [native.tree(request) for request in range(case.batch)]

        else:

            def build(lp: NDArray[np.float32], ids: NDArray[np.int32]) -> list[Arrays]:
                trees = [heapq_tree(*lists, case.budget) for lists in zip(lp, ids, strict=True)]
                for tree in trees:
                    source.back([tree["tokens"], tree["depths"], tree["parents"], visibility(tree["parents"])])
                return trees

        def call() -> None:
            lists = source.lists()
            left[:] = [*lists, build(*lists)]

        error = OURS if source.name == "numpy" else TORCHS

        def check() -> Checked:
            lp, ids, trees = left
            return self._checked(lp, ids, trees, error)

        return Candidate(call, case.batch, check, source.own)

    def _checked(
        self, lp: NDArray[np.float32], ids: NDArray[np.int32], trees: Sequence[Arrays] | None, error: float
    ) -> Checked:
        """Lists against the reference's of the same logits, trees against the reference's of these lists."""
        checks: list[Check] = []
        for request in range(self._case.batch):
            number, unit = request % len(self._logits), f"request {request}"
            checks += check_lists(unit, lp[request], ids[request], self._logits[number], self._truth[number], error)
            if trees is not None:
                checks.append(check_tree(unit, trees[request], lp[request], ids[request], self._case.budget))
        nodes = None if trees is None else float(np.mean([int(tree["node_count"]) for tree in trees]))
        return Checked("reference.topk_logprob and build_tree", checks, nodes)


def check_lists(
    unit: str,
    lp: NDArray[np.float32],
    ids: NDArray[np.int32],
    logits: NDArray[np.float32],
    truth: TopK,
    error: float,
) -> Iterator[Check]:
    """Lists [L, K] of `logits` [L, V]: the true logits in the true order, equal ones by id where OURS is the limit of
    the error; log-probabilities within `error` of the true ones."""
    for depth, (row, true_ids) in enumerate(zip(logits, truth.ids, strict=True)):
        place = f"{unit} depth {depth + 1}"
        if error == OURS:
            yield check_tokens(place, true_ids, ids[depth])
        else:
            yield _check_close(place, "lists.logits", row[true_ids], row[ids[depth]], 0.0)
        yield _check_close(place, "lists.lp", truth.lp[depth], lp[depth], error)


def _check_close(unit: str, what: str, truth: NDArray[np.float32], found: NDArray[np.float32], error: float) -> Check:
    bad = np.flatnonzero(~(np.abs(found - truth) <= error))
    if not len(bad):
        return Check(unit, len(truth))
    i = int(bad[0])
    return Check(unit, i + 1, Difference(what, unit, None, i, float(truth[i]), float(found[i]), None, None))


def visibility(parents: NDArray[np.int32]) -> NDArray[np.bool_]:
    """The mask that the public implementation sends to the device: bool [1+n, 1+n], row i sees its ancestors."""
    sees = np.eye(len(parents), dtype=np.bool_)
    for node in range(1, len(parents)):
        sees[node] |= sees[parents[node]]
    return sees


def make_logits(case: Logits) -> NDArray[np.float32]:
    """float32 [min(batch, DISTINCT), L, V], as sharp as a drafter's: less with every depth."""
    sharpness = np.linspace(3.0, 1.5, case.depth_limit, dtype=np.float32)[:, None]
    shape = (min(case.batch, DISTINCT), case.depth_limit, case.vocab)
    return sharpness * np.random.default_rng(0).standard_normal(shape, np.float32)


def rows(bench: Bench, chosen: Chosen) -> Iterator[Row]:
    """The rows of a case that begins at logits."""
    case = chosen.case
    assert isinstance(case, Logits)
    params: dict[str, Scalar] = {
        "depth_limit": case.depth_limit,
        "budget": case.budget,
        "batch": case.batch,
        "vocab": case.vocab,
    }
    logits = make_logits(case)
    case_hash = digest(case, logits.tobytes())
    if bench.is_done(chosen, case_hash, {GPU, TOPK} if bench.gpu is None else set()):
        return
    arms = _Arms(bench, case, logits)
    wanted = [name for name in case.arms if name in chosen.arms or name == BASE]
    yield from measure(bench, case, case_hash, params, wanted, arms.candidate, SAMPLES, 1, cpu_clock())
