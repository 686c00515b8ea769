"""Tokenizers, and whether two models speak of the same tokens."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from decode.common.errors import InputError

if TYPE_CHECKING:
    from decode.config import ModelConfig
    from decode.models.load import ModelDescription


def load_tokenizer(source: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id; raises InputError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(
            source.path, revision=source.revision, trust_remote_code=source.trust_remote_code
        )
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises nothing narrower for a damaged file
        raise InputError(
            f"no tokenizer can be loaded from {source.path} ({type(error).__name__}: {error}), and text cannot be read "
            "without one. Copy its tokenizer files again"
        ) from error


def token_map_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the token-to-id map: two tokenizers with the same hash give every token the same id."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def chat_template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Hash of the chat template, None where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else hashlib.sha256(json.dumps(template).encode()).hexdigest()


def check_same_tokens(target: ModelDescription, draft: ModelDescription) -> None:
    """Raise InputError unless both models speak of the same tokens; without draft tokenizer files only sizes are
    compared."""
    check_same_size(target, draft)
    ours, theirs = draft.token_map_hash, target.token_map_hash
    if ours is not None and theirs is not None and ours != theirs:
        raise InputError(
            f"the tokenizers differ although both vocabularies have {target.vocab_size} entries: token map "
            f"{ours[:12]} in "
            f"{draft.path}, {theirs[:12]} in {target.path}; the same id would mean different text. "
            "Use a draft trained on the target's own tokenizer"
        )


def check_same_size(target: ModelDescription, draft: ModelDescription) -> None:
    """Raise InputError unless both vocabularies have as many entries."""
    if target.vocab_size != draft.vocab_size:
        raise InputError(
            f"draft {draft.path} has {draft.vocab_size} vocabulary entries, target {target.path} has "
            f"{target.vocab_size}: "
            "acceptance compares full distributions, so both must be over the same tokens. "
            "Use a draft with the target's tokenizer and padded vocabulary size, or train one with `python -m train`"
        )
