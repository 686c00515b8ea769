"""Drafts that are given as folders, ours or as others publish them, and measured beside the arms that are trained."""

from __future__ import annotations

from decode.common.errors import ConfigError
from decode.config import model_folder
from decode.drafters.saved_draft import OWN, config_in, describe_draft
from decode.drafters.saved_head import HEADS
from decode.models.hidden_states import FINAL
from decode.models.load import ModelDescription
from eval.config import EvalConfig
from eval.inputs import check_held_out
from eval.modes.families.arms import ArmFacts
from eval.modes.families.trainings import Training
from eval.prompts.chats import check_chats_of_draft

NOT_TRAINED = "given, not trained here"


def given(cfg: EvalConfig) -> list[Training]:
    """One for each of cfg.drafts; what is kept of them lies with that of the trainings."""
    return [Training(name, "given", cfg.families.feature_codes[0], 0) for name in cfg.drafts]


def describe_given(cfg: EvalConfig, target: ModelDescription) -> dict[str, ArmFacts]:
    """Facts of every given draft; InputError where one does not fit the target or saw the held-out texts, ConfigError
    where it is called like an arm."""
    taken = sorted(set(cfg.drafts) & set(cfg.families.arms))
    if taken:
        raise ConfigError(f"drafts.{taken[0]} is called like an arm of families.arms; give it another name")
    return {name: _facts(cfg, name, target) for name in cfg.drafts}


def _facts(cfg: EvalConfig, name: str, target: ModelDescription) -> ArmFacts:
    folder = model_folder(cfg.drafts[name])
    found = describe_draft(folder, target, f"drafts.{name}")
    if cfg.prompts.file is None:
        check_held_out(cfg.data, name, found.path)
    check_chats_of_draft(cfg, name, found.path, target)
    taps: tuple[int, ...] = ()
    if found.family in HEADS:
        taps = (FINAL,) if folder == OWN else config_in(folder, target).taps
    return ArmFacts(found.family, found.num_parameters, taps, NOT_TRAINED)
