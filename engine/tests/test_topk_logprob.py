"""Logits -> lists on the device: the ids of the reference, its logz to 1 ulp, lp one subtraction of that logz.

What a row gives is a function of its logits alone: not of the batch, the alignment, the padding or the workspace.
"""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kdtr
from engine import abi
from engine.arrays import view
from engine.results import TopK
from engine.sources import CHECKOUT
from engine.tests.backends import guarded, to_device, to_host
from reference.topk import DraftError, topk_logprob

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), BF16]
VOCABULARIES = (1, 31, 32, 33, 127, 1000, 4097, 129281, 163840, 163841)
OK, NAN, INFINITE, OWN_SIZE, NO_CHOICE = 0, 1, 2, 9, 6
INF = np.inf

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def run(ops, logits, k, **options) -> TopK:
    """Of NumPy logits [R, L, V], as NumPy arrays."""
    name = logits.dtype.name
    found: TopK = ops.topk_logprob(to_device(ops, logits), k, dtype=name, **options).to_host()
    return found


def assert_lists(found: TopK, logits, k, vocab_size=None) -> None:
    """Equal to the reference, request by request."""
    for request, rows in enumerate(logits):
        wanted = topk_logprob(rows, k, vocab_size)
        np.testing.assert_array_equal(found.ids[request], wanted.ids)
        logz = found.logz[request]
        row = kdtr.compare_array("logz", wanted.logz, logz, kdtr.Tolerance.ulp(1))
        assert row.ok, f"request {request}: {row.problem} at {row.index}: reference {row.golden}, got {row.actual}"
        best = np.take_along_axis(rows.astype(np.float32), wanted.ids.astype(np.int64), axis=1)
        with np.errstate(invalid="ignore", over="ignore"):
            lp = np.where(np.isneginf(logz)[:, None], np.float32(-INF), best - logz[:, None])
        assert bits(found.lp[request]) == bits(lp)
    np.testing.assert_array_equal(found.status, np.zeros((len(logits), 3)))


def check(ops, logits, k, **options) -> TopK:
    found = run(ops, logits, k, **options)
    assert_lists(found, logits, k, options.get("vocab_size"))
    return found


