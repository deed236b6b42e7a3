"""Measure, compare and report DDTree decoding.

  python -m harness run                            # quick suite: tables and an HTML report in reports/run
  python -m harness run -k "humaneval and b64"     # measurements whose name holds both words
  python -m harness run --suite full --out DIR --resume
  python -m harness run --suite engine             # the engine's decodings on a GPU, in both number types
  python -m harness run --suite slice              # layers of a big model at full width, with random weights
  python -m harness run --suite trees              # tree builders alone, up to batches that fill a GPU
  python -m harness run --suite attention          # the engine's attention on a GPU beside FlashMLA and PyTorch
  python -m harness compare reports/run/rows.jsonl # against the baseline of this hardware
  python -m harness exactness                      # bits of the logits: chain and trees against plain decoding
  python -m harness report DIR                     # the reports of stored rows once more
  python -m harness env | list

Exit status: 0 fine, 1 regression or parity failure, 2 wrong use, 3 nothing measured or not comparable.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine.toolkit import BuildError
from harness import cases, codec, compare, exactness_groups, heap_tree, records, report
from harness.compare import Comparison, Exit
from harness.console import say
from harness.engine_library import library_path
from harness.environment import CHECKOUT, capture, gpu_missing
from harness.records import Environment, Row
from harness.run import ROWS, confirm, fresh, run
from harness.systems import Bench, Systems, short

OUT = CHECKOUT / "reports" / "run"


def main(arguments: Sequence[str] | None = None, systems: Systems | None = None) -> int:
    """Run one command and return the exit status. systems: what is measured, the reference by default."""
    parser = _parser()
    try:
        given = parser.parse_args(arguments)
    except SystemExit as end:  # argparse has said why
        return int(end.code or 0)
    with warnings.catch_warnings():
        warnings.simplefilter("default", records.TornLineWarning)
        warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}", error=True)
        try:
            if given.command == "run":
                return _run(given, systems or Systems())
            if given.command == "compare":
                return compare.command(given)
            if given.command == "exactness":
                return exactness_groups.command(given)
            if given.command == "report":
                return _report(given)
            if given.command == "env":
                return _environment(given)
            return _list(given)
        except (cases.SelectionError, records.RecordError, OSError) as error:
            say(f"{given.command}: {error}", error=True)
            return Exit.USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument("--suite", choices=sorted(cases.SUITES), default="quick", help="default: %(default)s")
    chosen.add_argument("--select", "-k", metavar="EXPRESSION", help='such as "decode and not mt_bench"; see `list`')

    one = commands.add_parser("run", parents=[chosen], help="measure, report, and check")
    one.add_argument("--out", type=Path, default=OUT, help="folder of rows and reports (default: reports/run)")
    one.add_argument("--resume", action="store_true", help="keep the rows in --out, measure what is missing")
    one.add_argument("--strict", action="store_true", help="compare with the baseline; 3 if anything has none")
    one.add_argument("--ci", action="store_true", help="compare parity, tau and ratios only: machines differ")
    one.add_argument("--seed", type=int, default=0, help="shifts the draws of sampled decoding (default: %(default)s)")
    one.add_argument("--models", type=Path, default=CHECKOUT / "datasets" / "models", help="folder of the pair")
    one.add_argument("--lists", type=Path, default=CHECKOUT / "datasets" / "golden", help="folder of recorded lists")
    one.add_argument("--baselines", type=Path, default=compare.BASELINES, help=argparse.SUPPRESS)

    compare.configure(commands.add_parser("compare", help="rows against the baseline of this hardware"))
    exactness_groups.configure(
        commands.add_parser("exactness", help="logits of chain and trees against plain decoding's")
    )
    again = commands.add_parser("report", help="write the reports of stored rows once more")
    again.add_argument(
        "rows", type=Path, nargs="?", default=OUT, help="rows.jsonl or its folder (default: reports/run)"
    )
    again.add_argument("--out", type=Path, help="folder of the reports (default: that of the rows)")
    facts = commands.add_parser("env", help="facts about machine and code")
    facts.add_argument("--json", action="store_true", help="as one JSON object")
    commands.add_parser("list", parents=[chosen], help="names of the measurements")
    return parser


def _run(given: argparse.Namespace, systems: Systems) -> int:
    chosen = cases.select(cases.SUITES[given.suite], given.select)
    on_gpu = any(arm.startswith(cases.GPU) for each in chosen for arm in each.arms)
    environment = _captured(engine=on_gpu)
    path = given.out / ROWS
    old: list[Row] = []
    if not given.resume:
        path = fresh(given.out)
    elif path.exists():
        old = records.read(path)
    bench = Bench(
        suite=given.suite,
        environment=environment,
        folder=given.out,
        models=given.models,
        lists=given.lists,
        seed=given.seed,
        systems=systems,
        done=frozenset(records.finished(old, environment)),
    )
    for problem in environment.problems:
        say(f"warning: {problem}", error=True)
    rows = run(bench, chosen, path, old)
    if not (given.ci or given.strict):
        return _show(rows, given.out)
    check = partial(
        compare.compare,
        baselines=compare.load_baselines(None, given.baselines),
        strict=given.strict,
        ci=given.ci,
    )
    rows, found = confirm(bench, chosen, path, rows, check)
    status = _show(rows, given.out, found)
    say(compare.render(found))
    return Exit.REGRESSION if Exit.REGRESSION in (status, found.exit) else max(status, found.exit)


def _show(rows: Sequence[Row], out: Path, found: Comparison | None = None) -> int:
    """Write the reports, print the text and the path of the HTML; the status that the rows alone give."""
    paths = report.write(rows, out, found)
    say(report.text(rows, found))
    say(f"\nHTML: {short(paths.html)}")
    if any(row.status == "INVALID" for row in rows):
        return Exit.REGRESSION
    return Exit.NOTHING if all(row.status == "NOT_RUN" for row in rows) else Exit.FINE


def _report(given: argparse.Namespace) -> int:
    path = given.rows / ROWS if given.rows.is_dir() else given.rows
    return _show(records.latest(records.read(path)), given.out or path.parent)


def _captured(engine: bool = False) -> Environment:
    """The environment, with the C++ builder's library if there is a compiler; engine: with the engine's, for a GPU."""
    libraries: dict[str, Path] = {}
    with contextlib.suppress(heap_tree.CompilerError):
        libraries["heap_tree"] = heap_tree.compile_library()
    if engine and gpu_missing() is None:
        with contextlib.suppress(BuildError):  # the rows of the GPU then say why
            libraries["engine"] = library_path("cuda")
    return capture(libraries=libraries)


def _environment(given: argparse.Namespace) -> int:
    environment = codec.to_dict(_captured())
    if given.json:
        say(json.dumps(environment, indent=2))
        return Exit.FINE
    for name, value in environment.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        say(f"{name + ':':<14} {'; '.join(value) if isinstance(value, list) else value}")
    return Exit.FINE


def _list(given: argparse.Namespace) -> int:
    for each in cases.select(cases.SUITES[given.suite], given.select):
        for arm in each.arms:
            say(f"{each.case.id}/{arm}")
    return Exit.FINE
