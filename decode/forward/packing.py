"""What runs in place of a model's own modules while a capture is made: packed linear layers, and fused modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from decode.forward.fused_modules import fused_modules, is_watched
from decode.forward.packed_linear import MOST_BYTES, Packed
from decode.forward.quantised_linear import kind_of


class Packing(Packed):
    """The packed layers and fused modules of one model, made once and put in place while a capture is made."""

    def __init__(self, model: nn.Module) -> None:
        linears = {
            name: module
            for name, module in model.named_modules()
            if type(module) is nn.Linear and not is_watched(module)
        }
        size = sum(module.weight.nbytes for module in linears.values())
        kinds = {name: kind_of(module) for name, module in linears.items()}
        chosen = linears if size <= MOST_BYTES and None not in kinds.values() else {}
        self._layers = fused_modules(model, chosen) if chosen else {}
        for name, module in chosen.items():
            kind = kinds[name]
            if name not in self._layers and kind is not None:
                self._layers[name] = kind([module])
        self._model = model

    @property
    def models(self) -> tuple[nn.Module, ...]:
        return (self._model,)

    @contextmanager
    def in_place(self) -> Iterator[None]:
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
