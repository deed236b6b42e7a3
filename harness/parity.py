"""Whether two results are the same: tokens, trees, accepted path lengths; and if not, where they part.

A check compares one unit (a prompt, a list) with the truth. `combine` makes the Parity of a row from its checks and
saves the first failing one as a .kdtr file of kind "divergence". `reproduce` reads such a file, computes the truth anew
with the reference, and compares what was stored as actual: `python -m harness.parity FILE`.

Arrays of a divergence, strings as u8: what ("tokens", "tree", "accepted"), unit, seed u64 [0 or 1], and
tokens:   prompt i32 [P], expected i32 [n], actual i32 [m], round_of_index i32 [k], model, model_sha256, precision,
          temperature f64, top_k i64, top_p f64, sampling_seed u64, stop_tokens i32 [s]
tree:     lp f32 [L, K], ids i32 [L, K], budget i32, root_token i32, expected/<name>, actual/<name>
accepted: round i32, tokens i32 [1+n], parents i32 [1+n], continuation i32 [c], expected i32, actual i32
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import kdtr
from harness.console import say
from harness.environment import CHECKOUT
from harness.records import Difference, Parity
from reference.accept import accept
from reference.checkpoint import load_target
from reference.loop import Round, Target, ar_generate
from reference.sampling import GREEDY, SamplingParams, choice_margins
from reference.tree import Tree, build_tree

MARGIN = 1e-5  # a target that wavers less than this may choose otherwise when sums are rounded in another order
TREE_ARRAYS = ("tokens", "parents", "depths", "ranks", "scores")
OPTIONAL_TREE_ARRAYS = ("positions", "first_child", "next_sibling", "visibility", "paths")
_NO_TOKEN = 2**31 - 1  # stands where the truth has ended; no vocabulary is that large

Arrays = dict[str, NDArray[Any]]


class ReproduceError(ValueError):
    """A file that holds no divergence, or whose model is not the one it was found with."""


@dataclass(frozen=True)
class Check:
    """One unit's comparison. compared: entries compared. near: the difference lies within the allowed margin.

    case: the arrays of its divergence, empty where the check cannot be run again from stored input.
    """

    unit: str
    compared: int
    difference: Difference | None = None
    near: bool = False
    case: Arrays | None = None


@dataclass(frozen=True)
class Decoding:
    """How the tokens of a unit came about, so that plain decoding can be run again.

    model: path of the target, relative to the checkout; precision: of the reference.
    """

    prompt: tuple[int, ...]
    model: str
    precision: str = "float32"
    sampling: SamplingParams = GREEDY
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if Path(self.model).is_absolute():
            raise ValueError(f"the model's path must be relative to the checkout, got {self.model}")


def check_tokens(
    unit: str,
    expected: ArrayLike,
    actual: ArrayLike,
    *,
    seed: int | None = None,
    accepted: Sequence[int] | None = None,
    margin: Callable[[int], float] | None = None,
    decoding: Decoding | None = None,
) -> Check:
    """Compare output tokens [n] with those of plain decoding.

    accepted: draft nodes accepted in each round of the actual output, to tell the round of a difference.
    margin(index): the target's margin at that token, asked for only at a difference (see `target_margin`); below 1e-5
    the unit counts as near and not as different. decoding: makes the divergence reproducible.
    """
    truth, found = _integers(expected, "expected"), _integers(actual, "actual")
    index = _first_difference(truth, found)
    if index is None:
        return Check(unit, len(truth))
    least = None if margin is None else float(margin(index))
    counts = np.array(() if accepted is None else accepted, np.int64)
    round_of_index = np.repeat(np.arange(len(counts)), counts + 1)
    difference = Difference(
        what="tokens",
        unit=unit,
        round=int(round_of_index[index]) if index < len(round_of_index) else None,
        index=index,
        expected=_at(truth, index),
        actual=_at(found, index),
        seed=seed,
        margin=least,
    )
    case = None
    if decoding is not None:
        sampling = decoding.sampling
        case = {
            **_head("tokens", unit, seed),
            "prompt": np.array(decoding.prompt, np.int32),
            "expected": truth.astype(np.int32),
            "actual": found.astype(np.int32),
            "round_of_index": round_of_index.astype(np.int32),
            "model": _text(decoding.model),
            "model_sha256": _text(_model_sha256(decoding.model)),
            "precision": _text(decoding.precision),
            "temperature": np.array(sampling.temperature, np.float64),
            "top_k": np.array(sampling.top_k, np.int64),
            "top_p": np.array(sampling.top_p, np.float64),
            "sampling_seed": np.array(sampling.seed, np.uint64),
            "stop_tokens": np.array(decoding.stop_tokens, np.int32),
        }
    return Check(unit, index + 1, difference, least is not None and least < MARGIN, case)


def check_choices(
    unit: str,
    expected: ArrayLike,
    actual: ArrayLike,
    margins: ArrayLike,
    allowed: float,
    *,
    seed: int | None = None,
) -> Check:
    """Compare choices [n] that one pass over `actual` made with those that it was made of.

    margins [n]: of the expected ones. Where choices differ at margins below `allowed` only, the unit is near. Told is
    the difference of the largest margin.
    """
    truth, found, sure = _integers(expected, "expected"), _integers(actual, "actual"), np.asarray(margins)
    if len(truth) != len(found):
        raise ValueError(f"{unit}: {len(found)} choices, the pass made {len(truth)}")
    differ = np.flatnonzero(truth != found)
    if not len(differ):
        return Check(unit, len(truth))
    index = int(differ[sure[differ].argmax()])
    margin = float(sure[index])
    difference = Difference("tokens", unit, None, index, int(truth[index]), int(found[index]), seed, margin)
    return Check(unit, len(truth), difference, margin < allowed)


def target_margin(
    target: Target, prompt: ArrayLike, expected: ArrayLike, sampling: SamplingParams = GREEDY
) -> Callable[[int], float]:
    """For check_tokens: the margin of the target's choice of expected[index], computed when it is asked for."""

    def margin(index: int) -> float:
        tokens = np.concatenate([_integers(prompt, "prompt"), _integers(expected, "expected")[:index]]).astype(np.int32)
        logits = target.forward(tokens, target.new_cache(len(tokens))).logits[-1:, : target.vocab_size]
        return float(choice_margins(logits, sampling, np.array([len(tokens) - 1]))[0])

    return margin


