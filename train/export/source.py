"""The draft that is exported, checked against its target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from decode.common.checked_json import read_json
from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.drafters.provenance import FILE, read_provenance
from decode.drafters.saved_draft import describe_draft
from decode.drafters.saved_head import HEADS, read_head
from decode.formats.source import Source
from decode.models.describe import ModelDescription, describe_model
from train.export.config import ExportConfig
from train.export.loadable import form_of


def open_source(cfg: ExportConfig) -> Source:
    """The draft of `cfg` and its target; no weights are read.

    Raises InputError for a folder that holds no draft of ours, one that is damaged, and a target that is not there or
    has changed since the draft was trained on it.
    """
    folder = Path(cast(str, cfg.draft.path))
    provenance = read_provenance(folder)
    if provenance is None:
        raise InputError(
            f"draft.path={folder} holds no {FILE}, so it is not a draft that was trained here; an export is written "
            "from one: give the folder of a run of `python -m train`, or model/ in it"
        )
    trained_on = None if provenance.target is None else provenance.target.path
    if cfg.target.path is None and trained_on is None:
        raise InputError(
            f"{folder} is a language model that was trained without a target, and an export is of a draft for one; "
            "give target.path"
        )
    target = (
        describe_model(cfg.target, loads=False)
        if cfg.target.path
        else _trained_on(cfg.target, cast(str, trained_on), folder)
    )
    family = describe_draft(str(folder), target).family
    config = read_head(folder, target) if family in HEADS else None
    return Source(
        folder=folder,
        form=form_of(family, config),
        target=target,
        dtype=None if cfg.dtype == "auto" else getattr(torch, cfg.dtype),
        num_draft_tokens=cfg.num_draft_tokens or (config.depth if config else _of_model(folder)),
        written=read_json(folder / FILE),
        head_config=config,
    )


def _trained_on(source: ModelConfig, path: str, folder: Path) -> ModelDescription:
    try:
        return describe_model(replace(source, path=path), loads=False)
    except InputError as error:
        raise InputError(
            f"target.path is not set, so it is {path}, the target that {folder} was trained on, as the run named it; "
            f"and that cannot be read from here: {error}. Give target.path"
        ) from error


def _of_model(folder: Path) -> int:
    return read_json(folder / "generation_config.json")["num_assistant_tokens"]
