"""The public face `generate()`, shaped like transformers'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from decode.arguments import check_models, conversation_of, expanded, pad_id_of, rows_of, seed_of, stop_strings_of
from decode.common.errors import ConfigError
from decode.common.typed_config import flag, require, whole
from decode.conversation import Conversation
from decode.drafters.base import Drafter
from decode.drafters.beside.refusals import check_foresees, check_overlap
from decode.drafters.untrained.config import CHAINS, UNEVEN
from decode.loop import Loop
from decode.models.adapters import unwrapped
from decode.prompts import check_ids, prompts_of
from decode.requests import Endings, Event, Observer, Request
from decode.sampling.allowed_tokens import Allowed, AllowedTokens, Restriction
from decode.sampling.audited import Audited
from decode.sampling.config import SamplingConfig, sampling_config
from decode.sampling.own_settings import RESTING, say_others
from decode.sampling.penalties import asked_processors
from decode.sampling.processors import check_processors
from decode.sampling.stopping import Criteria, StopStrings, eos_ids, own_eos_ids
from decode.sampling.warp import Sampling
from decode.stats import Stats
from decode.trees.tree_plans import parse

Processor = LogitsProcessor | Callable[..., Tensor]
Criterion = StoppingCriteria | Callable[..., Any]


@dataclass(frozen=True)
class Output:
    """What `generate` returns."""

    sequences: Tensor
    """(B, T + new) int64: column T is the first new token, rows right-padded after their end, prompts unchanged; with
    num_return_sequences=n those of the first prompt are the first n rows."""
    lengths: Tensor
    """(B,) int64: tokens of each row, its unpadded prompt included."""
    stats: Stats


def generate(
    model: PreTrainedModel,
    drafter: Drafter | None,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    logits_processor: Processor | Iterable[Processor] | None = None,
    prefix_allowed_tokens_fn: Allowed | None = None,
    stopping_criteria: Criterion | Iterable[Criterion] | None = None,
    eos_token_id: int | Sequence[int] | Tensor | None = None,
    stop_strings: Sequence[str] | None = None,
    pad_token_id: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_return_sequences: int = 1,
    conversation: Conversation | None = None,
    seed: int | None = None,
    rows: list[int] | None = None,
    batch_size: int | None = None,
    streamer: BaseStreamer | None = None,
    observer: Observer | None = None,
    endings: Endings | None = None,
    audit: bool = False,
    **settings: Any,
) -> Output:
    """Continue `input_ids` (B, T), padded left or right where `attention_mask` is 0; `drafter=None` is autoregressive.
    `model` is any transformers causal LM, or a PeftModel, with the adapter that is on.
    Without a mask, pad tokens (`pad_token_id`, None being the model's own) are padding unless they are end tokens too.

    `settings` are the fields of `decode.sampling.config.SamplingConfig`, which says what each means and what it is by
    default: max_new_tokens, temperature, top_k, top_p, min_p; verifier, num_draft_tokens, tree, tree_nodes,
    replacement, adaptive, confidence, overlap, strict, lossy; repetition_penalty, presence_penalty, frequency_penalty,
    logit_bias, banned_words and grammar, which come before `prefix_allowed_tokens_fn`, `logits_processor`, temperature
    and filters.

    With verifier="coupled" the sequences equal those of `drafter=None` with the same seed, for every drafter: exact
    in distribution; equal in fp64; equal in fp32 but for near-ties; bf16 may flip near-ties. temperature=0 is greedy.
    seed=None draws one from torch's global generator, so torch.manual_seed makes it repeatable.
    eos_token_id=None and stop_strings=None are the model's own, () none. `rows` are the sequences' own indices, which
    key the noise: a request's text does not depend on the batch it came in. `batch_size` requests are decoded at once,
    the others take the rows of those that end. `num_return_sequences` of each prompt, one after another, have noise of
    their own. `conversation` (`decode.Conversation`) reads only what is new in a prompt that begins with the text of
    the call before. `endings` (`decode.requests`) is told of each text as it ends, and given hidden states of it.

    `logits_processor` must be functions of each row of ids and scores, `prefix_allowed_tokens_fn` of the sequence's
    number and its ids: they are asked about drafted tokens as well, in any order, so that one which counts its calls
    would make the text depend on the draft. `audit` asks them three times to find those, and checks that no random
    number is read twice. `stopping_criteria` are asked about each token of a row in turn, as in plain decoding, with
    scores None.
    Raises ConfigError and InputError.
    """
    model = unwrapped(model)
    vocab_size, config = model.config.get_text_config().vocab_size, model.generation_config
    check_ids(input_ids, vocab_size)
    check_models(model, drafter, vocab_size)
    asked = sampling_config(settings)
    if drafter is not None:
        check_foresees(drafter.foresees, asked.confidence, "confidence")
        check_overlap(drafter.family, asked.overlap, "overlap")
        require(not (asked.strict and drafter.most_passengers), f"strict=True: {UNEVEN}")
        require(asked.is_chain or drafter.drafts_trees, f"tree={asked.tree}: {CHAINS}")
    ends, own_ends = eos_ids(eos_token_id, config, vocab_size), own_eos_ids(config, vocab_size)
    pad = pad_id_of(model, pad_token_id)
    # where () says that no token ends a row, the model's own end tokens still tell padding from text
    prompts = prompts_of(input_ids, attention_mask, pad, ends or own_ends)
    prompts = expanded(prompts, num_return_sequences, asked.temperature)
    given = check_processors([*_allowed(prefix_allowed_tokens_fn), *_listed(logits_processor)])
    processors = [*asked_processors(vocab_size, tokenizer, asked, ends or own_ends), *given]
    say_others(config, _used(asked, given), model.name_or_path or "the model", {one: f"{one}={{}}" for one in RESTING})
    request = Request(
        prompts=prompts,
        sampling=Sampling(asked.temperature, asked.top_k, asked.top_p, asked.min_p),
        batch_size=None if batch_size is None else whole(batch_size, "batch_size", least=1),
        seed=seed_of(seed),
        rows=rows_of(rows, len(prompts)),
        eos_ids=frozenset(ends),
        processors=_processor_list(processors, flag(audit, "audit")),
        stop=StopStrings.of(stop_strings_of(model, stop_strings), tokenizer),
        criteria=Criteria.of(stopping_criteria),
        conversation=conversation_of(conversation, len(prompts), asked.strict),
        endings=endings,
        audit=audit,
        shape=parse(asked.tree, asked.num_draft_tokens, asked.tree_nodes),
        max_new_tokens=asked.max_new_tokens,
        verifier=asked.verifier,
        replacement=asked.replacement,
        adaptive=asked.adaptive,
        confidence=asked.confidence,
        strict=asked.strict,
        overlap=asked.overlap,
    )
    input_ids = input_ids.repeat_interleave(len(prompts) // len(input_ids), 0)
    dead_ends = [_dead_ends(one, prompts) for one in processors if isinstance(one, Restriction)]
    observers = [*dead_ends, *([] if observer is None else [observer]), *_streaming(streamer, input_ids)]
    tokens, stats = Loop(model, drafter, request).run(_all_of(observers))
    if streamer is not None:
        streamer.end()
    filler = next(one for one in (pad, *ends, 0) if one is not None)
    return _output(input_ids, request.prompts, tokens, stats, filler)


def _used(asked: SamplingConfig, processors: Iterable[Any]) -> dict[str, float]:
    """The settings that a model may ask for too; transformers gives a penalty as a processor of its own."""
    penalties = [one.penalty for one in processors if isinstance(one, RepetitionPenaltyLogitsProcessor)]
    used = {name: getattr(asked, name) for name in RESTING}
    return used | {"repetition_penalty": penalties[-1]} if penalties else used


def _processor_list(processors: list[Any], audit: bool) -> LogitsProcessorList | None:
    found = list(map(Audited, processors)) if audit else processors
    return LogitsProcessorList(found) if found else None


def _listed(processors: Any) -> list[Any]:
    return [] if processors is None else list(processors) if isinstance(processors, Iterable) else [processors]


def _allowed(given: Any) -> list[AllowedTokens]:
    require(
        given is None or callable(given),
        f"prefix_allowed_tokens_fn={given!r} cannot be called; give a function of a sequence's number and its tokens",
    )
    return [] if given is None else [AllowedTokens(given)]


def _dead_ends(restriction: Restriction, prompts: list[list[int]]) -> Observer:
    texts = [list(prompt) for prompt in prompts]

    def watch(event: Event) -> None:
        for token in event.tokens:
            restriction.refuse_dead_end(event.row, texts[event.row])
            texts[event.row].append(token)

    return watch


def _streaming(streamer: BaseStreamer | None, input_ids: Tensor) -> list[Observer]:
    if streamer is None:
        return []
    if input_ids.shape[0] > 1:
        raise ConfigError(
            f"a streamer follows one sequence, but the batch has {input_ids.shape[0]}; stream one at a time"
        )
    streamer.put(input_ids.cpu())

    def put(event: Event) -> None:
        streamer.put(torch.tensor(event.tokens))

    return [put]


def _all_of(observers: list[Observer]) -> Observer | None:
    def tell(event: Event) -> None:
        for observer in observers:
            observer(event)

    return tell if observers else None


def _output(input_ids: Tensor, prompts: list[list[int]], tokens: list[list[int]], stats: Stats, pad: int) -> Output:
    new = [row[len(prompt) :] for row, prompt in zip(tokens, prompts, strict=True)]
    grown = torch.full((len(new), max(map(len, new))), pad, dtype=torch.long)
    for slot, row in enumerate(new):
        grown[slot, : len(row)] = torch.tensor(row)
    sequences = torch.cat([input_ids, grown.to(input_ids.device)], dim=1)
    return Output(sequences, torch.tensor([len(row) for row in tokens]), stats)
