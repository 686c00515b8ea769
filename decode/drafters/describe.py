"""What a saved draft is, read from its folder without its weights, and whether it fits a target."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from decode.config import ModelConfig
from decode.drafters.load import OWN, family_of, model_folder
from decode.drafters.own_mtp import own_mtp
from decode.drafters.saved_head import HEADS, expected, read_head
from decode.models.fingerprint import files_fingerprint
from decode.models.load import ModelDescription, check_same_tokens, describe_model


@dataclass(frozen=True)
class DraftDescription:
    """A draft of any family."""

    path: str
    """Its folder; of a target's own layers, the target's."""
    family: str
    fingerprint: str
    max_positions: int
    """Longest context in tokens."""
    num_parameters: int
    """Its own; a head's do not hold the target's embedding and output head."""


def describe_draft(path: str, target: ModelDescription, role: str = "draft") -> DraftDescription:
    """The draft in `path` (a draft's folder, that of the run that trained it, a hub id, or OWN); raises InputError
    where it does not fit the target."""
    folder = str(model_folder(path))
    if folder == OWN:
        config, weights = own_mtp(target, depth=1)
        size = sum(tensor.numel() for tensor in weights.values())
        return DraftDescription(target.path, config.family, target.fingerprint, config.max_positions, size)
    family = family_of(folder)
    if family in HEADS:
        config = read_head(folder, target)
        size = sum(map(prod, expected(config).values()))
        return DraftDescription(folder, family, files_fingerprint(Path(folder)), config.max_positions, size)
    found = describe_model(ModelConfig(path=folder), role)
    check_same_tokens(target, found)
    return DraftDescription(found.path, family, found.fingerprint, found.max_positions, found.num_parameters)
