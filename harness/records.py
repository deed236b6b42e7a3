"""Rows: the one type in which every measurement is stored, and the JSON-lines file that holds them.

A row is one (case, arm) of one run. Compare, Markdown, CSV, HTML and plots are functions of rows and of nothing else.
Times are seconds. A number that is not finite is stored as null, with its place and value in `Row.nulls`.

`Row`: schema, suite, block, case, case_hash, arm, against, params, seed, status, reason, parity, metrics,
    depth_histogram, stages, timing, trees, environment, nulls
`Parity`: against, compared, differences, margins, first_difference, reproduce
`Difference`: what, unit, round, index, expected, actual, seed, margin
`Timing`: method, mode, samples_s, warmup_s, dropped, capped, warmups, best_of, sample, launch, l2, clocks_before,
    clocks_after
`Clocks`: sm_mhz, memory_mhz, throttle
`RecordedTree`: prompt, round, tokens, texts, parents, depths, scores, accepted, bonus, bonus_text
`Environment`: hardware_key, os, arch, cpu, cores, commit, dirty, code, modules, versions, threads, libraries, gpu,
    gpu_missing, problems
`Gpu`: name, uuid_hash, sm_count, compute_capability, memory_bytes, driver, power_limit_w, max_sm_mhz, busy
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from harness import codec

SCHEMA = 1

Status = Literal["OK", "INVALID", "NOT_RUN"]
Method = Literal["wall", "cpu", "events", "graph"]
Scalar = str | int | float | bool | None


class RecordError(ValueError):
    """A rows file that cannot be read; the message names the file and the line."""


class TornLineWarning(UserWarning):
    """The last line of a rows file was cut off while it was written, and is ignored."""


@dataclass(frozen=True)
class Clocks:
    """GPU clocks at one moment, and the names of the active reasons for throttling (empty: none)."""

    sm_mhz: int | None
    memory_mhz: int | None
    throttle: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """Facts about one GPU. `busy`: another process was using it when the environment was captured."""

    name: str
    uuid_hash: str | None
    sm_count: int | None
    compute_capability: str | None
    memory_bytes: int | None
    driver: str | None
    power_limit_w: float | None
    max_sm_mhz: int | None
    busy: bool | None


@dataclass(frozen=True)
class Environment:
    """Where and with what code a row was measured; no host name and no absolute path.

    hardware_key: names the baseline file; only rows with equal keys are compared.
    commit, dirty: of the checkout, None without git. code: identity of the code, changed files included.
    modules: origin of each imported package, relative to the checkout or to site-packages.
    versions: of python, numpy, blas, cupy, cuda_runtime, nvcc, compiler ...; None = absent.
    threads: thread settings. libraries: SHA-256 of each native library in use. problems: what is wrong, in sentences.
    """

    hardware_key: str
    os: str
    arch: str
    cpu: str
    cores: int
    commit: str | None
    dirty: bool | None
    code: str
    modules: dict[str, str]
    versions: dict[str, str | None]
    threads: dict[str, str | int | None]
    libraries: dict[str, str]
    gpu: Gpu | None
    gpu_missing: str | None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Difference:
    """The first place where two results differ.

    what: "tokens", "tree.parents", "accepted" ...; unit: the prompt or list it was found in; index: of the entry.
    margin: distance of the target's choice there from another choice (top-1 minus top-2 logit when greedy).
    """

    what: str
    unit: str
    round: int | None
    index: int
    expected: Scalar
    actual: Scalar
    seed: int | None
    margin: float | None


@dataclass(frozen=True)
class Parity:
    """Whether a result equals that of `against`.

    compared: entries compared; 0 is never a pass. differences: units that differ.
    margins: units that part where the target's margin is below the allowed one; counted, no differences.
    first_difference: the first of the differences, or else of the margins. reproduce: file name of its .kdtr.
    """

    against: str
    compared: int
    differences: int
    margins: int = 0
    first_difference: Difference | None = None
    reproduce: str | None = None

    @property
    def passed(self) -> bool:
        return self.compared > 0 and self.differences == 0


@dataclass(frozen=True)
class Timing:
    """Samples of one arm. Sample i of every arm of a case was taken in the same interleaved turn, so they are paired.

    method: how a sample was measured; "cpu" = processor time, "graph" = events around a CUDA graph launch.
    mode: "e2e" has no synchronisation inside and gives speed; "staged" gives shares of stages.
    warmup_s: the first sample, kept apart. warmups: how many turns came before the samples. dropped: turns dropped
    because the GPU throttled. capped: the time limit ended the measurement before the wanted number of samples.
    best_of: calls behind one sample, which is the least of them; above 1 for short calls on a machine that is shared.
    sample: what one sample is: the same work once more, or another prompt (sample i is then the i-th prompt's decoding
    without its prefill, and a speed-up is a ratio of sums).
    """

    method: Method
    mode: Literal["e2e", "staged"]
    samples_s: tuple[float | None, ...]
    warmup_s: float | None
    dropped: int
    capped: bool
    warmups: int = 1
    best_of: int = 1
    sample: Literal["repeat", "prompt"] = "repeat"
    launch: Literal["eager", "graph"] | None = None
    l2: Literal["warm", "flushed"] | None = None
    clocks_before: Clocks | None = None
    clocks_after: Clocks | None = None

    def paired(self, other: Timing) -> bool:
        """Whether samples were taken in the same turns of the same kind, by whatever clock each arm has."""
        same = (self.mode, self.sample, len(self.samples_s)) == (other.mode, other.sample, len(other.samples_s))
        return same and (self.method == other.method or "graph" in (self.method, other.method))


@dataclass(frozen=True)
class RecordedTree:
    """The draft tree of one chosen round, for looking at. All per-node tuples have 1+n entries, the root first."""

    prompt: str
    round: int
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float | None, ...]
    accepted: tuple[int, ...]
    bonus: int
    bonus_text: str

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("tokens", "texts", "parents", "depths", "scores")}
        if len(set(lengths.values())) != 1:
            raise codec.FieldError(f"tree of {self.prompt!r}, round {self.round}: lengths differ: {lengths}")


@dataclass(frozen=True)
class Row:
    """One measured (or not measured) arm of one case.

    suite: "quick", "full" ...      block: the part of the report the row belongs to; "replay" never counts as lossless
    case: stable id, such as "decode/humaneval/block8/greedy"     case_hash: SHA-256 of all that defines the input
    arm: "ar", "chain", "ddtree-b64", "heapq", "sglang-heapq", "cpp-heap", "gpu" ...
    against: the arm of the same case that this one is measured in turns with, None for the arm that is the truth
    params: dataset, budget, block_size, depth_limit, batch, temperature ...
    status: speed is shown only for OK; INVALID and NOT_RUN say why in `reason`
    parity: needed by an OK row of decode and builder that has `against`
    metrics: tau, tau_mean, rounds, tokens, tokens_per_s, ttft_s, tpot_s, distinct8 ...; None = n/a, see `nulls`
    depth_histogram: [d] = rounds that accepted d draft nodes, d = 0..L
    stages: seconds by published stage name and "other"; only with timing.mode "staged"
    nulls: {place: "NaN" | "infinite" | "-infinite" | a sentence} for numbers that are n/a
    """

    suite: str
    block: Literal["decode", "builder", "stage", "curve", "replay", "attention", "bench"]
    case: str
    case_hash: str
    arm: str
    against: str | None
    params: dict[str, Scalar]
    seed: int | None
    status: Status
    reason: str | None
    parity: Parity | None
    metrics: dict[str, float | int | None]
    environment: Environment
    timing: Timing | None = None
    depth_histogram: tuple[int, ...] | None = None
    stages: dict[str, float | None] | None = None
    trees: tuple[RecordedTree, ...] = ()
    nulls: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        lost = codec.normalise(self)
        object.__setattr__(self, "nulls", {**lost, **self.nulls})
        name = f"row {self.case!r} arm {self.arm!r}"
        if self.schema != SCHEMA:
            raise codec.FieldError(f"{name}: schema {self.schema}, this program reads {SCHEMA}")
        if (self.status == "OK") != (self.reason is None):
            raise codec.FieldError(f"{name}: status {self.status} with reason {self.reason!r}")
        if self.status == "OK" and self.parity is not None and not self.parity.passed:
            raise codec.FieldError(f"{name}: status OK, but parity failed: {self.parity}")
        if self.status == "OK" and self.parity is None and self.against and self.block in ("decode", "builder"):
            raise codec.FieldError(f"{name}: status OK without a parity check against {self.against!r}")
        numbers = {"metrics": self.metrics, "stages": self.stages or {}}
        absent = [f"{group}.{n}" for group, values in numbers.items() for n, value in values.items() if value is None]
        if unexplained := [place for place in absent if place not in self.nulls]:
            raise codec.FieldError(f"{name}: no number and no reason in `nulls` for {', '.join(unexplained)}")
        if self.stages is not None and (self.timing is None or self.timing.mode != "staged"):
            raise codec.FieldError(f"{name}: stages belong to a row timed in mode staged")

    @property
    def key(self) -> tuple[str, str, str]:
        """(case, case_hash, arm): the same measurement in any run."""
        return self.case, self.case_hash, self.arm


def to_json(row: Row) -> str:
    """One line of strict JSON, without the line end; ASCII, so that no encoding can spoil it."""
    return json.dumps(codec.to_dict(row), allow_nan=False, separators=(",", ":"))


def from_json(line: str | bytes) -> Row:
    """The row of one line. Raises ValueError (FieldError for a wrong field); NaN and Infinity are refused."""
    plain = json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=_object)
    if isinstance(plain, Mapping) and plain.get("schema") != SCHEMA:
        raise codec.FieldError(f"schema {plain.get('schema')!r}, this program reads {SCHEMA}")
    return codec.from_dict(Row, plain)


class RowFile:
    """A rows file open for appending: a row is in the file when `append` returns, on the disk when `close` returns.

    A torn last line is cut off first. Raises RecordError for other damage, and when another process writes to the file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RecordError(f"{self.path}: another process is writing to this file") from None
            _, end = _parse(self.path)
            self._file.truncate(end)
            if end and os.pread(self._file.fileno(), 1, end - 1) != b"\n":
                self._write(b"\n")  # the last row was whole but for its line end
        except BaseException:
            self._file.close()
            raise

    def append(self, row: Row) -> None:
        self._write(to_json(row).encode("ascii") + b"\n")

    def close(self) -> None:
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]


