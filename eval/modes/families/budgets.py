"""From budgets to optimizer steps: so many tokens, or so many seconds at the pace that a finished training had."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from decode.common.errors import InputError
from distill.records.record_folder import RecordFolder
from distill.sequences import record_sequences
from eval.results.training_curves import METRICS, read_metrics
from train.batches import PackedSource
from train.config import TrainConfig


def tokens_per_step(train: TrainConfig, records: RecordFolder) -> float:
    """Tokens that a step reads on average: rows are packed, and their ends may stay empty."""
    packed = PackedSource.of(record_sequences(records, "train", train.sequence_length), train.sequence_length, 0)
    if not packed.rows:
        raise InputError(
            f"{records.path} holds no training records, so there is nothing to train on; record some with `python -m "
            "distill`"
        )
    rows = train.batch_size * train.gradient_accumulation
    return rows * packed.num_tokens / len(packed.rows)


def steps_for_tokens(tokens: float, per_step: float) -> int:
    """The number of steps that comes nearest to `tokens`; at least one."""
    return max(1, round(tokens / per_step))


@dataclass(frozen=True)
class Pace:
    """How fast a training went; validations and checkpoints are not counted."""

    steps: int
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Training tokens per second."""
        return self.tokens / self.seconds

    def steps_for_seconds(self, seconds: float) -> int:
        """Steps that take so long at this pace; at least one."""
        return max(1, round(seconds * self.steps / self.seconds))


def pace_of(folder: Path) -> Pace:
    """Of a training's metrics.jsonl: every log line tells the tokens read so far and the rate since the line before.

    InputError where it holds no such line.
    """
    tokens, seconds, steps = 0, 0.0, 0
    for line in read_metrics(folder / METRICS):
        if line.get("kind") != "train":
            continue
        if not (tokens <= (line.get("tokens") or -1) and (line.get("tokens_per_s") or 0) > 0):
            raise InputError(
                f"{folder / METRICS}: step {line['step']} has tokens={line.get('tokens')} after {tokens}, read at "
                f"tokens_per_s={line.get('tokens_per_s')}, from which no pace follows; delete {folder}"
            )
        seconds += (line["tokens"] - tokens) / line["tokens_per_s"]
        tokens, steps = line["tokens"], line["step"]
    if not steps:
        raise InputError(f"{folder / METRICS} holds no line of training, so its pace is unknown; delete {folder}")
    return Pace(steps, tokens, seconds)
