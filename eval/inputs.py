"""What every measurement checks before a weight is loaded, and how it loads target and drafts."""

from __future__ import annotations

import gc
from typing import Any

import torch
from transformers import PreTrainedModel

from decode import load_drafter
from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.drafters.provenance import TextOrigin, read_provenance
from decode.drafters.saved_draft import describe_draft
from decode.models.load import ModelDescription, describe_model, load_model
from distill.config import DataConfig
from eval.config import EvalConfig


def check_models(cfg: EvalConfig) -> tuple[ModelDescription, dict[str, str]]:
    """The target's description and each draft's family; InputError where a draft's tokens are not the target's."""
    target = describe_model(cfg.target)
    families = {}
    for name in cfg.drafts:
        draft = describe_draft(cfg.drafts[name], target, f"drafts.{name}")
        families[name] = draft.family
        if cfg.prompts.file is None:
            check_held_out(cfg.data, name, draft.path)
    return target, families


def check_held_out(data: DataConfig, name: str, draft: str) -> None:
    """Raise InputError where the draft was trained on the same corpus under other shares: held-out text would be
    seen."""
    provenance = read_provenance(draft)
    if provenance is not None and provenance.data is not None:
        check_same_shares(data, provenance.data, f"drafts.{name}={draft}")


def check_same_shares(data: DataConfig, trained: TextOrigin, who: str) -> None:
    """The same for what was trained on, or is to be: the corpus and its shares, as DataConfig names them."""
    if any(getattr(trained, key) != getattr(data, key) for key in ("name", "path", "subset")):
        return
    for key in ("heldout_share", "validation_share"):
        there, here = getattr(trained, key), getattr(data, key)
        if there != here:
            raise InputError(
                f"{who} was trained with data.{key}={there}, and this report draws its prompts "
                f"with data.{key}={here}: part of them was trained on. Give data.{key}={there}"
            )


def shared_context(cfg: EvalConfig, target: ModelDescription) -> int:
    """Longest context in tokens that target and drafts all know."""
    drafts = [describe_draft(path, target).max_positions for path in cfg.drafts.values()]
    return min(target.max_positions, *drafts)


def load(cfg: EvalConfig, source: ModelConfig) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The target as `source` says and all drafts, after whatever models were held before are gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    model = load_model(source)
    return model, {name: load_drafter(path, target=model) for name, path in cfg.drafts.items()}
