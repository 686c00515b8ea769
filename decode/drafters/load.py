"""From a folder to a drafter: the family a draft was saved as, checked against the target it is to serve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel

from decode.config import ModelConfig, Precision
from decode.drafters.base import Drafter
from decode.drafters.heads import HeadDraft
from decode.drafters.lm import LMDraft
from decode.drafters.mtp import MTPDraft
from decode.drafters.own_mtp import own_mtp
from decode.drafters.saved_head import HEADS, PROVENANCE, load_head
from decode.ends import ends_of
from decode.house.errors import InputError
from decode.house.run_folder import read_json
from decode.models import ModelDescription, check_same_tokens, describe_model, load_model

FAMILIES = ("lm", *HEADS)
OWN = "mtp"
"""In place of a folder: the MTP layer of the target's own checkpoint."""


def load_drafter(path: str | Path, target: PreTrainedModel, dtype: Precision = "auto") -> Drafter:
    """The drafter saved in `path`, on the target's device, in `dtype` ("auto": the target's own).

    `path` is a draft's folder or that of the run that trained it; a plain transformers folder is an `lm` draft.
    Raises InputError where vocabularies or tokenizers differ; where a folder holds no tokenizer files, only
    vocabulary sizes are compared.
    """
    folder = str(model_folder(path))
    if dtype == "auto":
        dtype = cast(Precision, str(target.dtype).removeprefix("torch."))
    if folder == OWN or family_of(folder) in HEADS:
        head = load_own(target) if folder == OWN else load_head(folder, ends_of(target), describe_loaded(target))
        head.source = describe_loaded(target).path if folder == OWN else folder
        return head.to(target.device, getattr(torch, dtype)).requires_grad_(False).eval()
    source = ModelConfig(path=folder, device=str(target.device))
    check_same_tokens(describe_loaded(target), describe_model(source, role="draft"))
    return cast(Drafter, LMDraft(load_model(replace(source, dtype=dtype), role="draft")).eval())


def load_own(target: PreTrainedModel) -> HeadDraft:
    """The target's own MTP layer, applied to its own output; InputError where the checkpoint has none."""
    config, weights = own_mtp(describe_loaded(target), depth=1)
    head = MTPDraft(config, ends_of(target))
    head.load_state_dict(weights)
    return head


def model_folder(path: str | Path) -> Path | str:
    """The folder itself, or `model/` in it where it is the folder of a training run."""
    inside = Path(path) / "model"
    return inside if (inside / "config.json").is_file() and not (Path(path) / "config.json").is_file() else path


def family_of(path: str) -> str:
    """The family that a draft folder names; raises InputError for one that is not known here."""
    file = Path(path) / PROVENANCE
    family = read_json(file).get("family", "lm") if file.is_file() else "lm"
    if family not in FAMILIES:
        raise InputError(f"{file} says family={family!r}; this version knows {', '.join(FAMILIES)}. Update draftsmith")
    return family


def describe_loaded(model: PreTrainedModel) -> ModelDescription:
    """The description of a model that is in memory already, found again by the path it came from; InputError where it
    came from nowhere. What was done to its weights since does not show."""
    path = model.config.name_or_path or model.name_or_path
    if not path:
        raise InputError(
            "the target was built in memory, so nothing says which files it is, and whether a saved draft fits it "
            "cannot be checked. Save it, and load it with from_pretrained"
        )
    return ModelDescription(ModelConfig(path=path), model.config)