def check_tree(
    unit: str,
    actual: Tree | Mapping[str, ArrayLike],
    lp: NDArray[np.float32],
    ids: NDArray[np.int32],
    budget: int,
    root_token: int = 0,
    *,
    expected: Tree | None = None,
    round: int | None = None,
    seed: int | None = None,
) -> Check:
    """Compare a tree, node for node and exactly, with the reference's tree of the same lists.

    actual: a Tree, or arrays of the names in reference.tree with node_count, possibly longer than 1+node_count; what
    stands past it is not looked at. positions must be those of prefix length 0. expected: computed here if not given.
    """
    truth = expected if expected is not None else build_tree(lp, ids, budget, root_token)
    given = {n: getattr(actual, n) for n in ("node_count", *TREE_ARRAYS)} if isinstance(actual, Tree) else actual
    arrays = {name: np.asarray(array) for name, array in given.items()}
    if absent := [name for name in ("node_count", *TREE_ARRAYS) if name not in arrays]:
        raise ValueError(f"{unit}: the tree has no {', '.join(absent)}")
    place = _first_tree_difference(truth, arrays, len(lp))
    if place is None:
        return Check(unit, len(truth.tokens))
    what, index, wanted, got = place
    difference = Difference(f"tree.{what}", unit, round, index, wanted, got, seed, None)
    kept = {n: arrays[n] for n in ("node_count", *TREE_ARRAYS, *OPTIONAL_TREE_ARRAYS) if n in arrays}
    case = {
        **_head("tree", unit, seed),
        "lp": lp,
        "ids": ids,
        "budget": np.array(budget, np.int32),
        "root_token": np.array(root_token, np.int32),
        **{f"expected/{name}": getattr(truth, name) for name in TREE_ARRAYS},
        **{f"actual/{name}": array for name, array in kept.items()},
    }
    return Check(unit, index + 1, difference, case=case)


