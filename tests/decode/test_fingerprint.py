"""What a fingerprint of weights in memory sees, and what it does not depend on."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from decode.models.fingerprint import comparable, weights_fingerprint
from tests.tiny import tiny_llama


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama(dtype=torch.bfloat16)


def same(one: LlamaForCausalLM, other: LlamaForCausalLM) -> bool:
    return weights_fingerprint(one) == weights_fingerprint(other)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loaded", [torch.float64, torch.float32, torch.bfloat16])
def test_precision_does_not_matter(saved: torch.dtype, loaded: torch.dtype) -> None:
    assert same(tiny_llama(dtype=saved).float(), cast(Any, tiny_llama(dtype=saved)).to(loaded))


def test_float16_is_compared_with_itself_alone(model: LlamaForCausalLM) -> None:
    """It rounds small weights of a bfloat16 checkpoint, so that equal files give unequal samples."""
    ours, half = weights_fingerprint(model), weights_fingerprint(deepcopy(model).half())
    assert not comparable(ours, half)
    assert comparable(half, half)
    assert comparable(ours, weights_fingerprint(tiny_llama(seed=1)))
    assert not comparable(ours, None)


@pytest.mark.parametrize("seed", [1, 2])
def test_other_weights_of_the_same_shapes_differ(model: LlamaForCausalLM, seed: int) -> None:
    assert not same(model, tiny_llama(seed=seed, dtype=torch.bfloat16))


def test_every_tensor_is_looked_at(model: LlamaForCausalLM) -> None:
    for name, weight in model.named_parameters():
        other = deepcopy(model)
        other.get_parameter(name).data.copy_(weight * 1.05)
        assert not same(model, other), name


def test_a_merged_and_an_unmerged_adapter_are_seen(model: LlamaForCausalLM) -> None:
    before = weights_fingerprint(model)
    adapters = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))  # type: ignore[arg-type]
    assert weights_fingerprint(model) != before
    merged = cast(Any, adapters).merge_and_unload()
    assert weights_fingerprint(merged) != before


def test_layout_in_memory_and_tied_names_do_not_matter() -> None:
    model, other = (tiny_llama(tie_word_embeddings=True) for _ in range(2))
    for module in other.modules():
        if isinstance(module, torch.nn.Linear) and module is not other.lm_head:
            module.weight.data = module.weight.data.t().contiguous().t()
    assert same(model, other)


def test_weights_that_are_not_all_here_have_none(model: LlamaForCausalLM) -> None:
    model.model.layers[1].to("meta")
    assert weights_fingerprint(model) is None


def test_of_quantised_weights_what_stays_floating_point_counts(model: LlamaForCausalLM) -> None:
    plain = weights_fingerprint(model)
    model.config.quantization_config = {"quant_method": "of_some_kind"}  # type: ignore[assignment]
    packed = torch.zeros(3, dtype=torch.uint8)
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(packed, requires_grad=False)  # type: ignore[union-attr]
    ours = weights_fingerprint(model)
    assert not comparable(plain, ours)
    other = deepcopy(model)
    other.model.layers[0].mlp.up_proj.weight.data += 1  # type: ignore[union-attr]
    assert same(model, other)
    other.model.norm.weight.data += 1
    assert not same(model, other)


def test_a_sample_is_not_of_one_column(model: LlamaForCausalLM) -> None:
    wide = torch.nn.Linear(4096, 4096, bias=False)
    wide.config = model.config  # type: ignore[assignment]
    before = weights_fingerprint(wide)  # type: ignore[arg-type]
    wide.weight.data[:, 1:] += 1
    assert weights_fingerprint(wide) != before  # type: ignore[arg-type]
