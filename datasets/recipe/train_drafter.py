"""Train the DFlash drafter on the target's own output within a time box.

    python datasets/recipe/train_drafter.py --seconds 240 --target work/target --own work/own --out OUT [--resume]

Random roots in the generated part of a row, one block per root, all blocks in one pass, of the sizes that the drafter
is to be used with: trained on blocks of 16 alone, it found 0.82 of the first tokens at 16 and 0.51 at 8. Cross-entropy
at k = 1..size - 1 weighted exp(-(k-1)/gamma) against the distribution that the target drew the token from: a token
alone says less. What follows a wrong guess weighs less: no chain gets there, though a tree may by another node of the
same depth. Embedding and head are the target's and stay frozen. Nothing after a generated end of text is learnt. Rows
that are made meanwhile (generate.py on another GPU) are taken up as they come.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from corpus import WORK
from model import Drafter, DrafterConfig, Target, TargetConfig
from tokenizer import END_OF_TEXT_ID
from torch import Tensor
from torch.nn import functional
from training import (
    Clock,
    autocast,
    learning_rate,
    load_drafter,
    load_target,
    optimisers,
    pick_device,
    save_checkpoint,
    save_resume,
    step_all,
    use_narrow_values,
    wait_for,
)


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


class Own:
    """Generated rows on the device with the length of their prefixes and the temperature they were drawn at."""

    def __init__(self, folder: Path, device: torch.device, seed: int) -> None:
        self.folder, self.device = folder, device
        self.known: set[Path] = set()
        self.rows = torch.empty(0, 0, dtype=torch.int16, device=device)
        self.prefixes = self.ends = torch.empty(0, dtype=torch.long, device=device)
        self.temperatures = torch.empty(0, device=device)
        self.generator = torch.Generator().manual_seed(seed)
        self.refresh()
        if not self.known:
            raise FileNotFoundError(f"{folder}: no own-*.npz; run generate.py")

    def refresh(self) -> None:
        """Take up the files that came since the last time."""
        for path in sorted(set(self.folder.glob("own-*.npz")) - self.known):
            with np.load(path) as file:
                rows = torch.from_numpy(file["rows"].astype(np.int16)).to(self.device)
                prefixes = torch.full((len(rows),), int(file["prefix"]), device=self.device)
                temperatures = torch.from_numpy(file["temperature"]).to(self.device)
            pieces = zip(rows.split(256), prefixes.split(256), strict=True)
            ends = torch.cat([usable(piece.long(), first) for piece, first in pieces])
            self.rows = torch.cat([self.rows, rows]) if self.known else rows
            self.prefixes = torch.cat([self.prefixes, prefixes])
            self.ends = torch.cat([self.ends, ends])
            self.temperatures = torch.cat([self.temperatures, temperatures])
            self.known.add(path)

    def next(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens [batch, width], bounds [2, batch]: first and end of the positions to learn, temperature [batch])."""
        pick = torch.randint(len(self.rows), (batch,), generator=self.generator).to(self.device)
        bounds = torch.stack([self.prefixes[pick], self.ends[pick]])
        return self.rows[pick].long(), bounds, self.temperatures[pick]


def usable(rows: Tensor, prefix: Tensor, run: int = 16, more: int = 32) -> Tensor:
    """End [B] of the generated text to learn from: its end of text, or `more` tokens into its first loop."""
    position = torch.arange(rows.shape[1], device=rows.device)
    own = position >= prefix[:, None]
    width = rows.shape[1]
    stop = torch.where((rows == END_OF_TEXT_ID) & own, position + 1, width).amin(1)
    return torch.minimum(stop, torch.where(closes_repeat(rows, run) & own, position + more, width).amin(1))


def draw_roots(first: Tensor, end: Tensor, width: int, roots: int, block: int) -> Tensor:
    """Random root positions [B, roots] in first..end - 2, each with a full block inside the row."""
    position = torch.arange(width - block + 1, device=first.device)
    noise = torch.rand(len(first), len(position), device=first.device)
    outside = (position < first[:, None]) | (position + 1 >= end[:, None])
    return noise.masked_fill(outside, -1.0).topk(roots, -1).indices


