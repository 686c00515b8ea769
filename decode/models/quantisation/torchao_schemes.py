"""Models quantised as they are loaded, by torchao: which schemes there are, and whether one runs
here.

The linear layers are quantised. Embedding and output head stay as they are: they are often one tensor, and the head's
rounding would fall on the scores themselves. So do the experts of a mixture that lie in one tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PretrainedConfig, TorchAoConfig

from decode.common.environment import resolve_device
from decode.common.errors import InputError
from decode.common.extras import extra, require_installed
from decode.models.quantisation.quantised import SCHEMES, method_of
from decode.models.weight_counts import empty_model

if TYPE_CHECKING:
    from decode.config import ModelConfig

GROUP = 32  # weights of int4 that share a scale
NOT_HERE = (AssertionError, AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What torchao raises where a kernel, a device or a precision is missing."""


def check_scheme(source: ModelConfig, config: PretrainedConfig, role: str) -> None:
    """Raise ConfigError without torchao, and InputError where the checkpoint is quantised already, where a layer's
    sizes are not those of the scheme, and where it does not run on this device in this precision: tried on a layer of
    32 x 32 weights."""
    scheme = source.quantization
    if scheme is None or scheme not in SCHEMES.values():
        return  # a word of an engine's
    own = "GGUF" if Path(source.path or "").is_file() else method_of(config)
    if own is not None:
        raise InputError(
            f"{role}.quantization={scheme}, and {role}.path={source.path} is quantised already by {own}: it would be "
            f"rounded twice. Leave {role}.quantization out, or give the checkpoint as it was before"
        )
    name = source.dtype if source.dtype != "auto" else str(getattr(config, "dtype", None) or "float32")
    dtype = getattr(torch, name.removeprefix("torch."))
    check_runs_here(scheme, resolve_device(source.device), dtype, role)
    if scheme == "int4":
        model = empty_model(config)
        check_sizes(model, f"{role}.path={source.path}", role, but=model.get_output_embeddings())


def scheme_settings(scheme: str, device: torch.device) -> TorchAoConfig:
    """What transformers quantises by as it loads."""
    return TorchAoConfig(_torchao_config(scheme, device))


def _torchao_config(scheme: str, device: torch.device) -> Any:
    from torchao import quantization as ao

    if scheme == "int8":
        return ao.Int8WeightOnlyConfig(set_inductor_config=False)
    if scheme == "int8_dynamic":
        return ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    assert scheme == "int4", scheme
    if device.type == "cpu":  # its kernel is not among the stable ones
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    packing: Any = "tile_packed_to_4d"
    return ao.Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format=packing, set_inductor_config=False)


def check_runs_here(scheme: str, device: torch.device, dtype: torch.dtype, role: str) -> None:
    """Raise ConfigError without torchao, and InputError where the scheme cannot run a layer of 32 x 32 weights."""
    remedy = f"Install it ({extra('quantization')}), or leave {role}.quantization out"
    require_installed("torchao", f"{role}.quantization={scheme}", remedy)
    try:
        with torch.no_grad():
            layer = nn.Sequential(nn.Linear(32, 32, bias=False, device=device, dtype=dtype))
            kind = type(layer[0].weight)
            quantise(layer, scheme, device)
            if type(layer[0].weight) is kind and type(layer[0].weight.data) is torch.Tensor:
                raise RuntimeError("torchao left the layer as it was")
            layer(torch.ones(1, 32, device=device, dtype=dtype))
    except NOT_HERE as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise InputError(
            f"{role}.quantization={scheme} does not run here, on {device} in {dtype}: {reason}. "
            f"Set {role}.dtype=bfloat16, use another of int8, int4 and int8_dynamic, or leave it out"
        ) from error


def quantise(module: nn.Module, scheme: str, device: torch.device) -> None:
    """All linear layers in `module`, in place."""
    config = _torchao_config(scheme, device)
    from torchao.quantization import quantize_

    quantize_(module, config)


def check_sizes(model: nn.Module, what: str, role: str, but: nn.Module | None = None) -> None:
    """Raise InputError for a layer, other than `but`, that int4 cannot take: torchao leaves some of these as they are,
    without a word."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not but and (layer.in_features % GROUP or layer.out_features % 16):
            raise InputError(
                f"{role}.quantization=int4 shares a scale among {GROUP} weights and computes 16 rows at once, and "
                f"{name} of {what} is {layer.out_features} x {layer.in_features}: its kernel could "
                "not take the layer. Use int8"
            )
