"""From a folder to a drafter: the family a draft was saved as, checked against the target it is to serve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from decode.config import ModelConfig, Precision
from decode.drafters.base import Drafter
from decode.drafters.lm import LMDraft
from decode.house.errors import InputError
from decode.house.run_folder import read_json
from decode.models import ModelDescription, check_same_tokens, describe_model, load_model

PROVENANCE = "draftsmith.json"
FAMILIES = {"lm": LMDraft}


def load_drafter(path: str | Path, target: PreTrainedModel, dtype: Precision = "auto") -> Drafter:
    """The drafter saved in `path`, on the target's device, in `dtype` ("auto": the target's own).

    `path` is a draft's folder or that of the run that trained it; a plain transformers folder is an `lm` draft.
    Raises InputError where vocabularies or tokenizers differ; where a folder holds no tokenizer files, only
    vocabulary sizes are compared.
    """
    source = ModelConfig(path=str(model_folder(path)), device=str(target.device))
    draft = describe_model(source, role="draft")
    family = FAMILIES[family_of(draft.path)]
    check_same_tokens(describe_loaded(target), draft)
    if dtype == "auto":
        dtype = cast(Precision, str(target.dtype).removeprefix("torch."))
    return cast(Drafter, family(load_model(replace(source, dtype=dtype), role="draft")).eval())


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
    """The description of a model that is in memory already, found again by the path it came from."""
    return ModelDescription(ModelConfig(path=model.config.name_or_path or model.name_or_path), model.config)
