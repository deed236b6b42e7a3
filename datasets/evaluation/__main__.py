"""Acceptance of the shipped pair on the shipped prompts.

    python -m datasets.evaluation tau      # measure every prompt; goes on where an earlier run stopped
    python -m datasets.evaluation report   # tables and verdicts of the rows; exit 1 when something does not hold
    python -m datasets.evaluation card     # put these tables into the model card
    python -m datasets.evaluation loops    # run the real loops too and hold them against the plain decode
    python -m datasets.evaluation record   # datasets/golden/drafter_lists_*.kdtr from real rounds

Rows go to the file given by --out (one JSON object a line). One BLAS thread is enough: most of the time goes into
products of a few hundred rows; set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from datasets.evaluation import loops, measure, pair, prompts, record, report, rows
from datasets.evaluation.measure import Settings
from datasets.evaluation.prompts import Prompt

REPORTS = Path("reports")
MARKS = ("<!-- acceptance: written by `python -m datasets.evaluation card` -->", "<!-- end of acceptance -->")
T = TypeVar("T")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("tau", "report", "card", "loops", "record"))
    parser.add_argument("--models", type=Path, default=pair.FOLDER)
    parser.add_argument(
        "--out", type=Path, help="rows (default reports/acceptance.jsonl, reports/loops.jsonl) or folder"
    )
    parser.add_argument("--sets", nargs="+", choices=prompts.SETS, default=prompts.SETS)
    parser.add_argument("--prompts", type=int, help="so many prompts a set, spread over it (default: all)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=Settings.temperatures)
    parser.add_argument("--blocks", type=int, nargs="+", default=Settings.blocks)
    parser.add_argument("--budgets", type=int, nargs="+", default=Settings.budgets)
    parser.add_argument("--new", type=int, default=Settings.max_new_tokens, help="output tokens a prompt")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after the batch that passes this time"
    )
    args = parser.parse_args()
    settings = Settings(tuple(args.temperatures), tuple(args.blocks), tuple(args.budgets), args.new)
    out = args.out or REPORTS / {"loops": "loops.jsonl"}.get(args.command, "acceptance.jsonl")
    if args.command == "report":
        return show(out)
    if args.command == "card":
        return fill_card(report.text(report.groups(rows.read(out))), args.models / "MODEL_CARD.md")
    if args.command == "record":
        return record.write(pair.load(args.models), args.out or record.FOLDER)
    chosen = interleaved([prompts.load(name) for name in args.sets], args.prompts)
    work = measure_all if args.command == "tau" else compare_all
    return work(pair.load(args.models), chosen, settings, out, args.minutes)


def interleaved(sets: Sequence[tuple[Prompt, ...]], count: int | None) -> list[Prompt]:
    """The prompts of all sets, each spread over the whole list: a stopped run holds its share of every set."""
    chosen = [prompts.subset(s, count) if count is not None and count < len(s) else s for s in sets]
    placed = [(i / len(s), order, prompt) for order, s in enumerate(chosen) for i, prompt in enumerate(s)]
    return [prompt for _, _, prompt in sorted(placed, key=lambda item: item[:2])]


def measure_all(held: pair.Pair, chosen: list[Prompt], settings: Settings, out: Path, minutes: float) -> int:
    """Rows of every prompt that has none yet, eight prompts at a time."""
    done = {row["case"] for row in rows.read(out)}
    todo = [p for p in chosen if not all(measure.case(held, p, t, settings) in done for t in settings.temperatures)]
    for batch in progress([todo[i : i + 8] for i in range(0, len(todo), 8)], minutes):
        rows.append(out, list(measure.measure(held, batch, settings)))
    return 0


def compare_all(held: pair.Pair, chosen: list[Prompt], settings: Settings, out: Path, minutes: float) -> int:
    """Loops of every prompt and temperature that has no rows yet; exit 1 when a difference is not excused."""
    done = {row["case"] for row in rows.read(out)}
    jobs = [(p, t) for p in chosen for t in settings.temperatures]
    wanted = {measure.case(held, p, t, settings): (p, t) for p, t in jobs}
    drafter = held.batch_drafter()
    for prompt, temperature in progress([job for key, job in wanted.items() if key not in done], minutes):
        rows.append(out, list(loops.compare(held, drafter, prompt, temperature, settings)))
    found = [row for row in rows.read(out) if row["case"] in wanted]
    for row in found:
        if not (row["same_tokens"] and row["same_counts"]):
            print(row)
    verdict = loops.verdict(found)
    print(verdict)
    return 0 if verdict.holds else 1


def progress(items: Sequence[T], minutes: float) -> Iterator[T]:
    """The items, with a line on stderr after each: done, total, seconds, seconds to go."""
    started = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        spent = time.monotonic() - started
        print(f"{done}/{len(items)} {spent:.0f} s, {spent / done * (len(items) - done):.0f} s to go", file=sys.stderr)
        if spent > 60 * minutes and done < len(items):
            print(f"stopped after {minutes:g} minutes; the same command goes on", file=sys.stderr)
            return


def fill_card(tables: str, card: Path) -> int:
    """Replace what stands between the two marks in the card; with no marks yet, add them at its end."""
    text = card.read_text(encoding="utf-8")
    before, found, rest = text.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2] if found else "\n"
    before = before if found else before.rstrip("\n") + "\n\n"
    card.write_text(f"{before}{MARKS[0]}\n{tables}\n{MARKS[1]}{after}", encoding="utf-8")
    return 0


def show(path: Path) -> int:
    """Tables and verdicts; exit 1 when something does not hold, 2 when there is nothing to show."""
    found = report.groups(rows.read(path))
    if not found:
        print(f"{path}: no rows", file=sys.stderr)
        return 2
    print(report.text(found))
    claims = report.claims(found)
    for claim in claims:
        print(f"{'holds' if claim.holds else 'FAILS'}  {claim.text}: {claim.found}")
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
