"""Whether a quantised checkpoint can be loaded here: what unpacks its weights is installed, and its files hold the
scales by which they are unpacked."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from decode.common.errors import InputError
from decode.models.quantisation.quantised import method_of, settings_of
from decode.models.weight_counts import empty_model

if TYPE_CHECKING:
    from decode.config import ModelConfig

PACKAGES = {
    "aqlm": "'aqlm[cpu,gpu]'",
    "auto-round": "auto-round",
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "kernels",
    "fbgemm_fp8": "fbgemm-gpu",
    "gptq": "gptqmodel optimum",
    "higgs": "flute-kernel fast_hadamard_transform",
    "hqq": "hqq",
    "mxfp4": "kernels triton",
    "quanto": "optimum-quanto",
    "spqr": "'spqr_quant[gpu]'",
    "vptq": "vptq",
}
"""What pip calls the packages of a method; of others transformers' own message says it."""
EIGHT_BITS = ("fbgemm_fp8", "fp8", "mxfp8")
"""Methods that keep a layer's weight under its own name, in eight bits, and its scale beside it."""
PACKED = ("weight", "weight_packed", "qweight")
OF_WEIGHT = ("_scale", "_scale_inv", "_scales", ".absmax")
OF_LAYER = (".weight_scale", ".scales", ".scale", ".SCB")
"""What methods call a scale: behind the name of the weight, and of its layer."""
SHOWN = 3  # names in a message


def refuse_missing_quantiser(config: PretrainedConfig, source: ModelConfig, role: str) -> None:
    """Raise InputError where transformers cannot load weights of this quantisation here, as it says itself: without the
    method's package or its device, or by a method that it does not know."""
    settings = settings_of(config)
    if settings is None:
        return
    try:
        quantiser = AutoHfQuantizer.from_config(deepcopy(dict(settings)), pre_quantized=True)
        quantiser.validate_environment(device_map=source.device_map, weights_only=True)
    except Exception as error:  # noqa: BLE001  ImportError, RuntimeError, ValueError, and what settings of other versions raise
        method = method_of(config)
        what = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        is_package = isinstance(error, ImportError) and method in PACKAGES
        remedy = f"Install it: pip install {PACKAGES[method]}" if is_package else "Load it where that is met"  # type: ignore[index]
        raise InputError(
            f"{role}.path={source.path} is quantised by {method}, and transformers cannot load such weights here: "
            f"{what.rstrip('.')}. {remedy}, or give the checkpoint as it was before it was quantised"
        ) from error


def refuse_missing_scales(config: PretrainedConfig, tensors: Mapping[str, Tensor], which: str) -> None:
    """Raise InputError where packed weights have no scale beside them, going by names and types in the headers, and
    where `config` says that weights have eight bits and a scale which have none."""
    settings = settings_of(config)
    if settings is None:
        return
    method, left = method_of(config), settings.get("modules_to_not_convert") or []
    if not isinstance(left, list | tuple):
        raise InputError(
            f"{which} is quantised by {method}, and modules_to_not_convert={left!r} in its config.json is no list of "
            "layers, so which weights have a scale is not known. Copy the folder again"
        )
    said = _in_eight_bits(config, settings) if method in EIGHT_BITS else ()
    packed = sorted({*filter(lambda name: _is_packed(name, tensors[name]), tensors), *tensors.keys() & said})
    without = [name for name in packed if not _has_scale(name, tensors)]
    has_none = method in (*EIGHT_BITS, "compressed-tensors") and not any("scale" in name for name in tensors)
    if without or has_none:
        shown = ", ".join(without[:SHOWN]) + (f" and {len(without) - SHOWN} more" if len(without) > SHOWN else "")
        count = f"{len(without)} of {len(packed)} weights have none ({shown})" if without else "its files hold none"
        raise InputError(
            f"{which} is quantised by {method}, and a weight is read by the scale beside it (weight_scale, "
            f"weight_scale_inv): {count}. Fetch it again, or take quantization_config out if the weights are plain"
        )


def _is_packed(name: str, tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return tensor.element_size() == 1 and "scale" not in name
    return name.rpartition(".")[2] in PACKED


def _in_eight_bits(config: PretrainedConfig, settings: Mapping[str, Any]) -> set[str]:
    """Names of the weights that transformers unpacks: of all linear layers but the output head and those left out."""
    model = empty_model(config)
    left = [*(settings.get("modules_to_not_convert") or ()), *(model._keep_in_fp32_modules or ())]
    head = model.get_output_embeddings()
    layers = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is not head}
    return {f"{name}.weight" for name in layers if should_convert_module(name, left)}


def _has_scale(name: str, tensors: Mapping[str, Tensor]) -> bool:
    layer = name.rpartition(".")[0]
    return any(name + end in tensors for end in OF_WEIGHT) or any(layer + end in tensors for end in OF_LAYER)
