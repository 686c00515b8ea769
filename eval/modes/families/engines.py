"""Which engines serve a draft: what train/export/engines says of its form, its target and its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from decode.common.errors import InputError
from decode.config import model_folder
from decode.drafters.provenance import read_provenance
from decode.formats.form import published_form
from decode.formats.source import Source
from decode.models.describe import ModelDescription
from eval.modes.families.arms import ArmFacts
from train.export.config import ExportConfig, SavedDraftConfig
from train.export.engines import ENGINES
from train.export.engines.base import Engine
from train.export.loadable import refusal
from train.export.source import open_source

Refusals = Mapping[str, str | None]
"""Engine -> why it does not serve a draft; None where it does."""


def refusals(draft: str, target: ModelDescription) -> dict[str, str | None]:
    """What every engine says of a saved draft at the depth that it was trained for; no weights are read."""
    form = published_form(model_folder(draft))
    if form is not None:
        return {name: _refusal_as_published(engine, form, target) for name, engine in ENGINES.items()}
    try:
        source = _source(draft, target)
    except InputError as error:  # it is measured all the same
        return dict.fromkeys(ENGINES, str(error))
    return {name: refusal(engine, source) for name, engine in ENGINES.items()}


def refused_forms(facts: Mapping[str, ArmFacts], engine: str) -> dict[str, str]:
    """Arm -> why the engine serves none of its family, known before anything is trained.

    Blocks of both layouts go by the family `dspark`; an engine loads either form of them or neither, and what else it
    refuses of a draft it says of the trained one.
    """
    how = {arm: ENGINES[engine].forms[one.family] for arm, one in facts.items()}
    return {arm: why for arm, why in how.items() if isinstance(why, str)}


def title(engine: str) -> str:
    """As its makers call it, with the version whose source was read."""
    return ENGINES[engine].title


def _refusal_as_published(engine: Engine, form: str, target: ModelDescription) -> str | None:
    """By its form and target; `python -m train.check` goes through the folder itself."""
    how, kind = engine.forms[form], target.config.get_text_config().model_type
    if isinstance(how, str):
        return how
    if how.targets is None or kind in how.targets:
        return None
    return f"it drafts so for {', '.join(sorted(how.targets))}, and the target is a {kind} model"


def _source(draft: str, target: ModelDescription) -> Source:
    folder = model_folder(draft)
    if read_provenance(folder) is None:
        return Source(Path(folder), "lm", target, None, 1, {"family": "lm"})
    wanted = ExportConfig("all", "unwritten", SavedDraftConfig(folder), target.source)
    return open_source(wanted)
