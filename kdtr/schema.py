"""Fixture kinds, version 1: which arrays a file of each kind holds (level 3 of kdtr/format.py, section 9).

A kind is data: one `Rule` an array, plus functions for what ties values together (kdtr/invariants.py). In kinds with
cases a file holds one case (arrays without "/" in their names) or several (arrays under "<case>/"); each case is
checked by itself, with its own symbolic sizes. Text is a 1-d u8 array (UTF-8), a scalar a 0-d array; config entries are
"config/<published field>", null ones absent.

Shapes are written as sizes separated by blanks, "" for a scalar: a number; a letter, the same size wherever it occurs
in a case; "1+X"; "*", any size; "...", any further sizes. L is the depth limit, K the list length, B the node budget,
V the vocabulary, N rows, H heads, S cache rows, P the prompt, T output tokens, R rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy.typing as npt

from kdtr import invariants
from kdtr.index import TensorInfo

if TYPE_CHECKING:
    from kdtr.container import Container

VERSION: Final = 1

Group = Mapping[str, npt.NDArray[Any]]
Sizes = Mapping[str, int]
Invariant = Callable[[Group, Sizes], Iterator[str]]

EXACT: Final = ("bits", "equal")
CLOSE: Final = (*EXACT, "close", "ulp", "similarity", "nmse")
FLOATS: Final = "f32 f64 bf16 f16"
STORED: Final = f"{FLOATS} f8_e4m3fn f8_e5m2 i8 u8 i32 u32"  # what weights and cache rows are stored in


@dataclass(frozen=True, slots=True)
class Rule:
    """An array: name pattern (with * and ?), dtypes ("*" for any), shape, roles, compare modes if it is expected."""

    name: str
    dtypes: str
    shape: str
    roles: str
    modes: tuple[str, ...] = EXACT
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fixture. `open`: arrays that no rule names are allowed. `asserts`: something must be expected."""

    rules: tuple[Rule, ...]
    invariants: tuple[Invariant, ...] = ()
    cases: bool = True
    open: bool = False
    asserts: bool = True


