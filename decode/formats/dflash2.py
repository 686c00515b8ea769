"""DFlash2 (z-lab; vLLM 0.32, model_executor/models/qwen3_dflash2.py): DFlash's folder with the convolutions of every
layer and the selector.

    layers.0.attention_conv.base_kernel (2, taps, d), .kernel_projection.weight (2 * taps * d / group, d)
    layers.0.mlp_conv.base_kernel, ...
    candidate_selector.predecessor_codebook (V, r), .successor_codebook (V, r), .hidden_projection.weight (r, d)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from decode.drafters.dflash2 import DFlash2Config
from decode.drafters.head_config import HeadConfig
from decode.formats import blocks
from decode.formats.base import Get, Layout, Reader, Spec
from decode.formats.convolved import convolutions, sizes, told
from decode.formats.folder import PublishedFolder
from decode.formats.mask import mask_id, write_mask
from decode.models.describe import ModelDescription

if TYPE_CHECKING:
    from decode.formats.source import Source

KEYS = {
    "conv_kernel_size": "conv_taps",
    "conv_group_size": "conv_group",
    "selector_rank": "markov_rank",
    "selector_top_k": "candidates",
}
"""Key in `dflash_config`, in folders of the speculators library at the top -> our field."""
SELECTOR = "candidate_selector."
_CODEBOOK = re.compile(r"_codebook$")


def read_config(folder: PublishedFolder, target: ModelDescription) -> HeadConfig:
    """DFlash's, with the sizes of both parts."""
    own = sizes(folder, KEYS, "DFlash2's convolutions and selector")
    plain = dataclasses.asdict(blocks.read_dflash(folder, target))
    return DFlash2Config(**{**plain, **own, "family": "dflash2"})


def read_tensors(folder: PublishedFolder, config: HeadConfig, get: Get) -> dict[str, Tensor]:
    """DFlash's; the tables of the selector are modules here."""
    held = blocks.read_tensors(folder, config, get)
    return {_CODEBOOK.sub("_codebook.weight", name): one for name, one in held.items()}


def written_config(source: Source) -> dict[str, Any]:
    """DFlash's, with the sizes where vLLM looks for them."""
    own = {key: getattr(cast(DFlash2Config, source.config), ours) for key, ours in KEYS.items()}
    fields = blocks.written_blocks(source, "dflash2", mask_id(source), source.block.depth + 1)
    fields["dflash_config"] |= own
    return {"architectures": ["DFlash2DraftModel"]} | fields


def written_tensors(source: Source) -> dict[str, Tensor]:
    """DFlash's and the selector's."""
    selector = {name: one for name, one in source.weights.items() if name.startswith(SELECTOR)}
    return blocks.written_tensors(source) | {
        name.replace("_codebook.weight", "_codebook"): one for name, one in selector.items()
    }


def manifest(written: Mapping[str, Any]) -> dict[str, Spec]:
    """Names and shapes, by a config.json."""
    width, rank = written["hidden_size"], told(written)["selector_rank"]
    table = Spec((blocks.num_tokens(written), rank))
    selector = {
        f"{SELECTOR}predecessor_codebook": table,
        f"{SELECTOR}successor_codebook": table,
        f"{SELECTOR}hidden_projection.weight": Spec((rank, width)),
    }
    return blocks.manifest(written) | convolutions(written) | selector


DFLASH2 = Layout(
    "dflash2",
    written_config,
    written_tensors,
    manifest,
    Reader(read_config, read_tensors, blocks.read_ends),
    extras=write_mask,
    most=lambda fields: fields["block_size"] - 1,
)
