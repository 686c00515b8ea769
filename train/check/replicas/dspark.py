"""DSpark: DFlash's block, and a bias for each token that the token before it gives. With `sample_from_anchor` slot k
drafts token k + 1 behind the block's first, slot 0 too."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from train.check.replicas.base import Served, tokens_before
from train.check.replicas.dflash import blocks


def dspark(served: Served, ids: Tensor, features: Tensor, places: Tensor, steps: int) -> Tensor:
    """See `train.check.replicas.base.Replica`."""
    first = 0 if served.fields.get("sample_from_anchor", True) else 1
    states = blocks(served, ids, features, places, first + steps)[:, first:]
    known = served.weights["markov_head.markov_w1.weight"][tokens_before(ids, places, steps)]
    bias = linear(known, served.weights["markov_head.markov_w2.weight"])
    return served.widened(served.logits(states.transpose(0, 1)) + bias)
