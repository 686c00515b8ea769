"""Targets and drafts with peft's adapters: the model with the adapter that is on, whatever wraps it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    BOFTConfig,
    HRAConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM

from decode import generate, load_drafter, speculative
from decode.common.errors import InputError
from decode.drafters.lm import LMDraft
from decode.models.adapters import IN_LAYERS
from decode.models.fingerprint import changed_since_read, weights_fingerprint
from tests.decode.checks import VOCAB, ragged_prompts
from tests.decode.heads import random_head
from tests.tiers import by_default
from tests.tiny import save_tiny_target, tiny_llama

WHERE: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
LORA = LoraConfig(r=4, init_lora_weights=False, modules_to_save=["lm_head"], **WHERE)
METHODS: dict[str, PeftConfig] = {
    "ADALORA": AdaLoraConfig(total_step=10, init_lora_weights=False, **WHERE),
    "BOFT": BOFTConfig(boft_block_size=4, init_weights=False, **WHERE),
    "HRA": HRAConfig(r=4, init_weights=False, **WHERE),
    "IA3": IA3Config(feedforward_modules=[], init_ia3_weights=False, **WHERE),
    "LN_TUNING": LNTuningConfig(target_modules=["input_layernorm"]),
    "LOHA": LoHaConfig(r=4, init_weights=False, **WHERE),
    "LOKR": LoKrConfig(r=4, init_weights=False, **WHERE),
    "LORA": LORA,
    "OFT": OFTConfig(oft_block_size=4, init_weights=False, **WHERE),
    "VERA": VeraConfig(r=4, init_weights=False, **WHERE),
}


def adapted(config: PeftConfig = LORA, **sizes: Any) -> Any:
    """A PeftModel in fp64 whose adapter changes the text."""
    model = get_peft_model(tiny_llama(VOCAB, dtype=torch.float64, **sizes), config).double().eval()  # type: ignore[arg-type]
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            torch.manual_seed(len(name))
            weight.data.add_(torch.randn_like(weight), alpha=0.3)
    return model.requires_grad_(False)


def test_every_method_that_is_taken_is_tried() -> None:
    assert set(METHODS) == set(IN_LAYERS)


@pytest.mark.usefixtures("uncaptured")
@pytest.mark.parametrize("name", by_default(3, sorted(METHODS, key=lambda one: one != "LORA")))
def test_texts_are_those_of_the_wrapped_model(name: str) -> None:
    model, (ids, mask) = adapted(METHODS[name]), ragged_prompts(2)
    asked: Any = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    theirs = model.generate(input_ids=ids, attention_mask=mask, **asked)
    draft = LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64))
    call = partial(generate, model, draft, ids, mask, max_new_tokens=12, temperature=0)
    assert torch.equal(call().sequences, theirs)
    ours = model.generate(input_ids=ids, attention_mask=mask, custom_generate=speculative, drafter=draft, **asked)
    assert torch.equal(ours, theirs)
    with model.disable_adapter():
        assert not torch.equal(call().sequences, theirs), "the adapter changes nothing: the test sees nothing"


@pytest.mark.usefixtures("uncaptured")
@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_heads_draft_for_a_wrapped_target(name: str) -> None:
    """A PeftModel calls another module its base_model: heads looked for layers there."""
    model, (ids, mask) = adapted(), ragged_prompts(2)
    head = random_head(name, model.get_base_model())
    call = partial(generate, model, input_ids=ids, attention_mask=mask, max_new_tokens=12, eos_token_id=(), seed=0)
    assert torch.equal(call(head).sequences, call(None).sequences)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


def wrapped(folder: Path) -> Any:
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LORA)


def test_the_target_is_another_one_while_an_adapter_is_on(folder: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder)
    model = wrapped(folder)
    inside = model.get_base_model()
    assert weights_fingerprint(inside) != weights_fingerprint(plain)
    assert changed_since_read(plain, folder) == []
    with model.disable_adapter():
        assert weights_fingerprint(inside) == weights_fingerprint(plain)
        assert changed_since_read(inside, folder) == []
    tokens = LoraConfig(task_type="CAUSAL_LM", trainable_token_indices=[1, 2], **WHERE)
    trained_tokens = AutoModelForCausalLM.from_pretrained(folder)
    with get_peft_model(trained_tokens, tokens).disable_adapter():
        assert weights_fingerprint(trained_tokens) == weights_fingerprint(plain)
    model.merge_adapter()
    with model.disable_adapter():
        assert weights_fingerprint(inside) != weights_fingerprint(plain), "merged weights are not those of the files"


@pytest.mark.slow
def test_a_wrapped_model_is_a_draft_and_has_drafts(folder: Path) -> None:
    model, ids = wrapped(folder), torch.tensor([[5, 6, 7]])
    for draft in (folder, wrapped(folder)):
        drafter = load_drafter(draft, target=model)
        drafted = generate(model, drafter, ids, max_new_tokens=8, eos_token_id=(), seed=0)
        assert torch.equal(
            drafted.sequences, generate(model, None, ids, max_new_tokens=8, eos_token_id=(), seed=0).sequences
        )


REFUSED: dict[str, tuple[PeftConfig, str]] = {
    "prompt": (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "PROMPT_TUNING"),
    "activated": (LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[3, 4], **WHERE), "an activated LoRA"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_are_not_in_layers_are_refused(name: str) -> None:
    config, words = REFUSED[name]
    model = get_peft_model(tiny_llama(VOCAB), config).eval()  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"adapter 'default' is {words}"):
        generate(model, None, ragged_prompts(1)[0], max_new_tokens=2)  # type: ignore[arg-type]
