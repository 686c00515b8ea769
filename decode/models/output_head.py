"""From tokens to states and from states to logits: a target's embedding, and its output head with the scale and soft
cap that some models apply after it. Heads use both; the target alone owns them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from decode.common.environment import device_of
from decode.common.errors import InputError
from decode.models.structure import decoder_of


class OutputHead:
    """hidden (..., d) -> logits (..., V), through the model's own (possibly tied, possibly sharded) output embedding.

    The embedding is looked up at every call, so that engines which replace or shard modules are followed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        self.model = model
        self.soft_cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2 and later
        self.scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
        self.divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite

    @property
    def module(self) -> nn.Module:
        """The output embedding itself."""
        return cast(nn.Module, self.model.get_output_embeddings())

    @property
    def weight(self) -> Tensor:  # (V, d)
        """Its matrix."""
        return cast(Tensor, self.module.weight)

    @property
    def dtype(self) -> torch.dtype:
        """Of its matrix."""
        return self.weight.dtype

    def __call__(self, hidden: Tensor) -> Tensor:  # (..., d) -> (..., V)
        """Logits on the head's device; recorded hidden states may come from another one, or in another precision."""
        weight = self.weight
        dtype = weight.dtype if weight.is_floating_point() else hidden.dtype
        return self.rescaled(self.module(hidden.to(weight.device, dtype)))

    def of_rows(self, hidden: Tensor, rows: Tensor) -> Tensor:  # (..., d), (V', d) -> (..., V')
        """Logits by some rows of its matrix alone, where it has no bias. As a product of two matrices: of more
        dimensions a capture made one by `bmm`, which copied the rows, 9 MB of SmolLM2's, for each draft token."""
        flat = linear(hidden.to(rows.device, rows.dtype).reshape(-1, hidden.shape[-1]), rows)
        return self.rescaled(flat.view(*hidden.shape[:-1], len(rows)))

    def rescaled(self, logits: Tensor) -> Tensor:
        """Logits of a product with the matrix, as the model scales and caps them."""
        if self.scale != 1.0 or self.divisor != 1.0:
            logits = logits * (self.scale / self.divisor)
        if self.soft_cap is None:
            return logits
        return torch.tanh(logits / self.soft_cap) * self.soft_cap


def head_of(model: PreTrainedModel) -> OutputHead:
    """The head of `model`, checked once against the logits the model itself makes; raises InputError if they differ,
    since training would see another model than serving."""
    head = OutputHead(model)
    ids = torch.tensor([[0, 1]], device=device_of(model))  # type: ignore[union-attr]
    with torch.no_grad():
        hidden = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
        ours, theirs = head(hidden), model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(ours.float(), theirs.float().to(ours.device), rtol=1e-2, atol=1e-2):
        gap = (ours.float() - theirs.float()).abs().max().item()
        raise InputError(
            f"{type(model).__name__} makes other logits than its output embedding gives (largest difference "
            f"{gap:.3g}). Supported are a plain head, final_logit_softcapping, logit_scale and logits_scaling"
        )
    return head


@dataclass(frozen=True)
class Ends:
    """No module on purpose: a draft that refers to it neither saves nor trains nor moves the target's weights."""

    embed: Callable[[Tensor], Tensor]
    """Token ids (...) of any device -> (..., d) on the embedding's, scaled as the target's first layer gets them."""
    head: OutputHead
    """Final hidden states (..., d) -> logits (..., V)."""


def ends_of(model: PreTrainedModel) -> Ends:
    """Those of a model in memory, looked up at every call."""
    scale = getattr(model.config.get_text_config(), "embedding_multiplier", None) or 1.0  # Granite
    return Ends(lambda ids: model.get_input_embeddings()(ids.to(device_of(model))) * scale, OutputHead(model))
