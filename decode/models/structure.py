"""Where a model keeps the parts that drafts reach into, found by structure: names differ from type to type."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from decode.common.errors import InputError


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The text model within, which holds the embedding and turns ids into the states that the output head reads.
    `base_model` may hold a tower for pictures too, or be the whole model (Llama 4)."""
    embedding = model.get_input_embeddings()
    return next(module for module in model.modules() if any(child is embedding for child in module.children()))


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers: the one list of as many modules as the config counts, in no other. InputError where there
    are none or several."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [
        module
        for name, module in decoder_of(model).named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and not any(c.isdigit() for c in name)
    ]
    if len(lists) != 1:
        raise InputError(
            f"{type(model).__name__} has {len(lists)} lists of {count} modules where its {count} layers are looked "
            "for, so that no pass can leave or enter between them. Use a draft of its own"
        )
    return list(lists[0])


def last_norm_of(model: PreTrainedModel) -> nn.Module:
    """What turns the last layer's output into the final states: the last norm beside the layers. InputError where there
    is none."""
    named = [(f"{name} {type(one).__name__}", one) for name, one in decoder_of(model).named_children()]
    norms = [one for words, one in named if "norm" in words.lower() or words.startswith("ln_")]
    if not norms:
        raise InputError(f"{type(model).__name__} has no norm beside its layers, where its final states are looked for")
    return norms[-1]
