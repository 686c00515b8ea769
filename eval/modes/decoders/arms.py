"""Every arm of the suite, made from one target, one draft and the engines that run beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from decode.config import SamplingConfig
from decode.drafters.lm import LMDraft
from eval.arms.assisted import NAME as ASSISTED
from eval.arms.assisted import AssistedArm, Setting
from eval.arms.assisted import settings as assisted_settings
from eval.arms.ours import Arm, OurArm, TransformersArm, eos_ids
from eval.arms.static_cache import NAME as STATIC
from eval.arms.static_cache import static_options
from eval.arms.vllm_peer import VllmArm
from eval.config import EvalConfig
from eval.measure.quality import sampling_at, settings_at
from eval.measure.speed import AUTOREGRESSIVE, TRANSFORMERS
from eval.modes.decoders.config import arm_settings
from eval.modes.decoders.engines import VLLM, Engines

LOOKUP = "transformers prompt lookup"


def our_name(setting: str) -> str:
    """Name of a speculative arm of ours."""
    return f"ours, {setting}"


@dataclass(frozen=True)
class Stock:
    """What arms are made of."""

    cfg: EvalConfig
    model: PreTrainedModel
    drafter: Any
    family: str
    """The drafter's family, as rows name it."""
    engines: Engines
    max_length: int
    """Longest prompt and continuation in tokens."""

    def settings(self, temperature: float) -> dict[str, SamplingConfig]:
        """Our settings by name."""
        return arm_settings(self.cfg.decoders, self.cfg.decode, temperature)

    def ours(self, temperature: float, names: Sequence[str] | None = None) -> dict[str, Arm]:
        """Our speculative arms by the name of their setting."""
        known = self.settings(temperature)
        return {
            name: OurArm(our_name(name), self.model, self.drafter, vars(known[name]))
            for name in (known if names is None else names)
        }

    def plain(self, temperature: float) -> list[Arm]:
        """Both ways without a draft that a baseline is chosen from."""
        return [
            OurArm(AUTOREGRESSIVE, self.model, None, settings_at(self.cfg, temperature)),
            TransformersArm(TRANSFORMERS, self.model, sampling_at(self.cfg, temperature)),
        ]

    def static(self, temperature: float) -> Arm:
        """transformers' compiled static cache."""
        options = static_options(self.model, self.max_length)
        return TransformersArm(STATIC, self.model, sampling_at(self.cfg, temperature), options)

    def assisted(self, temperature: float) -> dict[str, Arm]:
        """transformers assisted generation by setting; none for a draft that is no language model."""
        if not isinstance(self.drafter, LMDraft):
            return {}
        return {one.label: self.assisted_at(one, temperature) for one in assisted_settings(self.cfg.peers)}

    def assisted_at(self, setting: Setting, temperature: float) -> Arm:
        """transformers assisted generation at one setting."""
        sampling = sampling_at(self.cfg, temperature)
        return AssistedArm(f"{ASSISTED}, {setting.label}", self.model, self.drafter.model, sampling, setting)

    def lookup(self, temperature: float) -> dict[str, Arm]:
        """transformers prompt lookup by number of tokens."""
        sampling = sampling_at(self.cfg, temperature)
        return {
            f"n={tokens}": TransformersArm(
                f"{LOOKUP}, n={tokens}", self.model, sampling, {"prompt_lookup_num_tokens": tokens}
            )
            for tokens in self.cfg.peers.prompt_lookup_num_tokens
        }

    def vllm(self, temperature: float) -> list[Arm]:
        """vLLM without and with its draft; none unless asked for."""
        sampling, eos = sampling_at(self.cfg, temperature), eos_ids(self.model)
        return [VllmArm(name, engine, sampling, eos) for name, engine in self.engines.started.items()]


def is_vllm(arm: str) -> bool:
    """Whether an arm of that name is vLLM's."""
    return arm.startswith(VLLM)