def check_accepted(unit: str, truth: ArrayLike, rounds: Sequence[Round], *, seed: int | None = None) -> Check:
    """Compare what each round accepted with the longest path of its tree along the true output `truth` [n].

    Raises ValueError for a round without trace (see the loops' keep_traces).
    """
    tokens = _integers(truth, "truth")
    start = 0
    for number, done in enumerate(rounds):
        if done.trace is None:
            raise ValueError(f"{unit}: round {number} has no trace")
        tree, continuation = done.trace.tree, tokens[start:]
        wanted = _accepted_along(tree.tokens, tree.parents, continuation)
        if wanted != done.accepted:
            case = {
                **_head("accepted", unit, seed),
                "round": np.array(number, np.int32),
                "tokens": tree.tokens,
                "parents": tree.parents,
                "continuation": continuation.astype(np.int32),
                "expected": np.array(wanted, np.int32),
                "actual": np.array(done.accepted, np.int32),
            }
            difference = Difference("accepted", unit, number, number, wanted, done.accepted, seed, None)
            return Check(unit, number + 1, difference, case=case)
        start += done.accepted + 1
    return Check(unit, len(rounds))


def check_counts(unit: str, expected: Sequence[int], actual: Sequence[int], *, seed: int | None = None) -> Check:
    """Compare accepted counts round by round with those of another implementation that had the same proposals."""
    truth, found = _integers(expected, "expected"), _integers(actual, "actual")
    index = _first_difference(truth, found)
    if index is None:
        return Check(unit, len(truth))
    return Check(
        unit,
        index + 1,
        Difference("accepted", unit, index, index, _at(truth, index), _at(found, index), seed, None),
    )


def combine(against: str, checks: Iterable[Check], folder: Path | None = None, name: str = "divergence") -> Parity:
    """The Parity of a row. The first failing check that can be run again is saved as `<folder>/<name>.kdtr`.

    A check that compared nothing spoils the whole: `compared` is then 0, which is never a pass.
    """
    done = list(checks)
    failed = [check for check in done if check.difference is not None and not check.near]
    near = [check for check in done if check.difference is not None and check.near]
    first = next(iter(failed + near), None)
    saved = None
    case = next((check.case for check in failed if check.case is not None), None)
    if folder is not None and case is not None:
        saved = f"{name}.kdtr"
        save_divergence(folder / saved, case)
    return Parity(
        against=against,
        compared=sum(check.compared for check in done) if all(check.compared for check in done) else 0,
        differences=len(failed),
        margins=len(near),
        first_difference=first.difference if first else None,
        reproduce=saved,
    )


def reason(parity: Parity) -> str | None:
    """Why a row with this parity is INVALID, in one sentence, or None if it passed."""
    if parity.passed:
        return None
    if parity.first_difference is None:
        return f"parity: nothing was compared with {parity.against}"
    return f"parity with {parity.against}: {describe(parity.first_difference)}"


def describe(difference: Difference) -> str:
    """The difference in one sentence: place, both values, seed and margin."""
    place = f"{difference.what} of {difference.unit!r} differ at index {difference.index}"
    if difference.round is not None:
        place += f" (round {difference.round})"
    values = f"expected {_shown(difference.expected)}, found {_shown(difference.actual)}"
    seed = "" if difference.seed is None else f"; seed {difference.seed}"
    margin = "" if difference.margin is None else f"; the target's top-1/top-2 margin there is {difference.margin:.3g}"
    return f"{place}: {values}{seed}{margin}"


