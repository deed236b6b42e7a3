"""python -m engine generate: text as it is decoded, then how fast and in how many rounds."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from engine import checkpoint
from engine.abi import CACHES
from engine.decode_abi import BUILDERS, DTYPES, METHODS
from engine.engine import DEFAULT_BUDGET, Engine, Method
from engine.generation import Generation
from engine.run import DecodeError

TOKENIZER = "tokenizer.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a command line."""
    parser.add_argument("--target", type=Path, required=True, help="KDTR file or Hugging Face folder")
    parser.add_argument("--drafter", type=Path, help="the same of a DFlash drafter; needed by chain and ddtree")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help=f"needs the package tokenizers and {TOKENIZER}")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="the same, from a UTF-8 file")
    prompt.add_argument("--tokens", metavar="IDS", help="such as 5,1,17: needs neither")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help=f"default: {TOKENIZER} beside the target")
    parser.add_argument("--method", choices=METHODS, help="default: ddtree, without a drafter ar")
    parser.add_argument("--budget", type=int, default=DEFAULT_BUDGET, help="nodes of a tree (default: %(default)s)")
    parser.add_argument(
        "--builder",
        choices=BUILDERS,
        default=BUILDERS[0],
        help="of the trees: heap is the host's (default: %(default)s)",
    )
    parser.add_argument("--block-size", type=int, default=0, help="of the drafter (default: the trained one)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    parser.add_argument("--top-k", type=int, default=0, help="default: 0, off")
    parser.add_argument("--top-p", type=float, default=1.0, help="default: 1, off")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the arithmetic (default: %(default)s)")
    parser.add_argument(
        "--cache", choices=CACHES, default=CACHES[0], help="of the target's cache rows; fp8 with --dtype bfloat16 alone"
    )
    parser.add_argument("--device", type=int, default=0, help="number of the CUDA device (default: %(default)s)")
    parser.add_argument("--host", action="store_true", help="execute the kernels on the CPU: slow, needs no GPU")


def command(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 if decoding failed on the way. Raises ValueError, EngineError, BuildError before it starts."""
    method: Method = options.method or ("ddtree" if options.drafter else "ar")
    if method != "ar" and options.drafter is None:
        raise ValueError(f"--method {method} needs --drafter")
    tokenizer = _tokenizer(options)
    prompt = _prompt(options, tokenizer)
    budget = options.budget if method == "ddtree" else 0
    shown = Shown(tokenizer, sys.stdout)
    with Engine.load(
        options.target,
        options.drafter,
        dtype=options.dtype,
        cache=options.cache,
        kind="host" if options.host else "cuda",
        device=options.device,
        capacity=len(prompt) + max(options.max_new_tokens, 0) + max(budget, 0),
        max_budget=budget,
        block_size=options.block_size,
        prefill_rows=min(len(prompt), 256),
    ) as engine:
        try:
            made = engine.generate(
                prompt,
                method=method,
                builder=options.builder,
                max_new_tokens=options.max_new_tokens,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                seed=options.seed,
                stop_tokens=checkpoint.eos_tokens(options.target),
                on_tokens=lambda _, tokens: shown.add(tokens),
            )
        except DecodeError as error:
            shown.end()
            print(f"engine: {error}", file=sys.stderr)
            return 1
    shown.end()
    print(summary(made, len(prompt)), file=sys.stderr)
    if engine.dtype != DTYPES[0]:
        kernels = {**engine.paths, "attention": engine.attention_kernel}
        taken = ", ".join(f"{what}: {kernel}" for what, kernel in kernels.items())
        cache = "" if engine.cache == CACHES[0] else f", cache in {engine.cache}"
        print(f"in {engine.dtype}{cache}, kernels of {taken}", file=sys.stderr)
    return 0


def summary(made: Generation, prompt_length: int) -> str:
    """Speed, rounds and tau in one sentence."""
    decoded = _count(len(made.tokens), "token")
    if made.rounds:
        decoded += f" in {made.decode_seconds:.3g} s: {len(made.tokens) / made.decode_seconds:.3g} tokens/s"
        decoded += f", {_count(len(made.rounds), 'round')}, tau {made.tau:.2f}"
    prompt = f"prompt of {_count(prompt_length, 'token')} in {made.prefill_seconds:.3g} s"
    return f"{decoded}; {prompt}; ended by {made.finish_reason}"


class Shown:
    """Tokens as text, or as their numbers without a tokenizer, written to a stream as they come."""

    def __init__(self, tokenizer: Any, stream: TextIO):
        self._tokenizer, self._stream = tokenizer, stream
        self._tokens: list[int] = []
        self._length = 0  # characters written

    def add(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        text = self._text()
        if not text.endswith("\ufffd"):  # bytes of a character that is not whole yet
            self._write(text)

    def end(self) -> None:
        self._write(self._text() + "\n")

    def _text(self) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, self._tokens))
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=False))

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text[self._length :].encode(encoding, "backslashreplace").decode(encoding))
        self._stream.flush()
        self._length = len(text)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _tokenizer(options: argparse.Namespace) -> Any:
    """The tokenizer, None if there is none. Raises ValueError where one is needed, or the one asked for is broken."""
    beside = options.target if options.target.is_dir() else options.target.parent
    file = options.tokenizer or beside / TOKENIZER
    missing = None
    if not file.is_file():
        missing = f"{file} is absent"
    else:
        try:
            return importlib.import_module("tokenizers").Tokenizer.from_file(str(file))
        except ImportError:
            missing = "the package tokenizers is not installed"
        except Exception as error:  # what the package raises for a broken file
            raise ValueError(f"{file}: {error}") from error
    if options.tokens is None or options.tokenizer is not None:
        raise ValueError(f"no tokenizer: {missing}; --tokens takes token ids instead of text")
    return None


def _prompt(options: argparse.Namespace, tokenizer: Any) -> list[int]:
    if options.tokens is not None:
        try:
            return [int(word) for word in options.tokens.replace(",", " ").split()]
        except ValueError:
            raise ValueError(f"--tokens are integers such as 5,1,17, got {options.tokens!r}") from None
    try:
        text = options.prompt if options.prompt is not None else options.prompt_file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{options.prompt_file}: {error.strerror or error}") from error
    return list(tokenizer.encode(text).ids)
