"""Byte-level BPE of the trained pair, and the encoded corpus.

    python datasets/recipe/tokenizer.py train    # datasets/models/tokenizer.json from a sample of the training text
    python datasets/recipe/tokenizer.py encode   # work/tokens/{train,heldout}.bin (uint16) from work/corpus/*.xz

Token 0 ends a text and also stands before one (`encode(text)` puts it there); token 1 is the drafter's mask and
never occurs in a text.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from corpus import RECIPE, WORK, read_documents
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT, MASK = "<|endoftext|>", "<|mask|>"
END_OF_TEXT_ID, MASK_ID = 0, 1
TOKENIZER = RECIPE.parent / "models" / "tokenizer.json"
# Pre-tokens: line break with the indentation after it, an identifier with one space before it, up to three digits,
# a run of signs, other white space.
PIECES = r"\n+[ ]*| ?[^\W\d]+| ?\d{1,3}| ?[^\s\w]+|\s+"


def train(documents: list[str], vocab_size: int, path: Path, sample_chars: int = 40_000_000) -> Tokenizer:
    """Train on the first `sample_chars` characters of the (hash-ordered) documents and save to `path`."""
    sample, total = [], 0
    for document in documents:
        if total >= sample_chars:
            break
        sample.append(document)
        total += len(document)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        sample,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT, MASK],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
        length=len(sample),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, END_OF_TEXT_ID)]
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the sample gave {tokenizer.get_vocab_size()} tokens, wanted {vocab_size}: sample too small")
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str], batch: int = 2048) -> np.ndarray:
    """uint16 [tokens]: every document after an end-of-text token, and one at the very end."""
    parts = []
    for start in range(0, len(documents), batch):
        encodings = tokenizer.encode_batch_fast(documents[start : start + batch])
        parts += [np.array(encoding.ids, dtype=np.uint16) for encoding in encodings]
    return np.concatenate([*parts, np.array([END_OF_TEXT_ID], dtype=np.uint16)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "encode"))
    parser.add_argument("--corpus", type=Path, default=WORK / "corpus")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=WORK / "tokens")
    args = parser.parse_args()
    if args.command == "train":
        train(read_documents(args.corpus / "train.xz"), args.vocab_size, args.tokenizer)
        return
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    args.out.mkdir(parents=True, exist_ok=True)
    for split in ("heldout", "train"):
        start, documents = time.monotonic(), read_documents(args.corpus / f"{split}.xz")
        ids = encode(tokenizer, documents)
        part = args.out / f"{split}.part"
        ids.tofile(part)
        part.replace(args.out / f"{split}.bin")
        characters = sum(map(len, documents))
        print(
            f"{split}: {len(documents)} documents, {characters} characters, {len(ids)} tokens, "
            f"{characters / len(ids):.2f} characters a token, {time.monotonic() - start:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
