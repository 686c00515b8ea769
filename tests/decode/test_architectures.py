"""Targets of many architectures: the text of a loop without any cache, or a refusal before weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode import generate
from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.drafters.lm import LMDraft
from decode.forward.runner import CAPTURE_AFTER
from decode.models.compatibility import refuse_unsupported
from decode.models.load import describe_model
from decode.trees.tree_plans import chain, k_ary
from tests.architectures import CONFIGS, REFUSED, random_config, random_model

NEW_TOKENS = CAPTURE_AFTER + 6  # the last passes are captured, where they can be
PROMPTS = torch.tensor([[5, 9, 2, 17, 33], [60, 7, 21, 8, 12]])


def uncached(model: PreTrainedModel, ids: Tensor) -> Tensor:
    for _ in range(NEW_TOKENS):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_is_that_of_a_loop_without_cache(name: str) -> None:
    """Batches of two take the attention of batches. Falcon added boolean masks there, and both our loops agreed."""
    model = random_model(name)
    want = uncached(model, PROMPTS)
    for drafter, shape in ((None, chain(0)), (LMDraft(model), chain(2)), (LMDraft(model), k_ary([2, 1]))):
        settings = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "eos_token_id": (), "tree": shape}
        assert torch.equal(generate(model, drafter, PROMPTS, **settings).sequences, want), shape  # type: ignore[arg-type]
        alone = generate(model, drafter, PROMPTS[:1], **settings).sequences  # type: ignore[arg-type]
        assert torch.equal(alone, want[:1]), shape


@pytest.mark.parametrize("name", CONFIGS)
def test_drawn_text_does_not_depend_on_the_draft(name: str) -> None:
    model = random_model(name)
    plain = generate(model, None, PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=(), seed=3).sequences
    drafted = generate(
        model, LMDraft(model), PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=(), seed=3, tree=k_ary([2, 2])
    )
    assert torch.equal(drafted.sequences, plain)
    assert drafted.stats.acceptance_by_position[0] > 0.9


def test_falcon_is_not_given_an_attention_that_it_does_not_look_for() -> None:
    model = random_model("falcon")
    out = generate(model, None, PROMPTS, max_new_tokens=NEW_TOKENS, temperature=0, eos_token_id=(), seed=0)
    assert torch.equal(out.sequences, uncached(model, PROMPTS))


WHY = {
    "mpt": "take no position_ids",
    "minimax": "linear_attention",
    "openai-gpt": "take no cache",
    "xlnet": "take no cache",
    "bert": "is_decoder=False",
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_before_weights_are_read(name: str, tmp_path: Path) -> None:
    random_config(name).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(InputError, match=WHY[name]):
        describe_model(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("given", "said"),
    [({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"), ({"attn_temperature_tuning": True}, "end of")],
)
def test_llama_4_is_refused_where_its_attention_knows_nothing_of_positions(given: dict, said: str) -> None:
    config = random_config("llama4_text")
    for name, value in given.items():
        setattr(config, name, value)
    with pytest.raises(InputError, match=said):
        refuse_unsupported(config, "there")


def test_sdpa_is_refused_where_a_model_has_none_and_auto_takes_eager(tmp_path: Path) -> None:
    model = random_model("gpt_oss").float()
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="attn_implementation=sdpa.*gpt_oss.*attn_implementation=auto"):
        describe_model(ModelConfig(path=str(tmp_path), attn_implementation="sdpa"))
    assert LMDraft.from_pretrained(tmp_path).model.config._attn_implementation == "eager"
