"""`model.generate(..., custom_generate=speculative)`: transformers' settings, honoured or refused one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.logits_process import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from decode.api import generate
from decode.common.errors import ConfigError
from decode.common.typed_config import require, texts
from decode.drafters.base import Drafter
from decode.models.compatibility import CACHE_ARGUMENTS
from decode.sampling.config import Rule, SamplingConfig

WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
"""What Sampling does in their place -> the setting that transformers makes them of."""
COUNT_COLUMNS = (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)
"""They are told of columns of the batch, padding included; processors are shown rows without it here."""
HEEDED = ("attention_mask", "position_ids")
WITHOUT_EFFECT = (*CACHE_ARGUMENTS, "use_cache", "logits_to_keep", "cache_position", "output_attentions")
"""What transformers prepares for its own loop, or what changes no token."""
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def speculative(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter | None = None,
    verifier: Rule = SamplingConfig.verifier,
    num_draft_tokens: int = SamplingConfig.num_draft_tokens,
    seed: int | None = None,
    stop_strings: Sequence[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: BaseStreamer | None = None,
    audit: bool = False,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """For `model.generate(ids, custom_generate=speculative, drafter=drafter)`: the settings come from `generate`'s own.

    Without a seed one is drawn from torch's global generator. transformers keeps `tokenizer` and `streamer` back from a
    custom method, without a word: bind them, `custom_generate=partial(speculative, streamer=streamer)`, or call
    `decode.generate`. Stopping criteria are asked about each row without its padding, token by token, with scores None;
    return_dict_in_generate=True returns the sequences alone.

    Raises ConfigError for what speculative decoding cannot honour: beams, scores and states, criteria that look at
    scores, processors that follow the filters or count columns of a padded batch, other inputs of the model.
    """
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask  # transformers drops one that hides nothing
    _refuse_foreign(generation_config)
    _refuse_late_processors(logits_processor, generation_config)
    _refuse_column_counters(logits_processor, mask)
    _refuse_foreign_inputs(model_kwargs, mask)
    config = generation_config
    samples = bool(config.do_sample)
    length, ends, criteria = _ends(stopping_criteria, model.config.get_text_config().vocab_size)
    out = generate(
        model,
        drafter,
        input_ids,
        attention_mask=mask,
        max_new_tokens=length - input_ids.shape[1],
        temperature=float(1.0 if config.temperature is None else config.temperature) if samples else 0.0,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        logits_processor=[one for one in logits_processor if type(one) not in WARPERS],
        eos_token_id=ends,
        pad_token_id=config.pad_token_id,
        stopping_criteria=[*criteria, *_at_stop_strings(stop_strings, tokenizer)],
        stop_strings=(),
        seed=seed,
        verifier=verifier,
        num_draft_tokens=num_draft_tokens,
        streamer=streamer,
        audit=audit,
    )
    named = bool(config.return_dict_in_generate)
    return GenerateDecoderOnlyOutput(sequences=out.sequences) if named else out.sequences  # type: ignore[arg-type]


def _refuse_foreign(config: GenerationConfig) -> None:
    if (config.num_beams or 1) > 1:
        raise ConfigError(
            f"num_beams={config.num_beams}: speculative decoding draws one sequence per row; use num_beams=1"
        )
    other = [name for name in ("penalty_alpha", "dola_layers") if getattr(config, name, None)]
    require(
        not other,
        f"{' and '.join(other)} asks for another way to decode (contrastive search, DoLa) than drawing from the "
        "target's distribution, which is all that drafts speed up; leave it out",
    )
    asked = [name for name in OUTPUTS if getattr(config, name, None)]
    require(
        not asked,
        f"{' and '.join(asked)}=True asks for tensors of every token, which a round of several tokens does not keep; "
        "leave it out, and take them from model(sequences), one pass over the finished text",
    )


def _ends(criteria: StoppingCriteriaList, vocab_size: int) -> tuple[int, list[int], list[StoppingCriteria]]:
    """(columns at which a text ends, end tokens, the other criteria); one of the caller's own replaces that of its type
    which transformers made of the settings."""
    length = min((int(one.max_length) for one in criteria if type(one) is MaxLengthCriteria), default=0)
    ends = [token for one in criteria if type(one) is EosTokenCriteria for token in one.eos_token_id.flatten().tolist()]
    others = [one for one in criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)]
    return length, [token for token in ends if 0 <= token < vocab_size], others


def _at_stop_strings(strings: Sequence[str] | None, tokenizer: Any) -> list[StoppingCriteria]:
    if strings is None:
        return []
    require(
        tokenizer is not None,
        f"stop_strings={strings!r} need a tokenizer: transformers keeps tokenizer= back. Give "
        "custom_generate=partial(speculative, tokenizer=tokenizer), or stop by "
        "stopping_criteria=[StopStringCriteria(...)]",
    )
    return [StopStringCriteria(tokenizer, list(texts(strings, "stop_strings")))]


def _refuse_late_processors(processors: LogitsProcessorList, config: GenerationConfig) -> None:
    """Temperature and filters come last here, by their settings, so what transformers would apply after them, or a
    filter of the caller's own, has no place."""
    filters = [at for at, one in enumerate(processors) if _is_set(one, config)]
    foreign = [one for one in processors if isinstance(one, tuple(WARPERS)) and not _is_set(one, config)]
    late = [one for one in processors[filters[0] :] if type(one) not in WARPERS] if filters else []
    kinds = [type(processors[at]) for at in filters]
    if foreign or late or len(set(kinds)) < len(kinds):
        names = [type(one).__name__ for one in foreign or late] or [kind.__name__ for kind in kinds]
        raise ConfigError(
            f"logits processors {names} would act after, or twice beside, temperature, top_k, top_p and min_p, which "
            "come last here; drop typical_p and its like, and set filters as arguments of generate"
        )


def _is_set(processor: Any, config: GenerationConfig) -> bool:
    """Whether transformers made it of a setting, which is honoured."""
    name = WARPERS.get(type(processor))
    return name is not None and getattr(processor, name) == getattr(config, name, None)


def _refuse_column_counters(processors: LogitsProcessorList, mask: Tensor) -> None:
    counting = [type(one).__name__ for one in processors if isinstance(one, COUNT_COLUMNS)]
    require(
        not counting or bool((mask == 1).all()),
        f"logits processors {counting} count columns of the batch, and a row here is padded: {mask.shape[1]} columns "
        f"for {int(mask.sum(1).min())} tokens. Give rows of one length, or drop min_new_tokens and its like",
    )


def _refuse_foreign_inputs(model_kwargs: Mapping[str, Any], mask: Tensor) -> None:
    known = (*HEEDED, *WITHOUT_EFFECT)
    foreign = sorted(name for name, value in model_kwargs.items() if name not in known and value is not None)
    require(
        not foreign,
        f"the model's inputs {foreign} are not handed to it by speculative decoding, so the text would be another "
        "one; leave them out",
    )
    given = model_kwargs.get("position_ids")
    usual = mask.long().cumsum(-1) - 1
    same = given is None or (given.shape == usual.shape and bool(((given == usual) | (mask == 0)).all()))
    require(
        same,
        "position_ids differ from the tokens' numbers in their rows, which is where speculative decoding puts them; "
        "leave them out",
    )
