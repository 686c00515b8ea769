"""What DFlash2 and LiLiCorr write beyond DFlash: convolutions in the layers, and scales that are not taken here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decode.common.errors import InputError
from decode.formats.base import Spec
from decode.formats.folder import PublishedFolder

_SCALES = {"input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": 0}
"""What vLLM multiplies by or caps at, and the value that does nothing."""


def sizes(folder: PublishedFolder, keys: Mapping[str, str], of: str) -> dict[str, Any]:
    """Our field -> what config.json says under its key; InputError where it says nothing or 0, and for a head whose
    embedding or logits are multiplied or capped. `of` names the parts in the message."""
    missing = [key for key in keys if not folder.setting(key)]
    if missing:
        raise InputError(
            f"{folder.path}/config.json does not say {', '.join(missing)}: sizes of {of}. Write the values that it was "
            "trained with, in dflash_config"
        )
    scaled = {name: one for name, usual in _SCALES.items() if (one := folder.setting(name)) not in (None, usual)}
    if scaled:
        raise InputError(
            f"{folder.path}/config.json sets {', '.join(f'{name}={value}' for name, value in scaled.items())}, and "
            "embedding and logits are taken here as they are. Serve this head with the engine it was made for"
        )
    return {ours: folder.setting(key) for key, ours in keys.items()}


def convolutions(written: Mapping[str, Any]) -> dict[str, Spec]:
    """Those of every layer, where there are any."""
    said, width, specs = told(written), written["hidden_size"], {}
    taps, group = said.get("conv_kernel_size") or 0, said.get("conv_group_size") or 1
    for layer in range(written["num_hidden_layers"] if taps else 0):
        for conv in ("attention_conv", "mlp_conv"):
            specs[f"layers.{layer}.{conv}.base_kernel"] = Spec((2, taps, width))
            specs[f"layers.{layer}.{conv}.kernel_projection.weight"] = Spec((2 * taps * (width // group), width))
    return specs


def told(written: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with what is nested in it at the top."""
    return {**(written.get("dflash_config") or {}), **written}
