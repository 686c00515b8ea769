"""One row of the report: what a draft did at a temperature, on all prompts or on those of one category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from decode.acceptance import acceptance_by_position
from eval.arms.ours import Sample
from eval.config import TOKEN_FOR_TOKEN, EvalConfig
from eval.measure.component_times import is_plain_chain
from eval.measure.losslessness import Check, flips
from eval.measure.quality import Quality, verifier_at
from eval.measure.speed import AUTOREGRESSIVE, TRANSFORMERS, Timed, arm_name
from eval.measure.timed_run import Samples, call_seconds_per_token, seconds_per_token
from eval.results.statistics import (
    Estimate,
    bootstrap,
    finite,
    inter_arrivals,
    median_of_ratios,
    quantiles,
    ratio_of_sums,
    repeated_4grams,
    share,
)

ENERGY_REASON = "not measured: this report reads no energy counter"


@dataclass(frozen=True)
class Scope:
    """The prompts a row is about: indices of timed groups and of texts, and what to call them."""

    text: str
    groups: Sequence[int]
    texts: Sequence[int]
    category: str | None = None
    units: Sequence[str] | None = None
    """Per text, the document it begins in; None where each has its own."""


def speed_ratio(samples: Samples, ours: str, other: str, groups: Sequence[int], seed: int) -> Estimate | None:
    """Other's decode seconds per token over ours: median over prompts of the paired ratios; None without a common
    prompt."""
    return _paired(seconds_per_token(samples[other]), seconds_per_token(samples[ours]), groups, seed)


def call_ratio(samples: Samples, ours: str, other: str, groups: Sequence[int], seed: int) -> Estimate | None:
    """The same for whole calls, prompts included."""
    return _paired(call_seconds_per_token(samples[other]), call_seconds_per_token(samples[ours]), groups, seed)


def _paired(other: np.ndarray, ours: np.ndarray, groups: Sequence[int], seed: int) -> Estimate | None:
    columns = np.stack([other, ours], axis=1)[list(groups)]
    columns = columns[np.isfinite(columns).all(1)]
    return bootstrap(columns, median_of_ratios, seed) if len(columns) else None


def tokens_per_s(samples: Sequence[Sequence[Sample]], groups: Sequence[int]) -> float | None:
    """Decode tokens per second, median over prompts; for batches, of the whole batch."""
    each = 1 / seconds_per_token(samples)[list(groups)]
    return float(np.nanmedian(each)) if np.isfinite(each).any() else None


def baseline(samples: Samples, groups: Sequence[int]) -> str:
    """The faster of our autoregressive loop and transformers generate in this very run."""
    return max((AUTOREGRESSIVE, TRANSFORMERS), key=lambda arm: tokens_per_s(samples[arm], groups) or 0.0)


def make_row(
    cfg: EvalConfig,
    draft: str,
    family: str,
    dtype: str,
    temperature: float,
    quality: Quality,
    timed: Timed,
    scope: Scope,
) -> dict[str, Any]:
    """The row in the schema of results.json."""
    k = cfg.decode.num_draft_tokens
    samples = [timed.samples[arm_name(draft, k)][group] for group in scope.groups]
    return {
        "drafter": family,
        "draft": draft,
        "verifier": verifier_at(cfg, temperature),
        "tree": cfg.decode.tree,
        "dtype": dtype,
        "text": scope.text,
        "category": scope.category,
        "temperature": temperature,
        "batch_size": cfg.timing.batch_size,
        "num_draft_tokens": k,
        "seed": cfg.seed,
        "prompts": sum(len(group[0].new_ids) for group in samples),
        "tokens": sum(sample.tokens for group in samples for sample in group),
        **_alpha(quality, scope, cfg.seed),
        **acceptance(samples, k, cfg.seed),
        **_speed(cfg, timed, draft, k, scope.groups, samples),
        **latency(samples),
        **_checked(quality.checks, scope.texts),
        **_uncached(quality.uncached, scope.texts),
        **dtype_flips(timed.samples, arm_name(draft, k), scope.groups, verifier_at(cfg, temperature)),
        **uncached_flips(timed.uncached.get(draft), scope.groups),
        "repeated_4gram_share": repetition(samples),
        "energy_j_per_token": None,
        "energy_reason": ENERGY_REASON,
        "peak_memory_bytes": max(sample.peak_memory_bytes for group in samples for sample in group),
    }


def _alpha(quality: Quality, scope: Scope, seed: int) -> dict[str, Any]:
    sums = quality.alphas.sums(scope.texts, scope.units)
    if not len(sums):
        return {"alpha": None, "alpha_ci95": None, "alpha_tokens": 0}
    estimate = bootstrap(sums, ratio_of_sums, seed)
    return {"alpha": estimate.value, "alpha_ci95": estimate.interval, "alpha_tokens": int(sums[:, 1].sum())}


def acceptance(samples: Sequence[Sequence[Sample]], k: int, seed: int) -> dict[str, Any]:
    """tau with its interval, and acceptance by position, pooled over all rounds."""
    rounds = [[one for sample in group for one in sample.rounds] for group in samples]
    estimate = bootstrap(
        np.array([(sum(r.emitted for r in group), len(group)) for group in rounds]), ratio_of_sums, seed
    )
    by_position = acceptance_by_position([one for group in rounds for one in group], k)
    return {
        "tau": estimate.value,
        "tau_ci95": estimate.interval,
        "acceptance_by_position": [finite(value) for value in by_position],
    }


def _speed(
    cfg: EvalConfig, timed: Timed, draft: str, k: int, groups: Sequence[int], samples: Sequence[Sequence[Sample]]
) -> dict[str, Any]:
    arm, base = arm_name(draft, k), baseline(timed.samples, groups)
    speedup = speed_ratio(timed.samples, arm, base, groups, cfg.seed)
    whole = call_ratio(timed.samples, arm, base, groups, cfg.seed)
    costs = timed.costs[draft, k]
    predicted = costs.speedup(pooled_tau(samples)) if is_plain_chain(cfg.decode) else None
    return {
        "tokens_per_s": tokens_per_s(timed.samples[arm], groups),
        "baseline": base,
        "baseline_tokens_per_s": tokens_per_s(timed.samples[base], groups),
        **described("speedup", speedup),
        **described("whole_call_speedup", whole),
        "predicted_speedup": predicted,
        "realised": None if speedup is None or predicted is None else speedup.value / predicted,
        "component_times": costs.as_dict(),
    }


def described(name: str, estimate: Estimate | None) -> dict[str, Any]:
    """NAME and NAME_ci95 as JSON has them; None where nothing could be estimated."""
    if estimate is None:
        return {name: None, f"{name}_ci95": None}
    return {name: estimate.value, f"{name}_ci95": estimate.interval}


def pooled_tau(samples: Sequence[Sequence[Sample]]) -> float:
    """Tokens emitted per target pass, over all rounds."""
    rounds = [one for group in samples for sample in group for one in sample.rounds]
    return sum(one.emitted for one in rounds) / len(rounds)


def latency(samples: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """Time to the first tokens, and between arrivals."""
    each = [sample for group in samples for sample in group]
    gaps = [gap for sample in each for gap in inter_arrivals(sample.arrivals)]
    return {"ttft_s": float(np.median([sample.first_s for sample in each])), "itl_s": quantiles(gaps)}


def _checked(checks: Mapping[int, Check] | None, texts: Sequence[int]) -> dict[str, Any]:
    if checks is None:
        return {"mismatches": None, "near_ties": None, "tokens_checked": 0}
    total = sum((checks[text] for text in texts if text in checks), Check())
    return {"mismatches": total.mismatches, "near_ties": total.near_ties, "tokens_checked": total.tokens}


def _uncached(checks: Mapping[int, Check] | None, texts: Sequence[int]) -> dict[str, Any]:
    return {f"uncached_{name}": value for name, value in _checked(checks, texts).items()}


def uncached_flips(checks: Sequence[Check] | None, groups: Sequence[int]) -> dict[str, Any]:
    """Tokens of the timed texts that an uncached forward would not choose, by prompt group; None where none was
    made."""
    if checks is None:
        return {"uncached_dtype_flips": None, "uncached_dtype_tokens": 0}
    total = sum((checks[group] for group in groups), Check())
    return {"uncached_dtype_flips": total.mismatches + total.near_ties, "uncached_dtype_tokens": total.tokens}


def dtype_flips(samples: Samples, arm: str, groups: Sequence[int], verifier: str) -> dict[str, Any]:
    """Flips of the timed run against our autoregressive arm; None where only the distribution is equal."""
    if verifier not in TOKEN_FOR_TOKEN:
        return {"dtype_flips": None, "dtype_tokens_compared": 0}
    pairs = [
        (alone.new_ids, drafted.new_ids)
        for group in groups
        for alone, drafted in zip(samples[AUTOREGRESSIVE][group], samples[arm][group], strict=True)
    ]
    total = sum((flips(alone, drafted) for alone, drafted in pairs), Check())
    return {"dtype_flips": total.near_ties, "dtype_tokens_compared": total.tokens}


def repetition(samples: Sequence[Sequence[Sample]]) -> float | None:
    """Share of 4-token runs that occurred before in the same output."""
    counts = [repeated_4grams(ids) for group in samples for sample in group for ids in sample.new_ids]
    return share(sum(repeated for repeated, _ in counts), sum(every for _, every in counts))


def sweep_point(cfg: EvalConfig, draft: str, k: int, timed: Timed) -> dict[str, Any]:
    """Speedup at one draft length with its prediction, on all timed prompts."""
    samples = timed.samples[arm_name(draft, k)]
    groups = range(len(samples))
    return {
        "num_draft_tokens": k,
        "tau": pooled_tau(samples),
        **{
            key: value
            for key, value in _speed(cfg, timed, draft, k, groups, samples).items()
            if key in ("tokens_per_s", "speedup", "speedup_ci95", "predicted_speedup", "realised")
        },
    }
