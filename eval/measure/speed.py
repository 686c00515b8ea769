"""Second half of a report, in the run's own precision: all arms timed in one interleaved run per temperature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from decode.common.progress import get_logger
from decode.drafters.lm import LMDraft
from eval.arms.assisted import NAME, AssistedArm, Setting, settings
from eval.arms.ours import Arm, OurArm, TransformersArm
from eval.config import TOKEN_FOR_TOKEN, EvalConfig
from eval.measure.component_times import ComponentTimes, CostMeter
from eval.measure.losslessness import Check
from eval.measure.quality import sampling_at, settings_at, verifier_at
from eval.measure.timed_run import Samples, interleave, seconds_per_token, warm_up
from eval.measure.uncached import check_samples
from eval.prompts.held_out import Prompt, PromptSets

AUTOREGRESSIVE = "own autoregressive loop"
TRANSFORMERS = "transformers generate"
log = get_logger("eval")


@dataclass(frozen=True)
class Timed:
    """The timed run at one temperature."""

    samples: Samples
    costs: dict[tuple[str, int], ComponentTimes]
    """(draft, k) -> component times."""
    setting: Setting | None
    """The peer's best setting; None where the peer cannot run."""
    screened: dict[Setting, float]
    """Seconds per token of every setting on the screening prompts."""
    uncached: dict[str, list[Check]] = field(default_factory=dict)
    """Draft -> by prompt group, its timed texts against an uncached forward; empty under rules that draw noise of
    their own."""


def arm_name(draft: str, k: int) -> str:
    """Name of a speculative arm."""
    return f"{draft} k={k}"


def draft_lengths(cfg: EvalConfig, temperature: float, draft: str) -> list[int]:
    """Draft lengths timed: the configured one, and the sweep for the first draft at the first temperature."""
    is_swept = temperature == cfg.temperatures[0] and draft == next(iter(cfg.drafts))
    return sorted({cfg.decode.num_draft_tokens, *(cfg.timing.sweep if is_swept else [])})


def peer_refusal(cfg: EvalConfig, draft: object | None = None) -> str | None:
    """Why transformers assisted generation cannot run here; None where it can."""
    if not cfg.peers.num_assistant_tokens:
        return "peers.num_assistant_tokens is empty"
    if cfg.timing.batch_size > 1:
        return f"transformers assisted generation decodes one prompt at a time, not {cfg.timing.batch_size}"
    if draft is not None and not isinstance(draft, LMDraft):
        return f"transformers takes a language model as assistant_model, and this draft is a {type(draft).__name__}"
    return None


def own_arms(cfg: EvalConfig, model: PreTrainedModel, drafters: Mapping[str, Any], temperature: float) -> list[Arm]:
    """Our arms and the plain transformers baseline at one temperature."""
    settings = settings_at(cfg, temperature)
    arms: list[Arm] = [
        OurArm(AUTOREGRESSIVE, model, None, settings),
        TransformersArm(TRANSFORMERS, model, sampling_at(cfg, temperature)),
    ]
    for name, drafter in drafters.items():
        for k in draft_lengths(cfg, temperature, name):
            arms.append(OurArm(arm_name(name, k), model, drafter, {**settings, "num_draft_tokens": k}))
    return arms


def screen_peer(
    cfg: EvalConfig, model: PreTrainedModel, draft: LMDraft, prompts: Sequence[Prompt], temperature: float
) -> dict[Setting, float]:
    """Seconds per token of each setting on prompts that are not reported."""
    sampling = sampling_at(cfg, temperature)
    arms = {one: AssistedArm(one.label, model, draft.model, sampling, one) for one in settings(cfg.peers)}
    every = list(arms.values())
    label = f"choosing the peer's setting, T={temperature:g}"
    samples = interleave(every, prompts, cfg.timing.screening_tokens, 1, cfg.seed, 1, label)
    return {one: _median_or_inf(seconds_per_token(samples[arm.name])) for one, arm in arms.items()}


def _median_or_inf(seconds: np.ndarray) -> float:
    known = seconds[np.isfinite(seconds)]
    return float(np.median(known)) if len(known) else float("inf")


def mean_context(prompts: Sequence[Prompt], max_new_tokens: int) -> int:
    """Tokens in the cache half way through the mean prompt's continuation."""
    return round(sum(len(prompt.ids) for prompt in prompts) / len(prompts) + max_new_tokens / 2)


def measure_speed(
    cfg: EvalConfig, model: PreTrainedModel, drafters: Mapping[str, Any], prompts: PromptSets
) -> dict[float, Timed]:
    """Every temperature's interleaved run: both baselines, every draft, and the peer at its best setting."""
    return {temperature: _measure_at(cfg, model, drafters, prompts, temperature) for temperature in cfg.temperatures}


def _measure_at(
    cfg: EvalConfig, model: PreTrainedModel, drafters: Mapping[str, Any], prompts: PromptSets, temperature: float
) -> Timed:
    arms = own_arms(cfg, model, drafters, temperature)
    warm_up(arms, prompts.screening, cfg.timing.batch_size, cfg.seed)
    first = next(iter(drafters.values()))
    screened: dict[Setting, float] = {}
    refusal = peer_refusal(cfg, first)
    if refusal is None:
        peers = [
            AssistedArm(NAME, model, first.model, sampling_at(cfg, temperature), one) for one in settings(cfg.peers)
        ]
        warm_up(peers[:1], prompts.screening, 1, cfg.seed)
        screened = screen_peer(cfg, model, first, prompts.screening, temperature)
        best = min(screened, key=lambda one: screened[one])
        arms.append(AssistedArm(NAME, model, first.model, sampling_at(cfg, temperature), best))
    else:
        best = None
        log.info("no peer in this run: %s", refusal)
    meter = _meter(cfg, model, drafters, prompts.timed, temperature)
    samples = interleave(
        arms,
        prompts.timed,
        cfg.decode.max_new_tokens,
        cfg.timing.rounds,
        cfg.seed,
        cfg.timing.batch_size,
        f"timing at T={temperature:g}",
        between_rounds=meter.sample,
    )
    uncached = _uncached(cfg, model, drafters, prompts.timed, samples, temperature)
    return Timed(samples, meter.result(), best, screened, uncached)


def _uncached(
    cfg: EvalConfig,
    model: PreTrainedModel,
    drafters: Mapping[str, Any],
    prompts: Sequence[Prompt],
    samples: Samples,
    temperature: float,
) -> dict[str, list[Check]]:
    """After the timed run, in its own precision: rounding flips near-ties, a fault of our passes far more."""
    if verifier_at(cfg, temperature) not in TOKEN_FOR_TOKEN:
        return {}
    sampling, k = sampling_at(cfg, temperature), cfg.decode.num_draft_tokens
    return {
        draft: check_samples(model, prompts, samples[arm_name(draft, k)], cfg.timing.batch_size, sampling, cfg.seed)
        for draft in drafters
    }


def _meter(
    cfg: EvalConfig, model: PreTrainedModel, drafters: Mapping[str, Any], prompts: Sequence[Prompt], temperature: float
) -> CostMeter:
    lengths = {name: draft_lengths(cfg, temperature, name) for name in drafters}
    context = mean_context(prompts, cfg.decode.max_new_tokens)
    return CostMeter(model, drafters, lengths, context, cfg.timing.batch_size, cfg.timing.cost_repeats)
