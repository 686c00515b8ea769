"""A target's hidden states and its two ends, as heads see them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig

from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.forward.target import CachedModel
from decode.models.head_targets import check_taps, strangeness
from decode.models.hidden_states import FINAL, Taps
from decode.models.output_head import ends_of, head_of, load_ends
from decode.models.structure import decoder_of
from tests.architectures import CONFIGS, random_model
from tests.tiny import MODELS, tiny_llama

POSITIONS_FIRST = ("gpt2", "opt", "xglm")
"""Whose first layer gets more than what the embedding gives."""
MAKERS = {**MODELS, **{f"random {name}": partial(random_model, name) for name in CONFIGS}}
HEADS_DRAFT_FOR = [name for name in MAKERS if not name.endswith(POSITIONS_FIRST)]


@pytest.mark.parametrize("name", HEADS_DRAFT_FOR)
def test_taps_are_the_hidden_states_that_transformers_returns(name: str) -> None:
    model = MAKERS[name]()
    ids = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(0))
    taps = Taps(model, (0, 1, FINAL))
    with torch.no_grad(), taps:
        out = model(ids, output_hidden_states=True)
    assert torch.equal(taps.stacked(), torch.stack([out.hidden_states[tap] for tap in taps.layers], 2))
    assert strangeness(model) is None
    check_taps(model.config, (0, 1, FINAL), "there")
    alone = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(head_of(model)(alone), out.logits)


OFTEN = ["llama", "qwen3", "mistral", "gemma3_text", "exaone_moe"]
PUBLISHED = "qwen2 qwen3_moe gpt_oss glm4_moe llama4_text gemma3 phi3 olmo2 smollm3 granite cohere deepseek_v3".split()


@pytest.mark.parametrize("name", [*OFTEN, *PUBLISHED])
def test_sizes_as_published_are_looked_at_in_a_small_model(name: str) -> None:
    """That of no more than two layers; nothing else of the process draws other numbers for it."""
    config, before = AutoConfig.for_model(name), torch.random.get_rng_state()
    kept = config.to_dict()
    check_taps(config, (0, 5, FINAL), "there")
    assert torch.equal(before, torch.random.get_rng_state())
    assert config.to_dict() == kept


@pytest.mark.parametrize("name", HEADS_DRAFT_FOR)
def test_passes_keep_them_slot_by_slot(name: str) -> None:
    """Ragged rows read as a prompt, then a tree whose second child stands: what is kept is what a whole pass gives."""
    model = MAKERS[name]()
    runner = CachedModel(model, 2, 64, taps=(1, FINAL))
    rows = [[5, 9, 2, 7], [1, 8]]
    ids = torch.tensor([row + [0] * (8 - len(row)) for row in rows])
    with torch.inference_mode():
        runner.prefill(ids, [0, 0], [3, 1])
        tokens = torch.tensor([[7, 3, 4, 6], [8, 3, 4, 6]])
        above = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()[None]
        starts = torch.tensor([[3], [1]])
        runner.forward(tokens, starts, torch.tensor([[0, 1, 1, 2]]), above, last_start=3)
        runner.commit(starts, torch.tensor([[0, 2, 3], [0, 2, 3]]), is_chain=False)
    assert runner.features is not None
    for row, text in enumerate([[5, 9, 2, 7, 4, 6], [1, 8, 4, 6]]):
        taps = Taps(model, (1, FINAL))
        with torch.no_grad(), taps:
            model(torch.tensor([text]))
        torch.testing.assert_close(runner.features[row, : len(text)], taps.stacked()[0], rtol=1e-5, atol=1e-6)


def test_what_is_elsewhere_shows_in_a_pass() -> None:
    scaled = tiny_llama()
    scaled.model.layers[0].register_forward_pre_hook(lambda layer, given: (given[0] * 3, *given[1:]))
    assert "first layer does not get" in str(strangeness(scaled))
    capped = tiny_llama()
    capped.register_forward_hook(halved)
    assert "its logits are not" in str(strangeness(capped))
    hidden = tiny_llama()
    hidden.model.layers = torch.nn.ModuleList([torch.nn.ModuleList(hidden.model.layers)])
    with pytest.raises(InputError, match="lists of 2 modules"):
        strangeness(hidden)


def halved(model: object, given: object, out: Any) -> Any:
    out.logits = out.logits / 2
    return out


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in HEADS_DRAFT_FOR])
def test_targets_that_add_positions_first_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="first layer does not get what its embedding gives.*Use draft=lm"):
        check_taps(MAKERS[name]().config, (FINAL,), "x")


def test_other_targets_and_other_layers_are_refused() -> None:
    with pytest.raises(InputError, match="gpt2 model.*positions or another scale come between"):
        check_taps(GPT2Config(), (FINAL,), "x")
    for wrong in ([3], [0, 0], [-2], []):
        with pytest.raises(InputError, match="which has 2 layers"):
            check_taps(LlamaConfig(num_hidden_layers=2), wrong, "x")


def test_the_last_layer_is_read_before_its_norm_too() -> None:
    model = tiny_llama(num_layers=2)
    check_taps(model.config, (2, FINAL), "x")
    taps = Taps(model, (2, FINAL))
    with torch.no_grad(), taps:
        model(torch.tensor([[5, 9, 2]]))
    raw, final = taps.each()
    torch.testing.assert_close(model.model.norm(raw), final)
    assert not torch.allclose(raw, final)


@pytest.mark.parametrize("name", HEADS_DRAFT_FOR)
def test_ends_are_read_without_the_layers_between(name: str, tmp_path: Path) -> None:
    model = MAKERS[name]()
    model.save_pretrained(tmp_path)
    ends, whole = load_ends(ModelConfig(path=str(tmp_path), device="cpu")), ends_of(model)
    ids, width = torch.tensor([[1, 5]]), model.config.get_text_config().hidden_size
    hidden = torch.randn(1, 2, width, dtype=model.dtype)
    torch.testing.assert_close(
        ends.embed(ids), whole.embed(ids), rtol=1e-7, atol=0
    )  # Gemma's scale is a rounded buffer
    assert torch.equal(ends.head(hidden), whole.head(hidden))
    assert not [key for key in ends.head.model.state_dict() if "layers." in key]


def test_ends_of_a_tied_head_are_one_matrix(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    loaded = load_ends(ModelConfig(path=str(tmp_path), device="cpu")).head.model
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight  # type: ignore[union-attr]
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 2
