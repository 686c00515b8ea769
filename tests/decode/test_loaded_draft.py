"""A draft that is in memory already: checked against the target as a saved one is, and taken as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoConfig, GPTNeoForCausalLM

from decode import generate, load_drafter
from decode.common.errors import InputError
from tests.decode.checks import VOCAB, ragged_prompts
from tests.tiny import save_tiny_target, tiny_llama


def test_a_model_in_memory_drafts_and_stays_what_it_is() -> None:
    target = tiny_llama(VOCAB, dtype=torch.float64)
    draft = tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64).train()
    before = {name: weight.clone() for name, weight in draft.named_parameters()}
    drafter = load_drafter(draft, target=target)
    ids, mask = ragged_prompts(2)
    call: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": (), "seed": 0}
    drafted = generate(target, drafter, ids, mask, **call)
    assert torch.equal(drafted.sequences, generate(target, None, ids, mask, **call).sequences)
    assert draft.training
    assert all(weight.requires_grad and torch.equal(weight, before[name]) for name, weight in draft.named_parameters())
    itself = generate(target, load_drafter(target, target=target), ids, mask, num_draft_tokens=3, **call)
    assert itself.stats.tau == 4.0


def test_another_precision_or_vocabulary_is_refused() -> None:
    target = tiny_llama(VOCAB)
    draft = tiny_llama(VOCAB, num_layers=1, dtype=torch.float64)
    load_drafter(draft, target=target)
    for dtype, model in (("float32", draft), ("auto", tiny_llama(70, num_layers=1))):
        with pytest.raises(
            InputError, match="torch.float64.*torch.float32.*to\\(" if model is draft else "70 voc.*has 64"
        ):
            load_drafter(model, target=target, dtype=dtype)  # type: ignore[arg-type]


def test_a_model_in_memory_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(save_tiny_target(tmp_path / "target"))
    file = save_tiny_target(tmp_path / "draft", num_layers=1) / "tokenizer.json"
    draft = AutoModelForCausalLM.from_pretrained(file.parent)
    load_drafter(draft, target=target)
    text = file.read_text()
    file.write_text(text.replace('"!": 2', '"!": 999').replace('"#": 4', '"#": 2').replace('"!": 999', '"!": 4'))
    assert file.read_text() != text
    with pytest.raises(InputError, match="tokenizers differ"):
        load_drafter(draft, target=target)
    load_drafter(draft, target=target, check=False)


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (torch.nn.Linear(2, 2), "of type Linear"),
        (3, "of type int"),
        (
            GPTNeoForCausalLM(
                GPTNeoConfig(
                    vocab_size=64, hidden_size=32, num_layers=1, num_heads=4, attention_types=[[["global"], 1]]
                )
            ),
            "draft.path=.*gpt_neo",
        ),
    ],
    ids=["module", "number", "kind"],
)
def test_what_cannot_draft_is_refused(draft: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_drafter(draft, target=tiny_llama(VOCAB))
