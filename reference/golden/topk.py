"""Golden lists: logits -> sorted ids, log-probabilities and normaliser."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import kdtr
from reference.golden.files import EXACT, GoldenFile
from reference.golden.inputs import gaussian, integers
from reference.numerics import float32_to_bf16_bits
from reference.topk import topk_logprob

SEED = 20260413


def golden_files() -> list[GoldenFile]:
    file = GoldenFile(
        "topk", "topk", SEED, "Ties go to the lowest id; logz is within 1 ulp of the rounded float64 log-sum-exp."
    )
    for stream, vocab in enumerate((1, 31, 32, 33, 127, 1000, 4097)):
        _add(file, f"v{vocab}", 3 * gaussian(SEED, stream, 3, vocab), min(vocab, 64))
    _add(file, "k_above_v", gaussian(SEED, 20, 2, 5), 9)
    _add(file, "k_0", gaussian(SEED, 21, 2, 5), 0)
    _add(file, "no_depth", np.empty((0, 5), np.float32), 3)
    _add(file, "ties", integers(SEED, 22, 4, 4, 1000).astype(np.float32), 300)
    _add(file, "all_equal", np.full((2, 77), 2.5, np.float32), 40)
    padded = gaussian(SEED, 23, 3, 160)
    padded[:, 129:] = 1e30  # padding must never win, nor be counted
    _add(file, "padded_vocabulary", padded, 64, vocab_size=129)
    ends = gaussian(SEED, 24, 3, 200)
    ends[0, 3:] = -np.inf
    ends[1, 1:] = -np.inf
    _add(file, "minus_infinity", ends, 20)
    _add(file, "large", np.array([[65504, 60000, -65504, 0], [3e38, -3e38, 3e38, 0]], np.float32), 4)
    _add(file, "normalised", np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32)), 4)
    wide = gaussian(SEED, 25, 1, 163841)
    wide[0, [65535, 65536, 131071, 163840]] = [9, 9, 10, 10]  # ids that 16 bits or a float32 mantissa trick would lose
    _add(file, "v163841_bf16", bf16(wide), 128)
    _add(file, "v4096_bf16_ties", bf16(gaussian(SEED, 26, 7, 4096)), 256)
    return [file]


def _add(file: GoldenFile, case: str, logits: NDArray[Any], k: int, *, vocab_size: int | None = None) -> None:
    size = logits.shape[1] if vocab_size is None else vocab_size
    top = topk_logprob(logits, k, size)
    # lp = logit - logz: one ulp of logz, and the rounding of the subtraction.
    step = float(np.spacing(np.abs(top.logz).max(initial=np.float32(1))))
    finite = np.isfinite(top.lp)
    step = max(step, float(np.spacing(np.abs(top.lp[finite]).max(initial=np.float32(0)))))
    file.add(
        case,
        inputs={"logits": logits, "k": np.int32(k), "vocab_size": np.int32(size)},
        expected={
            "ids": (top.ids, EXACT),
            "lp": (top.lp, kdtr.Tolerance.close(2 * step, 0)),
            "logz": (top.logz, kdtr.Tolerance.ulp(1)),
        },
    )


def bf16(x: NDArray[Any]) -> NDArray[Any]:
    """Rounded to bfloat16, as an ml_dtypes array."""
    import ml_dtypes

    return float32_to_bf16_bits(x).view(ml_dtypes.bfloat16)
