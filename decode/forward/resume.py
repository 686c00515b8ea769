"""A pass in two halves: over the first layers, whose hidden states stay in the cache, and on from them over the others,
so that a target that drafts for itself by leaving early computes nothing twice.

The model's own forward makes both, with the layers that are not wanted stepped over: embedding, positions, masks by
layer, last norm and output head stay as the model has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.common.environment import device_of
from decode.common.errors import InputError
from decode.forward.capture import FAULTS
from decode.forward.target import NodePass


class HalfPass(nn.Module):
    """What both halves share: where a model is parted, and room for the hidden states there."""

    def __init__(self, node_pass: NodePass, num_lower: int) -> None:
        """The lower half has `num_lower` layers. Raises InputError for a model that cannot be parted behind them."""
        super().__init__()
        layers = layers_of(node_pass.model)
        refuse_inseparable(node_pass.model, layers, num_lower)
        self.node_pass, self.lower, self.upper = node_pass, layers[:num_lower], layers[num_lower:]
        self.states = _room(node_pass)


class LowerPass(HalfPass):
    """A NodePass over the lower layers: logits of the model's norm and head behind them. The cache then holds these
    layers' keys and values, and the hidden states that ResumedPass goes on from."""

    def forward(self, tokens: Tensor, starts: Tensor, depths: Tensor, above: Tensor) -> tuple[Tensor]:
        """As NodePass has it."""
        found: list[Tensor] = []

        def step_over(hidden_states: Tensor, *_: object, **__: object) -> Tensor:
            found.append(hidden_states)
            return hidden_states

        with _instead(self.upper, step_over):
            logits = self.node_pass(tokens, starts, depths, above)
        self.node_pass.cache.keep(found[:1])
        return logits


class ResumedPass(HalfPass):
    """The logits of the whole NodePass by its upper layers alone, whose keys and values are written: for nodes that
    LowerPass has been over, in this order."""

    def forward(self, tokens: Tensor, starts: Tensor, depths: Tensor, above: Tensor) -> tuple[Tensor]:
        """As NodePass has it."""
        width, num_nodes = above.shape[1:]
        own = starts + self.node_pass.slots[num_nodes - width : num_nodes]
        states = self.states.gather(1, own[..., None].expand(-1, -1, self.states.shape[-1]))
        with _instead(self.lower, lambda *_, **__: states):
            return self.node_pass(tokens, starts, depths, above)


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers, found by structure: the one list of as many modules as the config counts, in no other."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [
        module
        for name, module in model.base_model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and not any(c.isdigit() for c in name)
    ]
    if len(lists) != 1:
        raise InputError(
            f"{type(model).__name__} has {len(lists)} lists of {count} modules where its {count} layers are looked "
            "for, so that no pass can leave or enter between them. Use a draft of its own"
        )
    return list(lists[0])


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


def _room(node_pass: NodePass) -> Tensor:
    """(B, capacity, d): the hidden states of the tokens in the cache, beside its keys and values."""
    cache, config = node_pass.cache, node_pass.config
    if cache.states is None:
        shape = (1, len(node_pass.held), 1, cache.capacity, config.hidden_size)
        with torch.inference_mode(mode=False):  # captures write to it, and it is an ordinary tensor then
            cache.states = torch.zeros(shape, dtype=node_pass.model.dtype, device=node_pass.held.device)
    assert node_pass.taps is None, "taps of a head have the cache's room for hidden states"
    return cache.states[0, :, 0]
