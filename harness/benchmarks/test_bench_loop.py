"""Whole loops on a small random pair, on the CPU; each result is checked."""

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

pytestmark = pytest.mark.bench
GPU = pytest.param("gpu", marks=pytest.mark.gpu)
NO_ENGINE = "the native engine has no runner here"


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
