"""The recorded rounds: replayed through the reference they give what was recorded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import kdtr
from datasets.evaluation import prompts, record
from reference.accept import accept
from reference.drafter import ReplayDrafter
from reference.topk import topk_logprob
from reference.tree import build_tree

VOCABULARY = 4096
MAX_BYTES = 2 * 2**20


def cases(path) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    fixture = kdtr.read(path)
    for case in sorted({name.partition("/")[0] for name in fixture}):
        yield case, {name.partition("/")[2]: array for name, array in fixture.items() if name.startswith(case + "/")}


@pytest.fixture(params=range(len(record.PLANS)), ids=lambda i: record.PLANS[i].file)
def plan(request) -> record.Plan:
    return record.PLANS[request.param]


def test_each_file_is_valid_and_covers_every_set(plan):
    path = record.FOLDER / plan.file
    with kdtr.open(path) as container:
        container.validate()
    found = dict(cases(path))
    assert len(found) == len(prompts.SETS) * len(record.TEMPERATURES) * plan.prompts
    assert {case.rsplit("_", 2)[0] for case in found} == set(prompts.SETS)
    for case, arrays in found.items():
        assert arrays["lp"].shape[1:] == arrays["ids"].shape[1:] == (plan.block - 1, plan.budget), case
        assert int(arrays["block_size"]) == plan.block
        assert (arrays["temperature"] > 0) == case.endswith("sampled")


def test_all_files_together_are_small_and_hold_enough_rounds():
    paths = [record.FOLDER / plan.file for plan in record.PLANS]
    assert sum(path.stat().st_size for path in paths) <= MAX_BYTES
    assert sum(len(arrays["bonus"]) for path in paths for _, arrays in cases(path)) > 120


def test_the_reference_replays_every_round(plan):
    """Tree, accepted path and bonus token from the recorded lists and choices; the path spells the recorded output."""
    accepted = []
    for case, arrays in cases(record.FOLDER / plan.file):
        budget, prompt, tokens = int(arrays["budget"]), arrays["prompt"], arrays["tokens"]
        for r in range(len(arrays["bonus"])):
            at, root = int(arrays["prefix_length"][r]) - len(prompt), int(arrays["root_token"][r])
            tree = build_tree(arrays["lp"][r], arrays["ids"][r], budget, root, vocab_size=VOCABULARY)
            assert tree.node_count == arrays["node_count"][r], (case, r)
            choices = arrays["choices"][r]
            assert (choices[: 1 + tree.node_count] >= 0).all()
            assert (choices[1 + tree.node_count :] == -1).all()
            found = accept(tree.tokens, tree.parents, choices[: 1 + tree.node_count])
            path = arrays["path"][r]
            assert found.nodes.tolist() == path[path >= 0].tolist(), (case, r)
            assert found.bonus == arrays["bonus"][r], (case, r)
            spelled = [*tree.tokens[found.nodes].tolist(), found.bonus]
            assert spelled == tokens[at : at + len(spelled)].tolist(), (case, r)
            accepted.append(len(found.nodes) - 1)
    assert len(set(accepted)) > 1, "real rounds accept differently many tokens"


def test_the_replay_drafter_gives_the_recorded_lists(plan):
    case, arrays = next(cases(record.FOLDER / plan.file))
    lists = {int(p): (i, v) for p, i, v in zip(arrays["prefix_length"], arrays["ids"], arrays["lp"], strict=True)}
    drafter = ReplayDrafter(lists, VOCABULARY, plan.block)
    for at, (ids, lp) in lists.items():
        drafter.reset(arrays["prompt"])
        drafter.observe(np.zeros(at, np.int32), None)
        found = topk_logprob(drafter.propose(0, plan.block - 1), plan.budget)
        np.testing.assert_allclose(found.lp, lp, atol=2e-6, err_msg=case)
        # Logits that differ in their last bits can have equal log-probabilities; replayed, those stand in order of id.
        order = np.lexsort((ids, -lp), axis=1)
        np.testing.assert_array_equal(found.ids, np.take_along_axis(ids, order, axis=1), err_msg=case)
