"""What passes cost on this machine: the target's bare forwards and the draft's proposals, timed alone on the decoder's
own cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.drafters.base import Context, Drafter
from decode.forward.kept.lease import Lease
from decode.forward.runner import captured_at_once
from decode.forward.target import CachedModel, Part, runner_for
from decode.sampling.noise import Noise
from decode.sampling.warp import Sampling
from decode.trees.tree import Tree
from decode.trees.tree_plans import chain

Name = TypeVar("Name")


@dataclass(frozen=True)
class Costs:
    """Median seconds of bare forwards at one context length and batch size."""

    context: int
    """Tokens in the cache before the pass."""
    batch_size: int
    t_draft: float
    """A proposal of a chain by its length: what one draft token costs. The first finds its weights evicted by the
    target's."""
    t_target: dict[int, float]
    """Target pass by number of tokens: t_target[1] is an autoregressive step, t_target[k + 1] a verification."""


@torch.inference_mode()
def measure(
    model: PreTrainedModel,
    drafter: Drafter | None,
    context: int,
    num_tokens: list[int],
    batch_size: int = 1,
    repeats: int = 30,
) -> Costs:
    """Time t_target(n) for each n of `num_tokens`, and t_draft, interleaved so that drift of the machine hits all
    alike."""
    capacity = max(1, context) + max(num_tokens)
    lease = Lease()
    target = warmed(model, drafter, context, capacity, batch_size, lease)
    arms: dict[int, Callable[[], object]] = {n: target_pass(target, n, context, batch_size) for n in num_tokens}
    drafted = 1
    if drafter is not None:
        drafter = lease.own(drafter)
        wanted = _context(target, context, capacity, batch_size, lease)
        drafter.start(wanted, capacity)
        drafter.read(wanted, dict.fromkeys(range(batch_size), context))
        propose = _proposal(drafter, replace(wanted, shape=chain(max(1, max(num_tokens) - 1))))
        arms[0] = propose
        drafted = max(1, propose().max_depth)  # a head drafts as many as it has, whatever it is asked for
    seconds = interleaved(arms, repeats, target.device)
    medians = {n: statistics.median(times) for n, times in seconds.items()}
    draft = medians.pop(0) / drafted if drafter is not None else 0.0
    return Costs(context, batch_size, draft, medians)


def _context(target: CachedModel, context: int, capacity: int, batch_size: int, lease: Lease) -> Context:
    """Rows of `context` tokens whose greedy round is proposed again and again."""
    ids = _text(target, batch_size, 0, capacity)
    length = max(1, context)
    return Context(
        ids=ids,
        lengths=torch.full((batch_size,), length, device=target.device),
        shortest=length,
        longest=length,
        sampling=Sampling(temperature=0),
        temperature=torch.zeros(1, dtype=torch.float64, device=target.device),
        shape=chain(1),
        noise=Noise.of(0, list(range(batch_size)), target.config.vocab_size, target.device),
        shares_noise=True,
        features=target.features,
        target=target,
        lease=lease,
    )


def _proposal(drafter: Drafter, asked: Context) -> Callable[[], Tree]:
    """The draft's part of a greedy round, which reads no noise."""

    def propose() -> Tree:
        if drafter.prepare(asked) is None:  # nothing to go by, here where the text is of one token
            return Tree(asked.ids.gather(1, asked.lengths[:, None] - 1), (-1,))
        return drafter.propose(asked)

    return propose


def interleaved(
    arms: Mapping[Name, Callable[[], object]], repeats: int, device: torch.device
) -> dict[Name, list[float]]:
    """Seconds of each arm's calls, A B C A B C ..., the first round, in which they are captured, left out."""
    seconds: dict[Name, list[float]] = {name: [] for name in arms}
    for round_index in range(repeats + 1):
        for name, call in arms.items():
            synchronize(device)
            began = time.perf_counter()
            with captured_at_once():
                call()
            synchronize(device)
            if round_index:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def warmed(
    model: PreTrainedModel, drafter: Drafter | None, context: int, capacity: int, batch_size: int, lease: Lease
) -> CachedModel:
    """The target with `context` tokens of each row in its cache, as this drafter wants it."""
    runner = runner_for(model, batch_size, capacity, lease, taps=drafter.taps if drafter is not None else ())
    if context:
        runner.prefill(_text(runner, batch_size, 0, context), [0] * batch_size, [context] * batch_size)
    return runner


def target_pass(
    runner: CachedModel, num_tokens: int, context: int, batch_size: int, part: Part | None = None
) -> Callable[[], object]:
    """A pass over so many tokens behind `context` ones, by all layers or a part of them."""
    tokens = _text(runner, batch_size, context, num_tokens)
    starts = torch.full((batch_size, 1), context, device=runner.device)
    return lambda: runner.chain(tokens, starts, context, part=part)


def _text(runner: CachedModel, batch_size: int, start: int, length: int) -> Tensor:  # -> (batch_size, length)
    """Ever other tokens. One that was repeated took SmolLM2 to where rounding decides, 2 of logits up to 23: its pass
    over 4 tokens ran uncaptured, which took twice as long as in the rounds."""
    ids = 7919 * torch.arange(start + 1, start + length + 1, device=runner.device) % runner.config.vocab_size
    return ids.expand(batch_size, -1)


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
