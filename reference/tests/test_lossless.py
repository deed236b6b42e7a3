"""Chain and tree output equals plain decoding: every drafter, budget, block size, greedy and sampled, every target."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from reference.dflash import DFlash
from reference.drafter import NoisyOracleDrafter, OracleDrafter, ReplayDrafter
from reference.loop import ar_generate, chain_generate, ddtree_generate
from reference.model import Model
from reference.sampling import SamplingParams, choice_margins
from reference.tests.models import drafter_config, random_weights, target_config
from reference.tests.test_sampling import chi_square_tail
from reference.tests.toys import HashTarget, Output, RandomDrafter, TinyNet
from reference.tree import Tree

VOCABULARY = 29
PROMPT = np.array([3, 14, 15, 9, 2, 6], np.int32)
TOKENS = 24
BUDGETS = range(257)
BLOCKS = range(1, 17)
MODES = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0, seed=11),
    "filtered": SamplingParams(temperature=0.8, top_k=9, top_p=0.9, seed=2**63 + 5),
}
DRAFTERS = ("oracle", "half oracle", "noisy", "noisier", "random", "replay")


def drafter_of(name, tokens, block_size, vocabulary=VOCABULARY, seed=0) -> Any:
    if name == "oracle":
        return OracleDrafter(tokens, vocabulary, block_size)
    if name == "half oracle":
        return OracleDrafter(tokens, vocabulary, block_size, right=len(tokens) // 2)
    if name == "noisy":
        return NoisyOracleDrafter(tokens, vocabulary, block_size, miss=0.05, max_rank=1, seed=seed)
    if name == "noisier":
        return NoisyOracleDrafter(tokens, vocabulary, block_size, miss=0.2, max_rank=4, seed=seed)
    if name == "random":
        return RandomDrafter(vocabulary, block_size, seed)
    return ReplayDrafter(recorded_lists(tokens, vocabulary, seed), vocabulary, block_size)


def recorded_lists(tokens, vocabulary, seed):
    """Lists of 16 entries for every second root position, the right token among the first few."""
    rng = np.random.default_rng(seed)
    lists = {}
    for index in range(0, len(tokens), 2):
        ids = np.zeros((0, 16), int)
        for token in tokens[index + 1 : index + 16]:
            others = rng.permutation([i for i in range(vocabulary) if i != token])[:15]
            ids = np.vstack([ids, np.insert(others, rng.integers(0, 3), token)])
        lp = -np.sort(rng.exponential(2, ids.shape), axis=1).astype(np.float32) - np.float32(1)
        lists[len(PROMPT) + index] = ids, lp
    return lists


def margin_at(target, prompt, tokens, sampling):
    """Distance of plain decoding's choice after prompt + tokens from another choice."""
    sequence = np.array([*prompt, *tokens], np.int32)
    logits = target.forward(sequence, target.new_cache(len(sequence))).logits[-1:]
    return choice_margins(logits[:, : target.vocab_size], sampling, np.array([len(sequence) - 1]))[0]


def difference(target, prompt, expected, got, sampling):
    """None when equal; otherwise the first index that differs and plain decoding's margin there."""
    if got == expected:
        return None
    index = next(i for i, (a, b) in enumerate(itertools.zip_longest(expected, got)) if a != b)
    return index, margin_at(target, prompt, expected[:index], sampling)


# --- The matrix on a target whose logits depend on the context alone


@pytest.fixture(scope="module")
def plain():
    """Mode -> (target, plain output)."""
    targets = {mode: HashTarget(VOCABULARY, seed=5) for mode in MODES}
    return {
        mode: (target, ar_generate(target, None, PROMPT, max_new_tokens=TOKENS, sampling=MODES[mode]).tokens)
        for mode, target in targets.items()
    }


