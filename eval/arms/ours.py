"""Our decoder as an arm, and the arms that every mode times: two without a draft, ours and transformers' with one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedModel

from decode import generate, warm_up
from decode.autotune.timing import synchronize
from decode.drafters.base import Drafter
from decode.drafters.lm import LMDraft
from decode.forward.runner import least_room
from decode.sampling.config import SamplingConfig
from eval.arms.base import ASSISTED, AUTOREGRESSIVE, EARLY_EXIT, LOOKUP, TRANSFORMERS, Arm, Sample
from eval.arms.transformers_arms import Setting, TransformersArm, assisted_settings
from eval.config import EvalConfig
from eval.inputs import sampling_at, settings_at, verifier_at
from eval.measure.config import PeersConfig
from eval.measure.continuations import left_padded


@dataclass(frozen=True)
class OurArm:
    """decode.generate, speculative with a drafter and autoregressive without one."""

    name: str
    model: PreTrainedModel
    drafter: Drafter | None
    settings: Mapping[str, Any]
    """Keyword arguments of decode.generate (fields of SamplingConfig)."""

    def run(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], max_new_tokens: int, seed: int) -> Sample:
        """One call of decode.generate; times and arrivals are its own."""
        ids, mask = left_padded(prompts, 0, self.model.device)
        if ids.is_cuda:
            torch.cuda.reset_peak_memory_stats(ids.device)  # else the peak would be that of the arms before
        asked = {**self.settings, "max_new_tokens": max_new_tokens, "seed": seed}
        began = time.perf_counter()
        out = generate(self.model, self.drafter, ids, attention_mask=mask, rows=list(rows), **asked)
        synchronize(self.model.device)
        seconds = time.perf_counter() - began
        counts = [int(length) - len(prompt) for length, prompt in zip(out.lengths, prompts, strict=True)]
        new = [out.sequences[i, ids.shape[1] : ids.shape[1] + count].tolist() for i, count in enumerate(counts)]
        first = sum(one.emitted for one in out.stats.rounds[: len(prompts)])
        arrivals = out.stats.arrival_s
        rounds = out.stats.rounds if self.drafter is not None else []
        return Sample(new, seconds, arrivals[0], first, arrivals, rounds, out.stats.peak_memory_bytes)

    def capture_ahead(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """All captures that this call and longer ones, as far as there is room (`room_for`), may need: seconds each,
        which would stand in a call's time."""
        settings = {name: value for name, value in self.settings.items() if name != "max_new_tokens"}
        ids, _ = left_padded(prompts, 0, self.model.device)
        warm_up(self.model, self.drafter, ids, max(max_new_tokens, least_room() - ids.shape[1]), **settings)


def plain_arms(cfg: EvalConfig, model: PreTrainedModel, temperature: float) -> list[Arm]:
    """Both ways without a draft, of which the faster is the baseline."""
    return [
        OurArm(AUTOREGRESSIVE, model, None, settings_at(cfg, temperature)),
        TransformersArm(TRANSFORMERS, model, sampling_at(cfg, temperature)),
    ]


def our_arm(name: str, model: PreTrainedModel, drafter: Any, settings: SamplingConfig) -> Arm:
    """Our decoder with a draft."""
    return OurArm(name, model, drafter, vars(settings))


def drafting(cfg: EvalConfig, temperature: float, k: int, **changes: Any) -> SamplingConfig:
    """The configured settings at a temperature and draft length."""
    verifier: Any = verifier_at(cfg, temperature)
    return replace(cfg.decode, temperature=temperature, verifier=verifier, num_draft_tokens=k, **changes)


def assisted_arms(cfg: EvalConfig, model: PreTrainedModel, drafter: Any, temperature: float) -> dict[str, Arm]:
    """transformers assisted generation by setting; none for a draft that is not a language model."""
    if _of_draft(drafter) is not None:
        return {}
    sampling, lm = sampling_at(cfg, temperature), drafter.model
    return {
        one.label: TransformersArm(f"{ASSISTED}, {one.label}", model, sampling, draft=lm, setting=one)
        for one in assisted_settings(cfg.peers)
    }


def lookup_arms(cfg: EvalConfig, model: PreTrainedModel, temperature: float) -> dict[str, Arm]:
    """transformers prompt lookup by number of tokens."""
    sampling = sampling_at(cfg, temperature)
    return {
        f"n={tokens}": TransformersArm(f"{LOOKUP}, n={tokens}", model, sampling, {"prompt_lookup_num_tokens": tokens})
        for tokens in cfg.peers.prompt_lookup_num_tokens
    }


def early_exit_settings(cfg: PeersConfig) -> dict[str, tuple[int, int]]:
    """Name of a setting -> layers that draft, tokens."""
    return {f"E={e},n={n}": (e, n) for e, n in product(cfg.early_exit_layers, cfg.early_exit_tokens)}


def early_exit_arms(cfg: EvalConfig, model: PreTrainedModel, temperature: float) -> dict[str, Arm]:
    """Setting -> transformers' early exit there."""
    sampling = sampling_at(cfg, temperature)
    return {
        name: TransformersArm(
            f"{EARLY_EXIT}, {name}", model, sampling, {"assistant_early_exit": layers}, setting=Setting(tokens, 0.0)
        )
        for name, (layers, tokens) in early_exit_settings(cfg.peers).items()
    }


def renamed(arm: Any, name: str) -> Arm:
    """A peer at its best setting bears the peer's own name, whichever setting that is."""
    return replace(arm, name=name)


OF_LM = "transformers takes a language model as assistant_model, and the first of drafts is none; name one first"
HAS_WINDOW = "the draft attends over a window (draft.window), which transformers would not heed"


def assisted_refusal(cfg: EvalConfig, draft: object | None = None, family: str = "lm") -> str | None:
    """Why transformers assisted generation cannot run in a report, as far as is known of the first draft; None where
    it can."""
    if not cfg.peers.num_assistant_tokens:
        return "peers.num_assistant_tokens is empty"
    if cfg.timing.batch_size > 1:
        return f"transformers assisted generation decodes one prompt at a time, not {cfg.timing.batch_size}"
    if family != "lm":
        return OF_LM
    return None if draft is None else _of_draft(draft)


def _of_draft(draft: object) -> str | None:
    if not isinstance(draft, LMDraft):
        return OF_LM
    if draft.window is not None:
        return HAS_WINDOW
    return None
