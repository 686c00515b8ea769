"""transformers' assisted generation accepts of an exported draft LM what our decoder does."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode import generate
from tests.engines.environment import ROOT
from tests.engines.toys import PROMPTS, K, Toys

pytestmark = pytest.mark.engines


def test_it_takes_as_many_target_passes_as_our_rounds(toys: Toys) -> None:
    """By the code of its page; what a pass accepts is the same where texts and numbers of passes are, and both stop at
    the same token."""
    page = (ROOT / "docs/how-to/serving/transformers.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))
    folders = {
        '"TARGET"': repr(str(toys.target("llama"))),
        '"THIS_FOLDER"': repr(str(toys.exported("llama", "lm", "transformers"))),
    }
    for name, folder in folders.items():
        assert name in code
        code = code.replace(name, folder)
    found = []
    for prompt in PROMPTS:
        given = {"input_ids": torch.tensor([prompt]), "AutoModelForCausalLM": AutoModelForCausalLM}
        exec(compile(code, page, "exec"), given)
        found.append((given["text"][0].tolist(), given["passes"]))
    target, drafter = toys.loaded("llama"), toys.drafter("llama", "lm")
    out = generate(
        target, drafter, torch.tensor(PROMPTS), max_new_tokens=64, temperature=0.0, num_draft_tokens=K, seed=0
    )
    rounds = [sum(one.row == row for one in out.stats.rounds) for row in range(len(PROMPTS))]
    texts = [
        [*prompt, *new[:64]] for prompt, new in zip(PROMPTS, out.sequences[:, len(PROMPTS[0]) :].tolist(), strict=True)
    ]
    assert [text for text, _ in found] == [text[: len(own)] for text, (own, _) in zip(texts, found, strict=True)]
    assert [passes for _, passes in found] == rounds
    assert sum(rounds) < sum(len(text) - len(PROMPTS[0]) for text, _ in found) / 2
