"""Arguments of `generate()` as people give them: each read as what it means, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from decode.common.errors import ConfigError
from decode.common.typed_config import require, texts, whole, wholes
from decode.conversation import Conversation
from decode.drafters.base import Drafter
from decode.drafters.lm import LMDraft
from decode.models.compatibility import refuse_unsupported
from decode.models.quantisation.quantised import refuse_dependent_layers, refuse_dependent_rows


def check_models(model: PreTrainedModel, drafter: Drafter | None, vocab_size: int) -> None:
    """Raise InputError for a target whose passes cannot be made exactly, and ConfigError for what is no drafter of it
    or drops weights at random."""
    refuse_unsupported(model.config, model.config.name_or_path or "")
    refuse_dependent_rows(model.config, model.config.name_or_path or "")
    refuse_dependent_layers(model)
    for name, module in (("the target", model), ("the draft", drafter)):
        drops = isinstance(module, nn.Module) and any(
            one.training and (getattr(one, "attention_dropout", 0) or (isinstance(one, nn.Dropout) and one.p))
            for one in module.modules()
        )
        require(not drops, f"{name} is in train mode and has dropout, so no two passes agree; call its eval() first")
    if drafter is not None and not isinstance(drafter, Drafter):
        kind = f"a {type(drafter).__name__}" if isinstance(drafter, nn.Module) else repr(drafter)
        raise ConfigError(
            f"drafter={kind} is no drafter; get one from decode.load_drafter(it, target=model), or derive your own "
            "from decode.drafters.base.Drafter"
        )
    known = drafter.model.config.get_text_config().vocab_size if isinstance(drafter, LMDraft) else vocab_size
    require(
        known == vocab_size,
        f"the draft knows {known} tokens and the target {vocab_size}: their distributions cannot be compared. Use a "
        "draft with the target's tokenizer and padded vocabulary size",
    )


def seed_of(seed: int | None) -> int:
    """The seed, None being one that is drawn from torch's global generator. Noise counts seeds modulo 2**64, so larger
    ones would repeat the text of smaller ones."""
    if seed is None:
        return int(torch.randint(2**63 - 1, (1,)))
    number = whole(seed, "seed")
    require(-(2**63) <= number < 2**64, f"seed={number} has more than 64 bits; give one from -2**63 to 2**64 - 1")
    return number


def rows_of(rows: Any, num_sequences: int) -> list[int] | None:
    """The indices that key the noise, each once."""
    if rows is None:
        return None
    found = wholes(rows, "rows")
    require(len(found) == num_sequences, f"rows={rows} must name each of {num_sequences} sequences")
    twice = sorted({row for row in found if found.count(row) > 1})
    require(
        not twice,
        f"rows={found} gives several requests the same index ({twice}), so they would share their noise and equal "
        "prompts would get equal texts; give each an index of its own",
    )
    return found


def expanded(prompts: list[list[int]], num_return_sequences: Any, temperature: float) -> list[list[int]]:
    """Every prompt as often as sequences of it are wanted, one after another."""
    count = whole(num_return_sequences, "num_return_sequences", least=1)
    require(
        count == 1 or temperature > 0,
        f"num_return_sequences={count} at temperature 0, where all sequences of a prompt are the same text, as "
        "transformers says too; set a temperature above 0, or num_return_sequences=1",
    )
    return [prompt for prompt in prompts for _ in range(count)]


def conversation_of(given: Any, num_sequences: int, strict: bool) -> Conversation | None:
    """The conversation, of which a call continues one text."""
    require(
        given is None or isinstance(given, Conversation),
        f"conversation={given!r:.80} is of type {type(given).__name__}; give a decode.Conversation()",
    )
    require(
        given is None or num_sequences == 1,
        f"a conversation is one text, and {num_sequences} sequences are asked for; give each text a conversation and a "
        "call of its own",
    )
    require(
        given is None or not strict,
        "strict=True makes every pass alike, and a conversation keeps what passes of other shapes have read; leave one "
        "out",
    )
    return given


def stop_strings_of(model: PreTrainedModel, given: Sequence[str] | None) -> tuple[str, ...]:
    """Those given, None being the model's own."""
    config = model.generation_config
    own = None if config is None else config.stop_strings
    return texts((() if own is None else own) if given is None else given, "stop_strings")


def pad_id_of(model: PreTrainedModel, given: int | None) -> int | None:
    """The one given, None being the model's own."""
    config = model.generation_config
    own = None if config is None else config.pad_token_id
    return own if given is None else whole(given, "pad_token_id")
