"""Accepted rows moved to behind the prefix in every layer of a latent cache: the reference and the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.ops import Cache
from harness.cases import Decode as Case
from harness.cases import digest
from harness.parity import check_tokens, combine
from reference.cache import LatentCache

pytestmark = pytest.mark.bench
LAYERS, LATENT, ROPE, PREFIX, SCRATCH = 61, 512, 64, 64, 33
PATH = np.array([0, 2, 3, 7, 12, 18, 25, 31], np.int32)  # of 16-bit values, as a bf16 cache holds them


def filled(layers: int) -> tuple[LatentCache, NDArray[np.int16]]:
    """A cache with scratch behind its prefix, and a copy of its rows."""
    rows = np.random.default_rng(0).integers(-999, 999, (layers, PREFIX + SCRATCH, LATENT + ROPE)).astype(np.int16)
    storage = rows.copy()
    cache = LatentCache(layers, LATENT, ROPE, PREFIX + SCRATCH, np.int16, storage=storage)
    for start, stop in ((0, PREFIX), (PREFIX, PREFIX + SCRATCH)):
        for layer in range(layers):
            cache.write(layer, rows[layer, start:stop, :LATENT], rows[layer, start:stop, LATENT:])
        if not start:
            cache.commit(np.arange(PREFIX))
    return cache, rows


@pytest.mark.parametrize("layers", [4, LAYERS])
@pytest.mark.parametrize("arm", ["numpy", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_bench_compact(benchmark: Any, bench_row: Any, request: pytest.FixtureRequest, arm: str, layers: int) -> None:
    _, rows = filled(layers)
    wanted = rows[:, PREFIX + PATH]
    benchmark.group = f"compaction of {len(PATH)} rows, {layers} layers"
    timing = None
    if arm == "numpy":
        caches: list[LatentCache] = []

        def fresh() -> tuple[tuple[LatentCache], dict[str, Any]]:
            caches[:] = [filled(layers)[0]]
            return (caches[0],), {}

        benchmark.pedantic(lambda cache: cache.commit(PATH), setup=fresh, rounds=10)
        found = caches[0].storage[:, PREFIX : PREFIX + len(PATH)]
    else:
        gpu = request.getfixturevalue("gpu")
        numbers = [np.array([number], np.int32) for number in (PREFIX, len(PATH) - 1)]
        given = [gpu.to_device(array) for array in (*numbers, PATH[None])]
        compact = gpu.ops.kv_compact
        once = gpu.to_device(rows[:, None])
        compact(Cache(once), *given, stream=gpu.stream).raise_for_status()
        found = gpu.ops.memory.to_host(once, gpu.ops.memory.stream(gpu.stream))[:, 0, PREFIX : PREFIX + len(PATH)]
        again = gpu.to_device(rows[:, None])  # every call moves as many bytes, whatever they hold by then
        prepared, timing = request.getfixturevalue("gpu_measure")(compact.plan(Cache(again), *given, stream=gpu.stream))
        (result,) = prepared.results()
        result.raise_for_status()
    checks = [check_tokens(f"layer {layer}", wanted[layer].ravel(), found[layer].ravel()) for layer in range(layers)]
    parity = combine("the chosen rows", checks)
    case_hash = digest(Case("compact"), rows.tobytes(), PATH.tobytes())
    bench_row(
        case=f"bench/compact/layers{layers}",
        arm=arm,
        case_hash=case_hash,
        params={"rows": len(PATH), "layers": layers},
        parity=parity,
        timing=timing,
    )
    assert parity.passed, parity
