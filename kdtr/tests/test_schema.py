"""Kinds of fixtures: right ones pass level 3, and each thing that a schema forbids is found."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kdtr
from kdtr import errors
from kdtr.schema import KINDS, Rule

Case = dict[str, np.ndarray]

# A tree of depth limit 2 over lists of 3, budget 5, four nodes: the root's tokens 7 (score -1) and 8 (-2), then below 7
# tokens 4 (-1.5) and 5 (-3).
TREE: Case = {
    "lp": np.array([[-1, -2, -9], [-0.5, -2, -2]], np.float32),
    "ids": np.array([[7, 8, 1], [4, 5, 6]], np.int32),
    "budget": np.array(5, np.int32),
    "root_token": np.array(3, np.int32),
    "prefix_length": np.array(10, np.int32),
    "node_count": np.array(4, np.int32),
    "tokens": np.array([3, 7, 4, 8, 5, 0], np.int32),
    "parents": np.array([-1, 0, 1, 0, 1, -1], np.int32),
    "depths": np.array([0, 1, 2, 1, 2, 0], np.int32),
    "ranks": np.array([0, 0, 0, 1, 1, 0], np.int32),
    "positions": np.array([10, 11, 12, 11, 12, 0], np.int32),
    "scores": np.array([0, -1, -1.5, -2, -3, 0], np.float64),
    "visibility": np.array([[0b1], [0b11], [0b111], [0b1001], [0b10011], [0]], np.uint32),
    "paths": np.array([[0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 3, -1], [0, 1, 4], [-1, -1, -1]], np.int32),
    "first_child": np.array([1, 2, -1, -1, -1, -1], np.int32),
    "next_sibling": np.array([-1, 3, 4, -1, -1, -1], np.int32),
}
TOPK: Case = {
    "logits": np.zeros((2, 6), np.float32),
    "k": np.array(3, np.int32),
    "vocab_size": np.array(5, np.int32),
    "ids": np.array([[0, 1, 2], [0, 1, 2]], np.int32),
    "lp": np.full((2, 3), -1, np.float32),
    "logz": np.ones(2, np.float32),
}
ACCEPT: Case = {
    "tokens": TREE["tokens"],
    "parents": TREE["parents"],
    "node_count": TREE["node_count"],
    "choices": np.array([7, 4, 9, 0, 0, -1], np.int32),
    "accepted": np.array([0, 1, 2], np.int32),
    "bonus": np.array(9, np.int32),
}
COMPACT: Case = {
    "rows": np.zeros((2, 20, 4), np.float32),
    "prefix_length": np.array(10, np.int32),
    "accepted": np.array([0, 1, 4], np.int32),
    "rows_after": np.zeros((2, 20, 4), np.float32),
}
ATTENTION: Case = {
    "q_latent": np.zeros((2, 3, 8), np.float32),
    "q_rope": np.zeros((2, 3, 4), np.float32),
    "latent": np.zeros((7, 8), np.float32),
    "rope_key": np.zeros((7, 4), np.float32),
    "scale": np.array(0.5),
    "visible": np.ones((2, 2), np.bool_),
    "out": np.zeros((2, 3, 8), np.float32),
    "lse": np.zeros((2, 3), np.float32),
}
LISTS: Case = {
    "prompt": np.array([1, 2], np.int32),
    "tokens": np.array([3, 7, 4], np.int32),
    "block_size": np.array(3, np.int32),
    "budget": np.array(5, np.int32),
    "temperature": np.array(0.0),
    "seed": np.array(0, np.uint64),
    "prefix_length": np.array([10], np.int32),
    "root_token": np.array([3], np.int32),
    "lp": TREE["lp"][None],
    "ids": TREE["ids"][None],
    "choices": np.array([[7, 4, 9, 0, 0, -1]], np.int32),
    "node_count": np.array([4], np.int32),
    "path": np.array([[0, 1, 2]], np.int32),
    "bonus": np.array([9], np.int32),
}
MODEL: Case = {"config/hidden_size": np.array(4), "model.norm.weight": np.ones(4, np.float32)}
GOOD: dict[str, Case] = {
    "tree": TREE,
    "topk": TOPK,
    "accept": ACCEPT,
    "compact": COMPACT,
    "attention": ATTENTION,
    "op": {"op": np.frombuffer(b"rms_norm", np.uint8), "x": np.ones(3), "y": np.ones(3)},
    "model": MODEL,
    "drafter": MODEL,
    "drafter_lists": LISTS,
    "generation": {"prompt": np.array([1], np.int32), "tokens": np.array([2, 3], np.int32)},
    "divergence": {"what": np.frombuffer(b"tree", np.uint8), "unit": np.frombuffer(b"row", np.uint8)},
    "any": {"whatever/it/is": np.ones(2)},
}


def role_of(kind: str, name: str) -> str:
    if kind == "op":
        return {"op": "aux", "y": "expected"}.get(name, "input")
    rules = KINDS[kind].rules if kind in KINDS else ()
    return next((rule.roles for rule in rules if fnmatchcase(name, rule.name)), "none")


def problems(
    tmp_path, kind: str, arrays: Case, *, roles: dict[str, str] | None = None, cases: bool = False, **arguments: Any
) -> tuple[str, ...]:
    """Problems of a file of that kind, its arrays having the roles that the schema wants unless told otherwise."""
    wanted = {name: role_of(kind, name.split("/")[-1] if cases else name) for name in arrays} | (roles or {})
    tolerances = {name: kdtr.Tolerance.bits() for name, role in wanted.items() if role == "expected"}
    tolerances |= arguments.pop("tolerances", {})
    path = tmp_path / "a.kdtr"
    kdtr.save(path, arrays, kind=kind, meta=kdtr.provenance(), roles=wanted, tolerances=tolerances, **arguments)
    with kdtr.open(path) as handle:
        handle.verify()
        try:
            handle.validate()
        except errors.MetaError as error:
            return error.problems
    return ()


def test_every_kind_has_an_example():
    assert set(GOOD) == set(KINDS)


@pytest.mark.parametrize("kind", GOOD)
def test_good_examples(tmp_path, kind):
    assert problems(tmp_path, kind, GOOD[kind]) == ()


@pytest.mark.parametrize("kind", [kind for kind in GOOD if KINDS[kind].cases])
def test_several_cases_in_a_file(tmp_path, kind):
    arrays = {f"{case}/{name}": array for case in ("one", "two") for name, array in GOOD[kind].items()}
    assert problems(tmp_path, kind, arrays, cases=True) == ()
    del arrays[f"two/{next(iter(GOOD[kind]))}"]
    found = problems(tmp_path, kind, arrays, cases=True)
    assert len(found) == 1
    assert found[0].startswith("case 'two': ")


def test_sizes_belong_to_a_case(tmp_path):
    other = {**TOPK, "logits": np.zeros((2, 9), np.float32)}
    arrays = {f"{case}/{name}": array for case, group in (("a", TOPK), ("b", other)) for name, array in group.items()}
    assert problems(tmp_path, "topk", arrays, cases=True) == ()


def test_unknown_kind_and_version(tmp_path):
    assert "none of tree, topk" in problems(tmp_path, "mystery", {"x": np.ones(1)})[0]
    assert problems(tmp_path, "any", {}, kind_version=2) == ("kind_version of 'any' is 2, known is 1",)


REQUIRED = [(kind, rule) for kind in GOOD for rule in KINDS[kind].rules if not rule.optional]


@pytest.mark.parametrize(("kind", "rule"), REQUIRED, ids=lambda v: v if isinstance(v, str) else v.name)
def test_missing_arrays(tmp_path, kind: str, rule: Rule):
    arrays = {
        name: array for name, array in GOOD[kind].items() if role_of(kind, name) != rule.roles or "*" not in rule.name
    }
    arrays.pop(rule.name, None)
    found = problems(tmp_path, kind, arrays)
    assert any(f"'{rule.name}'" in problem and "is missing" in problem for problem in found)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("tree", {"extra": np.ones(1)}, "'extra' is not an array of this kind"),
        ("tree", {"lp": TREE["lp"].astype(np.float64)}, "'lp': dtype is f64, must be f32"),
        ("tree", {"ids": TREE["ids"][:, :2]}, r"'lp': shape is \(2, 3\), must be \[L K\] with .*K = 2"),
        ("tree", {"paths": TREE["paths"][:, :2]}, r"must be \[1\+B 1\+L\]"),
        ("tree", {"tokens": TREE["tokens"][:5]}, r"must be \[1\+B\] with"),
        ("tree", {"tokens": TREE["tokens"][None]}, r"'tokens': shape is \(1, 6\), must be \[1\+B\]"),
        ("topk", {"k": np.array([3], np.int32)}, r"'k': shape is \(1,\), must be \[\]"),
        ("compact", {"rows_after": np.zeros((2, 20, 5), np.float32)}, "width = 4"),
        ("attention", {"latent": np.zeros((6, 8), np.float32)}, r"'rope_key': shape is \(7, 4\), must be \[S p\]"),
        ("model", {"w": np.ones(2, np.complex64)}, "'w': dtype is c64, must be f32 or f64"),
    ],
)
def test_names_dtypes_and_shapes(tmp_path, kind, changes, message):
    found = problems(tmp_path, kind, GOOD[kind] | changes)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError("; ".join(found))


def test_roles_and_modes(tmp_path):
    assert any("'lp': role is aux, must be input" in p for p in problems(tmp_path, "tree", TREE, roles={"lp": "aux"}))
    loose = {"scores": kdtr.Tolerance.close(1, 1)}
    assert "'scores': is compared by close, must be bits or equal" in problems(tmp_path, "tree", TREE, tolerances=loose)
    assert problems(tmp_path, "topk", TOPK, tolerances={"logz": kdtr.Tolerance.ulp(1)}) == ()
    op = problems(tmp_path, "op", GOOD["op"], roles={"y": "aux"})
    assert op == ("nothing has the role expected",)


def changed(array: np.ndarray, at: Any, value: Any) -> np.ndarray:
    out = array.copy()
    out[at] = value
    return out


WRONG: list[tuple[str, str, Any, Any]] = [
    ("tree", "lp", (0, 0), np.nan),
    ("tree", "lp", (0, 0), np.inf),
    ("tree", "lp", (0, 1), 0),
    ("tree", "ids", (1, 2), -1),
    ("tree", "budget", (), 4),
    ("tree", "prefix_length", (), -1),
    ("tree", "node_count", (), 6),
    ("tree", "node_count", (), -1),
    ("tree", "node_count", (), 3),
    ("tree", "tokens", 0, 4),
    ("tree", "tokens", 4, 6),
    ("tree", "tokens", 5, 1),
    ("tree", "parents", 0, 0),
    ("tree", "parents", 2, 2),
    ("tree", "parents", 2, -1),
    ("tree", "parents", 4, 3),
    ("tree", "depths", 3, 2),
    ("tree", "depths", 0, 1),
    ("tree", "ranks", 4, 0),
    ("tree", "ranks", 4, 3),
    ("tree", "ranks", 5, 1),
    ("tree", "positions", 1, 12),
    ("tree", "positions", 5, 10),
    ("tree", "scores", 0, -1),
    ("tree", "scores", 1, -1.75),
    ("tree", "scores", 2, np.nan),
    ("tree", "scores", 5, -4),
    ("tree", "visibility", (1, 0), 1),
    ("tree", "visibility", (2, 0), 0b1111),
    ("tree", "visibility", (5, 0), 1),
    ("tree", "paths", (2, 1), 3),
    ("tree", "paths", (5, 0), 0),
    ("tree", "first_child", 1, 4),
    ("tree", "next_sibling", 1, -1),
    ("topk", "k", (), 2),
    ("topk", "vocab_size", (), 7),
    ("topk", "vocab_size", (), 2),
    ("topk", "ids", (0, 0), 5),
    ("topk", "ids", (0, 0), -1),
    ("topk", "lp", (0, 2), 0),
    ("accept", "node_count", (), 6),
    ("accept", "accepted", 0, 1),
    ("accept", "accepted", 2, 3),
    ("accept", "accepted", 2, 5),
    ("accept", "accepted", 2, -1),
    ("compact", "prefix_length", (), 16),
    ("compact", "prefix_length", (), -1),
    ("compact", "accepted", 0, 1),
    ("compact", "accepted", 1, 4),
    ("drafter_lists", "lp", (0, 0, 0), np.nan),
    ("drafter_lists", "budget", (), 4),
    ("drafter_lists", "block_size", (), 4),
    ("drafter_lists", "node_count", 0, 6),
    ("drafter_lists", "choices", (0, 4), -1),
    ("drafter_lists", "choices", (0, 5), 3),
    ("drafter_lists", "path", (0, 0), 1),
    ("drafter_lists", "path", (0, 2), 1),
    ("drafter_lists", "path", (0, 2), 5),
    ("drafter_lists", "path", (0, 1), -1),
]


@pytest.mark.parametrize(("kind", "name", "at", "value"), WRONG, ids=str)
def test_wrong_values(tmp_path, kind, name, at, value):
    found = problems(tmp_path, kind, GOOD[kind] | {name: changed(GOOD[kind][name], at, value)})
    assert found
    assert not any("must be [" in problem or "missing" in problem for problem in found)


def test_choices_or_logits(tmp_path):
    logits = {"logits": np.zeros((6, 10), np.float32)}
    assert problems(tmp_path, "accept", ACCEPT | logits) == ("either choices or logits must be given",)
    given = {name: array for name, array in ACCEPT.items() if name != "choices"}
    assert problems(tmp_path, "accept", given | logits) == ()
    assert problems(tmp_path, "accept", given) == ("either choices or logits must be given",)


def test_rest_of_compact(tmp_path):
    table = {"block_table": np.zeros(5, np.int32)}
    assert problems(tmp_path, "compact", COMPACT | table) == ("block_table and block_size go together",)
    assert problems(tmp_path, "compact", COMPACT | table | {"block_size": np.array(4, np.int32)}) == ()
    half = problems(tmp_path, "compact", COMPACT | {"rows_after": COMPACT["rows_after"].astype(np.float16)})
    assert half == ("rows are float32, rows_after float16",)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["tree", "topk", "accept", "compact", "drafter_lists"]), st.data())
def test_whatever_the_values_only_problems_are_told(tmp_path_factory, kind, data):
    arrays = {}
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for name, array in GOOD[kind].items():
        arrays[name] = array.copy()
        if data.draw(st.integers(0, 3)) == 0:
            arrays[name] = rng.integers(-(2**31), 2**31, array.shape).astype(array.dtype)
        elif data.draw(st.integers(0, 3)) == 0 and array.size:
            arrays[name].flat[data.draw(st.integers(0, array.size - 1))] = data.draw(st.integers(-2, 7)) % 2**31
    for problem in problems(tmp_path_factory.mktemp("s"), kind, arrays):
        assert isinstance(problem, str)


@pytest.mark.parametrize(("budget", "depth"), [(0, 0), (0, 3), (4, 0)])
def test_root_only_trees(tmp_path, budget, depth):
    rows = 1 + budget
    blank = np.zeros(rows, np.int32)
    none = np.full(rows, -1, np.int32)
    case = {
        "lp": np.zeros((depth, 0), np.float32),
        "ids": np.zeros((depth, 0), np.int32),
        "budget": np.array(budget, np.int32),
        "root_token": np.array(3, np.int32),
        "prefix_length": np.array(10, np.int32),
        "node_count": np.array(0, np.int32),
        "tokens": changed(blank, 0, 3),
        "parents": none,
        "depths": blank,
        "ranks": blank,
        "positions": changed(blank, 0, 10),
        "scores": np.zeros(rows),
        "visibility": changed(np.zeros((rows, 1), np.uint32), (0, 0), 1),
        "paths": changed(np.full((rows, 1 + depth), -1, np.int32), (0, 0), 0),
    }
    assert problems(tmp_path, "tree", case) == ()
