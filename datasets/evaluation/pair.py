"""The shipped pair, ready to run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import kdtr
from datasets.evaluation.batched import BatchDrafter
from reference.checkpoint import load_target, read_drafter
from reference.config import DrafterConfig
from reference.dflash import DFlash
from reference.model import Model
from reference.numerics import Array

FOLDER = Path(__file__).resolve().parent.parent / "models"


@dataclass(frozen=True)
class Pair:
    """Target and drafter in float32. digest: SHA-256 over what both files hold, their metadata aside."""

    target: Model
    drafter_config: DrafterConfig
    drafter_weights: Mapping[str, Array]
    digest: str

    @property
    def stop_tokens(self) -> frozenset[int]:
        return frozenset(self.target.config.eos_token_id)

    def drafter(self, block_size: int) -> DFlash:
        """A drafter of its own state."""
        return DFlash(
            self.drafter_config, self.drafter_weights, self.target.embedding, self.target.head, block_size=block_size
        )

    def batch_drafter(self) -> BatchDrafter:
        return BatchDrafter(self.drafter_config, self.drafter_weights, self.target.embedding, self.target.head)


def load(folder: Path = FOLDER) -> Pair:
    """target.kdtr and drafter.kdtr of a folder."""
    files = [folder / "target.kdtr", folder / "drafter.kdtr"]
    digest = hashlib.sha256("".join(map(_content, files)).encode()).hexdigest()
    config, weights = read_drafter(files[1])
    return Pair(load_target(files[0], attention="cheapest"), config, weights, digest)


def _content(path: Path) -> str:
    """Name, type, shape and checksum of every array of a KDTR file."""
    with kdtr.open(path) as container:
        return "".join(f"{n} {i.dtype} {i.shape} {i.data_sum:016x}\n" for n, i in sorted(container.info.items()))
