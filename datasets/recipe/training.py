"""What both trainings share: optimisers, the time-boxed schedule, checkpoints, the device."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from model import Drafter, DrafterConfig, Target, TargetConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

SHARD_BYTES = 15_000_000  # small enough for tools that move checkpoints in pieces


def pick_device() -> torch.device:
    torch.set_float32_matmul_precision("high")
    if torch.cuda.is_available():
        return torch.device("cuda")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return torch.device("cpu")


def use_narrow_values(target: Target, narrow: bool) -> None:
    """Attention without padding of v: 1.8 times as fast on Hopper, and only cuDNN's kernel takes it."""
    for layer in target.layers:
        layer.self_attn.pad_values = not narrow
    torch.backends.cuda.enable_flash_sdp(not narrow)
    torch.backends.cuda.enable_mem_efficient_sdp(not narrow)
    torch.backends.cuda.enable_math_sdp(not narrow)


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def learning_rate(share: float, warm: float = 0.03, cool: float = 0.5) -> float:
    """Share of the time used -> factor: linear warm-up, flat, linear to zero over the last `cool`."""
    if share < warm:
        return max(share, 1e-3) / warm
    return 1.0 if share < 1 - cool else max((1 - share) / cool, 0.0)


def wait_for(path: Path, seconds: float) -> None:
    """Wait until another command of the recipe has written `path` (compilation overlaps with making the data)."""
    begin = time.monotonic()
    while not path.exists():
        if time.monotonic() - begin > seconds:
            raise FileNotFoundError(f"{path}: not there after {seconds:g} s")
        time.sleep(0.2)


@dataclass
class Clock:
    """Time box that starts once compilation is over; `spent` is what earlier runs of a resumed training used."""

    seconds: float
    spent: float = 0.0
    started: float | None = None

    def start(self) -> None:
        self.started = time.monotonic()

    @property
    def elapsed(self) -> float:
        return self.spent + (0.0 if self.started is None else time.monotonic() - self.started)

    @property
    def share(self) -> float:
        return self.elapsed / self.seconds


@torch.no_grad()
def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration of Muon on a stack of matrices [n, rows, columns]."""
    x = g.to(torch.bfloat16 if g.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return (x.mT if tall else x).to(g.dtype)


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum for matrices; matrices of one shape are handled as one stack."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            moments = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
            grads = [p.grad for p in params]
            torch._foreach_mul_(moments, group["momentum"])
            torch._foreach_add_(moments, grads)
            ahead = torch._foreach_add(grads, moments, alpha=group["momentum"])
            stacks: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for index, p in enumerate(params):
                stacks[tuple(p.shape[-2:])].append(index)
            torch._foreach_mul_(params, 1 - group["lr"] * group["decay"])
            for (rows, columns), indices in stacks.items():
                parts = [ahead[i].reshape(-1, rows, columns) for i in indices]
                update = orthogonalise(torch.cat(parts)) * max(1.0, rows / columns) ** 0.5
                updates = [
                    u.view_as(params[i]) for i, u in zip(indices, update.split([len(p) for p in parts]), strict=True)
                ]
                torch._foreach_add_([params[i] for i in indices], updates, alpha=-group["lr"])


def optimisers(model: nn.Module, lr_muon: float, lr_adam: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, Adam for embedding, head, router and norms."""
    outside = ("embed_tokens", "lm_head", "router")
    matrices = [p for n, p in model.named_parameters() if p.ndim >= 2 and not any(o in n for o in outside)]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    fused = rest[0].is_cuda
    out = [Muon(matrices, lr_muon), torch.optim.Adam(rest, lr_adam, betas=(0.9, 0.95), fused=fused)]
    for optimiser in out:
        for group in optimiser.param_groups:
            group["base"] = group["lr"]
    return out


def step_all(opts: list[torch.optim.Optimizer], factor: float) -> None:
    for optimiser in opts:
        for group in optimiser.param_groups:
            group["lr"] = group["base"] * factor
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)


def save_resume(path: Path, state: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def save_checkpoint(folder: Path, weights: dict[str, Tensor], config: dict[str, object], stem: str = "model") -> None:
    """Hugging Face directory: bf16 weights (float32 for the correction bias), sharded, with config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in weights.items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        tensor = value.detach().to("cpu", dtype).contiguous()
        if size and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        names = [f"{stem}.safetensors"]
    else:
        names = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        where = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(t.nbytes for shard in shards for t in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, folder / f"{file}.part", metadata={"format": "pt"})
        (folder / f"{file}.part").replace(folder / file)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                yield name, handle.get_tensor(name)


def load_target(folder: Path, device: torch.device) -> Target:
    """The checkpoint of `save_checkpoint` (values as stored, held in float32)."""
    given = json.loads((folder / "config.json").read_text())
    c = TargetConfig(**{k: given[k] for k in vars(TargetConfig())})
    target = Target(c)
    weights = dict(read_weights(folder))
    state: dict[str, Tensor] = {}
    for name in target.state_dict():
        stem, _, last = name.rpartition(".")
        if stem.endswith("mlp") and last in ("router", "bias"):
            key = "gate.weight" if last == "router" else "gate.e_score_correction_bias"
            state[name] = weights.pop(f"model.{stem}.{key}")
        elif stem.endswith("mlp") and last in ("gate_proj", "up_proj", "down_proj"):
            keys = [f"model.{stem}.experts.{e}.{last}.weight" for e in range(c.n_routed_experts)]
            state[name] = torch.stack([weights.pop(key) for key in keys])
        else:
            state[name] = weights.pop(name if name.startswith("lm_head") else f"model.{name}")
    if weights:
        raise ValueError(f"{folder}: tensors that the config does not name: {sorted(weights)[:5]}")
    target.load_state_dict(state)
    return target.float().eval().requires_grad_(False).to(device)


def load_drafter(folder: Path, device: torch.device) -> Drafter:
    given = json.loads((folder / "config.json").read_text())
    flat = {**given, **given["dflash_config"]}
    c = DrafterConfig(**{k: flat[k] for k in vars(DrafterConfig())})
    c = DrafterConfig(**{**vars(c), "target_layer_ids": tuple(c.target_layer_ids)})
    drafter = Drafter(c)
    drafter.load_state_dict(dict(read_weights(folder)))
    return drafter.float().eval().requires_grad_(False).to(device)
