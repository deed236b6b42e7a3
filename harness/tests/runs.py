"""Made-up runs for the tests of reports: every block, several data sets, budgets and states."""

from __future__ import annotations

import math
from typing import Any

from harness.records import RecordedTree, Row, Timing
from harness.tests.examples import make_row

BUDGETS = (7, 16, 64)
SETS = ("humaneval", "heldout_code")


def timed(seconds: float, n: int = 12, **change: Any) -> Timing:
    """Samples around a time; neighbours move together, as turns do."""
    samples = tuple(seconds * (1 + 0.01 * ((7 * i) % 5 - 2)) for i in range(n))
    fields: dict[str, Any] = {"method": "cpu", "mode": "e2e", "samples_s": samples, "warmup_s": seconds * 2}
    return Timing(**{"dropped": 0, "capped": False, "sample": "prompt", **fields, **change})


def tree(**change: Any) -> RecordedTree:
    """Root, two children, and a grandchild below the second one, which is the accepted path."""
    fields: dict[str, Any] = {
        "prompt": "humaneval/0",
        "round": 3,
        "tokens": (10, 11, 12, 13),
        "texts": ("\n    ", "return", " if", " n"),
        "parents": (-1, 0, 0, 2),
        "depths": (0, 1, 1, 2),
        "scores": (0.0, -0.39, -1.87, -3.75),
        "accepted": (0, 2, 3),
        "bonus": 14,
        "bonus_text": "umbers",
    }
    return RecordedTree(**{**fields, **change})


def decode(dataset: str, arm: str, seconds: float, tau: float = 1.0, **change: Any) -> Row:
    """A decoding row over 12 prompts of 24 tokens each."""
    budget = int(arm.removeprefix("ddtree-b")) if "ddtree" in arm else 0
    params = {
        "dataset": dataset,
        "block_size": 8,
        "depth_limit": 7,
        "temperature": 0.0,
        "max_new_tokens": 24,
        "batch": 1,
        "system": "reference",
        "budget": budget,
        "looping": False,
    }
    fields: dict[str, Any] = {
        "case": f"decode/{dataset}/block8/greedy",
        "arm": arm,
        "against": None if arm == "ar" else "ar",
        "params": {**params, **change.pop("params", {})},
        "metrics": {
            "tau": tau,
            "tokens_per_s": 24 / seconds if seconds else math.nan,
            "tau_mean": tau,
            "prompts": 12,
            "distinct8": 0.95,
        },
        "timing": timed(seconds),
        "depth_histogram": None if arm == "ar" else (5, 10, 3, 1, 0, 0, 0, 1),
    }
    return make_row(**{**fields, **change})


def decodings(dataset: str, **change: Any) -> list[Row]:
    """AR, a chain of 1.6 times its speed, and trees of which the first one is faster than the chain."""
    rows = [decode(dataset, "ar", 1.0, **change), decode(dataset, "chain", 0.625, 2.5, **change)]
    for budget, seconds, tau in zip(BUDGETS, (0.5, 0.627, 0.9), (2.9, 3.1, 3.4), strict=True):
        rows.append(decode(dataset, f"ddtree-b{budget}", seconds, tau, **change))
    return rows


def builder(arm: str, seconds: float | None, budget: int = 64, batch: int = 1, **change: Any) -> Row:
    fields: dict[str, Any] = {
        "block": "builder",
        "case": f"builder/depth7/b{budget}/batch{batch}",
        "arm": arm,
        "against": None if arm == "heapq" else "heapq",
        "params": {"depth_limit": 7, "budget": budget, "batch": batch},
        "metrics": {"nodes": float(budget)},
        "timing": None if seconds is None else timed(seconds, sample="repeat"),
    }
    return make_row(**{**fields, **change})


def not_run(row: Row, reason: str = "no CUDA device") -> dict[str, Any]:
    """Changes that make a row one that did not run."""
    return {"status": "NOT_RUN", "reason": reason, "parity": None, "metrics": {}, "timing": None, "case": row.case}


def run() -> list[Row]:
    """A whole run without a GPU."""
    rows = [row for name in SETS for row in decodings(name)]
    rows[2] = decode("humaneval", "ddtree-b7", 0.5, 2.9, trees=(tree(), tree(round=4, accepted=(0,))))
    rows += [
        decode(name, "gpu", 1.0, **not_run(decode(name, "gpu", 1.0)), depth_histogram=None, params={}) for name in SETS
    ]
    for budget in BUDGETS:
        rows += [
            builder("heapq", 1e-6 * budget, budget),
            builder("cpp-heap", 1e-7 * budget, budget),
            builder("sglang-heapq", 2e-6 * budget, budget),
            builder("gpu", None, budget, status="NOT_RUN", reason="no CUDA device", parity=None, metrics={}),
        ]
    stages = {"draft": 0.1, "tree_build": 0.02, "tree_compile": 0.01, "verify": 0.8, "commit": 0.03, "other": 0.04}
    staged = Timing("cpu", "staged", (1.0,), None, 0, False, warmups=0)
    rows.append(
        make_row(
            block="stage",
            case="stage/humaneval",
            arm="ddtree-b64",
            metrics={"rounds": 4},
            timing=staged,
            stages=stages,
        )
    )
    for n in (1, 8, 33):
        rows.append(
            make_row(
                block="curve",
                case="curve/verify",
                arm=f"n{n}",
                against=None if n == 1 else "n1",
                params={"rows": n, "prefix": 128},
                metrics={},
                timing=timed(0.01 * n**0.5, sample="repeat"),
            )
        )
    for arm, seconds in (("ar", 1.0), ("ddtree-b64", 0.5)):
        rows.append(
            make_row(
                block="replay",
                case="replay/humaneval",
                arm=arm,
                against=None if arm == "ar" else "ar",
                params={"dataset": "humaneval", "acceptance": "recorded"},
                metrics={"tau": 2.0, "rounds": 12},
                timing=timed(seconds, sample="repeat"),
            )
        )
    rows.append(make_row(block="bench", case="test_topk", arm="numpy", metrics={}, timing=timed(3e-5, sample="repeat")))
    return rows
