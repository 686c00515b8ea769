"""Whether a draft and its target speak of the same tokens."""

from __future__ import annotations

import shlex

from decode.common.errors import InputError
from decode.models.describe import ModelDescription


def check_same_tokens(target: ModelDescription, draft: ModelDescription) -> None:
    """Raise InputError unless both models speak of the same tokens, however many rows pad them; without draft
    tokenizer files only sizes are compared."""
    if tokens_padded_otherwise(target, draft) is not None:
        return
    check_same_size(target, draft)
    ours, theirs = draft.token_map_hash, target.token_map_hash
    if ours is not None and theirs is not None and ours != theirs:
        raise InputError(
            f"the tokenizers differ although both vocabularies have {target.vocab_size} entries: token map "
            f"{ours[:12]} in {draft.path}, {theirs[:12]} in {target.path}. Use a draft with the target's own, or, as "
            f"it is, {_as_it_is(target, draft)}"
        )


def tokens_padded_otherwise(target: ModelDescription, draft: ModelDescription) -> int | None:
    """How many tokens both tokenizers know, where they are the same and the models differ in rows beyond them alone;
    None where as many rows stand for tokens, or other tokens."""
    if target.vocab_size == draft.vocab_size or draft.tokenizer is None or target.tokenizer is None:
        return None
    tokens = max(draft.tokenizer.get_vocab().values(), default=-1) + 1
    is_padding = 0 < tokens <= min(target.vocab_size, draft.vocab_size)
    return tokens if is_padding and draft.token_map_hash == target.token_map_hash else None


def check_same_size(target: ModelDescription, draft: ModelDescription) -> None:
    """Raise InputError unless both vocabularies have as many entries."""
    if target.vocab_size != draft.vocab_size:
        raise InputError(
            f"draft {draft.path} has {draft.vocab_size} vocabulary entries, target {target.path} has "
            f"{target.vocab_size}. Use a draft with the target's tokenizer, train one with `python -m train`, or as "
            f"it is, {_as_it_is(target, draft)}"
        )


def _as_it_is(target: ModelDescription, draft: ModelDescription) -> str:
    paths = shlex.join([f"target.path={target.path}", "draft=foreign", f"draft.settings.draft={draft.path}"])
    return f"decode with it: python -m decode {paths}"
