"""What a certificate compares: parts by precision and temperature, done chunk by chunk so that a killed run goes on;
and what strict passes cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, Field
from transformers import PreTrainedModel

from decode import generate
from decode.common.progress import progress
from decode.common.sealed import read_sealed, write_sealed
from decode.drafters.base import Drafter
from eval.config import EvalConfig
from eval.inputs import can_resume, processors_of, sampling_at, settings_at
from eval.measure.continuations import Job, Text, batches, continue_batch, left_padded
from eval.measure.losslessness import MARGIN, Check, Divergence, check_uncached, divergences, scores_at
from eval.prompts.prompt import Prompt

OPENING = 16
"""Tokens that the target samples before a prompt is used again: greedy text from the prompt is known by then."""
PADDING_ROUNDS = 4
PADDING_TOKENS = 48
PADDING_ARMS = {
    "plain": (False, False),
    "plain_padded": (False, True),
    "speculative": (True, False),
    "speculative_padded": (True, True),
}
"""Name -> (with the draft, strict)."""


@dataclass(frozen=True)
class Part:
    """One precision and temperature."""

    dtype: str
    temperature: float
    tokens: int
    """Reference tokens to compare."""
    is_judged: bool
    """Divergences are mismatches or near-ties (fp32 and wider); in a narrower precision they are listed."""

    @property
    def name(self) -> str:
        """Unique within a certificate."""
        return f"{self.dtype}, T={str(self.temperature).removesuffix('.0')}"


class Departure(BaseModel, frozen=True):
    """A divergence: where, both tokens, and how near the target's choice was."""

    prompt: str
    row: int
    position: int
    target_token: int | None
    speculative_token: int | None
    top2_margin: float
    gap: float | None
    """How far the worse of the two tokens lies below the best; None where one text had ended."""

    @property
    def is_near_tie(self) -> bool:
        """Rounding decided."""
        return self.gap is not None and self.gap <= MARGIN


class Counts(BaseModel):
    """What one part has compared so far."""

    chunks: int = 0
    sequences: int = 0
    tokens: int = 0
    mismatches: int = 0
    near_ties: int = 0
    divergences: list[Departure] = Field(default_factory=list)
    uncached_mismatches: int = 0
    uncached_near_ties: int = 0
    uncached_flips: int = 0
    """Both together; in a narrower precision they are not told apart."""
    uncached_tokens_checked: int = 0
    seconds: float = 0.0


@dataclass
class State:
    """All parts' counts, on disk after every chunk."""

    path: Path
    parts: dict[str, Counts]

    @classmethod
    def open(cls, path: Path, parts: Sequence[Part]) -> State:
        """What an interrupted run left, or zeros."""
        saved = read_sealed(path) if path.exists() else {}
        return cls(path, {part.name: Counts.model_validate(saved.get(part.name, {})) for part in parts})

    def save(self) -> None:
        """Atomically."""
        write_sealed(self.path, {name: counts.model_dump() for name, counts in self.parts.items()})

    def allowed_s(self, part: Part, parts: Sequence[Part], minutes: float | None) -> float:
        """This part's share of the time that is left, by the tokens it wants; what a part leaves over goes to those
        after it."""
        if minutes is None:
            return float("inf")
        at = list(parts).index(part)
        used = sum(self.parts[one.name].seconds for one in parts[:at])
        return (60 * minutes - used) * part.tokens / sum(one.tokens for one in parts[at:])


def is_done(part: Part, counts: Counts, allowed_s: float) -> bool:
    """All tokens compared, or the time spent; one chunk at least."""
    return counts.tokens >= part.tokens or (counts.chunks > 0 and counts.seconds >= allowed_s)


def compare(
    cfg: EvalConfig,
    model: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    part: Part,
    state: State,
    allowed_s: float,
) -> None:
    """Go on with a part until it is done, saving after every chunk."""
    counts = state.parts[part.name]
    with progress(part.tokens, "tokens", part.name, initial=min(counts.tokens, part.tokens)) as bar:
        while not is_done(part, counts, allowed_s):
            began, before = time.perf_counter(), counts.tokens
            _compare_chunk(cfg, model, drafter, prompts, part, counts)
            counts.seconds += time.perf_counter() - began
            state.save()
            bar.update(min(counts.tokens, part.tokens) - min(before, part.tokens), divergences=len(counts.divergences))


