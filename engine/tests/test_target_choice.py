"""The target's choices on the device against reference.sampling.

Draws must agree wherever the margin of the reference's draw is 1e-6 or more; a cut of top_p must not hang by less.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import kdtr
from engine.abi import SizeError
from engine.tests.backends import guarded, to_device, to_host
from reference.sampling import NO_CHOICE, SamplingParams, choice_margins, choose_rows, probabilities

GOLDEN = Path(__file__).resolve().parents[2] / "datasets" / "golden"
BFLOAT16 = ml_dtypes.bfloat16
MARGIN = 1e-6
GREEDY = SamplingParams()


def f32(value):
    """A parameter as the device gets it."""
    return float(np.float32(value))


def call(ops, logits, params=(), positions=None, **given):
    """choices [R, N] of logits [R, N, >=V]; params: one a request, none: all greedy."""
    own = {}
    if params:
        own = {
            "positions": np.asarray(positions, np.int32),
            "temperatures": np.array([p.temperature for p in params], np.float32),
            "top_k": np.array([p.top_k for p in params], np.int32),
            "top_p": np.array([p.top_p for p in params], np.float32),
            "seeds": np.array([p.seed for p in params], np.uint64),
        }
    dtype = "bfloat16" if logits.dtype == BFLOAT16 else None
    device = {name: to_device(ops, array) for name, array in own.items()}
    return to_host(ops, ops.target_choice(to_device(ops, logits), dtype=dtype, **device, **given))


def cut_margin(row, params):
    """How far top_p is from the nearest cumulative probability, at which the cut turns into another one."""
    if params.top_p == 1:
        return np.inf
    kept = probabilities(row[None], SamplingParams(params.temperature, params.top_k))[0]
    return np.abs(np.cumsum(-np.sort(-kept))[:-1] - params.top_p).min(initial=np.inf)


def compare(choices, logits, params, positions):
    """Compare choices [N] of logits [N, V]; returns how many draws were too close to call."""
    expected, margins = choose_rows(logits, params, positions), choice_margins(logits, params, positions)
    assert ((choices >= NO_CHOICE) & (choices < logits.shape[1])).all()
    turned = np.flatnonzero(choices != expected)
    for row in turned:
        close = params.temperature > 0 and (margins[row] < MARGIN or cut_margin(logits[row], params) < 1e-8)
        assert close, f"row {row}, {params}: {choices[row]}, expected {expected[row]}, margin {margins[row]}"
    return len(turned)


def gaussian(rng, shape, dtype=np.float32, scale=3.0):
    return (scale * rng.normal(size=shape)).astype(dtype)


def widened(logits):
    return logits.astype(np.float32)


SIZES = [1, 2, 3, 7, 8, 9, 31, 32, 33, 127, 1000, 4097]


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_greedy_rows(ops, dtype):
    rng = np.random.default_rng(0)
    for vocab in SIZES:
        logits = gaussian(rng, (3, 5, vocab), dtype)
        np.testing.assert_array_equal(call(ops, logits), widened(logits).argmax(axis=2), err_msg=str(vocab))


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
@pytest.mark.parametrize("rows", [1, 5, 60])
def test_greedy_ties_go_to_the_lowest_id_wherever_they_stand(ops, dtype, rows):
    """Small whole numbers, among them -0.0 beside 0.0; one block a row and several."""
    rng = np.random.default_rng(rows)
    for vocab in (40, 1000, 20_000 if rows < 60 else 300):
        logits = rng.integers(-3, 1, (1, rows, vocab)).astype(dtype)
        logits[rng.random(logits.shape) < 0.3] *= dtype(-1 if vocab == 40 else 1)
        zeros = logits == 0
        logits[zeros & (rng.random(logits.shape) < 0.5)] = dtype(-0.0)
        if vocab != 40:
            logits[:, :, : vocab // 2] = dtype(-5)
        np.testing.assert_array_equal(call(ops, logits), widened(logits).argmax(axis=2))


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_greedy_extremes(ops, dtype):
    rows = np.full((10, 90), -np.inf, dtype)
    expected = [17, 0, 89, NO_CHOICE, 5, 3, 40, NO_CHOICE, 0, 88]
    rows[0, 17], rows[1, 0], rows[2, 89] = -3e38, -1, 5
    rows[4, 5:] = ml_dtypes.finfo(dtype).min
    rows[5], rows[5, 3] = 0, ml_dtypes.finfo(dtype).smallest_subnormal
    rows[6], rows[6, 40] = -1, -ml_dtypes.finfo(dtype).smallest_subnormal
    rows[7], rows[7, 80] = ml_dtypes.finfo(dtype).max, np.inf
    rows[8] = ml_dtypes.finfo(dtype).max
    rows[9, 88:] = [-7, -8]
    assert call(ops, rows[None])[0].tolist() == expected


def not_numbers(dtype) -> Iterator[np.ndarray]:
    """NaN of both signs, quiet and with other payloads, and +inf."""
    bits = np.uint16 if dtype == BFLOAT16 else np.uint32
    shift = 0 if dtype == BFLOAT16 else 16
    for pattern in (0x7FC0, 0xFFC0, 0x7F81, 0xFF81, 0x7FFF, 0xFFFF, 0x7F80):
        yield np.array(pattern << shift, bits).view(dtype)[()]


@pytest.mark.parametrize("vocab", [1, 2, 33, 1000])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(0.8, 0, 1.0, 4), SamplingParams(0.8, 20, f32(0.9), 4)])
def test_a_row_that_holds_no_number_has_no_choice_and_disturbs_no_other(ops, vocab, dtype, params):
    """In every column's position of a vector, first and last (public issue: vllm-project/vllm#53029)."""
    rng = np.random.default_rng(vocab)
    patterns = list(not_numbers(dtype))
    columns = sorted({0, vocab // 3, vocab // 2, max(0, vocab - 2), vocab - 1} | set(range(min(vocab, 9))))
    rows = gaussian(rng, (2 * len(columns) + 2, vocab), dtype)
    good = call(ops, rows[None], [params], [range(len(rows))])[0]
    compare(good, widened(rows), params, np.arange(len(rows)))
    broken = rows.copy()
    for index, column in enumerate(columns):
        broken[2 * index + 1, column] = patterns[index % len(patterns)]
    broken[-1] = -np.inf
    choices = call(ops, broken[None], [params], [range(len(rows))])[0]
    assert choices[:-1:2].tolist() == good[:-1:2].tolist()
    assert (choices[1:-1:2] == NO_CHOICE).all()
    assert choices[-1] == NO_CHOICE


PARAMS = [
    SamplingParams(1.0, seed=1),
    SamplingParams(f32(0.6), seed=2**64 - 1),
    SamplingParams(f32(1.3), top_k=3, seed=3),
    SamplingParams(f32(0.05), top_k=40, seed=2**63 + 4),
    SamplingParams(1.0, top_p=f32(0.9), seed=5),
    SamplingParams(f32(2.5), top_p=f32(0.05), seed=6),
    SamplingParams(f32(0.7), top_k=50, top_p=f32(0.8), seed=7),
    SamplingParams(f32(1.1), top_k=1, seed=8),
    SamplingParams(f32(1.1), top_k=10**9, top_p=f32(0.999), seed=9),
    SamplingParams(f32(1e-30), top_p=f32(0.5), seed=10),
    SamplingParams(f32(1e30), seed=11),
    SamplingParams(1.0, top_p=f32(1e-30), seed=12),
    GREEDY,
]


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
@pytest.mark.parametrize("vocab", [1, 2, 33, 1000])
def test_draws_of_every_kind_in_one_batch(ops, dtype, vocab):
    """Greedy and sampled requests, with and without the filters, beside each other."""
    rng = np.random.default_rng(vocab)
    rows = 12
    logits = gaussian(rng, (len(PARAMS), rows, vocab), dtype)
    logits[:, 1] = rng.integers(0, 3, (len(PARAMS), vocab)).astype(dtype)  # many equal logits
    logits[:, 2, vocab // 2 + 1 :] = -np.inf
    logits[:, 3] = dtype(0.0)
    positions = rng.integers(0, 2**31, (len(PARAMS), rows))
    choices = call(ops, logits, PARAMS, positions)
    for r, params in enumerate(PARAMS):
        compare(choices[r], widened(logits[r]), params, positions[r])


def test_many_draws_follow_the_reference(ops):
    """6,000 draws from 150 rows: every row at many positions, so that its whole distribution is met."""
    rng = np.random.default_rng(1)
    close = kinds = 0
    for params in (PARAMS[0], PARAMS[2], PARAMS[4], PARAMS[6], SamplingParams(1.0, 0, f32(0.5), 13)):
        rows = gaussian(rng, (30, 40))
        rows[10:20] = rng.integers(0, 4, (10, 40))
        logits = np.repeat(rows, 40, axis=0).reshape(4, 300, 40)
        positions = rng.integers(0, 10**6, (4, 300))
        choices = call(ops, logits, [params] * 4, positions)
        for r in range(4):
            close += compare(choices[r], logits[r], params, positions[r])
        kinds += len(np.unique(choices))
    assert close <= 2
    assert kinds > 100


@pytest.mark.parametrize(
    ("logits", "params"),
    [
        # Equal logits at the cut: the lowest ids stay.
        (np.zeros(16), SamplingParams(1.0, top_k=5, seed=1)),
        (np.zeros(16), SamplingParams(1.0, top_p=0.25, seed=1)),  # exactly four of them
        (np.zeros(16), SamplingParams(1.0, top_p=f32(0.26), seed=1)),
        (np.zeros(16), SamplingParams(1.0, top_k=8, top_p=0.25, seed=1)),
        (np.zeros(16), SamplingParams(1.0, top_k=8, top_p=f32(0.999), seed=1)),  # all that top_k left, and no more
        (np.tile([1.0, 0, 2, 1], 8), SamplingParams(1.0, top_k=11, seed=1)),
        (np.tile([1.0, 0, 2, 1], 8), SamplingParams(1.0, top_k=20, top_p=f32(0.9), seed=1)),
        (np.tile([1.0, -0.0, 0.0, 1], 8), SamplingParams(1.0, top_k=18, seed=1)),
        (np.tile([-np.inf, 0, -np.inf, -1], 8), SamplingParams(1.0, top_k=20, seed=1)),
        (np.r_[0.0, np.full(99, -800.0)], SamplingParams(1.0, top_k=3, top_p=f32(0.999), seed=1)),
    ],
)
def test_filters_keep_what_the_reference_keeps(ops, logits, params):
    """Over enough draws every kept token is drawn and no other, as in the reference."""
    row = logits.astype(np.float32)
    rows = np.tile(row, (1, 400, 1))
    choices = call(ops, rows, [params], [range(400)])[0]
    compare(choices, rows[0], params, np.arange(400))
    kept = np.flatnonzero(probabilities(row[None], params)[0] > 1e-12)
    assert set(choices.tolist()) == set(kept.tolist())


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_a_vocabulary_of_163840(ops, dtype):
    """Ids that 16 bits would lose; flat rows whose cut of top_p lies tens of thousands of tokens deep."""
    rng = np.random.default_rng(4)
    vocab = 163_840
    params = [SamplingParams(1.0, seed=1), SamplingParams(1.0, 50_000, f32(0.97), 2), GREEDY]
    logits = np.stack([gaussian(rng, (2, vocab), dtype, scale) for scale in (4.0, 0.5, 3.0)])
    logits[2, 0, [65_535, 65_536, 131_071, 163_839]] = [90, 90, 100, 100]
    logits[2, 1, [163_839, 163_838]] = 100
    positions = [[7, 8], [9, 10], [0, 1]]
    choices = call(ops, logits, params, positions)
    assert choices[2].tolist() == [131_071, 163_838]
    for r in range(2):
        assert compare(choices[r], widened(logits[r]), params[r], np.array(positions[r])) == 0
    kept = np.count_nonzero(probabilities(widened(logits[1, :1]), params[1]))
    assert kept > 40_000


def test_rows_beyond_one_level_of_chunks(ops):
    """V = 600,011 needs three levels to find an id; u is spread over the whole row."""
    vocab = 600_011
    row = np.zeros((1, 3, vocab), np.float32)
    params = SamplingParams(1.0, top_k=vocab - 5, seed=3)
    choices = call(ops, row, [params], [[1, 2, 3]])[0]
    assert compare(choices, row[0], params, np.arange(1, 4)) == 0


def test_golden_logits(ops):
    """Rank 0 of a golden list is the greedy choice."""
    file = kdtr.read(GOLDEN / "topk.kdtr")
    for case in sorted({name.split("/")[0] for name in file}):
        logits, ids, vocab = (file[f"{case}/{name}"] for name in ("logits", "ids", "vocab_size"))
        if ids.size:
            choices = call(ops, logits[None], vocab_size=int(vocab))
            np.testing.assert_array_equal(choices[0], ids[:, 0], err_msg=case)


def test_a_draw_belongs_to_seed_and_position(ops):
    """Not to the row: the same in another row, beside others, and on a padded vocabulary."""
    rng = np.random.default_rng(8)
    params = SamplingParams(1.0, 0, f32(0.95), 77)
    row = gaussian(rng, (300,))
    logits = np.tile(row, (2, 6, 1))
    choices = call(ops, logits, [params] * 2, [[5, 9, 5, 30, 9, 5], [30, 5, 9, 9, 9, 30]])
    by_position = {p: int(choose_rows(row[None], params, np.array([p]))[0]) for p in (5, 9, 30)}
    assert choices.tolist() == [[by_position[p] for p in ps] for ps in ([5, 9, 5, 30, 9, 5], [30, 5, 9, 9, 9, 30])]
    assert len(set(by_position.values())) > 1
    physical = np.full((2, 6, 320), 1e30, np.float32)
    physical[..., :300] = logits
    padded = call(ops, physical, [params] * 2, [[5, 9, 5, 30, 9, 5], [30, 5, 9, 9, 9, 30]], vocab_size=300)
    assert padded.tolist() == choices.tolist()


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_a_row_gives_the_same_alone_and_in_any_batch(ops, dtype):
    rng = np.random.default_rng(6)
    params = [PARAMS[0], PARAMS[6], GREEDY, PARAMS[4]]
    logits = gaussian(rng, (4, 15, 17_000), dtype)
    logits[:, ::3] = np.round(widened(logits[:, ::3])).astype(dtype)
    positions = rng.integers(0, 1000, (4, 15))
    together = call(ops, logits, params, positions)
    assert call(ops, logits, params, positions).tobytes() == together.tobytes()
    for r in range(4):
        for row in (0, 7, 14):
            alone = call(ops, logits[r : r + 1, row : row + 1], params[r : r + 1], positions[r, row].reshape(1, 1))
            assert alone[0, 0] == together[r, row]


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_logits_at_any_address_and_distance(ops, dtype, offset):
    """Views into a pool, odd strides, V = 1,291 (public issue: lightseekorg/tokenspeed#683)."""
    rng = np.random.default_rng(offset)
    vocab = 1291
    logits = gaussian(rng, (2, 3, vocab), dtype)
    params, positions = [PARAMS[6], GREEDY], [[1, 2, 3]] * 2
    expected = call(ops, logits, params, positions)
    for r in range(2):
        compare(expected[r], widened(logits[r]), params[r], np.array(positions[r]))
    for stride in (vocab, vocab + 1, vocab + 5):
        bits = np.uint16 if dtype == BFLOAT16 else np.float32
        pool = guarded(ops, (2, 3, stride), bits, "the logits", offset)
        filled = np.full((2, 3, stride), np.nan, dtype)
        filled[..., :vocab] = logits
        pool.array[...] = to_device(ops, filled.view(bits))
        own = {
            "positions": np.array(positions, np.int32),
            "temperatures": np.array([p.temperature for p in params], np.float32),
            "top_k": np.array([p.top_k for p in params], np.int32),
            "top_p": np.array([p.top_p for p in params], np.float32),
            "seeds": np.array([p.seed for p in params], np.uint64),
        }
        given = {name: to_device(ops, array) for name, array in own.items()}
        kind = "bfloat16" if dtype == BFLOAT16 else None
        found = ops.target_choice(pool.array[..., :vocab], dtype=kind, **given)
        assert to_host(ops, found).tobytes() == expected.tobytes()
        assert pool.host().tobytes() == filled.tobytes()


def test_rows_past_the_node_count_and_requests_that_failed_are_left_alone(ops):
    """Budgets 0, 1, 7 of 9 rows; node counts outside the block have no rows at all (trymirai/lalamo#207)."""
    rng = np.random.default_rng(9)
    counts = [0, 1, 7, 8, 3, -1, 9, 8]
    before = np.zeros((8, 3), np.int32)
    before[4] = [1, 2, 3]
    logits = gaussian(rng, (8, 9, 500))
    params = [PARAMS[0], GREEDY, PARAMS[4], PARAMS[2], GREEDY, GREEDY, PARAMS[0], GREEDY]
    positions = np.arange(72).reshape(8, 9)
    used = [1, 2, 8, 9, 0, 0, 0, 9]
    results = []
    for garbage in (np.nan, 1e30):
        for r, rows in enumerate(used):
            logits[r, rows:] = garbage
        out = guarded(ops, (8, 9), np.int32, "choices")
        given = {"node_count": np.array(counts, np.int32), "before": before}
        device = {name: to_device(ops, array) for name, array in given.items()}
        call(ops, logits, params, positions, out=out.array, **device)
        untouched = out.untouched()
        for r, rows in enumerate(used):
            assert untouched[r].tolist() == [False] * rows + [True] * (9 - rows)
            compare(out.host()[r, :rows], logits[r, :rows], params[r], positions[r, :rows])
        results.append(out.host())
    assert results[0].tobytes() == results[1].tobytes()


def test_parameters_that_the_reference_refuses_choose_nothing(ops):
    temperatures = [1, -1, np.nan, np.inf, 1, 1, 1, 1, 1, 0]
    top_k = [0, 0, 0, 0, -1, 0, 0, 0, 0, -1]
    top_p = [1, 1, 1, 1, 1, 0, 1.5, np.nan, 1, 0]
    positions = [3, 3, 3, 3, 3, 3, 3, 3, -1, -1]
    own = {
        "positions": np.array(positions, np.int32)[:, None],
        "temperatures": np.array(temperatures, np.float32),
        "top_k": np.array(top_k, np.int32),
        "top_p": np.array(top_p, np.float32),
    }
    logits = to_device(ops, gaussian(np.random.default_rng(0), (10, 1, 50)))
    choices = to_host(ops, ops.target_choice(logits, **{name: to_device(ops, array) for name, array in own.items()}))
    assert (choices[1:9] == NO_CHOICE).all()
    assert (choices[[0, 9]] >= 0).all(), "sound, and greedy, which looks at nothing else"


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_the_order_of_threads_changes_nothing(host_ops, seed, monkeypatch):
    rng = np.random.default_rng(10)
    params = [PARAMS[6], PARAMS[0], GREEDY]
    logits = np.round(2 * gaussian(rng, (3, 2, 9000))) / 2
    positions = np.arange(6).reshape(3, 2)
    plain = call(host_ops, logits, params, positions)
    monkeypatch.setenv("KDTREE_HOST_SEED", seed)
    monkeypatch.setenv("KDTREE_HOST_THREADS", "2")
    assert call(host_ops, logits, params, positions).tobytes() == plain.tobytes()


def test_sizes_out_of_range_are_refused_with_their_numbers(ops):
    logits = to_device(ops, np.zeros((1, 1026, 4), np.float32))
    with pytest.raises(SizeError, match=r"rows is 1026, it must be in \[1, 1025\]"):
        ops.target_choice(logits)
    with pytest.raises(SizeError, match=r"vocab_size is 5, it must be in \[1, 4\]"):
        ops.target_choice(logits[:, :3], vocab_size=5)
    with pytest.raises(SizeError, match=r"vocab_size is 0, it must be in \[1, 4\]"):
        ops.target_choice(logits[:, :3], vocab_size=0)