def _nodes(name: str, dtype: str, shape: str = "1+B", *, optional: bool = False) -> Rule:
    return Rule(name, dtype, shape, "expected", EXACT, optional)


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        # Filler past node 1+n: parents, first_child, next_sibling, paths -1, everything else 0.
        "tree": Kind(
            (
                Rule("lp", "f32", "L K", "input"),
                Rule("ids", "i32", "L K", "input"),
                Rule("budget", "i32", "", "input"),
                Rule("root_token", "i32", "", "input"),
                Rule("prefix_length", "i32", "", "input"),
                _nodes("node_count", "i32", ""),
                _nodes("tokens", "i32"),
                _nodes("parents", "i32"),
                _nodes("depths", "i32"),
                _nodes("ranks", "i32"),
                _nodes("positions", "i32"),
                _nodes("scores", "f64"),
                _nodes("visibility", "u32", "1+B W"),
                _nodes("paths", "i32", "1+B 1+L"),
                _nodes("first_child", "i32", optional=True),
                _nodes("next_sibling", "i32", optional=True),
            ),
            (invariants.tree_lists, invariants.tree_nodes, invariants.tree_links),
        ),
        "topk": Kind(
            (
                Rule("logits", "f32 bf16", "L V", "input"),
                Rule("k", "i32", "", "input"),
                Rule("vocab_size", "i32", "", "input"),
                Rule("ids", "i32", "L K", "expected"),
                Rule("lp", "f32", "L K", "expected", CLOSE),
                Rule("logz", "f32", "L", "expected", CLOSE),
            ),
            (invariants.topk,),
        ),
        # The target's choices are given, or its logits, of which each choice is the argmax.
        "accept": Kind(
            (
                Rule("tokens", "i32", "N", "input"),
                Rule("parents", "i32", "N", "input"),
                Rule("node_count", "i32", "", "input"),
                Rule("choices", "i32", "N", "input", optional=True),
                Rule("logits", "f32 bf16", "N V", "input", optional=True),
                Rule("accepted", "i32", "A", "expected"),
                Rule("bonus", "i32", "", "expected"),
            ),
            (invariants.accept,),
        ),
        # rows_after: the rows with those of accepted node k at prefix_length + k; all other rows as before.
        "compact": Kind(
            (
                Rule("rows", STORED, "layers capacity width", "input"),
                Rule("prefix_length", "i32", "", "input"),
                Rule("accepted", "i32", "A", "input"),
                Rule("block_table", "i32", "*", "input", optional=True),
                Rule("block_size", "i32", "", "input", optional=True),
                Rule("rows_after", STORED, "layers capacity width", "expected"),
            ),
            (invariants.compact,),
        ),
        # Absorbed latent attention: N new rows over S cache rows (prefix, then the new ones); r latent, p rope sizes.
        # The arrays are stored, or come from a generator: then the results of sampled (row, head) pairs are kept.
        "attention": Kind(
            (
                Rule("q_latent", FLOATS, "N H r", "input", optional=True),
                Rule("q_rope", FLOATS, "N H p", "input", optional=True),
                Rule("latent", FLOATS, "S r", "input", optional=True),
                Rule("rope_key", FLOATS, "S p", "input", optional=True),
                Rule("scale", "f32 f64", "", "input"),
                Rule("visible", "bool", "N M", "input", optional=True),
                Rule("out", FLOATS, "N H r", "expected", CLOSE, optional=True),
                Rule("lse", "f32 f64", "N H", "expected", CLOSE, optional=True),
                Rule("seed", "u64", "", "input", optional=True),
                Rule("heads", "i32", "", "input", optional=True),
                Rule("prefix_length", "i32", "", "input", optional=True),
                Rule("parents", "i32", "N", "input", optional=True),
                Rule("pairs", "i32", "X 2", "input", optional=True),
                Rule("sampled_out", FLOATS, "X r", "expected", CLOSE, optional=True),
                Rule("sampled_lse", "f32 f64", "X", "expected", CLOSE, optional=True),
            ),
            (invariants.attention,),
            open=True,
        ),
        # One operation: its name, inputs and parameters of any shape, results.
        "op": Kind((Rule("op", "u8", "*", "aux"),), open=True),
        "model": Kind(
            (Rule("config/*", "*", "...", "aux"), Rule("*", STORED, "...", "param")), cases=False, asserts=False
        ),
        "drafter": Kind(
            (Rule("config/*", "*", "...", "aux"), Rule("*", STORED, "...", "param")), cases=False, asserts=False
        ),
        # Recorded rounds: lists, the target's token after each node (-1 past the last), what was accepted.
        "drafter_lists": Kind(
            (
                Rule("prompt", "i32", "P", "aux"),
                Rule("tokens", "i32", "T", "aux"),
                Rule("block_size", "i32", "", "aux"),
                Rule("budget", "i32", "", "aux"),
                Rule("temperature", "f64", "", "aux"),
                Rule("seed", "u64", "", "aux"),
                Rule("prefix_length", "i32", "R", "input"),
                Rule("root_token", "i32", "R", "input"),
                Rule("lp", "f32", "R L K", "input"),
                Rule("ids", "i32", "R L K", "input"),
                Rule("choices", "i32", "R 1+B", "input"),
                Rule("node_count", "i32", "R", "expected"),
                Rule("path", "i32", "R 1+L", "expected"),
                Rule("bonus", "i32", "R", "expected"),
            ),
            (invariants.drafter_lists,),
        ),
        "generation": Kind(
            (Rule("prompt", "i32", "P", "input"), Rule("tokens", "i32", "T", "expected")),
            open=True,
        ),
        # What a failed parity check needs to be run again: "what" names the check, "unit" the row.
        "divergence": Kind(
            (Rule("what", "u8", "*", "aux"), Rule("unit", "u8", "*", "aux")), cases=False, open=True, asserts=False
        ),
        "any": Kind((), cases=False, open=True, asserts=False),
    }
)


