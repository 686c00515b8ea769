"""The rotary embedding that a draft takes over: its frequencies must be the target's, or its positions are others."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig

from decode.config import ModelConfig
from decode.models.load import ModelDescription
from train.drafts.rope import rope_of


def target(rope: dict[str, Any] | None) -> ModelDescription:
    config = LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=2)
    config.rope_parameters = rope  # type: ignore[assignment]
    return ModelDescription(ModelConfig(path="there"), config)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {"rope_type": "longrope", "rope_theta": 1e6, "short_factor": [1.0, 1.1], "long_factor": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("theirs", "same_size", "ours"),
    [
        ({"rope_theta": 5e5}, False, {"rope_type": "default", "rope_theta": 5e5}),
        (LLAMA3, False, LLAMA3),
        (LONG, True, LONG),
        (LONG | {"partial_rotary_factor": 0.5}, True, {"rope_type": "default", "rope_theta": 1e6}),
        (LONG, False, {"rope_type": "default", "rope_theta": 1e6}),
        ({"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}, True, {"rope_theta": 5e5}),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, False, {"rope_theta": 1e6}),
        ({}, False, {"rope_theta": 1e4}),
        (None, True, {"rope_theta": 1e4}),
    ],
)
def test_it_is_the_targets_as_far_as_it_fits(theirs: Any, same_size: bool, ours: dict[str, Any]) -> None:
    """Factors that there are one of per frequency fit heads of the same size alone."""
    described = target(theirs)
    before = repr(described.config.rope_parameters)
    assert rope_of(described, same_size) == {"rope_type": "default"} | ours
    assert repr(described.config.rope_parameters) == before, "the target's own configuration was changed"


def test_without_a_target_it_is_the_usual_one() -> None:
    assert rope_of(None) == {"rope_type": "default", "rope_theta": 1e4}


def test_a_factor_that_follows_from_the_targets_length_is_written_out() -> None:
    """The draft's own length (draft.max_positions) would give another one."""
    described = target(LONG | {"original_max_position_embeddings": 256})
    described.config.max_position_embeddings = 1024  # type: ignore[attr-defined]
    assert rope_of(described, same_head_dim=True)["factor"] == 4.0
    share = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    assert rope_of(target(share), same_head_dim=True) == share
