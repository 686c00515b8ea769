"""What a pass costs on this machine: bare forwards of target and draft, timed alone on the decoder's own cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from decode.drafters.base import Context
from decode.drafters.lm import LMDraft
from decode.drafters.lm_chain import propose_chain
from decode.noise import Noise
from decode.sampling import Sampling
from decode.shapes import chain
from decode.target import CachedModel, runner_for


@dataclass(frozen=True)
class Costs:
    """Median seconds of bare forwards at one context length and batch size."""

    context: int
    """Tokens in the cache before the pass."""
    batch_size: int
    t_draft: float
    """One draft pass of one token, as part of a chain: the first finds its weights evicted by the target's."""
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
    runner = runner_for(model, batch_size, capacity)
    if context:
        ids = torch.ones(batch_size, context, dtype=torch.long, device=runner.device)
        runner.prefill(ids, [0] * batch_size, [context] * batch_size)
    return runner


def _pass(runner: CachedModel, num_tokens: int, context: int, batch_size: int) -> Callable[[], object]:
    tokens = torch.ones(batch_size, num_tokens, dtype=torch.long, device=runner.device)
    return lambda: runner.chain(tokens, [context] * batch_size)


def _draft_passes(
    drafter: LMDraft, context: int, capacity: int, batch_size: int, in_a_row: int
) -> Callable[[], object]:
    """A chain of draft tokens by the very pass that drafting replays, argmaxes for draws."""
    runner = runner_for(drafter.model, batch_size, capacity, "draft")
    ids = torch.ones(batch_size, capacity, dtype=torch.long, device=runner.device)
    rows = list(range(batch_size))
    wanted = Context(
        ids, [max(1, context)] * batch_size, Sampling(temperature=0), Noise(0, rows, 1, runner.device),
        chain(in_a_row), "arbitrary", True, None, 0,
    )  # fmt: skip
    return lambda: propose_chain(runner, wanted, min(2, *wanted.lengths))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
