"""The accepted path of one tree, the deepest there is: the reference and the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.cases import Decode as Case
from harness.cases import digest
from harness.parity import check_tokens, combine
from reference.accept import accept
from reference.topk import topk_logprob
from reference.tree import build_tree

pytestmark = pytest.mark.bench
DEPTH_LIMIT = 7


@pytest.mark.parametrize("budget", [16, 64, 256])
@pytest.mark.parametrize("arm", ["numpy", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_bench_accept(benchmark: Any, bench_row: Any, request: pytest.FixtureRequest, arm: str, budget: int) -> None:
    logits = 3 * np.random.default_rng(0).standard_normal((DEPTH_LIMIT, 4096)).astype(np.float32)
    lists = topk_logprob(logits, budget)
    tree = build_tree(lists.lp, lists.ids, budget)
    deepest = int(np.argmax(tree.depths))
    path = tree.paths(DEPTH_LIMIT)[deepest][: tree.depths[deepest] + 1]
    choices = np.zeros(len(tree.tokens), np.int32)
    choices[path[:-1]] = tree.tokens[path[1:]]
    benchmark.group = f"accept b{budget}"
    timing = None
    if arm == "numpy":
        nodes = benchmark.pedantic(accept, args=(tree.tokens, tree.parents, choices), rounds=50, warmup_rounds=3).nodes
    else:
        gpu = request.getfixturevalue("gpu")
        count = np.array([tree.node_count], np.int32)
        given = [gpu.to_device(array) for array in (tree.tokens[None], tree.parents[None], count, choices[None])]
        prepared, timing = request.getfixturevalue("gpu_measure")(
            gpu.ops.tree_accept.plan(*given, DEPTH_LIMIT, stream=gpu.stream)
        )
        (found,) = prepared.results()
        found.raise_for_status()
        nodes = found.path[0, : found.accepted[0] + 1]
    parity = combine("the deepest path", [check_tokens("path", path, nodes)])
    inputs = tree.tokens.tobytes(), tree.parents.tobytes(), choices.tobytes()
    case_hash = digest(Case("accept"), *inputs)
    bench_row(case=f"bench/accept/b{budget}", arm=arm, case_hash=case_hash, parity=parity, timing=timing)
    assert parity.passed, parity
