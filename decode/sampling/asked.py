"""The processors that settings ask for: what changes a token's score by the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import LogitsProcessor, PreTrainedTokenizerBase

from decode.sampling.config import SamplingConfig
from decode.sampling.grammar import grammar_of
from decode.sampling.penalties import penalties


def asked_processors(
    vocab_size: int, tokenizer: PreTrainedTokenizerBase | None, settings: SamplingConfig, ends: Sequence[int]
) -> list[LogitsProcessor]:
    """Penalties, biases and bans, then the grammar; none where all are at rest. `ends` are the tokens that end a text.

    Raises ConfigError as `penalties` and `grammar_of` do.
    """
    return [*penalties(vocab_size, tokenizer, settings), *grammar_of(settings.grammar, tokenizer, vocab_size, [*ends])]
