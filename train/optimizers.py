"""Optimizers by name, and the learning rate as a pure function of the step: there is no scheduler state to save."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.overrides import TorchFunctionMode

from decode.models.arithmetic import is_emulated
from train.config import TrainConfig


def build_optimizers(
    module: nn.Module, token_tables: Iterable[Tensor], cfg: TrainConfig, device: torch.device | None = None
) -> list[Optimizer]:
    """AdamW over everything, or Muon (Jordan et al. 2024) for the layers' matrices and AdamW for the rest.

    Muon orthogonalises a matrix that maps hidden states to hidden states; `token_tables`, norms and biases do not.
    `cfg` is `train.settled.settled`; `device` is where the weights will lie, where they are not there yet.
    """
    assert cfg.lr is not None, "settled"
    assert cfg.muon_lr is not None, "settled"
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    by_token = {id(weight) for weight in token_tables}
    hidden = [weight for weight in trained if weight.ndim == 2 and id(weight) not in by_token]
    tables = [weight for weight in trained if weight.ndim == 2 and id(weight) in by_token]
    vectors = [weight for weight in trained if weight.ndim != 2]  # an output head's bias, too, has a row for each token
    matrices = tables if cfg.optimizer == "muon" else hidden + tables
    groups = [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    found: list[Optimizer] = []
    if cfg.optimizer == "muon" and hidden:
        kind = WideMuon if is_emulated(torch.bfloat16, device or hidden[0].device) else Muon
        found.append(kind(hidden, lr=cfg.muon_lr, weight_decay=cfg.weight_decay, adjust_lr_fn="match_rms_adamw"))
    return [*found, AdamW(groups, lr=cfg.lr, betas=cfg.betas)] if groups else found


class WideMuon(Muon):
    """Muon that orthogonalises in float32. torch's own does so in bfloat16: on a CPU that emulates it a
    step of the toy's target took 120 s in place of 33."""

    def step(self, closure: Any = None) -> Any:
        """As Muon's."""
        with _Widened():
            return super().step(closure)


class _Widened(TorchFunctionMode):
    """What is cast to bfloat16 inside is copied in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))


class Schedule:
    """Sets the learning rates of a step: linear warmup, then a cosine down to `final_lr` of the peak."""

    def __init__(self, optimizers: Iterable[Optimizer], cfg: TrainConfig) -> None:
        """Reads the peaks off the optimizers, which must not be wrapped by an engine yet."""
        self.peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        self.steps, self.final = cfg.steps, cfg.final_lr
        self.warmup_steps = max(1, round(cfg.warmup * cfg.steps))

    def factor(self, step: int) -> float:
        """Share of the peak at step `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))

    def apply(self, optimizers: Iterable[Optimizer], step: int) -> float:
        """Set the rates of `step`; returns the first one, for the log."""
        factor = self.factor(step)
        for optimizer, peaks in zip(optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        return self.peaks[0][0] * factor
