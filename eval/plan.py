"""What a report would run: arms, prompts, tokens and a rough time, before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from decode.models.load import ModelDescription, resolve_device
from eval.arms.base import ASSISTED, AUTOREGRESSIVE, TRANSFORMERS
from eval.arms.ours import assisted_refusal
from eval.arms.transformers_arms import assisted_settings
from eval.config import EvalConfig
from eval.prompts.held_out import PromptSets
from eval.results.document import arm_name, draft_lengths

_BYTES_PER_S = {"cpu": 10e9, "cuda": 1e12}
"""Weights read per second at batch 1, as an order of magnitude for the estimate."""
_HOST_S = {"cpu": 0.5e-3, "cuda": 15e-3}
"""Seconds a token costs besides."""
_BATCH_GAIN = 6.0
"""How much faster than one by one a batch goes, in tokens per second."""


@dataclass(frozen=True)
class Plan:
    """Counts of one report."""

    arms: dict[float, list[str]]
    choose_k: list[int]
    prompts: PromptSets
    timed_tokens: int
    checked_tokens: int
    screened_tokens: int
    seconds: float

    def lines(self) -> list[str]:
        """For a person."""
        sets = self.prompts
        arms = [f"  T={temperature:g}: {', '.join(names)}" for temperature, names in self.arms.items()]
        return [
            "arms, timed prompt by prompt in one run:",
            *arms,
            *([f"k is chosen first, among {self.choose_k}, on other prompts"] if self.choose_k else []),
            f"prompts: {len(sets.timed)} timed, {len(sets.reported)} checked, {len(sets.screening)} for "
            "settings and warm-up",
            f"tokens: {self.timed_tokens:,} timed, {self.checked_tokens:,} checked and for alpha, "
            f"{self.screened_tokens:,} screened",
            f"time: about {self.seconds / 60:.0f} min (an order of magnitude)",
        ]


def make_plan(cfg: EvalConfig, target: ModelDescription, prompts: PromptSets) -> Plan:
    """Upper bounds: texts may end before their limit."""
    arms = {temperature: _arm_names(cfg, temperature) for temperature in cfg.temperatures}
    calls = cfg.timing.rounds * len(prompts.timed) * sum(len(names) for names in arms.values())
    timed = calls * cfg.decode.max_new_tokens
    checked = _checked_tokens(cfg, len(prompts.reported))
    screened = len(cfg.timing.choose_k) * len(prompts.screening) * cfg.timing.screening_tokens
    if assisted_refusal(cfg) is None:
        per_temperature = len(assisted_settings(cfg.peers)) * len(prompts.screening) * cfg.timing.screening_tokens
        screened += per_temperature * len(cfg.temperatures)
    per_token = seconds_per_token(target, cfg.target.device)
    seconds = per_token * ((timed + screened) / 1.3 + 2 * checked / _BATCH_GAIN)
    return Plan(arms, cfg.timing.choose_k, prompts, timed, checked, screened, seconds)


def seconds_per_token(target: ModelDescription, device: str) -> float:
    """Of plain decoding at batch 1, as an order of magnitude."""
    kind = resolve_device(device).type
    return target.weight_bytes / _BYTES_PER_S.get(kind, 10e9) + _HOST_S.get(kind, 3e-3)


def _arm_names(cfg: EvalConfig, temperature: float) -> list[str]:
    drafts = [arm_name(draft, k) for draft in cfg.drafts for k in draft_lengths(cfg, temperature, draft)]
    peers = [ASSISTED] if assisted_refusal(cfg) is None else []
    return [AUTOREGRESSIVE, TRANSFORMERS, *drafts, *peers]


def _checked_tokens(cfg: EvalConfig, prompts: int) -> int:
    main = prompts * cfg.lossless.tokens
    others = len(cfg.temperatures) * len(cfg.drafts) - 1 + len(set(cfg.curve_temperatures) - set(cfg.temperatures))
    return main + others * min(prompts, cfg.lossless.other_prompts) * cfg.lossless.other_tokens
