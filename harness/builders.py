"""Tree builders side by side on recorded real lists: Python heapq, SGLang's two, the C++ heap, and the GPU.

One sample is the time of building all lists of the case, `batch` at a time, divided by their number. heapq and C++ must
give the reference's trees, bit for bit, and so must the GPU; SGLang's build other trees, each held against its own
rules.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import kdtr
from engine.abi import EngineError, RequestError
from harness import gpu_builders, heap_tree, sglang_tree, torch_gpu, uno_tree
from harness.cases import GPU, Builder, Case, Chosen, digest
from harness.gpu_builders import NoGpuError
from harness.parity import Check, check_tree, combine, reason
from harness.records import Difference, Row, Scalar
from harness.timing import Clock, CpuClock, Own, interleave

if TYPE_CHECKING:
    from harness.systems import Bench

SAMPLES = 15
BEST_OF = 5
BASE = "heapq"
SGLANG = "sglang-heapq"
UNO = "sglang-uno"
CONTRACTS = {SGLANG: "sglang", UNO: "uno"}  # of others "ddtree"
Arrays = Mapping[str, NDArray[Any]]

# Builds one batch of the lists, by its number; what it returns gives the arrays of every tree, untimed.
Build = Callable[[int], Callable[[], list[Arrays]]]


class NoListsError(ValueError):
    """No recorded lists fit the case; the message says which were looked for."""


class UnableError(RuntimeError):
    """An arm that cannot be measured here; the message says what is missing."""


def load_lists(folder: Path, case: Builder) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """(lp float32, ids int32) [R, L, K] of `case.lists` recorded rounds, spread over the file. Raises NoListsError."""
    path = folder / case.file
    if not path.is_file():
        raise NoListsError(f"{path.name} is absent: no recorded lists")
    stored = kdtr.read(path)
    lp = np.concatenate([stored[name] for name in stored if name.endswith("/lp")])
    ids = np.concatenate([stored[name] for name in stored if name.endswith("/ids")])
    if lp.shape[1] != case.depth_limit or not len(lp):
        raise NoListsError(f"{path.name} holds {len(lp)} lists of depth {lp.shape[1]}, not of {case.depth_limit}")
    rounds = max(min(case.lists, len(lp)) // case.batch, 1) * case.batch  # a list twice only to fill a batch
    chosen = np.arange(rounds) * len(lp) // rounds
    width = min(case.budget, lp.shape[2])
    return np.ascontiguousarray(lp[chosen, :, :width]), np.ascontiguousarray(ids[chosen, :, :width])


def heapq_tree(lp: NDArray[np.float32], ids: NDArray[np.int32], budget: int, root_token: int = 0) -> Arrays:
    """The contract's tree by Python's heapq, without the checks of the reference: the baseline of every builder."""
    values: list[list[float]] = lp.tolist()
    names: list[list[int]] = ids.tolist()
    depth_limit, width = lp.shape
    tokens, parents, depths, ranks, scores = [root_token], [-1], [0], [0], [0.0]
    heap: list[tuple[float, tuple[int, ...], int]] = []
    if depth_limit and width and math.isfinite(values[0][0]):
        heap.append((-values[0][0], (0,), 0))
    while heap and len(tokens) <= budget:
        negative, path, parent = heapq.heappop(heap)
        score, depth, rank = -negative, len(path), path[-1]
        row = values[depth - 1]
        if rank + 1 < width and math.isfinite(row[rank + 1]):
            heapq.heappush(heap, (-((score - row[rank]) + row[rank + 1]), (*path[:-1], rank + 1), parent))
        if depth < depth_limit and math.isfinite(values[depth][0]):
            heapq.heappush(heap, (-(score + values[depth][0]), (*path, 0), len(tokens)))
        tokens.append(names[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        ranks.append(rank)
        scores.append(score)
    return {
        "node_count": np.array(len(tokens) - 1, np.int32),
        "tokens": np.array(tokens, np.int32),
        "parents": np.array(parents, np.int32),
        "depths": np.array(depths, np.int32),
        "ranks": np.array(ranks, np.int32),
        "scores": np.array(scores, np.float64),
    }


def make(name: str, lp: NDArray[np.float32], ids: NDArray[np.int32], budget: int) -> Build:
    """The builder of an arm for lists [batches, R, L, K]. Raises CompilerError for the C++ heap without a compiler."""
    if name == "heapq":
        return _each(lp, ids, lambda lp, ids: heapq_tree(lp, ids, budget))
    if name == SGLANG:
        return _each(lp, ids, lambda lp, ids: sglang_tree.build(lp, ids, budget).arrays())
    if name == "cpp-heap":
        library = heap_tree.compile_library()
        _, batch, depth_limit, width = lp.shape
        natives = [heap_tree.HeapTree(library, batch, depth_limit, width, budget, optional=False) for _ in lp]
        for native, *lists in zip(natives, lp, ids, strict=True):
            native.give(*lists, checked=True)  # as all others take them

        def build(number: int) -> Callable[[], list[Arrays]]:
            native = natives[number]
            if native.call():
                raise native.refusals()[0]
            return lambda: [native.tree(request) for request in range(batch)]

        return build
    raise ValueError(f"no builder {name!r}")


def _each(
    lp: NDArray[np.float32],
    ids: NDArray[np.int32],
    tree: Callable[[NDArray[np.float32], NDArray[np.int32]], Arrays],
) -> Build:
    """One tree after the other."""

    def build(batch: int) -> Callable[[], list[Arrays]]:
        trees = [tree(*lists) for lists in zip(lp[batch], ids[batch], strict=True)]
        return lambda: trees

    return build


def check(
    name: str, trees: Sequence[Arrays], lp: NDArray[np.float32], ids: NDArray[np.int32], budget: int
) -> tuple[str, list[Check]]:
    """(what an arm's trees must equal, the comparison of each with it) for lists [R, L, K]."""
    if name in CONTRACTS:
        rules = [
            sglang_tree.build_slowly(*lists, budget).arrays() if name == SGLANG else uno_tree.build(*lists, budget)
            for lists in zip(lp, ids, strict=True)
        ]
        checks = [_check_rules(f"list {i}", *both) for i, both in enumerate(zip(rules, trees, strict=True))]
        return "its own rules (another tree than the contract's)", checks
    return "reference.build_tree", [
        check_tree(f"list {i}", tree, lp[i], ids[i], budget) for i, tree in enumerate(trees)
    ]


@dataclass(frozen=True)
class Checked:
    """Checks of results against `truth`, and the mean number of their nodes."""

    truth: str
    checks: list[Check]
    nodes: float | None


@dataclass(frozen=True)
class Candidate:
    """An arm: `call` builds `trees` trees, `check` looks at the last ones. own: how it is measured otherwise."""

    call: Callable[[], object]
    trees: int
    check: Callable[[], Checked]
    own: Own | None = None
    contract: str = "ddtree"


def rows(bench: Bench, chosen: Chosen) -> Iterator[Row]:
    """The rows of a builder case: heapq and the arms asked for, on the GPU too if there is one."""
    case = chosen.case
    assert isinstance(case, Builder)
    params: dict[str, Scalar] = {
        "depth_limit": case.depth_limit,
        "budget": case.budget,
        "batch": case.batch,
        "lists": case.file.removesuffix(".kdtr"),
    }
    try:
        lp, ids = load_lists(bench.lists, case)
    except NoListsError as error:
        yield from bench.not_run(case, "builder", chosen.arms, str(error), params=params)
        return
    case_hash = digest(case, lp.tobytes(), ids.tobytes())
    absent = {GPU, UNO} if bench.gpu is None else set() if uno_tree.is_here() else {UNO}
    if bench.is_done(chosen, case_hash, absent):
        return
    shape = (-1, case.batch, *lp.shape[1:])
    batched = lp.reshape(shape), ids.reshape(shape)

    def make(arm: str) -> Candidate:
        return _candidate(bench, arm, *batched, case.budget)

    wanted = [arm for arm in case.arms if arm in chosen.arms or arm == BASE]
    yield from measure(bench, case, case_hash, params, wanted, make, SAMPLES, BEST_OF, CpuClock())


def _candidate(bench: Bench, name: str, lp: NDArray[np.float32], ids: NDArray[np.int32], budget: int) -> Candidate:
    """The arm that builds the trees of lists [batches, R, L, K]."""
    flat = lp.reshape(-1, *lp.shape[2:]), ids.reshape(-1, *ids.shape[2:])
    batches, requests = lp.shape[:2]

    def checked(trees: Sequence[Arrays]) -> Checked:
        truth, checks = check(name, trees, *flat, budget)
        return Checked(truth, checks, float(np.mean([int(tree["node_count"]) for tree in trees])))

    if name == GPU:
        arm = gpu_builders.tree_arm(bench.need_gpu(), lp, ids, budget)
        return Candidate(arm.run, arm.calls * requests, lambda: checked(gpu_builders.trees_of(arm)), arm.own)
    if name == UNO:
        bench.need_gpu()
        uno = uno_tree.UnoTrees(lp, ids, budget)
        calls = -(-gpu_builders.CALLS // batches)
        run, own = torch_gpu.replayed(uno.build, calls)
        return Candidate(run, calls * batches * requests, lambda: checked(uno.trees()), own, CONTRACTS[UNO])
    build = bench.systems.builder(name, lp, ids, budget)
    return Candidate(
        _all_batches(build, batches),
        batches * requests,
        lambda: checked([tree for batch in range(batches) for tree in build(batch)()]),
        contract=CONTRACTS.get(name, "ddtree"),
    )


def measure(
    bench: Bench,
    case: Case,
    case_hash: str,
    params: Mapping[str, Scalar],
    wanted: Iterable[str],
    make: Callable[[str], Candidate],
    samples: int,
    best_of: int,
    clock: Clock,
) -> Iterator[Row]:
    """The wanted arms in turns: a row each, its times those of one tree; then those that `make` could not make."""
    candidates: dict[str, Candidate] = {}
    others: list[Row] = []
    for name in wanted:
        try:
            candidates[name] = make(name)
        except (NoGpuError, UnableError, uno_tree.NoUnoError, heap_tree.CompilerError) as error:
            others += bench.not_run(case, "builder", [name], str(error), case_hash=case_hash, params=params)
        except EngineError as error:
            why = f"{type(error).__name__}: {error}"
            others.append(bench.row(case, case_hash, "builder", name, reason=why, params=params))
    if candidates:
        yield from _measured(bench, case, case_hash, params, candidates, samples, best_of, clock)
    yield from others


def _measured(
    bench: Bench,
    case: Case,
    case_hash: str,
    params: Mapping[str, Scalar],
    candidates: Mapping[str, Candidate],
    samples: int,
    best_of: int,
    clock: Clock,
) -> Iterator[Row]:
    arms = interleave(
        {name: candidate.call for name, candidate in candidates.items()},
        samples=samples,
        best_of=best_of,
        clock=clock,
        reader=bench.gpu.reader if GPU in candidates and bench.gpu is not None else None,
        own={name: candidate.own for name, candidate in candidates.items() if candidate.own is not None},
    )
    for name, measured in arms.items():
        candidate = candidates[name]
        parity, nodes, failure = None, None, measured.failure
        if failure is None:
            try:
                found = candidate.check()
                parity = combine(found.truth, found.checks, bench.folder, f"{case.id}-{name}".replace("/", "-"))
                nodes = found.nodes
            except (EngineError, RequestError) as error:
                failure = f"{type(error).__name__}: {error}"
        taken = tuple(None if s is None else s / candidate.trees for s in measured.timing.samples_s)
        warmup = None if measured.timing.warmup_s is None else measured.timing.warmup_s / candidate.trees
        yield bench.row(
            case,
            case_hash,
            "builder",
            name,
            against=None if name == BASE or BASE not in candidates else BASE,
            reason=failure or (reason(parity) if parity is not None else None),
            params={**params, "trees": candidate.trees, "contract": candidate.contract},
            parity=parity,
            metrics={} if nodes is None else {"nodes": nodes},
            timing=replace(measured.timing, samples_s=taken, warmup_s=warmup),
        )


def _all_batches(build: Build, batches: int) -> Callable[[], None]:
    def call() -> None:
        for batch in range(batches):
            build(batch)

    return call


def _check_rules(unit: str, wanted: Arrays, tree: Arrays) -> Check:
    """The first array and node in which a tree differs from the one that rules give."""
    for name, array in wanted.items():
        truth, found = np.atleast_1d(array), np.atleast_1d(tree[name])
        bad = np.flatnonzero(truth != found) if truth.shape == found.shape else np.array([0])
        if len(bad):
            i = int(bad[0])
            return Check(
                unit, i + 1, Difference(f"tree.{name}", unit, None, i, truth[i].item(), found[i].item(), None, None)
            )
    return Check(unit, len(wanted["tokens"]))
