"""What is measured: cases as data, in suites, chosen by expressions.

A case has a stable id, and arms that take turns on the same input. Its hash covers the bytes of the input and every
field that says something of it, so that results of different inputs are never compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields

BUDGETS = (7, 16, 32, 64, 128)
SETS = ("humaneval", "mt_bench", "gsm8k", "heldout_code")
DTYPES = ("float32", "bfloat16")  # of the engine
GPU = "gpu"
NO_INPUT = {"input": False}  # of a field that only adds arms, whose rows have hashes like those of the others


class SelectionError(ValueError):
    """A selection that is no expression, or that no case answers to."""


@dataclass(frozen=True)
class Arm:
    """One way to decode. method: "ar", "chain" or "ddtree"; budget: non-root nodes of a tree, 0 for the others.

    costs: (rows, seconds of a round that verifies so many) for the engine's policy, which then chooses each round's
    budget, that one at most. heap: the engine's trees are built by the host's heap, in place of the GPU.
    """

    method: str
    budget: int = 0
    costs: tuple[tuple[int, float], ...] = ()
    heap: bool = False

    @property
    def name(self) -> str:
        builder = "-heap" if self.heap else ""
        return f"{self.method}{builder}-b{self.budget}" if self.method == "ddtree" else self.method


AR, CHAIN = Arm("ar"), Arm("chain")


@dataclass(frozen=True)
class Decode:
    """Plain decoding, chain and trees on the prompts of a set. staged: arms whose stages are timed on the first."""

    set: str
    block_size: int = 8
    temperature: float = 0.0
    budgets: tuple[int, ...] = BUDGETS
    prompts: int = 10
    max_new_tokens: int = 24
    staged: tuple[str, ...] = ("ar", "chain", "ddtree-b64")

    @property
    def id(self) -> str:
        draw = f"t{self.temperature:g}" if self.temperature else "greedy"
        return f"decode/{self.set}/block{self.block_size}/{draw}"

    @property
    def arms(self) -> tuple[str, ...]:
        return (*(arm.name for arm in self.decodings), GPU)

    @property
    def decodings(self) -> tuple[Arm, ...]:
        return (AR, CHAIN, *(Arm("ddtree", budget) for budget in self.budgets))

    @property
    def cost(self) -> float:
        return 0.1 * self.prompts * self.max_new_tokens / 24 * (2 + sum(1 + budget / 60 for budget in self.budgets))


@dataclass(frozen=True)
class Native(Decode):
    """Decodings of the engine alone, in a number type, with graphs or without. Its trees are held against its own plain
    decoding, token for token, and that against one pass of the reference.

    prompts: as many whose output does not loop, if the set has them. policy: chooses the budgets of rounds, by costs
    that are measured before. heaps: budgets whose trees the host's heap builds once more, inside the same rounds.
    """

    prompts: int = 24
    budgets: tuple[int, ...] = (16, 32, 64, 128)
    max_new_tokens: int = 64
    staged: tuple[str, ...] = ("ar", "chain", *(f"ddtree-b{budget}" for budget in BUDGETS))
    dtype: str = "float32"
    graphs: bool = True
    policy: bool = False
    heaps: tuple[int, ...] = field(default=(), metadata=NO_INPUT)

    @property
    def id(self) -> str:
        return f"{super().id}/{self.dtype}{'' if self.graphs else '/eager'}{'/policy' if self.policy else ''}"

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(f"{GPU}-{arm.name}" for arm in self.decodings)

    @property
    def decodings(self) -> tuple[Arm, ...]:
        return (*super().decodings, *(Arm("ddtree", budget, heap=True) for budget in self.heaps))

    @property
    def cost(self) -> float:
        return self.prompts * self.max_new_tokens / 200


@dataclass(frozen=True)
class Builder:
    """Trees from recorded lists of the shipped drafter. batch: requests in one call; lists: how many are built."""

    block_size: int
    budget: int
    batch: int = 1
    lists: int = 32

    @property
    def depth_limit(self) -> int:
        return self.block_size - 1

    @property
    def file(self) -> str:
        """The recording whose lists are as wide as the budget asks."""
        return f"drafter_lists_b{self.block_size}_k{128 if self.budget <= 128 else 256}.kdtr"

    @property
    def id(self) -> str:
        return f"builder/depth{self.depth_limit}/b{self.budget}/batch{self.batch}"

    @property
    def arms(self) -> tuple[str, ...]:
        uno = ("sglang-uno",) if self.budget < 128 else ()  # its trees have 128 nodes at most
        return ("heapq", "sglang-heapq", "cpp-heap", *uno, GPU)

    @property
    def cost(self) -> float:
        return 0.3 + self.budget * max(self.lists, self.batch) / 4000


@dataclass(frozen=True)
class Logits:
    """Trees from drafter logits [L, vocab], the top-k of `budget` tokens included. batch: requests in one call."""

    budget: int
    batch: int = 1
    depth_limit: int = 7
    vocab: int = 163_840

    @property
    def id(self) -> str:
        return f"logits/depth{self.depth_limit}/v{self.vocab}/b{self.budget}/batch{self.batch}"

    @property
    def arms(self) -> tuple[str, ...]:
        return ("heapq", "cpp-heap", "topk", GPU)

    @property
    def cost(self) -> float:
        return 3.0 + self.vocab * self.batch / 1e6


@dataclass(frozen=True)
class Curve:
    """The reference's time for N rows behind a prefix, over its time for one row."""

    rows: tuple[int, ...] = (1, 8, 17, 33, 65, 129)
    prefix: int = 128

    @property
    def id(self) -> str:
        return f"curve/verify/prefix{self.prefix}"

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(f"n{n}" for n in self.rows)

    @property
    def cost(self) -> float:
        return sum(self.rows) / 40


