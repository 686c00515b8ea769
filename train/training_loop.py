"""The training loop: read, forward, backward, step; log, validate and checkpoint once in a while."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from decode.common.errors import RunError
from decode.common.progress import get_logger, progress
from decode.drafters.base import Batch
from decode.models.output_head import Ends
from decode.models.structure import decoder_of
from train.batches import PADDING, PackedSource, StepReader
from train.checkpoints.run_checkpoints import Checkpoints
from train.checkpoints.state import TrainState
from train.config import TrainConfig
from train.fully_sharded import is_sharded, whole_weights
from train.live_target import LiveTarget
from train.loss import DraftLoss
from train.metric_sums import Sums
from train.metrics_log import MetricsLog
from train.optimizers import Schedule
from train.packing import share
from train.speed_meter import Meter
from train.trackers import Tracker

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = get_logger("train")

MOVED = "DeepSpeed, which steps in the backward pass, has changed the weights by it, and they are lost with this run"


@dataclass(frozen=True)
class Compute:
    """What computes: the prepared module (`train.loss.DraftLoss`) and its optimizers."""

    accelerator: Accelerator
    module: nn.Module
    optimizers: list[Optimizer]
    schedule: Schedule
    live: LiveTarget | None = None
    """The target in this process, where p comes from it."""
    ends: Ends | None = None
    """The target's frozen ends, where the draft is a head between them."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(loss sum, sums as a tensor) of a batch from the CPU."""
        batch = self.completed(batch)
        with self.accelerator.autocast():  # a prepared module does so itself
            return self.module(batch)

    def completed(self, batch: Batch) -> Batch:
        """A batch from the CPU on the device, with what a live target makes of it."""
        batch = batch.to(self.accelerator.device)
        return batch if self.live is None else self.live(batch)

    @property
    def calibrates_together(self) -> bool:
        """Whether a draft is calibrated at the end on passes that take all processes."""
        is_spread = self.live is not None and is_sharded(decoder_of(self.live.reader.model))
        return is_spread and getattr(cast(Any, self.module).draft, "foresees", False)


@dataclass(frozen=True)
class Recorder:
    """What is written down."""

    checkpoints: Checkpoints
    log: MetricsLog | None
    """On rank 0."""
    tracker: Tracker

    def record(self, record: dict[str, Any]) -> None:
        """One line of metrics."""
        if self.log is not None:
            self.log.write(record)
        self.tracker.log(record)


