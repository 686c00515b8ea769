"""Hidden states of a target while it runs, for drafts that are made from them.

A tap is an index of transformers' `hidden_states`: 0 the embeddings, i the raw output of decoder layer i - 1, the last
one's too. FINAL is the state behind the last norm, which the output head reads. Hooks rather than
`output_hidden_states`, which keeps the
states of all layers, and which calls the normed state by the raw one's index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel

from decode.common.errors import InputError

FINAL = -1
HEAD_TARGETS = ("llama", "qwen3", "mistral", "gemma3_text", "exaone_moe")
"""Model types whose layers, norm and embedding lie where heads look for them."""


def check_taps(config: PretrainedConfig, taps: Sequence[int], path: str) -> None:
    """Raise InputError for a target that heads do not know, and for layers that it does not have."""
    if config.model_type not in HEAD_TARGETS:
        raise InputError(
            f"{path} is a {config.model_type} model, and heads read hidden states of {', '.join(HEAD_TARGETS)} models: "
            "others may hold them elsewhere or scaled. Use draft=lm, which needs none"
        )
    num_layers = config.num_hidden_layers
    wrong = [tap for tap in taps if tap != FINAL and not 0 <= tap <= num_layers]
    if wrong or len(set(taps)) < len(taps) or not taps:
        raise InputError(
            f"the hidden states {list(taps)} are asked of {path}, which has {num_layers} layers: name different ones "
            f"of 0 (embeddings) to {num_layers} (the last layer's raw output), or {FINAL} for the final state, normed"
        )


class Taps:
    """Inside a `with` block, every forward of the model leaves its hidden states at `layers` here."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._base = cast(Any, model.base_model)
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
            first = cast(nn.Module, self._base.layers[0])
            return first.register_forward_pre_hook(lambda module, given: self._keep(0, given[0]))
        module = cast(nn.Module, self._base.norm if tap == FINAL else self._base.layers[tap - 1])
        return module.register_forward_hook(self._keeper(tap))

    def _keeper(self, tap: int) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, given, made: self._keep(tap, made[0] if isinstance(made, tuple) else made)

    def _keep(self, tap: int, state: Tensor) -> None:
        self._found[tap] = state
