"""Rows of a run against the rows of a baseline: verdicts, gates and the exit status.

Baselines lie in reports/baseline/<hardware-key>.jsonl. Each row is compared with the baseline row of its own case,
input and arm, of its own hardware if there is one. Four checks:
parity  a row that is INVALID fails.
tau     off its baseline by more than 1 % fails, in either direction; it does not depend on the machine.
time    SLOW fails; only under equal conditions (see `conditions`), otherwise "not comparable" with the reasons.
ratio   how many times faster than the arm it took turns with; off by more than a factor of 2 fails.
In a continuous-integration job machines differ from run to run, so there (`ci`) time never fails, and the ratio, both
sides of which were measured in the job, fails on any hardware.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Literal

from harness import records, stats, tables
from harness.console import say
from harness.environment import CHECKOUT, driver_major
from harness.records import Environment, Row
from harness.stats import END_TO_END, KERNEL, Threshold, Verdict

BASELINES = CHECKOUT / "reports" / "baseline"
TAU_TOLERANCE = 0.01
RATIO_LIMIT = 2.0
NOT_COMPARABLE = "NOT COMPARABLE"
OFF = "OFF"


class Exit(IntEnum):
    """Exit status of a comparison. NOTHING: nothing was measured, or nothing of it can be compared."""

    FINE = 0
    REGRESSION = 1
    USAGE = 2
    NOTHING = 3


class BaselineRefusedError(ValueError):
    """Rows that must not become a baseline; the message lists every reason."""


@dataclass(frozen=True)
class Baseline:
    """A baseline file: its name for people, and its rows."""

    name: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Line:
    """One check of one row. result: a verdict, OFF or NOT_COMPARABLE. change: share of the baseline's value.

    baseline, current: seconds, tau or times faster, by check; None where there is no such number.
    """

    check: Literal["parity", "tau", "time", "ratio"]
    row: Row
    result: str
    fails: bool
    baseline: float | None = None
    current: float | None = None
    change: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Lines with failures first, notices in sentences, and the exit status with its reason."""

    lines: tuple[Line, ...]
    notices: tuple[str, ...]
    exit: Exit
    summary: str


def compare(
    current: Iterable[Row], baselines: Sequence[Baseline], *, strict: bool = False, ci: bool = False
) -> Comparison:
    """Check the latest row of each measurement. strict: what cannot be compared, or is missing, gives exit status 3."""
    rows = records.latest(current)
    baselines = [replace(baseline, rows=tuple(records.latest(baseline.rows))) for baseline in baselines]
    lines: list[Line] = []
    notices: list[str] = []
    chosen: dict[str, list[tuple[Row, Row]]] = {}
    for row in rows:
        if row.status == "NOT_RUN":
            notices.append(f"{row.case} {row.arm}: not run: {row.reason}")
        elif row.status == "INVALID":
            lines.append(Line("parity", row, Verdict.INVALID, True, reason=row.reason))
        elif (found := _find(row, baselines)) is None:
            lines.append(Line("time", row, NOT_COMPARABLE, False, reason="no baseline holds this case with this input"))
        else:
            baseline, old = found
            chosen.setdefault(baseline.name, []).append((row, old))
            lines += _check_tau(row, old)
            lines += _check_time(row, old, ci)
            lines += _check_ratio(row, old, rows, baseline.rows, ci)
    missing = _missing(rows, [b for b in baselines if any(_same_hardware(*pair) for pair in chosen.get(b.name, ()))])
    notices = [_describe(name, pairs) for name, pairs in chosen.items()] + notices + missing
    lines.sort(key=lambda line: (not line.fails, line.result == NOT_COMPARABLE))
    exit_code, summary = _exit(rows, lines, strict, ci, missing)
    return Comparison(tuple(lines), tuple(notices), exit_code, summary)