def assert_equal_to_plain(plain, mode, name, budget, block_size, seed):
    target, tokens = plain[mode]
    drafter = drafter_of(name, tokens, block_size, seed=seed)
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "sampling": MODES[mode]}
    result = ddtree_generate(target, drafter, PROMPT, budget=budget, **options)
    assert result.tokens == tokens, (mode, name, budget, block_size)
    assert all(r.nodes <= budget and r.depth_limit < block_size for r in result.rounds)
    return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_budget_gives_the_plain_output(plain, mode, name):
    """All budgets for one drafter, every sixth for each other pair of drafter and mode, shifted from pair to pair."""
    every = 1 if (mode, name) == ("greedy", "noisier") else 6
    for budget in BUDGETS[(DRAFTERS.index(name) + list(MODES).index(mode)) % every :: every]:
        assert_equal_to_plain(plain, mode, name, budget, 1 + budget * 5 % 16, seed=budget)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_block_size_gives_the_plain_output(plain, mode, name):
    target, tokens = plain[mode]
    for block_size in BLOCKS:
        for budget in (1, block_size - 1, 33):
            assert_equal_to_plain(plain, mode, name, budget, block_size, seed=block_size)
        drafter = drafter_of(name, tokens, block_size, seed=block_size)
        chain = chain_generate(target, drafter, PROMPT, max_new_tokens=TOKENS, sampling=MODES[mode])
        assert chain.tokens == tokens


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_budget_with_every_block_size_gives_the_plain_output(plain, mode, name):
    for budget, block_size in itertools.product(BUDGETS, BLOCKS):
        assert_equal_to_plain(plain, mode, name, budget, block_size, seed=budget * 16 + block_size)


@pytest.mark.parametrize("block_size", [8, 16])
def test_noisy_oracles_visit_every_depth_rank_and_move_pattern(block_size, capsys):
    """What the matrix rests on: every accepted depth, ranks 0..4, and 0 to 6 moved rows."""
    target = HashTarget(VOCABULARY, seed=6)
    tokens = ar_generate(target, None, PROMPT, max_new_tokens=80).tokens
    depths, ranks, moved = Counter[int](), Counter[int](), Counter[int]()
    for seed, (miss, max_rank) in itertools.product(range(6), ((0.02, 0), (0.08, 0), (0.02, 1), (0.1, 2), (0.2, 4))):
        drafter = NoisyOracleDrafter(tokens, VOCABULARY, block_size, miss, max_rank, seed)
        result = ddtree_generate(target, drafter, PROMPT, max_new_tokens=80, budget=(16, 64, 256)[seed % 3])
        assert result.tokens == tokens
        depths.update(r.accepted for r in result.rounds)
        ranks.update(rank for r in result.rounds for rank in r.ranks)
        moved.update(r.moved_rows for r in result.rounds)
    with capsys.disabled():
        for title, counts in (("accepted depth", depths), ("accepted rank", ranks), ("moved rows", moved)):
            line = ", ".join(f"{value}: {counts[value]}" for value in sorted(counts))
            print(f"\nblock {block_size}, {title}: {line}", end="")
    assert set(depths) == set(range(block_size))
    assert set(ranks) == set(range(5))
    assert set(moved) >= set(range(7))


def test_replaying_recorded_lists_gives_the_recorded_rounds():
    target = HashTarget(VOCABULARY, seed=8)
    drafter = RandomDrafter(VOCABULARY, 8, seed=4)
    first = ddtree_generate(target, drafter, PROMPT, max_new_tokens=60, budget=40, keep_traces=True)
    lists = {r.prefix_length: (r.trace.lists.ids, r.trace.lists.lp) for r in first.rounds if r.trace and r.trace.lists}
    again = ddtree_generate(
        target, ReplayDrafter(lists, VOCABULARY, 8), PROMPT, max_new_tokens=60, budget=40, keep_traces=True
    )
    assert again.tokens == first.tokens
    assert [r.path for r in again.rounds] == [r.path for r in first.rounds]
    for a, b in zip(again.rounds, first.rounds, strict=True):
        assert a.trace is not None
        assert b.trace is not None
        np.testing.assert_array_equal(a.trace.tree.tokens, b.trace.tree.tokens)


def test_a_paged_cache_gives_the_same_output(plain):
    _, tokens = plain["greedy"]
    for block_size in (1, 3, 16):
        target = HashTarget(VOCABULARY, seed=5, block_size=block_size)
        result = ddtree_generate(target, drafter_of("noisier", tokens, 8), PROMPT, max_new_tokens=TOKENS, budget=40)
        assert result.tokens == tokens


# --- Targets that compute in floating point


def real_model(precision):
    config = target_config()
    return Model(config, random_weights(config), precision=precision)


def real_drafter(model, block_size):
    config = drafter_config()
    return DFlash(config, random_weights(config, 1), model.embedding, model.head, model.numerics, block_size)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["attention net", "model"])
