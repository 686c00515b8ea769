"""Embedding and output head of a draft model with as many rows as its target's: one family pads its vocabulary to
different sizes (Qwen2.5: 151,936 and 152,064 rows over the same 151,665 tokens)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.common.progress import get_logger

log = get_logger("decode")


@torch.no_grad()
def with_rows(model: PreTrainedModel, rows: int, tokens: int) -> PreTrainedModel:
    """`model` itself, with `rows` rows: those beyond are cut, and added ones are copies of the last, which no token
    has, or the mean of all where every row has one. Its tokenizer knows `tokens`, all of which it keeps."""
    old = model.config.get_text_config().vocab_size
    assert tokens <= min(rows, old), (tokens, rows, old)
    done = f"{old - rows} rows were cut" if rows < old else f"{rows - old} rows were added"
    log.info(
        "%s has %d rows of embedding and output head, and its target %d, over the same %d tokens: %s",
        model.config.name_or_path, old, rows, tokens, done,
    )  # fmt: skip
    model.resize_token_embeddings(rows, mean_resizing=False)
    if rows < old:
        return model
    head = cast(Any, model.get_output_embeddings())
    tables = [model.get_input_embeddings().weight, head.weight, getattr(head, "bias", None)]
    for table in {id(one): one for one in tables if one is not None}.values():  # tied ones are one
        cast(Tensor, table)[old:] = table[old - 1] if old > tokens else table[:old].mean(0)
    return model