class TrainingLoop:
    """Trains from `state.step` to `cfg.steps`; all ranks run it in lockstep and come to the same decisions."""

    def __init__(
        self,
        cfg: TrainConfig,
        compute: Compute,
        reader: StepReader,
        validation: PackedSource,
        recorder: Recorder,
        state: TrainState,
    ) -> None:
        self.cfg, self.compute, self.reader, self.recorder, self.state = cfg, compute, reader, recorder, state
        self.accelerator = compute.accelerator
        self.validation = validation
        self._objective_takes_over(state.switched_at)
        self.meter = Meter(cfg.steps, state.step)
        self.lr = 0.0
        self.grad_norm: float | None = None

    def run(self) -> TrainState:
        """Train to the end; RunError at a loss or gradient that is not finite, the last checkpoint being kept."""
        first = self.state.step
        self.compute.module.train()  # pretrained weights come in eval mode
        if first == 0 and self.cfg.draft.pruning.is_asked:
            self.state.start = self._validate()
        with progress(self.cfg.steps, "steps", "train", initial=first) as bar:
            for step, batches in enumerate(self.reader.steps(first, self.cfg.steps), start=first):
                self.take_step(step, batches)
                self._write_down(bar)
                bar.update(1)
        objective = self.cfg.objective
        if objective.warm_up is not None and self.state.switched_at is None:
            logger.warning(
                "the validation alpha never reached objective.switch_at=%g, so every step was warm_up=%s and none "
                "objective=%s. Train longer, or switch earlier",
                *(objective.switch_at, objective.warm_up, objective.name),
            )
        return self.state

    def take_step(self, step: int, batches: list[Batch]) -> None:
        """One optimizer step; the loss is the mean over the learned tokens of all ranks and micro-steps together."""
        compute, accelerator = self.compute, self.accelerator
        self.draft_loss.counts_accepted = self._is_logged(step + 1)
        self.lr = compute.schedule.apply(compute.optimizers, step)
        learned = torch.stack([batch.next_token_rows().sum() for batch in batches]).sum().to(accelerator.device)
        total_learned = int(accelerator.reduce(learned, "sum"))  # type: ignore[arg-type]
        scale = accelerator.num_processes * self.cfg.gradient_accumulation / max(1, total_learned)
        sums = Sums().tensor(accelerator.device)
        for micro, batch in enumerate(batches):
            with accelerator.accumulate(compute.module):
                loss, values = compute.forward(batch)
                sums = sums + values
                if micro == len(batches) - 1:  # before the weights move: under DeepSpeed the last backward steps too
                    self._account(step, sums)
                accelerator.backward(loss * scale)
                if accelerator.sync_gradients:
                    self._move_weights(step)

    def _move_weights(self, step: int) -> None:
        norm = self.accelerator.clip_grad_norm_(self.compute.module.parameters(), self.cfg.clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.grad_norm = None if norm is None else float(norm)
        # DeepSpeed has stepped in backward: it skips what is not finite or, by version, steps and tells a norm of -1
        has_stepped = getattr(self.compute.module, "was_step_applied", lambda: None)()
        if has_stepped is False or not 0 <= (self.grad_norm or 0.0) < math.inf:
            every = range(self.accelerator.num_processes)
            raise self._not_finite(step, "gradient", every, moved=has_stepped is True)
        for optimizer in self.compute.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _account(self, step: int, sums: Tensor) -> None:
        """Add up the step's metrics over ranks, in one reduction that also says which rank's loss is not finite."""
        flags = torch.zeros(self.accelerator.num_processes, dtype=torch.float64, device=sums.device)
        flags[self.accelerator.process_index] = float(not torch.isfinite(sums[0]))
        reduced = self.accelerator.reduce(torch.cat([sums, flags]), "sum")
        assert isinstance(reduced, Tensor)
        bad_ranks = reduced[len(sums) :].nonzero().flatten().tolist()
        if bad_ranks:
            raise self._not_finite(step, "loss", bad_ranks)
        over_ranks = Sums.from_tensor(reduced[: len(sums)])
        self.state.since_log += over_ranks
        self.state.tokens += int(over_ranks.tokens)
        self.meter.add(over_ranks.tokens)

    def _not_finite(self, step: int, what: str, ranks: Any, moved: bool = False) -> RunError:
        names = sorted({name for rank in ranks for name in self.reader.documents_of(step, rank)})
        newest = self.recorder.checkpoints.newest()
        return RunError(
            f"the {what} is not finite at step {step + 1}, in the batch of these documents: "
            f"{', '.join(names[:20])}{f' and {len(names) - 20} more' if len(names) > 20 else ''}. "
            f"{MOVED if moved else 'It did not change the weights'}; the last good checkpoint is "
            f"{newest or 'none yet'}. Lower lr or clip, or look at those, and start again"
        )

    def _write_down(self, bar: Any) -> None:
        self.state.step += 1
        step, is_last = self.state.step, self.state.step == self.cfg.steps
        if self._is_logged(step):
            self._log_training(bar)
        if step % self.cfg.validate_every == 0 or is_last:
            self._validate()
        if step % self.cfg.checkpoint_every == 0 or is_last:
            self._checkpoint()

    def _is_logged(self, step: int) -> bool:
        return step % self.cfg.log_every == 0 or step == self.cfg.steps

    def _log_training(self, bar: Any) -> None:
        means = self.state.since_log.means()
        speed = self.meter.read(self.state.step, self.reader.wait_s)
        rates = {"tokens": self.state.tokens, "lr": self.lr, "grad_norm": self.grad_norm}
        self.recorder.record({"kind": "train", "step": self.state.step, **means, **rates, **speed})
        shown = {name: f"{means[name]:.3f}" for name in ("loss", "alpha", "tau") if means[name] is not None}
        shown |= {"tok/s": f"{speed['tokens_per_s']:.0f}", "wait": f"{speed['data_wait_share']:.0%}"}
        bar.set_postfix(shown, refresh=False)
        self.state.since_log = Sums()

    def _checkpoint(self) -> None:
        self.state.log_position = self.recorder.log.position if self.recorder.log is not None else 0
        with self.meter.pause():
            self.recorder.checkpoints.save(self.accelerator, self.state)

    def _validate(self) -> Sums:
        with self.meter.pause():
            sums = self.evaluate()
            self._keep_if_best(sums)
        means = sums.means()
        goes_on = self.state.step < self.cfg.steps
        if goes_on and self.state.switched_at is None and (means["alpha"] or 0.0) >= self.cfg.objective.switch_at:
            self._objective_takes_over(self.state.step)
        self.recorder.record(
            {
                "kind": "validation",
                "step": self.state.step,
                **means,
                "tokens": int(sums.tokens),
                "best_step": self.state.best_step,
            }
        )
        shown = ", ".join(f"{name} {value:.4f}" for name, value in means.items() if value is not None)
        logger.info("step %d: validation %s; best is step %d", self.state.step, shown, self.state.best_step)
        return sums

    def _objective_takes_over(self, step: int | None) -> None:
        """From its warm-up, for good; all ranks see the same validation."""
        if step is not None and self.cfg.objective.warm_up is not None:
            logger.info("objective=%s from step %d on", self.cfg.objective.name, step)
            self.state.switched_at, self.draft_loss.warm_up = step, None

    @property
    def draft_loss(self) -> DraftLoss:
        """Out of the engine's wrapping."""
        return cast(DraftLoss, self.accelerator.unwrap_model(self.compute.module))

    def _keep_if_best(self, sums: Sums) -> None:
        score = sums.score()
        if self.state.best_score is None or score > self.state.best_score:
            self.state.best_step, self.state.best_score, self.state.best = self.state.step, score, sums
            weights = whole_weights(self.accelerator, self.compute.module)
            self.recorder.checkpoints.save_best(self.accelerator, self.state.step, weights)

    @torch.no_grad()
    def evaluate(self) -> Sums:
        """The same rows of the validation split every time, whatever the number of ranks."""
        self.compute.module.eval()
        sums = Sums().tensor(self.accelerator.device)
        for rows in self._validation_rows():
            sums = sums + self.compute.forward(self.validation.batch(rows, self.reader.head))[1]
        self.compute.module.train()
        reduced = self.accelerator.reduce(sums, "sum")
        assert isinstance(reduced, Tensor)
        return Sums.from_tensor(reduced)

    def validation_batches(self) -> Iterator[Batch]:
        """This rank's part of what `evaluate` sees, with p and hidden states."""
        for rows in self._validation_rows():
            yield self.compute.completed(self.validation.batch(rows, self.reader.head))

    def _validation_rows(self) -> Iterator[list[int]]:
        """This rank's rows, in batches; every rank has as many batches, filled up with empty rows."""
        rows = self.validation.sample(self.cfg.validation_rows)
        ranks, size = self.accelerator.num_processes, self.cfg.batch_size
        rows += [PADDING] * (-len(rows) % (ranks * size))
        for number in range(len(rows) // (ranks * size)):
            yield share(rows, self.accelerator.process_index, number, size, ranks)
