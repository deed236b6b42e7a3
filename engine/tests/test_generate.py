"""The command line that decodes a prompt: what it prints and with which status it ends."""

from __future__ import annotations

import importlib.util
import io
import sys

import numpy as np
import pytest

from engine.__main__ import main
from engine.build import HOST_NAME
from engine.engine import Engine
from engine.generate import Shown, summary
from engine.generation import Generation, Round
from engine.tests.decoding import PROMPT, VOCABULARY, micro_target, write_model
from reference.tests.models import random_weights

TOKENS = ",".join(map(str, PROMPT))
needs_tokenizers = pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="no package tokenizers")


@pytest.fixture
def call(world, monkeypatch, capsys):
    """Runs the command with the library of the world; (status, output, errors)."""
    load = Engine.load

    def with_library(*args, kind, **options):
        assert kind == ("host" if world.library.path.name == HOST_NAME else "cuda")
        return load(*args, library=world.library, **options)

    monkeypatch.setattr(Engine, "load", with_library)

    def run(*arguments: object) -> tuple[int, str, str]:
        place = ["--host"] if world.library.path.name == HOST_NAME else []
        status = main(["generate", *place, *map(str, arguments)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.mark.parametrize("method", ["ar", "chain", "ddtree"])
def test_tokens_in_and_out_without_a_tokenizer(world, call, method):
    more = [] if method == "ar" else ["--drafter", world.drafter_file, "--budget", 5, "--block-size", 4]
    status, out, err = call(
        "--target", world.target_file, "--tokens", TOKENS, "--method", method, "--max-new-tokens", 6, *more
    )
    assert status == 0
    assert out.split() == list(map(str, world.plain(count=6).tokens))
    assert err.startswith("6 tokens in ")
    assert "; prompt of 4 tokens in " in err
    assert err.endswith("; ended by length\n")


@pytest.fixture
def bf16_tokens(world):
    """Asked for in front of `call`, so that the engine is made as usual."""
    return world.engine(dtype="bfloat16").generate(PROMPT, method="ar", max_new_tokens=3).tokens


def test_bf16_and_the_kernels_that_it_took_are_told(world, bf16_tokens, call):
    status, out, err = call(
        "--target", world.target_file, "--tokens", TOKENS, "--max-new-tokens", 3, "--dtype", "bfloat16"
    )
    assert (status, out.split()) == (0, list(map(str, bf16_tokens)))
    assert err.endswith("; ended by length\nin bfloat16, kernels of products: general, attention: general\n")


def test_a_cache_in_fp8_is_told_and_refused_where_it_does_not_fit(world, call, tmp_path):
    config = micro_target(kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=16)
    file = write_model(tmp_path / "target.kdtr", config, random_weights(config))
    common = ("--tokens", TOKENS, "--max-new-tokens", 2, "--cache", "fp8")
    status, _, err = call("--target", file, *common, "--dtype", "bfloat16")
    assert status == 0
    assert err.endswith("\nin bfloat16, cache in fp8, kernels of products: general, attention: mma\n")
    status, _, err = call("--target", file, *common)
    assert (status, err) == (2, "engine: an fp8 cache holds rows of bf16, and the dtype is float32\n")
    status, _, err = call("--target", world.target_file, *common, "--dtype", "bfloat16")
    assert (status, err) == (2, "engine: an fp8 cache holds rows of 512 + 64 values, and the model's have 6 + 4\n")


def test_the_method_follows_from_the_models_and_draws_from_the_options(world, call):
    status, _, err = call("--target", world.target_file, "--tokens", TOKENS, "--max-new-tokens", 3)
    assert (status, "3 rounds, tau 1.00" in err) == (0, True)
    status, out, err = call(
        *("--target", world.target_file, "--drafter", world.drafter_file, "--tokens", TOKENS, "--max-new-tokens", 5),
        *("--budget", 64, "--temperature", 1.0, "--top-k", 12, "--top-p", 0.875, "--seed", 3),
    )
    expected = world.plain(count=5, temperature=1.0, top_k=12, top_p=0.875, seed=3).tokens
    assert (status, out.split()) == (0, list(map(str, expected)))
    heap = call(
        *("--target", world.target_file, "--drafter", world.drafter_file, "--tokens", TOKENS, "--max-new-tokens", 5),
        *("--budget", 64, "--temperature", 1.0, "--top-k", 12, "--top-p", 0.875, "--seed", 3, "--builder", "heap"),
    )
    assert heap[:2] == (0, out)


def test_a_text_ends_with_the_tokens_of_the_config(world, call, tmp_path):
    tokens = world.plain().tokens
    config = micro_target(eos_token_id=[VOCABULARY - 1, tokens[5]])
    file = write_model(tmp_path / "target.kdtr", config, random_weights(config))
    status, out, err = call("--target", file, "--tokens", TOKENS, "--max-new-tokens", 24)
    cut = tokens[: tokens.index(tokens[5]) + 1]
    assert (status, out.split()) == (0, list(map(str, cut)))
    assert err.endswith("; ended by stop\n")


@needs_tokenizers
def test_text_in_and_out_with_a_tokenizer(world, call, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    text = " ".join(f"w{token}" for token in PROMPT)
    (tmp_path / "prompt.txt").write_text(text, encoding="utf-8")
    expected = " ".join(f"w{token}" for token in world.plain(count=4).tokens) + "\n"
    model = ("--target", world.target_file, "--tokenizer", tmp_path / "words.json", "--max-new-tokens", 4)
    for prompt in (("--prompt", text), ("--prompt-file", tmp_path / "prompt.txt"), ("--tokens", TOKENS)):
        status, out, _ = call(*model, *prompt)
        assert (status, out) == (0, expected)
    tokenizer.save(str(world.folder / "tokenizer.json"))
    try:
        _, out, _ = call("--target", world.target_file, "--max-new-tokens", 4, "--prompt", text)
    finally:
        (world.folder / "tokenizer.json").unlink()
    assert out == expected


def test_a_failure_on_the_way_shows_what_was_decoded_and_ends_with_1(world, call, tmp_path):
    weights, tokens = random_weights(micro_target()), world.plain().tokens
    token = next(token for token in tokens[5:] if token not in (*tokens[:5], *PROMPT))
    weights["model.embed_tokens.weight"][token] = np.nan
    file = write_model(tmp_path / "target.kdtr", micro_target(), weights)
    status, out, err = call("--target", file, "--tokens", TOKENS, "--max-new-tokens", 24)
    assert (status, out.split()) == (1, list(map(str, tokens[: tokens.index(token)])))
    assert err.startswith("engine: request 0, node 0: the target's logits hold NaN")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"--tokens": "1,x"}, "--tokens are integers such as 5,1,17, got '1,x'"),
        ({"--tokens": ""}, "request 0: the prompt must hold at least one token"),
        ({"--tokens": "1,99"}, "request 0: prompt token 99 at 1 is outside the vocabulary"),
        ({"--method": "chain"}, "--method chain needs --drafter"),
        ({"--max-new-tokens": "-1"}, "request 0: max_new_tokens is -1"),
        ({"--target": "absent.kdtr"}, "absent.kdtr: no such file or folder"),
        ({"--tokenizer": "absent.json"}, "no tokenizer: absent.json is absent; --tokens takes token ids instead"),
        ({"--tokens": None, "--prompt": "text"}, "tokenizer.json is absent; --tokens takes token ids instead"),
        ({"--tokens": None, "--prompt-file": "absent.txt"}, "absent; --tokens takes token ids instead"),
    ],
)
def test_what_cannot_be_done_ends_with_2(world, call, change, said):
    given = {"--target": str(world.target_file), "--tokens": TOKENS, "--max-new-tokens": "1", **change}
    status, out, err = call(*(word for pair in given.items() if pair[1] is not None for word in pair))
    assert (status, out) == (2, "")
    assert err.startswith("engine: ")
    assert said in err


