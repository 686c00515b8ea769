"""An arm of the comparison as the trainer sees it, and the records that arms train from: the toy's texts,
read again by the target where hidden states are wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from decode.common.compose import compose
from decode.common.errors import ConfigError, InputError
from decode.common.run_folder import is_finished
from decode.common.typed_config import build
from decode.models.describe import ModelDescription
from distill.config import DistillConfig
from distill.records.record_folder import RecordFolder
from eval.config import EvalConfig
from eval.inputs import check_held_out, check_same_shares
from eval.prompts.chats import check_chats_of_draft, check_same_chats
from train.config import TrainConfig
from train.drafts.registry import FAMILIES
from train.settled import settled


@dataclass(frozen=True)
class ArmFacts:
    """What is known of a draft before it is trained."""

    family: str
    num_parameters: int
    """Weights trained, tied ones once; the target's frozen ends are not counted."""
    taps: tuple[int, ...]
    """Layers of the target whose hidden states it reads; () for a draft that reads tokens alone."""
    optimizer: str
    """What trains it, with its peak rates."""


def train_config(cfg: EvalConfig, arm: str, **settings: Any) -> TrainConfig:
    """`python -m train` with the arm's overrides, on its target; `settings` are fields that the mode decides.

    ConfigError names the arm where its overrides are refused.
    """
    try:
        container = _composed((*cfg.families.training, *cfg.families.arms[arm]))
        steps = settings.get("steps", container["steps"])
        # validated, and so exported, at the end alone: a comparison at equal budgets keeps the last weights
        once = {name: steps for name in ("validate_every", "checkpoint_every")}
        records = own_records(cfg).get(arm) or settings.get("records", cfg.families.records)
        decided = {"target": asdict(cfg.target), "resume": "auto", **once, **settings, "records": records}
        return build(TrainConfig, {**container, **decided})
    except ConfigError as error:
        raise ConfigError(f"families.arms.{arm}: {error}") from error


@lru_cache(maxsize=64)
def _composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    container = compose("train", TrainConfig, ["output_dir=unset", *overrides])
    assert container is not None, "options of Hydra's own are no overrides"
    return container


def own_records(cfg: EvalConfig) -> dict[str, str]:
    """Arm -> its records, where its own overrides name others than all arms have."""
    named = {
        arm: one.partition("=")[2].strip("'\"")
        for arm, overrides in cfg.families.arms.items()
        for one in overrides
        if one.lstrip("+").startswith("records=")
    }
    return {arm: folder for arm, folder in named.items() if Path(folder) != Path(cfg.families.records)}


def facts_of(cfg: EvalConfig, arm: str, target: ModelDescription) -> ArmFacts:
    """What is known of the arm, from descriptions alone."""
    train = train_config(cfg, arm)
    blueprint = FAMILIES[train.draft.family](train, target, None)
    known = settled(train, blueprint, target.vocab_size)
    rates = f"muon {known.muon_lr:g}, adamw {known.lr:g}" if known.optimizer == "muon" else f"adamw {known.lr:g}"
    return ArmFacts(train.draft.family, blueprint.num_trained, blueprint.layers_read, rates)


def describe_arms(cfg: EvalConfig, target: ModelDescription) -> dict[str, ArmFacts]:
    """Every arm's facts; ConfigError where one cannot be built, or where codes are compared for an arm without taps."""
    facts = {arm: facts_of(cfg, arm, target) for arm in cfg.families.arms}
    _check_own_states(cfg, facts)
    for arm in cfg.families.arms:
        begun = train_config(cfg, arm).draft.init_from
        if begun is not None:
            check_begun(cfg, f"families.arms.{arm}: draft.init_from", begun, target)
    coded = cfg.families.feature_arm
    if coded in own_records(cfg) and len(cfg.families.feature_codes) > 1:
        raise ConfigError(
            f"families.feature_arm={coded} has records of its own, so that codes of families.records cannot be "
            "compared. Name another arm, or set families.feature_arm=null"
        )
    if coded is not None and not facts[coded].taps and len(cfg.families.feature_codes) > 1:
        raise ConfigError(
            f"families.feature_arm={coded} is of family {facts[coded].family}, which reads no hidden states, so codes "
            f"of them cannot be compared. Name an arm that does, or set families.feature_arm=null"
        )
    if coded is not None and len(cfg.families.feature_codes) > 1:
        source = train_config(cfg, coded).target_source
        if source != "records":
            raise ConfigError(
                f"families.feature_arm={coded} takes its states by target_source={source}, so that no codes of records "
                "can be compared. Set target_source=records for it, or families.feature_arm=null"
            )
    return facts


def check_begun(cfg: EvalConfig, who: str, draft: str, target: ModelDescription) -> None:
    """InputError where a draft was trained on held-out text, or on chats by another template."""
    if cfg.prompts.file is None:
        check_held_out(cfg.data, who, draft)
    check_chats_of_draft(cfg, who, draft, target)


