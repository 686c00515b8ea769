"""Quantised targets are taken where a token's pass does not depend on the others in it, and else refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from decode import generate, load_drafter
from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.models.load import describe_model
from tests.decode.checks import VOCAB, ragged_prompts
from tests.tiny import save_tiny_target, tiny_llama


def compressed(strategy: str, dynamic: bool) -> dict[str, Any]:
    weights, inputs = {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": strategy, "dynamic": dynamic}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": data}}}


def granularity(name: str) -> list[dict[str, Any]]:
    return [{"_type": name, "_data": {}}] * 2


FLOAT8 = "Float8DynamicActivationFloat8WeightConfig"
BY_LAYER = {"_type": "FqnToConfig", "_data": {"fqn_to_config": torchao(FLOAT8)["quant_type"]}}
TAKEN: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "fp8 constant": {"quant_method": "fp8", "activation_scheme": "static"},
    "bitsandbytes 4 bit": {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_threshold": 6.0},
    "bitsandbytes 8 bit": {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 0.0},
    "weights of compressed tensors": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}},
    "scales of tokens": compressed("token", True),
    "constant scale": compressed("tensor", False),
    "torchao weights": torchao("Int8WeightOnlyConfig", granularity={"_type": "PerTensor"}),
    "torchao rows": torchao(FLOAT8, granularity=granularity("PerRow")),
    "torchao by an old name": {"quant_method": "torchao", "quant_type": "int8_weight_only"},
    "quanto weights": {"quant_method": "quanto", "weights": "int8", "activations": None},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "llm_int8_threshold=6.0.*one outlier"),
    "scale of a pass": (compressed("tensor", True), "dynamic activation scales of strategy tensor in group_0"),
    "torchao tensor": (torchao(FLOAT8, granularity=granularity("PerTensor")), "PerTensor granularity"),
    "torchao default": (torchao(FLOAT8), "PerTensor granularity"),
    "torchao by layer": ({"quant_method": "torchao", "quant_type": {"default": BY_LAYER}}, "PerTensor granularity"),
    "torchao by an old name": (
        {"quant_method": "torchao", "quant_type": "float8_dynamic_activation_float8_weight"},
        "PerTensor granularity",
    ),
    "torchao by width": (
        torchao("Int8DynamicActivationInt8WeightConfig", weight_only_decode=True),
        "weight_only_decode",
    ),
    "quanto": ({"quant_method": "quanto", "weights": "int8", "activations": "int8"}, "activations=int8"),
    "unknown": ({"quant_method": "of_some_kind"}, "quantised by of_some_kind.*is not known here.*awq.*torchao"),
}


def said_to_be(settings: dict[str, Any]) -> Any:
    """A model whose configuration says so."""
    model = tiny_llama(VOCAB)
    model.config.quantization_config = settings  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("name", TAKEN)
def test_what_treats_each_token_by_itself_is_taken(name: str) -> None:
    generate(said_to_be(TAKEN[name]), None, ragged_prompts(1)[0], max_new_tokens=2)


@pytest.mark.parametrize("name", REFUSED)
def test_what_treats_a_pass_as_one_is_refused(name: str) -> None:
    settings, words = REFUSED[name]
    with pytest.raises(InputError, match=words):
        generate(said_to_be(settings), None, ragged_prompts(1)[0], max_new_tokens=2)


def test_a_folder_is_refused_before_its_weights_are_read_and_may_still_draft(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "quantised")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.quantization_config = REFUSED["torchao tensor"][0]
    model.config.save_pretrained(folder)
    with pytest.raises(InputError, match="PerTensor"):
        describe_model(ModelConfig(path=str(folder)))
    describe_model(ModelConfig(path=str(folder)), role="draft", loads=False)
    target, ids = tiny_llama(300), torch.tensor([[5, 6, 7]])
    generate(target, load_drafter(model, target=target), ids, max_new_tokens=4)


def differ(model: Any) -> float:
    """By how much the logits of a row change when others are read beside it."""
    ids = torch.randint(0, VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float((model(ids).logits[0] - model(ids[:1]).logits[0]).abs().max())


def test_layers_that_torch_quantised_in_memory_are_refused() -> None:
    quantize = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    model = quantize(tiny_llama(VOCAB), {nn.Linear})
    assert differ(model) > 1e-3
    with pytest.raises(InputError, match="15 layers of the target .*one scale"):
        generate(model, None, ragged_prompts(1)[0], max_new_tokens=2)


INSTALLED: dict[str, tuple[str, Any, bool]] = {
    "4 bit": ("bitsandbytes", lambda _: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype="float32"), True),
    "8 bit": ("bitsandbytes", lambda _: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), True),
    "8 bit, outliers": ("bitsandbytes", lambda _: BitsAndBytesConfig(load_in_8bit=True), False),
    "weights": ("torchao.quantization", lambda ao: TorchAoConfig(ao.Int8WeightOnlyConfig()), True),
    "tokens": ("torchao.quantization", lambda ao: TorchAoConfig(ao.Int8DynamicActivationInt8WeightConfig()), True),
}
"""By package, where it is installed: what quantises, and whether tokens stay apart."""
ROUND_ACTIVATIONS = ("8 bit", "tokens")
"""A last bit of a sum may then move a value by a whole step, so that only passes of one shape give equal texts."""


@pytest.mark.parametrize("name", INSTALLED)
def test_quantised_weights_give_the_plain_loops_text_or_are_refused(name: str, tmp_path: Path) -> None:
    package, quantise, is_taken = INSTALLED[name]
    module = pytest.importorskip(package)
    tiny_llama(VOCAB, hidden_size=64).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantise(module), dtype=torch.float32)
    ids, mask = ragged_prompts(3)
    settings: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": (), "seed": 0}
    call = partial(generate, model, input_ids=ids, attention_mask=mask, strict=name in ROUND_ACTIVATIONS, **settings)
    assert (differ(model) < 1e-5) == is_taken
    if not is_taken:
        with pytest.raises(InputError, match="the text would depend on the draft"):
            call(None)
        return
    draft = load_drafter(tiny_llama(VOCAB, num_layers=1, seed=3), target=model)
    for drafter in (draft, load_drafter(model, target=model)):
        assert torch.equal(call(drafter).sequences, call(None).sequences)
