"""Tree builders side by side on recorded real lists: Python heapq, SGLang's, and the C++ heap.

One sample is the time of building all lists of the case, `batch` at a time, divided by their number. heapq and C++ must
give the reference's trees, bit for bit; SGLang builds another tree and is held against its own rules.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import kdtr
from harness import heap_tree, sglang_tree
from harness.cases import GPU, Builder, Chosen, digest
from harness.parity import Check, check_tree, combine, reason
from harness.records import Difference, Row, Scalar
from harness.timing import CpuClock, interleave

if TYPE_CHECKING:
    from harness.systems import Bench

SAMPLES = 15
BEST_OF = 5
SGLANG = "sglang-heapq"
Arrays = Mapping[str, NDArray[Any]]

# Builds one batch of the lists, by its number; what it returns gives the arrays of every tree, untimed.
Build = Callable[[int], Callable[[], list[Arrays]]]


class NoListsError(ValueError):
    """No recorded lists fit the case; the message says which were looked for."""


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
            native.give(*lists)

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
    if name == SGLANG:
        held = "its own rules (another tree than the contract's)"
        return held, [_check_sglang(f"list {i}", tree, lp[i], ids[i], budget) for i, tree in enumerate(trees)]
    return "reference.build_tree", [
        check_tree(f"list {i}", tree, lp[i], ids[i], budget) for i, tree in enumerate(trees)
    ]


def rows(bench: Bench, chosen: Chosen) -> Iterator[Row]:
    """The rows of a builder case: heapq, the arms asked for, and a word on the GPU."""
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
    if bench.is_done(chosen, case_hash):
        return
    shape = (-1, case.batch, *lp.shape[1:])
    batched = lp.reshape(shape), ids.reshape(shape)
    builds: dict[str, Build] = {}
    for arm in case.arms:
        if arm == GPU or not (arm in chosen.arms or arm == "heapq"):
            continue
        try:
            builds[arm] = bench.systems.builder(arm, *batched, case.budget)
        except heap_tree.CompilerError as error:
            yield from bench.not_run(case, "builder", [arm], str(error), case_hash=case_hash, params=params)

    count = len(lp)
    calls = {name: _all_batches(build, len(batched[0])) for name, build in builds.items()}
    arms = interleave(calls, samples=SAMPLES, best_of=BEST_OF, clock=CpuClock())
    for name, measured in arms.items():
        trees = [tree for batch in range(len(batched[0])) for tree in builds[name](batch)()]
        truth, checks = check(name, trees, lp, ids, case.budget)
        parity = combine(truth, checks, bench.folder, f"{case.id}-{name}".replace("/", "-"))
        samples = tuple(None if s is None else s / count for s in measured.timing.samples_s)
        warmup = None if measured.timing.warmup_s is None else measured.timing.warmup_s / count
        yield bench.row(
            case,
            case_hash,
            "builder",
            name,
            against=None if name == "heapq" else "heapq",
            reason=measured.failure or reason(parity),
            params={**params, "trees": count, "contract": "sglang" if name == SGLANG else "ddtree"},
            parity=parity,
            metrics={"nodes": float(np.mean([int(tree["node_count"]) for tree in trees]))},
            timing=replace(measured.timing, samples_s=samples, warmup_s=warmup),
        )
    if GPU in chosen.arms:
        yield from bench.not_run(case, "builder", [GPU], bench.gpu_missing, case_hash=case_hash, params=params)


def _all_batches(build: Build, batches: int) -> Callable[[], None]:
    def call() -> None:
        for batch in range(batches):
            build(batch)

    return call


def _check_sglang(unit: str, tree: Arrays, lp: NDArray[np.float32], ids: NDArray[np.int32], budget: int) -> Check:
    """The first array and node in which a tree differs from the one that the rules give without a heap."""
    wanted = sglang_tree.build_slowly(lp, ids, budget).arrays()
    for name, array in wanted.items():
        truth, found = np.atleast_1d(array), np.atleast_1d(tree[name])
        bad = np.flatnonzero(truth != found) if truth.shape == found.shape else np.array([0])
        if len(bad):
            i = int(bad[0])
            return Check(
                unit, i + 1, Difference(f"tree.{name}", unit, None, i, truth[i].item(), found[i].item(), None, None)
            )
    return Check(unit, len(wanted["tokens"]))