def append(path: str | os.PathLike[str], row: Row) -> None:
    """Append one row to the file at `path`, which is made if absent."""
    with RowFile(path) as file:
        file.append(row)


def read(path: str | os.PathLike[str]) -> list[Row]:
    """All rows of a file, in order. A torn last line gives a TornLineWarning; other damage raises RecordError."""
    return _parse(Path(path))[0]


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of every key, in the order in which the keys first appear."""
    return list({row.key: row for row in rows}.values())


def finished(rows: Iterable[Row], environment: Environment) -> set[tuple[str, str, str]]:
    """Keys that need not be measured again: measured by the same code on the same hardware."""
    return {
        row.key
        for row in rows
        if row.status != "NOT_RUN"
        and row.environment.code == environment.code
        and row.environment.hardware_key == environment.hardware_key
    }


def _parse(path: Path) -> tuple[list[Row], int]:
    """(rows, number of bytes up to the end of the last whole row)."""
    data = path.read_bytes()
    rows: list[Row] = []
    start = number = 0
    while start < len(data):
        number += 1
        newline = data.find(b"\n", start)
        end = len(data) if newline < 0 else newline
        try:
            rows.append(from_json(data[start:end]))
        except ValueError as error:
            if newline < 0 and not isinstance(error, codec.FieldError):
                warnings.warn(
                    f"{path}, line {number}: the last line is torn and is ignored", TornLineWarning, stacklevel=3
                )
                return rows, start
            raise RecordError(f"{path}, line {number}: {error}") from None
        start = end + 1
    return rows, min(start, len(data))


def _refuse_constant(name: str) -> Any:
    raise codec.FieldError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        names = [name for name, _ in pairs]
        raise codec.FieldError(f"field {next(n for n in names if names.count(n) > 1)} stands twice")
    return plain
