"""A reduced vocabulary of a draft model (FR-Spec, Zhao et al. 2025, arXiv 2502.14856): of a small model over 49,152
tokens most of a pass is the output head. Its weights stay whole, and its config.json names the tokens that it drafts
(`draft_vocab`), which our own decoder heeds alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from decode.common.errors import InputError

FIELD = "draft_vocab"
"""Of config.json; transformers keeps fields that it does not know."""


def own_vocab(config: PretrainedConfig) -> Tensor | None:
    """(V_draft,) ascending ids of the tokens that a model drafts; None is all. InputError for an edited one."""
    text = config.get_text_config()
    fields = {FIELD: getattr(text, FIELD, None), "vocab_size": text.vocab_size}
    return vocab_in(fields, config.name_or_path or "")


def vocab_in(fields: Mapping[str, Any], path: str = "") -> Tensor | None:
    """The same of the fields of its config.json."""
    ids = fields.get(FIELD)
    if ids is None:
        return None
    size = fields["vocab_size"]
    whole = isinstance(ids, list) and bool(ids) and all(type(one) is int for one in ids)
    if not whole or ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < size:
        raise InputError(
            f"{path or 'a model'}: the {FIELD} of its config.json are not ascending tokens below vocab_size={size}: "
            f"{ids!r:.60}. Copy its folder again, or train it anew"
        )
    return torch.tensor(ids)


def set_vocab(config: PretrainedConfig, vocab: Tensor) -> None:
    """The model of this config drafts these tokens alone from now on, and its config.json says so."""
    setattr(config.get_text_config(), FIELD, vocab.tolist())


class FewRows(nn.Module):
    """An output head that makes logits of some tokens, and -inf of the others."""

    def __init__(self, weight: Tensor, vocab: Tensor) -> None:
        """`weight` (V, d) is the whole head's, `vocab` (V_draft,) what is kept of it."""
        super().__init__()
        rows = weight.detach()[vocab.to(weight.device)]
        self.size, self.rows = len(weight), nn.Linear(*reversed(rows.shape), bias=False, device="meta")
        self.rows.weight = nn.Parameter(rows, requires_grad=False)
        self.register_buffer("vocab", vocab.to(weight.device), persistent=False)

    @property
    def weight(self) -> Tensor:  # (V_draft, d)
        """Of the rows that are kept."""
        return self.rows.weight

    def forward(self, hidden: Tensor) -> Tensor:  # (..., d) -> (..., V)
        """Logits over all tokens."""
        drafted = self.rows(hidden)
        every = drafted.new_full((*drafted.shape[:-1], self.size), -torch.inf)
        return every.index_copy(-1, cast(Tensor, self.vocab), drafted)


def keep_few_rows(model: PreTrainedModel) -> PreTrainedModel:
    """`model` itself, to draft with: where its config.json names the tokens that it drafts, its output head makes no
    others. InputError for a head whose rows are packed by a quantisation."""
    vocab, head = own_vocab(model.config), cast(Any, model.get_output_embeddings())
    if vocab is None or isinstance(head, FewRows):
        return model
    if type(head.weight) not in (Tensor, nn.Parameter) or not head.weight.is_floating_point():
        raise InputError(
            f"{model.config.name_or_path} drafts {len(vocab)} of {model.config.get_text_config().vocab_size} tokens "
            f"({FIELD}), and its output head is quantised, of which no rows can be taken. Leave draft.quantization out"
        )
    model.set_output_embeddings(FewRows(head.weight, vocab))
    return model


def why_not_few(model: PretrainedConfig, head: nn.Module | None) -> str | None:
    """Why a model cannot draft some tokens alone; None where it can."""
    if getattr(model.get_text_config(), "final_logit_softcapping", None) is not None:
        return "caps its logits, so that tokens left out would have one"
    if getattr(head, "bias", None) is not None:
        return "has an output head with a bias"
    return None
