"""Where a completion ends: at an end-of-text token, or at the token that completes a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.house.errors import ConfigError


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


def eos_ids(model: PreTrainedModel, given: int | Sequence[int] | None = None) -> frozenset[int]:
    """The end-of-text tokens: those given, None being the model's own."""
    if given is None:
        config = model.generation_config
        given = config.eos_token_id if config is not None else None
    if given is None:
        return frozenset()
    return frozenset([given] if isinstance(given, int) else given)
