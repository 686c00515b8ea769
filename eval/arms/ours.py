"""The arms of the timed run: one way of continuing a batch of prompts each, all giving the same kind of sample."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from decode import generate
from decode.drafters.base import Drafter
from decode.sampling.warp import Sampling
from decode.stats import Round
from eval.measure.continuations import left_padded


@dataclass(frozen=True)
class Sample:
    """One call: what it emitted and when. Times are seconds from the call, on the host, the device synchronised at
    the end."""

    new_ids: list[list[int]]
    """Emitted ids per prompt, nothing after the end token, nothing beyond the limit."""
    seconds: float
    """Whole call."""
    first_s: float
    """Until the first tokens arrived; the prompt is read by then."""
    first_tokens: int
    """Tokens that arrived then."""
    arrivals: list[float]
    """Every arrival; the tokens of one target pass arrive together."""
    rounds: list[Round]
    """Target passes of a speculative arm; [] where the arm does not tell."""
    peak_memory_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Emitted ids."""
        return sum(len(ids) for ids in self.new_ids)

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first arrival."""
        return self.tokens - self.first_tokens

    @property
    def decode_s(self) -> float:
        """Seconds after the first arrival."""
        return self.seconds - self.first_s


class Arm(Protocol):
    """`name` is unique within a run."""

    @property
    def name(self) -> str: ...

    def run(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], max_new_tokens: int, seed: int) -> Sample:
        """Continue the prompts by at most max_new_tokens each."""
        ...


@dataclass(frozen=True)
class OurArm:
    """decode.generate, speculative with a drafter and autoregressive without one."""

    name: str
    model: PreTrainedModel
    drafter: Drafter | None
    settings: Mapping[str, Any]
    """Keyword arguments of decode.generate (fields of SamplingConfig)."""

    def run(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], max_new_tokens: int, seed: int) -> Sample:
        """One call of decode.generate; times and arrivals are its own."""
        ids, mask = left_padded(prompts, 0, self.model.device)
        if ids.is_cuda:
            torch.cuda.reset_peak_memory_stats(ids.device)  # else the peak would be that of the arms before
        asked = {**self.settings, "max_new_tokens": max_new_tokens, "seed": seed}
        began = time.perf_counter()
        out = generate(self.model, self.drafter, ids, attention_mask=mask, rows=list(rows), **asked)
        synchronize(self.model.device)
        seconds = time.perf_counter() - began
        counts = [int(length) - len(prompt) for length, prompt in zip(out.lengths, prompts, strict=True)]
        new = [out.sequences[i, ids.shape[1] : ids.shape[1] + count].tolist() for i, count in enumerate(counts)]
        first = sum(one.emitted for one in out.stats.rounds[: len(prompts)])
        arrivals = out.stats.arrival_s
        rounds = out.stats.rounds if self.drafter is not None else []
        return Sample(new, seconds, arrivals[0], first, arrivals, rounds, out.stats.peak_memory_bytes)


class ArrivalClock(StoppingCriteria):
    """Never stops anything; transformers calls it whenever tokens arrive, and it writes down when and how many there
    were."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.widths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        """No row is done."""
        if not self.times:
            synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        self.widths.append(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True)
class TransformersArm:
    """transformers' own generate on the same model; `options` are further fields of its GenerationConfig."""

    name: str
    model: PreTrainedModel
    sampling: Sampling
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], max_new_tokens: int, seed: int) -> Sample:
        """One call of model.generate, on its dynamic cache unless the options name another."""
        return run_transformers(self.model, self.sampling, prompts, max_new_tokens, seed + rows[0], **self.options)


def run_transformers(
    model: PreTrainedModel,
    sampling: Sampling,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    seed: int,
    assistant: PreTrainedModel | None = None,
    **options: Any,
) -> Sample:
    """model.generate, timed whole, with the arrivals that its stopping criteria see."""
    ids, mask = left_padded(prompts, 0, model.device)
    config = generation_config(model, sampling, max_new_tokens, options)
    clock = ArrivalClock()
    torch.manual_seed(seed)
    began = time.perf_counter()
    sequences = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=mask,
        generation_config=config,
        stopping_criteria=StoppingCriteriaList([clock]),
        assistant_model=assistant,
    )
    synchronize(model.device)
    seconds = time.perf_counter() - began
    new = [
        emitted(row[ids.shape[1] :].tolist(), eos_ids(model), max_new_tokens) for row in cast(torch.Tensor, sequences)
    ]
    first = min(clock.widths[0] - ids.shape[1], max_new_tokens)
    first_tokens = sum(min(first, len(row)) for row in new)
    arrivals = [at - began for at in clock.times]
    return Sample(new, seconds, arrivals[0], first_tokens, arrivals, [])


def generation_config(
    model: PreTrainedModel, sampling: Sampling, max_new_tokens: int, options: Mapping[str, Any] | None = None
) -> GenerationConfig:
    """The sampling, spelled out: transformers would fill what is left open from the model's own habits (top_k is 50
    there). `options` are further fields."""
    eos = eos_ids(model)
    warpers = {} if sampling.is_greedy else _warpers(sampling)
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=not sampling.is_greedy,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        num_beams=1,
        eos_token_id=list(eos) or None,
        pad_token_id=next(iter(eos), 0),
        **warpers,
        **(options or {}),
    )


def _warpers(sampling: Sampling) -> dict[str, float | int | None]:
    min_p = sampling.min_p if sampling.min_p > 0 else None
    return {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": min_p}


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The model's own end tokens."""
    config = model.generation_config
    eos = config.eos_token_id if config is not None else None
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)


def emitted(ids: list[int], eos: Sequence[int], limit: int) -> list[int]:
    """The ids a user gets: up to the limit and up to the end token, which is one of them."""
    ids = ids[:limit]
    ends = [i for i, token in enumerate(ids) if token in eos]
    return ids[: ends[0] + 1] if ends else ids


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
