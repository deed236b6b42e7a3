"""Decoding: plain (AR), with a chain (DFlash), with a tree (DDTree). The three loops stand side by side at the end.

Bookkeeping, the same for all. The prompt's P rows are committed first; the target's choice after them is the first
root token. A round starts with a root that is chosen but not yet in the cache, runs the target over the root and the
drafted nodes, walks along the target's own choices, and commits the a+1 rows of the root and the accepted nodes. The
choice after the last accepted node, the bonus token, is the next root. So a round outputs a+1 tokens, the bonus token
comes out with the next round, and 24 tokens with block 8 and right proposals take 3 rounds: tau = 1 + 21/3 = 8.
Sources: DDTree (arXiv 2604.12989), DFlash (arXiv 2602.06036).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Required, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reference.accept import Accepted, accept
from reference.cache import CapacityError, LatentCache
from reference.drafter import Drafter
from reference.sampling import GREEDY, SamplingParams, choose, choose_rows
from reference.topk import TopK, topk_logprob
from reference.tree import Tree, build_tree

DEFAULT_BUDGET = 64
STAGES = ("draft", "tree_build", "tree_compile", "verify", "commit")


class TargetOutput(Protocol):
    @property
    def logits(self) -> NDArray[Any]:
        """[N, >= vocab_size]"""

    @property
    def features(self) -> NDArray[Any]:
        """[N, len(taps) * hidden]"""


class Target(Protocol):
    """What the loops need of a target; reference.model.Model is one."""

    @property
    def vocab_size(self) -> int: ...

    def new_cache(self, capacity: int) -> LatentCache: ...

    def forward(
        self,
        tokens: NDArray[np.int32],
        cache: LatentCache,
        *,
        positions: NDArray[np.int32] | None = None,
        visibility: NDArray[np.bool_] | None = None,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        """Runs N rows behind the committed ones, writes their scratch rows, commits nothing."""


class Options(TypedDict, total=False):
    """Keyword arguments of the three loops."""

    max_new_tokens: Required[int]
    budget: int  # DDTree's non-root nodes per round, default DEFAULT_BUDGET
    sampling: SamplingParams  # default greedy
    stop_tokens: Collection[int]
    capacity: int | None  # cache rows; default: room for the prompt, the new tokens and a whole tree
    on_tokens: Callable[[tuple[int, ...]], None] | None  # called with each round's tokens once they are committed
    keep_traces: bool  # fill Round.trace
    request: int  # named in errors
    clock: Callable[[], float]  # tells seconds; default time.perf_counter


@dataclass(frozen=True, eq=False)
class Trace:
    """What one round saw: `lists` (None without proposals), `tree`, the target's `choices` int32 [1+n], and `bonus`."""

    lists: TopK | None
    tree: Tree
    choices: NDArray[np.int32]
    bonus: int


@dataclass(frozen=True)
class Round:
    """prefix_length: rows committed before it, also the root's position. nodes: n. depth_limit: deepest depth that may
    be drafted. path: nodes whose rows were committed, the root (0) first. ranks: those of path[1:]. seconds: by stage;
    what they leave of wall_seconds is bookkeeping. trace: on request."""

    prefix_length: int
    nodes: int
    depth_limit: int
    path: tuple[int, ...]
    ranks: tuple[int, ...]
    seconds: dict[str, float]
    wall_seconds: float
    trace: Trace | None = None

    @property
    def accepted(self) -> int:
        """a: committed draft nodes, also the depth of the last one."""
        return len(self.path) - 1

    @property
    def moved_rows(self) -> int:
        """Committed rows that compaction had to move."""
        return sum(node != place for place, node in enumerate(self.path))


@dataclass(frozen=True)
class Generation:
    """tokens: the output, prompt excluded, a stop token included. finish_reason: "stop", "length" or "capacity".
    cache_length: committed rows at the end, prompt included."""

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]
    finish_reason: str
    prefill_seconds: float
    cache_length: int

    @property
    def decode_seconds(self) -> float:
        """All rounds from end to end, prefill excluded."""
        return sum(r.wall_seconds for r in self.rounds)

    @property
    def tau(self) -> float:
        """Acceptance length; NaN without rounds."""
        return tau(self.rounds)


def tau(rounds: Iterable[Round]) -> float:
    """1 + accepted / rounds, pooled over all rounds given; NaN for none."""
    accepted = [r.accepted for r in rounds]
    return 1 + sum(accepted) / len(accepted) if accepted else float("nan")