def test_float64_targets_give_the_plain_output(kind, mode):
    target: Any = TinyNet(61, seed=1) if kind == "attention net" else real_model("float64")
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "sampling": MODES[mode]}
    tokens = ar_generate(target, None, PROMPT, **options).tokens
    for block_size, budget in ((1, 5), (2, 3), (8, 33), (16, 64), (8, 256)):
        for name in ("oracle", "noisier", "random", "dflash"):
            if name == "dflash" and (kind != "model" or block_size > 8):
                continue
            drafter = (
                real_drafter(target, block_size)
                if name == "dflash"
                else drafter_of(name, tokens, block_size, 61, seed=3)
            )
            assert ddtree_generate(target, drafter, PROMPT, budget=budget, **options).tokens == tokens
            assert chain_generate(target, drafter, PROMPT, **options).tokens == tokens


@pytest.mark.parametrize("mode", MODES)
def test_float32_targets_differ_only_at_margins_below_1e_5(mode, capsys):
    """Public issue: ggml-org/llama.cpp#27407. Differences are counted and printed; none is expected."""
    differences, runs = [], 0
    for kind in ("attention net", "model"):
        target: Any = TinyNet(61, seed=1, dtype=np.float32) if kind == "attention net" else real_model("float32")
        options: dict[str, Any] = {"max_new_tokens": TOKENS, "sampling": MODES[mode]}
        for prompt in np.random.default_rng(0).integers(
            0, 60, (4 if kind == "model" else 200 if mode == "greedy" else 60, 6)
        ):
            tokens = ar_generate(target, None, prompt, **options).tokens
            drafter = drafter_of("noisier", tokens, 8, 61, seed=runs)
            result = ddtree_generate(target, drafter, prompt, budget=(7, 64)[runs % 2], **options)
            if found := difference(target, prompt, tokens, result.tokens, MODES[mode]):
                differences.append(found)
            runs += 1
    with capsys.disabled():
        print(f"\nfloat32, {mode}: {len(differences)} of {runs} runs differ from plain decoding", end="")
        print("".join(f"; token {index}, margin {margin:.1e}" for index, margin in differences), end="")
    assert all(margin < 1e-5 for _, margin in differences)


def test_a_difference_is_found_and_measured():
    """The comparison above can fail: a token changed on purpose is reported with its margin."""
    target = TinyNet(61, seed=1, dtype=np.float32)
    tokens = ar_generate(target, None, PROMPT, max_new_tokens=10).tokens
    wrong = (*tokens[:4], (tokens[4] + 1) % 61, *tokens[5:])
    index, margin = difference(target, PROMPT, tokens, wrong, MODES["greedy"])
    assert index == 4
    assert margin > 1e-5
    assert difference(target, PROMPT, tokens, tokens[:7], MODES["greedy"])[0] == 7


# --- Width and position (public issues: ggml-org/llama.cpp#27407, lablup/mlxcel#1214, sgl-project/sglang#25015)


def prefixed(target, length, capacity=1100):
    cache = target.new_cache(capacity)
    if length:
        tokens = np.random.default_rng(length).integers(0, target.vocab_size, length).astype(np.int32)
        target.forward(tokens, cache)
        cache.commit(np.arange(length))
    return cache


def tree_of(tokens, parents):
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    zeros = np.zeros(len(tokens))
    return Tree(np.array(tokens), np.array(parents), np.array(depths), zeros.astype(int), zeros)


CHAIN = [7, 11, 13, 17]  # root and three nodes
SHAPES = {
    "chain": (tree_of(CHAIN, [-1, 0, 1, 2]), [0, 1, 2, 3]),
    "one useless sibling": (tree_of([7, 11, 5, 13, 17], [-1, 0, 0, 1, 3]), [0, 1, 3, 4]),
    "bushy": (
        tree_of([7, 5, 11, 6, 8, 13, 5, 9, 17, 2], [-1, 0, 0, 1, 1, 2, 2, 4, 5, 8]),
        [0, 2, 5, 8],
    ),
}


@pytest.mark.parametrize("length", [0, 1, 63, 64, 1000])
@pytest.mark.parametrize("kind", ["attention net", "model"])
def test_logits_of_a_chain_do_not_depend_on_the_tree_around_it(kind, length):
    target: Any = TinyNet(61, seed=2) if kind == "attention net" else real_model("float64")
    cache = prefixed(target, length)
    decoded = []
    for token in CHAIN:  # plain decoding
        decoded.append(target.forward(np.array([token], np.int32), cache).logits[0])
        cache.commit([0])
    for tree, nodes in SHAPES.values():
        cache = prefixed(target, length)
        positions, visibility = tree.positions(length), tree.visibility()
        logits = target.forward(tree.tokens, cache, positions=positions, visibility=visibility).logits
        np.testing.assert_allclose(logits[nodes], decoded, rtol=0, atol=1e-11)
    if kind == "attention net" and length:  # numbering by index instead of depth would show
        shifted = length + np.arange(len(tree.tokens))
        logits = target.forward(tree.tokens, cache, positions=shifted, visibility=visibility).logits
        assert np.abs(logits[nodes[1:]] - decoded[1:]).max() > 1e-3


