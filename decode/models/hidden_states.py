"""Hidden states of a target while it runs, for drafts that are made from them.

A tap is an index of transformers' `hidden_states`: 0 the embeddings, i the raw output of decoder layer i - 1, the last
one's too. FINAL is the state behind the last norm, which the output head reads. Hooks rather than
`output_hidden_states`, which keeps the states of all layers, and which calls the normed state by the raw one's index.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from decode.models.structure import last_norm_of, layers_of

FINAL = -1


class Taps:
    """Inside a `with` block, every forward of the model leaves its hidden states at `layers` here."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._model, self._places = model, layers_of(model) if self.layers else []
        self._found: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Taps:
        self._handles = [self._hook(tap) for tap in self.layers]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def each(self) -> list[Tensor]:
        """(B, T, d) of the last forward, in the order of `layers`."""
        return [self._found[tap] for tap in self.layers]

    def stacked(self) -> Tensor:
        """(B, T, n, d) of the last forward, on the device of the first one."""
        first, *rest = self.each()
        return torch.stack([first, *(one.to(first.device) for one in rest)], 2)

    def _hook(self, tap: int) -> RemovableHandle:
        if tap == 0:
            return self._places[0].register_forward_pre_hook(
                lambda module, given, named: self._keep(0, given[0] if given else named["hidden_states"]),
                with_kwargs=True,
            )
        # looked up each time: while a capture is made, another norm is in its place
        module = last_norm_of(self._model) if tap == FINAL else self._places[tap - 1]
        return module.register_forward_hook(
            lambda module, given, made: self._keep(tap, made if isinstance(made, Tensor) else made[0])
        )

    def _keep(self, tap: int, state: Tensor) -> None:
        self._found[tap] = state
