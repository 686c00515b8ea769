"""Models whose passes cannot be made exactly are refused, in memory as well as in a folder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPTNeoConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    PretrainedConfig,
)

from decode import generate
from decode.common.errors import ConfigError, InputError, UserError
from tests.decode.checks import check_pathwise_equality, ragged_prompts
from tests.tiny import tiny_llama

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
UNUSUAL = {
    "bloom": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
    "gpt_neo": GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ),
    "llama4_text": Llama4TextConfig(
        **SIZES, head_dim=8, attention_chunk_size=4, num_local_experts=2, layer_types=["chunked_attention"] * 2
    ),
    "mamba": MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_a_model_in_memory_that_cannot_be_treated_exactly_is_refused(name: str) -> None:
    ids, _ = ragged_prompts(1)
    with pytest.raises(InputError, match=name):
        generate(_random(UNUSUAL[name]), None, ids, max_new_tokens=2)


def test_a_rotation_that_depends_on_the_pass_is_used_only_where_it_does_not() -> None:
    """Beyond its original context longrope rotates whole passes anew: text would depend on the draft and the batch."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0} | factors
    special: dict[str, Any] = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "original_max_position_embeddings": 16,
    }
    model = _random(Phi3Config(**SIZES, **special, rope_parameters=rope)).double()
    for kind in ("oracle", "tree"):
        check_pathwise_equality(model, kind, 3, max_new_tokens=7, num_draft_tokens=5)
    with pytest.raises(InputError, match="context is 16"):
        generate(model, None, ragged_prompts(1)[0], max_new_tokens=8)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": 1e-40}, "temperature=1e-40 lies between 0 and 0.0001"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0"),
        ({"tree": "dynamic", "tree_nodes": 0}, "tree_nodes=0"),
        ({"confidence": True}, "adaptive=False"),
        ({"confidence": True, "adaptive": True, "tree": "2x2"}, "tree=chain"),
        ({"strict": True, "tree": "2x2"}, "strict=true"),
        ({"tree": "auto"}, "tree=auto is gone.*adaptive=true.*dynamic"),
        ({"tree": "sequoia"}, "tree=sequoia is gone.*adaptive=true.*dynamic"),
        ({"max_new_tokens": 120}, "129, but the model's context is 128"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_or_the_model_are_refused(settings: dict[str, Any], said: str) -> None:
    model = _random(LlamaConfig(**SIZES))
    with pytest.raises(UserError, match=said):
        generate(model, None, ragged_prompts(1)[0], **{"max_new_tokens": 2, **settings})


def test_attention_without_masks_is_refused() -> None:
    model = _random(LlamaConfig(**SIZES))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="flash_attention_2.*load the model with attn_implementation='sdpa'"):
        generate(model, None, ragged_prompts(1)[0], max_new_tokens=2, tree="2x2")


def _random(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_draft_tokens": 100_000}, "num_draft_tokens=100000"),
        ({"tree": "dynamic", "tree_nodes": 100_000}, "tree_nodes=100000"),
        ({"tree": "²x2"}, "not a tree"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"input_ids": torch.tensor([1, 2])}, "shape"),
        ({"input_ids": torch.zeros(0, 3, dtype=torch.long)}, "shape"),
        ({"input_ids": torch.zeros(1, 3)}, "float32"),
        ({"input_ids": torch.tensor([[1, 99]])}, "99"),
        ({"drafter": "ngram"}, "load_drafter"),
    ],
    ids=str,
)
def test_calls_without_sense_are_refused_at_once(settings: dict, words: str) -> None:
    call = {"drafter": None, "input_ids": torch.tensor([[1, 2]]), "max_new_tokens": 4} | settings
    with pytest.raises(ConfigError, match=words):
        generate(tiny_llama(), **call)


def test_a_model_that_drops_at_random_is_refused() -> None:
    model = tiny_llama(attention_dropout=0.5).train()
    with pytest.raises(ConfigError, match="train mode"):
        generate(model, None, torch.tensor([[1, 2]]), max_new_tokens=4)
