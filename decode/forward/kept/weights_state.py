"""What tells that weights have changed, so that captures and clocks of them are stale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SAMPLE = 64  # values of a tensor that are looked at to notice silent writes: 1 ms a call for a 28M model


def weights_state(model: nn.Module) -> int:
    """Changes when a parameter or buffer is replaced, moved or written to, and when a module is exchanged, hooked or
    set otherwise (train mode, an adapter switched on): a capture would not notice.

    Writes that bypass torch's version counter (`.data`, inference mode) show in a sample of the values on a CPU, where
    packed weights are copies.
    """
    tensors = (tensor_state(one) for one in (*model.parameters(), *model.buffers()))
    return hash((*tensors, *(_module_state(module) for module in model.modules())))


def tensor_state(tensor: Tensor) -> tuple[object, ...]:
    """Changes when the tensor is replaced, moved or written to."""
    version = 0 if tensor.is_inference() else tensor._version
    if type(tensor) not in (Tensor, nn.Parameter):  # quantised storage, which may have neither values nor a place
        return id(tensor), tensor.dtype, version
    if tensor.device.type != "cpu" or not tensor.is_floating_point():
        return tensor.data_ptr(), tensor.dtype, version
    sample = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // SAMPLE)]
    return tensor.data_ptr(), tensor.dtype, version, int(sample.double().sum().view(torch.long))  # nan is not nan


def _module_state(module: nn.Module) -> tuple[object, ...]:
    settings = tuple((name, _plain(value)) for name, value in vars(module).items() if name[:11] != "_draftsmith")
    hooks = (*module._forward_hooks, *module._forward_pre_hooks)  # ids of their handles, never used again
    return id(module), id(vars(module).get("forward")), hooks, settings


def _plain(value: object) -> object:
    """What of an attribute is compared: peft keeps the names of the adapters that are on in a list, and their scales in
    a dict. Lists of numbers are a drafter's own state, which every call changes."""
    if isinstance(value, list | tuple):
        return tuple(one for one in value if isinstance(one, str)) or None
    if type(value) is dict:
        return tuple((key, one) for key, one in value.items() if isinstance(one, bool | int | float | str))
    return value if isinstance(value, bool | int | float | str) else None