class _Request:
    """State of one request between rounds, and what the three loops share: prefill, commit, records."""

    def __init__(self, target: Target, drafter: Drafter | None, prompt: ArrayLike, budget: int, options: Options):
        if unknown := options.keys() - Options.__annotations__.keys():
            raise TypeError(f"unknown options {sorted(unknown)}, there are {sorted(Options.__annotations__)}")
        wanted, self.number = options["max_new_tokens"], options.get("request", 0)
        given = np.asarray(prompt)
        if given.ndim != 1 or given.size == 0 or not np.issubdtype(given.dtype, np.integer):
            got = f"{given.dtype} {list(given.shape)}"
            raise ValueError(f"request {self.number}: the prompt must be integers [P], P at least 1, got {got}")
        if wanted < 0 or budget < 0:
            raise ValueError(f"request {self.number}: max_new_tokens {wanted} and budget {budget} must be at least 0")
        tokens = given.astype(np.int32)
        capacity = options.get("capacity")
        if capacity is None:
            capacity = len(tokens) + wanted + budget
        if len(tokens) > capacity:
            raise CapacityError(f"request {self.number}: the prompt", needed=len(tokens), available=capacity)
        # Every output token gets a cache row, so the room behind the prompt bounds the output like max_new_tokens does.
        self.limit = min(wanted, capacity - len(tokens))
        self.finish_reason = "length" if wanted <= self.limit else "capacity"  # unless a stop token comes first
        self.sampling: SamplingParams = options.get("sampling", GREEDY)
        self.stop_tokens = frozenset(options.get("stop_tokens", ()))
        self.on_tokens, self.keep_traces = options.get("on_tokens"), options.get("keep_traces", False)
        self.vocab_size = target.vocab_size
        self.output: list[int] = []
        self.rounds: list[Round] = []

        self.now: Callable[[], float] = options.get("clock", time.perf_counter)
        started = self.now()
        self.cache = target.new_cache(capacity)
        result = target.forward(tokens, self.cache, taps=drafter.taps if drafter else ())
        last_row, last = result.logits[-1, : self.vocab_size], len(tokens) - 1
        self.root = choose(last_row, self.sampling, last, request=self.number)
        self.cache.commit(np.arange(len(tokens)))
        if drafter:
            drafter.reset(tokens)
            drafter.observe(tokens, result.features)
        self.prefill_seconds = self.now() - started
        if self.limit and self.root in self.stop_tokens:
            self._output([self.root], stopped=True)

    @property
    def wanted(self) -> int:
        """Tokens still to output, the root among them. Never more than the free cache rows."""
        return self.limit - len(self.output)

    def lists(self, drafter: Drafter, depth_limit: int, k: int, clock: _Clock) -> TopK:
        """Best k proposals for each of at most `depth_limit` depths, within the target's vocabulary."""
        if depth_limit == 0 or k == 0:
            return _NO_LISTS
        with clock.stage("draft"):
            logits = drafter.propose(self.root, depth_limit)
        if len(logits) > depth_limit:
            raise ValueError(f"request {self.number}: {len(logits)} depths proposed, at most {depth_limit} asked for")
        with clock.stage("tree_build"):
            # The contract's lists start from float32; a drafter may compute wider.
            narrow = logits.astype(np.float32) if logits.dtype == np.float64 else logits
            return topk_logprob(narrow, k, min(self.vocab_size, logits.shape[1]), request=self.number)

    def choices(self, result: TargetOutput, positions: NDArray[Any]) -> NDArray[np.int32]:
        """The target's choice after each row, int32 [N]."""
        return choose_rows(result.logits[:, : self.vocab_size], self.sampling, positions)

    def commit(self, tree: Tree, accepted: Accepted) -> NDArray[np.int32]:
        """Keep the cache rows of the accepted path, up to its first stop token; the bonus token is the next root."""
        tokens = tree.tokens[accepted.nodes].tolist()
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.stop_tokens), len(tokens))
        self.cache.commit(accepted.nodes[:end])
        self.root = accepted.bonus
        return accepted.nodes[:end]

    def end_round(
        self,
        clock: _Clock,
        depth_limit: int,
        lists: TopK | None,
        tree: Tree,
        choices: NDArray[np.int32],
        path: NDArray[np.int32],
    ) -> None:
        """Record the round, output its tokens, and the bonus token too if that ends the output."""
        self.rounds.append(
            Round(
                prefix_length=self.cache.length - len(path),
                nodes=tree.node_count,
                depth_limit=depth_limit,
                path=tuple(path.tolist()),
                ranks=tuple(tree.ranks[path[1:]].tolist()),
                seconds=clock.seconds,
                wall_seconds=clock.now() - clock.started,
                trace=Trace(lists, tree, choices, self.root) if self.keep_traces else None,
            )
        )
        tokens = tree.tokens[path].tolist()
        stopped = tokens[-1] in self.stop_tokens
        # A bonus token that stops needs no row and no round of its own: nothing will attend to it.
        if not stopped and len(tokens) < self.wanted and self.root in self.stop_tokens:
            tokens, stopped = [*tokens, self.root], True
        self._output(tokens, stopped)

    def _output(self, tokens: list[int], stopped: bool) -> None:
        self.output += tokens
        if stopped:
            self.finish_reason, self.limit = "stop", len(self.output)
        if self.on_tokens:
            self.on_tokens(tuple(tokens))

    def generation(self) -> Generation:
        output, rounds = tuple(self.output), tuple(self.rounds)
        return Generation(output, rounds, self.finish_reason, self.prefill_seconds, self.cache.length)