def bits(array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def all_bits(found: TopK) -> dict[str, bytes]:
    return {name: bits(getattr(found, name)) for name in ("ids", "lp", "logz", "status")}


def gaussian(seed, *shape, scale=3.0, dtype=np.float32) -> Any:
    return (scale * np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


# --- against the reference --------------------------------------------------------------------------------------------


def test_golden_lists(ops):
    golden = kdtr.read(CHECKOUT / "datasets" / "golden" / "topk.kdtr")
    cases = sorted(name.removesuffix("/logits") for name in golden if name.endswith("/logits"))
    for case in cases:
        logits, vocab_size = np.asarray(golden[f"{case}/logits"])[None], int(golden[f"{case}/vocab_size"])
        found = run(ops, logits, int(golden[f"{case}/k"]), vocab_size=vocab_size)
        assert bits(found.ids[0]) == bits(golden[f"{case}/ids"]), case
        for name in ("lp", "logz"):
            tolerance = golden.info[f"{case}/{name}"].tolerance
            assert tolerance is not None
            row = kdtr.compare_array(name, golden[f"{case}/{name}"], getattr(found, name)[0], tolerance)
            assert row.ok, f"{case}: {row}"
        assert_lists(found, logits, int(golden[f"{case}/k"]), vocab_size)
    assert len(cases) >= 18


@each_dtype
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_every_vocabulary_and_the_winners_that_narrow_ids_would_lose(ops, dtype, vocabulary):
    """Case C04. Public issues: vllm-project/vllm#44744 (an id outside the vocabulary), #41834."""
    logits = gaussian(vocabulary, 1, 2, vocabulary, dtype=dtype)
    winners = sorted({w % vocabulary for w in (0, 65535, 65536, 131071, vocabulary - 1)})
    logits[0, 1, winners] = 40
    found = check(ops, logits, min(64, vocabulary))
    assert found.ids[0, 1, : len(winners)].tolist() == winners
    assert found.ids.min() >= 0
    assert found.ids.max() < vocabulary


@each_dtype
@pytest.mark.parametrize("k", [0, 1, 2, 63, 255, 256, 257, 1000, 1024])
def test_every_length_of_lists(ops, dtype, k):
    """Both kernels, all sizes of groups, and vocabularies at the edges of chunks and groups."""
    for vocabulary in (1024, 2048, 2049, 4095, 16 * 1024 - 1, 16 * 1024, 20011):
        check(ops, gaussian(k, 1, 1, vocabulary, dtype=dtype), min(k, vocabulary))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_drawn_rows(ops, data):
    """Few different values, so that ties are everywhere; -inf, both zeros, any V and k."""
    vocabulary = data.draw(st.integers(1, 5000))
    seed = data.draw(st.integers(0, 2**32 - 1))
    values = data.draw(
        st.lists(st.sampled_from([-INF, -100.0, -3.5, -0.0, 0.0, 1e-30, 0.25, 7.0, 88.0, 3e38]), min_size=1, max_size=5)
    )
    noise = data.draw(st.sampled_from([0.0, 0.0, 1e-3, 5.0]))
    rng = np.random.default_rng(seed)
    rows = rng.choice(values, (1, 2, vocabulary)) + noise * rng.standard_normal((1, 2, vocabulary))
    dtype = data.draw(st.sampled_from(DTYPES))
    check(ops, rows.astype(np.float32).astype(dtype), data.draw(st.integers(0, min(vocabulary, 1024))))


def ascending(v):
    return np.linspace(-5, 20, v)


HARD = {
    "ascending": ascending,
    "descending": lambda v: ascending(v)[::-1],
    "all equal": lambda v: np.full(v, 2.5),
    "two values": lambda v: np.random.default_rng(1).integers(0, 2, v),
    "nine values": lambda v: np.random.default_rng(2).integers(-4, 5, v),
    "all -inf": lambda v: np.full(v, -INF),
    "masked by -inf": lambda v: np.where(np.arange(v) % 5003 == 17, gaussian(3, v), -INF),
    "masked by a number": lambda v: np.where(np.arange(v) % 5003 == 17, gaussian(3, v), -1e9),
    "one huge": lambda v: np.where(np.arange(v) == v // 2, 3e38, gaussian(4, v)),
    "one above, all below zero": lambda v: np.where(np.arange(v) == 7, 1, -3 + gaussian(5, v, scale=0.1)),
    "a cluster": lambda v: gaussian(6, v) + np.where(np.arange(v) < 3000, 10, 0),
    "a narrow plateau": lambda v: np.where(np.arange(v) % 64 == 3, 5 + gaussian(7, v, scale=1e-4), gaussian(8, v)),
    "millions": lambda v: gaussian(9, v, scale=1e6),
    "subnormal": lambda v: gaussian(10, v, scale=1e-40),
}


@each_dtype
@pytest.mark.parametrize("kind", HARD)
def test_rows_that_defeat_a_guess_at_the_bound(ops, dtype, kind):
    """Too many groups, candidates or ties for the room that is kept for them."""
    logits = HARD[kind](40_000).astype(np.float32).astype(dtype)[None, None]
    for k in (64, 1024):
        check(ops, logits, k)


@pytest.mark.parametrize("vocabulary", [163840, 163841])
@pytest.mark.parametrize("kind", ["ascending", "masked by -inf"])
def test_hard_rows_of_full_length(ops, vocabulary, kind):
    check(ops, HARD[kind](vocabulary).astype(np.float32)[None, None], 256)


def test_zeros_are_equal_and_keep_their_sign(ops):
    """-0.0 and +0.0 are one value, ordered by id; lp keeps the sign that logit - 0 has."""
    logits = np.array([[[0.0, -0.0, -0.0, 0.0], [-0.0, -INF, -INF, -INF]]], np.float32)
    found = check(ops, logits, 4)
    assert found.ids.tolist() == [[[0, 1, 2, 3], [0, 1, 2, 3]]]
    assert found.logz[0, 1] == 0
    assert np.signbit(found.lp[0, 1, 0])


# --- the normaliser ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [3, 1000, 5000])
def test_logz_of_any_size(ops, vocabulary):
    """From far below the fast sum's reach to far above: where |logz| is small, a float32 has more bits to get right."""
    rows = gaussian(0, 60, vocabulary).astype(np.float64)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    wanted = np.concatenate([np.linspace(-6, 6, 41), [1e-4, -1e-4, 3.999, 4.001, -3.999], 30.0 * np.arange(-7, 7)])
    check(ops, (rows + wanted[:, None]).astype(np.float32)[None, :31], 2)
    check(ops, (rows + wanted[:, None]).astype(np.float32)[None, 31:], 2)


@each_dtype
def test_normalised_rows(ops, dtype):
    """Peak and log-sum cancel: logz is some 1e-8, and more bits than a double has are needed."""
    rng = np.random.default_rng(4)
    for vocabulary in (2, 5, 17, 40, 3000):
        rows = np.log(rng.dirichlet(np.full(vocabulary, 2.0), (2, 20)))
        check(ops, rows.astype(np.float32).astype(dtype), min(vocabulary, 3))


def test_logz_of_one_token_and_next_to_nothing(ops):
    """log(1 + e^-40) is not 0, and not what is left after 1 has eaten its bits."""
    far = [[0, -40], [-1e-9, -20], [1e-45, -INF], [0, -80], [0, -103], [5, -90]]
    check(ops, np.array(far, np.float32)[None], 2)


def test_logz_of_enormous_logits(ops):
    biggest = np.finfo(np.float32).max
    rows = [[biggest, -biggest, 0], [biggest] * 3, [-biggest] * 3, [16384, 16383, -16384], [-32767.9, -32768.1, -INF]]
    check(ops, np.array(rows, np.float32)[None], 3)
    wide = np.full((1, 2, 3000), -32768.5, np.float32)  # chunks on both sides of what is summed fast
    wide[0, 0, 10], wide[0, 1, 2000] = -32767.5, 16000
    check(ops, wide, 3)


def test_terms_far_below_a_chunks_peak_count_only_beside_their_own(ops):
    """One chunk of almost nothing beside one that matters, in either order."""
    rows = np.full((1, 2, 4096), -200, np.float32)
    rows[0, 0, 5] = rows[0, 1, 4000] = 20
    check(ops, rows, 5)


# --- a row's result is its own ----------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("vocabulary", [33, 4097, 20001])
def test_views_into_a_pool(ops, dtype, vocabulary):
    """Case C38: logits that begin k elements off a 16-byte boundary. Public issue: lightseekorg/tokenspeed#683."""
    logits = gaussian(1, 1, 2, vocabulary, dtype=dtype)
    wanted = all_bits(check(ops, logits, 20))
    for offset in range(8):
        stride = vocabulary + offset % 3
        pool = np.full(offset + 2 * stride, np.nan, dtype)
        rows = pool[offset:].reshape(1, 2, stride)
        rows[..., :vocabulary] = logits
        device = to_device(ops, pool)[offset:].reshape(1, 2, stride)
        found = ops.topk_logprob(device, 20, vocab_size=vocabulary, dtype=dtype.name).to_host()
        assert all_bits(found) == wanted, offset


@each_dtype
def test_padding_is_never_looked_at(ops, dtype):
    """What lies behind the logical vocabulary may be anything, and rows may lie apart."""
    logits = gaussian(2, 3, 2, 1011, dtype=dtype)
    wanted = all_bits(check(ops, logits, 50))
    for padding in (1, 5, 13):
        for garbage in (np.nan, INF, 1e38):
            wide = np.full((3, 2, 1011 + padding), garbage, dtype)
            wide[..., :1011] = logits
            assert all_bits(run(ops, wide, 50, vocab_size=1011)) == wanted
    apart = np.full((3, 2, 1100), np.nan, dtype)
    apart[..., :1011] = logits
    found = ops.topk_logprob(to_device(ops, apart)[..., :1011], 50, dtype=dtype.name).to_host()
    assert all_bits(found) == wanted


@each_dtype
@pytest.mark.parametrize("shift", [20, 2, 0], ids=["fast", "in double", "nearly normalised"])
def test_batch_and_solo_give_the_same_bytes(ops, dtype, shift):
    """However many blocks share a row."""
    rows = gaussian(3, 4, 3, 20_003).astype(np.float64)
    rows += shift - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    logits = rows.astype(np.float32).astype(dtype)
    batch = check(ops, logits, 70)
    assert all_bits(run(ops, logits, 70)) == all_bits(batch)
    for request in range(4):
        solo = run(ops, logits[request : request + 1], 70)
        for name in ("ids", "lp", "logz"):
            assert bits(getattr(solo, name)[0]) == bits(getattr(batch, name)[request])
        alone = run(ops, logits[request : request + 1, 1:2], 70)
        assert bits(alone.lp[0, 0]) == bits(batch.lp[request, 1])


def test_half_precision_gives_the_bytes_of_the_same_values_in_float32(ops):
    logits = gaussian(5, 2, 2, 9001, dtype=BF16)
    assert all_bits(run(ops, logits, 300)) == all_bits(run(ops, logits.astype(np.float32), 300))


@pytest.mark.parametrize("shift", [12, 0], ids=["fast", "nearly normalised"])
def test_a_workspace_may_hold_anything(ops, shift):
    """Filled with two kinds of garbage: the same bytes, and nothing written behind it."""
    rows = gaussian(6, 2, 2, 20_011).astype(np.float64)
    rows += shift - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    logits = rows.astype(np.float32)
    wanted = all_bits(check(ops, logits, 80))
    size = ops.library.workspace("topk_logprob", 2, 2, 20_011, 80)
    assert size > 0
    for garbage in (0xFF, 0x3C):
        plan = ops.topk_logprob.plan(to_device(ops, logits), 80)
        scratch = to_device(ops, np.full(size + 512, garbage, np.uint8))
        start = -view("test", "workspace", scratch, ops.memory.device, 0).pointer % 256

        def take(bytes_, scratch=scratch, start=start):
            assert bytes_ == size
            part = scratch[start : start + bytes_]
            return view("test", "workspace", part, ops.memory.device, 0).pointer, scratch

        plan.scratch(take)
        assert all_bits(plan.call().to_host()) == wanted
        after = to_host(ops, scratch)[start + size :]
        assert (after == garbage).all()


# --- requests of their own size, and those that fail ------------------------------------------------------------------


def outputs(ops, requests, depths, k):
    shapes = {"ids": ("int32", k), "lp": ("float32", k), "logz": ("float32", None), "status": ("int32", None)}
    made = {}
    for name, (dtype, last) in shapes.items():
        shape = (requests, 3) if name == "status" else (requests, depths) if last is None else (requests, depths, last)
        made[name] = guarded(ops, shape, dtype, name, offset=1)
    return made


def test_depth_limits_of_each_request(ops):
    """Rows past a limit are neither read nor written."""
    logits = gaussian(7, 5, 3, 500)
    limits = np.array([3, 0, 1, 2, 3], np.int32)
    for request, limit in enumerate(limits):
        logits[request, limit:] = np.nan
    made = outputs(ops, 5, 3, 9)
    ops.topk_logprob(
        to_device(ops, logits),
        9,
        depth_limits=to_device(ops, limits),
        out={name: guard.array for name, guard in made.items()},
    )
    assert not made["status"].host().any()
    for request, limit in enumerate(limits):
        wanted = topk_logprob(logits[request, :limit], 9)
        np.testing.assert_array_equal(made["ids"].host()[request, :limit], wanted.ids)
        for name in ("ids", "lp", "logz"):
            untouched = made[name].untouched()[request]
            assert not untouched[:limit].any()
            assert untouched[limit:].all()


def test_a_limit_that_does_not_fit_is_refused_for_its_request_alone(ops):
    logits, limits = gaussian(8, 4, 2, 50), np.array([3, -1, 2, 1], np.int32)
    found = run(ops, logits, 5, depth_limits=to_device(ops, limits))
    assert found.status.tolist() == [[OWN_SIZE, 3, 2], [OWN_SIZE, -1, 2], [OK, 0, 0], [OK, 0, 0]]
    assert_filled(found, 0)
    assert_filled(found, 1)
    np.testing.assert_array_equal(found.ids[2], topk_logprob(logits[2], 5).ids)
    with pytest.raises(abi.RequestError, match="request 0"):
        found.raise_for_status()


def assert_filled(found: TopK, request: int, depths=slice(None)) -> None:
    """The lists of a request that is not taken: id 0, -inf, logz 0."""
    assert not found.ids[request, depths].any()
    assert np.isneginf(found.lp[request, depths]).all()
    assert not found.logz[request, depths].any()


@each_dtype
@pytest.mark.parametrize("vocabulary", [5, 1025, 20_001])
def test_nan_and_plus_inf_are_refused_at_the_first_place(ops, dtype, vocabulary):
    """The first in the order of depth, then token; the other requests are not touched by it.

    Public issue: vllm-project/vllm#41834, where a NaN row quietly became token 0.
    """
    last = vocabulary - 1
    negative_nan = np.uint32(0xFFC00000).view(np.float32)
    faults: list[tuple[list[tuple[int, int, Any]], int]] = [
        ([(0, last, np.nan)], NAN),
        ([(1, 0, INF), (2, 0, np.nan)], INFINITE),
        ([(1, last // 2, negative_nan), (1, last, INF), (2, 0, INF)], NAN),
        ([(2, last, INF)], INFINITE),
        ([], OK),
        ([(2, 3, np.nan), (2, 2, INF)], INFINITE),
    ]
    logits = gaussian(vocabulary, len(faults), 3, vocabulary).astype(dtype)
    for request, (places, _) in enumerate(faults):
        for depth, token, value in places:
            logits[request, depth, token] = value
    found = run(ops, logits, 4)
    for request, (places, code) in enumerate(faults):
        depth, token = min(((depth + 1, token) for depth, token, _ in places), default=(0, 0))
        assert found.status[request].tolist() == [code, depth, token]
        if code == OK:
            np.testing.assert_array_equal(found.ids[request], topk_logprob(logits[request], 4).ids)
        else:
            assert_filled(found, request)
            with pytest.raises(DraftError) as error:
                topk_logprob(logits[request], 4, request=request)
            assert (error.value.depth, error.value.token) == (depth, token)


def test_rows_of_nothing_but_nan(ops):
    logits = np.full((2, 2, 3000), np.nan, np.float32)
    logits[1] = INF
    assert run(ops, logits, 3).status.tolist() == [[NAN, 1, 0], [INFINITE, 1, 0]]


def test_nan_counts_up_to_the_depth_limit_only(ops):
    """And the lists past the limit of a request that fails are not written either."""
    logits = gaussian(11, 3, 3, 100)
    logits[:, 1, 5] = np.nan
    made = outputs(ops, 3, 3, 4)
    ops.topk_logprob(
        to_device(ops, logits),
        4,
        depth_limits=to_device(ops, np.array([1, 2, 3], np.int32)),
        out={name: guard.array for name, guard in made.items()},
    )
    assert made["status"].host().tolist() == [[OK, 0, 0], [NAN, 2, 5], [NAN, 2, 5]]
    for name in ("ids", "lp", "logz"):
        untouched = made[name].untouched().reshape(3, 3, -1)
        assert untouched.all(axis=2).tolist() == untouched.any(axis=2).tolist()
        assert untouched.any(axis=2).tolist() == [[False, True, True], [False, False, True], [False] * 3]


@pytest.mark.parametrize("in_place", [False, True], ids=["own status", "status of the stage before"])
def test_a_request_that_failed_before_is_passed_over(ops, in_place):
    """Its status is carried on, its lists are those of an empty round; also where both are one array."""
    logits = gaussian(12, 3, 2, 2500)
    logits[0, 1, 7] = logits[1, 0, 3] = np.nan
    before = to_device(ops, np.array([[NO_CHOICE, 4, 5], [OK, 0, 0], [OK, 8, 8]], np.int32))
    out = {"status": before} if in_place else None
    found = ops.topk_logprob(to_device(ops, logits), 6, before=before, out=out).to_host()
    assert found.status.tolist() == [[NO_CHOICE, 4, 5], [NAN, 1, 3], [OK, 0, 0]]
    assert_filled(found, 0)
    assert_filled(found, 1)
    np.testing.assert_array_equal(found.ids[2], topk_logprob(logits[2], 6).ids)


def test_many_requests_and_depths(ops):
    logits = gaussian(13, 300, 1, 40)
    check(ops, logits, 3)
    check(ops, gaussian(14, 2, 31, 70), 11)


@each_dtype
@pytest.mark.parametrize("k", [40, 300])
@pytest.mark.parametrize("in_place", [False, True], ids=["own status", "status of the stage before"])
def test_many_rows_are_each_what_it_is_alone(ops, dtype, k, in_place):
    """Many rows take another kernel. Faults, limits, earlier failures, precise sums and hard rows are among them."""
    requests, depths, vocabulary = 90, 3, 4100
    rng = np.random.default_rng(16)
    logits = (3 * rng.standard_normal((requests, depths, vocabulary), np.float32)).astype(np.float64)
    logits[10:20] -= np.log(np.exp(logits[10:20]).sum(axis=-1, keepdims=True))
    logits[20:24] = 2.5
    logits[24] = ascending(vocabulary)
    logits = logits.astype(np.float32).astype(dtype)
    for request, depth, token, value in (
        (30, 2, 4099, np.nan),
        (30, 2, 4000, INF),
        (31, 0, 0, INF),
        (32, 1, 5, np.nan),
    ):
        logits[request, depth, token] = value
    logits[33] = np.nan
    limits = np.full(requests, depths, np.int32)
    limits[[5, 32, 33, 40, 41]] = [1, 1, 0, 4, -1]
    before = np.zeros((requests, 3), np.int32)
    before[[7, 31]] = [[NO_CHOICE, 4, 5], [OK, 8, 8]]

    def lists(first, last):
        made = {name: guard.array for name, guard in outputs(ops, last - first, depths, k).items()}
        part = to_device(ops, before[first:last])
        if in_place:
            made["status"] = part
        limit = to_device(ops, limits[first:last])
        given = to_device(ops, logits[first:last])
        return ops.topk_logprob(given, k, dtype=dtype.name, depth_limits=limit, before=part, out=made).to_host()

    many = lists(0, requests)
    assert [many.status[r].tolist() for r in (30, 31, 32, 33, 40, 41)] == [
        *([INFINITE, 3, 4000], [INFINITE, 1, 0]),
        *([OK, 0, 0], [OK, 0, 0], [OWN_SIZE, 4, 3], [OWN_SIZE, -1, 3]),
    ]
    for request in range(requests):
        alone = all_bits(lists(request, request + 1))
        assert {name: bits(getattr(many, name)[request]) for name in alone} == alone, request


@pytest.mark.parametrize("depths", [0, 2])
def test_lists_of_nothing(ops, depths):
    """No depths, or no entries: the status is written all the same, and logz where there are rows."""
    logits = gaussian(15, 3, depths, 30)
    for k in (0, 4):
        found = run(ops, logits, k)
        assert found.ids.shape == (3, depths, k)
        assert_lists(found, logits, k)


# --- arguments --------------------------------------------------------------------------------------------------------


def arguments(**changed) -> abi.TopkLogprobArgs:
    """A call that would be taken, but for what is changed. Nothing is read: all calls here are refused."""
    address = 1 << 20
    sizes = {"requests": 2, "depth_limit": 3, "vocab_size": 100, "k": 7, "dtype": 0, "row_stride": 100}
    names = ("logits", "ids", "lp", "logz", "status", "workspace")
    given = {"struct_size": ctypes.sizeof(abi.TopkLogprobArgs), **sizes, **dict.fromkeys(names, address)}
    return abi.TopkLogprobArgs(**{**given, "workspace_size": 1 << 20, **changed})


@pytest.mark.parametrize(
    ("changed", "status", "message"),
    [
        ({"struct_size": 8}, 1, "struct_size is 8"),
        ({"requests": 0}, 2, "requests is 0, it must be in [1, 65535]"),
        ({"requests": 65536}, 2, "requests is 65536"),
        ({"depth_limit": 32}, 2, "depth_limit is 32, it must be in [0, 31]"),
        ({"vocab_size": 0}, 2, "vocab_size is 0, it must be in [1, "),
        ({"k": 101}, 2, "k is 101, it must be in [0, 100]"),
        ({"k": 1025, "vocab_size": 5000, "row_stride": 5000}, 2, "k is 1025, it must be in [0, 1024]"),
        ({"k": -1}, 2, "k is -1"),
        ({"dtype": 2}, 2, "dtype is 2, it must be in [0, 1]"),
        ({"row_stride": 99}, 2, "row_stride is 99, it must be in [100, "),
        ({"row_stride": 2**62}, 2, "row_stride is 4611686018427387904"),
        ({"logits": None}, 3, "logits is NULL"),
        ({"ids": None}, 3, "ids is NULL"),
        ({"lp": None}, 3, "lp is NULL"),
        ({"logz": None}, 3, "logz is NULL"),
        ({"status": None}, 3, "status is NULL"),
        ({"workspace": None}, 3, "workspace is NULL"),
        ({"logits": (1 << 20) + 2}, 4, "is not aligned to 4 bytes"),
        ({"logits": (1 << 20) + 1, "dtype": 1}, 4, "is not aligned to 2 bytes"),
        ({"lp": (1 << 20) + 3}, 4, "lp at 0x100003 is not aligned to 4 bytes"),
        ({"before": 6}, 4, "before at 0x6 is not aligned to 4 bytes"),
        ({"workspace": (1 << 20) + 64}, 4, "workspace at 0x100040 is not aligned to 256 bytes"),
        ({"workspace_size": 300}, 5, "the workspace has 300 bytes, "),
    ],
    ids=lambda value: ",".join(map(str, value)) if isinstance(value, dict) else None,
)
def test_arguments_are_refused_with_their_numbers(ops, changed, status, message):
    code = ops.library.stage("topk_logprob")(ctypes.byref(arguments(**changed)))
    with pytest.raises(abi.EngineError) as error:
        ops.library.check("topk_logprob", code)
    assert error.value.code == status
    assert "kdtree_topk_logprob: " in str(error.value)
    assert message in str(error.value)


def test_the_workspace_does_not_depend_on_the_dtype_and_grows_with_the_rows(ops):
    query = ops.library.workspace
    assert query("topk_logprob", 1, 0, 1000, 5) == 0
    assert query("topk_logprob", 1, 7, 163840, 65) == query("topk_logprob", 7, 1, 163840, 65)
    sizes = [query("topk_logprob", requests, 7, 163840, 64) for requests in (1, 2, 64, 65535)]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 2**32, "sizes past 32 bits"
    assert sizes[0] < 7 * 163840 * 2 / 10, "the workspace is small beside the logits"
