"""What runs in place of a model's own modules while a capture is made: packed linear layers, and fused modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from decode.forward.fused_modules import fused_modules, is_watched
from decode.forward.packed_linear import MOST_BYTES, PackedLinear, can_pack


class Packing:
    """The packed layers and fused modules of one model, made once and put in place while a capture is made."""

    def __init__(self, model: nn.Module) -> None:
        linears = {
            name: module
            for name, module in model.named_modules()
            if type(module) is nn.Linear and not is_watched(module)
        }
        size = sum(module.weight.nbytes for module in linears.values())
        chosen = linears if size <= MOST_BYTES and all(map(can_pack, linears.values())) else {}
        self._layers = fused_modules(model, chosen) if chosen else {}
        for name, module in chosen.items():
            if name not in self._layers:
                self._layers[name] = PackedLinear(module)
        self._model = model

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The one."""
        return (self._model,)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model runs on packed weights inside the block."""
        own = {name: self._model.get_submodule(name) for name in self._layers}
        try:
            self._put(self._layers)
            yield
        finally:
            self._put(own)

    def _put(self, layers: dict[str, nn.Module]) -> None:
        for name, layer in layers.items():
            parent, _, child = name.rpartition(".")
            setattr(self._model.get_submodule(parent), child, layer)
