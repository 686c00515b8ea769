"""The models that drafts within drafts are tested on."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from decode.drafters.lm import LMDraft
from tests.tiny import tiny_llama


@cache
def target() -> Any:
    """Shared, with its captures."""
    return tiny_llama(dtype=torch.float64).requires_grad_(False)


def draft_lm(seed: int = 3) -> LMDraft:
    """Random weights of one layer."""
    return LMDraft(tiny_llama(num_layers=1, seed=seed, dtype=torch.float64).requires_grad_(False))
