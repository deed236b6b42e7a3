"""Top-k with its normaliser on drafter logits: NumPy, PyTorch on the GPU, and the engine; lists against the truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness import gpu_builders
from harness.benchmarks.conftest import measure_graph
from harness.cases import Decode as Case
from harness.cases import digest
from harness.gpu_builders import GpuArm
from harness.logits import OURS, TORCHS, TorchSource, check_lists
from harness.parity import check_tokens, combine
from reference.topk import topk_logprob

pytestmark = pytest.mark.bench
K = 64
ON_GPU = tuple(pytest.param(arm, marks=pytest.mark.gpu) for arm in ("torch", "gpu"))


@pytest.mark.parametrize("vocab", [4096, 163_840])
@pytest.mark.parametrize("arm", ["numpy", *ON_GPU])
def test_bench_topk(benchmark: Any, bench_row: Any, request: pytest.FixtureRequest, arm: str, vocab: int) -> None:
    logits = np.random.default_rng(0).standard_normal((7, vocab)).astype(np.float32)
    benchmark.group = f"top-{K} of [7, {vocab}]"
    timing = None
    if arm == "numpy":
        found = benchmark.pedantic(topk_logprob, args=(logits, K), rounds=10, warmup_rounds=1)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :K]
        parity = combine("a stable sort", [check_tokens(f"depth {d}", order[d], found.ids[d]) for d in range(7)])
    else:
        gpu = request.getfixturevalue("gpu")
        rows = gpu.to_device(logits[None])
        if arm == "gpu":
            prepared, timing = request.getfixturevalue("gpu_measure")(
                gpu.ops.topk_logprob.plan(rows, K, stream=gpu.stream)
            )
            (found,) = prepared.results()
            found.raise_for_status()
            lp, ids = found.lp, found.ids
        else:
            pytest.importorskip("torch")
            run, own, lists = TorchSource(rows, K).graph(gpu_builders.CALLS)
            timing = measure_graph(benchmark, GpuArm(run, gpu_builders.CALLS, own, list))
            lp, ids = lists()
        error = OURS if arm == "gpu" else TORCHS
        checks = check_lists("request 0", lp[0], ids[0], logits, topk_logprob(logits, K), error)
        parity = combine("reference.topk_logprob", list(checks))
    case_hash = digest(Case("topk"), logits.tobytes())
    bench_row(case=f"bench/topk/v{vocab}", arm=arm, case_hash=case_hash, parity=parity, timing=timing)
    assert parity.passed, parity
