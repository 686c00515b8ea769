"""From logits to the distribution that is sampled: temperature, top-k, top-p, min-p, in transformers' order.

Everything is done in float32 or wider (float64 stays float64): uniforms and probabilities in bf16 are what lets zero
probability tokens through elsewhere (gpt-fast accepts u == 0, which bf16 draws in 0.2 % of cases).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decode.sampling.top_p import keep_top_k_and_p, keep_top_p


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 leave the distribution alone."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """The distribution is a point mass on the argmax."""
        return self.temperature == 0

    def apart(self) -> Sampling:
        """The same at temperature 1 unless greedy, for a temperature that is given as a tensor: captures are then
        shared by all temperatures above 0, where a service may be asked for any."""
        return self if self.is_greedy else replace(self, temperature=1.0)


def warp(logits: Tensor, sampling: Sampling, temperature: Tensor | None = None) -> Tensor:  # (..., V) -> (..., V)
    """Unnormalised log-probabilities of the distribution that is sampled, -inf outside its support; greedy leaves the
    logits alone. `temperature` (1,) divides in place of the sampling's own (`Sampling.apart`)."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.is_greedy:
        return scores
    if temperature is not None:
        scores = scores / temperature.to(scores.dtype)
    elif sampling.temperature != 1:
        scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = _keep_top_k(scores, sampling)
    elif sampling.top_p < 1:
        scores = keep_top_p(scores, sampling.top_p)
    if sampling.min_p > 0:
        floor = scores.amax(-1, keepdim=True) + torch.log(torch.tensor(sampling.min_p, dtype=scores.dtype))
        scores = scores.masked_fill(scores < floor, -torch.inf)
    return scores


def log_probs(logits: Tensor, sampling: Sampling) -> Tensor:  # (..., V) -> (..., V)
    """Log of the distribution that is sampled; greedy is a point mass (0 at the first argmax, -inf elsewhere)."""
    scores = warp(logits, sampling)
    if not sampling.is_greedy:
        return scores.log_softmax(-1)
    best = scores.argmax(-1, keepdim=True)
    return torch.full_like(scores, -torch.inf).scatter_(-1, best, 0.0)


def _keep_top_k(scores: Tensor, sampling: Sampling) -> Tensor:
    if sampling.top_p < 1:
        return keep_top_k_and_p(scores, sampling.top_k, sampling.top_p)
    return scores.masked_fill(scores < scores.topk(sampling.top_k).values[..., -1:], -torch.inf)
