"""Targets with adapters: the transformers model inside a PeftModel, and which weights it has while no adapter is on.

What peft makes is known by its attributes: importing it takes seconds, which those who use no adapters should not wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.common.errors import InputError

IN_LAYERS = ("ADALORA", "BOFT", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "OFT", "VERA")
"""peft's methods that change layers and nothing else, so that the model inside makes the same passes."""

TOKENS = ".token_adapter"
"""Within a wrapped embedding, around the embedding itself: what peft makes of trainable_token_indices."""


def unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model inside a PeftModel, whose layers hold the adapter that is on; any other model as it is.
    Raises InputError for adapters that do their work outside of layers, or by what other tokens are."""
    if not hasattr(model, "get_base_model"):
        return model
    for name in model.active_adapters:
        config = model.peft_config[name]
        method = str(getattr(config.peft_type, "value", config.peft_type))
        by_tokens = getattr(config, "alora_invocation_tokens", None)
        if method not in IN_LAYERS or by_tokens:
            raise InputError(
                f"the target's adapter {name!r} is {'an activated LoRA' if by_tokens else method}, which adds tokens, "
                f"mixes adapters or starts at a certain one. Use one of the kinds {', '.join(IN_LAYERS)}, or merge it "
                "first (merge_and_unload)"
            )
    return model.get_base_model()


def has_adapter_on(model: nn.Module) -> bool:
    """Whether an adapter changes what a layer of the model gives."""
    return any(_is_on(module) for _, module in _adapted(model))


def plain_names(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a state dict under the names that they had before adapters came; those of the adapters are left
    out while all are off. With one on, the state as it is."""
    places = {name: "base_layer" if hasattr(one, "base_layer") else "original_module" for name, one in _adapted(model)}
    if not places or has_adapter_on(model):
        return dict(state)
    found = {}
    for name, value in state.items():
        around = [one for one in places if name.startswith(f"{one}.")]
        place = max(around, key=len, default=None)  # trainable tokens wrap a wrapped embedding
        kept = f"{place}.{places[place]}." if place is not None else ""
        if name.startswith(kept):
            own = None if place is None else place.removesuffix(TOKENS)
            found[name if own is None else f"{own}.{name.removeprefix(kept)}"] = value
    return found


def _adapted(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        wraps = hasattr(module, "base_layer") or hasattr(module, "original_module")
        if wraps and hasattr(module, "disable_adapters"):
            yield name, module


def _is_on(layer: Any) -> bool:
    return bool(getattr(layer, "merged_adapters", ())) or bool(not layer.disable_adapters and layer.active_adapters)
