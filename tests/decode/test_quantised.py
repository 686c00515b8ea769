"""Quantised targets: taken where a token's pass does not depend on the others in it; else refused, where it can be
by config.json and headers alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from decode import generate, load_drafter
from decode.common.checked_json import read_json, write_json
from decode.common.errors import InputError
from decode.common.typed_config import build
from decode.config import DecodeConfig, ModelConfig
from decode.models.describe import describe_model
from decode.models.quantisation.quantiser import PACKAGES
from distill.config import DistillConfig
from eval.config import EvalConfig
from tests.decode.checks import VOCAB, ragged_prompts
from tests.tiers import spread
from tests.tiny import save_tiny_target, tiny_llama
from tests.train.toy import tiny_settings
from train.config import TrainConfig


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


@pytest.mark.parametrize("name", spread(2, INSTALLED))
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
        with pytest.raises(InputError, match="the text would depend on the draft|drafted ones too|drafts too"):
            call(None)
        return
    draft = load_drafter(tiny_llama(VOCAB, num_layers=1, seed=3), target=model)
    for drafter in (draft, load_drafter(model, target=model)):
        assert torch.equal(call(drafter).sequences, call(None).sequences)


GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
NOT_INSTALLED: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("gptqmodel", {"quant_method": "gptq", "bits": 4}),
    "awq": ("gptqmodel", {"quant_method": "awq", "bits": 4}),
    "compressed-tensors": ("compressed_tensors", {"quant_method": "compressed-tensors", "config_groups": GROUPS}),
    "bitsandbytes": ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bitsandbytes, of old": ("bitsandbytes", {"load_in_4bit": True}),
    "hqq": ("hqq", {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}),
    "auto-round": ("auto_round", {"quant_method": "auto-round", "bits": 4}),
    "aqlm": ("aqlm", {"quant_method": "aqlm"}),
    "quanto": ("optimum", {"quant_method": "quanto", "weights": "int8", "activations": None}),
    "vptq": ("vptq", {"quant_method": "vptq"}),
}
UNKNOWN: dict[str, Any] = {
    "other": {"quant_method": "of_some_kind"}, "none": {"bits": 4}, "null": {"quant_method": None}, "empty": {},
    "text": "fp8", "list": ["fp8"], "number": 4,
}  # fmt: skip
DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "compressed-tensors": ({"quant_method": "compressed-tensors",
                            "config_groups": {"group_0": {"input_activations": "dynamic"}}}, "quantised by compressed"),
    "torchao": ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": [1]}}},
                "quantised by int8"),
    "fp8": ({"quant_method": "fp8", "modules_to_not_convert": 5}, "modules_to_not_convert=5.*no list"),
    "fp8, one name": ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "'lm_head'.*no list"),
}  # fmt: skip
"""Settings of a known method that hold other kinds of values than they should."""
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
LAYERS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight",
          "down_proj.weight")  # fmt: skip


def said(folder: Path, settings: Any) -> Path:
    """A target whose config.json says that it is quantised so."""
    save_tiny_target(folder)
    write_json(folder / "config.json", read_json(folder / "config.json") | {"quantization_config": settings})
    return folder


def in_eight_bits(
    folder: Path, scale: Callable[[str], bool] = lambda name: True, pack: Callable[[str], bool] = lambda name: True,
    settings: dict[str, Any] = FP8, end: str = "_scale_inv",
) -> Path:  # fmt: skip
    """Linear weights in float8 where `pack` says so of their names, and with scales where `scale` does."""
    weights = load_file(said(folder, settings) / "model.safetensors")
    done: dict[str, Tensor] = {}
    for name, one in weights.items():
        is_linear = name.endswith(LAYERS)
        done[name] = one.to(torch.float8_e4m3fn) if is_linear and pack(name) else one
        if is_linear and scale(name):
            done[name + end] = torch.ones(-(-one.shape[0] // 16), -(-one.shape[1] // 16))
    save_file(done, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", NOT_INSTALLED)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_what_unpacks_its_weights_has_to_be_installed(name: str, role: str, tmp_path: Path) -> None:
    package, settings = NOT_INSTALLED[name]
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    method = name.partition(",")[0]
    said(tmp_path / "model", settings)
    with pytest.raises(
        InputError,
        match=rf"{role}\.path=.*quantised by {method}.*Install it: pip install {re.escape(PACKAGES[method])}",
    ):
        describe_model(ModelConfig(path=str(tmp_path / "model")), role=role)


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_method_that_nobody_knows_is_refused(name: str, role: str, tmp_path: Path) -> None:
    said(tmp_path / "model", UNKNOWN[name])
    with pytest.raises(InputError, match=rf"{role}\.path=.*(of_some_kind|no (table with a )?quant_method)"):
        describe_model(ModelConfig(path=str(tmp_path / "model")), role=role)


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_settings_of_another_kind_are_refused(name: str, role: str, tmp_path: Path) -> None:
    settings, words = DAMAGED[name]
    said(tmp_path / "model", settings)
    with pytest.raises(InputError, match=rf"{role}\.path=.*{words}"):
        describe_model(ModelConfig(path=str(tmp_path / "model")), role=role)


def decode(target: str, folder: Path) -> None:
    from decode.stage import run

    run(DecodeConfig(target=ModelConfig(path=target), prompt="def"))


def distill(target: str, folder: Path) -> None:
    from distill.stage import run

    run(build(DistillConfig, {"target": {"path": target}, "data": NOWHERE, "output_dir": str(folder)}))


def train(target: str, folder: Path) -> None:
    from train.stage import run

    run(build(TrainConfig, tiny_settings(folder, Path(target), target_source="live", data=NOWHERE)))


def judge(target: str, folder: Path) -> None:
    from eval.stage import run

    run(
        build(
            EvalConfig,
            {"target": {"path": target}, "drafts": {"a": "nowhere"}, "data": NOWHERE, "output_dir": str(folder)},
        )
    )


NOWHERE = {"name": "text", "path": "nowhere"}


@pytest.mark.parametrize("stage", [decode, distill, train, judge])
def test_every_stage_that_runs_the_target_refuses_it_before_it_reads(
    stage: Callable[[str, Path], None], tmp_path: Path
) -> None:
    """The corpus, which is not there, is not asked for."""
    if find_spec("gptqmodel"):
        pytest.skip("gptqmodel is installed")
    said(tmp_path / "model", NOT_INSTALLED["gptq"][1])
    with pytest.raises(InputError, match="pip install gptqmodel optimum"):
        stage(str(tmp_path / "model"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_engine_may_have_what_is_not_installed_here(tmp_path: Path) -> None:
    said(tmp_path / "model", NOT_INSTALLED["gptq"][1])
    describe_model(ModelConfig(path=str(tmp_path / "model")), loads=False)


FIRST = ".layers.0."
BROKEN: dict[str, dict[str, Any]] = {
    "plain weights": {"scale": lambda name: False, "pack": lambda name: False},
    "no scales": {"scale": lambda name: False},
    "some layers": {"scale": lambda name: FIRST in name},
    "some layers are plain": {"scale": lambda name: FIRST in name, "pack": lambda name: FIRST in name},
    "one weight": {"scale": lambda name: "layers.1.mlp.up" not in name},
    "fbgemm": {"settings": {"quant_method": "fbgemm_fp8"}, "scale": lambda name: False},
    "compressed": {
        "settings": {"quant_method": "compressed-tensors", "config_groups": GROUPS}, "scale": lambda name: False,
        "pack": lambda name: False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_weights_in_eight_bits_without_scales_are_refused(name: str, role: str, tmp_path: Path) -> None:
    folder = in_eight_bits(tmp_path / "model", **BROKEN[name])
    with pytest.raises(InputError, match=rf"{role}\.path=.*weight_scale, weight_scale_inv\): .*none.*Fetch"):
        describe_model(ModelConfig(path=str(folder)), role=role, loads=False)


WHOLE: dict[str, dict[str, Any]] = {
    "scales of blocks": {},
    "other name": {"end": "_scale"},
    "a layer left out": {
        "settings": FP8 | {"modules_to_not_convert": ["model.layers.1", "lm_head"]}, "pack": lambda name: FIRST in name,
        "scale": lambda name: FIRST in name,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_weights_with_their_scales_are_taken(name: str, tmp_path: Path) -> None:
    describe_model(ModelConfig(path=str(in_eight_bits(tmp_path / "model", **WHOLE[name]))))
