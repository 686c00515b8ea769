"""Continuations that the target writes alone, batched: the text behind alpha and the reference for losslessness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from decode import generate
from decode.common.progress import progress

if TYPE_CHECKING:
    from decode.drafters.base import Drafter
    from eval.prompts.prompt import Prompt


@dataclass(frozen=True)
class Text:
    """What was generated after one prompt; `row` is the prompt's index and keys its noise."""

    row: int
    prompt: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and continuation."""
        return self.prompt + self.new


@dataclass(frozen=True)
class Job:
    """A prompt to continue by `max_new` tokens with the noise of `row`."""

    row: int
    prompt: tuple[int, ...]
    max_new: int


Generate = Callable[[Sequence[Job]], list[Text]]


def left_padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask (B, T), the shorter prompts padded on the left."""
    width = max(len(prompt) for prompt in prompts)
    ids = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def generator(
    model: PreTrainedModel,
    drafter: Drafter | None,
    settings: Mapping[str, Any],
    seed: int,
    batch_size: int,
    label: str,
) -> Generate:
    """A function that continues jobs in batches, longest first, with or without a drafter; one seed, so texts
    compare. `settings` are keyword arguments of decode.generate (fields of SamplingConfig)."""

    def run(jobs: Sequence[Job]) -> list[Text]:
        done: dict[int, Text] = {}
        with progress(sum(job.max_new for job in jobs), "tokens", label) as bar:
            for batch in batches(jobs, batch_size):
                for text in continue_batch(model, drafter, settings, seed, batch):
                    done[text.row] = text
                bar.update(sum(job.max_new for job in batch))
        return [done[job.row] for job in jobs]

    return run


def batches(jobs: Sequence[Job], batch_size: int) -> Iterator[list[Job]]:
    """Jobs of similar length together: a batch runs until its longest row is done."""
    order = sorted(jobs, key=lambda job: (-job.max_new, -len(job.prompt)))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def continue_batch(
    model: PreTrainedModel, drafter: Drafter | None, settings: Mapping[str, Any], seed: int, batch: Sequence[Job]
) -> list[Text]:
    """One call of decode.generate for all jobs, each cut to its own max_new."""
    ids, mask = left_padded([job.prompt for job in batch], 0, model.device)
    asked = {**settings, "max_new_tokens": max(job.max_new for job in batch), "seed": seed}
    out = generate(model, drafter, ids, attention_mask=mask, rows=[job.row for job in batch], **asked)
    texts = []
    for i, job in enumerate(batch):
        count = min(int(out.lengths[i]) - len(job.prompt), job.max_new)
        new = out.sequences[i, ids.shape[1] : ids.shape[1] + count].tolist()
        texts.append(Text(job.row, job.prompt, tuple(new)))
    return texts


def jobs_for(prompts: Sequence[Prompt], max_new: int) -> list[Job]:
    """One job per prompt, rows numbered by their order."""
    return [Job(row, prompt.ids, max_new) for row, prompt in enumerate(prompts)]
