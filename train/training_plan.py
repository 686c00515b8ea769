"""What a run will cost, known before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from distill.corpora.bad_rows import BadRowCount
from distill.prompts.held_out_count import HeldOutCount
from train.config import TrainConfig
from train.settled import rates
from train.training_inputs import Inputs

USUAL_TOKENS = 250_000_000
"""What published heads of 8B targets learn from, at least: 500,000 responses of the target (speculators #751) of some
500 tokens."""
BYTES_PER_WEIGHT = 4
STATE_PER_WEIGHT = 8  # two fp32 averages of AdamW; Muon keeps one
WELL_COVERED = 0.9
"""Share of the learned tokens below which a reduced vocabulary is warned of: it bounds the acceptance of each draft
token, so that at 0.9 four of them all stand in 66% of rounds at most."""
DEAR = 1 / 3
"""Share of the target's cost above which a draft hardly pays: 3 draft tokens then cost as much as a target pass."""


@dataclass(frozen=True)
class TrainingPlan:
    """Sizes of a run."""

    steps: int
    tokens: int
    """Tokens that will be read, padding not counted."""
    epochs: float
    draft_parameters: int
    trained_parameters: int
    """Less, where adapters alone are trained."""
    target_parameters: int | None
    made_from: str | None
    """Of a pruned draft, what it was before."""
    cost: float | None
    """Weights that a draft token reads, as a share of those that a token of the target does."""
    vocab: int | None
    """Tokens of a reduced draft vocabulary."""
    covered: float | None
    """Share of the learned tokens that it holds."""
    held_out: HeldOutCount | None
    few_held_out: str | None
    """What to say where a report will find few prompts; of records `distill` has said it."""
    bad_rows: BadRowCount | None
    checkpoint_bytes: int
    """One checkpoint."""
    rates: str
    """Optimizer and peak learning rates."""
    engines: list[str]
    """Lines on the engines that will load a head, and why others will not."""
    disk_bytes: int
    """All that is kept at once: checkpoints, the best weights twice while they change, the export."""

    @classmethod
    def of(cls, cfg: TrainConfig, inputs: Inputs, rows_per_step: int) -> TrainingPlan:
        """The plan of `cfg` on these inputs."""
        rows = cfg.steps * rows_per_step
        weights, trained = inputs.blueprint.num_parameters, inputs.blueprint.num_trained
        checkpoint = weights * BYTES_PER_WEIGHT + trained * STATE_PER_WEIGHT
        target = None if inputs.target is None else inputs.target.weight_counts
        return cls(
            steps=cfg.steps,
            tokens=round(rows * inputs.train.num_tokens / len(inputs.train.rows)),
            epochs=rows / len(inputs.train.rows),
            draft_parameters=weights,
            trained_parameters=trained,
            target_parameters=None if target is None else target.total,
            made_from=inputs.blueprint.made_from,
            cost=None if target is None else inputs.blueprint.weights_per_token / target.per_token,
            vocab=None if inputs.covered is None else cfg.draft.head.vocab,
            covered=inputs.covered,
            held_out=inputs.held_out,
            few_held_out=_few_held_out(cfg, inputs),
            bad_rows=inputs.bad_rows,
            checkpoint_bytes=checkpoint,
            rates=rates(cfg),
            engines=inputs.blueprint.engines,
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

    def warnings(self) -> list[str]:
        """What cannot be mended once the draft is trained."""
        found = [] if self.few_held_out is None else [self.few_held_out]
        if self.covered is not None and self.covered < WELL_COVERED:
            found.append(
                f"draft.head.vocab={self.vocab} holds {self.covered:.1%} of the tokens that are learned, and "
                f"acceptance cannot exceed that; below {WELL_COVERED:.0%} it mostly costs more than the smaller output "
                "head saves. Use a larger one"
            )
        if self.cost is not None and self.cost > DEAR:
            found.append(
                f"a draft token reads {self.cost:.0%} of the weights that a token of the target does (layers and "
                f"output head), and above {DEAR:.0%} a draft hardly pays, however well it agrees. Make it smaller: a "
                "draft LM by draft.layers or draft.width, a head by draft.head.vocab"
            )
        return found

    def lines(self) -> list[str]:
        """For people."""
        whole = f" of {self.draft_parameters:,}" if self.trained_parameters < self.draft_parameters else ""
        lines = [
            f"{self.steps:,} steps, {self.tokens:,} tokens ({self.epochs:.2f} epochs)",
            f"trained: {self.trained_parameters:,}{whole} parameters, {self.rates}",
        ]
        if self.made_from is not None:
            lines.append(f"draft: {self.made_from}")
        if self.covered is not None:
            lines.append(f"draft vocabulary: {self.vocab:,} tokens, {self.covered:.1%} of those that are learned")
        if self.target_parameters is not None:
            lines.append(
                f"target: {self.target_parameters:,} parameters, frozen; a draft token reads {self.cost:.1%} of the "
                "weights that one of the target does"
            )
        lines += self.engines
        if self.held_out is not None:
            lines.append(f"held out: {self.held_out.line()}")
        if self.bad_rows:
            lines.append(f"left out: {self.bad_rows.line()}")
        megabytes = f"checkpoint: {self.checkpoint_bytes / 1e6:.1f} MB; on disk at most {self.disk_bytes / 1e6:.1f} MB"
        return [*lines, megabytes]


def _few_held_out(cfg: TrainConfig, inputs: Inputs) -> str | None:
    if cfg.data is None or inputs.held_out is None:
        return None
    return inputs.held_out.warning(cfg.data.heldout_share)
