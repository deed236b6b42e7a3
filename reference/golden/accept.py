"""Golden walks and golden compactions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.accept import accept
from reference.drafter import NoisyOracleDrafter
from reference.golden.files import EXACT, GoldenFile
from reference.golden.inputs import integers, words
from reference.sampling import GREEDY, choose_rows
from reference.topk import topk_logprob
from reference.tree import Tree, build_tree

SEED = 20260414
_PADDING = 5  # rows past the last node, filled with what must not be read


def golden_files() -> list[GoldenFile]:
    return [_accept(), _compact()]


def noisy_trees(
    seed: int, count: int, vocab: int, block_size: int, budget: int
) -> list[tuple[Tree, NDArray[np.int32]]]:
    """(tree, choices) of rounds whose right tokens stand at random ranks or are missing.

    choices: at depth d the right token of depth d + 1, so that only the tree decides how far the walk gets. The noise
    falls from round to round in threes, so that walks of every length occur.
    """
    golden = integers(seed, 0, vocab, count + block_size)
    noise = ((0.15, 2), (0.1, 1), (0.1, 0))  # missing with this probability, at most this rank
    rounds = []
    for first in range(count):
        drafter = NoisyOracleDrafter(golden[first:], vocab, block_size, *noise[first % 3], seed=seed + first)
        drafter.reset(np.empty(0, np.int32))
        lists = topk_logprob(drafter.propose(int(golden[first]), block_size - 1), budget)
        tree = build_tree(lists.lp, lists.ids, budget, int(golden[first]))
        rounds.append((tree, golden[first + 1 + tree.depths]))
    return rounds


def _accept() -> GoldenFile:
    file = GoldenFile("accept", "accept", SEED, "Rows past node_count hold garbage that must not be read.")
    chain = np.arange(-1, 8)
    _walk(file, "whole_chain", [3, 1, 4, 1, 5, 9, 2, 6, 5], chain, [1, 4, 1, 5, 9, 2, 6, 5, 8])
    _walk(file, "nothing_accepted", [3, 1, 4, 1, 5, 9, 2, 6, 5], chain, [7] * 9)
    _walk(file, "root_only", [3], [-1], [11])
    _walk(file, "token_0", [0, 0, 0, 0], [-1, 0, 1, 2], [0, 0, 5, 0])
    # Tokens 7 and 3 under many parents; only (parent, token) tells the child.
    tokens, parents = [0, 7, 3, 7, 3, 7, 3, 9], [-1, 0, 0, 1, 1, 2, 2, 5]
    _walk(file, "path_777", tokens, parents, [7, 7, 7, 7, 7, 7, 7, 7])
    _walk(file, "path_379", tokens, parents, [3, 7, 7, 7, 7, 9, 7, 1])
    _walk(file, "only_under_rejected", [0, 7, 3, 5], [-1, 0, 0, 2], [7, 5, 5, 5])
    for index, (tree, choices) in enumerate(noisy_trees(SEED + 1, 36, 50, 8, 48)):
        _walk(file, f"noisy_{index:02}", tree.tokens, tree.parents, choices)
    for budget in (255, 256, 1024):
        tree, choices = noisy_trees(SEED + budget, 1, 2000, 16, budget)[0]
        _walk(file, f"wide_b{budget}", tree.tokens, tree.parents, choices)
    # Choices by argmax: equal logits go to the lowest id; the first logit row has its maximum twice.
    logits = integers(SEED, 7, 5, 6, 40).astype(np.float32)
    choices = choose_rows(logits, GREEDY, np.arange(6))
    tokens, parents = [9, choices[0], 39, choices[1], choices[3], 1], [-1, 0, 0, 1, 3, 2]
    expected = accept(np.array(tokens, np.int32), np.array(parents, np.int32), choices)
    file.add(
        "logit_ties",
        inputs={
            "tokens": np.array(tokens, np.int32),
            "parents": np.array(parents, np.int32),
            "node_count": np.int32(5),
            "logits": logits,
        },
        expected={"accepted": (expected.nodes, EXACT), "bonus": (np.int32(expected.bonus), EXACT)},
    )
    return file


def _walk(file: GoldenFile, case: str, tokens: Any, parents: Any, choices: Any) -> None:
    expected = accept(np.asarray(tokens, np.int32), np.asarray(parents, np.int32), np.asarray(choices, np.int32))
    file.add(
        case,
        inputs={
            "tokens": _with_garbage(tokens, 1),
            "parents": _with_garbage(parents, 0),
            "choices": _with_garbage(choices, 1),
            "node_count": np.int32(len(tokens) - 1),
        },
        expected={"accepted": (expected.nodes, EXACT), "bonus": (np.int32(expected.bonus), EXACT)},
    )


def _with_garbage(values: Any, garbage: int) -> NDArray[np.int32]:
    return np.concatenate([np.asarray(values, np.int32), np.full(_PADDING, garbage, np.int32)])


def _compact() -> GoldenFile:
    file = GoldenFile("compact", "compact", SEED, "Every row is tagged: value = ((layer * 4096 + row) * 64) + column.")
    paths = {
        "scattered": [0, 3, 4, 9],
        "identity": [0, 1, 2],
        "root": [0],
        "far": [0, 32],
        "overlapping": [0, 2, 3, 4, 5],
        "every_second": list(range(0, 32, 2)),
    }
    for name, path in paths.items():
        for prefix in (0, 17):
            _move(file, f"{name}_p{prefix}", prefix, path, capacity=prefix + 34)
        for prefix in (0, 15, 16):
            _move(file, f"{name}_p{prefix}_paged", prefix, path, capacity=prefix + 34, block_size=16)
    for index, (tree, choices) in enumerate(noisy_trees(SEED, 4, 50, 16, 64)):
        path = accept(tree.tokens, tree.parents, choices).nodes.tolist()
        _move(file, f"noisy_{index}", 33 + index, path, capacity=108, block_size=8)
    return file


def _move(
    file: GoldenFile, case: str, prefix: int, path: list[int], *, capacity: int, block_size: int | None = None
) -> None:
    layers, width = 2, 6
    paged: dict[str, NDArray[np.int32]] = {}
    slot, slots = np.arange(capacity), capacity
    if block_size:
        blocks = -(-capacity // block_size)
        table = np.argsort(words(SEED + capacity, 3, np.arange(2 * blocks))[:, 0], kind="stable")[:blocks]
        slot, slots = table[slot // block_size] * block_size + slot % block_size, 2 * blocks * block_size
        paged = {"block_table": table.astype(np.int32), "block_size": np.array(block_size, np.int32)}
    layer, row, column = np.ogrid[:layers, :slots, :width]
    rows = ((layer * 4096 + row) * 64 + column).astype(np.float32)
    after = rows.copy()
    after[:, slot[prefix : prefix + len(path)]] = rows[:, slot[prefix + np.array(path)]]
    file.add(
        case,
        inputs={"rows": rows, "prefix_length": np.int32(prefix), "accepted": np.array(path, np.int32), **paged},
        expected={"rows_after": (after, EXACT)},
    )