class _Clock:
    """Seconds by stage of one round; a stage may be entered more than once."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.now = now
        self.started = now()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = self.now()
        yield
        self.seconds[name] += self.now() - started


_NO_LISTS = TopK(np.empty((0, 0), np.int32), np.empty((0, 0), np.float32), np.empty(0, np.float32))


def ar_generate(target: Target, drafter: Drafter | None, prompt: ArrayLike, **options: Unpack[Options]) -> Generation:
    """Plain decoding, one token a round. `drafter` and `budget` are not used."""
    request = _Request(target, None, prompt, 0, options)
    while request.wanted:
        clock = _Clock(request.now)
        tree = build_tree(_NO_LISTS.lp, _NO_LISTS.ids, 0, request.root)
        with clock.stage("verify"):
            result = target.forward(tree.tokens, request.cache)
            choices = request.choices(result, tree.positions(request.cache.length))
        with clock.stage("commit"):
            path = request.commit(tree, accept(tree.tokens, tree.parents, choices, request=request.number))
        request.end_round(clock, 0, None, tree, choices, path)
    return request.generation()


def chain_generate(target: Target, drafter: Drafter, prompt: ArrayLike, **options: Unpack[Options]) -> Generation:
    """DFlash: one chain a round, the drafter's best token at every depth. `budget` is not used."""
    request = _Request(target, drafter, prompt, 0, options)
    while request.wanted:
        clock = _Clock(request.now)
        depth_limit = min(drafter.block_size, request.wanted) - 1
        lists = request.lists(drafter, depth_limit, 1, clock)
        with clock.stage("tree_build"):  # one candidate per depth: the best-first tree is the chain
            tree = build_tree(lists.lp, lists.ids, depth_limit, request.root, request=request.number)
        with clock.stage("verify"):  # a chain needs neither mask nor positions
            result = target.forward(tree.tokens, request.cache, taps=drafter.taps)
            choices = request.choices(result, tree.positions(request.cache.length))
        with clock.stage("commit"):
            path = request.commit(tree, accept(tree.tokens, tree.parents, choices, request=request.number))
        with clock.stage("draft"):
            drafter.observe(tree.tokens[path], result.features[path])
        request.end_round(clock, depth_limit, lists, tree, choices, path)
    return request.generation()


def ddtree_generate(target: Target, drafter: Drafter, prompt: ArrayLike, **options: Unpack[Options]) -> Generation:
    """DDTree: one tree of at most `budget` nodes a round, fewer where the cache has no room for their rows."""
    budget = options.get("budget", DEFAULT_BUDGET)
    request = _Request(target, drafter, prompt, budget, options)
    while request.wanted:
        clock = _Clock(request.now)
        depth_limit = min(drafter.block_size, request.wanted) - 1
        nodes = min(budget, request.cache.room - 1)
        lists = request.lists(drafter, depth_limit, nodes, clock)
        with clock.stage("tree_build"):
            tree = build_tree(lists.lp, lists.ids, nodes, request.root, request=request.number)
        with clock.stage("tree_compile"):
            visibility, positions = tree.visibility(), tree.positions(request.cache.length)
        with clock.stage("verify"):
            result = target.forward(
                tree.tokens, request.cache, positions=positions, visibility=visibility, taps=drafter.taps
            )
            choices = request.choices(result, positions)
        with clock.stage("commit"):
            path = request.commit(tree, accept(tree.tokens, tree.parents, choices, request=request.number))
        with clock.stage("draft"):
            drafter.observe(tree.tokens[path], result.features[path])
        request.end_round(clock, depth_limit, lists, tree, choices, path)
    return request.generation()