def conditions(row: Row, old: Row) -> list[str]:
    """Why the times of two rows cannot be compared, one sentence each; empty if they can."""
    new_timing, old_timing = row.timing, old.timing
    if new_timing is None or old_timing is None:
        return ["no time was measured" if new_timing is None else "the baseline holds no time"]
    pairs = _machine(row.environment, old.environment)
    if new_timing.method in ("wall", "cpu"):
        pairs |= {
            "processor": (
                f"{row.environment.cpu}, {row.environment.cores} cores",
                f"{old.environment.cpu}, {old.environment.cores} cores",
            ),
            "thread settings": (str(row.environment.threads), str(old.environment.threads)),
        }
    for name in ("method", "mode", "launch", "l2", "best_of", "sample"):
        pairs[f"timing {name}"] = (getattr(new_timing, name), getattr(old_timing, name))
    return [f"{name} is {new}, the baseline's is {before}" for name, (new, before) in pairs.items() if new != before]


def threshold(row: Row) -> Threshold:
    """Kernels and builders must differ by 10 % and 2 us, whole decodings by 5 %."""
    return KERNEL if row.block in ("builder", "attention", "bench") else END_TO_END


def load_baselines(file: Path | None = None, folder: Path = BASELINES) -> list[Baseline]:
    """The given file, or all of the folder in order of name. Raises RecordError or OSError if one is unreadable."""
    paths = [file] if file is not None else sorted(folder.glob("*.jsonl"))
    return [Baseline(_short(path), tuple(records.read(path))) for path in paths]


def write_baseline(rows: Iterable[Row], folder: Path = BASELINES) -> Path:
    """Store the OK rows as the baseline of their hardware, in place of older rows of the same measurements.

    The file changes at once or not at all. Raises BaselineRefusedError for rows of changed or unknown code, of a busy
    GPU, that failed, or that come from several machines or versions of the code.
    """
    new = records.latest(rows)
    measured = [row for row in new if row.status == "OK"]
    if refusals := _refusals(new, measured):
        raise BaselineRefusedError("no baseline was written: " + "; ".join(refusals))
    path = folder / f"{measured[0].environment.hardware_key}.jsonl"
    kept = [replace(row, trees=()) for row in measured]
    old = records.read(path) if path.exists() else []
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        with records.RowFile(temporary) as file:
            for row in sorted(records.latest([*old, *kept]), key=lambda row: row.key):
                file.append(row)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def render(comparison: Comparison) -> str:
    """The comparison as plain ASCII text, failures first."""
    shown = []
    for line in comparison.lines:
        old, new = (stats.trim(value) for value in (line.baseline, line.current))
        values = f"{old} -> {new}{UNITS[line.check]}" if line.baseline is not None and line.current is not None else ""
        change = f"{line.change:+.1%}" if line.change is not None else ""
        mark = "FAIL" if line.fails else ""
        text = f"{mark:4} {line.result:14} {line.check:6} {line.row.case} {line.row.arm}  {values} {change}"
        shown.append(text.rstrip() + (f"\n       {line.reason}" if line.reason else ""))
    return "\n".join([comparison.summary, *shown, *comparison.notices])


