"""Choices that a configuration may leave to us, made once the draft is known: optimizer, learning rates, chunks."""

from __future__ import annotations

from dataclasses import replace

from distill.objectives.scoring import rows_at_once
from train.config import TrainConfig

KNOWN_WIDTH = 512
"""Of the drafts that the rates below were found on (docs/train.md)."""
FROM_RANDOM = {"lr": 3e-3, "muon_lr": 1e-2}
"""Peaks up to that width; wider drafts take less, in proportion."""
OF_PRETRAINED = 0.1
"""Share of those for weights that have learned already."""


def chosen_optimizer(cfg: TrainConfig) -> str:
    """What optimizer=auto is: Muon, but for saved weights, for DeepSpeed, and where `lr` alone is set, which would else
    be the rate of norms and tables only."""
    sets_adamw = cfg.lr is not None and cfg.muon_lr is None
    auto = "adamw" if _is_pretrained(cfg) or sets_adamw or cfg.engine.zero_stage else "muon"
    return auto if cfg.optimizer == "auto" else cfg.optimizer


def _is_pretrained(cfg: TrainConfig) -> bool:
    return cfg.draft.init_from is not None or cfg.draft.head.init_own


def settled(cfg: TrainConfig, width: int, vocab_size: int) -> TrainConfig:
    """`cfg` with the choices that it leaves open made, for a draft of hidden size `width` over so many tokens."""
    scale = min(1.0, KNOWN_WIDTH / width) * (OF_PRETRAINED if _is_pretrained(cfg) else 1.0)
    rates = {name: peak * scale for name, peak in FROM_RANDOM.items() if getattr(cfg, name) is None}
    objective = replace(cfg.objective, chunk_rows=cfg.objective.chunk_rows or rows_at_once(vocab_size))
    return replace(cfg, optimizer=chosen_optimizer(cfg), objective=objective, **rates)
