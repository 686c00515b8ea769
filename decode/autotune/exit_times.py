"""What the two halves of a pass cost, for each layer that a target may be left behind."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from decode.autotune.timing import interleaved, target_pass, warmed
from decode.drafters.untrained.early_exit import LAST
from decode.forward.kept.lease import Lease
from decode.forward.resume import Lower, Rest


@dataclass(frozen=True)
class ExitTimes:
    """Median seconds of passes that run alone."""

    t_target_1: float
    """The whole target over one token."""
    t_lower: tuple[float, ...]
    """The lower layers, with norm and head, over one token; by exit."""
    t_rest: tuple[dict[int, float], ...]
    """What is left of a verdict over k draft tokens and pending; by exit, then by k."""


@torch.inference_mode()
def measure_exits(
    model: PreTrainedModel,
    exits: Sequence[Lower],
    draft_lengths: Sequence[int],
    context: int,
    batch_size: int = 1,
    repeats: int = 30,
) -> ExitTimes:
    """Times behind `context` tokens a row, all passes interleaved so that drift of the machine hits all alike."""
    lease = Lease()
    runner = warmed(model, None, context, max(1, context) + max(draft_lengths) + 1, batch_size, lease)
    arms: dict[tuple[int, int], Callable[[], object]] = {(-1, 0): target_pass(runner, 1, context, batch_size)}
    for number, lower in enumerate(exits):
        arms[number, 0] = target_pass(runner, 1, context, batch_size, lower)
        for k in draft_lengths:
            arms[number, k] = target_pass(runner, k + 1, context, batch_size, Rest(lower.num_layers, LAST))
    try:
        seconds = interleaved(arms, repeats, runner.device)
    finally:
        lease.end()
    found = {name: statistics.median(times) for name, times in seconds.items()}
    rest = tuple({k: found[number, k] for k in draft_lengths} for number in range(len(exits)))
    return ExitTimes(found[-1, 0], tuple(found[number, 0] for number in range(len(exits))), rest)
