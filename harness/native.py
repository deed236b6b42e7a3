"""The engine's decodings alone, in a number type: every arm against its own plain decoding, token for token.

Prompts are taken whose plain decoding does not loop. Decodings that are timed keep no traces; the first prompt is
decoded once more with them, and by stages. What plain decoding says is held against one pass of the reference, whose
sums are rounded in another order or to another type: where they part, the reference must have wavered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from datasets.evaluation import prompts
from engine.abi import EngineError, RequestError
from harness import runners
from harness.cases import AR, GPU, Arm, Chosen, Native, digest
from harness.gpu_builders import NoGpuError
from harness.gpu_decoder import Timed
from harness.parity import MARGIN, Check, check_accepted, check_choices, check_tokens, check_tree
from harness.records import Row, Scalar, Timing
from harness.systems import Bench, NativeDecoder
from harness.timing import Stages
from reference.loop import Generation, Round
from reference.sampling import choice_margins, choose_rows

# Of the reference's choices that an engine of this type may turn. The shipped pair's in bf16 did up to 0.301, in
# GSM8K's prompt 552, where the reference's own emulation of bf16 turns it too.
MARGINS = {"float32": MARGIN, "bfloat16": 0.5}
COST_BUDGETS = (1, 3, 7, 15, 31, 63, 127)  # whose rounds are measured for the policy


def rows(bench: Bench, chosen: Chosen, progress: Callable[[float], None] = lambda _: None) -> Iterator[Row]:
    """The rows of the engine in the case's number type; one that says why where there is no GPU."""
    case = chosen.case
    assert isinstance(case, Native)
    params = {**runners.params_of(case), "dtype": case.dtype, **({"budgets": "by the policy"} if case.policy else {})}
    try:
        pair, decoder = bench.pair, bench.need_engine().of(case.dtype, case.graphs)
    except (FileNotFoundError, NoGpuError) as error:
        yield from bench.not_run(case, "decode", [GPU], str(error), params=params)
        return
    pool = units(case, bench.seed)
    draws = [(unit.sampling.seed if case.temperature else 0) for unit in pool]
    case_hash = digest(case, pair.digest, *(unit.prompt.tokens for unit in pool), *draws)
    if bench.is_done(chosen, case_hash):
        return
    arms = {f"{GPU}-{arm.name}": arm for arm in case.decodings}
    arms = {name: arm for name, arm in arms.items() if arm == AR or name in chosen.arms}

    def decode(arm: Arm, unit: runners.Unit) -> Generation:
        options = runners.options_of(bench, case, unit)
        return decoder.decode(arm, unit.prompt.tokens, case.block_size, options, keep_traces=False)

    try:
        held, looping = _sound(case.prompts, pool, lambda unit: decode(AR, unit))
        if not held:
            why = f"the outputs of all {len(looping)} prompts loop"
            yield from bench.not_run(case, "decode", list(arms), why, case_hash=case_hash, params=params)
            return
        if case.policy:
            costs = _costs(max(case.budgets), lambda arm: decode(arm, held[0]))
            arms = {name: replace(arm, costs=costs) if arm.budget else arm for name, arm in arms.items()}
    except (EngineError, RequestError) as error:
        for name in arms:
            yield bench.row(case, case_hash, "decode", name, reason=f"before its turns: {error}", params=params)
        return
    yield from _Run(bench, case, case_hash, params, held, len(looping), arms, decoder).rows(progress)


def units(case: Native, seed: int) -> list[runners.Unit]:
    """All prompts of the set with their draws, in an order of chance that is always the same."""
    count = len(prompts.load(case.set))
    found = runners.units(replace(case, prompts=count), seed)
    return [found[i] for i in np.random.default_rng(0).permutation(count).tolist()]


def _sound(
    count: int, pool: Sequence[runners.Unit], decode: Callable[[runners.Unit], Generation]
) -> tuple[list[runners.Unit], list[runners.Unit]]:
    """The first `count` of the pool whose plain decoding does not loop, and those before them whose does."""
    sound: list[runners.Unit] = []
    looping: list[runners.Unit] = []
    for unit in pool:
        if len(sound) == count:
            break
        (looping if runners.loops(decode(unit).tokens) else sound).append(unit)
    return sound, looping


def _costs(most: int, decode: Callable[[Arm], Generation]) -> tuple[tuple[int, float], ...]:
    """Rows of a round's verify pass with the mean seconds of such rounds, by the host's clock: up to `most` nodes."""
    costs = []
    for budget in sorted({*(b for b in COST_BUDGETS if b < most), most}):
        made = decode(Arm("ddtree", budget))
        costs.append((budget + 1, sum(r.wall_seconds for r in made.rounds) / len(made.rounds)))
    return tuple(costs)


