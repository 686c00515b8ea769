"""`model.generate(..., custom_generate=speculative)`: transformers' settings, honoured or refused one by one."""

from __future__ import annotations

from collections.abc import Mapping
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
    StoppingCriteriaList,
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

from decode.api import generate
from decode.common.errors import ConfigError
from decode.common.typed_config import require
from decode.config import Rule, SamplingConfig
from decode.drafters.base import Drafter
from decode.sampling.stopping import own_eos_ids

WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)  # Sampling does what they do
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
WITHOUT_EFFECT = ("past_key_values", "use_cache", "logits_to_keep", "cache_position", "output_attentions")
"""What transformers prepares for its own loop, or what changes no token."""


def speculative(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter | None = None,
    verifier: Rule = SamplingConfig.verifier,
    num_draft_tokens: int = SamplingConfig.num_draft_tokens,
    audit: bool = False,
    **model_kwargs: Any,
) -> Tensor:
    """For `model.generate(ids, custom_generate=speculative, drafter=drafter)`: the settings come from `generate`'s own.

    The seed is drawn from torch's global generator, so torch.manual_seed makes it repeatable. Raises ConfigError for
    what speculative decoding cannot honour: beams, criteria other than length and end tokens, processors that follow
    the filters or count columns of a padded batch, other inputs of the model. transformers hands no streamer on to a
    custom method: use `decode.generate(..., streamer=...)`.
    """
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask  # transformers drops one that hides nothing
    _refuse_foreign(generation_config, stopping_criteria)
    _refuse_late_processors(logits_processor)
    _refuse_column_counters(logits_processor, mask)
    _refuse_foreign_inputs(model_kwargs, mask)
    config = generation_config
    samples = bool(config.do_sample)
    ends = own_eos_ids(config, model.config.get_text_config().vocab_size)
    out = generate(
        model,
        drafter,
        input_ids,
        attention_mask=mask,
        max_new_tokens=int(config.max_length or 0) - input_ids.shape[1],
        temperature=float(1.0 if config.temperature is None else config.temperature) if samples else 0.0,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        logits_processor=[one for one in logits_processor if not isinstance(one, WARPERS)],
        eos_token_id=ends,
        pad_token_id=config.pad_token_id,
        stop_strings=(),
        seed=int(torch.randint(2**31, (1,))),
        verifier=verifier,
        num_draft_tokens=num_draft_tokens,
        audit=audit,
    )
    return out.sequences


def _refuse_foreign(config: GenerationConfig, criteria: StoppingCriteriaList) -> None:
    if (config.num_beams or 1) > 1:
        raise ConfigError(
            f"num_beams={config.num_beams}: speculative decoding draws one sequence per row; use num_beams=1"
        )
    require(
        not config.return_dict_in_generate,
        "return_dict_in_generate=True asks for scores and states that a round of several tokens does not keep; leave "
        "it out, or use decode.generate, whose answer has the statistics",
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


def _refuse_column_counters(processors: LogitsProcessorList, mask: Tensor) -> None:
    counting = [type(one).__name__ for one in processors if isinstance(one, COUNT_COLUMNS)]
    require(
        not counting or bool((mask == 1).all()),
        f"logits processors {counting} count columns of the batch, and a row here is padded: {mask.shape[1]} columns "
        f"for {int(mask.sum(1).min())} tokens, so lengths would be off by the padding. Give rows of one length, or "
        "drop min_new_tokens and its like",
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
