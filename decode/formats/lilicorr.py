"""LiLiCorr (vLLM 0.32, model_executor/models/lilicorr.py): DFlash's folder with the lattice, and with DFlash2's
convolutions where it has them.

    lilicorr.token_proj.weight (w, d), .bias      where the lattice is not as wide as the draft
    lilicorr.layers.0.attn.in_proj_weight (3 w, w), lilicorr.slot_embedding (1, 1, N, 1, w), ...

Folders as Model Optimizer writes them (pull request 2342) number the parts of MLPs, which vLLM names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from decode.common.errors import InputError
from decode.drafters.candidate_lattice import CandidateLattice
from decode.drafters.head_config import HeadConfig
from decode.drafters.lilicorr import LiLiCorrConfig
from decode.formats import blocks
from decode.formats.base import Get, Layout, Reader, Spec
from decode.formats.convolved import convolutions, sizes, told
from decode.formats.folder import PublishedFolder
from decode.formats.mask import mask_id, write_mask
from decode.models.describe import ModelDescription

if TYPE_CHECKING:
    from decode.formats.source import Source

KEYS = {
    "lilicorr_candidate_topk": "candidates",
    "lilicorr_num_layers": "lattice_layers",
    "lilicorr_num_heads": "lattice_heads",
    "lilicorr_mlp_ratio": "lattice_mlp",
    "lilicorr_factor_dim": "factor_dim",
    "lilicorr_vector_eps": "vector_eps",
    "lilicorr_logit_scale": "logit_scale",
}
CONVOLUTIONS = {"conv_kernel_size": "conv_taps", "conv_group_size": "conv_group"}
"""Key in `dflash_config` -> our field."""
WIDTH = "lilicorr_hidden_size"
"""Left out or 0, it is the draft's."""
LATTICE = "lilicorr."
_NUMBERED = {
    "feature_mlp.0.": "feature_norm.",
    "feature_mlp.1.": "feature_mlp.up_proj.",
    "feature_mlp.3.": "feature_mlp.down_proj.",
    ".mlp.0.": ".mlp.up_proj.",
    ".mlp.2.": ".mlp.down_proj.",
}
"""Model Optimizer's names -> vLLM's."""


def read_config(folder: PublishedFolder, target: ModelDescription) -> HeadConfig:
    """DFlash's, with the sizes of the lattice."""
    own = sizes(folder, KEYS, "LiLiCorr's lattice")
    if folder.setting("lilicorr_enabled") is False:
        raise InputError(
            f"{folder.path}/config.json has lilicorr_enabled=false, so that its lattice takes no part, and here it "
            "does. Take the tensors of the lattice out, and give DFlashDraftModel as architecture"
        )
    plain = dataclasses.asdict(blocks.read_dflash(folder, target))
    own |= {ours: folder.setting(key) or 0 for key, ours in CONVOLUTIONS.items()}
    own["lattice_width"] = folder.setting(WIDTH) or plain["hidden_size"]
    return LiLiCorrConfig(**{**plain, **own, "family": "lilicorr"})


def read_tensors(folder: PublishedFolder, config: HeadConfig, get: Get) -> dict[str, Tensor]:
    """DFlash's and the lattice's."""
    return {_named(name): one for name, one in blocks.read_tensors(folder, config, get).items()}


def _named(name: str) -> str:
    if name.startswith(LATTICE):
        for numbered, ours in _NUMBERED.items():
            name = name.replace(numbered, ours)
    return name


def written_config(source: Source) -> dict[str, Any]:
    """DFlash's, with the sizes where vLLM looks for them."""
    config = cast(LiLiCorrConfig, source.config)
    fields = blocks.written_blocks(source, "lilicorr", mask_id(source), source.block.depth + 1)
    keys = KEYS | CONVOLUTIONS if config.conv_taps else KEYS
    own = {WIDTH: config.lattice_width} | {key: getattr(config, ours) for key, ours in keys.items()}
    fields["dflash_config"] |= {"lilicorr_enabled": True} | own
    return {"architectures": ["LiLiCorrDraftModel"]} | fields


def written_tensors(source: Source) -> dict[str, Tensor]:
    """DFlash's and the lattice's."""
    return blocks.written_tensors(source) | {
        name: one for name, one in source.weights.items() if name.startswith(LATTICE)
    }


def manifest(written: Mapping[str, Any]) -> dict[str, Spec]:
    """Names and shapes, by a config.json."""
    said, width = told(written), written["hidden_size"]
    own = {"rms_norm_eps": 0.0, "vector_eps": 0.0, "logit_scale": 0.0}  # of no tensor
    own |= {ours: said[key] for key, ours in KEYS.items() if ours not in own}
    own |= {"hidden_size": width, "lattice_width": said.get(WIDTH) or width, "depth": said["block_size"] - 1}
    with torch.device("meta"):
        lattice = CandidateLattice(SimpleNamespace(**own)).state_dict()
    specs = {f"{LATTICE}{name}": Spec(tuple(one.shape)) for name, one in lattice.items()}
    return blocks.manifest(written) | convolutions(written) | specs


LILICORR = Layout(
    "lilicorr",
    written_config,
    written_tensors,
    manifest,
    Reader(read_config, read_tensors, blocks.read_ends),
    extras=write_mask,
    most=lambda fields: fields["block_size"] - 1,
)
