"""The arms that every mode times: the two without a draft, ours with one, and transformers assisted generation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from decode.config import SamplingConfig
from decode.drafters.lm import LMDraft
from decode.sampling.settings import generate_settings
from eval.arms.assisted import NAME as ASSISTED
from eval.arms.assisted import AssistedArm, Setting, settings
from eval.arms.ours import AUTOREGRESSIVE, TRANSFORMERS, Arm, OurArm, TransformersArm
from eval.config import EvalConfig
from eval.measure.quality import sampling_at, settings_at, verifier_at


def plain_arms(cfg: EvalConfig, model: PreTrainedModel, temperature: float) -> list[Arm]:
    """Both ways without a draft, of which the faster is the baseline."""
    return [
        OurArm(AUTOREGRESSIVE, model, None, settings_at(cfg, temperature)),
        TransformersArm(TRANSFORMERS, model, sampling_at(cfg, temperature)),
    ]


def our_arm(name: str, model: PreTrainedModel, drafter: Any, settings: SamplingConfig) -> Arm:
    """Our decoder with a draft."""
    return OurArm(name, model, drafter, generate_settings(settings))


def drafting(cfg: EvalConfig, temperature: float, k: int, **changes: Any) -> SamplingConfig:
    """The configured settings at a temperature and draft length."""
    verifier: Any = verifier_at(cfg, temperature)
    return replace(cfg.decode, temperature=temperature, verifier=verifier, num_draft_tokens=k, **changes)


def assisted_arms(cfg: EvalConfig, model: PreTrainedModel, drafter: Any, temperature: float) -> dict[str, Arm]:
    """transformers assisted generation by setting; none for a draft that is not a language model."""
    if not isinstance(drafter, LMDraft):
        return {}
    tried = {one.label: one for one in settings(cfg.peers)}
    return {label: _assisted(cfg, model, drafter, temperature, label, one) for label, one in tried.items()}


def _assisted(
    cfg: EvalConfig, model: PreTrainedModel, drafter: LMDraft, temperature: float, label: str, setting: Setting
) -> Arm:
    return AssistedArm(f"{ASSISTED}, {label}", model, drafter.model, sampling_at(cfg, temperature), setting)


def renamed(arm: Any, name: str) -> Arm:
    """A peer at its best setting bears the peer's own name, whichever setting that is."""
    return replace(arm, name=name)


def assisted_refusal(cfg: EvalConfig, draft: object | None = None) -> str | None:
    """Why transformers assisted generation cannot run in a report; None where it can."""
    if not cfg.peers.num_assistant_tokens:
        return "peers.num_assistant_tokens is empty"
    if cfg.timing.batch_size > 1:
        return f"transformers assisted generation decodes one prompt at a time, not {cfg.timing.batch_size}"
    if draft is not None and not isinstance(draft, LMDraft):
        return f"transformers takes a language model as assistant_model, and this draft is a {type(draft).__name__}"
    return None
