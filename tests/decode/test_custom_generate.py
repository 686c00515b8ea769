"""`model.generate(..., custom_generate=speculative)`: what transformers hands on is honoured or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode import speculative
from decode.common.errors import ConfigError
from decode.drafters.lm import LMDraft
from tests.decode.checks import VOCAB, ragged_prompts
from tests.tiny import tiny_llama

END = 5


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(VOCAB, dtype=torch.float64)


def both(model: Any, ids: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers' own loop gives, and ours."""
    asked = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0, **settings}
    draft = LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64))
    return model.generate(ids, **asked), model.generate(ids, custom_generate=speculative, drafter=draft, **asked)


COUNTING: dict[str, dict[str, Any]] = {
    "min_new_tokens": {"min_new_tokens": 6},
    "min_length": {"min_length": 14},
    "forced_eos": {"forced_eos_token_id": 7},
    "decay": {"exponential_decay_length_penalty": (2, 1.5)},
    "begin": {"begin_suppress_tokens": list(range(30))},
}


@pytest.mark.parametrize("name", COUNTING)
def test_processors_that_count_columns_are_taken_where_no_row_is_padded(model: Any, name: str) -> None:
    """Of a padded row they would count the padding: with min_new_tokens=6 a row padded by one got seven."""
    ids, mask = ragged_prompts(2)
    settings = {"eos_token_id": END, "sequence_bias": [[[END], 6.0]], **COUNTING[name]}
    theirs, ours = both(model, ids, attention_mask=torch.ones_like(ids), **settings)
    assert torch.equal(ours, theirs)
    with pytest.raises(ConfigError, match=r"count columns of the batch.* 9 columns for 8 tokens"):
        both(model, ids, attention_mask=mask, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"position_ids": torch.arange(3, 12)[None]}, "position_ids differ"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
        ({"encoder_repetition_penalty": 1.5}, "EncoderRepetitionPenalty"),
    ],
    ids=str,
)
def test_what_is_not_honoured_is_refused(model: Any, settings: dict[str, Any], words: str) -> None:
    ids, _ = ragged_prompts(1)
    with pytest.raises(ConfigError, match=words):
        both(model, ids, **settings)


def test_inputs_of_the_model_that_would_be_left_out_are_refused(model: Any) -> None:
    ids, _ = ragged_prompts(1)
    with pytest.raises(ConfigError, match=r"inputs \['token_type_ids'\]"):
        speculative(model, ids, [], [], model.generation_config, token_type_ids=torch.zeros_like(ids))  # type: ignore[arg-type]


def test_positions_that_are_the_usual_ones_are_taken(model: Any) -> None:
    ids, mask = ragged_prompts(2)
    usual = (mask.cumsum(-1) - 1).clamp(min=0)
    theirs, ours = both(model, ids, attention_mask=mask, position_ids=usual)
    assert torch.equal(ours, theirs)


def test_several_sequences_of_a_prompt_have_noise_of_their_own(model: Any) -> None:
    ids, _ = ragged_prompts(1)
    _, ours = both(model, ids, do_sample=True, top_k=0, num_return_sequences=3)
    assert len({tuple(row) for row in ours.tolist()}) == 3
