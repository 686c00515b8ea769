"""Counting where speculative output departs from the target's own, and telling a near-tie from an error.

Exact in distribution; equal in fp64; equal in fp32 but for near-ties; bf16 may flip near-ties. A divergence whose two
tokens lie within `MARGIN` of the best score (log p, plus the noise G at temperatures above 0) is a near-tie: rounding
decided. Any other one is a mismatch. After either, comparison goes on from the reference's prefix, so one divergence
hides nothing that follows it.

Two loops of ours run the same passes over the same cache: what is wrong in both alike, a position or a mask, no
comparison of them sees. So finished texts are also held against one plain forward of the model (`check_text`): no
cache, no mask, no capture, no batch. There every token is judged on the text before it as it stands, so each counts by
itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from decode.common.environment import device_of
from decode.common.progress import progress
from decode.sampling.noise import Noise
from decode.sampling.processors import processed, widened
from decode.sampling.warp import Sampling, warp
from eval.arms.base import Sample
from eval.measure.continuations import Generate, Job, Text
from eval.prompts.prompt import Prompt

MARGIN = 1e-4

Margin = Callable[[Text, int, int], float]
"""(reference text, index of the diverging new token, the other token) -> how far the worse of the two lies below the
best score."""
MOST_LOGITS = 2**25
"""Logits held at a time: 128 MB in float32; sorting them and drawing their noise takes some ten times as much."""


@dataclass(frozen=True)
class Check:
    """Counts for one prompt."""

    mismatches: int = 0
    near_ties: int = 0
    tokens: int = 0

    def __add__(self, other: Check) -> Check:
        return Check(self.mismatches + other.mismatches, self.near_ties + other.near_ties, self.tokens + other.tokens)


@dataclass(frozen=True)
class Divergence:
    """A reference text, the index of the new token where the other one departs, and what that one has from there."""

    text: Text
    at: int
    rest: tuple[int, ...]

    @property
    def has_both(self) -> bool:
        """Both have a token there; otherwise one stopped and the other went on."""
        return bool(self.rest) and self.at < len(self.text.new)

    @property
    def left_out(self) -> int:
        """Reference tokens after it."""
        return max(0, len(self.text.new) - self.at - 1)


def divergences(reference: Sequence[Text], speculate: Generate, resumes: bool = True) -> Iterator[Divergence]:
    """Every departure of `speculate` from the reference, each reference token compared once: after a departure
    `speculate` goes on from the reference's own prefix, unless the settings tell prompt from text (`resumes`)."""
    texts = {text.row: text for text in reference}
    resumed = {text.row: 0 for text in reference}
    jobs = [Job(text.row, text.prompt, len(text.new)) for text in reference if text.new]
    while jobs:
        again = []
        for found in speculate(jobs):
            text, start = texts[found.row], resumed[found.row]
            at = first_divergence(text.new[start:], found.new)
            if at is None:
                continue
            yield Divergence(text, start + at, found.new[at:])
            resumed[found.row] = start + at + 1
            if resumes and start + at + 1 < len(text.new):
                prefix = text.prompt + text.new[: start + at + 1]
                again.append(Job(text.row, prefix, len(text.new) - start - at - 1))
        jobs = again


def check(reference: Sequence[Text], speculate: Generate, margin: Margin, resumes: bool = True) -> list[Check]:
    """Per reference text, the divergences of `speculate` from it and the tokens compared: every reference token once,
    or those up to a divergence where texts cannot be resumed."""
    counts = {text.row: Check(tokens=len(text.new)) for text in reference}
    for found in divergences(reference, speculate, resumes):
        counts[found.text.row] += judge(found, margin) + Check(tokens=0 if resumes else -found.left_out)
    return [counts[text.row] for text in reference]


