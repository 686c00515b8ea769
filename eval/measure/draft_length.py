"""The draft length that a report uses, chosen by speed on prompts that it never reports (`timing.choose_k`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from decode.common.errors import ConfigError
from decode.common.progress import get_logger
from eval.arms.ours import OurArm
from eval.config import EvalConfig
from eval.inputs import load
from eval.measure.quality import settings_at
from eval.measure.timed_run import fastest, interleave, warm_up
from eval.prompts.held_out import Prompt, PromptSets, held_out_prompts
from eval.results.row import tokens_per_s

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger("eval")


@dataclass(frozen=True)
class LengthChoice:
    """What was chosen, and the speeds it was chosen by."""

    num_draft_tokens: int
    tried: dict[int, float | None]
    """k -> tokens per second on the prompts of the choice."""
    temperature: float
    source: str
    prompts: int

    def as_dict(self) -> dict[str, Any]:
        """For results.json."""
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "tokens_per_s": {str(k): speed for k, speed in self.tried.items()},
            "temperature": self.temperature,
            "source": self.source,
            "prompts": self.prompts,
        }


@dataclass(frozen=True)
class ChoicePrompts:
    """Prompts to choose on, and where they are from."""

    prompts: list[Prompt]
    source: str


def choice_prompts(cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, sets: PromptSets) -> ChoicePrompts:
    """Windows of the validation split, as many as are timed; of a prompt file, those set apart for settings.

    ConfigError where the validation split gives none.
    """
    if not cfg.timing.choose_k:
        return ChoicePrompts([], "")
    if cfg.prompts.file is not None:
        return ChoicePrompts(sets.screening, f"{cfg.prompts.file}, questions that are not reported")
    from distill.corpora import load_corpus

    documents = load_corpus(cfg.data).documents("validation")
    prompts = held_out_prompts(documents, tokenizer, cfg.prompts, cfg.timing.prompts, cfg.seed)
    if not prompts:
        raise ConfigError(
            f"timing.choose_k={cfg.timing.choose_k} chooses on the validation split of data={cfg.data.name}, which has "
            f"no text of {cfg.prompts.tokens} tokens; shorten prompts.tokens, raise data.validation_share, or set "
            "timing.choose_k=[] to use decode.num_draft_tokens"
        )
    return ChoicePrompts(prompts, f"validation split of {cfg.data.name}")


def with_chosen_length(cfg: EvalConfig, chosen_on: ChoicePrompts) -> tuple[EvalConfig, LengthChoice | None]:
    """The configuration with the fastest of timing.choose_k for the first draft at the first temperature."""
    if not cfg.timing.choose_k:
        return cfg, None
    temperature, tried = cfg.temperatures[0], _speeds(cfg, chosen_on.prompts)
    k = fastest(tried)
    log.info("draft length %d, chosen on prompts that are not reported", k)
    choice = LengthChoice(k, tried, temperature, chosen_on.source, len(chosen_on.prompts))
    return replace(cfg, decode=replace(cfg.decode, num_draft_tokens=k)), choice


def _speeds(cfg: EvalConfig, prompts: Sequence[Prompt]) -> dict[int, float | None]:
    model, drafters = load(cfg, cfg.target)
    drafter, settings = next(iter(drafters.values())), settings_at(cfg, cfg.temperatures[0])
    arms = {
        k: OurArm(f"k={k}", model, drafter, {**settings, "num_draft_tokens": k})
        for k in dict.fromkeys(cfg.timing.choose_k)
    }
    every, size, tokens = list(arms.values()), cfg.timing.batch_size, cfg.timing.screening_tokens
    warm_up(every, prompts, size, cfg.seed, tokens)
    samples = interleave(every, prompts, tokens, 1, cfg.seed, size, "choosing the draft length")
    return {k: tokens_per_s(samples[arm.name], range(len(samples[arm.name]))) for k, arm in arms.items()}