@dataclass(frozen=True)
class NativeCurve(Curve):
    """The same of the engine on the GPU, in a number type."""

    rows: tuple[int, ...] = (1, 2, 3, 5, 9, 17, 33, 65, 129)
    dtype: str = "float32"

    @property
    def id(self) -> str:
        return f"{super().id}/{self.dtype}"

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(f"{GPU}-n{n}" for n in self.rows)

    @property
    def cost(self) -> float:
        return 2.0


@dataclass(frozen=True)
class Replay:
    """The loops with an acceptance that is given, not found: recorded rounds, or `forced` draft nodes every round.

    The models run at full cost; what they say is replaced. So speed can be compared where weights are random.
    """

    set: str
    block_size: int = 8
    budget: int = 64
    forced: int | None = None
    repeats: int = 10
    max_new_tokens: int = 24

    @property
    def id(self) -> str:
        source = "recorded" if self.forced is None else f"forced{self.forced}"
        return f"replay/{self.set}/block{self.block_size}/{source}"

    @property
    def arms(self) -> tuple[str, ...]:
        return ("ar", f"ddtree-b{self.budget}", GPU)

    @property
    def cost(self) -> float:
        return 0.08 * self.repeats * self.max_new_tokens / 24 * (2 + self.budget / 40)


@dataclass(frozen=True)
class Slice:
    """A few layers of a published target at full width, with random weights: decoding and passes of the engine."""

    model: str = "kimi-k2"
    layers: int = 3
    rows: tuple[int, ...] = (1, 2, 3, 5, 9, 17, 33, 65, 129)
    budgets: tuple[int, ...] = (16, 64)
    prefix: int = 1024
    dtype: str = "bfloat16"

    @property
    def id(self) -> str:
        return f"slice/{self.model}/layers{self.layers}/prefix{self.prefix}/{self.dtype}"

    @property
    def arms(self) -> tuple[str, ...]:
        trees = (f"{GPU}-ddtree-b{budget}" for budget in self.budgets)
        return (f"{GPU}-ar", *trees, *(f"{GPU}-n{n}" for n in self.rows))

    @property
    def cost(self) -> float:
        return 20.0


@dataclass(frozen=True)
class SliceCost(Slice):
    """What exactness costs there: row-invariant products and cuBLAS's in turns, two engines in one memory."""

    layers: int = 2
    rows: tuple[int, ...] = (1, 17, 65)
    budgets: tuple[int, ...] = (64,)

    @property
    def id(self) -> str:
        return f"{super().id}/cost"

    @property
    def arms(self) -> tuple[str, ...]:
        works = ("ar", *(f"n{n}" for n in self.rows))
        return tuple(f"{GPU}-{name}" for work in works for name in (work, f"cublas-{work}"))


@dataclass(frozen=True)
class Attention:
    """One layer's verify attention of N rows behind a prefix, beside others. cold: caches are not in L2."""

    prefix: int
    heads: int = 64
    batch: int = 1
    rows: tuple[int, ...] = (1, 8, 17, 33, 65, 129)
    cold: bool = True

    @property
    def id(self) -> str:
        return f"attention/heads{self.heads}/batch{self.batch}/prefix{self.prefix}/{'cold' if self.cold else 'warm'}"

    @property
    def arms(self) -> tuple[str, ...]:
        """System and rows; only as many rows as scores that are written out leave time and memory for."""
        size = self.batch * self.heads * self.prefix
        limits = {"unfused": 2**29, "sdpa": 2**24, f"{GPU}-float32": 2**21}
        systems = ("flashmla", "flashmla-tree", f"{GPU}-wgmma", f"{GPU}-portable", *limits)
        return tuple(f"{name}-n{n}" for n in self.rows for name in systems if n * size < limits.get(name, n * size + 1))

    @property
    def cost(self) -> float:
        return 4.0 + sum(self.rows) * self.heads * self.batch / 8000


Case = Slice | Decode | Builder | Logits | Curve | Replay | Attention

