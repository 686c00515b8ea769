"""Two cards on a machine that has none: tensors are told apart by a note, and what reads two of different notes at once
fails, as kernels of a GPU do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

FIRST, SECOND = torch.device("cpu"), torch.device("cpu:1")


def card(tensor: Tensor) -> torch.device:
    return vars(tensor).get("card", FIRST)


def noted(tensor: Tensor, where: torch.device) -> Tensor:
    vars(tensor)["card"] = where
    return tensor


class TwoCards(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return card(args[0])
        name = getattr(func, "__name__", "")
        if name == "to":
            return _moved(*args, **given)
        tensors = [one for one in tree_leaves((args, given)) if isinstance(one, Tensor)]
        cards = {card(one) for one in tensors if one.dim()}
        copies = name == "copy_" or (
            name == "__setitem__" and not any(isinstance(i, Tensor) for i in tree_leaves(args[1]))
        )
        if len(cards) > 1 and not copies:
            raise RuntimeError(f"{name} of tensors on {sorted(map(str, cards))}")
        where = given.pop("device", None) or next(iter(cards), FIRST)
        before = {id(one) for one in tensors}
        made = func(*args, **given)
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and id(one) not in before:
                noted(one, torch.device(where))
        return made


def _moved(tensor: Tensor, *args: Any, **given: Any) -> Tensor:
    where, dtype = card(tensor), tensor.dtype
    for one in (*args, given.get("device"), given.get("dtype")):
        if isinstance(one, Tensor):
            where, dtype = card(one), one.dtype
        elif isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, str | torch.device):
            where = torch.device(one)
    if (where, dtype) == (card(tensor), tensor.dtype):
        return tensor
    return noted(tensor.type(dtype) if dtype != tensor.dtype else tensor.clone(), where)


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Its second half of layers, norm and output head on the second card, as `device_map=auto` lays it out."""
    base: Any = model.base_model
    layers = list(base.layers)
    head: Any = model.get_output_embeddings()
    for part in (*layers[len(layers) // 2 :], base.norm, head):
        for weight in (*part.parameters(), *part.buffers()):
            noted(weight, SECOND)
        part.register_forward_pre_hook(_to(SECOND), with_kwargs=True)
    model.register_forward_hook(lambda module, given, made: _at(made, FIRST))
    return model


def _to(where: torch.device) -> Callable[..., Any]:
    return lambda module, args, kwargs: (_at(args, where), _at(kwargs, where))


def _at(values: Any, where: torch.device) -> Any:
    return tree_map(lambda one: one.to(where) if isinstance(one, Tensor) else one, values)
