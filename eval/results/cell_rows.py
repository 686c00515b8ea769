"""One row of results.json per cell and speculative arm, in the report's schema; alpha is the report's to measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from decode.config import SamplingConfig
from eval.measure.cells import Cell
from eval.measure.component_times import ComponentTimes
from eval.measure.timed_run import Samples
from eval.results.row import (
    ENERGY_REASON,
    acceptance,
    baseline,
    call_ratio,
    described,
    dtype_flips,
    latency,
    pooled_tau,
    repetition,
    speed_ratio,
    tokens_per_s,
    uncached_flips,
)


@dataclass(frozen=True)
class Subject:
    """What a row is about."""

    arm: str
    """Name of the arm in the timed run."""
    drafter: str
    """Family of the draft."""
    draft: str
    """Name of the draft."""
    setting: str
    """Name of the setting it drafts with."""
    dtype: str
    """Precision of the run."""


def make_row(
    subject: Subject,
    cell: Cell,
    settings: SamplingConfig,
    samples: Samples,
    costs: ComponentTimes | None,
    seed: int,
) -> dict[str, Any]:
    """`costs` are the component times of a plain chain; the speedup of another shape is not predicted."""
    arm = subject.arm
    groups = range(len(samples[arm]))
    each = [sample for group in samples[arm] for sample in group]
    return {
        "drafter": subject.drafter,
        "draft": subject.draft,
        "setting": subject.setting,
        "verifier": settings.verifier,
        "tree": settings.tree,
        "dtype": subject.dtype,
        "text": cell.text,
        "category": None,
        "temperature": cell.temperature,
        "batch_size": cell.batch_size,
        "num_draft_tokens": settings.num_draft_tokens,
        "seed": seed,
        "prompts": sum(len(group[0].new_ids) for group in samples[arm]),
        "tokens": sum(sample.tokens for sample in each),
        "alpha": None,
        "alpha_ci95": None,
        **acceptance(samples[arm], settings.num_draft_tokens, seed),
        **_speed(samples, arm, costs, seed),
        **latency(samples[arm]),
        "mismatches": None,
        "near_ties": None,
        "tokens_checked": 0,
        "uncached_mismatches": None,
        "uncached_near_ties": None,
        "uncached_tokens_checked": 0,
        **dtype_flips(samples, arm, groups, settings.verifier),
        **uncached_flips(None, groups),
        "repeated_4gram_share": repetition(samples[arm]),
        "energy_j_per_token": None,
        "energy_reason": ENERGY_REASON,
        "peak_memory_bytes": max(sample.peak_memory_bytes for sample in each),
    }


def _speed(samples: Samples, arm: str, costs: ComponentTimes | None, seed: int) -> dict[str, Any]:
    groups = range(len(samples[arm]))
    base = baseline(samples, groups)
    speedup = speed_ratio(samples, arm, base, groups, seed)
    predicted = None if costs is None else costs.speedup(pooled_tau(samples[arm]))
    realised = None if predicted is None or speedup is None else speedup.value / predicted
    return {
        "tokens_per_s": tokens_per_s(samples[arm], groups),
        "baseline": base,
        "baseline_tokens_per_s": tokens_per_s(samples[base], groups),
        **described("speedup", speedup),
        **described("whole_call_speedup", call_ratio(samples, arm, base, groups, seed)),
        "predicted_speedup": predicted,
        "realised": realised,
        "component_times": None if costs is None else costs.as_dict(),
    }
