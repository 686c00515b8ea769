"""Where a completion ends: at an end-of-text token, or at the token that completes a stop string."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from decode.common.errors import ConfigError
from decode.common.typed_config import require, wholes


@dataclass(frozen=True)
class StopStrings:
    """Texts that end a row. A token may carry text past the end of a stop string; it is kept whole, as transformers
    does."""

    tokenizer: PreTrainedTokenizerBase
    strings: tuple[str, ...]

    @classmethod
    def of(cls, strings: tuple[str, ...], tokenizer: PreTrainedTokenizerBase | None) -> StopStrings | None:
        """None where there is nothing to stop at; raises ConfigError without a tokenizer to read tokens with."""
        if not strings:
            return None
        if tokenizer is None:
            raise ConfigError(f"stop_strings={strings} are looked for in text, which needs tokenizer=; none was given")
        return cls(tokenizer, strings)

    def ends(self, tokens: list[int], prompt_length: int) -> bool:
        """Whether the newest token completed a stop string within what was generated."""
        longest = max(len(string.encode()) for string in self.strings)
        tail = tokens[max(prompt_length, len(tokens) - longest - 1) :]  # a token is at least one byte
        text = self.tokenizer.decode(tail)
        return any(string in text for string in self.strings)


def own_eos_ids(config: GenerationConfig | None, vocab_size: int) -> list[int]:
    """A model's own end-of-text tokens. Some of a model whose vocabulary was cut may lie outside it; they never come,
    and are left out."""
    return [token for token in _named(config) if 0 <= token < vocab_size]


def eos_ids(given: Any, config: GenerationConfig | None, vocab_size: int) -> list[int]:
    """The end-of-text tokens: those given, None being the model's own. Raises ConfigError for a given one that is no
    token of the model, and where of its own ones none is."""
    named = _named(config) if given is None else wholes(given, "eos_token_id")
    known = [token for token in named if 0 <= token < vocab_size]
    whose = "the model's own generation_config.eos_token_id" if given is None else "eos_token_id"
    require(
        known == named or (given is None and bool(known)),
        f"{whose}={named} names tokens outside the vocabulary, which is 0 to {vocab_size - 1}: no text would ever end "
        "there. Give the tokens that end a text in eos_token_id=, or in the model's generation_config.json, or () for "
        "none",
    )
    return known


def _named(config: GenerationConfig | None) -> list[int]:
    own = None if config is None else config.eos_token_id
    return [] if own is None else wholes(own, "generation_config.eos_token_id")
