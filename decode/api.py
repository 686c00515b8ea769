"""The public face `generate()`, shaped like transformers'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from decode.autotune.choose_tree import resolve
from decode.common.errors import ConfigError
from decode.common.typed_config import flag, require, texts, whole, wholes
from decode.config import sampling_config
from decode.drafters.base import Drafter
from decode.drafters.lm import LMDraft
from decode.loop import Event, Loop, Observer, Request
from decode.models.compatibility import refuse_unsupported
from decode.requests import check_ids, prompts_of
from decode.sampling.penalties import penalties
from decode.sampling.processors import Audited, check_processors
from decode.sampling.stopping import StopStrings, eos_ids, own_eos_ids
from decode.sampling.warp import Sampling
from decode.stats import Stats
from decode.trees.tree_plans import parse

Processor = LogitsProcessor | Callable[..., Tensor]


@dataclass(frozen=True)
class Output:
    """What `generate` returns."""

    sequences: Tensor
    """(B, T + new) int64: column T is the first new token, rows right-padded after their end, prompts unchanged."""
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
    eos_token_id: int | Sequence[int] | Tensor | None = None,
    stop_strings: Sequence[str] | None = None,
    pad_token_id: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
    rows: list[int] | None = None,
    batch_size: int | None = None,
    streamer: BaseStreamer | None = None,
    observer: Observer | None = None,
    audit: bool = False,
    **settings: Any,
) -> Output:
    """Continue `input_ids` (B, T), padded left or right where `attention_mask` is 0; `drafter=None` is autoregressive.
    Without a mask, pad tokens (`pad_token_id`, None being the model's own) are padding unless they are end tokens too.

    `settings` are the fields of `decode.config.SamplingConfig`, which says what each means and what it is by default:
    max_new_tokens, temperature, top_k, top_p, min_p; verifier, num_draft_tokens, tree, tree_nodes, replacement,
    adaptive, confidence, strict, lossy; repetition_penalty, presence_penalty, frequency_penalty, logit_bias and
    banned_words, which come before `logits_processor`, temperature and filters.

    With verifier="coupled" the sequences equal those of `drafter=None` with the same seed, for every drafter: exact
    in distribution; equal in fp64; equal in fp32 but for near-ties; bf16 may flip near-ties. temperature=0 is greedy.
    eos_token_id=None and stop_strings=None are the model's own, () none. `rows` are the requests' own indices, which
    key the noise: a request's text does not depend on the batch it came in. `batch_size` requests are decoded at once,
    the others take the rows of those that end.
    `logits_processor` must be functions of each row of ids and scores: they are asked about drafted tokens as well, in
    any order, so that one which counts its calls would make the text depend on the draft. `audit` asks them three times
    to find those, and checks that no random number is read twice.
    Raises ConfigError and InputError.
    """
    vocab_size, config = model.config.get_text_config().vocab_size, model.generation_config
    check_ids(input_ids, vocab_size)
    _check_models(model, drafter, vocab_size)
    asked = sampling_config(settings)
    ends = eos_ids(eos_token_id, config, vocab_size)
    pad = _pad_id(model, pad_token_id)
    processors = check_processors(logits_processor, len(input_ids))
    processors = [*penalties(vocab_size, tokenizer, asked), *processors]
    processors = list(map(Audited, processors)) if flag(audit, "audit") else processors
    request = Request(
        # where () says that no token ends a row, the model's own end tokens still tell padding from text
        prompts=prompts_of(input_ids, attention_mask, pad, ends or own_eos_ids(config, vocab_size)),
        sampling=Sampling(asked.temperature, asked.top_k, asked.top_p, asked.min_p),
        batch_size=None if batch_size is None else whole(batch_size, "batch_size", least=1),
        seed=_seed(seed),
        rows=None if rows is None else _rows(rows, len(input_ids)),
        eos_ids=frozenset(ends),
        processors=LogitsProcessorList(processors) if processors else None,
        stop=StopStrings.of(_stop_strings(model, stop_strings), tokenizer),
        audit=audit,
        max_new_tokens=asked.max_new_tokens,
        verifier=asked.verifier,
        replacement=asked.replacement,
        adaptive=asked.adaptive,
        confidence=asked.confidence,
        strict=asked.strict,
    )
    if asked.tree == "sequoia":
        shape = resolve(asked.tree_nodes, model, drafter, request)
    else:
        shape = parse(asked.tree, asked.num_draft_tokens, asked.tree_nodes)
    request = replace(request, shape=shape)
    observers = [one for one in (observer, _streaming(streamer, input_ids)) if one is not None]
    tokens, stats = Loop(model, drafter, request).run(_all_of(observers))
    if streamer is not None:
        streamer.end()
    filler = next(one for one in (pad, *ends, 0) if one is not None)
    return _output(input_ids, request.prompts, tokens, stats, filler)


def _check_models(model: PreTrainedModel, drafter: Drafter | None, vocab_size: int) -> None:
    refuse_unsupported(model.config, model.config.name_or_path or "")
    for name, module in (("the target", model), ("the draft", drafter)):
        drops = isinstance(module, nn.Module) and any(
            one.training and (getattr(one, "attention_dropout", 0) or (isinstance(one, nn.Dropout) and one.p))
            for one in module.modules()
        )
        require(not drops, f"{name} is in train mode and has dropout, so no two passes agree; call its eval() first")
    if drafter is not None and not hasattr(drafter, "propose"):
        raise ConfigError(f"drafter={drafter!r} is no drafter; get one from decode.load_drafter(path, target=model)")
    known = drafter.model.config.get_text_config().vocab_size if isinstance(drafter, LMDraft) else vocab_size
    require(
        known == vocab_size,
        f"the draft knows {known} tokens and the target {vocab_size}: their distributions cannot be compared. Use a "
        "draft with the target's tokenizer and padded vocabulary size",
    )


def _seed(seed: int) -> int:
    """Noise counts seeds modulo 2**64, so larger ones would repeat the text of smaller ones."""
    number = whole(seed, "seed")
    require(-(2**63) <= number < 2**64, f"seed={number} has more than 64 bits; give one from -2**63 to 2**64 - 1")
    return number


def _rows(rows: Any, num_requests: int) -> list[int]:
    found = wholes(rows, "rows")
    require(len(found) == num_requests, f"rows={rows} must name each of {num_requests} requests")
    twice = sorted({row for row in found if found.count(row) > 1})
    require(
        not twice,
        f"rows={found} gives several requests the same index ({twice}), so they would share their noise and equal "
        "prompts would get equal texts; give each an index of its own",
    )
    return found


def _stop_strings(model: PreTrainedModel, given: Sequence[str] | None) -> tuple[str, ...]:
    config = model.generation_config
    own = None if config is None else config.stop_strings
    return texts((() if own is None else own) if given is None else given, "stop_strings")


def _pad_id(model: PreTrainedModel, given: int | None) -> int | None:
    config = model.generation_config
    own = None if config is None else config.pad_token_id
    return own if given is None else whole(given, "pad_token_id")


def _streaming(streamer: BaseStreamer | None, input_ids: Tensor) -> Observer | None:
    if streamer is None:
        return None
    if input_ids.shape[0] > 1:
        raise ConfigError(
            f"a streamer follows one sequence, but the batch has {input_ids.shape[0]}; stream one at a time"
        )
    streamer.put(input_ids.cpu())

    def put(event: Event) -> None:
        streamer.put(torch.tensor(event.tokens))

    return put


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
