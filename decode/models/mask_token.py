"""The token whose row of the target's embedding stands where tokens are to be drafted (blocks, P-EAGLE)."""

from __future__ import annotations

import torch

from decode.common.errors import InputError
from decode.common.typed_config import require
from decode.models.compatibility import load_tokenizer
from decode.models.describe import ModelDescription
from decode.models.output_head import Ends


def usual_mask(target: ModelDescription) -> int | None:
    """An unused row, else a token that begins or fills up texts, and that a target is never answered with, so that no
    round begins with it; None where there is none."""
    text = target.config.get_text_config()
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    candidates = (unused_row(target), text.bos_token_id, text.pad_token_id)
    return next((one for one in candidates if one is not None and one not in ends), None)


def unused_row(target: ModelDescription) -> int | None:
    """The first row of the target's embedding behind all tokens of its tokenizer; None where there is none."""
    try:
        tokens = load_tokenizer(target.source).get_vocab()
    except InputError:
        return None
    first = max(tokens.values(), default=-1) + 1  # ids may have gaps, so that the number of tokens is one of them
    return first if first < target.vocab_size else None


def check_row(token: int | None, vocab_size: int) -> None:
    """Raise ConfigError where the embedding has no such row."""
    require(
        token is None or 0 <= token < vocab_size,
        f"mask_token={token}, and the target's embedding, of which a row is to be the mask, has the rows 0 to "
        f"{vocab_size - 1}. Name a token of them that no text holds, or none: the mask is then learned",
    )


def is_zero(token: int | None, ends: Ends) -> bool:
    """Whether there is such a row, and nothing in it."""
    return token is not None and not ends.embed(torch.tensor([token])).any()
