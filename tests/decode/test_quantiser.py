"""A quantised checkpoint that cannot be loaded here is refused from its config.json and headers alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.common.checked_json import read_json, write_json
from decode.common.errors import InputError
from decode.common.typed_config import build
from decode.config import DecodeConfig, ModelConfig
from decode.models.load import describe_model
from decode.models.quantiser import PACKAGES
from distill.config import DistillConfig
from eval.config import EvalConfig
from tests.tiny import save_tiny_target
from tests.train.toy import tiny_settings
from train.config import TrainConfig

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
