"""A pass in two halves: over the first layers, whose hidden states stay in the cache, and on from them over the others,
so that a target that drafts for itself by leaving early computes nothing twice.

The model's own forward makes both, with the layers that are not wanted stepped over: embedding, positions, masks by
layer, last norm and output head stay as the model has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.common.environment import device_of
from decode.common.errors import InputError
from decode.forward.capture import FAULTS
from decode.forward.target import NodePass
from decode.models.structure import decoder_of, layers_of


class HalfPass(NodePass):
    """What both halves share: where a model is parted, and room for the hidden states there."""

    def __init__(self, whole: NodePass, num_lower: int) -> None:
        """The lower half has `num_lower` layers; `refuse_inseparable` has seen that the model can be parted there."""
        super().__init__(whole.model, whole.cache, whole.held, len(whole.slots), whole.taps)
        layers = layers_of(whole.model)
        assert 0 < num_lower < len(layers), (num_lower, len(layers))
        self.lower, self.upper = layers[:num_lower], layers[num_lower:]
        self.states = _room(whole)

    def read_lower(self, part: nn.Module, *given: Tensor, adapter: nn.Module | None = None) -> Any:
        """What `part` of the model says over the lower layers, with an `adapter` in place of the upper ones. Their keys
        and values are in the cache then and, where there is room, the hidden states behind them."""
        with left_before(self.upper, adapter) as found:
            out = self._called(part, *given)
        if self.states is not None:
            self.cache.keep(found[:1], self.held.device)
        return out


class LowerPass(HalfPass):
    """A NodePass over the lower layers: logits of the model's norm and head behind them. The cache then holds these
    layers' keys and values, and the hidden states that ResumedPass goes on from, which an `adapter` between them and
    the norm does not change."""

    def __init__(self, whole: NodePass, num_lower: int, adapter: nn.Module | None = None) -> None:
        super().__init__(whole, num_lower)
        self.adapter = adapter
        self.written = () if self.states is None else (self.states,)

    def _over(self, *given: Tensor) -> tuple[Tensor]:
        return (self.read_lower(self.model, *given, adapter=self.adapter).logits,)


class ResumedPass(HalfPass):
    """The logits of the whole NodePass by its upper layers, whose keys and values are written: for nodes that
    LowerPass has been over, in this order, but for the last `unread` ones, which the lower layers read now, without
    norm and head."""

    def __init__(self, whole: NodePass, num_lower: int, unread: int = 0) -> None:
        super().__init__(whole, num_lower)
        assert self.states is not None, "taps of a head have the cache's room for hidden states"
        self.unread = unread

    def _over(self, tokens: Tensor, own: Tensor, positions: Tensor, visible: Tensor, keys: Tensor) -> tuple[Tensor]:
        assert self.states is not None
        if self.unread:
            last = (one[:, -self.unread :] for one in (tokens, own, positions, visible))
            self.read_lower(decoder_of(self.model), *last, keys)
        states = self.states.gather(1, own[..., None].expand(-1, -1, self.states.shape[-1]))
        with _instead(self.lower, lambda *_, **__: states):
            return super()._over(tokens, own, positions, visible, keys)


@dataclass(frozen=True)
class Lower:
    """The first layers of a model, as a part of its passes."""

    num_layers: int
    adapter: nn.Module | None = None
    """What changes the hidden states (..., d) before norm and head."""
    serial: int = 0
    """Another one where the adapter's weights have changed, of which captures hold copies."""

    def __call__(self, whole: NodePass) -> LowerPass:
        """Such a pass."""
        return LowerPass(whole, self.num_layers, self.adapter)


@dataclass(frozen=True)
class Rest:
    """What is left of a pass when `Lower` of as many layers has been over all nodes but the last `unread`."""

    num_lower: int
    unread: int

    def __call__(self, whole: NodePass) -> ResumedPass:
        """Such a pass."""
        return ResumedPass(whole, self.num_lower, self.unread)


def refuse_inseparable(model: PreTrainedModel, layers: list[nn.Module], num_lower: int) -> None:
    """Raise InputError unless the hidden states behind layer `num_lower` are all that the layers above need of those
    below, by a pass over two tokens that is resumed there."""
    if not 0 < num_lower < len(layers):
        raise InputError(
            f"a pass is to be parted behind {num_lower} layers, and {type(model).__name__} has {len(layers)}: both "
            f"halves need some. Choose 1 to {len(layers) - 1}"
        )
    why = _difference(model, layers, num_lower)
    if why is not None:
        raise InputError(
            f"passes of {type(model).__name__} cannot be parted behind layer {num_lower}: {why}. What is drafted there "
            "would not be what is verified. Use a draft of its own"
        )


def _difference(model: PreTrainedModel, layers: list[nn.Module], num_lower: int) -> str | None:
    made: list[object] = []
    ids = torch.tensor([[0, 1]], device=device_of(model))
    hook = layers[num_lower - 1].register_forward_hook(lambda module, given, result: made.append(result))
    with torch.no_grad(), hook:
        whole = model(input_ids=ids, use_cache=False).logits
    (states,) = made
    if not isinstance(states, Tensor):
        return f"a layer hands on {type(states).__name__}, more than hidden states"
    try:
        with torch.no_grad(), _instead(layers[:num_lower], lambda *_, **__: states):
            resumed = model(input_ids=ids, use_cache=False).logits
    except FAULTS as error:
        return str(error).strip() or repr(error)
    gap = (whole.float() - resumed.float()).abs().max().item()
    return None if gap <= 1e-2 else f"its logits differ by up to {gap:.3g}"


@contextmanager
def left_before(upper: list[nn.Module], adapter: nn.Module | None = None) -> Iterator[list[Tensor]]:
    """Passes inside the block leave before the `upper` layers, by an `adapter` in place of these where there is one; of
    the list that it gives the first entry is then the hidden states (B, T, d) that they left with, adapter not
    counted."""
    found: list[Tensor] = []

    def step_over(hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        found.append(hidden_states)
        return hidden_states if adapter is None or len(found) > 1 else adapter(hidden_states)

    with _instead(upper, step_over):
        yield found


@contextmanager
def _instead(layers: list[nn.Module], forward: Callable[..., Tensor]) -> Iterator[None]:
    """The layers compute `forward` inside the block; what stood in its place is put back."""
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                del layer.forward
            else:
                layer.forward = own


def _room(whole: NodePass) -> Tensor | None:
    """(B, capacity, d): the hidden states of the tokens in the cache, beside its keys and values; None where those for
    a head lie there."""
    if whole.taps is not None:
        return None
    cache, config = whole.cache, whole.config
    if cache.states is None:
        shape = (1, len(whole.held), 1, cache.capacity, config.hidden_size)
        with torch.inference_mode(mode=False):  # captures write to it, and it is an ordinary tensor then
            cache.states = torch.zeros(shape, dtype=whole.model.dtype, device=whole.held.device)
    return cache.states[0, :, 0]
