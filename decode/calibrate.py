"""What a pass costs on this machine: bare forwards of target and draft, timed alone on the decoder's own cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from decode.drafters.lm import LMDraft
from decode.target import CachedModel
from decode.tree import chain_parents


@dataclass(frozen=True)
class Costs:
    """Median seconds of bare forwards at one context length and batch size."""

    context: int
    """Tokens in the cache before the pass."""
    batch_size: int
    t_draft: float
    """One draft pass of one token, as part of a run of passes: the first finds its weights evicted by the target's."""
    t_target: dict[int, float]
    """Target pass by number of tokens: t_target[1] is an autoregressive step, t_target[k + 1] a verification."""


@torch.inference_mode()
def measure(
    model: PreTrainedModel,
    drafter: LMDraft | None,
    context: int,
    num_tokens: list[int],
    batch_size: int = 1,
    repeats: int = 30,
) -> Costs:
    """Time t_target(n) for each n of `num_tokens`, and t_draft, interleaved so that drift of the machine hits all
    alike."""
    capacity = context + max(num_tokens)
    in_a_row = max(1, max(num_tokens) - 1)
    target = _warmed(model, context, capacity, batch_size)
    arms: dict[int, Callable[[], object]] = {n: _pass(target, n, context, batch_size) for n in num_tokens}
    if drafter is not None:
        arms[0] = _draft_passes(drafter, context, capacity, batch_size, in_a_row)
    seconds = interleaved(arms, repeats, target.device)
    medians = {n: statistics.median(times) for n, times in seconds.items()}
    draft = medians.pop(0) / in_a_row if drafter is not None else 0.0
    return Costs(context, batch_size, draft, medians)


def interleaved(arms: dict[int, Callable[[], object]], repeats: int, device: torch.device) -> dict[int, list[float]]:
    """Seconds of each arm's calls, A B C A B C ..., the first round (warm-up) left out."""
    seconds: dict[int, list[float]] = {name: [] for name in arms}
    for round_index in range(repeats + 1):
        for name, call in arms.items():
            _synchronise(device)
            began = time.perf_counter()
            call()
            _synchronise(device)
            if round_index:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def _warmed(model: PreTrainedModel, context: int, capacity: int, batch_size: int) -> CachedModel:
    runner = CachedModel(model, capacity)
    if context:
        ids = torch.ones(batch_size, context, dtype=torch.long, device=runner.device)
        runner.prefill(ids, [context] * batch_size)
    return runner


def _pass(runner: CachedModel, num_tokens: int, context: int, batch_size: int) -> Callable[[], object]:
    tokens = torch.ones(batch_size, num_tokens, dtype=torch.long, device=runner.device)
    return lambda: runner.forward(tokens, [context] * batch_size, chain_parents(num_tokens))


def _draft_passes(
    drafter: LMDraft, context: int, capacity: int, batch_size: int, in_a_row: int
) -> Callable[[], object]:
    """Single tokens through the very pass that drafting replays."""
    runner = drafter.runner(batch_size, capacity)
    token = torch.ones(batch_size, 1, dtype=torch.long, device=drafter.model.device)
    return lambda: [runner.forward(token, token * context) for _ in range(in_a_row)]


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
