"""Texts of a grammar: a matcher of xgrammar says which tokens may follow what was generated; no other gets a chance.

The mask stands on the target's scores at every node of a tree, each under the tokens on its own path, before the
filters: so the text is what plain decoding with the same mask writes. Masking drafts alone would not do, since the
target's own tokens, and what a refused draft is replaced by, would be free (off by up to 0.996 in total variation,
arXiv 2605.07698). Drafts are masked as well, so that none is proposed in vain.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decode.common.errors import ConfigError
from decode.common.typed_config import require
from decode.sampling.allowed_tokens import Restriction
from decode.sampling.config import GRAMMARS

MOST_SPACES = 16
"""Between the parts of a JSON text: enough to indent by, and models fall into writing nothing else."""


class Grammar(Restriction):
    """The tokens that continue a text of the grammar, and its end tokens where the text is whole."""

    name = "decode.grammar"

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int, ends: tuple[int, ...]) -> None:
        """Raises ConfigError for a file that is no grammar, or whose texts this vocabulary cannot begin."""
        super().__init__()
        self.vocab_size = vocab_size
        self._compiled = _compiled(path, Path(path).read_text(encoding="utf-8"), tokenizer, vocab_size, ends)
        self._places: dict[int, _Place] = {}

    def __call__(  # type: ignore[override]
        self, input_ids: Tensor, scores: Tensor, prompt_lengths: Tensor, requests: Tensor
    ) -> Tensor:
        """ids (n, length), scores (n, V), prompt_lengths (n,), requests (n,) -> (n, V)."""
        from xgrammar import allocate_token_bitmask, apply_token_bitmask_inplace

        may_follow = allocate_token_bitmask(len(input_ids), self.vocab_size)  # (n, ceil(V / 32)), all of them
        asked = zip(input_ids.tolist(), prompt_lengths.tolist(), requests.tolist(), strict=True)
        for row, (ids, prompt_length, request) in enumerate(asked):
            place = self._places.setdefault(request, _Place(self._compiled))
            if place.goes_to(ids[prompt_length:]):
                place.matcher.fill_next_token_bitmask(may_follow, row)
                if not may_follow[row].any():
                    self.note_dead_end(request, ids)
                    may_follow[row] = -1
        mask = torch.zeros(scores.shape, dtype=torch.float32, device=scores.device)
        apply_token_bitmask_inplace(mask, may_follow.to(scores.device))
        found = scores + mask.to(scores.dtype)
        for row in found.isneginf().all(-1).nonzero().flatten().tolist():  # what it allows was banned before
            self.note_dead_end(int(requests[row]), input_ids[row].tolist())
        return found


class _Place:
    """Where in a text of the grammar a matcher stands. From one path of a tree to the next it takes back the tokens in
    which they differ, and no more."""

    def __init__(self, compiled: Any) -> None:
        from xgrammar import GrammarMatcher

        self.matcher = GrammarMatcher(compiled)
        self.taken: list[int] = []

    def goes_to(self, tokens: list[int]) -> bool:
        """Whether these tokens begin a text of the grammar that has not ended."""
        same = next((n for n, (a, b) in enumerate(zip(self.taken, tokens, strict=False)) if a != b), None)
        same = min(len(self.taken), len(tokens)) if same is None else same
        self.matcher.rollback(len(self.taken) - same)
        del self.taken[same:]
        for token in tokens[same:]:
            if self.matcher.is_terminated() or not self.matcher.accept_token(token):
                return False
            self.taken.append(token)
        return not self.matcher.is_terminated()


def grammar_of(
    path: str | None, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, ends: list[int]
) -> list[Grammar]:
    """The grammar in that file, none for None. `ends` are the tokens that may end a text.

    Raises ConfigError without a tokenizer or an end token, and as `Grammar` does.
    """
    if path is None:
        return []
    if tokenizer is None:
        raise ConfigError(f"grammar={path} is a grammar of text, which needs tokenizer=; none was given")
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]  # type: ignore[arg-type]
    found = tuple(ends) or tuple(own)
    require(
        bool(found),
        f"grammar={path} ends its texts by an end-of-text token, and neither the model nor the tokenizer names one; "
        "give eos_token_id=",
    )
    return [Grammar(path, tokenizer, vocab_size, found)]


@lru_cache(maxsize=8)  # compiling takes a second with a vocabulary of 150,000, and a call may last less
def _compiled(
    path: str, text: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int, ends: tuple[int, ...]
) -> Any:  # xgrammar's CompiledGrammar
    from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo, allocate_token_bitmask

    info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[*ends])
    compiler, suffix = GrammarCompiler(info), Path(path).suffix
    bounded = {"max_whitespace_cnt": MOST_SPACES} if suffix == ".json" else {}
    try:
        compiled = getattr(compiler, GRAMMARS[suffix])(text, **bounded)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"grammar={path} cannot be read as {suffix}: {error}. Mend the file; its ending says what it is: {_kinds()}"
        ) from error
    first = allocate_token_bitmask(1, vocab_size)
    GrammarMatcher(compiled).fill_next_token_bitmask(first, 0)
    require(
        bool(first.any()),
        f"grammar={path} is satisfied by no text of this target's vocabulary: no token may come first. Mend it",
    )
    return compiled


def _kinds() -> str:
    return ", ".join(f"{suffix} ({method.removeprefix('compile_')})" for suffix, method in GRAMMARS.items())
