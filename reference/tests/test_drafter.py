from __future__ import annotations

import numpy as np
import pytest

from reference.drafter import NoisyOracleDrafter, OracleDrafter, ReplayDrafter
from reference.tests.test_sampling import scalar_philox
from reference.topk import topk_logprob
from reference.tree import build_tree

PROMPT = np.array([4, 4, 4], np.int32)


def started(drafter, committed=0):
    """The drafter after the prompt and `committed` output tokens."""
    drafter.reset(PROMPT)
    drafter.observe(PROMPT, None)
    if committed:
        drafter.observe(np.zeros(committed, np.int32), None)
    return drafter


def best(logits):
    return logits.argmax(axis=1).tolist()


def test_oracle_proposes_the_tokens_after_the_root():
    drafter = OracleDrafter([10, 11, 12, 13, 14, 15], vocab_size=20, block_size=4)
    assert best(started(drafter).propose(10, 7)) == [11, 12, 13]
    assert best(started(drafter, 2).propose(12, 2)) == [13, 14]
    assert best(started(drafter, 3).propose(13, 9)) == [14, 15]
    for logits in (started(drafter, 5).propose(15, 9), started(drafter, 8).propose(0, 9)):
        assert logits.shape == (0, 20)
    assert drafter.propose(0, 0).dtype == np.float32


def test_oracle_is_wrong_from_the_given_token_on_with_valid_ids():
    drafter = OracleDrafter([3, 19, 2, 19, 1], vocab_size=20, block_size=9, right=2)
    logits = started(drafter).propose(3, 8)
    assert best(logits) == [19, 3, 0, 2]
    assert np.argwhere(np.isneginf(logits)).tolist() == [[1, 2], [2, 19], [3, 1]]
    with pytest.raises(ValueError, match="leaves no wrong proposal"):
        OracleDrafter([0, 0], 1, 4, right=1)
    assert best(started(OracleDrafter([0, 0], 1, 4)).propose(0, 3)) == [0]


def test_noisy_oracle_follows_its_published_formula():
    golden, vocabulary, seed = [7, 3, 9, 0, 5, 11], 12, 0x1234567890ABCDEF
    drafter = NoisyOracleDrafter(golden, vocabulary, 8, miss=0.4, max_rank=5, seed=seed)
    logits = started(drafter, 1).propose(3, 9)
    assert logits.shape == (4, vocabulary)
    missing = 0
    for row, index in zip(logits, range(2, 6), strict=True):
        x0, x1, x2, x3 = scalar_philox([index, 0, 1, 0], (seed & 0xFFFFFFFF, seed >> 32))
        order = [(x2 + i) % vocabulary for i in range(vocabulary) if (x2 + i) % vocabulary != golden[index]]
        order.insert(x1 % 6, golden[index])
        expected = np.empty(vocabulary)
        expected[order] = [-4 * r / 2 ** (x3 % 4) for r in range(vocabulary)]
        if (x0 + 0.5) / 2**32 < 0.4:
            expected[golden[index]] = -np.inf
            missing += 1
        np.testing.assert_array_equal(row, expected)
    assert 0 < missing < 4


def test_noisy_oracle_repeats_by_seed_and_position_however_it_got_there():
    golden = np.random.default_rng(0).integers(0, 50, 40)
    first = started(NoisyOracleDrafter(golden, 50, 8, seed=3), 5).propose(0, 7)
    again = NoisyOracleDrafter(golden, 50, 16, seed=3)
    started(again)
    for count in (2, 1, 2):
        again.propose(0, 15)
        again.observe(np.zeros(count, np.int32), None)
    np.testing.assert_array_equal(again.propose(0, 7), first)
    assert (started(NoisyOracleDrafter(golden, 50, 8, seed=4), 5).propose(0, 7) != first).any()


def test_noisy_oracle_visits_every_rank_evenly_and_misses_as_often_as_asked():
    golden = np.random.default_rng(1).integers(0, 30, 4001)
    logits = started(NoisyOracleDrafter(golden, 30, 4001, miss=0.25, max_rank=3, seed=9)).propose(0, 4000)
    right = logits[np.arange(4000), golden[1:]]
    found = np.isfinite(right)
    assert abs(found.mean() - 0.75) < 0.03
    ranks = (logits > right[:, None]).sum(axis=1)[found]
    assert np.all(np.abs(np.bincount(ranks, minlength=4) / len(ranks) - 0.25) < 0.03)
    assert ranks.max() == 3


@pytest.mark.parametrize("vocabulary", [1, 2, 3])
def test_noisy_oracle_with_a_vocabulary_smaller_than_its_ranks(vocabulary):
    logits = started(NoisyOracleDrafter(np.zeros(9, int), vocabulary, 9, miss=0.5, max_rank=7)).propose(0, 8)
    top = topk_logprob(logits, 4)
    tree = build_tree(top.lp, top.ids, 30, vocab_size=vocabulary)
    assert logits.shape == (8, vocabulary)
    assert (tree.tokens < vocabulary).all()


def recorded(vocabulary, width, seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (6, vocabulary)).astype(np.float32)
    return topk_logprob(logits, width)


@pytest.mark.parametrize("width", [4, 50, 60])
def test_replay_gives_back_the_recorded_lists(width):
    lists = {3: recorded(60, width, 0), 5: recorded(60, width, 1)}
    drafter = ReplayDrafter({p: (top.ids, top.lp) for p, top in lists.items()}, vocab_size=60, block_size=7)
    for committed, position in ((0, 3), (2, 5)):
        logits = started(drafter, committed).propose(0, 6)
        top = topk_logprob(logits, width)
        np.testing.assert_array_equal(top.ids, lists[position].ids)
        np.testing.assert_allclose(top.lp, lists[position].lp, rtol=0, atol=2e-6)
        rest = topk_logprob(logits, 60)
        assert np.isfinite(rest.lp).all() or width == 60
    assert started(drafter, 1).propose(0, 6).shape == (0, 60)
    assert started(drafter).propose(0, 2).shape == (2, 60)


def test_replay_never_proposes_what_was_recorded_as_minus_inf():
    ids, lp = np.array([[2, 0, 1]]), np.log(np.array([[0.5, 0.2, 0.1]])).astype(np.float32)
    lp[0, 2] = -np.inf
    logits = started(ReplayDrafter({3: (ids, lp)}, 5, 4)).propose(0, 3)
    assert np.isneginf(logits[0, [1, 3, 4]]).all()
    assert best(logits) == [2]
    filled = ReplayDrafter({3: (np.array([[2, 0, 2]]), lp)}, 5, 4)
    np.testing.assert_array_equal(started(filled).propose(0, 3), logits)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"golden tokens 0\.\.9 are outside the vocabulary of 9"):
        OracleDrafter([0, 9], 9, 4)
    with pytest.raises(ValueError, match="block size 0 must be at least 1"):
        NoisyOracleDrafter([0], 9, 0)
    for bad in ({"miss": 1.5}, {"max_rank": -1}, {"seed": -1}):
        with pytest.raises(ValueError, match="is out of range"):
            NoisyOracleDrafter([0], 9, 4, **bad)
    lp = np.zeros((1, 2), np.float32)
    with pytest.raises(ValueError, match=r"position 7: ids -1\.\.3 exceed a vocabulary of 9"):
        ReplayDrafter({7: (np.array([[-1, 3]]), lp)}, 9, 4)
    with pytest.raises(ValueError, match="position 7: ids"):
        ReplayDrafter({7: (np.array([[1, 3, 4]]), lp)}, 9, 4)
