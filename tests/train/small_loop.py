"""Training loops over texts of a few tokens, whose numbers a test can work out (fp64, plain SGD, no stage around), and
a clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD

from decode.drafters.lm import LMDraft
from distill.objectives.config import ObjectiveConfig
from distill.sequences import TextSequences, TrainSequence
from tests.tiny import tiny_llama
from tests.train.toy import tiny_config
from train.batches import PackedSource, StepReader
from train.checkpoints.run_checkpoints import Checkpoints
from train.checkpoints.state import TrainState
from train.config import TrainConfig
from train.engine import build_accelerator
from train.live_target import LiveTarget
from train.loss import DraftLoss
from train.metrics_log import MetricsLog
from train.optimizers import Schedule
from train.packing import Order
from train.trackers import Tracker
from train.training_loop import Compute, Recorder, TrainingLoop

VOCAB = 16
LENGTH = 12
"""Tokens of a row."""
LENGTHS = (12, 2, 7, 3, 11, 4, 5, 9)
"""Of the texts, no two of which fill one row."""


def sequences(lengths: Sequence[int] = LENGTHS, learned: Callable[[int], Any] = bool) -> TextSequences:
    """A text of so many tokens each, named doc0, doc1 ...; `learned` says which places are learned, all but the first
    one if nothing is said."""
    generator = np.random.default_rng(0)
    return TextSequences(
        [
            TrainSequence(
                generator.integers(0, VOCAB, length),
                np.array([bool(learned(t)) for t in range(length)]),
                document=f"doc{n}",
            )
            for n, length in enumerate(lengths)
        ]
    )


def one_text_a_row(lengths: Sequence[int] = LENGTHS) -> PackedSource:
    """Rows in the order of the texts."""
    return PackedSource(sequences(lengths), [(index,) for index in range(len(lengths))], LENGTH)


Kind = TypeVar("Kind", bound=DraftLoss)


def small_draft(kind: type[Kind] = DraftLoss) -> Kind:
    """One layer of width 8, in fp64; learns p of a live target."""
    model = tiny_llama(VOCAB, 8, num_layers=1, seed=2, dtype=torch.float64)
    return kind(LMDraft(model), ObjectiveConfig(chunk_rows=64), window=2).train()


def small_target() -> LiveTarget:
    """Another model over the same tokens."""
    return LiveTarget(tiny_llama(VOCAB, 8, num_layers=1, seed=1, dtype=torch.float64))


def small_config(folder: Path, **changes: Any) -> TrainConfig:
    """Rates start at their peak and nothing is clipped, unless asked for."""
    settings: dict[str, Any] = {
        "warmup": 0.0,
        "clip": 1e9,
        "lr": 1.0,
        "batch_size": 1,
        "data": {"name": "python_stdlib"},
    }
    return tiny_config(folder, Path("target"), target_source="live", **settings | changes)


def small_loop(
    cfg: TrainConfig, module: nn.Module | None = None, accelerator: Any = None, state: TrainState | None = None
) -> TrainingLoop:
    """Over `one_text_a_row`, which it also validates on; SGD at `cfg.lr`."""
    module, folder = module or small_draft(), Path(cfg.output_dir)
    folder.mkdir(exist_ok=True)
    accelerator = accelerator or build_accelerator(cfg)
    optimizers: list[Any] = [SGD(module.parameters(), lr=cfg.lr or 1e-2)]
    schedule = Schedule(optimizers, cfg)
    compute = Compute(accelerator, module, optimizers, schedule, small_target())
    rows, ranks = one_text_a_row(), accelerator.num_processes
    per_step = ranks * cfg.gradient_accumulation * cfg.batch_size
    split = (accelerator.process_index, ranks, cfg.gradient_accumulation, cfg.batch_size)
    reader = StepReader(rows, Order(len(rows.rows), per_step, cfg.seed), split)
    log = MetricsLog(folder / "metrics.jsonl") if accelerator.is_main_process else None
    recorder = Recorder(Checkpoints(folder / "checkpoints", 2), log, Tracker())
    return TrainingLoop(cfg, compute, reader, rows, recorder, state or TrainState())


def weights_of(loop: TrainingLoop) -> Tensor:
    """All weights in a row."""
    return torch.cat([weight.detach().flatten() for weight in loop.compute.module.parameters()])


class Rank:
    """What a loop asks of an accelerator, for one of several ranks that are threads: reductions wait for all of them,
    and gradients are averaged as DDP does."""

    device = torch.device("cpu")
    sync_gradients = True

    def __init__(self, process_index: int, given: list[Any], barrier: threading.Barrier) -> None:
        self.process_index, self.num_processes = process_index, len(given)
        self.is_main_process = process_index == 0
        self.given, self.barrier = given, barrier

    def reduce(self, tensor: Tensor, how: str) -> Tensor:
        """The sum over ranks."""
        assert how == "sum"
        self.given[self.process_index] = tensor
        self.barrier.wait(20)
        total = torch.stack(self.given).sum(0)
        self.barrier.wait(20)
        return total

    def autocast(self) -> nullcontext:
        """It computes in the weights' own precision."""
        return nullcontext()

    def unwrap_model(self, module: nn.Module) -> nn.Module:
        """It wraps none."""
        return module

    def accumulate(self, module: nn.Module) -> nullcontext:
        """Of one micro-step there is nothing to hold back."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """The gradients of this rank alone."""
        loss.backward()

    def clip_grad_norm_(self, weights: Any, clip: float) -> Tensor:
        """Of the gradients averaged over ranks."""
        weights = list(weights)
        for weight in weights:
            weight.grad = self.reduce(weight.grad, "sum") / self.num_processes
        return torch.nn.utils.clip_grad_norm_(weights, clip)


def small_ranks(folder: Path, module: Callable[[], DraftLoss] = small_draft, **changes: Any) -> list[TrainingLoop]:
    """The loops of two ranks with a draft of `module` each, of the same weights."""
    barrier, given = threading.Barrier(2), [None, None]
    loops = []
    for index in range(2):
        cfg = small_config(folder / f"rank{index}", **changes)
        loops.append(small_loop(cfg, module(), Rank(index, given, barrier)))
    return loops


def together(loops: list[TrainingLoop], run: Callable[[TrainingLoop], Any]) -> list[Any]:
    """What `run` makes of each rank's loop, all at once; an error on one of them ends all."""

    def on_rank(loop: TrainingLoop) -> Any:
        try:
            return run(loop)
        except BaseException:
            cast(Rank, loop.accelerator).barrier.abort()
            raise

    with ThreadPoolExecutor(len(loops)) as pool:
        return list(pool.map(on_rank, loops))


class Clock:
    """Stands in for the module `time`."""

    def __init__(self, tick: float = 0.0) -> None:
        """`tick` passes whenever somebody looks."""
        self.now, self.tick = 0.0, tick

    def perf_counter(self) -> float:
        """Seconds."""
        self.now += self.tick
        return self.now