def _check_own_states(cfg: EvalConfig, facts: Mapping[str, ArmFacts]) -> None:
    """InputError where an arm is to read hidden states from records of its own that lack them."""
    for arm, folder in own_records(cfg).items():
        if not facts[arm].taps or train_config(cfg, arm).target_source != "records":
            continue
        features = RecordFolder.open(folder).layout.features
        there = [] if features is None else features.layers
        if missing := sorted(set(facts[arm].taps) - set(there)):
            raise InputError(
                f"families.arms.{arm}: records={folder} holds the hidden states {sorted(there)}, and the arm reads "
                f"{missing} too. Record them with records.features.layers, or train with target_source=live"
            )


TOY = "runs/toy"
REMEDY = "write it first: bash scripts/toy.sh"


def check_present(cfg: EvalConfig) -> None:
    """Raise InputError where the target or the records are not there, before anything else looks for them."""
    target = str(cfg.target.path)
    if target.startswith(TOY) and not Path(target).is_dir():
        raise InputError(f"target.path={target} does not exist, and mode=families drafts for it; {REMEDY}")
    for who, folder in _every_records(cfg).items():
        if not is_finished(Path(folder)):
            state = "is not finished" if Path(folder).is_dir() else "does not exist"
            raise InputError(f"{who}={folder} {state}, and arms are trained on its texts; {REMEDY}")


def _every_records(cfg: EvalConfig) -> dict[str, str]:
    """Setting -> folder of records."""
    own = {f"families.arms.{arm}: records": folder for arm, folder in own_records(cfg).items()}
    return {"families.records": cfg.families.records, **own}


def check_records(cfg: EvalConfig, target: ModelDescription) -> RecordFolder:
    """The records that arms share; these and arms' own are checked against target and held-out share."""
    for setting, folder in _every_records(cfg).items():
        records, who = RecordFolder.open(folder, target), f"{setting}={folder}"
        data = records.manifest.config.data
        if cfg.prompts.file is None:
            check_same_shares(cfg.data, data, who)
        check_same_chats(cfg, data, records.manifest.target.chat_template_hash, target, who)
    return RecordFolder.open(cfg.families.records, target)


def layers_wanted(cfg: EvalConfig, facts: Mapping[str, ArmFacts]) -> dict[str, list[int]]:
    """Code of features -> layers to record: all arms' for the first code, those of `feature_arm` for the others.

    Empty where no arm reads hidden states, or those that do take them from the target itself (`target_source`).
    """
    first, *others = cfg.families.feature_codes
    shared = facts.keys() - own_records(cfg).keys()
    recorded = (facts[arm] for arm in shared if train_config(cfg, arm).target_source == "records")
    everything = sorted({tap for one in recorded for tap in one.taps})
    if not everything:
        return {}
    coded = cfg.families.feature_arm
    return {first: everything} | ({code: sorted(facts[coded].taps) for code in others} if coded is not None else {})


def record_folders(cfg: EvalConfig, wanted: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Code -> folder of records; the given records themselves where they hold what is wanted."""
    if not wanted:
        return {cfg.families.feature_codes[0]: cfg.families.records}
    own = RecordFolder.open(cfg.families.records).layout.features
    return {
        code: cfg.families.records
        if own is not None and own.code == code and set(layers) <= set(own.layers)
        else str(Path(cfg.families.folder) / f"records_{code}")
        for code, layers in wanted.items()
    }


def check_layers(cfg: EvalConfig, wanted: Mapping[str, list[int]]) -> None:
    """Raise InputError where a finished folder lacks a layer that an arm has come to want."""
    folders = record_folders(cfg, wanted)
    for code, layers in wanted.items():
        if is_finished(Path(folders[code])):
            features = RecordFolder.open(folders[code]).layout.features
            there = [] if features is None else features.layers
            if missing := sorted(set(layers) - set(there)):
                raise InputError(
                    f"{folders[code]} holds the hidden states {sorted(there)}, and families.arms read {layers}: "
                    f"{missing} are missing. Delete the folder, which is then written again, or use another "
                    "families.folder"
                )


def rescoring(cfg: EvalConfig, code: str, layers: list[int], output_dir: str) -> DistillConfig:
    """The given records' own stores and seed, so that p is what it is there, and features beside them."""
    written = RecordFolder.open(cfg.families.records).manifest.config
    settings = {
        "target": asdict(cfg.target),
        "responses": "records",
        "from_records": cfg.families.records,
        "records": {**written.records.model_dump(), "features": {"layers": layers, "code": code}},
        "output_dir": output_dir,
        "resume": "auto",
        "batch_size": written.batch_size,
        "seed": written.seed,
    }
    return build(DistillConfig, settings)


def feature_bytes(folder: str, num_taps: int) -> float:
    """Bytes on disk that `num_taps` of a folder's layers take, per token; 0 without features."""
    layout = RecordFolder.open(folder).layout
    return 0.0 if layout.features is None else layout.feature_bytes_per_token * num_taps / len(layout.features.layers)