def _compare_chunk(
    cfg: EvalConfig,
    model: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    part: Part,
    counts: Counts,
) -> None:
    jobs = _jobs(cfg, model, prompts, counts.chunks)
    settings, size = settings_at(cfg, part.temperature), cfg.lossless.batch_size
    reference = continue_batch(model, None, settings, cfg.seed, jobs)

    def speculate(jobs: Sequence[Job]) -> list[Text]:
        return [
            text for batch in batches(jobs, size) for text in continue_batch(model, drafter, settings, cfg.seed, batch)
        ]

    resumes = can_resume(cfg)
    for found in divergences(reference, speculate, resumes):
        entry = _entry(cfg, model, part, found, prompts)
        counts.divergences.append(entry)
        counts.tokens -= 0 if resumes else found.left_out
        if part.is_judged:
            counts.near_ties += entry.is_near_tie
            counts.mismatches += not entry.is_near_tie
    counts.chunks += 1
    counts.sequences += len(reference)
    counts.tokens += sum(len(text.new) for text in reference)
    _count_uncached(cfg, model, part, reference, counts)


def _count_uncached(
    cfg: EvalConfig, model: PreTrainedModel, part: Part, reference: Sequence[Text], counts: Counts
) -> None:
    """The same texts against a forward that shares neither cache nor masks with both loops."""
    sampling, processors = sampling_at(cfg, part.temperature), processors_of(cfg, model)
    total = sum(check_uncached(model, reference, sampling, cfg.seed, processors), Check())
    if part.is_judged:
        counts.uncached_mismatches += total.mismatches
        counts.uncached_near_ties += total.near_ties
    counts.uncached_flips += total.mismatches + total.near_ties
    counts.uncached_tokens_checked += total.tokens


def _jobs(cfg: EvalConfig, model: PreTrainedModel, prompts: Sequence[Prompt], chunk: int) -> list[Job]:
    """The chunk's prompts. When all were used, they are used again, each after an opening that the target samples; the
    request's index is new, and with it the noise."""
    size, limit = cfg.lossless.batch_size, cfg.lossless.tokens
    per_pass = -(-len(prompts) // size)
    turn, at = divmod(chunk, per_pass)
    indices = range(at * size, min((at + 1) * size, len(prompts)))
    first = turn * len(prompts)
    if turn == 0:
        return [Job(first + i, prompts[i].ids, limit) for i in indices]
    openings = [Job(first + i, prompts[i].ids, OPENING) for i in indices]
    sampled = continue_batch(model, None, {**settings_at(cfg, 1.0), "verifier": "coupled"}, cfg.seed, openings)
    return [Job(text.row, text.ids, max(1, limit - OPENING)) for text in sampled]


def _entry(
    cfg: EvalConfig, model: PreTrainedModel, part: Part, found: Divergence, prompts: Sequence[Prompt]
) -> Departure:
    """A divergence for the certificate."""
    text = found.text
    sampling, processors = sampling_at(cfg, part.temperature), processors_of(cfg, model)
    scores = scores_at(model, sampling, cfg.seed, text, found.at, processors)
    best = scores.topk(2).values
    both = (text.new[found.at], found.rest[0]) if found.has_both else ()
    return Departure(
        prompt=prompts[text.row % len(prompts)].id,
        row=text.row,
        position=len(text.prompt) + found.at,
        target_token=text.new[found.at] if found.at < len(text.new) else None,
        speculative_token=found.rest[0] if found.rest else None,
        top2_margin=(best[0] - best[1]).item(),
        gap=max(((scores.max() - scores[token]).item() for token in both), default=None),
    )


def measure_padding(
    cfg: EvalConfig, model: PreTrainedModel, drafter: Drafter, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Tokens per second after the first arrival of each arm, medians over rounds of timing.batch_size prompts each, at
    the first configured temperature. The first round warms up and is left out."""
    size, temperature = cfg.timing.batch_size, cfg.temperatures[0]
    speeds: dict[str, list[float]] = {name: [] for name in PADDING_ARMS}
    for turn in range(PADDING_ROUNDS + 1):
        ids = [prompts[(turn * size + i) % len(prompts)].ids for i in range(size)]
        for name, (drafts, strict) in PADDING_ARMS.items():
            settings = {**settings_at(cfg, temperature), "strict": strict, "max_new_tokens": PADDING_TOKENS}
            speed = _tokens_per_s(model, drafter if drafts else None, settings, cfg.seed, ids)
            if turn and speed is not None:
                speeds[name].append(speed)
    found = {name: median(each) if each else None for name, each in speeds.items()}
    return {
        "temperature": temperature,
        "batch_size": size,
        "rows": cfg.decode.num_draft_tokens + 1,
        "tokens_per_s": found,
    }


def _tokens_per_s(
    model: PreTrainedModel, drafter: Drafter | None, settings: Mapping[str, Any], seed: int, prompts: Sequence[Any]
) -> float | None:
    """None where everything came with the first arrival."""
    ids, mask = left_padded(prompts, 0, model.device)
    stats = generate(model, drafter, ids, attention_mask=mask, seed=seed, **settings).stats
    later = stats.num_tokens - sum(one.emitted for one in stats.rounds[: len(prompts)])
    return later / (stats.arrival_s[-1] - stats.arrival_s[0]) if later else None
