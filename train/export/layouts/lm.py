"""A draft LM: a plain transformers folder, which every engine loads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from decode.common.checked_json import read_json, write_json
from train.export.draft_folder import TOKENIZER_FILES, older_rope
from train.export.layouts.base import Layout, Spec
from train.export.source import Source
from train.export.window import as_sliding


def config(source: Source) -> dict[str, Any]:
    """As training wrote it, in the precision that is asked for; earlier releases left rope_scaling out."""
    fields = read_json(source.folder / "config.json")
    fields |= older_rope(fields)
    if source.window is not None:
        fields = as_sliding(fields, source.window)
    if source.dtype is None:
        return fields
    name = str(source.dtype).removeprefix("torch.")
    return fields | {"dtype": name, "torch_dtype": name}


def tensors(source: Source) -> dict[str, Tensor]:
    """As training wrote them; a tied output head is left out."""
    weights = load_file(source.folder / "model.safetensors")
    return {name: one.to(source.dtype or one.dtype) for name, one in weights.items()}


def manifest(fields: Mapping[str, Any]) -> dict[str, Spec]:
    """The tensors of the transformers class that config.json names."""
    kind = deepcopy(dict(fields))  # transformers writes into a rope_scaling that it is handed
    known = AutoConfig.for_model(kind.pop("model_type"), **kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known)
    return {
        name: Spec(tuple(one.shape), optional=known.tie_word_embeddings and name == "lm_head.weight")
        for name, one in model.state_dict().items()
    }


def _extras(source: Source, folder: Path) -> None:
    """The target's tokenizer files, byte for byte, and how transformers drafts, by as many tokens as are asked for."""
    drafting = read_json(source.folder / "generation_config.json")
    write_json(folder / "generation_config.json", drafting | {"num_assistant_tokens": source.num_draft_tokens})
    for name in TOKENIZER_FILES:
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, folder / name)


LM = Layout("lm", config, tensors, manifest, extras=_extras)