def schema_problems(handle: Container) -> Iterator[str]:
    """What the schema of the file's kind does not allow, tensor by tensor and case by case."""
    kind = KINDS.get(handle.kind)
    if kind is None:
        yield f"kind '{handle.kind}' is none of {', '.join(KINDS)}"
        return
    if handle.kind_version != VERSION:
        yield f"kind_version of '{handle.kind}' is {handle.kind_version}, known is {VERSION}"
        return
    for case, names in _cases(kind, handle.names).items():
        where = f"case '{case}': " if case else ""
        infos = {name.removeprefix(f"{case}/"): handle.info[name] for name in names}
        yield from (where + problem for problem in _case_problems(kind, infos, _LazyGroup(handle, infos)))


def _cases(kind: Kind, names: tuple[str, ...]) -> dict[str, list[str]]:
    cases: dict[str, list[str]] = {}
    for name in names:
        case = name.partition("/")[0] if kind.cases and "/" in name else ""
        cases.setdefault(case, []).append(name)
    return cases or {"": []}


def _case_problems(kind: Kind, infos: Mapping[str, TensorInfo], group: Group) -> Iterator[str]:
    found = False
    sizes: dict[str, int] = {}
    matched: set[Rule] = set()
    for name, info in infos.items():
        rule = next((rule for rule in kind.rules if fnmatchcase(name, rule.name)), None)
        if rule is not None:
            matched.add(rule)
            for problem in _rule_problems(rule, info, sizes):
                found = True
                yield f"'{name}': {problem}"
        elif not kind.open:
            found = True
            yield f"'{name}' is not an array of this kind"
    for rule in kind.rules:
        if rule not in matched and not rule.optional:
            found = True
            yield f"'{rule.name}' ({rule.dtypes}, [{rule.shape}], {rule.roles}) is missing"
    if kind.asserts and not any(info.role == "expected" for info in infos.values()):
        found = True
        yield "nothing has the role expected"
    if not found:  # invariants may rely on names, dtypes and shapes
        for invariant in kind.invariants:
            yield from invariant(group, sizes)


def _rule_problems(rule: Rule, info: TensorInfo, sizes: dict[str, int]) -> Iterator[str]:
    if rule.dtypes != "*" and info.dtype not in rule.dtypes.split():
        yield f"dtype is {info.dtype}, must be {' or '.join(rule.dtypes.split())}"
    if info.role not in rule.roles.split():
        yield f"role is {info.role}, must be {' or '.join(rule.roles.split())}"
    if info.tolerance is not None and info.tolerance.mode not in rule.modes:
        yield f"is compared by {info.tolerance.mode}, must be {' or '.join(rule.modes)}"
    wanted = rule.shape.split()
    if "..." in wanted:
        wanted = wanted[: wanted.index("...")]
        shape = info.shape[: len(wanted)]
    else:
        shape = info.shape
    if len(shape) != len(wanted):
        yield f"shape is {info.shape}, must be [{rule.shape}]"
        return
    for size, symbol in zip(shape, wanted, strict=True):
        more, _, name = symbol.rpartition("+")
        least = int(more or 0)
        if symbol == "*":
            continue
        value = int(symbol) if symbol.isdigit() else least + sizes.setdefault(name, size - least)
        if size != value or size < least:
            known = ", ".join(f"{key} = {number}" for key, number in sizes.items() if number >= 0)
            yield f"shape is {info.shape}, must be [{rule.shape}] with {known}"
            return


class _LazyGroup(Mapping[str, npt.NDArray[Any]]):
    """Arrays of one case by the names within it, read when they are asked for."""

    def __init__(self, handle: Container, infos: Mapping[str, TensorInfo]) -> None:
        self._handle = handle
        self._infos = infos
        self._read: dict[str, npt.NDArray[Any]] = {}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._read:
            self._read[name] = self._handle.get(self._infos[name].name)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)
