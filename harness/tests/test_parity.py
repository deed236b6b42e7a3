"""A planted difference of any kind is found where it is, told in one sentence, and shows again from its file."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdtr
from harness import parity
from harness.environment import CHECKOUT
from harness.parity import Check, Decoding
from harness.records import Parity
from reference.drafter import NoisyOracleDrafter
from reference.loop import Generation, ar_generate, ddtree_generate
from reference.sampling import SamplingParams, choice_margins, choose_rows
from reference.tests.lists import random_lists
from reference.tests.toys import HashTarget
from reference.tree import Tree, build_tree

PROMPT = np.array([5, 3, 8], np.int32)
VOCAB = 16
SAMPLED = SamplingParams(temperature=0.8, seed=2**63 + 5)


def decode(sampling: SamplingParams) -> tuple[HashTarget, tuple[int, ...], Generation]:
    target = HashTarget(VOCAB)
    truth = ar_generate(target, None, PROMPT, max_new_tokens=40, sampling=sampling).tokens
    drafter = NoisyOracleDrafter(truth, VOCAB, 8, seed=1)
    found = ddtree_generate(target, drafter, PROMPT, max_new_tokens=40, budget=12, sampling=sampling, keep_traces=True)
    return target, truth, found


@pytest.fixture(scope="module")
def lists() -> tuple[np.ndarray, np.ndarray]:
    return next((lp, ids) for kind, lp, ids in random_lists(3, 60, 7, 8) if kind == "smooth" and min(lp.shape) >= 4)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_equal_results_pass(sampling):
    target, truth, found = decode(sampling)
    margin = parity.target_margin(target, PROMPT, truth, sampling)
    checks = [
        parity.check_tokens("p", truth, found.tokens, accepted=[r.accepted for r in found.rounds], margin=margin),
        parity.check_accepted("p", truth, found.rounds),
    ]
    result = parity.combine("ar", checks)
    assert result == Parity("ar", 40 + len(found.rounds), 0)
    assert result.passed
    assert parity.reason(result) is None
    assert max(r.accepted for r in found.rounds) >= 3  # paths long enough to be cut


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("index", [0, 17, 39])
def test_a_wrong_token_is_found_told_and_reproduced(tmp_path, sampling, index):
    target, truth, found = decode(sampling)
    accepted = [r.accepted for r in found.rounds]
    wrong = list(found.tokens)
    wrong[index] = (wrong[index] + 1) % VOCAB
    check = parity.check_tokens(
        "p7",
        truth,
        wrong,
        seed=sampling.seed,
        accepted=accepted,
        margin=parity.target_margin(target, PROMPT, truth, sampling),
        decoding=Decoding(tuple(PROMPT.tolist()), "toy", sampling=sampling),
    )
    difference = check.difference
    assert difference is not None
    assert (difference.index, difference.expected, difference.actual) == (index, truth[index], wrong[index])
    ends = np.cumsum(np.array(accepted) + 1)
    assert difference.round == int(np.searchsorted(ends, index, side="right"))
    assert difference.margin is not None
    assert difference.margin > parity.MARGIN

    result = parity.combine("ar", [check], tmp_path, "case")
    assert not result.passed
    assert (result.differences, result.reproduce) == (1, "case.kdtr")
    said = str(parity.reason(result))
    for fact in (
        "'p7'",
        f"index {index} ",
        f"(round {difference.round})",
        f"expected {truth[index]}",
        str(sampling.seed),
    ):
        assert fact in said
    assert f"margin there is {difference.margin:.3g}" in said

    again = parity.reproduce(tmp_path / "case.kdtr", lambda model, precision: target)
    assert again.difference == difference


def test_the_margin_of_a_draw_is_that_of_its_position():
    target, truth, _ = decode(SAMPLED)
    for index in (0, 5, 39):
        tokens = np.array([*PROMPT, *truth[:index]], np.int32)
        row = target.forward(tokens, target.new_cache(64)).logits[-1:, :VOCAB]
        margins = choice_margins(np.repeat(row, 60, axis=0), SAMPLED, np.arange(60))
        assert choose_rows(row, SAMPLED, np.array([len(PROMPT) + index - 1]))[0] == truth[index]
        assert parity.target_margin(target, PROMPT, truth, SAMPLED)(index) == margins[len(PROMPT) + index - 1]


def test_the_margin_is_that_of_the_target_at_the_token():
    target, truth, _ = decode(SamplingParams())
    margin = parity.target_margin(target, PROMPT, truth)
    for index in (0, 5, 39):
        tokens = np.array([*PROMPT, *truth[:index]], np.int32)
        row = target.forward(tokens, target.new_cache(64)).logits[-1, :VOCAB]
        assert row.argmax() == truth[index]
        best = np.sort(row)
        assert margin(index) == best[-1] - best[-2]


@pytest.mark.parametrize(("margin", "near"), [(0.9e-5, True), (1.1e-5, False), (float("nan"), False)])
def test_a_target_that_wavers_is_counted_apart(margin, near):
    check = parity.check_tokens("p", [1, 2, 3], [1, 9, 3], margin=lambda index: margin)
    result = parity.combine("ar", [check, parity.check_tokens("q", [1], [1])])
    assert (result.margins, result.differences, result.passed) == ((1, 0, True) if near else (0, 1, False))
    assert result.first_difference is not None
    assert result.first_difference.index == 1


def test_the_margin_is_asked_for_only_at_a_difference():
    def refuse(index):
        raise AssertionError

    assert parity.check_tokens("p", [1, 2], [1, 2], margin=refuse).difference is None


@pytest.mark.parametrize(
    ("expected", "actual", "index", "values"),
    [
        ([1, 2, 3], [1, 2], 2, (3, None)),
        ([1, 2], [1, 2, 3], 2, (None, 3)),
        ([], [4], 0, (None, 4)),
        ([4], [], 0, (4, None)),
    ],
)
def test_a_missing_or_surplus_token_is_a_difference(expected, actual, index, values):
    found = parity.check_tokens("p", expected, actual).difference
    assert found is not None
    assert (found.index, found.expected, found.actual) == (index, *values)
    assert "the end" in parity.describe(found)


def test_nothing_compared_is_never_a_pass():
    nothing = parity.combine("ar", [])
    assert not nothing.passed
    assert parity.reason(nothing) == "parity: nothing was compared with ar"
    empty = [parity.check_tokens("p", [], []), parity.check_accepted("p", [], []), parity.check_counts("p", [], [])]
    for check in empty:
        assert not parity.combine("ar", [check]).passed
        assert not parity.combine("ar", [parity.check_tokens("q", [1], [1]), check]).passed


def test_numbers_that_are_no_tokens_are_refused():
    with pytest.raises(ValueError, match="actual must be integers, got float64"):
        parity.check_tokens("p", [1], [1.0])


@pytest.mark.parametrize("form", ["tree", "arrays", "padded"])
def test_equal_trees_pass(lists, form):
    lp, ids = lists
    tree = build_tree(lp, ids, 20, 9)
    forms: dict[str, Any] = {
        "tree": tree,
        "arrays": {name: getattr(tree, name) for name in ("node_count", *parity.TREE_ARRAYS)},
        "padded": tree.padded(40, len(lp)),
    }
    assert parity.check_tree("l", forms[form], lp, ids, 20, 9) == Check("l", tree.node_count + 1)


def test_filler_is_not_looked_at(lists):
    lp, ids = lists
    arrays = build_tree(lp, ids, 20).padded(30, len(lp))
    for name in (*parity.TREE_ARRAYS, "positions", "first_child", "next_sibling", "visibility", "paths"):
        arrays[name][21:] = 77
    assert parity.check_tree("l", arrays, lp, ids, 20).difference is None


@pytest.mark.parametrize("name", [*parity.TREE_ARRAYS, *parity.OPTIONAL_TREE_ARRAYS])
@pytest.mark.parametrize("node", [1, 13, 20])
def test_one_wrong_entry_of_any_array_is_found_and_reproduced(tmp_path, lists, name, node):
    lp, ids = lists
    arrays = build_tree(lp, ids, 20).padded(30, len(lp))
    if arrays[name].dtype == np.float64:
        arrays[name][node] = np.nextafter(arrays[name][node], 0)
    else:
        arrays[name][node] += 1
    check = parity.check_tree("list 4", arrays, lp, ids, 20, round=3, seed=11)
    found = check.difference
    assert found is not None
    assert (found.what, found.index, found.round) == (f"tree.{name}", node, 3)
    assert found.expected != found.actual
    result = parity.combine("heapq", [check], tmp_path)
    assert "list 4" in str(parity.reason(result))
    again = parity.reproduce(tmp_path / "divergence.kdtr").difference
    assert again == dataclasses.replace(found, round=None)


def test_the_first_of_two_differences_is_told(lists):
    lp, ids = lists
    arrays = build_tree(lp, ids, 20).padded(20, len(lp))
    arrays["tokens"][15] += 1
    arrays["scores"][6] -= 1
    arrays["ranks"][6] += 1
    found = parity.check_tree("l", arrays, lp, ids, 20).difference
    assert found is not None
    assert (found.what, found.index) == ("tree.ranks", 6)


def test_two_swapped_nodes_and_a_wrong_count_are_found(lists):
    lp, ids = lists
    tree = build_tree(lp, ids, 20)
    arrays = tree.padded(20, len(lp))
    order = np.arange(21)
    order[[19, 20]] = 20, 19
    swapped = {**arrays, **{name: arrays[name][order] for name in parity.TREE_ARRAYS}}
    found = parity.check_tree("l", swapped, lp, ids, 20).difference
    assert found is not None
    assert found.index == 19
    for count, index in ((19, 20), (0, 1), (-1, 0), (21, 0)):
        found = parity.check_tree("l", {**arrays, "node_count": count}, lp, ids, 20).difference
        assert found is not None
        assert (found.what, found.index, found.expected, found.actual) == ("tree.node_count", index, 20, count)
    smaller = parity.check_tree("l", build_tree(lp, ids, 12), lp, ids, 20).difference
    assert smaller is not None
    assert (smaller.what, smaller.index, smaller.expected, smaller.actual) == ("tree.node_count", 13, 20, 12)


def test_a_tree_without_its_arrays_is_refused(lists):
    lp, ids = lists
    arrays = build_tree(lp, ids, 20).padded(20, len(lp))
    with pytest.raises(ValueError, match="no scores"):
        parity.check_tree("l", {n: a for n, a in arrays.items() if n != "scores"}, lp, ids, 20)
    with pytest.raises(ValueError, match=r"ranks has shape \[7\], but the tree has 21 nodes"):
        parity.check_tree("l", {**arrays, "ranks": arrays["ranks"][:7]}, lp, ids, 20)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_accept_length_is_found_and_reproduced(tmp_path, change):
    _, truth, found = decode(SamplingParams())
    number = next(i for i, r in enumerate(found.rounds) if r.accepted >= 2)
    wrong = found.rounds[number]
    path = wrong.path[:-1] if change < 0 else (*wrong.path, wrong.nodes)
    rounds = [*found.rounds]
    rounds[number] = dataclasses.replace(wrong, path=path)
    check = parity.check_accepted("p", truth, rounds, seed=4)
    difference = check.difference
    assert difference is not None
    assert (difference.what, difference.round) == ("accepted", number)
    assert (difference.expected, difference.actual) == (wrong.accepted, wrong.accepted + change)
    parity.combine("ar", [check], tmp_path)
    assert parity.reproduce(tmp_path / "divergence.kdtr").difference == difference


def test_an_accepted_path_may_end_with_the_output():
    target, truth, _ = decode(SamplingParams())
    for stop in truth[3:12]:
        wanted = ar_generate(target, None, PROMPT, max_new_tokens=40, stop_tokens=[stop]).tokens
        drafter = NoisyOracleDrafter(truth, VOCAB, 8, seed=1)
        found = ddtree_generate(
            target, drafter, PROMPT, max_new_tokens=40, budget=12, stop_tokens=[stop], keep_traces=True
        )
        assert parity.check_accepted("p", wanted, found.rounds).difference is None


def test_rounds_without_trace_are_refused():
    _, truth, found = decode(SamplingParams())
    with pytest.raises(ValueError, match="round 0 has no trace"):
        parity.check_accepted("p", truth, [dataclasses.replace(found.rounds[0], trace=None)])


def test_counts_of_two_implementations():
    assert parity.check_counts("p", [3, 0, 7], [3, 0, 7]) == Check("p", 3)
    for actual, index in (([3, 1, 7], 1), ([3, 0], 2), ([3, 0, 7, 0], 3)):
        found = parity.check_counts("p", [3, 0, 7], actual).difference
        assert found is not None
        assert (found.round, found.index) == (index, index)


def test_one_command_shows_the_difference(tmp_path, lists):
    lp, ids = lists
    tree = build_tree(lp, ids, 20)
    tokens = tree.tokens.copy()
    tokens[7] += 1
    wrong = Tree(tokens, tree.parents, tree.depths, tree.ranks, tree.scores)
    check = parity.check_tree("list 4", wrong, lp, ids, 20, seed=3)
    parity.combine("heapq", [check], tmp_path, "found")
    right = {**dict(kdtr.read(tmp_path / "found.kdtr"))}
    right["actual/tokens"] = right["expected/tokens"]
    parity.save_divergence(tmp_path / "repaired.kdtr", right)

    def command(*files: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "harness.parity", *files]
        return subprocess.run(program, cwd=CHECKOUT, capture_output=True, text=True, check=False)

    shown = command(str(tmp_path / "found.kdtr"))
    assert (shown.returncode, shown.stderr) == (1, "")
    assert check.difference is not None
    assert parity.describe(check.difference) in shown.stdout
    fixed = command(str(tmp_path / "repaired.kdtr"))
    assert (fixed.returncode, fixed.stderr) == (0, "")
    assert "no difference any more" in fixed.stdout
    assert command().returncode == 2
    absent = command(str(tmp_path / "absent.kdtr"))
    assert (absent.returncode, absent.stdout) == (2, "")
    assert "absent.kdtr" in absent.stderr
    assert "Traceback" not in absent.stderr


def test_a_file_that_holds_no_divergence_is_refused(tmp_path):
    kdtr.save(tmp_path / "other.kdtr", {"x": np.zeros(3)}, kind="any")
    with pytest.raises(parity.ReproduceError, match="kind 'any', expected 'divergence'"):
        parity.reproduce(tmp_path / "other.kdtr")


def test_another_model_than_the_one_it_was_found_with_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "CHECKOUT", tmp_path)
    (tmp_path / "target.kdtr").write_bytes(b"one")
    decoding = Decoding((1, 2), "target.kdtr")
    parity.combine("ar", [parity.check_tokens("p", [1], [2], decoding=decoding)], tmp_path)
    (tmp_path / "target.kdtr").write_bytes(b"two")
    with pytest.raises(parity.ReproduceError, match="SHA-256 7692c3ad"):
        parity.reproduce(tmp_path / "divergence.kdtr")
    (tmp_path / "target.kdtr").unlink()
    with pytest.raises(parity.ReproduceError, match="absent"):
        parity.reproduce(tmp_path / "divergence.kdtr")
    with pytest.raises(ValueError, match="relative"):
        Decoding((1, 2), str(Path("/models/target.kdtr")))
