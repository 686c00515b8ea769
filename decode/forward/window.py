"""Attention over a sliding window with attention sinks (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453): of a text
before it a token sees the first positions and the last ones. Training and decoding ask here, so that they agree.

Positions stay those of the text: the paper numbers the kept tokens anew, for models that were trained without a window;
a draft here is trained with its window, and no key has to be turned when another one leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor
from transformers import PretrainedConfig

from decode.common.errors import InputError

FIELDS = ("draft_window", "draft_sinks")
"""Of a draft LM's config.json, as the settings are called; transformers keeps fields that it does not know."""


@dataclass(frozen=True)
class Window:
    """Which positions are seen."""

    size: int
    """The last ones, the token's own among them."""
    sinks: int
    """The first ones of the text."""

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """queries (B or 1, T) and keys (B or 1, S) by their positions -> (B or 1, T, S) bool, later keys too."""
        return self.keeps(queries[:, :, None], keys[:, None, :])

    def keeps(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The same of positions that are side by side already."""
        return (keys < self.sinks) | (queries - keys < self.size)

    def written(self) -> dict[str, int]:
        """The fields of config.json."""
        return dict(zip(FIELDS, (self.size, self.sinks), strict=True))


def window_of(size: int | None, sinks: int) -> Window | None:
    """None where there is no window."""
    return None if size is None else Window(size, sinks)


def own_window(config: PretrainedConfig) -> Window | None:
    """That which a language model was trained with here; None of every other one. InputError for an edited one."""
    text = config.get_text_config()
    return window_in({name: getattr(text, name, None) for name in FIELDS}, config.name_or_path or "")


def window_in(fields: Mapping[str, Any], path: str = "") -> Window | None:
    """The same of the fields of its config.json."""
    size, sinks = (fields.get(name) for name in FIELDS)
    if size is None and sinks is None:
        return None
    if not (_is_whole(size, 1) and _is_whole(sinks, 0)):
        raise InputError(
            f"{path or 'a model'}: its config.json says draft_window={size!r} and draft_sinks={sinks!r}; they are "
            "whole numbers of at least 1 and 0. Copy its folder again, or train it anew"
        )
    return Window(size, sinks)


def set_window(config: PretrainedConfig, window: Window) -> None:
    """The model of this config has it from now on, and its config.json says so."""
    for name, value in window.written().items():
        setattr(config.get_text_config(), name, value)


def _is_whole(value: Any, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
