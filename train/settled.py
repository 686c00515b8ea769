"""Choices that a configuration may leave to us, made once the draft is known: optimizer, learning rates, chunks."""

from __future__ import annotations

from dataclasses import replace

from distill.objectives.scoring import rows_at_once
from train.config import TrainConfig
from train.drafts.blueprint import Blueprint

KNOWN_WIDTH = 512
"""Of the drafts that the rates below were found on (docs/how-to/train_a_draft.md)."""
LR = 3e-3
"""Peak of AdamW at that width; Muon's is the family's. Wider drafts take less of both, in proportion, and narrower ones
more: at 128 to 1,024 this is the best of rates that double, or next to it (docs/results/rates.md)."""
MOST_SCALE = 4.0
"""Of a width of 128, below which none was tried."""
OF_PRETRAINED = 0.1
"""Share of those for weights that have learned already. Adapters in them begin at nothing and take the whole: ten times
the rate of all weights (Schulman et al. 2025, LoRA Without Regret); on an MTP head of SmolLM2 a third of it and three
times as much both learned less."""


def width_scale(width: int) -> float:
    """Share of the rates above that a draft of this width takes."""
    return min(MOST_SCALE, KNOWN_WIDTH / width)


def chosen_optimizer(cfg: TrainConfig) -> str:
    """The optimizer of the run. `auto` is AdamW for saved weights, under engines that shard and where `lr` alone is
    set, which would else be the rate of norms and tables only; Muon everywhere else."""
    sets_adamw = cfg.lr is not None and cfg.muon_lr is None
    auto = "adamw" if _is_pretrained(cfg) or sets_adamw or cfg.engine.is_sharded else "muon"
    return auto if cfg.optimizer == "auto" else cfg.optimizer


def _is_pretrained(cfg: TrainConfig) -> bool:
    return cfg.draft.init_from is not None or cfg.draft.head.init_own


def settled(cfg: TrainConfig, blueprint: Blueprint, row: int) -> TrainConfig:
    """`cfg` with the choices that it leaves open made, for this draft and a loss of rows of so many entries."""
    goes_on = _is_pretrained(cfg) and not cfg.draft.lora.rank
    scale = width_scale(blueprint.width) * (OF_PRETRAINED if goes_on else 1.0)
    peaks = {"lr": LR, "muon_lr": blueprint.muon_lr}
    rates = {name: peak * scale for name, peak in peaks.items() if getattr(cfg, name) is None}
    objective = replace(cfg.objective, chunk_rows=cfg.objective.chunk_rows or rows_at_once(row))
    return replace(cfg, optimizer=chosen_optimizer(cfg), objective=objective, **rates)


def rates(cfg: TrainConfig) -> str:
    """Optimizer and peak learning rates, as they are settled."""
    adamw = f"AdamW at {cfg.lr:.3g}"
    return adamw if cfg.optimizer == "adamw" else f"Muon at {cfg.muon_lr:.3g}, tables and norms by {adamw}"