def save_divergence(path: Path, case: Arrays) -> None:
    """Write the arrays of a failing check as a .kdtr file of kind "divergence"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    inputs = {"lp", "ids", "budget", "root_token", "prompt", "parents", "continuation"}
    roles = {name: "input" if name in inputs else "aux" for name in case}
    seed = str(case["seed"][0]) if len(case["seed"]) else None
    meta = kdtr.provenance(seed=seed, command=f"python -m harness.parity {path.name}")
    kdtr.save(path, case, kind="divergence", meta=meta, roles=roles)


def reproduce(path: str | Path, load: Callable[[str, str], Target] | None = None) -> Check:
    """Compute the truth of a stored divergence anew and compare the stored actual result with it.

    load(model, precision) gives the target; default: the file it names, refused if its SHA-256 is another one.
    Raises ReproduceError for a file that is no divergence or whose model is missing or another one.
    """
    case = kdtr.read(path)
    if case.kind != "divergence":
        raise ReproduceError(f"{path}: kind '{case.kind}', expected 'divergence'")
    what, unit = _string(case["what"]), _string(case["unit"])
    seed = int(case["seed"][0]) if len(case["seed"]) else None
    if what == "tree":
        actual = {name.removeprefix("actual/"): case[name] for name in case if name.startswith("actual/")}
        budget, root = int(case["budget"]), int(case["root_token"])
        return check_tree(unit, actual, case["lp"], case["ids"], budget, root, seed=seed)
    if what == "accepted":
        wanted, found = _accepted_along(case["tokens"], case["parents"], case["continuation"]), int(case["actual"])
        number = int(case["round"])
        difference = Difference("accepted", unit, number, number, wanted, found, seed, None)
        return Check(unit, 1, difference if wanted != found else None)
    if what == "tokens":
        return _reproduce_tokens(path, case, unit, seed, load)
    raise ReproduceError(f"{path}: a divergence of {what!r} is not known")


def _reproduce_tokens(
    path: str | Path,
    case: Mapping[str, NDArray[Any]],
    unit: str,
    seed: int | None,
    load: Callable[[str, str], Target] | None,
) -> Check:
    model, precision = _string(case["model"]), _string(case["precision"])
    if load is None:
        if (stored := _string(case["model_sha256"])) != (present := _model_sha256(model)):
            raise ReproduceError(
                f"{path}: found with model {model} of SHA-256 {stored}, here it is {present or 'absent'}"
            )
        target: Target = load_target(CHECKOUT / model, precision)
    else:
        target = load(model, precision)
    sampling = SamplingParams(
        float(case["temperature"]), int(case["top_k"]), float(case["top_p"]), int(case["sampling_seed"])
    )
    prompt, actual = case["prompt"], case["actual"]
    truth = ar_generate(
        target,
        None,
        prompt,
        max_new_tokens=max(len(case["expected"]), len(actual)),
        sampling=sampling,
        stop_tokens=tuple(case["stop_tokens"].tolist()),
    ).tokens[: len(case["expected"])]
    margin = target_margin(target, prompt, np.array(truth), sampling)
    check = check_tokens(unit, truth, actual, seed=seed, margin=margin)
    rounds = case["round_of_index"]
    if check.difference is None or check.difference.index >= len(rounds):
        return check
    return replace(check, difference=replace(check.difference, round=int(rounds[check.difference.index])))


def _accepted_along(tokens: NDArray[np.int32], parents: NDArray[np.int32], continuation: NDArray[Any]) -> int:
    """Draft nodes on the longest path that continues as the truth does; continuation[0] is the root's own token."""
    depths = np.zeros(len(tokens), np.int64)
    for node in range(1, len(depths)):
        depths[node] = depths[parents[node]] + 1
    choices = np.full(len(tokens), _NO_TOKEN, np.int32)
    known = depths + 1 < len(continuation)
    choices[known] = continuation[depths[known] + 1]
    return len(accept(tokens, parents, choices).nodes) - 1


