"""A saved head that a training goes on with (`draft.init_from`): whose it is, and that it keeps its shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from decode.common.compose import CONF
from decode.common.errors import InputError
from decode.common.progress import get_logger
from decode.common.typed_config import require
from decode.drafters.head_config import HeadConfig
from decode.drafters.provenance import read_provenance
from decode.drafters.saved_draft import config_in, family_of
from decode.drafters.saved_head import is_of
from decode.formats.form import published_form
from decode.models.describe import ModelDescription
from train.config import TrainConfig
from train.drafts.adapters import require_peft
from train.drafts.draft_config import DraftConfig, HeadSettings

log = get_logger("train")


def saved_head(cfg: TrainConfig, target: ModelDescription) -> tuple[HeadConfig, Path]:
    """Its configuration and its folder. InputError where it is no head of this target's tokens; ConfigError where other
    sizes are asked for than it has."""
    draft = cfg.draft
    assert draft.init_from is not None
    folder = Path(draft.init_from)
    if not (folder / "config.json").is_file():
        raise InputError(
            f"draft.init_from={draft.init_from} holds no saved head (config.json, model.safetensors, draftsmith.json); "
            "give the folder of one, of the run that trained it, or of a head as others publish them"
        )
    family = family_of(str(folder))
    require(
        family == draft.family,
        f"draft.init_from={draft.init_from} is of family {family}, and draft.family={draft.family}; use draft={family}",
    )
    config = config_in(folder, target, check=is_published(folder))  # ours may follow another target
    _follow(folder, target, draft.lora.rank > 0)
    _tell_of_other_objective(folder, cfg)
    if published_form(folder) and (config.is_recursive or config.family == "peagle"):
        config = replace(config, depth=draft.head.depth)  # of which nothing is made, and few folders tell it
    _check_shape(draft, config)
    require_peft(draft.lora)
    return config, folder


def is_published(folder: Path) -> bool:
    """Whether others made it."""
    return read_provenance(folder) is None


def _check_shape(draft: DraftConfig, config: HeadConfig) -> None:
    saved = vars(config) | {"taps": list(config.taps), "vocab": config.draft_vocab_size}
    asked, unasked = draft.head_shape, list(_unasked(draft.family))
    for name in (asked.keys() & saved.keys()) - {"anchors"}:  # of which no weight is made
        own = "null" if saved[name] is None else saved[name]
        where = f"draft.{'head.' * (name in vars(HeadSettings()))}{name}"
        require(
            asked[name] in (saved[name], *(one[name] for one in unasked if name in one)),
            f"{where}={asked[name]}, and the head {draft.init_from} has {own}, which stays as it is. Set "
            f"{where}={own}, or train a new head without draft.init_from",
        )


def _unasked(family: str) -> Iterator[dict[str, Any]]:
    """The shapes that settings have where nobody has set them: of a new head, by each choice of the group `draft`."""
    yield DraftConfig().head_shape
    for path in sorted((CONF / "draft").glob("*.yaml")):
        option: Any = OmegaConf.to_container(OmegaConf.load(path))
        if option.get("family") == family:
            yield option | option.get("head", {})


def _follow(folder: Path, target: ModelDescription, is_adapted: bool) -> None:
    """Say so where a head of ours goes on with other weights than it was trained on: a target is trained further, and
    its head after it. InputError where its tokens are others."""
    provenance = read_provenance(folder)
    before = None if provenance is None else provenance.target
    if before is None or is_of(before, target):
        return
    theirs, ours = before.token_map_hash, target.token_map_hash
    if theirs and ours and theirs != ours:
        raise InputError(
            f"draft.init_from={folder} drafts tokens of another tokenizer: token map {theirs[:12]} there, {ours[:12]} "
            f"of target.path={target.path}. Train a head without draft.init_from, or give the target that tokenizer"
        )
    require(
        not is_adapted,
        f"draft.init_from={folder} was trained on {before.path}, and adapters for target.path={target.path} would "
        "belong to no draft of that target. Train the head on it first, without draft.lora.rank",
    )
    log.info("the head %s was trained on %s; it goes on with %s", folder, before.path, target.path)


def _tell_of_other_objective(folder: Path, cfg: TrainConfig) -> None:
    """Where the default takes the place of another. On SmolLM2 it lowered the KL of a head that lk_hybrid had trained,
    and its alpha with it."""
    provenance = read_provenance(folder)
    config = (provenance and provenance.config) or {}
    before = (config.get("objective") or {}).get("name")
    if before not in (None, "forward_kl") and cfg.objective.name == "forward_kl":
        log.warning(
            "the head %s was trained by objective=%s, and this run trains by forward_kl: alpha may fall; objective=%s "
            "goes on as before", folder, before, before,
        )  # fmt: skip
