"""The public faces: `generate()`, shaped like transformers', and `model.generate(..., custom_generate=speculative)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from decode.auto_tree import resolve
from decode.config import check_temperature
from decode.drafters.base import Drafter
from decode.house.config import require
from decode.house.errors import ConfigError
from decode.loop import Event, Loop, Observer, Request
from decode.penalties import penalties
from decode.sampling import Sampling
from decode.shapes import CALIBRATED, Shape, parse
from decode.stats import Stats
from decode.stopping import StopStrings, eos_ids
from decode.verify import VERIFIERS

WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)  # Sampling does what they do


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
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    logits_processor: Iterable[LogitsProcessor] | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    stop_strings: Sequence[str] | None = None,
    seed: int = 0,
    verifier: str = "coupled",
    num_draft_tokens: int = 5,
    tree: str | Shape | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    rows: list[int] | None = None,
    observer: Observer | None = None,
    tree_nodes: int = 16,
    replacement: bool = False,
    lossy: bool = False,
    batch_size: int | None = None,
    strict: bool = False,
    adaptive: bool = False,
    confidence: bool = False,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int | str, float] | None = None,
    banned_words: Sequence[int | str] = (),
) -> Output:
    """Continue `input_ids` (B, T), padded left or right where `attention_mask` is 0; `drafter=None` is autoregressive.

    With verifier="coupled" the sequences equal those of `drafter=None` with the same seed, for every drafter: exact
    in law; equal in fp64; equal in fp32 but for near-ties; bf16 may flip near-ties. temperature=0 is greedy.
    eos_token_id=None and stop_strings=None are the model's own, () none. `rows` are the requests' own indices, which
    key the noise: a request's text does not depend on the batch it came in. `batch_size` requests are decoded at once,
    the others take the rows of those that end. `strict` gives every target pass the same rows, so that bf16 output too
    equals that of drafter=None (chains). `tree` (`shapes.parse`) is chain, branching factors such as 3x2x1, or dynamic
    with `tree_nodes` draft nodes, or sequoia or auto, which measure pair and machine at the first call
    (`auto_tree.resolve`); `replacement` lets rejection draw siblings alike.
    `adaptive` drafts what pays, at most that, and with `confidence` looks at the draft's inside a round, too
    (`decode.budget`). Penalties, biases by token id or text, and banned words (`decode.penalties`) come before
    `logits_processor`, temperature and filters.
    `lossy` permits verifier="typical", which changes the target's law; stats.distance is the measured TV distance.
    Raises ConfigError and InputError.
    """
    if verifier not in VERIFIERS:
        raise ConfigError(f"verifier={verifier!r} is not known; choose one of {', '.join(VERIFIERS)}")
    require(max_new_tokens >= 1, f"max_new_tokens={max_new_tokens}; ask for at least 1 token")
    check_temperature(temperature, "temperature=")
    require(top_k >= 0, f"top_k={top_k} is negative; use 0 to keep every token")
    require(0 < top_p <= 1, f"top_p={top_p} is outside (0, 1]; use 1 to keep every token")
    require(0 <= min_p <= 1, f"min_p={min_p} is outside [0, 1]; use 0 to keep every token")
    require(batch_size is None or batch_size >= 1, f"batch_size={batch_size}; decode at least 1 request at a time")
    require(rows is None or len(rows) == len(input_ids), f"rows={rows} must name each of {len(input_ids)} requests")
    vocab_size = model.config.get_text_config().vocab_size
    _check_ids(input_ids, vocab_size)
    _check_models(model, drafter)
    asked = (repetition_penalty, presence_penalty, frequency_penalty, logit_bias, banned_words)
    processors = [*penalties(vocab_size, tokenizer, *asked), *(logits_processor or ())]
    request = Request(
        prompts=_unpadded(input_ids, attention_mask),
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature, top_k, top_p, min_p),
        verifier=verifier,
        shape=parse(None if tree in CALIBRATED else tree, num_draft_tokens, tree_nodes),
        replacement=replacement,
        lossy=lossy,
        batch_size=batch_size,
        adaptive=adaptive,
        confidence=confidence,
        strict=strict,
        seed=seed,
        rows=rows,
        eos_ids=eos_ids(model, eos_token_id),
        processors=LogitsProcessorList(processors) if processors else None,
        stop=StopStrings.of(_stop_strings(model, stop_strings), tokenizer),
    )
    if tree in CALIBRATED:
        request = replace(request, shape=resolve(str(tree), tree_nodes, model, drafter, request))
    observers = [one for one in (observer, _streaming(streamer, input_ids)) if one is not None]
    tokens, stats = Loop(model, drafter, request).run(_all_of(observers))
    if streamer is not None:
        streamer.end()
    return _output(input_ids, request.prompts, tokens, stats, _pad_id(model))


def speculative(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter | None = None,
    verifier: str = "coupled",
    num_draft_tokens: int = 5,
    **model_kwargs: Any,
) -> Tensor:
    """For `model.generate(ids, custom_generate=speculative, drafter=drafter)`: the settings come from `generate`'s own.

    The seed is drawn from torch's global generator, so torch.manual_seed makes it repeatable. Raises ConfigError for
    what speculative decoding cannot honour: beams, criteria other than length and end tokens, processors that follow
    the filters. transformers hands no streamer on to a custom method: use `decode.generate(..., streamer=...)`.
    """
    _refuse_foreign(generation_config, stopping_criteria)
    _refuse_late_processors(logits_processor)
    config = generation_config
    samples = bool(config.do_sample)
    history = [one for one in logits_processor if not isinstance(one, WARPERS)]
    eos = config.eos_token_id
    out = generate(
        model,
        drafter,
        input_ids,
        attention_mask=model_kwargs.get("attention_mask"),
        max_new_tokens=int(config.max_length or 0) - input_ids.shape[1],
        temperature=float(1.0 if config.temperature is None else config.temperature) if samples else 0.0,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        logits_processor=history or None,
        eos_token_id=() if eos is None else eos,
        stop_strings=(),
        seed=int(torch.randint(2**31, (1,))),
        verifier=verifier,
        num_draft_tokens=num_draft_tokens,
    )
    return out.sequences


def _check_ids(input_ids: Tensor, vocab_size: int) -> None:
    shape = tuple(input_ids.shape)
    require(len(shape) == 2 and shape[0] > 0, f"input_ids has shape {shape}; give (requests, tokens), at least one row")
    require(not input_ids.is_floating_point(), f"input_ids is {input_ids.dtype}; token ids are integers")
    if not shape[1]:
        return  # a prompt without tokens has a message of its own
    least, most = int(input_ids.min()), int(input_ids.max())
    require(
        least >= 0 and most < vocab_size,
        f"input_ids holds ids from {least} to {most}, and the model knows 0 to {vocab_size - 1}; encode the prompt "
        "with the model's own tokenizer",
    )


def _check_models(model: PreTrainedModel, drafter: Drafter | None) -> None:
    for name, module in (("the target", model), ("the draft", drafter)):
        drops = isinstance(module, nn.Module) and any(
            one.training and (getattr(one, "attention_dropout", 0) or (isinstance(one, nn.Dropout) and one.p))
            for one in module.modules()
        )
        require(not drops, f"{name} is in train mode and has dropout, so no two passes agree; call its eval() first")
    if drafter is not None and not hasattr(drafter, "propose"):
        raise ConfigError(f"drafter={drafter!r} is no drafter; get one from decode.load_drafter(path, target=model)")


def _refuse_foreign(config: GenerationConfig, criteria: StoppingCriteriaList) -> None:
    if (config.num_beams or 1) > 1:
        raise ConfigError(
            f"num_beams={config.num_beams}: speculative decoding draws one sequence per row; use num_beams=1"
        )
    foreign = [type(one).__name__ for one in criteria if not isinstance(one, MaxLengthCriteria | EosTokenCriteria)]
    if foreign:
        raise ConfigError(
            f"stopping criteria {foreign} are not applied inside a round of several tokens; use max_new_tokens and "
            "eos_token_id here, or decode.generate(..., stop_strings=..., tokenizer=...)"
        )


def _refuse_late_processors(processors: LogitsProcessorList) -> None:
    """Temperature and filters come last here, so what transformers would apply after them has no place."""
    filters = [at for at, one in enumerate(processors) if isinstance(one, WARPERS)]
    late = [type(one).__name__ for one in processors[filters[0] :] if not isinstance(one, WARPERS)] if filters else []
    kinds = [type(processors[at]) for at in filters]
    if late or len(set(kinds)) < len(kinds):
        names = late or [kind.__name__ for kind in kinds]
        raise ConfigError(
            f"logits processors {names} would act after, or twice beside, temperature, top_k, top_p and min_p, which "
            "are applied once and last here; drop typical_p and its like, and set filters as arguments of generate"
        )


def _unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    if attention_mask is None:
        return input_ids.tolist()
    if attention_mask.shape != input_ids.shape:
        raise ConfigError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}; they "
            "must be equal"
        )
    return [ids[kept].tolist() for ids, kept in zip(input_ids, attention_mask.bool(), strict=True)]


def _stop_strings(model: PreTrainedModel, given: Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        config = model.generation_config
        given = (config.stop_strings if config is not None else None) or ()
    return (given,) if isinstance(given, str) else tuple(given)


def _pad_id(model: PreTrainedModel) -> int:
    config = model.generation_config
    candidates = [config.pad_token_id, config.eos_token_id] if config is not None else []
    return next((one for one in candidates if isinstance(one, int)), 0)


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
