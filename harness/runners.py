"""Decoding measured: plain, chain and trees on the same prompts in turns, every output checked against plain decoding.

A sample is one prompt, so that acceptance, output and time come from the same decodings. Prompts whose output loops
(fewer than 0.8 distinct 8-grams) get rows of their own, under "<case>/looping": looping text inflates every speed-up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from datasets.evaluation import prompts
from datasets.evaluation.measure import sampling as prompt_sampling
from datasets.evaluation.prompts import Prompt
from datasets.evaluation.statistics import LOOPING_BELOW, distinct_ratio
from harness import stats, timing
from harness.cases import AR, GPU, Arm, Chosen, Decode, digest
from harness.environment import CHECKOUT
from harness.gpu_builders import NoGpuError
from harness.parity import (
    Check,
    Decoding,
    check_accepted,
    check_tokens,
    check_tree,
    combine,
    reason,
    target_margin,
)
from harness.records import RecordedTree, Row, Scalar, Timing
from harness.systems import Bench, Decoder
from harness.timing import Stages, interleave, staged_timing
from reference.loop import Generation, Options, Round, tau
from reference.sampling import SamplingParams, choice_margins, choose_rows

TREE_BUDGETS = (16, 64)  # whose rounds are stored for looking at
STAGED_TRIES = 3  # a neighbour may disturb the moments between two stages, but not each time


@dataclass(frozen=True)
class Unit:
    """One prompt of a case."""

    prompt: Prompt
    sampling: SamplingParams


def units(case: Decode, seed: int) -> list[Unit]:
    """The prompts of a case with their draws; `seed` shifts those of every prompt."""
    chosen = prompts.subset(prompts.load(case.set), case.prompts)
    draws = [prompt_sampling(prompt, case.temperature) for prompt in chosen]
    return [Unit(p, replace(d, seed=(d.seed + seed) % 2**64)) for p, d in zip(chosen, draws, strict=True)]


def rows(bench: Bench, chosen: Chosen, progress: Callable[[float], None] = lambda _: None) -> Iterator[Row]:
    """The rows of a decoding case. progress(share) is called while it runs."""
    case = chosen.case
    assert isinstance(case, Decode)
    params = params_of(case)
    try:
        pair = bench.pair
    except FileNotFoundError as error:
        yield from bench.not_run(case, "decode", chosen.arms, str(error), params=params)
        return
    held = units(case, bench.seed)
    draws = [(unit.sampling.seed if case.temperature else 0) for unit in held]
    case_hash = digest(case, pair.digest, *(unit.prompt.tokens for unit in held), *draws)
    native = {f"{GPU}-{arm.name}": arm for arm in case.decodings}
    expected = [arm for arm in chosen.arms if arm != GPU]
    if GPU in chosen.arms and bench.engine is not None:
        expected += native
    if bench.is_done(replace(chosen, arms=tuple(expected)), case_hash):
        return
    arms = {arm.name: arm for arm in case.decodings if arm == AR or arm.name in chosen.arms}
    truth: dict[int, Generation] | None = None
    if arms.keys() != {AR.name} or AR.name in chosen.arms:
        run = Run(bench, case, case_hash, params, held, arms, bench.decoder)
        yield from run.rows(progress)
        truth = run.found[AR.name]
    if GPU not in chosen.arms:
        return
    try:
        decoder = bench.need_engine()
        if truth is None:
            truth = {i: _decode(bench, bench.decoder, case, AR, unit) for i, unit in enumerate(held)}
        if len(truth) < len(held):
            raise NoGpuError("plain decoding by the reference failed")
    except NoGpuError as error:
        yield from bench.not_run(case, "decode", [GPU], str(error), case_hash=case_hash, params=params)
        return
    yield from Run(bench, case, case_hash, params, held, native, decoder, truth).rows(progress)


def params_of(case: Decode) -> dict[str, Scalar]:
    """What all rows of a case share."""
    return {
        "dataset": case.set,
        "block_size": case.block_size,
        "depth_limit": case.block_size - 1,
        "temperature": case.temperature,
        "max_new_tokens": case.max_new_tokens,
        "batch": 1,
    }


def loops(tokens: Sequence[int]) -> bool:
    """Whether an output is looping text."""
    return distinct_ratio(tokens) < LOOPING_BELOW


def _decode(bench: Bench, decoder: Decoder, case: Decode, arm: Arm, unit: Unit) -> Generation:
    return decoder.decode(arm, unit.prompt.tokens, case.block_size, options_of(bench, case, unit))


def options_of(bench: Bench, case: Decode, unit: Unit) -> Options:
    return {
        "max_new_tokens": case.max_new_tokens,
        "sampling": unit.sampling,
        "stop_tokens": bench.pair.stop_tokens,
    }


class Run:
    """The measurement of one case by one decoder: arms by the names of their rows, the first of them plain decoding.

    truth: what the reference decodes, by prompt; None where `decoder` is the reference, whose plain decoding is then
    checked against one pass over the whole output.
    """

    def __init__(
        self,
        bench: Bench,
        case: Decode,
        case_hash: str,
        params: Mapping[str, Any],
        held: Sequence[Unit],
        arms: Mapping[str, Arm],
        decoder: Decoder,
        truth: Mapping[int, Generation] | None = None,
    ):
        self.bench, self.case, self.case_hash, self.params, self.held, self.arms = (
            bench,
            case,
            case_hash,
            {**params, "system": decoder.name},
            held,
            arms,
        )
        self.decoder, self.truth, self.base = decoder, truth, next(iter(arms))
        self.found: dict[str, dict[int, Generation]] = {name: {} for name in arms}

    def rows(self, progress: Callable[[float], None]) -> Iterator[Row]:
        now = [0]

        def begin(number: int) -> None:
            now[0] = number
            progress(number / len(self.held))

        def keep(name: str, _: int, result: Generation) -> None:
            self.found[name][now[0]] = result

        measured = interleave(
            {name: self._call(name, now) for name in self.arms},
            samples=len(self.held),
            clock=self.decoder.clock,
            launch=self.decoder.launch,
            reader=self.decoder.reader,
            begin=begin,
            inspect=keep,
            seconds=lambda result: float(result.decode_seconds),
            sample="prompt",
        )
        if measured[self.base].failure is not None:
            for name, arm in measured.items():
                why = arm.failure or f"plain decoding failed: {measured[self.base].failure}"
                yield self._row(name, reason=why, timing=arm.timing)
            return
        ratios = {i: distinct_ratio(result.tokens) for i, result in self.found[self.base].items()}
        good = [i for i in ratios if ratios[i] >= LOOPING_BELOW]
        looping = [i for i in ratios if ratios[i] < LOOPING_BELOW]
        for suffix, numbers in (("", good), ("/looping", looping)):
            if not numbers and suffix:
                continue
            for name, arm in measured.items():
                if arm.failure is not None:
                    yield self._row(name, suffix, reason=arm.failure, timing=arm.timing)
                elif not numbers:
                    why = f"the outputs of all {len(looping)} prompts loop"
                    yield self._row(name, suffix, reason=why, not_run=True)
                else:
                    yield self._measured_row(name, suffix, numbers, ratios, measured)
        yield from self._staged(measured)

    def _call(self, name: str, now: list[int]) -> Callable[[], Generation]:
        return lambda: self._decode(name, now[0])

    def _decode(self, name: str, i: int) -> Generation:
        """One prompt, as it is timed."""
        return _decode(self.bench, self.decoder, self.case, self.arms[name], self.held[i])

    def _true(self, i: int) -> tuple[int, ...]:
        """The tokens that every arm must give."""
        return (self.truth[i] if self.truth is not None else self.found[self.base][i]).tokens

    def _measured_row(
        self,
        name: str,
        suffix: str,
        numbers: Sequence[int],
        ratios: Mapping[int, float],
        measured: Mapping[str, timing.Arm],
    ) -> Row:
        """The row of one arm over some of the prompts."""
        results = [self.found[name][i] for i in numbers]
        checks = [check for i in numbers for check in self._checks(name, i)]
        truth = "one pass over the whole output" if self.truth is None and name == self.base else AR.name
        label = f"{self.case.id}{suffix}-{name}".replace("/", "-")
        parity = combine(truth, checks, self.bench.folder, label)
        samples = _some(measured[name].timing, measured[name].numbers, numbers)
        base = _some(measured[self.base].timing, measured[self.base].numbers, numbers)
        metrics, nulls = self._metrics(name, results, samples, base)
        metrics |= {"distinct8": float(np.mean([ratios[i] for i in numbers])), "prompts": len(numbers)}
        return self._row(
            name,
            suffix,
            reason=reason(parity),
            parity=parity,
            metrics=metrics,
            nulls=nulls,
            timing=samples,
            depth_histogram=_histogram(results, self.case.block_size),
            trees=self._trees(name, numbers[0]) if not suffix else (),
        )

    def _row(self, name: str, suffix: str = "", **fields: Any) -> Row:
        arm = self.arms[name]
        return self.bench.row(
            self.case,
            self.case_hash,
            "decode",
            name,
            name=self.case.id + suffix,
            against=None if name == self.base else self.base,
            params={**self.params, "budget": arm.budget, "looping": bool(suffix)},
            **fields,
        )

    def _checks(self, name: str, i: int) -> Iterator[Check]:
        """Tokens against plain decoding, accepted counts against the true output, trees against the reference's."""
        unit, result, truth = self.held[i], self.found[name][i], self._true(i)
        target = self.bench.pair.target
        label = unit.prompt.id
        if self.truth is None and name == self.base:
            yield check_one_pass(label, target, unit.prompt.tokens, truth, unit.sampling)
            return
        tokens = check_tokens(
            label,
            truth,
            result.tokens,
            seed=unit.sampling.seed,
            accepted=[r.accepted for r in result.rounds],
            margin=target_margin(target, unit.prompt.tokens, np.array(truth), unit.sampling),
            decoding=Decoding(
                unit.prompt.tokens,
                _relative(self.bench),
                sampling=unit.sampling,
                stop_tokens=tuple(sorted(self.bench.pair.stop_tokens)),
            ),
        )
        yield tokens
        # Where rounding turned a choice, all that follows is another true output: the one that was decoded.
        yield check_accepted(label, result.tokens if tokens.near else truth, result.rounds, seed=unit.sampling.seed)
        for number, done in enumerate(result.rounds):
            if done.trace is not None and done.trace.lists is not None:
                lists, tree = done.trace.lists, done.trace.tree
                budget = self.arms[name].budget or done.depth_limit
                yield check_tree(
                    label, tree, lists.lp, lists.ids, budget, int(tree.tokens[0]), round=number, seed=unit.sampling.seed
                )

    def _metrics(
        self, name: str, results: Sequence[Generation], samples: Timing, base: Timing
    ) -> tuple[dict[str, float | int | None], dict[str, str]]:
        rounds = [r for result in results for r in result.rounds]
        decode_s = sum(s for s in samples.samples_s if s is not None)
        tokens = sum(len(result.tokens) for result in results)
        means = [result.tau for result in results if result.rounds]
        staged = self._staged_rounds(name, rounds)
        draft, verify = (_mean_stage(staged, stage) for stage in ("draft", "verify"))
        numbers = {
            "tau": stats.Number(tau(rounds)),
            "tau_mean": stats.Number(float(np.mean(means)) if means else None, "no rounds"),
            "tokens_per_s": stats.ratio(tokens, decode_s),
            "tpot_s": stats.ratio(decode_s, tokens),
            "ttft_s": stats.Number(float(np.median([result.prefill_seconds for result in results]))),
            "nodes_per_round": stats.ratio(sum(r.nodes for r in rounds), len(rounds)),
            "draft_s": draft,
            "verify_s": verify,
        }
        faster = stats.times_faster(base, samples)
        step = stats.ratio(sum(s for s in base.samples_s if s is not None), tokens)
        numbers["loop_efficiency"] = stats.loop_efficiency(
            faster.value, tau(rounds), step.value, draft.value, verify.value
        )
        metrics: dict[str, float | int | None] = {"rounds": len(rounds), "tokens": tokens}
        metrics |= {key: number.value for key, number in numbers.items()}
        nulls = {f"metrics.{n}": v.reason or "not finite" for n, v in numbers.items() if v.value is None}
        return metrics, nulls

    def _staged_rounds(self, name: str, rounds: Sequence[Round]) -> Sequence[Round]:
        """Rounds of an arm that tell their time by stage, if any do."""
        return rounds

    def _staged(self, measured: Mapping[str, timing.Arm]) -> Iterator[Row]:
        """One more decoding of the first prompt for each staged arm, its time split into stages."""
        for name, arm in self.arms.items():
            if replace(arm, heap=False).name not in self.case.staged or measured[name].failure is not None:
                continue
            result, stages = self._split(name)
            unit, truth = self.held[0], self._true(0)
            margin = target_margin(self.bench.pair.target, unit.prompt.tokens, np.array(truth), unit.sampling)
            check = check_tokens(unit.prompt.id, truth, result.tokens, seed=unit.sampling.seed, margin=margin)
            parity = combine(AR.name, [check])
            yield self.bench.row(
                self.case,
                self.case_hash,
                "stage",
                name,
                name=self.case.id.replace("decode/", "stage/", 1),
                against=None if name == self.base else self.base,
                reason=reason(parity) or stages.problem,
                params={**self.params, "budget": self.arms[name].budget},
                parity=parity,
                metrics={"rounds": len(result.rounds), "tokens": len(result.tokens)},
                timing=replace(staged_timing(stages, self.decoder.clock.method), launch=self.decoder.launch),
                stages=stages.seconds,
            )

    def _split(self, name: str) -> tuple[Generation, Stages]:
        """The first prompt decoded, and its time by stage; anew where something else than a stage took time."""
        arm = self.arms[name]
        options = options_of(self.bench, self.case, self.held[0])
        for _ in range(STAGED_TRIES):
            result, stages = self.decoder.split(arm, self.held[0].prompt.tokens, self.case.block_size, options)
            if stages.problem is None:
                break
        return result, stages

    def _trees(self, name: str, i: int) -> tuple[RecordedTree, ...]:
        """The first round of a prompt, and the one that accepted most."""
        if self.arms[name].budget not in TREE_BUDGETS:
            return ()
        done = self._with_traces(name, i).rounds
        best = max(range(len(done)), key=lambda n: done[n].accepted, default=0)
        return tuple(self._tree(i, n, done[n]) for n in sorted({0, best}) if n < len(done) and done[n].trace)

    def _with_traces(self, name: str, i: int) -> Generation:
        """A decoding whose rounds can be looked at."""
        return self.found[name][i]

    def _tree(self, i: int, number: int, done: Round) -> RecordedTree:
        assert done.trace is not None
        tree, text = done.trace.tree, self.bench.text
        return RecordedTree(
            prompt=self.held[i].prompt.id,
            round=number,
            tokens=tuple(tree.tokens.tolist()),
            texts=tuple(text(token) for token in tree.tokens.tolist()),
            parents=tuple(tree.parents.tolist()),
            depths=tuple(tree.depths.tolist()),
            scores=tuple(tree.scores.tolist()),
            accepted=done.path,
            bonus=done.trace.bonus,
            bonus_text=text(done.trace.bonus),
        )


