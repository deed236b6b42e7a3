"""Teach the trained target out of its loops: a short fine-tuning on its own greedy output.

    python datasets/recipe/unloop.py --seconds 50 --target work/target --out OUT

Greedy text of a small model repeats itself. Unlikelihood training (Welleck et al. 2020, "Neural Text Generation with
Unlikelihood Training") lowers the probability of every token that closes a run of `--run` tokens seen before in the
row, next to the ordinary loss on the corpus. Own rows are made anew several times. If the held-out loss ends more
than `--worse` nats above where it began, the target is written unchanged.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from corpus import WORK
from generate import continue_rows, draw_prefixes
from model import Target
from torch import Tensor
from torch.nn import functional
from train_target import Windows, evaluate, loss_of
from training import autocast, load_target, optimisers, pick_device, save_checkpoint, step_all


def closes_repeat(rows: Tensor, run: int) -> Tensor:
    """bool [B, T]: the `run` tokens that end here stand earlier in the row too."""
    count = rows.shape[1] - run + 1
    windows = rows.unfold(1, run, 1)  # [B, count, run]
    factors = torch.randint(1, 2**40, (run,), generator=torch.Generator().manual_seed(0)).to(rows.device)
    keys = ((windows + 1) * factors).sum(-1)  # wraps around: a hash
    same = keys[:, :, None] == keys[:, None, :]
    earlier = torch.ones(count, count, dtype=torch.bool, device=rows.device).tril(-1)
    out = torch.zeros_like(rows, dtype=torch.bool)
    out[:, run - 1 :] = (same & earlier).any(-1)
    return out


def unlikelihood(target: Target, rows: Tensor, repeats: Tensor, share: float) -> Tensor:
    """-log(1 - p) of the repeated tokens, averaged over `share` of all tokens (so that few repeats weigh little)."""
    logits = target(rows[:, :-1]).logits.float()
    nats = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    # log(1 - exp(-nats)), kept away from -inf
    loss = -torch.log1p(-torch.exp(-nats.clamp(min=1e-6)))
    return (loss * repeats[:, 1:].flatten()).sum() / (share * nats.numel())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=WORK / "target")
    parser.add_argument("--tokens", type=Path, default=WORK / "tokens")
    parser.add_argument("--out", type=Path, default=WORK / "target-unlooped")
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--rounds", type=int, default=5, help="how often own rows are made anew")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--prefixes", type=int, nargs="+", default=[32, 64, 96])
    parser.add_argument("--run", type=int, default=12)
    parser.add_argument("--weight", type=float, default=0.5)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32, help="corpus windows a step")
    parser.add_argument("--own-batch", type=int, default=64, help="own rows a step")
    parser.add_argument("--lr-muon", type=float, default=0.002)
    parser.add_argument("--lr-adam", type=float, default=3e-4)
    parser.add_argument("--balance", type=float, default=1e-4)
    parser.add_argument("--eval-windows", type=int, default=256)
    parser.add_argument("--worse", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = pick_device()
    target = load_target(args.target, device).train().requires_grad_(True)
    opts = optimisers(target, args.lr_muon, args.lr_adam)
    data = Windows(args.tokens / "train.bin", args.length, args.batch, device, args.seed)
    stream = np.fromfile(args.tokens / "train.bin", np.uint16)
    rng = np.random.default_rng(args.seed)
    moe = [layer.mlp for layer in target.layers if not layer.dense]

    def heldout() -> dict[str, float]:
        return evaluate(target, args.tokens / "heldout.bin", args.length, min(32, args.batch), args.eval_windows)

    def own_rows() -> tuple[Tensor, Tensor]:
        length = int(rng.choice(args.prefixes))
        prefixes = torch.from_numpy(draw_prefixes(stream, length, args.rows, rng).astype(np.int64)).to(device)
        rows = continue_rows(target, prefixes, args.width, torch.zeros(args.rows, device=device), args.seed)
        repeats = torch.cat([closes_repeat(part, args.run) for part in rows.split(256)])
        repeats[:, :length] = False
        return rows, repeats

    before, begin, steps, log = heldout(), time.monotonic(), 0, []
    for number in range(args.rounds):
        rows, repeats = own_rows()
        log.append([number, steps, round(repeats.float().mean().item(), 4)])
        print(
            f"{time.monotonic() - begin:5.0f} s step {steps}: {log[-1][2]:.3f} of the tokens close a repeat", flush=True
        )
        while (now := (time.monotonic() - begin) / args.seconds) < (number + 1) / args.rounds:
            pick = torch.randint(args.rows, (args.own_batch,), device=device)
            with autocast(device):
                plain, load = loss_of(target, data.next())
                loops = unlikelihood(target, rows[pick], repeats[pick], 0.2)
            (plain + args.weight * loops).backward()
            factor = min(1.0, (steps + 1) / 20) * max(0.0, 1 - now)
            step_all(opts, factor)
            for mlp, counts in zip(moe, load, strict=True):
                mlp.balance(counts, args.balance * factor)
            steps += 1
            if steps % 20 == 0:
                print(f"{now * args.seconds:5.0f} s step {steps} corpus {plain:.3f} repeats {loops:.3f}", flush=True)
    _, repeats = own_rows()
    log.append([args.rounds, steps, round(repeats.float().mean().item(), 4)])
    after = heldout()
    args.out.mkdir(parents=True, exist_ok=True)
    kept = after["nats"] <= before["nats"] + args.worse
    if kept:
        save_checkpoint(args.out, target.published(), target.c.published())
    else:
        for path in (*args.target.glob("*.safetensors*"), args.target / "config.json"):
            shutil.copy(path, args.out / path.name)
    report = {"kept": kept, "steps": steps, "heldout_before": before, "heldout_after": after, "repeats": log}
    (args.out / "unloop.json").write_text(json.dumps(report) + "\n")
    print(report, flush=True)


if __name__ == "__main__":
    main()