_QUICK: tuple[Case, ...] = (
    *(Builder(8, budget) for budget in (*BUDGETS, 256)),
    *(Builder(16, budget) for budget in (16, 64, 256)),
    Builder(8, 64, batch=8),
    *(Decode(name) for name in ("humaneval", "gsm8k")),
    *(Decode(name, budgets=(7, 16, 64)) for name in ("mt_bench", "heldout_code")),
    Curve(),
    Replay("humaneval"),
    Replay("humaneval", forced=3),
    *(Native("humaneval", prompts=10, budgets=(16, 64), dtype=dtype) for dtype in DTYPES),
    *(NativeCurve(dtype=dtype) for dtype in DTYPES),
)
# The engine's speed on the GPU: every set in both number types, a longer block, single launches, the policy, and what N
# rows cost.
_ENGINE: tuple[Case, ...] = (
    *(Native(name, dtype=dtype, heaps=(64,)) for dtype in DTYPES for name in SETS),
    Native("heldout_code", 16, dtype="bfloat16"),
    *(Native("heldout_code", prompts=10, budgets=(64,), dtype=dtype, graphs=False) for dtype in DTYPES),
    Native("heldout_code", budgets=(64,), dtype="bfloat16", policy=True),
    *(NativeCurve(prefix=prefix, dtype=dtype) for dtype in DTYPES for prefix in (128, 512)),
)
_FULL: tuple[Case, ...] = (
    *(Builder(block, budget, batch) for block in (8, 16) for budget in (*BUDGETS, 256) for batch in (1, 8, 64)),
    *(
        Decode(name, block, temperature, prompts=32, max_new_tokens=64)
        for temperature in (0.0, 1.0)
        for block in (8, 16)
        for name in SETS
    ),
    *(Curve((1, 8, 17, 33, 65, 129, 257), prefix) for prefix in (16, 128, 512)),
    *(Replay(name, forced=forced) for name in SETS for forced in (None, 0, 3, 7)),
    *_ENGINE,
)
# What a GPU builds, up to batches that fill it; CPU arms stand beside it as far as they go.
_TREES: tuple[Case, ...] = (
    *(Builder(8, budget, batch) for budget in (16, 64, 256) for batch in (1, 8, 64, 128, 256)),
    *(Builder(16, budget, batch) for budget in (64, 256) for batch in (1, 128)),
    *(Logits(budget, batch) for budget in (64, 1024) for batch in (1, 8, 64, 128, 256)),
)
_SLICE: tuple[Case, ...] = (Slice(), Slice(prefix=8192), SliceCost())
_FEW = (1, 17, 65)
_ATTENTION: tuple[Case, ...] = (
    *(Attention(prefix) for prefix in (1024, 8192, 32_768, 131_072)),
    *(Attention(prefix, cold=False) for prefix in (1024, 8192, 32_768)),
    *(Attention(prefix, heads, rows=_FEW) for heads in (16, 128) for prefix in (8192, 32_768, 131_072)),
    *(Attention(prefix, batch=8, rows=_FEW) for prefix in (1024, 8192)),
)
SUITES: dict[str, tuple[Case, ...]] = {
    "quick": _QUICK,
    "full": _FULL,
    "trees": _TREES,
    "engine": _ENGINE,
    "slice": _SLICE,
    "attention": _ATTENTION,
}


@dataclass(frozen=True)
class Chosen:
    """A case and those of its arms that are wanted."""

    case: Case
    arms: tuple[str, ...]


def select(cases: Iterable[Case], expression: str | None = None) -> list[Chosen]:
    """The measurements whose name, "<case id>/<arm>", answers to the expression: words joined by and, or, not, ( ).

    A word stands for the names that contain it, upper or lower case. Raises SelectionError.
    """
    if expression is None:
        return [Chosen(case, case.arms) for case in cases]
    answers = _parse(expression)
    chosen = [Chosen(case, tuple(a for a in case.arms if answers(f"{case.id}/{a}".lower()))) for case in cases]
    if found := [each for each in chosen if each.arms]:
        return found
    raise SelectionError(f"no measurement answers to {expression!r}; `list` shows their names")


def digest(case: Case, *inputs: bytes | str | int | float | Sequence[int]) -> str:
    """SHA-256 over the case's fields and its input: what the result depends on, apart from code and machine."""
    said = asdict(case)
    for each in fields(case):
        if not each.metadata.get("input", True):
            del said[each.name]
    total = hashlib.sha256(json.dumps([type(case).__name__, said], sort_keys=True).encode())
    for value in inputs:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()


def _parse(expression: str) -> Callable[[str], bool]:
    """The test that an expression is of a name. `not` binds closer than `and`, `and` closer than `or`."""
    words = expression.lower().replace("(", " ( ").replace(")", " ) ").split()[::-1]
    wrong = SelectionError(f"{expression!r} is no selection: words joined by and, or, not and parentheses")

    def either() -> Callable[[str], bool]:
        parts = [both()]
        while words and words[-1] == "or":
            words.pop()
            parts.append(both())
        return lambda name: any(part(name) for part in parts)

    def both() -> Callable[[str], bool]:
        parts = [single()]
        while words and words[-1] == "and":
            words.pop()
            parts.append(single())
        return lambda name: all(part(name) for part in parts)

    def single() -> Callable[[str], bool]:
        word = words.pop() if words else ")"
        if word == "not":
            inner = single()
            return lambda name: not inner(name)
        if word == "(":
            inner = either()
            if not words or words.pop() != ")":
                raise wrong
            return inner
        if word in (")", "and", "or"):
            raise wrong
        return lambda name: word in name

    answers = either()
    if words:
        raise wrong
    return answers
