"""LiLiCorr: DFlash's block, of whose slots the best tokens are held against those of the slot before by a transformer
over all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from train.check.replicas.base import Served, untouched
from train.check.replicas.dflash import blocks
from train.check.replicas.dflash2 import convolved, told
from train.check.replicas.lattice import scores


def lilicorr(served: Served, ids: Tensor, features: Tensor, places: Tensor, steps: int) -> Tensor:
    """See `train.check.replicas.base.Replica`; -inf for what is no candidate. Behind a token that was none itself,
    candidates have the logits of their slot."""
    around = convolved if told(served, "conv_kernel_size") else untouched
    states = blocks(served, ids, features, places, served.fields["block_size"], around)[:, 1:]
    logits = served.logits(states)
    if told(served, "lilicorr_enabled") is False:
        return served.widened(logits[:, :steps].transpose(0, 1))
    best = logits.topk(told(served, "lilicorr_candidate_topk"))
    padded, found = torch.cat([ids, ids.new_zeros(steps)]), []
    for number, place in enumerate(places.tolist()):
        text = served.norm(served.linear(features.flatten(1)[place - 1], "fc"), "hidden_norm") if place else None
        log_q = logits[number].log_softmax(-1).gather(-1, best.indices[number])
        tokens = best.indices[number] if served.drafted is None else served.drafted[best.indices[number]]
        first, pairs = scores(served, served.embed(tokens), log_q, states[number], text)
        rows = [first]
        for step in range(1, steps):
            here = (tokens[step - 1] == padded[place + step]).nonzero().flatten().tolist()
            rows.append(pairs[step - 1, here[0]] if here else best.values[number, step])
        found.append(torch.stack(rows[:steps]))
    none = torch.full((steps, len(places), logits.shape[-1]), -torch.inf)
    return served.widened(none.scatter(-1, best.indices[:, :steps].transpose(0, 1), torch.stack(found, 1)))
