"""What a run will cost, known before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from train.config import TrainConfig
from train.training_inputs import Inputs

USUAL_TOKENS = 250_000_000
"""What published heads of 8B targets learn from, at least: 500,000 responses of the target (speculators #751) of some
500 tokens."""
BYTES_PER_WEIGHT = 4
STATE_PER_WEIGHT = 8  # two fp32 averages of AdamW; Muon keeps one


@dataclass(frozen=True)
class TrainingPlan:
    """Sizes of a run."""

    steps: int
    tokens: int
    """Tokens that will be read, padding not counted."""
    epochs: float
    draft_parameters: int
    target_parameters: int | None
    checkpoint_bytes: int
    """One checkpoint."""
    rates: str
    """Optimizer and peak learning rates."""
    disk_bytes: int
    """All that is kept at once: checkpoints, the best weights twice while they change, the export."""

    @classmethod
    def of(cls, cfg: TrainConfig, inputs: Inputs, rows_per_step: int) -> TrainingPlan:
        """The plan of `cfg` on these inputs."""
        rows = cfg.steps * rows_per_step
        weights = inputs.blueprint.num_parameters
        checkpoint = weights * (BYTES_PER_WEIGHT + STATE_PER_WEIGHT)
        return cls(
            steps=cfg.steps,
            tokens=round(rows * inputs.train.num_tokens / len(inputs.train.rows)),
            epochs=rows / len(inputs.train.rows),
            draft_parameters=weights,
            target_parameters=inputs.target.num_parameters if inputs.target else None,
            checkpoint_bytes=checkpoint,
            rates=_rates(cfg),
            disk_bytes=checkpoint * (cfg.keep_checkpoints + 1) + 3 * weights * BYTES_PER_WEIGHT,
        )

    def advice(self) -> list[str]:
        """What is far from what is known to work; of drafts, not of targets."""
        if self.target_parameters is None or self.tokens >= USUAL_TOKENS / 10:
            return []
        return [
            f"{self.tokens:,} tokens are {self.tokens / USUAL_TOKENS:.1%} of the {USUAL_TOKENS:,} that published heads "
            "learn from: enough for a trial, far too few to serve with (docs/how-to/train_a_draft.md, How much)"
        ]

    def lines(self) -> list[str]:
        """For people."""
        target = [] if self.target_parameters is None else [f"target: {self.target_parameters:,} parameters, frozen"]
        return [
            f"{self.steps:,} steps, {self.tokens:,} tokens ({self.epochs:.2f} epochs)",
            f"trained: {self.draft_parameters:,} parameters, {self.rates}",
            *target,
            f"checkpoint: {self.checkpoint_bytes / 1e6:.1f} MB; on disk at most {self.disk_bytes / 1e6:.1f} MB",
        ]


def _rates(cfg: TrainConfig) -> str:
    adamw = f"AdamW at {cfg.lr:g}"
    return adamw if cfg.optimizer == "adamw" else f"Muon at {cfg.muon_lr:g}, tables and norms by {adamw}"
