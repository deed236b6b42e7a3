"""From the trainings' checkpoints to the shipped files, and back to Hugging Face directories.

    python -m datasets.recipe.export pack --target work/target --drafter work/drafter   # -> datasets/models/*.kdtr
    python -m datasets.recipe.export hf --out DIR      # DIR/target (sharded) and DIR/drafter, published names

Values are bf16, the router's correction bias float32; both directions keep every bit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import kdtr
from reference.checkpoint import read_drafter, read_target, save_hf, save_kdtr

RECIPE = Path(__file__).resolve().parent
MODELS = RECIPE.parent / "models"
SHARD_BYTES = 15_000_000  # two shards: the sharded reader has something to read


def pack(folders: Mapping[str, Path], out: Path) -> None:
    """Write out/target.kdtr, out/drafter.kdtr or both from the directories of the trainings (with train.json)."""
    out.mkdir(parents=True, exist_ok=True)
    for name, folder in folders.items():
        report = json.loads((folder / "train.json").read_text())
        steps = " + ".join(str(n) for n in (*report.get("before", ()), report["steps"]))
        meta = kdtr.provenance(
            seed=report["seed"],
            rng="torch",
            command=f"python datasets/recipe/train_{name}.py",
            device=report["device"],
            libs={"torch": report["torch"]},
            license="Apache-2.0",
            notes=f"{steps} steps",
        )
        if name == "target":
            save_kdtr(out / "target.kdtr", *read_target(folder), meta=meta)
        else:
            save_kdtr(out / "drafter.kdtr", *read_drafter(folder), meta=meta)
        print(f"{out / name}.kdtr: {(out / f'{name}.kdtr').stat().st_size / 2**20:.2f} MiB")


def to_hf(models: Path, out: Path) -> None:
    """Write out/target and out/drafter; FileExistsError if one of them is there."""
    config, weights = read_target(models / "target.kdtr")
    save_hf(out / "target", config, weights, max_shard_bytes=SHARD_BYTES)
    save_hf(out / "drafter", *read_drafter(models / "drafter.kdtr"))
    # The drafter's own numbers do not need it, so the file leaves it out; the published loaders ask for it.
    path = out / "drafter" / "config.json"
    given = {**json.loads(path.read_text()), "max_position_embeddings": config.max_position_embeddings}
    path.write_text(json.dumps(given, indent=2, sort_keys=True) + "\n")
    print(f"{out / 'target'}, {out / 'drafter'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="checkpoints of the trainings to KDTR")
    packing.add_argument("--target", type=Path, default=RECIPE / "work" / "target")
    packing.add_argument("--drafter", type=Path, default=RECIPE / "work" / "drafter")
    packing.add_argument("--only", choices=("target", "drafter"), help="pack one of the two")
    packing.add_argument("--out", type=Path, default=MODELS)
    unpacking = commands.add_parser("hf", help="KDTR to Hugging Face directories")
    unpacking.add_argument("--models", type=Path, default=MODELS)
    unpacking.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "pack":
        folders = {"target": args.target, "drafter": args.drafter}
        pack({args.only: folders[args.only]} if args.only else folders, args.out)
    else:
        to_hf(args.models, args.out)


if __name__ == "__main__":
    main()
