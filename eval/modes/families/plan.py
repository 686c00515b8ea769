"""What the comparison would run, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from decode.common.run_folder import is_finished
from decode.models.load import ModelDescription
from distill.records.record_folder import RecordFolder
from eval.config import EvalConfig
from eval.modes.families.arms import ArmFacts
from eval.modes.families.measuring import cells
from eval.modes.families.trainings import Training, trainings
from eval.plan import seconds_per_token
from eval.render.formatting import count

_TOKENS_PER_S = 2000.0
"""Training tokens per second of a small draft on 2 cores, as an order of magnitude."""
_START_S = 4.0
"""Seconds that a training costs besides: opening records, one validation, export."""
_BATCH_GAIN = 6.0
"""How much faster than one by one the check of losslessness goes, in tokens per second."""
_WARM_UPS = 4
"""Calls per arm that choosing draft lengths and warming up add to a cell, beside those of each length tried."""


def plan_lines(
    cfg: EvalConfig,
    target: ModelDescription,
    facts: Mapping[str, ArmFacts],
    wanted: Mapping[str, Sequence[int]],
    records: RecordFolder,
) -> list[str]:
    """For a person."""
    families = cfg.families
    every = trainings(cfg)
    missing = [one for one in every if not is_finished(one.folder(cfg))]
    seconds = _seconds(cfg, target, missing, wanted, records)
    layers = "; ".join(f"{code} of layers {list(one)}" for code, one in wanted.items())
    return [
        f"target: {target.path}, {target.num_parameters:,} parameters; records: {families.records}, "
        f"{records.manifest.counts.tokens:,} tokens",
        f"records with hidden states: {layers or 'none, no arm reads any'}",
        "arms:",
        *(_arm_line(cfg, arm, one) for arm, one in facts.items()),
        f"trainings: {len(every)}, {len(missing)} still to do: {count(len(families.arms), 'arm')} x "
        f"{count(len(families.seeds), 'seed')}, at {families.tokens:,} tokens and at {families.seconds:g} s each"
        + (f"; {families.feature_arm} from {', '.join(families.feature_codes[1:])} too" if _codes(every) else ""),
        f"measured: tau of {', '.join(families.shapes)} at T {_listed(cfg.temperatures)} on {cfg.lossless.prompts} "
        f"prompts; speed in {count(len(cells(cfg)), 'cell')} ({', '.join(cell.name for cell in cells(cfg))})",
        f"time: about {seconds / 60:.0f} min (an order of magnitude)",
    ]


def _arm_line(cfg: EvalConfig, arm: str, facts: ArmFacts) -> str:
    taps = f"reads target layers {list(facts.taps)}" if facts.taps else "reads tokens alone"
    return f"  {arm}: {facts.num_parameters:,} parameters, {taps} ({' '.join(cfg.families.arms[arm])})"


def _codes(every: Sequence[Training]) -> bool:
    return any(one.is_coded for one in every)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _seconds(
    cfg: EvalConfig,
    target: ModelDescription,
    missing: Sequence[Training],
    wanted: Mapping[str, Sequence[int]],
    records: RecordFolder,
) -> float:
    per_token = seconds_per_token(target, cfg.target.device)
    rescored = [code for code in wanted if not is_finished(Path(cfg.families.folder) / f"records_{code}")]
    reading = len(rescored) * records.manifest.counts.tokens * per_token / _BATCH_GAIN
    by_tokens = [one for one in missing if one.budget == "tokens"]
    training = len(by_tokens) * cfg.families.tokens / _TOKENS_PER_S + len(missing) * _START_S
    training += (len(missing) - len(by_tokens)) * cfg.families.seconds
    passes = sum(len(one.shapes(cfg)) for one in missing) * len(cfg.temperatures)
    checking = passes * cfg.lossless.prompts * cfg.lossless.tokens * per_token / _BATCH_GAIN
    return reading + training + checking + _racing(cfg) * per_token


def _racing(cfg: EvalConfig) -> float:
    """Steps of the timed run, batches counted as one step."""
    arms, tried = len(cfg.families.arms), max(1, len(cfg.timing.choose_k))
    steps = 0.0
    for cell in cells(cfg):
        calls = cfg.families.num_timed[cell.batch_size] * cfg.timing.rounds + _WARM_UPS
        steps += (arms + 2) * calls * cfg.decode.max_new_tokens
        steps += arms * tried * (cfg.families.screening_batches + 1) * cfg.timing.screening_tokens
    return steps