def _first_tree_difference(
    truth: Tree, found: Mapping[str, NDArray[Any]], depth_limit: int
) -> tuple[str, int, int | float, int | float] | None:
    """(array, node, expected, found) at the first node that differs, or None. Names are looked at in order."""
    count = int(found["node_count"])
    if not 0 <= count < len(found["tokens"]):
        return "node_count", 0, truth.node_count, count
    wanted = truth.padded(max(truth.node_count, len(found["tokens"]) - 1), depth_limit)
    rows = min(truth.node_count, count) + 1
    differing: list[tuple[int, int, str]] = []
    for order, name in enumerate((*TREE_ARRAYS, *(n for n in OPTIONAL_TREE_ARRAYS if n in found))):
        if found[name].ndim != wanted[name].ndim or len(found[name]) <= count:
            raise ValueError(f"{name} has shape {list(found[name].shape)}, but the tree has {count + 1} nodes")
        unequal = _rows_of(wanted[name], found[name], rows)
        if len(bad := np.flatnonzero(unequal.any(axis=1))):
            differing.append((int(bad[0]), order, name))
    if not differing:
        return None if count == truth.node_count else ("node_count", rows, truth.node_count, count)
    node, _, name = min(differing)
    column = int(np.flatnonzero(_rows_of(wanted[name], found[name], rows)[node])[0])
    place = (node, column) if wanted[name].ndim > 1 else (node,)
    return name, node, wanted[name][place].item(), found[name][place].item()


def _rows_of(a: NDArray[Any], b: NDArray[Any], rows: int) -> NDArray[np.bool_]:
    """bool [rows, columns that both have]: where they differ. Spare columns of a wider array hold filler."""
    left, right = a[:rows].reshape(rows, -1), b[:rows].reshape(rows, -1)
    columns = min(left.shape[1], right.shape[1])
    unequal: NDArray[np.bool_] = left[:, :columns] != right[:, :columns]
    return unequal


def _head(what: str, unit: str, seed: int | None) -> Arrays:
    return {"what": _text(what), "unit": _text(unit), "seed": np.array([] if seed is None else [seed], np.uint64)}


def _text(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


def _string(array: NDArray[Any]) -> str:
    return array.tobytes().decode("utf-8", "surrogatepass")


def _model_sha256(model: str) -> str:
    """SHA-256 of the model's file; "" for a folder or an absent file."""
    path = CHECKOUT / model
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _integers(values: ArrayLike, name: str) -> NDArray[Any]:
    array = np.asarray(values).reshape(-1)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must be integers, got {array.dtype}")
    return array.astype(np.int64)


def _first_difference(a: NDArray[Any], b: NDArray[Any]) -> int | None:
    shared = min(len(a), len(b))
    unequal = np.flatnonzero(a[:shared] != b[:shared])
    if len(unequal):
        return int(unequal[0])
    return None if len(a) == len(b) else shared


def _at(values: NDArray[Any], index: int) -> int | None:
    return int(values[index]) if index < len(values) else None


def _shown(value: object) -> str:
    return "the end" if value is None else repr(value)


def main(arguments: Sequence[str]) -> int:
    """Print the difference that each file holds; exit status 1 if one shows again, 0 if none does, 2 for bad use."""
    if not arguments:
        say("usage: python -m harness.parity FILE.kdtr ...", error=True)
        return 2
    status = 0
    for path in arguments:
        try:
            found = reproduce(path)
        except (ReproduceError, kdtr.KDTRError, OSError) as error:
            say(str(error), error=True)
            return 2
        say(f"{path}: {describe(found.difference) if found.difference else 'no difference any more'}")
        status = max(status, int(found.difference is not None))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
