from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from reference.cache import CapacityError, LatentCache
from reference.tests.lists import random_lists
from reference.tree import build_tree

LAYERS, LATENT, ROPE = 3, 5, 2


def tags(request, layer, nodes):
    """latent [N, 5] and rope key [N, 2] whose every value names request, layer, node and column."""
    base = 1e6 * request + 1e5 * layer + 10.0 * np.asarray(nodes)[:, None]
    return base + np.arange(LATENT), base + LATENT + np.arange(ROPE)


def prefixed(request, prefix, capacity, **view):
    cache = LatentCache(LAYERS, LATENT, ROPE, capacity, np.float64, **view)
    for layer in range(LAYERS):
        cache.write(layer, *tags(request, layer, np.arange(prefix)))
    cache.commit(np.arange(prefix))
    return cache


def write_nodes(cache, request, count, first=1000):
    for layer in range(LAYERS):
        cache.write(layer, *tags(request, layer, first + np.arange(count)))


def assert_rows(cache, request, expected):
    assert cache.length == len(expected)
    for layer in range(LAYERS):
        latent, rope_key = tags(request, layer, expected)
        held = cache.read(layer, cache.length)
        np.testing.assert_array_equal(held[0], latent)
        np.testing.assert_array_equal(held[1], rope_key)


