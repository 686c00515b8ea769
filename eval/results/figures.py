"""From the calls of a timed run to the figures of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from decode.acceptance import acceptance_by_position
from eval.arms.base import AUTOREGRESSIVE, TRANSFORMERS, Sample
from eval.config import TOKEN_FOR_TOKEN
from eval.measure.energy import NO_METER, EnergyMeter
from eval.measure.losslessness import Check, flips
from eval.measure.timed_run import Samples, call_seconds_per_token, is_plain_chain, promised_speedup, seconds_per_token
from eval.results.by_context import tau_by_context
from eval.results.energy import energy_pairs, joules_per_token
from eval.results.schema import ComponentTimes, Row
from eval.results.statistics import (
    Estimate,
    bootstrap,
    described,
    finite,
    inter_arrivals,
    median_of_ratios,
    quantiles,
    ratio_of_sums,
    repeated_4grams,
    share,
)

if TYPE_CHECKING:
    from decode.sampling.config import SamplingConfig
    from eval.measure.quality import Quality


@dataclass(frozen=True)
class Scope:
    """The prompts a row is about: indices of timed groups and of texts, and what to call them."""

    text: str
    groups: Sequence[int]
    texts: Sequence[int] = ()
    category: str | None = None
    units: Sequence[str] | None = None
    """Per text, the document it begins in; None where each has its own."""


@dataclass(frozen=True)
class Drafted:
    """An arm of ours that drafts: what a row is about."""

    arm: str
    """Name of the arm in the timed run."""
    family: str
    draft: str
    """Name of the draft."""
    settings: SamplingConfig
    """With the temperature and rule of the run."""
    setting: str | None = None
    """Name of the settings, where several are compared."""


def make_row(
    one: Drafted,
    scope: Scope,
    samples: Samples,
    costs: ComponentTimes | None,
    uncached: Sequence[Check] | None,
    batch_size: int,
    dtype: str,
    seed: int,
    meter: EnergyMeter = NO_METER,
) -> Row:
    """The row of one arm. `costs` are its component times, `uncached` its timed texts against an uncached forward, by
    prompt group; None where neither was measured. alpha and losslessness are not a timed run's to know
    (`quality_figures`)."""
    settings, chosen = one.settings, [samples[one.arm][group] for group in scope.groups]
    return Row(
        drafter=one.family,
        draft=one.draft,
        setting=one.setting,
        verifier=settings.verifier,
        tree=settings.tree,
        dtype=dtype,
        text=scope.text,
        category=scope.category,
        temperature=settings.temperature,
        batch_size=batch_size,
        num_draft_tokens=settings.num_draft_tokens,
        seed=seed,
        prompts=sum(len(group[0].new_ids) for group in chosen),
        tokens=sum(sample.tokens for group in chosen for sample in group),
        **acceptance(chosen, settings.num_draft_tokens, seed),
        **speed(samples, one, scope.groups, costs, seed),
        **latency(chosen),
        **dtype_flips(samples, one.arm, scope.groups, settings.verifier),
        **uncached_flips(uncached, scope.groups),
        repeated_4gram_share=repetition(chosen),
        ahead_share=_ahead(chosen),
        **energy(chosen, meter, seed),
        peak_memory_bytes=max(sample.peak_memory_bytes for group in chosen for sample in group),
    )


def _ahead(chosen: Sequence[Sequence[Sample]]) -> float | None:
    """Of the rounds with drafts, the share whose drafts were made during the pass before."""
    told = [one.ahead for group in chosen for sample in group for one in sample.rounds if one.ahead is not None]
    return share(sum(told), len(told))


def speed_ratio(samples: Samples, ours: str, other: str, groups: Sequence[int], seed: int) -> Estimate | None:
    """Other's decode seconds per token over ours: median over prompts of the paired ratios; None without a common
    prompt."""
    return _ratio(_pairs(samples, ours, other, groups), seed)


def call_ratio(samples: Samples, ours: str, other: str, groups: Sequence[int], seed: int) -> Estimate | None:
    """The same for whole calls, prompts included."""
    return _ratio(_call_pairs(samples, ours, other, groups), seed)


def _pairs(samples: Samples, ours: str, other: str, groups: Sequence[int]) -> np.ndarray:  # (groups, 2)
    return np.stack([seconds_per_token(samples[other]), seconds_per_token(samples[ours])], axis=1)[list(groups)]


def _call_pairs(samples: Samples, ours: str, other: str, groups: Sequence[int]) -> np.ndarray:  # (groups, 2)
    both = [call_seconds_per_token(samples[other]), call_seconds_per_token(samples[ours])]
    return np.stack(both, axis=1)[list(groups)]


def _ratio(pairs: np.ndarray, seed: int) -> Estimate | None:
    known = pairs[np.isfinite(pairs).all(1)]
    return bootstrap(known, median_of_ratios, seed) if len(known) else None


def listed(pairs: np.ndarray) -> list[list[float] | None]:
    """(n, 2) as JSON has it, in the order of the prompts; None where one of the two is unknown."""
    return [[float(one) for one in pair] if np.isfinite(pair).all() else None for pair in pairs]


def tokens_per_s(samples: Sequence[Sequence[Sample]], groups: Sequence[int] | None = None) -> float | None:
    """Decode tokens per second, median over the prompts of `groups`, or all; for batches, of the whole batch."""
    each = 1 / seconds_per_token(samples)[slice(None) if groups is None else list(groups)]
    return float(np.nanmedian(each)) if np.isfinite(each).any() else None


def baseline(samples: Samples, groups: Sequence[int]) -> str:
    """The faster of our autoregressive loop and transformers generate in this very run."""
    return max((AUTOREGRESSIVE, TRANSFORMERS), key=lambda arm: tokens_per_s(samples[arm], groups) or 0.0)


def acceptance(samples: Sequence[Sequence[Sample]], k: int, seed: int) -> dict[str, Any]:
    """tau with its interval, and acceptance by position, pooled over all rounds."""
    rounds = [[one for sample in group for one in sample.rounds] for group in samples]
    counts = np.array([(sum(r.emitted for r in group), len(group)) for group in rounds], dtype=float)
    by_position = acceptance_by_position([one for group in rounds for one in group], k)
    return {
        **described("tau", bootstrap(counts, ratio_of_sums, seed)),
        "acceptance_by_position": [finite(value) for value in by_position],
        "passes_by_prompt": counts.tolist(),
        "tau_by_context": tau_by_context(rounds, seed) or None,
    }


def speed(
    samples: Samples, one: Drafted, groups: Sequence[int], costs: ComponentTimes | None, seed: int
) -> dict[str, Any]:
    """Speed and speedup of an arm; predicted for plain chains alone, from their component times."""
    base = baseline(samples, groups)
    speedup = speed_ratio(samples, one.arm, base, groups, seed)
    tau = typical_tau([samples[one.arm][group] for group in groups])
    predicted = None
    if costs is not None and tau is not None and is_plain_chain(one.settings):
        predicted = promised_speedup(costs, tau)
    return {
        "tokens_per_s": tokens_per_s(samples[one.arm], groups),
        "baseline": base,
        "baseline_tokens_per_s": tokens_per_s(samples[base], groups),
        **described("speedup", speedup),
        **described("whole_call_speedup", call_ratio(samples, one.arm, base, groups, seed)),
        "predicted_speedup": predicted,
        "realised": None if speedup is None or predicted is None else speedup.value / predicted,
        "realised_ci95": None if predicted is None else realised_interval(samples, one.arm, base, groups, costs, seed),
        "component_times": costs,
        "seconds_by_prompt": listed(_pairs(samples, one.arm, base, groups)),
        "call_seconds_by_prompt": listed(_call_pairs(samples, one.arm, base, groups)),
    }


def typical_tau(samples: Sequence[Sequence[Sample]]) -> float | None:
    """Tokens per target pass after the first arrival: of each prompt, then the median over prompts, as the speedup is.

    Pooled over passes it would be less, since prompts of a low tau take more of them, and the speedup that it predicts
    too: at T=0, where prompts differ most, measured speedups came out twice as high as such predictions.
    """
    each = [tau for tau in taus(samples) if np.isfinite(tau)]
    return float(np.median(each)) if each else None


def taus(samples: Sequence[Sequence[Sample]]) -> np.ndarray:  # (prompts,)
    """Of each prompt, tokens per target pass after the first arrival; NaN where no pass followed it."""
    later = [[one for sample in group for one in sample.rounds[len(sample.new_ids) :]] for group in samples]
    return np.array([sum(one.emitted for one in rounds) / len(rounds) if rounds else np.nan for rounds in later])


def realised_interval(
    samples: Samples, ours: str, base: str, groups: Sequence[int], costs: ComponentTimes | None, seed: int
) -> list[float] | None:
    """95% interval over prompts of measured over predicted speedup: a prompt's times and its tau are drawn together,
    the component times stay as they were measured. None for a single prompt."""
    pairs, each = _pairs(samples, ours, base, groups), taus([samples[ours][group] for group in groups])
    columns = np.column_stack([pairs, each])
    known = columns[np.isfinite(columns).all(1)]
    if costs is None or not len(known):
        return None
    for_one_token = promised_speedup(costs, 1.0)
    return bootstrap(known, lambda drawn: _realised(drawn) / for_one_token, seed).interval


def _realised(drawn: np.ndarray) -> np.ndarray:  # (R, n, 3) -> (R,)
    """Speedup over tau, each the median over prompts, as in the figures themselves."""
    return median_of_ratios(drawn[..., :2]) / np.median(drawn[..., 2], axis=-1)


def latency(samples: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """Time to the first tokens, and between arrivals."""
    each = [sample for group in samples for sample in group]
    gaps = [gap for sample in each for gap in inter_arrivals(sample.arrivals)]
    return {"ttft_s": float(np.median([sample.first_s for sample in each])), "itl_s": quantiles(gaps)}


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


def energy(samples: Sequence[Sequence[Sample]], meter: EnergyMeter, seed: int) -> dict[str, Any]:
    """Joules per emitted token, and what `meter` says of them."""
    pairs = energy_pairs(samples)
    return {
        **described("energy_j_per_token", joules_per_token(pairs, seed)),
        "energy_kind": meter.kind,
        "energy_reason": meter.reason,
        "joules_by_prompt": pairs,
    }


def repetition(samples: Sequence[Sequence[Sample]]) -> float | None:
    """Share of 4-token runs that occurred before in the same output."""
    counts = [repeated_4grams(ids) for group in samples for sample in group for ids in sample.new_ids]
    return share(sum(repeated for repeated, _ in counts), sum(every for _, every in counts))


def quality_figures(quality: Quality, scope: Scope, seed: int) -> dict[str, Any]:
    """The fields of a row that its draft's quality fills."""
    uncached = {f"uncached_{name}": value for name, value in _checked(quality.uncached, scope.texts).items()}
    return {**_alpha(quality, scope, seed), **_checked(quality.checks, scope.texts), **uncached}


def alpha_alone(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Of those figures."""
    return {name: value for name, value in figures.items() if name.startswith("alpha")}


def _alpha(quality: Quality, scope: Scope, seed: int) -> dict[str, Any]:
    sums = quality.alphas.sums(scope.texts, scope.units)
    if not len(sums):
        return {"alpha": None, "alpha_ci95": None, "alpha_tokens": 0}
    estimate = described("alpha", bootstrap(sums, ratio_of_sums, seed))
    return {**estimate, "alpha_tokens": int(sums[:, 1].sum()), "alpha_by_document": sums.tolist()}


def _checked(checks: Mapping[int, Check] | None, texts: Sequence[int]) -> dict[str, Any]:
    if checks is None:
        return {"mismatches": None, "near_ties": None, "tokens_checked": 0}
    total = sum((checks[text] for text in texts if text in checks), Check())
    return {"mismatches": total.mismatches, "near_ties": total.near_ties, "tokens_checked": total.tokens}
