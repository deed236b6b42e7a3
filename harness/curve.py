"""What verifying costs: the target's time for N rows at once behind a prefix, over its time for one.

A tree of N-1 nodes pays only where its acceptance length lies above this curve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datasets.evaluation import prompts
from harness.cases import GPU, Arm, Chosen, Curve, NativeCurve, digest
from harness.gpu_builders import NoGpuError
from harness.native import MARGINS
from harness.parity import Check, check_choices, check_tokens, combine, reason
from harness.records import Row
from harness.systems import Bench
from harness.timing import cpu_clock, interleave
from reference.loop import Options, Round
from reference.sampling import GREEDY, choice_margins, choose_rows

BLOCK = 8  # of the trees that the engine verifies


def rows(bench: Bench, chosen: Chosen) -> Iterator[Row]:
    """T_verify(N): the target on N rows behind a prefix, with the mask of a tree; choices against one causal pass."""
    case = chosen.case
    assert isinstance(case, Curve)
    try:
        target = bench.pair.target
    except FileNotFoundError as error:
        yield from bench.not_run(case, "curve", chosen.arms, str(error))
        return
    text = _text(case.prefix + max(case.rows))
    case_hash = digest(case, bench.pair.digest, text.tobytes())
    if bench.is_done(chosen, case_hash):
        return
    cache = target.new_cache(len(text))
    whole = target.forward(text, cache).logits[case.prefix :, : target.vocab_size]
    cache.commit(np.arange(case.prefix))
    positions = np.arange(case.prefix, len(text), dtype=np.int32)
    truth = choose_rows(whole, GREEDY, positions)
    margins = choice_margins(whole, GREEDY, positions)

    def call(n: int) -> Callable[[], Any]:
        mask, rows, at = np.tri(n, dtype=np.bool_), text[case.prefix : case.prefix + n], positions[:n]
        return lambda: target.forward(rows, cache, positions=at, visibility=mask)

    found: dict[str, Any] = {}
    counts = {f"n{n}": n for n in case.rows if n == 1 or f"n{n}" in chosen.arms}
    arms = interleave(
        {name: call(n) for name, n in counts.items()},
        samples=10,
        clock=cpu_clock(),
        inspect=lambda name, _, result: found.update({name: result}),
    )
    for name, arm in arms.items():
        n = counts[name]
        choices: Any = (
            choose_rows(found[name].logits[:, : target.vocab_size], GREEDY, positions[:n]) if name in found else []
        )
        check = check_tokens(name, truth[:n], choices, margin=lambda i: float(margins[i]))
        parity = combine("one causal pass", [check])
        yield bench.row(
            case,
            case_hash,
            "curve",
            name,
            against=None if name == "n1" else "n1",
            reason=arm.failure or reason(parity),
            params={"rows": n, "prefix": case.prefix, "system": "reference"},
            parity=parity,
            timing=arm.timing,
        )


def native_rows(bench: Bench, chosen: Chosen) -> Iterator[Row]:
    """The same of the engine: the verify stage of a first round with a tree of N-1 nodes, timed apart from the others.

    The trees are full ones of made-up lists. Choices are held against the reference's pass over the same tree.
    """
    case = chosen.case
    assert isinstance(case, NativeCurve)
    try:
        pair, decoder = bench.pair, bench.need_engine().of(case.dtype)
    except (FileNotFoundError, NoGpuError) as error:
        yield from bench.not_run(case, "curve", [GPU], str(error))
        return
    prefix = _text(case.prefix)
    case_hash = digest(case, pair.digest, prefix.tobytes())
    if bench.is_done(chosen, case_hash):
        return
    target, prompt = pair.target, prefix.tolist()
    lists = {len(prompt): made_up_lists(BLOCK - 1, min(max(max(case.rows) - 1, 1), target.vocab_size))}
    options: Options = {"max_new_tokens": 2 * BLOCK}
    found: dict[str, Round] = {}

    def call(n: int) -> Callable[[], Round]:
        return lambda: decoder.first_round(Arm("ddtree", n - 1), prompt, BLOCK, options, lists)

    counts = {f"{GPU}-n{n}": n for n in sorted({1, *case.rows})}
    counts = {name: n for name, n in counts.items() if n == 1 or name in chosen.arms}
    arms = interleave(
        {name: call(n) for name, n in counts.items()},
        samples=10,
        clock=decoder.clock,
        launch=decoder.launch,
        reader=decoder.reader,
        inspect=lambda name, _, done: found.update({name: done}),
        seconds=lambda done: float(done.seconds["verify"]),
    )
    for name, arm in arms.items():
        n, parity, why = counts[name], None, arm.failure
        if name in found:
            parity = combine(
                "a pass over the same tree", [check_verify(name, target, prefix, found[name], MARGINS[case.dtype])]
            )
            why = why or reason(parity)
            if found[name].nodes != n - 1:
                why = f"{found[name].nodes + 1} rows were verified, {n} were asked for"
        yield bench.row(
            case,
            case_hash,
            "curve",
            name,
            against=None if n == 1 else f"{GPU}-n1",
            reason=why,
            params={"rows": n, "prefix": case.prefix, "system": decoder.name, "dtype": case.dtype},
            parity=parity,
            timing=arm.timing,
        )


def _text(length: int) -> NDArray[np.int32]:
    """The first tokens of the held-out code."""
    return np.array([t for p in prompts.load("heldout_code") for t in p.tokens][:length], np.int32)


def made_up_lists(depths: int, width: int, slope: float = 0.05) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """ids, lp [L, K] whose trees grow in breadth and depth: ids from 0 on, each `slope` less likely than the last."""
    values = -slope * np.arange(width)
    lp = (values - np.log(np.exp(values).sum()) - 1e-3).astype(np.float32)
    return np.tile(np.arange(width, dtype=np.int32), (depths, 1)), np.tile(lp, (depths, 1))


def check_verify(unit: str, target: Any, prefix: NDArray[np.int32], done: Round, allowed: float) -> Check:
    """The choices of a round right behind `prefix`, traced, against the target's own over the same tree.

    allowed: margins below which they may differ.
    """
    assert done.trace is not None
    tree = done.trace.tree
    cache = target.new_cache(len(prefix) + len(tree.tokens))
    target.forward(prefix, cache)
    cache.commit(np.arange(len(prefix)))
    positions = tree.positions(len(prefix))
    logits = target.forward(tree.tokens, cache, positions=positions, visibility=tree.visibility()).logits
    logits = logits[:, : target.vocab_size]
    margins = choice_margins(logits, GREEDY, positions)
    truth = choose_rows(logits, GREEDY, positions)
    return check_choices(unit, truth, done.trace.choices, margins, allowed)
