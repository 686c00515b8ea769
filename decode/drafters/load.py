"""From a folder to a drafter: the family a draft was saved as, checked against the target it is to serve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel

from decode.config import ModelConfig, Precision
from decode.drafters.base import Drafter
from decode.drafters.lm import LMDraft
from decode.house.errors import InputError
from decode.house.run_folder import read_json
from decode.models import ModelDescription, check_same_tokens, describe_model, load_model

PROVENANCE = "draftsmith.json"
SMALL_DRAFT = 8_000_000  # parameters: 32 MB in float32
FAMILIES = {"lm": LMDraft}


def load_drafter(path: str | Path, target: PreTrainedModel, dtype: Precision = "auto") -> Drafter:
    """The drafter saved in `path`, on the target's device, in `dtype` ("auto": as `draft_dtype` says).

    `path` is a draft's folder or that of the run that trained it; a plain transformers folder is an `lm` draft.
    Raises InputError where vocabularies or tokenizers differ; where a folder holds no tokenizer files, only
    vocabulary sizes are compared.
    """
    source = ModelConfig(path=str(model_folder(path)), device=str(target.device))
    draft = describe_model(source, role="draft")
    family = FAMILIES[family_of(draft.path)]
    check_same_tokens(describe_loaded(target), draft)
    if dtype == "auto":
        dtype = cast(Precision, str(draft_dtype(draft.num_parameters, target)).removeprefix("torch."))
    return cast(Drafter, family(load_model(replace(source, dtype=dtype), role="draft")).eval())


def model_folder(path: str | Path) -> Path | str:
    """The folder itself, or `model/` in it where it is the folder of a training run."""
    inside = Path(path) / "model"
    return inside if (inside / "config.json").is_file() and not (Path(path) / "config.json").is_file() else path


def draft_dtype(num_parameters: int, target: PreTrainedModel) -> torch.dtype:
    """The target's precision; float32 for a draft that fits a CPU's cache, where small bf16 products cost up to four
    times as much (256 x 256: 30 us against 7; a 2M-parameter draft pass: 0.50 ms against 0.34). The output does not
    depend on it."""
    if target.device.type == "cpu" and target.dtype == torch.bfloat16 and num_parameters <= SMALL_DRAFT:
        return torch.float32
    return target.dtype


def family_of(path: str) -> str:
    """The family that a draft folder names; raises InputError for one that is not known here."""
    file = Path(path) / PROVENANCE
    family = read_json(file).get("family", "lm") if file.is_file() else "lm"
    if family not in FAMILIES:
        raise InputError(f"{file} says family={family!r}; this version knows {', '.join(FAMILIES)}. Update draftsmith")
    return family


def describe_loaded(model: PreTrainedModel) -> ModelDescription:
    """The description of a model that is in memory already, found again by the path it came from."""
    return ModelDescription(ModelConfig(path=model.config.name_or_path or model.name_or_path), model.config)
