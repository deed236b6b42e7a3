"""The drafter's training data: the target's own continuations of text prefixes.

    python datasets/recipe/generate.py --seconds 60 --target work/target --out work/own

A share of the rows is greedy, the others are sampled at temperatures between 0.7 and 1.0. A prefix is an end-of-text
token and 15 to 255 tokens of a document, from its start (a function with its documentation begins like a HumanEval
prompt) or from anywhere inside it. Writes OUT/own-NNN.npz: rows uint16 [n, width], prefix (tokens not generated),
temperature.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from corpus import WORK
from model import Target
from tokenizer import END_OF_TEXT_ID, MASK_ID
from torch import Tensor
from training import autocast, load_target, pick_device

PREFIXES = (16, 32, 64, 96, 128, 192, 256)


def choose(logits: Tensor, temperature: Tensor, generator: torch.Generator) -> Tensor:
    """logits [B, V], temperature [B] (0 is greedy) -> tokens [B]. The mask token is never chosen."""
    logits = logits.float()
    logits[:, MASK_ID] = -torch.inf
    uniform = torch.rand(logits.shape, generator=generator, device=logits.device).clamp_(1e-20, 1 - 1e-7)
    gumbel = -torch.log(-torch.log(uniform))
    return (logits + temperature[:, None] * gumbel).argmax(-1)


@torch.no_grad()
def continue_rows(target: Target, prefixes: Tensor, width: int, temperature: Tensor, seed: int) -> Tensor:
    """prefixes [B, P] on the target's device, temperature [B] -> rows [B, width], generated from column P on."""
    (batch, length), device = prefixes.shape, prefixes.device
    generator = torch.Generator(device).manual_seed(seed)
    cache = target.new_cache(batch, width, torch.bfloat16 if device.type == "cuda" else torch.float32)
    out = torch.empty(batch, width, dtype=torch.long, device=device)
    out[:, :length] = prefixes
    with autocast(device):
        logits = target.step(prefixes, 0, cache)
        for position in range(length, width):
            tokens = choose(logits, temperature, generator)
            out[:, position] = tokens
            if position + 1 < width:
                logits = target.step(tokens[:, None], position, cache)
    return out


def draw_prefixes(tokens: np.ndarray, length: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """[count, length]: half from the start of documents, half from anywhere; an end-of-text token stands first."""
    ends = np.flatnonzero(tokens[:-length] == END_OF_TEXT_ID)
    starts = np.concatenate(
        [rng.choice(ends, count // 2) + 1, rng.integers(1, len(tokens) - length, count - count // 2)]
    )
    rows = tokens[starts[:, None] + np.arange(length - 1)]
    return np.concatenate([np.full((count, 1), END_OF_TEXT_ID, rows.dtype), rows], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=WORK / "target")
    parser.add_argument("--tokens", type=Path, default=WORK / "tokens")
    parser.add_argument("--out", type=Path, default=WORK / "own")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--prefixes", type=int, nargs="+", default=PREFIXES)
    parser.add_argument("--greedy", type=float, default=0.5, help="share of the rows")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    device = pick_device()
    target = load_target(args.target, device)
    tokens = np.fromfile(args.tokens / "train.bin", np.uint16)
    args.out.mkdir(parents=True, exist_ok=True)
    done = len(list(args.out.glob("own-*.npz")))  # files of an interrupted run are kept
    begin, count = time.monotonic(), 0
    while count == 0 or time.monotonic() - begin < args.seconds:
        rng = np.random.default_rng([args.seed, done])
        length = args.prefixes[done % len(args.prefixes)]
        drawn = rng.uniform(0.7, 1.0, args.batch)
        temperature = np.where(rng.random(args.batch) < args.greedy, 0.0, drawn).astype(np.float32)
        prefixes = torch.from_numpy(draw_prefixes(tokens, length, args.batch, rng).astype(np.int64)).to(device)
        rows = continue_rows(target, prefixes, args.width, torch.from_numpy(temperature).to(device), done)
        part = args.out / "part.npz"
        np.savez(part, rows=rows.cpu().numpy().astype(np.uint16), prefix=length, temperature=temperature)
        part.replace(args.out / f"own-{done:03d}.npz")
        done, count = done + 1, count + args.batch * (args.width - length)
        seconds = time.monotonic() - begin
        print(f"{seconds:5.0f} s {done} files, {count} new tokens, {count / seconds / 1e3:.0f} k tokens/s", flush=True)
    (args.out / "done").touch()


if __name__ == "__main__":
    main()
