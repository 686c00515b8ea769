"""How many weights a model has, and how many of them a token costs; counted without their values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class WeightCounts:
    """Parameters of a model, tied ones once."""

    total: int
    per_token: int
    """Those that a pass reads for a token: layers and output head, but not the tables of which it reads a row. Of a
    mixture of experts all experts are counted."""


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """The model of a configuration without values."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def count_weights(config: PretrainedConfig) -> WeightCounts:
    """Of the model of that configuration."""
    model = empty_model(config)
    head = model.get_output_embeddings()
    kept = None if head is None else head.weight
    tables = [one.weight for one in model.modules() if isinstance(one, nn.Embedding) and one.weight is not kept]
    total = model.num_parameters()
    return WeightCounts(total, total - sum(table.numel() for table in tables))