def views(block_size, capacity, requests):
    """Cache options of `requests` requests: contiguous, or sharing one pool through shuffled block tables."""
    if block_size is None:
        return [{} for _ in range(requests)]
    blocks = -(-capacity // block_size)
    tables = np.random.default_rng(block_size).permutation(blocks * requests + 2)[: blocks * requests]
    pool = np.full((LAYERS, (blocks * requests + 2) * block_size, LATENT + ROPE), -1.0)
    return [
        {"block_size": block_size, "block_table": table, "storage": pool} for table in tables.reshape(requests, blocks)
    ]


PATHS: tuple[list[int], ...] = (
    [0, 3, 4, 9],
    [0, 1, 2],
    [0],
    [0, 32],
    [0, 2, 3, 4, 5],
    [],
    list(range(40)),
    [0, 15, 16, 17, 31, 32, 33],
)


@pytest.mark.parametrize("requests", [1, 5])
@pytest.mark.parametrize("block_size", [None, 1, 16, 64])
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_accepted_rows_follow_the_prefix_in_path_order(path, block_size, requests):
    """Every row tagged by (request, layer, node, column): a permutation inside a page would show.

    Public issues: sgl-project/sglang#15360, #26866, #31218, openvinotoolkit/openvino.genai#3755.
    """
    capacity = 110
    caches, prefixes = [], [17, 0, 16, 63, 1][:requests]
    for request, view in enumerate(views(block_size, capacity, requests)):
        caches.append(prefixed(request, prefixes[request], capacity, **view))
        write_nodes(caches[request], request, 40)
    for request, cache in enumerate(caches):
        cache.commit(path)
        expected = [*range(prefixes[request]), *(1000 + i for i in path)]
        for other in range(request + 1):  # what was committed before stays as it was
            rows = [*range(prefixes[other]), *(1000 + i for i in path)]
            assert_rows(caches[other], other, rows if other < request else expected)
        for other in range(request + 1, requests):  # uncommitted neighbours keep their scratch rows
            latent, _ = caches[other].read(1, prefixes[other] + 40)
            np.testing.assert_array_equal(latent[prefixes[other] :], tags(other, 1, 1000 + np.arange(40))[0])


@pytest.mark.parametrize("block_size", [None, 16])
def test_200_rounds_of_random_trees_in_place(block_size):
    rng = np.random.default_rng(1)
    capacity = 1400
    cache = prefixed(2, 3, capacity, **views(block_size, capacity, 1)[0])
    expected = [0, 1, 2]
    moved = 0
    for round_index, (_, lp, ids) in enumerate(random_lists(seed=3, count=200, max_depth=6, max_width=6)):
        tree = build_tree(lp, ids, int(rng.integers(0, 66)))
        write_nodes(cache, 2, 1 + tree.node_count, first=1000 * (round_index + 1))
        path = tree.paths()[int(rng.integers(0, 1 + tree.node_count))]
        path = path[path >= 0]
        cache.commit(path)
        expected += [1000 * (round_index + 1) + int(i) for i in path]
        moved += int((path != np.arange(len(path))).sum())
        assert_rows(cache, 2, expected)
    assert moved > 200


def test_storage_layout_is_that_of_the_block_table():
    pool = np.zeros((LAYERS, 12, LATENT + ROPE))
    cache = LatentCache(LAYERS, LATENT, ROPE, 5, np.float64, block_size=4, block_table=[2, 0], storage=pool)
    write_nodes(cache, 1, 5, first=1)
    latent, _ = tags(1, 2, 1 + np.arange(5))
    np.testing.assert_array_equal(pool[2, [8, 9, 10, 11, 0], :LATENT], latent)
    assert not pool[:, 1:8].any(), "rows of other blocks and past the capacity stay untouched"


def test_overflow_names_needed_and_available_rows_and_writes_nothing():
    """Public issues: unslothai/llama.cpp#224, NVIDIA/TensorRT-LLM#16826."""
    cache = prefixed(0, 6, 8)
    before = cache.storage.copy()
    with pytest.raises(CapacityError, match="a pass at length 6 needs 3 cache rows, 2 are available") as error:
        write_nodes(cache, 0, 3)
    assert (error.value.needed, error.value.available) == (3, 2)
    np.testing.assert_array_equal(cache.storage, before)
    write_nodes(cache, 0, 2)
    cache.commit([0, 1])
    assert cache.room == 0
    with pytest.raises(CapacityError, match="needs 1 cache rows, 0 are available"):
        write_nodes(cache, 0, 1)


@pytest.mark.parametrize("rows", [[1, 1], [2, 1], [-1, 0], [0, 4], [4]])
def test_rows_that_do_not_increase_within_the_scratch_are_refused_and_nothing_changes(rows):
    cache = prefixed(0, 2, 10)
    write_nodes(cache, 0, 4)
    with pytest.raises(ValueError, match="increase strictly within the 4 scratch rows"):
        cache.commit(rows)
    assert cache.length == 2
    cache.commit([0, 2])
    assert_rows(cache, 0, [0, 1, 1000, 1002])


def test_a_pass_that_reached_only_some_layers_cannot_be_committed():
    cache = prefixed(0, 2, 10)
    cache.write(0, *tags(0, 0, np.arange(3)))
    with pytest.raises(ValueError, match="within the 0 scratch rows"):
        cache.commit([0])


def test_scratch_is_overwritten_by_the_next_pass_and_dropped_by_commit_and_crop():
    cache = prefixed(0, 4, 12)
    write_nodes(cache, 0, 5, first=50)
    write_nodes(cache, 0, 2, first=70)
    with pytest.raises(ValueError, match="layer 1 holds 6 rows, 7 asked for"):
        cache.read(1, 7)
    cache.commit([1])
    assert_rows(cache, 0, [0, 1, 2, 3, 71])
    with pytest.raises(ValueError, match="layer 0 holds 5 rows, 6 asked for"):
        cache.read(0, 6)
    write_nodes(cache, 0, 2, first=90)
    cache.crop(3)
    assert_rows(cache, 0, [0, 1, 2])
    for length in (-1, 4):
        with pytest.raises(ValueError, match=f"cannot crop a cache of 3 rows to {length}"):
            cache.crop(length)


def test_rows_never_written_are_nan():
    cache = LatentCache(1, 2, 1, 7, ml_dtypes.bfloat16, block_size=4)
    assert cache.storage.shape == (1, 8, 3)
    assert np.isnan(cache.storage.astype(np.float32)).all()


def test_arguments_that_make_no_cache_are_refused():
    with pytest.raises(ValueError, match="capacity -1"):
        LatentCache(1, 2, 1, -1, np.float32)
    with pytest.raises(ValueError, match="block size 0"):
        LatentCache(1, 2, 1, 4, np.float32, block_size=0)
    with pytest.raises(ValueError, match="needs a block size"):
        LatentCache(1, 2, 1, 4, np.float32, block_table=[0])
    with pytest.raises(CapacityError, match="block table needs 9 cache rows, 8 are available"):
        LatentCache(1, 2, 1, 9, np.float32, block_size=4, block_table=[0, 1])
    for table in ([0, 0], [0, -1]):
        with pytest.raises(ValueError, match="distinct blocks"):
            LatentCache(1, 2, 1, 8, np.float32, block_size=4, block_table=table)
    with pytest.raises(CapacityError, match="block table needs 24 cache rows, 16 are available"):
        LatentCache(1, 2, 1, 8, np.float32, 4, [0, 5], np.zeros((1, 16, 3), np.float32))
    with pytest.raises(CapacityError, match="the cache needs 8 cache rows, 7 are available"):
        LatentCache(1, 2, 1, 8, np.float32, storage=np.zeros((1, 7, 3), np.float32))
    with pytest.raises(ValueError, match=r"storage must be float32 \[1, rows, 3\], got float64 \[1, 8, 3\]"):
        LatentCache(1, 2, 1, 8, np.float32, storage=np.zeros((1, 8, 3)))
    cache = LatentCache(1, 2, 1, 8, np.float32)
    with pytest.raises(ValueError, match=r"expected latent \[N, 2\] and rope key \[N, 1\], got \[3, 2\] and \[2, 1\]"):
        cache.write(0, np.zeros((3, 2)), np.zeros((2, 1)))
    assert LatentCache(2, 2, 1, 0, np.float32).room == 0
