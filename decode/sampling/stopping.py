"""Where a completion ends: at an end-of-text token, at the token that completes a stop string, or where a criterion of
the caller says so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import ConfidenceCriteria

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
        start = max(prompt_length, len(tokens) - longest - 1)  # a token is at least one byte
        before = tokens[max(0, start - 1) : start]  # of the first token that they decode some tokenizers drop the blank
        text = self.tokenizer.decode(before + tokens[start:])[len(self.tokenizer.decode(before)) :]
        return any(string in text for string in self.strings)


@dataclass(frozen=True)
class Criteria:
    """transformers' stopping criteria, asked about a row after each of its tokens as plain decoding asks them: ids
    (1, n) without padding, prompt included, and None for scores, which a round of several tokens does not keep."""

    criteria: tuple[Any, ...]

    @classmethod
    def of(cls, given: Any) -> Criteria | None:
        """None where there are none; raises ConfigError for what is no criterion, or looks at scores."""
        found = () if given is None else tuple(given) if isinstance(given, Iterable) else (given,)
        for one in found:
            require(
                callable(one), f"stopping_criteria holds {one!r}, which cannot be called; give transformers' criteria"
            )
            require(
                not isinstance(one, ConfidenceCriteria),
                "stopping criterion ConfidenceCriteria looks at scores, which a round of several tokens does not keep; "
                "leave it out, or decode with transformers",
            )
        return cls(found) if found else None

    def end(self, ids: Tensor) -> bool:
        """Whether one of them ends the row whose tokens are ids (1, n)."""
        return any(_answer(one, one(ids, None)) for one in self.criteria)


def _answer(criterion: Any, done: Any) -> bool:
    is_one = isinstance(done, bool) or (isinstance(done, Tensor) and done.dtype == torch.bool and done.numel() == 1)
    name = getattr(criterion, "__name__", type(criterion).__name__)
    shown = (tuple(done.shape), done.dtype) if isinstance(done, Tensor) else repr(done)
    require(
        is_one,
        f"stopping criterion {name} was asked about one row and answered {shown}; it must return True or False, or a "
        "bool tensor of shape (1,)",
    )
    return bool(done)


def own_eos_ids(config: GenerationConfig | PretrainedConfig | None, vocab_size: int) -> list[int]:
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
        f"{whose}={named} names tokens outside the vocabulary, which is 0 to {vocab_size - 1}. Give the tokens that "
        "end a text in eos_token_id=, or in the model's generation_config.json, or () for none",
    )
    return known


def _named(config: GenerationConfig | PretrainedConfig | None) -> list[int]:
    own = getattr(config, "eos_token_id", None)
    return [] if own is None else wholes(own, "generation_config.eos_token_id")
