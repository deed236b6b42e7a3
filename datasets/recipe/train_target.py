"""Train the target on the encoded corpus within a time box.

    python datasets/recipe/train_target.py --seconds 480 --out OUT [--resume]

Writes OUT/{config.json, model*.safetensors} at intervals and at the end, OUT/train.json (losses, speed) at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from corpus import WORK
from model import Target, TargetConfig
from torch import Tensor
from torch.nn import functional
from training import (
    Clock,
    autocast,
    learning_rate,
    optimisers,
    pick_device,
    save_checkpoint,
    save_resume,
    step_all,
    use_narrow_values,
    wait_for,
)


class Windows:
    """Windows of length + 1 tokens; every epoch shifts them by a random offset and shuffles them."""

    def __init__(self, path: Path, length: int, batch: int, device: torch.device, seed: int) -> None:
        self.tokens = torch.from_numpy(np.fromfile(path, np.uint16).astype(np.int16)).to(device)
        self.length, self.batch, self.generator = length, batch, torch.Generator().manual_seed(seed)
        self.starts = torch.empty(0, dtype=torch.long)
        self.epoch = 0
        if len(self.tokens) < (batch + 1) * length + 1:
            raise ValueError(f"{path}: {len(self.tokens)} tokens, one batch needs {(batch + 1) * length + 1}")

    def next(self) -> Tensor:
        if len(self.starts) < self.batch:
            offset = int(torch.randint(self.length, (1,), generator=self.generator))
            count = (len(self.tokens) - 1 - offset) // self.length
            self.starts = torch.randperm(count, generator=self.generator) * self.length + offset
            self.epoch += 1
        starts, self.starts = self.starts[: self.batch], self.starts[self.batch :]
        index = starts.to(self.tokens.device)[:, None] + torch.arange(self.length + 1, device=self.tokens.device)
        return self.tokens[index].long()


def loss_of(target: Target, batch: Tensor) -> tuple[Tensor, Tensor]:
    out = target(batch[:, :-1])
    return functional.cross_entropy(out.logits.flatten(0, 1).float(), batch[:, 1:].flatten()), out.load


@torch.no_grad()
def evaluate(target: Target, path: Path, length: int, batch: int, windows: int) -> dict[str, float]:
    """Held-out nats a token and top-1, over evenly spread windows."""
    device = target.lm_head.weight.device
    tokens = torch.from_numpy(np.fromfile(path, np.uint16).astype(np.int64))
    starts = torch.linspace(0, len(tokens) - length - 2, windows).long()
    nats = hits = 0.0
    for part in starts.split(batch):
        x = tokens[part[:, None] + torch.arange(length + 1)].to(device)
        with autocast(device):
            logits = target(x[:, :-1]).logits.flatten(0, 1).float()
        nats += functional.cross_entropy(logits, x[:, 1:].flatten(), reduction="sum").item()
        hits += (logits.argmax(-1) == x[:, 1:].flatten()).sum().item()
    count = windows * length
    return {"nats": nats / count, "top1": hits / count, "tokens": count}


Loss = Callable[[Target, Tensor], tuple[Tensor, Tensor]]


def prepare(target: Target, args: argparse.Namespace, device: torch.device) -> Loss:
    """The loss function, compiled where asked for, with the fastest attention that gives the plain result."""
    if not args.compile:
        return loss_of
    batch = torch.randint(2, target.c.vocab_size, (args.batch, args.length + 1), device=device)

    def probe(run: Loss) -> Tensor:
        with autocast(device):
            loss, _ = run(target, batch)
        loss.backward()
        size = torch.stack([p.grad.norm() for p in target.parameters() if p.grad is not None]).norm()
        target.zero_grad(set_to_none=True)
        return torch.stack([loss.detach(), size])

    plain = probe(loss_of)
    for narrow in (True, False) if device.type == "cuda" else (False,):
        use_narrow_values(target, narrow)
        run: Loss = torch.compile(loss_of, dynamic=False)
        try:
            got = probe(run)
            torch.testing.assert_close(got, plain, rtol=5e-2, atol=0.0)
        except (RuntimeError, AssertionError) as error:
            print(f"narrow values {narrow}: {error}", flush=True)
            torch.compiler.reset()
            continue
        print(f"narrow values {narrow}: loss and gradient norm {got.tolist()}, plain {plain.tolist()}", flush=True)
        return run
    print("no compiled form gives the plain result: training runs uncompiled", flush=True)
    use_narrow_values(target, False)
    return loss_of


def train(args: argparse.Namespace, config: TargetConfig) -> dict[str, object]:
    torch.manual_seed(args.seed)
    device = pick_device()
    target = Target(config).to(device).train()
    opts = optimisers(target, args.lr_muon, args.lr_adam)
    begin = time.monotonic()
    run = prepare(target, args, device)
    prepared = time.monotonic() - begin
    wait_for(args.tokens / "train.bin", args.wait)
    data = Windows(args.tokens / "train.bin", args.length, args.batch, device, args.seed)
    clock, step, log = Clock(args.seconds), 0, []
    resume = args.work / "target.resume"
    if args.resume and resume.exists():
        state = torch.load(resume, map_location=device, weights_only=True)
        target.load_state_dict(state["model"])
        for optimiser, saved in zip(opts, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        data.generator.set_state(state["generator"].cpu())
        clock.spent, step, log = state["elapsed"], state["step"], state["log"]
    print(f"parameters {sum(p.numel() for p in target.parameters())}; prepared in {prepared:.1f} s", flush=True)
    if args.deadline:  # compilation counts: the time box shrinks to what the deadline leaves
        clock.seconds = min(clock.seconds, args.deadline - (time.monotonic() - args.begin))
    clock.start()
    last_save, first = 0.0, step
    while clock.share < 1:
        factor = learning_rate(clock.share)
        with autocast(device):
            loss, load = run(target, data.next())
        loss.backward()
        step_all(opts, factor)
        moe = [layer.mlp for layer in target.layers if not layer.dense]
        for mlp, counts in zip(moe, load, strict=True):
            mlp.balance(counts, args.balance * factor)
        step += 1
        if step % args.every == 0:
            value, busiest = loss.item(), (load.float().amax(1) / load.float().mean(1)).max().item()
            rate = (step - first) * args.batch * args.length / max(clock.elapsed - clock.spent, 1e-9)
            log.append([step, round(clock.elapsed, 1), round(value, 4)])
            print(
                f"{clock.elapsed:6.0f} s step {step} epoch {data.epoch} loss {value:.3f} "
                f"{rate / 1e3:.0f} k tokens/s, busiest expert {busiest:.2f} x mean",
                flush=True,
            )
            if clock.elapsed - last_save > args.save_every:
                last_save = clock.elapsed
                save_checkpoint(args.out, target.published(), config.published())
                state = {"model": target.state_dict(), "optimisers": [o.state_dict() for o in opts]}
                state |= {"elapsed": clock.elapsed, "step": step, "log": log, "generator": data.generator.get_state()}
                save_resume(resume, state)
    save_checkpoint(args.out, target.published(), config.published())
    target.eval()
    with torch.no_grad():
        for p in target.parameters():
            p.copy_(p.to(torch.bfloat16))
    report: dict[str, object] = {
        "parameters": sum(p.numel() for p in target.parameters()),
        "steps": step,
        "tokens": step * args.batch * args.length,
        "epochs": data.epoch,
        "seconds": round(clock.elapsed, 1),
        "compile_seconds": round(prepared, 1),
        "heldout": evaluate(target, args.tokens / "heldout.bin", args.length, args.eval_batch, args.eval_windows),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "seed": args.seed,
        "log": log[:: max(1, len(log) // 100)],
    }
    (args.out / "train.json").write_text(json.dumps(report) + "\n")
    print({k: v for k, v in report.items() if k != "log"}, flush=True)
    return report


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, default=WORK / "tokens")
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--out", type=Path, default=WORK / "target")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--deadline", type=float, help="seconds after the start at which training must have ended")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait for train.bin once prepared")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr-muon", type=float, default=0.02)
    parser.add_argument("--lr-adam", type=float, default=3e-3)
    parser.add_argument("--balance", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--save-every", type=float, default=60)
    parser.add_argument("--eval-windows", type=int, default=512)
    parser.add_argument("--eval-batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of TargetConfig fields to change")
    return parser


def main() -> None:
    begin = time.monotonic()
    args = arguments().parse_args()
    args.begin = begin
    args.out.mkdir(parents=True, exist_ok=True)
    train(args, TargetConfig(**args.config))


if __name__ == "__main__":
    main()
