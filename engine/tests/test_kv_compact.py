"""Compaction of the latent KV cache against reference.cache, byte for byte, in every layout that the view can say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdtr
from engine.abi import RequestError, SizeError
from engine.ops import Cache
from engine.tests.backends import guarded, is_host, to_device, to_host
from reference.cache import LatentCache

GOLDEN = Path(__file__).resolve().parents[2] / "datasets" / "golden"
PATHS = [[0, 3, 4, 9], [0, 1, 2], [0], [0, 32], [0, 2, 3, 4, 5], [*range(0, 32, 2)], [0, *range(31, 62)]]
SUCCESS = [0, 0, 0]


def padded(paths, length):
    """accepted int32 [R] and path int32 [R, length]; what stands behind a path is no node."""
    path = np.full((len(paths), length), -1, np.int32)
    for row, nodes in zip(path, paths, strict=True):
        row[: len(nodes)] = nodes
    return np.array([len(nodes) - 1 for nodes in paths], np.int32), path


def compact(ops, cache, prefixes, paths, length=32, **given):
    accepted, path = padded(paths, length)
    prefix = to_device(ops, np.array(prefixes, np.int32))
    return ops.kv_compact(cache, prefix, to_device(ops, accepted), to_device(ops, path), **given)


def moved(path):
    return sum(node != row for row, node in enumerate(path))


def tagged(shape, dtype):
    """Every element of [..., rows, width] differs from all others of its column, as far as the dtype can tell."""
    place = np.arange(int(np.prod(shape[:-1])), dtype=np.uint64)[:, None] * np.uint64(2654435761)
    mixed = (place >> np.uint64(7)) + np.arange(shape[-1], dtype=np.uint64) * np.uint64(40503)
    return mixed.astype(dtype).reshape(shape)


def expected_of(rows, slots, prefix, path):
    """rows [layers, slots, ...] after the rows at slots[prefix + path] went to slots[prefix:], all read before."""
    after = rows.copy()
    after[:, slots[prefix : prefix + len(path)]] = rows[:, slots[prefix + np.array(path)]]
    return after


def test_golden_compactions(ops):
    file = kdtr.read(GOLDEN / "compact.kdtr")
    for case in sorted({name.split("/")[0] for name in file}):
        rows, path = file[f"{case}/rows"], file[f"{case}/accepted"].tolist()
        table = None
        device = to_device(ops, rows)
        if f"{case}/block_table" in file:
            size = int(file[f"{case}/block_size"])
            table = to_device(ops, file[f"{case}/block_table"][None])
            view = device.reshape(len(rows), -1, size, rows.shape[2])
        else:
            view = device[:, None]
        result = compact(ops, Cache(view, table), [file[f"{case}/prefix_length"]], [path])
        result.raise_for_status()
        np.testing.assert_array_equal(to_host(ops, device), file[f"{case}/rows_after"], err_msg=case)
        assert result.to_host().moved.tolist() == [moved(path)], case


# Row widths and strides that are moved in words of 16, 4, 2 and 1 bytes, and more than one block wide.
LAYOUTS = [
    (np.uint8, 1152, 0, 16),
    (np.uint16, 576, 0, 16),
    (np.float32, 4 * 1025, 0, 16),
    (np.float32, 6, 1, 4),
    (np.uint16, 577, 0, 2),
    (np.uint16, 8, 1, 2),
    (np.uint8, 1153, 0, 1),
    (np.uint8, 656, 0, 16),  # of an fp8 cache
    (np.uint8, 16, 3, 1),
]


@pytest.mark.parametrize("requests", [1, 5])
@pytest.mark.parametrize(("dtype", "width", "gap", "word"), LAYOUTS)
def test_every_row_of_every_layer_and_request_in_every_word_size(ops, requests, dtype, width, gap, word):
    """Rows are tagged with (layer, request, row); nothing else moves (public issue: sgl-project/sglang#15360)."""
    layers, capacity = 3, 70
    whole = to_device(ops, tagged((layers, requests, capacity, width + gap), dtype))
    before = to_host(ops, whole)
    bits = whole.strides[2] | width * whole.itemsize
    assert next(size for size in (16, 4, 2, 1) if bits % size == 0) == word
    for start in range(0, len(PATHS), requests):
        paths = [PATHS[(start + r) % len(PATHS)] for r in range(requests)]
        prefixes = [(0, 1, 5, 7, 3)[r] for r in range(requests)]
        result = compact(ops, Cache(whole[..., :width]), prefixes, paths).to_host()
        assert result.status.tolist() == [SUCCESS] * requests
        assert result.moved.tolist() == [moved(path) for path in paths]
        expected = before.copy()
        for r, (prefix, path) in enumerate(zip(prefixes, paths, strict=True)):
            view = before[:, r, :, :width]
            expected[:, r, :, :width] = expected_of(view, np.arange(capacity), prefix, path)
        before = to_host(ops, whole)
        assert before.tobytes() == expected.tobytes(), (paths, prefixes)


@pytest.mark.parametrize("offset", range(1, 16))
def test_a_cache_at_any_address(ops, offset):
    """A view into a pool, packed behind other bytes (public issue: lightseekorg/tokenspeed#683)."""
    shape = (2, 2, 40, 48)
    pool = guarded(ops, shape, np.uint8, "the cache", offset)
    rows = tagged(shape, np.uint8)
    pool.array[...] = to_device(ops, rows)
    compact(ops, Cache(pool.array), [3, 4], [[0, 3, 4, 9], [0, 32]]).raise_for_status()
    for r, (prefix, path) in enumerate([(3, [0, 3, 4, 9]), (4, [0, 32])]):
        rows[:, r] = expected_of(rows[:, r], np.arange(40), prefix, path)
    assert pool.host().tobytes() == rows.tobytes()


def test_layers_and_requests_may_lie_in_any_order(ops):
    """[requests, rows, layers, width] in memory, seen as [layers, requests, rows, width]."""
    memory = to_device(ops, tagged((3, 20, 4, 16), np.uint16))
    rows = to_host(ops, memory).transpose(2, 0, 1, 3).copy()
    paths = [[0, 2, 5], [0, 4], [0, 1, 2, 9]]
    compact(ops, Cache(memory.transpose(2, 0, 1, 3)), [0, 9, 7], paths).raise_for_status()
    for r, (prefix, path) in enumerate(zip([0, 9, 7], paths, strict=True)):
        rows[:, r] = expected_of(rows[:, r], np.arange(20), prefix, path)
    np.testing.assert_array_equal(to_host(ops, memory).transpose(2, 0, 1, 3), rows)


def test_more_requests_and_layers_than_blocks(ops):
    """300 requests of 20 layers: a block takes several layers."""
    rng = np.random.default_rng(5)
    rows = tagged((20, 300, 12, 4), np.uint8)
    device = to_device(ops, rows)
    prefixes = rng.integers(0, 4, 300).tolist()
    paths = [random_path(rng, 8) for _ in prefixes]
    compact(ops, Cache(device), prefixes, paths).raise_for_status()
    for r, (prefix, path) in enumerate(zip(prefixes, paths, strict=True)):
        rows[:, r] = expected_of(rows[:, r], np.arange(12), prefix, path)
    assert to_host(ops, device).tobytes() == rows.tobytes()


def random_path(rng, scratch):
    """A path within `scratch` rows, often starting as a chain, of 1 to 32 nodes."""
    length = int(rng.integers(0, min(32, scratch)))
    chain = int(rng.integers(0, length + 1))
    rest = chain + 1 + np.sort(rng.permutation(scratch - 1 - chain)[: length - chain])
    return [*range(chain + 1), *rest.tolist()]


@pytest.mark.parametrize(
    ("ops", "seed"),
    [("host", "0"), ("host", "1"), ("host", "2"), pytest.param("cuda", "0", marks=pytest.mark.gpu)],
    indirect=["ops"],
)
@pytest.mark.parametrize("block_size", [None, 1, 7, 16])
def test_200_rounds_in_place(ops, block_size, seed, monkeypatch):
    """The cache is that of the reference after every round; on the CPU also with other orders of threads."""
    if is_host(ops):
        monkeypatch.setenv("KDTREE_HOST_SEED", seed)
        monkeypatch.setenv("KDTREE_HOST_THREADS", "2")
    rng = np.random.default_rng(17)
    layers, capacity, width = 2, 700, 9
    table = None
    if block_size is not None:
        blocks = -(-capacity // block_size)
        table = rng.permutation(blocks + 3)[:blocks].astype(np.int32)
    reference = LatentCache(layers, 6, width - 6, capacity, np.float32, block_size, table)
    reference.storage[...] = 0
    device = to_device(ops, reference.storage)
    view = device[:, None] if block_size is None else device.reshape(layers, -1, block_size, width)
    cache = Cache(view, None if table is None else to_device(ops, table[None]), capacity)
    for round_ in range(200):
        scratch = int(rng.integers(1, 65))
        if scratch > reference.room:
            reference.crop(int(rng.integers(0, 30)))
        latent, key = rng.normal(size=(scratch, 6)), rng.normal(size=(scratch, 3))
        for layer in range(layers):
            reference.write(layer, latent + layer, key - layer)
        device[...] = to_device(ops, reference.storage)  # the pass over the tree writes its rows
        path = random_path(rng, scratch)
        result = compact(ops, cache, [reference.length], [path])
        reference.commit(path)
        assert to_host(ops, device).tobytes() == reference.storage.tobytes(), (round_, path)
        assert to_host(ops, result.moved).tolist() == [moved(path)]


def test_requests_that_share_a_pool_touch_their_own_blocks_alone(ops):
    rng = np.random.default_rng(2)
    layers, size, width, requests, blocks = 3, 4, 5, 6, 11
    names = rng.permutation(requests * blocks + 9)
    tables = names[: requests * blocks].reshape(requests, blocks).astype(np.int32)
    pool = tagged((layers, len(names), size, width), np.uint16)
    device = to_device(ops, pool)
    wide = np.full((requests, blocks + 2), 10**9, np.int32)  # entries past the capacity are never read
    wide[:, :blocks] = tables
    flat = pool.reshape(layers, -1, width)
    prefixes = rng.integers(0, 8, requests).tolist()
    paths = [random_path(rng, blocks * size - prefix) for prefix in prefixes]
    result = compact(ops, Cache(device, to_device(ops, wide), blocks * size), prefixes, paths)
    result.raise_for_status()
    for table, prefix, path in zip(tables, prefixes, paths, strict=True):
        rows = np.arange(blocks * size)
        flat = expected_of(flat, table[rows // size] * size + rows % size, prefix, path)
    assert to_host(ops, device).tobytes() == flat.tobytes()
    assert sum(map(moved, paths)) > 20


def test_a_row_that_keeps_its_place_is_not_even_read(ops):
    """Its block may be missing from the table: a chain touches no row, and a path only those that move."""
    rows = tagged((2, 6, 2, 8), np.uint16)
    for path, table, count in (
        ([0, 1, 2, 3], [-1] * 6, 0),
        ([0, 1, 2, 3, 8], [-1, -1, 5, -1, 2, -1], 1),
    ):
        device = to_device(ops, rows)
        result = compact(ops, Cache(device, to_device(ops, np.array([table], np.int32))), [0], [path])
        result.raise_for_status()
        assert result.to_host().moved.tolist() == [count]
        expected = rows.copy()
        if count:
            expected[:, 5, 0] = rows[:, 2, 0]
        assert to_host(ops, device).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("path", "prefix", "table", "status"),
    [
        ([1, 2], 0, None, [10, 0, 1]),
        ([0, 2, 2], 0, None, [10, 2, 2]),
        ([0, 3, 2, 9], 0, None, [10, 2, 2]),
        ([0, 1, -1], 0, None, [10, 2, -1]),
        ([-1], 0, None, [10, 0, -1]),
        ([0, 1025], 0, None, [10, 1, 1025]),  # no tree has such a node
        ([0, 2**31 - 1], 0, None, [10, 1, 2**31 - 1]),
        ([0, 16], 0, None, [11, 17, 16]),
        ([0, 1], 15, None, [11, 17, 16]),
        ([0], 16, None, [11, 17, 16]),
        ([0, 1024], 2**31 - 2, None, [11, 2**31 - 1, 16]),
        ([0], -1, None, [9, -1, 16]),
        ([0, 9], 2, [0, 1, -1, 3], [11, 12, 8]),  # the row comes from a block that is not there
        ([0, 9], 2, [-1, 1, 2, 3], [11, 12, 0]),  # or goes there
    ],
)
def test_a_refused_request_names_the_numbers_and_moves_nothing(ops, path, prefix, table, status):
    """A path that does not increase, or more rows than there are (public issue: unslothai/llama.cpp#224)."""
    good = [0, 2, 3]
    rows = tagged((2, 8, 4, 8), np.float32)
    device = to_device(ops, rows)
    tables = np.array([table or [0, 1, 2, 3], [4, 5, 6, 7]], np.int32)
    cache = Cache(device, to_device(ops, tables))
    result = compact(ops, cache, [prefix, 1], [path, good]).to_host()
    assert result.status.tolist() == [status, SUCCESS]
    assert result.moved.tolist() == [0, 2]
    flat = rows.reshape(2, 32, 8)
    expected = expected_of(flat, np.arange(32), 17, good)
    assert to_host(ops, device).tobytes() == expected.tobytes()
    with pytest.raises(RequestError, match=r"request 0\D"):
        result.raise_for_status()


def test_a_true_overflow_says_what_is_needed_and_what_there_is(ops):
    cache = Cache(to_device(ops, np.zeros((1, 1, 64, 4), np.uint8)), capacity=60)
    with pytest.raises(RequestError, match="request 0: needs 61 cache rows, 60 are available"):
        compact(ops, cache, [50], [[0, 10]]).raise_for_status()
    compact(ops, cache, [50], [[0, 9]]).raise_for_status()


@pytest.mark.parametrize("accepted", [-2, 4, 2**31 - 1, -(2**31)])
def test_a_number_of_nodes_outside_the_path_is_refused_and_minus_one_is_nothing_to_do(ops, accepted):
    rows = tagged((2, 3, 16, 8), np.uint8)
    device = to_device(ops, rows)
    path = to_device(ops, np.array([[0, 2, 4, 6]] * 3, np.int32))
    prefix = to_device(ops, np.array([0, -9, 1], np.int32))
    count = to_device(ops, np.array([accepted, -1, 3], np.int32))
    result = ops.kv_compact(Cache(device), prefix, count, path).to_host()
    assert result.status.tolist() == [[9, accepted, 3], SUCCESS, SUCCESS]
    assert result.moved.tolist() == [0, 0, 3]
    rows[:, 2] = expected_of(rows[:, 2], np.arange(16), 1, [0, 2, 4, 6])
    assert to_host(ops, device).tobytes() == rows.tobytes()


def test_requests_that_failed_before_keep_their_rows_and_their_status(ops):
    """Also where `before` and the status are one array."""
    before = np.array([SUCCESS, [6, 4, 0], [10, 1, 1], SUCCESS], np.int32)
    paths = [[0, 2], [0, 2], [0, 2], [0, 3, 3]]
    for aliased in (False, True):
        rows = tagged((2, 4, 8, 16), np.uint8)
        device, given = to_device(ops, rows), to_device(ops, before)
        out = {"status": given} if aliased else None
        result = compact(ops, Cache(device), [1] * 4, paths, before=given, out=out).to_host()
        assert result.status.tolist() == [SUCCESS, [6, 4, 0], [10, 1, 1], [10, 2, 3]]
        assert result.moved.tolist() == [1, 0, 0, 0]
        rows[:, 0, 2] = rows[:, 0, 3]
        assert to_host(ops, device).tobytes() == rows.tobytes()


def test_accept_and_commit_in_one_breath(ops):
    """What accept wrote goes straight in: a failed request (-1) moves nothing."""
    tokens = to_device(ops, np.array([[0, 5, 6, 7], [0, 5, 5, 7]], np.int32))
    parents = to_device(ops, np.array([[-1, 0, 0, 2], [-1, 0, 0, 2]], np.int32))
    choices = to_device(ops, np.array([[6, 0, 7, 9]] * 2, np.int32))
    counts = to_device(ops, np.array([3, 3], np.int32))
    accepted = ops.tree_accept(tokens, parents, counts, choices, 3)
    rows = tagged((2, 2, 8, 16), np.uint8)
    device = to_device(ops, rows)
    prefix = to_device(ops, np.array([2, 2], np.int32))
    result = ops.kv_compact(Cache(device), prefix, accepted.accepted, accepted.path, before=accepted).to_host()
    assert result.status.tolist() == [SUCCESS, [8, 2, 1]]
    rows[:, 0, 3:5] = rows[:, 0, 4:6]
    assert to_host(ops, device).tobytes() == rows.tobytes()


def test_rows_past_2_to_the_31(ops):
    """Row 3,728,270 of a cache 576 wide is element 2^31, and its first byte 2^32."""
    capacity, width = 3_728_330, 576
    whole = empty_cache(ops, capacity, width)
    prefix, path = 3_728_265, [0, 3, 5, 6, 63]
    window = slice(prefix - 2, prefix + 65)
    rows = tagged((67, width), np.uint16)
    whole[0, 0, window] = to_device(ops, rows)
    compact(ops, Cache(whole), [prefix], [path]).raise_for_status()
    expected = expected_of(rows[None], np.arange(67), 2, path)[0]
    assert to_host(ops, whole[0, 0, window]).tobytes() == expected.tobytes()


def empty_cache(ops: Any, capacity: int, width: int) -> Any:
    """4.3 GB, of which on the CPU only what is written takes memory."""
    try:
        return ops.memory.empty((1, 1, capacity, width), "uint16", ops.memory.stream(None))
    except MemoryError as error:
        pytest.skip(f"no room for the cache: {error}")


@dataclass(frozen=True)
class Strided:
    """A view that says what it likes of its strides."""

    __array_interface__: dict[str, Any]


def test_sizes_out_of_range_are_refused_with_their_numbers(ops):
    cache = Cache(to_device(ops, np.zeros((2, 2, 8, 4), np.uint8)))
    with pytest.raises(SizeError, match=r"depth_limit is 32, it must be in \[0, 31\]"):
        compact(ops, cache, [0, 0], [[0], [0]], length=33)
    if is_host(ops):
        array = np.zeros(256, np.uint8)
        overlapping = {**array.__array_interface__, "shape": (2, 2, 8, 4), "strides": (2, 64, 4, 1)}
        with pytest.raises(SizeError, match=r"cache.layer_stride is 2, it must be in \[4, "):
            compact(ops, Cache(Strided(overlapping)), [0, 0], [[0], [0]])
