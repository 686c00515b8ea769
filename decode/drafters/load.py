"""From a folder to a drafter: the family a draft was saved as, checked against the target it is to serve."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from decode.config import ModelConfig, Precision
from decode.drafters.base import Drafter
from decode.drafters.dspark import DSparkConfig, DSparkDraft
from decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from decode.drafters.heads import HeadConfig, HeadDraft
from decode.drafters.hydra import HydraConfig, HydraDraft
from decode.drafters.lm import LMDraft
from decode.drafters.medusa import MedusaConfig, MedusaDraft
from decode.drafters.mtp import MTPConfig, MTPDraft
from decode.drafters.own_mtp import own_mtp
from decode.ends import Ends, ends_of
from decode.house.errors import InputError
from decode.house.run_folder import read_json
from decode.models import ModelDescription, check_same_tokens, describe_model, load_model
from decode.stopping import eos_ids

PROVENANCE = "draftsmith.json"
WEIGHTS = "model.safetensors"
HEADS: dict[str, tuple[type[HeadConfig], type[HeadDraft]]] = {
    "dspark": (DSparkConfig, DSparkDraft),
    "eagle3": (Eagle3Config, Eagle3Draft),
    "hydra": (HydraConfig, HydraDraft),
    "medusa": (MedusaConfig, MedusaDraft),
    "mtp": (MTPConfig, MTPDraft),
}
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


def load_head(folder: str | Path, ends: Ends, target: ModelDescription) -> HeadDraft:
    """The head saved in `folder`, in the precision it was saved in, on the CPU; InputError where it is another
    target's."""
    check_target(folder, target)
    config = read_head_config(folder)
    vocab = None if config.draft_vocab_size is None else torch.zeros(config.draft_vocab_size, dtype=torch.long)
    head = HEADS[config.family][1](config, ends, vocab)
    weights = load_file(Path(folder) / WEIGHTS)
    head.to(next(weight.dtype for weight in weights.values() if weight.is_floating_point()))
    head.load_state_dict(weights)
    _check_vocabulary(folder, head)
    return head


def read_head_config(folder: str | Path) -> HeadConfig:
    """config.json of a head; InputError where its fields are not those of its family."""
    fields = read_json(Path(folder) / "config.json")
    known = HEADS[fields["family"]][0]
    wrong = set(fields) ^ {field.name for field in dataclasses.fields(known)}
    if wrong:
        raise InputError(
            f"{folder}/config.json and this version's {fields['family']} heads do not share the fields "
            f"{', '.join(sorted(wrong))}; train the head with this version, or load it with the one that wrote it"
        )
    return known(**fields)


def check_target(folder: str | Path, target: ModelDescription) -> None:
    """Raise InputError where a head was trained on another target's hidden states."""
    trained = read_json(Path(folder) / PROVENANCE)["target"]
    if trained["fingerprint"] != target.fingerprint:
        raise InputError(
            f"the head {folder} was trained on the hidden states of {trained['path']} with fingerprint "
            f"{trained['fingerprint']}, and {target.path} has {target.fingerprint}: it would draft from states that "
            "mean something else. Give the target that it knows, or train one for this target with `python -m train`"
        )


def _check_vocabulary(folder: str | Path, head: HeadDraft) -> None:
    """A draft that can never say EOS drafts past every end."""
    ends = eos_ids(head.ends.head.model)
    missing = [] if head.vocab is None else sorted(ends - set(head.vocab.tolist()))
    if missing:
        raise InputError(
            f"the draft vocabulary of {folder} ({head.config.draft_vocab_size} of {head.config.vocab_size} tokens) "
            f"lacks the end of text {missing}, so it would draft past every end. Train it with draft.head.vocab=N, "
            "which always keeps EOS and the special tokens"
        )


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
