"""The conclusions of a served comparison, draft by draft, and the files that they name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from decode.common.checked_json import read_json, write_json
from decode.config import model_folder
from decode.drafters.dspark import DSparkConfig
from decode.drafters.provenance import FILE
from decode.drafters.saved_head import read_head
from decode.models.load import ModelDescription
from eval.config import EvalConfig
from eval.modes.served.engine.jobs import target_options
from eval.modes.served.folders import ServedDraft, is_ours
from eval.modes.served.schedule.conclusion import (
    Conclusion,
    Row,
    concluded,
    has_speeds,
    launch_commands,
    measured_of,
)
from eval.modes.served.schedule.dspark_files import COSTS, TEMPERATURES, cost_table, engine_probes, temperature_file


def conclusions(
    cfg: EvalConfig, target: ModelDescription, drafts: Sequence[ServedDraft], speeds: Sequence[Row]
) -> list[Conclusion]:
    """One for each draft that was timed beside the target alone in two rounds or more; `speeds` are those of
    results.json."""
    return [_conclusion(cfg, target, draft, speeds) for draft in drafts if has_speeds(speeds, draft.name)]


def write_schedules(found: Sequence[Conclusion], folder: Path) -> None:
    """Those that the conclusions name, in `folder`/paste/DRAFT."""
    for one in found:
        for paste in one.pastes:
            for name, content in paste.files.items():
                place = _place(folder, one.draft)
                place.mkdir(parents=True, exist_ok=True)
                write_json(place / name, content)


def _conclusion(cfg: EvalConfig, target: ModelDescription, draft: ServedDraft, speeds: Sequence[Row]) -> Conclusion:
    options = [*target_options(cfg.target), *cfg.served.options]
    served = draft.target or cfg.target.path
    assert served is not None
    measured = measured_of(speeds, draft.name, served, draft.method, draft.options, options)
    commands = {}
    if is_ours(draft.path):
        commands = launch_commands(draft.path, cfg.target, str(Path(cfg.output_dir) / "exports" / draft.name))
        if draft.form == "dspark":
            measured = replace(measured, dspark=_dspark(draft, target, speeds))
    return concluded(measured, draft.name, commands, _place(Path(cfg.output_dir), draft.name))


def _dspark(draft: ServedDraft, target: ModelDescription, speeds: Sequence[Row]) -> dict[str, Any]:
    folder = Path(model_folder(draft.path))
    config = read_head(folder, target)
    assert isinstance(config, DSparkConfig)
    temperatures = temperature_file(config, read_json(folder / FILE))
    return {
        COSTS: cost_table(engine_probes(speeds, draft.name)),
        **({} if temperatures is None else {TEMPERATURES: temperatures}),
    }


def _place(folder: Path, draft: str) -> Path:
    return folder / "paste" / draft
