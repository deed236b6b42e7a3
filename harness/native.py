"""The engine's decodings alone, in a number type: every arm against its own plain decoding, token for token.

Decodings that are timed keep no traces; the first prompt is decoded once more with them, and by stages. What plain
decoding says is held against one pass of the reference, whose sums are rounded in another order or to another type:
where they part, the reference must have wavered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from harness import runners
from harness.cases import AR, GPU, Arm, Chosen, Native, digest
from harness.gpu_builders import NoGpuError
from harness.parity import MARGIN, Check, check_accepted, check_choices, check_tokens, check_tree
from harness.records import Row, Scalar
from harness.systems import Bench, NativeDecoder
from harness.timing import Stages
from reference.loop import Generation, Round
from reference.sampling import choice_margins, choose_rows

# Of the reference's choices that an engine of this type may turn. The shipped pair's in bf16 did up to 0.08.
MARGINS = {"float32": MARGIN, "bfloat16": 0.25}


def rows(bench: Bench, chosen: Chosen, progress: Callable[[float], None] = lambda _: None) -> Iterator[Row]:
    """The rows of the engine in the case's number type; one that says why where there is no GPU."""
    case = chosen.case
    assert isinstance(case, Native)
    params = {**runners.params_of(case), "dtype": case.dtype}
    try:
        pair, decoder = bench.pair, bench.need_engine().of(case.dtype, case.graphs)
    except (FileNotFoundError, NoGpuError) as error:
        yield from bench.not_run(case, "decode", [GPU], str(error), params=params)
        return
    held = runners.units(case, bench.seed)
    draws = [(unit.sampling.seed if case.temperature else 0) for unit in held]
    case_hash = digest(case, pair.digest, *(unit.prompt.tokens for unit in held), *draws)
    if bench.is_done(chosen, case_hash):
        return
    arms = {f"{GPU}-{arm.name}": arm for arm in case.decodings}
    wanted = {name: arm for name, arm in arms.items() if arm == AR or name in chosen.arms}
    yield from _Run(bench, case, case_hash, params, held, wanted, decoder).rows(progress)


class _Run(runners.Run):
    """As of the reference, whose place as the truth is taken by the engine's plain decoding."""

    def __init__(
        self,
        bench: Bench,
        case: Native,
        case_hash: str,
        params: Mapping[str, Scalar],
        held: Sequence[runners.Unit],
        arms: Mapping[str, Arm],
        decoder: NativeDecoder,
    ):
        super().__init__(bench, case, case_hash, params, held, arms, decoder)
        self._native = decoder
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
                yield check_tree(label, tree, lists.lp, lists.ids, budget, root, round=number, seed=seed)