UNITS = {"parity": "", "tau": "", "time": " s", "ratio": " times"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the comparison to a command line."""
    parser.add_argument("rows", type=Path, help="rows.jsonl of the run")
    parser.add_argument("--baseline", type=Path, help="baseline file (default: the one of this hardware)")
    parser.add_argument("--baselines", type=Path, default=BASELINES, help="folder of baselines (default: %(default)s)")
    parser.add_argument("--strict", action="store_true", help="exit with 3 if anything cannot be compared")
    parser.add_argument("--ci", action="store_true", help="gate parity, tau and ratios only: machines differ")
    parser.add_argument("--write-baseline", action="store_true", help="store the rows as baseline instead of comparing")


def command(arguments: argparse.Namespace) -> Exit:
    """Run the comparison, print it, and return the exit status."""
    try:
        rows = records.read(arguments.rows)
        if arguments.write_baseline:
            say(f"baseline written: {_short(write_baseline(rows, arguments.baselines))}")
            return Exit.FINE
        baselines = load_baselines(arguments.baseline, arguments.baselines)
    except (OSError, records.RecordError, BaselineRefusedError) as error:
        say(str(error), error=True)
        return Exit.USAGE
    found = compare(rows, baselines, strict=arguments.strict, ci=arguments.ci)
    say(render(found))
    return found.exit


def _check_tau(row: Row, old: Row) -> list[Line]:
    new, old_tau = row.metrics.get("tau"), old.metrics.get("tau")
    if old_tau is None:
        return [] if new is None else [Line("tau", row, NOT_COMPARABLE, False, None, new, reason="not in the baseline")]
    change = stats.ratio(None if new is None else new - old_tau, old_tau).value
    if change is None:
        reason = row.nulls.get("metrics.tau", "the row holds no tau")
        return [Line("tau", row, OFF, True, old_tau, new, reason=reason)]
    off = abs(change) > TAU_TOLERANCE
    return [Line("tau", row, OFF if off else Verdict.SAME, off, old_tau, new, change)]


def _check_time(row: Row, old: Row, ci: bool) -> list[Line]:
    if row.timing is None or row.timing.mode != "e2e":
        return []
    if reasons := conditions(row, old):
        return [Line("time", row, NOT_COMPARABLE, False, reason="; ".join(reasons))]
    assert old.timing is not None
    before, now = stats.summarise(old.timing.samples_s), stats.summarise(row.timing.samples_s)
    if before.median is None or before.median <= 0:
        return [Line("time", row, NOT_COMPARABLE, False, reason=f"baseline: {before.reason or 'a time of 0 s'}")]
    samples = old.timing.samples_s, row.timing.samples_s
    if row.timing.sample == "prompt" and len(samples[0]) == len(samples[1]):  # prompts differ by far more than runs do
        found = stats.judge_turns(*samples, threshold(row))
    else:
        found = stats.judge(*samples, threshold(row))
    fails = found.verdict == Verdict.INVALID or (found.verdict == Verdict.SLOW and not ci)
    return [Line("time", row, found.verdict, fails, before.median, now.median, found.delta, found.reason)]


def _check_ratio(row: Row, old: Row, rows: Sequence[Row], old_rows: Sequence[Row], ci: bool) -> list[Line]:
    if row.against is None or row.timing is None or row.timing.mode != "e2e":
        return []
    now, before = _times_faster(row, rows), _times_faster(old, old_rows)
    change = stats.ratio(now.value, before.value)
    if change.value is None:
        reason = f"baseline: {before.reason}" if now.value is not None else now.reason
        return [Line("ratio", row, NOT_COMPARABLE, False, before.value, now.value, reason=reason)]
    off = not 1 / RATIO_LIMIT <= change.value <= RATIO_LIMIT
    fails = off and (ci or _same_hardware(row, old))
    return [Line("ratio", row, OFF if off else Verdict.SAME, fails, before.value, now.value, change.value - 1)]


def _times_faster(row: Row, rows: Sequence[Row]) -> stats.Number:
    """How many times faster the row is than the arm it took turns with, which is among `rows`."""
    partner = next((r for r in rows if r.key == (row.case, row.case_hash, row.against)), None)
    return tables.faster(partner, row)


def _find(row: Row, baselines: Sequence[Baseline]) -> tuple[Baseline, Row] | None:
    """The baseline row of the same measurement: of the same hardware if there is one, else the first."""
    found = [(b, old) for b in baselines for old in b.rows if old.key == row.key and old.status == "OK"]
    return next((pair for pair in found if _same_hardware(row, pair[1])), found[0] if found else None)


def _same_hardware(row: Row, old: Row) -> bool:
    return row.environment.hardware_key == old.environment.hardware_key


def _machine(new: Environment, old: Environment) -> dict[str, tuple[object, object]]:
    pairs: dict[str, tuple[object, object]] = {"hardware key": (new.hardware_key, old.hardware_key)}
    if new.gpu is not None and old.gpu is not None:
        pairs |= {
            "GPU": (new.gpu.name, old.gpu.name),
            "driver major": (driver_major(new.gpu.driver), driver_major(old.gpu.driver)),
            "CUDA runtime": (new.versions.get("cuda_runtime"), old.versions.get("cuda_runtime")),
            "power limit": (new.gpu.power_limit_w, old.gpu.power_limit_w),
        }
    elif new.gpu is not old.gpu:
        pairs["GPU"] = (new.gpu.name if new.gpu else "none", old.gpu.name if old.gpu else "none")
    return pairs


def _missing(rows: Sequence[Row], used: Iterable[Baseline]) -> list[str]:
    """Measurements of the baselines of this hardware, of the suites of this run, that this run did not make."""
    suites, made = {row.suite for row in rows}, {row.key for row in rows if row.status != "NOT_RUN"}
    return [
        f"{old.case} {old.arm}: in {baseline.name}, but not measured now"
        for baseline in used
        for old in baseline.rows
        if old.suite in suites and old.key not in made
    ]


def _exit(
    rows: Sequence[Row], lines: Sequence[Line], strict: bool, ci: bool, missing: Sequence[str]
) -> tuple[Exit, str]:
    failed = sum(line.fails for line in lines)
    compared = sum(line.result != NOT_COMPARABLE for line in lines)
    unable = len(lines) - compared
    if failed:
        return Exit.REGRESSION, f"FAILED: {failed} of {compared} checks"
    if all(row.status == "NOT_RUN" for row in rows):
        return Exit.NOTHING, "NOTHING MEASURED"
    times = [line for line in lines if line.check == "time"]
    no_time = bool(times) and all(line.result == NOT_COMPARABLE for line in times) and not ci
    if compared == 0 or no_time:
        return Exit.NOTHING, "NOT COMPARABLE: " + (
            "no time" if compared else "no row"
        ) + " has a baseline to stand beside"
    if strict and (unable or missing):
        return Exit.NOTHING, f"NOT COMPARABLE: {unable} checks, {len(missing)} rows not measured"
    return Exit.FINE, f"PASSED: {compared} checks" + (f", {unable} not comparable" if unable else "")


def _refusals(rows: Sequence[Row], measured: Sequence[Row]) -> list[str]:
    environments = [row.environment for row in measured]
    failed = sorted({f"{row.case} {row.arm}" for row in rows if row.status == "INVALID"})
    keys, codes = ({getattr(e, name) for e in environments} for name in ("hardware_key", "code"))
    refusals = []
    if not measured:
        refusals.append("nothing was measured")
    if failed:
        refusals.append(f"INVALID rows: {', '.join(failed)}")
    if any(e.dirty is not False for e in environments):
        refusals.append("the checkout has uncommitted changes or no commit")
    if any(e.gpu is not None and e.gpu.busy for e in environments):
        refusals.append("the GPU was busy with other work")
    if len(keys) > 1:
        refusals.append(f"rows of {len(keys)} machines: {', '.join(sorted(keys))}")
    if len(codes) > 1:
        refusals.append(f"rows of {len(codes)} versions of the code: {', '.join(sorted(codes))}")
    return refusals


def _describe(name: str, pairs: Sequence[tuple[Row, Row]]) -> str:
    """Which baseline was chosen for how many rows, and what it is."""
    commits = sorted({(old.environment.commit or "unknown")[:12] for _, old in pairs})
    keys = sorted({old.environment.hardware_key for _, old in pairs})
    hardware = (
        "this hardware" if all(_same_hardware(*pair) for pair in pairs) else f"other hardware ({', '.join(keys)})"
    )
    return f"compared with {name}: {len(pairs)} rows, commit {', '.join(commits)}, {hardware}"


def _short(path: Path) -> str:
    """A path for people: relative to the checkout where it lies in it."""
    whole = path.resolve()
    return whole.relative_to(CHECKOUT).as_posix() if whole.is_relative_to(CHECKOUT) else str(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.compare", description=__doc__.split("\n")[0])
    configure(parser)
    return command(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
