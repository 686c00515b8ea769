"""An arm of the suite as the trainer sees it: its composed configuration, and what is known of it without weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from decode.common.compose import compose
from decode.common.errors import ConfigError
from decode.common.typed_config import build
from decode.models.load import ModelDescription
from eval.config import EvalConfig
from train.config import TrainConfig
from train.drafts.registry import FAMILIES


@dataclass(frozen=True)
class ArmFacts:
    """What is known of a draft before it is trained."""

    family: str
    num_parameters: int
    """Weights trained, tied ones once; the target's frozen ends are not counted."""
    taps: tuple[int, ...]
    """Layers of the target whose hidden states it reads; () for a draft that reads tokens alone."""


def train_config(cfg: EvalConfig, arm: str, **settings: Any) -> TrainConfig:
    """`python -m train` with the arm's overrides, on the suite's target; `settings` are fields that the suite decides.

    ConfigError names the arm where its overrides are refused.
    """
    try:
        container = _composed((*cfg.families.training, *cfg.families.arms[arm]))
        steps = settings.get("steps", container["steps"])
        # validated, and so exported, at the end alone: a comparison at equal budgets keeps the last weights
        once = {name: steps for name in ("validate_every", "checkpoint_every")}
        decided = {"target": asdict(cfg.target), "records": cfg.families.records, "resume": "auto", **once, **settings}
        return build(TrainConfig, {**container, **decided})
    except ConfigError as error:
        raise ConfigError(f"families.arms.{arm}: {error}") from error


@lru_cache(maxsize=64)
def _composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    container = compose("train", TrainConfig, ["output_dir=unset", *overrides])
    assert container is not None, "options of Hydra's own are no overrides"
    return container


def facts_of(cfg: EvalConfig, arm: str, target: ModelDescription) -> ArmFacts:
    """Family, size and taps, from descriptions alone."""
    train = train_config(cfg, arm)
    blueprint = FAMILIES[train.draft.family](train, target, None)
    return ArmFacts(train.draft.family, blueprint.num_parameters, blueprint.layers_read)


def describe_arms(cfg: EvalConfig, target: ModelDescription) -> dict[str, ArmFacts]:
    """Every arm's facts; ConfigError where one cannot be built, or where codes are compared for an arm without taps."""
    facts = {arm: facts_of(cfg, arm, target) for arm in cfg.families.arms}
    coded = cfg.families.feature_arm
    if coded is not None and not facts[coded].taps and len(cfg.families.feature_codes) > 1:
        raise ConfigError(
            f"families.feature_arm={coded} is of family {facts[coded].family}, which reads no hidden states, so codes "
            f"of them cannot be compared. Name an arm that does, or set families.feature_arm=null"
        )
    return facts
