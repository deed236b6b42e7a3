"""Quick acceptance of a pair on held-out text, for choosing between checkpoints (one batched pass a sequence).

    python datasets/recipe/evaluate.py --target work/target --drafter work/drafter --out OUT/acceptance.json

The target's continuation is generated first; the drafter then proposes at every position of it, and chain and tree
rounds are walked along the continuation. That is exact for greedy decoding and has the right distribution for
sampling. tau is the number of tokens a round commits, the bonus token included; budgets exclude the root. Rows whose
output has less than 0.8 distinct 8-grams (loops) are counted apart.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from pathlib import Path

import numpy as np
import torch
from corpus import WORK
from generate import continue_rows, draw_prefixes
from model import Drafter, Target
from tokenizer import END_OF_TEXT_ID, Tokenizer
from torch import Tensor
from torch.nn import functional
from training import autocast, load_drafter, load_target, pick_device

RANKS = 32


def chain_length(ids: np.ndarray, truth: np.ndarray) -> int:
    """ids [L, K], truth [L] -> committed tokens of a chain round."""
    wrong = np.flatnonzero(ids[:, 0] != truth)
    return int(wrong[0]) + 1 if len(wrong) else len(truth) + 1


def tree_length(scores: np.ndarray, ids: np.ndarray, truth: np.ndarray, budget: int) -> int:
    """Committed tokens of a round with the best-first tree of `budget` nodes over scores, ids [L, K]."""
    depth_limit, ranks = scores.shape
    heap, children, count = [(-scores[0, 0], 0, 0, 0)], {}, 0  # (-score, depth, rank, parent)
    while heap and count < budget:
        cost, depth, rank, parent = heapq.heappop(heap)
        count += 1
        children[parent, int(ids[depth, rank])] = count
        if rank + 1 < ranks:
            heapq.heappush(heap, (cost + scores[depth, rank] - scores[depth, rank + 1], depth, rank + 1, parent))
        if depth + 1 < depth_limit:
            heapq.heappush(heap, (cost - scores[depth + 1, 0], depth + 1, 0, count))
    node, length = 0, 0
    while length < len(truth) and (node, int(truth[length])) in children:
        node = children[node, int(truth[length])]
        length += 1
    return length + 1


@torch.no_grad()
def propose(
    target: Target, drafter: Drafter, rows: Tensor, prefix: int, block: int, batch: int = 16
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and ids [n, positions, block - 1, K] of the drafter at every root prefix..width - block."""
    device, c = rows.device, drafter.c
    out_scores, out_ids = [], []
    for part in rows.split(batch):
        roots = torch.arange(prefix, rows.shape[1] - block + 1, device=device).expand(len(part), -1)
        noise = torch.full((*roots.shape, block), c.mask_token_id, device=device)
        noise[..., 0] = part.gather(1, roots)
        with autocast(device):
            features = target(part, taps=c.target_layer_ids, logits=False).features
            assert features is not None
            hidden = drafter(target.embed_tokens(noise), features, roots, block)[:, :, 1:]
            logits = functional.linear(hidden, target.lm_head.weight)
        top = functional.log_softmax(logits.float(), -1).topk(RANKS, -1)
        out_scores.append(top.values.cpu().numpy())
        out_ids.append(top.indices.cpu().numpy())
    return np.concatenate(out_scores), np.concatenate(out_ids)


def end_of(row: np.ndarray, prefix: int) -> int:
    ends = np.flatnonzero(row[prefix:] == END_OF_TEXT_ID)
    return prefix + int(ends[0]) + 1 if len(ends) else len(row)


def distinct_runs(row: np.ndarray, n: int = 8) -> float:
    runs = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def measure(
    target: Target, drafter: Drafter, rows: Tensor, prefix: int, block: int, budgets: tuple[int, ...]
) -> dict[str, object]:
    scores, ids = propose(target, drafter, rows, prefix, block)
    kinds = ("chain", *budgets)
    totals = {group: {kind: [0, 0] for kind in kinds} for group in ("plain", "looping")}
    right, count, sizes = np.zeros(block - 1), 0, {"plain": 0, "looping": 0}
    for index, row in enumerate(rows.cpu().numpy()):
        end = end_of(row, prefix)
        group = "plain" if distinct_runs(row[prefix:end]) >= 0.8 else "looping"
        sizes[group] += 1
        for kind in kinds:
            at = prefix
            while at + block <= end:
                truth, own = row[at + 1 : at + block], (scores[index, at - prefix], ids[index, at - prefix])
                length = chain_length(own[1], truth) if kind == "chain" else tree_length(*own, truth, int(kind))
                totals[group][kind][0] += length
                totals[group][kind][1] += 1
                at += length
        for at in range(prefix, end - block + 1):
            right += ids[index, at - prefix, :, 0] == row[at + 1 : at + block]
            count += 1
    return {
        "rows": sizes,
        "tau": {
            group: {str(kind): round(a / b, 3) for kind, (a, b) in part.items() if b} for group, part in totals.items()
        },
        "top1_by_depth": [round(x, 3) for x in (right / max(count, 1)).tolist()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=WORK / "target")
    parser.add_argument("--drafter", type=Path, default=WORK / "drafter")
    parser.add_argument("--tokens", type=Path, default=WORK / "tokens" / "heldout.bin")
    parser.add_argument("--tokenizer", type=Path, help="with it, some continuations are printed as text")
    parser.add_argument("--out", type=Path, default=WORK / "acceptance.json")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=128)
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--budgets", type=int, nargs="+", default=[7, 16, 32, 64, 128])
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    device = pick_device()
    target, drafter = load_target(args.target, device), load_drafter(args.drafter, device)
    tokens = np.fromfile(args.tokens, np.uint16)
    prefixes = draw_prefixes(tokens, args.prefix, args.rows, np.random.default_rng(args.seed)).astype(np.int64)
    report = {}
    for temperature in (0.0, 1.0):
        begin = time.monotonic()
        heat = torch.full((args.rows,), temperature, device=device)
        rows = continue_rows(target, torch.from_numpy(prefixes).to(device), args.prefix + args.new, heat, args.seed)
        result: dict[str, object] = {
            "distinct_8grams": round(
                float(np.mean([distinct_runs(r[args.prefix : end_of(r, args.prefix)]) for r in rows.cpu().numpy()])), 3
            ),
            "ended": int(((rows[:, args.prefix :] == END_OF_TEXT_ID).any(1)).sum()),
        }
        for block in args.blocks:
            found = measure(target, drafter, rows, args.prefix, block, tuple(args.budgets))
            result[f"block{block}"] = found
            print(f"T={temperature} block {block}: {found}", flush=True)
        report[f"T={temperature:g}"] = result
        print(f"T={temperature}: {result['distinct_8grams']} distinct, {time.monotonic() - begin:.1f} s", flush=True)
        if args.tokenizer:
            reader = Tokenizer.from_file(str(args.tokenizer))
            for row in rows[: args.samples].cpu().numpy():
                end = end_of(row, args.prefix)
                print(f"--- T={temperature}\n{reader.decode(row[1 : args.prefix])}\n>>>>>>", flush=True)
                print(reader.decode(row[args.prefix : end]), flush=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