def loss_of(
    drafter: Drafter,
    target: Target,
    features: Tensor,
    taught: Tensor,
    tokens: Tensor,
    bounds: Tensor,
    temperature: Tensor,
    roots: Tensor,
    sizes: Tensor,
    weights: Tensor,
    astray: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, chain tau of whole blocks, share of right tokens a depth in them).

    features [B, T, taps * hidden], taught [B, T, V]: logits of the target; bounds [2, B]: first and end; roots,
    sizes [B, R]: of the blocks; astray: what a token behind a wrong one weighs.
    """
    c = drafter.c
    index = roots[..., None] + torch.arange(c.block_size, device=tokens.device)
    labels = tokens.gather(1, index.flatten(1)).view(index.shape)
    noise = torch.full_like(labels, c.mask_token_id)
    noise[..., 0] = labels[..., 0]
    hidden = drafter(target.embed_tokens(noise), features, roots, c.block_size, sizes)[:, :, 1:]
    logits = functional.linear(hidden, target.lm_head.weight)
    labels, first, end = labels[..., 1:], bounds[0, :, None, None], bounds[1, :, None, None]
    depth = torch.arange(1, c.block_size, device=tokens.device)
    live = (index[..., 1:] < end) & (roots[..., None] >= first) & (depth < sizes[..., None])
    rows = torch.arange(len(tokens), device=tokens.device)[:, None, None]
    # Greedy rows have their token alone; nothing is drawn as the mask.
    drawn = taught[rows, index[..., 1:] - 1].float() / temperature.clamp(min=0.05)[:, None, None, None]
    drawn[..., c.mask_token_id] = -torch.inf
    nats = -(drawn.softmax(-1) * logits.float().log_softmax(-1)).sum(-1)
    right = (logits.argmax(-1) == labels) & live
    chain = right.long().cumprod(-1)  # 1: right up to here
    reached = functional.pad(chain[..., :-1], (1, 0), value=1)
    weights = weights * torch.where(reached > 0, 1.0, astray) * live
    whole = live.all(-1)
    tau = 1 + (chain.sum(-1) * whole).sum() / whole.sum().clamp(min=1)
    by_depth = (right * whole[..., None]).sum((0, 1)) / whole.sum().clamp(min=1)
    return (nats * weights).sum() / weights.sum().clamp(min=1e-6), tau, by_depth


def train(args: argparse.Namespace, config: DrafterConfig) -> dict[str, object]:
    torch.manual_seed(args.seed)
    device = pick_device()
    target = Target(TargetConfig(**args.target_config)).to(device).eval().requires_grad_(False)
    drafter = Drafter(config).to(device).train()
    before: list[int] = []  # steps of the trainings that this one goes on from
    if args.init:
        drafter.load_state_dict(load_drafter(args.init, device).state_dict())
        if (args.init / "train.json").exists():
            earlier = json.loads((args.init / "train.json").read_text())
            before = [*earlier.get("before", ()), earlier["steps"]]
    if target.c.num_hidden_layers - 1 in config.target_layer_ids:
        raise ValueError(f"target_layer_ids {config.target_layer_ids}: the last layer must not be tapped")
    weights = torch.exp(-torch.arange(config.block_size - 1, device=device).float() / args.gamma)
    if not all(2 <= size <= config.block_size for size in args.blocks):
        raise ValueError(f"blocks {args.blocks}: a size must lie in 2..{config.block_size}")
    blocks = torch.tensor(args.blocks, device=device)
    opts = optimisers(drafter, args.lr_muon, args.lr_adam)
    run = torch.compile(loss_of, dynamic=False) if args.compile else loss_of

    def learn(tokens: Tensor, bounds: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        roots = draw_roots(*bounds, tokens.shape[1], args.roots, config.block_size)
        sizes = blocks[torch.randint(len(blocks), roots.shape, device=device)]
        with autocast(device):
            with torch.no_grad():
                taught = target(tokens, taps=config.target_layer_ids)
            loss, tau, by_depth = run(
                drafter,
                target,
                taught.features,
                taught.logits,
                tokens,
                bounds,
                temperature,
                roots,
                sizes,
                weights,
                args.astray,
            )
        loss.backward()
        return loss.detach(), tau, by_depth

    begin = time.monotonic()
    if args.compile:
        use_narrow_values(target, device.type == "cuda")
        tokens = torch.randint(2, target.c.vocab_size, (args.batch, args.width), device=device)
        bounds = torch.full((2, args.batch), 16, device=device) + torch.tensor([[0], [99]], device=device)
        learn(tokens, bounds, torch.ones(args.batch, device=device))
        drafter.zero_grad(set_to_none=True)
    prepared = time.monotonic() - begin
    wait_for(args.own / "own-000.npz", args.wait)
    target.load_state_dict(load_target(args.target, device).state_dict())
    own = Own(args.own, device, args.seed)
    clock, step, log = Clock(args.seconds), 0, []
    resume = args.work / "drafter.resume"
    if args.resume and resume.exists():
        state = torch.load(resume, map_location=device, weights_only=True)
        drafter.load_state_dict(state["model"])
        for optimiser, saved in zip(opts, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        own.generator.set_state(state["generator"].cpu())
        clock.spent, step, log = state["elapsed"], state["step"], state["log"]
    size = sum(p.numel() for p in drafter.parameters())
    print(f"parameters {size}; prepared in {prepared:.1f} s; {len(own.rows)} rows", flush=True)
    if args.deadline:
        clock.seconds = min(clock.seconds, args.deadline - (time.monotonic() - args.begin))
    clock.start()
    first, sums = step, torch.zeros(3, device=device)
    while clock.share < 1:
        loss, tau, by_depth = learn(*own.next(args.batch))
        step_all(opts, learning_rate(clock.share, warm=0.04))
        step += 1
        sums += torch.stack([loss, tau, by_depth[0]])
        if step % args.every == 0:
            mean = (sums / args.every).tolist()
            sums.zero_()
            log.append([step, round(clock.elapsed, 1), *(round(m, 4) for m in mean)])
            print(
                f"{clock.elapsed:6.0f} s step {step} loss {mean[0]:.3f} tau {mean[1]:.3f} first token {mean[2]:.3f} "
                f"{(step - first) / max(clock.elapsed - clock.spent, 1e-9):.1f} steps/s, {len(own.rows)} rows",
                flush=True,
            )
            own.refresh()
            if len(log) % args.save_logs == 0:
                save_checkpoint(args.out, dict(drafter.state_dict()), config.published())
                state = {"model": drafter.state_dict(), "optimisers": [o.state_dict() for o in opts]}
                state |= {"elapsed": clock.elapsed, "step": step, "log": log, "generator": own.generator.get_state()}
                save_resume(resume, state)
    save_checkpoint(args.out, dict(drafter.state_dict()), config.published())
    report: dict[str, object] = {
        "parameters": size,
        "steps": step,
        "before": before,
        "roots": step * args.batch * args.roots,
        "own_rows": len(own.rows),
        "seconds": round(clock.elapsed, 1),
        "top1_by_depth": [round(x, 3) for x in by_depth.tolist()],
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "seed": args.seed,
        "log": log[:: max(1, len(log) // 100)],
    }
    (args.out / "train.json").write_text(json.dumps(report) + "\n")
    print({k: v for k, v in report.items() if k != "log"}, flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=WORK / "target")
    parser.add_argument("--own", type=Path, default=WORK / "own")
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--out", type=Path, default=WORK / "drafter")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--deadline", type=float, help="seconds after the start at which training must have ended")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait for the first data once prepared")
    parser.add_argument("--width", type=int, default=384, help="width of the generated rows")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--roots", type=int, default=64)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16], help="sizes of blocks to learn")
    parser.add_argument("--gamma", type=float, default=4.0)
    parser.add_argument("--astray", type=float, default=0.3, help="weight of tokens that follow a wrong one")
    parser.add_argument("--lr-muon", type=float, default=0.02)
    parser.add_argument("--lr-adam", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--save-logs", type=int, default=10, help="save at every n-th line of the log")
    parser.add_argument("--init", type=Path, help="drafter directory to start from")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--target-config", type=json.loads, default={}, help="JSON of TargetConfig fields to change")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of DrafterConfig fields to change")
    args = parser.parse_args()
    args.begin = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in args.config.items()}
    train(args, DrafterConfig(**given))


if __name__ == "__main__":
    main()