def first_divergence(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Index of the first token that only one has, or that they have otherwise; None where they are equal."""
    for i, (ours, theirs) in enumerate(zip(expected, found, strict=False)):
        if ours != theirs:
            return i
    return None if len(expected) == len(found) else min(len(expected), len(found))


def flips(alone: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]]) -> Check:
    """Sequences that left the autoregressive text of the same noise, as near-ties, and the tokens compared until then.

    For the timed run in its own precision, where bf16 rounding decides near-ties; what follows a flip is another text.
    """
    total = Check()
    for expected, found in zip(alone, drafted, strict=True):
        at = first_divergence(expected, found)
        total += Check(tokens=len(expected)) if at is None else Check(near_ties=1, tokens=at + 1)
    return total


def judge(found: Divergence, margin: Margin) -> Check:
    """Near-tie or mismatch; where one text stopped and the other went on, it is a mismatch."""
    gap = margin(found.text, found.at, found.rest[0]) if found.has_both else float("inf")
    return Check(near_ties=1) if gap <= MARGIN else Check(mismatches=1)


def margin_from(
    model: PreTrainedModel, sampling: Sampling, seed: int, processors: LogitsProcessorList | None = None
) -> Margin:
    """The gap measured by one forward over the reference's prefix, in the precision of `model` (fp32 or wider)."""

    def margin(text: Text, at: int, other: int) -> float:
        scores = scores_at(model, sampling, seed, text, at, processors)
        worse = torch.minimum(scores[text.new[at]], scores[other])
        return (scores.max() - worse).item()

    return margin


@torch.inference_mode()
def scores_at(
    model: PreTrainedModel,
    sampling: Sampling,
    seed: int,
    text: Text,
    at: int,
    processors: LogitsProcessorList | None = None,
) -> torch.Tensor:  # (V,)
    """What the target's choice of new token `at` is the argmax of: log p, plus the noise at temperatures above 0."""
    prefix = torch.tensor([text.prompt + text.new[:at]], device=model.device)
    logits = model(prefix).logits[:, -1]
    if processors:
        logits = _told(processors, text, prefix, widened(logits))
    scores = warp(logits[0], sampling).log_softmax(-1)
    if sampling.is_greedy:
        return scores
    noise = Noise.of(seed, [text.row], scores.shape[-1], scores.device)
    return scores + noise.coupled(torch.tensor([[prefix.shape[1]]], device=scores.device))[0, 0]


def is_judged(dtype: torch.dtype) -> bool:
    """Whether a token that an uncached forward would not choose is an error; bf16 may flip near-ties."""
    return dtype in (torch.float32, torch.float64)


def check_uncached(
    model: PreTrainedModel,
    texts: Sequence[Text],
    sampling: Sampling,
    seed: int,
    processors: LogitsProcessorList | None = None,
) -> list[Check]:
    """`check_text` for each."""
    found = []
    with progress(len(texts), "texts", f"uncached, T={sampling.temperature:g}") as bar:
        for text in texts:
            found.append(check_text(model, text, sampling, seed, processors))
            bar.update(1)
    return found


def check_samples(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    samples: Sequence[Sequence[Sample]],
    batch_size: int,
    sampling: Sampling,
    seed: int,
) -> list[Check]:
    """By prompt group, all rounds of a timed arm, with the rows and seeds that
    `eval.measure.timed_run.interleave` gives them."""
    found = []
    with progress(len(samples), "prompt groups", f"uncached, T={sampling.temperature:g}") as bar:
        for number, group in enumerate(samples):
            texts = [
                (turn, Text(row, prompts[row].ids, tuple(new)))
                for turn, sample in enumerate(group)
                for row, new in enumerate(sample.new_ids, start=number * batch_size)
            ]
            checks = [check_text(model, text, sampling, seed + turn) for turn, text in texts]
            found.append(sum(checks, Check()))
            bar.update(1)
    return found


@torch.inference_mode()
def check_text(
    model: PreTrainedModel,
    text: Text,
    sampling: Sampling,
    seed: int,
    processors: LogitsProcessorList | None = None,
) -> Check:
    """The new tokens that are not the argmax of log p + G in a forward over the text itself.

    G is the coupled noise of `seed`, the text's row and the position, none at temperature 0; p is warped by `sampling`
    after `processors`. Such a token is a mismatch where it lies more than MARGIN below the best, else a near-tie.
    """
    assert not model.training, "dropout would make another model of it"
    total = Check()
    for part in _parts(len(text.new), MOST_LOGITS // model.config.get_text_config().vocab_size):
        logits = _logits(model, text, part)
        logits = logits if processors is None else _processed(logits, text, part, processors)
        total += _part_check(_part_scores(logits, text, part, sampling, seed), text, part)
    return total


def _parts(count: int, most: int) -> Iterator[range]:
    size = max(1, most)
    return (range(start, min(start + size, count)) for start in range(0, count, size))


def _logits(model: PreTrainedModel, text: Text, part: range) -> Tensor:  # (n, V)
    """Those that predict new tokens `part`, by a forward over all that is before the last of them."""
    before = text.ids[: len(text.prompt) + part.stop - 1]
    ids = torch.tensor([before], device=device_of(model))
    return model(input_ids=ids, use_cache=False, logits_to_keep=len(part)).logits[0]


def _processed(logits: Tensor, text: Text, part: range, processors: LogitsProcessorList) -> Tensor:  # (n, V) -> (n, V)
    """Processors look at the whole text before a token, which is longer for each."""
    rows = []
    for at, row in zip(part, widened(logits), strict=True):
        before = torch.tensor([text.prompt + text.new[:at]], device=logits.device)
        rows.append(_told(processors, text, before, row[None])[0])
    return torch.stack(rows)


def _told(processors: LogitsProcessorList, text: Text, before: Tensor, scores: Tensor) -> Tensor:  # (1, V) -> (1, V)
    """With all that processors of ours may ask for."""
    told = (torch.tensor([number], device=scores.device) for number in (len(text.prompt), text.row))
    return processed(processors, before, scores, *told)


def _part_scores(logits: Tensor, text: Text, part: range, sampling: Sampling, seed: int) -> Tensor:  # (n, V) -> (n, V)
    scores = warp(logits, sampling).log_softmax(-1)
    if sampling.is_greedy:
        return scores
    positions = torch.tensor([[len(text.prompt) + at for at in part]], device=scores.device)
    return scores + Noise.of(seed, [text.row], scores.shape[-1], scores.device).coupled(positions)[0]


def _part_check(scores: Tensor, text: Text, part: range) -> Check:
    emitted = torch.tensor(text.new[part.start : part.stop], device=scores.device)
    differs = scores.argmax(-1) != emitted
    is_near = scores.amax(-1) - scores.gather(-1, emitted[:, None])[:, 0] <= MARGIN  # never true of NaN
    return Check(int((differs & ~is_near).sum()), int((differs & is_near).sum()), len(part))
