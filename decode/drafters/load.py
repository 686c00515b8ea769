"""From a folder to a drafter: the family a draft was saved as, checked against the target it is to serve."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from decode.config import ModelConfig
from decode.drafters.base import Drafter
from decode.drafters.lm import LMDraft
from decode.house.errors import InputError
from decode.house.run_folder import read_json
from decode.models import ModelDescription, check_same_tokens, describe_model

PROVENANCE = "draftsmith.json"
FAMILIES = {"lm": LMDraft}


def load_drafter(path: str | Path, target: PreTrainedModel) -> Drafter:
    """The drafter saved in `path`, on the target's device and in its precision.

    A plain transformers folder is an `lm` draft. Raises InputError where vocabularies or tokenizers differ; where a folder
    holds no tokenizer files, only vocabulary sizes are compared.
    """
    draft = describe_model(ModelConfig(path=str(path)), role="draft")
    family = FAMILIES[family_of(draft.path)]
    check_same_tokens(describe_loaded(target), draft)
    drafter = family.from_pretrained(draft.path, dtype=target.dtype)
    return cast(Drafter, drafter.to(target.device).eval().requires_grad_(False))


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
