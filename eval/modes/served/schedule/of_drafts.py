"""The conclusions of a served comparison, draft by draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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


def conclusions(cfg: EvalConfig, drafts: Sequence[ServedDraft], speeds: Sequence[Row]) -> list[Conclusion]:
    """One for each draft that was timed beside the target alone in two rounds or more; `speeds` are those of
    results.json."""
    return [_conclusion(cfg, draft, speeds) for draft in drafts if has_speeds(speeds, draft.name)]


def _conclusion(cfg: EvalConfig, draft: ServedDraft, speeds: Sequence[Row]) -> Conclusion:
    options = [*target_options(cfg.target), *cfg.served.options]
    served = draft.target or cfg.target.path
    assert served is not None
    measured = measured_of(speeds, draft.name, served, draft.method, draft.options, options)
    commands = {}
    if is_ours(draft.path):
        commands = launch_commands(draft.path, cfg.target, str(Path(cfg.output_dir) / "exports" / draft.name))
    return concluded(measured, draft.name, commands)
