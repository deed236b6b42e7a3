"""The prompt sets as objects, and the fixed subset that quick checks use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "prompts"
SETS = ("humaneval", "mt_bench", "gsm8k", "heldout_code")


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt set. tokens: the tokenizer's encoding of text, end-of-text token in front."""

    set: str
    id: str
    source: str
    text: str
    tokens: tuple[int, ...]


def load(name: str, folder: Path = FOLDER) -> tuple[Prompt, ...]:
    """The prompts of one set, in file order. ValueError naming file and line for a line that is not a prompt."""
    path = folder / f"{name}.jsonl"
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        row = json.loads(line)
        if set(row) != {"id", "source", "text", "tokens"} or not row["tokens"]:
            raise ValueError(f"{path}:{number}: not a prompt: keys {sorted(row)}, {len(row.get('tokens', ()))} tokens")
        prompts.append(Prompt(name, row["id"], row["source"], row["text"], tuple(row["tokens"])))
    return tuple(prompts)


def subset(prompts: Sequence[Prompt], count: int = 16) -> tuple[Prompt, ...]:
    """`count` prompts spread evenly over a set; always the same ones."""
    return tuple(prompts[i * len(prompts) // count] for i in range(count))
