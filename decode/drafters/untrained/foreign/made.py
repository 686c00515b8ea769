"""From a folder to a draft that speaks other tokens, and what can be said against it before a model is loaded."""

from __future__ import annotations

from typing import cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.common.errors import InputError
from decode.config import ModelConfig, Precision, model_folder
from decode.drafters.provenance import read_provenance
from decode.drafters.untrained.config import ForeignConfig
from decode.drafters.untrained.foreign.drafter import ForeignDrafter
from decode.drafters.untrained.foreign.shared_tokens import SharedTokens
from decode.drafters.untrained.foreign.spelling import Spelling
from decode.formats.form import published_form
from decode.models.describe import ModelDescription, describe_model
from decode.models.load import load_model

LEAST_SHARED = 0.05
"""Of the smaller vocabulary: two with nothing in common but the letters of Latin script have less."""


def make_foreign(
    config: ForeignConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: Precision
) -> ForeignDrafter:
    """The drafter of these settings for a target with this tokenizer; InputError as `check_foreign`."""
    draft = _described(config)
    vocab_size = target.config.get_text_config().vocab_size
    shared = _shared(tokenizer, vocab_size, str(target.config.name_or_path), draft)
    own = cast(Precision, str(target.dtype).removeprefix("torch.")) if dtype == "auto" else dtype
    model = load_model(ModelConfig(draft.path, device=str(target.device), dtype=own), role="the foreign draft")
    return ForeignDrafter(model, shared)


def check_foreign(config: ForeignConfig, target: ModelDescription) -> None:
    """Raise InputError where the draft is no language model, where a tokenizer is missing, or where too few tokens are
    shared to draft from them."""
    if target.tokenizer is None:
        raise InputError(
            f"{target.path} holds no tokenizer files, and a draft with other tokens is given the text of the target's. "
            "Copy the target's tokenizer there"
        )
    _shared(target.tokenizer, target.vocab_size, target.path, _described(config))


def _described(config: ForeignConfig) -> ModelDescription:
    assert config.draft is not None
    folder = model_folder(config.draft)
    provenance = read_provenance(folder)
    family = published_form(folder) if provenance is None else provenance.family
    if family not in (None, "lm"):
        raise InputError(
            f"draft={config.draft} is a head ({family}), which drafts from the hidden states of one target; "
            "draft=foreign takes a language model of its own. Give that head as draft.path"
        )
    return describe_model(ModelConfig(path=folder), role="the foreign draft")


def _shared(tokenizer: PreTrainedTokenizerBase, vocab_size: int, path: str, draft: ModelDescription) -> SharedTokens:
    if draft.tokenizer is None:
        raise InputError(
            f"{draft.path} holds no tokenizer files, so nobody knows what its tokens stand for. Copy the tokenizer "
            "that the draft was trained with there, or, if it is the target's, use draft.path"
        )
    shared = SharedTokens(Spelling(tokenizer, vocab_size), Spelling(draft.tokenizer, draft.vocab_size))
    least = LEAST_SHARED * min(len(tokenizer), len(draft.tokenizer))
    if len(shared.drafted) < least:
        raise InputError(
            f"{path} ({len(tokenizer)} tokens) and {draft.path} ({len(draft.tokenizer)}) share {len(shared.drafted)}, "
            f"under {LEAST_SHARED:.0%} of the smaller vocabulary: next to nothing could be drafted from these. "
            "Use another draft"
        )
    return shared