def check_one_pass(
    unit: str, target: Any, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingParams
) -> Check:
    """Plain decoding against one causal pass over prompt and output: other row counts, the same choices."""
    whole = np.array([*prompt, *tokens[:-1]], np.int32)
    first = len(prompt) - 1
    logits = target.forward(whole, target.new_cache(len(whole))).logits[first:, : target.vocab_size]
    positions = np.arange(first, len(whole))
    expected = choose_rows(logits, sampling, positions)
    return check_tokens(
        unit,
        expected,
        tokens,
        seed=sampling.seed,
        margin=lambda i: float(choice_margins(logits[i : i + 1], sampling, positions[i : i + 1])[0]),
    )


def _mean_stage(rounds: Sequence[Round], stage: str) -> stats.Number:
    """Mean seconds of a stage in whole decodings."""
    if not all(stage in r.seconds for r in rounds):
        return stats.Number(None, "its stages are timed in runs of their own")
    return stats.Number(sum(r.seconds[stage] for r in rounds) / max(len(rounds), 1))


def _some(whole: Timing, numbers: Sequence[int], wanted: Sequence[int]) -> Timing:
    """The samples of some of the prompts."""
    samples = dict(zip(numbers, whole.samples_s, strict=True))
    return replace(whole, samples_s=tuple(samples[i] for i in wanted))


def _histogram(results: Sequence[Generation], block_size: int) -> tuple[int, ...]:
    accepted = [r.accepted for result in results for r in result.rounds]
    return tuple(int(n) for n in np.bincount(np.array(accepted, np.int64), minlength=block_size))


def _relative(bench: Bench) -> str:
    """The target's file, relative to the checkout, as a divergence names it."""
    return Path(os.path.relpath(bench.models / "target.kdtr", CHECKOUT)).as_posix()
