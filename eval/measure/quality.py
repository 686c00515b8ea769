"""First half of a report, in float32 and batched: is the output the target's own, and how much of p does each draft
cover?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.acceptance import greedy_agreement, overlap
from decode.common.progress import get_logger
from distill.corpora.bad_rows import BadRow
from eval.config import TOKEN_FOR_TOKEN, EvalConfig
from eval.inputs import can_resume, processors_of, sampling_at, settings_at, verifier_at
from eval.measure.alpha import Alphas, measure_alpha
from eval.measure.continuations import Generate, Text, generator, jobs_for
from eval.measure.losslessness import Check, check, check_uncached, is_judged, margin_from
from eval.prompts.prompt import Prompt
from eval.prompts.questions import next_turn

log = get_logger("eval")


@dataclass(frozen=True)
class Quality:
    """One draft at one temperature."""

    alphas: Alphas
    checks: dict[int, Check] | None
    """By prompt; None where the verifier promises equality in distribution only."""
    uncached: dict[int, Check] | None = None
    """By prompt, the target's own text against an uncached forward; None in a precision that flips near-ties."""


def with_answers(
    cfg: EvalConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> list[Prompt]:
    """The prompts and, for conversations, their later turns, each after the answers that the target gave before it."""
    conversations = [[prompt] for prompt in prompts]
    while waiting := [turns for turns in conversations if turns[-1].later]:
        answer = alone(cfg, target, cfg.temperatures[0], "answers between turns")
        texts = answer(jobs_for([turns[-1] for turns in waiting], cfg.decode.max_new_tokens))
        for turns, text in zip(waiting, texts, strict=True):
            said = str(tokenizer.decode(list(text.new), skip_special_tokens=True))
            try:
                turns.append(next_turn(turns[-1], said, tokenizer))
            except BadRow as error:  # an empty answer, say
                log.warning("a conversation ends after its turn %d: %s", len(turns), error)
                turns[-1] = replace(turns[-1], later=())
    return [prompt for turns in conversations for prompt in turns]


def alone(cfg: EvalConfig, target: PreTrainedModel, temperature: float, label: str) -> Generate:
    """What writes texts without a draft."""
    settings = {**settings_at(cfg, temperature), "verifier": "coupled"}
    return generator(target, None, settings, cfg.seed, cfg.lossless.batch_size, label)


def measure_quality(
    cfg: EvalConfig, target: PreTrainedModel, drafters: Mapping[str, Any], prompts: Sequence[Prompt]
) -> dict[tuple[float, str], Quality]:
    """alpha and losslessness of every draft at every temperature of the run, on text that the target writes for it."""
    found, size = {}, cfg.lossless
    for number, temperature in enumerate(cfg.temperatures):
        reference = write_alone(cfg, target, temperature, prompts, is_first=number == 0)
        alphas = measure_alpha(target, drafters, reference, sampling_at(cfg, temperature))
        uncached = _uncached(cfg, target, temperature, reference)
        shorter = [replace(text, new=text.new[: size.other_tokens]) for text in reference[: size.other_prompts]]
        for name, drafter in drafters.items():
            is_first = number == 0 and name == next(iter(drafters))
            compared = reference if is_first else shorter
            checks = _check(cfg, target, drafter, temperature, compared, f"{name} against it")
            found[temperature, name] = Quality(alphas[name], checks, uncached)
    return found


def write_alone(
    cfg: EvalConfig, target: PreTrainedModel, temperature: float, prompts: Sequence[Prompt], is_first: bool
) -> list[Text]:
    """What the target writes at this temperature: most of it at the first one."""
    size = cfg.lossless
    jobs = jobs_for(prompts, size.tokens) if is_first else jobs_for(prompts[: size.other_prompts], size.other_tokens)
    return alone(cfg, target, temperature, f"target alone at T={temperature:g}")(jobs)


def _check(
    cfg: EvalConfig, target: PreTrainedModel, drafter: Any, temperature: float, reference: Sequence[Text], label: str
) -> dict[int, Check] | None:
    verifier = verifier_at(cfg, temperature)
    if verifier not in TOKEN_FOR_TOKEN:
        log.info("losslessness is not counted: verifier=%s does not promise the tokens", verifier)
        return None
    speculate = generator(target, drafter, settings_at(cfg, temperature), cfg.seed, cfg.lossless.batch_size, label)
    margin = margin_from(target, sampling_at(cfg, temperature), cfg.seed, processors_of(cfg, target))
    counts = check(reference, speculate, margin, can_resume(cfg))
    return {text.row: count for text, count in zip(reference, counts, strict=True)}


def _uncached(
    cfg: EvalConfig, target: PreTrainedModel, temperature: float, reference: Sequence[Text]
) -> dict[int, Check] | None:
    if not is_judged(target.dtype):
        log.info("texts are not held against an uncached forward: %s flips near-ties", target.dtype)
        return None
    sampling, processors = sampling_at(cfg, temperature), processors_of(cfg, target)
    counts = check_uncached(target, reference, sampling, cfg.seed, processors)
    return {text.row: count for text, count in zip(reference, counts, strict=True)}


def measure_curve(
    cfg: EvalConfig,
    target: PreTrainedModel,
    drafters: Mapping[str, Any],
    prompts: Sequence[Prompt],
    known: Mapping[tuple[float, str], Quality],
) -> dict[tuple[float, str], Alphas]:
    """alpha of every draft that has one, at the curve's temperatures; those of the run itself are taken over."""
    found = {}
    drafters = {name: one for name, one in drafters.items() if known[cfg.temperatures[0], name].alphas.by_row}
    if not drafters:
        return found
    for temperature in cfg.curve_temperatures:
        if temperature in cfg.temperatures:
            found |= {(temperature, name): known[temperature, name].alphas for name in drafters}
            continue
        texts = write_alone(cfg, target, temperature, prompts, is_first=False)
        alphas = measure_alpha(target, drafters, texts, sampling_at(cfg, temperature))
        found |= {(temperature, name): alphas[name] for name in drafters}
    return found


@torch.inference_mode()
def rounding(model: PreTrainedModel, other: PreTrainedModel, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """{"kl", "tv", "argmax_agreement", "positions"} over all positions of the prompts, at temperature 1: mean
    KL(other || model) in nats, mean total variation, and the share of equal argmaxes."""
    sums, positions = torch.zeros(3, dtype=torch.float64), 0
    for prompt in prompts:
        ids = torch.tensor([list(prompt.ids)], device=model.device)
        ours, theirs = (one(ids, use_cache=False).logits[0].float().log_softmax(-1) for one in (model, other))
        kl = (theirs.exp() * (theirs - ours)).sum(-1)
        each = (kl, 1 - overlap(theirs, ours), greedy_agreement(theirs, ours))
        sums += torch.stack([one.sum() for one in each]).double().cpu()
        positions += ids.shape[1]
    kl, tv, same = (sums / positions).tolist()
    return {"kl": kl, "tv": tv, "argmax_agreement": same, "positions": positions}