def test_a_missing_package_and_a_broken_file_are_told(world, call, tmp_path, monkeypatch):
    (tmp_path / "broken.json").write_text("{")
    arguments = ("--target", world.target_file, "--tokenizer", tmp_path / "broken.json", "--prompt", "text")
    if importlib.util.find_spec("tokenizers") is not None:
        status, _, err = call(*arguments)
        assert (status, "broken.json: " in err) == (2, True)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    status, _, err = call(*arguments)
    assert (status, "no tokenizer: the package tokenizers is not installed" in err) == (2, True)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens, skip_special_tokens):
        assert not skip_special_tokens
        return bytes(tokens).decode("utf-8", "replace")


def test_text_is_shown_in_whole_characters():
    stream = io.StringIO()
    shown = Shown(Bytes(), stream)
    seen = []
    for token in "aé€".encode():
        shown.add([token])
        seen.append(stream.getvalue())
    assert seen == ["a", "a", "aé", "aé", "aé", "aé€"]
    shown.add([0xE2, 0x82])
    shown.end()
    assert stream.getvalue() == "aé€\ufffd\n"
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    plain = Shown(Bytes(), narrow)
    plain.add("é".encode())
    plain.end()
    assert narrow.buffer.getvalue() == b"\\xe9\n"


def test_the_summary():
    done = Round(4, 3, 3, (0, 1, 2), (0, 0), {}, 0.25)
    made = Generation((1, 2, 3), (done,), "length", 0.125, 7)
    assert summary(made, 4) == (
        "3 tokens in 0.25 s: 12 tokens/s, 1 round, tau 3.00; prompt of 4 tokens in 0.125 s; ended by length"
    )
    assert summary(Generation((1,), (), "stop", 0.5, 4), 4) == ("1 token; prompt of 4 tokens in 0.5 s; ended by stop")
