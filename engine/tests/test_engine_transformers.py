"""The engine against other people's code: transformers decodes the same greedy tokens of the shipped target, and its
bf16 is no nearer to float32 than the engine's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets.evaluation import prompts
from datasets.recipe.export import to_hf
from engine.sources import CHECKOUT
from engine.tests.backends import open_ops
from engine.tests.decoding import World

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.filterwarnings("default")

MODELS = CHECKOUT / "datasets" / "models"
PROMPTS = [p for name in prompts.SETS for p in prompts.subset(prompts.load(name), 4)]
NEW = 64
TOLERANCE = 2e-4  # of logits: both sum in float32, in different orders


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(open_ops("cuda").library, tmp_path_factory.mktemp("models"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped target as transformers reads it."""
    made: Path = tmp_path_factory.mktemp("hf")
    to_hf(MODELS, made)
    return made / "target"


def load(folder: Path, dtype: Any) -> Any:
    """The target in transformers, float32 without TF32, on the GPU if PyTorch has it."""
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return load(folder, torch.float32)


def error(found: np.ndarray, true: np.ndarray) -> float:
    """Root of the mean square of the difference, in parts of that of the truth."""
    return float(np.sqrt(np.mean((found - true) ** 2) / np.mean(true**2)))


@pytest.mark.parametrize("kind", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bf16_is_as_near_to_float32_as_that_of_transformers(kind, folder, theirs, tmp_path):
    """Of short texts: the CPU has time for no more."""
    narrow = load(folder, torch.bfloat16)
    given = [prompt.tokens[:24] for prompt in PROMPTS[::4]]
    made_world = World(open_ops(kind).library, tmp_path)
    engine = made_world.engine(
        target=MODELS / "target.kdtr", drafter=None, dtype="bfloat16", block_size=2, prefill_rows=24, capacity=64
    )
    assert set(engine.paths.values()) == {"tensor_cores"}
    for number, text in enumerate(given):
        made = engine.generate(text, method="ar", max_new_tokens=4, keep_logits=True)
        whole = torch.tensor([[*text, *made.tokens]], device=theirs.device)
        with torch.no_grad():
            true, their_narrow = (
                model(whole).logits[0, len(text) - 1 :].float().cpu().numpy() for model in (theirs, narrow)
            )
        ours, other = error(made.logits, true), error(their_narrow, true)
        assert ours < 1.5 * other, f"text {number}: {ours:.3g}, that of transformers {other:.3g}"
        assert error(made.logits, their_narrow) < 2 * other, f"text {number}"
    made_world.close()


@pytest.mark.gpu
def test_transformers_decodes_the_engines_greedy_tokens(world, theirs):
    longest = max(len(prompt.tokens) for prompt in PROMPTS)
    engine = world.engine(
        target=MODELS / "target.kdtr",
        drafter=MODELS / "drafter.kdtr",
        max_requests=len(PROMPTS),
        capacity=longest + NEW + 64,
        prefill_rows=512,
    )
    given = [prompt.tokens for prompt in PROMPTS]
    made = {
        method: engine.generate(given, method=method, max_new_tokens=NEW, keep_logits=True)
        for method in ("ar", "ddtree")
    }
    for number, prompt in enumerate(PROMPTS):
        text = torch.tensor([prompt.tokens], device=theirs.device)
        with torch.no_grad():
            whole = theirs.generate(
                text,
                # Without it the end-of-text token in front would be taken for padding.
                attention_mask=torch.ones_like(text),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            logits = theirs(whole).logits[0, len(prompt.tokens) - 1 :].cpu().numpy()
        found = tuple(whole[0, len(prompt.tokens) :].tolist())
        for method, ours in ((name, generations[number]) for name, generations in made.items()):
            best = np.sort(ours.logits, axis=1)[:, -2:]
            margin = float((best[:, 1] - best[:, 0]).min())
            assert ours.tokens == found, f"{prompt.id}, {method}; least margin of the engine's choices {margin:.2g}"
            np.testing.assert_allclose(ours.logits, logits, atol=TOLERANCE, rtol=0, err_msg=f"{prompt.id}, {method}")