@pytest.mark.parametrize(("precision", "bound"), [("float64", 1e-12), ("float32", 2e-5)])
@pytest.mark.parametrize("kind", ["attention net", "model"])
def test_root_logits_do_not_depend_on_the_verify_width(kind, precision, bound, capsys):
    """Widths 1..64, the extra nodes in useless branches; a repeated pass gives the same bits."""
    target: Any = TinyNet(61, seed=2, dtype=precision) if kind == "attention net" else real_model(precision)
    alone = target.forward(np.array([7], np.int32), prefixed(target, 40)).logits[0]
    worst = 0.0
    for width in (1, 2, 3, 4, 5, 8, 16, 33, 64):
        tree = tree_of([7, *(i % 61 for i in range(1, width))], [-1, *(i // 2 for i in range(width - 1))])
        passes = [
            target.forward(
                tree.tokens, prefixed(target, 40), positions=tree.positions(40), visibility=tree.visibility()
            ).logits
            for _ in range(2)
        ]
        assert passes[0].tobytes() == passes[1].tobytes()
        worst = max(worst, float(np.abs(passes[0][0] - alone).max()))
        assert passes[0][0].argmax() == alone.argmax()
    with capsys.disabled():
        print(f"\n{kind} {precision}: root logits over widths 1..64 differ by at most {worst:.1e}", end="")
    assert worst < bound


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_equal_logits_go_to_the_lowest_id_on_both_paths(mode):
    target = HashTarget(VOCABULARY, seed=3, levels=1)
    tied = [(row == row.max()).sum() > 1 for row in target.table]
    assert sum(tied) > 50
    tokens = ar_generate(target, None, PROMPT, max_new_tokens=200, sampling=MODES[mode]).tokens
    drafter = drafter_of("noisier", tokens, 8)
    assert ddtree_generate(target, drafter, PROMPT, max_new_tokens=200, sampling=MODES[mode]).tokens == tokens


# --- The distribution of sampled output


class FourTokens:
    """Four tokens with fixed logits, whatever the context."""

    vocab_size = 4
    logits = np.array([0.7, -0.4, 0.1, -1.2])

    def new_cache(self, capacity):
        return HashTarget(4).new_cache(capacity)

    def forward(self, tokens, cache, *, positions=None, visibility=None, taps=()):
        rows = len(tokens)
        for layer in range(2):
            cache.write(layer, np.zeros((rows, 2)), np.zeros((rows, 1)))
        return Output(np.tile(self.logits, (rows, 1)), np.zeros((rows, 0)))


class Marginal(RandomDrafter):
    """Proposes the target's own distribution at every depth."""

    def propose(self, root_token, depth_limit):
        return np.tile(FourTokens.logits, (min(depth_limit, self.block_size - 1), 1)).astype(np.float32)


@pytest.mark.parametrize("count", [10_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_sampled_tokens_follow_the_target_and_are_those_of_plain_decoding(count):
    """Sample and match is unbiased: the tree chooses which rows are computed, never which token is drawn."""
    options: dict[str, Any] = {"max_new_tokens": count, "sampling": SamplingParams(temperature=1.0, seed=2024)}
    plain = ar_generate(FourTokens(), None, [0], **options)
    tree = ddtree_generate(FourTokens(), Marginal(4, 8), [0], budget=24, **options)
    assert tree.tokens == plain.tokens
    assert tree.tau > 2
    expected = count * np.exp(FourTokens.logits) / np.exp(FourTokens.logits).sum()
    counts = np.bincount(tree.tokens, minlength=4)
    assert chi_square_tail(((counts - expected) ** 2 / expected).sum(), 3) > 1e-4
    pairs = np.bincount(4 * np.array(tree.tokens[:-1]) + np.array(tree.tokens[1:]), minlength=16)  # no memory either
    joint = np.outer(expected, expected).ravel() / count
    assert chi_square_tail(((pairs - joint) ** 2 / joint).sum(), 15) > 1e-4
