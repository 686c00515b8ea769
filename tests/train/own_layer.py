"""MTP layers as targets are published with them: random, beside the target's own tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from decode.formats.mtp import OWN_MTP

INDEX = "model.safetensors.index.json"


def add_own_layer(folder: Path) -> Path:
    """Into the last of the target's files of weights, and into its index where there is one."""
    generator, config = torch.Generator().manual_seed(1), json.loads((folder / "config.json").read_text())
    made = {name: torch.randn(one.shape, generator=generator) * 0.1 for name, one in OWN_MTP.manifest(config).items()}
    made |= {name: one + 1 for name, one in made.items() if one.dim() == 1}
    last = max(folder.glob("*.safetensors"))
    save_file(load_file(last) | made, last, metadata={"format": "pt"})
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] |= dict.fromkeys(made, last.name)
        (folder / INDEX).write_text(json.dumps(index))
    return folder
