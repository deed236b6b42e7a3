"""The engine against other people's code: transformers decodes the same greedy tokens of the shipped target."""

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
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

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
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The target in transformers, float32 without TF32, on the GPU if PyTorch has it."""
    folder: Path = tmp_path_factory.mktemp("hf")
    to_hf(MODELS, folder)
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(
        folder / "target", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


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
