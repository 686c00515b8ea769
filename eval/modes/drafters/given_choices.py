"""Settings that an earlier run of the comparison chose, so that several processes time the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode.common.errors import InputError
from eval.arms.base import EARLY_EXIT, LOOKUP, VLLM_LOOKUP
from eval.arms.ours import early_exit_settings
from eval.config import EvalConfig
from eval.measure.cells import Cell
from eval.modes.drafters.arms import cells
from eval.modes.drafters.results import arms_in_words
from eval.modes.drafters.targets import Target
from eval.modes.drafters.way import length_name
from eval.results.comparisons import about, check_same_comparison
from eval.results.schema import read_results

Choices = dict[Cell, dict[str, Any]]


def given_choices(cfg: EvalConfig, targets: Sequence[Target]) -> Choices:
    """What drafters.choices holds, {} where it is null; InputError where that run tried other arms, or is of other
    targets or drafts, or lacks a cell, an arm or a setting of this one."""
    if cfg.drafters.choices is None:
        return {}
    file = Path(cfg.drafters.choices)
    results = read_results(file)
    paths = {text: target.description.path for target in targets for text in target.texts}
    there = {text: one["path"] for one in results.get("targets", []) for text in one["texts"]}
    known = {**results, "targets": {text: there.get(text) for text in paths}}
    wanted = {"mode": "drafters", "targets": paths, "drafts": dict(cfg.drafts), "arms": arms_in_words(cfg)}
    check_same_comparison("drafters.choices", file, known, wanted)
    found = {about(one): one for one in results["choices"]}
    return {
        cell: {**_choice(cfg, target, cell, found, file), "seconds": 0.0, "chosen_in": str(file)}
        for target in targets
        for cell in cells(cfg, [target])
    }


def _choice(cfg: EvalConfig, target: Target, cell: Cell, found: dict[Any, Any], file: Path) -> dict[str, Any]:
    choice = found.get(about(cell.as_dict()))
    if choice is None:
        raise InputError(
            f"drafters.choices={file} chose nothing for {cell.name}, which this run times. Leave it out of "
            "drafters.batch_sizes, drafters.texts or temperatures, or choose anew with drafters.choices=null"
        )
    for arm, settings in _settings(cfg, target, cell).items():
        if choice["best"].get(arm) not in settings:
            raise InputError(
                f"drafters.choices={file} has {arm} at {choice['best'].get(arm)} for {cell.name}, and this run tries "
                f"{', '.join(settings)}. Give the arms and peers of that run, or choose anew with drafters.choices=null"
            )
    return choice


def _settings(cfg: EvalConfig, target: Target, cell: Cell) -> dict[str, list[str]]:
    """Arm of a cell -> the settings that are tried."""
    each = {way.name: [length_name(k) for k in way.lengths] for way in target.ways(cfg, cell.text)}
    if cell.batch_size == 1 and cfg.peers.prompt_lookup_num_tokens:
        each[LOOKUP] = [f"n={tokens}" for tokens in cfg.peers.prompt_lookup_num_tokens]
    if cell.batch_size == 1 and cfg.peers.early_exit_layers:
        each[EARLY_EXIT] = list(early_exit_settings(cfg.peers))
    if cfg.peers.vllm_python is not None and cfg.peers.vllm_draft_tokens:
        each[VLLM_LOOKUP] = [length_name(k) for k in cfg.peers.vllm_draft_tokens]
    return each