class _Run(runners.Run):
    """As of the reference, whose place as the truth is taken by the engine's plain decoding."""

    def __init__(
        self,
        bench: Bench,
        case: Native,
        case_hash: str,
        params: Mapping[str, Scalar],
        held: Sequence[runners.Unit],
        looping: int,
        arms: Mapping[str, Arm],
        decoder: NativeDecoder,
    ):
        """looping: prompts that were left out."""
        super().__init__(bench, case, case_hash, params, held, arms, decoder)
        self._native, self._looping = decoder, looping
        self._traced: dict[tuple[str, int], Generation] = {}
        self._stages: dict[str, tuple[Generation, Stages]] = {}

    def _decode(self, name: str, i: int, keep_traces: bool = False) -> Generation:
        unit = self.held[i]
        options = runners.options_of(self.bench, self.case, unit)
        tokens, block = unit.prompt.tokens, self.case.block_size
        return self._native.decode(self.arms[name], tokens, block, options, keep_traces=keep_traces)

    def _with_traces(self, name: str, i: int) -> Generation:
        if (name, i) not in self._traced:
            self._traced[name, i] = self._decode(name, i, keep_traces=True)
        return self._traced[name, i]

    def _split(self, name: str) -> tuple[Generation, Stages]:
        if name not in self._stages:
            self._stages[name] = super()._split(name)
        return self._stages[name]

    def _staged_rounds(self, name: str, rounds: Sequence[Round]) -> Sequence[Round]:
        """Those of the first prompt, in a run of their own: timed runs keep no stages."""
        return self._split(name)[0].rounds

    def _metrics(
        self, name: str, results: Sequence[Generation], samples: Timing, base: Timing
    ) -> tuple[dict[str, float | int | None], dict[str, str]]:
        metrics, nulls = super()._metrics(name, results, samples, base)
        return {**metrics, "looping_left_out": self._looping, **_predicted(results)}, nulls

    def _checks(self, name: str, i: int) -> Iterator[Check]:
        unit, result, truth = self.held[i], self.found[name][i], self._true(i)
        if name == self.base:
            yield self._one_pass(i)
            return
        accepted = [r.accepted for r in result.rounds]
        yield check_tokens(unit.prompt.id, truth, result.tokens, seed=unit.sampling.seed, accepted=accepted)
        if i == min(self.found[name]):
            yield from self._check_rounds(name, i)

    def _one_pass(self, i: int) -> Check:
        unit, truth, target = self.held[i], self._true(i), self.bench.pair.target
        whole = np.array([*unit.prompt.tokens, *truth[:-1]], np.int32)
        first = len(unit.prompt.tokens) - 1
        logits = target.forward(whole, target.new_cache(len(whole))).logits[first:, : target.vocab_size]
        positions = np.arange(first, len(whole))
        expected = choose_rows(logits, unit.sampling, positions)
        margins = choice_margins(logits, unit.sampling, positions)
        return check_choices(
            unit.prompt.id, expected, truth, margins, MARGINS[self._native.dtype], seed=unit.sampling.seed
        )

    def _check_rounds(self, name: str, i: int) -> Iterator[Check]:
        """Of the decoding with traces: its tokens, what its rounds accepted, and their trees by the reference."""
        unit, traced, truth = self.held[i], self._with_traces(name, i), self._true(i)
        label, seed = unit.prompt.id, unit.sampling.seed
        yield check_tokens(label, truth, traced.tokens, seed=seed)
        yield check_accepted(label, truth, traced.rounds, seed=seed)
        for number, done in enumerate(traced.rounds):
            if done.trace is not None and done.trace.lists is not None:
                lists, tree = done.trace.lists, done.trace.tree
                budget, root = self.arms[name].budget or done.depth_limit, int(tree.tokens[0])
                if isinstance(traced, Timed) and (chosen := traced.predictions[number]) is not None:
                    budget = chosen.budget
                yield check_tree(label, tree, lists.lp, lists.ids, budget, root, round=number, seed=seed)


def _predicted(results: Sequence[Generation]) -> dict[str, float | int | None]:
    """Of the rounds of which a policy expected something: tokens and seconds of a round, as expected and as found."""
    pairs = [
        (expected, done)
        for result in results
        if isinstance(result, Timed)
        for expected, done in zip(result.predictions, result.rounds, strict=True)
        if expected is not None and expected.tokens is not None and expected.seconds is not None
    ]
    if not pairs:
        return {}
    return {
        "predicted_tokens": float(np.mean([expected.tokens for expected, _ in pairs])),
        "round_tokens": float(np.mean([1 + done.accepted for _, done in pairs])),
        "predicted_s": float(np.mean([expected.seconds for expected, _ in pairs])),
        "round_s": float(np.mean([done.wall_seconds for _, done in pairs])),
    }
