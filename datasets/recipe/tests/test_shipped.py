"""The shipped target in other people's code: transformers loads the export and decodes the same tokens in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from datasets.recipe.export import to_hf
from reference.checkpoint import load_target
from reference.loop import ar_generate

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.filterwarnings("default")

DATASETS = Path(__file__).resolve().parent.parent.parent
NEW = 24


def test_transformers_decodes_the_same_greedy_tokens(tmp_path):
    to_hf(DATASETS / "models", tmp_path / "hf")
    model, info = transformers.DeepseekV3ForCausalLM.from_pretrained(
        tmp_path / "hf" / "target", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    model.eval()
    ours = load_target(DATASETS / "models" / "target.kdtr")
    for name in ("humaneval", "mt_bench", "gsm8k", "heldout_code"):
        with (DATASETS / "prompts" / f"{name}.jsonl").open() as file:
            prompt = json.loads(file.readline())["tokens"][:160]
        with torch.no_grad():
            theirs = model.generate(
                torch.tensor([prompt]),
                # Without it the end-of-text token in front would be taken for padding.
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(prompt) :]
        found = ar_generate(ours, None, np.array(prompt, np.int32), max_new_tokens=NEW)
        assert theirs.tolist() == list(found.tokens), name
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0].numpy()
        mine = ours.forward(np.array(prompt, np.int32), ours.new_cache(len(prompt))).logits
        np.testing.assert_allclose(mine, logits, atol=2e-4, rtol=0)
