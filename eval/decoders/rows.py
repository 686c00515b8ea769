"""One row of results.json per cell and setting of ours, in the report's schema; alpha is the report's to measure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from decode.config import SamplingConfig
from eval.components import ComponentTimes
from eval.decoders.arms import our_name
from eval.measure import Samples
from eval.rows import (
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
)

if TYPE_CHECKING:
    from eval.decoders.arms import Stock
    from eval.decoders.cells import Cell


def make_row(
    stock: Stock, cell: Cell, name: str, settings: SamplingConfig, samples: Samples, costs: ComponentTimes | None
) -> dict[str, Any]:
    """`costs` are the component times of a plain chain; the speedup of another shape is not predicted."""
    arm, seed = our_name(name), stock.cfg.seed
    groups = range(len(samples[arm]))
    each = [sample for group in samples[arm] for sample in group]
    return {
        "drafter": stock.family,
        "draft": next(iter(stock.cfg.drafts)),
        "setting": name,
        "verifier": settings.verifier,
        "tree": settings.tree,
        "dtype": str(stock.model.dtype).removeprefix("torch."),
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
        **dtype_flips(samples, arm, groups, settings.verifier),
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
