"""The other pieces of a round, and whole loops on a small random pair, on the CPU; each result is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from datasets.evaluation import pair as pairs
from harness.cases import AR, CHAIN, Arm, digest
from harness.cases import Decode as Case
from harness.parity import Check, check_accepted, check_tokens, combine
from harness.systems import ReferenceDecoder
from harness.tests.pairs import write_pair
from reference.accept import accept
from reference.topk import topk_logprob
from reference.tree import build_tree

pytestmark = pytest.mark.bench
GPU = pytest.param("gpu", marks=pytest.mark.gpu)
NO_ENGINE = "the native engine has no runner here"


@pytest.mark.parametrize("vocab", [4096, 163_840])
@pytest.mark.parametrize("arm", ["numpy", GPU])
def test_bench_topk(benchmark: Any, bench_row: Any, arm: str, vocab: int) -> None:
    if arm == "gpu":
        pytest.skip(NO_ENGINE)
    logits = np.random.default_rng(0).standard_normal((7, vocab)).astype(np.float32)
    benchmark.group = f"top-64 of [7, {vocab}]"
    found = benchmark.pedantic(topk_logprob, args=(logits, 64), rounds=10, warmup_rounds=1)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :64]
    parity = combine("a stable sort", [check_tokens(f"depth {d}", order[d], found.ids[d]) for d in range(7)])
    bench_row(case=f"bench/topk/v{vocab}", arm=arm, case_hash=digest(Case("topk"), logits.tobytes()), parity=parity)
    assert parity.passed, parity


@pytest.mark.parametrize("budget", [16, 64, 256])
@pytest.mark.parametrize("arm", ["numpy", GPU])
def test_bench_accept(benchmark: Any, bench_row: Any, arm: str, budget: int) -> None:
    if arm == "gpu":
        pytest.skip(NO_ENGINE)
    lists = topk_logprob(3 * np.random.default_rng(0).standard_normal((7, 4096)).astype(np.float32), budget)
    tree = build_tree(lists.lp, lists.ids, budget)
    deepest = int(np.argmax(tree.depths))
    path = tree.paths(7)[deepest][: tree.depths[deepest] + 1]
    choices = np.zeros(len(tree.tokens), np.int32)
    choices[path[:-1]] = tree.tokens[path[1:]]
    benchmark.group = f"accept b{budget}"
    found = benchmark.pedantic(accept, args=(tree.tokens, tree.parents, choices), rounds=50, warmup_rounds=3)
    parity = combine("the deepest path", [check_tokens("path", path, found.nodes)])
    inputs = tree.tokens.tobytes(), tree.parents.tobytes(), choices.tobytes()
    bench_row(case=f"bench/accept/b{budget}", arm=arm, case_hash=digest(Case("accept"), *inputs), parity=parity)
    assert parity.passed, parity


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> pairs.Pair:
    return pairs.load(write_pair(tmp_path_factory.mktemp("pair")))


@pytest.mark.parametrize(
    "arm", [AR, CHAIN, Arm("ddtree", 16), Arm("ddtree", 64), GPU], ids=lambda arm: getattr(arm, "name", arm)
)
def test_bench_loop(benchmark: Any, bench_row: Any, pair: pairs.Pair, arm: Arm) -> None:
    """12 tokens of a random pair, prefill of 32 tokens included."""
    if not isinstance(arm, Arm):
        pytest.skip(NO_ENGINE)
    prompt = (1 + np.arange(32) % 7).tolist()
    decoder = ReferenceDecoder(pair)
    benchmark.group = "loop, 12 tokens, random pair"
    found = benchmark.pedantic(decoder.decode, args=(arm, prompt, 8, {"max_new_tokens": 12}), rounds=5, warmup_rounds=1)
    truth = decoder.decode(AR, prompt, 8, {"max_new_tokens": 12}).tokens
    checks: list[Check] = [check_tokens("prompt", truth, found.tokens), check_accepted("prompt", truth, found.rounds)]
    parity = combine("ar", checks)
    bench_row(case="bench/loop", arm=arm.name, case_hash=digest(Case("loop"), pair.digest, prompt), parity=parity)
    assert parity.passed, parity
