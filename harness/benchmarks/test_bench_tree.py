"""Tree builders, one batch a call, on lists as sharp as a drafter's; each tree is compared with the reference's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness import builders, gpu_builders, heap_tree
from harness.benchmarks.conftest import measure_graph
from harness.cases import Builder, digest
from harness.parity import combine
from reference.topk import topk_logprob

pytestmark = pytest.mark.bench
BLOCK, VOCAB, BATCH = 8, 4096, 8
ARMS = ("heapq", "sglang-heapq", "cpp-heap", pytest.param("gpu", marks=pytest.mark.gpu))


def sharp_lists(width: int) -> tuple[Any, Any]:
    """(lp, ids) [BATCH, L, width]: the best entries stand out, less with every depth."""
    rng = np.random.default_rng(0)
    sharpness = np.linspace(3.0, 1.5, BLOCK - 1)[:, None]
    logits = [(sharpness * rng.standard_normal((BLOCK - 1, VOCAB))).astype(np.float32) for _ in range(BATCH)]
    made = [topk_logprob(each, width) for each in logits]
    return np.stack([m.lp for m in made]), np.stack([m.ids for m in made])


@pytest.mark.parametrize("budget", [16, 64, 256])
@pytest.mark.parametrize("arm", ARMS)
def test_bench_tree(benchmark: Any, bench_row: Any, request: pytest.FixtureRequest, arm: str, budget: int) -> None:
    if arm == "cpp-heap" and heap_tree.compiler() is None:
        pytest.skip("no C++ compiler")
    lp, ids = sharp_lists(budget)
    benchmark.group = f"tree b{budget}, {BATCH} requests a call"
    timing = None
    if arm == "gpu":
        prepared = gpu_builders.tree_arm(request.getfixturevalue("gpu"), lp[None], ids[None], budget)
        timing = measure_graph(benchmark, prepared, BATCH)
        trees: Any = gpu_builders.trees_of(prepared)
    else:
        build = builders.make(arm, lp[None], ids[None], budget)
        trees = benchmark.pedantic(build, args=(0,), rounds=30, warmup_rounds=3)()
    parity = combine(*builders.check(arm, trees, lp, ids, budget))
    case = Builder(BLOCK, budget, BATCH, BATCH)
    bench_row(
        case=f"bench/tree/b{budget}",
        arm=arm,
        case_hash=digest(case, lp.tobytes(), ids.tobytes()),
        params={"budget": budget, "batch": BATCH, "depth_limit": BLOCK - 1},
        parity=parity,
        calls=BATCH,
        timing=timing,
    )
    assert parity.passed, parity
