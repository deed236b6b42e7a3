"""Rows and environments for the tests of this package, valid unless a field is changed."""

from __future__ import annotations

from typing import Any

from harness.records import Environment, Parity, Row


def make_environment(**change: Any) -> Environment:
    fields: dict[str, Any] = {
        "hardware_key": "cpu-example-2",
        "os": "Linux",
        "arch": "x86_64",
        "cpu": "Example CPU",
        "cores": 2,
        "commit": "a" * 40,
        "dirty": False,
        "code": "a" * 40,
        "modules": {"harness": "checkout/harness"},
        "versions": {"python": "3.11.9", "numpy": "2.3.0", "cupy": None},
        "threads": {"OMP_NUM_THREADS": "1"},
        "libraries": {},
        "gpu": None,
        "gpu_missing": "no CUDA driver",
    }
    return Environment(**{**fields, **change})


def make_row(**change: Any) -> Row:
    fields: dict[str, Any] = {
        "suite": "quick",
        "block": "decode",
        "case": "decode/x",
        "case_hash": "c" * 64,
        "arm": "ddtree-b64",
        "against": "ar",
        "params": {"dataset": "x", "budget": 64},
        "seed": 0,
        "status": "OK",
        "reason": None,
        "parity": Parity("ar", 24, 0),
        "metrics": {"tau": 3.5},
        "environment": make_environment(),
    }
    return Row(**{**fields, **change})
