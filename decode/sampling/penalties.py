"""Penalties, biases and bans as settings: transformers' own processors where there are such, and OpenAI's penalties.

Applied in transformers' order, before temperature and filters: bias, repetition, presence and frequency, bans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from decode.common.errors import ConfigError
from decode.common.typed_config import whole
from decode.sampling.config import SamplingConfig
from decode.sampling.grammar import grammar_of


class GeneratedTokenPenalty(LogitsProcessor):
    """score - frequency * count - presence * (count > 0), the count being that of the token in what was generated.

    As OpenAI and vLLM define them: the prompt does not count (for the repetition penalty it does).
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor, prompt_lengths: Tensor) -> Tensor:  # type: ignore[override]
        """ids (n, length), scores (n, V), prompt_lengths (n,) -> (n, V)."""
        generated = torch.arange(input_ids.shape[1], device=input_ids.device) >= prompt_lengths[:, None]
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, generated.to(scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


def penalties(
    vocab_size: int, tokenizer: PreTrainedTokenizerBase | None, settings: SamplingConfig
) -> list[LogitsProcessor]:
    """The processors that these settings ask for; none where all are at rest.

    A text stands for the tokens it is written with, at the start of a line and after a space; a bias falls on its last
    token once the others stand. Other spellings in smaller tokens are not found. Raises ConfigError for texts without a
    tokenizer or that no token spells, token ids outside the vocabulary, tokens with two biases, and bans that leave no
    token.
    """
    found: list[LogitsProcessor] = []
    if settings.logit_bias:
        found.append(SequenceBiasLogitsProcessor(_biases(settings.logit_bias, tokenizer, vocab_size)))
    if settings.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.presence_penalty or settings.frequency_penalty:
        found.append(GeneratedTokenPenalty(settings.presence_penalty, settings.frequency_penalty))
    if settings.banned_words:
        banned = {x for key in settings.banned_words for x in _spellings(key, tokenizer, vocab_size)}
        _refuse_all(banned, settings.banned_words, vocab_size)
        found.append(NoBadWordsLogitsProcessor([list(x) for x in sorted(banned)]))
    return found


def _biases(
    logit_bias: Mapping[int | str, float], tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> list[list[list[int] | float]]:
    """Token sequences with their biases, as transformers takes them."""
    found: dict[tuple[int, ...], float] = {}
    for key, bias in logit_bias.items():
        for spelling in _spellings(key, tokenizer, vocab_size):
            if found.setdefault(spelling, float(bias)) != bias:
                raise ConfigError(
                    f"logit_bias gives token(s) {list(spelling)} the biases {found[spelling]} and {float(bias)}, the "
                    f"second one by {key!r}: only one of them would count. A text stands for itself and for itself "
                    "after a space; name each once"
                )
    return [[list(spelling), bias] for spelling, bias in found.items()]


def _spellings(key: int | str, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> list[tuple[int, ...]]:
    """Token sequences of a text, or the one token that an id names."""
    if not isinstance(key, str):
        key = whole(key, "a token of logit_bias or banned_words")
        if not 0 <= key < vocab_size:
            raise ConfigError(
                f"logit_bias or banned_words names token {key}, but the target knows 0 to {vocab_size - 1}. Write a "
                f"text that looks like a number in quotes: \"decode.banned_words=['{key}']\""
            )
        return [(key,)]
    if tokenizer is None:
        raise ConfigError(f"logit_bias or banned_words names the text {key!r}, which needs tokenizer=; none was given")
    texts = (key, key if key[:1].isspace() else " " + key)
    spelled = {tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts}  # type: ignore[arg-type]
    if not any(spelled):
        raise ConfigError(
            f"logit_bias or banned_words names the text {key!r}, of which the tokenizer makes no token, so it could "
            "neither be banned nor biased; leave it out, or name token ids"
        )
    return sorted(one for one in spelled if one)


def _refuse_all(banned: set[tuple[int, ...]], words: Sequence[int | str], vocab_size: int) -> None:
    if sum(len(one) == 1 for one in banned) >= vocab_size:
        raise ConfigError(
            f"banned_words has {len(words)} entries which ban all {vocab_size} tokens of the target, so nothing could "
            "be said; leave some out"
        )


def asked_processors(
    vocab_size: int, tokenizer: PreTrainedTokenizerBase | None, settings: SamplingConfig, ends: Sequence[int]
) -> list[LogitsProcessor]:
    """Penalties, biases and bans, then the grammar; none where all are at rest. `ends` are the tokens that end a text.

    Raises ConfigError as `penalties` and `grammar_of` do.
    """
    return [*penalties(vocab_size, tokenizer, settings), *grammar_of(settings.grammar, tokenizer, vocab_size, [*ends])]
