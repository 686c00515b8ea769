"""Stop strings: a completion ends with the token that completes one of them."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

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
