"""Finished texts held against one plain forward of the model: no cache, no mask, no capture, no batch.

`eval.losslessness` compares two loops of ours, which run the same passes over the same cache: what is wrong in both
alike, a position or a mask, it cannot see. Here every token is judged on the text before it as it stands, so each
counts by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from decode.common.progress import progress
from decode.models.load import device_of
from decode.sampling.noise import Noise
from decode.sampling.processors import widened
from decode.sampling.warp import Sampling, warp
from eval.arms.base import Sample
from eval.measure.continuations import Text
from eval.measure.losslessness import MARGIN, Check
from eval.prompts.held_out import Prompt

MOST_LOGITS = 2**25
"""Logits held at a time: 128 MB in float32; sorting them and drawing their noise takes some ten times as much."""


def is_judged(dtype: torch.dtype) -> bool:
    """Whether a token that this forward would not choose is an error in that precision; bf16 may flip near-ties."""
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
        total += _judge(_scores(logits, text, part, sampling, seed), text, part)
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
    lengths, rows = torch.tensor([len(text.prompt)], device=logits.device), []
    for at, row in zip(part, widened(logits), strict=True):
        before = torch.tensor([text.prompt + text.new[:at]], device=logits.device)
        rows.append(processors(before, row[None], prompt_lengths=lengths)[0])  # type: ignore[arg-type]
    return torch.stack(rows)


def _scores(logits: Tensor, text: Text, part: range, sampling: Sampling, seed: int) -> Tensor:  # (n, V) -> (n, V)
    scores = warp(logits, sampling).log_softmax(-1)
    if sampling.is_greedy:
        return scores
    positions = [[len(text.prompt) + at for at in part]]
    return scores + Noise(seed, [text.row], scores.shape[-1], scores.device).coupled(positions)[0]


def _judge(scores: Tensor, text: Text, part: range) -> Check:
    emitted = torch.tensor(text.new[part.start : part.stop], device=scores.device)
    differs = scores.argmax(-1) != emitted
    is_near = scores.amax(-1) - scores.gather(-1, emitted[:, None])[:, 0] <= MARGIN  # never true of NaN
    return Check(int((differs & ~is_near).sum()), int((differs & is_near).sum()), len(part))
