"""Replay: the loops run with an acceptance that is given. Target and drafter do their full work; what they say is
replaced by a script, so the speed of a system can be measured where weights are random and would accept nothing.

The engine's target cannot be made to say something else. There the script's lists are told in the words of its own
plain decoding: of each depth, the token that the script accepts changes places with the one that the target says.

Such rows stand in block "replay", are labelled, and never count as lossless output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kdtr
from datasets.evaluation import prompts
from engine.abi import EngineError
from harness.builders import NoListsError
from harness.cases import AR, GPU, Arm, Builder, Chosen, Replay, digest
from harness.gpu_builders import NoGpuError
from harness.gpu_decoder import Lists
from harness.parity import check_counts, check_tokens, combine, reason
from harness.records import Row, Scalar
from harness.systems import Bench
from harness.timing import cpu_clock, interleave
from reference.accept import accept
from reference.drafter import Drafter, ReplayDrafter
from reference.loop import Generation, Options, Target, ar_generate, ddtree_generate
from reference.topk import topk_logprob
from reference.tree import build_tree

DOWN = -12.0  # logit of what a forced script does not accept: below the whole accepted chain, so that this comes first


@dataclass(frozen=True, eq=False)
class Step:
    """One round of a script: the drafter's logits float32 [L, V], and what the target says: said[d] after the accepted
    node of depth d. The last one is the bonus token, so len(said) - 1 nodes are accepted."""

    logits: NDArray[np.float32]
    said: tuple[int, ...]


Script = Sequence[Step]


def recorded_script(path: Path, name: str, budget: int, vocab_size: int) -> list[Step]:
    """The recorded greedy rounds of a prompt set, in order, with what a tree of `budget` nodes accepts of their paths.

    Raises NoListsError.
    """
    if not path.is_file():
        raise NoListsError(f"{path.name} is absent: no recorded rounds")
    stored = kdtr.read(path)
    steps = []
    for case in sorted({n.rpartition("/")[0] for n in stored if n.startswith(f"{name}_") and "_greedy/" in n}):
        columns = (stored[f"{case}/{column}"] for column in ("lp", "ids", "path", "bonus"))
        for lp, ids, nodes, bonus in zip(*columns, strict=True):
            tokens = build_tree(lp, ids, int(stored[f"{case}/budget"])).tokens[nodes[nodes > 0]]
            logits = ReplayDrafter({0: (ids, lp)}, vocab_size, len(lp) + 1).propose(0, len(lp))
            lists = topk_logprob(logits, budget)
            tree = build_tree(lists.lp, lists.ids, budget)
            said = np.array([*tokens, bonus], np.int32)
            accepted = accept(tree.tokens, tree.parents, said[np.minimum(tree.depths, len(said) - 1)]).nodes
            steps.append(Step(logits, tuple(said[: len(accepted)].tolist())))
    if not steps:
        raise NoListsError(f"{path.name} holds no greedy rounds of {name}")
    return steps


def forced_script(accepted: int, depth_limit: int, vocab_size: int) -> list[Step]:
    """One round for ever, in which `accepted` nodes, at most the depth, are what the target says; trees are full."""
    row = DOWN - 0.01 * np.arange(vocab_size, dtype=np.float32)
    row[0] = 0.0
    return [Step(np.tile(row, (depth_limit, 1)), (*([0] * min(accepted, depth_limit)), vocab_size - 1))]


class ScriptedDrafter:
    """A drafter that works and says what the script says."""

    def __init__(self, inner: Drafter, state: _State):
        self._inner, self._state = inner, state
        self.block_size, self.taps = inner.block_size, inner.taps

    def reset(self, prompt: NDArray[np.int32]) -> None:
        self._inner.reset(prompt)

    def observe(self, tokens: NDArray[np.int32], features: NDArray[Any] | None) -> None:
        self._inner.observe(tokens, features)

    def propose(self, root_token: int, depth_limit: int) -> NDArray[np.float32]:
        return self._state.step.logits[: len(self._inner.propose(root_token, depth_limit))]


class ScriptedTarget:
    """A target that works and says what the script says, by the depth of each row."""

    def __init__(self, inner: Target, state: _State):
        self._inner, self._state = inner, state
        self.vocab_size = inner.vocab_size
        self.new_cache = inner.new_cache

    def forward(
        self,
        tokens: NDArray[np.int32],
        cache: Any,
        *,
        positions: NDArray[np.int32] | None = None,
        visibility: NDArray[np.bool_] | None = None,
        taps: Sequence[int] = (),
    ) -> Any:
        result = self._inner.forward(tokens, cache, positions=positions, visibility=visibility, taps=taps)
        depths = np.arange(len(tokens)) if positions is None else positions - cache.length
        said = self._state.say(cache.length, depths)
        logits = np.zeros(result.logits.shape, np.float32)
        logits[np.arange(len(said)), said] = 1.0
        return _Output(logits, result.features)


@dataclass(frozen=True, eq=False)
class _Output:
    logits: NDArray[np.float32]
    features: NDArray[Any]


class _State:
    """Which round of the script is running: drafter and target of one generation share it."""

    def __init__(self, script: Script):
        self._script, self._round, self.step = script, -1, script[0]

    def say(self, committed: int, depths: NDArray[Any]) -> NDArray[np.int64]:
        """The tokens said after rows of these depths. The prompt's own pass is answered with the first step's."""
        said = np.array(self.step.said, np.int64)
        answer: NDArray[np.int64] = said[np.minimum(depths, len(said) - 1)]
        if committed:  # a round; the prompt itself has nothing committed before it
            self._round += 1
        self.step = self._script[(self._round + 1) % len(self._script)]
        return answer

    def counts(self, rounds: Sequence[Any]) -> list[int]:
        """What each of these rounds should have accepted, as far as its depth limit lets it."""
        steps = (self._script[n % len(self._script)] for n in range(len(rounds)))
        return [min(len(step.said) - 1, r.depth_limit) for step, r in zip(steps, rounds, strict=True)]


def generate(target: Target, drafter: Drafter, prompt: Sequence[int], script: Script, arm: Arm, **options: Any) -> Any:
    """One generation by the script: (Generation, what each round should have accepted)."""
    state = _State(script)
    scripted = ScriptedTarget(target, state)
    if arm == AR:
        found = ar_generate(scripted, None, prompt, **options)
        return found, [0] * len(found.rounds)
    found = ddtree_generate(scripted, ScriptedDrafter(drafter, state), prompt, budget=arm.budget, **options)
    return found, state.counts(found.rounds)


@dataclass(frozen=True)
class Told:
    """A script for one prompt: lists by position, and how many of their nodes each round accepts."""

    lists: Lists
    accepted: tuple[int, ...]


def tell(script: Script, prompt_length: int, text: Sequence[int], budget: int, vocab_size: int) -> Told:
    """The script in the words of `text`, the plain decoding behind the prompt, whose first token is the first root.

    What is accepted is counted as the reference does, on what it makes of the told lists, until the text ends.
    """
    lists: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}
    accepted: list[int] = []
    place = 0  # of the root in the text
    for step in itertools.cycle(script):
        depths = len(step.logits)
        if place + depths + 1 >= len(text):
            return Told(lists, tuple(accepted))
        logits, truth = step.logits.copy(), np.array(text[place + 1 : place + depths + 2], np.int32)
        for depth, (said, true) in enumerate(zip(step.said, truth[:depths], strict=False)):
            logits[depth, [said, true]] = logits[depth, [true, said]]
        told = topk_logprob(logits, min(budget, vocab_size))
        heard = topk_logprob(
            ReplayDrafter({0: (told.ids, told.lp)}, vocab_size, depths + 1).propose(0, depths), min(budget, vocab_size)
        )
        tree = build_tree(heard.lp, heard.ids, budget)
        lists[prompt_length + place] = told.ids, told.lp
        accepted.append(len(accept(tree.tokens, tree.parents, truth[tree.depths]).nodes) - 1)
        place += accepted[-1] + 1
    raise ValueError("a script without steps")


def rows(bench: Bench, chosen: Chosen) -> Iterator[Row]:
    """The rows of a replay case, labelled as such."""
    case = chosen.case
    assert isinstance(case, Replay)
    source = "recorded" if case.forced is None else f"forced: {case.forced} nodes a round"
    params: dict[str, Scalar] = {
        "dataset": case.set,
        "block_size": case.block_size,
        "acceptance": source,
        "max_new_tokens": case.max_new_tokens,
        "system": "reference",
    }
    try:
        pair = bench.pair
        recording = bench.lists / Builder(case.block_size, case.budget).file
        script: Script = (
            recorded_script(recording, case.set, case.budget, pair.target.vocab_size)
            if case.forced is None
            else forced_script(case.forced, case.block_size - 1, pair.target.vocab_size)
        )
    except (FileNotFoundError, NoListsError) as error:
        yield from bench.not_run(case, "replay", chosen.arms, str(error), params=params)
        return
    prompt = prompts.subset(prompts.load(case.set), 1)[0]
    contents = [part for step in script for part in (step.logits.tobytes(), step.said)]
    case_hash = digest(case, pair.digest, prompt.tokens, *contents)
    native = {f"{GPU}-{arm.name}": arm for arm in (AR, Arm("ddtree", case.budget))}
    expected = [arm for arm in chosen.arms if arm != GPU]
    if GPU in chosen.arms and bench.engine is not None:
        expected += native
    if bench.is_done(replace(chosen, arms=tuple(expected)), case_hash):
        return
    if GPU in chosen.arms:
        yield from _native_rows(bench, case, case_hash, params, native, prompt.tokens, script)
    if chosen.arms == (GPU,):
        return
    arms = {arm.name: arm for arm in (AR, Arm("ddtree", case.budget)) if arm == AR or arm.name in chosen.arms}
    drafter = pair.drafter(case.block_size)
    clock = cpu_clock()
    options: Options = {"max_new_tokens": case.max_new_tokens, "clock": clock.now}

    def call(arm: Arm) -> Callable[[], tuple[Generation, list[int]]]:
        return lambda: generate(pair.target, drafter, prompt.tokens, script, arm, **options)

    found: dict[str, tuple[Generation, list[int]]] = {}
    measured = interleave(
        {name: call(arm) for name, arm in arms.items()},
        samples=case.repeats,
        clock=clock,
        inspect=lambda name, _, result: found.update({name: result}),
        seconds=lambda result: float(result[0].decode_seconds),
    )
    for name, arm in measured.items():
        parity, metrics = None, {}
        if name in found:
            result, wanted = found[name]
            check = check_counts(prompt.id, wanted, [r.accepted for r in result.rounds])
            parity = combine("the acceptance of the script", [check])
            metrics = {"tau": result.tau, "rounds": len(result.rounds), "tokens": len(result.tokens)}
        yield bench.row(
            case,
            case_hash,
            "replay",
            name,
            against=None if name == AR.name else AR.name,
            reason=arm.failure or (reason(parity) if parity else None),
            params={**params, "budget": arms[name].budget},
            parity=parity,
            metrics=metrics,
            timing=arm.timing,
        )


def _native_rows(
    bench: Bench,
    case: Replay,
    case_hash: str,
    params: Mapping[str, Scalar],
    arms: Mapping[str, Arm],
    prompt: Sequence[int],
    script: Script,
) -> Iterator[Row]:
    """The rows of the engine, whose outputs are those of its own plain decoding."""
    try:
        decoder = bench.need_engine()
    except NoGpuError as error:
        yield from bench.not_run(case, "replay", [GPU], str(error), case_hash=case_hash, params=params)
        return
    options: Options = {"max_new_tokens": case.max_new_tokens}
    longer: Options = {"max_new_tokens": case.max_new_tokens + 2 * case.block_size}
    try:
        text = decoder.decode(AR, prompt, case.block_size, longer).tokens
    except EngineError as error:
        for name in arms:
            yield bench.row(case, case_hash, "replay", name, reason=f"plain decoding failed: {error}", params=params)
        return
    told = tell(script, len(prompt), text, case.budget, bench.pair.target.vocab_size)

    def call(arm: Arm) -> Callable[[], Generation]:
        if arm == AR:
            return lambda: decoder.decode(arm, prompt, case.block_size, options)
        return lambda: decoder.replay(arm, prompt, case.block_size, options, told.lists)

    found: dict[str, Generation] = {}
    measured = interleave(
        {name: call(arm) for name, arm in arms.items()},
        samples=case.repeats,
        clock=decoder.clock,
        launch=decoder.launch,
        reader=decoder.reader,
        inspect=lambda name, _, result: found.update({name: result}),
        seconds=lambda result: float(result.decode_seconds),
    )
    base = next(iter(arms))
    for name, measurement in measured.items():
        parity, metrics = None, {}
        if name in found:
            result = found[name]
            wanted = told.accepted if name != base else [0] * len(result.rounds)
            counts = [min(n, r.depth_limit) for n, r in zip(wanted, result.rounds, strict=False)]
            checks = [
                check_counts(case.set, counts, [r.accepted for r in result.rounds]),
                check_tokens(case.set, text[: case.max_new_tokens], result.tokens),
            ]
            parity = combine("the acceptance of the script", checks)
            metrics = {"tau": result.tau, "rounds": len(result.rounds), "tokens": len(result.tokens)}
        yield bench.row(
            case,
            case_hash,
            "replay",
            name,
            against=None if name == base else base,
            reason=measurement.failure or (reason(parity) if parity else None),
            params={**params, "system": decoder.name, "budget": arms[name].budget},
            parity=parity,
            metrics=metrics,
            timing=measurement.timing,
        )
