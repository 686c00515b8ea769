"""What a saved draft is, read from its folder without its weights, and whether it fits a target."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import safe_open

from decode.config import ModelConfig
from decode.drafters.load import HEADS, OWN, WEIGHTS, check_target, family_of, model_folder, read_head_config
from decode.drafters.own_mtp import own_mtp
from decode.house.errors import InputError
from decode.models import ModelDescription, check_same_tokens, describe_model, files_fingerprint


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
        return _head(folder, family, target, role)
    found = describe_model(ModelConfig(path=folder), role)
    check_same_tokens(target, found)
    return DraftDescription(found.path, family, found.fingerprint, found.max_positions, found.num_parameters)


def _head(folder: str, family: str, target: ModelDescription, role: str) -> DraftDescription:
    missing = [name for name in ("config.json", WEIGHTS) if not (Path(folder) / name).is_file()]
    if missing:
        raise InputError(f"{role}.path={folder} lacks {' and '.join(missing)}, so it is no whole head; copy it again")
    check_target(folder, target)
    config = read_head_config(folder)
    with safe_open(str(Path(folder) / WEIGHTS), "np") as tensors:
        size = sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return DraftDescription(folder, family, files_fingerprint(Path(folder)), config.max_positions, size)
