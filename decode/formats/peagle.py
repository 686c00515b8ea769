"""P-EAGLE heads as vLLM has them (model_executor/models/llama_eagle3.py, v1/spec_decode/llm_base_proposer.py): the
folder of EAGLE-3, with further layers, the id of the mask's token and the hidden states that stand beside it.

    layers.1.* and so on         layers of Llama, over the states alone
    mask_hidden                  (1, n * d), the hidden states of a mask
    ptd_token_id, mask_token_id  the mask's token, in config.json
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from decode.common.errors import InputError
from decode.drafters.head_config import HeadConfig
from decode.drafters.peagle import PEagleConfig
from decode.formats import eagle3
from decode.formats.base import Get, Layout, Reader, Spec
from decode.formats.folder import PublishedFolder
from decode.formats.mask import HOW, MASK_ID
from decode.formats.states import ascending
from decode.models.describe import ModelDescription

if TYPE_CHECKING:
    from decode.formats.source import Source

HIDDEN = "mask_hidden"
_IDS = (MASK_ID, "pard_token", "ptd_token_id")
"""Keys of the mask's token, in the order in which vLLM looks for them."""
_LAYER = re.compile(r"^layers\.(\d+)\.")
_UNREAD = re.compile(r"^layers\.[1-9]\d*\.hidden_norm\.weight$")
"""vLLM makes room for it in every layer, and reads that of the first."""


def read_config(folder: PublishedFolder, target: ModelDescription) -> HeadConfig:
    """EAGLE-3's, with layers and mask."""
    token = next((folder.fields[name] for name in _IDS if folder.fields.get(name) is not None), None)
    if token is None:
        raise InputError(
            f"{folder.path}/config.json names none of {', '.join(_IDS)}, so nobody knows which token stands where "
            "tokens are to be drafted. Write the id that it was trained with"
        )
    head = dataclasses.asdict(eagle3.read_head(folder, target))
    layers = folder.needed("num_hidden_layers")[0]
    return PEagleConfig(**head | {"family": "peagle", "norm_output": False}, layers=layers, mask_token=token)


def read_tensors(folder: PublishedFolder, config: HeadConfig, get: Get) -> dict[str, Tensor]:
    """EAGLE-3's, with those of the further layers counted from 0."""
    read = {}
    for name, one in eagle3.read_tensors(folder, config, get).items():
        if name == HIDDEN:
            read[f"{HIDDEN}.weight"] = one.reshape(1, -1)
        elif not _UNREAD.search(name):
            read[_LAYER.sub(lambda layer: f"layers.{int(layer[1]) - 1}.", name)] = one
    return read


def written_config(source: Source) -> dict[str, Any]:
    """Without what the speculators library wants: vLLM would then read its half alone, which knows no `fc_norm`."""
    head = cast(PEagleConfig, source.config)
    fields = eagle3.written_config(source)
    ours = {name: one for name, one in fields.items() if not name.startswith(("speculators_", "transformer_layer"))}
    ids = dict.fromkeys((MASK_ID, "ptd_token_id"), head.mask_token)
    return ours | {"num_hidden_layers": head.layers, "ttt_length": head.depth} | ids


def written_tensors(source: Source) -> dict[str, Tensor]:
    """EAGLE-3's names for the first layer and what is around it, then the further ones, counted on."""
    moved = {}
    for name, one in source.weights.items():
        if name == f"{HIDDEN}.weight":
            moved[HIDDEN] = ascending(one, source.taps)
        elif layer := _LAYER.match(name):
            moved[f"layers.{int(layer[1]) + 1}.{name[layer.end() :]}"] = one
    first = {name: one for name, one in source.weights.items() if not name.startswith(("layers.", HIDDEN))}
    return eagle3.written_tensors(source, first) | moved


def manifest(fields: Mapping[str, Any]) -> dict[str, Spec]:
    """With the mask's states."""
    width = fields.get("target_hidden_size") or fields["hidden_size"]
    return eagle3.manifest(fields) | {HIDDEN: Spec((1, eagle3.num_states(fields) * width), is_flat=True)}


def no_token(source: Source) -> str | None:
    """Why engines cannot embed its mask; None where they can."""
    if cast(PEagleConfig, source.config).mask_token is None:
        return f"its mask is a learned vector, and engines embed a token there; {HOW}"
    return None


PEAGLE = Layout(
    "peagle",
    written_config,
    written_tensors,
    manifest,
    Reader(read_config, read_tensors, eagle3.read_ends),
    most=lambda fields: fields.get("ttt_length"),
)
